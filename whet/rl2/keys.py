"""RL2's keys, and what whet.rl2 does with each: the source of the translation and of docs/from-rl2.md.

One table for each trainer holds the keys of all generations of RL2: the README of July 2025, the release of September
2025 and the configuration of May 2026. If a row works, the translation copies the value to whet's key. If a row has the
state "differs", the translation computes whet's keys from this value and from others.
"""

from __future__ import annotations

from whet.compat.field import Field, no_effect, refused

__all__ = ["KEYS", "MEGATRON", "effect_of"]


def effect_of(field: Field) -> str:
    """Returns the word that the page and `--help` show for a row without a key of whet's."""
    if field.state == "refused":
        return "refused above 1" if field.harmless[-1:] == (1,) else "refused"
    return "checked" if field.state == "differs" else field.state


def copied(key: str, note: str = "") -> Field:
    """Returns a row for a key that the translation copies to a key of whet's."""
    return Field(state="works", note=note, key=key)


def computed(key: str = "", note: str = "") -> Field:
    """Returns a row for a key from which, with others, the translation computes keys of whet's; "" = it is only
    checked.
    """
    return Field(state="differs", note=note, key=key)


_ONE = refused(None, "the processes of the actor's tp_size sample together; set it to 1", harmless=(1,))
_DDP = computed(
    "trainer.data_parallel_replicate_size", "copies of each model; roles that leave it out have that of the others"
)
_FSDP = computed(
    "", "ddp_size x fsdp_size x tp_size must be torchrun's processes; left out, or 0, it is what the others leave"
)
_TP = computed(
    "trainer.tensor_parallel_size",
    "processes that divide the matrices of layers; roles that leave it out have that of the others",
)
_CP = computed(
    "trainer.context_parallel_size",
    "processes that divide the tokens of a pass; roles that leave it out have that of the others",
)
MEGATRON = "whet does not use Megatron; leave its keys out"
"""The reason to refuse Megatron's keys."""
_LIGER = "whet never computes a whole row of logits, and has its own norms, rotary embeddings and LoRA for a GPU"
_BUDGET = "all passes use the token budget of training"
_SWITCH = "one switch for models and optimizers of all roles: on, unless a key is false and none is true"
_ACTOR_MODEL = "the rollout uses the actor's model; another one is refused"
_AS_IN_TRAINING = "evaluation uses the value of training; another value is refused"
_TEST_RATIO = "read if no test path is set; the default since 2026 is 0.03"
_ROLE_FOLDER = "whet saves all roles together, in the run folder: trainer.save_dir"


def _sampling(mode: str, to: str) -> dict[str, Field]:
    """Returns the keys below sampling_params, which have SGLang's names."""
    same = {
        "temperature": "temperature",
        "max_new_tokens": "max_tokens_to_generate",
        "min_new_tokens": "min_tokens",
        "top_p": "top_p",
        "top_k": "top_k",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "stop": "stop",
        "stop_token_ids": "eos_tokens",
        "regex": "constraint.regex",
        "json_schema": "constraint.json_schema",
    }
    kept = "a completion always keeps the tokens of its stop string"
    other = {
        "no_stop_trim": no_effect(None, kept),
        "skip_special_tokens": no_effect(None, "the rollout returns tokens; rewards read texts without special tokens"),
        "spaces_between_special_tokens": no_effect(None, "the rollout returns tokens"),
        **{
            name: refused(None, "whet's engine has only repetition_penalty", harmless=(0, 0.0))
            for name in ("frequency_penalty", "presence_penalty")
        },
        "n": refused(None, "set responses_per_prompt instead", harmless=(1,)),
        "ebnf": refused(None, "whet.rollout.constrained_decoding.grammar takes a grammar in Lark's form"),
    }
    notes = {
        "max_new_tokens": "it bounds one turn; it is required" if mode == "train" else "",
        "stop_token_ids": "they replace the model's own end ids",
    }
    return {**{k: copied(f"{to}.{v}", notes.get(k, "")) for k, v in same.items()}, **other}


