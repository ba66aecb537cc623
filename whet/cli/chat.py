"""`whet chat`: a conversation with a model, in a terminal or through a pipe.

What the model has said is never encoded again where the chat template lets it stand as it was: the next turn is put
behind the ids of the last one, and an engine that holds them encodes only what is new.
Left out on purpose: tools, images, a history that outlives the program, and a conversation longer than the model, which
ends with an error that names /reset.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import numpy as np

from whet.cli.generate import open_sampler, sampling_keys, visible
from whet.config.base import check
from whet.config.generate import ChatConfig, check_model
from whet.config.loader import tree
from whet.errors import ConfigError, DataError, WhetError, lookup_error
from whet.rollout.base import Sampling
from whet.rollout.sampler import Sampler
from whet.rollout.text import TextStream
from whet.types import Message, Prompt

__all__ = ["Chat", "chat"]

log = logging.getLogger("whet")

LIVE = (
    "constraint",
    "eos_tokens",
    "forbidden_tokens",
    "generation_kwargs",
    "max_tokens",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "seed",
    "stop",
    "temperature",
    "top_k",
    "top_p",
)
"""Keys that /set changes."""
HELP = """/reset             forget the conversation
/system TEXT       set the system prompt and start again; without TEXT, show it
/set key=value     change temperature, top_p, max_tokens, seed ...; quote a value with blanks;
                   without words, show them
