"""Translates a command of RL2's to the configuration of whet's that does the same.

A key with a counterpart is copied (keys.py). common.py, ppo.py and supervised.py compute the rest, RL2's own defaults
included: those of July 2025, or of the later generation that the command is written for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.config import RunConfig
from whet.config.base import config_from_dict
from whet.config.loader import merge
from whet.rl2 import ppo, supervised
from whet.rl2.common import WhetKeys, translate_models, translate_sizes, translate_trainer
from whet.rl2.messages import vocabulary
from whet.rl2.parsed_args import CONFIGS, ParsedArgs, copied_values, parse_args

__all__ = ["translate_args", "translate_command", "translated_tree"]


def translate_command(trainer: str, words: Sequence[str]) -> Any:
    """Returns the checked configuration of a command.

    Args: trainer: ppo, sft, rm or dpo. words: as RL2 takes them; whet.<key> sets a key of whet's and wins.
    Raises: ConfigError: all problems at once, a line each.

    >>> config = translate_command("ppo", ["actor.model_name=m", "data.path=d.jsonl", "data.prompts_per_rollout=8",
    ...     "rollout.env_path=env.py", "rollout.train_sampling_params.max_new_tokens=16"])
    >>> config.algo.advantage_estimator, config.rollout.eval["temperature"], config.reward_names
    ('reinforce', 0.0, ('env.py:reward_fn',))
    """
    return translate_args(parse_args(trainer, words))


def translate_args(args: ParsedArgs) -> Any:
    """Returns the checked configuration of parsed arguments. Raises ConfigError: as `translate_command` does."""
    kind, tree = translated_tree(args)
    with vocabulary(args).translating():
        return config_from_dict(kind, merge(tree, args.whet_keys))


def translated_tree(args: ParsedArgs) -> tuple[type, dict[str, Any]]:
    """Returns the class of the configuration and its tree, without the keys given as whet.<key>."""
    args.collect_refused()
    sizes = translate_sizes(args)
    args.raise_problems()
    flat = copied_values(args) | sizes
    for translate in _TRANSLATIONS[args.trainer]:
        flat |= translate(args)
    args.raise_problems()
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        node: Any = value
        for part in reversed(key.split(".")):
            node = {part: node}
        tree = merge(tree, node)
    without_critic = args.trainer == "ppo" and args.get("adv.estimator") != "gae"
    return RunConfig if without_critic else CONFIGS[args.trainer], tree


_TRANSLATIONS: Mapping[str, Sequence[Callable[[ParsedArgs], WhetKeys]]] = {
    "ppo": (translate_models, *ppo.TRANSLATIONS, translate_trainer),
    "sft": (translate_models, supervised.translate_data, supervised.translate_averaging, translate_trainer),
    "rm": (translate_models, supervised.translate_data, translate_trainer),
    "dpo": (translate_models, supervised.translate_data, translate_trainer),
}
"""Trainer -> the functions that compute the keys of its configuration."""
