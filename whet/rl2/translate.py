"""From a command of RL2's to the configuration of whet's that does the same.

Values that have a place go there as they are; the functions below make what several keys say together. What RL2 does by
default is set here too, as July 2025 has it, or 2026 where a command is written so. docs/from-rl2.md is the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.config.base import check
from whet.config.loader import merged
from whet.config.run import PPORunConfig, RunConfig
from whet.errors import lookup_error, shown
from whet.rl2.given import Given, key_of, read
from whet.rl2.keys import KEYS, Key

__all__ = ["CONTENTS_ALONE", "translated", "tree_of"]

CONTENTS_ALONE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
"""The chat template that stands for apply_chat_template=false."""
PROMPT_TOKENS = 2048
"""Longest prompt where max_length_per_device is not given."""
SAMPLED = {
    "top_p": 1.0,
    "top_k": None,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "stop": (),
}
"""What evaluation has unless it is said, whatever training has."""
Part = dict[str, Any]


def translated(verb: str, words: Sequence[str]) -> Any:
    """The checked configuration of a command.

    Args: verb: ppo. words: as RL2 takes them; whet.<key> is a key of whet's own, over the translation.
    Raises: ConfigError: all problems at once, a line each.

    >>> made = translated("ppo", ["actor.model_name=m", "data.path=d.jsonl", "data.prompts_per_rollout=8",
    ...     "rollout.env_path=env.py", "rollout.train_sampling_params.max_new_tokens=16"])
    >>> made.algo.advantage_estimator, made.rollout.eval["temperature"], made.reward_names
    ('reinforce', 0.0, ('env.py:reward_fn',))
    """
    given = read(verb, words)
    kind, found = tree_of(given)
    return check(kind, merged(found, given.own))


def tree_of(given: Given) -> tuple[type, dict[str, Any]]:
    """The class of the configuration, and its tree, without keys of whet's own."""
    _refuse(given)
    given.check()
    flat = _copied(given)
    rules, kind = RULES[given.verb]
    for rule in rules:
        flat |= rule(given)
    given.check()
    found: dict[str, Any] = {}
    for key, value in flat.items():
        node: Any = value
        for part in reversed(key.split(".")):
            node = {part: node}
        found = merged(found, node)
    return kind(given), found


# ---- every key -------------------------------------------------------------------------------------------------------


def _row(given: Given, key: str) -> Key:
    row = key_of(key, KEYS[given.verb])
    assert row is not None
    return row


def _refuse(given: Given) -> None:
    """Notes every key whose value can't be carried out."""
    for key, value in given.values.items():
        row = _row(given, key) if key_of(key, KEYS[given.verb]) else None
        if row is not None and row.how in ("one", "refused") and not _harmless(value, row):
            given.problems.append(f"{key}={shown(value, 60)} is refused: {row.note}")


def _harmless(value: Any, row: Key) -> bool:
    return any(type(value) is type(other) and value == other for other in row.harmless)


def _copied(given: Given) -> Part:
    """The values of keys that are a key of whet's under another name."""
    flat: Part = {}
    for key, value in given.values.items():
        row = _row(given, key)
        if row.how != "same" or value is None:
            continue
        if row.to in flat and flat[row.to] != value:
            given.problems.append(f"{key}={value!r}: {row.to} is {flat[row.to]!r} by another key; give one of them")
        flat[row.to] = value
    return flat


def _need(given: Given, what: str, *keys: str) -> Any:
    """A value that has no default. Without it a problem is noted."""
    value = given.get(*keys)
    if value is None:
        given.problems.append(f"{what} is not given; write {keys[0]}=...")
    return value


def _one_of(given: Given, key: str, value: Any, known: Sequence[str]) -> Any:
    if value not in known:
        given.problems.append(str(lookup_error(key, value, known)))
    return value


def _same(given: Given, what: Any, *keys: str) -> None:
    """Notes keys that say something else than what they must repeat."""
    for key in keys:
        value = given.values.get(key)
        if value is not None and value != what:
            given.problems.append(f"{key}={value!r} is refused: it is {what!r} for the others; leave it out")


# ---- models ----------------------------------------------------------------------------------------------------------


