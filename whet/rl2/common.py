"""What all of RL2's trainers have: models, optimizers, the run's folder and length."""

from __future__ import annotations

from typing import Any

from whet.rl2.parsed_args import Given

__all__ = ["Part", "models", "split_of", "trainer"]

Part = dict[str, Any]
"""Keys of whet's, with dots, and their values."""


def models(given: Given) -> Part:
    """Models, their tokenizer, and what saves memory."""
    roles = [role for role in ("actor", "ref_actor", "critic") if _uses(given, role)]
    own = "reward_model" if given.verb == "rm" else "critic"
    sections = {"actor": "actor", "ref_actor": "reference", "critic": own}
    flat: Part = {}
    name = given.need("the model", *(["critic.model_name"] if given.verb == "rm" else ["actor.model_name"]))
    given.same(name, "rollout.model_name", "rollout.server_args.model_path")
    names = [f"{role}.tokenizer_name" for role in ("actor", "rollout", "ref_actor", "critic")]
    if (tokenizer := given.get(*names)) is not None:
        flat["tokenizer"] = tokenizer
    for role in roles:
        dtype = given.get(f"{role}.dtype")
        if dtype is not None:
            flat[f"{sections[role]}.dtype"] = given.one_of(f"{role}.dtype", dtype, ("bfloat16", "float32"))
        if role != "ref_actor":
            names = (f"{role}.gradient_checkpointing", f"{role}.enable_gradient_checkpointing")
            flat[f"{sections[role]}.gradient_checkpointing"] = given.get(*names, default=True)
            flat |= {**optimizer(given, role, sections[role]), **adapter(given, role, sections[role])}
    switches = [given.get(f"{role}.offload_{what}") for role in roles for what in ("model", "optimizer")]
    flat["offload_to_cpu"] = True in switches or False not in switches
    return flat


def _uses(given: Given, role: str) -> bool:
    """Whether a command has a role; keys of one that it has not are a problem."""
    there = {
        "actor": given.verb != "rm",
        "ref_actor": given.verb == "dpo" or (given.verb == "ppo" and bool(given.get("actor.kl.coef"))),
        "critic": given.verb == "rm" or given.get("adv.estimator") == "gae",
    }[role]
    extra = [k for k in given.values if k.startswith(f"{role}.")]
    if extra and not there and role == "critic":
        given.problems.append(f"{extra[0]}: there is a critic with adv.estimator=gae alone; leave it out")
    return there


def adapter(given: Given, role: str, section: str) -> Part:
    """The low-rank adapter of a role; nothing where its rank is 0. Args: section: of the role."""
    own = {name: given.get(f"{role}.lora.{name}") for name in ("rank", "alpha", "target_modules", "dropout")}
    if not own["rank"]:
        return {}
    names = {"rank": "r", "alpha": "lora_alpha", "target_modules": "target_modules", "dropout": "lora_dropout"}
    own["alpha"] = LORA_ALPHA if own["alpha"] is None else own["alpha"]
    return {f"{section}.lora.{names[name]}": value for name, value in own.items() if value is not None}


LORA_ALPHA = 16
"""An adapter's alpha where none is given."""


DEFAULTS = {
    "ppo": {"actor": (1e-6, 1e-7, None), "critic": (5e-6, 5e-7, None)},
    "sft": {"actor": (5e-6, 1e-7, 0.1)},
    "rm": {"critic": (1e-5, 5e-7, 0.1)},
    "dpo": {"actor": (5e-7, 1e-7, 0.1)},
}
"""Trainer -> role -> rate in July 2025, least rate in 2026, warm-up's share in July 2025 (None = a constant rate)."""
LATER_RATES = {"actor": 1e-6, "critic": 5e-6}
"""Role -> rate in 2026."""


def optimizer(given: Given, role: str, section: str) -> Part:
    """The optimizer of a role and its schedule, as the generation has them by default. Args: section: of the role."""
    optim, (rate, least, ratio) = f"{section}.optim", DEFAULTS[given.verb][role]
    rate = LATER_RATES[role] if given.is_later else rate
    both = lambda name: (f"{role}.{name}", f"{role}.optimizer.{name}")
    inherited = {} if role == "actor" or given.is_later else given.below("actor")  # 2025's critic has the actor's
    decay = given.get(*both("weight_decay"), default=inherited.get("weight_decay", 1e-2))
    flat = {f"{optim}.lr": given.get(*both("lr"), default=rate), f"{optim}.weight_decay": decay}
    flat[f"{optim}.max_grad_norm"] = given.get(f"{role}.max_grad_norm", default=inherited.get("max_grad_norm", 1.0))
    more = {
        k: v for k, v in given.below(f"{role}.scheduler").items() if k not in ("name", "warmup_ratio") and v is not None
    }
    if given.is_later:
        name = given.get(f"{role}.scheduler.name", default="cosine_with_min_lr")
        more = {"min_lr": least, **more} if name == "cosine_with_min_lr" else more
        ratio = 0.03
    elif given.is_september:
        usual = inherited.get("scheduler", "constant" if ratio is None else "cosine")
        name = given.get(f"{role}.scheduler", default=usual)
        ratio = given.get(f"{role}.warmup_ratio", default=inherited.get("warmup_ratio", 0.1))
        ratio = 0.0 if name == "constant" else ratio  # which takes no notice of it there
        return {**flat, f"{optim}.schedule": name, f"{optim}.warmup_ratio": ratio, f"{optim}.schedule_kwargs": {}}
    else:
        ratio = given.get(f"{role}.warmup_ratio", default=ratio)
        name = "constant" if ratio is None else "cosine"
    name = given.get(f"{role}.scheduler.name", f"{role}.scheduler", default=name)
    flat[f"{optim}.warmup_ratio"] = given.get(
        f"{role}.warmup_ratio", f"{role}.scheduler.warmup_ratio", default=ratio or 0.0
    )
    return {**flat, f"{optim}.schedule": name, f"{optim}.schedule_kwargs": more}


def split_of(path: Any) -> tuple[str, Any]:
    """The split of split@path, and the path."""
    split, at, rest = str(path).partition("@")
    return (split, rest) if at and path is not None else ("train", path)


def trainer(given: Given) -> Part:
    """Folder, checkpoints, loggers, length of the run."""
    flat: Part = {}
    role = "critic" if given.verb == "rm" else "actor"
    folder = given.get("trainer.save_dir", f"{role}.save_dir")
    name = given.get("trainer.experiment_name")
    if folder is not None:
        flat["trainer.run_dir"] = str(folder).rstrip("/").removesuffix(f"/{role}")
    elif name is not None:
        flat["trainer.run_dir"] = f"ckpts/{name}"
    every = given.get("trainer.save_freq", f"{role}.save_freq")
    if every is not None:
        flat["trainer.checkpointing_options"] = {"save_interval_steps": every, "max_to_keep": None}
    use, disable = given.get("trainer.use_wandb"), given.get("trainer.disable_wandb")
    if use is not False and disable is not True:
        flat["trainer.loggers"] = ["wandb"]
    if given.get("trainer.total_steps") is None and given.get("trainer.n_epochs") is None:
        if given.is_later and given.verb == "ppo":
            given.problems.append("the length of the run is not given; write trainer.total_steps=...")
        flat["trainer.num_epochs"] = 1
    return flat
