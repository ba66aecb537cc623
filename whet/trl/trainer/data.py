"""Checks the data sets of a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any

from whet.errors import ConfigError, DataError

__all__ = ["check_dataset", "check_evaluation", "load_eval_sets"]


def check_dataset(data: Any, name: str) -> Any:
    """A data set: a datasets.Dataset or IterableDataset, a list of dicts, an iterable of them.

    Args: name: train_dataset or eval_dataset, for the message.
    Raises: DataError: something else, with how it is made one; it has no rows.

    >>> check_dataset({"train": [{"prompt": "a"}]}, "train_dataset")
    Traceback (most recent call last):
    whet.errors.DataError: `train_dataset` must be a `Dataset` or `IterableDataset`, got `dict`; give one of its \
splits: train_dataset=data['train']
    """
    if isinstance(data, Mapping):
        way = f"give one of its splits: {name}=data[{next(iter(data), 'train')!r}]"
    elif isinstance(data, str | PathLike):
        way = f'load it first: load_dataset("json", data_files={str(data)!r}, split="train")'
    elif hasattr(data, "iloc"):
        way = "make it one: Dataset.from_pandas(data)"
    elif not (isinstance(data, Iterable) or hasattr(data, "__getitem__")):
        way = "or give a list of dicts"
    elif isinstance(data, list | tuple) and data and not isinstance(data[0], Mapping):
        raise DataError(f"{name}: its rows are {type(data[0]).__name__}, and rows are dicts: a value for each column")
    elif hasattr(data, "__len__") and len(data) == 0:  # pyright: ignore[reportArgumentType]
        raise DataError(f"{name} has no rows; give at least one")
    else:
        return data
    raise DataError(f"`{name}` must be a `Dataset` or `IterableDataset`, got `{type(data).__name__}`; {way}")


def load_eval_sets(data: Any, rows: Callable[[Any, str], Any]) -> dict[str, list[Any]]:
    """The evaluation sets by name, each whole; "" is the name of a single one.

    Args: data: one, or several by name; None = none. rows: of a set that is checked, and what it is called.
    """
    if data is None:
        return {}
    named = data if isinstance(data, Mapping) else {"": data}
    called = {name: f"eval_dataset[{name!r}]" if name else "eval_dataset" for name in named}
    return {name: list(rows(check_dataset(one, called[name]), called[name])) for name, one in named.items()}


def check_evaluation(args: Any, sets: Mapping[str, Any]) -> None:
    """Raises ConfigError where the arguments ask for evaluations, and there is no evaluation set."""
    asked = {"eval_strategy": args.eval_strategy.value != "no", "eval_on_start": args.eval_on_start}
    for name in (name for name, wanted in asked.items() if wanted and not sets):
        value = getattr(args, name)
        raise ConfigError(
            f"{name}={getattr(value, 'value', value)!r} asks for evaluations, and there is no eval_dataset: give one, "
            f"or set {name}={'no' if name == 'eval_strategy' else False!r}"
        )
