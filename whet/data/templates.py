"""Chat templates: from messages to the text that a tokenizer's template makes of them.

Left out on purpose: images, and templates of our own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from whet.errors import ConfigError, DataError
from whet.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ChatTemplate"]


class ChatTemplate:
    """A tokenizer's chat template with its arguments.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> ChatTemplate(byte_tokenizer()).text([{"role": "user", "content": "hi"}], asks=True)
    '<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n'
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> None:
        """Args: tokenizer: of transformers. options: further arguments of the template; enable_thinking is false unless
        they say otherwise.
        """
        self.tokenizer = tokenizer
        self.options: dict[str, Any] = {"enable_thinking": False, **(options or {})}

    def need(self) -> None:
        """Raises ConfigError where the tokenizer has no chat template."""
        if self.tokenizer.chat_template is None:
            raise ConfigError(
                "this tokenizer has no chat template, which messages need; set tokenizer.chat_template, take the "
                "instruction-tuned model's tokenizer, or give plain text prompts"
            )

    def text(self, messages: Sequence[Message], *, asks: bool = False, row: int = 0, **options: Any) -> str:
        """The messages as the template writes them.

        Args:
            messages: at least one.
            asks: the header of an assistant's turn at the end.
            row: for the message of an error.
            options: further arguments of apply_chat_template, e.g. tools.
        Raises: ConfigError: there is no template. DataError: it refuses the messages.
        """
        self.need()
        try:
            made: Any = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, **{"add_generation_prompt": asks, **self.options, **options}
            )
        except Exception as error:  # a template is a program: it may raise anything
            roles = ", ".join(str(m["role"]) for m in messages)
            raise DataError(
                f"row {row}: the chat template refused turns of {roles}: {type(error).__name__}: {error}; change "
                "the row, or the tokenizer's chat_template"
            ) from error
        return made
