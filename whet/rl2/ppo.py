"""Computes the keys of whet's that depend on several keys of RL2's ppo: data, sampling, lengths, objective, updates."""

from __future__ import annotations

from typing import Any

from whet.rl2.common import WhetKeys, context_size, named_step, split_of
from whet.rl2.parsed_args import ParsedArgs, copied_values

__all__ = ["CONTENTS_ALONE", "TRANSLATIONS"]

CONTENTS_ALONE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
"""The chat template that does what apply_chat_template=false does in RL2: it joins the contents."""
PROMPTS, RESPONSES = (
    tuple(f"{section}.{name}" for section in ("data", "train_data", "rollout.train"))
    for name in ("prompts_per_rollout", "responses_per_prompt")
)
"""The keys for the prompts of a step and the completions of each prompt, in every generation of RL2."""
STEP_TURNS = 16
"""The most turns of an environment that ends its episodes itself, by `done`; RL2 has no limit there."""
PROMPT_TOKENS = 2048
"""The longest prompt if max_length_per_device is not set, in tokens."""
SAMPLED = {
    "top_p": 1.0,
    "top_k": None,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "stop": (),
}
"""Sampling parameters that evaluation does not take from training, with their defaults."""


def translate_data(args: ParsedArgs) -> WhetKeys:
    """Translates data sets, and the form of their prompts."""
    args.require("the prompts of a step", *PROMPTS)
    number = args.get_count(*RESPONSES)
    args.require_equal(number, "rollout.responses_per_prompt", "adv.responses_per_prompt")
    flat: WhetKeys = {"algo.num_generations": number, "rollout.num_generations_eval": 1}
    path = args.require("the data", "data.path", "data.train_data_path", "train_data.path", "rollout.train.path")
    flat["data.split"], flat["data.path"] = split_of(path)
    test = args.get("data.test_data_path", "test_data.path", "rollout.test.path")
    if test is not None:
        flat["data.eval_split"], flat["data.eval_path"] = split_of(test)
        if args.get("rollout.test_ratio") is not None:
            args.problems.append("rollout.test_ratio has no effect next to a test path; leave one of them out")
    elif args.is_2026:
        flat["data.eval_fraction"] = args.get("rollout.test_ratio", default=0.03)
    apply = args.get("rollout.apply_chat_template", "rollout.train.apply_chat_template")
    templated = not args.is_september_2025 if apply is None else apply  # prompts of September 2025 are plain texts
    args.require_equal(templated, "rollout.test.apply_chat_template")
    flat["data.apply_chat_template"] = templated
    if apply is False:
        flat["rollout.chat_template_kwargs"] = {"chat_template": CONTENTS_ALONE}
    columns = {name: args.get(f"rollout.train.{name}_key", default=name) for name in ("prompt", "messages")}
    for name, column in columns.items():
        args.require_equal(column, f"rollout.test.{name}_key")
    if not args.is_september_2025:
        flat["data.prompt_column"] = columns["messages" if templated or args.is_july_2025 else "prompt"]
    tests = ("test_data.responses_per_prompt", "rollout.test.responses_per_prompt")
    if (test_number := args.get(*tests)) is not None:
        flat["rollout.num_generations_eval"] = test_number
    return flat


