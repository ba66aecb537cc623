"""RewardTrainer: TRL's interface over whet's RewardModelLearner."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from whet.config import RoleConfig
from whet.data.supervised import RowEncoder
from whet.errors import ConfigError
from whet.learners.preference import RewardModelLearner
from whet.models.heads import has_score_head
from whet.train.supervised_models import SupervisedModels
from whet.trl.config.reward import RewardConfig
from whet.trl.supervised.examples import PairOrIdsEncoder, first_row, scored_columns
from whet.trl.supervised.trainer import SupervisedTrainer, learner_class

__all__ = ["RewardTrainer"]


class RewardTrainer(SupervisedTrainer):
    """Trains a reward model on preference pairs, with the interface of TRL's RewardTrainer.

    Args:
        model: a hub name, a folder, or a transformers module. A model without a score head gets one of zeros.
        args: RewardConfig; None = its defaults, output_dir "{model}-Reward".
        train_dataset: rows with chosen and rejected, as texts or messages, optionally prompt and margin; or rows with
            chosen_ids and rejected_ids. A stream needs max_steps.
        eval_dataset: like train_dataset, or a dict of several data sets by name.
        processing_class: the tokenizer; None = the tokenizer of the model.
        callbacks: callbacks of transformers.
        optimizers: (optimizer, scheduler) over the model's own fp32 parameters.
        optimizer_cls_and_kwargs: (class, keywords including the learning rate), in place of optimizers.
        quantization_config: 4-bit BitsAndBytesConfig, for a model given by name.
        peft_config: PEFT's LoraConfig, to train an adapter instead of all weights.
        compute_metrics: EvalPrediction -> the metrics of an evaluation, in a second pass. Each batch has the scores of
            the chosen answers, then those of the rejected ones.
        preprocess_logits_for_metrics: (scores, labels) of a batch -> the predictions for compute_metrics.
        data_collator: not supported; the error names the alternative.
    Raises: ConfigError: an unsupported argument. DataError: rows that can't be trained on.
    """

    METHOD = "Reward"
    COLUMNS = staticmethod(scored_columns)
    TAG = "reward-trainer"
    TRAINED_BY = "reward modelling"
    CONFIG = RewardConfig

    def __init__(
        self,
        model: str | nn.Module,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        super().__init__(
            model,
            args,
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
        )

    def encoder(self, data: Any, *, packs: bool = False) -> RowEncoder:
        """Returns the encoder of pairs. Pairs over max_length are left out."""
        return PairOrIdsEncoder(self.processing_class, self.encoding(on_long="drop"))

    def rows(self, data: Any) -> Any:
        """Returns the rows. Warns, as TRL does, if the columns have the names of earlier releases."""
        if "chosen_input_ids" in first_row(data):
            warnings.warn(
                "The columns `chosen_input_ids` and `rejected_input_ids` are deprecated and will not be supported in "
                "v1 of TRL; rename them to `chosen_ids` and `rejected_ids`",
                FutureWarning,
                stacklevel=2,
            )
        return data

    def make_models(self, model: RoleConfig | nn.Module, optim: Any) -> SupervisedModels:
        """Makes a model with a score head. Raises ConfigError: a classifier of several labels."""
        config: Any = None if isinstance(model, RoleConfig) or not has_score_head(model) else model.config
        if config is not None and (labels := config.num_labels) != 1:
            raise ConfigError(
                f"reward models require `num_labels=1`, and this one has {labels}; load it by "
                "AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)"
            )
        return self.build_models(optim, reward_model=model)

    def make_learner(self) -> Any:
        """Makes a RewardModelLearner with the configured objective."""
        return learner_class(RewardModelLearner)(self.models, self.args.to_whet(), data=self.data_config())
