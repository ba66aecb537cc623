"""`whet data`: shows the rows of a run as its model would read them, and their lengths, without loading the model."""

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

__all__ = ["check_inputs", "show_data"]

MAX_STREAM_ROWS = 1000
"""The number of rows that are read from a stream."""
TREATMENTS = {
    "error": "the run refuses them",
    "truncate_left": "they are cut on the left",
    "truncate": "they are cut at the end",
    "drop": "they are left out",
}
"""How a run treats rows over a limit, by on_long or on_long_prompt."""


def show_data(config: RunConfig | SupervisedRunConfig, *, rows: int = 3, say: Callable[[str], None]) -> None:
    """Shows the first rows as the model would read them, the distribution of lengths, and the rows over a limit.

    Args: config: of the run. rows: the number of rows to show. say: prints lines.
    Raises: ConfigError: no data, or no tokenizer. DataError: a row that the run would refuse.
    """
    model = check_inputs(config)
    train, evaluation = load_train_and_eval(config)
    trusted = getattr(config, config.TRAINED).trust_remote_code
    tokenizer = load_tokenizer(config.tokenizer or model, trust_remote_code=trusted)
    config = with_template(config, tokenizer, train)
    positions = None if model is None or is_ref(model) else read_positions(model, trusted)
    if isinstance(config, RunConfig):
        _show_prompts(config, tokenizer, {Mode.TRAIN: train, Mode.EVAL: evaluation}, rows, say)
    else:
        _show_examples(config, tokenizer, {Mode.TRAIN: train, Mode.EVAL: evaluation}, rows, say, positions)


def check_inputs(config: RunConfig | SupervisedRunConfig) -> str | None:
    """Returns the name of the model. Raises ConfigError if there are no data or no tokenizer."""
    role: RoleConfig = getattr(config, config.TRAINED)
    missing = missing_inputs("", config.data.path)  # only the tokenizer of the model is needed
    if config.tokenizer is None and role.model is None:
        missing.append("no tokenizer; write model=<hub name or folder>; only its tokenizer is loaded")
    elif config.tokenizer is None and is_ref(role.model or ""):
        missing.append(f"a run creates model={role.model} by a function; write tokenizer=<folder, hub name or byte>")
    if missing:
        raise ConfigError("\n".join(missing))
    return role.model


def _show_prompts(
    config: RunConfig, tokenizer: Any, sets: dict[Mode, Any], rows: int, say: Callable[[str], None]
) -> None:
    """Shows the prompts of `whet grpo` and `whet ppo`."""
    all_lengths = LengthStats()
    for mode, data in sets.items():
        if data is None:
            continue
        rollout = dataclasses.replace(config.rollout, max_prompt_length=None, on_long_prompt="error")
        encode = make_encoder(dataclasses.replace(config, rollout=rollout), tokenizer, mode)
        for place, row in _read_rows(data, encode):
            prompt = encode(row, place)
            all_lengths.add(len(prompt.tokens) if prompt else 0)
            if prompt and mode is Mode.TRAIN and place < rows:
                say("\n".join([*prompt_lines(encode, prompt), ""]))
        _show_lengths(_name(mode, data), "prompts", encode.stats, say)
        if limit := config.rollout.max_prompt_length:
            _show_over(encode.stats, limit, "rollout.max_prompt_length", config.rollout.on_long_prompt, say)
    rollout = with_lengths(config, all_lengths).rollout
    lengths = ("max_prompt_length", "max_tokens_to_generate")
    say(_wrap("a run has " + ", ".join(f"rollout.{name}={getattr(rollout, name)}" for name in lengths)))


def _show_examples(
    config: SupervisedRunConfig,
    tokenizer: Any,
    sets: dict[Mode, Any],
    rows: int,
    say: Callable[[str], None],
    positions: int | None,
) -> None:
    """Shows the rows of `whet sft`, `whet rm` and `whet dpo`."""
    section = dataclasses.replace(config.data, max_length=None)
    for mode, data in sets.items():
        if data is None:
            continue
        encode = _row_encoder(config)(tokenizer, section)
        trained = 0
        for place, row in _read_rows(data, encode):
            example = encode(row, place)
            if example is None:
                continue
            trained += sum(int(s.mask.sum()) for s in example.sequences)
            if mode is Mode.TRAIN and place < rows:
                say("\n".join([*example_lines(encode, example, row), ""]))
        stats = encode.lengths.stats
        _show_lengths(_name(mode, data), "sequences", stats, say)
        say(f"  {trained} tokens are trained")
        if limit := config.data.max_length:
            _show_over(stats, limit, "data.max_length", config.data.on_long, say)
        if positions is not None:
            _show_over(stats, positions, "the model's max_position_embeddings", "error", say)
        if counts := encode.describe_counts():
            say(_wrap(counts))


def _row_encoder(config: SupervisedRunConfig) -> type[RowEncoder]:
    """Returns the encoder class of a command's rows."""
    if isinstance(config, SFTRunConfig):
        return SFTEncoder
    if not isinstance(config, DPORunConfig):
        return ScoredPairEncoder
    from whet.learners.preference_from_config import make_preference_objective

    paired = make_preference_objective(config.algo).needs.rows == "pairs"
    return PreferenceEncoder if paired else UnpairedEncoder


def _read_rows(data: Any, encode: PromptEncoder | RowEncoder) -> Iterator[tuple[int, Any]]:
    """(index, row) of all rows, or of the first rows of a stream."""
    rows: Iterable[Any] = iterate_rows(data, "the data")
    if not has_random_access(data):
        rows = islice(rows, MAX_STREAM_ROWS)
    index = 0
    for item in rows:
        column = encode.prompt_column if isinstance(encode, PromptEncoder) else None
        batch = isinstance(encode, PromptEncoder) and is_batch(item, column)
        for row in batch_to_rows(item, column) if batch else [item]:
            yield index, row
            index += 1


def _name(mode: Mode, data: Any) -> str:
    """Returns the name of a data set."""
    name = "training" if mode is Mode.TRAIN else "evaluation"
    return name if has_random_access(data) else f"{name}, the first {MAX_STREAM_ROWS} rows of a stream"


def _show_lengths(name: str, what: str, stats: LengthStats, say: Callable[[str], None]) -> None:
    """Prints the distribution of the lengths of a data set."""
    say(f"{name}, tokens of {what}:\n  {stats}")
    for line in stats.histogram():
        say(f"  {line}")


def _show_over(stats: LengthStats, limit: int, name: str, treatment: str, say: Callable[[str], None]) -> None:
    """Prints the number of rows over a limit, and how the run treats them."""
    over = stats.describe_over(limit, name)
    say(_wrap(f"{over}; {TREATMENTS[treatment]}" if over else f"none is over {name} {limit}"))


def _wrap(text: str) -> str:
    """Wraps a text to the width of a terminal."""
    text = text.replace(" %", "\N{NO-BREAK SPACE}%")
    lines = textwrap.fill(text, 79, subsequent_indent="  ", break_on_hyphens=False)
    return lines.replace("\N{NO-BREAK SPACE}", " ")
