"""Computes the keys of whet's that all of RL2's trainers have: models, optimizers, the run's folder and length."""

from __future__ import annotations

from typing import Any

from whet.parallel.torchrun_env import world_size
from whet.rl2.parsed_args import ParsedArgs

__all__ = ["WhetKeys", "check_sizes", "split_of", "translate_models", "translate_trainer"]

_CONTEXT = ", and whet.trainer.context_parallel_size={size} to share the tokens of each pass"
WhetKeys = dict[str, Any]
"""Dotted keys of whet's and their values."""


def translate_models(args: ParsedArgs) -> WhetKeys:
    """Translates models, their tokenizer, and the switches that save memory."""
    roles = [role for role in ("actor", "ref_actor", "critic") if _has_role(args, role)]
    own = "reward_model" if args.trainer == "rm" else "critic"
    sections = {"actor": "actor", "ref_actor": "reference", "critic": own}
    flat: WhetKeys = {}
    name = args.require("the model", *(["critic.model_name"] if args.trainer == "rm" else ["actor.model_name"]))
    args.require_equal(name, "rollout.model_name", "rollout.server_args.model_path")
    names = [f"{role}.tokenizer_name" for role in ("actor", "rollout", "ref_actor", "critic")]
    if (tokenizer := args.get(*names)) is not None:
        flat["tokenizer"] = tokenizer
    for role in roles:
        dtype = args.get(f"{role}.dtype")
        if dtype is not None:
            flat[f"{sections[role]}.dtype"] = args.require_choice(f"{role}.dtype", dtype, ("bfloat16", "float32"))
        if role != "ref_actor":
            names = (f"{role}.gradient_checkpointing", f"{role}.enable_gradient_checkpointing")
            flat[f"{sections[role]}.gradient_checkpointing"] = args.get(*names, default=True)
            flat |= {**translate_optimizer(args, role, sections[role]), **translate_adapter(args, role, sections[role])}
    switches = [args.get(f"{role}.offload_{what}") for role in roles for what in ("model", "optimizer")]
    flat["offload_to_cpu"] = True in switches or (False not in switches and world_size() == 1)
    return flat


