"""docs/from-tunix.md: every field of Tunix's configurations, and what whet.tunix does with it."""

from __future__ import annotations

import dataclasses
from typing import Any

from tools.docs.table import legend, table
from whet.compat.field import Field, State
from whet.tunix import ABSENT
from whet.tunix.agentic import ABSENT as AGENTIC_ABSENT
from whet.tunix.agentic.config import AgenticGRPOConfig
from whet.tunix.configs import (
    AlgorithmConfig,
    CheckpointingOptions,
    ClusterConfig,
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    MetricsLoggerOptions,
    PerfMetricsOptions,
    PPOConfig,
    ProfilerOptions,
    RLTrainingConfig,
    RolloutConfig,
    TrainingConfig,
)

__all__ = ["PROGRAMS", "REQUIRED", "TUNIX_FIELDS", "page"]

REQUIRED = "(required)"
"""The default of a field that has none."""


_VLLM: dict[str, Any] = {
    "server_mode": False,
    "server_mode_submission_threshold": 0,
    "server_mode_submission_timeout_s": 0.0,
    "model_version": "",
    "lora_config": None,
    "hbm_utilization": 0.2,
    "init_with_random_weights": True,
    "async_scheduling": False,
    "logprobs_mode": "processed_logprobs",
    "hf_config_path": None,
    "additional_config": None,
    "enable_dp_attention": False,
    "delete_dst_buffers": True,
    "max_num_batched_tokens": None,
    "max_num_seqs": None,
    "reshard_chunk_size": None,
    "kwargs": {},
    "sampling_kwargs": {},
}
_SGLANG: dict[str, Any] = {
    "model_version": "",
    "context_length": None,
    "mem_fraction_static": 0.2,
    "init_with_random_weights": True,
    "disable_radix_cache": True,
    "enable_deterministic_sampling": False,
    "use_sort_for_toppk_minp": True,
    "enable_static_lora": False,
    "enable_single_process": True,
    "lora_target_modules": None,
    "max_lora_rank": None,
    "lora_scaling": None,
    "precompile_bs_paddings": None,
    "precompile_token_paddings": None,
    "chunked_prefill_size": -1,
    "page_size": 128,
    "load_format": "auto",
    "max_running_requests": None,
    "log_level": "info",
    "kwargs": {},
}
_ONE = "in vLLM and SGLang -1 or 1; more is refused when the engine is built"
_DONE = {
    "vllm_server_mode": "requests are taken while it decodes in any case",
    "vllm_server_mode_submission_threshold": "a step's requests come together",
    "vllm_server_mode_submission_timeout_s": "a step's requests come together",
    "vllm_init_with_random_weights": "it starts without weights and takes the actor's at once",
    "vllm_delete_dst_buffers": "weights are written in place",
    "vllm_reshard_chunk_size": "parameters are handed over one at a time, by reference",
    "sglang_jax_init_with_random_weights": "it starts without weights and takes the actor's at once",
    "sglang_jax_load_format": "no weights are read",
    "sglang_jax_use_sort_for_toppk_minp": "SGLang's PyTorch engine has no such choice",
    "sglang_jax_enable_single_process": "SGLang's PyTorch engine has no such choice",
    "sglang_jax_lora_target_modules": "whole weights are sent",
    "sglang_jax_max_lora_rank": "whole weights are sent",
    "sglang_jax_lora_scaling": "whole weights are sent",
    "sglang_jax_precompile_bs_paddings": "SGLang's PyTorch engine chooses its graphs by itself",
    "sglang_jax_precompile_token_paddings": "SGLang's PyTorch engine chooses its graphs by itself",
}
"""Fields of the external engines that are accepted without effect."""
_NARROWER = {
    "vllm_model_version": "a folder or name; its config is used, and the weights are the actor's",
    "vllm_lora_config": "refused when the engine is built unless None: whole weights are sent",
    "vllm_hbm_utilization": "on a CPU, the share of the host's memory that the KV may take",
    "vllm_logprobs_mode": "processed_logprobs or raw_logprobs",
    "vllm_enable_dp_attention": "refused when the engine is built unless False: one device",
    "vllm_sampling_kwargs": "those that change the distribution are refused",
    "sglang_jax_model_version": "a folder or name; its config is used, and the weights are the actor's",
    "sglang_jax_enable_deterministic_sampling": "draws follow the request's seed only with it",
    "sglang_jax_enable_static_lora": "refused when the engine is built unless False: whole weights are sent",
}
"""Fields of the external engines that have a narrower meaning here."""


