"""Whether each published method learns, and how far in equal steps: held-out accuracy on two tasks, several seeds.

    python benchmarks/presets.py --out results

Every method starts from the same warm-started model of a seed, samples as many completions in a step and makes as many
updates of it, by the same optimizer. Each run is added to OUT/results.jsonl as it ends; called again, the benchmark
goes on with what is missing there. The last line printed is the result as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import common
from learning_tasks import TASKS

from whet.config.algo.presets import PRESETS

LEARNING_RATE = 2e-4
GROUP = 8
"""Completions of a prompt, in the methods that compare with a group."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A published method: a preset, with groups of 8 where it has groups."""

    preset: str
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields in place of the preset's."""
    note: str = ""
    """What of the published method is otherwise here, and what to know of the row."""

    def configuration(self) -> Any:
        """The section algo."""
        groups = {} if PRESETS[self.preset]().num_generations == 1 else {"num_generations": GROUP}
        return PRESETS[self.preset](**{**groups, **self.changes})

    @property
    def chosen(self) -> dict[str, Any]:
        """The fields of its configuration that are not at their defaults: what makes two runs of a method the same."""
        algo = self.configuration()
        usual = type(algo)(num_generations=GROUP)
        return {
            f.name: value
            for f in dataclasses.fields(algo)
            if (value := getattr(algo, f.name)) != getattr(usual, f.name)
        }

    @property
    def sampled(self) -> int:
        """Completions of a prompt that are sampled: the greedy one of ReMax as well."""
        algo = self.configuration()
        return algo.num_generations + (algo.advantage_estimator == "remax")


_LEFT = (
    "groups whose rewards agree are left out and not replaced, so that a step with 16 or fewer left makes one update"
)
_TWO_UPDATES = "published with one update of each rollout; the updates of a step are those of all methods here"
_NO_KL = {"beta": 0.0}

