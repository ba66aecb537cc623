"""A rollout class of the user's with Tunix's BaseRollout methods, as an engine.

Such a class takes text and returns text, tokens and perhaps logprobs, for a whole batch at once. The adapter decodes
the prompt ids with their special tokens, cuts what comes back at the stop token, and stamps it with the policy version.
Each call has its own seed in rollout_config.seed, made from the rng_key of its first prompt, so steps differ and a run
can be repeated. The interface has no arguments for keys of draws and for aborting; the adapter refuses sampling
fields that the interface does not have.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from whet.data.tokenizer import pad_token_id
from whet.errors import EngineError
from whet.models.modes import eval_mode, transformers_attention
from whet.ops.counter_rng import hash_rng_key
from whet.rollout.base import EngineCaps, Output, Request, Sampling
from whet.rollout.queue_engine import QueueEngine
from whet.rollout.stopping import find_end

__all__ = ["BaseRollout", "BaseRolloutAdapter", "TokenizerAdapter", "is_rollout_class", "prompt_text"]


BEYOND = {
    "constraint": None,
    "forbidden_ids": "forbidden_tokens",
    "generation_kwargs": None,
    "logprobs_mode": "logprobs_mode",
    "min_p": "min_p",
    "min_tokens": "min_tokens",
    "repetition_penalty": "repetition_penalty",
    "return_logits": None,
    "stop": "stop",
}
"""Fields of Sampling that Tunix's RolloutConfig has no name for -> whet's name in a rollout configuration, if any."""


class BaseRollout(Protocol):
    """The methods of a rollout class that whet calls.

    The class may have Tunix's other methods (get_per_token_logps, pad_id, eos_id, model); whet does not call them.
    """

    def generate(self, prompts: list[str], rollout_config: Any) -> Any:
        """Returns one completion for each prompt: an object with `tokens` and, on request, `logprobs`, as RolloutOutput
        has.
        """
        ...

    def update_params(self, params: Any) -> None:
        """Takes new weights: an iterator of (name, tensor)."""
        ...


class BaseRolloutAdapter(QueueEngine):
    """An engine that calls a BaseRollout.

    Args:
        rollout: an object, or a class or functools.partial, called without arguments.
        decode: prompt ids -> text, special tokens kept (`prompt_text`).
        module: the policy, which generate may call. During the call it runs as it was loaded: without whet's
            attention, gradients and dropout.
        rollout_config: a dataclass with Tunix's field names, which generate receives with the Sampling's values; None
            = a plain object with these names. With return_logprobs=False all logprobs are 0 and caps.logprobs is
            False.

    Example: `BaseRolloutAdapter(MyRollout, decode=tokenizer.decode)`.
    """

    def __init__(
        self,
        rollout: BaseRollout | Callable[[], BaseRollout],
        *,
        decode: Callable[[Sequence[int]], str],
        module: nn.Module | None = None,
        rollout_config: Any = None,
    ) -> None:
        super().__init__("BaseRollout")
        build = isinstance(rollout, type | functools.partial)
        self.rollout: BaseRollout = rollout() if build else rollout  # pyright: ignore
        """The object that generates."""
        self._decode, self._config, self._module = decode, rollout_config, module
        logprobs = rollout_config is not None and bool(rollout_config.return_logprobs)
        self.caps = EngineCaps(logprobs=logprobs, stop_strings=False)

    @classmethod
    def of_class(
        cls, rollout: Any, module: nn.Module, *, tokenizer: Any, mesh: Any, rollout_config: Any
    ) -> BaseRolloutAdapter:
        """Builds the engine of a rollout class, or of a partial of one; it is called with Tunix's arguments.

        Args: module: the policy. tokenizer: its tokenizer. mesh: of Role.ROLLOUT, or None.
        """
        instance = rollout(
            rollout_actor=module, tokenizer=TokenizerAdapter(tokenizer), mesh=mesh, rollout_config=rollout_config
        )
        decode = functools.partial(prompt_text, tokenizer)
        return cls(instance, decode=decode, module=module, rollout_config=rollout_config)

    def check(self, request: Request) -> None:
        """Raises EngineError for an offset, or a sampling field without a Tunix name."""
        if request.offset:
            raise EngineError(
                f"request {request.id}: a Tunix-style rollout class can't resume a partial completion "
                f"(offset={request.offset}); submit the prompt with offset 0"
            )
        known = set() if self._config is None else {f.name for f in dataclasses.fields(self._config)}
        for name in (n for n, theirs in BEYOND.items() if theirs not in known):
            value = vars(request.sampling)[name]
            if value != vars(Sampling())[name]:
                raise EngineError(
                    f"request {request.id}: {name}={value!r} is not supported by a Tunix-style rollout class; leave it "
                    "out"
                )

    def step(self, timeout_s: float | None = None) -> list[Output]:
        """Generates for all requests that share the first one's Sampling; [] = no request is in flight.

        Raises: EngineError: generate returned too few or too many completions, an empty one, or no logprobs.
        """
        self.check_awake()
        if not self.queue:
            return []
        sampling = self.queue[0].sampling
        batch = [r for r in self.queue if r.sampling == sampling]
        self.queue = deque(r for r in self.queue if r.sampling != sampling)
        texts = [self._decode(r.tokens.tolist()) for r in batch]
        config = tunix_config(sampling, self._config, seed=hash_rng_key(*batch[0].rng_key) % 2**31)
        with ExitStack() as stack:
            if self._module is not None:
                for context in (torch.no_grad(), transformers_attention(self._module), eval_mode(self._module)):
                    stack.enter_context(context)
            out = self.rollout.generate(texts, rollout_config=config)
        if len(out.tokens) != len(batch):
            raise EngineError(f"generate returned {len(out.tokens)} completions for {len(batch)} prompts")
        if self.caps.logprobs and out.logprobs is None:
            raise EngineError("generate returned logprobs None; return them, or set return_logprobs=False")
        return self.finish(batch, [self._output(r, i, out) for i, r in enumerate(batch)])

    def _output(self, request: Request, i: int, out: Any) -> Output:
        """Returns one completion, cut at its first stop token or at max_tokens."""
        tokens = np.asarray(out.tokens[i]).astype(np.int32)
        end, finish_reason = find_end(request.sampling, tokens, new=len(tokens)) or (len(tokens), "length")
        tokens = tokens[:end]
        if len(tokens) == 0:
            raise EngineError(f"generate returned no tokens for request {request.id}; the stop token belongs to them")
        logprobs = np.zeros(len(tokens), np.float32)
        if self.caps.logprobs and out.logprobs is not None:
            logprobs = np.asarray(out.logprobs[i]).astype(np.float32)[: len(tokens)]
            if len(logprobs) != len(tokens):
                raise EngineError(f"request {request.id}: {len(logprobs)} logprobs for {len(tokens)} tokens")
        return Output(
            id=request.id,
            tokens=tokens,
            logprobs=logprobs,
            versions=np.full(len(tokens), self.version, np.int32),
            finish_reason=finish_reason,
        )

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Passes the weights to update_params."""
        self.rollout.update_params(weights)