def translate_sampling(args: ParsedArgs) -> WhetKeys:
    """Translates the sampling parameters of training and evaluation, turns, and the token budget."""
    names = [f"rollout.train{dot}sampling_params.max_new_tokens" for dot in ("_", ".")]
    each = args.require("the longest completion", *names)
    temperature = args.get(*(n.replace("max_new_tokens", "temperature") for n in names), default=1.0)
    args.require_equal(temperature, "actor.temperature", "ref_actor.temperature")
    flat: WhetKeys = {"rollout.temperature": temperature}
    train, test = (copied_values(_sampling_args(args, mode)) for mode in ("train", "test"))
    # since 2026 evaluation uses the stop strings of training
    stop = {} if args.is_2026 and "rollout.eval.stop" not in test else {"stop": ()}
    for name, usual in {**{k: v for k, v in SAMPLED.items() if k != "stop"}, **stop}.items():
        if f"rollout.{name}" in train and f"rollout.eval.{name}" not in test:
            flat[f"rollout.eval.{name}"] = usual
    flat["rollout.eval.temperature"] = test.get("rollout.eval.temperature", 0.0)
    path = args.require("the file with reward_fn", "rollout.env_path")
    named = named_step(path) if isinstance(path, str) else path
    usual = 1 if named == path else STEP_TURNS
    turns = args.get("rollout.max_turns", "rollout.train.max_turns", default=usual)
    return flat | {"rollout.env_path": named, "rollout.max_turns": turns} | _translate_lengths(args, each, turns)


def _sampling_args(args: ParsedArgs, mode: str) -> ParsedArgs:
    """Returns the arguments that are sampling parameters of one mode."""
    of_mode = (f"rollout.{mode}_sampling_params.", f"rollout.{mode}.sampling_params.")
    return ParsedArgs(args.trainer, {k: v for k, v in args.values.items() if k.startswith(of_mode)}, {})


def _translate_lengths(args: ParsedArgs, each: Any, turns: Any) -> WhetKeys:
    """Computes the longest prompt and episode for which max_length_per_device has room."""
    if not isinstance(each, int) or not isinstance(turns, int):
        return {}  # the configuration itself reports the wrong type
    if args.get("actor.max_length_per_device") is None:
        return {"rollout.max_prompt_length": PROMPT_TOKENS}
    own = args.get_count("actor.max_length_per_device", default=each + 1)
    budget = own * context_size(args)
    if budget <= each:
        args.problems.append(
            f"actor.max_length_per_device={own} holds no prompt besides max_new_tokens={each}; raise it"
        )
    flat: WhetKeys = {"trainer.max_tokens_per_microbatch": budget, "rollout.max_prompt_length": budget - each}
    if turns > 1:  # the text between the turns counts too; an episode that fills the budget ends
        flat["rollout.max_episode_tokens"] = budget
    return flat


def translate_objective(args: ParsedArgs) -> WhetKeys:
    """Translates advantages, KL, the correction for the sampler, averaging, and the updates of a rollout."""
    estimator = args.require_choice(
        "adv.estimator", args.get("adv.estimator", default="reinforce"), ("reinforce", "gae")
    )
    gae = estimator == "gae"
    flat: WhetKeys = {"algo.preset": "rl2_ppo" if gae else "rl2_reinforce"}
    flat["algo.entropy_coef"] = args.get("actor.entropy.coef", default=0.0)
    own = {"gamma": "gamma", "lamda": "gae_lambda"} if gae else {"norm_var": "norm_var", "global_norm": "global_norm"}
    for name, field in own.items():
        if (value := args.get(f"adv.{name}")) is not None:
            flat[f"algo.{field}"] = value
    for name in ("norm_var", "global_norm") if gae else ():
        if args.get(f"adv.{name}"):
            args.problems.append(f"adv.{name} is of adv.estimator=reinforce; gae whitens its advantages")
    return flat | (
        translate_kl(args) | translate_correction(args) | translate_averaging(args, gae) | translate_updates(args, gae)
    )


def translate_kl(args: ParsedArgs) -> WhetKeys:
    """Translates the KL to the reference: its coefficient, its place and its estimator."""
    coef, where = args.get("actor.kl.coef", default=0.0), args.get("actor.kl.type")
    if not coef:
        return {"algo.beta": 0.0}
    if where is None:
        args.problems.append(
            f"actor.kl.coef={coef!r} acts nowhere without actor.kl.type; write reward, loss or advantage"
        )
        return {}
    args.require_choice("actor.kl.type", where, ("reward", "loss", "advantage"))
    name, usual = ("loss_estimator", "k2") if where == "loss" else ("reward_estimator", "k1")
    estimate = args.require_choice(f"actor.kl.{name}", args.get(f"actor.kl.{name}", default=usual), ("k1", "k2", "k3"))
    return {"algo.beta": coef, "algo.kl_type": where, "algo.kl_loss_mode": estimate}