METHODS: dict[str, Method] = {
    "grpo": Method(preset="deepseek_grpo", note="with its KL of 0.04; in groups of 8 these are Tunix's defaults"),
    "grpo_without_kl": Method(preset="deepseek_grpo", changes=_NO_KL),
    "grpo_top_entropy": Method(
        preset="deepseek_grpo",
        changes={**_NO_KL, "loss_masks": ("top-entropy",), "top_entropy_quantile": 0.2},
        note="grpo_without_kl on the fifth of the tokens with the highest entropy",
    ),
    "dr_grpo": Method(preset="dr_grpo"),
    "dapo": Method(
        preset="dapo",
        changes={"overlong_buffer": {"enable": False}},
        note="without the punishment of long completions, of which there are none; it samples further batches of "
        "prompts, so look at accuracy_at_equal_completions too",
    ),
    "gspo": Method(preset="gspo"),
    "rloo": Method(preset="rloo", note=_TWO_UPDATES),
    "cispo": Method(preset="cispo"),
    "sapo": Method(preset="sapo"),
    "gmpo": Method(preset="gmpo"),
    "vespo": Method(preset="vespo"),
    "reinforce_plus_plus": Method(preset="reinforce_pp"),
    "reinforce_plus_plus_baseline": Method(preset="reinforce_pp_baseline"),
    "remax": Method(
        preset="remax", note=f"half of the completions are the greedy ones of the baseline; {_TWO_UPDATES}"
    ),
    "opo": Method(preset="opo", note=_TWO_UPDATES),
    "scale_rl": Method(preset="scale_rl", note=_LEFT),
    "trl_grpo": Method(preset="trl_grpo"),
    "rl2_reinforce": Method(preset="rl2_reinforce", note=_LEFT),
    "ppo": Method(
        preset="ppo",
        changes={**_NO_KL, "gae_lambda": 0.99, "critic_warmup_steps": 5},
        note="recipes/demo_ppo.yaml; of the 5 first steps, which count, only the critic (rate 5e-4) learns",
    ),
}
"""The KL is that of the published method, none where it has none. One learning rate for all."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the results, which a later call goes on with"
    )
    parser.add_argument("--models", type=Path, help="folder of the warm-started models (OUT/models)")
    parser.add_argument("--tasks", default=",".join(TASKS), help="names, with commas between (%(default)s)")
    parser.add_argument("--methods", default=",".join(METHODS), help="names, with commas between (all)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each: of the model and the draws (%(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="rollouts (%(default)s)")
    parser.add_argument("--completions", type=int, default=256, help="sampled in a step (%(default)s)")
    parser.add_argument("--updates", type=int, default=2, help="optimizer steps of a step (%(default)s)")
    parser.add_argument("--lr", type=float, default=LEARNING_RATE, help="with a linear decay (%(default)s)")
    parser.add_argument("--eval-every", type=int, default=10, help="steps between evaluations (%(default)s)")
    parser.add_argument("--eval-limit", type=int, help="held-out prompts (all)")
    parser.add_argument("--threads", type=int, default=common.usable_cores(), help="threads (all usable cores)")
    parser.add_argument("--record", type=Path, help="also write the result here")
    args = parser.parse_args(argv)
    for name, known in (("tasks", TASKS), ("methods", METHODS)):
        given = getattr(args, name).split(",")
        if unknown := [n for n in given if n not in known]:
            parser.error(f"--{name} {','.join(unknown)}: known are {', '.join(known)}")
        setattr(args, name, given)
    for name in ("seeds", "steps", "updates", "eval_every", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.completions % (2 * GROUP * args.updates):
        parser.error(
            f"--completions must be a multiple of {2 * GROUP * args.updates}: groups of 8, --updates, ReMax's half"
        )
    args.models = args.models or args.out / "models"
    return args


DIGITS = 6
"""Significant ones of what is written."""
SETTING = ("steps", "completions", "updates", "lr", "eval_every", "eval_limit")
"""What makes runs comparable: those of another setting in the file are not of this result."""


# ---- a run -----------------------------------------------------------------------------------------------------------


def make_learner(args: argparse.Namespace, task_name: str, method: Method, seed: int, observers: list[Any]) -> Any:
    """The learner of one run, from the warm-started model of the seed, which is made where it is not there yet."""
    from whet import (
        ClusterConfig,
        DataConfig,
        GRPOLearner,
        OptimConfig,
        PPOConfig,
        PPOLearner,
        RLCluster,
        RLTrainingConfig,
        RoleConfig,
        RolloutConfig,
    )

    task = TASKS[task_name]
    model = task.warm_start(str(args.models / f"{task_name}-{seed}"), seed)
    prompts = args.completions // method.sampled
    algo = method.configuration()
    critic = isinstance(algo, PPOConfig)
    linear = OptimConfig(lr=args.lr, schedule="linear", warmup_steps=5, max_grad_norm=1.0)
    constant = OptimConfig(lr=5e-4, schedule="constant_with_warmup", warmup_steps=5, max_grad_norm=1.0)
    cluster = RLCluster(
        actor=RoleConfig(model=model, dtype="float32", optim=linear),
        reference=RoleConfig(model=model, dtype="float32") if algo.beta else None,
        critic=RoleConfig(model=model, dtype="float32", optim=constant) if critic else None,
        tokenizer=model,
        cluster_config=ClusterConfig(
            rollout_config=RolloutConfig(
                max_tokens_to_generate=task.max_tokens,
                max_prompt_length=task.max_prompt,
                temperature=1.0,
                eval={"temperature": 0.0},
            ),
            training_config=RLTrainingConfig(
                max_steps=args.steps,
                mini_batch_size=prompts // args.updates,
                eval_every_n_steps=args.eval_every,
                seed=seed,
            ),
        ),
    )
    learner = PPOLearner if critic else GRPOLearner
    return learner(cluster, algo, reward_fns=[task.reward], data=DataConfig(batch_size=prompts), observers=observers)


class Counted:
    """Counts what is sampled in training; passed to a learner in place of its cluster's `sample`."""

    def __init__(self, cluster: Any) -> None:
        self.completions = self.tokens = 0
        self.by_step: dict[int, int] = {}
        self._sample, cluster.sample = cluster.sample, self

    def __call__(self, prompts: Any, *, step: int, mode: Any, **keywords: Any) -> Any:
        """Samples, and counts; evaluations are not counted."""
        groups = self._sample(prompts, step=step, mode=mode, **keywords)
        if mode.value == "train":
            found = [c for g in groups for c in (*g.completions, *([g.greedy] if g.greedy is not None else []))]
            self.completions += len(found)
            self.tokens += sum(len(c.tokens) for c in found)
            self.by_step[step] = self.completions
        return groups


