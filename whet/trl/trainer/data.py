"""Checks the data sets of a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any

from whet.errors import ConfigError, DataError

__all__ = ["check_dataset", "check_evaluation", "load_eval_sets"]


def check_dataset(data: Any, name: str) -> Any:
    """Returns a data set: a datasets.Dataset or IterableDataset, a list of dicts, or an iterable of dicts.

    Args: name: train_dataset or eval_dataset, for the message.
    Raises: DataError: an empty data set, or another type; the message shows how to convert it.

    >>> check_dataset({"train": [{"prompt": "a"}]}, "train_dataset")
    Traceback (most recent call last):
    whet.errors.DataError: `train_dataset` must be a `Dataset` or `IterableDataset`, got `dict`; give one of its \
splits: train_dataset=data['train']
    """
    if isinstance(data, Mapping):
        fix = f"give one of its splits: {name}=data[{next(iter(data), 'train')!r}]"
    elif isinstance(data, str | PathLike):
        fix = f'load it first: load_dataset("json", data_files={str(data)!r}, split="train")'
    elif hasattr(data, "iloc"):
        fix = "convert it: Dataset.from_pandas(data)"
    elif not (isinstance(data, Iterable) or hasattr(data, "__getitem__")):
        fix = "or give a list of dicts"
    elif isinstance(data, list | tuple) and data and not isinstance(data[0], Mapping):
        raise DataError(f"{name}: the rows are {type(data[0]).__name__}; give dicts with a value for each column")
    elif hasattr(data, "__len__") and len(data) == 0:  # pyright: ignore[reportArgumentType]
        raise DataError(f"{name} has no rows; give at least one")
    else:
        return data
    raise DataError(f"`{name}` must be a `Dataset` or `IterableDataset`, got `{type(data).__name__}`; {fix}")


def load_eval_sets(data: Any, rows: Callable[[Any, str], Any]) -> dict[str, list[Any]]:
    """Loads the evaluation sets by name; "" is the name of a single set.

    Args: data: a data set, or several by name; None = no sets. rows: (checked data set, its name in messages) -> rows.
    """
    if data is None:
        return {}
    sets = {}
    for name, dataset in (data if isinstance(data, Mapping) else {"": data}).items():
        shown = f"eval_dataset[{name!r}]" if name else "eval_dataset"
        sets[name] = list(rows(check_dataset(dataset, shown), shown))
    return sets


def check_evaluation(args: Any, sets: Mapping[str, Any]) -> None:
    """Raises ConfigError if the arguments ask for evaluations and there is no evaluation set."""
    for name, value, off in (
        ("eval_strategy", args.eval_strategy.value, "no"),
        ("eval_on_start", args.eval_on_start, False),
    ):
        if value != off and not sets:
            raise ConfigError(
                f"{name}={value!r} asks for evaluations, and there is no eval_dataset: give one, or set {name}={off!r}"
            )
