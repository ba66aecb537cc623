"""RL2's keys, and what whet.rl2 does with each: the source of the translation and of docs/from-rl2.md.

One table for each trainer holds the keys of all generations of RL2: the README of July 2025, the release of September
2025 and the configuration of May 2026. Of a row that works, the translation copies the value to whet's key. Of a row in
the state "other" it computes whet's keys from the value and from others.
"""

from __future__ import annotations

from whet.fronts.field import Field, inert, refused

__all__ = ["KEYS", "MEGATRON", "effect_of"]


def effect_of(field: Field) -> str:
    """What the page and `--help` show for a row without a key of whet's."""
    if field.state == "refused":
        return "refused above 1" if field.harmless[-1:] == (1,) else "refused"
    return "checked" if field.state == "other" else field.state


def copied(key: str, note: str = "") -> Field:
    """A row with a value that goes to a key of whet's as it is."""
    return Field(state="works", note=note, key=key)


def computed(key: str = "", note: str = "") -> Field:
    """A row with a value that, with others, gives one or more keys of whet's; "" = it is only checked."""
    return Field(state="other", note=note, key=key)


_OWN_COMMANDS = "whet's own commands shard a model over the processes of torchrun (whet docs scaling)"
_ONE = refused(None, "tensor, sequence and context parallelism are not supported; set it to 1", harmless=(1,))
_DDP = refused(None, f"whet.rl2 is made for one process, set it to 1; {_OWN_COMMANDS}", harmless=(1,))
_FSDP = _DDP._replace(harmless=(0, 1))
MEGATRON = "Megatron is not here: leave its keys out, whet trains with its own worker"
"""Why its keys are refused."""
_LIGER = "a whole row of logits is never made; the fused layers are a CPU's, and on a GPU nothing stands in for Liger's"
_BUDGET = "training's budget counts for all passes"
_SWITCH = "one switch for models and optimizers of all roles: on, unless one says false and none says true"
_ROLE_FOLDER = "all roles are saved together, in the run folder: trainer.save_dir"


def _sampling(mode: str, to: str) -> dict[str, Field]:
    """The keys below a sampling_params, by the names that SGLang has for them."""
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
    kept = "the tokens of a stop string stay, always"
    other = {
        "no_stop_trim": inert(None, kept),
        "skip_special_tokens": inert(None, "tokens go in and out; texts are for rewards, without special tokens"),
        "spaces_between_special_tokens": inert(None, "tokens go in and out"),
        **{
            name: refused(None, "whet's engine has repetition_penalty alone", harmless=(0, 0.0))
            for name in ("frequency_penalty", "presence_penalty")
        },
        "n": refused(None, "responses_per_prompt says how many", harmless=(1,)),
        "ebnf": refused(None, "whet.rollout.constrained_decoding.grammar takes a grammar in Lark's form"),
    }
    notes = {
        "max_new_tokens": "of one turn; must be given" if mode == "train" else "",
        "stop_token_ids": "in place of the model's own end ids",
    }
    return {**{k: copied(f"{to}.{v}", notes.get(k, "")) for k, v in same.items()}, **other}


def _under(prefix: str, keys: dict[str, Field]) -> dict[str, Field]:
    return {f"{prefix}.{name}": key for name, key in keys.items()}


def _model(role: str, section: str) -> dict[str, Field]:
    """What every model has, also one that is only read."""
    return {
        "model_name": copied(f"{section}.model"),
        "tokenizer_name": computed("tokenizer", "one tokenizer for all roles: the actor's"),
        "use_liger_kernel": inert(None, _LIGER),
        "dtype": computed(f"{section}.dtype", "bfloat16 or float32; masters are fp32 either way; float16 is refused"),
        "ddp_size": _DDP,
        "fsdp_size": _FSDP,
        "tp_size": _ONE,
        "sp_size": _ONE,
        "cp_size": _ONE,
        "max_length_per_device": inert(None, f"the actor's {_BUDGET}"),
        "max_inference_length_per_device": inert(None, _BUDGET),
        "offload_model": computed("offload_to_cpu", _SWITCH),
    }


