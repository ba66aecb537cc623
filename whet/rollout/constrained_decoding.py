"""Constrained decoding: the tokens that keep a completion inside a regular expression, a JSON schema or a grammar.

llguidance computes which bytes may follow. This module decides where a completion may end: stop ids are allowed exactly
where the language may end. The sampler and the trainer get the same masks, so both mean the same distribution.
Dim legend: n rows, s tokens, V vocabulary, W = 4 ceil(V / 32) bytes of a mask, one bit per token, lowest bit first.
Left out on purpose: inserting forced tokens without a draw (every token has a draw and a logprob), and languages over
special tokens.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from whet.errors import ConfigError, DataError, EngineError
from whet.packing.micro_batch import MicroBatch
from whet.rollout.base import Constraint, Request, Sampling
from whet.types import FinishReason
from whet.util.install import install_hint

__all__ = ["Grammars", "Masks", "Matcher"]

log = logging.getLogger("whet")

UNFORCED = '%llguidance {"no_forcing": true}'
"""A forced text may be written in any tokens; llguidance would allow only the tokenizer's own encoding."""
MAX_COMPILED = 64
"""The most compiled languages that are kept."""
MASK_CACHE_BYTES = 256 * 2**20
"""Memory of the distinct masks that are kept between the passes over a batch."""


