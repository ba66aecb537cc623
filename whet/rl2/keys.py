"""RL2's keys, and what each is here: the source of the translation and of docs/from-rl2.md.

All generations of RL2 in one table for each trainer: the README of July 2025, and the configuration of May 2026.
How a key is read: "same": its value goes to the key named; "made": translate.py makes the keys named, from it and
others; "one": of several ranks, refused above 1; "none": accepted, it has no effect here; "refused": anything but its
harmless values is.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

__all__ = ["KEYS", "MEGATRON", "VERBS", "Key", "effect_of"]

VERBS = ("ppo", "sft", "rm", "dpo")
"""RL2's trainers."""


class Key(NamedTuple):
    """What a key of RL2's is here."""

    how: Literal["same", "made", "one", "none", "refused"]
    to: str = ""
    """whet's key, or several with commas."""
    note: str = ""
    """What differs; of a refused key the reason, and what to use."""
    harmless: tuple[Any, ...] = (None,)
    """Values of a refused key that ask for nothing."""


def effect_of(key: Key) -> str:
    """What a key does that no key of whet's stands for, in a word or two."""
    return {"one": "refused above 1", "none": "no effect", "refused": "refused"}.get(key.how, "checked")


_RANKS = "whet runs one process now"
_ONE = Key("one", note=f"{_RANKS}: a model, and a sequence, lie on one device; set it to 1", harmless=(None, 1))
_FSDP = _ONE._replace(harmless=(None, 0, 1))
MEGATRON = "Megatron is not here: leave its keys out, whet trains with its own worker"
"""Why its keys are refused."""
_LIGER = "a whole row of logits is never made; the fused layers are a CPU's, and on a GPU nothing stands in for Liger's"
_BUDGET = "training's budget counts for all passes"
_SWITCH = "one switch for models and optimizers of all roles: on, unless one says false and none says true"
_ROLE_FOLDER = "all roles are saved together, in the run folder: trainer.save_dir"


def _sampling(mode: str, to: str) -> dict[str, Key]:
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
        "no_stop_trim": Key("none", note=kept),
        "skip_special_tokens": Key("none", note="tokens go in and out; texts are for rewards, without special tokens"),
        "spaces_between_special_tokens": Key("none", note="tokens go in and out"),
        **{
            name: Key("refused", note="whet's engine has repetition_penalty alone", harmless=(None, 0, 0.0))
            for name in ("frequency_penalty", "presence_penalty")
        },
        "n": Key("refused", note="responses_per_prompt says how many", harmless=(None, 1)),
        "ebnf": Key("refused", note="whet.rollout.constrained_decoding.grammar takes a grammar in Lark's form"),
    }
    notes = {
        "max_new_tokens": "of one turn; must be given" if mode == "train" else "",
        "stop_token_ids": "in place of the model's own end ids",
    }
    return {**{k: Key("same", f"{to}.{v}", notes.get(k, "")) for k, v in same.items()}, **other}


def _under(prefix: str, keys: dict[str, Key]) -> dict[str, Key]:
    return {f"{prefix}.{name}": key for name, key in keys.items()}


def _model(role: str, section: str) -> dict[str, Key]:
    """What every model has, also one that is only read."""
    return {
        "model_name": Key("same", f"{section}.model"),
        "tokenizer_name": Key("made", "tokenizer", "one tokenizer for all roles: the actor's"),
        "use_liger_kernel": Key("none", note=_LIGER),
        "dtype": Key(
            "made", f"{section}.dtype", "bfloat16 or float32; masters are fp32 either way; float16 is refused"
        ),
        "ddp_size": _ONE,
        "fsdp_size": _FSDP,
        "tp_size": _ONE,
        "sp_size": _ONE,
        "cp_size": _ONE,
        "max_length_per_device": Key("none", note=f"the actor's {_BUDGET}"),
        "max_inference_length_per_device": Key("none", note=_BUDGET),
        "offload_model": Key("made", "offload_to_cpu", _SWITCH),
    }


