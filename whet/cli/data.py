"""`whet data`: what a run would give its model, without the model: rows as they are rendered, and how long they are."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from whet.cli.resolve_defaults import make_encoder, with_lengths, with_template
from whet.cli.rows import load_train_and_eval
from whet.config import DPORunConfig, Mode, RoleConfig, RunConfig, SFTRunConfig, SupervisedRunConfig
from whet.config.run import missing_inputs
from whet.data.lengths import LengthStats
from whet.data.preference import PreferenceEncoder, ScoredPairEncoder, UnpairedEncoder
from whet.data.preview import example_lines, prompt_lines
from whet.data.prompt_stream import batch_to_rows, has_random_access, is_batch
from whet.data.prompts import PromptEncoder
from whet.data.read_errors import iterate_rows
from whet.data.supervised import RowEncoder, SFTEncoder
from whet.data.tokenizer import load_tokenizer
from whet.errors import ConfigError
from whet.models.config_sizes import read_positions
from whet.util.references import is_ref

__all__ = ["show_data"]

WIDTH = 74
"""Characters of a line of a row's text."""
OF_A_STREAM = 1000
"""Rows of a stream that are looked at."""
FATES = {
    "error": "the run refuses them",
    "truncate_left": "they are cut on the left",
    "truncate": "they are cut at the end",
    "drop": "they are left out",
}
"""What becomes of rows over a limit."""


def show_data(config: RunConfig | SupervisedRunConfig, *, rows: int = 3, say: Callable[[str], None]) -> None:
    """Shows the first rows as the model would be given them, the distribution of lengths, and what is over a limit.

    Args: config: of the run. rows: how many are shown. say: writes lines.
    Raises: ConfigError: no data, no tokenizer. DataError: what the run would refuse, after the rows before it.
    """
    model = _checked(config)
    train, evaluation = load_train_and_eval(config)
    trusted = getattr(config, config.TRAINED).trust_remote_code
    tokenizer = load_tokenizer(config.tokenizer or model, trust_remote_code=trusted)
    config = with_template(config, tokenizer, train)
    positions = None if model is None or is_ref(model) else read_positions(model, trusted)
    if isinstance(config, RunConfig):
        _show_prompts(config, tokenizer, {Mode.TRAIN: train, Mode.EVAL: evaluation}, rows, say)
    else:
        _show_examples(config, tokenizer, {Mode.TRAIN: train, Mode.EVAL: evaluation}, rows, say, positions)


def _checked(config: RunConfig | SupervisedRunConfig) -> str | None:
    """The model's name. Raises ConfigError where there are no data or no tokenizer."""
    role: RoleConfig = getattr(config, config.TRAINED)
    missing = missing_inputs("", config.data.path)  # of the model only the tokenizer is needed
    if config.tokenizer is None and role.model is None:
        missing.append("no tokenizer; write model=<hub name or folder>, of which only the tokenizer is loaded")
    elif config.tokenizer is None and is_ref(role.model or ""):
        missing.append(f"model={role.model} is made by a function in a run; write tokenizer=<folder, hub name or byte>")
    if missing:
        raise ConfigError("\n".join(missing))
    return role.model


def _show_prompts(
    config: RunConfig, tokenizer: Any, sets: dict[Mode, Any], rows: int, say: Callable[[str], None]
) -> None:
    """Prompts of `whet grpo` and `whet ppo`."""
    whole = LengthStats()
    for mode, given in sets.items():
        if given is None:
            continue
        rollout = dataclasses.replace(config.rollout, max_prompt_length=None, on_long_prompt="error")
        encode = make_encoder(dataclasses.replace(config, rollout=rollout), tokenizer, mode)
        for place, row in _looked_at(given, encode):
            prompt = encode(row, place)
            whole.add(len(prompt.tokens) if prompt else 0)
            if prompt and mode is Mode.TRAIN and place < rows:
                say("\n".join([*prompt_lines(encode, prompt, width=WIDTH), ""]))
        _show_lengths(_name(mode, given), "prompts", encode.spread, say)
        if limit := config.rollout.max_prompt_length:
            _show_over(encode.spread, limit, "rollout.max_prompt_length", config.rollout.on_long_prompt, say)
    settled = with_lengths(config, whole).rollout
    lengths = ("max_prompt_length", "max_tokens_to_generate")
    say(_filled("a run has " + ", ".join(f"rollout.{name}={getattr(settled, name)}" for name in lengths)))


