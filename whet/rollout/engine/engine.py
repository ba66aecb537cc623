"""EmbeddedEngine: continuous batching in this process, on the module that is trained.

It reads the parameters as they are now, so nothing is sent after an optimizer step (with own_weights it runs a copy).
All work happens inside `step`, which repeats three parts: `_schedule` admits what fits, `_run_prefill` and
`_run_decode` draw tokens, `_postprocess` records them and removes what has ended. A row that ends leaves at once, and
the last row moves into its place.
Left out on purpose: threads.
Dim legend: n live rows.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
from torch import Tensor, nn

from whet.config import RolloutConfig
from whet.errors import ConfigError, EngineError
from whet.models.loaded_model import LoadedModel
from whet.models.modes import max_positions
from whet.rollout.base import EngineCaps, EngineStats, Output, PartialOutput, Request, Sampling
from whet.rollout.constrained_decoding import Grammars
from whet.rollout.engine.engine_model import EngineModel
from whet.rollout.engine.kv_pool import pool_unsupported_reason
from whet.rollout.engine.live_rows import LiveRows
from whet.rollout.engine.model_forward import FusedForward, make_forward
from whet.rollout.engine.pool_runner import PoolRunner
from whet.rollout.engine.prefix_cache import CachedSequence, PrefixCache, common_prefix_length
from whet.rollout.engine.runner import Runner, StepOutput
from whet.rollout.engine.scheduler import Prefix, Scheduler
from whet.rollout.in_flight import InFlightRequest
from whet.rollout.requests import SamplingPlan, check_request, check_request_ids, make_plan
from whet.rollout.stopping import Decode
from whet.types import FinishReason

__all__ = ["EmbeddedEngine"]

log = logging.getLogger("whet")

STEPS_PER_READ = 4
"""Decode steps before the host reads what was drawn."""


class EmbeddedEngine:
    """Continuous batching with shared prompts, on the trainer's own module.

    Requests with equal prompts share one prefill and its KV. Draws follow Request.rng_key, so a request gives the same
    tokens alone and in a batch (without native kernels, except for ties broken by the last bit of a logit).

    Args:
        model: a LoadedModel, or a module to load.
        decode: ids -> text, needed for stop strings only.
        max_batch: sequences decoded together.
        kv_cache_tokens: bound on the KV held, in tokens, padding included; None = as much as max_batch sequences need.
        prefill_tokens: prompt tokens run at once; longer prompts run in chunks.
        fast: False = always run the module itself, never the fused backbone.
        native: False = on a CPU, only torch's kernels.
        grammars: of the tokenizer, needed for constraints only.
        own_weights: True = sample from a copy of the model, which takes new weights only in `update_weights`.
    Raises: ConfigError: a model that whet's attention does not fit, or a size below 1.

    Example: `engine.submit([Request(...)]); outputs = engine.step()`, until step gives [].
    """

    caps = EngineCaps(
        shared_weights=True,
        keyed_draws=True,
        abort=True,
        sleep=True,
        logits=True,
        peek=True,
        updates_in_flight=True,
        conversations=True,
        constraints=True,
    )

    def __init__(
        self,
        model: LoadedModel | nn.Module,
        *,
        decode: Decode | None = None,
        max_batch: int = 256,
        kv_cache_tokens: int | None = None,
        prefill_tokens: int = 8192,
        fast: bool = True,
        native: bool = True,
        grammars: Grammars | None = None,
        own_weights: bool = False,
    ) -> None:
        sizes = {"max_batch": max_batch, "prefill_tokens": prefill_tokens, "kv_cache_tokens": kv_cache_tokens}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value} must be at least 1")
        self._model = EngineModel(model, own_weights=own_weights)
        self.caps = replace(type(self).caps, shared_weights=not own_weights, adapters=self._model.adapted)
        self._decode, self._grammars = decode, grammars
        self._positions = max_positions(self._model.loaded.module)
        forward = make_forward(self._model.loaded, fast=fast, native=native)
        self._runner = Runner(self._model.loaded, forward, max_batch=max_batch, prefill_tokens=prefill_tokens)
        self._scheduler = Scheduler(max_batch=max_batch, kv_cache_tokens=kv_cache_tokens)
        if forward.device.type == "cuda":
            self._use_pool_if_it_fits()
        self._plans: list[SamplingPlan] = []
        self._plan_of: dict[Sampling, int] = {}
        self._in_flight: set[int] = set()
        self._rows = LiveRows()
        self._admitted: list[tuple[InFlightRequest, Prefix]] = []  # by the scheduler; not rows yet
        self._prefixes: dict[bytes, Prefix] = {}
        self._conversations = PrefixCache(max_batch if kv_cache_tokens is None else None)
        self._finished: list[Output] = []
        self._rows_changed = True
        self._weights_changed = self._asleep = self._closed = False
        self._totals = EngineStats()
        self.version = 0
        """The policy version stamped on what is drawn now."""

    @classmethod
    def from_config(
        cls, config: RolloutConfig, model: LoadedModel, *, decode: Decode, grammars: Grammars | None = None, **_: Any
    ) -> Self:
        """Returns the engine of a rollout configuration. Args: as make_engine's."""
        return cls(
            model,
            decode=decode,
            max_batch=config.max_batch_size,
            kv_cache_tokens=config.kv_cache_tokens,
            native=config.native_kernels,
            grammars=grammars,
        )

    def _use_pool_if_it_fits(self) -> None:
        """Captures decode steps from a KVPool where the model's attention can run there, else says why it can't."""
        case = self._runner.forward.pool_case()
        reason = case if isinstance(case, str) else pool_unsupported_reason(case)
        if reason is None:
            self._use_pool()
            return
        self._runner.why_eager = reason
        if isinstance(case, str):  # the comparison of a case has its own warning
            slow = "decode steps are not captured, which makes a rollout several times slower"
            log.warning("%s: %s; rollout_engine=vllm may be faster", slow, reason)

    def _use_pool(self, **options: Any) -> None:
        """Puts KV into a KVPool from now on, and captures decode steps. Args: options: of PoolRunner."""
        runner, scheduler = self._runner, self._scheduler
        assert isinstance(runner.forward, FusedForward)
        sizes = {"max_batch": scheduler.max_batch, "kv_cache_tokens": scheduler.kv_cache_tokens}
        sizes["prefill_tokens"] = runner.prefill_tokens
        self._runner = pooled = PoolRunner(runner.loaded, runner.forward, **sizes, **options)
        scheduler.pool = pooled.places

    # ---- requests ------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests.

        Raises: EngineError: one of them could never fit, or its id is in flight; none is queued then.
        """
        check_request_ids(requests, self._in_flight)
        for r in requests:
            check_request(
                r,
                vocabulary=self._runner.vocabulary,
                positions=self._positions,
                decodes=self._decode is not None,
                constrains=self._grammars is not None,
                closed=self._closed,
            )
            self._scheduler.check(r)
        matchers = [self._grammars and self._grammars.start(r) for r in requests]
        plans = [self._plan(r.sampling) for r in requests]
        self._in_flight |= {r.id for r in requests}
        self._scheduler.add(
            [InFlightRequest(request=r, plan=p, matcher=m) for r, p, m in zip(requests, plans, matchers, strict=True)]
        )

    def _plan(self, sampling: Sampling) -> int:
        """Returns the index of a Sampling's plan; Samplings that differ only in max_tokens are drawn together."""
        sampling = replace(sampling, max_tokens=1)
        if sampling not in self._plan_of:
            self._plans.append(make_plan(sampling))
            self._plan_of[sampling] = len(self._plans) - 1
        return self._plan_of[sampling]

    def abort(self, ids: Iterable[int]) -> list[Output]:
        """Ends requests now; ids that are not in flight are ignored.

        Args: ids: of requests.
        Returns: their tokens so far, finish_reason "abort"; submit again with an offset to resume.
        """
        aborted = set(ids)
        out = [flight.output("abort") for flight in self._scheduler.remove(aborted)]
        rows = {row for row, (flight, _) in enumerate(self._rows) if flight.request.id in aborted}
        out += [self._record(row).output("abort") for row in sorted(rows)]
        if rows:
            with self._runner.forward.running():
                self._remove_rows(rows)
        out += [o for o in self._finished if o.id in aborted]  # finished in a step that was cut short
        self._finished = [o for o in self._finished if o.id not in aborted]
        self._in_flight -= {o.id for o in out}
        return out

    def peek(self, ids: Iterable[int]) -> dict[int, PartialOutput]:
        """Returns all tokens drawn so far, without computing.

        Args: ids: of requests; those that are not in flight are ignored.
        Returns: partial outputs by id; `step(timeout_s=0.0)` draws a few more tokens.
        """
        requested, rows = set(ids), self._rows
        partials = {f.request.id: f.partial() for f in self._scheduler.queue if f.request.id in requested}
        for row, (flight, _) in enumerate(rows):
            if flight.request.id in requested:
                partials[flight.request.id] = flight.partial(rows.tokens(row), rows.logprobs(row), self.version)
        return partials

    # ---- a step: schedule, run, postprocess ----------------------------------------------------------------------

    def step(self, timeout_s: float | None = None) -> list[Output]:
        """Admits, prefills and decodes until a request finishes, or the time is up.

        Args: timeout_s: looked at between blocks of decode steps; None = no limit.
        Returns: finished requests; [] = nothing in flight (or the time is up).
        Raises: EngineError: the engine sleeps. Any other error (Ctrl-C, no memory) loses no request: all are queued
            again with the tokens drawn so far.
        """
        if self._asleep:
            raise EngineError("the engine is asleep; call wake_up() first")
        self._model.check_complete()
        start = time.monotonic()
        try:
            with self._runner.forward.running():
                self._runner.forward.refresh(force=self._weights_changed)
                self._weights_changed = False
                while not self._finished and (self._rows or self._scheduler.queue):
                    if admitted := self._schedule():
                        self._postprocess(*self._run_prefill(admitted))
                    if self._rows and not self._finished:
                        self._decode_block()
                    if timeout_s is not None and self._agree(time.monotonic() - start >= timeout_s):
                        break
        except BaseException:
            self._requeue()
            self._weights_changed = True
            raise
        finished, self._finished = self._finished, []
        return finished

    def _agree(self, is_late: bool) -> bool:
        """Returns whether the time of a step is up. Args: is_late: whether it is by this process's clock."""
        return is_late

    def _schedule(self) -> list[tuple[InFlightRequest, Prefix]]:
        """Admits what fits into the batch, and returns unused memory to make it fit. Returns: [] = nothing fits."""
        scheduler, longest = self._scheduler, self._rows.max_new
        admit = lambda: scheduler.admit(
            num_live=len(self._rows),
            longest=longest,
            prefixes=self._prefixes,
            conversations=self._conversations,
            min_free=max(1, scheduler.max_batch // 8),
        )
        self._admitted = admit()
        if scheduler.pool is not None:
            if not self._admitted and not self._rows and scheduler.queue:  # a held prompt divides the pool
                self._prefixes.clear()
                scheduler.pool.clear()
                self._admitted = admit()
        elif self._admitted and scheduler.kv_cache_tokens is not None:
            longest = max(longest, *(flight.remaining for flight, _ in self._admitted))
            self._runner.shrink(len(self._rows), longest, self._slots_in_use())
        for _, prefix in self._admitted:
            prefix.ref_count += 1
        return self._admitted

    def _run_prefill(self, admitted: list[tuple[InFlightRequest, Prefix]]) -> tuple[StepOutput, int]:
        """Runs each new prompt once, and draws the first token of each admitted request.

        Returns: what was drawn, and the row of the first of them.
        """
        new = {p.key: p for _, p in admitted if p.last_hidden is None}
        computed = sum(len(p.tokens) - p.num_computed_tokens for p in new.values())
        reused = sum(len(p.tokens) for _, p in admitted) - computed
        self._totals = self._totals.plus(prefilled=computed, reused=reused)
        if new:
            slots_in_use = self._slots_in_use()
            self._prefixes |= new  # now, since rows that leave between two chunks move prompts
            self._runner.prefill(list(new.values()), slots_in_use, self._decode_between_chunks)
        for flight, prefix in admitted:
            cached = self._conversations.get(flight.request.conversation)
            if cached is not None and common_prefix_length(cached.tokens, prefix.tokens) == len(cached.tokens):
                self._conversations.drop(flight.request.conversation)  # the prompt's own row has all of it
        first = len(self._rows)
        self._runner.reserve_rows(first, len(admitted))
        drawn = self._runner.add_rows(first, admitted, self._plans, self._allowed(admitted))
        self._rows.add(admitted)
        self._admitted, self._rows_changed = [], True
        return drawn, first

    def _decode_between_chunks(self) -> None:
        """Live rows decode between two chunks of new prompts. With a bound on the cache all memory is reserved."""
        if self._rows and self._scheduler.kv_cache_tokens is None:
            self._decode_block()

    def _decode_block(self) -> None:
        """Decodes a few steps, and records them. In a KVPool rows get the places for them first."""
        if self._scheduler.pool is not None:
            self._make_room()
        if self._rows:
            self._postprocess(self._run_decode())

    def _make_room(self) -> None:
        """Gives rows of a KVPool places for the next steps; those with the fewest tokens are queued again for want."""
        runner, scheduler, rows = self._runner, self._scheduler, self._rows
        assert isinstance(runner, PoolRunner)
        fits = False
        while rows and not fits:
            flights = [flight for flight, _ in rows]
            moves, fits = scheduler.grow(flights, rows.num_drawn, STEPS_PER_READ, self._conversations)
            runner.move_places(moves)
            if not fits:
                row = min(reversed(range(len(rows))), key=lambda row: len(flights[row].tokens) + rows.num_drawn[row])
                scheduler.resume([self._record(row)])
                self._remove_rows({row})
                scheduler.is_full = True

    def _run_decode(self) -> StepOutput:
        """Decodes a few steps, no more than the row nearest to its limit may draw; one, where a row is constrained."""
        runner, rows, allowed = self._runner, self._rows, self._allowed(self._rows.all)
        steps = min(STEPS_PER_READ if allowed is None else 1, int(rows.remaining.min()))
        runner.reserve_drawn(len(rows), int(rows.num_drawn.max()) - 1 + steps, rows.max_new)
        if self._rows_changed:
            runner.regroup(rows.all, self._plans)
            self._rows_changed = False
        self._totals = self._totals.plus(steps=steps, row_steps=steps * len(rows))
        return runner.decode(steps, rows.num_drawn.copy(), int(rows.lengths.max()), allowed)

    def _allowed(self, rows: Sequence[tuple[InFlightRequest, Prefix]]) -> Tensor | None:
        """Returns which tokens the constraints allow next, uint8 [n, W]; None where no row has a constraint."""
        matchers = [flight.matcher for flight, _ in rows] if self._grammars else []
        return self._grammars.rows(matchers) if self._grammars and any(matchers) else None

    def _postprocess(self, drawn: StepOutput, first: int = 0) -> None:
        """Records what rows first.. have drawn, and removes those that have ended (rollout/stopping.py says why)."""
        steps, rows = len(drawn.tokens), self._rows
        rows.append(first, drawn.tokens, drawn.logprobs)
        if drawn.logits is not None:
            for row in range(first, len(rows)):
                flight, _ = rows[row]
                if flight.request.sampling.return_logits:
                    flight.logits.append(drawn.logits[:, row - first])
        may_end = rows.remaining[first:] <= 0  # only these rows are looked at one by one
        for plan in np.unique(rows.plans[first:]):
            sampling, of_plan = self._plans[plan].sampling, np.flatnonzero(rows.plans[first:] == plan)
            may_end[of_plan] |= bool(sampling.stop) or np.isin(drawn.tokens[:, of_plan], sampling.stop_ids).any(0)
        ended: dict[int, FinishReason] = {}
        for row in (first + np.flatnonzero(may_end)).tolist():
            flight, _ = rows[row]
            if end := flight.find_end(self._decode, new=steps, unrecorded=rows.tokens(row)):
                rows.num_drawn[row] = end[0] - len(flight.tokens)
                ended[row] = end[1]
        if self._grammars is not None:
            constrained = {row: rows[row][0].matcher for row in range(first, len(rows)) if ended.get(row) != "stop"}
            matchers = {row: m for row, m in constrained.items() if m is not None}
            ended |= self._grammars.advance(matchers, drawn.tokens[-1], first=first)
        for row in sorted(ended):
            flight = self._record(row)
            self._in_flight.discard(flight.request.id)
            self._finished.append(flight.output(ended[row]))
        if ended:
            self._remove_rows(set(ended))

    def _record(self, row: int) -> InFlightRequest:
        """Adds what a row has drawn since its admission to its request. Returns: the request."""
        flight, tokens = self._rows[row][0], self._rows.tokens(row)
        flight.extend(tokens.tolist(), self._rows.logprobs(row).tolist(), version=self.version)
        if flight.logits:  # blocks of steps may reach past the end
            flight.logits = [np.concatenate(flight.logits)[: len(flight.tokens)]]
        self._totals = self._totals.plus(generated=len(tokens))
        return flight

    def _remove_rows(self, gone: set[int]) -> None:
        """Removes rows from the batch; a conversation's KV is kept for its next turn, if it fits."""
        turns: list[tuple[int, CachedSequence]] = []
        for row in sorted(gone):
            flight, prefix = self._rows[row]
            prefix.ref_count -= 1
            if flight.request.conversation is not None:
                drawn = self._rows.tokens(row)[:-1]  # the last token has no KV yet
                tokens = np.concatenate([prefix.tokens, drawn]).astype(np.int32)
                cached = CachedSequence(tokens=tokens, layers=self._runner.copy_kv(row, flight, prefix, len(drawn)))
                turns.append((flight.request.conversation, cached))
            if self._scheduler.pool is not None:
                self._scheduler.pool.free(flight.place)
        source, target = self._rows.compact(gone)
        if len(target):
            self._runner.move_rows(source, target, int(self._rows.num_drawn[target].max()))
        self._rows_changed, self._scheduler.is_full = True, False
        self._drop_unused_prefixes()
        room = self._conversation_budget(sum(len(cached.tokens) for _, cached in turns)) if turns else None
        for conversation, cached in turns:
            self._conversations.put(conversation, cached, room)

    def _drop_unused_prefixes(self) -> None:
        """Drops prompts that no row reads, but not that of the next request; the last of a store fills the hole."""
        queue = self._scheduler.queue
        waiting = queue[0].context.tobytes() if queue else None
        for prefix in [p for p in self._prefixes.values() if not p.ref_count and p.key != waiting]:
            del self._prefixes[prefix.key]
            if self._scheduler.pool is not None:
                self._scheduler.pool.free(prefix.place)
                continue
            same_store = [p for p in self._prefixes.values() if p.bucket == prefix.bucket]
            last = max(same_store, key=lambda p: p.slot, default=None)
            if last is not None and last.slot > prefix.slot:
                self._runner.move_prefix(prefix.bucket, last.slot, prefix.slot)
                last.slot = prefix.slot

    # ---- memory --------------------------------------------------------------------------------------------------

    def _slots_in_use(self) -> Counter[int]:
        """Returns rows in use of the prompts' stores, by bucket."""
        return Counter(p.bucket for p in self._prefixes.values())

    def _conversation_budget(self, tokens: int) -> int | None:
        """Returns tokens of earlier turns that may be held, new ones included; None = no bound. Frees what is not in
        use.
        """
        bound, longest = self._scheduler.kv_cache_tokens, self._rows.max_new
        if bound is None:
            return None
        if self._scheduler.pool is not None:
            if self._runner.kv_tokens + self._conversations.tokens + tokens > bound:
                self._runner.shrink(len(self._rows), longest, {})
            return bound - self._runner.kv_tokens
        store = self._runner.completion_store  # the rows that have left would take places too when the others grow
        unused = store.rows * max(0, longest - store.length)
        if self._runner.kv_tokens + unused + self._conversations.tokens + tokens > bound:
            self._runner.shrink(len(self._rows), longest, self._slots_in_use())
        return bound - self._scheduler.places(self._slots_in_use(), len(self._rows), longest)

    def update_weights(self, version: int, weights: Iterator[tuple[str, Tensor]] | None = None) -> None:
        """Takes a new policy version. Requests in flight continue under it, with their KV recomputed.

        Args: version: stamped on tokens from now on. weights: all of them by name, for an engine with its own weights;
            None for an engine that reads the trainer's.
        Raises: EngineError: weights came to an engine that shares the trainer's, none came to one that has its own, or
            they don't fit.
        """
        self._model.check_weights(weights)
        self._requeue()
        self._weights_changed, self.version = True, version
        self._model.load_weights(weights)

    def _requeue(self) -> None:
        """Takes all requests out of the batch, keeping their tokens, and drops all KV."""
        flights = [self._record(row) for row in range(len(self._rows))]
        self._scheduler.resume([*flights, *(flight for flight, _ in self._admitted if flight not in flights)])
        self._rows.clear()
        self._admitted, self._scheduler.is_full = [], False
        self._prefixes.clear()
        self._conversations.clear()
        self._runner.drop()

    def sleep(self) -> None:
        """Frees KV memory and what is derived from weights; requests in flight keep their tokens until wake."""
        self._requeue()
        self._runner.release()
        self._asleep = True

    def wake_up(self) -> None:
        """Undoes sleep; memory comes back as it is needed."""
        self._asleep = False

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the weights that it runs with, as the trainer names them."""
        return self._model.loaded.module.named_parameters()

    def close(self) -> None:
        """Frees everything; requests in flight are lost. The engine can't be used again."""
        self.abort(set(self._in_flight))
        self._conversations.clear()
        self._runner.close()
        self._finished, self._closed = [], True

    # ---- what it reports -----------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Returns its state now, and its counts since construction."""
        scheduler = self._scheduler
        return replace(
            self._totals,
            live=len(self._rows),
            waiting=len(scheduler.queue),
            held=len(self._conversations),
            max_batch=scheduler.max_batch,
            kv_tokens=self._runner.kv_tokens + self._conversations.tokens,
            kv_tokens_bound=scheduler.kv_cache_tokens,
            kv_bytes=self.kv_bytes,
            generated=self._totals.generated + int(self._rows.num_drawn.sum()),
        )

    @property
    def kv_bytes(self) -> int:
        """KV memory held now."""
        return self._runner.kv_bytes + self._conversations.bytes

    @property
    def weight_bytes(self) -> int:
        """Memory of what is derived from the weights (packed copies); the weights themselves are not counted."""
        return self._runner.forward.bytes

    @property
    def backends(self) -> dict[str, str]:
        """The implementation of each part, with the reason for a fallback; never chosen by timing."""
        return {**self._runner.forward.backends, "steps": self._runner.steps}
