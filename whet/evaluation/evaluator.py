"""Evaluator: samples completions of a data set, computes their rewards, and the metrics.

The keys of the draws are (seed, place of the prompt, generation), so that neither the number of prompts that are
completed together nor a resume changes one. It completes by Sampler and judges by RewardManager, as a run does.
Begin at `Evaluator.run`.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whet._version import __version__
from whet.config import Mode, config_from_dict, dump_tree
from whet.config.evaluate import EVAL_SHORTHANDS, EvalRunConfig
from whet.config.loader import merge
from whet.data.checksums import compute_checksums
from whet.data.prompt_stream import encode_all, hold_out
from whet.data.prompts import DATA_FIELDS
from whet.data.sources import load_rows
from whet.data.templates import uses_chat_template
from whet.data.text_parts import decode_ids
from whet.envs import Conversation, load_script
from whet.envs.agent import AGENT_REWARD, load_agent
from whet.envs.environment import ENVIRONMENT_REWARD
from whet.envs.failures import EpisodeFailures
from whet.errors import ConfigError, DataError, lookup_error, nearest
from whet.evaluation.columns import make_completion_columns
from whet.evaluation.estimators import Estimate, resolve_ks
from whet.evaluation.eval_folder import EvalBatch, EvalFolder
from whet.evaluation.metrics import PromptResult, compute_metrics, compute_passed, prompt_results, resolve_answer_fn
from whet.evaluation.reward_functions import hash_reward_functions, make_reward_manager
from whet.evaluation.sample import BestAndWorst
from whet.evaluation.table import format_table, table_rows
from whet.hub.base_model import trained_with_chat_template
from whet.observe.notebook import table_html
from whet.observe.progress import Progress
from whet.parallel.processes import join_processes
from whet.rewards.reward_batch import RewardBatch
from whet.rollout.build import make_sampling
from whet.rollout.policy_rollouts import EpisodeRunner
from whet.rollout.sampler import Sampler
from whet.run.provenance import function_source, weights_digest
from whet.storage.files import finite_or_none
from whet.types import Group, Prompt

if TYPE_CHECKING:
    from whet.serve.agent_episodes import AgentEpisodes

__all__ = ["Evaluation", "Evaluator", "evaluate"]

log = logging.getLogger("whet")

SOURCES = ("source", "data_source")
"""The default source columns: results are broken down by the first one that the data has."""
MAX_SOURCES = 64
"""A default source column with more values than this is ignored: its values are names of rows."""
ENGINE_FIELDS = ("eval", "kv_cache_tokens", "max_batch_size", "native_kernels", "sglang", "vllm")
"""Fields of the rollout section that may differ in a resumed evaluation."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """The results of an evaluation.

    Example: evaluation["pass@8"].value, evaluation.by_source["gsm8k"]["pass@1"].se, print(evaluation).
    """

    results: Mapping[str, Estimate]
    """Over all prompts, by name; see metrics.compute_metrics."""
    by_source: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)
    """The results of each source, in alphabetical order."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the evaluation, as plain values."""
    folder: Path | None = None
    """The folder with the files; None = nothing is written."""
    examples: Sequence[str] = ()
    """Lines that show the best and the worst completion with their prompts."""

    def __getitem__(self, name: str) -> Estimate:
        """Returns a result over all prompts. Raises ConfigError for an unknown name, with the nearest one."""
        if name not in self.results:
            raise lookup_error("result", name, self.results)
        return self.results[name]

    def plain(self) -> dict[str, Any]:
        """Returns all fields as plain values, as in results.json; NaN becomes None."""
        return {
            **self.about,
            "results": _plain(self.results),
            "by_source": {source: _plain(results) for source, results in self.by_source.items()},
        }

    def __str__(self) -> str:
        return format_table(self.results, self.by_source)

    def _repr_html_(self) -> str:
        """Returns the HTML for a notebook: the table, and the best and the worst completion."""
        examples = "".join(f"<pre>{html.escape(line)}</pre>" for line in self.examples)
        return table_html(str(self.about.get("model", "")), table_rows(self.results, self.by_source)) + examples


