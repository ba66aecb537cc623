"""RewardTrainer: TRL's, over RewardModelLearner."""

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
    """TRL's RewardTrainer.

    Args:
        model: a hub name, a folder, or a transformers module; one without a score head gets one, which starts at 0.
        args: RewardConfig; None = its defaults, output_dir "{model}-Reward".
        train_dataset: rows with chosen and rejected, with or without prompt, texts or messages, and margin where there
            is one; or chosen_ids and rejected_ids. A stream needs max_steps.
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer; None = the model's.
        callbacks: of transformers.
        optimizers: (optimizer, schedule) over the model's own fp32 parameters.
        optimizer_cls_and_kwargs: in place of it a class and its keywords, learning rate included.
        quantization_config: BitsAndBytesConfig of 4 bits, for a model given by its name.
        peft_config: PEFT's LoraConfig: an adapter is trained in place of all weights.
        compute_metrics: EvalPrediction (of each batch the scores of the chosen answers and then of the rejected) ->
            metrics of an evaluation, which takes a second pass. preprocess_logits_for_metrics: makes them first.
        data_collator: refused, with what to do instead.
    Raises: ConfigError: what is not there, by name. DataError: rows that can't be trained on.
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
        """Pairs; those over max_length are left out."""
        return PairOrIdsEncoder(self.processing_class, self.encoding(on_long="drop"))

    def rows(self, data: Any) -> Any:
        """The rows; a warning where their columns have the names of earlier releases, as TRL's."""
        if "chosen_input_ids" in first_row(data):
            warnings.warn(
                "The columns `chosen_input_ids` and `rejected_input_ids` are deprecated and will not be supported in "
                "v1 of TRL; rename them to `chosen_ids` and `rejected_ids`",
                FutureWarning,
                stacklevel=2,
            )
        return data

    def make_models(self, given: RoleConfig | nn.Module, optim: Any) -> SupervisedModels:
        """A model with a score head. Raises ConfigError: a classifier of several labels."""
        labels = 1 if isinstance(given, RoleConfig) or not has_score_head(given) else given.config.num_labels  # pyright: ignore
        if labels != 1:
            raise ConfigError(
                f"reward models require `num_labels=1`, and this one has {labels}; load it by "
                "AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)"
            )
        return self.build_models(optim, reward_model=given)

    def make_learner(self) -> Any:
        """The learner with the objective of the configuration."""
        return learner_class(RewardModelLearner)(self.models, self.args.to_whet(), data=self.data_config())