def _trained(role: str, section: str) -> dict[str, Key]:
    """What a model that is trained has."""
    optim = f"{section}.optim"
    lr, decay = (
        Key("same", f"{optim}.lr"),
        Key("same", f"{optim}.weight_decay", "of matrices; norms and biases don't decay"),
    )
    ratio = Key("made", f"{optim}.warmup_ratio", "with it alone, and no scheduler: a cosine down to 0, as in July 2025")
    without = "; a reference is then the actor without it" if role == "actor" else ""
    recompute = Key("made", f"{section}.gradient_checkpointing", "on unless it says false, as there")
    return {
        **_model(role, section),
        "gradient_checkpointing": recompute,
        "enable_gradient_checkpointing": recompute,
        "lr": lr,
        "weight_decay": decay,
        "warmup_ratio": ratio,
        "max_grad_norm": Key("same", f"{optim}.max_grad_norm", "of the whole gradient"),
        "optimizer.lr": lr,
        "optimizer.weight_decay": decay,
        "optimizer.betas": Key("same", f"{optim}.betas"),
        "optimizer.eps": Key("same", f"{optim}.eps"),
        "scheduler": Key("same", f"{optim}.schedule", "of September 2025; constant has no warm-up, as there"),
        "scheduler.name": Key("same", f"{optim}.schedule", "any of transformers' get_scheduler"),
        "scheduler.warmup_ratio": Key("same", f"{optim}.warmup_ratio"),
        "scheduler.*": Key("made", f"{optim}.schedule_kwargs", "e.g. min_lr"),
        "offload_optimizer": Key("made", "offload_to_cpu", _SWITCH),
        "load_ckpt": Key("none", note="trainer.load_ckpt_from says from where"),
        "optimizer_dir": Key(
            "refused",
            note="a checkpoint holds weights, moments and the order of the data together: trainer.load_ckpt_from",
        ),
        "save_dir": Key("made", "trainer.run_dir", f"the folder above .../{role} is the run folder"),
        "save_freq": Key(
            "made", "trainer.checkpointing_options.save_interval_steps", "with it all checkpoints are kept"
        ),
        "save_optimizer": Key("none", note="checkpoints hold the optimizer, the model that is given away does not"),
        "tf_config.*": Key("refused", note=MEGATRON, harmless=(None, 1, "full", "uniform")),
        "ddp_config.*": Key("refused", note=MEGATRON),
        "optimizer.*": Key("refused", note=f"AdamW has lr, weight_decay, betas, eps; {MEGATRON}"),
        "lora.rank": Key("made", f"{section}.lora.r", f"0: none{without}"),
        "lora.alpha": Key("made", f"{section}.lora.lora_alpha", "16 by default, as there"),
        "lora.target_modules": Key("made", f"{section}.lora.target_modules"),
        "lora.dropout": Key("made", f"{section}.lora.lora_dropout", "0.0 in PPO" if role == "actor" else ""),
    }


