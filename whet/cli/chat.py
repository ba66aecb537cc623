"""`whet chat`: a conversation with a model, in a terminal or through a pipe.

What the model has said is never encoded again where the chat template lets it stand as it was: the next turn is put
behind the ids of the last one, and an engine that holds them encodes only what is new.
Left out on purpose: tools, images, and a history that outlives the program.
"""

from __future__ import annotations

import dataclasses
import io
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
from whet.config.loader import EXPRESSIONS, tree
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
/system TEXT       set the system prompt and begin anew; without TEXT, show it
/set key=value     change temperature, top_p, max_tokens, seed ...; without words, show them
/help              this
/quit              leave (so does Ctrl-D)
Ctrl-C stops an answer; a \\ at the end of a line continues it on the next."""
ROOM = 64
"""Tokens that an answer is left where nobody says how long it may be, if the model has so many."""
KEPT = 0.75
"""Share of the tokens that are kept of a conversation that has outgrown the model: what is left is encoded anew, so a
few turns at least go by until the next time."""


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
            prompt, sampling = self._prompt(self._sampling())
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

    def _prompt(self, sampling: Sampling) -> tuple[Prompt, Sampling]:
        """The ids of the conversation so far, the oldest turns left out where it has outgrown the model."""
        longest, prompt = self.sampler.longest, self._encoded()
        given = self.config.max_tokens is not None
        room = sampling.max_tokens if given else max(sampling.min_tokens, min(ROOM, (longest or ROOM) // 4))
        if longest is not None and len(prompt.tokens) > longest - room:
            dropped = False
            while len(prompt.tokens) > KEPT * (longest - room) and self._drop_oldest():
                dropped, prompt = True, self._encoded()
            if dropped:
                log.warning(
                    "the conversation has outgrown the model's %d tokens: its oldest turns are left out", longest
                )
        return prompt, self.sampler.fitted(sampling, [prompt], given=given)[0]

    def _drop_oldest(self) -> bool:
        """Leaves out the oldest question and its answer; False where there is only the last question."""
        first = next((i for i, m in enumerate(self.messages) if m["role"] == "user"), 0)
        if first >= len(self.messages) - 1:
            return False
        del self.messages[first : first + 2]
        self._held = None
        return True

    def _encoded(self) -> Prompt:
        """The conversation as ids: what is held with the rest behind it, or all of it anew."""
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
            return "the conversation begins anew"
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
        return "the system prompt is set, the conversation begins anew"

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
    """What the user says, a line or several joined by a backslash at a time; empty ones are passed over."""
    if live:
        with suppress(ImportError):
            import readline  # noqa: F401  (input() then edits and remembers lines)
    parts: list[str] = []
    while True:
        try:
            line = _line("... " if parts else "> ") if live else sys.stdin.readline()
        except KeyboardInterrupt:
            parts = []
            _tell("\n(Ctrl-D or /quit leaves)")
            continue
        except UnicodeDecodeError as error:
            raise DataError(f"standard input is not {error.encoding} text: {error}; convert it first") from error
        if line is None or (line == "" and not live):
            if parts and not live:
                yield "\n".join(parts)  # the last line of the pipe ended in a backslash
            return
        line = line.rstrip("\n")
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        whole = "\n".join([*parts, line])
        parts = []
        if whole.strip():
            yield whole


def _line(prompt: str) -> str | None:
    """A line from the terminal; None = Ctrl-D."""
    try:
        return input(prompt)
    except EOFError:
        sys.stdout.write("\n")
        return None


def _words(line: str) -> list[str]:
    r'''The words of a line, quotes taken off; a backslash is a letter, as expressions have it.

    A value that begins with a bracket goes to the bracket that closes it, blanks and quotes included.

    >>> _words(r"""a=\d+ 'b=1 2' c={d: "e f"}""")
    ['a=\\d+', 'b=1 2', 'c={d: "e f"}']
    '''
    words, rest = [], line.strip()
    while rest:
        if end := _bracketed(rest):
            words.append(rest[:end])
        else:
            stream = io.StringIO(rest)
            split = shlex.shlex(stream, posix=True, punctuation_chars=False)
            split.whitespace_split, split.escape, split.commenters = True, "", ""
            try:
                words.append(split.get_token() or "")
            except ValueError as error:
                raise ConfigError(f"/set {line}: {error}; close the quotation") from error
            end = stream.tell()
        rest = rest[end:].lstrip()
    return words


def _bracketed(text: str) -> int:
    """Where a first word key=[...] or key={...} ends; 0 = it is none. The brackets of an expression are not YAML's."""
    key, equals, value = text.partition("=")
    if not equals or value[:1] not in ("[", "{") or key.split(".")[-2:] in EXPRESSIONS:
        return 0
    depth, quote = 0, ""
    for place, letter in enumerate(value, len(key) + 1):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if depth == 0:
            return place + 1 if text[place + 1 : place + 2] in ("", " ") else 0
    return 0


def _tell(text: str) -> None:
    """A word of the program's own, apart from the model's."""
    dim = sys.stderr.isatty()
    sys.stderr.write(f"\033[2m{text}\033[0m\n" if dim else f"{text}\n")
    sys.stderr.flush()
