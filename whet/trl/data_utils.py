"""TRL's helpers for the rows of a data set: chat templates, prompts, pairs, packs.

The trainers take conversations and pairs as they are. KTOTrainer reads pairs by `extract_prompt` and `unpair_rows`.
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
_SAID = ("messages", "prompt", *_ANSWERS)
_FORMS = (
    {"messages"},
    {"prompt"},
    {"prompt", "completion"},
    {"prompt", "chosen", "rejected"},
    {"chosen", "rejected"},
    {"prompt", "completion", "label"},
)
"""The columns of rows that a chat template is applied to."""
_AT_ONCE = 1000
"""Rows of a batch of datasets.map."""


# ---- conversations ---------------------------------------------------------------------------------------------------


def is_conversational(example: Row) -> bool:
    """Whether what a row says are lists of messages.

    >>> is_conversational({"prompt": [{"role": "user", "content": "1+1?"}]}), is_conversational({"prompt": "1+1="})
    (True, False)
    """
    return any(_is_messages(example[name], "role") for name in _SAID if name in example)


def is_conversational_from_value(example: Row) -> bool:
    """Whether a row has `conversations` of messages with `from` and `value`.

    >>> is_conversational_from_value({"conversations": [{"from": "human", "value": "1+1?"}]})
    True
    """
    return _is_messages(example.get("conversations"), "from", "value")


def maybe_convert_to_chatml(example: Row) -> dict[str, Any]:
    """A row whose messages have `role` and `content`, in `messages` where they were in `conversations`.

    >>> maybe_convert_to_chatml({"conversations": [{"from": "user", "value": "1+1?"}]})
    {'messages': [{'role': 'user', 'content': '1+1?'}]}
    """
    names = {"from": "role", "value": "content"}

    def renamed(said: Any) -> Any:
        if not isinstance(said, list):
            return said
        return [{names.get(k, k): v for k, v in m.items()} if isinstance(m, Mapping) else m for m in said]

    row = {name: renamed(said) if name in (*_SAID, "conversations") else said for name, said in example.items()}
    return {"messages" if name == "conversations" else name: said for name, said in row.items()}


def apply_chat_template(
    example: Row, processing_class: Any, tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
    **template_kwargs: Any,
) -> dict[str, Any]:  # fmt: skip
    """The texts that a chat template makes of a row's conversations.

    Args: example: messages; prompt, alone or with an answer, with a label or without; a pair; with chat_template_kwargs
        of its own. processing_class: the tokenizer. tools: functions or schemas. template_kwargs: for the template.
    Returns: the row's columns as texts, `messages` as `text`. Prompt and answer together are what the template makes of
        the whole: where it shows the prompt alone otherwise, the prompt ends before that.
    Raises: DataError: other columns, a text among messages, or a prompt that ends in a system turn.
    """
    keys = {name for name in example if name in (*_SAID, "label")}
    if keys not in _FORMS:
        raise DataError(
            f"Invalid keys in the example: {sorted(keys)}; give {' or '.join(map(str, map(sorted, _FORMS)))}"
        )
    options = {
        "tools": tools or None,
        "tokenize": False,
        **(example.get("chat_template_kwargs") or {}),
        **template_kwargs,
    }
    shown: Callable[..., str] = partial(processing_class.apply_chat_template, **options)
    answers = [name for name in _ANSWERS if name in example]
    found: dict[str, Any] = {"text": shown(example["messages"])} if "messages" in example else {}
    if "prompt" in example:
        if isinstance(example["prompt"], str):
            raise DataError("the prompt is a text and the answers are messages; apply maybe_extract_prompt first")
        role = example["prompt"][-1]["role"]
        if role not in ("user", "tool", "assistant"):
            raise DataError(f"Invalid role in the last message: {role}; a prompt ends with user, tool or assistant")
        said = role == "assistant"
        alone = shown(example["prompt"], continue_final_message=said, add_generation_prompt=not said)
        wholes = {name: shown(example["prompt"] + example[name]) for name in answers}
        found["prompt"] = commonprefix([alone, *wholes.values()])  # noqa: RUF071 - of characters
        found |= {name: whole[len(found["prompt"]) :] for name, whole in wholes.items()}
    else:
        found |= {name: shown(example[name]) for name in answers}
    return found | ({"label": example["label"]} if "label" in example else {})


def maybe_apply_chat_template(
    example: Row, processing_class: Any, tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
    **template_kwargs: Any,
) -> Any:  # fmt: skip
    """`apply_chat_template` of a row of conversations; any other as it is."""
    if not is_conversational(example):
        return example
    return apply_chat_template(example, processing_class, tools, **template_kwargs)


def _is_messages(value: Any, *names: str) -> bool:
    return (
        isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and all(n in value[0] for n in names)
    )


# ---- pairs -----------------------------------------------------------------------------------------------------------


def extract_prompt(example: Row) -> dict[str, Any]:
    """A pair with what both answers begin with as its prompt: messages, or characters.

    A blank before the answers is theirs; each keeps a message or a character at least.

    >>> extract_prompt({"chosen": "The sky is blue.", "rejected": "The sky is green."})
    {'prompt': 'The sky is', 'chosen': ' blue.', 'rejected': ' green.'}
    """
    chosen, rejected = example["chosen"], example["rejected"]
    most = min(len(chosen), len(rejected))
    same = next((i for i in range(most) if chosen[i] != rejected[i]), None)
    if same is None:
        same = max(most - 1, 0)
    elif same and chosen[same - 1] == " ":
        same -= 1
    return {"prompt": chosen[:same], "chosen": chosen[same:], "rejected": rejected[same:]}


def maybe_extract_prompt(example: Row) -> Any:
    """`extract_prompt` of a pair without a prompt of its own form; any other row as it is."""
    if "chosen" not in example or "rejected" not in example:
        return example
    forms = [is_conversational({"prompt": example[name]}) for name in ("prompt", "chosen") if name in example]
    if len(forms) == 2 and forms[0] == forms[1]:
        return example
    return extract_prompt(example)


def unpair_preference_dataset(
    dataset: Any, num_proc: int | None = None, desc: str | None = None, **map_kwargs: Any
) -> Any:
    """Rows with `completion` and `label` of pairs: of every thousand first the chosen answers, then the rejected ones.

    Args: dataset: a Dataset, a DatasetDict, or their streams. The rest is for its `map`.
    """
    given = {"num_proc": num_proc, "desc": desc, **map_kwargs}
    more = {name: value for name, value in given.items() if value is not None}
    return dataset.map(_both, batched=True, remove_columns=_columns(dataset), **more)


def maybe_unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """`unpair_preference_dataset` of pairs; any other data set as it is."""
    pairs = {"chosen", "rejected"} <= {*_columns(dataset)}
    return unpair_preference_dataset(dataset, num_proc, desc) if pairs else dataset


def _columns(dataset: Any) -> list[str]:
    """The columns of a data set, or of the first of several; of a stream that does not say them, its first row's."""
    several = isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict)
    first: Any = next(iter(dataset.values())) if several else dataset
    return list(next(iter(first))) if first.column_names is None else list(first.column_names)