def models(given: Given) -> Part:
    """Models, their tokenizer, and what saves memory."""
    roles = [role for role in ("actor", "ref_actor", "critic") if _uses(given, role)]
    sections = {"actor": "actor", "ref_actor": "reference", "critic": "critic"}
    flat: Part = {}
    name = _need(given, "the model", *(["critic.model_name"] if given.verb == "rm" else ["actor.model_name"]))
    _same(given, name, "rollout.model_name", "rollout.server_args.model_path")
    names = [f"{role}.tokenizer_name" for role in ("actor", "rollout", "ref_actor", "critic")]
    if (tokenizer := given.get(*names)) is not None:
        flat["tokenizer"] = tokenizer
    for role in roles:
        dtype = given.get(f"{role}.dtype")
        if dtype is not None:
            flat[f"{sections[role]}.dtype"] = _one_of(given, f"{role}.dtype", dtype, ("bfloat16", "float32"))
        if role != "ref_actor":
            names = (f"{role}.gradient_checkpointing", f"{role}.enable_gradient_checkpointing")
            flat[f"{sections[role]}.gradient_checkpointing"] = given.get(*names, default=True)
            flat |= optimizer(given, role)
    switches = [given.get(f"{role}.offload_{what}") for role in roles for what in ("model", "optimizer")]
    flat["offload_to_cpu"] = True in switches or None in switches
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


DEFAULTS = {
    "ppo": {"actor": (1e-6, 1e-7, None), "critic": (5e-6, 5e-7, None)},
    "sft": {"actor": (5e-6, 1e-7, 0.1)},
    "rm": {"critic": (1e-5, 5e-7, 0.1)},
    "dpo": {"actor": (5e-7, 1e-7, 0.1)},
}
"""Trainer -> role -> rate in July 2025, least rate in 2026, warm-up's share in July 2025 (None = a constant rate)."""
LATER_RATES = {"actor": 1e-6, "critic": 5e-6}
"""Role -> rate in 2026."""


def optimizer(given: Given, role: str) -> Part:
    """The optimizer of a role and its schedule, as the generation has them by default."""
    optim, (rate, least, ratio) = f"{role}.optim", DEFAULTS[given.verb][role]
    rate = LATER_RATES[role] if given.is_later else rate
    both = lambda name: (f"{role}.{name}", f"{role}.optimizer.{name}")
    inherited = {} if role == "actor" or given.is_later else given.below("actor")  # July's critic has the actor's
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
    else:
        ratio = given.get(f"{role}.warmup_ratio", default=ratio)
        name = "constant" if ratio is None else "cosine"
    name = given.get(f"{role}.scheduler.name", default=name)
    flat[f"{optim}.warmup_ratio"] = given.get(
        f"{role}.warmup_ratio", f"{role}.scheduler.warmup_ratio", default=ratio or 0.0
    )
    return {**flat, f"{optim}.schedule": name, f"{optim}.schedule_kwargs": more}


# ---- data and lengths ------------------------------------------------------------------------------------------------


def rows(given: Given) -> Part:
    """Data sets, and how their prompts are written."""
    _need(given, "the prompts of a step", "data.prompts_per_rollout", "rollout.train.prompts_per_rollout")
    number = given.count("data.responses_per_prompt", "rollout.train.responses_per_prompt")
    _same(given, number, "rollout.responses_per_prompt", "adv.responses_per_prompt")
    flat = {"algo.num_generations": number, "rollout.num_generations_eval": 1}
    path = _need(given, "the data", "data.path", "data.train_data_path", "rollout.train.path")
    flat["data.split"], flat["data.path"] = _split(path)
    test = given.get("data.test_data_path", "rollout.test.path")
    if test is not None:
        flat["data.eval_split"], flat["data.eval_path"] = _split(test)
        if given.get("rollout.test_ratio") is not None:
            given.problems.append("rollout.test_ratio has no effect next to a test path; leave one of them out")
    elif given.is_later:
        flat["data.eval_fraction"] = given.get("rollout.test_ratio", default=0.03)
    for key in ("prompt_key", "messages_key"):
        if given.get(f"rollout.test.{key}") is not None:
            _same(given, given.get(f"rollout.train.{key}"), f"rollout.test.{key}")
    templated = given.get("rollout.apply_chat_template", "rollout.train.apply_chat_template", default=True)
    _same(given, templated, "rollout.test.apply_chat_template")
    flat["data.apply_chat_template"] = templated
    if not templated:
        flat["rollout.chat_template_kwargs"] = {"chat_template": CONTENTS_ALONE}
    if (test_number := given.get("rollout.test.responses_per_prompt")) is not None:
        flat["rollout.num_generations_eval"] = test_number
    return flat


