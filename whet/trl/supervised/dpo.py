"""DPOTrainer: TRL's, over whet's PreferenceLearner."""

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
from whet.trl.trainer.model import trusts_remote_code, unwrap_peft

__all__ = ["DPOTrainer"]


class DPOTrainer(SupervisedTrainer):
    """TRL's DPOTrainer.

    Args:
        model: a hub name, a folder, or a transformers module.
        ref_model: what the policy is compared with; None = the model as it begins: of an adapter its base, read with
            the adapter off, else a second copy. Not made where the loss reads none.
        args: DPOConfig; None = its defaults, output_dir "{model}-DPO".
        train_dataset: rows with prompt, chosen and rejected, texts or messages; without prompt, what both begin with
            alike is it. A stream needs max_steps.
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer; None = the model's.
        callbacks: of transformers.
        optimizers: (optimizer, schedule) over the model's own fp32 parameters.
        quantization_config: BitsAndBytesConfig of 4 bits, for a model given by its name.
        peft_config: PEFT's LoraConfig: an adapter is trained in place of all weights.
        compute_metrics: EvalPrediction (of each batch logits and ids of the chosen answers and then of the rejected) ->
            metrics of an evaluation, which takes a second pass.
        data_collator: refused, with what to do instead.
    Raises: ConfigError: what is not there, by name. DataError: rows that can't be trained on.
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
                "`model` and `ref_model` cannot be the same object: the reference would move with the policy; leave "
                "ref_model out, and it is the model as it begins"
            )
        self._given_reference = unwrap_peft(ref_model)
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
        """The encoder of pairs."""
        return TextPairEncoder(self.processing_class, self.encoding(on_long=ON_LONG[self.args.truncation_mode]))

    def rows(self, data: Any) -> Any:
        """The rows. Raises ConfigError: precompute_ref_log_probs with a stream."""
        if self.args.precompute_ref_log_probs and not has_rows(data):
            raise ConfigError(
                "`precompute_ref_log_probs=True` is not supported with IterableDataset: the reference is read over all "
                "rows before the first step; give a Dataset, or leave it out"
            )
        return data

    def make_models(self, given: RoleConfig | nn.Module, optim: Any) -> SupervisedModels:
        """A policy, and a reference where the loss reads one."""
        needed = make_preference_objective(self.args.to_whet()).needs.reference
        own = "actor" if self._given_reference is None else self._given_reference
        if isinstance(self._given_reference, str):
            own = RoleConfig(model=self._given_reference, trust_remote_code=trusts_remote_code(self.args))
        return self.build_models(optim, actor=given, reference=own if needed else None)

    def make_learner(self) -> Any:
        """The learner with the objective of the configuration."""
        return learner_class(PreferenceLearner)(self.models, self.args.to_whet(), data=self.data_config())