def _external(engine: str, defaults: dict[str, Any]) -> dict[str, Field]:
    """The fields of an external engine under their full names."""
    found = {}
    for name, default in defaults.items():
        key = f"{engine}_{name}"
        state: State = "no effect" if key in _DONE else "differs" if key in _NARROWER else "works"
        found[f"rollout_{key}"] = Field(default, state, _DONE.get(key) or _NARROWER.get(key, ""))
    return found


_OWN_REFUSED = RolloutConfig.REFUSED  # pyright: ignore[reportAttributeAccessIssue]
_OVERLONG_BUFFER = {
    "enable": True,
    "overlong_buffer_length": 4096,
    "overlong_buffer_penalty": 1.0,
    "max_response_length": 20480,
}

TUNIX_FIELDS: dict[type, dict[str, Field]] = {
    AlgorithmConfig: {
        "algo_variant": Field("grpo", "no effect", "the other fields say it all"),
        "advantage_estimator": Field("grpo", note="also a function or package.module:function"),
        "policy_loss_fn": Field("grpo", note="also a function or package.module:function"),
        "reward_manager": Field("sequence-level", note="also a class or package.module:name"),
        "kl_clamp_value": Field(None),
        "overlong_buffer": Field(
            _OVERLONG_BUFFER,
            "differs",
            "off unless `enable`, which DAPOConfig sets; counts tokens, not characters, and takes no more than that",
        ),
    },
    GRPOConfig: {
        "loss_agg_mode": Field("sequence-mean-token-mean", note="also a function"),
        "loss_algo": Field("grpo"),
        "num_generations": Field(2),
        "num_iterations": Field(1),
        "beta": Field(0.04),
        "kl_loss_mode": Field("kl", note="its gradient does not pull towards the reference; that of low_var_kl does"),
        "epsilon": Field(0.2),
        "epsilon_high": Field(None, note="a real field; there it is read where it happens to be set"),
        "epsilon_c": Field(None, note="a real field; there it is read where it happens to be set"),
        "use_rollout_logps": Field(True),
        "sampler_is": Field(None),
        "sampler_is_threshold": Field(2.0),
        "force_compute_kl": Field(False, note="there in the agentic GRPOConfig"),
    },
    AgenticGRPOConfig: {
        "algo_variant": Field("agentic_grpo", "no effect", "the other fields say it all"),
        "reward_manager": Field("agentic-sequence-level", "differs", "the name is accepted for the default"),
        "system_prompt": Field(""),
        "max_response_length": Field(
            1024, note="of an episode; max_tokens_to_generate is that of a turn, and need not be equal"
        ),
        "max_concurrency": Field(16, "no effect", "all episodes of a step run; rollout_micro_batch_size bounds them"),
        "off_policy_steps": Field(0, "differs", "must be 0: rollouts and updates take turns"),
        "episode_timeout": Field(1800.0),
        "filter_statuses": Field(None),
        "overlong_filter": Field(False),
        "degenerate_group_masking": Field(False, "no effect", "advantages of equal rewards are 0 anyway"),
    },
    DAPOConfig: {
        "algo_variant": Field("dapo", "no effect", "the other fields say it all"),
        "loss_agg_mode": Field("token-mean"),
        "beta": Field(None, "differs", "None is read as 0.0; no reference is loaded"),
        "epsilon": Field(0.2),
        "epsilon_high": Field(0.28),
        "dynamic_sampling": Field(True, note="carried out, with trainer.max_steps; there it is not"),
        "overlong_buffer": Field(
            _OVERLONG_BUFFER,
            "differs",
            "the same values; counts tokens, not characters, and takes no more than the penalty",
        ),
    },
    DrGRPOConfig: {
        "algo_variant": Field("drgrpo", "no effect", "the other fields say it all"),
        "advantage_estimator": Field("drgrpo", note="may be changed"),
        "loss_agg_mode": Field("sequence-mean-token-scale"),
    },
    PPOConfig: {
        "algo_variant": Field("ppo", "no effect", "the other fields say it all"),
        "num_iterations": Field(1),
        "gamma": Field(1.0),
        "gae_lambda": Field(0.95),
        "beta": Field(0.04, note="of the KL in the reward; kl_type puts it elsewhere"),
        "epsilon": Field(0.2),
        "epsilon_low": Field(None, note="0.0 is a value; there it counts as unset"),
        "epsilon_high": Field(None, note="0.0 is a value; there it counts as unset"),
        "epsilon_c": Field(None),
        "entropy_coef": Field(None, "differs", "None is read as 0.0"),
        "clip_range_value": Field(0.2),
        "kl_method": Field("low_var_kl"),
        "advantage_estimator": Field("gae", note="also a function or package.module:function"),
        "policy_loss_fn": Field("ppo", note="also a function or package.module:function"),
        "value_loss_fn": Field("ppo", note="also a function or package.module:function"),
    },
    RolloutConfig: {
        "max_tokens_to_generate": Field(64),
        "temperature": Field(0.9),
        "top_p": Field(1.0),
        "top_k": Field(None),
        "seed": Field(None, "differs", "an integer; None = the run's seed, and every call draws for itself"),
        "max_prompt_length": Field(64, "differs", "a longer prompt is an error unless on_long_prompt says otherwise"),
        "kv_cache_size": Field(1024, "no effect", "a row takes the cache it needs; kv_cache_tokens bounds them all"),
        "data_type": Field(None, "refused", "the rollout reads the trainer's weights; set actor.dtype"),
        "eos_tokens": Field(None),
        "rollout_mapping_config": Field(None, "refused", "both sides use Hugging Face's parameter names"),
        "tensor_parallel_size": Field(-1, "differs", _ONE),
        "data_parallel_size": Field(-1, "differs", _ONE),
        "expert_parallel_size": Field(1, "differs", _ONE),
        "return_logprobs": Field(False, "differs", "decides about RolloutOutput.logprobs; training has them anyway"),
        **_external("vllm", _VLLM),
        "rollout_vllm_tpu_backend_type": Field(None, "refused", "there is no TPU back end"),
        **_external("sglang_jax", _SGLANG),
        **{name: Field(None, "refused", reason) for name, reason in _OWN_REFUSED.items()},
    },
    TrainingConfig: {
        "eval_every_n_steps": Field(REQUIRED, "differs", "0 by default: only before the first and after the last step"),
        "max_steps": Field(None, "differs", "global steps (rollouts) everywhere; None is allowed"),
        "gradient_accumulation_steps": Field(None),
        "checkpoint_root_directory": Field(None, "differs", "None = checkpoints/ of the run folder, if there is one"),
        "checkpointing_options": Field(None),
        "metrics_logging_options": Field(None),
        "profiler_options": Field(None),
        "perf_metrics_options": Field(None),
        "data_sharding_axis": Field(("fsdp",), "no effect", "one process holds the whole batch"),
        "max_inflight_computations": Field(2, "no effect", "a step ends before the next begins"),
        "metrics_prefix": Field(""),
        "pbar_description": Field("Training"),
        "max_seq_token_per_tpu": Field(
            None,
            "differs",
            "read into max_tokens_per_microbatch; None = 16384 on a GPU; about 1536, up to 2048, on a CPU",
        ),
        "max_segments_per_packed_row": Field(None, "differs", "sequences of a micro-batch"),
        "max_logp_positions_per_packed_row": Field(None, "refused", "only completion positions are computed anyway"),
    },
    RLTrainingConfig: {
        "actor_optimizer": Field(REQUIRED, "differs", "an OptimConfig, a torch optimizer factory or its reference"),
        "critic_optimizer": Field(None, "differs", "the same; None = as the actor's"),
        "mini_batch_size": Field(None),
        "train_micro_batch_size": Field(None, "differs", "an upper bound, in addition to the token budget"),
        "rollout_micro_batch_size": Field(None),
        "compute_logps_micro_batch_size": Field(None, "differs", "an upper bound, in addition to the token budget"),
        "compute_logps_chunk_size": Field(0, "no effect", "logits are always made a chunk at a time"),
    },
    ClusterConfig: {
        "role_to_mesh": Field(REQUIRED, "differs", "checked: axes of data whose product is torchrun's processes"),
        "role_to_logical_axis_rule": Field(None, "refused", "parameters are sharded by mesh axis"),
        "rollout_engine": Field(
            "vanilla",
            "differs",
            '"embedded", under either name; "sglang_jax" = "sglang"; also a class, partial, reference',
        ),
        "offload_to_cpu": Field(False, "differs", "reference, masters and moments; the actor's weights stay"),
        "training_config": Field(REQUIRED, "differs", "RLTrainingConfig() by default"),
        "rollout_config": Field(REQUIRED, "differs", "RolloutConfig() by default; a dict of modes needs Mode.TRAIN"),
        "gc_collect_after_weight_sync": Field(
            True, "refused", "weights are written in place, nothing is left to collect"
        ),
    },
    CheckpointingOptions: {
        "save_interval_steps": Field(None),
        "max_to_keep": Field(3),
        "enable_async_checkpointing": Field(True, "differs", "False unless set; True writes sharded checkpoints"),
        "timeout_secs": Field(1200, "no effect", "a save ends or raises"),
    },
    MetricsLoggerOptions: {
        "log_dir": Field(REQUIRED, "differs", "None = the run folder; with no logger named it turns TensorBoard on"),
        "project_name": Field("tunix", "differs", '"whet"'),
        "run_name": Field(""),
        "flush_every_n_steps": Field(100),
        "backend_kwargs": Field({}, "differs", "keys jsonl, tensorboard, trackio, wandb; own loggers go to loggers"),
        "enable_opentelemetry": Field(False, "refused", "there is no exporter; give loggers an object"),
    },
    ProfilerOptions: {
        "log_dir": Field(REQUIRED, "differs", "None = the run folder; torch.profiler's timeline and a table"),
        "skip_first_n_steps": Field(REQUIRED, "differs", "1 by default"),
        "profiler_steps": Field(REQUIRED, "differs", "1 by default; a pair of files for each"),
        "set_profile_options": Field(True, "no effect", "every operation of torch is traced"),
        "host_tracer_level": Field(2, "no effect", "every operation of torch is traced"),
        "python_tracer_level": Field(1, "no effect", "Python shows as one line of each phase"),
        "max_num_hosts": Field(None, "no effect", "the first process alone is profiled"),
    },
    PerfMetricsOptions: {
        "enable_perf_v1": Field(True, "no effect", "time/ metrics are always there"),
        "enable_perf_v2": Field(False, "no effect", "time/ metrics are always there"),
        "custom_export_fn_path": Field(None, "refused", "time/ metrics go to every logger"),
        "custom_export_fn_path_v2": Field(None, "refused", "time/ metrics go to every logger"),
        "enable_trace_writer": Field(True),
        "trace_dir": Field(None, "differs", "None = the run folder; trace.json opens in Perfetto"),
    },
}
"""Configuration class -> Tunix's field -> what it is here."""

