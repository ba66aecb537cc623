"""The demo's task: a pupil who can calculate learns by GRPO which operation comes first.

A prompt is four numbers and three operations, "2*2+4*3="; a completion carries out one operation per step until a
number is left, "4+4*3=4+12=16". The warm start imitates a pupil whose every step is right but who picks *any*
operation next. The reward looks at the last number alone, and out of it the policy finds the order of operations.
Prompts are those where a random order is right at most one time in three; some of them are held out from both phases.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["demonstration", "heldout_rows", "reward", "small_model", "train_rows", "warm_start"]

log = logging.getLogger("whet")
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
LARGEST_FACTOR, LARGEST_NUMBER = 6, 80
HELD_OUT, VALIDATION = 256, 128
Expression = tuple[tuple[int, ...], tuple[str, ...]]


def carry_out(expression: Expression, i: int) -> Expression:
    """The expression after its i-th operation.

    >>> carry_out(((2, 3, 4), ("+", "*")), 1)
    ((2, 12), ('+',))
    """
    numbers, operations = expression
    result = OPERATIONS[operations[i]](numbers[i], numbers[i + 1])
    return (*numbers[:i], result, *numbers[i + 2 :]), operations[:i] + operations[i + 1 :]


def written(expression: Expression) -> str:
    """The expression as text."""
    numbers, operations = expression
    return str(numbers[0]) + "".join(f"{o}{n}" for o, n in zip(operations, numbers[1:], strict=True))


def parsed(text: str) -> Expression:
    """The expression of a text.

    >>> parsed("2*2+4*3=")
    ((2, 2, 4, 3), ('*', '+', '*'))
    """
    return tuple(map(int, re.findall(r"\d+", text))), tuple(re.findall(r"[-+*]", text))


def value(expression: Expression) -> int:
    """What the expression is worth: products first, then from the left."""
    while expression[1]:
        products = [i for i, o in enumerate(expression[1]) if o == "*"]
        expression = carry_out(expression, products[0] if products else 0)
    return expression[0][0]


@functools.cache
def _results(expression: Expression) -> tuple[int, ...] | None:
    """The results of all orders; None if one of them leaves 0..LARGEST_NUMBER on the way."""
    numbers, operations = expression
    if min(numbers) < 0 or max(numbers) > LARGEST_NUMBER:
        return None
    if not operations:
        return numbers
    parts = [_results(carry_out(expression, i)) for i in range(len(operations))]
    return None if None in parts else tuple(itertools.chain.from_iterable(p for p in parts if p))


@functools.cache
def _rows() -> list[dict[str, Any]]:
    """Every prompt of the task with its answer, in one shuffled order."""
    rows = []
    for operations in itertools.product("+-*", repeat=3):
        for numbers in itertools.product(range(1, 10), repeat=4):
            pairs = zip(operations, numbers, numbers[1:], strict=False)
            if any(o == "*" and max(a, b) > LARGEST_FACTOR for o, a, b in pairs):
                continue
            results = _results((numbers, operations))
            if results is None:
                continue
            answer = value((numbers, operations))
            if 3 * results.count(answer) <= len(results):
                rows.append({"prompt": written((numbers, operations)) + "=", "answer": answer})
    _results.cache_clear()
    random.Random(0).shuffle(rows)
    return rows


def heldout_rows() -> list[dict[str, Any]]:
    """The prompts that no training sees."""
    return _rows()[:HELD_OUT]


def validation_rows() -> list[dict[str, Any]]:
    """The prompts that tell the warm start when to stop."""
    return _rows()[HELD_OUT : HELD_OUT + VALIDATION]


def train_rows() -> list[dict[str, Any]]:
    """The prompts of the demonstrations and of GRPO."""
    return _rows()[HELD_OUT + VALIDATION :]


def demonstration(prompt: str, rng: random.Random) -> str:
    """What the pupil writes: right steps in an order of his own.

    >>> demonstration("1+2+3+4=", random.Random(0))
    '1+5+4=1+9=10'
    """
    expression, steps = parsed(prompt), []
    while expression[1]:
        expression = carry_out(expression, rng.randrange(len(expression[1])))
        steps.append(written(expression))
    return "=".join(steps)


def reward(prompts: list[str], completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """1 where the last number is the answer, else 0; the steps don't count.

    >>> reward(["2+2="], ["4"], [4]), reward(["2+2="], ["²"], [4])
    ([1.0], [0.0])
    """
    last = [c.split("=")[-1] for c in completions]
    return [float(bool(re.fullmatch(r"[0-9]{1,4}", n)) and int(n) == a) for n, a in zip(last, answer, strict=True)]


def valid_steps(prompt: str, completion: str) -> bool:
    """Whether each step is right arithmetic, in whatever order."""
    expression = parsed(prompt)
    for step in completion.split("="):
        following = [carry_out(expression, i) for i in range(len(expression[1]))]
        match = next((f for f in following if written(f) == step), None)
        if match is None:
            return False
        expression = match
    return not expression[1]


def small_model(seed: int) -> Any:
    """A random Qwen3 of 0.7 M parameters over bytes."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    # initializer_range: the usual 0.02 is far too small at this width, 1 / sqrt(128) learns several times faster
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=264,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=128,
            initializer_range=0.08,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=256,
            pad_token_id=257,
        )
    )


