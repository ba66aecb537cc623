"""Trainer: the interface of transformers' Trainer: callbacks, state, logs, evaluation and checkpoints.

    Trainer -- RLTrainer -- GRPOTrainer, RLOOTrainer                                        rl/
            -- SupervisedTrainer -- SFTTrainer, RewardTrainer, DPOTrainer -- KTOTrainer     supervised/

A subclass makes the models and a learner from its arguments. `train` runs the learner, and a task (task.py) reports the
events of the run to the trainer.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, enable_full_determinism, set_seed
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    ExportableState,
    PrinterCallback,
    ProgressCallback,
)
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging as transformers_logging

from whet.config import OptimConfig, Role
from whet.data.tokenizer import load_tokenizer
from whet.errors import ConfigError, lookup_error
from whet.hub.push import check_hub_token
from whet.learners.step import BaseStep
from whet.train.role_checkpoints import Checkpoints
from whet.train.worker import ModelWorker
from whet.trl.config.arguments import Arguments
from whet.trl.config.translate import optimizer_config
from whet.trl.trainer import optimizers as factories
from whet.trl.trainer.argument_changes import ArgumentSnapshot, change_error
from whet.trl.trainer.attention_switch import AttentionSwitch
from whet.trl.trainer.checkpoints import TrainerCheckpoints, checkpoint_path, find_checkpoint, rotate_checkpoints
from whet.trl.trainer.hub import HubMixin
from whet.trl.trainer.messages import VOCABULARY
from whet.trl.trainer.metrics import MetricsWindow, best_metric_name
from whet.trl.trainer.model import model_name, trusts_remote_code, with_revision
from whet.trl.trainer.not_provided import NOT_CALLED, missing_attribute
from whet.trl.trainer.peft_model import wrap_in_peft

__all__ = ["Trainer"]

log = logging.getLogger("whet")

_USUAL = {DefaultFlowCallback, PrinterCallback, ProgressCallback}
"""Callbacks of transformers, which don't call the model."""