def _split(path: Any) -> tuple[str, Any]:
    """The split of split@path, and the path."""
    split, at, rest = str(path).partition("@")
    return (split, rest) if at and path is not None else ("train", path)


def sampling(given: Given) -> Part:
    """Sampling of training and evaluation, turns, and the budget of tokens."""
    names = [f"rollout.train{dot}sampling_params.max_new_tokens" for dot in ("_", ".")]
    each = _need(given, "the longest completion", *names)
    temperature = given.get(*(n.replace("max_new_tokens", "temperature") for n in names), default=1.0)
    _same(given, temperature, "actor.temperature", "ref_actor.temperature")
    flat: Part = {"rollout.temperature": temperature}
    train, test = (_copied(_only(given, mode)) for mode in ("train", "test"))
    stop = {} if given.is_later and "rollout.eval.stop" not in test else {"stop": ()}  # it has training's since 2026
    for name, usual in {**{k: v for k, v in SAMPLED.items() if k != "stop"}, **stop}.items():
        if f"rollout.{name}" in train and f"rollout.eval.{name}" not in test:
            flat[f"rollout.eval.{name}"] = usual
    flat["rollout.eval.temperature"] = test.get("rollout.eval.temperature", 0.0)
    _need(given, "the file with reward_fn", "rollout.env_path")
    turns = given.get("rollout.max_turns", "rollout.train.max_turns", default=1)
    return flat | {"rollout.max_turns": turns} | _lengths(given, each, turns)


def _only(given: Given, mode: str) -> Given:
    """The sampling parameters of a mode alone."""
    of_mode = (f"rollout.{mode}_sampling_params.", f"rollout.{mode}.sampling_params.")
    return Given(given.verb, {k: v for k, v in given.values.items() if k.startswith(of_mode)}, {})