def right_steps(prompt: str) -> str:
    """What is to be learned: products first, then from the left.

    >>> right_steps("2*2+4*3=")
    '4+4*3=4+12=16'
    """
    expression, steps = parsed(prompt), []
    while expression[1]:
        products = [i for i, o in enumerate(expression[1]) if o == "*"]
        expression = carry_out(expression, products[0] if products else 0)
        steps.append(written(expression))
    return "=".join(steps)


def demonstration_rows(number: int = 20_000) -> list[dict[str, Any]]:
    """What the pupil writes to training prompts, for SFT: prompt and response."""
    rng, rows = random.Random(0), train_rows()
    prompts = [rng.choice(rows)["prompt"] for _ in range(number)]
    return [{"prompt": prompt, "response": demonstration(prompt, rng)} for prompt in prompts]


def heldout_demonstrations() -> list[dict[str, Any]]:
    """What the pupil writes to held-out prompts."""
    rng = random.Random(1)
    return [{"prompt": row["prompt"], "response": demonstration(row["prompt"], rng)} for row in heldout_rows()]


def preference_rows() -> list[dict[str, Any]]:
    """Pairs on training prompts, for reward models and DPO: prompt, chosen, rejected."""
    return [pair for row in train_rows() if (pair := _pair(row)) is not None]


def heldout_preferences() -> list[dict[str, Any]]:
    """Pairs on held-out prompts."""
    return [pair for row in heldout_rows() if (pair := _pair(row)) is not None]


def _pair(row: dict[str, Any]) -> dict[str, Any] | None:
    """The right order of operations against one of the pupil's with another result; None: ten tries found none."""
    rng, chosen = random.Random(row["prompt"]), right_steps(row["prompt"])
    for _ in range(10):
        rejected = demonstration(row["prompt"], rng)
        if rejected.split("=")[-1] != str(row["answer"]):
            return {"prompt": row["prompt"], "chosen": chosen, "rejected": rejected}
    return None


def untaught(folder: str, seed: int) -> str:
    """Writes the random model with its tokenizer. Returns: the folder."""
    from whet.data.tokenizer import byte_tokenizer

    small_model(seed).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pupil:
    """How the model is to write before it is trained by rewards, and when it has learnt to."""

    demonstration: Callable[[str, random.Random], str] = demonstration
    """(prompt, random numbers) -> what the pupil writes."""
    valid: Callable[[str, str], bool] = valid_steps
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
    pupil: Pupil | None = None,
    steps: int = 1100,
    demonstrations: int = 20_000,
    batch_size: int = 64,
) -> str:
    """Builds the tokenizer and the model, and teaches it the pupil's ways by imitation.

    Args:
        folder: where the model is written.
        seed: of the model, the demonstrations and their order.
        pupil: None = the demo's.
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
    pupil, tokenizer = pupil or Pupil(), byte_tokenizer()
    optim = OptimConfig(
        lr=3e-3,
        betas=(0.9, 0.99),
        weight_decay=0.01,
        schedule="cosine_with_min_lr",
        schedule_kwargs={"min_lr": 1.5e-4},
        warmup_steps=30,
        total_steps=steps,
    )
    worker = ModelWorker(load_model(small_model(seed)), optim=optim)
    trainer = RoleTrainer(worker, loss=nll)
    rng = random.Random(seed)
    rows = train_rows()
    pairs = [(p, pupil.demonstration(p, rng)) for p in (rng.choice(rows)["prompt"] for _ in range(demonstrations))]
    started = said = time.monotonic()
    log.info("warm start: at most %d steps on %d demonstrations", steps, demonstrations)
    for step in range(1, steps + 1):
        metrics = trainer.update(_batch(rng.sample(pairs, batch_size), tokenizer))
        if time.monotonic() - said >= 15:
            said = time.monotonic()
            log.info("warm start: step %d/%d  loss %.3f  %.0f s", step, steps, metrics["loss"].value, said - started)
        if step % 100 == 0 and step >= pupil.first_check:
            share = _valid_share(worker, tokenizer, pupil)
            log.info("warm start: step %d, %.1f %% of the validation prompts get valid steps", step, 100 * share)
            if share >= pupil.enough:
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


def _valid_share(worker: Any, tokenizer: Any, pupil: Pupil) -> float:
    """The share of the validation prompts whose greedy completion has valid steps."""
    from whet.data.prompts import PromptEncoder
    from whet.rollout import resolve_engine
    from whet.rollout.base import Sampling
    from whet.rollout.driver import Rollouts, single_turns

    engine = resolve_engine("embedded")(worker.loaded)
    encode = PromptEncoder(tokenizer)
    prompts = [encode(row, i) for i, row in enumerate(validation_rows()[: pupil.checked])]
    sampling = Sampling(max_tokens=pupil.max_tokens, temperature=0.0, stop_ids=(tokenizer.eos_token_id,))
    groups = Rollouts(engine).run(single_turns(prompts, sampling))
    engine.close()
    texts = [tokenizer.decode(g.completions[0].tokens, skip_special_tokens=True) for g in groups]
    return sum(pupil.valid(str(p.source), t) for p, t in zip(prompts, texts, strict=True)) / len(prompts)