def _under(prefix: str, keys: dict[str, Field]) -> dict[str, Field]:
    return {f"{prefix}.{name}": key for name, key in keys.items()}


def _model(role: str, section: str) -> dict[str, Field]:
    """Returns the keys of every model."""
    return {
        "model_name": copied(f"{section}.model"),
        "tokenizer_name": computed("tokenizer", "all roles use the actor's tokenizer"),
        "use_liger_kernel": no_effect(None, _LIGER),
        "dtype": computed(
            f"{section}.dtype", "bfloat16 or float32; master weights are fp32 in both; float16 is refused"
        ),
        "ddp_size": _DDP,
        "fsdp_size": _FSDP,
        "tp_size": _TP,
        "sp_size": _CP,
        "cp_size": _CP,
        "max_length_per_device": no_effect(None, _BUDGET),
        "max_inference_length_per_device": no_effect(None, _BUDGET),
        "offload_model": computed("offload_to_cpu", _SWITCH),
    }


def _trained(role: str, section: str) -> dict[str, Field]:
    """Returns the keys of a model that is trained."""
    optim = f"{section}.optim"
    lr, decay = (
        copied(f"{optim}.lr"),
        copied(f"{optim}.weight_decay", "only matrices decay, norms and biases do not"),
    )
    ratio = computed(
        f"{optim}.warmup_ratio", "without a scheduler key the schedule is a cosine down to 0, as in July 2025"
    )
    without = "; the reference is then the actor without the adapter" if role == "actor" else ""
    recompute = computed(f"{section}.gradient_checkpointing", "on unless it is false, as in RL2")
    return {
        **_model(role, section),
        "gradient_checkpointing": recompute,
        "enable_gradient_checkpointing": recompute,
        "lr": lr,
        "weight_decay": decay,
        "warmup_ratio": ratio,
        "max_grad_norm": copied(f"{optim}.max_grad_norm", "it bounds the norm of the whole gradient"),
        "optimizer.lr": lr,
        "optimizer.weight_decay": decay,
        "optimizer.betas": copied(f"{optim}.betas"),
        "optimizer.eps": copied(f"{optim}.eps"),
        "scheduler": copied(f"{optim}.schedule", "the key of September 2025; constant has no warm-up, as in RL2"),
        "scheduler.name": copied(f"{optim}.schedule", "any of transformers' get_scheduler"),
        "scheduler.warmup_ratio": copied(f"{optim}.warmup_ratio"),
        "scheduler.*": computed(f"{optim}.schedule_kwargs", "e.g. min_lr"),
        "offload_optimizer": computed("offload_to_cpu", _SWITCH),
        "load_ckpt": no_effect(None, "trainer.load_ckpt_from names the checkpoint"),
        "optimizer_dir": refused(
            None,
            "a checkpoint holds weights, moments and the order of the data; resume with trainer.load_ckpt_from",
        ),
        "save_dir": computed("trainer.run_dir", f"the folder that contains .../{role} is the run folder"),
        "save_freq": computed(
            "trainer.checkpointing_options.save_interval_steps", "if it is set, all checkpoints are kept"
        ),
        "save_optimizer": no_effect(None, "checkpoints hold the optimizer's state, the exported model does not"),
        "tf_config.*": refused(None, MEGATRON, harmless=(1, "full", "uniform")),
        "ddp_config.*": refused(None, MEGATRON),
        "optimizer.*": refused(None, f"AdamW has lr, weight_decay, betas and eps; {MEGATRON}"),
        "lora.rank": computed(f"{section}.lora.r", f"0: no adapter{without}"),
        "lora.alpha": computed(f"{section}.lora.lora_alpha", "the default is 16, as in RL2"),
        "lora.target_modules": computed(f"{section}.lora.target_modules"),
        "lora.dropout": computed(f"{section}.lora.lora_dropout", "0.0 in PPO" if role == "actor" else ""),
    }