/help              this
/quit              leave (so does Ctrl-D)
Ctrl-C stops an answer."""


class Chat:
    """A conversation: what was said, and how the next answer is drawn.

    Args: sampler: the model. config: settings.

    >>> from whet.demo import small_model
    >>> chat = Chat(Sampler(small_model(seed=0), "byte"), ChatConfig(max_tokens=4, seed=1))
    >>> answer = "".join(chat.say("2+2="))
    >>> [m["role"] for m in chat.messages], chat.messages[1]["content"] == answer
    (['user', 'assistant'], True)
    """

    def __init__(self, sampler: Sampler, config: ChatConfig) -> None:
        self.sampler, self.config = sampler, config
        there = sampler.tokenizer.chat_template is not None
        if config.apply_chat_template and not there:
            raise ConfigError("apply_chat_template=true, but this model's tokenizer has no chat template; leave it out")
        self.templated = there if config.apply_chat_template is None else config.apply_chat_template
        """Whether turns go through the chat template."""
        self.finish_reason: str | None = None
        """Why the last answer ended; None = it was stopped."""
        self.messages: list[Message] = []
        self._number = 0
        self.reset()
        self._sampling()

    def reset(self) -> None:
        """Forgets what was said; the system prompt stays."""
        self.messages = []
        if self.templated and self.config.system_prompt:
            self.messages.append({"role": "system", "content": self.config.system_prompt})
        self._held: np.ndarray | None = None
        self._asked = self._text = ""  # what was rendered up to the answer, and with it
        self._turn = 0
        self._number += 1

    def say(self, text: str) -> Generator[str]:
        """Says something, and gives the answer as it is made; leaving early stops it, what was made stays said.

        Raises: DataError: the text alone is longer than the model allows, or no valid text; it is not part of the
            conversation then.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{text[:40]!r} is no valid text ({error.reason}); is the input UTF-8?") from error
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        stream, made, said = TextStream(self.sampler.decode), [], []
        self.finish_reason = None
        try:
            prompt, sampling = self._fitted(self._sampling())
            seed = secrets.randbits(31) if self.config.seed is None else self.config.seed
            pieces = self.sampler.stream(prompt, sampling, seed=seed, place=self._turn, conversation=self._number)
            try:
                for piece in pieces:
                    made += piece.tokens.tolist()
                    self.finish_reason = piece.finish_reason
                    said.append(stream.push(piece.tokens, last=piece.finish_reason is not None))
                    yield said[-1]
            except (GeneratorExit, KeyboardInterrupt):
                said.append(stream.push((), last=True))
                self._record(prompt, made, "".join(said))
                raise
        except WhetError:
            self.messages, self._held = before, None
            raise
        self._record(prompt, made, "".join(said))

    def _record(self, prompt: Prompt, made: list[int], said: str) -> None:
        """Keeps an answer: its text for the template, its ids for what follows."""
        self.messages.append({"role": "assistant", "content": said})
        self._turn += 1
        self._held = np.concatenate([prompt.tokens, np.array(made, np.int32)])
        if self.templated:
            self._text = self._asked + self._decode_raw(made)

    def _sampling(self) -> Sampling:
        return self.sampler.sampling(**sampling_keys(self.config))

    def _fitted(self, sampling: Sampling) -> tuple[Prompt, Sampling]:
        """The ids of the conversation so far, and as many tokens for the answer as the model has left."""
        prompt = self._encoded()
        try:
            return prompt, self.sampler.fitted(sampling, [prompt], given=self.config.max_tokens is not None)[0]
        except DataError as error:
            hint = "; /reset forgets what was said before" if len(self.messages) > 2 else ""
            raise DataError(f"{error}{hint}") from error

    def _encoded(self) -> Prompt:
        """The conversation as ids: what is held with the rest behind it, or all of it encoded again."""
        tokenizer = self.sampler.tokenizer
        if not self.templated:
            held = self._held
            if held is None:
                return self.sampler.encode("".join(m["content"] for m in self.messages))[0]
            rest = tokenizer(self.messages[-1]["content"], add_special_tokens=False, verbose=False).input_ids
            return self._behind(held, rest)
        self._asked = whole = self._render(self.messages)
        held = self._held if whole.startswith(self._text) else None
        rest = whole if held is None else whole[len(self._text) :]
        return self._behind(held, tokenizer(rest, add_special_tokens=False, verbose=False).input_ids)

    def _behind(self, held: np.ndarray | None, rest: Any) -> Prompt:
        """What is held, and ids behind it."""
        parts = [np.array(rest, np.int32)] if held is None else [held, np.array(rest, np.int32)]
        return Prompt(tokens=np.concatenate(parts), source=self.messages)

    def _render(self, messages: list[Message]) -> str:
        """The conversation as the template writes it, up to where the answer begins."""
        options = {"enable_thinking": False, **self.sampler.chat_template_kwargs}
        try:
            return str(
                self.sampler.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **options
                )
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise DataError(f"the chat template refused the conversation: {type(error).__name__}: {error}") from error

    def _decode_raw(self, ids: list[int]) -> str:
        """The text of ids with special tokens, as the template would have to write it."""
        return str(self.sampler.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    # ---- commands ------------------------------------------------------------------------------------------------

    def command(self, line: str) -> str | None:
        """Carries out a line that begins with a slash.

        Returns: what to tell the user; None = leave.
        Raises: ConfigError: an unknown command, or settings that are wrong.
        """
        word, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if word in ("quit", "exit", "q"):
            return None
        if word == "help":
            return HELP
        if word == "reset":
            self.reset()
            return "the conversation starts again"
        if word == "system":
            return self._set_system(rest)
        if word == "set":
            return self._set(rest)
        raise lookup_error("command", f"/{word}", ("/help", "/quit", "/reset", "/set", "/system"))

    def _set_system(self, text: str) -> str:
        if not text:
            return self.config.system_prompt or "there is no system prompt"
        if not self.templated:
            raise ConfigError("plain text has no system prompt; it is part of the chat template")
        self.config = dataclasses.replace(self.config, system_prompt=text)
        self.reset()
        return "the system prompt is set, the conversation starts again"

    def _set(self, words: str) -> str:
        """Changes settings, all or none."""
        if words:
            parts = _words(words)
            given = tree(["=".join(parts)] if len(parts) == 2 and "=" not in words else parts)
            for key in given:
                if key not in LIVE:
                    raise lookup_error("setting", key, LIVE)
            before = self.config
            own = {f.name: getattr(before, f.name) for f in dataclasses.fields(before)}
            self.config = check(ChatConfig, {**own, **given})
            try:
                self._sampling()
            except ConfigError:
                self.config = before
                raise
        return ", ".join(f"{name}={getattr(self.config, name)}" for name in LIVE if getattr(self.config, name) != ())


def chat(config: ChatConfig) -> None:
    """Talks with a person at a terminal, or answers the lines of a pipe.

    Args: config: the whole configuration.
    """
    check_model(config)
    if sys.stdin is None:
        raise ConfigError("a chat reads standard input, which is closed; run it in a terminal, or pipe lines in")
    with open_sampler(config, max_batch_size=1) as sampler:
        talk = Chat(sampler, config)
        live = sys.stdin.isatty()
        if not talk.templated:
            why = "has no chat template" if config.apply_chat_template is None else "is not given its chat template"
            log.warning("%s %s: it goes on with what you write, as plain text", config.model, why)
            if config.system_prompt:
                raise ConfigError("system_prompt needs the chat template; leave it out")
        if live:
            _tell(f"{config.model}: /help for commands, Ctrl-D to leave")
        for line in _lines(live):
            try:
                if line.startswith("/"):
                    told = talk.command(line)
                    if told is None:
                        return
                    _tell(told)
                else:
                    _answer(talk, line, live)
            except WhetError as error:
                _tell(str(error))


def _answer(talk: Chat, line: str, live: bool) -> None:
    """Prints an answer as it is made."""
    show: Callable[[str], str] = visible if sys.stdout.isatty() else str
    with _interruptible(talk.sampler) as stopped, closing(talk.say(line)) as answer:
        for text in answer:
            sys.stdout.write(show(text))
            sys.stdout.flush()
            if stopped.is_set():
                break
    sys.stdout.write("\n")
    sys.stdout.flush()
    if stopped.is_set():
        _tell("[stopped]")
    elif live and talk.finish_reason == "length":
        _tell("[cut at its longest; /set max_tokens=... for more]")


@contextmanager
def _interruptible(sampler: Sampler) -> Iterator[threading.Event]:
    """Ctrl-C sets the event, and ends the block where the engine could not be asked in between; the program goes on."""
    stopped = threading.Event()

    def stop(*_: Any) -> None:
        again = stopped.is_set() or not all(engine.caps.peek for engine in sampler.engines)
        stopped.set()
        if again:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    except KeyboardInterrupt:
        stopped.set()
    finally:
        signal.signal(signal.SIGINT, before)


def _lines(live: bool) -> Iterator[str]:
    """What the user says, a line at a time; empty ones are passed over."""
    if live:
        with suppress(ImportError):
            import readline  # noqa: F401  (input() then edits and remembers lines)
    while True:
        try:
            line = _line("> ") if live else sys.stdin.readline() or None
        except KeyboardInterrupt:
            _tell("\n(Ctrl-D or /quit leaves)")
            continue
        except UnicodeDecodeError as error:
            raise DataError(f"standard input is not {error.encoding} text: {error}; convert it first") from error
        if line is None:
            return
        if line.strip():
            yield line.rstrip("\n")


def _line(prompt: str) -> str | None:
    """A line from the terminal; None = Ctrl-D."""
    try:
        return input(prompt)
    except EOFError:
        sys.stdout.write("\n")
        return None


def _words(line: str) -> list[str]:
    r"""The words of a line, quotes taken off; a backslash is a letter, as regular expressions have it.

    >>> _words(r"constraint.regex=\d+ 'stop=a b'")
    ['constraint.regex=\\d+', 'stop=a b']
    """
    split = shlex.shlex(line, posix=True, punctuation_chars=False)
    split.whitespace_split, split.escape, split.commenters = True, "", ""
    try:
        return list(split)
    except ValueError as error:
        raise ConfigError(f"/set {line}: {error}; close the quotation") from error


def _tell(text: str) -> None:
    """A word of the program's own, apart from the model's."""
    dim = sys.stderr.isatty()
    sys.stderr.write(f"\033[2m{text}\033[0m\n" if dim else f"{text}\n")
    sys.stderr.flush()