_TRAINER = {
    "project": Key("same", "trainer.metrics_logging_options.project_name"),
    "experiment_name": Key(
        "same",
        "trainer.metrics_logging_options.run_name",
        "the run folder: ckpts/<its value>, then _2, _3 ...",
    ),
    "load_ckpt_from": Key("same", "trainer.resume", '"latest" too; a run without a checkpoint begins at step 1'),
    "load_ckpt_from_dir": Key("same", "trainer.resume"),
    "save_dir": Key("made", "trainer.run_dir", "the model is in final/ at the end, checkpoints in checkpoints/"),
    "save_freq": Key(
        "made", "trainer.checkpointing_options.save_interval_steps", "null: by time, and three are kept; else all"
    ),
    "test_freq": Key("same", "trainer.eval_every_n_steps", "and before the first step, and after the last"),
    "use_wandb": Key("made", "trainer.loggers", "on by default, where wandb is installed"),
    "disable_wandb": Key("made", "trainer.loggers"),
    "n_epochs": Key("same", "trainer.num_epochs"),
}
_PPO = {
    "update_per_rollout": Key(
        "made", "trainer.mini_batch_size", "slices of whole groups: it divides prompts_per_rollout"
    ),
    "clip": Key("same", "algo.epsilon"),
    "avg_level": Key(
        "made", "algo.loss_agg_mode, algo.loss_agg_units", "sequence: forks of a trajectory are one; there each counts"
    ),
    "adv_estimator": Key("none", note="adv.estimator says it"),
    "freeze_steps": Key("made", "algo.critic_warmup_steps", "the first N steps; there the first N − 1. With gae alone"),
    "temperature": Key("made", "", "the rollout's own, in training too; another is refused"),
    "tis_coef": Key(
        "made",
        "algo.sampler_is, algo.sampler_is_threshold, algo.sampler_is_current, algo.sampler_is_kl",
        "the ratio of the current policy, on the KL as well",
    ),
    "kl.coef": Key("made", "algo.beta", "with it kl.type must be given"),
    "kl.type": Key("made", "algo.kl_type", "reward, loss or advantage, there after whitening"),
    "kl.reward_estimator": Key("made", "algo.kl_loss_mode", "with kl.type=loss it only changed what was logged"),
    "kl.loss_estimator": Key("made", "algo.kl_loss_mode", "of kl.type=loss"),
    "entropy.coef": Key("same", "algo.entropy_coef"),
}
_CRITIC = {
    "update_per_rollout": Key("made", "algo.critic_updates", "a multiple of the actor's; 12 by default in July 2025"),
    "clip": Key("same", "algo.clip_range_value"),
    "avg_level": Key("made", "algo.value_loss_agg_mode", "the actor's by default"),
}
_ROWS = {
    "path": Key("made", "data.path, data.split", "hub name, folder or file; split@path"),
    "prompts_per_rollout": Key("same", "data.batch_size"),
    "responses_per_prompt": Key("same", "algo.num_generations"),
    "prompt_key": Key("made", "data.prompt_column", "the column that is read without the chat template; prompt"),
    "messages_key": Key("made", "data.prompt_column", "the column that is read with the chat template; messages"),
    "apply_chat_template": Key(
        "made",
        "data.apply_chat_template, rollout.chat_template_kwargs",
        "false: contents follow one another, without a template",
    ),
    "dynamic_filtering": Key(
        "made",
        "algo.dynamic_sampling",
        "others in their place; there the step is smaller. Off for groups of one",
    ),
    "partial_rollout": Key("refused", note="a step ends before the next begins", harmless=(None, False)),
    "max_turns": Key("same", "rollout.max_turns"),
    "save_dir": Key("none", note="completions/ of the run folder has every step"),
}
_TEST = {
    "path": Key("made", "data.eval_path, data.eval_split"),
    "prompts_per_rollout": Key("none", note="evaluation is of the whole set"),
    "responses_per_prompt": Key("same", "rollout.num_generations_eval"),
    "prompt_key": Key("made", "", "training's; another is refused"),
    "messages_key": Key("made", "", "training's; another is refused"),
    "apply_chat_template": Key("made", "", "training's; another is refused"),
    "save_dir": Key("none", note="completions/ of the run folder has every evaluation"),
}
_KV = Key("none", note="whet's engine takes the KV that it needs; rollout.kv_cache_tokens bounds it")
_SERVER = {
    "model_path": Key("made", "", "the actor's; another is refused"),
    "dtype": Key("none", note="the rollout reads the trainer's own weights"),
    "tp_size": _ONE,
    "mem_fraction_static": _KV,
    "*": Key("refused", note="SGLang's own: whet's engine runs the rollout; whet.rollout.sglang.* are for SGLang's"),
}
_ROLLOUT = {
    "model_name": Key("made", "", "the actor's; another is refused"),
    "tokenizer_name": Key("made", "tokenizer"),
    "tp_size": _ONE,
    "gpu_memory_utilization": _KV,
    "responses_per_prompt": Key("made", "", "data.responses_per_prompt; another is refused"),
    "apply_chat_template": _ROWS["apply_chat_template"],
    "max_turns": Key("same", "rollout.max_turns"),
    "env_path": Key("same", "rollout.env_path", "interact, reward_fn and TOOL; its reward_fn is the reward"),
    "dynamic_filtering": _ROWS["dynamic_filtering"],
    "group_filtering.lower": Key(
        "made", "algo.group_reward_bounds", "groups whose mean reward lies between, bounds out"
    ),
    "group_filtering.upper": Key("made", "algo.group_reward_bounds"),
    "bucket_size": Key("none", note="weights are not sent: the rollout reads the trainer's own"),
    "adv_estimator": Key("none", note="adv.estimator says it"),
    "base_port": Key("none", note="there is no server"),
    "test_ratio": Key("same", "data.eval_fraction", "where no test path is given; 0.03 by default since 2026"),
}
_OWN_BUDGET = Key("made", "trainer.max_tokens_per_microbatch", "the longest sequence fits into it, prompt included")
_PPO_TRAINER = {
    "total_steps": Key("same", "trainer.max_steps"),
    "eval_only": Key("refused", note="use `whet eval`", harmless=(None, False)),
    "n_epochs": Key("same", "trainer.num_epochs", "with dynamic_filtering as many steps as so many epochs have"),
}
_ADV = {
    "estimator": Key("made", "algo.advantage_estimator", "reinforce: `whet grpo`; gae: `whet ppo`, with a critic"),
    "gamma": Key("made", "algo.gamma", "of gae"),
    "lamda": Key("made", "algo.gae_lambda", "of gae; the critic's returns have it too, unwhitened"),
    "norm_var": Key("made", "algo.norm_var", "of reinforce"),
    "global_norm": Key("made", "algo.global_norm", "of reinforce"),
    "responses_per_prompt": Key("made", "", "data.responses_per_prompt; another is refused"),
}
_OTHERS_DATA = {
    name: Key("refused", note="it is of sft, rm and dpo; ppo has prompts_per_rollout, and max_length_per_device")
    for name in ("max_length", "batch_size")
}