def _trained(role: str, section: str) -> dict[str, Field]:
    """What a model that is trained has."""
    optim = f"{section}.optim"
    lr, decay = (
        copied(f"{optim}.lr"),
        copied(f"{optim}.weight_decay", "of matrices; norms and biases don't decay"),
    )
    ratio = computed(f"{optim}.warmup_ratio", "with it alone, and no scheduler: a cosine down to 0, as in July 2025")
    without = "; a reference is then the actor without it" if role == "actor" else ""
    recompute = computed(f"{section}.gradient_checkpointing", "on unless it says false, as there")
    return {
        **_model(role, section),
        "gradient_checkpointing": recompute,
        "enable_gradient_checkpointing": recompute,
        "lr": lr,
        "weight_decay": decay,
        "warmup_ratio": ratio,
        "max_grad_norm": copied(f"{optim}.max_grad_norm", "of the whole gradient"),
        "optimizer.lr": lr,
        "optimizer.weight_decay": decay,
        "optimizer.betas": copied(f"{optim}.betas"),
        "optimizer.eps": copied(f"{optim}.eps"),
        "scheduler": copied(f"{optim}.schedule", "of September 2025; constant has no warm-up, as there"),
        "scheduler.name": copied(f"{optim}.schedule", "any of transformers' get_scheduler"),
        "scheduler.warmup_ratio": copied(f"{optim}.warmup_ratio"),
        "scheduler.*": computed(f"{optim}.schedule_kwargs", "e.g. min_lr"),
        "offload_optimizer": computed("offload_to_cpu", _SWITCH),
        "load_ckpt": inert(None, "trainer.load_ckpt_from says from where"),
        "optimizer_dir": refused(
            None,
            "a checkpoint holds weights, moments and the order of the data together: trainer.load_ckpt_from",
        ),
        "save_dir": computed("trainer.run_dir", f"the folder above .../{role} is the run folder"),
        "save_freq": computed("trainer.checkpointing_options.save_interval_steps", "with it all checkpoints are kept"),
        "save_optimizer": inert(None, "checkpoints hold the optimizer, the model that is given away does not"),
        "tf_config.*": refused(None, MEGATRON, harmless=(1, "full", "uniform")),
        "ddp_config.*": refused(None, MEGATRON),
        "optimizer.*": refused(None, f"AdamW has lr, weight_decay, betas, eps; {MEGATRON}"),
        "lora.rank": computed(f"{section}.lora.r", f"0: none{without}"),
        "lora.alpha": computed(f"{section}.lora.lora_alpha", "16 by default, as there"),
        "lora.target_modules": computed(f"{section}.lora.target_modules"),
        "lora.dropout": computed(f"{section}.lora.lora_dropout", "0.0 in PPO" if role == "actor" else ""),
    }


