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
"""Keys of a data set in a list of them."""


def _check_sources(value: Any) -> str | tuple[Any, ...]:
    """A data set's name, or a list of data sets: each a name, or a mapping with its path."""
    if isinstance(value, str):
        return as_name(value)
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
    """The paths that data.path or data.eval_path names.

    >>> source_paths("a.jsonl"), source_paths(("a.jsonl", {"path": "b.jsonl"})), source_paths(None)
    (('a.jsonl',), ('a.jsonl', 'b.jsonl'), ())
    """
    if source is None or isinstance(source, str):
        return () if source is None else (source,)
    return tuple(item["path"] if isinstance(item, Mapping) else item for item in source)


@config
class SourceConfig:
    """Where rows come from, and how many make a step."""

    READ_BY: ClassVar[tuple[str, ...]] = (
        "path",
        "eval_path",
        "eval_split",
        "eval_fraction",
        "subset",
        "streaming",
        "limit",
    )
    """Fields that say where rows are read; from Python train() is given the rows themselves."""

    path: Sources | None = None
    """Hub name (name@revision pins it), folder, a json, jsonl, csv, parquet or arrow file (also .gz, .bz2, .zst,
    .lz4), a glob or URL of such files, "file.py:function" or "package.module:function" that returns the rows; or a
    list of these: [{path, weight, split, subset, limit}, ...], whose weights are their shares of an epoch; without
    weights all rows are taken. None = given from Python."""
    subset: Name | None = None
    """Configuration of a hub data set, e.g. main, of eval_path too; None = its only one."""
    eval_path: Sources | None = None
    """The same, without weights, for evaluation; None = path with eval_split, or a part cut off by eval_fraction."""
    split: Name = "train"
    """Split to train on, where there are several."""
    eval_split: Name | None = None
    """Split to evaluate on; None = eval_path's only one, or the only one named test, validation, dev or the like."""
    eval_fraction: Float = 0.0
    """Share of the rows kept for evaluation and not trained on. 0.0 = off."""
    batch_size: Size = 8
    """Rows of one step: prompts, conversations or pairs."""
    shuffle: Bool = True
    """A new order in each epoch, from the run's seed. A stream is shuffled within its shuffle_buffer."""
    shuffle_buffer: Number = 0
    """Rows of a stream that are held and shuffled at a time. 0 = a stream keeps its own order."""
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
    """Where prompts come from."""

    prompt_column: Name | None = None
    """Column with the prompt; None = prompt, prompts, messages, question or conversations, whichever is there."""
    apply_chat_template: Bool = False
    """Make each plain-text prompt a user's turn in the chat template; conversations always go through it."""
    system_prompt: Text = ""
    """Put before every conversation. "" = off."""
    on_template_change: Literal["error", "accept"] = "error"
    """What to do where the chat template changes or leaves out what a prompt says, e.g. blanks at its end: "error", or
    "accept" what the template makes of it."""
    on_answered: Literal["error", "take_off", "continue"] = "error"
    """What to do with a conversation that ends with the assistant's turn: "error"; "take_off" = it is the row's answer:
    the column answer, unless there is one; "continue" = the model goes on with it."""


@config
class SupervisedDataConfig(SourceConfig):
    """Where rows of supervised training come from, and what of them is trained."""

    messages_column: Name | None = None
    """Column with a conversation; None = messages or conversations, whichever is there."""
    prompt_column: Name | None = None
    """Column with the prompt; None = prompt or question, whichever is there."""
    response_column: Name | None = None
    """Column with what follows the prompt; None = response or completion, whichever is there."""
    text_column: Name | None = None
    """Column with plain text, trained whole; None = text."""
    chosen_column: Name | None = None
    """Column with the better answer of a pair; None = chosen."""
    rejected_column: Name | None = None
    """Column with the worse answer of a pair; None = rejected."""
    margin_column: Name | None = None
    """Column with how much better the chosen answer is, a number; None = margin, where there is one."""
    label_column: Name | None = None
    """Column that says whether a single answer is good (true, 1) or bad (false, 0); None = label."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens that are trained: "assistant" = every turn of the assistant's, "last" = its last turn only, "all" = every
    token but the first. No effect on pairs and labelled answers: what follows the prompt is trained."""
    apply_chat_template: Bool = False
    """Make a plain-text prompt a user's turn and its response the assistant's; conversations always go through it."""
    chat_template_kwargs: Tree = field(default_factory=dict)
    """Further arguments of the chat template, e.g. {enable_thinking: true}; false is the default."""
    system_prompt: Text = ""
    """Put before every conversation that has no system turn. "" = off."""
    on_template_change: Literal["error", "accept"] = "error"
    """What to do where the chat template changes or leaves out what a row says, e.g. thinking, or blanks at the end:
    "error", or "accept" what the template makes of it."""
    max_length: Count | None = None
    """Most tokens of a sequence, prompt and template included. None = no limit."""
    on_long: Literal["error", "truncate", "truncate_left", "drop"] = "error"
    """What to do with a row over max_length: "error"; "truncate" = cut it at its end, "truncate_left" at its beginning,
    and drop it where nothing trained is left; "drop". Dropped and cut rows are counted."""
    on_empty: Literal["error", "drop"] = "error"
    """What to do with a row that has nothing to train (no turn of the assistant's that says something, a pair of equal
    answers): "error", or "drop" and count it."""