def run_one(args: argparse.Namespace, task_name: str, name: str, seed: int) -> dict[str, Any]:
    """Trains once. Returns: accuracies, rewards and costs, as they go into the file."""
    from whet.run.observer import Observer

    class Progress(Observer):
        def on_evaluate(self, run: Any, row: Mapping[str, Any]) -> None:
            print(f"{task_name} {name} seed {seed}: step {run.step}, accuracy {row['accuracy']:.3f}", flush=True)

    started = time.monotonic()
    learner = make_learner(args, task_name, METHODS[name], seed, [Progress()])
    task, counted = TASKS[task_name], Counted(learner.cluster)
    began = time.monotonic()
    try:
        run = learner.train(task.train_rows(), task.heldout_rows()[: args.eval_limit])
    finally:
        learner.cluster.close()
    accuracy = {r["step"]: r["accuracy"] for r in run.rows if r["mode"] == "eval"}
    return {
        "accuracy": accuracy,
        "rewards": [r["reward"] for r in run.rows if r["mode"] == "train"],
        "completions": counted.completions,
        "accuracy_at_equal_completions": at_budget(accuracy, counted.by_step, args.steps * args.completions),
        "tokens": counted.tokens,
        "train_s": time.monotonic() - began,
        "start_s": began - started,
    }


def at_budget(accuracy: dict[int, float], sampled: dict[int, int], budget: int) -> float:
    """The last accuracy that was reached with no more completions than the budget.

    Args: accuracy: step -> of the evaluation after it. sampled: step -> completions up to its end.

    >>> at_budget({0: 0.3, 10: 0.5, 20: 0.7}, {10: 100, 20: 201}, 200)
    0.5
    """
    within = [step for step in accuracy if step == 0 or sampled[step] <= budget]
    return accuracy[max(within)]


# ---- the file of results ---------------------------------------------------------------------------------------------


def read_results(path: Path, args: argparse.Namespace) -> dict[tuple[str, str, int], dict[str, Any]]:
    """The runs of this setting and of the methods as they are now, by (task, method, seed); of several the last.

    A line that was cut off, as by a killed process, is skipped.
    """
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        method = METHODS.get(row["method"])
        if method is not None and row["setting"] == setting_of(args) and row["algo"] == written(method.chosen):
            found[row["task"], row["method"], row["seed"]] = row
    return found


