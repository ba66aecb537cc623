"""Checks of requests and prompts, and SamplingPlan: the distribution that a request asks for.

`check_prompt_lengths` finds prompts that could never fit the model before the first rollout; otherwise the run would
end at the step that meets one. Left out on purpose: drawing (engine/sampler.py), what only one engine refuses, and
prompts of a stream, which are not known in advance: the engine refuses those one by one.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from whet.data.lengths import Spread
from whet.errors import ConfigError, DataError, EngineError, lookup_error
from whet.models.modes import max_positions
from whet.ops.support import Support
from whet.rollout.base import Request, Sampling, support_of
from whet.types import Prompt

__all__ = ["SamplingPlan", "check_ids", "check_prompt_lengths", "check_request", "make_plan"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingPlan:
    """A Sampling, prepared once: what to do with the logits of its rows."""

    sampling: Sampling
    support: Support
    """Drawn from."""
    reported: Support
    """Whose logprobs are reported."""


def make_plan(sampling: Sampling) -> SamplingPlan:
    """The plan of a Sampling.

    Args: sampling: of a request.
    Returns: its plan.
    Raises: ConfigError: an unknown logprob_support, or a field out of its range.

    >>> make_plan(Sampling(top_k=3, logprob_support="full")).reported.plain
    True
    """
    if sampling.logprob_support not in ("sampling", "full"):
        raise lookup_error("logprob_support", sampling.logprob_support, ["sampling", "full"])
    support = replace(support_of(sampling), full=False)
    full = sampling.logprob_support == "full" and bool(sampling.generation_kwargs or not support.plain)
    return SamplingPlan(sampling=sampling, support=support, reported=replace(support, full=True) if full else support)


def check_ids(requests: Iterable[Request], in_flight: Container[int]) -> None:
    """Refuses requests whose id is taken. Raises EngineError: the id is in flight, or two of them have it."""
    ids: set[int] = set()
    for r in requests:
        if r.id in in_flight or r.id in ids:
            raise EngineError(f"request id {r.id} is in flight already; ids are unique until their output has come")
        ids.add(r.id)


def check_request(
    request: Request,
    *,
    vocabulary: int,
    positions: int | None,
    decodes: bool,
    constrains: bool = False,
    closed: bool = False,
) -> None:
    """Refuses a request that could never be served.

    Args:
        request: to check.
        vocabulary: ids the model knows.
        positions: tokens its positions reach, None = no limit.
        decodes: whether the engine can turn tokens into text.
        constrains: whether it has the tokens' bytes, for constraints.
        closed: whether the engine was closed.
    Raises: EngineError: with the numbers; ConfigError: stop strings without a decode function, a constraint without
        grammars.
    """
    s, name = request.sampling, f"request {request.id}"
    if closed:
        raise EngineError(f"{name} was sent to a closed engine; make another")
    _check_arrays(request)
    length = len(request.tokens)
    if length == 0:
        raise EngineError(f"{name} has an empty prompt; give at least one token")
    if s.max_tokens < 1:
        raise EngineError(f"{name}: max_tokens {s.max_tokens} must be at least 1")
    if not 0 <= request.offset < length:
        raise EngineError(
            f"{name}: offset {request.offset} must be in 0..{length - 1}: its {length} tokens include them"
        )
    if request.draw < 0:
        raise EngineError(f"{name}: draw {request.draw} must be 0 or more: draws are counted from the address's first")
    if positions is not None and length + s.max_tokens > positions:
        raise EngineError(
            f"{name} can never fit: {length} prompt + {s.max_tokens} new tokens = {length + s.max_tokens}, the model "
            f"has {positions} positions; shorten the prompt or max_tokens"
        )
    _check_ids(request, vocabulary)
    if "" in s.stop:
        raise EngineError(f"{name}: an empty stop string would end every completion at once; leave it out")
    if s.stop and not decodes:
        raise ConfigError(
            f"{name} has stop strings {s.stop}, but the engine was built without a decode function; pass decode="
        )
    if s.constraint is not None and not constrains:
        raise ConfigError(
            f"{name} has the constraint {s.constraint}, but the engine was built without grammars=, which constraints "
            "need; pass grammars=Grammars(tokenizer, vocabulary=...) to an engine that takes it ('embedded', 'hf')"
        )


def _check_ids(request: Request, vocabulary: int) -> None:
    """Raises EngineError for an id outside the vocabulary, or where every id is forbidden."""
    s, name = request.sampling, f"request {request.id}"
    low, high = int(request.tokens.min()), int(request.tokens.max())
    if low < 0 or high >= vocabulary:
        raise EngineError(f"{name}: token {low if low < 0 else high} is outside the vocabulary of {vocabulary}")
    if wrong := [i for i in (*s.stop_ids, *s.forbidden_ids) if not 0 <= i < vocabulary]:
        raise EngineError(f"{name}: stop or forbidden id {wrong[0]} is outside the vocabulary of {vocabulary}")
    barred = s.forbidden_ids + (s.stop_ids if s.min_tokens > request.offset else ())
    if len(barred) >= vocabulary and len(set(barred)) == vocabulary:
        early = f", stop ids until token {s.min_tokens}" if len(set(s.forbidden_ids)) < vocabulary else ""
        raise EngineError(f"{name}: all {vocabulary} ids are forbidden{early}; leave one to draw")


def _check_arrays(request: Request) -> None:
    """Raises EngineError unless tokens are a row of integers, and the address four of them."""
    name, tokens = f"request {request.id}", request.tokens
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
        got = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else type(tokens).__name__
        raise EngineError(f"{name}: tokens must be an array of integer ids [P], got {got}; np.array(ids, np.int32)")
    address = tuple(request.address)
    if len(address) != 4 or not all(isinstance(a, int | np.integer) and not isinstance(a, bool) for a in address):
        raise EngineError(
            f"{name}: the address must be four integers, (seed, step, prompt, generation), got {request.address!r}"
        )


def _way_to_fit(length: int, positions: int, max_tokens: int) -> str:
    """What to set so that a prompt of `length` tokens and its completion fit."""
    cut = "with on_long_prompt drop or truncate_left"
    if max_tokens < positions:
        return f"set rollout.max_prompt_length to {positions - max_tokens} {cut}, or lower max_tokens_to_generate"
    alone = "max_tokens_to_generate alone leaves no room for a prompt; set it to"
    if length < positions:
        return f"{alone} {positions - length} or less, as this one needs"
    return f"{alone} {positions - 1} or less, and rollout.max_prompt_length to what is left {cut}"


def check_prompt_lengths(prompts: Iterable[Prompt], module: nn.Module, max_tokens: int) -> None:
    """Refuses a prompt that the model could never complete.

    Args: prompts: encoded. module: a model of transformers. max_tokens: new tokens that may be asked for, as
        max_tokens_to_generate says.
    Raises: DataError: prompts and completions have more tokens than the model has positions: how many, what 95 % have,
        the longest; or an id is outside its vocabulary, with the row.

    >>> import numpy as np
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, n_positions=16, vocab_size=32))
    >>> p = Prompt(tokens=np.arange(10), source="", row=3)
    >>> check_prompt_lengths([p], model, max_tokens=6)
    >>> check_prompt_lengths([p], model, max_tokens=7)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    whet.errors.DataError: 1 of 1 prompts can't fit, 95 % have 10 tokens or fewer; the longest, row 3: 10 prompt ...
    """
    prompts, positions = list(prompts), max_positions(module)
    spread = Spread(len(p.tokens) for p in prompts)
    if positions is not None and (over := spread.over(positions - max_tokens)):
        length, row = max(((len(p.tokens), p.row) for p in prompts), key=lambda pair: pair[0])
        raise DataError(
            f"{over} of {len(prompts)} prompts can't fit, 95 % have {spread.most} tokens or fewer; the longest, row "
            f"{row}: {length} prompt tokens + rollout.max_tokens_to_generate {max_tokens} = {length + max_tokens}, but "
            f"the model has {positions} positions (max_position_embeddings); "
            f"{_way_to_fit(length, positions, max_tokens)}"
        )
    vocabulary = int(module.get_input_embeddings().weight.shape[0])  # pyright: ignore
    for p in prompts:
        highest = int(p.tokens.max())
        if highest >= vocabulary:
            raise DataError(
                f"row {p.row}: token {highest} is outside the model's vocabulary of {vocabulary}; the tokenizer is "
                "another model's: set tokenizer to this one's"
            )