_TRAINER = {
    "project": copied("trainer.metrics_logging_options.project_name"),
    "experiment_name": copied(
        "trainer.metrics_logging_options.run_name",
        "the run folder: ckpts/<its value>, then _2, _3 ...",
    ),
    "load_ckpt_from": copied("trainer.resume", '"latest" too; a run without a checkpoint begins at step 1'),
    "load_ckpt_from_dir": copied("trainer.resume"),
    "save_dir": computed("trainer.run_dir", "the model is in final/ at the end, checkpoints in checkpoints/"),
    "save_freq": computed(
        "trainer.checkpointing_options.save_interval_steps", "null: by time, and three are kept; else all"
    ),
    "test_freq": copied("trainer.eval_every_n_steps", "and before the first step, and after the last"),
    "use_wandb": computed("trainer.loggers", "on by default, where wandb is installed"),
    "disable_wandb": computed("trainer.loggers"),
    "n_epochs": copied("trainer.num_epochs"),
}
_PPO = {
    "update_per_rollout": computed("trainer.mini_batch_size", "slices of whole groups: it divides prompts_per_rollout"),
    "clip": copied("algo.epsilon"),
    "avg_level": computed(
        "algo.loss_agg_mode, algo.loss_agg_units", "sequence: forks of a trajectory are one; there each counts"
    ),
    "adv_estimator": inert(None, "adv.estimator says it"),
    "freeze_steps": computed("algo.critic_warmup_steps", "the first N steps; there the first N − 1. With gae alone"),
    "temperature": computed("", "the rollout's own, in training too; another is refused"),
    "tis_coef": computed(
        "algo.sampler_is, algo.sampler_is_threshold, algo.sampler_is_current, algo.sampler_is_kl",
        "the ratio of the current policy, on the KL as well",
    ),
    "kl.coef": computed("algo.beta", "with it kl.type must be given"),
    "kl.type": computed("algo.kl_type", "reward, loss or advantage, there after whitening"),
    "kl.reward_estimator": computed("algo.kl_loss_mode", "with kl.type=loss it only changed what was logged"),
    "kl.loss_estimator": computed("algo.kl_loss_mode", "of kl.type=loss"),
    "entropy.coef": copied("algo.entropy_coef"),
}
_CRITIC = {
    "update_per_rollout": computed("algo.critic_updates", "a multiple of the actor's; 12 by default in July 2025"),
    "clip": copied("algo.clip_range_value"),
    "avg_level": computed("algo.value_loss_agg_mode", "the actor's by default"),
}
_ROWS = {
    "path": computed("data.path, data.split", "hub name, folder or file; split@path"),
    "prompts_per_rollout": copied("data.batch_size"),
    "responses_per_prompt": copied("algo.num_generations"),
    "prompt_key": computed("data.prompt_column", "the column that is read without the chat template; prompt"),
    "messages_key": computed("data.prompt_column", "the column that is read with the chat template; messages"),
    "apply_chat_template": computed(
        "data.apply_chat_template, rollout.chat_template_kwargs",
        "false: contents follow one another, without a template",
    ),
    "dynamic_filtering": computed(
        "algo.dynamic_sampling",
        "others in their place; there the step is smaller. Off for groups of one",
    ),
    "partial_rollout": refused(None, "a step ends before the next begins", harmless=(False,)),
    "max_turns": copied("rollout.max_turns"),
    "save_dir": inert(None, "completions/ of the run folder has every step"),
}
_TEST = {
    "path": computed("data.eval_path, data.eval_split"),
    "prompts_per_rollout": inert(None, "evaluation is of the whole set"),
    "responses_per_prompt": copied("rollout.num_generations_eval"),
    "prompt_key": computed("", "training's; another is refused"),
    "messages_key": computed("", "training's; another is refused"),
    "apply_chat_template": computed("", "training's; another is refused"),
    "save_dir": inert(None, "completions/ of the run folder has every evaluation"),
}
_KV = inert(None, "whet's engine takes the KV that it needs; rollout.kv_cache_tokens bounds it")
_SERVER = {
    "model_path": computed("", "the actor's; another is refused"),
    "dtype": inert(None, "the rollout reads the trainer's own weights"),
    "tp_size": _ONE,
    "mem_fraction_static": _KV,
    "*": refused(None, "SGLang's own: whet's engine runs the rollout; whet.rollout.sglang.* are for SGLang's"),
}
_ROLLOUT = {
    "model_name": computed("", "the actor's; another is refused"),
    "tokenizer_name": computed("tokenizer"),
    "tp_size": _ONE,
    "gpu_memory_utilization": _KV,
    "responses_per_prompt": computed("", "data.responses_per_prompt; another is refused"),
    "apply_chat_template": _ROWS["apply_chat_template"],
    "max_turns": copied("rollout.max_turns"),
    "env_path": copied("rollout.env_path", "interact, reward_fn and TOOL; its reward_fn is the reward"),
    "dynamic_filtering": _ROWS["dynamic_filtering"],
    "group_filtering.lower": computed("algo.group_reward_bounds", "groups whose mean reward lies between, bounds out"),
    "group_filtering.upper": computed("algo.group_reward_bounds"),
    "bucket_size": inert(None, "weights are not sent: the rollout reads the trainer's own"),
    "adv_estimator": inert(None, "adv.estimator says it"),
    "base_port": inert(None, "there is no server"),
    "test_ratio": copied("data.eval_fraction", "where no test path is given; 0.03 by default since 2026"),
}
_OWN_BUDGET = computed("trainer.max_tokens_per_microbatch", "the longest sequence fits into it, prompt included")
_PPO_TRAINER = {
    "total_steps": copied("trainer.max_steps"),
    "eval_only": refused(None, "use `whet eval`", harmless=(False,)),
    "n_epochs": copied("trainer.num_epochs", "with dynamic_filtering as many steps as so many epochs have"),
}
_ADV = {
    "estimator": computed("algo.advantage_estimator", "reinforce: `whet grpo`; gae: `whet ppo`, with a critic"),
    "gamma": computed("algo.gamma", "of gae"),
    "lamda": computed("algo.gae_lambda", "of gae; the critic's returns have it too, unwhitened"),
    "norm_var": computed("algo.norm_var", "of reinforce"),
    "global_norm": computed("algo.global_norm", "of reinforce"),
    "responses_per_prompt": computed("", "data.responses_per_prompt; another is refused"),
}
_OTHERS_DATA = {
    name: refused(None, "it is of sft, rm and dpo; ppo has prompts_per_rollout, and max_length_per_device")
    for name in ("max_length", "batch_size")
}