def setting_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the runs of a result have in common."""
    return {name: getattr(args, name) for name in SETTING}


def written(tree: Any) -> Any:
    """What is read back once `append` has written this: lists for tuples, fewer digits.

    >>> written({"a": (1, 1.1920928955)})
    {'a': [1, 1.19209]}
    """
    return json.loads(json.dumps(common.rounded(tree, DIGITS)))


def append(path: Path, row: dict[str, Any]) -> None:
    """Adds a line, on the disk before it returns; one that was cut off before it is ended first."""
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            file.write(b"" if file.read(1) == b"\n" else b"\n")
        file.write((json.dumps(written(row)) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def thinned(values: list[float], points: int = 20) -> list[float]:
    """Means of so many stretches of about equal length, in their order.

    >>> thinned([1.0, 3.0, 5.0, 7.0], points=2), thinned([1.0], points=2)
    ([2.0, 6.0], [1.0])
    """
    count = min(points, len(values))
    ends = [round(i * len(values) / count) for i in range(count + 1)]
    return [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(ends)]


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One method on one task: its runs' accuracies, their mean and spread, the mean curve, costs.

    Args: runs: one for each seed; those that failed count for nothing but their reason.
    """
    done = [r for r in runs if "error" not in r]
    found: dict[str, Any] = {"seeds": [r["seed"] for r in done]}
    if failed := [r["error"] for r in runs if "error" in r]:
        found["errors"] = failed
    if not done:
        return found
    curves = [list(r["accuracy"].values()) for r in done]
    final = [c[-1] for c in curves]
    mean, error = common.mean_and_error(final)
    equal = [r["accuracy_at_equal_completions"] for r in done]
    return {
        **found,
        "start": [c[0] for c in curves],
        "final": final,
        "mean": mean,
        "deviation": error * math.sqrt(len(final)),
        "whole_curve": [statistics.fmean(c[1:]) for c in curves],
        "accuracy_at_equal_completions": equal,
        "learned": statistics.fmean(equal) > statistics.fmean(c[0] for c in curves) + 0.05,
        "accuracy_curve": {step: statistics.fmean(r["accuracy"][step] for r in done) for step in done[0]["accuracy"]},
        "reward_curve": [statistics.fmean(p) for p in zip(*(thinned(r["rewards"]) for r in done), strict=True)],
        "train_s": [r["train_s"] for r in done],
        "tokens": [r["tokens"] for r in done],
        "completions": [r["completions"] for r in done],
        "commits": sorted({str(r["commit"]) for r in done}),
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """The result for people: a line for each task and method."""
    lines = []
    for task, methods in results.items():
        lines.append(
            f"{task}: accuracy before; after equal steps (deviation); after equal completions; over all; seconds"
        )
        for name, found in methods.items():
            if "mean" not in found:
                lines.append(f"  {name:30s} {'; '.join(found.get('errors', ['not run yet']))}")
                continue
            columns = ("start", "final", "accuracy_at_equal_completions", "whole_curve", "train_s")
            start, final, equal, whole, seconds = (statistics.fmean(found[k]) for k in columns)
            lines.append(
                f"  {name:30s} {start:.3f}  {final:.3f} ({found['deviation']:.3f})  {equal:.3f}  {whole:.3f}  "
                f"{seconds:.0f}{'' if found['learned'] else '  DID NOT LEARN'}"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Makes the runs that are missing, and prints the result of all."""
    import torch

    args = arguments(argv)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    path, machine = args.out / "results.jsonl", common.machine()
    wanted = [(task, name, seed) for seed in range(args.seeds) for task in args.tasks for name in args.methods]
    for i, (task, name, seed) in enumerate(wanted):
        known = read_results(path, args).get((task, name, seed))
        if known is not None and "error" not in known:
            continue
        row = {
            "task": task,
            "method": name,
            "seed": seed,
            "setting": setting_of(args),
            "algo": METHODS[name].chosen,
            "commit": machine["commit"],
        }
        try:
            row |= run_one(args, task, name, seed)
            said = f"accuracy {[*row['accuracy'].values()][-1]:.3f} in {row['train_s']:.0f} s"
        except Exception as error:  # the other methods are still of use; the reason stands in the result
            traceback.print_exc(file=sys.stderr)
            row["error"] = said = f"{type(error).__name__}: {error}"
        append(path, row)
        print(f"{i + 1} of {len(wanted)}: {task} {name} seed {seed}: {said}", flush=True)
    found = read_results(path, args)
    results = {
        task: {
            name: summary([found[task, name, s] for s in range(args.seeds) if (task, name, s) in found])
            | ({"note": METHODS[name].note} if METHODS[name].note else {})
            for name in args.methods
        }
        for task in args.tasks
    }
    print(table(results))
    result = {"device": "cpu", "threads": args.threads, **setting_of(args), "results": results, "machine": machine}
    common.finish("presets", result, device="cpu", record=args.record)


if __name__ == "__main__":
    main()
