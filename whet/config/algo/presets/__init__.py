"""Published methods as configurations: `presets.dapo()`, or `algo.preset=dapo` in a file and on the command line.

A preset is a function that returns a configuration. It takes any field as a keyword, which then stands in place of the
preset's. It sets every field that the source's formula has, so that a change of whet's defaults does not change it.
What the configuration of an algorithm does not hold (learning rate, sizes of batches, lengths) is in docs/papers.md,
with where each source states it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from whet.config.algo.policy import GRPOConfig, PolicyConfig
from whet.config.algo.ppo import PPOConfig
from whet.config.algo.presets.libraries import rl2_ppo, rl2_reinforce, trl_grpo, trl_rloo
from whet.config.algo.presets.papers import (
    cispo,
    dapo,
    deepseek_grpo,
    dppo,
    dr_grpo,
    gdpo,
    gmpo,
    gspo,
    luspo,
    opo,
    ppo,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
    sapo,
    scale_rl,
    vespo,
)
from whet.errors import ConfigError, lookup_error

__all__ = [
    "PRESETS",
    "cispo",
    "dapo",
    "deepseek_grpo",
    "dppo",
    "dr_grpo",
    "gdpo",
    "gmpo",
    "gspo",
    "luspo",
    "opo",
    "ppo",
    "preset",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rl2_ppo",
    "rl2_reinforce",
    "rloo",
    "sapo",
    "scale_rl",
    "trl_grpo",
    "trl_rloo",
    "vespo",
]

PRESETS: Mapping[str, Callable[..., PolicyConfig]] = {
    "cispo": cispo,
    "dapo": dapo,
    "deepseek_grpo": deepseek_grpo,
    "dppo": dppo,
    "dr_grpo": dr_grpo,
    "gdpo": gdpo,
    "gmpo": gmpo,
    "gspo": gspo,
    "luspo": luspo,
    "opo": opo,
    "ppo": ppo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
    "rl2_ppo": rl2_ppo,
    "rl2_reinforce": rl2_reinforce,
    "rloo": rloo,
    "sapo": sapo,
    "scale_rl": scale_rl,
    "trl_grpo": trl_grpo,
    "trl_rloo": trl_rloo,
    "vespo": vespo,
}
"""fn(**changes) -> a configuration, by the names that algo.preset takes."""

_COMMANDS: Mapping[type, str] = {GRPOConfig: "whet grpo", PPOConfig: "whet ppo"}
"""The command that trains by a class of configuration."""


def preset(name: Any, wanted: type) -> PolicyConfig:
    """Returns the configuration that a name in algo.preset stands for.

    Args: name: of PRESETS. wanted: the class of the section algo.
    Returns: an instance of it.
    Raises: ConfigError: an unknown name, or a preset of another algorithm.

    >>> preset("dapo", GRPOConfig).epsilon_high
    0.28
    >>> preset("dapoo", GRPOConfig)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    whet.errors.ConfigError: unknown algo.preset 'dapoo'; did you mean dapo or sapo or gdpo? Known: cispo, dapo, ...
    """
    if not isinstance(name, str) or name not in PRESETS:
        raise lookup_error("algo.preset", name, PRESETS)
    config = PRESETS[name]()
    if not issubclass(wanted, type(config)):
        kind = type(config)
        here = next((known for known in _COMMANDS if issubclass(wanted, known)), wanted)
        same = ", ".join(sorted(n for n, function in PRESETS.items() if issubclass(wanted, type(function()))))
        raise ConfigError(
            f"algo.preset={name!r} is a {kind.__name__}, and algo is a {here.__name__} here: train with "
            f"{_COMMANDS[kind]}, or take one of {same}"
        )
    return config