def _plain(results: Mapping[str, Estimate]) -> dict[str, Any]:
    return {
        n: {"value": finite_or_none(e.value), "se": finite_or_none(e.se), "prompts": e.prompts}
        for n, e in results.items()
    }


def evaluate(
    model: Any = None, data: Any = None, reward: Any = None, *, tokenizer: Any = None, **keys: Any
) -> Evaluation:
    """Evaluates a model on a data set, as `whet eval` does.

    Args:
        model: a folder (of a model, a run, a checkpoint), a hub name, or a module with `tokenizer`.
        data: rows, or what data.path takes.
        reward: a reward function, a name, or a list of either; or name -> weight.
        tokenizer: None = the model's.
        keys: further keys of EvalRunConfig: num_generations, temperature, max_tokens, seed, k, limit, out, answer_fn,
            ..., and whole sections as mappings: rollout={"top_p": 0.95}. Plain text takes the chat template only
            with the key data.apply_chat_template, as in Sampler: **{"data.apply_chat_template": True}.
    Returns: the results; with out= they are also written to that folder.
    Raises: ConfigError, DataError, RewardError: as the command does. With out= the finished completions are kept.

    >>> from whet.demo import small_model
    >>> rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    >>> sampled = {"num_generations": 2, "temperature": 1.0, "max_tokens": 4}
    >>> evaluation = evaluate(small_model(seed=0), rows, "exact_match", tokenizer="byte", **sampled)
    >>> sorted(evaluation.results)
    ['majority@2', 'pass@1', 'pass@2', 'reward', 'rewards/exact_match', 'tokens', 'truncated']
    """
    objects: dict[str, Any] = {}
    tree: dict[str, Any] = {}
    defaults = {"data": {"apply_chat_template": False}}
    for key, value in keys.items():
        node = value
        for part in reversed(EVAL_SHORTHANDS.get(key, key).split(".")):
            node = {part: node}
        if duplicate := _find_duplicate(tree, node):
            raise ConfigError(f"{duplicate} is given twice, the second time as {key}; give it once")
        tree = merge(tree, node)
    arguments = {"model": model, "tokenizer": tokenizer, "data": data, "reward": reward}
    for name, value in arguments.items():
        is_plain = isinstance(value, str | Path) or (name == "reward" and _are_names(value))
        if value is not None and not is_plain:
            objects[name] = value
        elif value is not None and name == "data":
            tree["data"] = {**tree.get("data", {}), "path": str(value)}
        elif value is not None:
            tree[name] = str(value) if isinstance(value, Path) else value
    return Evaluator(config_from_dict(EvalRunConfig, merge(defaults, tree), short=EVAL_SHORTHANDS), **objects).run()


