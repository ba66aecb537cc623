"""Fills in what a run's configuration leaves to its model and data, before a model is loaded: the chat template, the
date that it writes, and the lengths of prompts and completions.

Rows with a length are encoded here, once; the learner takes the prompts as they are, with the encoders that made them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, TypeVar

from whet.config import Mode, RunConfig, SupervisedRunConfig
from whet.config.run_sections import NEW_TOKENS
from whet.data.lengths import LengthStats, check_prompt_lengths
from whet.data.prompt_stream import batch_to_rows, encode_all, first_row, has_random_access, is_batch
from whet.data.prompts import PromptEncoder, find_prompt_column
from whet.data.templates import DAY, uses_chat_template, writes_date
from whet.data.tokenizer import load_tokenizer
from whet.errors import ConfigError, DataError
from whet.models.config_sizes import read_positions
from whet.types import Prompt
from whet.util.references import is_ref

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ResolvedRun", "make_encoder", "resolve_defaults", "with_lengths", "with_template"]

log = logging.getLogger("whet")

C = TypeVar("C", bound=RunConfig | SupervisedRunConfig)


@dataclass(frozen=True)
class ResolvedRun:
    """A configuration without open values, and the data that are ready to train on."""

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    train: Any
    """Prompts; ready-made batches and streams as they were read."""
    evaluation: Any
    """The same; None = there are none."""
    encoders: Mapping[Mode, PromptEncoder]
    """The encoder of the prompts of each mode that has data."""


def resolve_defaults(config: RunConfig, train: Any, evaluation: Any) -> ResolvedRun:
    """Encodes the rows, and sets apply_chat_template, max_tokens_to_generate and max_prompt_length where they are open.

    Args: config: of the run. train, evaluation: its rows; None = none.
    Raises: DataError: prompts over the limit, or over the model's context; the message has their number, the
        longest length and the 95th percentile.
        ConfigError: no tokenizer; a stream, whose longest prompt is unknown, without max_prompt_length.
    """
    tokenizer = load_tokenizer(config.tokenizer or config.actor.model, trust_remote_code=config.actor.trust_remote_code)
    config = with_template(config, tokenizer, train)
    sets = {mode: rows for mode, rows in ((Mode.TRAIN, train), (Mode.EVAL, evaluation)) if rows is not None}
    column = config.data.prompt_column
    are_rows = {mode: has_random_access(x) and not is_batch(first_row(x), column) for mode, x in sets.items()}
    encoders = {mode: make_encoder(config, tokenizer, mode) for mode in sets}
    ready = {mode: _encode(encoders[mode], rows) if are_rows[mode] else rows for mode, rows in sets.items()}
    if config.rollout.open_lengths:
        spread = LengthStats()
        for mode, rows in ready.items():
            prompts = rows if are_rows[mode] else _prompts_of_batches(encoders[mode], rows, config)
            spread.extend(len(p.tokens) for p in prompts)
        is_open, config = config.rollout.max_tokens_to_generate is None, with_lengths(config, spread)
        _log_lengths(config, spread, may_be_short=is_open)
        for mode, encode in encoders.items():
            encode.max_prompt_length = config.rollout.for_mode(mode).max_prompt_length
            if are_rows[mode]:  # prompts over the model's context are cut or left out
                ready[mode] = _encode(encode, ready[mode])
    return ResolvedRun(config, tokenizer, ready.get(Mode.TRAIN), ready.get(Mode.EVAL), encoders)


def _encode(encode: PromptEncoder, rows: Any) -> Sequence[Prompt]:
    """Returns all rows as prompts; a warning says how many were over the limit."""
    prompts = encode_all(rows, encode)
    if not len(prompts):
        limit = encode.max_prompt_length
        raise DataError(f"all {len(rows)} prompts are over rollout.max_prompt_length={limit}; raise it")
    if counts := encode.describe_counts():
        log.warning("%s", counts)
    return prompts


def _prompts_of_batches(encode: PromptEncoder, data: Any, config: RunConfig) -> Sequence[Prompt]:
    """Returns the prompts of ready-made batches, to be measured; none of a stream, whose limit is set.

    Raises: ConfigError: the limit of a stream is not set.
    """
    if has_random_access(data):
        return _encode(encode, [row for batch in data for row in batch_to_rows(batch, config.data.prompt_column)])
    if config.rollout.max_prompt_length is None:
        raise ConfigError(
            "rollout.max_prompt_length is needed: the data are a stream, whose longest prompt is not known before it "
            "is read; set it"
        )
    return ()


def with_template(config: C, tokenizer: PreTrainedTokenizerBase, rows: Any) -> C:
    """Returns the configuration with apply_chat_template and the date that a template writes settled, a log
    line each.
    """
    data, plain = config.data, _plain(config, rows)
    options = (config.rollout if isinstance(config, RunConfig) else config.data).chat_template_kwargs
    applied = data.apply_chat_template
    if applied == "auto":
        applied = uses_chat_template(tokenizer, options)
        if applied and plain:
            log.info(
                "chat template: each plain-text prompt is a user's turn in it (data.apply_chat_template=auto; false "
                "keeps plain text)"
            )
        config = dataclasses.replace(config, data=dataclasses.replace(data, apply_chat_template=applied))
    return _with_day(config) if (applied or not plain) and writes_date(tokenizer, options) else config


def _with_day(config: C) -> C:
    """Returns the configuration with the day that its chat template writes: resumed tomorrow, a run has today's
    prompts.
    """
    name = "rollout" if isinstance(config, RunConfig) else "data"
    section = vars(config)[name]
    if DAY in section.chat_template_kwargs:
        return config
    today = date.today().isoformat()
    log.info("chat template: it writes the date, which stays %s (%s.chat_template_kwargs.%s)", today, name, DAY)
    options = {**section.chat_template_kwargs, DAY: today}
    return dataclasses.replace(config, **{name: dataclasses.replace(section, chat_template_kwargs=options)})


def _plain(config: RunConfig | SupervisedRunConfig, rows: Any) -> bool:
    """Returns whether the first row's prompt is a text."""
    first = first_row(rows)
    if not isinstance(first, dict):
        return False
    try:
        value = first[find_prompt_column(first, config.data.prompt_column)]
    except DataError:
        return False
    if is_batch(first, config.data.prompt_column):
        value = value[0] if len(value) else None
    return isinstance(value, str)


