"""KTOTrainer: TRL's, over PreferenceLearner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from whet.config import RoleConfig, SupervisedDataConfig
from whet.data.pairs import LabelledEncoder
from whet.data.supervised import RowEncoder
from whet.errors import ConfigError
from whet.learners.preference import PreferenceLearner
from whet.train.supervised_models import SupervisedModels
from whet.trl.config.kto import KTOConfig
from whet.trl.data_utils import unpaired
from whet.trl.supervised.examples import first_row
from whet.trl.supervised.trainer import SupervisedTrainer, of_front
from whet.trl.trainer.model import inner_model
from whet.types import Example

__all__ = ["KTOTrainer"]


def _columns(examples: Sequence[Example]) -> dict[str, list[Any]]:
    """Rows as TRL's KTOTrainer holds them: prompt_ids, completion_ids and label."""
    return {
        "prompt_ids": [e.sequences[0].prefix.tolist() for e in examples],
        "completion_ids": [e.sequences[0].tokens.tolist() for e in examples],
        "label": [bool(e.columns["label"][0]) for e in examples],
    }


class KTOTrainer(SupervisedTrainer):
    """TRL's KTOTrainer.

    Args:
        model: a hub name, a folder, or a transformers module.
        ref_model: what the policy is compared with; None = the model as it begins: of an adapter its base, read with
            the adapter off, else a second copy.
        args: KTOConfig; None = its defaults, output_dir "{model}-KTO".
        train_dataset: rows with prompt, completion and label, texts or messages; or pairs, of which each answer becomes
            a row. A stream needs max_steps.
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer; None = the model's.
        callbacks: of transformers.
        optimizers: (optimizer, schedule) over the model's own fp32 parameters.
        quantization_config: BitsAndBytesConfig of 4 bits, for a model given by its name.
        peft_config: PEFT's LoraConfig: an adapter is trained in place of all weights.
        data_collator, compute_metrics: refused, with what to do instead.
    Raises: ConfigError: what is not there, by name. DataError: rows that can't be trained on.
    """

    METHOD = "KTO"
    COLUMNS = staticmethod(_columns)
    CONFIG = KTOConfig

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
        if compute_metrics is not None:
            raise ConfigError("compute_metrics is not taken: write a callback with on_evaluate, given the metrics")
        self._given_reference = inner_model(ref_model)
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
            refused={"data_collator": data_collator},
        )

    def encoder(self, data: Any, *, packs: bool = False) -> RowEncoder:
        """Answers with a label."""
        return LabelledEncoder(self.processing_class, self.encoding(on_long="truncate"))

    def rows(self, data: Any) -> Any:
        """The rows; of pairs each answer, in the order that TRL has them in."""
        if not {"chosen", "rejected"} <= first_row(data).keys():
            return data
        return list(unpaired(data)) if hasattr(data, "__len__") else _Unpaired(data)

    def data_config(self, **fields: Any) -> SupervisedDataConfig:
        """The section data, whose max_length is that of the mismatched rows too."""
        return super().data_config(**{"max_length": self.args.max_length, **fields})

    def make_models(self, given: RoleConfig | nn.Module, optim: Any) -> SupervisedModels:
        """A policy and its reference."""
        own = "actor" if self._given_reference is None else self._given_reference
        return self.models_of(optim, actor=given, reference=own)

    def make_learner(self) -> Any:
        """Whet's, of the objective that the configuration says."""
        return of_front(PreferenceLearner)(self.models, self.args.to_whet(), data=self.data_config())

    def measured(self, rows: Any) -> dict[str, float]:
        """The loss and its metrics over an evaluation set, the reference read ahead where that is asked for."""
        if self.args.precompute_ref_log_probs and not self.learner.knows_run:
            self.learner.new_run(self._rows)
        return super().measured(rows)


class _Unpaired:
    """The answers of a stream of pairs, read from its beginning whenever it is asked."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __iter__(self) -> Any:
        return unpaired(self._data)