def translate_correction(args: ParsedArgs) -> WhetKeys:
    """Translates truncated importance sampling: the weight min(π / sampler, tis_coef), which multiplies the KL too."""
    most = args.get("actor.tis_coef", default=2.0 if args.is_september_2025 else 0.0)
    if not most:
        return {}
    options = {"threshold": most, "current": True, "kl": True}
    return {"algo.sampler_is": "token", **{f"algo.sampler_is_{name}": value for name, value in options.items()}}


def translate_averaging(args: ParsedArgs, gae: bool) -> WhetKeys:
    """Translates avg_level of actor and critic."""
    modes = {"token": "token-mean", "sequence": "sequence-mean-token-mean"}
    level = args.require_choice("actor.avg_level", args.get("actor.avg_level", default="token"), tuple(modes))
    flat: WhetKeys = {"algo.loss_agg_mode": modes.get(level)}
    if level == "sequence":
        flat["algo.loss_agg_units"] = "all"
    if gae:
        own = args.get("critic.avg_level", default=level)
        flat["algo.value_loss_agg_mode"] = modes.get(args.require_choice("critic.avg_level", own, tuple(modes)))
    return flat


def translate_updates(args: ParsedArgs, gae: bool) -> WhetKeys:
    """Translates update_per_rollout of actor and critic, and freeze_steps."""
    flat: WhetKeys = {}
    number = args.get_count("actor.update_per_rollout")
    prompts = args.get_count(*PROMPTS, default=number)
    if prompts % number:
        divisors = [n for n in range(1, prompts + 1) if prompts % n == 0]
        near = sorted(divisors, key=lambda n: abs(n - number))[:3]
        args.problems.append(
            f"actor.update_per_rollout={number} does not divide the {prompts} prompts of a rollout: groups stay whole; "
            f"take one of {', '.join(map(str, sorted(near)))}"
        )
    flat["trainer.mini_batch_size"] = max(1, prompts // number)
    frozen = args.get("actor.freeze_steps", default=0)
    if not gae:
        if frozen:
            args.problems.append(
                f"actor.freeze_steps={frozen} with adv.estimator=reinforce would train nothing; leave it out"
            )
        return flat
    usual = max(12 // number * number, number) if args.is_july_2025 else number
    critic = args.get_count("critic.update_per_rollout", default=usual)
    if critic % number:
        args.problems.append(
            f"critic.update_per_rollout={critic} is not a multiple of actor.update_per_rollout={number}: the critic's "
            "updates are parts of the actor's"
        )
    return flat | {"algo.critic_updates": max(1, critic // number), "algo.critic_warmup_steps": frozen}


def translate_filtering(args: ParsedArgs) -> WhetKeys:
    """Translates dynamic_filtering and group_filtering: new groups replace those that they filter out."""
    number = args.get_count(*RESPONSES)
    low, high = (args.get(f"rollout.group_filtering.{name}") for name in ("lower", "upper"))
    filters = args.get("rollout.dynamic_filtering", "rollout.train.dynamic_filtering", default=True) and number > 1
    if low is None and high is None:
        return {"algo.dynamic_sampling": filters, "algo.max_num_gen_batches": 10}
    bounds = [-1e15 if low is None else low, 1e15 if high is None else high]
    return {"algo.dynamic_sampling": True, "algo.max_num_gen_batches": 10, "algo.group_reward_bounds": bounds}


TRANSLATIONS = (translate_data, translate_sampling, translate_objective, translate_filtering)
"""The functions that compute the keys of a configuration."""
