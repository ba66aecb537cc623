"""The commands of `whet` that train by reinforcement learning: from a RunConfig to a cluster, a learner and a run."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from whet.cli.preflight import check_rewards, check_run, check_teacher_used
from whet.cli.resolve_defaults import resolve_defaults
from whet.cli.rows import load_train_and_eval
from whet.cluster import RLCluster
from whet.config import (
    ClusterConfig,
    Mode,
    PPORunConfig,
    RoleConfig,
    RunConfig,
    SourceConfig,
    SupervisedRunConfig,
    TrainingConfig,
    check_complete,
    load_run,
)
from whet.config.lora import LORA_LR
from whet.errors import ConfigError, format_exception
from whet.hub.model_card import write_model_card
from whet.learners.base import RLLearner
from whet.learners.grpo import GRPOLearner
from whet.learners.ppo import PPOLearner
from whet.models.model_factory import call_model_factory
from whet.observe.environment import read_environment
from whet.observe.plots import plot_curves
from whet.observe.progress import sparkline
from whet.parallel.processes import join_processes
from whet.parallel.ranks import Ranks
from whet.parallel.torchrun_env import check_mesh, world_size
from whet.rollout.auto_engine import AUTO, choose_engine
from whet.run.run import Run
from whet.run.signals import Stopped
from whet.storage.completions import read_completions
from whet.storage.files import finite_or_none, to_json, write_atomic
from whet.train.memory_plan import choose_settings, free_gpu_memory
from whet.train.role_checkpoints import Checkpoints
from whet.train.role_workers import ACTOR
from whet.util.garbage import pause_collector
from whet.util.package_files import recipe_path
from whet.util.references import is_ref
from whet.util.text_lines import escape_control_characters, shorten_middle

__all__ = ["demo", "grpo", "make_rl_learner", "ppo", "train", "without_read_keys"]

log = logging.getLogger("whet")

AnyRun = RunConfig | SupervisedRunConfig
R = TypeVar("R", bound=AnyRun)
D = TypeVar("D", bound=SourceConfig)


def grpo(config: RunConfig) -> dict[str, Any]:
    """`whet grpo`: trains a policy by GRPO, evaluating before and after where there is evaluation data.

    Args: config: the whole configuration. actor.model may be "package.module:function" or "file.py:function", called
        with folder= and seed= and returning the folder of the model that it made there.
    Returns: the summary that is written to summary.json.
    """
    return train(config, make_rl_learner)


def ppo(config: PPORunConfig) -> dict[str, Any]:
    """`whet ppo`: trains a policy by PPO, and its critic: see `grpo`. Without a critic's model it is the actor's."""
    return train(config, make_rl_learner)


def train(config: R, make_learner: Callable[[R], tuple[Any, Any, Any]]) -> dict[str, Any]:
    """Runs the training of a configuration, in a new run folder where none is named.

    Args: config: of a run. make_learner: makes the learner, the training data and the evaluation data of it.
    Returns: the summary that is written to summary.json.
    """
    from transformers.utils import logging as transformers_logging

    ranks = join_processes(config.trainer.collective_timeout_s)
    with pause_collector():
        ranks.call_on_writer(lambda: check_run(config))  # only one rank may lock a folder to read it
    transformers_logging.disable_progress_bar()
    started = time.monotonic()
    named = config.trainer.run_dir is not None
    config = _with_run_dir(config, ranks)
    folder = Path(config.trainer.run_dir or "").absolute()
    log.info("run folder: %s", folder)
    try:
        _set_threads(config)
        config = _with_model(config, folder, ranks)
        with pause_collector():
            learner, train_ds, eval_ds = make_learner(config)
        try:
            run = learner.train(train_ds, eval_ds)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(_describe_stop(stop, config)) from stop
        finally:
            learner.close()
    except BaseException:
        if not named and ranks.is_writer:
            with suppress(OSError):
                folder.rmdir()  # where nothing was written, only the name taken
        raise
    summary = summarise(run, config, time.monotonic() - started)
    if not ranks.is_writer:
        return summary
    try:
        write_atomic(folder / "summary.json", (to_json(summary, indent=1) + "\n").encode("utf-8", "replace"))
        if plot_curves(run.rows, folder / "curves.png") is not None:
            write_model_card(folder)  # with them
    except Exception as error:  # the model is trained and saved: nothing that only shows it may fail the run
        log.warning("summary.json or curves.png could not be written: %s", format_exception(error))
    done = f"{run.step} step{'s' * (run.step != 1)}"
    log.info("%s in %.0f s; final model: %s", done, summary["train_seconds"], folder / "final")
    metric = run.task.main_metric
    values = [value for row in run.rows if row["mode"] == Mode.TRAIN.value and metric in row for value in [row[metric]]]
    if len(values) > 1:
        log.info("%s in training: %.3f %s %.3f", metric, values[0], sparkline(values, 40), values[-1])
    before, after = (summary.get(f"eval_{metric}_{when}") for when in ("before", "after"))
    if before is not None and after is not None:
        log.info("evaluation %s: %.3f -> %.3f", metric, before, after)
    for line in compare_examples(folder, [row["step"] for row in run.evaluations]):
        log.info("%s", line)
    return summary


def demo(argv: Sequence[str] = ()) -> dict[str, Any]:
    """`whet demo`: the recipe of the demo, with an explanation printed around it.

    Args: argv: overrides, as of `whet grpo`; seed=n is short for trainer.seed=n.
    Returns: the summary.
    """
    words = [w.replace("seed=", "trainer.seed=", 1) if w.removeprefix("--").startswith("seed=") else w for w in argv]
    recipe = recipe_path("demo")
    config = load_run(["--config", str(recipe), *words])
    _print_line("whet demo: GRPO teaches a small model the order of operations (a minute or two on 2 cores)")
    _print_line("  task: 2*2+4*3= -> 4+4*3=4+12=16")
    _print_line(
        "  At first the model calculates correctly, but in random order. The reward checks only the final number."
    )
    summary = grpo(config)
    folder = Path(summary["run_dir"])
    _print_line("")
    _print_line(
        f"held-out accuracy (greedy, {summary['eval_prompts']} unseen prompts): "
        f"{summary['accuracy_before']:.1%} before GRPO, {summary['accuracy_after']:.1%} after"
    )
    _print_line(f"time: {summary['train_seconds']:.0f} s for training and evaluation")
    curves = "curves.png, " if (folder / "curves.png").is_file() else ""
    _print_line(f"run folder:  {folder}   (metrics.jsonl, completions/, {curves}summary.json)")
    _print_line(f"final model: {folder / 'final'}   (loads with transformers' from_pretrained)")
    _print_line("next, a model and rows of your own (a jsonl file with the columns prompt and answer):")
    _print_line(f"  {program()} grpo model=path/to/model data=train.jsonl reward=last_number")
    return summary


# ---- steps of a command ----------------------------------------------------------------------------------------------


def make_rl_learner(config: RunConfig) -> tuple[RLLearner, Any, Any]:
    """Returns the cluster and learner of a configuration, and its training and evaluation data."""
    check_complete(config)
    resolved = resolve_defaults(config, *load_train_and_eval(config))
    config = resolved.config
    check_rewards(config, resolved.train, resolved.evaluation)
    check_teacher_used(config)
    config = _with_engine_that_fits(config)
    algo = dataclasses.replace(config.algo, reward_weights=config.reward_weights)
    reference = None
    if algo.beta or algo.force_compute_kl:
        role = config.reference
        reference = ACTOR if role is None else dataclasses.replace(role, model=role.model or config.actor.model)
    cluster = RLCluster(
        actor=config.actor,
        critic=_critic(config) if isinstance(config, PPORunConfig) else None,
        reference=reference,
        reward=config.reward_model,
        teacher=config.teacher,
        tokenizer=resolved.tokenizer,
        cluster_config=ClusterConfig(
            rollout_engine=config.rollout_engine,
            offload_to_cpu=config.offload_to_cpu,
            rollout_config=config.rollout,
            training_config=config.trainer,
        ),
    )
    make = PPOLearner if isinstance(config, PPORunConfig) else GRPOLearner
    learner = make(cluster, algo, list(config.reward_names), data=without_read_keys(config.data), settings=config)  # pyright: ignore
    learner.encoders.update(resolved.encoders)
    return learner, resolved.train, resolved.evaluation


def _with_engine(config: RunConfig) -> RunConfig:
    """Chooses the engine where rollout_engine leaves it open, before memory is planned; the run folder names it."""
    if config.rollout_engine != AUTO:
        return config
    ranks = join_processes(config.trainer.collective_timeout_s)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = {"num_processes": ranks.size, "is_quantized": config.actor.quantization is not None}
    return dataclasses.replace(config, rollout_engine=choose_engine(config.rollout, device=device, **options))


def _with_engine_that_fits(config: RunConfig) -> RunConfig:
    """Chooses engine and memory; "auto" is the embedded engine where the plan with vLLM does not fit."""
    chosen = _with_engine(config)
    try:
        return _with_memory_plan(chosen)
    except ConfigError as error:
        if config.rollout_engine != AUTO or chosen.rollout_engine != "vllm":
            raise
        log.info("rollout_engine auto: embedded, since with vllm %s", error)
        return _with_memory_plan(dataclasses.replace(config, rollout_engine="embedded"))


def _with_memory_plan(config: RunConfig) -> RunConfig:
    """Sets what is open to what fits the GPU of each process, where the embedded engine or vLLM samples."""
    if config.rollout_engine not in ("embedded", "vllm"):
        return config
    memory, num_processes = gpu_memory(config.trainer)
    return config if memory is None else choose_settings(config, memory, num_processes)


def gpu_memory(trainer: TrainingConfig) -> tuple[float | None, int]:
    """Returns the free bytes of the GPU that has the least, None if a process has none; and the number of processes."""
    ranks = join_processes(trainer.collective_timeout_s)  # it selects this process's GPU
    check_mesh(
        ranks.size,
        trainer.context_parallel_size,
        trainer.data_parallel_replicate_size,
        trainer.tensor_parallel_size,
    )
    free = [memory for memory in ranks.all_gather(free_gpu_memory()) if memory is not None]
    return min(free) if len(free) == ranks.size else None, ranks.size


def _critic(config: PPORunConfig) -> RoleConfig:
    """Returns the critic's model: the actor's, with a score head of its own, where none is given."""
    actor = config.actor
    adapter_options = {"lora": actor.lora, "optim": {}} if actor.lora is not None else {}  # with the rate of an adapter
    critic = config.critic or RoleConfig(
        dtype=actor.dtype,
        quantization=actor.quantization,
        gradient_checkpointing=actor.gradient_checkpointing,
        **adapter_options,
    )
    if critic.model is not None:
        return critic
    adapter = (
        "" if critic.lora is None else f" and an adapter of rank {critic.lora.r}, lr {critic.optim.lr or LORA_LR:g}"
    )
    log.info("critic: %s with a fresh score head, whose values are 0 at first%s", actor.model, adapter)
    return dataclasses.replace(critic, model=actor.model)


def _describe_stop(stop: KeyboardInterrupt, config: AnyRun) -> str:
    """Returns the message of a run that was stopped: how far it came, and the whole command that continues it."""
    trainer = config.trainer
    what = stop.message if isinstance(stop, Stopped) else "stopped at once"
    newest = Checkpoints(trainer.checkpoint_root, {}).find("latest")
    if newest is None:
        return f"{what}; there is no checkpoint to resume from"
    where = "" if isinstance(stop, Stopped) else f"; checkpoint: {newest}"
    named = f"trainer.run_dir={shlex.quote(str(trainer.run_dir))}"
    there = f"cd {shlex.quote(str(Path.cwd()))}"  # relative paths of the configuration begin there
    return f"{what}{where}\ncontinue with:\n  {there} && {program()} {config.COMMAND} {named} trainer.resume=latest"


def program() -> str:
    """Returns the command that runs whet from this shell, with torchrun where it started several processes."""
    if (size := world_size()) > 1:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        nodes = "--standalone" if per_node == size else f"--nnodes={size // per_node}"
        torchrun = "torchrun" if shutil.which("torchrun") else f"{shlex.quote(sys.executable)} -m torch.distributed.run"
        return f"{torchrun} {nodes} --nproc_per_node={per_node} -m whet"
    return "whet" if shutil.which("whet") is not None else f"{shlex.quote(sys.executable)} -m whet"


def without_read_keys(data: D) -> D:
    """Returns the section data with the defaults of the keys by which rows are read: the rows are read already."""
    defaults = type(data)()
    return dataclasses.replace(data, **{name: getattr(defaults, name) for name in data.READ_BY})


def _set_threads(config: AnyRun) -> None:
    """Sets the number of torch's threads: OMP_NUM_THREADS, the number of the resumed run, or all cores.

    The number is never chosen by timing, because it decides the last bits of the results. environment.json records it.
    """
    if "OMP_NUM_THREADS" in os.environ or torch.cuda.is_available():
        return
    available = torch.get_num_threads()
    recorded = read_environment(config.trainer.run_dir).get("threads") if config.trainer.resume is not None else None
    if recorded is not None and recorded < available:
        torch.set_num_threads(recorded)
        log.info("threads: %d, as at the start of the run", recorded)
    elif available > 1:
        log.info("threads: %d; if other programs use these cores, OMP_NUM_THREADS=1 may be faster", available)


def _with_run_dir(config: R, ranks: Ranks) -> R:
    """Adds a run folder where none was given: runs/<date>-<time>, followed by -2 and so on where that exists."""
    if config.trainer.run_dir is not None:
        return config
    folder = ranks.call_on_writer(_make_run_dir)
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, run_dir=folder))


def _make_run_dir() -> str:
    """Makes a run folder with a new name."""
    first = folder = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    try:
        first.parent.mkdir(exist_ok=True)
        for n in itertools.count(2):
            with suppress(FileExistsError):  # by a run that began in the same second
                folder.mkdir()
                break
            folder = first.with_name(f"{first.name}-{n}")
    except OSError as error:
        raise ConfigError(f"{folder} can't be created: {error}; give another trainer.run_dir") from error
    return str(folder)


def _with_model(config: R, folder: Path, ranks: Ranks) -> R:
    """Calls the function that makes the model, where there is one, and replaces it by the folder of the model."""
    section = config.TRAINED
    role: RoleConfig = getattr(config, section)
    if role.model is None or not is_ref(role.model):
        return config
    factory, place, seed = role.model, str(folder / "start"), config.trainer.seed
    model = ranks.call_on_writer(lambda: call_model_factory(factory, place, seed))
    return dataclasses.replace(config, **{section: dataclasses.replace(role, model=model)})


def summarise(run: Run, config: AnyRun, seconds: float) -> dict[str, Any]:
    """Returns the results of a run, from its rows of metrics."""
    evals = run.evaluations
    train = [row for row in run.rows if row["mode"] == Mode.TRAIN.value]
    name = run.task.main_metric
    summary: dict[str, Any] = {
        "steps": run.step,
        "seed": config.trainer.seed,
        "train_seconds": round(seconds, 1),
        f"{name}_first": finite_or_none(train[0].get(name)) if train else None,
        f"{name}_last": finite_or_none(train[-1].get(name)) if train else None,
        "run_dir": str(config.trainer.run_dir),
    }
    if evals:
        first = evals[0] if evals[0]["step"] == 0 else {}  # of a run that began elsewhere there is none before it
        summary |= {
            f"eval_{name}_before": finite_or_none(first.get(name)),
            f"eval_{name}_after": finite_or_none(evals[-1].get(name)),
        }
        items = run.task.eval_unit
        summary[f"eval_{items}"] = int(finite_or_none(evals[-1].get(f"{items}/count")) or 0)
        if "accuracy" in first and "accuracy" in evals[-1]:
            summary |= {"accuracy_before": first["accuracy"], "accuracy_after": evals[-1]["accuracy"]}
    return summary


def compare_examples(folder: Path, steps: Sequence[int], count: int = 4) -> list[str]:
    """Returns how many held-out prompts got a better or a worse completion, and the first of those with both
    completions.

    Args: folder: of the run. steps: of its evaluations. count: prompts at most.
    Returns: lines for a person; none where the run keeps no completions, or was evaluated once.
    """
    files = [folder / "completions" / f"eval-{step:06d}.parquet" for step in (*steps[:1], *steps[-1:])]
    if len({*files}) < 2 or not all(file.is_file() for file in files):
        return []
    before, after = (_first_completions(file) for file in files)
    gains = {row: after[row][2] - before[row][2] for row in before if row in after}
    better, worse = sum(gain > 0 for gain in gains.values()), sum(gain < 0 for gain in gains.values())
    lines = [f"held-out prompts: {better} better than before, {worse} worse, {len(gains) - better - worse} equal"]
    for row in [row for row, gain in gains.items() if gain][:count]:
        lines.append(f"  {_one_line(before[row][0])}")
        for name, (_, completion, reward) in (("before", before[row]), ("after", after[row])):
            lines.append(f"    {name:<6} (reward {reward:.3g}): {_one_line(completion)}")
    return lines


def _first_completions(file: Path) -> dict[int, tuple[str, str, float]]:
    """Row -> its prompt, its first completion and that one's reward."""
    columns, _ = read_completions(file)
    first: dict[int, tuple[str, str, float]] = {}
    for row, *rest in zip(*(columns[name] for name in ("row", "prompt", "completion", "reward")), strict=True):
        first.setdefault(row, (rest[0], rest[1], rest[2]))
    return first


def _one_line(text: str) -> str:
    """Returns a text on one line, shortened in its middle."""
    return shorten_middle(escape_control_characters(" ".join(text.split())), 160)


def _print_line(line: str) -> None:
    """Writes a line to standard output at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
