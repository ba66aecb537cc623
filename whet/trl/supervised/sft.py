"""SFTTrainer: TRL's interface over whet's SFTLearner."""

from __future__ import annotations

from functools import partial
from typing import Any

from datasets import Dataset
from torch import nn

from whet.config import RoleConfig
from whet.data.supervised import MESSAGES, RowEncoder
from whet.errors import ConfigError
from whet.learners.sft import SFTLearner
from whet.train.supervised_models import SupervisedModels
from whet.trl.config.sft import SFTConfig, from_training_arguments
from whet.trl.config.supervised import ON_LONG
from whet.trl.supervised.examples import LazyRows, Pack, SFTOrIdsEncoder, first_row, sft_columns
from whet.trl.supervised.packs import pack_best_fit, pack_wrapped
from whet.trl.supervised.trainer import SupervisedTrainer, learner_class

__all__ = ["SFTTrainer"]


class SFTTrainer(SupervisedTrainer):
    """Fine-tunes on texts and conversations, with the interface of TRL's SFTTrainer.

    Args:
        model: a hub name, a folder, or a transformers module.
        args: SFTConfig, or transformers' TrainingArguments; None = its defaults, output_dir "{model}-SFT".
        train_dataset: rows with prompt and completion, with messages (or ShareGPT's conversations), with a text, or
            with input_ids and labels. A stream needs max_steps.
        eval_dataset: like train_dataset, or a dict of several data sets by name.
        processing_class: the tokenizer; None = the tokenizer of the model.
        callbacks: callbacks of transformers.
        optimizers: (optimizer, scheduler) over the model's own fp32 parameters.
        optimizer_cls_and_kwargs: (class, keywords including the learning rate), in place of optimizers.
        quantization_config: 4-bit BitsAndBytesConfig, for a model given by name.
        peft_config: PEFT's LoraConfig, to train an adapter instead of all weights.
        formatting_func: row -> the text to train on.
        compute_metrics: EvalPrediction -> the metrics of an evaluation, in a second pass. It has logits and labels
            (-100 = not trained).
        preprocess_logits_for_metrics: (logits, labels) of a batch -> the predictions for compute_metrics.
        data_collator, compute_loss_func: not supported; the error names the alternative.
    Raises: ConfigError: an unsupported argument. DataError: rows that can't be trained on.
    """

    METHOD = "SFT"
    COLUMNS = staticmethod(sft_columns)
    CONFIG = SFTConfig

    def __init__(
        self,
        model: str | nn.Module,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Any = None,
        compute_metrics: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Any = None,
    ) -> None:
        self._formatting_func = formatting_func
        super().__init__(
            model,
            from_training_arguments(args),
            train_dataset,
            eval_dataset,
            processing_class,
            callbacks,
            optimizers,
            quantization_config,
            peft_config,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            data_collator=data_collator,
            compute_loss_func=compute_loss_func,
        )

    def encoder(self, data: Any, *, packs: bool = False) -> RowEncoder:
        """Returns the encoder. The columns of the first row decide the form of the data and which tokens are trained.

        Args: packs: whether rows are packed; packing cuts them, and the encoder does not.
        Raises: ConfigError: an argument that does not fit the rows.
        """
        args, row = self.args, first_row(data)
        has_ids, has_completion = "input_ids" in row, "prompt" in row and "completion" in row
        completion_only = has_completion if args.completion_only_loss is None else args.completion_only_loss
        has_messages = any(name in row for name in MESSAGES)
        is_conversational = has_messages or (has_completion and not isinstance(row["completion"], str))
        if args.assistant_only_loss and not (is_conversational or has_ids):
            raise ConfigError("You set `assistant_only_loss=True`, but the dataset is not conversational; leave it out")
        if args.assistant_only_loss and has_completion and not completion_only:
            raise ConfigError(
                "completion_only_loss=False with assistant_only_loss=True also trains the assistant's turns in the "
                "prompt: give rows with messages, prompt and completion in one"
            )
        if self._skips_preparation and not has_ids:
            raise ConfigError("dataset_kwargs: skip_prepare_dataset needs rows of input_ids; leave it out")
        if self._skips_preparation and "labels" not in row and {"completion_mask", "assistant_masks"} & row.keys():
            raise ConfigError(
                "dataset_kwargs: skip_prepare_dataset does not read masks, and would train on the whole row. Add a "
                "'labels' column with -100 for untrained tokens, or leave skip_prepare_dataset out"
            )
        text = args.dataset_text_field
        if text not in row and "text" in row and not {"input_ids", "messages", "prompt"} & row.keys():
            raise ConfigError(
                f"dataset_text_field={text!r} is not a column of the rows, which have {', '.join(row)}; set it to the "
                "column of the texts"
            )
        masks_prompt = args.assistant_only_loss or (completion_only and (has_completion or has_ids))
        config = self.encoding(
            train_on="assistant" if masks_prompt else "all",
            text_column=text if text != "text" and text in row else None,
            max_length=None if packs else args.max_length,
            on_long=ON_LONG[args.truncation_mode],
        )
        return SFTOrIdsEncoder(self.processing_class, config)

    @property
    def _skips_preparation(self) -> bool:
        """Whether dataset_kwargs declares that the rows are token ids."""
        return bool((self.args.dataset_kwargs or {}).get("skip_prepare_dataset"))

    def rows(self, data: Any) -> Any:
        """Returns the rows, formatted by formatting_func if there is one.

        Raises: ConfigError: formatting_func with completion_only_loss; rows that change at each reading; max_length
            with padding_free, which TRL refuses.
        """
        if self.args.padding_free and not self.args.packing and self.args.max_length is not None:
            raise ConfigError(
                "padding_free=True without packing: in TRL `max_length` is not enforced then, and it refuses this; set "
                "max_length=None, or leave padding_free out: whet never pads"
            )
        if not self._skips_preparation and isinstance(data, Dataset) and data.format["type"] == "custom":
            raise ConfigError(
                "the rows come from `Dataset.with_transform()`, which can return other rows at each reading, and whet "
                "encodes rows once: use Dataset.map(), or set dataset_kwargs={'skip_prepare_dataset': True} and let "
                "the transform return trainer-ready rows of input_ids"
            )
        row, formatting_func = first_row(data), self._formatting_func
        if formatting_func is None or "input_ids" in row:
            return data
        completion_only = self.args.completion_only_loss
        if completion_only or (completion_only is None and "prompt" in row and "completion" in row):
            raise ConfigError(
                "A formatting function was provided while `completion_only_loss=True`: the formatted text has no "
                "separate completion; set completion_only_loss=False, or leave formatting_func out"
            )
        column = self.args.dataset_text_field
        rows = LazyRows(data, lambda data: ({column: formatting_func(row)} for row in data))
        return list(rows) if hasattr(data, "__len__") else rows

    def pack(self, *, evaluation: bool) -> Pack | None:
        """Returns TRL's packing function, or None if packing (or eval_packing) is off."""
        args = self.args
        if not (args.packing if not evaluation or args.eval_packing is None else args.eval_packing):
            return None
        if args.packing_strategy == "wrapped":
            return partial(pack_wrapped, size=args.max_length)
        return partial(pack_best_fit, size=args.max_length, split=args.packing_strategy == "bfd_split")

    def make_models(self, model: RoleConfig | nn.Module, optim: Any) -> SupervisedModels:
        """Makes a language model."""
        return self.build_models(optim, actor=model)

    def make_learner(self) -> Any:
        """Makes an SFTLearner with the configured objective."""
        return learner_class(SFTLearner)(self.models, self.args.to_whet(), data=self.data_config())