_TRAINER = {
    "project": copied("trainer.metrics_logging_options.project_name"),
    "experiment_name": copied(
        "trainer.metrics_logging_options.run_name",
        "the run folder is ckpts/<its value>; later runs of this name get _2, _3 ...",
    ),
    "load_ckpt_from": copied("trainer.resume", 'it may be "latest"; a run without a checkpoint begins at step 1'),
    "load_ckpt_from_dir": copied("trainer.resume"),
    "save_dir": computed("trainer.run_dir", "final/ gets the trained model, checkpoints/ the checkpoints"),
    "save_freq": computed(
        "trainer.checkpointing_options.save_interval_steps",
        "null saves by time and keeps three checkpoints; a number keeps all",
    ),
    "test_freq": copied("trainer.eval_every_n_steps", "a run also evaluates before the first step and after the last"),
    "use_wandb": computed("trainer.loggers", "on by default if wandb is installed"),
    "disable_wandb": computed("trainer.loggers"),
    "n_epochs": copied("trainer.num_epochs"),
}
_PPO = {
    "update_per_rollout": computed(
        "trainer.mini_batch_size", "it must divide prompts_per_rollout, since an update takes whole groups"
    ),
    "clip": copied("algo.epsilon"),
    "avg_level": computed(
        "algo.loss_agg_mode, algo.loss_agg_units",
        "sequence: the forks of a trajectory count as one sequence; in RL2 each counts",
    ),
    "adv_estimator": no_effect(None, "set adv.estimator"),
    "freeze_steps": computed("algo.critic_warmup_steps", "the first N steps, in RL2 the first N − 1; only with gae"),
    "temperature": computed("", "training uses the rollout's temperature; another value is refused"),
    "tis_coef": computed(
        "algo.sampler_is, algo.sampler_is_threshold, algo.sampler_is_current, algo.sampler_is_kl",
        "the weight is the ratio of the current policy, and multiplies the KL too",
    ),
    "kl.coef": computed("algo.beta", "it requires kl.type"),
    "kl.type": computed("algo.kl_type", "reward, loss or advantage; RL2 adds it to the advantage after whitening"),
    "kl.reward_estimator": computed("algo.kl_loss_mode", "with kl.type=loss it changed only a logged metric"),
    "kl.loss_estimator": computed("algo.kl_loss_mode", "it is read with kl.type=loss"),
    "entropy.coef": copied("algo.entropy_coef"),
}
_CRITIC = {
    "update_per_rollout": computed(
        "algo.critic_updates", "it must be a multiple of the actor's; the default of July 2025 is 12"
    ),
    "clip": copied("algo.clip_range_value"),
    "avg_level": computed("algo.value_loss_agg_mode", "the default is the actor's value"),
}
_ROWS = {
    "path": computed("data.path, data.split", "a hub name, a folder or a file; split@path"),
    "prompts_per_rollout": copied("data.batch_size"),
    "responses_per_prompt": copied("algo.num_generations"),
    "prompt_key": computed("data.prompt_column", "the column to read without the chat template; the default is prompt"),
    "messages_key": computed(
        "data.prompt_column", "the column to read with the chat template; the default is messages"
    ),
    "apply_chat_template": computed(
        "data.apply_chat_template, rollout.chat_template_kwargs",
        "false joins the contents of the messages without a template",
    ),
    "dynamic_filtering": computed(
        "algo.dynamic_sampling",
        "whet samples other groups in their place, RL2 makes the step smaller; off for groups of one",
    ),
    "partial_rollout": refused(None, "a step ends before the next begins", harmless=(False,)),
    "max_turns": copied("rollout.max_turns"),
    "save_dir": no_effect(None, "completions/ of the run folder has the completions of every step"),
}
_TEST = {
    "path": computed("data.eval_path, data.eval_split"),
    "prompts_per_rollout": no_effect(None, "an evaluation reads the whole set"),
    "responses_per_prompt": copied("rollout.num_generations_eval"),
    **{name: computed("", _AS_IN_TRAINING) for name in ("prompt_key", "messages_key", "apply_chat_template")},
    "save_dir": no_effect(None, "completions/ of the run folder has the completions of every evaluation"),
}
_KV = no_effect(None, "whet's engine allocates the KV cache that it needs; rollout.kv_cache_tokens bounds it")
_SERVER = {
    "model_path": computed("", _ACTOR_MODEL),
    "dtype": no_effect(None, "the rollout reads the trainer's own weights"),
    "tp_size": _ONE,
    "mem_fraction_static": _KV,
    "*": refused(
        None,
        "whet's engine runs the rollout; SGLang's own options are whet.rollout.sglang.*",
    ),
}
_ROLLOUT = {
    "model_name": computed("", _ACTOR_MODEL),
    "tokenizer_name": computed("tokenizer"),
    "tp_size": _ONE,
    "gpu_memory_utilization": _KV,
    "responses_per_prompt": computed("", "it must equal data.responses_per_prompt"),
    "apply_chat_template": _ROWS["apply_chat_template"],
    "max_turns": copied("rollout.max_turns"),
    "env_path": copied("rollout.env_path", "a file with reward_fn, and interact or TOOL"),
    "dynamic_filtering": _ROWS["dynamic_filtering"],
    "group_filtering.lower": computed(
        "algo.group_reward_bounds", "a step trains on the groups with a mean reward strictly between the two"
    ),
    "group_filtering.upper": computed("algo.group_reward_bounds"),
    "bucket_size": no_effect(None, "no weights are sent: the rollout reads the trainer's own"),
    "adv_estimator": no_effect(None, "set adv.estimator"),
    "base_port": no_effect(None, "there is no server"),
    "test_ratio": copied("data.eval_fraction", _TEST_RATIO),
}
_OWN_BUDGET = computed(
    "trainer.max_tokens_per_microbatch",
    "times the processes that divide a pass (sp_size, cp_size); the longest sequence must fit, prompt included",
)
_PPO_TRAINER = {
    "total_steps": copied("trainer.max_steps"),
    "eval_only": refused(None, "use `whet eval`", harmless=(False,)),
    "n_epochs": copied(
        "trainer.num_epochs", "with dynamic_filtering the run has as many steps as these epochs have without it"
    ),
}
_ADV = {
    "estimator": computed("algo.advantage_estimator", "reinforce is `whet grpo`; gae is `whet ppo`, with a critic"),
    "gamma": computed("algo.gamma", "gae reads it"),
    "lamda": computed("algo.gae_lambda", "gae reads it; the critic's returns use it too, before whitening"),
    "norm_var": computed("algo.norm_var", "reinforce reads it"),
    "global_norm": computed("algo.global_norm", "reinforce reads it"),
    "responses_per_prompt": computed("", "it must equal data.responses_per_prompt"),
}
_OTHERS_DATA = {
    name: refused(None, "sft, rm and dpo have this key; ppo has prompts_per_rollout and max_length_per_device")
    for name in ("max_length", "batch_size")
}

