"""Facts about a model from local files: the name of its base on the hub, its licence, and its run's prompt format.

Left out on purpose: guesses. A folder without a card has no base and no licence.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.config import read_yaml
from whet.errors import ConfigError
from whet.storage.model_paths import split_revision
from whet.util.references import is_ref

__all__ = [
    "LICENCE_KEYS",
    "find_base_model",
    "find_licence",
    "hub_name",
    "read_card_metadata",
    "trained_with_chat_template",
]

LICENCE_KEYS = ("license", "license_name", "license_link")
"""The keys of a card for the licence."""
CARDS = ("README.md", "model_card.md", "../README.md", "../model_card.md")
"""The paths of a card, from a model's folder; for final/ of a run it is in the folder above."""
DATA_FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")


def hub_name(text: str | None) -> str | None:
    """Returns the text without its revision if it can be a name on the hub and is not a local path; else None.

    >>> hub_name("Qwen/Qwen3-0.6B"), hub_name("train.jsonl"), hub_name("/tmp"), hub_name("my.data:rows")
    ('Qwen/Qwen3-0.6B', None, None, None)
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not text or is_ref(text) or text.endswith(DATA_FILES) or text.startswith((".", "/", "~")):
        return None
    name, _ = split_revision(text)
    try:
        validate_repo_id(name)
        return None if Path(text).exists() else name
    except (HFValidationError, OSError):
        return None


def read_card_metadata(path: Path) -> dict[str, Any]:
    """Returns the front matter of a card; {} if there is none that can be read."""
    from huggingface_hub.repocard import metadata_load

    try:
        metadata = metadata_load(path) if path.is_file() else None
    except Exception:  # any content: not UTF-8, not YAML
        return {}
    return dict(metadata) if isinstance(metadata, dict) else {}


def find_base_model(model: str | None) -> str | None:
    """Returns the name of a model on the hub: its own, or that of the base in the card of its folder."""
    if model is None:
        return None
    if (named := hub_name(model)) is not None:
        return named
    base = _card_of(model).get("base_model")
    base = base[0] if isinstance(base, list) and base else base
    return base if isinstance(base, str) else None


def trained_with_chat_template(model: Any) -> bool | None:
    """Returns whether the run that trained a model put plain-text prompts into the chat template.

    Args: model: a run's folder, or a folder in it (final/, start/, a checkpoint).
    Returns: None if the path is not in the folder of a run.
    """
    if not isinstance(model, str | Path):
        return None
    folder = Path(model).expanduser()
    for place in (folder, *list(folder.absolute().parents)[:3]):
        try:
            settings = read_yaml(place / "config.yaml") if (place / "config.yaml").is_file() else {}
        except (ConfigError, OSError):
            continue
        data = settings.get("data")
        if "trainer" in settings and isinstance(data, dict) and isinstance(data.get("apply_chat_template"), bool):
            return data["apply_chat_template"]
    return None


def find_licence(model: str | None) -> dict[str, str]:
    """Returns the licence of a model: license, license_name, license_link, from the card in its folder or in the hub's
    cache.

    Returns: {} if there is no card with a licence.
    """
    from huggingface_hub import try_to_load_from_cache

    if model is None:
        return {}
    name, revision = split_revision(model)
    if hub_name(model) is None:
        return licence_of_card(_card_of(model))
    cached = try_to_load_from_cache(name, "README.md", revision=revision)
    return licence_of_card(read_card_metadata(Path(cached))) if isinstance(cached, str) else {}


def licence_of_card(card: Mapping[str, Any]) -> dict[str, str]:
    """Returns the licence in the front matter of a card."""
    return {name: card[name] for name in LICENCE_KEYS if isinstance(card.get(name), str)}


def _card_of(folder: str) -> dict[str, Any]:
    """Returns the front matter of a folder's first card that has one."""
    for name in CARDS:
        if metadata := read_card_metadata(Path(folder).expanduser() / name):
            return metadata
    return {}
