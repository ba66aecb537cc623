"""AgenticGRPOLearner: GRPO over the episodes of agents and environments, on whet's loop."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from whet.cluster import RLCluster as CoreCluster
from whet.config import Mode
from whet.data.prompts import PromptEncoder
from whet.envs.environment import ENVIRONMENT_REWARD
from whet.envs.recorded import RecordedAnswers
from whet.errors import ConfigError
from whet.learners.episodes import longest_sequence
from whet.rollout.driver import Episode
from whet.rollout.policy_rollouts import EpisodeRunner
from whet.serve.run_model import RunModel
from whet.tunix.agentic.agents import ModelAgent
from whet.tunix.agentic.collect import ChatTemplateParser, message_texts
from whet.tunix.agentic.config import AgenticGRPOConfig
from whet.tunix.agentic.environments import TaskEnvironment
from whet.tunix.agentic.episodes import AgenticEpisodes
from whet.tunix.configs import core_config
from whet.tunix.learners import GRPOLearner

__all__ = ["AgenticGRPOLearner"]

_REFUSED = {
    "_batch_to_train_example": "examples are made of whole steps",
    "_build_orchestrator": "the driver of rollouts runs all episodes (whet.rollout.driver)",
    "_model_call": "an agent's messages go to the engine as they are; chat_parser writes them",
    "_orchestrator_producer": "there is no queue that examples are put into",
    "_process_results": "rewards and advantages are stages: reward, batch, score, assign_advantages",
    "_producer": "there is no queue that examples are put into",
}
"""Methods of Tunix's learner that a subclass may not replace, and why."""


class AgenticGRPOLearner(GRPOLearner):
    """Trains the actor by GRPO on the episodes of agents and environments.

    Args:
        rl_engine: or rl_cluster.
        algo_config: an AgenticGRPOConfig.
        reward_fns: receive the last turn of each episode as its completion, besides the reward of the environment;
            None = that alone.
        chat_parser: writes the messages by its method `parse`; None = the tokenizer's chat template.
        metric_fns: as in GRPOLearner; completions are the last turns.
        agent_class, agent_kwargs: the agent of each episode; system_prompt is that of algo_config unless named.
        env_class, env_kwargs: its environment: env_class(row, group_id=, pair_index=, **env_kwargs).
        options: of GRPOLearner: data, data_shuffle_seed and others.

    The row has the columns of the data and the prompt as "prompts", numbers and texts as NumPy's scalars. A subclass
    may replace `_create_agent_env_pair`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raises ConfigError for a subclass that replaces a method that is never called."""
        for name, reason in _REFUSED.items():
            if name in vars(cls):
                raise ConfigError(
                    f"{cls.__name__}.{name} would never be called: {reason}; replace _create_agent_env_pair, or a "
                    "stage of whet's (docs/extending.md)"
                )
        super().__init_subclass__(**kwargs)

    def __init__(
        self,
        rl_engine: Any = None,
        algo_config: Any = None,
        reward_fns: Any = None,
        chat_parser: Any = None,
        metric_fns: Sequence[Callable[..., Any]] | None = None,
        agent_class: type = ModelAgent,
        agent_kwargs: Mapping[str, Any] | None = None,
        env_class: type = TaskEnvironment,
        env_kwargs: Mapping[str, Any] | None = None,
        *,
        rl_cluster: Any = None,
        **options: Any,
    ) -> None:
        config = AgenticGRPOConfig() if algo_config is None else algo_config
        if not isinstance(config, AgenticGRPOConfig):
            raise ConfigError(f"algo_config is a {type(config).__name__}; AgenticGRPOLearner takes AgenticGRPOConfig")
        self.agentic_config, self.chat_parser = config, chat_parser
        self.agent_class, self.agent_kwargs = agent_class, dict(agent_kwargs or {})
        self.env_class, self.env_kwargs = env_class, dict(env_kwargs or {})
        for name in ("group_id", "pair_index"):
            if name in self.env_kwargs:
                raise ConfigError(f"env_kwargs has {name!r}, which the learner sets for each episode; leave it out")
        if chat_parser is not None and not callable(getattr(chat_parser, "parse", None)):
            raise ConfigError(f"chat_parser is a {type(chat_parser).__name__} without parse(messages=...); write it")
        core: Any = core_config(config)
        core = dataclasses.replace(core, mask_truncated_completions=config.overlong_filter)
        metric_fns = [_with_last_turns(fn) for fn in metric_fns or ()]
        super().__init__(rl_cluster, core, reward_fns, metric_fns, rl_engine=rl_engine, **options)
        rollout = self.cluster.rollout_for()
        if rollout.env_path is not None or rollout.agent is not None:
            raise ConfigError(
                "AgenticGRPOLearner has env_class and agent_class, and the rollout configuration names "
                "env_path or agent besides; leave those out, or take GRPOLearner for them"
            )

    @property
    def episode_reward(self) -> str | None:
        """The name of the reward that the environments give."""
        return ENVIRONMENT_REWARD

    def set_reward_fns(self, reward_fns: Any) -> None:
        """Takes the reward functions; each is given the last turn of an episode as its completion."""
        fns = reward_fns if isinstance(reward_fns, list | tuple) else [] if reward_fns is None else [reward_fns]
        super().set_reward_fns([_with_last_turns(fn) if callable(fn) else fn for fn in fns] or None)

    def encoder(self, mode: Mode) -> PromptEncoder:
        """Returns the encoder of a mode. A prompt may be empty: the agent writes the conversation."""
        encode = super().encoder(mode)
        encode.empty_ids = list(self.cluster.eos_ids)[:1]
        return encode

    def episode_runner(self, mode: Mode) -> EpisodeRunner | None:
        """Returns the generator function of a mode's episodes."""
        if mode not in self._episode_runners:
            c, folder = self.agentic_config, self.cluster.rollout_for(mode).answers_dir
            episodes = AgenticEpisodes(
                self._start,
                _policy_model(self.cluster, mode, self.chat_parser),
                self.failures,
                answers=None if folder is None else RecordedAnswers(folder),
                gamma=c.gamma,
                max_response_length=c.max_response_length,
                timeout=c.episode_timeout,
                filter_statuses=c.filter_statuses,
                overlong_filter=c.overlong_filter,
            )
            self._episode_runners[mode] = episodes.run_episode
        return self._episode_runners[mode]

    def _start(self, episode: Episode) -> tuple[Any, Any]:
        """Returns an agent and an environment for an episode."""
        prompt = episode.prompt
        row = {name: _scalar(value) for name, value in {**prompt.columns, "prompts": prompt.source}.items()}
        return self._create_agent_env_pair(row, group_id=prompt.row, pair_index=episode.generation)

    def _create_agent_env_pair(self, single_example: dict[str, Any], group_id: int, pair_index: int) -> tuple[Any, Any]:
        """Returns the agent and the environment of an episode.

        Args: single_example: the row. group_id: its number. pair_index: the generation.
        """
        agent = self.agent_class(**{"system_prompt": self.agentic_config.system_prompt, **self.agent_kwargs})
        ids = {"group_id": group_id, "pair_index": pair_index}
        return agent, self.env_class(single_example, **{**ids, **self.env_kwargs})


