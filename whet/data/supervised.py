"""From rows to Examples: SFT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from whet.config.data import SupervisedDataConfig
from whet.data.conversations import Part, conversation_parts, sequence_of
from whet.data.templates import ChatTemplate
from whet.errors import DataError
from whet.types import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["SFTEncoder"]


class SFTEncoder:
    """Turns rows into Examples of supervised fine-tuning, and counts what became of them.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> encode = SFTEncoder(byte_tokenizer())
    >>> s = encode({"prompt": "2+2=", "response": "4"}, 7).sequences[0]
    >>> s.prefix.tolist(), s.tokens.tolist(), s.mask.tolist()
    ([50, 43, 50, 61], [52, 256], [True, True])
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: SupervisedDataConfig | None = None) -> None:
        """Args: tokenizer: of transformers. data: the section data; None = its defaults."""
        self.tokenizer = tokenizer
        self.data = data or SupervisedDataConfig()
        self.template = ChatTemplate(tokenizer, self.data.chat_template_kwargs)
        self.counts = {"encoded": 0, "dropped": 0, "truncated": 0, "forked": 0}

    def __call__(self, row: Mapping[str, Any], number: int = 0) -> Example | None:
        """One row as an Example. Args: row: column -> value. number: the row's place in the data set."""
        if "messages" in row:
            forks = conversation_parts(self.template, row["messages"], row=number)
        elif "prompt" in row:
            response = row["response"] if "response" in row else row["completion"]
            forks = [[Part(row["prompt"], False), Part(response + str(self.tokenizer.eos_token), True)]]
        else:
            raise DataError(f"row {number}: neither messages nor prompt among the columns {', '.join(row)}")
        encode = self.tokenizer
        sequences = tuple(
            sequence_of([(encode(p.text, add_special_tokens=False).input_ids, p.trained) for p in parts])
            for parts in forks
        )
        if not sequences:
            raise DataError(f"row {number} has nothing to train")
        self.counts["encoded"] += 1
        self.counts["forked"] += len(sequences) > 1
        return Example(sequences=sequences, row=number)