def make_encoder(config: RunConfig, tokenizer: PreTrainedTokenizerBase, mode: Mode) -> PromptEncoder:
    """Returns the encoder of a run's rows. Args: config: apply_chat_template is not "auto". mode: of the sampling."""
    rollout = config.rollout.for_mode(mode)
    if rollout.env_path is None:
        return PromptEncoder.from_config(tokenizer, rollout, config.data)
    from whet.envs import load_script  # which imports torch: `whet data` seldom needs it

    script = load_script(rollout.env_path, turns=rollout.max_turns)
    return PromptEncoder.from_config(tokenizer, rollout, config.data, tools=script.tools)


def with_lengths(config: RunConfig, stats: LengthStats) -> RunConfig:
    """Returns the configuration with both lengths.

    Args: config: of the run. stats: lengths of its prompts; empty = they are unknown, and max_prompt_length is set.
    Raises: DataError: prompts that the model's context has no room for. ConfigError: it has room for none.
    """
    rollout = config.rollout
    model = config.actor.model
    positions = None if model is None or is_ref(model) else read_positions(model, config.actor.trust_remote_code)
    prompt_length = rollout.max_prompt_length if not len(stats) else stats.longest
    assert prompt_length is not None
    keeps_all = rollout.on_long_prompt == "error" or rollout.max_prompt_length is not None
    new_tokens = rollout.max_tokens_to_generate
    if new_tokens is None:
        new_tokens = max(NEW_TOKENS, rollout.min_tokens)
        if rollout.max_episode_tokens is not None:
            new_tokens = min(new_tokens, rollout.max_episode_tokens)
        if positions is not None:
            new_tokens = max(
                1,
                min(
                    new_tokens,
                    positions - prompt_length if keeps_all else max(positions - prompt_length, positions // 2),
                ),
            )
    room = prompt_length if positions is None else positions - new_tokens
    if room < 1:
        raise ConfigError(
            f"rollout.max_tokens_to_generate={new_tokens} leaves no room in {positions} positions; lower it"
        )
    if keeps_all:
        best = room if rollout.max_tokens_to_generate is not None else max(1, room - min(NEW_TOKENS, room // 2))
        check_prompt_lengths(stats, positions, new_tokens, best_limit=best)
    limit = rollout.max_prompt_length or min(prompt_length, room)
    lengths = {"max_prompt_length": limit, "max_tokens_to_generate": new_tokens}
    return dataclasses.replace(config, rollout=dataclasses.replace(rollout, **lengths))


def _log_lengths(config: RunConfig, spread: LengthStats, *, may_be_short: bool) -> None:
    """Logs the lengths. Args: may_be_short: whether a small context was allowed to lower max_tokens_to_generate."""
    rollout = config.rollout
    most: int | None = rollout.max_tokens_to_generate
    assert most is not None
    log.info(
        "lengths: rollout.max_prompt_length=%d (%s), rollout.max_tokens_to_generate=%d",
        rollout.max_prompt_length,
        spread,
        most,
    )
    if may_be_short and most < NEW_TOKENS:
        log.warning(
            "completions are cut at %d tokens: the model's context has no room for %d after the longest prompt; "
            "shorter prompts (rollout.max_prompt_length, rollout.on_long_prompt=drop) leave more",
            most,
            NEW_TOKENS,
        )