def _both(batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """A batch of pairs as rows, the chosen answers first."""
    found = {name: values * 2 for name, values in batch.items() if name not in ("chosen", "rejected")}
    labels = [True] * len(batch["chosen"]) + [False] * len(batch["chosen"])
    return {**found, "completion": batch["chosen"] + batch["rejected"], "label": labels}


def unpair_rows(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """Pairs of any iterable as `unpair_preference_dataset` has them, prompts extracted where there are none."""
    rows = iter(rows)
    while part := list(islice(rows, _AT_ONCE)):
        whole = [row if "prompt" in row else {**row, **extract_prompt(row)} for row in part]
        for side, label in (("chosen", True), ("rejected", False)):
            for row in whole:
                kept = {name: value for name, value in row.items() if name not in ("chosen", "rejected")}
                yield {**kept, "completion": row[side], "label": label}


# ---- lengths ---------------------------------------------------------------------------------------------------------


def truncate_dataset(dataset: Any, max_length: int, map_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Rows whose lists are cut at the end. Args: max_length: of each list. map_kwargs: for the data set's `map`."""

    def cut(batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        return {name: [v[:max_length] if _is_list(v) else v for v in values] for name, values in batch.items()}

    return _mapped(dataset, cut, map_kwargs)


def pack_dataset(
    dataset: Any, seq_length: int, strategy: str = "bfd", map_kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Rows of lists, put together to rows of at most seq_length, a thousand at a time.

    Args:
        dataset: a Dataset, a DatasetDict, or their streams; every column holds lists of one length in a row.
        seq_length: of a pack.
        strategy: bfd = rows stay whole, those that are longer are cut; bfd_split = these are divided; wrapped = rows
            stand end to end, and a pack ends wherever it is full.
        map_kwargs: for the data set's `map`.
    Returns: the packs; with bfd and bfd_split the lengths of the rows in each as seq_lengths.
    Raises: ConfigError: an unknown strategy. DataError: a column that holds no lists, or lists of other lengths.
    """
    known = ("bfd", "bfd_split", "wrapped")
    if strategy not in known:
        raise lookup_error("packing strategy", strategy, known)
    return _mapped(dataset, partial(_packs, size=seq_length, strategy=strategy), map_kwargs)


def _packs(batch: Mapping[str, list[Any]], size: int, strategy: str) -> dict[str, list[Any]]:
    """A batch as packs."""
    lengths = _lengths(batch)
    if strategy == "wrapped":
        ends = range(0, sum(lengths), size)
        whole = {name: [x for value in values for x in value] for name, values in batch.items()}
        return {name: [values[i : i + size] for i in ends] for name, values in whole.items()}
    split = strategy == "bfd_split"
    parts = [
        (row, start, min(start + size, length))
        for row, length in enumerate(lengths)
        for start in range(0, length if split else min(length, 1), size)
    ]
    packs = [[parts[i] for i in pack] for pack in best_fit([end - start for _, start, end in parts], size)]
    found: dict[str, list[Any]] = {
        name: [[x for row, start, end in pack for x in values[row][start:end]] for pack in packs]
        for name, values in batch.items()
    }
    return {**found, "seq_lengths": [[end - start for _, start, end in pack] for pack in packs]}


def _lengths(batch: Mapping[str, list[Any]]) -> list[int]:
    """The length of each row, which all of its columns have."""
    found: list[int] | None = None
    for name, values in batch.items():
        if not all(_is_list(value) for value in values):
            raise DataError(f"Packing requires all columns to be lists of lists, and {name!r} is not; remove it first")
        own = [len(value) for value in values]
        if found is not None and own != found:
            raise DataError(
                f"All columns must have values of the same length, and {name!r} has others; remove it first"
            )
        found = own
    return found or []


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _mapped(dataset: Any, fn: Callable[[Any], dict[str, list[Any]]], map_kwargs: Mapping[str, Any] | None) -> Any:
    """A data set of what a function makes of its batches, which are lists whatever its format is, in that format."""
    if isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
        return type(dataset)({name: _mapped(split, fn, map_kwargs) for name, split in dataset.items()})
    made = dataset.with_format(None).map(fn, batched=True, **(map_kwargs or {}))
    if isinstance(dataset, datasets.IterableDataset):
        return made.with_format(dataset._formatting and dataset._formatting.format_type)
    own = dataset.format
    shown = [*own["columns"], *(name for name in made.column_names if name not in dataset.column_names)]
    return made.with_format(own["type"], shown, own["output_all_columns"], **own["format_kwargs"])
