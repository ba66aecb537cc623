"""KTOTrainer: TRL's. It is DPOTrainer on labelled rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whet.config import SupervisedDataConfig
from whet.data.preference import UnpairedEncoder
from whet.data.supervised import RowEncoder
from whet.trl.config.kto import KTOConfig
from whet.trl.data_utils import unpair_rows
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
        args: KTOConfig; None = its defaults, output_dir "{model}-KTO".
        train_dataset: rows with prompt, completion and label, texts or messages; or pairs, and then each answer becomes
            a row. A stream needs max_steps.
        compute_metrics: refused, with the alternative. The other arguments are those of DPOTrainer.
    Raises: ConfigError: what is not there, by name. DataError: rows that can't be trained on.
    """

    METHOD = "KTO"
    COLUMNS = staticmethod(_columns)
    CONFIG = KTOConfig
    REFUSED = ("compute_metrics", "data_collator")

    def encoder(self, data: Any, *, packs: bool = False) -> RowEncoder:
        """The encoder of labelled rows."""
        return UnpairedEncoder(self.processing_class, self.encoding(on_long="truncate"))

    def rows(self, data: Any) -> Any:
        """The rows; each answer of a pair becomes a row, in TRL's order."""
        data = super().rows(data)
        if not {"chosen", "rejected"} <= first_row(data).keys():
            return data
        return list(unpair_rows(data)) if has_rows(data) else _Unpaired(data)

    def data_config(self, **fields: Any) -> SupervisedDataConfig:
        """Whet's data configuration; its max_length also limits the mismatched rows."""
        return super().data_config(**{"max_length": self.args.max_length, **fields})


class _Unpaired:
    """The answers of a stream of pairs, read from its beginning whenever it is asked."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __iter__(self) -> Any:
        return unpair_rows(self._data)
