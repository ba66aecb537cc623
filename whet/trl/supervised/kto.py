"""KTOTrainer: TRL's interface. It is DPOTrainer on rows with a label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whet.config import SupervisedDataConfig
from whet.data.preference import UnpairedEncoder
from whet.data.supervised import RowEncoder
from whet.trl.config.kto import KTOConfig
from whet.trl.data_utils import unpair_rows
from whet.trl.supervised.dpo import DPOTrainer
from whet.trl.supervised.examples import LazyRows, first_row, has_rows
from whet.types import Example

__all__ = ["KTOTrainer"]


def _columns(examples: Sequence[Example]) -> dict[str, list[Any]]:
    """Returns the columns of TRL's KTOTrainer: prompt_ids, completion_ids and label."""
    return {
        "prompt_ids": [e.sequences[0].prefix.tolist() for e in examples],
        "completion_ids": [e.sequences[0].tokens.tolist() for e in examples],
        "label": [bool(e.columns["label"][0]) for e in examples],
    }


class KTOTrainer(DPOTrainer):
    """Trains on labelled completions, with the interface of TRL's KTOTrainer. Other arguments are DPOTrainer's.

    Args:
        args: KTOConfig; None = its defaults, output_dir "{model}-KTO".
        train_dataset: rows with prompt, completion and label, as texts or messages; or pairs, whose answers become a
            row each. A stream needs max_steps.
        compute_metrics: not supported; the error names the alternative.
    Raises: ConfigError: an unsupported argument. DataError: rows that can't be trained on.
    """

    METHOD = "KTO"
    COLUMNS = staticmethod(_columns)
    CONFIG = KTOConfig
    REFUSED = ("compute_metrics", "data_collator")

    def encoder(self, data: Any, *, packs: bool = False) -> RowEncoder:
        """Returns the encoder of labelled rows."""
        return UnpairedEncoder(self.processing_class, self.encoding(on_long="truncate"))

    def rows(self, data: Any) -> Any:
        """Returns the rows; each answer of a pair becomes a row, in TRL's order."""
        data = super().rows(data)
        if not {"chosen", "rejected"} <= first_row(data).keys():
            return data
        return list(unpair_rows(data)) if has_rows(data) else LazyRows(data, unpair_rows)

    def data_config(self, **fields: Any) -> SupervisedDataConfig:
        """Whet's data configuration; its max_length also limits the mismatched rows."""
        return super().data_config(**{"max_length": self.args.max_length, **fields})
