"""The data set: the section data of RL and of supervised training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from whet.config.base import config
from whet.config.fields import Bool, Count, Float, Name, Number, Size, Text, Tree, as_name
from whet.errors import ConfigError, format_value, nearest

__all__ = ["DataConfig", "SourceConfig", "Sources", "SupervisedDataConfig", "source_paths"]

SOURCE_KEYS = ("path", "weight", "split", "subset", "limit")
"""Keys of a data set in a list of data sets."""


def _check_sources(value: Any) -> str | tuple[Any, ...]:
    """Checks a data set's name, or a list of names and mappings with a path."""
    if isinstance(value, str):
        return as_name(value)
    if isinstance(value, Mapping) and value and all(str(key).isdigit() for key in value):
        raise ValueError(
            "an item of the list can't be set alone; give the whole list, e.g. '[{path: a.jsonl, limit: 100}, ...]'"
        )
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(
            "expected the name of a data set, or a list: [a.jsonl, b.jsonl] or [{path: a.jsonl, weight: 0.7}, ...], "
            f"got {format_value(value)}"
        )
    for item in value:
        path = item.get("path") if isinstance(item, Mapping) else item
        if not isinstance(path, str) or not path.strip():
            raise ValueError(f"each data set of a list is a name, or has a path; got {format_value(item)}")
        for key in item if isinstance(item, Mapping) else ():
            if key not in SOURCE_KEYS:
                raise ValueError(
                    f"data set {path!r} has an unknown key {key!r} (its keys are {', '.join(SOURCE_KEYS)})"
                    f"{nearest(str(key), SOURCE_KEYS)}"
                )
    weights = [item.get("weight") if isinstance(item, Mapping) else None for item in value]
    if any(weight is not None for weight in weights):
        for item, weight in zip(value, weights, strict=True):
            number = weight if isinstance(weight, int | float) and not isinstance(weight, bool) else math.nan
            if not (math.isfinite(number) and number > 0):
                path = item["path"] if isinstance(item, Mapping) else item
                raise ValueError(
                    f"data set {path!r} has weight {weight!r}; give each of the list a weight above 0, or none of them"
                )
    return tuple(dict(item) if isinstance(item, Mapping) else item for item in value)


Sources = Annotated[str | tuple[Any, ...], BeforeValidator(_check_sources)]
"""A data set by its name, or a list of them."""


def source_paths(source: Sources | None) -> tuple[str, ...]:
    """Returns the paths that data.path or data.eval_path names.

    >>> source_paths("a.jsonl"), source_paths(("a.jsonl", {"path": "b.jsonl"})), source_paths(None)
    (('a.jsonl',), ('a.jsonl', 'b.jsonl'), ())
    """
    if source is None or isinstance(source, str):
        return () if source is None else (source,)
    return tuple(item["path"] if isinstance(item, Mapping) else item for item in source)


