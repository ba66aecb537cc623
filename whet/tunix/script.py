"""A Tunix script before and after: the beginning of docs/from-tunix.md. The second half is run by a test."""

__all__ = ["SCRIPT"]

SCRIPT = """## A script, before and after

What changes is what belongs to JAX: the mesh, the optimizer of optax, how a model is read, the second copy of it. What
is said of the training stays, word for word. In Tunix:

```python skip
import jax
import optax
from tunix.rl import rl_cluster as rl
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

mesh = jax.make_mesh((1, 4), ("fsdp", "tp"))
policy, reference = read_model(FOLDER, mesh), read_model(FOLDER, mesh)  # each model family has a function of its own
schedule = optax.schedules.warmup_cosine_decay_schedule(0.0, 3e-6, warmup_steps=1, decay_steps=2, end_value=0.0)
optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(schedule, b1=0.9, b2=0.99, weight_decay=0.1))
cluster = rl.RLCluster(
    actor=policy,
    reference=reference,
    tokenizer=tokenizer,
    cluster_config=rl.ClusterConfig(
        role_to_mesh={rl.Role.ACTOR: mesh, rl.Role.REFERENCE: mesh, rl.Role.ROLLOUT: mesh},
        rollout_engine="vanilla",
        rollout_config=RolloutConfig(max_tokens_to_generate=8, max_prompt_length=16, kv_cache_size=64, temperature=0.9),
        training_config=rl.RLTrainingConfig(
            actor_optimizer=optimizer, eval_every_n_steps=10, max_steps=2, checkpoint_root_directory="ckpts"
        ),
    ),
)
algo = GRPOConfig(num_generations=4, num_iterations=1, beta=0.08, epsilon=0.2)
learner = GRPOLearner(rl_cluster=cluster, algo_config=algo, reward_fns=[digits])
with mesh:
    learner.train(batches)
```

Here:

```python
from whet.tunix import ClusterConfig, GRPOConfig, GRPOLearner, OptimConfig, RLCluster, RLTrainingConfig, RolloutConfig
from whet.demo import small_model


def digits(prompts, completions, **columns):  # a reward function is called as there
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


batches = [{"prompts": ["1+1=", "2+2="]}, {"prompts": ["3+3=", "4+4="]}]  # and so are batches
optimizer = OptimConfig(
    lr=3e-6, betas=(0.9, 0.99), weight_decay=0.1, schedule="cosine", warmup_steps=1, max_grad_norm=0.1
)
cluster = RLCluster(
    actor=small_model(seed=0),  # or FOLDER, or a hub name
    reference="actor",  # as it is at the start; or a folder
    tokenizer="byte",
    cluster_config=ClusterConfig(
        rollout_engine="vanilla",  # whet's own, "embedded"
        rollout_config=RolloutConfig(max_tokens_to_generate=8, max_prompt_length=16, kv_cache_size=64, temperature=0.9),
        training_config=RLTrainingConfig(
            actor_optimizer=optimizer, eval_every_n_steps=10, max_steps=2, checkpoint_root_directory="ckpts"
        ),
    ),
)
algo = GRPOConfig(num_generations=4, num_iterations=1, beta=0.08, epsilon=0.2)
learner = GRPOLearner(rl_cluster=cluster, algo_config=algo, reward_fns=[digits])
run = learner.train(batches)
print([row["reward"] for row in run.rows])
```

- **Names**: `whet.tunix` has those of Tunix's packages in one place; what is not there says so when it is imported.
- **Devices**: there a mesh for each role; here one process on the device there is, and `role_to_mesh` is left out.
- **Optimizer**: there a transformation of optax; here `OptimConfig` with clipping, schedule and decay as fields, or a
  function that makes an optimizer of torch.
- **Model**: there a function for each family, called twice; here a folder or hub name of Hugging Face, read once.
  `reference="actor"` is its state at the start.
- **An adapter**: there LoRA by qwix, before the cluster is made; here
  `actor=RoleConfig(model=FOLDER, lora=LoraConfig(r=16))`, and the reference is the base under it.
- **KL**: `kl_loss_mode="kl"` by default, as there; `"low_var_kl"` pulls towards the reference.
- **The data**: in their order, once, as there; `data=DataConfig(shuffle=True)` and `num_epochs` say otherwise.
- **A second start**: where `checkpoint_root_directory` holds checkpoints, `train` goes on from the newest, as there.
- **What comes out**: there checkpoints of Orbax; here, where `run_dir` is given, a Hugging Face folder in `final/` and
  checkpoints that resume exactly.

The same run as a command, with the same words, and without a program: `whet grpo model=FOLDER data=train.jsonl
reward=rewards.py:digits algo.beta=0.08 rollout.temperature=0.9 ...`.
"""
"""The section."""