_EXAMPLES = {
    "path": computed("data.path, data.split", "a hub name, a folder or a file; split@path"),
    "max_length": computed(
        "data.max_length, data.on_long",
        "longer sequences are truncated, and a line logs their number; without this key none is. In sft and dpo it "
        "bounds the model's input, which lacks the last token, so whet's value is 1 more",
    ),
    "batch_size": computed("data.batch_size"),
    "prompt_key": computed("data.prompt_column", "only read without the chat template"),
    "apply_chat_template": computed("data.apply_chat_template", "false reads texts unchanged and adds the end token"),
}
_EXAMPLES_TEST = {
    "path": computed("data.eval_path, data.eval_split"),
    **{name: computed("", _AS_IN_TRAINING) for name in ("max_length", "apply_chat_template")},
}
_SFT_KEYS = {
    "response": computed("data.response_column", "only read without the chat template"),
    "messages": computed("data.messages_column", "only read with the chat template"),
}
_PAIR_KEYS = {
    **{name: computed(f"data.{name}_column") for name in ("chosen", "rejected")},
    "messages": computed("data.messages_column", "a key of July 2025: the prompt of two texts"),
}


def _examples(**columns: Field) -> dict[str, Field]:
    """Returns the keys of a data set for supervised training and of its columns."""
    own = {f"{name}_key": key for name, key in columns.items()}
    test = {name: computed("", _AS_IN_TRAINING) for name in ("prompt_key", *own)}
    return {
        **_under("data", {**_EXAMPLES, **own}),
        **_under("data.train", {**_EXAMPLES, **own}),
        **_under("data.test", {**_EXAMPLES_TEST, **test}),
        "data.test_ratio": computed("data.eval_fraction", _TEST_RATIO),
    }


