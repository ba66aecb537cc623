"""DPOTrainer: TRL's interface over whet's PreferenceLearner."""

from __future__ import annotations

from typing import Any

from torch import nn

from whet.config import RoleConfig
from whet.data.supervised import RowEncoder
from whet.errors import ConfigError
from whet.learners.preference import PreferenceLearner
from whet.learners.preference_from_config import make_preference_objective
from whet.train.supervised_models import SupervisedModels
from whet.trl.config.dpo import DPOConfig
from whet.trl.config.supervised import ON_LONG
from whet.trl.supervised.examples import TextPairEncoder, has_rows, pair_columns
from whet.trl.supervised.trainer import SupervisedTrainer, learner_class
from whet.trl.trainer.model import place_module, trusts_remote_code, unwrap_peft

__all__ = ["DPOTrainer"]


class DPOTrainer(SupervisedTrainer):
    """Trains on preference pairs, with the interface of TRL's DPOTrainer.

    Args:
        model: a hub name, a folder, or a transformers module.
        ref_model: the reference; None = the model before training. That is the base model if an adapter is trained,
            else a second copy. It is not loaded if the loss reads no reference.
        args: DPOConfig; None = its defaults, output_dir "{model}-DPO".
        train_dataset: rows with prompt, chosen and rejected, as texts or messages. Without a column prompt, the common
            beginning of both answers is the prompt. A stream needs max_steps.
        eval_dataset: like train_dataset, or a dict of several data sets by name.
        processing_class: the tokenizer; None = the tokenizer of the model.
        callbacks: callbacks of transformers.
        optimizers: (optimizer, scheduler) over the model's own fp32 parameters.
        quantization_config: 4-bit BitsAndBytesConfig, for a model given by name.
        peft_config: PEFT's LoraConfig, to train an adapter instead of all weights.
        compute_metrics: EvalPrediction -> the metrics of an evaluation, in a second pass. Each batch has the logits and
            ids of the chosen answers, then those of the rejected ones.
        data_collator: not supported; the error names the alternative.
    Raises: ConfigError: an unsupported argument. DataError: rows that can't be trained on.
    """

    METHOD = "DPO"
    COLUMNS = staticmethod(pair_columns)
    CONFIG = DPOConfig

    def __init__(
        self,
        model: str | nn.Module,
        ref_model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        if ref_model is not None and ref_model is model and not isinstance(model, str):
            raise ConfigError(
                "`model` and `ref_model` cannot be the same object: the reference would change with the policy; leave "
                "ref_model out to compare with the model before training"
            )
        self._ref_model = unwrap_peft(ref_model)
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
            compute_metrics=compute_metrics,
            data_collator=data_collator,
        )

    def encoder(self, data: Any, *, packs: bool = False) -> RowEncoder:
        """Returns the encoder of pairs."""
        return TextPairEncoder(self.processing_class, self.encoding(on_long=ON_LONG[self.args.truncation_mode]))

    def rows(self, data: Any) -> Any:
        """Returns the rows. Raises ConfigError: precompute_ref_log_probs with a stream."""
        if self.args.precompute_ref_log_probs and not has_rows(data):
            raise ConfigError(
                "`precompute_ref_log_probs=True` is not supported with IterableDataset: the reference scores all rows "
                "before the first step; give a Dataset, or leave precompute_ref_log_probs out"
            )
        return data

    def make_models(self, model: RoleConfig | nn.Module, optim: Any) -> SupervisedModels:
        """Makes the policy, and the reference if the loss reads one."""
        reference = "actor" if self._ref_model is None else self._ref_model
        if isinstance(self._ref_model, str):
            reference = RoleConfig(model=self._ref_model, trust_remote_code=trusts_remote_code(self.args))
        elif self._ref_model is not None:
            reference = place_module(self._ref_model, self.args)
        needs_reference = make_preference_objective(self.args.to_whet()).needs.reference
        return self.build_models(optim, actor=model, reference=reference if needs_reference else None)

    def make_learner(self) -> Any:
        """Makes a PreferenceLearner with the configured objective."""
        return learner_class(PreferenceLearner)(self.models, self.args.to_whet(), data=self.data_config())
