"""TRL's helpers for the rows of a data set: chat templates, prompts, pairs, packs.

The trainers read conversations and pairs without these helpers, except KTOTrainer: it uses `extract_prompt` and
`unpair_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from os.path import commonprefix
from typing import Any

import datasets

from whet.errors import DataError, lookup_error
from whet.trl.supervised.packs import best_fit

__all__ = [
    "apply_chat_template",
    "extract_prompt",
    "is_conversational",
    "is_conversational_from_value",
    "maybe_apply_chat_template",
    "maybe_convert_to_chatml",
    "maybe_extract_prompt",
    "maybe_unpair_preference_dataset",
    "pack_dataset",
    "truncate_dataset",
    "unpair_preference_dataset",
    "unpair_rows",
]

Row = Mapping[str, Any]
_ANSWERS = ("chosen", "rejected", "completion")
_TEXT_COLUMNS = ("messages", "prompt", *_ANSWERS)
_COLUMN_SETS = (
    {"messages"},
    {"prompt"},
    {"prompt", "completion"},
    {"prompt", "chosen", "rejected"},
    {"chosen", "rejected"},
    {"prompt", "completion", "label"},
)
"""The columns of rows that a chat template is applied to."""
_BATCH_ROWS = 1000
"""Rows of a batch of datasets.map."""


# ---- conversations ---------------------------------------------------------------------------------------------------


def is_conversational(example: Row) -> bool:
    """Returns whether a row holds lists of messages.

    >>> is_conversational({"prompt": [{"role": "user", "content": "1+1?"}]}), is_conversational({"prompt": "1+1="})
    (True, False)
    """
    return any(_is_messages(example[name], "role") for name in _TEXT_COLUMNS if name in example)


def is_conversational_from_value(example: Row) -> bool:
    """Returns whether a row has `conversations` of messages with `from` and `value`.

    >>> is_conversational_from_value({"conversations": [{"from": "human", "value": "1+1?"}]})
    True
    """
    return _is_messages(example.get("conversations"), "from", "value")


def maybe_convert_to_chatml(example: Row) -> dict[str, Any]:
    """Returns the row with `role` and `content` in every message; the column `conversations` becomes `messages`.

    >>> maybe_convert_to_chatml({"conversations": [{"from": "user", "value": "1+1?"}]})
    {'messages': [{'role': 'user', 'content': '1+1?'}]}
    """
    names = {"from": "role", "value": "content"}

    def rename_keys(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [{names.get(k, k): v for k, v in m.items()} if isinstance(m, Mapping) else m for m in value]

    columns = (*_TEXT_COLUMNS, "conversations")
    row = {name: rename_keys(value) if name in columns else value for name, value in example.items()}
    return {"messages" if name == "conversations" else name: value for name, value in row.items()}


def apply_chat_template(
    example: Row, processing_class: Any, tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
    **template_kwargs: Any,
) -> dict[str, Any]:  # fmt: skip
    """Returns the conversations of a row as texts of the chat template.

    Args:
        example: a row with messages; with prompt and optionally completion and label; or with a pair. It may have a
            column chat_template_kwargs.
        processing_class: the tokenizer.
        tools: functions or schemas.
        template_kwargs: arguments of the template.
    Returns: the row's columns as texts, `messages` as `text`. Prompt and answer together equal the template's text of
        the whole conversation. If the template renders the prompt differently without the answer, the prompt ends
        before the first difference.
    Raises: DataError: other columns, a text among messages, or a prompt that ends in a system turn.
    """
    keys = {name for name in example if name in (*_TEXT_COLUMNS, "label")}
    if keys not in _COLUMN_SETS:
        raise DataError(
            f"Invalid keys in the example: {sorted(keys)}; give {' or '.join(map(str, map(sorted, _COLUMN_SETS)))}"
        )
    options = {
        "tools": tools or None,
        "tokenize": False,
        **(example.get("chat_template_kwargs") or {}),
        **template_kwargs,
    }
    render: Callable[..., str] = partial(processing_class.apply_chat_template, **options)
    answers = [name for name in _ANSWERS if name in example]
    texts: dict[str, Any] = {"text": render(example["messages"])} if "messages" in example else {}
    if "prompt" in example:
        if isinstance(example["prompt"], str):
            raise DataError("the prompt is a text and the answers are messages; apply maybe_extract_prompt first")
        role = example["prompt"][-1]["role"]
        if role not in ("user", "tool", "assistant"):
            raise DataError(f"Invalid role in the last message: {role}; a prompt ends with user, tool or assistant")
        unfinished = role == "assistant"
        prompt = render(example["prompt"], continue_final_message=unfinished, add_generation_prompt=not unfinished)
        conversations = {name: render(example["prompt"] + example[name]) for name in answers}
        texts["prompt"] = commonprefix([prompt, *conversations.values()])  # noqa: RUF071 - of characters
        texts |= {name: text[len(texts["prompt"]) :] for name, text in conversations.items()}
    else:
        texts |= {name: render(example[name]) for name in answers}
    return texts | ({"label": example["label"]} if "label" in example else {})


def maybe_apply_chat_template(
    example: Row, processing_class: Any, tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
    **template_kwargs: Any,
) -> Any:  # fmt: skip
    """`apply_chat_template` of a row of conversations; any other row is returned unchanged."""
    if not is_conversational(example):
        return example
    return apply_chat_template(example, processing_class, tools, **template_kwargs)


def _is_messages(value: Any, *names: str) -> bool:
    return (
        isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and all(n in value[0] for n in names)
    )


# ---- pairs -----------------------------------------------------------------------------------------------------------


def extract_prompt(example: Row) -> dict[str, Any]:
    """Returns the pair with the common beginning of its answers, in messages or in characters, as its prompt.

    A space before the first difference stays with the answers; each answer keeps at least one message or character.

    >>> extract_prompt({"chosen": "The sky is blue.", "rejected": "The sky is green."})
    {'prompt': 'The sky is', 'chosen': ' blue.', 'rejected': ' green.'}
    """
    chosen, rejected = example["chosen"], example["rejected"]
    shorter = min(len(chosen), len(rejected))
    start = next((i for i in range(shorter) if chosen[i] != rejected[i]), None)
    if start is None:
        start = max(shorter - 1, 0)
    elif start and chosen[start - 1] == " ":
        start -= 1
    return {"prompt": chosen[:start], "chosen": chosen[start:], "rejected": rejected[start:]}


def maybe_extract_prompt(example: Row) -> Any:
    """`extract_prompt` of a pair that has no prompt of the same form; any other row is returned unchanged."""
    if "chosen" not in example or "rejected" not in example:
        return example
    forms = [is_conversational({"prompt": example[name]}) for name in ("prompt", "chosen") if name in example]
    if len(forms) == 2 and forms[0] == forms[1]:
        return example
    return extract_prompt(example)


def unpair_preference_dataset(
    dataset: Any, num_proc: int | None = None, desc: str | None = None, **map_kwargs: Any
) -> Any:
    """Converts pairs to rows with `completion` and `label`.

    Each batch of 1000 pairs gives the chosen answers, then the rejected ones.

    Args: dataset: a Dataset, a DatasetDict, or their streams. The other arguments are for its `map`.
    """
    options = {"num_proc": num_proc, "desc": desc, **map_kwargs}
    options = {name: value for name, value in options.items() if value is not None}
    return dataset.map(_unpair_batch, batched=True, remove_columns=_columns(dataset), **options)


def maybe_unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """`unpair_preference_dataset` of pairs; any other data set is returned unchanged."""
    pairs = {"chosen", "rejected"} <= {*_columns(dataset)}
    return unpair_preference_dataset(dataset, num_proc, desc) if pairs else dataset


def _columns(dataset: Any) -> list[str]:
    """Returns the columns of a data set, or of the first of several. Reads a row if a stream has no column names."""
    is_dict = isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict)
    first: Any = next(iter(dataset.values())) if is_dict else dataset
    return list(next(iter(first))) if first.column_names is None else list(first.column_names)


def _unpair_batch(batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Converts a batch of pairs to rows, the chosen answers first."""
    columns = {name: values * 2 for name, values in batch.items() if name not in ("chosen", "rejected")}
    labels = [True] * len(batch["chosen"]) + [False] * len(batch["chosen"])
    return {**columns, "completion": batch["chosen"] + batch["rejected"], "label": labels}


