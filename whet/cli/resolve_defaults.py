"""What a run leaves to its model and data, settled before a model is loaded: the chat template, the date that it
writes, and the lengths.

The rows are encoded here, once; a learner takes the prompts as they are.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, TypeVar

from whet.config import Mode, RunConfig, SupervisedRunConfig
from whet.config.run_sections import NEW_TOKENS
from whet.data.lengths import Spread
from whet.data.prompt_stream import encode_all, first_of, has_places, is_batch, unbatch
from whet.data.prompts import PromptEncoder, find_prompt_column
from whet.data.templates import DAY, goes_through, writes_date
from whet.data.tokenizer import load_tokenizer
from whet.errors import ConfigError, DataError
from whet.models.config_sizes import read_positions
from whet.types import Prompt
from whet.util.references import is_ref

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Settled", "encoder_of", "settled", "with_lengths", "with_template"]

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
    tokenizer = load_tokenizer(config.tokenizer or config.actor.model, trust_remote_code=config.actor.trust_remote_code)
    config = with_template(config, tokenizer, train)
    rollout = config.rollout
    if not rollout.open_lengths:
        return Settled(config, tokenizer, train, evaluation)
    sets = {Mode.TRAIN: train, Mode.EVAL: evaluation}
    given = {mode: rows for mode, rows in sets.items() if rows is not None}
    prompts = {mode: _prompts(encoder_of(config, tokenizer, mode), rows, config) for mode, rows in given.items()}
    spread = Spread(len(p.tokens) for known in prompts.values() for p in known or ())
    given_new, config = config.rollout.max_tokens_to_generate, with_lengths(config, spread)
    _tell_lengths(config, spread, cut=given_new is None)
    assert config.rollout.max_prompt_length is not None
    if spread.longest > config.rollout.max_prompt_length:  # over the model's context: cut or left out
        prompts = {mode: _prompts(encoder_of(config, tokenizer, mode), rows, config) for mode, rows in given.items()}
    rows = {mode: prompts[mode] if _are_rows(data) else data for mode, data in given.items()}
    return Settled(config, tokenizer, rows[Mode.TRAIN], rows.get(Mode.EVAL))


def with_template(config: C, tokenizer: PreTrainedTokenizerBase, rows: Any) -> C:
    """The configuration with apply_chat_template and the date that a template writes settled, a log line each."""
    data, plain = config.data, _plain(config, rows)
    options = (config.rollout if isinstance(config, RunConfig) else config.data).chat_template_kwargs
    applied = data.apply_chat_template
    if applied == "auto":
        applied = goes_through(tokenizer, options)
        if applied and plain:
            log.info(
                "chat template: each plain-text prompt is a user's turn in it (data.apply_chat_template=auto; false "
                "keeps plain text)"
            )
        config = dataclasses.replace(config, data=dataclasses.replace(data, apply_chat_template=applied))
    return _with_day(config) if (applied or not plain) and writes_date(tokenizer, options) else config


def _with_day(config: C) -> C:
    """The configuration with the day that its chat template writes: resumed tomorrow, a run has today's prompts."""
    name = "rollout" if isinstance(config, RunConfig) else "data"
    section = vars(config)[name]
    if DAY in section.chat_template_kwargs:
        return config
    today = date.today().isoformat()
    log.info("chat template: it writes the date, which stays %s (%s.chat_template_kwargs.%s)", today, name, DAY)
    options = {**section.chat_template_kwargs, DAY: today}
    return dataclasses.replace(config, **{name: dataclasses.replace(section, chat_template_kwargs=options)})


def _plain(config: RunConfig | SupervisedRunConfig, rows: Any) -> bool:
    """Whether the first row's prompt is a text."""
    first = first_of(rows)
    if not isinstance(first, dict):
        return False
    try:
        value = first[find_prompt_column(first, config.data.prompt_column)]
    except DataError:
        return False
    if is_batch(first, config.data.prompt_column):
        value = value[0] if len(value) else None
    return isinstance(value, str)


def encoder_of(config: RunConfig, tokenizer: PreTrainedTokenizerBase, mode: Mode) -> PromptEncoder:
    """What turns a run's rows into prompts. Args: config: with its template settled. mode: whose sampling."""
    rollout = config.rollout.for_mode(mode)
    if rollout.env_path is None:
        return PromptEncoder.of(tokenizer, rollout, config.data)
    from whet.envs import load_script  # which imports torch: `whet data` seldom needs it

    script = load_script(rollout.env_path, turns=rollout.max_turns)
    return PromptEncoder.of(tokenizer, rollout, config.data, tools=script.tools)


def _are_rows(data: Any) -> bool:
    """Whether data are rows with a length, which are encoded once."""
    return has_places(data) and not is_batch(first_of(data))


def _prompts(encode: PromptEncoder, data: Any, config: RunConfig) -> Sequence[Prompt] | None:
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


def with_lengths(config: RunConfig, spread: Spread) -> RunConfig:
    """The configuration with both lengths.

    Args: config: of the run. spread: lengths of its prompts; empty = they are not known, and their limit is set.
    Raises: DataError: prompts that the model's context has no room for. ConfigError: it has room for none.
    """
    rollout = config.rollout
    model = config.actor.model
    positions = None if model is None or is_ref(model) else read_positions(model, config.actor.trust_remote_code)
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
    what = f"what {positions} positions leave beside {new} new token{'s' * (new != 1)},"
    if keeps_all and (over := spread.told_over(room, what)):
        fewer = "lower rollout.max_tokens_to_generate, or " if new > 1 else ""
        most = room if rollout.max_tokens_to_generate is not None else max(1, room - min(NEW_TOKENS, room // 2))
        raise DataError(
            f"{over}; {fewer}set rollout.max_prompt_length={most} with rollout.on_long_prompt=drop or truncate_left"
        )
    limit = rollout.max_prompt_length or min(known, room)
    lengths = {"max_prompt_length": limit, "max_tokens_to_generate": new}
    return dataclasses.replace(config, rollout=dataclasses.replace(rollout, **lengths))


def _tell_lengths(config: RunConfig, spread: Spread, *, cut: bool) -> None:
    """Logs the lengths. Args: cut: whether completions may be shorter than usual for want of positions."""
    rollout = config.rollout
    most: int | None = rollout.max_tokens_to_generate
    assert most is not None
    log.info(
        "lengths: rollout.max_prompt_length=%d (%s), rollout.max_tokens_to_generate=%d",
        rollout.max_prompt_length,
        spread,
        most,
    )
    if cut and most < NEW_TOKENS:
        log.warning(
            "completions are cut at %d tokens: the model's context has no room for %d after the longest prompt; "
            "shorter prompts (rollout.max_prompt_length, rollout.on_long_prompt=drop) leave more",
            most,
            NEW_TOKENS,
        )
