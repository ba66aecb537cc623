"""ModelWorker: one model with its optimizer, and the methods that learners call.

These methods hide micro-batches, packing, shared prefixes, mixed precision and sharding; a loss sees whole sequences in
fp32 or better. Rule 1 of docs/design.md (weights once, then only sums) holds here: for each micro-batch `_run` sums the
losses with `total = aggregate(losses, weights)`, which is (weights * losses).sum(), and runs `total.backward()`.
Nothing divides.

Dim legend: N sequences, S tokens of a batch, s tokens of a micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn

from whet.config import OptimConfig, RoleConfig
from whet.errors import ConfigError, DataError
from whet.metrics import Last, Mean, Sum, merge
from whet.models.backends import training_backends
from whet.models.fast_layers import FastLayers
from whet.models.forward import TeacherTarget, head_states, token_stats
from whet.models.loaded_model import LoadedModel
from whet.models.lora_layers import merged_weights
from whet.models.quantized import cast_parameters, quantized_layer_names
from whet.ops import LogitsProcessors, aggregate, segment_count
from whet.packing.bin_packing import model_cost
from whet.packing.micro_batch import MicroBatch
from whet.packing.path_keys import path_keys
from whet.packing.plan_cache import PlanCache
from whet.parallel.placement import Placement
from whet.train.loss_inputs import check_loss_shapes, has_unit_weights, make_loss_inputs
from whet.train.metric_reduction import Metrics, Reductions, reduce_metrics, unpack_metrics
from whet.train.model_files import ModelFiles
from whet.train.optimizer import Optim, total_norm
from whet.train.out_of_memory import log_smaller_budget, out_of_memory_note, smaller_budget
from whet.types import LossInputs, TokenBatch, TokenStats
from whet.util.device import empty_cache
from whet.util.tensor_subclasses import is_sharded
from whet.util.transfer import to_device

if TYPE_CHECKING:
    from whet.parallel.shards import ShardReader

__all__ = ["Allowed", "Divergence", "Loss", "LossNeeds", "ModelWorker"]

T = TypeVar("T")
Loss = Callable[[LossInputs], tuple[Tensor, dict[str, Tensor]]]
Allowed = Callable[[MicroBatch], Tensor]
"""fn(micro-batch) -> uint8 [s, W]: for each target, a bit for each token that it could be sampled from."""
BF16_MULTIPLE = 32
"""Micro-batches in bf16 on a CPU are padded to a multiple of this: oneDNN prepares, and keeps in memory, a kernel of
megabytes for each new shape of attention."""


@dataclass(frozen=True)
class Divergence:
    """A request for x.divergence, of losses that compare whole distributions with a teacher's.

    The teacher runs the trained model's own micro-batches, without a gradient, so its states of a whole batch are never
    in memory. It needs the same token budget, and must be packable if the trained model is.

    Example: worker.forward_backward(batch, loss, divergence=Divergence(teacher, gkd_beta=0.5)).
    """

    teacher: ModelWorker
    """A worker that is not trained."""
    gkd_beta: float = 0.5
    """β: 0 the forward KL, 1 the reverse KL; see ops.generalized_jsd."""


class LossNeeds(TypedDict, total=False):
    """What a loss reads besides the log-probabilities."""

    entropy: bool
    """x.entropy."""
    constants: Collection[str]
    """These of types.loss.CONSTANTS: "correct" for x.correct."""
    scores: bool
    """x.scores, of a model with a value head."""
    divergence: Divergence | None
    """x.divergence, from this teacher's distribution."""


