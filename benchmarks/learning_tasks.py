"""The tasks of presets.py: the demo's, and the same one with answers six times as long.

order: the demo's (whet/demo.py), completions of 11 to 15 bytes.

steps: the same prompts, each step written out: the expression, the operations to choose from, the expression with the
chosen one in brackets, and that one carried out. 83 to 97 bytes, of which three decide as in the demo.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whet import demo
from whet.demo import Expression, carry_out, parsed, written

__all__ = ["TASKS", "Task"]

log = logging.getLogger("whet")
VALIDATION = 64
"""Prompts that tell the warm start when to stop."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What a run needs to know of a task."""

    train_rows: Callable[[], list[dict[str, Any]]]
    heldout_rows: Callable[[], list[dict[str, Any]]]
    reward: Callable[..., list[float]]
    warm_start: Callable[[str, int], str]
    """(folder, seed) -> the folder, with the model and its tokenizer in it."""
    max_prompt: int
    max_tokens: int


def bracketed(expression: Expression, i: int) -> str:
    """The expression with its i-th operation in brackets.

    >>> bracketed(((9, 2, 3), ("-", "*")), 1)
    '9-(2*3)'
    """
    numbers, operations = expression
    words = [str(n) for n in numbers]
    words[i], words[i + 1] = f"({words[i]}", f"{words[i + 1]})"
    return words[0] + "".join(o + w for o, w in zip(operations, words[1:], strict=True))


def step(expression: Expression, i: int) -> str:
    """How carrying out the i-th operation is written.

    >>> step(((9, 2, 3), ("-", "*")), 1)
    '9-2*3:9-2,2*3:9-(2*3):2*3=6'
    """
    numbers, operations = expression
    choices = [f"{a}{o}{b}" for a, o, b in zip(numbers, operations, numbers[1:], strict=False)]
    result = carry_out(expression, i)[0][i]
    return f"{written(expression)}:{','.join(choices)}:{bracketed(expression, i)}:{choices[i]}={result}"


def demonstration(prompt: str, rng: random.Random) -> str:
    """What the pupil writes: right steps in an order of his own.

    >>> demonstration("9-2*3=", random.Random(1))
    '9-2*3:9-2,2*3:(9-2)*3:9-2=7;7*3:7*3:(7*3):7*3=21'
    """
    expression, steps = parsed(prompt), []
    while expression[1]:
        i = rng.randrange(len(expression[1]))
        steps.append(step(expression, i))
        expression = carry_out(expression, i)
    return ";".join(steps)


def valid_steps(prompt: str, completion: str) -> bool:
    """Whether each step is right, in whatever order.

    >>> valid_steps("7*3=", "7*3:7*3:(7*3):7*3=21"), valid_steps("7*3=", "7*3:7*3:(7*3):7*3=20")
    (True, False)
    """
    expression = parsed(prompt)
    for said in completion.split(";"):
        chosen = next((i for i in range(len(expression[1])) if step(expression, i) == said), None)
        if chosen is None:
            return False
        expression = carry_out(expression, chosen)
    return not expression[1]


def warm_start(folder: str, seed: int, *, steps: int = 1500, demonstrations: int = 20_000, batch_size: int = 16) -> str:
    """Teaches the demo's model the pupil's ways, as demo.warm_start does, which see for the arguments.

    It stops once 95 % of the validation prompts get valid steps.
    """
    from whet.config import OptimConfig
    from whet.data.tokenizer import byte_tokenizer
    from whet.models.load import load_model
    from whet.ops import nll
    from whet.train.role_trainer import RoleTrainer
    from whet.train.worker import ModelWorker

    if (Path(folder) / "warm_start.txt").is_file():
        return folder
    tokenizer = byte_tokenizer()
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
    rng, rows = random.Random(seed), demo.train_rows()
    pairs = [(p, demonstration(p, rng)) for p in (rng.choice(rows)["prompt"] for _ in range(demonstrations))]
    started = said = time.monotonic()
    for index in range(1, steps + 1):
        metrics = trainer.update(demo._batch(rng.sample(pairs, batch_size), tokenizer))
        if time.monotonic() - said >= 15:
            said = time.monotonic()
            log.info("warm start: step %d/%d  loss %.3f  %.0f s", index, steps, metrics["loss"].value, said - started)
        if index % 100 == 0 and (share := _valid_share(worker, tokenizer)):
            log.info("warm start: step %d, %.1f %% of the validation prompts get valid steps", index, 100 * share)
            if share >= 0.95:
                break
    worker.export(Path(folder), tokenizer)
    (Path(folder) / "warm_start.txt").write_text(f"seed {seed}, {index} steps\n")
    return folder


def _valid_share(worker: Any, tokenizer: Any) -> float:
    """The share of the validation prompts whose greedy completion has valid steps."""
    from whet.data.prompts import PromptEncoder
    from whet.rollout import resolve_engine
    from whet.rollout.base import Sampling
    from whet.rollout.driver import Rollouts, single_turns

    engine = resolve_engine("embedded")(worker.loaded)
    encode = PromptEncoder(tokenizer)
    prompts = [encode(row, i) for i, row in enumerate(demo.validation_rows()[:VALIDATION])]
    sampling = Sampling(max_tokens=TASKS["steps"].max_tokens, temperature=0.0, stop_ids=(tokenizer.eos_token_id,))
    groups = Rollouts(engine).run(single_turns(prompts, sampling))
    engine.close()
    texts = [tokenizer.decode(g.completions[0].tokens, skip_special_tokens=True) for g in groups]
    return sum(valid_steps(str(p.source), t) for p, t in zip(prompts, texts, strict=True)) / len(prompts)


TASKS = {
    "order": Task(
        train_rows=demo.train_rows,
        heldout_rows=demo.heldout_rows,
        reward=demo.reward,
        warm_start=demo.warm_start,
        max_prompt=16,
        max_tokens=26,
    ),
    "steps": Task(
        train_rows=demo.train_rows,
        heldout_rows=demo.heldout_rows,
        reward=demo.reward,
        warm_start=warm_start,
        max_prompt=16,
        max_tokens=112,
    ),
}
