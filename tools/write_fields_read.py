"""Writes whet/config/algo/fields_read.py from the signatures of the functions: python -m tools.write_fields_read."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from whet.config import PPOConfig, PreferenceConfig, RewardModelConfig
from whet.config.introspection import choices
from whet.learners.from_config import fields_read
from whet.learners.preference_from_config import fields_read_by_loss
from whet.ops import (
    ADVANTAGE_ESTIMATORS,
    CORRECTIONS,
    LOSS_AGG_MODES,
    POLICY_LOSSES,
    TOKEN_MASKS,
    VALUE_LOSSES,
    advantages_and_returns,
)
from whet.ops.preference import F_DIVERGENCES, PREFERENCE_LOSSES, REWARD_LOSSES

HEADER = '''"""Which fields of a configuration each function that is chosen by name reads.

Written by `python -m tools.write_fields_read` from the signatures of the functions, which need torch; a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["CRITIC_READS", "POLICY_READS", "PREFERENCE_READS", "REWARD_MODEL_READS", "Readers"]

Readers = Mapping[str, Mapping[str, tuple[str, ...]]]
"""Field that chooses functions -> name -> the fields that this function reads."""
'''

Table = dict[str, dict[str, tuple[str, ...]]]


def tables() -> dict[str, Any]:
    """The tables of the file by their names."""
    policy = {
        "advantage_estimator": ADVANTAGE_ESTIMATORS,
        "policy_loss_fn": POLICY_LOSSES,
        "loss_agg_mode": LOSS_AGG_MODES,
        "loss_masks": TOKEN_MASKS,
        "sampler_is": CORRECTIONS,
        "value_loss_fn": VALUE_LOSSES,
    }
    found = _table(PPOConfig, policy)
    modes = found["loss_agg_mode"].items()
    found["value_loss_agg_mode"] = {name: tuple({*names} & {"loss_agg_units"}) for name, names in modes}
    return {
        "POLICY_READS": found,
        "CRITIC_READS": tuple(sorted(fields_read(advantages_and_returns))),
        "PREFERENCE_READS": {
            **_table(PreferenceConfig, {"loss_type": PREFERENCE_LOSSES}, fields_read_by_loss),
            **_table(PreferenceConfig, {"f_divergence_type": F_DIVERGENCES}),
        },
        "REWARD_MODEL_READS": _table(RewardModelConfig, {"loss_type": REWARD_LOSSES}),
    }


def _table(
    config: type, known: Mapping[str, Mapping[str, Any]], read: Callable[[Any], set[str]] = fields_read
) -> Table:
    """Choice -> name -> fields, the names in the order in which help lists them."""
    names = {f.name for f in fields(config)}
    return {
        choice: {name: tuple(sorted(read(functions[name]) & names)) for name in choices(config, choice)}
        for choice, functions in known.items()
    }


def main() -> None:
    """Writes the file."""
    import whet.config.algo.fields_read as module

    kinds = {name: "tuple[str, ...]" if isinstance(table, tuple) else "Readers" for name, table in tables().items()}
    text = HEADER + "\n" + "\n".join(f"{name}: {kinds[name]} = {table!r}" for name, table in tables().items())
    done = subprocess.run(["ruff", "format", "-"], input=text, capture_output=True, text=True, check=True)
    Path(module.__file__).write_text(done.stdout)


if __name__ == "__main__":
    main()
