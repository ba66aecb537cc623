"""SupervisedTrainer: the base of SFTTrainer, DPOTrainer, KTOTrainer and RewardTrainer.

    rows -> Examples (examples.py, packs.py) -> one of whet's supervised learners

A step is one update of per_device_train_batch_size * gradient_accumulation_steps rows in each process. Read `__init__`
first, then the methods that a subclass overrides: `encoder`, `make_models`, `make_learner`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from datasets import Dataset
from torch import nn

from whet.config import Mode, RoleConfig, SupervisedDataConfig, SupervisedTrainingConfig
from whet.data.encoder import FunctionEncoder
from whet.data.supervised import RowEncoder
from whet.errors import ConfigError
from whet.learners.step import ExampleStep
from whet.learners.supervised import SupervisedLearner
from whet.metrics import flat
from whet.train.supervised_models import SupervisedModels
from whet.trl.config.translate import training_fields
from whet.trl.supervised.examples import ExampleStream, Pack, make_examples
from whet.trl.supervised.predictions import compute_user_metrics
from whet.trl.supervised.tokenizer import prepare_tokenizer, set_eos_token
from whet.trl.trainer.data import check_dataset, check_evaluation, load_eval_sets
from whet.trl.trainer.messages import VOCABULARY
from whet.trl.trainer.metrics import supervised_metrics
from whet.trl.trainer.model import module_dtype, prepare_model, unwrap_peft
from whet.trl.trainer.not_provided import NOT_CALLED
from whet.trl.trainer.task import SupervisedCallbackTask
from whet.trl.trainer.trainer import Trainer
from whet.types import Example
from whet.util.garbage import pause_collector

__all__ = ["SupervisedTrainer", "learner_class"]

_ROWS = "give the rows as they are to be trained on"
_ALTERNATIVES = {
    "compute_loss_func": "write a loss of your own for whet's learner (whet docs supervised), or choose loss_type",
    "compute_metrics": "write a callback with on_evaluate, which gets the metrics",
    "data_collator": "rows are packed, never padded; choose the trained tokens by completion_only_loss and "
    "assistant_only_loss, or give rows of input_ids and labels",
}
"""Unsupported argument -> the alternative."""


class SupervisedTrainer(Trainer):
    """The base of the supervised trainers; SFTTrainer describes the arguments."""

    models: SupervisedModels
    COLUMNS: ClassVar[Any]
    """Examples -> the columns of TRL's trainer."""
    raw_train_dataset: Any
    """The data set to train on, before it is encoded."""
    REFUSED: ClassVar[tuple[str, ...]] = ("compute_loss_func", "data_collator")
    """TRL's arguments that are not supported."""
    NOT_CALLED: ClassVar[Mapping[str, str]] = {
        **NOT_CALLED,
        "_compute_loss": "write a loss for whet's learner (whet docs supervised), or choose loss_type",
        "_prepare_dataset": _ROWS,
        "compute_loss": "write a loss for whet's learner (whet docs supervised), or choose loss_type",
    }

    @pause_collector()
    @VOCABULARY.translating()
    def __init__(
        self,
        model: str | nn.Module,
        args: Any,
        train_dataset: Any,
        eval_dataset: Any,
        processing_class: Any,
        callbacks: Sequence[Any] | None,
        optimizers: tuple[Any, Any],
        quantization_config: Any,
        peft_config: Any,
        *,
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        compute_metrics: Callable[..., dict[str, float]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        data_collator: Any = None,
        compute_loss_func: Any = None,
    ) -> None:
        values = {
            "compute_loss_func": compute_loss_func,
            "compute_metrics": compute_metrics,
            "data_collator": data_collator,
        }
        for name in self.REFUSED:
            if values[name] is not None:
                raise ConfigError(f"{name} is not supported: {_ALTERNATIVES[name]}")
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        if train_dataset is None:
            raise ConfigError("`train_dataset` is required: give the rows to train on")
        super().__init__(model, args, processing_class, callbacks)
        model = unwrap_peft(model)
        prepare_tokenizer(self.processing_class, self.args)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._read_data()
        prepared = prepare_model(
            model, self.args, peft_config, quantization_config, supervised=True, scored=self.METHOD == "Reward"
        )
        self._module_dtype = module_dtype(self.args, prepared, optimizers)
        self.models = self.make_models(prepared, self.optim(optimizers, optimizer_cls_and_kwargs))
        set_eos_token(self.worker.module, self.processing_class, self.args)
        self.learner = self.make_learner()
        self.learner.make_task = lambda learner: SupervisedCallbackTask(learner, self)
        self.finish_init()

    # ---- methods that a subclass overrides --------------------------------------------------------------------------

    def encoder(self, data: Any, *, packs: bool = False) -> RowEncoder:
        """Returns the encoder of a data set's rows. Args: packs: whether the encoded rows are packed."""
        raise NotImplementedError

    def rows(self, data: Any) -> Any:
        """Returns the rows of a data set in the form that the encoder reads."""
        return data

    def pack(self, *, evaluation: bool) -> Pack | None:
        """Returns the function that packs rows; None = no packing."""
        return None

    def make_models(self, model: RoleConfig | nn.Module, optim: Any) -> SupervisedModels:
        """Makes the models. Args: model: the model to train. optim: its optimizer."""
        raise NotImplementedError

    def make_learner(self) -> Any:
        """Makes the learner, an instance of `learner_class(...)`."""
        raise NotImplementedError

    @property
    def train_dataset(self) -> Any:
        """The encoded rows as a datasets.Dataset of token ids; a stream is not encoded."""
        if self._encoded is None and isinstance(self._rows, list):
            self._encoded = Dataset.from_dict(self.COLUMNS(self._rows))
        return self.raw_train_dataset if self._encoded is None else self._encoded

    @train_dataset.setter
    def train_dataset(self, data: Any) -> None:
        self.raw_train_dataset, self._encoded = data, None

    @property
    def eval_dataset(self) -> Any:
        """The encoded evaluation rows as a datasets.Dataset, or a dict of several by name."""
        if self._encoded_eval is None and self.eval_rows:
            encoded = {name: Dataset.from_dict(self.COLUMNS(rows)) for name, rows in self.eval_rows.items()}
            self._encoded_eval = encoded.get("", encoded)
        return self.raw_eval_dataset if self._encoded_eval is None else self._encoded_eval

    @eval_dataset.setter
    def eval_dataset(self, data: Any) -> None:
        self._raw_eval, self._encoded_eval = data, None

    @property
    def raw_eval_dataset(self) -> Any:
        """The evaluation data, before they are encoded."""
        return self._raw_eval

    # ---- configurations and data ------------------------------------------------------------------------------------

    def data_config(self, **fields: Any) -> SupervisedDataConfig:
        """Whet's data configuration. Args: fields: a subclass's further fields."""
        args = self.args
        shuffle = args.train_sampling_strategy == "random" and isinstance(self._rows, list)
        return SupervisedDataConfig(**{"batch_size": self.rows_per_update, "shuffle": shuffle, **fields})

    def encoding(self, **fields: Any) -> SupervisedDataConfig:
        """Returns the encoder's data configuration; it accepts the rows that TRL accepts. Args: fields: a subclass's
        fields.
        """
        defaults = {
            "chat_template_kwargs": {"enable_thinking": True},
            "max_length": self.args.max_length,
            "on_empty": "drop",
            "on_template_change": "accept",
        }
        return SupervisedDataConfig(**{**defaults, **fields})

    def loop_config(self) -> SupervisedTrainingConfig:
        """Whet's training configuration."""
        args = self.args
        last = "drop" if args.dataloader_drop_last else "keep"
        return SupervisedTrainingConfig(
            last_batch=last, **training_fields(args, self.max_steps or None, self.resumable_root)
        )

    def build_models(self, optim: Any, **roles: Any) -> SupervisedModels:
        """Makes the models of a run. Args: optim: the trained model's optimizer. roles: the models by role."""
        return SupervisedModels(
            **roles,
            tokenizer=self.processing_class,
            config=self.loop_config(),
            optimizer=optim,
            module_dtype=self._module_dtype,
            device="cpu" if self.args.use_cpu else None,
        )

    def _examples(self, data: Any, *, evaluation: str = "") -> list[Example] | ExampleStream:
        """Returns the Examples of a data set. Args: evaluation: the name of an evaluation set; "" = the
        training set.
        """
        args = self.args
        shuffle = args.seed if "shuffle_dataset" in args.TABLE and args.shuffle_dataset and not evaluation else None
        data = self.rows(data)
        pack = self.pack(evaluation=bool(evaluation))
        encoder = self.encoder(data, packs=pack is not None)
        return make_examples(data, encoder, pack=pack, shuffle=shuffle, name=evaluation)

    def _read_data(self) -> None:
        """Reads the data sets and counts the steps of the run."""
        if self.has_changed("raw_train_dataset"):
            data = self.raw_train_dataset
            self._rows = None if data is None else self._examples(check_dataset(data, "train_dataset"))
        self.read_eval_data()
        check_evaluation(self.args, self.eval_rows)
        self._count_steps()

    def read_changes(self) -> None:
        """Reads the data sets again if they were replaced."""
        self._read_data()
        self.learner.data = dataclasses.replace(self.learner.data, shuffle=self.data_config().shuffle)

    def _count_steps(self) -> None:
        """Computes the number of steps of the run."""
        args, steps = self.args, 0
        if isinstance(self._rows, list):
            full, rest = divmod(len(self._rows), self.rows_per_update)
            updates = full + (rest > 0 and not args.dataloader_drop_last)
            if not updates:
                raise ConfigError(
                    f"dataloader_drop_last=True drops all {len(self._rows)} rows: an update takes "
                    f"{self.rows_per_update}; lower per_device_train_batch_size or gradient_accumulation_steps"
                )
            self.updates_per_epoch = updates
            steps = math.ceil(args.num_train_epochs * updates)
        elif self._rows is not None and args.max_steps <= 0:
            raise ConfigError("train_dataset has no length: set max_steps, the optimizer steps of the run")
        self.max_steps = args.max_steps if args.max_steps > 0 else steps

    # ---- methods of the base ----------------------------------------------------------------------------------------

    @property
    def rows_per_update(self) -> int:
        """Rows of an optimizer step."""
        return self._rows_per_micro_step * self.args.gradient_accumulation_steps

    @property
    def _rows_per_micro_step(self) -> int:
        """Rows of a forward pass of all processes."""
        return self.args.per_device_train_batch_size * self.args.world_size

    def train_rows(self) -> Any:
        """Returns the Examples to train on. Raises ConfigError: there are none."""
        if self._rows is None:
            raise ConfigError("train() needs train_dataset; give it to the trainer")
        return self._rows

    def eval_sets(self, data: Any) -> dict[str, list[Example]]:
        """Evaluation data as Examples, by name."""
        return load_eval_sets(data, lambda rows, name: self._examples(rows, evaluation=name))

    def can_log(self, metric: str) -> bool:
        """Returns whether an evaluation has this metric; compute_metrics can add any."""
        return bool(supervised_metrics({metric: 0.0})) or metric == "num_tokens" or self.compute_metrics is not None

    def measure(self, rows: list[Example]) -> dict[str, float]:
        """Returns the loss and its metrics, as means over the whole evaluation set."""
        learner = self.learner
        learner.new_task().check_fit(rows)
        step = learner.measure(ExampleStep(index=self.state.global_step, examples=rows, mode=Mode.EVAL))
        metrics = supervised_metrics(flat(step.metrics))
        return metrics if self.compute_metrics is None else metrics | compute_user_metrics(self, rows)

    def resume_from(self, folder: str | None) -> None:
        """Sets the folder that the next run resumes from; None = it starts anew."""
        self.models.config = dataclasses.replace(self.models.config, resume=folder, max_steps=self.max_steps or None)

    def record_step(self, row: Mapping[str, Any], step: Any) -> None:
        """Records the metrics of an update."""
        self.window.add({**supervised_metrics(row), "num_tokens": float(self.state.num_input_tokens_seen)})

    def set_epoch(self) -> None:
        """Computes state.epoch from micro-batches; for a stream, it is the finished share of the run."""
        if not isinstance(self._rows, list) or not self.updates_per_epoch:
            super().set_epoch()
            return
        micro = max(1, -(-len(self._rows) // self._rows_per_micro_step))
        epochs, updates = divmod(self.state.global_step, self.updates_per_epoch)
        self.state.epoch = epochs + min(updates * self.args.gradient_accumulation_steps, micro) / micro


def learner_class(kind: type[SupervisedLearner[Any]]) -> Callable[..., Any]:
    """Returns a subclass of a learner that takes Examples as rows and reports to the trainer's callbacks.

    Args: kind: the learner's class.
    Returns: the subclass; the trainer sets `make_task`.
    """

    class FrontLearner(kind):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
        make_task: Any

        def encoder(self) -> Any:
            return FunctionEncoder()  # the rows are Examples

        def new_task(self, eval_ds: Any = None) -> Any:
            return self.make_task(self)

    FrontLearner.__name__ = FrontLearner.__qualname__ = kind.__name__
    return FrontLearner