PROGRAMS: tuple[tuple[str, str, str], ...] = (
    (
        "`RLCluster`, `RLEngine`",
        "works",
        "`generate`, the per-token logps, `update_actor`, `update_critic`, `train(role, ...)`, `eval_actor`, "
        "`get_values` ([B, C], at completion tokens), `get_rewards` ([B], at the last token)",
    ),
    (
        "`with_external_metrics_logger`",
        "works",
        "a MetricsBuffer of each step and each evaluation: `rewards/*`, `completions/*`, prompts, completions, "
        "trajectory_ids, metric_fns (of steps) and buffer_metrics; steps count from 1, 0 is the evaluation before them",
    ),
    (
        "`GRPOLearner`, `PPOLearner`",
        "works",
        "`rl_engine=` or `rl_cluster=`; trains on rows or batches in their order, once; continues from the newest "
        "checkpoint of checkpoint_root_directory",
    ),
    (
        "`_generate_and_compute_advantage`",
        "works",
        "a subclass may replace it, with or without `super()`; training uses the batch that it returns; "
        "`_compute_rewards` calls the reward functions. Not with dynamic_sampling",
    ),
    (
        "`prepare_dataset`, `_prepare_data`, `_run_global_step`",
        "refused",
        "never called: a step's prompts are completed together, and there is no queue",
    ),
    ("`RewardFn`, `MetricFn`", "works", ""),
    (
        "`TrainingHooks`",
        "works",
        "losses are numbers; on_train_start and on_train_end once a run, not once an update; in reinforcement learning "
        "the evaluation hooks once an evaluation, with the loss of what it sampled",
    ),
    ("`DataHooks`", "differs", "give `actor_trainer.train()` its batches; a learner refuses a trainer that has them"),
    (
        "`Trainer`: `train`, `train_steps`, `iter_steps`, `restored_global_step`, `model`",
        "works",
        "`cluster.actor_trainer` and `critic_trainer`; `with_loss_fn` takes a loss of whet's form (docs/extending.md)",
    ),
    (
        "`with_rl_metrics_to_log`",
        "differs",
        "np.mean, np.max, np.min, their names, or another of whet's reductions; other functions are refused",
    ),
    ("`with_tqdm_metrics_to_display`", "works", "functions are called once, when they are given"),
    (
        "`cluster.rollout`",
        "works",
        "`generate(prompts, rollout_config)`, `get_per_token_logps`, `pad_id()`, `eos_id()`, `model()`; "
        "`update_params` is refused: the engine reads the actor's weights",
    ),
    ("`VanillaRollout`", "works", "samples from its own model; `update_params` takes weights by name"),
    (
        "`InferenceWorker`",
        "works",
        "`get_rewards`, `get_values` (also compute_...: [B, T]), `get_ref_per_token_logps`, `get_model`; models are "
        "modules of transformers",
    ),
    (
        "`rl.common`",
        "works",
        "`from whet.tunix import common`: masks, positions, per-token logps (the model in place of graphdef and "
        "state), scores, KLs, `aggregate_loss` (divided); rows packed by hand (segment_ids) are refused",
    ),
    (
        "`PerfMetricsConfig`, `PerfMetricsExport`",
        "differs",
        "the export of PerfMetricsExport has no effect: time/ metrics are always logged; a function of your own is "
        "refused, because whet has no Tunix spans",
    ),
    ("`PPOConfig.mini_batch_size`", "refused", "it is RLTrainingConfig's"),
    ("`TokenizerAdapter`, `Tokenizer`", "differs", "around a tokenizer of transformers, from a folder or a hub name"),
    ("`Sampler`, `CacheConfig`", "works", "[generating](generating.md)"),
    (
        "`AgenticGRPOLearner`",
        "works",
        "agent_class, env_class and their kwargs, chat_parser, metric_fns; a subclass may replace "
        "`_create_agent_env_pair`. Reward functions get the last turn of an episode (in Tunix the first); "
        "trajectory_rewards is not offered to them. ENV_TIMEOUT gives no reward. "
        "With the rollout's `answers_dir` episodes are recorded and played again",
    ),
    ("an agent's row, `env.task`", "differs", "texts and numbers are NumPy's scalars, not arrays of one element"),
    ("an agent that changes its history", "works", "the episode forks; in Tunix the ids no longer fit the history"),
    (
        "`rl.agentic`: agents, environments, tools, rewards, `TrajectoryCollectEngine`",
        "works",
        "`from whet.tunix.agentic import ...`, by Tunix's names of modules or of classes; tool parsers qwen and gemini",
    ),
    (
        "chat parsers (`QwenChatTemplateParser` and others)",
        "differs",
        "each is `ChatTemplateParser(tokenizer)`, which writes by the tokenizer's own template; one of yours, with "
        "`parse`, works",
    ),
    ("trajectories as CSV", "differs", "the run folder's completions/*.parquet has the turns of each episode"),
    ("data queues, resharding", "refused", "nothing is queued, resharded or awaited"),
)
"""Names that Tunix's programs use apart from configurations: the name, its state here, a note."""