def _lengths(given: Given, each: Any, turns: Any) -> Part:
    """Longest prompts and episodes: what max_length_per_device has room for."""
    if not isinstance(each, int) or not isinstance(turns, int):
        return {}  # told where the whole is checked
    if given.get("actor.max_length_per_device") is None:
        return {"rollout.max_prompt_length": PROMPT_TOKENS}
    budget = given.count("actor.max_length_per_device", default=each + 1)
    if budget <= each:
        given.problems.append(
            f"actor.max_length_per_device={budget} holds no prompt besides max_new_tokens={each}; raise it"
        )
    flat: Part = {"trainer.max_tokens_per_microbatch": budget, "rollout.max_prompt_length": budget - each}
    if turns > 1:  # a quarter for the prompt, the rest for the turns and what stands between them
        after = max(each, budget - max(1, budget // 4))
        flat |= {"rollout.max_prompt_length": budget - after, "rollout.max_episode_tokens": after}
    return flat


# ---- the objective ---------------------------------------------------------------------------------------------------


def objective(given: Given) -> Part:
    """Advantage, KL, correction, averaging, and the updates of a rollout."""
    estimator = _one_of(given, "adv.estimator", given.get("adv.estimator", default="reinforce"), ("reinforce", "gae"))
    gae = estimator == "gae"
    flat: Part = {"algo.preset": "rl2_ppo" if gae else "rl2_reinforce"}
    flat["algo.entropy_coef"] = given.get("actor.entropy.coef", default=0.0 if given.is_later else 1e-4)
    own = {"gamma": "gamma", "lamda": "gae_lambda"} if gae else {"norm_var": "norm_var", "global_norm": "global_norm"}
    for name, field in own.items():
        if (value := given.get(f"adv.{name}")) is not None:
            flat[f"algo.{field}"] = value
    for name in {"norm_var", "global_norm"} if gae else set():
        if given.get(f"adv.{name}"):
            given.problems.append(f"adv.{name} is of adv.estimator=reinforce; gae whitens its advantages")
    return flat | kl(given) | correction(given) | averaging(given, gae) | updates(given, gae)


def kl(given: Given) -> Part:
    """The KL to the reference: how much, where, and by which estimate."""
    coef, where = given.get("actor.kl.coef", default=0.0), given.get("actor.kl.type")
    if not coef:
        return {"algo.beta": 0.0}
    if where is None:
        given.problems.append(
            f"actor.kl.coef={coef!r} acts nowhere without actor.kl.type; write reward, loss or advantage"
        )
        return {}
    _one_of(given, "actor.kl.type", where, ("reward", "loss", "advantage"))
    name, usual = ("loss_estimator", "k2") if where == "loss" else ("reward_estimator", "k1")
    estimate = _one_of(given, f"actor.kl.{name}", given.get(f"actor.kl.{name}", default=usual), ("k1", "k2", "k3"))
    return {"algo.beta": coef, "algo.kl_type": where, "algo.kl_loss_mode": estimate}


def correction(given: Given) -> Part:
    """Truncated importance sampling: min(π / sampler, tis_coef) of the current policy, on the KL too."""
    most = given.get("actor.tis_coef", default=0.0)
    if not most:
        return {}
    weighed = {"threshold": most, "current": True, "kl": True}
    return {"algo.sampler_is": "token", **{f"algo.sampler_is_{name}": value for name, value in weighed.items()}}


def averaging(given: Given, gae: bool) -> Part:
    """avg_level of actor and critic."""
    modes = {"token": "token-mean", "sequence": "sequence-mean-token-mean"}
    level = _one_of(given, "actor.avg_level", given.get("actor.avg_level", default="token"), tuple(modes))
    flat: Part = {"algo.loss_agg_mode": modes.get(level)}
    if level == "sequence":
        flat["algo.loss_agg_units"] = "all"
    if gae:
        own = given.get("critic.avg_level", default=level)
        flat["algo.value_loss_agg_mode"] = modes.get(_one_of(given, "critic.avg_level", own, tuple(modes)))
    return flat


def updates(given: Given, gae: bool) -> Part:
    """update_per_rollout of actor and critic, and freeze_steps."""
    flat: Part = {}
    number = given.count("actor.update_per_rollout")
    prompts = given.count("data.prompts_per_rollout", "rollout.train.prompts_per_rollout", default=number)
    if prompts % number:
        whole = [n for n in range(1, prompts + 1) if prompts % n == 0]
        near = sorted(whole, key=lambda n: abs(n - number))[:3]
        given.problems.append(
            f"actor.update_per_rollout={number} does not divide the {prompts} prompts of a rollout: groups stay whole; "
            f"take one of {', '.join(map(str, sorted(near)))}"
        )
    flat["trainer.mini_batch_size"] = max(1, prompts // number)
    frozen = given.get("actor.freeze_steps", default=0)
    if not gae:
        if frozen:
            given.problems.append(
                f"actor.freeze_steps={frozen} with adv.estimator=reinforce would train nothing; leave it out"
            )
        return flat
    usual = number if given.is_later else max(12 // number * number, number)
    critic = given.count("critic.update_per_rollout", default=usual)
    if critic % number:
        given.problems.append(
            f"critic.update_per_rollout={critic} is no multiple of actor.update_per_rollout={number}: the critic's "
            "updates are parts of the actor's"
        )
    return flat | {"algo.critic_updates": max(1, critic // number), "algo.critic_warmup_steps": frozen}


def selection(given: Given) -> Part:
    """dynamic_filtering and group_filtering: which groups a step trains on, others in place of the rest."""
    number = given.count("data.responses_per_prompt", "rollout.train.responses_per_prompt")
    low, high = (given.get(f"rollout.group_filtering.{name}") for name in ("lower", "upper"))
    filters = given.get("rollout.dynamic_filtering", "rollout.train.dynamic_filtering", default=True) and number > 1
    if low is None and high is None:
        return {"algo.dynamic_sampling": filters, "algo.max_num_gen_batches": 10}
    bounds = [-1e15 if low is None else low, 1e15 if high is None else high]
    return {"algo.dynamic_sampling": True, "algo.max_num_gen_batches": 10, "algo.group_reward_bounds": bounds}


# ---- the loop --------------------------------------------------------------------------------------------------------


def trainer(given: Given) -> Part:
    """Folder, checkpoints, loggers, length of the run."""
    flat: Part = {}
    folder = given.get("trainer.save_dir", "actor.save_dir")
    name = given.get("trainer.experiment_name")
    if folder is not None:
        flat["trainer.run_dir"] = str(folder).rstrip("/").removesuffix("/actor")
    elif name is not None:
        flat["trainer.run_dir"] = f"ckpts/{name}"
    every = given.get("trainer.save_freq", "actor.save_freq")
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


def _rl(given: Given) -> type:
    return PPORunConfig if given.get("adv.estimator") == "gae" else RunConfig


Rule = Callable[[Given], Mapping[str, Any]]
RULES: dict[str, tuple[tuple[Rule, ...], Callable[[Given], type]]] = {
    "ppo": ((models, rows, sampling, objective, selection, trainer), _rl),
}
"""Trainer -> what makes its configuration, and the class of it."""
