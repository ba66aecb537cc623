"""What a run leaves to its model and data, settled before a model is loaded: the chat template, and the lengths.

The rows are encoded here, once; a learner takes the prompts as they are.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from whet.config import Mode, RunConfig, SupervisedRunConfig
from whet.config.run_sections import NEW_TOKENS
from whet.data.lengths import Spread
from whet.data.order import encode_all, first_of, has_places, is_batch, unbatch
from whet.data.prompts import PromptEncoder, find_prompt_column
from whet.data.templates import goes_through
from whet.data.tokenizer import load_tokenizer
from whet.envs import load_script
from whet.errors import ConfigError, DataError
from whet.models.read import read_positions
from whet.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Settled", "settled", "with_template"]

log = logging.getLogger("whet")

C = TypeVar("C", bound=RunConfig | SupervisedRunConfig)


@dataclass(frozen=True)
class Settled:
    """A run's configuration with numbers for what was left open, and its data."""

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    train: Any
    """Prompts; rows or batches as they were read where nothing was to be settled by them."""
    evaluation: Any


def settled(config: RunConfig, train: Any, evaluation: Any) -> Settled:
    """Settles apply_chat_template, max_tokens_to_generate and max_prompt_length.

    Args: config: of the run. train, evaluation: its rows; None = none.
    Raises: DataError: prompts over the limit, or over the model's context: how many, the longest, what 95 % have.
        ConfigError: no tokenizer; a stream, whose longest prompt nobody knows, without max_prompt_length.
    """
    tokenizer = load_tokenizer(config.tokenizer or config.actor.model)
    config = with_template(config, tokenizer, train)
    rollout = config.rollout
    if None not in (rollout.max_tokens_to_generate, rollout.max_prompt_length):
        return Settled(config, tokenizer, train, evaluation)
    sets = {Mode.TRAIN: train, Mode.EVAL: evaluation}
    given = {mode: rows for mode, rows in sets.items() if rows is not None}
    prompts = {mode: _prompts(_encoder(config, tokenizer, mode), rows, config) for mode, rows in given.items()}
    spread = Spread(len(p.tokens) for known in prompts.values() for p in known or ())
    config = _with_lengths(config, spread)
    assert config.rollout.max_prompt_length is not None
    if spread.longest > config.rollout.max_prompt_length:  # over the model's context: cut or left out
        prompts = {mode: _prompts(_encoder(config, tokenizer, mode), rows, config) for mode, rows in given.items()}
    rows = {mode: prompts[mode] if _are_rows(data) else data for mode, data in given.items()}
    return Settled(config, tokenizer, rows[Mode.TRAIN], rows.get(Mode.EVAL))


def with_template(config: C, tokenizer: PreTrainedTokenizerBase, rows: Any) -> C:
    """The configuration with apply_chat_template settled; one line of the log where plain text is templated by auto."""
    data = config.data
    if data.apply_chat_template != "auto":
        return config
    options = config.rollout.chat_template_kwargs if isinstance(config, RunConfig) else data.chat_template_kwargs
    applied = goes_through(tokenizer, options)
    if applied and _plain(config, rows):
        log.info(
            "chat template: each plain-text prompt is a user's turn in it (data.apply_chat_template=auto; false keeps "
            "plain text)"
        )
    return dataclasses.replace(config, data=dataclasses.replace(data, apply_chat_template=applied))


def _plain(config: RunConfig | SupervisedRunConfig, rows: Any) -> bool:
    """Whether the first row's prompt is a text."""
    first = first_of(rows)
    if not isinstance(first, dict):
        return False
    try:
        value = first[find_prompt_column(first, config.data.prompt_column)]
    except DataError:
        return False
    return isinstance(value[0] if is_batch(first, config.data.prompt_column) else value, str)


def _encoder(config: RunConfig, tokenizer: PreTrainedTokenizerBase, mode: Mode) -> PromptEncoder:
    """What turns a run's rows into prompts."""
    rollout = config.rollout.for_mode(mode)
    script = None if rollout.env_path is None else load_script(rollout.env_path, turns=rollout.max_turns)
    return PromptEncoder.of(tokenizer, rollout, config.data, tools=None if script is None else script.tools)


def _are_rows(data: Any) -> bool:
    """Whether data are rows with a length, which are encoded once."""
    return has_places(data) and not is_batch(first_of(data))


def _prompts(encode: PromptEncoder, data: Any, config: RunConfig) -> list[Prompt] | None:
    """The prompts of rows or ready-made batches; None where they are a stream, whose limit is set.

    Raises: ConfigError: its limit is not set.
    """
    if not has_places(data):
        if config.rollout.max_prompt_length is None:
            raise ConfigError(
                "rollout.max_prompt_length is needed: the data are a stream, whose longest prompt is not known before "
                "it is read; set it"
            )
        return None
    rows: Iterable[Any] = data
    if not _are_rows(data):
        rows = [row for batch in data for row in unbatch(batch, config.data.prompt_column)]
    made = encode_all(rows, encode, "prompts")
    if over := encode.told_over():
        log.warning("%s; %s", over, encode.told_fate())
    return made


def _with_lengths(config: RunConfig, spread: Spread) -> RunConfig:
    """The configuration with both lengths. Raises: DataError: prompts that the model's context has no room for."""
    rollout = config.rollout
    positions = None if config.actor.model is None else read_positions(config.actor.model)
    known = rollout.max_prompt_length if not len(spread) else spread.longest
    assert known is not None
    keeps_all = rollout.on_long_prompt == "error" or rollout.max_prompt_length is not None
    new = rollout.max_tokens_to_generate
    if new is None:
        new = max(NEW_TOKENS, rollout.min_tokens)
        if rollout.max_episode_tokens is not None:
            new = min(new, rollout.max_episode_tokens)
        if positions is not None:
            new = max(1, min(new, positions - known if keeps_all else max(positions - known, positions // 2)))
    room = known if positions is None else positions - new
    if room < 1:
        raise ConfigError(f"rollout.max_tokens_to_generate={new} leaves no room in {positions} positions; lower it")
    if keeps_all and (over := spread.told_over(room, f"what {positions} positions leave beside {new} new tokens,")):
        raise DataError(
            f"{over}; lower rollout.max_tokens_to_generate, or set rollout.max_prompt_length={room} with "
            "rollout.on_long_prompt=drop or truncate_left"
        )
    limit = rollout.max_prompt_length or min(known, room)
    short = log.warning if new < NEW_TOKENS and rollout.max_tokens_to_generate is None else log.info
    short(
        "prompts (%s): rollout.max_prompt_length=%d, rollout.max_tokens_to_generate=%d%s",
        spread,
        limit,
        new,
        "" if new >= NEW_TOKENS or positions is None else f", of the model's {positions} positions",
    )
    lengths = {"max_prompt_length": limit, "max_tokens_to_generate": new}
    return dataclasses.replace(config, rollout=dataclasses.replace(rollout, **lengths))