@config
class SourceConfig:
    """The source of the rows, and the number of rows of a step."""

    READ_BY: ClassVar[tuple[str, ...]] = (
        "path",
        "eval_path",
        "eval_split",
        "eval_fraction",
        "subset",
        "streaming",
        "limit",
    )
    """Fields that say where to read rows. From Python, train() receives the rows themselves."""

    path: Sources | None = None
    """Hub name (name@revision pins it), folder, a json, jsonl, csv, parquet or arrow file (also .gz, .bz2, .zst,
    .lz4), a glob or URL of such files, "file.py:function" or "package.module:function" that returns the rows; or a
    list of data sets: [{path, weight, split, subset, limit}, ...]. The weights are their shares of an epoch; without
    weights every row is used once. None = the rows come from Python."""
    subset: Name | None = None
    """Configuration of a hub data set, e.g. main; for eval_path too. None = its only one."""
    eval_path: Sources | None = None
    """Data set for evaluation, as path but without weights; None = path with eval_split or eval_fraction."""
    split: Name = "train"
    """Split to train on, if the data set has several."""
    eval_split: Name | None = None
    """Split to evaluate on; None = the only split of eval_path, or the only one named test, validation, dev or
    similar."""
    eval_fraction: Float = 0.0
    """Share of the rows to hold out for evaluation. 0.0 = off."""
    batch_size: Size = 8
    """Rows of one step: prompts, conversations or pairs."""
    shuffle: Bool = True
    """Shuffle the rows in each epoch by the run's seed. A stream is shuffled within its shuffle_buffer."""
    shuffle_buffer: Number = 0
    """Rows of a stream that are kept in memory and shuffled. 0 = a stream keeps its own order."""
    streaming: Bool = False
    """Read the data set during the run, without downloading it first."""
    limit: Count | None = None
    """Use only the first N rows; None = all."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(f"eval_fraction must lie in [0, 1), got {self.eval_fraction!r}; 0.0 turns it off")
        if any(isinstance(item, Mapping) and "weight" in item for item in self.eval_path or ()):
            raise ConfigError("eval_path takes no weights: an evaluation reads every row once; leave them out")
        if self.eval_fraction and (self.eval_path or self.eval_split):
            raise ConfigError("eval_fraction cuts rows off the training data; drop it, or eval_path and eval_split")


@config
class DataConfig(SourceConfig):
    """The source of the prompts."""

    prompt_column: Name | None = None
    """Column with the prompt; None = the one of prompt, prompts, messages, question, conversations that exists."""
    apply_chat_template: Bool = False
    """Make each plain-text prompt a user's turn in the chat template; conversations always go through it."""
    system_prompt: Text = ""
    """System prompt of every conversation. "" = none."""
    on_template_change: Literal["error", "accept"] = "error"
    """If the chat template changes the text of a prompt, e.g. removes blanks at its end: "error" = refuse it, "accept"
    = use the changed text."""
    on_answered: Literal["error", "take_off", "continue"] = "error"
    """A conversation that ends with the assistant's turn: "error" = refuse it; "take_off" = remove that turn and use it
    as the column answer, unless the row has one; "continue" = let the model continue it."""


@config
class SupervisedDataConfig(SourceConfig):
    """The source of the rows of supervised training, and the tokens that are trained."""

    messages_column: Name | None = None
    """Column with a conversation; None = the one of messages, conversations that exists."""
    prompt_column: Name | None = None
    """Column with the prompt; None = the one of prompt, question that exists."""
    response_column: Name | None = None
    """Column with the text after the prompt; None = the one of response, completion that exists."""
    text_column: Name | None = None
    """Column with plain text, all of which is trained; None = text."""
    chosen_column: Name | None = None
    """Column with the better answer of a pair; None = chosen."""
    rejected_column: Name | None = None
    """Column with the worse answer of a pair; None = rejected."""
    margin_column: Name | None = None
    """Column with a number, the margin of the chosen answer over the rejected one; None = margin, if it exists."""
    label_column: Name | None = None
    """Column with the label of a single answer: good (true, 1) or bad (false, 0); None = label."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens to train: "assistant" = every turn of the assistant, "last" = only its last turn, "all" = every token but
    the first. No effect on pairs and labelled answers, which train every token after the prompt."""
    apply_chat_template: Bool = False
    """Make a plain-text prompt a user's turn and its response the assistant's; conversations always go through it."""
    chat_template_kwargs: Tree = field(default_factory=dict)
    """More arguments of the chat template, e.g. {enable_thinking: true}; its default here is false."""
    system_prompt: Text = ""
    """System prompt of every conversation without a system turn. "" = none."""
    on_template_change: Literal["error", "accept"] = "error"
    """If the chat template changes the text of a row, e.g. removes thinking or blanks at the end: "error" = refuse it,
    "accept" = use the changed text."""
    max_length: Count | None = None
    """Maximum number of tokens of a sequence, prompt and template included. None = no limit."""
    on_long: Literal["error", "truncate", "truncate_left", "drop"] = "error"
    """A row over max_length: "error" = refuse it, "truncate" = cut its end, "truncate_left" = cut its beginning, "drop"
    = leave it out. A cut row without a trained token is left out. The number of cut and dropped rows is logged."""
    on_empty: Literal["error", "drop"] = "error"
    """A row without anything to train (every turn of the assistant is empty, or both answers of a pair are equal):
    "error" = refuse it, "drop" = leave it out and log the number."""
