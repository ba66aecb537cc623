"""What several keys of RL2's ppo say together: data, sampling, lengths, the objective, the updates of a rollout."""

from __future__ import annotations

from typing import Any

from whet.config.run import PPORunConfig, RunConfig
from whet.rl2.common import Part, models, split_of, trainer
from whet.rl2.parsed_args import Given, copied

__all__ = ["CONTENTS_ALONE", "RULES", "kind"]

CONTENTS_ALONE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
"""The chat template that stands for apply_chat_template=false."""
PROMPTS, RESPONSES = (
    tuple(f"{section}.{name}" for section in ("data", "train_data", "rollout.train"))
    for name in ("prompts_per_rollout", "responses_per_prompt")
)
"""The prompts of a step and the completions of each, as the generations name them."""
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


def rows(given: Given) -> Part:
    """Data sets, and how their prompts are written."""
    given.need("the prompts of a step", *PROMPTS)
    number = given.count(*RESPONSES)
    given.same(number, "rollout.responses_per_prompt", "adv.responses_per_prompt")
    flat: Part = {"algo.num_generations": number, "rollout.num_generations_eval": 1}
    path = given.need("the data", "data.path", "data.train_data_path", "train_data.path", "rollout.train.path")
    flat["data.split"], flat["data.path"] = split_of(path)
    test = given.get("data.test_data_path", "test_data.path", "rollout.test.path")
    if test is not None:
        flat["data.eval_split"], flat["data.eval_path"] = split_of(test)
        if given.get("rollout.test_ratio") is not None:
            given.problems.append("rollout.test_ratio has no effect next to a test path; leave one of them out")
    elif given.is_later:
        flat["data.eval_fraction"] = given.get("rollout.test_ratio", default=0.03)
    asked = given.get("rollout.apply_chat_template", "rollout.train.apply_chat_template")
    templated = not given.is_september if asked is None else asked  # its prompts are texts, taken as they are
    given.same(templated, "rollout.test.apply_chat_template")
    flat["data.apply_chat_template"] = templated
    if asked is False:
        flat["rollout.chat_template_kwargs"] = {"chat_template": CONTENTS_ALONE}
    columns = {name: given.get(f"rollout.train.{name}_key", default=name) for name in ("prompt", "messages")}
    for name, column in columns.items():
        given.same(column, f"rollout.test.{name}_key")
    if not given.is_september:
        flat["data.prompt_column"] = columns["messages" if templated or given.is_july else "prompt"]
    tests = ("test_data.responses_per_prompt", "rollout.test.responses_per_prompt")
    if (test_number := given.get(*tests)) is not None:
        flat["rollout.num_generations_eval"] = test_number
    return flat


def sampling(given: Given) -> Part:
    """Sampling of training and evaluation, turns, and the budget of tokens."""
    names = [f"rollout.train{dot}sampling_params.max_new_tokens" for dot in ("_", ".")]
    each = given.need("the longest completion", *names)
    temperature = given.get(*(n.replace("max_new_tokens", "temperature") for n in names), default=1.0)
    given.same(temperature, "actor.temperature", "ref_actor.temperature")
    flat: Part = {"rollout.temperature": temperature}
    train, test = (copied(_only(given, mode)) for mode in ("train", "test"))
    stop = {} if given.is_later and "rollout.eval.stop" not in test else {"stop": ()}  # it has training's since 2026
    for name, usual in {**{k: v for k, v in SAMPLED.items() if k != "stop"}, **stop}.items():
        if f"rollout.{name}" in train and f"rollout.eval.{name}" not in test:
            flat[f"rollout.eval.{name}"] = usual
    flat["rollout.eval.temperature"] = test.get("rollout.eval.temperature", 0.0)
    given.need("the file with reward_fn", "rollout.env_path")
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
    if turns > 1:  # what stands between the turns counts too; an episode ends where it fills the budget
        flat["rollout.max_episode_tokens"] = budget
    return flat


def objective(given: Given) -> Part:
    """Advantage, KL, correction, averaging, and the updates of a rollout."""
    estimator = given.one_of("adv.estimator", given.get("adv.estimator", default="reinforce"), ("reinforce", "gae"))
    gae = estimator == "gae"
    flat: Part = {"algo.preset": "rl2_ppo" if gae else "rl2_reinforce"}
    flat["algo.entropy_coef"] = given.get("actor.entropy.coef", default=0.0)
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
    given.one_of("actor.kl.type", where, ("reward", "loss", "advantage"))
    name, usual = ("loss_estimator", "k2") if where == "loss" else ("reward_estimator", "k1")
    estimate = given.one_of(f"actor.kl.{name}", given.get(f"actor.kl.{name}", default=usual), ("k1", "k2", "k3"))
    return {"algo.beta": coef, "algo.kl_type": where, "algo.kl_loss_mode": estimate}


def correction(given: Given) -> Part:
    """Truncated importance sampling: min(π / sampler, tis_coef) of the current policy, on the KL too."""
    most = given.get("actor.tis_coef", default=2.0 if given.is_september else 0.0)
    if not most:
        return {}
    weighed = {"threshold": most, "current": True, "kl": True}
    return {"algo.sampler_is": "token", **{f"algo.sampler_is_{name}": value for name, value in weighed.items()}}


def averaging(given: Given, gae: bool) -> Part:
    """avg_level of actor and critic."""
    modes = {"token": "token-mean", "sequence": "sequence-mean-token-mean"}
    level = given.one_of("actor.avg_level", given.get("actor.avg_level", default="token"), tuple(modes))
    flat: Part = {"algo.loss_agg_mode": modes.get(level)}
    if level == "sequence":
        flat["algo.loss_agg_units"] = "all"
    if gae:
        own = given.get("critic.avg_level", default=level)
        flat["algo.value_loss_agg_mode"] = modes.get(given.one_of("critic.avg_level", own, tuple(modes)))
    return flat


def updates(given: Given, gae: bool) -> Part:
    """update_per_rollout of actor and critic, and freeze_steps."""
    flat: Part = {}
    number = given.count("actor.update_per_rollout")
    prompts = given.count(*PROMPTS, default=number)
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
    usual = max(12 // number * number, number) if given.is_july else number
    critic = given.count("critic.update_per_rollout", default=usual)
    if critic % number:
        given.problems.append(
            f"critic.update_per_rollout={critic} is not a multiple of actor.update_per_rollout={number}: the critic's "
            "updates are parts of the actor's"
        )
    return flat | {"algo.critic_updates": max(1, critic // number), "algo.critic_warmup_steps": frozen}


def selection(given: Given) -> Part:
    """dynamic_filtering and group_filtering: which groups a step trains on, others in place of the rest."""
    number = given.count(*RESPONSES)
    low, high = (given.get(f"rollout.group_filtering.{name}") for name in ("lower", "upper"))
    filters = given.get("rollout.dynamic_filtering", "rollout.train.dynamic_filtering", default=True) and number > 1
    if low is None and high is None:
        return {"algo.dynamic_sampling": filters, "algo.max_num_gen_batches": 10}
    bounds = [-1e15 if low is None else low, 1e15 if high is None else high]
    return {"algo.dynamic_sampling": True, "algo.max_num_gen_batches": 10, "algo.group_reward_bounds": bounds}


def kind(given: Given) -> type:
    """The class of the configuration."""
    return PPORunConfig if given.get("adv.estimator") == "gae" else RunConfig


RULES = (models, rows, sampling, objective, selection, trainer)
"""What makes a configuration."""