_EXAMPLES = {
    "path": Key("made", "data.path, data.split", "hub name, folder or file; split@path"),
    "max_length": Key(
        "made",
        "data.max_length, data.on_long",
        "longer ones are cut, their number is logged; without it none is. In sft and dpo it bounds what the model "
        "reads, all but the last token: whet's is 1 more",
    ),
    "batch_size": Key("made", "data.batch_size"),
    "prompt_key": Key("made", "data.prompt_column", "read without the chat template alone"),
    "apply_chat_template": Key("made", "data.apply_chat_template", "false: texts as they are, ended by the end token"),
}
_EXAMPLES_TEST = {
    "path": Key("made", "data.eval_path, data.eval_split"),
    **{name: Key("made", "", "training's; another is refused") for name in ("max_length", "apply_chat_template")},
}
_SFT_KEYS = {
    "response": Key("made", "data.response_column", "read without the chat template alone"),
    "messages": Key("made", "data.messages_column", "read with the chat template alone"),
}
_PAIR_KEYS = {
    **{name: Key("made", f"data.{name}_column") for name in ("chosen", "rejected")},
    "messages": Key("made", "data.messages_column", "of July 2025: the prompt of two texts"),
}


def _examples(**columns: Key) -> dict[str, Key]:
    """The keys of a data set of supervised training, with those of its columns."""
    own = {f"{name}_key": key for name, key in columns.items()}
    test = {name: Key("made", "", "training's; another is refused") for name in ("prompt_key", *own)}
    return {
        **_under("data", {**_EXAMPLES, **own}),
        **_under("data.train", {**_EXAMPLES, **own}),
        **_under("data.test", {**_EXAMPLES_TEST, **test}),
        "data.test_ratio": Key("made", "data.eval_fraction", "where no test path is given; 0.03 by default since 2026"),
    }


KEYS: dict[str, dict[str, Key]] = {
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
        **_under("critic", {**_trained("critic", "critic"), **_CRITIC, "save_dir": Key("none", note=_ROLE_FOLDER)}),
        "critic.save_freq": Key("none", note=_ROLE_FOLDER),
        **_under("adv", _ADV),
        **_under("trainer", {**_TRAINER, **_PPO_TRAINER}),
    },
    "sft": {
        **_examples(**_SFT_KEYS),
        **_under("actor", {**_trained("actor", "actor"), "max_length_per_device": _OWN_BUDGET}),
        "actor.avg_level": Key(
            "made",
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
        "actor.beta": Key("same", "algo.beta"),
        **_under("ref_actor", _model("ref_actor", "reference")),
        **_under("trainer", _TRAINER),
    },
}
"""Trainer -> RL2's key -> what it is here. One that ends in .* stands for all that begin alike and have no row."""
