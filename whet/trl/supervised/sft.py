"""SFTTrainer: TRL's, over SFTLearner."""

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
from whet.trl.supervised.examples import FormattedRows, Pack, SFTOrIdsEncoder, first_row, sft_columns
from whet.trl.supervised.packs import pack_best_fit, pack_wrapped
from whet.trl.supervised.trainer import SupervisedTrainer, learner_class

__all__ = ["SFTTrainer"]


class SFTTrainer(SupervisedTrainer):
    """TRL's SFTTrainer.

    Args:
        model: a hub name, a folder, or a transformers module.
        args: SFTConfig, or transformers' TrainingArguments; None = its defaults, output_dir "{model}-SFT".
        train_dataset: rows with prompt and completion, messages (or ShareGPT's conversations), a text, or input_ids
            and labels; a stream needs max_steps.
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer; None = the model's.
        callbacks: of transformers.
        optimizers: (optimizer, schedule) over the model's own fp32 parameters.
        optimizer_cls_and_kwargs: in place of it a class and its keywords, learning rate included.
        quantization_config: BitsAndBytesConfig of 4 bits, for a model given by its name.
        peft_config: PEFT's LoraConfig: an adapter is trained in place of all weights.
        formatting_func: row -> the text that is trained.
        compute_metrics: EvalPrediction (logits and labels, -100 where nothing is trained) -> metrics of an evaluation,
            which takes a second pass. preprocess_logits_for_metrics: (logits, labels) of a batch -> what is kept.
        data_collator, compute_loss_func: refused, with what to do instead.
    Raises: ConfigError: what is not there, by name. DataError: rows that can't be trained on.
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
        self._formatting = formatting_func
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
        """Conversations, prompts with completions, texts or token ids; what of them is trained goes by the first row.

        Args: packs: rows are cut where they are packed.
        Raises: ConfigError: what is to be trained does not fit the rows.
        """
        args, row = self.args, first_row(data)
        ready, answered = "input_ids" in row, "prompt" in row and "completion" in row
        only = answered if args.completion_only_loss is None else args.completion_only_loss
        talk = any(name in row for name in MESSAGES) or (answered and not isinstance(row["completion"], str))
        if args.assistant_only_loss and not (talk or ready):
            raise ConfigError("You set `assistant_only_loss=True`, but the dataset is not conversational; leave it out")
        if args.assistant_only_loss and answered and not only:
            raise ConfigError(
                "completion_only_loss=False with assistant_only_loss=True trains the prompt's assistant too: give rows "
                "with messages, prompt and completion in one"
            )
        if self._prepared and not ready:
            raise ConfigError("dataset_kwargs: skip_prepare_dataset needs rows of input_ids; leave it out")
        if self._prepared and "labels" not in row and {"completion_mask", "assistant_masks"} & row.keys():
            raise ConfigError(
                "dataset_kwargs: with skip_prepare_dataset masks are not read, and the whole row would be trained. Add "
                "a 'labels' column, -100 where nothing is trained, or leave skip_prepare_dataset out"
            )
        text = args.dataset_text_field
        if text not in row and "text" in row and not {"input_ids", "messages", "prompt"} & row.keys():
            raise ConfigError(
                f"dataset_text_field={text!r} is no column of the rows, which have {', '.join(row)}; name the column "
                "of their texts"
            )
        apart = args.assistant_only_loss or (only and (answered or ready))
        section = self.encoding(
            train_on="assistant" if apart else "all",
            text_column=text if text != "text" and text in row else None,
            max_length=None if packs else args.max_length,
            on_long=ON_LONG[args.truncation_mode],
        )
        return SFTOrIdsEncoder(self.processing_class, section)

    @property
    def _prepared(self) -> bool:
        """Whether the rows are said to be token ids already."""
        return bool((self.args.dataset_kwargs or {}).get("skip_prepare_dataset"))

    def rows(self, data: Any) -> Any:
        """The rows, each as the text that formatting_func makes of it.

        Raises: ConfigError: only the completion is to be trained, and a text has none; rows that change when they are
            read; a limit that padding_free leaves out in TRL.
        """
        if self.args.padding_free and not self.args.packing and self.args.max_length is not None:
            raise ConfigError(
                "padding_free=True without packing: `max_length` is not enforced there, so TRL refuses it; set "
                "max_length=None, or leave padding_free out: nothing is padded here in any case"
            )
        if not self._prepared and isinstance(data, Dataset) and data.format["type"] == "custom":
            raise ConfigError(
                "the rows come from `Dataset.with_transform()`, which makes others at each reading, and they are "
                "encoded once: use Dataset.map(), or set dataset_kwargs={'skip_prepare_dataset': True} and let the "
                "transform return trainer-ready rows of input_ids"
            )
        row = first_row(data)
        if self._formatting is None or "input_ids" in row:
            return data
        only = self.args.completion_only_loss
        if only or (only is None and "prompt" in row and "completion" in row):
            raise ConfigError(
                "A formatting function was provided while `completion_only_loss=True`: it makes a text of the row, of "
                "which no part is the completion; set completion_only_loss=False, or leave formatting_func out"
            )
        made = FormattedRows(data, self._formatting, self.args.dataset_text_field)
        return list(made) if hasattr(data, "__len__") else made

    def pack(self, *, evaluation: bool) -> Pack | None:
        """TRL's packs, where packing asks for them."""
        args = self.args
        if not (args.packing if not evaluation or args.eval_packing is None else args.eval_packing):
            return None
        if args.packing_strategy == "wrapped":
            return partial(pack_wrapped, size=args.max_length)
        return partial(pack_best_fit, size=args.max_length, split=args.packing_strategy == "bfd_split")

    def make_models(self, given: RoleConfig | nn.Module, optim: Any) -> SupervisedModels:
        """A language model."""
        return self.build_models(optim, actor=given)

    def make_learner(self) -> Any:
        """The learner with the objective of the configuration."""
        return learner_class(SFTLearner)(self.models, self.args.to_whet(), data=self.data_config())
