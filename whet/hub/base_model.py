"""What a model comes from: the hub's name of its base, its licence, and how the run that made it wrote prompts, as far
as the files here tell.

Left out on purpose: guesses. A folder that says nothing has no base and no licence.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.config import read_yaml
from whet.errors import ConfigError
from whet.util.model_paths import split_revision
from whet.util.references import is_ref

__all__ = ["LICENCE", "find_base_model", "find_licence", "hub_name", "read_card_metadata", "trained_with_chat_template"]

LICENCE = ("license", "license_name", "license_link")
"""Keys of a card that say the licence."""
CARDS = ("README.md", "model_card.md", "../README.md", "../model_card.md")
"""Where the card of a model's folder may lie: final/ of a run has it one above."""
DATA_FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")


def hub_name(text: str | None) -> str | None:
    """The text without its revision, if it can be a name on the hub and is nothing here; else None.

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
    """The front matter of a card; {} where there is none that can be read."""
    from huggingface_hub.repocard import metadata_load

    try:
        found = metadata_load(path) if path.is_file() else None
    except Exception:  # a file of anybody's: not UTF-8, not YAML
        return {}
    return dict(found) if isinstance(found, dict) else {}


def find_base_model(model: str | None) -> str | None:
    """The hub's name of a model: its own, or of the base that the card in its folder names."""
    if model is None:
        return None
    if (named := hub_name(model)) is not None:
        return named
    base = _card_of(model).get("base_model")
    base = base[0] if isinstance(base, list) and base else base
    return base if isinstance(base, str) else None


def trained_with_chat_template(model: Any) -> bool | None:
    """Whether the run in whose folder a model lies put plain-text prompts into the chat template.

    Args: model: a run's folder, or one inside it (final/, start/, a checkpoint); anything else is of no run.
    Returns: None where no run here says it.
    """
    if not isinstance(model, str | Path):
        return None
    folder = Path(model).expanduser()
    for place in (folder, *list(folder.absolute().parents)[:3]):
        try:
            found = read_yaml(place / "config.yaml") if (place / "config.yaml").is_file() else {}
        except (ConfigError, OSError):
            continue
        data = found.get("data")
        if "trainer" in found and isinstance(data, dict) and isinstance(data.get("apply_chat_template"), bool):
            return data["apply_chat_template"]
    return None


def find_licence(model: str | None) -> dict[str, str]:
    """The licence of a model, from the card in its folder or in the hub's cache: license, license_name, license_link.

    Returns: {} where neither says it.
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
    """The licence that the front matter of a card says."""
    return {name: card[name] for name in LICENCE if isinstance(card.get(name), str)}


def _card_of(folder: str) -> dict[str, Any]:
    """The front matter of the first card of a folder that has any."""
    for name in CARDS:
        if found := read_card_metadata(Path(folder).expanduser() / name):
            return found
    return {}
