"""A rehearsal before the first step: what takes the most memory runs once, so that a run that does not fit ends now.

The largest micro-batch is scored, and then runs forward and backward next to as much memory as the optimizers' states
will take: kernels for both are compiled and compared here. Then the keys and values of a whole rollout are allocated
next to both. Weights, optimizers and random numbers stay as they are, and gradients are dropped. An update that runs
out of memory goes on with smaller micro-batches (train/out_of_memory.py), which the run then keeps.
Left out on purpose: the workspace of the optimizer's step, and the memory of vLLM and SGLang.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.config import Role
from whet.errors import ConfigError
from whet.models.config_sizes import kv_bytes_per_token
from whet.train.memory_plan import GB, MOMENT_BYTES
from whet.train.role_trainer import RoleTrainer
from whet.train.role_workers import RoleWorkers
from whet.train.worker import ModelWorker
from whet.types import Example, LossInputs, TokenBatch, TrainSequence
from whet.util.device import empty_cache
from whet.util.tensor_subclasses import local_part

__all__ = ["rehearse"]

log = logging.getLogger("whet")


def rehearse(models: RoleWorkers, prompt: int, completion: int, *, kv_tokens: int = 0) -> None:
    """Runs the largest micro-batch of each trained model, and allocates the cache of a rollout, in the memory of a run.

    Args: models: of the run, before its first step. prompt, completion: tokens of the longest sequence. kv_tokens: of
        the engine's cache; 0 = there is no engine, or it has its own memory.
    Raises: ConfigError: one of them does not fit with any setting that a run may choose; the settings to change.

    Example: `rehearse(cluster, 512, 1024, kv_tokens=98304)`.
    """
    start, tokens = time.perf_counter(), 0
    workers = [trainer.worker for trainer in models.trainers.values()]
    if any(worker.processors.constrained for worker in workers):
        log.info("rehearsal: left out, since random tokens break the rollout's constraint")
        return
    states = [x for worker in workers for x in _optimizer_state(worker)]
    for trainer in models.trainers.values():
        tokens = max(tokens, _run_update(trainer, prompt, completion))
        models.clear_plans()
    device = workers[0].device
    empty_cache(device)
    if kv_tokens:
        _allocate_cache(workers[0], kv_tokens)
    del states
    empty_cache(device)
    peak = ""
    if device.type == "cuda":
        peak = f"; peak {torch.cuda.max_memory_allocated(device) / GB:.1f} GB"
        torch.cuda.reset_peak_memory_stats(device)
    cache = f" and a cache of {kv_tokens:,} tokens" if kv_tokens else ""
    seconds = time.perf_counter() - start
    log.info("rehearsal: an update with %d tokens in a micro-batch%s fit%s (%.1f s)", tokens, cache, peak, seconds)


def _optimizer_state(worker: ModelWorker) -> list[Tensor]:
    """Memory of the size of an optimizer's state; [] where it has one already, or it lies on the host in an update."""
    assert worker.optim is not None, "a trained model has an optimizer"
    if worker.optim.updates or worker.placement.offloads:
        return []
    name = "" if worker.optim.config is None else worker.optim.config.name
    size = MOMENT_BYTES.get(name, 8.0)
    own = map(local_part, worker.optim.masters.values())
    return [torch.empty(int(size * m.numel()), dtype=torch.uint8, device=worker.device) for m in own]


def _run_update(trainer: RoleTrainer, prompt: int, completion: int) -> int:
    """Runs the largest micro-batch forward and backward, and drops the gradient. Returns: its tokens."""
    worker = trainer.worker
    assert worker.optim is not None, "a trained model has an optimizer"
    batch = _largest_batch(worker, prompt, completion)
    try:
        if trainer.role is Role.ACTOR:
            worker.logprobs(batch)
        worker.forward_backward(batch, _loss, **trainer.needs)
        return max(micro.num_tokens for micro in worker.micro_batches(batch, worker.max_sequences, trained=True))
    except torch.OutOfMemoryError as error:
        section = trainer.role.section
        raise ConfigError(
            f"the rehearsal before the first step ran out of memory in an update of the {trainer.role.value}, with one "
            f"sequence of {prompt + completion} tokens in a micro-batch; set {section}.gradient_checkpointing=full, "
            f"{section}.optim.name=adamw8bit, {section}.lora.r=16, a smaller rollout.max_tokens_to_generate, or "
            "trainer.rehearse=false to go without a rehearsal"
        ) from error
    finally:
        worker.optim.clear_gradients()
        worker.pop_flops()
        worker.pop_imbalance()


def _largest_batch(worker: ModelWorker, prompt: int, completion: int) -> TokenBatch:
    """Returns completions of one prompt, as many as a micro-batch of each process holds: its rows have the most
    targets.
    """
    ids, count = worker.loaded.num_ids, max(1, (worker.max_tokens - prompt) // completion)
    count = min(count, worker.max_sequences or count)
    rng = np.random.default_rng(0)  # ids that differ share nothing but the prompt
    draw = lambda length: rng.integers(0, ids, length).astype(np.int32)
    examples = []
    for row in range(worker.placement.data_size):
        prefix, mask = draw(prompt), np.ones(completion, dtype=bool)
        sequences = [TrainSequence(prefix=prefix, tokens=draw(completion), mask=mask) for _ in range(count)]
        examples.append(Example(sequences=tuple(sequences), row=row))
    batch = TokenBatch.from_examples(examples, version=worker.version)
    return batch.replace(weights=torch.full((batch.num_tokens,), 1.0 / batch.num_tokens))


def _loss(x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the sum of all outputs of the model that have a gradient."""
    scores = None if x.scores is None else x.scores.index_select(0, x.sequence)
    outputs: list[Any] = [x.logprobs, x.entropy, x.new_values, x.divergence, scores]
    return sum(y for y in outputs if y is not None and y.requires_grad), {}  # pyright: ignore[reportReturnType]


def _allocate_cache(worker: ModelWorker, tokens: int) -> None:
    """Allocates and frees the engine's cache, a tensor a layer. Raises ConfigError with the bound that would fit."""
    config = worker.loaded.module.config.get_text_config()
    layers, total = config.num_hidden_layers, kv_bytes_per_token(config, worker.dtype.itemsize)

    def fits(count: int) -> bool:
        try:
            size = count * total // layers
            held = [torch.empty(size, dtype=torch.uint8, device=worker.device) for _ in range(layers)]
        except torch.OutOfMemoryError:
            return False
        finally:
            empty_cache(worker.device)
        return bool(held)

    if fits(tokens):
        return
    part = next((n for n in (tokens * k // 8 for k in range(7, 0, -1)) if fits(n)), None)
    what = "set a smaller rollout.max_tokens_to_generate" if part is None else f"set rollout.kv_cache_tokens={part}"
    raise ConfigError(
        f"the rehearsal before the first step ran out of memory with a cache of {tokens} tokens, "
        f"{tokens * total / GB:.1f} GB; {what}, or trainer.rehearse=false to go without a rehearsal"
    )
