"""README.md of a model: what the hub reads, and how it was trained. A base that lies on this machine is not named."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

__all__ = ["card"]

_NAMED = ("whet", "torch", "transformers", "datasets")


def card(name: str, method: str, base: str | None, dataset: str | None, tags: Sequence[str]) -> str:
    """The text. Args: name: of the model. method: GRPO, ... base, dataset: names on the hub. tags: for it."""
    base = None if base is None or Path(base).exists() else base
    facts = {
        "library_name": "transformers",
        "model_name": name,
        "tags": ["whet", method.lower().replace(" ", "-"), *tags],
        **({"base_model": base} if base else {}),
        **({"datasets": [dataset]} if dataset else {}),
    }
    of = f" of [{base}](https://huggingface.co/{base})" if base else ""
    on = f" on [{dataset}](https://huggingface.co/datasets/{dataset})" if dataset else ""
    versions = "\n".join(f"- {package}: {_version(package)}" for package in _NAMED)
    return (
        f"---\n{yaml.safe_dump(facts, sort_keys=False)}---\n\n# {name}\n\nA model trained{of}{on} by {method}, with "
        f"[whet](https://pypi.org/project/whet).\n\n## Versions\n\n{versions}\n"
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
