"""Agents: GRPOTrainer's arguments for completions of more than one turn.

tools, environment_factory      whet.envs.ToolEpisodes runs the episodes on the engine
rollout_func(prompts, trainer)  generates the completions itself
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from whet.config import Mode
from whet.envs.multi_turn import PROMPT
from whet.envs.tool_calls import ToolTemplate
from whet.envs.tool_episodes import ToolEpisodes
from whet.envs.tools import ToolLimits, Tools
from whet.errors import ConfigError, DataError
from whet.models.modes import max_positions
from whet.rollout.driver import Episode
from whet.rollout.policy_rollouts import EpisodeRunner
from whet.trl.agents.environments import Environments
from whet.types import Completion, Group, Prompt

__all__ = ["Agents", "completion_prompts"]

_REQUIRED_KEYS = ("completion_ids", "logprobs", "prompt_ids")


class Agents:
    """The tools, the environments, or the rollout_func of a trainer.

    Args: tools, environment_factory, rollout_func: GRPOTrainer's arguments; `tools` may also be Tools, whose limits
        then hold for an environment's methods too. tokenizer: the model's. args: the trainer's arguments.
    Raises: ConfigError: a rollout_func together with tools or an environment_factory.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]] | Tools | None,
        environment_factory: Any,
        rollout_func: Callable[..., Any] | None,
        tokenizer: Any,
        args: Any,
    ) -> None:
        limits = tools.limits if isinstance(tools, Tools) else ToolLimits()
        own = [*(tools or ())]
        has_tools = bool(own) or environment_factory is not None
        if rollout_func is not None and has_tools:
            raise ConfigError(
                "rollout_func generates the completions itself, but tools and environment_factory need whet to "
                "generate them; give one of them"
            )
        self.rollout_func, self.tokenizer, self.args = rollout_func, tokenizer, args
        self.tools = Tools(own, limits=limits) if has_tools else None
        self.environments = None if environment_factory is None else Environments(environment_factory, own, limits)
        self.episodes: ToolEpisodes | None = None
        self.columns: dict[str, list[Any]] = {}
        """Further columns for the reward functions from the last rollout_func: a value for each completion."""

    @property
    def has_tools(self) -> bool:
        """Whether completions are episodes with tools."""
        return self.tools is not None

    @property
    def schemas(self) -> tuple[Any, ...]:
        """The tools' schemas for every row's prompt; environments add theirs when they are reset."""
        return () if self.tools is None or self.environments is not None else tuple(self.tools.schemas)

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """The functions that the model may call: the tools, and the environment's methods if there is only one kind."""
        own = [] if self.environments is None else self.environments.functions
        return own or ([] if self.tools is None else list(self.tools.functions.values()))

    @property
    def rewards(self) -> list[Callable[..., Any]]:
        """The reward functions of environments."""
        return [] if self.environments is None else self.environments.rewards

    def attach(self, cluster: Any, options: Mapping[str, Any]) -> None:
        """Prepares the episodes with tools. Args: cluster: the models. options: chat_template_kwargs.

        Raises: ConfigError: a chat template that does not render tools.
        """
        if self.has_tools:
            self.episodes = ToolEpisodes(
                ToolTemplate(self.tokenizer, options, cluster.eos_ids),
                max_tokens=self.args.max_completion_length,
                max_length=max_positions(cluster.actor.module),
                max_rounds=self.args.max_tool_calling_iterations,
            )

    # ---- rollouts ------------------------------------------------------------------------------------------------

    def start_episodes(
        self, learner: Any, prompts: Sequence[Prompt], number: int, mode: Mode, first: int
    ) -> tuple[Sequence[Prompt], EpisodeRunner | None]:
        """Resets environments. Args: number: completions of a prompt. first: the index of the first prompt in its step.

        Returns: the prompts, and the generator function of an episode; None = a single completion.
        """
        if self.episodes is None or self.tools is None:
            return prompts, None
        episodes, tools = self.episodes, self.tools
        if self.environments is None:
            return prompts, partial(episodes.run_episode, start=lambda episode: (episode.prompt, tools))
        started = self.environments.reset(prompts, number, lambda schemas: learner.encoder_with(mode, schemas))

        def start(episode: Episode) -> tuple[Prompt, Tools]:
            return started[(episode.rng_key[2] - first) * number + episode.generation]

        return [started[i * number][0] for i in range(len(prompts))], partial(episodes.run_episode, start=start)

    def call_rollout_func(
        self, trainer: Any, prompts: Sequence[Prompt], number: int, end_ids: Sequence[int]
    ) -> list[Group]:
        """Calls rollout_func with each prompt repeated for each of its completions. Returns: the groups.

        Raises: DataError: rollout_func returned another form than TRL's.
        """
        assert self.rollout_func is not None
        copies = [copy.deepcopy(p.source) for p in prompts for _ in range(number)]
        with trainer.attention.native():
            output = self.rollout_func(copies, trainer)
        missing = [name for name in _REQUIRED_KEYS if name not in output]
        if missing:
            raise DataError(f"rollout_func must return keys {missing} in its output dict.")
        masks = output.get("env_mask")
        rows = {name: output[name] for name in _REQUIRED_KEYS} | ({} if masks is None else {"env_mask": masks})
        for name, values in rows.items():
            if len(values) != len(copies):
                raise DataError(
                    f"rollout_func returned {len(values)} {name} for {len(copies)} prompts; the list of prompts has "
                    f"each prompt {number} times, so return one value for each entry"
                )
        known = (*_REQUIRED_KEYS, "env_mask")
        self.columns = {n: _column(v, len(copies)) for n, v in output.items() if n not in known}
        version = trainer.worker.version
        completions = [self._completion(rows, i, i % number, end_ids, version) for i in range(len(copies))]
        return [self._group(p, completions[i * number : (i + 1) * number]) for i, p in enumerate(prompts)]

    def _completion(
        self, rows: Mapping[str, Any], i: int, generation: int, end_ids: Sequence[int], version: int
    ) -> Completion:
        tokens = np.asarray(rows["completion_ids"][i], np.int32)
        logprobs = [math.nan if x is None else float(x) for x in rows["logprobs"][i]]  # None = unknown
        mask = np.ones(len(tokens), bool) if "env_mask" not in rows else np.asarray(rows["env_mask"][i], bool)
        if not len(tokens) == len(logprobs) == len(mask) or not mask.any():
            raise DataError(
                f"rollout_func, completion {i}: {len(tokens)} completion_ids, {len(logprobs)} logprobs, {len(mask)} "
                f"values of env_mask, {int(mask.sum())} of them 1; return a value for each token, and env_mask = 1 for "
                "at least one token"
            )
        ends = {*end_ids, self.tokenizer.pad_token_id}
        return Completion(
            tokens=tokens,
            logprobs=np.asarray(logprobs, np.float32),
            versions=np.where(mask, version, -1).astype(np.int32),
            finish_reason="stop" if int(tokens[-1]) in ends else "length",
            generation=generation,
            prefix=np.asarray(rows["prompt_ids"][i], np.int32),
        )

    def _group(self, prompt: Prompt, completions: Sequence[Completion]) -> Group:
        """Returns a group with its first completion's prompt; a completion with another prompt keeps its prefix."""
        shared = completions[0].prefix
        assert shared is not None
        completions = [
            dataclasses.replace(c, prefix=None) if np.array_equal(c.prefix, shared) else c  # pyright: ignore
            for c in completions
        ]
        return Group(prompt=dataclasses.replace(prompt, tokens=shared), completions=tuple(completions))

    # ---- metrics ------------------------------------------------------------------------------------------

    def take_metrics(self, completions: int) -> dict[str, float]:
        """Returns the metrics of tool calls since the last call. Args: completions: the number of completions."""
        return {} if self.episodes is None else self.episodes.counts.take(completions)


def completion_prompts(groups: Sequence[Group]) -> list[Any]:
    """Returns the prompt of each completion, in order: the environment's prompt, or the group's."""
    return [c.info.get(PROMPT, g.prompt.source) for g in groups for c in g.completions]


def _column(values: Any, count: int) -> list[Any]:
    """Returns a column of rollout_func with a value for each completion; a single value is repeated."""
    if not isinstance(values, list):
        return [values] * count
    return [*values, *[None] * (count - len(values))][:count]