def _show_examples(
    config: SupervisedRunConfig,
    tokenizer: Any,
    sets: dict[Mode, Any],
    rows: int,
    say: Callable[[str], None],
    positions: int | None,
) -> None:
    """Rows of `whet sft`, `whet rm` and `whet dpo`."""
    section = dataclasses.replace(config.data, max_length=None)
    for mode, given in sets.items():
        if given is None:
            continue
        encode = _row_encoder(config)(tokenizer, section)
        trained = 0
        for place, row in _looked_at(given, encode):
            example = encode(row, place)
            if example is None:
                continue
            trained += sum(int(s.mask.sum()) for s in example.sequences)
            if mode is Mode.TRAIN and place < rows:
                say("\n".join([*example_lines(encode, example, row, width=WIDTH), ""]))
        spread = encode.lengths.spread
        _show_lengths(_name(mode, given), "sequences", spread, say)
        say(f"  {trained} tokens are trained")
        if limit := config.data.max_length:
            _show_over(spread, limit, "data.max_length", config.data.on_long, say)
        if positions is not None:
            _show_over(spread, positions, "the model's max_position_embeddings", "error", say)
        if counts := encode.describe_counts():
            say(_filled(counts))


def _row_encoder(config: SupervisedRunConfig) -> type[RowEncoder]:
    """What reads the rows of a command."""
    if isinstance(config, SFTRunConfig):
        return SFTEncoder
    if not isinstance(config, DPORunConfig):
        return ScoredPairEncoder
    from whet.learners.preference_from_config import make_preference_objective

    paired = make_preference_objective(config.algo).needs.rows == "pairs"
    return PreferenceEncoder if paired else UnpairedEncoder


def _looked_at(given: Any, encode: PromptEncoder | RowEncoder) -> Iterator[tuple[int, Any]]:
    """The rows that are looked at, with their places: all, or the first of a stream."""
    rows: Iterable[Any] = iterate_rows(given, "the data")
    if not has_random_access(given):
        rows = islice(rows, OF_A_STREAM)
    place = 0
    for item in rows:
        column = encode.prompt_column if isinstance(encode, PromptEncoder) else None
        batch = isinstance(encode, PromptEncoder) and is_batch(item, column)
        for row in batch_to_rows(item, column) if batch else [item]:
            yield place, row
            place += 1


def _name(mode: Mode, given: Any) -> str:
    """What a set is called."""
    name = "training" if mode is Mode.TRAIN else "evaluation"
    return name if has_random_access(given) else f"{name}, the first {OF_A_STREAM} rows of a stream"


def _show_lengths(name: str, what: str, spread: LengthStats, say: Callable[[str], None]) -> None:
    """Writes how long the rows of a set are."""
    say(f"{name}, tokens of {what}:\n  {spread}")
    for line in spread.histogram():
        say(f"  {line}")


def _show_over(spread: LengthStats, limit: int, name: str, fate: str, say: Callable[[str], None]) -> None:
    """Writes how many rows are over a limit, and what becomes of them."""
    over = spread.describe_over(limit, name)
    say(_filled(f"{over}; {FATES[fate]}" if over else f"none is over {name} {limit}"))


def _filled(text: str) -> str:
    """A text in lines of a terminal's width."""
    held = text.replace(" %", "\N{NO-BREAK SPACE}%")
    filled = textwrap.fill(held, 79, subsequent_indent="  ", break_on_hyphens=False)
    return filled.replace("\N{NO-BREAK SPACE}", " ")