_EXAMPLES = {
    "path": computed("data.path, data.split", "hub name, folder or file; split@path"),
    "max_length": computed(
        "data.max_length, data.on_long",
        "longer ones are cut, their number is logged; without it none is. In sft and dpo it bounds what the model "
        "reads, all but the last token: whet's is 1 more",
    ),
    "batch_size": computed("data.batch_size"),
    "prompt_key": computed("data.prompt_column", "read without the chat template alone"),
    "apply_chat_template": computed("data.apply_chat_template", "false: texts as they are, ended by the end token"),
}
_EXAMPLES_TEST = {
    "path": computed("data.eval_path, data.eval_split"),
    **{name: computed("", "training's; another is refused") for name in ("max_length", "apply_chat_template")},
}
_SFT_KEYS = {
    "response": computed("data.response_column", "read without the chat template alone"),
    "messages": computed("data.messages_column", "read with the chat template alone"),
}
_PAIR_KEYS = {
    **{name: computed(f"data.{name}_column") for name in ("chosen", "rejected")},
    "messages": computed("data.messages_column", "of July 2025: the prompt of two texts"),
}


def _examples(**columns: Field) -> dict[str, Field]:
    """The keys of a data set of supervised training, with those of its columns."""
    own = {f"{name}_key": key for name, key in columns.items()}
    test = {name: computed("", "training's; another is refused") for name in ("prompt_key", *own)}
    return {
        **_under("data", {**_EXAMPLES, **own}),
        **_under("data.train", {**_EXAMPLES, **own}),
        **_under("data.test", {**_EXAMPLES_TEST, **test}),
        "data.test_ratio": computed("data.eval_fraction", "where no test path is given; 0.03 by default since 2026"),
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
        **_under("critic", {**_trained("critic", "critic"), **_CRITIC, "save_dir": inert(None, _ROLE_FOLDER)}),
        "critic.save_freq": inert(None, _ROLE_FOLDER),
        **_under("adv", _ADV),
        **_under("trainer", {**_TRAINER, **_PPO_TRAINER}),
    },
    "sft": {
        **_examples(**_SFT_KEYS),
        **_under("actor", {**_trained("actor", "actor"), "max_length_per_device": _OWN_BUDGET}),
        "actor.avg_level": computed(
            "algo.loss_agg_mode",
            "sequence in July 2025, token since, unless it is said; rows without a trained token are left out, there "
            "they count in the mean over sequences",
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
"""Trainer -> RL2's key -> what it is here. One that ends in .* stands for all that begin alike and have no row."""
