"""One update in one library, without a rollout: python train_sides.py rate|naive|whet|trl job.json.

Every row of the job brings its completions. The first step only warms up; each of the others is timed from token ids to
updated weights. Prints what it measured as one JSON line, last.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import common
import sides
import tasks
from common import Job, Resident


def steps(job: Job) -> list[list[dict[str, Any]]]:
    """The rows of each step."""
    return [job.rows[i : i + job.prompts] for i in range(0, len(job.rows), job.prompts)]


def rewards_of(job: Job, rows: list[dict[str, Any]], tokenizer: Any) -> list[float]:
    """The reward of every completion of these rows."""
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for row in rows for ids in row["completions"]]
    flat = [row["flat"] for row in rows for _ in row["completions"]]
    return tasks.REWARDS[job.reward](prompts=[], completions=texts, flat=flat)


def timed(job: Job, update: Callable[[list[dict[str, Any]]], dict[str, float]], memory: Resident) -> dict[str, Any]:
    """Seconds of each step but the first, what the last update said, and the peak of memory."""
    seconds, said = [], {}
    for rows in steps(job):
        start = time.perf_counter()
        said = update(rows)
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds[1:], "memory": memory.peak(), "memory_exact": memory.exact, **said}


# ---- whet ------------------------------------------------------------------------------------------------------------


def run_whet(job: Job) -> dict[str, Any]:
    """whet's worker with its defaults, one mechanism switched off where the job says so."""
    import torch
    from transformers import AutoTokenizer

    from whet.config import OptimConfig, RLTrainingConfig
    from whet.models.load import load_model
    from whet.ops import PolicyObjective
    from whet.train.worker import ModelWorker

    if job.without == "native kernels":
        os.environ["WHET_NATIVE"] = "0"
    loaded = load_model(job.model, device=job.device)
    memory = Resident(job.device)
    training = RLTrainingConfig(max_steps=1, max_tokens_per_microbatch=job.budget)
    budget = training.token_budget(job.device, job.max_prompt + job.max_tokens)
    worker = ModelWorker(
        loaded,
        optim=OptimConfig(lr=job.lr),
        dtype=getattr(torch, job.dtype),
        max_tokens=budget,
        saturating_tokens=training.saturating_tokens(job.device),
    )
    MECHANISMS[job.without](worker)
    tokenizer = AutoTokenizer.from_pretrained(job.model)

    def update(rows: list[dict[str, Any]]) -> dict[str, float]:
        batch = whet_batch(job, rows, tokenizer, skip=job.without != "skipping")
        found = {**worker.forward_backward(batch, PolicyObjective(), entropy=True), **worker.optim_step()}
        return {"grad_norm": found["grad_norm"].value}

    return timed(job, update, memory)


def whet_batch(job: Job, rows: list[dict[str, Any]], tokenizer: Any, *, skip: bool) -> Any:
    """The rows as the learner would hand them to the worker: advantages, weights, those without signal left out."""
    import numpy as np
    import torch

    from whet.learners.policy import sequences_with_signal
    from whet.ops import ADVANTAGE_ESTIMATORS, token_weights
    from whet.types import Completion, Group, Prompt, TokenBatch

    groups = []
    for i, row in enumerate(rows):
        ids = np.array(tokenizer(row["prompt"], add_special_tokens=False)["input_ids"], dtype=np.int32)
        completions = tuple(
            Completion(
                tokens=np.array(c, dtype=np.int32),
                logprobs=np.zeros(len(c), dtype=np.float32),
                versions=np.zeros(len(c), dtype=np.int32),
                finish_reason="length",
                generation=g,
            )
            for g, c in enumerate(row["completions"])
        )
        groups.append(
            Group(prompt=Prompt(tokens=ids, source=row["prompt"], columns={}, row=i), completions=completions)
        )
    batch = TokenBatch.from_groups(groups)
    rewards = torch.tensor(rewards_of(job, rows, tokenizer), dtype=torch.float64)
    advantages = ADVANTAGE_ESTIMATORS["grpo"](rewards, batch.group_of).float()
    batch = batch.replace(
        advantages=advantages.index_select(0, batch.trajectory),
        weights=token_weights(batch.mask, batch.trajectory, "sequence-mean-token-mean"),
    )
    return batch.select(sequences_with_signal(batch)) if skip else batch


def _plan_with(**options: Any) -> Callable[[Any], None]:
    """Turns micro-batches into those of other options."""

    def patch(worker: Any) -> None:
        from whet.packing.micro_batch_planner import plan_micro_batches

        keep = {"max_tokens": worker.max_tokens, "packable": worker.loaded.packable}
        keep |= {"cost": worker.cost, "device": worker.device, "saturating_tokens": worker.saturating_tokens}
        keep |= {"attention": worker.loaded.attention}
        if not options.get("packable", True):
            worker.module.set_attn_implementation("sdpa")
        worker.micro_batches = lambda batch, most, at_end=False, *_: plan_micro_batches(
            batch, max_sequences=most, at_end=at_end, **{**keep, **options}
        )

    return patch


def _plain_head(worker: Any) -> None:
    """Whole logits and log_softmax instead of the fused head."""
    import torch.nn.functional as F

    from whet.models import forward
    from whet.types import TokenStats

    def plain(hidden: Any, weight: Any, targets: Any, *, bias: Any, temperature: float, entropy: bool, **_: Any) -> Any:
        logp = (F.linear(hidden, weight, bias).float() / temperature).log_softmax(-1)
        chosen = logp.gather(1, targets[:, None]).squeeze(1)
        return TokenStats(logprobs=chosen, entropy=-(logp.exp() * logp).sum(1) if entropy else None)

    forward.linear_stats = plain