def is_rollout_class(engine: Any) -> bool:
    """Returns whether an engine is a class, or a partial of one, with Tunix's rollout methods: it has no `submit`."""
    kind = engine.func if isinstance(engine, functools.partial) else engine
    return inspect.isclass(kind) and not callable(inspect.getattr_static(kind, "submit", None))


class TokenizerAdapter:
    """A tokenizer of transformers with the methods bos_id(), eos_id() and pad_id().

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> adapter = TokenizerAdapter(byte_tokenizer())
    >>> adapter.encode("hi"), adapter.eos_id(), adapter("hi").input_ids
    ([104, 105], 256, [104, 105])
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def bos_id(self) -> int | None:
        """Returns the id that begins a text; None = the tokenizer has none."""
        return self.tokenizer.bos_token_id

    def eos_id(self) -> int | None:
        """Returns the id that ends a text; None = the tokenizer has none."""
        return self.tokenizer.eos_token_id

    def pad_id(self) -> int:
        """Returns the padding id, or the end id."""
        eos = self.eos_id()
        return pad_token_id(self.tokenizer, () if eos is None else (eos,))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the tokenizer's own call."""
        return self.tokenizer(*args, **kwargs)

    def __len__(self) -> int:
        """Returns the number of ids."""
        return len(self.tokenizer)

    def __getattr__(self, name: str) -> Any:
        """Any other attribute is the tokenizer's."""
        return getattr(self.tokenizer, name)


def prompt_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Returns the text of a prompt's ids, with their special tokens.

    The tokens that the tokenizer itself puts before every text (bos) are left out, since they would come twice.
    Args: tokenizer: of transformers. ids: of the prompt.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> prompt_text(byte_tokenizer(), [258, 104, 105])
    '<|im_start|>hi'
    """
    special = [int(i) for i in tokenizer("").input_ids]
    differing = (n for n, (a, b) in enumerate(zip(special, ids)) if a != b)
    first = next(differing, min(len(special), len(ids)))
    return str(tokenizer.decode(list(ids[first:]), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def tunix_config(sampling: Sampling, config: Any = None, seed: int | None = None) -> Any:
    """Returns a Sampling under Tunix's field names.

    Args: sampling: of a request. config: a dataclass to copy; None = a plain object. seed: of the call.
    Returns: the copy, or the object, with the Sampling's values.

    >>> tunix_config(Sampling(max_tokens=5, top_k=0)).top_k is None
    True
    """
    values: dict[str, Any] = {
        "max_tokens_to_generate": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or None,
        "eos_tokens": tuple(sampling.stop_ids) or None,
        "seed": seed,
    }
    if config is not None:
        known = {f.name for f in dataclasses.fields(config)}
        beyond = {theirs: vars(sampling)[n] for n, theirs in BEYOND.items() if theirs in known}
        return dataclasses.replace(config, **values, **beyond)
    return SimpleNamespace(**values, return_logprobs=False)
