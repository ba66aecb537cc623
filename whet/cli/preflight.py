"""Checks a command before it loads data and models: names, references, sizes, loggers, folders.

Each check raises an error; `raise_all` runs all checks, and raises one error with all findings. Reward functions are
checked after the data are loaded, and before a model is. resolve_defaults.py checks lengths; loading a model checks the
model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

from whet.config import (
    ClusterConfig,
    DPORunConfig,
    Mode,
    PPORunConfig,
    PreferenceConfig,
    RewardModelConfig,
    RoleConfig,
    RolloutConfig,
    RunConfig,
    SFTConfig,
    SupervisedRunConfig,
    TrainingConfig,
    check_complete,
    check_supervised,
    dump_tree,
)
from whet.config.data import source_paths
from whet.config.loader import flatten
from whet.config.rewards import REWARD_MODEL
from whet.data.prompt_stream import first_row, has_random_access, is_batch
from whet.data.prompts import ANSWER, find_prompt_column
from whet.data.sources import check_source
from whet.envs import load_script
from whet.envs.agent import load_agent
from whet.errors import CheckpointError, ConfigError, raise_all
from whet.learners.from_config import objective_checks, other_field, policy_loss
from whet.learners.grpo import check_temperature
from whet.learners.preference_from_config import make_preference_objective, make_reward_loss
from whet.models.lora import check_lora
from whet.observe.loggers import check_loggers
from whet.ops import LOSS_AGG_MODES, SFT_LOSSES, teacher_column
from whet.rewards.columns import check_answers, check_columns
from whet.rewards.manager import RewardManager, resolve_reward_manager
from whet.rewards.resolve import resolve_reward, resolve_rewards
from whet.rollout import check_engine
from whet.run.builtin_observers import check_push_to_hub
from whet.run.provenance import check_settings
from whet.storage.files import check_writable
from whet.storage.folder_lock import check_unlocked
from whet.storage.run_folder import check_no_run
from whet.train.lr_schedule import check_schedule
from whet.train.make_optimizer import check_optimizer
from whet.train.role_checkpoints import Checkpoints
from whet.train.role_workers import check_model_exists
from whet.types import Prompt
from whet.util.references import is_ref, resolve_callable, resolve_name

__all__ = ["check_rewards", "check_run", "check_teacher_used"]

Check = tuple[str, Callable[[], Any]]
"""(the sections that a check reads together, or "" if it reads one value; the check)."""


def check_run(config: RunConfig | SupervisedRunConfig, unread: Collection[str] = ()) -> None:
    """Checks a run before anything is loaded.

    Args: config: of the run. unread: sections with keys that could not be read (partial_config_from_dict); checks that
        combine them with others are skipped. A name that is not a section may belong to any section.
    Raises: ConfigError: one line per finding; a single finding is raised unchanged.

    >>> from whet.config import load_run
    >>> words = ["reward=exact_match", "actor.optim.name=sdg", "trainer.mini_batch_size=3"]
    >>> check_run(load_run(words))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    whet.errors.ConfigError: no model; write model=<hub name or folder>
    no data; write data=<hub name, folder, json, jsonl, csv, parquet or arrow file>
    batch_size=8 must be a multiple of mini_batch_size=3; use mini_batch_size=2 or 4
    unknown optim.name 'sdg'; did you mean sgd? Known: adam, adamw, adamw8bit, muon, sgd, package.module:name, ...
    """
    sections = {field.name for field in dataclasses.fields(config)}
    doubtful = set(unread) if sections.issuperset(unread) else sections
    checks = _policy_checks(config, unread) if isinstance(config, RunConfig) else _supervised_checks(config, unread)
    raise_all(check for reads, check in [*checks, *_shared_checks(config)] if doubtful.isdisjoint(reads.split()))


def _policy_checks(config: RunConfig, unread: Collection[str]) -> Iterator[Check]:
    """Yields the checks of a run of reinforcement learning."""
    yield "", partial(check_complete, config, unread)
    yield "data trainer", partial(config.trainer.check_batch_sizes, config.data.batch_size)
    if not config.rollout.open_lengths:  # otherwise they follow from the data
        check_sizes = partial(ClusterConfig, rollout_config=config.rollout, training_config=config.trainer)
        yield "rollout trainer", check_sizes
    sections = "" if config.reward is not None else "reward rollout teacher"
    yield from ((sections, partial(resolve_reward, name)) for name in config.reward_names if name != REWARD_MODEL)
    yield "", partial(resolve_reward_manager, config.algo.reward_manager)
    yield from (("algo", check) for check in objective_checks(config.algo))
    yield "", partial(check_engine, config.rollout_engine)
    if not isinstance(config, PPORunConfig):
        yield "rollout", partial(check_temperature, config.rollout)
    if config.teacher is not None:
        yield "algo teacher", partial(check_teacher_used, config)
    for mode in Mode:
        rollout = config.rollout.for_mode(mode)
        if rollout.env_path is not None:
            sections = "rollout" if mode is Mode.EVAL else "reward rollout teacher"
            needs_reward = mode is Mode.TRAIN and not config.reward_names and config.teacher is None
            yield sections, partial(_check_environment, rollout, needs_reward)
        if rollout.agent is not None:
            yield "rollout", partial(load_agent, rollout.agent)
    for section in ("actor", "critic", "reference", "teacher", "reward_model"):
        yield from _role_checks(
            section, getattr(config, section), config.trainer, trained=section in ("actor", "critic")
        )


def _supervised_checks(config: SupervisedRunConfig, unread: Collection[str]) -> Iterator[Check]:
    """Yields the checks of a supervised run."""
    yield "", partial(check_supervised, config, unread)
    algo = vars(config)["algo"]
    if isinstance(algo, PreferenceConfig):
        yield "algo", partial(make_preference_objective, algo)
    elif isinstance(algo, RewardModelConfig):
        yield "algo", partial(make_reward_loss, algo)
    elif isinstance(algo, SFTConfig):
        yield "", partial(resolve_name, algo.loss_type, SFT_LOSSES, "SFT loss", other_field)
        yield "", partial(resolve_name, algo.loss_agg_mode, LOSS_AGG_MODES, "loss_agg_mode", other_field)
    yield from _role_checks(config.TRAINED, config.trained, config.trainer, trained=True)
    if isinstance(config, DPORunConfig):
        yield from _role_checks("reference", config.reference, config.trainer, trained=False)


def _shared_checks(config: RunConfig | SupervisedRunConfig) -> Iterator[Check]:
    """Yields the checks of every run: data, tokenizer, loggers, folders, keep_best and stop_when."""
    data, trainer = config.data, config.trainer
    part = None if data.eval_path is not None or data.eval_split == data.split else data.eval_split
    paths = (*source_paths(data.path), *source_paths(data.eval_path))
    yield from (("", partial(check_source, path, part)) for path in paths)
    if config.tokenizer not in (None, "byte"):
        yield "", partial(check_model_exists, config.tokenizer)
    yield "", partial(check_loggers, trainer.chosen_loggers, trainer.metrics_logging_options)
    if trainer.hub_model_id is not None:
        yield "trainer", partial(check_push_to_hub, trainer)
    evaluates = data.eval_path is not None or data.eval_split is not None or bool(data.eval_fraction)
    yield "data trainer", partial(_check_watched, trainer, evaluates)
    if trainer.resume is not None:
        yield "trainer", partial(Checkpoints(trainer.checkpoint_root, {}).find, trainer.resume)
        if trainer.resume == "latest":
            yield " ".join(field.name for field in dataclasses.fields(config)), partial(_check_resumed_numbers, config)
    elif trainer.run_dir is not None:
        yield "trainer", partial(check_no_run, trainer.run_dir)
    for key in ("run_dir", "checkpoint_root_directory"):
        if (folder := getattr(trainer, key)) is not None:
            yield "", partial(check_writable, folder, f"trainer.{key}")
            yield "", partial(check_unlocked, folder, f"trainer.{key}")


def _check_resumed_numbers(config: RunConfig | SupervisedRunConfig) -> None:
    """Raises CheckpointError: a number that a resumed run may not change differs from the checkpoint's.

    The run compares the other settings too, when "auto" has a value and all files are verified.
    """
    trainer = config.trainer
    checkpoint = Checkpoints(trainer.checkpoint_root, {}).find("latest")
    if checkpoint is None or trainer.allow_config_change:
        return
    try:
        before = flatten(Checkpoints.state(checkpoint)["settings"])
    except CheckpointError:
        return
    now = flatten(dump_tree(config))
    numbers = [key for key, value in now.items() if key in before and isinstance(value, int | float)]
    check_settings({key: before[key] for key in numbers}, {key: now[key] for key in numbers}, allow=False)


def _role_checks(section: str, role: RoleConfig | None, trainer: TrainingConfig, *, trained: bool) -> Iterator[Check]:
    """Yields the checks of a role: its model exists, and its optimizer and adapter are valid."""
    if role is None:
        return
    if role.model is not None:
        if is_ref(role.model):
            yield "", partial(resolve_callable, role.model, f"{section}.model")
        else:
            yield "", partial(check_model_exists, role.model)
        if role.lora is not None and not is_ref(role.model):
            yield section, partial(check_lora, role.model, role.lora, role.trust_remote_code)
    if trained:
        yield "", partial(check_optimizer, role.optim, trainer.checkpointing_options)
        yield "", partial(check_schedule, role.optim)


def _check_environment(rollout: RolloutConfig, needs_reward: bool) -> None:
    """Raises ConfigError: env_path names no environment, or there is no reward."""
    script = load_script(rollout.env_path, turns=rollout.max_turns)
    if needs_reward and script.environment is not None and not script.environment.has_reward:
        raise ConfigError(
            f"no reward: environment {script.name} has neither get_reward() nor get_turn_reward(); write one of them, "
            "or reward=file.py:function"
        )


def _check_watched(trainer: TrainingConfig, evaluates: bool) -> None:
    """Raises ConfigError if keep_best or stop_when read evaluations, and there are none."""
    watched = [] if trainer.keep_best is None else ["trainer.keep_best"]
    watched += [f"trainer.stop_when.{name}" for name in trainer.stop_when or {} if name.startswith("eval/")]
    if watched and not evaluates:
        raise ConfigError(
            f"{', '.join(watched)} needs evaluations, and there is no evaluation data; set data.eval_path, "
            "data.eval_split or data.eval_fraction"
        )


def check_rewards(config: RunConfig, train: Any, evaluation: Any) -> None:
    """Checks reward functions and the environment against the data, before a model is loaded.

    Args: config: of the run. train, evaluation: rows, ready-made batches or encoded prompts; None = there are none.
    Raises: ConfigError: a function, or `reset`, needs a column that is missing. DataError: a function can't read an
        answer.
    """
    first = first_row(train)
    columns: list[str] | None = None
    if isinstance(first, Prompt):
        columns = list(first.columns)
    elif isinstance(first, Mapping):
        prompt = find_prompt_column(first, config.data.prompt_column)
        columns = [name for name in first if name != prompt]
        columns += [ANSWER] if config.data.on_answered == "take_off" else []
    if columns is not None and config.rollout.env_path is not None:
        environment = load_script(config.rollout.env_path, turns=config.rollout.max_turns).environment
        if environment is not None:
            environment.check_columns(columns)
    if resolve_reward_manager(config.algo.reward_manager) is not RewardManager:
        return  # a reward manager of the user may add columns
    fns = resolve_rewards([name for name in config.reward_names if name != REWARD_MODEL])
    fields = {f.name: getattr(config.algo, f.name) for f in dataclasses.fields(config.algo)}
    checks: list[Callable[[], Any]] = [] if columns is None else [partial(check_columns, fns, columns, fields)]
    if config.trainer.on_reward_error == "raise":  # otherwise the run warns
        for rows, what in ((train, "rows"), (evaluation, "evaluation rows")):
            if has_random_access(rows) and not is_batch(first_row(rows), config.data.prompt_column):
                numbered = ((p.row, p.columns) if isinstance(p, Prompt) else (n, p) for n, p in enumerate(rows))
                checks.append(partial(check_answers, fns, numbered, what))
    raise_all(checks)


def check_teacher_used(config: RunConfig) -> None:
    """Raises ConfigError if the loss does not use the teacher."""
    if config.teacher is not None and teacher_column(policy_loss(config.algo)) is None:
        raise ConfigError(
            f"teacher has no effect: algo.policy_loss_fn={config.algo.policy_loss_fn!r} does not use one; set "
            "distillation or gkd, or leave teacher out"
        )
