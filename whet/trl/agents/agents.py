"""Agents: GRPOTrainer's arguments for completions of more than one turn.

tools, environment_factory      whet.envs.ToolEpisodes runs the episodes on the engine
rollout_func(prompts, trainer)  generates the completions itself
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from whet.config import Mode
from whet.envs.multi_turn import PROMPT
from whet.envs.recorded import DivergedError, RecordedAnswers, RngKey, Tape
from whet.envs.tool_calls import ToolTemplate
from whet.envs.tool_episodes import ToolEpisodes
from whet.envs.tools import ToolLimits, Tools
from whet.errors import ConfigError, DataError
from whet.models.modes import max_positions
from whet.rewards.call import CallResults
from whet.rollout.driver import Episode, GroupKey
from whet.rollout.policy_rollouts import EpisodeRunner
from whet.trl.agents.environments import Environments
from whet.types import Completion, Group, Prompt

__all__ = ["Agents", "completion_prompts"]

NO_IDS = np.zeros(0, np.int32)
"""The context of a recorded reward: the episode has ended."""
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
        self.answers = None if args.answers_dir is None else RecordedAnswers(args.answers_dir)
        if self.answers is not None and not has_tools:
            raise ConfigError(
                f"answers_dir={args.answers_dir!r} records what tools and environments answer, and there are none; "
                "give tools or environment_factory, or leave it out"
            )
        self._records: list[tuple[RngKey, Prompt, Tape]] = []
        """Of each completion of the last rollout: its key, its row's prompt and its recorded answers."""
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
        self, learner: Any, prompts: Sequence[Prompt], number: int, mode: Mode, key: GroupKey, *, replays: bool = True
    ) -> tuple[Sequence[Prompt], EpisodeRunner | None]:
        """Resets environments.

        Args: number: completions of a prompt. key: of the first prompt. replays: answer from records if all
            completions have one.
        Returns: the prompts, and the generator function of an episode; None = a single completion.
        """
        if self.episodes is None or self.tools is None:
            return prompts, None
        if not replays:
            self.episodes.counts.take(1)  # of episodes that a record has answered until one differed
        seed, step, first = key
        keys = [((seed, step, first + i, g), prompt) for i, prompt in enumerate(prompts) for g in range(number)]
        self._records = [] if self.answers is None else self._find_records(self.answers, keys, replays)
        tapes = [tape for _, _, tape in self._records]
        started = [(prompt, self.tools) for _, prompt in keys]
        if self.environments is not None:
            encoder = lambda schemas: learner.encoder_with(mode, schemas)
            started = self.environments.reset(prompts, number, encoder, tapes)

        def start(episode: Episode) -> tuple[Prompt, Tools, Tape | None]:
            place = (episode.rng_key[2] - first) * number + episode.generation
            return (*started[place], tapes[place] if tapes else None)

        run = partial(self.episodes.run_episode, start=start)
        return [started[i * number][0] for i in range(len(prompts))], run

    def _find_records(
        self, answers: RecordedAnswers, keys: Sequence[tuple[RngKey, Prompt]], replays: bool
    ) -> list[tuple[RngKey, Prompt, Tape]]:
        """Returns the records of all completions, or empty ones."""
        found = [answers.find(key, prompt) if replays else None for key, prompt in keys]
        tapes = [tape for tape in found if tape is not None]
        if len(tapes) < len(keys):
            tapes = [Tape(replays=False) for _ in keys]
        return [(key, prompt, tape) for (key, prompt), tape in zip(keys, tapes, strict=True)]

    def record_rewards(
        self, functions: Mapping[str, Callable[..., Any]], call: Callable[[Sequence[str]], CallResults]
    ) -> CallResults:
        """Returns the rewards of a rollout, of records where the functions read environments, and writes new records.

        Args: functions: all reward functions. call: calls those of some names.
        Raises: ConfigError: a record has other functions that read environments.
        """
        if self.answers is None:
            return call(list(functions))
        if not self._records[0][2].replays:
            results = call(list(functions))
            for j, (key, prompt, tape) in enumerate(self._records):
                for name in filter(lambda name: _reads_environments(functions[name]), functions):
                    tape.add(f"reward {name}", NO_IDS, float(results.rewards[name][j]))
                self.answers.write(key, prompt, tape)
            return results
        results = call([name for name in functions if not _reads_environments(functions[name])])
        recorded = dict(results.rewards)
        try:
            for name in filter(lambda name: _reads_environments(functions[name]), functions):
                recorded[name] = np.array([tape.next(f"reward {name}", NO_IDS) for _, _, tape in self._records])
        except DivergedError as error:
            raise ConfigError(
                f"answers_dir={str(self.answers.folder)!r} has no {error.args[0]}, which reads the environments; "
                "give the reward functions of the recorded run, or another folder"
            ) from error
        return results._replace(rewards={name: recorded[name] for name in functions})

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


def _reads_environments(function: Callable[..., Any]) -> bool:
    """Returns whether a reward function names the keyword `environments`."""
    try:
        return "environments" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin has no signature
        return False


def _column(values: Any, count: int) -> list[Any]:
    """Returns a column of rollout_func with a value for each completion; a single value is repeated."""
    if not isinstance(values, list):
        return [values] * count
    return [*values, *[None] * (count - len(values))][:count]
