"""Episodes of several turns, as a learner has them: rollout.env_path and rollout.max_turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whet.config import Mode
from whet.envs import Conversation, Script, load_script
from whet.models.modes import max_positions
from whet.rollout.policy import Play

if TYPE_CHECKING:
    from whet.cluster import RLCluster
    from whet.learners.base import RLLearner

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


def turns_of(learner: RLLearner, mode: Mode) -> Play | None:
    """What an episode of a mode plays; None = one completion."""
    config = learner.cluster.rollout_for(mode)
    if config.max_turns == 1:
        return None
    return Conversation(
        load_script(config.env_path, turns=config.max_turns),
        learner.encoder(mode),
        turns=config.max_turns,
        tokens=config.most_tokens,
        positions=max_positions(learner.cluster.actor.module),
        timeout_s=learner.config.reward_timeout_s,
        on_error=learner.config.on_reward_error,
    ).play
