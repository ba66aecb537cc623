"""Runner: prefill and decode steps of the model, with the state of the live rows on the device.

Live rows are 0..n-1. A step does nothing per row in Python: token, position and draw number are tensors, and the host
reads the drawn tokens every few steps.
Dim legend: n live rows, V vocabulary, d hidden size.
Left out on purpose: speculation, and products of half-precision weights accumulated in less than fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from whet.models.attention import Layout
from whet.models.loaded_model import LoadedModel
from whet.ops.counter_rng import hash_rng_key, uniform
from whet.rollout.engine.kv_cache import KVStore
from whet.rollout.engine.layouts import DecodeLayout
from whet.rollout.engine.model_forward import FusedForward, ModuleForward
from whet.rollout.engine.native_step import NativeLayout
from whet.rollout.engine.prefill import PrefillLayout, PrefillSpan, sequence_ends
from whet.rollout.engine.prefix_cache import CachedSequence
from whet.rollout.engine.sampling import sample_rows, seen_tokens
from whet.rollout.engine.scheduler import Prefix
from whet.rollout.in_flight import InFlightRequest
from whet.rollout.requests import SamplingPlan
from whet.util.transfer import to_device, to_host

__all__ = ["Runner", "StepOutput"]

INITIAL_ROWS = 256
"""Rows allocated at first; more are allocated when they are needed, up to max_batch."""
TOKEN, POSITION, NUM_STORED, NUM_DRAWN, DRAW, KEY = range(6)
"""Rows of the state: last token, its position, tokens in the completion store before it, completion tokens up to it,
its draw number, hashed rng_key."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepOutput:
    """The tokens of some steps, on the host."""

    tokens: np.ndarray
    """int32 [steps, n]."""
    logprobs: np.ndarray
    """float32 [steps, n]."""
    logits: np.ndarray | None
    """float32 [steps, n, V], where a row asked for them."""


