"""The starting model of the learning benchmarks, one for each seed: a small model, trained by SFT on demonstrations."""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from whet import demo

__all__ = ["SFTTask", "warm_start"]

log = logging.getLogger("whet")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTTask:
    """How the model is to write before it is trained by rewards, and when it has learnt to."""

    demonstration: Callable[[str, random.Random], str] = demo.demonstration
    """(prompt, random numbers) -> a completion to imitate."""
    valid: Callable[[str, str], bool] = demo.valid_steps
    """(prompt, completion) -> whether each step of it is right."""
    max_tokens: int = 32
    """Of a completion."""
    enough: float = 0.985
    """Share of the validation prompts with valid steps at which the warm start ends."""
    first_check: int = 500
    """Steps before which that is not looked at."""
    checked: int | None = None
    """Validation prompts that are looked at; None = all."""


def warm_start(
    folder: str,
    seed: int,
    *,
    sft_task: SFTTask | None = None,
    steps: int = 1100,
    demonstrations: int = 20_000,
    batch_size: int = 64,
) -> str:
    """Builds the tokenizer and the model, and trains it on demonstrations.

    Args:
        folder: where the model is written.
        seed: of the model, the demonstrations and their order.
        sft_task: None = the demo's.
        steps: at most; it stops sooner once enough of the validation prompts get valid steps.
        demonstrations, batch_size: as named.
    Returns: the folder, which loads as any Hugging Face model does. One that is already there is taken as it is.
    """
    from whet.config import OptimConfig
    from whet.data.tokenizer import byte_tokenizer
    from whet.models.load import load_model
    from whet.ops import nll
    from whet.train.role_trainer import RoleTrainer
    from whet.train.worker import ModelWorker

    if (Path(folder) / "warm_start.txt").is_file():
        return folder
    sft_task, tokenizer = sft_task or SFTTask(), byte_tokenizer()
    optim = OptimConfig(
        lr=3e-3,
        betas=(0.9, 0.99),
        weight_decay=0.01,
        schedule="cosine_with_min_lr",
        schedule_kwargs={"min_lr": 1.5e-4},
        warmup_steps=30,
        total_steps=steps,
    )
    worker = ModelWorker(load_model(demo.small_model(seed)), optim=optim)
    trainer = RoleTrainer(worker, loss=nll)
    rng = random.Random(seed)
    rows = demo.train_rows()
    pairs = [(p, sft_task.demonstration(p, rng)) for p in (rng.choice(rows)["prompt"] for _ in range(demonstrations))]
    started = said = time.monotonic()
    log.info("warm start: at most %d steps on %d demonstrations", steps, demonstrations)
    for step in range(1, steps + 1):
        metrics = trainer.update(_batch(rng.sample(pairs, batch_size), tokenizer))
        if time.monotonic() - said >= 15:
            said = time.monotonic()
            log.info("warm start: step %d/%d  loss %.3f  %.0f s", step, steps, metrics["loss"].value, said - started)
        if step % 100 == 0 and step >= sft_task.first_check:
            share = _valid_share(worker, tokenizer, sft_task)
            log.info("warm start: step %d, %.1f %% of the validation prompts get valid steps", step, 100 * share)
            if share >= sft_task.enough:
                break
    log.info("warm start: %d steps, %.0f s", step, time.monotonic() - started)
    worker.export(Path(folder), tokenizer)
    (Path(folder) / "warm_start.txt").write_text(f"seed {seed}, {step} steps\n")
    return folder


def _batch(pairs: list[tuple[str, str]], tokenizer: Any) -> Any:
    """Demonstrations as a TokenBatch: everything after the prompt is trained."""
    from whet.types import Example, TokenBatch, TrainSequence

    examples = []
    for prompt, completion in pairs:
        tokens = np.array([*tokenizer(completion)["input_ids"], tokenizer.eos_token_id], dtype=np.int32)
        prefix = np.array(tokenizer(prompt)["input_ids"], dtype=np.int32)
        examples.append(
            Example(sequences=(TrainSequence(prefix=prefix, tokens=tokens, mask=np.ones(len(tokens), bool)),))
        )
    return TokenBatch.from_examples(examples)


def _valid_share(worker: Any, tokenizer: Any, sft_task: SFTTask) -> float:
    """The share of the validation prompts whose greedy completion has valid steps."""
    from whet.data.prompts import PromptEncoder
    from whet.rollout import resolve_engine
    from whet.rollout.base import Sampling
    from whet.rollout.driver import RolloutDriver, single_turns

    engine = resolve_engine("embedded")(worker.loaded)
    encode = PromptEncoder(tokenizer)
    prompts = [encode(row, i) for i, row in enumerate(demo.validation_rows()[: sft_task.checked])]
    sampling = Sampling(max_tokens=sft_task.max_tokens, temperature=0.0, stop_ids=(tokenizer.eos_token_id,))
    groups = RolloutDriver(engine).run(single_turns(prompts, sampling))
    engine.close()
    texts = [tokenizer.decode(g.completions[0].tokens, skip_special_tokens=True) for g in groups]
    return sum(sft_task.valid(str(p.source), t) for p, t in zip(prompts, texts, strict=True)) / len(prompts)
