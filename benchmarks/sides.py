"""One job in one library: python sides.py whet|front|trl job.json. Prints what it measured as one JSON line, last.

"front" is the script of "trl" with whet.trl imported in its place.

A step lasts from the end of the step before to its own end, on both sides; the time in between that generation takes
is its rollout, the rest its update (rewards, loss, gradients, optimizer, and what lies between).
"""

from __future__ import annotations

import functools
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import common
import tasks
from common import Job, Resident


class Clock:
    """Step by step: seconds, seconds of generation and of processors, lengths, rewards.

    Args: device: on a GPU the clock waits for it. reward: the job's.
    """

    def __init__(self, device: str, reward: Callable[..., list[float]]) -> None:
        self.cuda = device == "cuda"
        self.reward = reward
        self.steps: list[dict[str, Any]] = []
        self.rollout = 0.0
        self.lengths: list[int] = []
        self.rewards: list[float] = []
        self.last = self.now()
        self.cpu = time.process_time()

    def now(self) -> float:
        """Seconds, with nothing in flight on the device."""
        if self.cuda:
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    def reward_fn(self) -> Callable[..., list[float]]:
        """The reward function that both libraries call; it notes lengths and rewards."""

        def benchmark_reward(
            prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any
        ) -> list[float]:
            values = self.reward(prompts=prompts, completions=completions, **columns)
            self.lengths += [len(ids) for ids in completion_ids]
            self.rewards += values
            return values

        return benchmark_reward

    def generation(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The same function; its time counts as rollout."""

        @functools.wraps(fn)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            out = fn(*args, **kwargs)
            self.rollout += self.now() - start
            return out

        return timed

    def step_ends(self) -> None:
        """Closes the step's entry."""
        now, cpu = self.now(), time.process_time()
        entry = {"step": now - self.last, "rollout": self.rollout, "update": now - self.last - self.rollout}
        entry["cpu"] = cpu - self.cpu
        self.steps.append({**entry, "lengths": self.lengths, "reward": sum(self.rewards) / max(len(self.rewards), 1)})
        self.last, self.cpu, self.rollout, self.lengths, self.rewards = now, cpu, 0.0, [], []


def load(job: Job, dtype: str) -> Any:
    """The job's model."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    return model.to(job.device)


def run_whet(job: Job) -> dict[str, Any]:
    """The job in whet."""
    from whet import GRPOLearner, RLCluster
    from whet.config import (
        ClusterConfig,
        DataConfig,
        GRPOConfig,
        OptimConfig,
        RLTrainingConfig,
        RoleConfig,
        RolloutConfig,
    )

    # The model is loaded for the memory's start alone: the cluster loads its own, since it computes in the job's dtype
    # with fp32 weights beside. What the allocator kept of this one counts against whet.
    model = load(job, "float32")
    memory = Resident(job.device)
    del model
    cluster = RLCluster(
        actor=RoleConfig(model=job.model, dtype=job.dtype),  # pyright: ignore[reportArgumentType]
        tokenizer=job.model,
        cluster_config=ClusterConfig(
            rollout_config=RolloutConfig(
                temperature=1.0,
                max_tokens_to_generate=job.max_tokens,
                min_tokens=job.min_tokens,
                max_prompt_length=job.max_prompt,
            ),
            training_config=RLTrainingConfig(
                actor_optimizer=OptimConfig(lr=job.lr),
                max_steps=job.steps,
                max_tokens_per_microbatch=job.budget,
                seed=job.seed,
                pbar_description=None,
                loggers=(logger := _StepLogger(),),
            ),
        ),
    )
    logger.clock = clock = Clock(job.device, tasks.REWARDS[job.reward])
    learner = GRPOLearner(
        cluster,
        GRPOConfig(num_generations=job.generations, beta=0.0, epsilon=0.2, loss_agg_mode="sequence-mean-token-mean"),
        reward_fns=[clock.reward_fn()],
        data=DataConfig(batch_size=job.prompts, shuffle=False),
    )
    cluster.sample = clock.generation(cluster.sample)
    learner.train(job.rows)
    return _said(clock, memory, "whet")


class _StepLogger:
    """A logger that closes the clock's steps: it is told of a step when the step ends."""

    clock: Clock

    def log(self, step: int, values: Any) -> None:
        self.clock.step_ends()

    def close(self) -> None:
        """Nothing is held."""


def run_trl(job: Job) -> dict[str, Any]:
    """The job in TRL."""
    import trl

    return _script(job, trl, "trl", lambda trainer: (trainer, "_generate_single_turn"))


def run_front(job: Job) -> dict[str, Any]:
    """The job by TRL's script with its import changed: whet.trl's own loop."""
    import whet.trl

    return _script(job, whet.trl, "whet", lambda trainer: (trainer.cluster, "sample"))


def _script(job: Job, module: Any, library: str, sampler: Callable[[Any], tuple[Any, str]]) -> dict[str, Any]:
    """TRL's script. Args: module: what it imports. library: its name. sampler: trainer -> object and name of what
    generates."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    class StepEnds(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.step_ends()

    mixed = job.dtype == "bfloat16" and job.autocast
    model = load(job, "float32" if mixed else job.dtype)
    memory = Resident(job.device)
    clock = Clock(job.device, tasks.REWARDS[job.reward])
    with tempfile.TemporaryDirectory() as folder:
        trainer = module.GRPOTrainer(
            model=model,
            reward_funcs=[clock.reward_fn()],
            args=trl_config(job, folder, mixed, module.GRPOConfig),
            train_dataset=Dataset.from_list(job.rows),
            processing_class=AutoTokenizer.from_pretrained(job.model),
            callbacks=[StepEnds()],
        )
        owner, name = sampler(trainer)
        setattr(owner, name, clock.generation(getattr(owner, name)))
        trainer.train()
    return _said(clock, memory, library)


def trl_config(job: Job, folder: str, mixed: bool, config: Any) -> Any:
    """TRL's configuration for a job, in a folder of its own; mixed: autocast. config: the class."""
    completions = job.prompts * job.generations
    micro = min(job.micro, completions)
    batching: dict[str, Any] = {"max_memory_percent": 0.1 if job.device == "cpu" else 0.3}
    if job.pages is not None:
        batching = {"num_blocks": job.pages, "page_size": 64, "max_batch_tokens": 2048}
    return config(
        output_dir=folder,
        use_transformers_continuous_batching=job.continuous,
        transformers_continuous_batching_config=batching,
        cache_implementation=job.cache,
        torch_compile=job.compile,
        generation_kwargs={"min_new_tokens": job.min_tokens} if job.min_tokens else None,
        max_steps=job.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=completions // micro,
        num_generations=job.generations,
        max_completion_length=job.max_tokens,
        shuffle_dataset=False,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        loss_type="grpo",
        scale_rewards="group",
        beta=0.0,
        epsilon=0.2,
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        bf16=mixed,
        use_cpu=job.device == "cpu",
        dataloader_num_workers=0,
        dataloader_pin_memory=job.device == "cuda",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=job.seed,
    )


def _said(clock: Clock, memory: Resident, library: str) -> dict[str, Any]:
    named = {library: "whet-rl" if library == "whet" else library, "torch": "torch", "transformers": "transformers"}
    versions = {name: metadata.version(distribution) for name, distribution in named.items()}
    return {
        "steps": clock.steps,
        "memory": memory.peak(),
        "memory_exact": memory.exact,
        "versions": {**versions, "python": platform.python_version()},
    }


def main() -> None:
    """Runs the job."""
    import torch

    side, path = sys.argv[1:]
    job = common.read_job(path)
    torch.set_num_threads(job.threads)
    print(json.dumps({"whet": run_whet, "front": run_front, "trl": run_trl}[side](job)))


if __name__ == "__main__":
    main()