class _ParserModel(RunModel):
    """The policy, whose messages a chat parser of the user's writes."""

    parser: Any = None

    def render(self, messages: Any, tools: Any, options: Any, *, asks: bool) -> str:
        """Returns the text of a conversation. Args: asks: with the header of the assistant's turn."""
        return self.parser.parse(messages=messages, add_generation_prompt=asks, is_first_msg=True)


def _policy_model(cluster: CoreCluster, mode: Mode, parser: Any) -> RunModel:
    """Returns the policy of a mode's episodes. Args: parser: of the user's; None = the tokenizer's chat template."""
    rollout = cluster.rollout_for(mode)
    options = dict(rollout.chat_template_kwargs or {})
    own = isinstance(parser, ChatTemplateParser) or parser is None
    if own and parser is not None:
        options["enable_thinking"] = parser.enable_thinking
    model = (RunModel if own else _ParserModel)(
        cluster.tokenizer,
        cluster.eos_ids,
        name="policy",
        longest=longest_sequence(cluster, mode),
        chat_template_kwargs=options,
    )
    if isinstance(model, _ParserModel):
        model.parser = parser
    return model


def _scalar(value: Any) -> Any:
    """Returns a number or a text as a NumPy scalar, which has `item` like Tunix's arrays; others as copies."""
    return np.array([value])[0] if isinstance(value, str | int | float | bool) else copy.deepcopy(value)


def _with_last_turns(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that is given the last turn of the model in place of an episode's messages."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "completions" in kwargs:
            kwargs["completions"] = [_last_turn(completion) for completion in kwargs["completions"]]
        return fn(*args, **kwargs)

    return call


def _last_turn(completion: Any) -> Any:
    if not isinstance(completion, list):
        return completion
    turns = [message for message in message_texts(completion) if message["role"] == "assistant"]
    return turns[-1]["content"] if turns else ""