_SCRIPT = """## A script, before and after

The parts that belong to JAX change: the mesh, the optax optimizer, and the loading of the model and its second copy.
The configuration of the training stays the same, word for word. In Tunix:

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

In whet:

```python
from whet.tunix import ClusterConfig, GRPOConfig, GRPOLearner, OptimConfig, RLCluster, RLTrainingConfig, RolloutConfig
from whet.demo import small_model


def digits(prompts, completions, **columns):  # a reward function has the same signature
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


batches = [{"prompts": ["1+1=", "2+2="]}, {"prompts": ["3+3=", "4+4="]}]  # and batches have the same form
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

- **Names**: `whet.tunix` has the names of all of Tunix's packages. Importing a name that whet does not offer raises an
  error with the reason.
- **Devices**: Tunix has a mesh for each role. In whet all roles share the processes of `torchrun`, each with one
  device, and every model is sharded over all of them ([Several processes](scaling.md)): leave `role_to_mesh` out. A
  mesh (torch's, jax's, `{"fsdp": 2}` or `((2, 1), ("fsdp", "tp"))`) is checked: an axis of tensors above 1, or another
  product than the number of processes, is refused with the arithmetic.
- **Optimizer**: an optax transformation in Tunix; in whet an `OptimConfig`, which has fields for clipping, schedule and
  decay, or a function that makes a torch optimizer.
- **Model**: Tunix calls a loader of the model family twice; whet reads a Hugging Face folder or hub name once.
  `reference="actor"` is the actor's state at the start.
- **LoRA**: Tunix applies qwix before it makes the cluster. In whet set
  `actor=RoleConfig(model=FOLDER, lora=LoraConfig(r=16))`; the reference is the base model under the adapter.
- **KL**: the default is `kl_loss_mode="kl"`, as in Tunix; `"low_var_kl"` pulls towards the reference.
- **Second names**: `loss_algo` is read into `policy_loss_fn`, and `kl_method` into `kl_loss_mode`.
- **Data**: read once, in their order, as in Tunix, unless `data=DataConfig(shuffle=True)` or `num_epochs` is set.
- **Resume**: if `checkpoint_root_directory` holds checkpoints, `train` continues from the newest, as in Tunix.
- **Output**: Tunix writes Orbax checkpoints. With `run_dir`, whet writes a Hugging Face folder in `final/`, and
  checkpoints that resume exactly.

An agent of Tunix's form plays episodes of several turns. Its imports change, and nothing else:

```python
from whet.tunix import AgenticGRPOConfig, AgenticGRPOLearner
from whet.tunix.agentic import BaseTaskEnv, EnvStepResult, ModelAgent


class Twice(BaseTaskEnv):
    def _initial_observation(self):
        return self.task  # the row; the agent says its "prompts"

    def _step_impl(self, action):
        reward = float(action == str(self.task["answer"]))
        return EnvStepResult(observation="Are you sure?", reward=reward, done=False, info={})


class Lines:  # a chat parser of one's own, since this tokenizer has no chat template
    def parse(self, messages, add_generation_prompt=False, is_first_msg=False):
        return "".join(f"{message['content']}\\n" for message in messages)


agentic = RLCluster(
    actor=small_model(seed=0),
    tokenizer="byte",
    cluster_config=ClusterConfig(
        rollout_config=RolloutConfig(max_tokens_to_generate=8, max_prompt_length=32, return_logprobs=True),
        training_config=RLTrainingConfig(actor_optimizer=optimizer, max_steps=1),
    ),
)
learner = AgenticGRPOLearner(
    rl_engine=agentic,
    algo_config=AgenticGRPOConfig(num_generations=4, beta=0.0, max_response_length=48, system_prompt="Add."),
    chat_parser=Lines(),
    agent_class=ModelAgent,
    env_class=Twice,
    env_kwargs={"max_steps": 2},
)
run = learner.train([{"prompts": ["1+1=", "2+2="], "answer": ["2", "4"]}])
assert run.rows[0]["turns/mean"] == 2
```

The same run as a command, with the same keys and without a program: `whet grpo model=FOLDER data=train.jsonl
reward=rewards.py:digits algo.beta=0.08 rollout.temperature=0.9 ...`.
"""
"""A Tunix script before and after; a test runs the second half."""