class Trainer(HubMixin):
    """The base of whet.trl's trainers.

    Args:
        model: a hub name, a folder or a module.
        args: the configuration; None = its defaults, output_dir "{model}-{METHOD}".
        processing_class: the tokenizer; None = the model's.
        callbacks: of transformers, classes or instances.
    """

    METHOD: ClassVar[str] = ""
    """The method's name, in the default folder."""
    TRAINED_BY: ClassVar[str] = ""
    """The method's name in a model card; "" = METHOD."""
    TAG: ClassVar[str] = ""
    """TRL's tag for a model trained by the method; "" = METHOD in lower case."""
    CONFIG: ClassVar[type[Arguments]] = Arguments
    """The class of its arguments."""
    NOT_CALLED: ClassVar[Mapping[str, str]] = NOT_CALLED
    """Methods of TRL's trainer that nothing calls here -> the alternative."""
    models: Any
    """The RoleWorkers of the run; the subclass makes them."""
    learner: Any
    """What trains them; the subclass makes it."""
    eval_dataset: Any
    """As it was given, or set since."""

    is_deepspeed_enabled = is_fsdp_enabled = is_model_parallel = False
    aux_loss_enabled = False
    """Whether the auxiliary loss of a mixture of experts is added."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """An argument, which TRL's trainers have as an attribute, or an AttributeError with the alternative."""
            return missing_attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute. Raises ConfigError: it has the name of an argument, which was read earlier."""
        held = vars(self)
        is_new = name not in held and not hasattr(type(self), name)
        if is_new and "_snapshot" in held and name in self.args.TABLE and getattr(self, name) != value:
            problem = f"{type(self).__name__}.{name} = {value!r} would change nothing: the argument was read earlier"
            raise change_error(problem, name, type(self.args))
        super().__setattr__(name, value)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuses a subclass with a method that nothing would call, its own or of another base."""
        super().__init_subclass__(**kwargs)
        for name, instead in cls.NOT_CALLED.items():
            if hasattr(cls, name):
                raise ConfigError(
                    f"{cls.__name__}.{name} would never be called: whet trains by its own loop; {instead}"
                )

    def __init__(
        self, model: str | nn.Module, args: Any, processing_class: Any, callbacks: Sequence[Any] | None
    ) -> None:
        self._original_model = model
        self._data_read: dict[str, Any] = {}
        """The data sets that were read last, by attribute."""
        name = model_name(model)
        args = self.CONFIG(f"{name.rstrip('/').rpartition('/')[2]}-{self.METHOD}") if args is None else args
        if not isinstance(args, self.CONFIG):
            wanted = self.CONFIG.__name__
            raise ConfigError(f"args is a {type(args).__module__}.{type(args).__name__}; take whet.trl's {wanted}")
        inner = getattr(processing_class, "tokenizer", None)  # a processor has one for its texts
        given = with_revision(name, args) if processing_class is None else processing_class if inner is None else inner
        self.args: Any = args
        trust = {"trust_remote_code": True} if trusts_remote_code(args) else {}
        self.processing_class = load_tokenizer(given, **trust)
        (enable_full_determinism if args.full_determinism else set_seed)(args.seed)
        if args.push_to_hub:
            check_hub_token(args.hub_token)
        if args.tf32 is not None:
            torch.backends.cuda.matmul.allow_tf32 = args.tf32
        if args.log_level != "passive":
            log.setLevel(args.get_process_log_level())
            transformers_logging.set_verbosity(args.get_process_log_level())
        own = [] if not args.report_to else _reporting(args.report_to)
        self.callback_handler = CallbackHandler(
            [DefaultFlowCallback, *own, *(callbacks or ())], None, self.processing_class, None, None
        )
        for callback in self.callback_handler.callbacks if args.logging_dir else ():
            if type(callback).__name__ == "TensorBoardCallback":
                callback.logging_dir = str(Path(args.logging_dir).expanduser())
        self.callback_handler.add_callback(PrinterCallback if args.disable_tqdm else ProgressCallback)
        self.control = TrainerControl()
        self.state = TrainerState(stateful_callbacks=self._stateful())
        self.window, self.losses = MetricsWindow(), list[float]()
        self.run: Any = None
        self.scheduler: Any = None
        self.updates_per_epoch: int | None = None
        """Optimizer steps of a pass over the data; None = the data have no length."""
        self.max_steps = 0
        self.eval_rows: Mapping[str, Any] = {}
        """The evaluation sets by name; "" is that of a single one."""
        self.accelerator = SimpleNamespace(
            device=args.device, is_main_process=True, is_local_main_process=True, num_processes=1, process_index=0,
            local_process_index=0, unwrap_model=lambda model, *_, **__: model, wait_for_everyone=lambda: None,
            print=print,
        )  # fmt: skip

    def _stateful(self) -> list[Any]:
        return [c for c in [*self.callback_handler.callbacks, self.control] if isinstance(c, ExportableState)]

    def finish_init(self) -> None:
        """Connects callbacks and checkpoints to the model, and calls on_init_end; models and learner are made."""
        self._model = wrap_in_peft(self.worker, self._original_model)
        self._model.add_model_tags(["whet", self.TAG or self.METHOD.lower()])
        self.callback_handler.model = self._model
        self.accelerator.device = self.worker.device
        optim = self.worker.optim
        handler: Any = self.callback_handler
        handler.optimizer = None if optim is None else optim.optimizer
        handler.lr_scheduler = factories.LRView(self) if self.scheduler is None else self.scheduler
        if coefficient := vars(self.worker.module.config).get("router_aux_loss_coef"):
            log.warning("router_aux_loss_coef=%s: the auxiliary loss of the experts is not added", coefficient)
        best_metric_name(self.args, self.eval_rows, self.can_log)  # raises for a metric that no evaluation can have
        self._snapshot = ArgumentSnapshot(self.args)
        self.models.checkpoints = TrainerCheckpoints(self, self.resumable_root)
        self.attention = AttentionSwitch(self.worker.module)
        self.attention.use_native()
        self.call_event("on_init_end")

    def optim(self, optimizers: tuple[Any, Any], made_of: tuple[Any, Any] | None) -> OptimConfig | Callable[..., Any]:
        """The optimizer of the arguments, a given one with its schedule, or one of a given class.

        Args: made_of: optimizer_cls_and_kwargs.
        Raises: ConfigError: both; a schedule without an optimizer.
        """
        own, self.scheduler = optimizers
        self._has_own_class = made_of is not None
        if made_of is not None:
            if own is not None or self.scheduler is not None:
                raise ConfigError("optimizers and optimizer_cls_and_kwargs can't both be; give one of them")
            keep = partial(setattr, self, "scheduler")
            return factories.optimizer_from_class(*made_of, self.args, self.max_steps or 1, keep)
        if own is not None:
            return factories.existing_optimizer(own, self.scheduler, self.args.max_grad_norm)
        if self.scheduler is not None:
            raise ConfigError("optimizers has a schedule and no optimizer; give both, or set lr_scheduler_type")
        return optimizer_config(self.args, self.max_steps or None)

    # ---- what a user reads ---------------------------------------------------------------------------------------

    @property
    def role(self) -> Role:
        """The role of the model in training."""
        return next(iter(self.models.trainers))

    @property
    def worker(self) -> ModelWorker:
        """The worker of the model in training."""
        return self.models.trainers[self.role].worker

    @property
    def model(self) -> Any:
        """The model in training; with an adapter, PEFT's PeftModel around it."""
        return self._model

    @property
    def ref_model(self) -> Any:
        """The reference; None without one, and where it is the model in training without its adapter."""
        held = self.models.workers.get(Role.REFERENCE)
        return None if held is None or held.module is self.worker.module else held.module

    @property
    def optimizer(self) -> Any:
        """The optimizer, over the fp32 masters."""
        return self.callback_handler.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The schedule: a given one, or a view of whet's own."""
        return self.callback_handler.lr_scheduler

    def get_num_trainable_parameters(self) -> int:
        """The number of trained parameters."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def model_wrapped(self) -> Any:
        """The model: nothing wraps it."""
        return self.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self.processing_class

    def is_world_process_zero(self) -> bool:
        """Whether this is the process that writes."""
        return True

    is_local_process_zero = is_world_process_zero

    def end(self) -> None:
        """Does nothing: one process trains, and loggers end by themselves."""

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Adds a callback after the others."""
        self.callback_handler.add_callback(callback)

    def remove_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Removes a callback, or the first of a class."""
        self.callback_handler.remove_callback(callback)

    def pop_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> Any:
        """Removes and returns a callback, or the first of a class."""
        return self.callback_handler.pop_callback(callback)

    # ---- what a front says -----------------------------------------------------------------------------------------

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a step of the learner."""
        return 1

    @property
    def rows_per_update(self) -> int:
        """Rows of an optimizer step."""
        raise NotImplementedError

    def train_rows(self) -> Any:
        """The rows to train on. Raises ConfigError: there are none."""
        raise NotImplementedError

    def eval_sets(self, data: Any) -> Mapping[str, Any]:
        """Evaluation data by name, in the form that `measure` takes; "" is the name of a single set."""
        raise NotImplementedError

    def can_log(self, metric: str) -> bool:
        """Whether an evaluation can have a metric of this name; reward functions add metrics."""
        return True

    def measure(self, rows: Any) -> dict[str, float]:
        """The metrics of an evaluation set, under TRL's names."""
        raise NotImplementedError

    def resume_from(self, folder: str | None) -> None:
        """Sets what the next run resumes from; None = it begins anew."""
        raise NotImplementedError

    def record_step(self, row: Mapping[str, Any], step: BaseStep) -> None:
        """Records a finished step of the learner. Args: row: its metrics, under whet's names. step: its record."""
        raise NotImplementedError

    # ---- training ------------------------------------------------------------------------------------------------

    @VOCABULARY.translating()
    def train(self, resume_from_checkpoint: bool | str | None = None, **kwargs: Any) -> TrainOutput:
        """Trains to max_steps or the end of the last epoch.

        Args: resume_from_checkpoint: True = go on from the newest checkpoint in output_dir, or a checkpoint's folder.
        Returns: optimizer steps, mean loss, and the numbers of the run.
        Raises: CheckpointError: nothing to resume.
        """
        if kwargs:
            raise ConfigError(f"train() takes no {sorted(kwargs)[0]!r}; give resume_from_checkpoint alone")
        self._snapshot.check()
        self.read_changes()
        self._restart_optimizer()
        factories.begin_schedule(self)
        resume = None if not resume_from_checkpoint else find_checkpoint(self.args.output_dir, resume_from_checkpoint)
        self.resume_from(None if resume is None else str(resume))
        self.state = TrainerState(stateful_callbacks=self._stateful())
        self.window, self.losses, started = MetricsWindow(), [], time.monotonic()
        with self.attention.whet():
            self.learner.train(self.train_rows())
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            self._load_best(Path(self.state.best_model_checkpoint))
        return self._finish(time.monotonic() - started)

    @property
    def resumable_root(self) -> str | None:
        """The folder of checkpoints that a run can be resumed from; None = none are written."""
        return None if self.args.save_strategy == "no" or self.args.save_only_model else self.args.output_dir

    def read_changes(self) -> None:
        """Reads again the data, the length of the run and the functions, which may have been set since."""
        raise NotImplementedError

    def _restart_optimizer(self) -> None:
        """Makes the optimizer anew, its schedule at the beginning, and moves the checkpoints where args say."""
        root = self.resumable_root
        self.models.checkpoints.root = None if root is None else Path(root).absolute()
        held = self.worker.optim
        if held is not None and held.config is not None:
            held.restart(optimizer_config(self.args, self.max_steps or None))
            handler: Any = self.callback_handler
            handler.optimizer = held.optimizer
        elif self._has_own_class and held is not None and held.updates:
            raise ConfigError(
                "optimizer_cls_and_kwargs: its schedule is at its end, and train() a second time would train nothing; "
                "make another trainer of trainer.model, or give optimizers=(optimizer, scheduler)"
            )

    def has_changed(self, name: str) -> bool:
        """Whether a data set is another object than at the last call. Args: name: its attribute."""
        is_same = name in self._data_read and self._data_read[name] is getattr(self, name)
        self._data_read[name] = getattr(self, name)
        return not is_same

    def read_eval_data(self) -> None:
        """Reads the evaluation data where they have changed."""
        if self.has_changed("given_eval"):
            self.eval_rows = self.eval_sets(self.given_eval)

    @property
    def given_eval(self) -> Any:
        """The evaluation data as they were given or set since."""
        return self.eval_dataset

    def _finish(self, seconds: float) -> TrainOutput:
        steps = self.state.global_step
        samples = steps * self.rows_per_update
        metrics = {
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(samples / max(seconds, 1e-9), 3),
            "train_steps_per_second": round(steps / max(seconds, 1e-9), 3),
            "total_flos": self.state.total_flos,
            "train_loss": sum(self.losses) / max(len(self.losses), 1),
        }
        self.log_window(metrics)
        self.call_event("on_train_end")
        return TrainOutput(steps, metrics["train_loss"], metrics)

    def begin(self, *, resumed: bool) -> None:
        """Fills in the state at the beginning of a run."""
        args, state = self.args, self.state
        state.max_steps, state.train_batch_size = self.max_steps, args.per_device_train_batch_size
        state.num_train_epochs = math.ceil(self.max_steps / self.updates_per_epoch) if self.updates_per_epoch else 1
        state.compute_steps(args, self.max_steps)
        self.control.should_training_stop = False
        if resumed:
            log.info("resumed after %d optimizer steps", state.global_step)

    def set_epoch(self) -> None:
        """Computes state.epoch from the optimizer steps; for a stream, the finished share of the run."""
        self.state.epoch = self.state.global_step / (self.updates_per_epoch or max(self.state.max_steps, 1))

    def at_epoch_end(self) -> bool:
        """Whether an epoch is over; for a stream, the run."""
        return self.state.global_step % (self.updates_per_epoch or self.state.max_steps) == 0

    def call_event(self, event: str, **kwargs: Any) -> None:
        """Calls an event of all callbacks. Where one of the user's handles it, the model has its native attention."""
        with self.attention.native() if self._has_handler(event) else nullcontext():
            self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control, **kwargs)

    def _has_handler(self, event: str) -> bool:
        """Whether a callback of the user's overrides an event."""
        base = getattr(TrainerCallback, event)
        own = [getattr(c, event) for c in self.callback_handler.callbacks if type(c) not in _USUAL]
        return any(getattr(method, "__func__", method) is not base for method in own)

    # ---- evaluation ----------------------------------------------------------------------------------------------

    @VOCABULARY.translating()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Measures on the evaluation data. For each set, logs the result and calls on_evaluate.

        Args: eval_dataset: in place of the trainer's; the name of one of several, or data. ignore_keys: not used.
            metric_key_prefix: of the names; the name of a set follows it.
        Returns: the metrics of all sets, and the epoch.
        """
        self.read_eval_data()
        sets = self.eval_rows
        if isinstance(eval_dataset, str):
            if eval_dataset not in sets:
                raise ConfigError(f"there is no evaluation set {eval_dataset!r}; there are {', '.join(sets) or 'none'}")
            sets = {eval_dataset: sets[eval_dataset]}
        elif eval_dataset is not None:
            sets = self.eval_sets(eval_dataset)
        if not sets:
            raise ConfigError("evaluation needs eval_dataset; give it to the trainer, or to evaluate()")
        metrics: dict[str, float] = {}
        for name, rows in sets.items():
            with self.attention.whet():
                metrics |= self._evaluated(rows, f"{metric_key_prefix}_{name}" if name else metric_key_prefix)
        return metrics if self.state.epoch is None else {**metrics, "epoch": self.state.epoch}

    def _evaluated(self, rows: Any, prefix: str) -> dict[str, float]:
        started = time.monotonic()
        found = self.measure(rows)
        seconds = time.monotonic() - started
        found |= {
            "runtime": round(seconds, 4),
            "samples_per_second": round(len(rows) / max(seconds, 1e-9), 3),
            "steps_per_second": round(1 / max(seconds, 1e-9), 3),
            "num_tokens": float(self.state.num_input_tokens_seen),
        }
        metrics = {n if n.startswith(f"{prefix}_") else f"{prefix}_{n}": value for n, value in found.items()}
        self.log(dict(metrics))
        self.call_event("on_evaluate", metrics=metrics)
        return metrics

    # ---- logs ----------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds a row to state.log_history, with epoch and step, and calls on_log. Args: start_time: not used."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.call_event("on_log", logs=logs)

    def log_window(self, of_run: dict[str, float] | None = None) -> None:
        """Logs the means since the last log. Args: of_run: totals of a finished run, logged with them."""
        found = self.window.take()
        if of_run is not None:
            of_run |= {n: v for n, v in found.items() if n not in MetricsWindow.FIRST}
        self.log(found if of_run is None else of_run)

    def record_best(self, metrics: Mapping[str, float]) -> None:
        """Keeps the best value of metric_for_best_model, and steps a schedule that follows it."""
        args, state = self.args, self.state
        name = best_metric_name(args, self.eval_rows, self.can_log)
        if name is None:
            return
        if name not in metrics:
            raise lookup_error("metric_for_best_model", name, metrics)
        factories.step_schedule(self, metrics[name])
        value, best = metrics[name], state.best_metric
        if best is None or (value > best if args.greater_is_better else value < best):
            state.best_metric, state.best_global_step = value, state.global_step
            if args.save_strategy == "best":
                self.control.should_save = True

    # ---- files ---------------------------------------------------------------------------------------------------

    def save_weights(self) -> None:
        """Writes a checkpoint without optimizer state: with save_only_model, or where save_strategy is "no"."""
        folder = checkpoint_path(self.args.output_dir, self.state.global_step)
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.prepare_save()
        Checkpoints.export(folder, self.run.step, self.worker, self.processing_class)
        self.save_user_files(folder)
        self.state.save_to_json(str(folder / "trainer_state.json"))
        self.after_save(folder)

    def prepare_save(self) -> None:
        """Updates the state before a checkpoint is written."""
        state = self.state
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(checkpoint_path(self.args.output_dir, state.global_step))
        state.stateful_callbacks = TrainerState(stateful_callbacks=self._stateful()).stateful_callbacks

    def after_save(self, folder: Path) -> None:
        """Removes the oldest checkpoints after one was written, and calls on_save."""
        state = self.state
        best = [Path(state.best_model_checkpoint)] if state.best_model_checkpoint else []
        rotate_checkpoints(self.args.output_dir, self.args.save_total_limit, [folder, *best])
        self.call_event("on_save")

    def _load_best(self, folder: Path) -> None:
        log.info("loading the best model, of %s (%s)", folder, self.state.best_metric)
        self.models.checkpoints.load_best(folder)

    def resume_state(self) -> dict[str, Any]:
        """The trainer's part of a checkpoint: its state, and the state of a given schedule."""
        schedule = {} if self.scheduler is None else factories.serializable_state(self.scheduler.state_dict())
        return {"state": json.dumps(dataclasses.asdict(self.state)), "scheduler": schedule}

    def load_resume_state(self, held: Mapping[str, Any]) -> None:
        """Restores `resume_state`; the best checkpoint is looked for in output_dir where the folder was moved."""
        self.state = TrainerState(**json.loads(held["state"]))
        best = self.state.best_model_checkpoint
        if best is not None and not Path(best).is_dir():
            self.state.best_model_checkpoint = str(Path(self.args.output_dir) / Path(best).name)
        if self.scheduler is not None and held["scheduler"]:
            factories.restore_schedule(self, held["scheduler"])

    def close(self) -> None:
        """Frees the engine and the optimizers; the model stays."""
        self.learner.close()


def _reporting(names: Sequence[str]) -> list[Any]:
    """The callbacks of loggers that transformers has."""
    from transformers.integrations import integration_utils

    try:
        return integration_utils.get_reporting_integration_callbacks(list(names))
    except ValueError as error:
        raise ConfigError(f"report_to={list(names)}: {error}") from error
