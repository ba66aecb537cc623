"""Episodes of several turns, from rollout.env_path and rollout.max_turns."""

from __future__ import annotations

from whet.cluster import RLCluster
from whet.config import Mode
from whet.data.prompts import PromptEncoder
from whet.envs import Conversation, Script, load_script
from whet.models.modes import max_positions
from whet.rollout.policy_rollouts import Play

__all__ = ["load_environment", "make_play"]


def load_environment(cluster: RLCluster) -> Script | None:
    """Loads the environment of training, and checks that of evaluation. Returns: None where there is none.

    Raises: ConfigError: a file can't be loaded, or has no function that answers.
    """
    scripts = {}
    for mode in (Mode.TRAIN, Mode.EVAL):
        config = cluster.rollout_for(mode)
        scripts[mode] = None if config.env_path is None else load_script(config.env_path, turns=config.max_turns)
    return scripts[Mode.TRAIN]


def make_play(cluster: RLCluster, mode: Mode, encode: PromptEncoder) -> Play | None:
    """Makes the generator of a mode's episodes; None = one completion each. Args: encode: the mode's encoder."""
    config, training = cluster.rollout_for(mode), cluster.training_config
    if config.max_turns == 1:
        return None
    bounds = [max_positions(cluster.actor.module)]
    if mode is Mode.TRAIN:
        bounds.append(training.max_tokens_per_microbatch)
    return Conversation(
        load_script(config.env_path, turns=config.max_turns),
        encode,
        max_turns=config.max_turns,
        max_tokens=config.most_tokens,
        max_length=min((bound for bound in bounds if bound is not None), default=None),
        timeout_s=training.reward_timeout_s,
        on_error=training.on_reward_error,
    ).play
