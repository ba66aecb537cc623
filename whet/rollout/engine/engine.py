"""The embedded engine: the protocol, and the order of its work.

It runs the module it is given with the parameters of the moment: after an optimizer step nothing is sent (with
own_weights, a copy is run). All work happens inside `step`: admit what fits, decode a few steps, read what was drawn,
retire what is finished. A sequence that ends leaves at once, and the last row moves into its place.
Left out on purpose: threads, and preemption by memory (memory is reserved when a request is admitted).
Dim legend: n live rows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor, nn

from whet.errors import ConfigError, EngineError
from whet.models.loaded_model import LoadedModel
from whet.models.modes import max_positions
from whet.rollout.base import EngineCaps, EngineStats, Output, PartialOutput, Request, Sampling
from whet.rollout.constrained_decoding import Grammars
from whet.rollout.engine.conversation_cache import CachedSequence, ConversationCache, common_length
from whet.rollout.engine.engine_model import EngineModel
from whet.rollout.engine.live_rows import LiveRows
from whet.rollout.engine.runner import Runner, StepOutput
from whet.rollout.engine.scheduler import Prefix, Scheduler, SequenceState
from whet.rollout.requests import SamplingPlan, check_request, completed_string, make_plan
from whet.types import FinishReason

__all__ = ["EmbeddedEngine"]

STEPS_PER_READ = 4
"""Decode steps between two looks at what was drawn."""


class EmbeddedEngine:
    """Continuous batching with shared prompts, on the trainer's own module.

    Requests with equal prompts share one prefill and its KV. Draws follow Request.address, so a request gives the same
    tokens alone and in a crowd (without native kernels, but for ties broken by the last bit of a logit).
    Args: model: a LoadedModel, or a module to load. decode: ids -> text, needed for stop strings only.
        max_batch: sequences decoded together. kv_cache_tokens: bound on the KV held, in tokens, padding included;
            None = as much as max_batch sequences ask for. prefill_tokens: prompt tokens run at once; longer prompts run
            in chunks. fast: False = always run the module itself, never the fused trunk. native: False = on a CPU,
            torch's kernels alone. grammars: the tokenizer's, needed for constraints only. own_weights:
            True = sample from a copy of the model, which takes its weights in `update` alone.
    Raises: ConfigError: a model that whet's attention does not fit, or a size below 1.

    Example: `engine.submit([Request(...)]); outputs = engine.step()`, until step gives [].
    """

    caps = EngineCaps(
        shared_weights=True,
        addressed=True,
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
        decode: Callable[[Sequence[int]], str] | None = None,
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
        self._runner = Runner(
            self._model.loaded, max_batch=max_batch, prefill_tokens=prefill_tokens, fast=fast, native=native
        )
        if self._runner.device.type == "cuda" and kv_cache_tokens is None and self.backends["trunk"] == "fused":
            self._runner.fix_shapes()  # padding rows hold KV too, which a bounded cache does not count
        self._scheduler = Scheduler(max_batch=max_batch, kv_cache_tokens=kv_cache_tokens)
        self._plans: list[SamplingPlan] = []
        self._plan_of: dict[Sampling, int] = {}
        self._in_flight: set[int] = set()
        self._rows = LiveRows()
        self._admitted: list[tuple[SequenceState, Prefix]] = []  # by the scheduler; not rows yet
        self._prefixes: dict[bytes, Prefix] = {}
        self._conversations = ConversationCache(max_batch if kv_cache_tokens is None else None)
        self._finished: list[Output] = []
        self._rows_changed = True
        self._weights_changed = self._asleep = self._closed = False
        self._totals = EngineStats()
        self.version = 0
        """The policy version stamped on what is drawn now."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests.

        Raises: EngineError: one of them could never fit, or its id is in flight; none is queued then.
        """
        ids: set[int] = set()
        for r in requests:
            if r.id in self._in_flight or r.id in ids:
                raise EngineError(f"request id {r.id} is in flight already; ids are unique until their output has come")
            ids.add(r.id)
            check_request(
                r,
                vocabulary=self._runner.vocabulary,
                positions=self._positions,
                decodes=self._decode is not None,
                constrains=self._grammars is not None,
                closed=self._closed,
            )
            self._scheduler.check(r)
        matchers = [self._grammars.start(r) if self._grammars else None for r in requests]
        plans = [self._plan(r.sampling) for r in requests]
        self._in_flight |= ids
        self._scheduler.add(
            [SequenceState(request=r, plan=p, matcher=m) for r, p, m in zip(requests, plans, matchers, strict=True)]
        )

    def _plan(self, sampling: Sampling) -> int:
        """The index of a Sampling's plan; Samplings that differ in max_tokens alone draw together."""
        sampling = replace(sampling, max_tokens=1)
        if sampling not in self._plan_of:
            self._plans.append(make_plan(sampling))
            self._plan_of[sampling] = len(self._plans) - 1
        return self._plan_of[sampling]

    def step(self, timeout_s: float | None = None) -> list[Output]:
        """Computes until something finishes, or the time is up, and returns what has finished.

        Args: timeout_s: looked at between blocks of steps; None = no limit.
        Returns: finished requests; [] = nothing in flight (or the time is up).
        Raises: EngineError: the engine sleeps. What else is raised (Ctrl-C, no memory) ends no request: all are queued
            again with what they have made.
        """
        if self._asleep:
            raise EngineError("the engine is asleep; call wake() first")
        self._model.check_whole()
        try:
            with self._runner.forward.running():
                self._runner.forward.refresh(force=self._weights_changed)
                self._weights_changed = False
                self._run_until_finished(timeout_s)
        except BaseException:
            self._requeue()
            self._weights_changed = True
            raise
        done, self._finished = self._finished, []
        return done

    def _run_until_finished(self, timeout_s: float | None) -> None:
        """Admits and decodes until something is finished."""
        start = time.monotonic()
        while not self._finished and (self._rows or self._scheduler.queue):
            self._admit()
            if self._rows and not self._finished:
                self._advance()
            if timeout_s is not None and time.monotonic() - start >= timeout_s:
                break

    def _admit(self) -> None:
        """Admits what fits, prefills new prompts, draws first tokens."""
        live, scheduler, runner = len(self._rows), self._scheduler, self._runner
        if not scheduler.queue:
            return
        longest = self._rows.max_new
        admitted = scheduler.admit(
            live=live,
            longest=longest,
            prefixes=self._prefixes,
            conversations=self._conversations,
            idle=max(1, scheduler.max_batch // 8),
        )
        if not admitted:
            return
        self._admitted = admitted
        if scheduler.kv_cache_tokens is not None:
            runner.shrink(live, max(longest, *(seq.left for seq, _ in admitted)), self._slots_in_use())
        for _, p in admitted:
            p.live += 1
        self._prefill(admitted)
        live = len(self._rows)
        runner.reserve_rows(live, len(admitted))
        block = runner.add_rows(live, admitted, self._plans, self._allowed(admitted))
        self._rows.add(admitted)
        self._admitted = []
        self._rows_changed = True
        self._collect(block, live)

    def _slots_in_use(self) -> dict[int, int]:
        """Rows in use of the prompts' stores, by bucket."""
        return Counter(p.bucket for p in self._prefixes.values())

    def _prefill(self, admitted: Sequence[tuple[SequenceState, Prefix]]) -> None:
        """Runs the new prompts, each once, from the first token that an earlier turn does not hold."""
        new = {p.key: p for _, p in admitted if p.hidden is None}
        fresh = sum(len(p.tokens) - p.filled for p in new.values())
        self._add_stats(prefilled=fresh, reused=sum(len(p.tokens) for _, p in admitted) - fresh)
        if new:
            slots_in_use = self._slots_in_use()
            self._prefixes |= new  # now, since rows that leave between two chunks move prompts
            self._runner.prefill(list(new.values()), slots_in_use, self._decode_between_chunks)
        for seq, prefix in admitted:
            held = self._conversations.get(seq.request.conversation)
            if held is not None and common_length(held.tokens, prefix.tokens) == len(held.tokens):
                self._conversations.drop(seq.request.conversation)  # the prompt's own row has all of it

    def _decode_between_chunks(self) -> None:
        """Live rows decode between two chunks of new prompts; with a bound on the cache, all memory is spoken for."""
        if self._rows and self._scheduler.kv_cache_tokens is None:
            self._advance()

    def _advance(self) -> None:
        """Decodes a few steps, no more than the row nearest to its limit may make; one, where a row is constrained."""
        runner, rows, allowed = self._runner, self._rows, self._allowed(self._rows.all)
        steps = min(STEPS_PER_READ if allowed is None else 1, int(rows.left.min()))
        runner.own.reserve(len(rows), int(rows.made.max()) - 1 + steps, longest=rows.max_new)
        if self._rows_changed:
            runner.regroup(rows.all, self._plans)
            self._rows_changed = False
        self._add_stats(steps=steps, row_steps=steps * len(rows))
        self._collect(runner.decode(steps, rows.made.copy(), int(rows.lengths.max()), allowed), 0)

    def _allowed(self, rows: Sequence[tuple[SequenceState, Prefix]]) -> Tensor | None:
        """What constraints allow next, uint8 [n, W]; None where no row has one."""
        matchers = [seq.matcher for seq, _ in rows] if self._grammars else []
        return self._grammars.rows(matchers) if self._grammars and any(matchers) else None

    def _add_stats(self, **counts: int) -> None:
        """Adds to what was done since construction."""
        done = self._totals
        self._totals = replace(done, **{name: vars(done)[name] + n for name, n in counts.items()})

    def _collect(self, block: StepOutput, first: int) -> None:
        """Records what rows first.. to the last have drawn, and retires those that are finished."""
        self._rows.append(first, block.tokens, block.logprobs)
        if block.logits is not None:
            for row in range(first, len(self._rows)):
                seq, _ = self._rows[row]
                if seq.request.sampling.return_logits:
                    seq.logits.append(block.logits[:, row - first])
        ended = self._ended(block, first)
        if ended:
            self._finish(ended)

    def _ended(self, block: StepOutput, first: int) -> dict[int, FinishReason]:
        """Rows that are finished, and why; what a row that stopped has made is cut to its stop token."""
        steps, rows = len(block.tokens), self._rows
        ended: dict[int, FinishReason] = {first + int(i): "length" for i in np.flatnonzero(rows.left[first:] <= 0)}
        plans = rows.plans[first:]
        for plan in np.unique(plans):
            sampling = self._plans[plan].sampling
            mine = np.flatnonzero(plans == plan)
            stops = np.isin(block.tokens[:, mine], sampling.stop_ids)
            for i in np.flatnonzero(stops.any(0)):
                row = first + int(mine[i])
                rows.made[row] += int(stops[:, i].argmax()) + 1 - steps
                ended[row] = "stop"
            for row in mine + first if sampling.stop else ():
                if self._cut(int(row), steps):
                    ended[int(row)] = "stop"
        self._advance_grammars(block.tokens[-1], first, ended)
        return ended

    def _advance_grammars(self, drawn: np.ndarray, first: int, ended: dict[int, FinishReason]) -> None:
        """Tells the grammars of constrained rows what was drawn, and ends rows where no token may come."""
        rows = enumerate(self._rows.all[first:], first)
        matchers = {row: seq.matcher for row, (seq, _) in rows if seq.matcher and ended.get(row) != "stop"}
        for row, matcher in matchers.items():
            matcher.advance(int(drawn[row - first]))
        if self._grammars and matchers:
            self._grammars.refresh(list(matchers.values()))
        ended |= {row: m.ended for row, m in matchers.items() if m.ended}

    def _cut(self, row: int, steps: int) -> bool:
        """Cuts a row at the token that completes a stop string, if one of its last `steps` does."""
        seq, _ = self._rows[row]
        r, made = seq.request, self._rows.tokens(row)
        whole = np.concatenate([r.tokens[len(r.tokens) - r.offset :], *(s.tokens for s in seq.spans), made])
        assert self._decode is not None
        place = completed_string(self._decode, whole, r.sampling.stop, fresh=min(steps, len(made)))
        if place is None:
            return False
        self._rows.made[row] = place - (len(whole) - len(made))
        return True

    def _finish(self, ended: dict[int, FinishReason]) -> None:
        """Retires finished rows."""
        for row in sorted(ended):
            seq, _ = self._rows[row]
            self._save_span(row)
            self._in_flight.discard(seq.request.id)
            self._finished.append(seq.output(ended[row]))
        self._remove_rows(set(ended))

    def _remove_rows(self, gone: set[int]) -> None:
        """Takes rows out; what they held stays for the next turn of their conversation, if it has one and fits."""
        turns: list[tuple[int, CachedSequence]] = []
        for row in sorted(gone):
            seq, prefix = self._rows[row]
            if seq.request.conversation is not None:
                own = self._rows.tokens(row)[:-1]  # the last token has no KV yet
                tokens = np.concatenate([prefix.tokens, own]).astype(np.int32)
                held = CachedSequence(tokens=tokens, layers=self._runner.copy_kv(row, prefix, len(own)))
                turns.append((seq.request.conversation, held))
        self._compact(gone)
        room = self._conversation_budget(sum(len(h.tokens) for _, h in turns)) if turns else None
        for conversation, held in turns:
            self._conversations.put(conversation, held, room)

    def _conversation_budget(self, tokens: int) -> int | None:
        """Tokens that may be held of earlier turns, new ones included; None = no bound. Frees what is not in use."""
        bound, longest = self._scheduler.kv_cache_tokens, self._rows.max_new
        if bound is None:
            return None
        own = self._runner.own  # the rows that have left would take places too when the others grow
        unused = own.rows * max(0, longest - own.length)
        if self._runner.kv_tokens + unused + self._conversations.tokens + tokens > bound:
            self._runner.shrink(len(self._rows), longest, self._slots_in_use())
        return bound - sum(p.bucket for p in self._prefixes.values()) - len(self._rows) * longest

    def _save_span(self, row: int) -> None:
        """Adds what a row has drawn since it was admitted to its sequence."""
        seq, span = self._rows[row][0], self._rows.span(row, self.version)
        logits = np.concatenate(seq.logits)[: len(span.tokens)] if seq.logits else None
        seq.logits = []
        seq.spans.append(replace(span, logits=logits))
        self._add_stats(generated=len(span.tokens))

    def _compact(self, gone: set[int]) -> None:
        """Moves the last rows into the freed slots; drops prompts that no row reads."""
        for row in gone:
            self._rows[row][1].live -= 1
        source, target = self._rows.compact(gone)
        if len(target):
            self._runner.move_rows(source, target, int(self._rows.made[target].max()))
        self._rows_changed = True
        queue = self._scheduler.queue
        waiting = queue[0].context.tobytes() if queue else None
        for p in [p for p in self._prefixes.values() if not p.live and p.key != waiting]:
            self._forget(p)

    def _forget(self, prefix: Prefix) -> None:
        """Drops a prompt; the last one of its store moves into its place."""
        del self._prefixes[prefix.key]
        same = [p for p in self._prefixes.values() if p.bucket == prefix.bucket]
        last = max(same, key=lambda p: p.slot, default=None)
        if last is not None and last.slot > prefix.slot:
            self._runner.move_prefix(prefix.bucket, last.slot, prefix.slot)
            last.slot = prefix.slot

    def abort(self, ids: Iterable[int]) -> list[Output]:
        """Ends requests now; ids that are not in flight are passed over.

        Args: ids: of requests.
        Returns: what they had made, finish_reason "abort"; submit again with an offset to go on.
        """
        gone = set(ids)
        out = [seq.output("abort") for seq in self._scheduler.remove(gone)]
        rows = {i for i, (seq, _) in enumerate(self._rows) if seq.request.id in gone}
        for row in sorted(rows):
            self._save_span(row)
            out.append(self._rows[row][0].output("abort"))
        if rows:
            with self._runner.forward.running():
                self._remove_rows(rows)
        out += [o for o in self._finished if o.id in gone]  # finished in a step that was cut short
        self._finished = [o for o in self._finished if o.id not in gone]
        self._in_flight -= {o.id for o in out}
        return out

    def update(self, version: int, weights: Iterator[tuple[str, Tensor]] | None = None) -> None:
        """Takes a new policy version. Sequences under way go on under it, with their KV made again.

        Args: version: stamped on tokens from now on. weights: all of them by name, for an engine with weights of its
            own; else None, since the parameters are the trainer's.
        Raises: EngineError: weights were given to the one, or none to the other, or they don't fit.
        """
        self._model.check_given(weights)
        self._requeue()
        self._weights_changed, self.version = True, version
        self._model.take(weights)

    def _requeue(self) -> None:
        """Takes all rows out, keeping what they made, and drops all KV."""
        for row in range(len(self._rows)):
            self._save_span(row)
        seqs = [seq for seq, _ in self._rows]
        self._scheduler.resume([*seqs, *(seq for seq, _ in self._admitted if seq not in seqs)])
        self._rows.clear()
        self._admitted = []
        self._prefixes.clear()
        self._conversations.clear()
        self._runner.drop()

    def sleep(self) -> None:
        """Frees KV memory and derived weights; sequences under way are kept as tokens and go on after wake."""
        self._requeue()
        self._runner.forward.drop()
        self._asleep = True

    def wake(self) -> None:
        """Undoes sleep; memory comes back as it is needed."""
        self._asleep = False

    def close(self) -> None:
        """Frees everything; what was in flight is lost. The engine can't be used again."""
        self.abort(set(self._in_flight))
        self._conversations.clear()
        self._runner.drop()
        self._runner.forward.drop()
        self._finished, self._closed = [], True

    def peek(self, ids: Iterable[int]) -> dict[int, PartialOutput]:
        """All tokens made so far, without computing.

        Args: ids: of requests; those that are not in flight are passed over.
        Returns: by id, what each has made; `step(timeout_s=0.0)` makes a few tokens more.
        """
        asked = set(ids)
        found = {seq.request.id: seq.piece() for seq in self._scheduler.queue if seq.request.id in asked}
        for row, (seq, _) in enumerate(self._rows):
            if seq.request.id in asked:
                found[seq.request.id] = seq.piece(self._rows.span(row, self.version))
        return found

    def stats(self) -> EngineStats:
        """Where it stands, and what it has done since it was built."""
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
            generated=self._totals.generated + int(self._rows.made.sum()),
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
        """What runs, in words, with the reason where something stepped aside; never chosen by the clock."""
        steps = "eager" if self._runner.graphs is None else self._runner.graphs.path
        return {**self._runner.forward.backends, "steps": steps}
