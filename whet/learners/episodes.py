"""Episodes of several turns, from rollout.env_path and rollout.max_turns."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from whet.cluster import RLCluster
from whet.config import Mode
from whet.data.prompts import PromptEncoder
from whet.envs import Conversation, Script, load_script
from whet.envs.agent import load_agent
from whet.envs.failures import EpisodeFailures
from whet.models.modes import max_positions
from whet.rollout.policy_rollouts import EpisodeRunner

if TYPE_CHECKING:
    from whet.serve.agent_episodes import AgentEpisodes

__all__ = ["load_environments", "longest_sequence", "make_agent_episodes", "make_episode_runner"]

log = logging.getLogger("whet")


def load_environments(cluster: RLCluster) -> dict[Mode, Script | None]:
    """Loads the environments of training and of evaluation; checks the agents.

    Returns: the environment of each mode; None = there is none.
    Raises: ConfigError: a file can't be loaded, or has no function that answers; an agent can't be called.
    """
    scripts: dict[Mode, Script | None] = {}
    for mode in (Mode.TRAIN, Mode.EVAL):
        config = cluster.rollout_for(mode)
        if config.agent is not None:
            load_agent(config.agent)
        script = None if config.env_path is None else load_script(config.env_path, turns=config.max_turns)
        if script is not None and script.environment is not None:
            script.environment.check_lifetime(config.episode_timeout_s)
        scripts[mode] = script
        if script is None or mode is not Mode.TRAIN or config.max_turns > 1:
            continue
        if script.interact if script.environment is None else script.environment.has_step:
            log.info(
                "rollout.max_turns=1: an episode is one turn, so the model reads no answer of the environment %s; "
                "rollout.max_turns=4 gives it more turns",
                script.name,
            )
    return scripts


def make_episode_runner(
    cluster: RLCluster, mode: Mode, encode: PromptEncoder, failures: EpisodeFailures
) -> EpisodeRunner | None:
    """Makes the generator function of a mode's episodes; None = one completion each.

    Args: encode: the mode's encoder. failures: of the run's episodes.
    """
    config = cluster.rollout_for(mode)
    if not config.has_turns:
        return None
    longest = longest_sequence(cluster, mode)
    conversation = Conversation.from_config(
        config, encode, end_ids=cluster.eos_ids, max_length=longest, failures=failures
    )
    return conversation.run_episode


def make_agent_episodes(
    cluster: RLCluster, mode: Mode, encode: PromptEncoder, failures: EpisodeFailures
) -> AgentEpisodes:
    """Makes the episodes of rollout.agent, with the server that its agents call.

    Args: encode: the mode's encoder; calls have its system prompt and chat template. failures: of the run's episodes.
    Raises: ConfigError: the agent can't be found or called.
    """
    from whet.serve.agent_episodes import AgentEpisodes  # with the server, which other runs do without

    return AgentEpisodes.from_config(
        cluster.rollout_for(mode),
        cluster.tokenizer,
        eos_ids=cluster.eos_ids,
        longest=longest_sequence(cluster, mode),
        system_prompt=encode.system_prompt,
        failures=failures,
    )


def longest_sequence(cluster: RLCluster, mode: Mode) -> int | None:
    """Returns the most tokens of a sequence: what the model has positions for, and in training what a pass holds."""
    bounds = [max_positions(cluster.actor.module)]
    if mode is Mode.TRAIN:
        bounds.append(cluster.training_config.max_tokens_per_microbatch)
    return min((bound for bound in bounds if bound is not None), default=None)
