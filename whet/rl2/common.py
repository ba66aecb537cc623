"""Computes the keys of whet's that all of RL2's trainers have: models, optimizers, the run's folder and length."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from whet.parallel.torchrun_env import world_size
from whet.rl2.parsed_args import ParsedArgs

__all__ = [
    "WhetKeys",
    "context_size",
    "named_step",
    "split_of",
    "translate_models",
    "translate_sizes",
    "translate_trainer",
]

ROLES = ("actor", "ref_actor", "critic")
"""RL2's names of the roles."""
WhetKeys = dict[str, Any]
"""Dotted keys of whet's and their values."""


def translate_models(args: ParsedArgs) -> WhetKeys:
    """Translates models, their tokenizer, and the switches that save memory."""
    roles = [role for role in ROLES if _has_role(args, role)]
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


def translate_sizes(args: ParsedArgs) -> WhetKeys:
    """Translates the sizes of RL2's device meshes to those of whet's one mesh, which all roles share.

    A size that only some roles have is that of all: it divides memory and work, and no update depends on it. As in RL2,
    a missing fsdp_size, or 0, is what ddp_size leaves. What torchrun's processes can't be is a problem.
    """
    processes = world_size()
    replicas, tensor = _size_of_all_roles(args, "ddp_size"), _size_of_all_roles(args, "tp_size")
    for role in ROLES:
        shards = args.get(f"{role}.fsdp_size") or max(processes // replicas // tensor, 1)
        product = replicas * shards * tensor
        if product != processes:
            sizes = f"ddp_size={replicas} x fsdp_size={shards}" + ("" if tensor == 1 else f" x tp_size={tensor}")
            args.problems.append(
                f"{role}: {sizes} = {product} processes, and torchrun has started {processes}; start torchrun "
                f"--nproc_per_node={product}, or leave fsdp_size out and set ddp_size to a divisor of "
                f"{max(processes // tensor, 1)}"
            )
    context = context_size(args)
    if processes % (context * tensor):
        args.problems.append(
            f"sp_size (cp_size)={context} does not divide torchrun's {processes} process(es)"
            + ("" if tensor == 1 else f" by tp_size={tensor}")
            + f"; start a multiple of {context * tensor}, or set it to a divisor of {max(processes // tensor, 1)}"
        )
    return {
        "trainer.data_parallel_replicate_size": replicas,
        "trainer.context_parallel_size": context,
        "trainer.tensor_parallel_size": tensor,
    }


def context_size(args: ParsedArgs) -> int:
    """Returns the number of processes that divide the tokens of a pass: sp_size, since 2026 cp_size."""
    return _size_of_all_roles(args, "sp_size", "cp_size")


def _size_of_all_roles(args: ParsedArgs, *names: str) -> int:
    """Returns a size that all roles share, 1 if none has it; two different ones are a problem."""
    sizes = {key: args.get_count(key) for key in (f"{role}.{name}" for role in ROLES for name in names)}
    own = {key: size for key, size in sizes.items() if args.values.get(key) is not None}
    if len({*own.values()}) > 1:
        args.problems.append(
            f"{' and '.join(f'{key}={size}' for key, size in own.items())}: all roles share one mesh; give one size"
        )
    return next(iter(own.values()), 1)


def _has_role(args: ParsedArgs, role: str) -> bool:
    """Returns whether a command trains or reads a role. Keys of a critic without adv.estimator=gae are a problem."""
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
    """Returns the low-rank adapter of a role; empty if its rank is 0. Args: section: of whet's configuration."""
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
    inherited = {} if role == "actor" or args.is_2026 else args.section("actor")  # the critic's defaults in 2025
    decay = args.get(*both("weight_decay"), default=inherited.get("weight_decay", 1e-2))
    flat = {f"{optim}.lr": args.get(*both("lr"), default=rate), f"{optim}.weight_decay": decay}
    flat[f"{optim}.max_grad_norm"] = args.get(f"{role}.max_grad_norm", default=inherited.get("max_grad_norm", 1.0))
    more = {
        k: v
        for k, v in args.section(f"{role}.scheduler").items()
        if k not in ("name", "warmup_ratio") and v is not None
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
    """Returns the split of split@path, and the path."""
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


def named_step(path: str) -> str:
    """Returns the reference to an environment of RL2's later forms: its file and the function step or env_step.

    Args: path: of a file. Returns: the path itself where the file has reward_fn or interact, or neither function.
    """
    try:
        tree = ast.parse(Path(path).read_text())
    except (OSError, SyntaxError, ValueError):
        return path
    names = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    if "reward_fn" in names or "interact" in names:
        return path
    return next((f"{path}:{name}" for name in ("step", "env_step") if name in names), path)
