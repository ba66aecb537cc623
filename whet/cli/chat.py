"""`whet chat`: a conversation with a model, in a terminal or through a pipe.

The ids of a conversation are kept. If the chat template does not rewrite earlier turns, only the text of the new turn
is tokenised, and an engine with a prefix cache computes only the new tokens.
Left out on purpose: tools, images, saved conversations, and conversations that are longer than the model's limit. These
end with an error that suggests /reset.
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
from whet.config.generate import SAMPLING_SHORTHANDS, ChatConfig, check_sampling
from whet.config.loader import parse_config_args
from whet.errors import ConfigError, DataError, WhetError, format_exception, lookup_error
from whet.parallel.torchrun_env import require_single_process
from whet.rollout.base import Sampling
from whet.rollout.sampler import Sampler
from whet.rollout.text import TextStream
from whet.types import Message, Prompt

__all__ = ["Chat", "chat"]

log = logging.getLogger("whet")


class Chat:
    """A conversation with a model, and the sampling settings of the next answer.

    Args: sampler: the model. config: the settings.
    Raises: ConfigError: the settings need a chat template, and the tokenizer has none.

    >>> from whet.demo import small_model
    >>> chat = Chat(Sampler(small_model(seed=0), "byte"), ChatConfig(max_tokens=4, seed=1))
    >>> answer = "".join(chat.say("2+2="))
    >>> [m["role"] for m in chat.messages], chat.messages[1]["content"] == answer
    (['user', 'assistant'], True)
    """

    def __init__(self, sampler: Sampler, config: ChatConfig) -> None:
        self.sampler, self.config = sampler, config
        has_template = sampler.tokenizer.chat_template is not None
        if config.apply_chat_template and not has_template:
            raise ConfigError("apply_chat_template=true, but this model's tokenizer has no chat template; leave it out")
        self.templated = has_template if config.apply_chat_template is None else config.apply_chat_template
        """Whether the chat template renders the turns."""
        if config.system_prompt and not self.templated:
            raise ConfigError("system_prompt needs the chat template; leave it out")
        self.finish_reason: str | None = None
        """Why the last answer ended; None = the user stopped it."""
        self._number = 0
        self.reset()
        self._sampling()

    def reset(self) -> None:
        """Starts a new conversation with the same system prompt."""
        system = self.config.system_prompt
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self._ids, self._text = np.zeros(0, np.int32), ""  # of the conversation, as the template rendered it
        self._number += 1

    def say(self, text: str) -> Generator[str]:
        """Sends a message, and yields the answer piece by chunk.

        A caller that stops early ends the answer; the conversation keeps what was generated.
        Raises: DataError: the text is invalid, or the conversation is too long for the model. Then the message is
            removed from the conversation.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{text[:40]!r} is not valid text ({error.reason}); convert the input to UTF-8") from error
        before = self.messages, self._ids, self._text
        self.messages = [*self.messages, {"role": "user", "content": text}]
        tokens, texts, stream = [], [], TextStream(self.sampler.decode)
        self.finish_reason = None
        try:
            prompt, sampling = self._next_request()
            turn = [m["role"] for m in self.messages].count("assistant")
            place = {"seed": self.config.seed, "place": turn, "conversation": self._number}
            try:
                for chunk in self.sampler.stream(prompt, sampling, **place):
                    tokens += chunk.tokens.tolist()
                    self.finish_reason = chunk.finish_reason
                    texts.append(stream.push(chunk.tokens, last=chunk.finish_reason is not None))
                    yield texts[-1]
            finally:
                answer = "".join(texts) + stream.push((), last=True)
                self.messages.append({"role": "assistant", "content": answer})
                self._ids = np.concatenate([prompt.tokens, np.array(tokens, np.int32)])
                self._text += str(self.sampler.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
        except WhetError:
            self.messages, self._ids, self._text = before
            raise

    def _sampling(self) -> Sampling:
        return self.sampler.sampling(**sampling_keys(self.config))

    def _next_request(self) -> tuple[Prompt, Sampling]:
        """Returns the prompt of the next answer, and its sampling settings, with max_tokens limited to the free
        positions.
        """
        prompt = self._encode()
        try:
            is_set = self.config.max_tokens is not None
            return prompt, self.sampler.limit_lengths(self._sampling(), [prompt], fixed=is_set)[0]
        except DataError as error:
            hint = "; /reset starts a new conversation" if len(self.messages) > 2 else ""
            raise DataError(f"{error}{hint}") from error

    def _encode(self) -> Prompt:
        """Returns the ids of the conversation: the kept ids and those of the new text, or all ids again."""
        tokenizer, new_text = self.sampler.tokenizer, self.messages[-1]["content"]
        if self.templated:
            options = {"enable_thinking": False, **self.sampler.chat_template_kwargs, "add_generation_prompt": True}
            try:
                text = str(tokenizer.apply_chat_template(self.messages, tokenize=False, **options))
            except Exception as error:  # a template is a program: it may raise anything
                raise DataError(f"the chat template refused this: {format_exception(error)}") from error
            if not text.startswith(self._text):  # the template has changed an earlier turn
                self._ids, self._text = self._ids[:0], ""
            new_text, self._text = text[len(self._text) :], text
        ids = tokenizer(new_text, add_special_tokens=not (self.templated or len(self._ids)), verbose=False).input_ids
        return Prompt(tokens=np.concatenate([self._ids, np.array(ids, np.int32)]), source=self.messages)

    def command(self, line: str) -> str | None:
        """Runs a line that starts with a slash, and returns the reply to the user; None = quit.

        Raises: ConfigError: an unknown command, or invalid settings.
        """
        word, _, rest = line[1:].partition(" ")
        if word not in ("quit", "reset", "set"):
            raise lookup_error("command", f"/{word}", ("/quit", "/reset", "/set"))
        if word == "reset":
            self.reset()
            return "a new conversation starts"
        return self._set(rest.strip()) if word == "set" else None

    def _set(self, text: str) -> str:
        """Changes settings (all of them, or none after an error), and returns them as text."""
        current = {f.name: getattr(self.config, f.name) for f in dataclasses.fields(self.config)}
        changeable = sorted(current.keys() & {"max_tokens", "seed", *sampling_keys(self.config)})
        args = _split_words(text)
        changes = parse_config_args(
            ["=".join(args)] if len(args) == 2 and "=" not in text else args,
            SAMPLING_SHORTHANDS,
            ChatConfig,
        )
        if wrong := changes.keys() - changeable:
            raise lookup_error("setting", min(wrong), changeable)
        config = config_from_dict(ChatConfig, {**current, **changes})
        self.sampler.sampling(**sampling_keys(config))
        self.config = config
        return ", ".join(f"{name}={getattr(config, name)}" for name in changeable if getattr(config, name) != ())


def chat(config: ChatConfig) -> None:
    """Runs a conversation at a terminal, or answers the lines of standard input.

    Raises: ConfigError: no model, or no standard input. OutputError: an answer can't be printed.
    """
    require_single_process("whet chat")
    check_sampling(config)
    with open_sampler(config, max_batch_size=1) as sampler:
        conversation = Chat(sampler, config)
        if not conversation.templated:
            reason = "has no chat template" if config.apply_chat_template is None else "runs without its chat template"
            log.warning("%s %s: it continues your text as plain text", config.model, reason)
        for line in _read_lines(sys.stdin.isatty()):
            try:
                if not line.startswith("/"):
                    _print_answer(conversation, line)
                elif (reply := conversation.command(line)) is None:
                    return
                else:
                    _print_notice(reply)
            except OutputError:
                raise
            except WhetError as error:
                _print_notice(str(error))


def _print_answer(conversation: Chat, line: str) -> None:
    """Prints an answer while it is generated. Ctrl-C stops it after the next token, or at once if the engine does not
    stream tokens.
    """
    stopped: list[int] = []

    def stop(number: int, _: Any) -> None:
        stopped.append(number)
        if len(stopped) > 1 or not all(engine.caps.peek for engine in conversation.sampler.engines):
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        with suppress(KeyboardInterrupt), closing(conversation.say(line)) as answer:
            for text in answer:
                show(text)
                if stopped:
                    break
    finally:
        signal.signal(signal.SIGINT, before)
    show("\n")
    if stopped:
        _print_notice("[stopped]")
    elif conversation.finish_reason == "length" and sys.stdin.isatty():
        _print_notice("[truncated at max_tokens; /set max_tokens=... for more]")


def _read_lines(interactive: bool) -> Iterator[str]:
    """Yields the lines that the user types, without empty ones."""
    if interactive:
        _print_notice("/reset, /set temperature=0.7, /quit; Ctrl-C stops an answer")
        with suppress(ImportError):
            import readline  # noqa: F401  (input() then has line editing and a history)
    while True:
        try:
            line = f"{input('> ')}\n" if interactive else sys.stdin.readline()
        except EOFError:
            show("\n")
            return
        except KeyboardInterrupt:
            _print_notice("\n(Ctrl-D or /quit leaves)")
            continue
        except UnicodeDecodeError as error:
            raise DataError(f"standard input is not {error.encoding} text: {error}; convert it first") from error
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _split_words(line: str) -> list[str]:
    """Returns the words of a line, without quotes; a backslash is an ordinary character, because regular expressions
    use it.
    """
    split = shlex.shlex(line, posix=True, punctuation_chars=False)
    split.whitespace_split, split.escape, split.commenters = True, "", ""
    try:
        return list(split)
    except ValueError as error:
        raise ConfigError(f"/set {line}: {error}; close the quotes") from error


def _print_notice(text: str) -> None:
    """Prints a message of the program to standard error; the model's text goes to standard output."""
    sys.stderr.write(f"{text}\n")
