"""Programs for RL2 and Tunix in the folder of a model and its rows, which run on one process or on several."""

import os

from helpers import length_reward, tiny_model
from processes import as_torchrun

SGD = ["whet.actor.optim.name=sgd"]
RL2 = ["ppo", "data.path=chats.jsonl", "data.prompts_per_rollout=4", "data.responses_per_prompt=3", "actor.lr=1e-2",
       "actor.model_name=model", "actor.dtype=float32", "actor.offload_model=false",
       "actor.kl.coef=0.01", "actor.kl.type=loss", "ref_actor.dtype=float32", "rollout.env_path=env.py",
       "rollout.max_turns=2", "rollout.train_sampling_params.max_new_tokens=6", "trainer.disable_wandb=true",
       "trainer.save_dir=rl2", "trainer.n_epochs=1", "whet.trainer.pbar_description=null", *SGD]  # fmt: skip
"""A command of RL2's."""


def rl2(size):
    """RL2's command with a copy of the model on each process, which together run each pass."""
    from whet.rl2.command import main

    sizes = [f"actor.ddp_size={size}", "actor.fsdp_size=1", f"actor.sp_size={size}"]
    assert main([*RL2, f"actor.max_length_per_device={160 // size}", *sizes]) == 0


def tunix(size):
    """A program for Tunix with a reference, evaluations, checkpoints and a mesh of all processes."""
    from whet.data.tokenizer import byte_tokenizer
    from whet.tunix import (
        ClusterConfig,
        GRPOConfig,
        GRPOLearner,
        OptimConfig,
        RLCluster,
        RLTrainingConfig,
        Role,
        RolloutConfig,
    )

    mesh = {"fsdp": size, "tp": 1}
    training = RLTrainingConfig(actor_optimizer=OptimConfig(name="sgd", lr=0.1), eval_every_n_steps=2, max_steps=2,
                                pbar_description=None, run_dir="tunix")  # fmt: skip
    rollout = RolloutConfig(max_tokens_to_generate=6, max_prompt_length=16, kv_cache_size=64)
    config = ClusterConfig(role_to_mesh={Role.ACTOR: mesh, Role.REFERENCE: mesh}, rollout_config=rollout,
                           training_config=training)  # fmt: skip
    cluster = RLCluster(actor=tiny_model(), reference="actor", tokenizer=byte_tokenizer(), cluster_config=config)
    batches = [{"prompts": [f"{i}+{j}=" for j in range(3)]} for i in range(2)]
    algo = GRPOConfig(num_generations=3, beta=0.1)
    GRPOLearner(rl_cluster=cluster, algo_config=algo, reward_fns=[length_reward]).train(batches, batches[:1])


def run_programs(rank, size, folder, port):
    """Runs both as one of several ranks."""
    as_torchrun(rank, size, port)
    os.chdir(folder)
    rl2(size)
    tunix(size)