class ModelWorker:
    """One model behind a few methods: logprobs, values, forward_backward, optim_step, weights, state.

    Args:
        loaded: the model, from models.load_model.
        optim: its optimizer; None = a model that is not trained (a reference).
        dtype: the dtype that the model computes in; None = its own.
        processors: make the sampler's distribution, whose logprobs are computed.
        allowed: the tokens that a constraint allows; required if the processors are constrained.
        max_tokens: the token budget of a micro-batch.
        saturating_tokens: the size from which on a larger micro-batch is no faster; None = unknown.
        max_sequences: the number of sequences of a micro-batch at most; None = limited by the token budget only.
        config: the configuration of the role, for the run's settings; None = a module was given.
        placement: where its tensors lie; None = on the model's device, in one process.
        plan_cache: shared with workers that run the same batches; None = a cache of its own.
        seed: of the draws of an adapter's dropout.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        optim: OptimConfig | Callable[..., Any] | None = None,
        dtype: torch.dtype | None = None,
        processors: LogitsProcessors | None = None,
        allowed: Allowed | None = None,
        max_tokens: int = 16384,
        saturating_tokens: int | None = None,
        max_sequences: int | None = None,
        config: RoleConfig | None = None,
        placement: Placement | None = None,
        plan_cache: PlanCache | None = None,
        seed: int = 0,
    ) -> None:
        if loaded.is_view and optim is not None:
            raise ConfigError(
                f"{loaded.name} is a read-only view of another model (its adapter switched off), so it can't be "
                "trained; give the optimizer to that model's worker"
            )
        self.loaded = loaded
        self.config = config
        self.processors = processors or LogitsProcessors()
        self.allowed = allowed
        self.max_tokens = max_tokens
        self.saturating_tokens = saturating_tokens
        self.max_sequences = max_sequences
        self.max_read_sequences = max_sequences
        self.plan_cache = plan_cache or PlanCache()
        self.seed = seed
        self.version = 0
        self.on_micro_batch: Callable[[int, int], object] = lambda done, total: None
        """Called before each micro-batch of a batch, with the number of those before it and of all."""
        self.tokens_after_restart: int | None = None
        """The token budget after a restart of several processes, if this one ran out of memory before it."""
        self._smaller_tokens: dict[bool, int] = {}
        """The token budgets of passes with a gradient (True) and without one, after some that ran out of memory."""
        self._flops = 0.0
        self._slowest_work = self._mean_work = 0.0
        self.replaced = False
        """Whether an untrained model has other weights than the loaded ones: checkpoints then hold them too."""
        self.cost = model_cost(loaded.module)
        """The cost model that balances the micro-batches of a batch."""
        if optim is None and not loaded.is_view:  # a view's module is trained by its owner
            loaded.module.requires_grad_(False)
        elif optim is not None and loaded.adapter is None and (bits := quantized_layer_names(loaded.module)):
            raise ConfigError(
                f"{loaded.name} can't be trained as it is: {bits[0]} and {len(bits) - 1} other layers are held in "
                "4 bits; set lora to train an adapter on it, or leave out quantization"
            )
        self.placement = placement or Placement()
        dtype = self.placement.prepare(loaded.module, dtype)
        norm = lambda grads: self.placement.grad_norm(grads, total_norm)  # a process may have a part of each gradient
        self.optim = None if optim is None else Optim(loaded.module, optim, dtype=dtype, norm=norm)
        if dtype is not None and not loaded.is_view:
            cast_parameters(loaded.module, dtype)
        self.fast_layers: FastLayers | None = self.placement.find_fast_layers(loaded.module)
        """whet's own forwards for some layers; None = the module's own only."""
        self.placement.attach(loaded.module, self.optim)

    @property
    def module(self) -> nn.Module:
        """The Hugging Face module, parameters under their own names."""
        return self.loaded.module

    @property
    def device(self) -> torch.device:
        """The device that the model computes on, also while its weights are on another one."""
        return self.placement.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        return self.placement.dtype

    @property
    def backends(self) -> dict[str, str]:
        """The implementations of its attention and its layers, with the reasons; see models.backends."""
        backends = training_backends(self.loaded, self.dtype, self.device)
        if self.device.type == "cuda" and self.fast_layers is not None and len(self.fast_layers):
            backends["layers"] = f"torch, {len(self.fast_layers)} of them in fewer kernels or less memory"
        return backends

    def limit_tokens(self, tokens: int) -> None:
        """Lowers the token budget of updates, where all sequences fit into it."""
        self._smaller_tokens[True] = min(tokens, self._smaller_tokens.get(True, tokens))

    def plan(self, total_updates: int | None) -> None:
        """Tells the learning-rate schedule how many updates the run will make."""
        if self.optim is not None:
            self.optim.plan(total_updates)

    def set_max_sequences(self, *, training: int | None, reading: int | None) -> None:
        """Caps the sequences of one pass, besides the token budget; None = as before. `reading` follows `training`."""
        caps = [n for n in (training, self.max_sequences) if n is not None]
        self.max_sequences = min(caps, default=None)
        caps = [n for n in (reading or training, self.max_read_sequences) if n is not None]
        self.max_read_sequences = min(caps, default=None)

    # ---- reading -------------------------------------------------------------------------------------------------

    def logprobs(
        self,
        batch: TokenBatch,
        *,
        entropy: bool = False,
        processors: LogitsProcessors | None = None,
        max_sequences: int | None = None,
    ) -> TokenStats:
        """Log-probability (and entropy) of every completion token.

        Args:
            batch: N sequences.
            entropy: also the entropy of the distribution before each token, in nats.
            processors: instead of the worker's own.
            max_sequences: sequences of one forward pass at most.
        Returns: TokenStats of [S], detached, on the CPU.
        """
        names = ("logprobs", "entropy") if entropy else ("logprobs",)
        return self._read(batch, names, processors or self.processors, max_sequences)

    def values(self, batch: TokenBatch) -> Tensor:
        """Returns a critic's value of the state before each token: [S], detached, on the CPU."""
        values = self._read(batch, ("values",), self.processors).values
        assert values is not None
        return values

    def scores(self, batch: TokenBatch) -> Tensor:
        """Returns the value head's score at the last token of each sequence: [N], detached, on the CPU.

        Raises: ConfigError: the model has no value head.
        """
        scores = self._read(batch, ("scores",), self.processors).scores
        assert scores is not None
        return scores

    @torch.no_grad()
    def _read(
        self, batch: TokenBatch, names: tuple[str, ...], processors: LogitsProcessors, max_sequences: int | None = None
    ) -> TokenStats:
        apart = batch.replace(unit_of=None, unit_weights=None)  # what is read of a sequence needs no other
        cut = (apart, max_sequences or self.max_read_sequences, "scores" in names)

        def read() -> TokenStats:
            out: dict[str, Tensor] = {}
            own_passes = self._own_passes(*cut)
            for i, (micro, counts) in enumerate(own_passes):
                self.on_micro_batch(i, len(own_passes))
                stats = self._stats(micro, processors, entropy="entropy" in names, outputs={*names} - {"entropy"})
                for name in names:
                    column = getattr(stats, name)
                    size, at = (
                        (batch.num_sequences, micro.sequences)
                        if name == "scores"
                        else (batch.num_tokens, micro.token_index)
                    )
                    whole = out.setdefault(name, column.new_zeros(size))
                    if counts:
                        whole.index_copy_(0, at, column)
            return TokenStats(**{name: whole.cpu() for name, whole in self.placement.gather_columns(out).items()})

        with self.placement.during("read"):
            return self._with_less_memory(read, *cut)

    def _stats(
        self,
        micro: MicroBatch,
        processors: LogitsProcessors,
        *,
        entropy: bool,
        constants: Collection[str] = (),
        outputs: Collection[str] | None = None,
        teacher: TeacherTarget | None = None,
    ) -> TokenStats:
        """Runs one forward pass. Returns: the model's statistics of its targets."""
        # the tokens that a constraint allows at each target; None = there is no constraint here
        matters = processors.constrained and not processors.full and self.loaded.lm_head.kind != "none"
        allowed = self.allowed(micro) if matters and self.allowed else None
        part = self.placement.split_tokens(micro)
        if allowed is not None and part.share is not None:
            allowed = allowed.index_select(0, part.share.targets.to(allowed.device))
        options = {"constants": constants, "allowed": allowed, "outputs": outputs, "teacher": teacher}
        with self.layers(), self.loaded.use_view():
            stats = self.placement.forward(
                lambda: token_stats(self.loaded, part, processors=processors, entropy=entropy, **options)  # pyright: ignore
            )
        return self.placement.gather_tokens(stats, part)

    @torch.no_grad()
    def _teacher_target(self, micro: MicroBatch, divergence: Divergence | None) -> TeacherTarget | None:
        """Returns the teacher's states of one forward pass; None = there is no teacher."""
        if divergence is None:
            return None
        teacher = divergence.teacher
        temperature, part = self.processors.temperature or 1.0, teacher.placement.split_tokens(micro)
        with teacher.layers(), teacher.loaded.use_view():
            states = teacher.placement.forward(lambda: head_states(teacher.loaded, part, temperature))
        return states, divergence.gkd_beta

    def layers(self) -> AbstractContextManager[None]:
        """Returns a context for forward and backward passes that runs layers by whet's faster forwards."""
        return nullcontext() if self.fast_layers is None else self.fast_layers.enabled()

    def micro_batches(
        self, batch: TokenBatch, max_sequences: int | None, at_end: bool = False, trained: bool = False
    ) -> list[MicroBatch]:
        """Packs a batch into forward passes of similar cost within the token budget; deterministic.

        There are as few passes as possible, unless smaller ones are as fast: see `saturating_tokens`.

        Args: max_sequences: of one pass. at_end: run completions to their last token, for scores. trained: with a
            gradient. After some that ran out of memory, passes of their kind are smaller.
        Raises: DataError: a sequence or a unit over the token budget.
        """
        return [micro.to(self.device) for micro in self._planned_within(batch, max_sequences, at_end, trained)]

    def _planned_within(
        self, batch: TokenBatch, max_sequences: int | None, at_end: bool, trained: bool
    ) -> list[MicroBatch]:
        """Returns the passes on the host, with the smaller token budget where all sequences and units fit into it."""
        if (smaller := self._smaller_tokens.get(trained)) is not None:
            try:
                return self._planned(batch, max_sequences, at_end, min(smaller, self.max_tokens))
            except DataError:  # a sequence or a unit of this batch is longer
                pass
        return self._planned(batch, max_sequences, at_end, self.max_tokens)

    def _planned(self, batch: TokenBatch, max_sequences: int | None, at_end: bool, max_tokens: int) -> list[MicroBatch]:
        return self.plan_cache.get(
            batch,
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            packable=self.loaded.packable,
            at_end=at_end,
            cost=self.cost,
            attention=self.loaded.attention,
            saturating_tokens=self.saturating_tokens,
            multiple=BF16_MULTIPLE if self.device.type == "cpu" and self.dtype == torch.bfloat16 else 1,
            num_ranks=self.placement.data_size,
        )

    def _own_passes(
        self, batch: TokenBatch, max_sequences: int | None, at_end: bool, trained: bool = False
    ) -> list[tuple[MicroBatch, bool]]:
        """Returns the passes of a batch that this process runs, and whether each counts. Args: trained: count their
        work.
        """
        passes = self.micro_batches(batch, max_sequences, at_end, trained)
        if trained:
            work, size = [self._work(micro) for micro in passes], self.placement.data_size
            self._slowest_work += sum(max(work[i : i + size]) for i in range(0, len(work), size))
            self._mean_work += sum(work) / size
        self.placement.check_same_passes(
            {
                "sequences": batch.num_sequences,
                "tokens": batch.num_tokens,
                "passes": len(passes),
                "weight version": self.version,
                "digest": self.plan_cache.digest.hex(),
            }
        )
        return self.placement.split_passes(passes)

    # ---- training ------------------------------------------------------------------------------------------------

    def forward_backward(
        self,
        batch: TokenBatch,
        loss: Loss,
        *,
        reductions: Reductions | None = None,
        **needs: Unpack[LossNeeds],
    ) -> Metrics:
        """Adds the gradient of (weights * loss).sum() over the whole batch.

        Args:
            batch: with `weights` [S], or `unit_weights` [U], made once per optimizer step.
            loss: per token, [s], where the batch has `weights`; per unit, [u], where it has `unit_weights`.
            reductions: how a loss's metric is reduced: name -> {label: how}, how one of REDUCTIONS; its mean under its
                own name if not named.
            needs: what the loss reads besides the log-probabilities; see LossNeeds.
        Returns: "loss" (the sum) and the loss's metrics, over the tokens of the mask, or over the units with a trained
            token.
        An update that runs out of memory starts again with micro-batches of half the tokens, unless gradients of other
        calls have been added already. So do `logprobs`, `values`, `scores` and `evaluate`.

        Raises: DataError: the batch has no weights, or both kinds; a loss or a metric of another shape.
            OutOfMemoryError: one sequence or unit alone does not fit.
        """
        with self.placement.during("backward"), _teacher_on_device(needs.get("divergence")):
            run = lambda: self._run(batch, loss, needs, reductions or {}, backward=True)
            return self._with_less_memory(run, batch, self.max_sequences, needs.get("scores", False), trained=True)

    def _with_less_memory(
        self, run: Callable[[], T], batch: TokenBatch, max_sequences: int | None, at_end: bool, trained: bool = False
    ) -> T:
        """Runs all passes of a batch, again with smaller ones where they run out of memory.

        Args: run: the passes. batch, max_sequences, at_end, trained: that `micro_batches` cuts them from.
        Raises: OutOfMemoryError: one sequence or unit alone does not fit, or the passes can't run again.
        """
        several, added = not self.placement.repeats_passes, self.optim is not None and self.optim.has_gradient
        is_repeatable = not several and not (trained and added)
        counted = self._flops, self._slowest_work, self._mean_work
        cut = (batch, max_sequences, at_end)
        while True:
            try:
                return run()
            except torch.OutOfMemoryError as error:
                last = self._smaller_tokens.get(trained, self.max_tokens)
                used = max(micro.num_tokens for micro in self._planned_within(*cut, trained))
                is_planned = is_repeatable or (several and trained)
                smaller = smaller_budget(lambda tokens: self._planned(*cut, tokens), used) if is_planned else None
                if smaller is None or several:
                    self.tokens_after_restart = smaller
                    retried = {"is_repeatable": is_repeatable, "after_restart": smaller, "trained": trained}
                    error.add_note(out_of_memory_note(self.max_tokens, last, **retried))
                    raise
            # the error, which held the tensors of the pass, is gone here
            self._flops, self._slowest_work, self._mean_work = counted
            self._smaller_tokens[trained] = smaller
            log_smaller_budget(used, smaller, trained)
            if trained and self.optim is not None:
                self.optim.clear_gradients()
            empty_cache(self.device)

    @torch.no_grad()
    def evaluate(
        self,
        batch: TokenBatch,
        loss: Loss,
        *,
        reductions: Reductions | None = None,
        **needs: Unpack[LossNeeds],
    ) -> Metrics:
        """Returns the metrics that forward_backward would return, computed without a gradient."""
        with self.placement.during("read"), _teacher_on_device(needs.get("divergence")):
            run = lambda: self._run(batch, loss, needs, reductions or {}, backward=False)
            return self._with_less_memory(run, batch, self.max_sequences, needs.get("scores", False))

    def _run(
        self, batch: TokenBatch, loss: Loss, needs: LossNeeds, reductions: Reductions, *, backward: bool
    ) -> Metrics:
        entropy, constants = needs.get("entropy", False), needs.get("constants", ())
        per_unit = has_unit_weights(batch)
        labels: list[list[tuple[str, str]]] = []
        numbers: list[Tensor] = []  # of each micro-batch, on the device: read once, since a GPU is waited for
        token_columns, sequence_columns, unit_weights = _columns_on(self.device, batch)
        own_passes = self._own_passes(batch, self.max_sequences, needs.get("scores", False), trained=backward)
        for i, (micro, counts) in enumerate(own_passes):
            self.on_micro_batch(i, len(own_passes))
            self.placement.set_gradient_sync(i == len(own_passes) - 1)
            with self._dropout(micro) if backward else nullcontext():
                teacher = self._teacher_target(micro, needs.get("divergence"))
                stats = self._stats(micro, self.processors, entropy=entropy, constants=constants, teacher=teacher)
                x = make_loss_inputs(token_columns, sequence_columns, micro, stats)
                losses, values = loss(x)
                weights = x.need("weights") if unit_weights is None else unit_weights.index_select(0, micro.units)
                weights = weights.to(losses.dtype)
                check_loss_shapes(losses, values, weights, per_unit)
                total = aggregate(losses, weights if counts else torch.zeros_like(weights))
                if backward:
                    with self.layers():  # checkpointed layers run again
                        total.backward()
                    self._flops += 6.0 * self._work(micro) / self.placement.pass_size
            if not counts:
                continue
            if per_unit:
                mask = segment_count(x.mask, x.unit, x.num_units) > 0  # units with a trained token
                segments = (torch.arange(x.num_units, device=self.device), x.num_units)
            else:
                mask, segments = x.mask, (x.sequence, x.num_sequences)
            names, sums = reduce_metrics(values, mask, weights, reductions, *segments)
            labels.append(names)
            numbers.append(torch.stack([total.detach().double(), *sums]))
        read = torch.cat(numbers).tolist() if numbers else []
        return merge({"loss": Sum(0.0)}, *self.placement.gather_results(list(unpack_metrics(labels, read))))

    def _work(self, micro: MicroBatch) -> int:
        """Multiply-adds of a forward pass with the entries of the matrices."""
        return self.cost.token * micro.num_tokens + self.cost.target * len(micro.targets)

    def _dropout(self, micro: MicroBatch) -> AbstractContextManager[None]:
        """Returns a context for a training pass, in which an adapter's dropout is on."""
        adapter = self.loaded.adapter
        if adapter is None or not adapter.dropout:
            return nullcontext()
        keys = path_keys(self.placement.split_tokens(micro))
        return adapter.dropout_on(keys.flatten().to(self.device), self.seed, self.updates)

    def pop_flops(self) -> float:
        """Returns the FLOPs of this process's training passes since the last call.

        6 N for each token that is run, N the matrices' entries: a product and its two gradients. Attention between
        tokens and the second forward pass of checkpointing do not count, frozen weights count like trained ones.
        """
        flops, self._flops = self._flops, 0.0
        return flops

    def pop_imbalance(self) -> float:
        """Returns how much longer the training passes since the last call took than if all processes had had equal
        work.

        The processes run their passes in rounds, and in each round all wait for the longest pass. So this is the sum of
        the most work of each round, over the mean work of a process; 1 = balanced, nan = there were no passes.
        Work is the FLOPs of `pop_flops`; a pass that a process runs only because the others wait for it counts none.
        """
        slowest, mean, self._slowest_work, self._mean_work = self._slowest_work, self._mean_work, 0.0, 0.0
        return slowest / mean if mean else float("nan")

    @property
    def updates(self) -> int:
        """The number of optimizer steps, over all resumes; skipped ones don't count."""
        return 0 if self.optim is None else self.optim.updates

    def optim_step(self) -> Metrics:
        """Clips the gradient, steps, and clears it. A gradient that isn't finite is skipped, cleared and counted.

        Returns: "grad_norm" (before clipping), "learning_rate" (of this step), "optim/skipped" (0 or 1).
        """
        assert self.optim is not None, "this worker was made without an optimizer"
        with self.placement.during("step"):
            norm, rate, skipped = self.optim.step()
        metrics: Metrics = {"learning_rate": Last(rate), "optim/skipped": Sum(float(skipped))}
        return metrics if skipped else {**metrics, "grad_norm": Mean(norm, 1.0)}

    # ---- weights and state ---------------------------------------------------------------------------------------

    def rollout_weights(self, *, parts: bool = False) -> AbstractContextManager[nn.Module]:
        """Returns a context for engines: the module's parameters are plain tensors in the dtype that it computes in.

        Args: parts: as of Placement.weights.
        Example: `with worker.rollout_weights(): outputs = engine.step()`.
        """
        return self.placement.weights(parts=parts)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, compute-dtype tensor), one at a time, each shared tensor under each of its names.

        A model with an adapter gives merged weights under its base's names. A score head next to an LM head is left
        out, since it is not a part of the language model.
        """
        besides = self.loaded.score_head if self.loaded.lm_head.kind != "none" else None
        weights = merged_weights(self.module)
        for name, w in weights:
            if besides is None or name != "score.weight":
                yield name, w.to(self.dtype) if is_sharded(w) else w  # trained shards are fp32

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(the module's own name, tensor) of the trained weights; of an adapted model only the adapter."""
        yield from ((name, p.detach()) for name, p in self.module.named_parameters() if p.requires_grad)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], mixup_alpha: float = 1.0) -> None:
        """Moves the weights of a model that is not trained toward another's: p <- p + mixup_alpha (w - p), in place.

        mixup_alpha=1 copies them. A smaller value after each step keeps an exponential moving average with decay
        1 - mixup_alpha.

        Args: weights: (name, tensor), from `named_weights`. mixup_alpha: between 0 and 1; 1 = a copy.
        Raises: ConfigError: the model is trained, or has no parameter of that name.
        """
        if self.optim is not None or self.loaded.is_view:
            raise ConfigError(
                "load_weights is for a model that is only read (a reference); this one "
                + ("has an optimizer" if self.optim is not None else "is a view of the model that is trained")
            )
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        seen: set[int] = set()
        for name, weight in weights:
            if name not in parameters:
                raise ConfigError(f"this model has no parameter {name}; both models must have the same architecture")
            if id(parameters[name]) not in seen:  # a shared tensor comes under each of its names
                parameters[name].lerp_(weight.to(parameters[name]), mixup_alpha)
            seen.add(id(parameters[name]))
        self.replaced = True

    @property
    def files(self) -> ModelFiles:
        """The model's files in a checkpoint."""
        return ModelFiles(self.loaded, self.optim)

    def save(self, folder: Path | None) -> None:
        """Writes everything that a resumed worker needs into a folder: weights, optimizer, schedule, version.

        The weights have the module's own names, and config.json is beside them, so transformers loads the folder too.
        Of a model with an adapter only the adapter is written, in PEFT's format. Args: folder: None = another rank
            writes, and this one gives it its shards; all ranks must call it.
        """
        with self.placement.during("save"), self.placement.whole_module() as module:
            self._files_of(module).write(folder, self.version)

    def shards(self) -> tuple[dict[str, Tensor], Any]:
        """Returns what a resumed worker needs: this process's shards of the tensors, and plain state.

        See ModelFiles.shards; the tensors are the worker's own, which the next update changes.
        """
        with self.placement.during("save"):
            self.placement.reshard()
            return self.files.shards()

    def load(self, folder: Path, shards: ShardReader | None = None) -> None:
        """Restores what `save` wrote. Args: shards: of a sharded checkpoint. Raises CheckpointError if it doesn't fit
        this model.
        """
        with self.placement.during("load"):
            self.version = self.files.read(folder) if shards is None else self.files.read_shards(folder, shards)

    def export(self, folder: Path | None, tokenizer: Any = None, *, merge: bool = False, dtype: str = "auto") -> None:
        """Writes the model in Hugging Face's format, from the fp32 masters where there are any.

        If the model has an adapter, it writes only that, in PEFT's format. Of several processes all must call it; rank
        0 writes, and the files are there when it returns in any of them.
        Args: folder: None = rank 0 is given one. merge: write the whole model with the adapter merged. dtype: of the
            weights; auto = that of the model's files, fp32 for an adapter.
        """
        with self.placement.during("export"), self.placement.whole_module() as module:
            files = self._files_of(module)
            write = lambda: None if folder is None else files.export(folder, tokenizer, merge=merge, dtype=dtype)
            self.placement.call_on_writer(write)

    def _files_of(self, module: nn.Module) -> ModelFiles:
        """Returns the model's files. Args: module: with the weights to write, which may be a copy that is not
        sharded.
        """
        if module is self.module:
            return self.files
        copy = dataclasses.replace(self.loaded, module=module)
        return ModelFiles(copy, self.optim, has_masters=True)

    def close(self) -> None:
        """Frees gradients and optimizer state."""
        if self.optim is not None:
            self.optim.close()
        self.optim = None
        self.placement.release()


def _columns_on(device: torch.device, batch: TokenBatch) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
    """Returns the columns of a batch's tokens and sequences, and its units' weights, on a device; micro-batches have
    tokens.
    """
    tokens = {name: c for name, c in batch.token_columns.items() if name != "tokens"}
    sequences = batch.sequence_columns
    weights = [] if batch.unit_weights is None else [batch.unit_weights]
    moved = iter(to_device([*tokens.values(), *sequences.values(), *weights], device))
    return dict(zip(tokens, moved)), dict(zip(sequences, moved)), next(moved, None)


def _teacher_on_device(divergence: Divergence | None) -> AbstractContextManager[None]:
    """Returns a context in which the weights of a divergence's teacher are on the device that computes."""
    return nullcontext() if divergence is None else divergence.teacher.placement.during("read")