def _plain_layers(worker: Any) -> None:
    """The module's own layers and torch's default products."""
    from whet.models import linear_logprob, matmul

    worker.fast_layers = None
    matmul.MIN_MULTIPLICATIONS = float("inf")
    linear_logprob.weight_grad = lambda grad, x, into=None: grad.t() @ x if into is None else into.addmm_(grad.t(), x)


MECHANISMS: dict[str, Callable[[Any], None]] = {
    "": lambda worker: None,
    "shared prefixes": _plan_with(shared_prefix=False),
    "packing": _plan_with(packable=False),
    "fused head": _plain_head,
    "skipping": lambda worker: None,
    "fast layers": _plain_layers,
    "native kernels": lambda worker: None,
}
"""What can be switched off in whet's worker. "skipping" (completions without signal) is where the batch is made, and
"native kernels" before anything asks for them."""


# ---- the others ------------------------------------------------------------------------------------------------------


def run_naive(job: Job) -> dict[str, Any]:
    """A plain loop: padded rows of prompt and completion, whole logits, log_softmax, AdamW."""
    import torch
    from transformers import AutoTokenizer

    model = sides.load(job, job.dtype)
    memory = Resident(job.device)
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, weight_decay=0.0, fused=True)

    def update(rows: list[dict[str, Any]]) -> dict[str, float]:
        rewards = torch.tensor(rewards_of(job, rows, tokenizer), device=job.device).view(len(rows), -1)
        advantages = ((rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
        for ids, mask, completion, places in padded(job, rows, tokenizer):
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, completion - 1 : -1]
            logp = logits.float().log_softmax(-1)
            with torch.no_grad():  # for the log, as the others have it
                entropy = -(logp.exp() * logp).sum(-1)
            chosen = logp.gather(2, ids[:, completion:, None]).squeeze(2)
            ratio = (chosen - chosen.detach()).exp()
            a = advantages[places, None]
            loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
            kept = mask[:, completion:]
            ((loss * kept).sum(1) / kept.sum(1)).sum().div(len(advantages)).backward()
            del logits, logp, entropy, chosen, ratio, loss
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"grad_norm": float(norm)}

    return timed(job, update, memory)


def padded(job: Job, rows: list[dict[str, Any]], tokenizer: Any) -> Iterator[tuple[Any, Any, int, slice]]:
    """Micro-batches of ids [B T] and their mask, all as long as the longest of the step; where completions start."""
    import torch

    prompts = [tokenizer(row["prompt"], add_special_tokens=False)["input_ids"] for row in rows]
    pairs = [(p, c) for p, row in zip(prompts, rows, strict=True) for c in row["completions"]]
    left, right = max(len(p) for p, _ in pairs), max(len(c) for _, c in pairs)
    ids = torch.full((len(pairs), left + right), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for i, (p, c) in enumerate(pairs):
        ids[i, left - len(p) : left + len(c)] = torch.tensor(p + c)
        mask[i, left - len(p) : left + len(c)] = 1
    ids, mask = ids.to(job.device), mask.to(job.device)
    for a in range(0, len(pairs), job.micro):
        places = slice(a, min(a + job.micro, len(pairs)))
        yield ids[places], mask[places], left, places


def run_trl(job: Job) -> dict[str, Any]:
    """TRL's GRPOTrainer; generation hands out the job's completions, and its time does not count."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class StepEnds(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.step_ends()

    mixed = job.dtype == "bfloat16" and job.autocast
    model = sides.load(job, "float32" if mixed else job.dtype)
    memory = Resident(job.device)
    clock = sides.Clock(job.device, tasks.REWARDS[job.reward])
    left = [[ids for row in rows for ids in row["completions"]] for rows in steps(job)]
    data = [{name: value for name, value in row.items() if name != "completions"} for row in job.rows]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=[clock.reward_fn()],
            args=sides.trl_config(job, folder, mixed, GRPOConfig),
            train_dataset=Dataset.from_list(data),
            processing_class=AutoTokenizer.from_pretrained(job.model),
            callbacks=[StepEnds()],
        )
        trainer._generate_single_turn = clock.generation(lambda *args, **options: (left.pop(0), None))
        trainer.train()
    return {
        "seconds": [s["update"] for s in clock.steps[1:]],
        "memory": memory.peak(),
        "memory_exact": memory.exact,
    }


def run_rate(job: Job) -> dict[str, Any]:
    """The product of two square matrices by the best kernel, and by torch's default, as in machine.py."""
    import machine
    import torch

    with torch.inference_mode():
        found = machine.matmul_rates(Namespace(size=2048, device=job.device, trial_s=0.3), job.dtype)
    return {"gflop_per_s": found["gflop_per_s"], "kernel": found["kernel"], "default": found["all"]["torch"]}


RUNS = {"rate": run_rate, "naive": run_naive, "whet": run_whet, "trl": run_trl}


def main() -> None:
    """Runs the job."""
    import torch

    side, path = sys.argv[1:]
    job = common.read_job(path)
    torch.set_num_threads(job.threads)
    print(json.dumps(RUNS[side](job)))


if __name__ == "__main__":
    main()