def unpair_rows(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """Yields the rows of `unpair_preference_dataset` for any iterable of pairs; a missing prompt is extracted."""
    rows = iter(rows)
    while batch := list(islice(rows, _BATCH_ROWS)):
        pairs = [row if "prompt" in row else {**row, **extract_prompt(row)} for row in batch]
        for side, label in (("chosen", True), ("rejected", False)):
            for row in pairs:
                kept = {name: value for name, value in row.items() if name not in ("chosen", "rejected")}
                yield {**kept, "completion": row[side], "label": label}


# ---- lengths ---------------------------------------------------------------------------------------------------------


def truncate_dataset(dataset: Any, max_length: int, map_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Truncates every list to max_length items. Args: map_kwargs: for the data set's `map`."""

    def truncate(batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        return {name: [v[:max_length] if _is_list(v) else v for v in values] for name, values in batch.items()}

    return _map_batches(dataset, truncate, map_kwargs)


def pack_dataset(
    dataset: Any, seq_length: int, strategy: str = "bfd", map_kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Packs rows into rows of at most seq_length items, 1000 rows at a time.

    Args:
        dataset: a Dataset, a DatasetDict, or their streams; every column holds lists of one length in a row.
        seq_length: the items of a pack.
        strategy: bfd = longer rows are truncated; bfd_split = longer rows are split; wrapped = rows are concatenated
            and split wherever a pack is full.
        map_kwargs: for the data set's `map`.
    Returns: the packs; with bfd and bfd_split the column seq_lengths has the lengths of the rows in each pack.
    Raises: ConfigError: an unknown strategy. DataError: a column without lists, or columns of different lengths.
    """
    known = ("bfd", "bfd_split", "wrapped")
    if strategy not in known:
        raise lookup_error("packing strategy", strategy, known)
    return _map_batches(dataset, partial(_pack_batch, size=seq_length, strategy=strategy), map_kwargs)


def _pack_batch(batch: Mapping[str, list[Any]], size: int, strategy: str) -> dict[str, list[Any]]:
    """Packs a batch of rows."""
    lengths = _lengths(batch)
    if strategy == "wrapped":
        starts = range(0, sum(lengths), size)
        joined = {name: [x for value in values for x in value] for name, values in batch.items()}
        return {name: [values[i : i + size] for i in starts] for name, values in joined.items()}
    split = strategy == "bfd_split"
    parts = [
        (row, start, min(start + size, length))
        for row, length in enumerate(lengths)
        for start in range(0, length if split else min(length, 1), size)
    ]
    packs = [[parts[i] for i in pack] for pack in best_fit([end - start for _, start, end in parts], size)]
    columns: dict[str, list[Any]] = {
        name: [[x for row, start, end in pack for x in values[row][start:end]] for pack in packs]
        for name, values in batch.items()
    }
    return {**columns, "seq_lengths": [[end - start for _, start, end in pack] for pack in packs]}


def _lengths(batch: Mapping[str, list[Any]]) -> list[int]:
    """Returns the length of each row. Raises DataError: a column without lists, or with other lengths."""
    lengths: list[int] | None = None
    for name, values in batch.items():
        if not all(_is_list(value) for value in values):
            raise DataError(f"Packing requires all columns to be lists of lists, and {name!r} is not; remove it first")
        column_lengths = [len(value) for value in values]
        if lengths is not None and column_lengths != lengths:
            raise DataError(f"All columns must have values of the same length, but {name!r} differs; remove it first")
        lengths = column_lengths
    return lengths or []


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _map_batches(dataset: Any, fn: Callable[[Any], dict[str, list[Any]]], map_kwargs: Mapping[str, Any] | None) -> Any:
    """Maps a function over a data set's batches of lists, and keeps the data set's format."""
    if isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
        return type(dataset)({name: _map_batches(split, fn, map_kwargs) for name, split in dataset.items()})
    mapped = dataset.with_format(None).map(fn, batched=True, **(map_kwargs or {}))
    if isinstance(dataset, datasets.IterableDataset):
        return mapped.with_format(dataset._formatting and dataset._formatting.format_type)
    previous = dataset.format
    shown = [*previous["columns"], *(name for name in mapped.column_names if name not in dataset.column_names)]
    return mapped.with_format(previous["type"], shown, previous["output_all_columns"], **previous["format_kwargs"])
