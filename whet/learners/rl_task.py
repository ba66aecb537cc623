"""RLTask: the part of a run that is reinforcement learning: prompts, evaluation by sampling, completions, warnings."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from whet.config import Mode, Role, dump_tree
from whet.data.lengths import LengthStats, check_prompt_lengths
from whet.data.preview import prompt_lines
from whet.data.prompt_stream import PromptStream
from whet.data.prompts import PromptEncoder
from whet.data.text_parts import decode_ids
from whet.envs.agent import load_agent
from whet.evaluation.sample import describe_sample
from whet.learners.diagnostics import Diagnostics
from whet.learners.learner_task import LearnerTask, check_vocabulary
from whet.learners.step import Step
from whet.learners.step_metrics import completion_columns, evaluation_metrics
from whet.metrics import flat
from whet.models.modes import max_positions
from whet.rewards.manager import RewardManager
from whet.run.run import Run
from whet.train.rehearsal import rehearse
from whet.types import Prompt

if TYPE_CHECKING:
    from whet.learners.base import RLLearner

__all__ = ["RLTask"]

log = logging.getLogger("whet")


class RLTask(LearnerTask):
    """A reinforcement learner's part of its run.

    Args: learner: the run's. eval_ds: rows, batches or a reference to them; None = no evaluation.
    """

    required_state = ("cluster", "diagnostics", "learner")

    def __init__(self, learner: RLLearner, eval_ds: Any = None) -> None:
        super().__init__(learner, learner.cluster, learner.config, eval_ds)
        self.learner, self.cluster = learner, learner.cluster
        self.diagnostics = Diagnostics(
            self.cluster,
            learns_from_rewards=learner.learns_from_rewards,
            bands=learner.config.warn_when,
            templated=learner.data.apply_chat_template,
        )

    # ---- data ----------------------------------------------------------------------------------------------------

    def encoder(self, mode: Mode) -> PromptEncoder:
        """Returns the learner's encoder of a mode."""
        return self.learner.encoder(mode)

    def stream(self, train_ds: Any) -> PromptStream:
        """Returns the training prompts in their order, checked against the rewards. Args, Raises: see LearnerTask."""
        stream, manager = super().stream(train_ds), self.learner.reward_manager
        script = self.learner.environments[Mode.TRAIN]
        if stream.kind == "rows" and script is not None and script.environment is not None:
            script.environment.check_columns(stream.source[0].columns)
        if stream.kind == "rows" and isinstance(manager, RewardManager):
            manager.check(list(stream.source[0].columns))
            manager.check_answers((p.row, p.columns) for p in stream.source)
        self.config.check_batch_sizes(stream.batch_size)
        return stream

    def show_first(self, stream: PromptStream, rows: Any) -> None:
        """Logs the first prompt as the model receives it."""
        if (prompt := self.first_item(stream)) is not None:
            log.info("first prompt, %s", "\n".join(prompt_lines(self.encoder(Mode.TRAIN), prompt)))

    def prepare(self) -> None:
        """Encodes the evaluation data, and checks the answers."""
        is_new = self._evaluated is None
        super().prepare()
        if is_new and self._evaluated and isinstance(manager := self.learner.reward_manager, RewardManager):
            manager.check_answers(((p.row, p.columns) for p in self._evaluated), "evaluation rows")

    def check_fit(self, items: Sequence[Prompt], mode: Mode = Mode.TRAIN) -> None:
        """Raises DataError: a prompt leaves no room for its completion, or has an id that the model does not know."""
        config, actor = self.cluster.rollout_for(mode), self.cluster.actor
        longest = max(items, key=lambda p: len(p.tokens)).row if items else None
        lengths = LengthStats(len(p.tokens) for p in items)
        check_prompt_lengths(lengths, max_positions(actor.module), config.max_tokens_to_generate, row=longest)
        for p in items:
            check_vocabulary(p.row, int(p.tokens.max()), actor.loaded.num_ids)

    def rehearse(self) -> None:
        """Runs the largest update, next to the memory of the cache of a whole rollout in the embedded engine."""
        rollout, positions = self.cluster.rollout_for(Mode.TRAIN), max_positions(self.cluster.actor.module)
        prompt, completion = rollout.max_prompt_length, rollout.most_tokens
        if positions is not None and prompt + completion > positions:
            prompt = min(prompt, max(1, positions - rollout.max_tokens_to_generate))
            completion = max(1, positions - prompt)
        kv_tokens = 0
        if self.cluster.cluster_config.rollout_engine == "embedded":
            learner = self.learner
            rows = (self.config.rollout_micro_batch_size or learner.data.batch_size) * learner.num_generations
            rows = min(rollout.max_batch_size, max(rows, len(self._evaluated or ())))
            kv_tokens = rollout.kv_cache_tokens or rows * (prompt + completion)
        rehearse(self.cluster, prompt, completion, kv_tokens=kv_tokens)

    # ---- settings and inputs ----------------------------------------------------------------------------

    def own_sections(self) -> Mapping[str, Any]:
        """Returns the sections of sampling."""
        return {
            "rollout": self.cluster.rollout_for(Mode.TRAIN),
            "rollout_engine": self.cluster.cluster_config.rollout_engine,
        }

    def extra_settings(self) -> dict[str, Any]:
        """Returns the settings that were given from Python and have no key in the configuration."""
        rollout, evaluation = self.cluster.cluster_config.rollout_config, {}
        if isinstance(rollout, dict):  # else the section has the differences itself, in `eval`
            train, evaluate = (dump_tree(self.cluster.rollout_for(mode)) for mode in (Mode.TRAIN, Mode.EVAL))
            evaluation = {name: value for name, value in evaluate.items() if value != train[name]}
        return {
            "from Python": {
                "data_shuffle_seed": self.learner.data_shuffle_seed,
                "rollout_config[Mode.EVAL]": evaluation,
            }
        }

    def own_functions(self) -> Iterator[tuple[str, Any]]:
        """Yields the functions of rewards, environments, agents, metrics and losses: (description, function)."""
        learner = self.learner
        manager = learner.reward_manager
        if type(manager) is not RewardManager:
            yield "the reward manager", manager
        if isinstance(manager, RewardManager):
            yield from ((f"reward function {name}", fn) for name, fn in manager.fns.items())
        script = learner.environments[Mode.TRAIN]
        if script is not None and script.code is not None:
            yield "the environment", script.code
        if (agent := learner.cluster.rollout_for().agent) is not None:
            yield "the agent", load_agent(agent)
        yield from ((f"metric function {n}", fn) for n, fn in enumerate(learner.metric_fns))
        yield from ((f"the loss of the {role.value}", t.loss) for role, t in learner.cluster.trainers.items())

    def expected_metrics(self) -> tuple[str, ...]:
        """Returns the metrics of rewards: of the total, of each function, and the accuracy."""
        manager = self.learner.reward_manager
        each = [f"rewards/{name}" for name in manager.fns] if isinstance(manager, RewardManager) else []
        return ("reward", "accuracy", "reward_max", "reward_min", *each, *(f"{name}/mean" for name in each))

    def total_updates(self, role: Role, steps: int, batch_size: int) -> int:
        """See RLLearner."""
        return self.learner.total_updates(role, steps, batch_size)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def on_run_begin(self, run: Run) -> None:
        """Lets rollouts see that the run should stop. Of several processes none may stop alone."""
        if run.ranks.size == 1:
            self.cluster.set_should_stop(lambda: run.stop_requested)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Rollouts after the run don't stop."""
        self.cluster.set_should_stop(None)

    def on_step_end(self, run: Run, step: Step) -> None:
        """Stores the completions, logs a sample every show_samples steps, and runs the diagnostics."""
        self._store(run, step)
        every = self.learner.config.show_samples
        if every and step.index % every == 0:
            log.info("%s", describe_sample(step.index, step.rewards))
        self.diagnostics.check(step.index, run.rows[-1], step.rewards, step.batch)

    def progress_fields(self, row: Mapping[str, float]) -> dict[str, str]:
        """Returns the mean length of completions, the share of truncated ones, failed episodes, and the KL if there is
        one.
        """
        known = {
            "len": ("completions/mean_length", ".0f"),
            "truncated": ("completions/clipped_ratio", ".0%"),
            "kl": ("kl", ".2g"),
        }
        shown = {name: (row[metric], form) for name, (metric, form) in known.items() if metric in row}
        fields = {name: f"{value:{form}}" for name, (value, form) in shown.items() if not math.isnan(value)}
        return {**fields, **({"failed": f"{row['turns/failed']:.0f}"} if row.get("turns/failed") else {})}

    def _store(self, run: Run, step: Step) -> None:
        """Stores the completions of a step."""
        decode = functools.partial(decode_ids, self.cluster.tokenizer)
        batch = step.batch if step.has("batch") else None
        run.log_completions(step.index, step.mode, *completion_columns(step.rewards, batch, decode))

    # ---- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self, run: Run, step: int) -> dict[str, float]:
        """Completes and rewards the evaluation prompts as the learner does.

        Returns: the row that is logged: reward, reward_max, reward_min, each function's, lengths.
        """
        learner, cluster = self.learner, self.cluster
        self.prepare()
        prompts = self._evaluated or []
        started = time.monotonic()
        with cluster.trace.span("eval"):
            groups = learner.rollout(prompts, step=step, mode=Mode.EVAL)
            rewarded = learner.reward(Step(index=step, prompts=prompts, groups=groups, mode=Mode.EVAL))
        row = {
            **flat(evaluation_metrics(rewarded.rewards)),
            **learner.extra_metrics(rewarded),
            "time/eval": time.monotonic() - started,
        }
        self._store(run, rewarded)
        log.info("eval, step %d: reward %.4g  (%d prompts, %.1f s)", step, row["reward"], len(groups), row["time/eval"])
        return row

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns the state of the cluster, the diagnostics and the learner."""
        return {
            "cluster": self.cluster.state(),
            "diagnostics": self.diagnostics.state(),
            "learner": self.learner.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`."""
        self.cluster.restore(state["cluster"])
        self.diagnostics.restore(state["diagnostics"])
        self.learner.restore(state["learner"])
