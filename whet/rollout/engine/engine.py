"""The embedded engine: the protocol, and the host's books.

It runs the module it is given with the parameters of the moment: after an optimizer step nothing is sent (with
own_weights, a copy is run). All work happens inside `poll`: let in what fits, decode a few steps, read what was drawn,
let out what is finished. A sequence that ends leaves at once, and the last row moves into its place.
Left out on purpose: threads, and preemption by memory (memory is reserved when a request is let in).
Dim legend: n live rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor, nn

from whet.errors import ConfigError, EngineError
from whet.models.modes import max_positions
from whet.models.types import LoadedModel
from whet.rollout.base import EngineCaps, EngineStats, Output, PartialOutput, Request, Sampling
from whet.rollout.constraint import Grammars
from whet.rollout.engine.conversation_cache import CachedSequence, ConversationCache, common_length
from whet.rollout.engine.runner import Runner, StepOutput
from whet.rollout.engine.scheduler import Part, Prefix, Scheduler, Task
from whet.rollout.engine.weights import EngineModel
from whet.rollout.requests import SamplingPlan, check_request, completed_string, make_plan
from whet.types import FinishReason

__all__ = ["EmbeddedEngine"]

NUM_GENERATED, MAX_NEW, PROMPT, PLAN = range(4)
"""Rows of the book: tokens made in this stay, tokens it may make, prompt tokens, index of the plan."""
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

    Example: `engine.submit([Request(...)]); outputs = engine.poll()`, until poll gives [].
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
        self.caps = replace(type(self).caps, shared_weights=not own_weights)
        self._model = EngineModel(model, own_weights=own_weights)
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
        self._ids: set[int] = set()
        self._rows: list[tuple[Task, Prefix]] = []
        self._entering: list[tuple[Task, Prefix]] = []  # let in by the scheduler, and not yet rows
        self._book = np.zeros((4, 0), np.int64)
        """[4, n], a column for each live row."""
        self._tokens, self._logprobs = np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
        self._prefixes: dict[bytes, Prefix] = {}
        self._shelf = ConversationCache(max_batch if kv_cache_tokens is None else None)
        self._done: list[Output] = []
        self._stale = True
        self._renew = self._asleep = self._closed = False
        self._work_done = EngineStats()
        self.version = 0
        """The policy version stamped on what is drawn now."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests.

        Raises: EngineError: one of them could never fit, or its id is in flight; none is queued then.
        """
        ids: set[int] = set()
        for r in requests:
            if r.id in self._ids or r.id in ids:
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
        self._ids |= ids
        self._scheduler.add(
            [Task(request=r, plan=p, matcher=m) for r, p, m in zip(requests, plans, matchers, strict=True)]
        )

    def _plan(self, sampling: Sampling) -> int:
        """The index of a Sampling's plan; Samplings that differ in max_tokens alone draw together."""
        sampling = replace(sampling, max_tokens=1)
        if sampling not in self._plan_of:
            self._plans.append(make_plan(sampling))
            self._plan_of[sampling] = len(self._plans) - 1
        return self._plan_of[sampling]

    def poll(self, timeout_s: float | None = None) -> list[Output]:
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
                self._runner.forward.refresh(force=self._renew)
                self._renew = False
                self._work(timeout_s)
        except BaseException:
            self._requeue()
            self._renew = True
            raise
        done, self._done = self._done, []
        return done

    def _work(self, timeout_s: float | None) -> None:
        """Lets in and decodes until something is finished."""
        start = time.monotonic()
        while not self._done and (self._rows or self._scheduler.queue):
            self._admit()
            if self._rows and not self._done:
                self._advance()
            if timeout_s is not None and time.monotonic() - start >= timeout_s:
                break

    def _admit(self) -> None:
        """Lets in what fits, prefills new prompts, draws first tokens."""
        live, scheduler, runner = len(self._rows), self._scheduler, self._runner
        if not scheduler.queue:
            return
        longest = int(self._book[MAX_NEW].max(initial=0))
        idle = max(1, scheduler.max_batch // 8)
        admitted = scheduler.admit(live=live, longest=longest, prefixes=self._prefixes, shelf=self._shelf, idle=idle)
        if not admitted:
            return
        self._entering = admitted
        if scheduler.kv_cache_tokens is not None:
            runner.shrink(live, max(longest, *(t.left for t, _ in admitted)), self._taken())
        for _, p in admitted:
            p.live += 1
        self._prefill(admitted)
        live = len(self._rows)
        runner.make_room(live, len(admitted))
        self._room(live + len(admitted), 0)
        block = runner.enter(live, admitted, self._plans, self._allowed(admitted))
        columns = [(0, t.left, len(p.tokens), t.plan) for t, p in admitted]
        self._book = np.concatenate([self._book, np.array(columns, np.int64).T], 1)
        self._rows, self._entering = self._rows + admitted, []
        self._stale = True
        self._collect(block, live)

    def _taken(self) -> dict[int, int]:
        """Rows in use of the prompts' stores, by bucket."""
        taken: dict[int, int] = {}
        for p in self._prefixes.values():
            taken[p.bucket] = taken.get(p.bucket, 0) + 1
        return taken

    def _prefill(self, admitted: Sequence[tuple[Task, Prefix]]) -> None:
        """Runs the new prompts, each once, from the first token that an earlier turn does not hold."""
        new = {p.key: p for _, p in admitted if p.hidden is None}
        fresh = sum(len(p.tokens) - p.filled for p in new.values())
        self._book_work(prefilled=fresh, reused=sum(len(p.tokens) for _, p in admitted) - fresh)
        if new:
            taken = self._taken()
            self._prefixes |= new  # now, since rows that leave between two chunks move prompts
            self._runner.prefill(list(new.values()), taken, self._meanwhile)
        for task, prefix in admitted:
            held = self._shelf.get(task.request.conversation)
            if held is not None and common_length(held.tokens, prefix.tokens) == len(held.tokens):
                self._shelf.drop(task.request.conversation)  # the prompt's own row has all of it

    def _meanwhile(self) -> None:
        """Live rows decode between two chunks of new prompts; with a bound on the cache, all memory is spoken for."""
        if self._rows and self._scheduler.kv_cache_tokens is None:
            self._advance()

    def _advance(self) -> None:
        """Decodes a few steps, no more than the row nearest to its limit may make; one, where a row is constrained."""
        runner, book, allowed = self._runner, self._book, self._allowed(self._rows)
        steps = min(STEPS_PER_READ if allowed is None else 1, int((book[MAX_NEW] - book[NUM_GENERATED]).min()))
        own = book[NUM_GENERATED].copy()
        runner.own.reserve(len(self._rows), int(own.max()) - 1 + steps, longest=int(book[MAX_NEW].max()))
        if self._stale:
            runner.regroup(self._rows, self._plans)
            self._stale = False
        self._book_work(steps=steps, row_steps=steps * len(self._rows))
        self._collect(runner.run(steps, own, int((book[PROMPT] + book[NUM_GENERATED]).max()), allowed), 0)

    def _allowed(self, rows: Sequence[tuple[Task, Prefix]]) -> Tensor | None:
        """What constraints allow next, uint8 [n, W]; None where no row has one."""
        matchers = [t.matcher for t, _ in rows] if self._grammars else []
        return self._grammars.rows(matchers) if self._grammars and any(matchers) else None

    def _book_work(self, **counts: int) -> None:
        """Adds to what was done since construction."""
        done = self._work_done
        self._work_done = replace(done, **{name: vars(done)[name] + n for name, n in counts.items()})

    def _collect(self, block: StepOutput, first: int) -> None:
        """Books what rows first.. drew, and lets out those that are finished."""
        steps, count = block.tokens.shape
        rows = np.arange(first, first + count)
        made = self._book[NUM_GENERATED, first : first + count]
        self._room(first + count, int(made.max()) + steps)
        columns = made[:, None] + np.arange(steps)
        self._tokens[rows[:, None], columns] = block.tokens.T
        self._logprobs[rows[:, None], columns] = block.logprobs.T
        made += steps  # a view of the book
        for row in range(first, first + count) if block.logits is not None else ():
            if self._rows[row][0].request.sampling.return_logits:
                self._rows[row][0].logits.append(block.logits[:, row - first])  # pyright: ignore[reportOptionalSubscript]
        ended = self._ended(block, first)
        if ended:
            self._leave(ended)

    def _room(self, rows: int, columns: int) -> None:
        """Makes the host's buffers large enough."""
        if rows > (have := self._tokens.shape)[0] or columns > have[1]:
            pad = [(0, max(n - h, h, 64) if n > h else 0) for n, h in zip((rows, columns), have, strict=True)]
            self._tokens, self._logprobs = np.pad(self._tokens, pad), np.pad(self._logprobs, pad)

    def _ended(self, block: StepOutput, first: int) -> dict[int, FinishReason]:
        """Rows that are finished, and why; what a row that stopped has made is cut to its stop token."""
        steps, count = block.tokens.shape
        book, ended = self._book[:, first : first + count], {}
        for row in np.flatnonzero(book[NUM_GENERATED] >= book[MAX_NEW]):
            ended[first + int(row)] = "length"
        for plan in np.unique(book[PLAN]):
            sampling = self._plans[plan].sampling
            mine = np.flatnonzero(book[PLAN] == plan)
            stops = np.isin(block.tokens[:, mine], sampling.stop_ids)
            for i in np.flatnonzero(stops.any(0)):
                book[NUM_GENERATED, mine[i]] += int(stops[:, i].argmax()) + 1 - steps
                ended[first + int(mine[i])] = "stop"
            for row in mine + first if sampling.stop else ():
                if self._cut(int(row), steps):
                    ended[int(row)] = "stop"
        self._follow(block.tokens[-1], first, ended)
        return ended

    def _follow(self, drawn: np.ndarray, first: int, ended: dict[int, FinishReason]) -> None:
        """Takes constrained rows one token on in their languages, and ends those where no token may come."""
        rows = enumerate(self._rows[first : first + len(drawn)], first)
        matchers = {row: t.matcher for row, (t, _) in rows if t.matcher and ended.get(row) != "stop"}
        for row, matcher in matchers.items():
            matcher.advance(int(drawn[row - first]))
        if self._grammars and matchers:
            self._grammars.refresh(list(matchers.values()))
        ended |= {row: m.ended for row, m in matchers.items() if m.ended}

    def _cut(self, row: int, steps: int) -> bool:
        """Cuts a row at the token that completes a stop string, if one of its last `steps` does."""
        task, made = self._rows[row][0], int(self._book[NUM_GENERATED, row])
        r = task.request
        before = [r.tokens[len(r.tokens) - r.offset :], *(p.tokens for p in task.parts)]
        whole = np.concatenate([*before, self._tokens[row, :made]])
        assert self._decode is not None
        place = completed_string(self._decode, whole, r.sampling.stop, fresh=min(steps, made))
        if place is None:
            return False
        self._book[NUM_GENERATED, row] = place - (len(whole) - made)
        return True

    def _leave(self, ended: dict[int, FinishReason]) -> None:
        """Lets rows out and closes the ranks."""
        for row in sorted(ended):
            task = self._rows[row][0]
            self._close_stay(row)
            self._ids.discard(task.request.id)
            self._done.append(task.output(ended[row]))
        self._depart(set(ended))

    def _depart(self, gone: set[int]) -> None:
        """Takes rows out; what they held stays for the next turn of their conversation, if it has one and fits."""
        turns: list[tuple[int, CachedSequence]] = []
        for row in sorted(gone):
            task, prefix = self._rows[row]
            if task.request.conversation is not None:
                own = int(self._book[NUM_GENERATED, row]) - 1  # the last token has no KV yet
                tokens = np.concatenate([prefix.tokens, self._tokens[row, :own]]).astype(np.int32)
                held = CachedSequence(tokens=tokens, layers=self._runner.take(row, prefix, own))
                turns.append((task.request.conversation, held))
        self._compact(gone)
        room = self._room_for(sum(len(h.tokens) for _, h in turns)) if turns else None
        for conversation, held in turns:
            self._shelf.put(conversation, held, room)

    def _room_for(self, tokens: int) -> int | None:
        """Tokens that may be held of earlier turns, new ones included; None = no bound. Frees what is not in use."""
        bound, longest = self._scheduler.kv_cache_tokens, int(self._book[MAX_NEW].max(initial=0))
        if bound is None:
            return None
        own = self._runner.own  # the rows that have left would take places too when the others grow
        unused = own.rows * max(0, longest - own.length)
        if self._runner.kv_tokens + unused + self._shelf.tokens + tokens > bound:
            self._runner.shrink(len(self._rows), longest, self._taken())
        return bound - sum(p.bucket for p in self._prefixes.values()) - len(self._rows) * longest

    def _close_stay(self, row: int) -> None:
        """Puts what a row made in this stay into its task."""
        task, part = self._rows[row][0], self._stay(row)
        logits = np.concatenate(task.logits)[: len(part.tokens)] if task.logits else None
        task.logits = []
        task.parts.append(replace(part, logits=logits))
        self._book_work(generated=len(part.tokens))

    def _stay(self, row: int) -> Part:
        """What a row has made in this stay."""
        made = slice(int(self._book[NUM_GENERATED, row]))
        tokens, logprobs = self._tokens[row, made].copy(), self._logprobs[row, made].copy()
        return Part(tokens=tokens, logprobs=logprobs, version=self.version)

    def _compact(self, gone: set[int]) -> None:
        """Moves the last rows into the holes; drops prompts that nobody reads."""
        n = len(self._rows) - len(gone)
        for row in gone:
            self._rows[row][1].live -= 1
        holes = [r for r in sorted(gone) if r < n]
        last = [r for r in range(n, len(self._rows)) if r not in gone]
        if holes:
            source, target = np.array(last), np.array(holes)
            self._runner.move_rows(source, target, int(self._book[NUM_GENERATED, source].max()))
            self._book[:, target] = self._book[:, source]
            for x in (self._tokens, self._logprobs):
                x[target] = x[source]
            for s, t in zip(last, holes, strict=True):
                self._rows[t] = self._rows[s]
        del self._rows[n:]
        self._book = self._book[:, :n].copy()
        self._stale = True
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
        out = [t.output("abort") for t in self._scheduler.remove(gone)]
        rows = {i for i, (t, _) in enumerate(self._rows) if t.request.id in gone}
        for row in sorted(rows):
            self._close_stay(row)
            out.append(self._rows[row][0].output("abort"))
        if rows:
            with self._runner.forward.running():
                self._depart(rows)
        out += [o for o in self._done if o.id in gone]  # finished in a poll that was cut short
        self._done = [o for o in self._done if o.id not in gone]
        self._ids -= {o.id for o in out}
        return out

    def update(self, version: int, weights: Iterator[tuple[str, Tensor]] | None = None) -> None:
        """Takes a new policy version. Sequences under way go on under it, with their KV made again.

        Args: version: stamped on tokens from now on. weights: all of them by name, for an engine with weights of its
            own; else None, since the parameters are the trainer's.
        Raises: EngineError: weights were given to the one, or none to the other, or they don't fit.
        """
        self._model.check_given(weights)
        self._requeue()
        self._renew, self.version = True, version
        self._model.take(weights)

    def _requeue(self) -> None:
        """Takes all rows out, keeping what they made, and drops all KV."""
        for row in range(len(self._rows)):
            self._close_stay(row)
        self._scheduler.resume([t for t, _ in (*self._rows, *self._entering)])
        self._rows, self._entering, self._book = [], [], np.zeros((4, 0), np.int64)
        self._prefixes.clear()
        self._shelf.clear()
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
        self.abort(set(self._ids))
        self._shelf.clear()
        self._runner.drop()
        self._runner.forward.drop()
        self._done, self._closed = [], True

    def peek(self, ids: Iterable[int]) -> dict[int, PartialOutput]:
        """All tokens made so far, without computing.

        Args: ids: of requests; those that are not in flight are passed over.
        Returns: by id, what each has made; `poll(timeout_s=0.0)` makes a few tokens more.
        """
        asked = set(ids)
        found = {t.request.id: t.piece() for t in self._scheduler.queue if t.request.id in asked}
        for row, (task, _) in enumerate(self._rows):
            if task.request.id in asked:
                found[task.request.id] = task.piece(self._stay(row))
        return found

    def stats(self) -> EngineStats:
        """Where it stands, and what it has done since it was built."""
        scheduler = self._scheduler
        return replace(
            self._work_done,
            live=len(self._rows),
            waiting=len(scheduler.queue),
            held=len(self._shelf),
            max_batch=scheduler.max_batch,
            kv_tokens=self._runner.kv_tokens + self._shelf.tokens,
            kv_tokens_bound=scheduler.kv_cache_tokens,
            kv_bytes=self.kv_bytes,
            generated=self._work_done.generated + int(self._book[NUM_GENERATED].sum()),
        )

    @property
    def kv_bytes(self) -> int:
        """KV memory held now."""
        return self._runner.kv_bytes + self._shelf.bytes

    @property
    def weight_bytes(self) -> int:
        """Memory of what is derived from the weights (packed copies); the weights themselves are not counted."""
        return self._runner.forward.bytes

    @property
    def backends(self) -> dict[str, str]:
        """What runs, in words, with the reason where something stepped aside; never chosen by the clock."""
        steps = "eager" if self._runner.graphs is None else self._runner.graphs.path
        return {**self._runner.forward.backends, "steps": steps}
