"""A small training run that can be killed: `python tests/faults/train.py FOLDER`, again and again until it is done."""

import os
import random
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import datasets
import numpy as np
import pyarrow.parquet
import torch
import transformers.models.qwen3.modeling_qwen3
from helpers import cluster, length_reward, tiny_model

from whet.config import (
    CheckpointingOptions,
    DataConfig,
    GRPOConfig,
    OptimConfig,
    SupervisedDataConfig,
    SupervisedTrainingConfig,
)
from whet.learners.grpo import GRPOLearner
from whet.learners.sft import SFTLearner
from whet.rollout import resolve_engine
from whet.storage import checkpoint
from whet.train.supervised_models import SupervisedModels

IMPORTED = (datasets, pyarrow.parquet, transformers.models.qwen3.modeling_qwen3)  # before a fork, not after it
ENGINE = resolve_engine("embedded")
STEPS = 12


def noisy_reward(completions, **_):
    """Draws from a global generator, which a resumed run must find where it was."""
    return [r + 0.5 * np.random.random() for r in length_reward(completions)]


def slow_down_saves():
    """Gives time enough to be killed while a checkpoint is being written."""
    sync = checkpoint._fsync
    checkpoint._fsync = lambda path: (time.sleep(0.05), sync(path))


def train(folder, threads=1, slow_saves=False):
    """12 steps over 20 rows in batches of 4: two and a half shuffled epochs, a checkpoint every second step."""
    torch.set_num_threads(threads)
    np.random.seed(0)
    learn(folder, slow_saves, noisy_reward, {"eval": {"temperature": 0.0}})


class Weather:
    """An environment that says something else each time. Its answers are recorded."""

    draw = random.SystemRandom()

    def step(self, message):
        return None if self.draw.random() < 0.2 else str(self.draw.randrange(1000))

    def get_reward(self):
        return self.draw.random()


def train_environment(folder, threads=1, slow_saves=False):
    """The same in two turns, with the answers recorded beside the folder."""
    torch.set_num_threads(threads)
    two_turns = {"env_path": Weather, "max_turns": 2, "max_episode_tokens": 90}
    learn(folder, slow_saves, None, {"answers_dir": str(folder.parent / "answers"), **two_turns})


def learn(folder, slow_saves, reward, rollout):
    if slow_saves:
        slow_down_saves()
    c = cluster(
        tiny_model(),
        reference=tiny_model(1),
        run_dir=str(folder),
        resume="latest",
        max_steps=STEPS,
        seed=3,
        mini_batch_size=2,
        eval_every_n_steps=4,
        actor_optimizer=OptimConfig(lr=3e-3, schedule="linear", warmup_steps=4),
        checkpointing_options=CheckpointingOptions(save_interval_steps=2, max_to_keep=2),
        rollout=rollout,
    )
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(20)]
    algo = GRPOConfig(num_generations=4, beta=0.02)
    learner = GRPOLearner(c, algo, reward, data_shuffle_seed=1, data=DataConfig(batch_size=4))
    learner.train(rows, rows[:5])


def train_sft(folder, threads=1, slow_saves=False):
    """12 steps of supervised training over 20 rows in batches of 4, a checkpoint every second step."""
    torch.set_num_threads(threads)
    if slow_saves:
        slow_down_saves()
    models = SupervisedModels(
        actor=tiny_model(),
        tokenizer="byte",
        config=SupervisedTrainingConfig(
            run_dir=str(folder),
            resume="latest",
            max_steps=STEPS,
            seed=3,
            eval_every_n_steps=4,
            checkpointing_options=CheckpointingOptions(save_interval_steps=2, max_to_keep=2),
        ),
        optimizer=OptimConfig(lr=3e-3, schedule="linear", warmup_steps=4),
    )
    rows = [{"prompt": f"{i}+{i}=", "response": str(2 * i) * (i % 3 + 1)} for i in range(20)]
    SFTLearner(models, data=SupervisedDataConfig(batch_size=4)).train(rows, rows[:5])


if __name__ == "__main__":
    train(sys.argv[1], threads=int(os.environ.get("OMP_NUM_THREADS", "1")))