KEYS: dict[str, dict[str, Field]] = {
    "ppo": {
        **_under("data", {"path": _ROWS["path"], "train_data_path": _ROWS["path"], "test_data_path": _TEST["path"]}),
        **_under("data", {name: _ROWS[name] for name in ("prompts_per_rollout", "responses_per_prompt")}),
        **_under("train_data", {name: _ROWS[name] for name in ("path", "prompts_per_rollout", "responses_per_prompt")}),
        **_under("test_data", {name: _TEST[name] for name in ("path", "prompts_per_rollout", "responses_per_prompt")}),
        **_under("data", _OTHERS_DATA),
        **_under("rollout", _ROLLOUT),
        **_under("rollout.train", _ROWS),
        **_under("rollout.test", _TEST),
        **_under("rollout.train_sampling_params", _sampling("train", "rollout")),
        **_under("rollout.test_sampling_params", _sampling("test", "rollout.eval")),
        **_under("rollout.train.sampling_params", _sampling("train", "rollout")),
        **_under("rollout.test.sampling_params", _sampling("test", "rollout.eval")),
        **_under("rollout.server_args", _SERVER),
        **_under("actor", {**_trained("actor", "actor"), **_PPO, "max_length_per_device": _OWN_BUDGET}),
        **_under("ref_actor", {**_model("ref_actor", "reference"), "temperature": _PPO["temperature"]}),
        **_under("critic", {**_trained("critic", "critic"), **_CRITIC, "save_dir": no_effect(None, _ROLE_FOLDER)}),
        "critic.save_freq": no_effect(None, _ROLE_FOLDER),
        **_under("adv", _ADV),
        **_under("trainer", {**_TRAINER, **_PPO_TRAINER}),
    },
    "sft": {
        **_examples(**_SFT_KEYS),
        **_under("actor", {**_trained("actor", "actor"), "max_length_per_device": _OWN_BUDGET}),
        "actor.avg_level": computed(
            "algo.loss_agg_mode",
            "the default is sequence in July 2025 and token later; whet leaves out rows without a trained token, which "
            "RL2 counts in the mean over sequences",
        ),
        **_under("trainer", _TRAINER),
    },
    "rm": {
        **_examples(**_PAIR_KEYS),
        **_under("critic", {**_trained("critic", "reward_model"), "max_length_per_device": _OWN_BUDGET}),
        **_under("trainer", _TRAINER),
    },
    "dpo": {
        **_examples(**_PAIR_KEYS),
        **_under("actor", {**_trained("actor", "actor"), "max_length_per_device": _OWN_BUDGET}),
        "actor.beta": copied("algo.beta"),
        **_under("ref_actor", _model("ref_actor", "reference")),
        **_under("trainer", _TRAINER),
    },
}
"""Trainer -> RL2's key -> its row. A key that ends in .* stands for all keys with this prefix that have no row."""