def _find_duplicate(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Returns a key with a value in both of two nested mappings; "" = none.

    >>> _find_duplicate({"a": {"b": 1.0}}, {"a": {"c": 2}}), _find_duplicate({"a": {"b": 1}}, {"a": {"b": 1}})
    ('', 'a.b')
    """
    for key in a.keys() & b.keys():
        if not isinstance(a[key], Mapping) or not isinstance(b[key], Mapping):
            return key
        if path := _find_duplicate(a[key], b[key]):
            return f"{key}.{path}"
    return ""


def _are_names(reward: Any) -> bool:
    """Returns whether all reward functions are names, as in a configuration."""
    return isinstance(reward, str | dict) or (isinstance(reward, list) and all(isinstance(r, str) for r in reward))


class Evaluator:
    """Evaluates a model on a data set.

    Args:
        config: everything that has a key.
        model, tokenizer, data, reward: objects from Python in place of config.model, config.tokenizer, config.data.path
            and config.reward; None = the configuration's.
    Raises: ConfigError: no model, data or reward.
    """

    def __init__(
        self, config: EvalRunConfig, *, model: Any = None, tokenizer: Any = None, data: Any = None, reward: Any = None
    ) -> None:
        self.ranks = join_processes()
        """The processes that evaluate together: each has the whole model, and completes and judges a share."""
        self.config = config
        self.model: Any = config.model if model is None else model
        self.tokenizer = config.tokenizer if tokenizer is None else tokenizer
        self.data = config.data.path if data is None else data
        self.reward = reward
        self._episodes: AgentEpisodes | None = None
        rollout = config.sampling
        turns = rollout.max_turns
        self.script = None if rollout.env_path is None else load_script(rollout.env_path, turns=turns)
        """The environment."""
        environment = None if self.script is None else self.script.environment
        self.own_reward = ENVIRONMENT_REWARD if environment is not None and environment.has_reward else None
        if rollout.agent is not None:
            load_agent(rollout.agent)  # raises before the model is loaded
            self.own_reward = AGENT_REWARD
        """The name of the reward that the episodes bring; None = they bring none."""
        required = {
            "model": self.model,
            "data": self.data,
            "reward": reward if reward is not None else config.reward_names or self.own_reward,
        }
        if missing := [name for name, value in required.items() if value is None or value == ()]:
            raise ConfigError(f"an evaluation needs {' and '.join(missing)}; set {' '.join(f'{n}=' for n in missing)}")

    def run(self, description: str | None = None, *, should_stop: Callable[[], bool] = lambda: False) -> Evaluation:
        """Runs the evaluation.

        Args: description: text before a progress bar; None = no bar. should_stop: asked after each batch.
        Returns: the results, which are also written if there is a folder.
        Raises: DataError: a prompt that can't fit. RewardError: a reward function failed; the completions are kept.
            KeyboardInterrupt: it should stop, and prompts are left.
        """
        c, started = self.config, time.monotonic()
        folder = None if c.out is None or not self.ranks.is_writer else EvalFolder(c.out, resume=c.resume)
        try:
            with Sampler(
                self.model,
                self.tokenizer,
                rollout_engine=c.rollout_engine,
                dtype=c.dtype,
                device=c.device,
                chat_template_kwargs=c.sampling.chat_template_kwargs,
                rollout_config=c.sampling,
                trust_remote_code=c.trust_remote_code,
            ) as sampler:
                self.config = self._with_template(sampler)
                work = _Work(self, sampler, folder)
                self._episodes = work.agents
                with Progress(len(work.prompts), description=description) as progress:
                    results: list[PromptResult] = []
                    for batch in work.batches():
                        results += work.compute_rewards(batch, progress)
                        if any(self.ranks.all_gather(should_stop())) and len(results) < len(work.prompts):
                            raise KeyboardInterrupt(f"stopped after {len(results)} of {len(work.prompts)} prompts")
            evaluation = work.summarize(results, time.monotonic() - started)
            if folder is not None:
                folder.write_results(evaluation.plain())
        except (Exception, KeyboardInterrupt) as error:
            if folder is not None and not isinstance(error, ConfigError) and any(folder.completions.glob("*")):
                log.warning("what was completed is kept in %s; continue with resume=true out=%s", folder.path, c.out)
            raise
        finally:
            if self._episodes is not None:
                self._episodes.close()
            if folder is not None:
                folder.close()
        return evaluation

    def _with_template(self, sampler: Sampler) -> EvalRunConfig:
        """Returns the configuration with a value of apply_chat_template in place of "auto"."""
        c = self.config
        if c.data.apply_chat_template != "auto":
            return c
        applied = trained_with_chat_template(self.model)
        if applied is None:
            applied = uses_chat_template(sampler.tokenizer, c.sampling.chat_template_kwargs)
        if applied:
            log.info("chat template: it is applied to prompts that are plain text (data.apply_chat_template=auto)")
        return dataclasses.replace(c, data=dataclasses.replace(c.data, apply_chat_template=applied))


class _Work:
    """A running evaluation: the prompts, the reward functions and the folder."""

    def __init__(self, evaluator: Evaluator, sampler: Sampler, folder: EvalFolder | None) -> None:
        self.config, self.sampler, self.folder = evaluator.config, sampler, folder
        self.ranks, self.script = evaluator.ranks, evaluator.script
        self.own_rewards = () if evaluator.own_reward is None else (evaluator.own_reward,)
        c = self.config.sampling
        self.name = sampler.loaded.name
        self.start_time, self.tokens = time.monotonic(), 0
        self.reward_sum, self.num_rewarded = 0.0, 0
        """Of the prompts so far that have a reward."""
        self.best_and_worst = BestAndWorst()
        self.prompts, self.num_dropped = self._encode(evaluator.data)
        self.source_column = self._find_source_column()
        self.manager = make_reward_manager(self.config, sampler, evaluator.reward, has_own=bool(self.own_rewards))
        self.manager.check(list(dict.fromkeys(name for p in self.prompts for name in p.columns)))
        self.manager.check_answers((prompt.row, prompt.columns) for prompt in self.prompts)
        fns = self.manager.fns  # pass_reward also decides which answers are correct
        answer_fns = [fns[self.config.pass_reward]] if self.config.pass_reward in fns else list(fns.values())
        self.read_answer, self.answer_fn_name = resolve_answer_fn(self.config.answer_fn, answer_fns)
        self.generations = c.num_generations_eval or 1
        self.ks = resolve_ks(self.config.k, self.generations)
        self.seed = self.config.seed if c.seed is None else c.seed
        count, each = len(self.prompts), self.generations
        many = f"{count} prompt{'s' * (count != 1)}, {each} completion{'s' * (each != 1)}"
        log.info("%s: %s of each", self.name, many)
        sampling = make_sampling(c, sampler.eos_ids, sampler.tokenizer)
        self.sampling = sampler.limit_lengths(sampling, self.prompts, fixed=False)
        self.run_episode: EpisodeRunner | None = None
        self.agents: AgentEpisodes | None = None
        """Those of rollout.agent, with a server."""
        if c.has_turns or c.agent is not None:
            self.sampling = [sampling] * len(self.prompts)  # an episode limits its own turns
            self.run_episode = self._make_episodes(sampler)
        if num_short := sum(s.max_tokens < c.max_tokens_to_generate for s in self.sampling):
            log.warning(
                "%d of %d prompts leave less than rollout.max_tokens_to_generate=%d of the %s tokens of the context; "
                "their completions end there",
                num_short,
                len(self.prompts),
                c.max_tokens_to_generate,
                sampler.longest,
            )

    def _make_episodes(self, sampler: Sampler) -> EpisodeRunner:
        """Returns the generator function of the episodes of an agent or an environment."""
        c = self.config.sampling
        failures = EpisodeFailures(
            self.config.on_reward_error,
            on_infrastructure="retry" if c.on_infrastructure_failure == "retry" else "mask",
            max_retries=c.max_retries,
        )
        end_ids = sampler.eos_ids if c.eos_tokens is None else c.eos_tokens
        if c.agent is None:
            return Conversation.from_config(
                c, self.encode, end_ids=end_ids, max_length=sampler.longest, failures=failures
            ).run_episode
        from whet.serve.agent_episodes import AgentEpisodes  # with the server, which others do without

        self.agents = AgentEpisodes.from_config(
            c,
            sampler.tokenizer,
            eos_ids=end_ids,
            longest=sampler.longest,
            system_prompt=self.encode.system_prompt,
            failures=failures,
        )
        return self.agents.run_episode

    def _encode(self, data: Any) -> tuple[list[Prompt], int]:
        """Returns the encoded prompts, and the number of those that were too long."""
        c, rollout = self.config.data, self.config.sampling
        rows = load_rows(data, split=c.split, subset=c.subset, limit=c.limit)
        if c.eval_fraction:
            _, rows = hold_out(rows, c.eval_fraction, c.eval_fraction_seed)
        script = self.script
        self.encode = encode = self.sampler.encoder(
            sections=True,
            tools=None if script is None else script.tools,
            max_prompt_length=rollout.max_prompt_length,
            on_long_prompt=rollout.on_long_prompt,
            **{name: getattr(c, name) for name in DATA_FIELDS},
        )
        prompts = list(encode_all(rows, encode, str(data) if isinstance(data, str | Path) else "the data"))
        dropped = encode.counts["dropped"]
        if not prompts:
            raise DataError(
                f"all {dropped} prompts are over rollout.max_prompt_length={rollout.max_prompt_length}; raise it"
            )
        if counts := encode.describe_counts():
            log.warning("%s", counts)
        return prompts, dropped

    def _find_source_column(self) -> str | None:
        """Returns the column by which results are broken down. Raises DataError: the data lacks the configured one."""
        columns = {name for p in self.prompts for name in p.columns}
        if (name := self.config.data.source_column) is not None:
            if name not in columns:
                raise DataError(
                    f"data.source_column={name!r} is not among the columns {sorted(columns)}{nearest(name, columns)}"
                )
            return name
        name = next((name for name in SOURCES if name in columns), None)
        if name is not None and (count := len({str(p.columns.get(name)) for p in self.prompts})) > MAX_SOURCES:
            log.info("column %s has %d values: no breakdown; ask for it with data.source_column", name, count)
            return None
        return name

    def batches(self) -> Iterator[EvalBatch]:
        """Yields all prompts with their completions, in batches: those of an earlier attempt, then new ones."""
        done, folder = 0, self.folder
        begin = lambda: (
            []
            if folder is None
            else folder.begin(
                self.config,
                *self._identity(),
                self.prompts,
                [*self.own_rewards, *self.manager.fns],
                own=self.own_rewards,
            )
        )
        for batch in self.ranks.call_on_writer(begin):
            done = batch.first + len(batch.groups)
            yield batch
        if done:
            log.info("%d of %d prompts were completed before", done, len(self.prompts))
        size = self.config.data.batch_size
        for first in range(done, len(self.prompts), size):
            places = range(first, min(first + size, len(self.prompts)))
            groups = [group for share in self.ranks.scatter_gather(self._sample, places) for group in share]
            batch = EvalBatch(first=first, groups=groups, has_rewards=False)
            self._write(batch, self._decode(groups), None)
            yield batch

    def _sample(self, places: Sequence[int]) -> list[Group]:
        """Returns the groups of consecutive prompts."""
        span = slice(places[0], places[-1] + 1)
        return self.sampler.sample(
            self.prompts[span],
            self.sampling[span],
            num_generations=self.generations,
            seed=self.seed,
            first=places[0],
            run_episode=self.run_episode,
        )

    def compute_rewards(self, batch: EvalBatch, progress: Progress) -> list[PromptResult]:
        """Returns the results of a batch, with its stored rewards or those that the functions compute now."""
        texts = self._decode(batch.groups)
        if batch.has_rewards:
            rewards = self.manager.from_groups(batch.groups, texts, mode=Mode.EVAL)
        else:
            compute = lambda groups: self.manager(groups, self._decode(groups), mode=Mode.EVAL)
            rewards = RewardBatch.cat(self.ranks.scatter_gather(compute, batch.groups))
            self._write(batch, texts, rewards)
        self.best_and_worst.add(rewards)
        results = prompt_results(rewards, source_column=self.source_column, read=self.read_answer)
        self.tokens += sum(int(r.lengths.sum()) for r in results)
        mean = compute_metrics(results, None, ())["reward"]
        if mean.prompts:
            self.reward_sum += mean.value * mean.prompts
            self.num_rewarded += mean.prompts
        reward = self.reward_sum / self.num_rewarded if self.num_rewarded else math.nan
        speed = self.tokens / max(time.monotonic() - self.start_time, 1e-9)
        progress.update(batch.first + len(batch.groups), value=reward, tokens_per_s=speed)
        return results

    def _decode(self, groups: Sequence[Group]) -> list[list[Any]]:
        """Returns the texts, or of episodes with turns the messages."""
        return [
            [list(c.messages) if c.messages else self.sampler.decode(c.tokens) for c in g.completions] for g in groups
        ]

    def _write(self, batch: EvalBatch, texts: Sequence[Sequence[Any]], rewards: RewardBatch | None) -> None:
        """Writes a batch. Args: rewards: None = not computed yet."""
        if self.folder is None:
            return
        if rewards is None:
            rewards = self.manager.from_groups(batch.groups, texts, mode=Mode.EVAL)
            names, totals = [n for n in self.own_rewards if n in rewards.table], [None] * len(rewards.trajectory_of)
        else:
            names, totals = sorted(rewards.table), rewards.total[rewards.trajectory_of].tolist()
        columns = make_completion_columns(
            batch.groups, texts, totals, functools.partial(decode_ids, self.sampler.tokenizer)
        )
        self.folder.write(batch.first, columns, {n: rewards.table[n][rewards.trajectory_of] for n in names})

    def _identity(self) -> tuple[dict[str, Any], str]:
        """Returns the inputs that the completions and their rewards depend on."""
        module, (prompts, columns) = self.sampler.loaded.module, compute_checksums(self.prompts)
        sampling = {n: v for n, v in dump_tree(self.config.sampling).items() if n not in ENGINE_FIELDS}
        draws = {
            "weights": weights_digest(module),
            "dtype": str(module.dtype),
            "prompts": [len(self.prompts), prompts],
            "num_generations": self.generations,
            "seed": self.seed,
            "sampling": sampling,
            "rollout_engine": dump_tree(self.config.rollout_engine),
        }
        if self.agents is not None:
            draws["agent"] = function_source(self.agents.agent)[1:]
        elif self.run_episode is not None and self.script is not None:
            draws["environment"] = function_source(self.script.code)[1:]
        return draws, hash_reward_functions(self.manager, [columns])

    def summarize(self, results: Sequence[PromptResult], seconds: float) -> Evaluation:
        """Returns the evaluation: the metrics of all prompts, and of each source."""
        c = self.config
        passed = compute_passed(results, c.pass_reward, c.pass_threshold)
        if passed is None:
            log.info(
                "no pass@k: rewards are not all 0 or 1; set pass_threshold, the least reward of a right completion"
            )
        by_source = {}
        for source in sorted({r.source for r in results if r.source is not None}):
            places = [i for i, r in enumerate(results) if r.source == source]
            source_passed = None if passed is None else [passed[i] for i in places]
            by_source[source] = compute_metrics([results[i] for i in places], source_passed, self.ks)
        sampling = c.sampling
        about = {
            "whet": __version__,
            "model": self.name,
            "dtype": str(self.sampler.loaded.module.dtype).removeprefix("torch."),
            "data": {n: getattr(c.data, n) for n in ("path", "subset", "split", "limit")},
            "prompts": len(results),
            "prompts_left_out": self.num_dropped,
            "completions_without_reward": sum(int(np.isnan(r.totals).sum()) for r in results),
            "sampling": {
                "num_generations": self.generations,
                "seed": self.seed,
                **{
                    n: getattr(sampling, n)
                    for n in ("temperature", "top_p", "top_k", "min_p", "max_tokens_to_generate")
                },
            },
            "rewards": dict(self.manager.weights),
            "passes": None
            if passed is None
            else {
                "reward": c.pass_reward or "total",
                "at_least": 1.0 if c.pass_threshold is None else c.pass_threshold,
            },
            "majority_of": self.answer_fn_name,
            "source_column": self.source_column,
            "seconds": round(seconds, 1),
        }
        folder = None if self.folder is None else self.folder.path
        metrics = compute_metrics(results, passed, self.ks)
        examples = self.best_and_worst.lines()
        return Evaluation(results=metrics, by_source=by_source, about=about, folder=folder, examples=examples)
