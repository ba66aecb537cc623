"""Calls: one call of a route, from its body to engine requests, and from their tokens to a response or its chunks.

    call = ChatCall(model, body)
    generation = loop.submit(call.requests)
    call.response(outputs)                          the whole response, or
    call.chunks(index, partial), call.last_chunks() the chunks of a streamed one

Dim legend: P prompt, C completion.
"""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from whet.envs.sessions import Session
from whet.envs.tool_calls import ReasoningStream, split_reasoning
from whet.rollout.base import Output, PartialOutput, Request
from whet.rollout.text import TextStream
from whet.serve.api_errors import ApiError
from whet.serve.bodies import ChatBody, CompletionBody, GenerateBody, SamplingBody
from whet.serve.chat_model import ChatModel
from whet.serve.served_model import read_messages

__all__ = ["ROUTES", "Call", "ChatCall", "CompletionCall", "GenerateCall", "join_partials", "version_spans"]

_places = itertools.count()
_SEED = secrets.randbits(31)
"""The seed of requests that name none; each has a place of its own."""


class ChoiceText:
    """The text of a choice while it grows, cut before the first stop string.

    Args: decode: ids -> text. stop: the stop strings; text that may begin one is held back.

    >>> text = ChoiceText(lambda ids: bytes(ids).decode(), ["END"])
    >>> text.push(b"2 E"), text.push(b"N"), text.push(b"D!", last=True)
    ('2 ', '', '')
    """

    def __init__(self, decode: Any, stop: Sequence[str] = ()) -> None:
        self._stream, self._stop, self._held, self._ended = TextStream(decode), tuple(stop), "", False

    def push(self, tokens: Any, *, last: bool = False) -> str:
        """Returns the text that the next tokens add. Args: last: no more tokens follow."""
        if self._ended:
            return ""
        self._held += self._stream.push(tokens, last=last)
        ends = [place for s in self._stop if (place := self._held.find(s)) >= 0]
        if ends:
            self._ended = True
            return self._held[: min(ends)]
        keep = 0
        if not last:
            longest = max((len(s) - 1 for s in self._stop), default=0)
            lengths = range(min(longest, len(self._held)), 0, -1)
            keep = next((n for n in lengths if any(s.startswith(self._held[-n:]) for s in self._stop)), 0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text


def join_partials(partials: Sequence[PartialOutput]) -> Output:
    """Returns the whole of a request's tokens. Args: partials: up to the last one."""
    reason = partials[-1].finish_reason
    assert reason is not None
    return Output(
        id=partials[-1].id,
        tokens=np.concatenate([p.tokens for p in partials]),
        logprobs=np.concatenate([p.logprobs for p in partials]),
        versions=np.concatenate([p.versions for p in partials]),
        finish_reason=reason,
    )


class Call:
    """One call of a route.

    Args: model: that answers. body: checked. session: that the call belongs to; None = one of its own.
    """

    kind = ""
    """The prefix of the response's id."""

    def __init__(self, model: ChatModel, body: Any, session: Session | None = None) -> None:
        self.model, self.body, self.session = model, body, session or Session(model)
        model.check_name(body.model)
        self.id = f"{self.kind}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.requests: list[Request] = []
        """Of each prompt its n choices, one after the other."""
        self.completion_tokens = 0
        """Tokens that were drawn."""
        self._texts: list[ChoiceText] = []
        self._offsets: list[int] = []

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts."""
        return sum(len(r.tokens) for r in self.requests[:: self.body_sampling.n])

    @property
    def body_sampling(self) -> SamplingBody:
        """The part of the body that has the sampling fields."""
        return self.body

    def add_prompts(
        self, prompts: Sequence[np.ndarray], *, max_tokens: int | None, response_format: Any = None
    ) -> None:
        """Makes the requests of prompts. Raises ApiError, ConfigError: see ChatModel.sampling and limit."""
        body = self.body_sampling
        sampling = self.model.sampling(body, max_tokens=max_tokens, response_format=response_format)
        for i, tokens in enumerate(prompts):
            limited = self.model.limit(sampling, tokens, max_tokens=max_tokens)
            seed, place = (_SEED, next(_places)) if body.seed is None else (body.seed % 2**63, i)
            self.requests += [
                Request(id=-1, tokens=tokens, sampling=limited, group=-1, rng_key=(seed, 0, place, generation))
                for generation in range(body.n)
            ]
        self._texts = [ChoiceText(self.model.decode, r.sampling.stop) for r in self.requests]
        self._offsets = [0] * len(self.requests)

    def requests_of(self, conversation: int | None) -> list[Request]:
        """Returns the engine requests. Args: conversation: whose KV a single request continues; None = none."""
        if conversation is None or len(self.requests) > 1:
            return self.requests
        return [replace(self.requests[0], conversation=conversation)]

    # ---- what the routes fill in ---------------------------------------------------------------------------------

    def choice(self, index: int, output: PartialOutput) -> dict[str, Any]:
        """Returns a choice of the response."""
        raise NotImplementedError

    def delta(self, index: int, partial: PartialOutput) -> Iterator[dict[str, Any]]:
        """The choices of the chunks that new tokens add to the stream."""
        raise NotImplementedError

    def envelope(self, choices: list[dict[str, Any]], *, streamed: bool = False) -> dict[str, Any]:
        """Returns a response or a chunk around its choices."""
        raise NotImplementedError

    # ---- responses -----------------------------------------------------------------------------------------------

    def response(self, outputs: Sequence[PartialOutput]) -> dict[str, Any]:
        """Returns the whole response. Args: outputs: of the requests, in order."""
        choices = []
        for i, output in enumerate(outputs):
            self._count(output)
            choices.append(self.choice(i, output))
        return {**self.envelope(choices), "usage": self.usage()}

    def chunks(self, index: int, partial: PartialOutput) -> Iterator[dict[str, Any]]:
        """Yields the chunks that new tokens of a request add to a streamed response."""
        self._count(partial)
        for choice in self.delta(index, partial):
            yield self.envelope([choice], streamed=True)

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        """Yields the chunks after all choices have ended."""
        options = self.body.stream_options
        if options is not None and options.include_usage:
            yield {**self.envelope([], streamed=True), "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Returns the tokens of prompts and completions."""
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _count(self, partial: PartialOutput) -> None:
        self.completion_tokens += len(partial.tokens)
        if partial.finish_reason == "error":
            raise ApiError(500, "the constraint allows no next token; change response_format")

    def _text(self, index: int, partial: PartialOutput) -> str:
        """Returns the text that new tokens add to a choice."""
        return self._texts[index].push(partial.tokens, last=partial.finish_reason is not None)

    def _ids(self, partial: PartialOutput) -> dict[str, Any]:
        """token_ids and weight_versions of a choice, where the client asked for them."""
        if not self.body.return_token_ids:
            return {}
        return {"token_ids": partial.tokens.tolist(), "weight_versions": version_spans(partial.versions)}


class ChatCall(Call):
    """A call of /v1/chat/completions."""

    kind = "chatcmpl"

    def __init__(self, model: ChatModel, body: ChatBody, session: Session | None = None) -> None:
        super().__init__(model, body, session)
        self.tools = list(body.tools or ()) if body.tool_choice != "none" else []
        if self.tools:
            _ = model.tool_template  # refuses a template without tools before anything is drawn
        messages = read_messages(body.messages)
        self.turn = self.session.begin(messages, body.tools or (), body.chat_template_kwargs or {})
        max_tokens = body.max_completion_tokens or body.max_tokens
        self.add_prompts([self.turn.tokens], max_tokens=max_tokens, response_format=body.response_format)
        self._partials: list[list[PartialOutput]] = [[] for _ in self.requests]
        self._said: list[dict[str, Any]] = [{"role": "assistant", "content": ""} for _ in self.requests]
        is_open = bool(body.stream) and self.turn.text().rstrip().endswith("<think>")
        self._reasoning = [ReasoningStream(is_open=is_open) for _ in self.requests]
        self._begun: set[int] = set()

    def envelope(self, choices: list[dict[str, Any]], *, streamed: bool = False) -> dict[str, Any]:
        """Returns a response or a chunk around its choices."""
        fields: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion.chunk" if streamed else "chat.completion",
            "created": self.created,
            "model": self.model.name,
            "choices": choices,
        }
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = self.requests[0].tokens.tolist()
        return fields

    def choice(self, index: int, output: PartialOutput) -> dict[str, Any]:
        """Returns a choice of the response, with its message."""
        message = self._message(index, output)
        self._record(output, message)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(output),
            "finish_reason": _finish_reason(output, message),
            **self._ids(output),
        }

    def delta(self, index: int, partial: PartialOutput) -> Iterator[dict[str, Any]]:
        """The first chunk has the role, the last one the finish_reason. With tools, all text is in the last one."""
        if index not in self._begun:
            self._begun.add(index)
            yield self._delta(index, {"role": "assistant", "content": ""})
        self._partials[index].append(partial)
        whole = None if partial.finish_reason is None else join_partials(self._partials[index])
        if self.tools:
            if whole is None:
                return
            message = self._message(index, whole)
            self._record(whole, message)
            calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls", ()))]
            content = {**message, **({"tool_calls": calls} if calls else {})}
            yield self._delta(index, content, whole, finish_reason=_finish_reason(whole, message))
            return
        thought, content = self._reasoning[index].push(self._text(index, partial), last=whole is not None)
        said = self._said[index]
        said["content"] += content
        if thought:
            said["reasoning_content"] = said.get("reasoning_content", "") + thought
        if whole is not None:
            self._record(whole, said)
        if content or thought or len(partial.tokens) or partial.finish_reason:
            delta = {"content": content, **({"reasoning_content": thought} if thought else {})}
            yield self._delta(index, delta, partial, finish_reason=partial.finish_reason)

    def _delta(
        self, index: int, delta: Mapping[str, Any], partial: PartialOutput | None = None, **fields: Any
    ) -> dict[str, Any]:
        more = {} if partial is None else {"logprobs": self._logprobs(partial), **self._ids(partial)}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more, **fields}

    def _record(self, output: PartialOutput, message: Mapping[str, Any]) -> None:
        """Records a choice as a turn of the session."""
        self.session.end(self.turn, output, read_messages([message])[0])

    def _message(self, index: int, output: PartialOutput) -> dict[str, Any]:
        """Returns the assistant's message, with its tool calls in OpenAI's form."""
        if not self.tools:
            return split_reasoning(self._text(index, output))
        turn = self.model.read_turn(output.tokens, self.requests[index].tokens, self.tools)
        calls = [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": f["name"], "arguments": json.dumps(f["arguments"], ensure_ascii=False)},
            }
            for call in turn.get("tool_calls") or ()
            for f in [call.get("function", call)]
        ]
        message: dict[str, Any] = {"role": "assistant", "content": turn["content"] or (None if calls else "")}
        if turn.get("reasoning_content"):
            message["reasoning_content"] = turn["reasoning_content"]
        return {**message, **({"tool_calls": calls} if calls else {})}

    def _logprobs(self, partial: PartialOutput) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return {"content": _token_logprobs(self.model, partial), "refusal": None}