class Matcher:
    """The state of a completion in its language. `Grammars.matcher` makes it."""

    def __init__(self, inner: Any, rules: _Rules) -> None:
        self._inner, self._rules = inner, rules
        self._num_tokens = 0
        self.allowed = rules.all
        """uint8 [W]: the tokens allowed next; `Grammars.refresh` sets it."""
        self.finish_reason: FinishReason | None = None
        """Set where no token may follow: "stop" = the language ends here; "error" = every continuation is forbidden."""

    def copy(self) -> Matcher:
        """Returns a copy in the same state."""
        other = Matcher(self._inner.deep_copy(), self._rules)
        other._num_tokens, other.allowed, other.finish_reason = self._num_tokens, self.allowed, self.finish_reason
        return other

    def advance(self, token: int) -> bool:
        """Consumes a token. Returns: whether the text may continue after it; a stop id ends it."""
        self._num_tokens += 1
        return self.finish_reason is None and token not in self._rules.stops and bool(self._inner.consume_token(token))

    def set_allowed(self, mask: np.ndarray) -> None:
        """Sets `allowed` and `finish_reason`. Args: mask: uint8 [W], from llguidance; stop ids are set in it here."""
        rules, accepts = self._rules, self._inner.is_accepting()
        mask &= rules.text
        if accepts and self._num_tokens >= rules.min_tokens:
            mask |= rules.stop
        self.allowed = mask
        if mask.any():
            self.finish_reason = None
        elif accepts:
            self.finish_reason = "stop"
        else:
            self.finish_reason = "error"
            reason = (self._inner.get_error() or "every continuation is forbidden").splitlines()[0]
            log.warning(
                "constraint %s: no allowed next token after %d tokens (finish_reason 'error'): %s",
                rules.constraint,
                self._num_tokens,
                reason,
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rules:
    """The fields of a Sampling that affect masks, besides the language; masks are [W] bytes."""

    constraint: Constraint
    all: np.ndarray
    """Every token."""
    text: np.ndarray
    """Tokens of the text: neither stop ids nor forbidden."""
    stop: np.ndarray
    """Stop ids that are not forbidden."""
    stops: frozenset[int]
    min_tokens: int


class Grammars:
    """Languages compiled for a tokenizer, and the masks of completions in them.

    Args:
        tokenizer: a fast tokenizer of transformers; not used before the first constraint.
        vocabulary: V, the number of the model's ids.
    Raises: ConfigError, in all methods: llguidance is missing, the tokenizer has no bytes for its tokens, a constraint
        is malformed, or no token may begin it.

    >>> from whet.data.tokenizer import byte_tokenizer
    >>> grammars = Grammars(byte_tokenizer(), vocabulary=259)
    >>> m = grammars.matcher(Sampling(constraint=Constraint(kind="regex", text="ab?"), stop_ids=(256,)))
    >>> m.advance(ord("a")), grammars.refresh([m]), np.flatnonzero(np.unpackbits(m.allowed, bitorder="little"))
    (True, None, array([ 98, 256]))
    """

    def __init__(self, tokenizer: Any, *, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._compile = functools.lru_cache(maxsize=MAX_COMPILED)(self._compile_language)

    def check(self, sampling: Sampling) -> None:
        """Compiles a Sampling's constraint, if it has one. Raises ConfigError: see the class."""
        if sampling.constraint is not None:
            self._root(sampling)

    def _root(self, sampling: Sampling) -> Matcher:
        """Returns the start of a Sampling's language, compiled once for all Samplings with the same masks."""
        assert sampling.constraint is not None
        return self._compile(sampling.constraint, sampling.stop_ids, sampling.forbidden_ids, sampling.min_tokens)

    def matcher(self, sampling: Sampling, tokens: Sequence[int] = ()) -> Matcher:
        """Returns the matcher of a completion.

        Args: sampling: with a constraint. tokens: of the completion so far.
        Returns: the matcher, with `allowed` and `finish_reason` set.
        Raises: DataError: the tokens leave the language.
        """
        matcher = self._root(sampling).copy()
        for place, token in enumerate(tokens):
            if not matcher.advance(int(token)):
                raise self._outside_error(sampling, place, int(token))
        if len(tokens):
            self.refresh([matcher])
        return matcher

    def start(self, request: Request) -> Matcher | None:
        """Returns the matcher of a request, after the tokens of its offset; None without a constraint.

        Raises: EngineError: these tokens leave the language, or no token may follow them.
        """
        if request.sampling.constraint is None:
            return None
        before = request.tokens[len(request.tokens) - request.offset :].tolist()
        try:
            matcher = self.matcher(request.sampling, before)
        except DataError as error:
            raise EngineError(f"request {request.id}: {error}") from None
        if matcher.finish_reason is not None:
            raise EngineError(
                f"request {request.id}: nothing may follow its {request.offset} completion tokens under "
                f"{request.sampling.constraint}; it is complete, don't submit it again"
            )
        return matcher

    def advance(
        self, matchers: Mapping[int, Matcher], tokens: np.ndarray, *, first: int = 0
    ) -> dict[int, FinishReason]:
        """Advances constrained rows by one token.

        Args: matchers: by row. tokens: int [n], drawn by the n rows from `first` on.
        Returns: the rows after which no token may follow, with their finish_reason.
        """
        for row, matcher in matchers.items():
            matcher.advance(int(tokens[row - first]))
        if matchers:
            self.refresh(list(matchers.values()))
        return {row: m.finish_reason for row, m in matchers.items() if m.finish_reason is not None}

    def refresh(self, matchers: Sequence[Matcher]) -> None:
        """Sets the tokens that are allowed next, for each of some matchers."""
        table = np.zeros((len(matchers), self._width), np.uint8)
        self._fill(matchers, range(len(matchers)), table)

    def rows(self, matchers: Sequence[Matcher | None]) -> torch.Tensor:
        """uint8 [n, W]: the tokens allowed next, a row per matcher; None and ended matchers allow all tokens."""
        free = np.full(self._width, 255, np.uint8)
        return torch.from_numpy(np.stack([free if m is None or m.finish_reason else m.allowed for m in matchers]))

    def replay(self, sampling: Sampling, tokens: np.ndarray, sequence: np.ndarray, sampled: np.ndarray) -> torch.Tensor:
        """Returns the masks that tokens were drawn under.

        Each run of sampled tokens of a sequence is a separate text, as the turns of a conversation are.

        Args:
            sampling: with a constraint.
            tokens: int [s], completions laid end to end.
            sequence: int [s], the completion of each.
            sampled: Bool [s]; the other tokens are not constrained.
        Returns: uint8 [s, W].
        Raises: DataError: a sampled token that the constraint does not allow.
        """
        table = np.full((len(tokens), self._width), 255, np.uint8)
        first, last, cut = sampled.copy(), sampled.copy(), sequence[1:] != sequence[:-1]
        first[1:] &= cut | ~sampled[:-1]
        last[:-1] &= cut | ~sampled[1:]
        starts, ends = np.flatnonzero(first), np.flatnonzero(last) + 1
        matchers = [self._root(sampling).copy() for _ in starts]
        for step in range(int((ends - starts).max(initial=0))):
            live = np.flatnonzero(ends - starts > step)
            places = starts[live] + step
            self._fill([matchers[i] for i in live], places, table)
            for i, place in zip(live, places, strict=True):
                token = int(tokens[place])
                if not (_is_set(table[place], token) and (matchers[i].advance(token) or last[place])):
                    raise self._outside_error(sampling, step, token)
        return torch.from_numpy(table)

    def _fill(self, matchers: Sequence[Matcher], places: Sequence[int] | np.ndarray, table: np.ndarray) -> None:
        """Writes the masks of matchers into rows of a table [., W], in parallel where torch may use more threads."""
        jobs = [(m._inner, int(p)) for m, p in zip(matchers, places, strict=True)]
        if jobs:
            self._pool.unsafe_compute_mask_ptr(jobs, table.ctypes.data, self._width, len(table))
        for matcher, place in zip(matchers, places, strict=True):
            matcher.set_allowed(table[place])

    @property
    def _width(self) -> int:
        """W, of the larger of the model's and the tokenizer's vocabulary."""
        return 4 * -(-self._words.vocab_size // 32)

    @functools.cached_property
    def _pool(self) -> Any:
        return _library().LLExecutor(num_threads=torch.get_num_threads())

    @functools.cached_property
    def _words(self) -> Any:
        """The tokenizer as llguidance sees it: the bytes of each token."""
        _library()
        from llguidance.hf import from_tokenizer

        t = self._tokenizer
        if t is None:
            raise ConfigError("a constraint needs the tokenizer, and there is none; give tokenizer=")
        special = [i for i in (t.eos_token_id, t.pad_token_id, *t.all_special_ids) if i is not None]
        if not special:
            raise ConfigError(
                f"{type(t).__name__} has no special token, and llguidance needs one that is not text; give it an end "
                "token: tokenizer.add_special_tokens({'eos_token': '<eos>'})"
            )
        try:
            size = max(self._vocabulary, 1 + max(t.get_vocab().values()))
            return from_tokenizer(t, n_vocab=size, eos_token=special[0])
        except ValueError as error:
            raise ConfigError(
                f"the bytes of {type(t).__name__}'s tokens are not known ({error}); a constraint needs a fast "
                "tokenizer with a byte-level or byte-fallback decoder"
            ) from error

    def _compile_language(
        self, constraint: Constraint, stop_ids: tuple[int, ...], forbidden_ids: tuple[int, ...], min_tokens: int
    ) -> Matcher:
        words = self._words
        inner = _library().LLMatcher(words, _source(constraint), log_level=0)
        if inner.is_error():
            raise ConfigError(
                f"constraint {constraint} is refused: {_reason(inner.get_error())}; fix it, or use what llguidance "
                "supports: whet docs constraints"
            )
        all_ids, stop, forbidden = (
            _pack_bits(ids, words.vocab_size) for ids in (range(self._vocabulary), stop_ids, forbidden_ids)
        )
        rules = _Rules(
            constraint=constraint,
            all=all_ids,
            text=all_ids & ~stop & ~forbidden & ~_pack_bits([words.eos_token], words.vocab_size),
            stop=stop & ~forbidden,
            stops=frozenset(stop_ids),
            min_tokens=min_tokens,
        )
        root = Matcher(inner, rules)
        table = np.zeros((1, self._width), np.uint8)
        inner.unsafe_compute_mask_ptr(table.ctypes.data, self._width)
        root.set_allowed(table[0])
        if root.finish_reason is not None:
            raise ConfigError(
                f"constraint {constraint}: no allowed first token: the forbidden ids rule out every way to start it, "
                "and it can't be empty; change the constraint, the forbidden ids or min_tokens"
            )
        return root

    def _outside_error(self, sampling: Sampling, place: int, token: int) -> DataError:
        return DataError(
            f"completion token {place} is {token} ({self._tokenizer.decode([token])!r}), which {sampling.constraint} "
            "does not allow there; only what was drawn under a constraint can be scored or continued under it: use "
            "rollout.logprobs_mode='full', or leave the constraint out"
        )


class Masks:
    """The masks under which completions were drawn, computed once for all passes over a batch.

    A language has few different masks, so equal ones are stored once: memory is that of the different masks, and 4
    bytes for each token.
    Args: grammars: of the tokenizer. max_bytes: of the different masks; others are computed again in each pass.
    """

    def __init__(self, grammars: Grammars, *, max_bytes: int = MASK_CACHE_BYTES) -> None:
        self._grammars, self._max_bytes = grammars, max_bytes
        self.drop()

    def drop(self) -> None:
        """Drops all masks, before other completions."""
        self._rows: list[np.ndarray] = []
        self._places: dict[bytes, int] = {}
        self._stored: dict[Hashable, np.ndarray] = {}

    @property
    def bytes(self) -> int:
        """Memory of the distinct masks."""
        return sum(row.nbytes for row in self._rows)

    def of_targets(self, sampling: Sampling, micro: MicroBatch) -> torch.Tensor:
        """Returns the masks of a micro-batch's targets. Args: sampling: they were drawn under. Returns: uint8
        [s, W].
        """
        micro = micro.on_host
        sampled = micro.batch.versions[micro.token_index] >= 0
        return self.replay(sampling, micro.targets.numpy(), micro.sequence.numpy(), sampled.numpy())

    def replay(self, sampling: Sampling, tokens: np.ndarray, sequence: np.ndarray, sampled: np.ndarray) -> torch.Tensor:
        """Returns the masks of `Grammars.replay`, with the same arguments and errors; sequences are complete."""
        cuts = [0, *(np.flatnonzero(sequence[1:] != sequence[:-1]) + 1).tolist(), len(tokens)]
        spans: dict[Hashable, list[slice]] = {}
        for a, b in itertools.pairwise(cuts):
            spans.setdefault((sampling, tokens[a:b].tobytes(), sampled[a:b].tobytes()), []).append(slice(a, b))
        new = {key: places[0] for key, places in spans.items() if key not in self._stored}
        at = np.concatenate([np.arange(s.start, s.stop) for s in new.values()] or [np.zeros(0, int)])
        masks = self._grammars.replay(sampling, tokens[at], sequence[at], sampled[at]).numpy()
        fresh = dict(zip(new, np.split(masks, np.cumsum([s.stop - s.start for s in new.values()])), strict=False))
        for key, rows in fresh.items():
            self._keep(key, rows)
        if len(masks) == len(tokens):  # all are new, and in order
            return torch.from_numpy(masks)
        table = np.empty((len(tokens), masks.shape[1]), np.uint8)
        for key, places in spans.items():
            rows = fresh[key] if key in fresh else [self._rows[i] for i in self._stored[key]]
            for place in places:
                table[place] = rows
        return torch.from_numpy(table)

    def _keep(self, key: Hashable, masks: np.ndarray) -> None:
        """Stores the masks [c, W] of a completion, if they fit."""
        index, last = np.empty(len(masks), np.int32), b""
        for i, mask in enumerate(masks):
            content = mask.tobytes()
            if content == last:  # most equal the previous one; comparing is cheaper than a hash of 20 kB
                index[i] = index[i - 1]
                continue
            if content not in self._places:
                if (len(self._rows) + 1) * len(content) > self._max_bytes:
                    return
                self._places[content] = len(self._rows)
                self._rows.append(np.frombuffer(content, np.uint8))
            index[i], last = self._places[content], content
        self._stored[key] = index


def _is_set(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


def _pack_bits(ids: Sequence[int], size: int) -> np.ndarray:
    """uint8 [W]: the ids' bits."""
    flags = np.zeros(32 * -(-size // 32), np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little")


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(f"a constraint needs llguidance; {install_hint('grammar')}") from error
    return llguidance


def _source(constraint: Constraint) -> str:
    """Returns the constraint as llguidance reads it: a Lark grammar."""
    library, text = _library(), constraint.text
    if constraint.kind == "regex":
        text = f"start: /{library.regex_to_lark(text, '')}/"
    elif constraint.kind == "json_schema":
        try:
            text = f"start: %json {json.dumps(json.loads(text))}"
        except ValueError as error:
            raise ConfigError(f"constraint {constraint} is not JSON: {error}; give the schema as JSON text") from error
    return library.LLMatcher.grammar_from_lark(f"{text}\n{UNFORCED}")


def _reason(message: str) -> str:
    """Returns an error of llguidance in one line, without the drawing of its position."""
    return " ".join(line.strip() for line in message.splitlines() if line.strip(" ^") and "|" not in line)
