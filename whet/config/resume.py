"""The configuration of a resumed run: keys that are not given now come from the run's config_full.yaml.

So neither a forgotten key nor a default that a new release has changed alters the run. run/provenance.py compares the
keys that are given with the checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from whet.config.base import config_from_dict, partial_config_from_dict
from whet.config.introspection import section_at
from whet.config.loader import dump_tree, flatten, parse_config_args, read_yaml
from whet.errors import ConfigError
from whet.util.references import check_access

__all__ = ["FULL_CONFIG_FILE", "command_of", "load_partial", "load_resumable", "non_default_run_values"]

T = TypeVar("T")

FULL_CONFIG_FILE = "config_full.yaml"
"""The file of a run folder with every key of its configuration."""
MINIMAL_CONFIG_FILE = "config.yaml"
"""The file of a run folder with the keys that were set or have an effect. It is read if the other one is missing."""
_RESUME_KEYS = ("trainer.allow_config_change", "trainer.resume", "trainer.run_dir")
"""Keys about the resume itself, which are never taken from the run."""


def load_resumable(cls: type[T], argv: Sequence[str], short: Mapping[str, str]) -> T:
    """Returns a checked configuration from command-line arguments; with trainer.resume=latest, over the run's
    configuration.

    Args: cls: of a run's configuration. argv, short: see `loader.parse_config_args`.
    Raises: ConfigError: every problem at once, a line each.
    """
    return config_from_dict(cls, _with_run(cls, argv, short), short=short)


def load_partial(cls: type[T], argv: Sequence[str], short: Mapping[str, str]) -> tuple[T | None, frozenset[str]]:
    """As load_resumable, without the keys that are refused: see `base.partial_config_from_dict`."""
    return partial_config_from_dict(cls, _with_run(cls, argv, short))


def non_default_run_values(cls: type, argv: Sequence[str], short: Mapping[str, str]) -> dict[str, tuple[Any, Any]]:
    """Returns the values of a resumed run that differ from this release's defaults: key -> (value, default)."""
    arguments, kept = parse_config_args(argv, short, cls), {}
    _fill_from_run(cls, arguments, _run_settings(cls, arguments), "", kept)
    return kept


def _with_run(cls: type, argv: Sequence[str], short: Mapping[str, str]) -> dict[str, Any]:
    """Returns the given keys, over those of the run."""
    arguments = parse_config_args(argv, short, cls)
    return _fill_from_run(cls, arguments, _run_settings(cls, arguments), "", {})


def command_of(settings: Mapping[str, Any]) -> str:
    """Returns the command of a configuration, by the keys of its algorithm; "" if they do not show it.

    >>> command_of({"actor": {}, "algo": {"loss_type": "nll"}}), command_of({})
    ('sft', '')
    """
    algo = settings.get("algo")
    algo = algo if isinstance(algo, Mapping) else {}
    if "advantage_estimator" in algo:
        return "ppo" if "gae_lambda" in algo else "grpo"
    if "actor" not in settings and "reward_model" in settings:
        return "rm"
    if "loss_type" not in algo:
        return ""
    return "dpo" if "beta" in algo else "sft"


def _run_settings(cls: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration of the run to resume; {} if there is none. Raises ConfigError: another command started
    it.
    """
    trainer = arguments.get("trainer")
    if not isinstance(trainer, Mapping) or trainer.get("resume") != "latest":
        return {}
    folder = trainer.get("run_dir")
    if not isinstance(folder, str):
        return {}
    check_access(Path(folder) / FULL_CONFIG_FILE)
    whole, brief = (
        read_yaml(f) if (f := Path(folder) / name).is_file() else {} for name in (FULL_CONFIG_FILE, MINIMAL_CONFIG_FILE)
    )
    if (theirs := command_of(whole)) not in ("", own := cls.COMMAND):
        raise ConfigError(
            f"{folder} is a run of whet {theirs}; resume it by that, or give whet {own} another trainer.run_dir"
        )
    if whole:
        _check_unedited(brief, whole, arguments, folder)
    return whole or brief


def _check_unedited(
    brief: Mapping[str, Any], whole: Mapping[str, Any], arguments: Mapping[str, Any], folder: str
) -> None:
    """Raises ConfigError for an edit of config.yaml, which a resume would ignore and overwrite."""
    run, now = flatten(whole), flatten(arguments)
    edited = [
        f"{key} is {value!r} in {folder}/{MINIMAL_CONFIG_FILE}, and {run.get(key)!r} in the run"
        for key, value in flatten(brief).items()
        if key and key not in _RESUME_KEYS and value not in (run.get(key), now.get(key))
    ]
    if edited:
        raise ConfigError(
            f"{'; '.join(edited)}: a resume takes a run's keys from {FULL_CONFIG_FILE} and writes "
            f"{MINIMAL_CONFIG_FILE} again; undo the edit, or give what is to change as key=value, with "
            "trainer.allow_config_change=true"
        )


def _fill_from_run(
    cls: type, arguments: Mapping[str, Any], run: Mapping[str, Any], prefix: str, kept: dict[str, tuple[Any, Any]]
) -> dict[str, Any]:
    """Returns the given keys of a section, and the other keys from the run. A key that this release does not have is
    left out.

    Args: cls: of the section. arguments: its keys now. run: its keys in the run. prefix: of its keys. kept: receives
        the values that were taken from the run and differ from the defaults.
    """
    merged = dict(arguments)
    for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        name, key = field.name, prefix + field.name
        if name not in run or key in _RESUME_KEYS:
            continue
        section, own = section_at(cls, (name,)), merged.get(name, {})
        if section is not None and isinstance(run[name], Mapping) and isinstance(own, Mapping):
            if "preset" not in own:  # which gives every key of its section
                merged[name] = _fill_from_run(section, own, run[name], f"{key}.", kept)
        elif name not in merged:
            merged[name] = run[name]
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            if (usual := dump_tree(default)) != run[name]:
                kept[key] = (run[name], usual)
    return merged
