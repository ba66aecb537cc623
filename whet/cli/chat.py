"""`whet chat`: a conversation with a model, in a terminal or through a pipe.

What the model has said is never encoded again where the chat template lets it stand as it was: the next turn is put
behind the ids of the last one, and an engine that holds them encodes only what is new.
Left out on purpose: tools, images, a history that outlives the program, and a conversation longer than the model, which
ends with an error that names /reset.
"""

from __future__ import annotations

import dataclasses
import logging
import shlex
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from typing import Any

import numpy as np

from whet.cli.generate import OutputError, open_sampler, sampling_keys, show
from whet.config.base import config_from_dict
from whet.config.generate import ChatConfig, check_sampling, sampling_shorthands
from whet.config.loader import parse_config_args
from whet.errors import ConfigError, DataError, WhetError, format_exception, lookup_error
from whet.rollout.base import Sampling
from whet.rollout.sampler import Sampler
from whet.rollout.text import TextStream
from whet.types import Message, Prompt

__all__ = ["Chat", "chat"]

log = logging.getLogger("whet")


class Chat:
    """A conversation: what was said, and how the next answer is drawn.

    Args: sampler: the model. config: settings.
    Raises: ConfigError: a template or a system prompt is asked for where there is no template.

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
        if config.system_prompt and not self.templated:
            raise ConfigError("system_prompt needs the chat template; leave it out")
        self.finish_reason: str | None = None
        """Why the last answer ended; None = it was stopped."""
        self._number = 0
        self.reset()
        self._sampling()

    def reset(self) -> None:
        """Forgets what was said; the system prompt stays."""
        system = self.config.system_prompt
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self._held, self._text = np.zeros(0, np.int32), ""  # the conversation as ids, and as the template wrote it
        self._number += 1

    def say(self, text: str) -> Generator[str]:
        """Says something, and gives the answer as it is made; leaving early stops it, what was made stays said.

        Raises: DataError: text that is not valid, or longer than the model allows; the conversation is without it then.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{text[:40]!r} is no valid text ({error.reason}); is the input UTF-8?") from error
        before = self.messages, self._held, self._text
        self.messages = [*self.messages, {"role": "user", "content": text}]
        tokens, texts, stream = [], [], TextStream(self.sampler.decode)
        self.finish_reason = None
        try:
            prompt, sampling = self._fitted()
            turn = [m["role"] for m in self.messages].count("assistant")
            address = {"seed": self.config.seed, "place": turn, "conversation": self._number}
            try:
                for piece in self.sampler.stream(prompt, sampling, **address):
                    tokens += piece.tokens.tolist()
                    self.finish_reason = piece.finish_reason
                    texts.append(stream.push(piece.tokens, last=piece.finish_reason is not None))
                    yield texts[-1]
            finally:
                answer = "".join(texts) + stream.push((), last=True)
                self.messages.append({"role": "assistant", "content": answer})
                self._held = np.concatenate([prompt.tokens, np.array(tokens, np.int32)])
                self._text += str(self.sampler.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
        except WhetError:
            self.messages, self._held, self._text = before
            raise

    def _sampling(self) -> Sampling:
        return self.sampler.sampling(**sampling_keys(self.config))

    def _fitted(self) -> tuple[Prompt, Sampling]:
        """The ids of the conversation so far, and as many tokens for the answer as the model has left."""
        prompt = self._encoded()
        try:
            given = self.config.max_tokens is not None
            return prompt, self.sampler.limit_lengths(self._sampling(), [prompt], given=given)[0]
        except DataError as error:
            hint = "; /reset forgets what was said before" if len(self.messages) > 2 else ""
            raise DataError(f"{error}{hint}") from error

    def _encoded(self) -> Prompt:
        """The conversation as ids: what is held with the rest behind it, or all of it encoded again."""
        tokenizer, rest = self.sampler.tokenizer, self.messages[-1]["content"]
        if self.templated:
            options = {"enable_thinking": False, **self.sampler.chat_template_kwargs, "add_generation_prompt": True}
            try:
                whole = str(tokenizer.apply_chat_template(self.messages, tokenize=False, **options))
            except Exception as error:  # a template is a program: it may raise anything
                raise DataError(f"the chat template refused this: {format_exception(error)}") from error
            if not whole.startswith(self._text):  # the template has rewritten an answer
                self._held, self._text = self._held[:0], ""
            rest, self._text = whole[len(self._text) :], whole
        ids = tokenizer(rest, add_special_tokens=not (self.templated or len(self._held)), verbose=False).input_ids
        return Prompt(tokens=np.concatenate([self._held, np.array(ids, np.int32)]), source=self.messages)

    def command(self, line: str) -> str | None:
        """Carries out a line that begins with a slash, and returns what to tell the user; None = leave.

        Raises: ConfigError: an unknown command, or settings that are wrong.
        """
        word, _, rest = line[1:].partition(" ")
        if word not in ("quit", "reset", "set"):
            raise lookup_error("command", f"/{word}", ("/quit", "/reset", "/set"))
        if word == "reset":
            self.reset()
            return "the conversation starts again"
        return self._set(rest.strip()) if word == "set" else None

    def _set(self, words: str) -> str:
        """Changes settings, all or none, and shows them."""
        own = {f.name: getattr(self.config, f.name) for f in dataclasses.fields(self.config)}
        live = sorted(own.keys() & {"max_tokens", "seed", *sampling_keys(self.config)})
        parts = _words(words)
        given = parse_config_args(
            ["=".join(parts)] if len(parts) == 2 and "=" not in words else parts,
            sampling_shorthands(ChatConfig),
            ChatConfig,
        )
        if wrong := given.keys() - live:
            raise lookup_error("setting", min(wrong), live)
        config = config_from_dict(ChatConfig, {**own, **given})
        self.sampler.sampling(**sampling_keys(config))
        self.config = config
        return ", ".join(f"{name}={getattr(config, name)}" for name in live if getattr(config, name) != ())


def chat(config: ChatConfig) -> None:
    """Talks with a person at a terminal, or answers the lines of a pipe.

    Raises: ConfigError: no model, no standard input. OutputError: an answer can't be printed.
    """
    check_sampling(config)
    with open_sampler(config, max_batch_size=1) as sampler:
        talk = Chat(sampler, config)
        if not talk.templated:
            why = "has no chat template" if config.apply_chat_template is None else "is not given its chat template"
            log.warning("%s %s: it goes on with what you write, as plain text", config.model, why)
        for line in _lines(sys.stdin.isatty()):
            try:
                if not line.startswith("/"):
                    _answer(talk, line)
                elif (reply := talk.command(line)) is None:
                    return
                else:
                    _tell(reply)
            except OutputError:
                raise
            except WhetError as error:
                _tell(str(error))


def _answer(talk: Chat, line: str) -> None:
    """Prints an answer as it is made; Ctrl-C stops it at its next token, or at once if they come all at once."""
    stopped: list[int] = []

    def stop(number: int, _: Any) -> None:
        stopped.append(number)
        if len(stopped) > 1 or not all(engine.caps.peek for engine in talk.sampler.engines):
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        with suppress(KeyboardInterrupt), closing(talk.say(line)) as answer:
            for text in answer:
                show(text)
                if stopped:
                    break
    finally:
        signal.signal(signal.SIGINT, before)
    show("\n")
    if stopped:
        _tell("[stopped]")
    elif talk.finish_reason == "length" and sys.stdin.isatty():
        _tell("[truncated at its longest; /set max_tokens=... for more]")


def _lines(live: bool) -> Iterator[str]:
    """What the user says, a line at a time; empty ones are passed over."""
    if live:
        _tell("/reset, /set temperature=0.7, /quit; Ctrl-C stops an answer")
        with suppress(ImportError):
            import readline  # noqa: F401  (input() then edits and remembers lines)
    while True:
        try:
            line = f"{input('> ')}\n" if live else sys.stdin.readline()
        except EOFError:
            show("\n")
            return
        except KeyboardInterrupt:
            _tell("\n(Ctrl-D or /quit leaves)")
            continue
        except UnicodeDecodeError as error:
            raise DataError(f"standard input is not {error.encoding} text: {error}; convert it first") from error
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _words(line: str) -> list[str]:
    """The words of a line, quotes taken off; a backslash is a letter, as regular expressions have it."""
    split = shlex.shlex(line, posix=True, punctuation_chars=False)
    split.whitespace_split, split.escape, split.commenters = True, "", ""
    try:
        return list(split)
    except ValueError as error:
        raise ConfigError(f"/set {line}: {error}; close the quotation") from error


def _tell(text: str) -> None:
    """A word of the program's own, apart from the model's."""
    sys.stderr.write(f"{text}\n")
