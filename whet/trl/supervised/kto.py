"""KTOTrainer: TRL's. It is DPOTrainer with rows that have a label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from whet.config import SupervisedDataConfig
from whet.data.preference import UnpairedEncoder
from whet.data.supervised import RowEncoder
from whet.errors import ConfigError
from whet.trl.config.kto import KTOConfig
from whet.trl.data_utils import unpaired
from whet.trl.supervised.dpo import DPOTrainer
from whet.trl.supervised.examples import first_row, has_rows
from whet.types import Example

__all__ = ["KTOTrainer"]


def _columns(examples: Sequence[Example]) -> dict[str, list[Any]]:
    """Rows as TRL's KTOTrainer holds them: prompt_ids, completion_ids and label."""
    return {
        "prompt_ids": [e.sequences[0].prefix.tolist() for e in examples],
        "completion_ids": [e.sequences[0].tokens.tolist() for e in examples],
        "label": [bool(e.columns["label"][0]) for e in examples],
    }


class KTOTrainer(DPOTrainer):
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
        if compute_metrics is not None:
            raise ConfigError("compute_metrics is not taken: write a callback with on_evaluate, given the metrics")
        super().__init__(
            model,
            ref_model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            None,
            callbacks,
            optimizers,
            quantization_config,
            peft_config,
        )

    def encoder(self, data: Any, *, packs: bool = False) -> RowEncoder:
        """Answers with a label."""
        return UnpairedEncoder(self.processing_class, self.encoding(on_long="truncate"))

    def rows(self, data: Any) -> Any:
        """The rows; of pairs each answer, in the order that TRL has them in."""
        data = super().rows(data)
        if not {"chosen", "rejected"} <= first_row(data).keys():
            return data
        return list(unpaired(data)) if has_rows(data) else _Unpaired(data)

    def data_config(self, **fields: Any) -> SupervisedDataConfig:
        """The section data, whose max_length is that of the mismatched rows too."""
        return super().data_config(**{"max_length": self.args.max_length, **fields})


class _Unpaired:
    """The answers of a stream of pairs, read from its beginning whenever it is asked."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __iter__(self) -> Any:
        return unpaired(self._data)
