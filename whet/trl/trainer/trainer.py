"""Trainer: implements transformers' Trainer interface: callbacks, state, logs, evaluation and checkpoints.

    Trainer -- RLTrainer -- GRPOTrainer, RLOOTrainer                                        rl/
            -- SupervisedTrainer -- SFTTrainer, RewardTrainer, DPOTrainer -- KTOTrainer     supervised/

A subclass makes the models and a learner from its arguments. `train` runs the learner, and a task (task.py) reports
the run's events to the trainer.
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
from whet.errors import ConfigError, format_value, lookup_error
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
from whet.trl.trainer.model import model_name, named_dtype, trusts_remote_code, with_revision
from whet.trl.trainer.not_provided import NOT_CALLED, missing_attribute
from whet.trl.trainer.peft_model import wrap_in_peft

__all__ = ["Trainer"]

log = logging.getLogger("whet")

_BUILTIN_CALLBACKS = {DefaultFlowCallback, PrinterCallback, ProgressCallback}
"""transformers' callbacks that don't call the model."""


class Trainer(HubMixin):
    """The base of whet.trl's trainers.

    Args:
        model: a hub name, a folder or a module.
        args: the configuration; None = its defaults, output_dir "{model}-{METHOD}".
        processing_class: the tokenizer; None = the model's.
        callbacks: transformers callbacks, classes or instances.
    """

    METHOD: ClassVar[str] = ""
    """The method's name, in the default folder."""
    TRAINED_BY: ClassVar[str] = ""
    """The method's name in a model card; "" = METHOD."""
    TAG: ClassVar[str] = ""
    """TRL's tag for a model trained by the method; "" = METHOD in lower case."""
    CONFIG: ClassVar[type[Arguments]] = Arguments
    """The class of the trainer's arguments."""
    NOT_CALLED: ClassVar[Mapping[str, str]] = NOT_CALLED
    """Methods of TRL's trainer that whet never calls -> the alternative."""
    models: Any
    """The run's RoleWorkers; the subclass makes them."""
    learner: Any
    """The learner that trains the models; the subclass makes it."""
    eval_dataset: Any
    """The evaluation data."""

    is_deepspeed_enabled = is_fsdp_enabled = is_model_parallel = False
    aux_loss_enabled = False
    """Whether the auxiliary loss of a mixture of experts is added."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Returns an argument: TRL's trainers have them as attributes. Else raises AttributeError with a fix."""
            return missing_attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute. Raises ConfigError: the name of an argument, because the trainer has read it already."""
        attributes = vars(self)
        is_new = name not in attributes and not hasattr(type(self), name)
        if is_new and "_snapshot" in attributes and name in self.args.TABLE and getattr(self, name) != value:
            problem = f"{type(self).__name__}.{name} = {value!r} would change nothing: the argument was read earlier"
            raise change_error(problem, name, type(self.args))
        super().__setattr__(name, value)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raises ConfigError for a subclass with a method that whet would never call."""
        super().__init_subclass__(**kwargs)
        for name, alternative in cls.NOT_CALLED.items():
            if hasattr(cls, name):
                raise ConfigError(
                    f"{cls.__name__}.{name} would never be called: whet trains by its own loop; {alternative}"
                )

    def __init__(
        self, model: str | nn.Module, args: Any, processing_class: Any, callbacks: Sequence[Any] | None
    ) -> None:
        self._original_model = model
        self._data_read: dict[str, Any] = {}
        """Attribute -> the data set that was read last."""
        name = model_name(model)
        args = self.CONFIG(f"{name.rstrip('/').rpartition('/')[2]}-{self.METHOD}") if args is None else args
        if not isinstance(args, self.CONFIG):
            actual = f"{type(args).__module__}.{type(args).__name__}"
            raise ConfigError(f"args is a {actual}; give whet.trl's {self.CONFIG.__name__}")
        tokenizer = with_revision(name, args) if processing_class is None else processing_class
        tokenizer = getattr(tokenizer, "tokenizer", None) or tokenizer  # a processor has a tokenizer for its texts
        self.args: Any = args
        trust = {"trust_remote_code": True} if trusts_remote_code(args) else {}
        self.processing_class = load_tokenizer(tokenizer, **trust)
        (enable_full_determinism if args.full_determinism else set_seed)(args.seed)
        if args.push_to_hub:
            check_hub_token(args.hub_token)
        if args.tf32 is not None:
            torch.backends.cuda.matmul.allow_tf32 = args.tf32
        if args.log_level != "passive" or not args.should_log:
            log.setLevel(args.get_process_log_level())
            transformers_logging.set_verbosity(args.get_process_log_level())
        if not isinstance(callbacks, list | tuple | None):
            raise ConfigError(f"callbacks must be a list, got {format_value(callbacks, 80)}")
        loggers = [] if not args.report_to else _reporting_callbacks(args.report_to)
        self.callback_handler = CallbackHandler(
            [DefaultFlowCallback, *loggers, *(callbacks or ())], None, self.processing_class, None, None
        )
        for callback in self.callback_handler.callbacks if args.logging_dir else ():
            if type(callback).__name__ == "TensorBoardCallback":
                callback.logging_dir = str(Path(args.logging_dir).expanduser())
        self.callback_handler.add_callback(PrinterCallback if args.disable_tqdm else ProgressCallback)
        self.control = TrainerControl()
        self.state = self._new_state()
        self.window, self.losses = MetricsWindow(), list[float]()
        self.run: Any = None
        self.scheduler: Any = None
        self.updates_per_epoch: int | None = None
        """The optimizer steps of an epoch; None = the data have no length."""
        self.max_steps = 0
        self.eval_rows: Mapping[str, Any] = {}
        """The evaluation sets by name; "" is the name of a single set."""
        self.accelerator = SimpleNamespace(
            device=args.device, is_main_process=args.should_log, is_local_main_process=args.local_process_index == 0,
            num_processes=args.world_size, process_index=args.process_index,
            local_process_index=args.local_process_index, unwrap_model=lambda model, *_, **__: model,
            wait_for_everyone=lambda: self.models.ranks.all_gather(None),
            print=print if args.should_log else lambda *_, **__: None,
        )  # fmt: skip

    def _new_state(self, **values: Any) -> TrainerState:
        """Returns the state of a run. Args: values: of a checkpoint; without them the run is a new one."""
        state = TrainerState(**(values or {"stateful_callbacks": self._stateful()}))
        state.is_world_process_zero, state.is_local_process_zero = self._is_zero()
        return state

    def _is_zero(self) -> tuple[bool, bool]:
        """Returns whether this process is the first of all, and of its machine."""
        return self.args.process_index == 0, self.args.local_process_index == 0

    def _stateful(self) -> list[Any]:
        return [c for c in [*self.callback_handler.callbacks, self.control] if isinstance(c, ExportableState)]

    def finish_init(self) -> None:
        """Connects callbacks and checkpoints to the models and the learner, and calls on_init_end."""
        if isinstance(self._original_model, str):
            saved_dtype = named_dtype(self.args, self.worker.loaded.saved_dtype)
            self.worker.loaded = dataclasses.replace(self.worker.loaded, saved_dtype=saved_dtype)
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
        best_metric_name(self.args, self.eval_rows, self.can_log)  # raises if no evaluation can have the metric
        self._snapshot = ArgumentSnapshot(self.args)
        self.models.checkpoints = TrainerCheckpoints(self, self.resumable_root)
        self.attention = AttentionSwitch(self.worker.module)
        self.attention.use_native()
        self.call_event("on_init_end")

    def optim(
        self, optimizers: tuple[Any, Any], cls_and_kwargs: tuple[Any, Any] | None
    ) -> OptimConfig | Callable[..., Any]:
        """Returns the optimizer's configuration from the arguments, or a factory of the user's optimizer.

        Args: optimizers: (optimizer, scheduler) or (None, None). cls_and_kwargs: optimizer_cls_and_kwargs.
        Raises: ConfigError: both arguments; a scheduler without an optimizer.
        """
        optimizer, self.scheduler = optimizers
        self._has_optimizer_class = cls_and_kwargs is not None
        if cls_and_kwargs is not None:
            if optimizer is not None or self.scheduler is not None:
                raise ConfigError("both optimizers and optimizer_cls_and_kwargs are set; give one of them")
            set_scheduler = partial(setattr, self, "scheduler")
            return factories.optimizer_from_class(*cls_and_kwargs, self.args, self.max_steps or 1, set_scheduler)
        if optimizer is not None and self.args.world_size > 1:
            raise ConfigError(
                f"optimizers has an optimizer over the whole model's weights, and each of {self.args.world_size} "
                "processes has only a shard of them; set optim and lr_scheduler_type, or give optimizer_cls_and_kwargs"
            )
        if optimizer is not None:
            return factories.existing_optimizer(optimizer, self.scheduler, self.args.max_grad_norm)
        if self.scheduler is not None:
            raise ConfigError("optimizers has a scheduler but no optimizer; give both, or set lr_scheduler_type")
        return optimizer_config(self.args, self.max_steps or None)

    # ---- attributes of transformers' Trainer ---------------------------------------------------------------------

    @property
    def role(self) -> Role:
        """The trained model's role."""
        return next(iter(self.models.trainers))

    @property
    def worker(self) -> ModelWorker:
        """The trained model's worker."""
        return self.models.trainers[self.role].worker

    @property
    def model(self) -> Any:
        """The model in training; with an adapter, PEFT's PeftModel around it."""
        return self._model

    @property
    def ref_model(self) -> Any:
        """The reference model; None if there is none, or if it is the trained model without its adapter."""
        reference = self.models.workers.get(Role.REFERENCE)
        return None if reference is None or reference.module is self.worker.module else reference.module

    @property
    def optimizer(self) -> Any:
        """The optimizer, over the fp32 master weights."""
        return self.callback_handler.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The learning-rate schedule: the user's, or a view of whet's own."""
        return self.callback_handler.lr_scheduler

    def get_num_trainable_parameters(self) -> int:
        """Returns the number of trained parameters."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def model_wrapped(self) -> Any:
        """The model; whet does not wrap it."""
        return self.model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self.processing_class

    def is_world_process_zero(self) -> bool:
        """Returns whether this process writes files."""
        return self._is_zero()[0]

    def is_local_process_zero(self) -> bool:
        """Returns whether this process is the first of its machine."""
        return self._is_zero()[1]

    def end(self) -> None:
        """Does nothing: processes and loggers end by themselves."""

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Adds a callback after the others."""
        self.callback_handler.add_callback(callback)

    def remove_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        """Removes a callback, or the first of a class."""
        self.callback_handler.remove_callback(callback)

    def pop_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> Any:
        """Removes and returns a callback, or the first of a class."""
        return self.callback_handler.pop_callback(callback)

    # ---- methods that a subclass overrides -----------------------------------------------------------------------

    @property
    def updates_per_step(self) -> int:
        """The optimizer steps of a learner's step."""
        return 1

    @property
    def rows_per_update(self) -> int:
        """The rows of an optimizer step."""
        raise NotImplementedError

    def train_rows(self) -> Any:
        """Returns the rows to train on. Raises ConfigError: there are none."""
        raise NotImplementedError

    def eval_sets(self, data: Any) -> Mapping[str, Any]:
        """Evaluation data by name, in the form that `measure` takes; "" is the name of a single set."""
        raise NotImplementedError

    def can_log(self, metric: str) -> bool:
        """Returns whether an evaluation can have a metric of this name; reward functions add metrics."""
        return True

    def measure(self, rows: Any) -> dict[str, float]:
        """Returns the metrics of an evaluation set, under TRL's names."""
        raise NotImplementedError

    def resume_from(self, folder: str | None) -> None:
        """Sets the folder that the next run resumes from; None = it starts anew."""
        raise NotImplementedError

    def record_step(self, row: Mapping[str, Any], step: BaseStep) -> None:
        """Records a learner's finished step. Args: row: the metrics under whet's names. step: the step's record."""
        raise NotImplementedError

    # ---- training ------------------------------------------------------------------------------------------------

    @VOCABULARY.translating()
    def train(self, resume_from_checkpoint: bool | str | None = None, **kwargs: Any) -> TrainOutput:
        """Trains to max_steps or the end of the last epoch.

        Args: resume_from_checkpoint: a checkpoint's folder, or True = the newest checkpoint in output_dir.
        Returns: optimizer steps, mean loss, and the run's metrics.
        Raises: CheckpointError: there is no checkpoint to resume from.
        """
        if kwargs:
            raise ConfigError(f"train() has no argument {sorted(kwargs)[0]!r}; give resume_from_checkpoint only")
        self._snapshot.check()
        self.read_changes()
        self._restart_optimizer()
        factories.begin_schedule(self)
        resume = None
        if resume_from_checkpoint:
            find = partial(find_checkpoint, self.args.output_dir, resume_from_checkpoint)
            resume = self.models.ranks.call_on_writer(find)
        self.resume_from(None if resume is None else str(resume))
        self.state = self._new_state()
        self.window, self.losses, started = MetricsWindow(), [], time.monotonic()
        with self.attention.whet():
            self.learner.train(self.train_rows())
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            self._load_best(Path(self.state.best_model_checkpoint))
        seconds = time.monotonic() - started
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

    @property
    def resumable_root(self) -> str | None:
        """The folder of resumable checkpoints; None = none are written."""
        return None if self.args.save_strategy == "no" or self.args.save_only_model else self.args.output_dir

    def read_changes(self) -> None:
        """Reads the data, the length of the run and the functions again if they were replaced."""
        raise NotImplementedError

    def _restart_optimizer(self) -> None:
        """Resets the optimizer and its schedule, and sets the folder of checkpoints, for a new run."""
        root = self.resumable_root
        self.models.checkpoints.root = None if root is None else Path(root).absolute()
        optim = self.worker.optim
        if optim is not None and optim.config is not None:
            optim.restart(optimizer_config(self.args, self.max_steps or None))
            handler: Any = self.callback_handler
            handler.optimizer = optim.optimizer
        elif self._has_optimizer_class and optim is not None and optim.updates:
            raise ConfigError(
                "optimizer_cls_and_kwargs: the schedule has ended, so a second train() would train nothing; make "
                "another trainer of trainer.model, or give optimizers=(optimizer, scheduler)"
            )

    def has_changed(self, name: str) -> bool:
        """Returns whether an attribute is another object than at the last call. Args: name: a data set's attribute."""
        is_same = name in self._data_read and self._data_read[name] is getattr(self, name)
        self._data_read[name] = getattr(self, name)
        return not is_same

    def read_eval_data(self) -> None:
        """Reads the evaluation data if they have changed."""
        if self.has_changed("raw_eval_dataset"):
            self.eval_rows = self.eval_sets(self.raw_eval_dataset)

    @property
    def raw_eval_dataset(self) -> Any:
        """The evaluation data, before they are encoded."""
        return self.eval_dataset

    def begin(self, *, resumed: bool) -> None:
        """Initializes the state at the beginning of a run."""
        args, state = self.args, self.state
        state.max_steps, state.train_batch_size = self.max_steps, args.per_device_train_batch_size
        state.num_train_epochs = math.ceil(self.max_steps / self.updates_per_epoch) if self.updates_per_epoch else 1
        state.compute_steps(args, self.max_steps)
        self.control.should_training_stop = False
        if resumed:
            log.info("resumed after %d optimizer steps", state.global_step)

    def set_epoch(self) -> None:
        """Computes state.epoch from the optimizer steps; for a stream, it is the finished share of the run."""
        self.state.epoch = self.state.global_step / (self.updates_per_epoch or max(self.state.max_steps, 1))

    def at_epoch_end(self) -> bool:
        """Returns whether an epoch has ended; for a stream, whether the run has."""
        return self.state.global_step % (self.updates_per_epoch or self.state.max_steps) == 0

    def call_event(self, event: str, **kwargs: Any) -> None:
        """Calls an event of all callbacks. If a user's callback handles it, the model has native attention."""
        with self.attention.native() if self._has_handler(event) else nullcontext():
            self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control, **kwargs)

    def _has_handler(self, event: str) -> bool:
        """Returns whether a user's callback overrides an event."""
        base = getattr(TrainerCallback, event)
        methods = [getattr(c, event) for c in self.callback_handler.callbacks if type(c) not in _BUILTIN_CALLBACKS]
        return any(getattr(method, "__func__", method) is not base for method in methods)

    # ---- evaluation ----------------------------------------------------------------------------------------------

    @VOCABULARY.translating()
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluates on the evaluation data. For each set, logs the metrics and calls on_evaluate.

        Args: eval_dataset: data, or the name of one of the trainer's sets; None = all the trainer's sets. ignore_keys:
            has no effect. metric_key_prefix: begins the metrics' names, before the set's name.
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
                metrics |= self._evaluate_set(rows, f"{metric_key_prefix}_{name}" if name else metric_key_prefix)
        return metrics if self.state.epoch is None else {**metrics, "epoch": self.state.epoch}

    def _evaluate_set(self, rows: Any, prefix: str) -> dict[str, float]:
        started = time.monotonic()
        measured = self.measure(rows)
        seconds = time.monotonic() - started
        measured |= {
            "runtime": round(seconds, 4),
            "samples_per_second": round(len(rows) / max(seconds, 1e-9), 3),
            "steps_per_second": round(1 / max(seconds, 1e-9), 3),
            "num_tokens": float(self.state.num_input_tokens_seen),
        }
        metrics = {n if n.startswith(f"{prefix}_") else f"{prefix}_{n}": value for n, value in measured.items()}
        self.log(dict(metrics))
        self.call_event("on_evaluate", metrics=metrics)
        return metrics

    # ---- logs ----------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds a row with epoch and step to state.log_history, and calls on_log. Args: start_time: has no effect."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.call_event("on_log", logs=logs)

    def log_window(self, totals: dict[str, float] | None = None) -> None:
        """Logs the means since the last log. Args: totals: a finished run's totals, which come first in the row."""
        means = self.window.take()
        if totals is not None:
            totals |= {n: v for n, v in means.items() if n not in MetricsWindow.FIRST}
        self.log(means if totals is None else totals)

    def record_best(self, metrics: Mapping[str, float]) -> None:
        """Updates the best value of metric_for_best_model, and steps a schedule that follows it."""
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
        """Writes a checkpoint without optimizer state, for save_only_model or save_strategy="no"."""
        folder = checkpoint_path(self.args.output_dir, self.state.global_step)
        self.prepare_save()
        if self.args.should_save:
            folder.parent.mkdir(parents=True, exist_ok=True)
            Checkpoints.export(folder, self.run.step, self.worker, self.processing_class)
        else:  # it gives its shards to the first process
            self.worker.export(None)
        self.save_user_files(folder)
        if self.args.should_save:
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
        if self.args.should_save:
            rotate_checkpoints(self.args.output_dir, self.args.save_total_limit, [folder, *best])
        self.call_event("on_save")

    def _load_best(self, folder: Path) -> None:
        log.info("loading the best model from %s (%s)", folder, self.state.best_metric)
        self.models.checkpoints.load_best(folder)

    def resume_state(self) -> dict[str, Any]:
        """Returns the trainer's part of a checkpoint: its state, and the user's schedule's state."""
        schedule = {} if self.scheduler is None else factories.serializable_state(self.scheduler.state_dict())
        return {"state": json.dumps(dataclasses.asdict(self.state)), "scheduler": schedule}

    def load_resume_state(self, saved: Mapping[str, Any]) -> None:
        """Restores `resume_state`. If the best checkpoint has moved, it is expected in output_dir."""
        self.state = self._new_state(**json.loads(saved["state"]))
        best = self.state.best_model_checkpoint
        if best is not None and not Path(best).is_dir():
            self.state.best_model_checkpoint = str(Path(self.args.output_dir) / Path(best).name)
        if self.scheduler is not None and saved["scheduler"]:
            factories.restore_schedule(self, saved["scheduler"])

    def close(self) -> None:
        """Frees the engine and the optimizers; the model stays loaded."""
        self.learner.close()


def _reporting_callbacks(names: Sequence[str]) -> list[Any]:
    """Returns the callbacks that transformers has for the loggers in report_to."""
    from transformers.integrations import integration_utils

    try:
        return integration_utils.get_reporting_integration_callbacks(list(names))
    except ValueError as error:
        raise ConfigError(f"report_to={list(names)}: {error}") from error
