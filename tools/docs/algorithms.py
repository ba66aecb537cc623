"""docs/algorithms.md: the functions that can be chosen by name, with equation, parameters and source."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from tools.docs.table import table
from whet.config import GRPOConfig, PolicyConfig, PPOConfig, field_docs
from whet.config.introspection import choices
from whet.learners.from_config import keyword_arguments
from whet.ops import (
    ADVANTAGE_ESTIMATORS,
    CORRECTIONS,
    IMPORTANCE_LEVELS,
    KL_MODES,
    LOSS_AGG_MODES,
    POLICY_LOSSES,
    TOKEN_MASKS,
    VALUE_LOSSES,
    kl_divergence,
    token_weights,
)

__all__ = ["KNOWN", "equation", "page", "source"]

KNOWN: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "advantage_estimator": ADVANTAGE_ESTIMATORS,
    "policy_loss_fn": POLICY_LOSSES,
    "importance_sampling_level": IMPORTANCE_LEVELS,
    "loss_agg_mode": LOSS_AGG_MODES,
    "kl_loss_mode": KL_MODES,
    "sampler_is": CORRECTIONS,
    "loss_masks": TOKEN_MASKS,
    "value_loss_fn": VALUE_LOSSES,
}
"""Field -> the functions that it names."""
SAME = "the same by another name"
_TITLES = {
    "advantage_estimator": "Advantage estimators",
    "policy_loss_fn": "Surrogates",
    "importance_sampling_level": "The importance ratio",
    "loss_agg_mode": "Aggregation: the weight of each token",
    "kl_loss_mode": "The KL to the reference, of d = log π − log π_ref",
    "sampler_is": "Corrections for a sampler that differs from the trainer",
    "loss_masks": "Masks",
    "value_loss_fn": "Value losses",
}
_OF_ALL: Mapping[str, Callable[..., Any]] = {"loss_agg_mode": token_weights, "kl_loss_mode": kl_divergence}
"""Functions whose docstring states the source of all names of a field."""
_INTRO = """# Algorithms

    loss of a token = surrogate · corrections · masks + β · KL − c · entropy
    loss of a step  = Σ weight of a token · its loss

Each part is chosen on its own, by the field of `algo` above its table. A function, or "package.module:function", may
take the place of a name ([Extending](extending.md)). A run logs its parts at the start and writes them to
`environment.json`. `whet grpo --help algo` shows the same names. Parameters are fields of `algo` too; a parameter that
the chosen function does not take is refused.

A published method is a choice for all parts: `presets.dapo()` from Python, `algo.preset=dapo` in a file or on the
command line; other keys then change it. [Papers](papers.md) lists the methods with the values of their sources.
"""


def equation(fn: Callable[..., Any]) -> str:
    """The text of a docstring between its first line and its first section, or the first line where that is empty."""
    text = _doc(fn)
    head, _, rest = text.partition("\n")
    if text and _inner(fn).__name__.startswith("_"):  # what is there by its name alone has its equation in one line
        return head.strip()
    body = re.split(r"\n\s*(?:Args|Returns|Raises|Source|>>>)\b:?|\n\s*>>>", "\n" + rest)[0]
    return " ".join(body.split()) or head.strip()


def source(fn: Callable[..., Any]) -> str:
    """The Source section of a docstring; "" = it has none."""
    found = re.search(r"^\s*Source: (.*?)(?=\n\s*\n|\n\s*(?:Args|Returns|Raises):|\n\s*>>>|\Z)", _doc(fn), re.S | re.M)
    return "" if found is None else " ".join(found[1].split())


def _inner(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside a partial: a callable argument, or the called function."""
    while isinstance(fn, functools.partial):
        given = [value for value in fn.args if callable(value)]
        fn = given[0] if given else fn.func
    return fn


def _doc(fn: Callable[..., Any]) -> str:
    return inspect.getdoc(_inner(fn)) or ""


def _parameters(fn: Callable[..., Any]) -> str:
    """The fields that a function takes, with their defaults, and the values that its name fixes."""
    taken = keyword_arguments(fn)
    defaults = {f.name: f.default for cls in (PPOConfig, PolicyConfig) for f in fields(cls)}
    words = [f"`{name}={default}`" for name, default in defaults.items() if name in taken]
    fixed = fn.keywords if isinstance(fn, functools.partial) else {}
    return ", ".join([*words, *(f"{name} = {value}" for name, value in fixed.items())])


def _cells(name: str, when: str, fn: Callable[..., Any]) -> tuple[str, ...]:
    if when == SAME:
        return (f"`{name}`", "as above", when, "", "")
    text = equation(fn) + (" The gradient is that of k2." if name.endswith("+") else "")
    return (f"`{name}`", text, when, _parameters(fn), source(fn))


def page() -> str:
    """The text of docs/algorithms.md."""
    parts = [_INTRO]
    for field, known in KNOWN.items():
        about = " ".join(field_docs(PPOConfig).get(field, "").split())
        parts.append(f"## {_TITLES[field]}\n\n`algo.{field}`. {about}\n" if about else f"## {_TITLES[field]}\n")
        rows = [_cells(name, when, known[name]) for name, when in choices(GRPOConfig, field).items() if name in known]
        parts.append(f"{table(['name', 'what it is', 'when', 'parameters', 'source'], rows)}\n")
        if field in _OF_ALL:
            parts.append(f"Source: {source(_OF_ALL[field])}\n")
    return "\n".join(parts)
