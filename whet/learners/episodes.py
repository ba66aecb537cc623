"""Episodes of several turns, as a learner has them: rollout.env_path and rollout.max_turns."""

from __future__ import annotations

from whet.cluster import RLCluster
from whet.config import Mode
from whet.data.prompts import PromptEncoder
from whet.envs import Conversation, Script, load_script
from whet.models.modes import max_positions
from whet.rollout.policy_rollouts import Play

__all__ = ["environment_of", "turns_of"]


def environment_of(cluster: RLCluster) -> Script | None:
    """The environment of training, checked for evaluation too; None = there is none.

    Raises: ConfigError: it can't be loaded, or can't answer.
    """
    found = None
    for mode in (Mode.EVAL, Mode.TRAIN):
        config = cluster.rollout_for(mode)
        found = None if config.env_path is None else load_script(config.env_path, turns=config.max_turns)
    return found


def turns_of(cluster: RLCluster, mode: Mode, encode: PromptEncoder) -> Play | None:
    """What an episode of a mode plays; None = one completion. Args: encode: of the mode's prompts."""
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