class TokenCall(Call):
    """A call whose prompts are token ids: a session matches them by their ids."""

    def begin_prompts(self, prompts: Sequence[np.ndarray], *, max_tokens: int | None) -> None:
        """Makes the requests of prompts, as turns of the session. Raises ApiError, ConfigError: see `add_prompts`."""
        self._turns = [self.session.begin_tokens(tokens) for tokens in prompts]
        self.add_prompts(prompts, max_tokens=max_tokens)
        self._partials: list[list[PartialOutput]] = [[] for _ in self.requests]

    def response(self, outputs: Sequence[PartialOutput]) -> dict[str, Any]:
        """Returns the whole response; its choices are recorded."""
        whole = super().response(outputs)
        for i, output in enumerate(outputs):
            self._record(i, output)
        return whole

    def chunks(self, index: int, partial: PartialOutput) -> Iterator[dict[str, Any]]:
        """Yields the chunks that new tokens of a request add; a choice that has ended is recorded."""
        self._partials[index].append(partial)
        yield from super().chunks(index, partial)
        if partial.finish_reason is not None:
            self._record(index, join_partials(self._partials[index]))

    def _record(self, index: int, output: PartialOutput) -> None:
        message = {"role": "assistant", "content": self.model.decode(output.tokens)}
        self.session.end(self._turns[index // self.body_sampling.n], output, message)


class CompletionCall(TokenCall):
    """A call of /v1/completions."""

    kind = "cmpl"

    def __init__(self, model: ChatModel, body: CompletionBody, session: Session | None = None) -> None:
        super().__init__(model, body, session)
        prompts = body.prompts()
        if not prompts:
            raise ApiError(400, "prompt is empty; give a text, token ids, or a list of them", param="prompt")
        encoded = [model.encode_text(p) if isinstance(p, str) else np.asarray(p, np.int32) for p in prompts]
        self.begin_prompts(encoded, max_tokens=body.max_tokens)

    def envelope(self, choices: list[dict[str, Any]], *, streamed: bool = False) -> dict[str, Any]:
        """Returns a response or a chunk around its choices."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model.name,
            "choices": choices,
        }

    def choice(self, index: int, output: PartialOutput) -> dict[str, Any]:
        """Returns a choice of the response, or of a chunk."""
        prompt = {"prompt_token_ids": self.requests[index].tokens.tolist()} if self.body.return_token_ids else {}
        return {
            "index": index,
            "text": self._text(index, output),
            "logprobs": self._logprobs(index, output),
            "finish_reason": output.finish_reason,
            **prompt,
            **self._ids(output),
        }

    def delta(self, index: int, partial: PartialOutput) -> Iterator[dict[str, Any]]:
        """One chunk for new tokens."""
        yield self.choice(index, partial)

    def _logprobs(self, index: int, partial: PartialOutput) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        tokens = [self.model.token_text(int(t)) for t in partial.tokens]
        *offsets, self._offsets[index] = itertools.accumulate(map(len, tokens), initial=self._offsets[index])
        return {
            "tokens": tokens,
            "token_logprobs": [float(x) for x in partial.logprobs],
            "top_logprobs": None,
            "text_offset": offsets,
        }


class GenerateCall(TokenCall):
    """A call of /inference/v1/generate: token ids in, token ids out, in vLLM's form."""

    kind = "gen"

    def __init__(self, model: ChatModel, body: GenerateBody, session: Session | None = None) -> None:
        super().__init__(model, body, session)
        if body.request_id is not None:
            self.id = body.request_id
        self.begin_prompts([np.asarray(body.token_ids, np.int32)], max_tokens=body.sampling_params.max_tokens)

    @property
    def body_sampling(self) -> SamplingBody:
        """The part of the body that has the sampling fields."""
        return self.body.sampling_params

    def envelope(self, choices: list[dict[str, Any]], *, streamed: bool = False) -> dict[str, Any]:
        """Returns a response or a chunk around its choices."""
        return {"request_id": self.id, "choices": choices, "prompt_logprobs": None, "kv_transfer_params": None}

    def choice(self, index: int, output: PartialOutput) -> dict[str, Any]:
        """Returns a choice of the response, or of a chunk. weight_versions counts its tokens."""
        has_logprobs = self.body.sampling_params.logprobs is not None
        content = _token_logprobs(self.model, output, ids=True) if has_logprobs else None
        return {
            "index": index,
            "logprobs": {"content": content} if has_logprobs else None,
            "finish_reason": output.finish_reason,
            "token_ids": output.tokens.tolist(),
            "weight_versions": version_spans(output.versions),
        }

    def delta(self, index: int, partial: PartialOutput) -> Iterator[dict[str, Any]]:
        """One chunk for new tokens."""
        yield self.choice(index, partial)


def _token_logprobs(model: ChatModel, partial: PartialOutput, *, ids: bool = False) -> list[dict[str, Any]]:
    """Returns the tokens with their logprobs, in the form of chat completions. Args: ids: add token_id."""
    entries = []
    for token, logprob in zip(partial.tokens.tolist(), partial.logprobs.tolist(), strict=True):
        text = model.token_text(token)
        is_whole = "\N{REPLACEMENT CHARACTER}" not in text
        entry = {
            "token": text,
            "logprob": logprob,
            "bytes": list(text.encode()) if is_whole else None,
            "top_logprobs": [],
        }
        entries.append({"token_id": token, **entry} if ids else entry)
    return entries


def version_spans(versions: np.ndarray) -> list[dict[str, int]]:
    """Runs of tokens that one policy version drew: version, start, end (exclusive).

    >>> version_spans(np.array([3, 3, 4]))
    [{'version': 3, 'start': 0, 'end': 2}, {'version': 4, 'start': 2, 'end': 3}]
    """
    starts = [i for i in range(len(versions)) if i == 0 or versions[i] != versions[i - 1]]
    return [{"version": int(versions[s]), "start": s, "end": e} for s, e in zip(starts, [*starts[1:], len(versions)])]


def _finish_reason(output: PartialOutput, message: Mapping[str, Any]) -> str | None:
    """OpenAI's finish_reason: "tool_calls" where the message has some."""
    return "tool_calls" if message.get("tool_calls") else output.finish_reason


ROUTES: dict[str, tuple[type[Any], type[Call]]] = {
    "/v1/chat/completions": (ChatBody, ChatCall),
    "/v1/completions": (CompletionBody, CompletionCall),
    "/inference/v1/generate": (GenerateBody, GenerateCall),
}
"""Path -> the class of its body, and the class of its calls."""