def check_sizes(args: ParsedArgs, role: str) -> None:
    """Notes sizes of a role's device mesh that torchrun's processes don't have, or that whet can't run.

    As in RL2, a missing fsdp_size, or 0, is what the other sizes leave.
    """
    processes = world_size()
    ddp, *axes = (args.get_count(f"{role}.{name}_size") for name in ("ddp", "tp", "sp", "cp"))
    shards = args.get(f"{role}.fsdp_size") or max(processes // ddp, 1)
    for name, size in zip(("tp", "sp", "cp"), axes, strict=True):
        if size > 1:
            rest = f" = {size} x {processes // size}" if processes % size == 0 else f", no multiple of {size}"
            args.problems.append(
                f"{role}.{name}_size={size} is refused: there are {processes} process(es){rest}, and whet shards each "
                f"model over all; set it to 1{'' if name == 'tp' else _CONTEXT.format(size=size)}"
            )
    if ddp * shards != processes:
        args.problems.append(
            f"{role}: ddp_size={ddp} x fsdp_size={shards} = {ddp * shards} processes, and torchrun has started "
            f"{processes}; start torchrun --nproc_per_node={ddp * shards}, or leave both out: whet shards over all"
        )


def _has_role(args: ParsedArgs, role: str) -> bool:
    """Whether a command trains or reads a role. Keys of a critic without adv.estimator=gae are a problem."""
    has_role = {
        "actor": args.trainer != "rm",
        "ref_actor": args.trainer == "dpo" or (args.trainer == "ppo" and bool(args.get("actor.kl.coef"))),
        "critic": args.trainer == "rm" or args.get("adv.estimator") == "gae",
    }[role]
    extra = [k for k in args.values if k.startswith(f"{role}.")]
    if extra and not has_role and role == "critic":
        args.problems.append(f"{extra[0]}: only adv.estimator=gae has a critic; leave it out")
    return has_role


def translate_adapter(args: ParsedArgs, role: str, section: str) -> WhetKeys:
    """The low-rank adapter of a role; empty if its rank is 0. Args: section: of whet's configuration."""
    own = {name: args.get(f"{role}.lora.{name}") for name in ("rank", "alpha", "target_modules", "dropout")}
    if not own["rank"]:
        return {}
    names = {"rank": "r", "alpha": "lora_alpha", "target_modules": "target_modules", "dropout": "lora_dropout"}
    own["alpha"] = LORA_ALPHA if own["alpha"] is None else own["alpha"]
    return {f"{section}.lora.{names[name]}": value for name, value in own.items() if value is not None}


LORA_ALPHA = 16
"""RL2's default."""


DEFAULTS = {
    "ppo": {"actor": (1e-6, 1e-7, None), "critic": (5e-6, 5e-7, None)},
    "sft": {"actor": (5e-6, 1e-7, 0.1)},
    "rm": {"critic": (1e-5, 5e-7, 0.1)},
    "dpo": {"actor": (5e-7, 1e-7, 0.1)},
}
"""Trainer -> role -> rate in July 2025, least rate in 2026, warm-up's share in July 2025 (None = a constant rate)."""
LATER_RATES = {"actor": 1e-6, "critic": 5e-6}
"""Role -> rate in 2026."""


def translate_optimizer(args: ParsedArgs, role: str, section: str) -> WhetKeys:
    """Translates the optimizer of a role, a section of whet's, and its schedule; defaults are the generation's."""
    optim, (rate, least, ratio) = f"{section}.optim", DEFAULTS[args.trainer][role]
    rate = LATER_RATES[role] if args.is_2026 else rate
    both = lambda name: (f"{role}.{name}", f"{role}.optimizer.{name}")
    inherited = {} if role == "actor" or args.is_2026 else args.under("actor")  # the critic's defaults in 2025
    decay = args.get(*both("weight_decay"), default=inherited.get("weight_decay", 1e-2))
    flat = {f"{optim}.lr": args.get(*both("lr"), default=rate), f"{optim}.weight_decay": decay}
    flat[f"{optim}.max_grad_norm"] = args.get(f"{role}.max_grad_norm", default=inherited.get("max_grad_norm", 1.0))
    more = {
        k: v for k, v in args.under(f"{role}.scheduler").items() if k not in ("name", "warmup_ratio") and v is not None
    }
    if args.is_2026:
        name = args.get(f"{role}.scheduler.name", default="cosine_with_min_lr")
        more = {"min_lr": least, **more} if name == "cosine_with_min_lr" else more
        ratio = 0.03
    elif args.is_september_2025:
        usual = inherited.get("scheduler", "constant" if ratio is None else "cosine")
        name = args.get(f"{role}.scheduler", default=usual)
        ratio = args.get(f"{role}.warmup_ratio", default=inherited.get("warmup_ratio", 0.1))
        ratio = 0.0 if name == "constant" else ratio  # RL2 ignores it there
        return {**flat, f"{optim}.schedule": name, f"{optim}.warmup_ratio": ratio, f"{optim}.schedule_kwargs": {}}
    else:
        ratio = args.get(f"{role}.warmup_ratio", default=ratio)
        name = "constant" if ratio is None else "cosine"
    name = args.get(f"{role}.scheduler.name", f"{role}.scheduler", default=name)
    flat[f"{optim}.warmup_ratio"] = args.get(
        f"{role}.warmup_ratio", f"{role}.scheduler.warmup_ratio", default=ratio or 0.0
    )
    return {**flat, f"{optim}.schedule": name, f"{optim}.schedule_kwargs": more}


def split_of(path: Any) -> tuple[str, Any]:
    """The split of split@path, and the path."""
    split, at, rest = str(path).partition("@")
    return (split, rest) if at and path is not None else ("train", path)


def translate_trainer(args: ParsedArgs) -> WhetKeys:
    """Translates the run's folder, checkpoints, loggers and length."""
    flat: WhetKeys = {}
    role = "critic" if args.trainer == "rm" else "actor"
    folder = args.get("trainer.save_dir", f"{role}.save_dir")
    name = args.get("trainer.experiment_name")
    if folder is not None:
        flat["trainer.run_dir"] = str(folder).rstrip("/").removesuffix(f"/{role}")
    elif name is not None:
        flat["trainer.run_dir"] = f"ckpts/{name}"
    every = args.get("trainer.save_freq", f"{role}.save_freq")
    if every is not None:
        flat["trainer.checkpointing_options"] = {"save_interval_steps": every, "max_to_keep": None}
    use, disable = args.get("trainer.use_wandb"), args.get("trainer.disable_wandb")
    if use is not False and disable is not True:
        flat["trainer.loggers"] = ["wandb"]
    if args.get("trainer.total_steps") is None and args.get("trainer.n_epochs") is None:
        if args.is_2026 and args.trainer == "ppo":
            args.problems.append("the length of the run is not given; write trainer.total_steps=...")
        flat["trainer.num_epochs"] = 1
    return flat