_INTRO = f"""# From Tunix

A Tunix program changes one line: `from whet.tunix import ...`. Tunix's names, defaults and error messages are kept for
everything that whet offers. This page shows a script, then every field, then the names that programs use.

{_SCRIPT}
## Every field

{{legend}}

Configurations are frozen: `dataclasses.replace(config, beta=0.0)` makes a changed copy. A wrong keyword or type raises
an error that suggests the nearest name. `GrpoConfig` and `GrpoLearner` are the same as `GRPOConfig` and
`GRPOLearner`. Sizes of batches count prompts; a *step* is always one rollout.
"""


def page() -> str:
    """The text of docs/from-tunix.md."""
    rows = [field for fields in TUNIX_FIELDS.values() for field in fields.values()]
    parts = [_INTRO.replace("{legend}", legend(rows))]
    for cls, fields in TUNIX_FIELDS.items():
        theirs = {name for known in TUNIX_FIELDS.values() for name in known}
        bases = [base for base in TUNIX_FIELDS if base is not cls and issubclass(cls, base)]
        inherited = {f.name for base in bases for f in dataclasses.fields(base)}
        ours = [f.name for f in dataclasses.fields(cls) if f.name not in theirs | inherited]
        rows = [
            (f"`{name}`", REQUIRED if field.default == REQUIRED else f"`{field.default!r}`", field.state, field.note)
            for name, field in fields.items()
        ]
        parts.append(f"### {cls.__name__}\n\n{table(['field', 'default in Tunix', 'here', 'note'], rows)}\n")
        if ours:
            parts.append(f"whet's own: {', '.join(f'`{n}`' for n in ours)}.\n")
    absent = {**{f"agentic.{name}": reason for name, reason in AGENTIC_ABSENT.items()}, **ABSENT}
    rows = [*PROGRAMS, *((f"`{name}`", "refused", reason) for name, reason in absent.items())]
    parts.append(f"## Names, methods and hooks\n\n{table(['in Tunix', 'in whet.tunix', 'note'], rows)}\n")
    return "\n".join(parts)