class Runner:
    """The device's half of the engine: it runs what the engine has scheduled."""

    def __init__(
        self,
        loaded: LoadedModel,
        forward: FusedForward | ModuleForward,
        *,
        max_batch: int,
        prefill_tokens: int,
    ) -> None:
        module = loaded.module
        self.loaded, self.forward = loaded, forward
        self.device = next(module.parameters()).device
        self.vocabulary = int(module.get_output_embeddings().weight.shape[0])  # pyright: ignore
        self.max_batch, self.prefill_tokens = max_batch, prefill_tokens
        self.completion_store = KVStore()
        self.prompt_stores: dict[int, KVStore] = {}
        kernels = self.forward.kernels
        self.layout = (
            DecodeLayout(self.completion_store, self.device)
            if kernels is None
            else NativeLayout(kernels, self.completion_store)
        )
        half = any(p.dtype.itemsize == 2 for p in module.parameters())
        self.drops_empty_store = half and self.device.type == "cpu" and kernels is None
        """Whether an empty batch starts with a new completion store: see reserve_rows."""
        rows = min(max_batch, INITIAL_ROWS)
        self.state = torch.zeros(6, rows, dtype=torch.long, device=self.device)
        self.seen: Tensor | None = None
        self.groups: list[tuple[SamplingPlan, Tensor | None]] = []
        self.share_draws: Callable[[Tensor], None] = lambda tokens: None
        """Gives drawn tokens, in place, the values of the process that decides, where several run the same rows."""
        self.why_eager = ""
        """Why steps are not captured, on a GPU."""

    @property
    def steps(self) -> str:
        """How decode steps run, for `backends`."""
        return f"eager ({self.why_eager})" if self.why_eager else "eager"

    def reserve_rows(self, live: int, count: int) -> None:
        """Allocates memory for new rows. Args: live: rows in the batch. count: new rows.

        The last bits of oneDNN's half-precision products depend on the length of the store, also where it is not read.
        An empty batch therefore starts with a new store. Otherwise earlier requests (an evaluation, which a resumed run
        does not repeat) could change later draws.
        """
        if not live:
            self.seen = None
            if self.drops_empty_store:
                self.completion_store.drop()
        self.completion_store.reserve(live + count, self.completion_store.length)
        rows = self.state.shape[1]
        if live + count > rows:
            more = min(1 << (live + count - 1).bit_length(), self.max_batch) - rows
            self.state = F.pad(self.state, (0, more))
            self.seen = None if self.seen is None else F.pad(self.seen, (0, 0, 0, more))

    def prefill(
        self, prefixes: Sequence[Prefix], slots_in_use: dict[int, int], between: Callable[[], None] = lambda: None
    ) -> None:
        """Runs new prompts, packed, each once. Their KV goes to the stores, their last hidden state to the prefix.

        Args:
            prefixes: the new prompts.
            slots_in_use: rows in use of each bucket; the new prompts get the next ones.
            between: called between two chunks; it may move prompts within their stores, and sets Prefix.slot then.
        """
        order = sorted(prefixes, key=lambda p: len(p.tokens))
        dependent = [p for p in order if isinstance(p.source, Prefix) and p.source.last_hidden is None]
        independent = [p for p in order if p not in dependent]
        self._reserve_prompts([*independent, *dependent], slots_in_use)
        is_first = True
        for group in (independent, dependent):  # the dependent ones copy KV of the others
            self._copy_computed(group)
            for chunk in self._chunks(group):
                if not is_first:
                    between()
                self._prefill_chunk(chunk)
                is_first = False

    def _reserve_prompts(self, prefixes: Sequence[Prefix], slots_in_use: dict[int, int]) -> None:
        """Allocates memory for new prompts, and gives each its slot: those of one length get neighbouring ones."""
        for p in prefixes:
            p.slot = slots_in_use.get(p.bucket, 0)
            slots_in_use[p.bucket] = p.slot + 1
        for bucket, rows in slots_in_use.items():
            self.prompt_stores.setdefault(bucket, KVStore()).reserve(rows, bucket, longest=bucket)

    def _copy_computed(self, prefixes: Sequence[Prefix]) -> None:
        """Copies the KV that prompts share with their sources."""
        for p in prefixes:
            if (source := p.source) is not None:
                if isinstance(source, CachedSequence):
                    self._write_prompt(p, source.layers)
                else:
                    self._write_prompt(p, self._read_prompt(source, p.num_computed_tokens))
                p.source = None

    def _read_prompt(self, prefix: Prefix, count: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Returns the keys and values [K T D] of a prompt's first tokens, by layer."""
        return self.prompt_stores[prefix.bucket].read(prefix.slot, count)

    def _write_prompt(self, prefix: Prefix, layers: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Writes the keys and values of a prompt's computed tokens."""
        self.prompt_stores[prefix.bucket].write(prefix.slot, prefix.num_computed_tokens, layers)

    def _chunks(self, prefixes: Sequence[Prefix]) -> Iterator[list[tuple[Prefix, int, int]]]:
        """Chunks of at most prefill_tokens tokens, in order: (prompt, first token, end) of each part."""
        chunk, room = [], self.prefill_tokens
        for p in prefixes:
            if chunk and len(p.tokens) - p.num_computed_tokens > room:
                yield chunk
                chunk, room = [], self.prefill_tokens
            first = p.num_computed_tokens
            for start in range(first, len(p.tokens), self.prefill_tokens):
                end = min(len(p.tokens), start + self.prefill_tokens)
                if start > first:
                    yield chunk
                    chunk, room = [], self.prefill_tokens
                chunk.append((p, start, end))
                room -= end - start
        if chunk:
            yield chunk

    def _prefill_chunk(self, chunk: list[tuple[Prefix, int, int]]) -> None:
        """Runs one forward over packed prompts, or over one piece of a long prompt."""
        ids = np.concatenate([p.tokens[start:end] for p, start, end in chunk]).astype(np.int64)
        self.forward.ensure_positions(max(end for _, _, end in chunk))
        ends = torch.tensor([end - start for _, start, end in chunk]).cumsum(0) - 1
        layout, tokens, ends = self._prefill_layout(chunk, torch.from_numpy(ids), ends)
        hidden = self.forward.features(tokens.unsqueeze(0), layout)
        last_hidden = hidden.index_select(0, ends)
        for (p, _, end), h in zip(chunk, last_hidden, strict=True):
            p.last_hidden, p.num_computed_tokens = h, end

    def _prefill_layout(
        self, chunk: list[tuple[Prefix, int, int]], tokens: Tensor, ends: Tensor
    ) -> tuple[Layout, Tensor, Tensor]:
        """Returns the layout of a chunk, and its tokens and the place of each prompt's last one, on the device."""
        spans: list[PrefillSpan] = []
        for p, start, end in chunk:
            store, last = self.prompt_stores[p.bucket], spans[-1] if spans else None
            is_neighbour = last is not None and last.store is store and last.slot + last.count == p.slot
            if last and is_neighbour and last.start == start == 0 and last.length == end:
                spans[-1] = PrefillSpan(count=last.count + 1, start=0, length=end, store=store, slot=last.slot)
            else:
                spans.append(PrefillSpan(count=1, start=start, length=end - start, store=store, slot=p.slot))
        host = [tokens, torch.cat([span.positions for span in spans]), ends, *sequence_ends(spans)]
        tokens, positions, ends, *sequences = to_device(host, self.device)
        return PrefillLayout(spans, positions.unsqueeze(0), (sequences[0], sequences[1])), tokens, ends

    def _read_drawn(self, row: int, flight: InFlightRequest, count: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Returns the keys and values [K T D] of a row's first drawn tokens, by layer. Args: flight: its request."""
        del flight
        return self.completion_store.read(row, count)

    def copy_kv(
        self, row: int, flight: InFlightRequest, prefix: Prefix, drawn: int
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Returns a copy of a row's KV: by layer, keys and values [K T D] of its prompt, then of its drawn tokens.

        Args: row: a live row. flight, prefix: its request and prompt. drawn: how many drawn tokens to copy.
        """
        prompt = self._read_prompt(prefix, len(prefix.tokens))
        if not drawn:
            return {i: (k.clone(), v.clone()) for i, (k, v) in prompt.items()}
        completion = self._read_drawn(row, flight, drawn)
        return {
            i: (torch.cat([k, completion[i][0]], 1), torch.cat([v, completion[i][1]], 1))
            for i, (k, v) in prompt.items()
        }

    def add_rows(
        self,
        first: int,
        admitted: Sequence[tuple[InFlightRequest, Prefix]],
        plans: Sequence[SamplingPlan],
        allowed: Tensor | None = None,
    ) -> StepOutput:
        """Adds requests as rows first.., and draws their first tokens.

        Args:
            first: the number of live rows before.
            admitted: requests with prefilled prefixes.
            plans: all sampling plans; InFlightRequest.plan is an index of them.
            allowed: uint8 [new rows, W], the tokens that constraints allow; None = no constraints.

        Returns: one step over the new rows.
        """
        rows = slice(first, first + len(admitted))
        state = np.zeros((len(self.state), len(admitted)), np.int64)
        state[POSITION] = [len(p.tokens) for _, p in admitted]
        state[NUM_DRAWN] = [flight.request.offset + len(flight.tokens) for flight, _ in admitted]
        state[DRAW] = [flight.request.draw + flight.request.offset + len(flight.tokens) for flight, _ in admitted]
        state[KEY] = [hash_rng_key(*flight.request.rng_key) for flight, _ in admitted]
        self._fill_places(state, admitted)
        (self.state[:, rows],) = to_device([torch.from_numpy(state)], self.device)
        if any(plans[flight.plan].processors.penalises for flight, _ in admitted):
            if self.seen is None:
                shape = (self.state.shape[1], self.vocabulary)
                self.seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
            contexts = [torch.from_numpy(p.tokens.astype(np.int64)) for _, p in admitted]
            self.seen[rows] = seen_tokens(to_device(contexts, self.device), self.vocabulary)
        logits = self.forward.logits(torch.stack([p.last_hidden for _, p in admitted if p.last_hidden is not None]))
        groups = self._grouped([flight.plan for flight, _ in admitted], plans)
        numbers = uniform(self.state[KEY, rows], self.state[DRAW, rows])
        tokens, logprobs = self._sample(logits, groups, rows, numbers, allowed)
        self.state[TOKEN, rows] = tokens
        keep = any(plan.sampling.return_logits for plan, _ in groups)
        return self._read([tokens], [logprobs], [logits] if keep else None)

    def _fill_places(self, state: np.ndarray, admitted: Sequence[tuple[InFlightRequest, Prefix]]) -> None:
        """Fills in where the KV of new rows lies, if the state has it. Args: state: int64 [states, new rows]."""

    def regroup(self, rows: Sequence[tuple[InFlightRequest, Prefix]], plans: Sequence[SamplingPlan]) -> None:
        """Records the batch's rows and where their prompts lie. Args: rows: in order. plans: all sampling plans."""
        self._regroup(rows)
        self.groups = self._grouped([flight.plan for flight, _ in rows], plans)

    def _regroup(self, rows: Sequence[tuple[InFlightRequest, Prefix]]) -> None:
        """Records where the prompts of the batch's rows lie."""
        buckets = np.array([p.bucket for _, p in rows], np.int64)
        slots = np.array([p.slot for _, p in rows], np.int64)
        lengths = np.array([len(p.tokens) for _, p in rows], np.int64)
        self.layout.regroup(self.prompt_stores, buckets, slots, lengths)

    def reserve_drawn(self, rows: int, length: int, longest: int) -> None:
        """Allocates memory for drawn tokens. Args: rows: live ones. length: of each. longest: the most of one."""
        self.completion_store.reserve(rows, length, longest=longest)

    def decode(self, steps: int, drawn: np.ndarray, furthest: int, allowed: Tensor | None = None) -> StepOutput:
        """Decodes some steps.

        Args:
            steps: how many.
            drawn: int [n], tokens that each row has drawn (the last one is not in the KV yet).
            furthest: the most tokens of a row, prompt included.
            allowed: uint8 [n, W], the tokens that constraints allow at this one step; None = no constraints.
        Returns: what was drawn.
        """
        n, longest, equal = len(drawn), int(drawn.max()), bool((drawn == drawn[0]).all())
        keep = any(plan.sampling.return_logits for plan, _ in self.groups)
        tokens, logprobs, kept = [], [], [] if keep else None
        self.forward.ensure_positions(furthest + steps)
        state = self.state[:, :n]
        ahead = torch.arange(1, steps + 1, device=self.device).unsqueeze(1)
        numbers = uniform(state[KEY].repeat(steps), (state[DRAW] + ahead).flatten()).view(steps, n)
        for step in range(steps):
            features = self._features(n, longest=longest - 1 + step, furthest=furthest - 1 + step, equal=equal)
            logits = self.forward.logits(features)
            state[POSITION : DRAW + 1] += 1
            token, logprob = self._sample(logits, self.groups, slice(0, n), numbers[step], allowed)
            state[TOKEN] = token
            tokens.append(token)
            logprobs.append(logprob)
            if kept is not None:
                kept.append(logits)
        return self._read(tokens, logprobs, kept)

    def _features(self, n: int, *, longest: int, furthest: int, equal: bool) -> Tensor:
        """Returns the hidden states [n, d] of the live rows' last tokens, and stores their keys and values. Args: see
        DecodeLayout.begin.
        """
        state = self.state[:, :n]
        self.layout.begin(state[POSITION], state[NUM_STORED], longest=longest, furthest=furthest, equal=equal)
        return self.forward.features(state[TOKEN].unsqueeze(1), self.layout)

    def _grouped(self, indices: list[int], plans: Sequence[SamplingPlan]) -> list[tuple[SamplingPlan, Tensor | None]]:
        """Returns the rows of each plan; None = all rows. Args: indices: the plan of each row."""
        distinct = sorted(set(indices))
        if len(distinct) == 1:
            return [(plans[distinct[0]], None)]
        array = np.array(indices)
        rows = to_device([torch.from_numpy(np.flatnonzero(array == i)) for i in distinct], self.device)
        return [(plans[i], index) for i, index in zip(distinct, rows, strict=True)]

    def _sample(
        self,
        logits: Tensor,
        groups: list[tuple[SamplingPlan, Tensor | None]],
        rows: slice,
        u: Tensor,
        allowed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draws a token for each of some rows of the state, plan by plan, and marks the tokens as seen."""
        position = self.state[NUM_DRAWN, rows]
        seen = None if self.seen is None else self.seen[rows]
        allowed = None if allowed is None else to_device([allowed], logits.device)[0]
        if len(groups) == 1:
            plan = groups[0][0]
            tokens, logprobs = sample_rows(logits, plan, u=u, position=position, seen=seen, allowed=allowed)
        else:
            tokens, logprobs = torch.empty_like(position), torch.empty(len(position), device=logits.device)
            for plan, index in groups:
                assert index is not None
                columns = {"u": u, "position": position, "seen": seen, "allowed": allowed}
                selected = {name: None if x is None else x.index_select(0, index) for name, x in columns.items()}
                t, lp = sample_rows(logits.index_select(0, index), plan, **selected)  # pyright: ignore[reportArgumentType]
                tokens.index_copy_(0, index, t)
                logprobs.index_copy_(0, index, lp)
        self.share_draws(tokens)
        if seen is not None:
            seen.scatter_(1, tokens.unsqueeze(1), True)
        return tokens, logprobs

    def _read(self, tokens: list[Tensor], logprobs: list[Tensor], logits: list[Tensor] | None) -> StepOutput:
        """Copies steps to the host."""
        drawn, values = to_host([torch.stack(tokens).to(torch.int32), torch.stack(logprobs)])
        kept = None if logits is None else to_host([torch.stack(logits)])[0].numpy()
        return StepOutput(tokens=drawn.numpy(), logprobs=values.numpy(), logits=kept)

    def move_rows(self, source: np.ndarray, target: np.ndarray, length: int) -> None:
        """Moves live rows into holes. Args: source, target: int [m]. length: the most tokens that one has drawn."""
        src, dst = to_device([torch.from_numpy(x) for x in (source, target)], self.device)
        self._move_drawn(src, dst, length)
        self.state.index_copy_(1, dst, self.state.index_select(1, src))
        if self.seen is not None:
            self.seen.index_copy_(0, dst, self.seen.index_select(0, src))

    def _move_drawn(self, source: Tensor, target: Tensor, length: int) -> None:
        """Moves the KV of live rows."""
        self.completion_store.move(source, target, length)

    def move_prefix(self, bucket: int, source: int, target: int) -> None:
        """Moves a prompt's KV into a hole of its store."""
        src, dst = to_device([torch.tensor([x]) for x in (source, target)], self.device)
        self.prompt_stores[bucket].move(src, dst, bucket)

    def shrink(self, rows: int, length: int, slots_in_use: dict[int, int]) -> None:
        """Frees memory that is not in use.

        Args: rows, length: of completions. slots_in_use: of prompts, by bucket.
        """
        self.completion_store.shrink(rows, length)
        for bucket in sorted(self.prompt_stores):
            if bucket in slots_in_use:
                self.prompt_stores[bucket].shrink(slots_in_use[bucket], bucket)
            else:  # a layout may still refer to it, so its memory is freed here
                self.prompt_stores.pop(bucket).drop()

    @property
    def kv_tokens(self) -> int:
        """Places allocated in all stores."""
        return self.completion_store.tokens + sum(s.tokens for s in self.prompt_stores.values())

    @property
    def kv_bytes(self) -> int:
        """Memory of all stores."""
        return self.completion_store.bytes + sum(s.bytes for s in self.prompt_stores.values())

    def release(self) -> None:
        """Drops all KV, and frees its memory and what is derived from the weights; both come back when needed."""
        self.drop()
        self.forward.drop()

    def close(self) -> None:
        """Frees everything."""
        self.release()

    def drop(self) -> None:
        """Drops all KV, and what depends on it."""
        for store in (self.completion_store, *self.prompt_stores.values()):
            store.drop()
        self.prompt_stores.clear()
        self.seen = None
