"""Chat templates: render messages as text by the template of a tokenizer.

Left out on purpose: images, and templates of our own.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from typing import TYPE_CHECKING, Any

from whet.errors import ConfigError, DataError, format_exception, format_value
from whet.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DAY", "ChatTemplate", "common_prefix", "uses_chat_template", "writes_date"]

DAY = "strftime_now"
"""transformers' function by which a template writes the date; as an argument of the template, the day that it is to
write, as ISO text."""
KEPT = 64
"""The number of rendered texts in the cache."""
_WRITTEN = re.compile(rf"""{DAY}\(\s*(['"])(.*?)\1\s*\)""")


LIMIT_S = 60.0
"""The time limit, in seconds, for rendering one conversation; it usually takes less than a millisecond."""


class _Endless(Exception):
    """A template exceeded the time limit."""


@contextmanager
def _limited() -> Iterator[None]:
    """Stops the body by an alarm at the time limit; only on the main thread, and where no other alarm is set."""
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    if not mine or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return
    signal.signal(signal.SIGALRM, _end)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _end(*_: object) -> None:
    raise _Endless


class ChatTemplate:
    r"""A tokenizer's chat template with its arguments.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> ChatTemplate(byte_tokenizer()).text([{"role": "user", "content": "hi"}], asks=True)
    '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n'
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> None:
        """Args: tokenizer: of transformers. options: further arguments of the template; enable_thinking is false unless
        they say otherwise.
        """
        self.tokenizer = tokenizer
        self.options: dict[str, Any] = {"enable_thinking": False, **(options or {})}
        self._kept: dict[str, str] = {}
        self.thinks_as_turns_do = "enable_thinking" not in (options or {})

    @property
    def has_marks(self) -> bool:
        """Whether the template marks the assistant's text by {% generation %}."""
        text = self.tokenizer.chat_template
        return isinstance(text, str) and re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", text) is not None

    def require(self) -> None:
        """Raises ConfigError where the tokenizer has no chat template."""
        if self.tokenizer.chat_template is None and "chat_template" not in self.options:
            raise ConfigError(
                "this tokenizer has no chat template, which messages need; set tokenizer.chat_template, take the "
                "instruction-tuned model's tokenizer, or give plain text prompts"
            )

    def text(self, messages: Sequence[Message], *, asks: bool = False, row: int = 0, **options: Any) -> str:
        """Renders the messages.

        Args:
            messages: at least one.
            asks: with the header of an assistant's turn at the end.
            row: for the message of an error.
            options: further arguments of apply_chat_template, e.g. tools.
        Raises: ConfigError: there is no template. DataError: it refuses the messages.
        """
        return self._apply(messages, row, {"tokenize": False, "add_generation_prompt": asks, **options})

    def text_of_stand_ins(self, messages: Sequence[Message], row: int, options: Mapping[str, Any]) -> str:
        """`text` with a cache: rows of the same form have the same stand-ins (data/template_check.py)."""
        key = repr((messages, options))
        if key not in self._kept:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            self._kept[key] = self.text(messages, row=row, **options)
        return self._kept[key]

    def header(self, messages: Sequence[Message], turn: str, *, row: int = 0, **options: Any) -> str:
        """Renders the messages and the header of the assistant's next turn.

        Args: messages: all before the turn. turn: the text of the messages and the turn. row, options: as for `text`.
        Returns: the text of the messages and the header. Where the turn contains thinking and chat_template_kwargs do
            not set enable_thinking, it is the header for a turn with thinking.
        """
        text = self.text(messages, asks=True, row=row, **options)
        if turn.startswith(text) or not self.thinks_as_turns_do or "enable_thinking" in options:
            return text
        thinking = self.text(messages, asks=True, row=row, **{**options, "enable_thinking": True})
        return thinking if turn.startswith(thinking) else text

    def opening(self, turn: Message, row: int = 0, **options: Any) -> str:
        """The text before the assistant's content where its turn is the first message. Templates can't render a header
        without messages, so this is the common beginning of two different first turns.
        """
        others = ({"role": turn["role"], "content": letter} for letter in "\ue002\ue003")
        return common_prefix(*(self.text([other], row=row, **options) for other in others))

    def marked(self, messages: Sequence[Message], row: int = 0, **options: Any) -> tuple[list[int], list[bool]]:
        """The ids of the messages, and whether {% generation %} marks each."""
        asked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True, **options}
        encoded = self._apply(messages, row, asked)
        return list(encoded["input_ids"]), [bool(one) for one in encoded["assistant_masks"]]

    def _apply(self, messages: Sequence[Message], row: int, asked: Mapping[str, Any]) -> Any:
        self.require()
        given = {**self.options, **asked}
        try:
            if (day := given.pop(DAY, None)) is not None:
                given["chat_template"] = _dated(given.get("chat_template", self.tokenizer.chat_template), day)
            with _limited():
                return self.tokenizer.apply_chat_template(list(messages), **given)
        except _Endless as error:
            text = given.get("chat_template", self.tokenizer.chat_template)
            raise ConfigError(
                f"row {row}: the chat template {format_value(str(text), 60)} has not ended within {LIMIT_S:g} s, so it "
                "loops for ever or nearly so; repair the tokenizer's chat_template, or give another by "
                "rollout.chat_template_kwargs.chat_template"
            ) from error
        except Exception as error:  # a template is a program: it may raise anything
            roles = ", ".join(str(m["role"]) for m in messages)
            raise DataError(
                f"row {row}: the chat template refused turns of {roles}: {format_exception(error)}; change "
                f"{_cause(messages)}, or the tokenizer's chat_template"
            ) from error


def _dated(template: str, day: str) -> str:
    """A template that writes this day, not today: transformers gives templates no functions of others.

    >>> _dated("{{ strftime_now('%d %b %Y') }}", "2026-11-23")
    "{{ '23 Nov 2026' }}"
    """
    return _WRITTEN.sub(lambda call: repr(date.fromisoformat(day).strftime(call[2])), template)


def _cause(messages: Sequence[Message]) -> str:
    """The part of a conversation that templates reject most often."""
    if any(isinstance(m.get("content"), list | tuple) for m in messages):
        return "the content from a list of parts to its text"
    return "the row (or data.system_prompt)" if messages[0]["role"] == "system" else "the row"


def uses_chat_template(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> bool:
    """Whether apply_chat_template=auto renders plain text by a chat template: where the tokenizer or the arguments
    have one.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> uses_chat_template(byte_tokenizer())
    True
    """
    return tokenizer.chat_template is not None or "chat_template" in (options or {})


def writes_date(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> bool:
    """Whether a chat template writes the date, as those of Llama 3.2 and gpt-oss do: prompts differ from day to day."""
    return _WRITTEN.search(str((options or {}).get("chat_template", tokenizer.chat_template))) is not None


def common_prefix(a: str, b: str) -> str:
    """The common beginning of two texts.

    >>> common_prefix("now", "never")
    'n'
    """
    differ = (place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return a[: next(differ, min(len(a), len(b)))]
