"""Chat templates: render messages as text by the template of a tokenizer."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from itertools import groupby
from typing import TYPE_CHECKING, Any

from whet.errors import ConfigError, DataError, format_exception, format_value
from whet.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DAY", "ChatTemplate", "alarm_handler", "common_prefix", "uses_chat_template", "writes_date"]

DAY = "strftime_now"
"""transformers' function with which a template writes the date. As an argument of the template: the day to write, in
ISO format."""
CACHE_SIZE = 64
"""The number of rendered texts in the cache."""
_DATE_CALL = re.compile(rf"""{DAY}\(\s*(['"])(.*?)\1\s*\)""")
LIMIT_S = 60.0
"""The time limit, in seconds, for rendering one conversation; it usually takes less than a millisecond."""


class _TimeoutError(Exception):
    """A template exceeded the time limit."""


@contextmanager
def alarm_handler() -> Iterator[bool]:
    """Installs the handler of the time limit; around many conversations, so that each only sets its alarm.

    Yields: whether the handler is installed: only on the main thread, and if the signal had no other.
    """
    on_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGALRM) if on_main else None
    if before != signal.SIG_DFL:
        yield before is _raise_timeout
        return
    signal.signal(signal.SIGALRM, _raise_timeout)
    try:
        yield True
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


@contextmanager
def _time_limit() -> Iterator[None]:
    """Stops the body with an alarm at the time limit, if the handler is installed and no other alarm is set."""
    with alarm_handler() as installed:
        if not installed or signal.getitimer(signal.ITIMER_REAL)[0]:
            yield
            return
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_timeout(*_: object) -> None:
    raise _TimeoutError


class ChatTemplate:
    r"""A tokenizer's chat template with its arguments.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> ChatTemplate(byte_tokenizer()).text([{"role": "user", "content": "hi"}], asks=True)
    '<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n'
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> None:
        """Args: tokenizer: of transformers. options: more template arguments; enable_thinking is False by default."""
        self.tokenizer = tokenizer
        self.options: dict[str, Any] = {"enable_thinking": False, **(options or {})}
        self._cache: dict[str, str] = {}
        self.forms: dict[Any, list[list[str]]] = {}
        """The outputs for plain texts by the form of the conversation (data/template_check.py)."""
        self.adapts_thinking = "enable_thinking" not in (options or {})

    @property
    def has_marks(self) -> bool:
        """Whether the template marks the assistant's text by {% generation %}."""
        text = self.tokenizer.chat_template
        return isinstance(text, str) and re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", text) is not None

    def require(self) -> None:
        """Raises ConfigError if the tokenizer has no chat template."""
        if self.tokenizer.chat_template is None and "chat_template" not in self.options:
            raise ConfigError(
                "this tokenizer has no chat template, which messages need; set tokenizer.chat_template, use the "
                "tokenizer of an instruction-tuned model, or use plain text prompts"
            )

    def text(self, messages: Sequence[Message], *, asks: bool = False, row: int = 0, **options: Any) -> str:
        """Renders the messages.

        Args:
            messages: at least one.
            asks: add the header of an assistant's turn at the end.
            row: the row number for error messages.
            options: more arguments of apply_chat_template, e.g. tools.
        Raises: ConfigError: there is no template. DataError: the template refuses the messages.
        """
        return self._apply(messages, row, {"tokenize": False, "add_generation_prompt": asks, **options})

    def texts(self, conversations: Sequence[Sequence[Message]], options: Sequence[Mapping[str, Any]]) -> list[str]:
        """Renders several conversations: one call of the tokenizer for neighbours with the same options.

        Args: conversations: each has at least one message. options: of each conversation; see `text`.
        Raises: Exception: a conversation can't be rendered; `text` says which and why.
        """
        self.require()
        texts: list[str] = []
        pairs = zip(conversations, options, strict=True)
        for _, group in groupby(pairs, key=lambda pair: repr(pair[1])):
            together, (one, *_) = zip(*group, strict=True)
            texts += self._call([list(messages) for messages in together], {"tokenize": False, **one})
        if len(texts) != len(conversations):
            raise DataError(f"the chat template wrote {len(texts)} texts of {len(conversations)} conversations")
        return texts

    def text_of_stand_ins(self, messages: Sequence[Message], row: int, options: Mapping[str, Any]) -> str:
        """`text` with a cache: rows of the same form have the same stand-ins (data/template_check.py)."""
        key = repr((messages, options))
        if key not in self._cache:
            if len(self._cache) >= CACHE_SIZE:
                self._cache.clear()
            self._cache[key] = self.text(messages, row=row, **options)
        return self._cache[key]

    def header(self, messages: Sequence[Message], turn: str, *, row: int = 0, **options: Any) -> str:
        """Renders the messages and the header of the assistant's next turn.

        Args: messages: all before the turn. turn: the text of the messages and the turn. row, options: see `text`.
        Returns: the text of the messages and the header. If the turn contains thinking, and chat_template_kwargs do not
            set enable_thinking, it is the header for a turn with thinking.
        """
        text = self.text(messages, asks=True, row=row, **options)
        if turn.startswith(text) or not self.adapts_thinking or "enable_thinking" in options:
            return text
        thinking = self.text(messages, asks=True, row=row, **{**options, "enable_thinking": True})
        return thinking if turn.startswith(thinking) else text

    def opening(self, turn: Message, row: int = 0, **options: Any) -> str:
        """Returns the text before the assistant's content if its turn is the first message. Templates can't render a
        header without messages, so this is the common prefix of two different first turns.
        """
        turns = ({"role": turn["role"], "content": letter} for letter in "\ue002\ue003")
        return common_prefix(*(self.text([first], row=row, **options) for first in turns))

    def marked(self, messages: Sequence[Message], row: int = 0, **options: Any) -> tuple[list[int], list[bool]]:
        """Returns the ids of the messages, and whether {% generation %} marks each."""
        arguments = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True, **options}
        encoded = self._apply(messages, row, arguments)
        return list(encoded["input_ids"]), [bool(bit) for bit in encoded["assistant_masks"]]

    def _apply(self, messages: Sequence[Message], row: int, overrides: Mapping[str, Any]) -> Any:
        self.require()
        try:
            return self._call(list(messages), overrides)
        except _TimeoutError as error:
            text = {**self.options, **overrides}.get("chat_template", self.tokenizer.chat_template)
            raise ConfigError(
                f"row {row}: the chat template {format_value(str(text), 60)} has not ended within {LIMIT_S:g} s; it "
                "probably has an endless loop: repair the tokenizer's chat_template, or set another one in "
                "rollout.chat_template_kwargs.chat_template"
            ) from error
        except Exception as error:  # a template is a program: it may raise anything
            roles = ", ".join(str(m["role"]) for m in messages)
            raise DataError(
                f"row {row}: the chat template refused turns of {roles}: {format_exception(error)}; change "
                f"{_describe_cause(messages)}, or the tokenizer's chat_template"
            ) from error

    def _call(self, messages: Any, overrides: Mapping[str, Any]) -> Any:
        """Calls apply_chat_template for a conversation, or for a list of them, within the time limit."""
        arguments = {**self.options, **overrides}
        if (day := arguments.pop(DAY, None)) is not None:
            arguments["chat_template"] = _set_date(arguments.get("chat_template", self.tokenizer.chat_template), day)
        with _time_limit():
            return self.tokenizer.apply_chat_template(messages, **arguments)


def _set_date(template: str, day: str) -> str:
    """Returns a template that writes this day instead of today. transformers does not let templates call other
    functions.

    >>> _set_date("{{ strftime_now('%d %b %Y') }}", "2026-11-23")
    "{{ '23 Nov 2026' }}"
    """
    return _DATE_CALL.sub(lambda call: repr(date.fromisoformat(day).strftime(call[2])), template)


def _describe_cause(messages: Sequence[Message]) -> str:
    """Returns the part of a conversation that templates reject most often."""
    if any(isinstance(m.get("content"), list | tuple) for m in messages):
        return "the content from a list of parts to its text"
    return "the row (or data.system_prompt)" if messages[0]["role"] == "system" else "the row"


def uses_chat_template(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> bool:
    """Returns whether apply_chat_template=auto renders plain text: if the tokenizer or the arguments have a chat
    template.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> uses_chat_template(byte_tokenizer())
    True
    """
    return tokenizer.chat_template is not None or "chat_template" in (options or {})


def writes_date(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> bool:
    """Returns whether a chat template writes the date, so that prompts change daily, as for Llama 3.2 and gpt-oss."""
    return _DATE_CALL.search(str((options or {}).get("chat_template", tokenizer.chat_template))) is not None


def common_prefix(a: str, b: str) -> str:
    """Returns the common prefix of two texts.

    >>> common_prefix("now", "never")
    'n'
    """
    differ = (place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return a[: next(differ, min(len(a), len(b)))]
