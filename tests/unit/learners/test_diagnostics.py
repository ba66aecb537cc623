"""Diagnostics: the warnings of a run that learns nothing or has collapsed, when they come, and how often."""

import dataclasses
import io
import logging
import math
import re
from types import SimpleNamespace

import pytest
import torch
from helpers import cluster, completion, prompt, rows

from whet.config import DataConfig, GRPOConfig, Mode
from whet.config.monitoring import Band
from whet.learners.diagnostics import REPEAT_FACTOR, Diagnostics, num_choices
from whet.learners.grpo import GRPOLearner
from whet.ops import LogitsProcessors, grpo_advantages
from whet.rewards.manager import RewardManager
from whet.types import Group, TokenBatch

FINE = {"grad_norm": 1.0, "entropy/token_mean": 2.0}


@pytest.fixture(scope="module")
def tiny():
    return cluster()


@pytest.fixture
def diagnostics(tiny, caplog):
    caplog.set_level(logging.WARNING, "whet")
    return Diagnostics(tiny)


def said(caplog):
    found = [r.getMessage() for r in caplog.records if r.name == "whet"]
    caplog.clear()
    return found


def sample(rewards=(1.0, 0.0), *, alike=False, trained=True, estimator=grpo_advantages, **options):
    """What two completions of one prompt come to: (rewarded, batch)."""

    def judge(completions):
        if rewards == "fail":
            raise ValueError("gold")
        return list(rewards)

    version = 0 if trained else -1
    done = (completion([7, 8], version=version), completion([7, 8] if alike else [7, 9], 1, version=version))
    rewarded = RewardManager(judge, **options)([Group(prompt=prompt("2+2="), completions=done)], [["four", "five"]])
    batch = TokenBatch.from_groups(rewarded.groups)
    return rewarded, batch.replace(
        advantages=estimator(torch.from_numpy(rewarded.total), batch.group_of).index_select(0, batch.trajectory)
    )


def watch(diagnostics, first, last, sampled, row=FINE):
    rewarded, batch = sampled
    errors = {name: m.value for name, m in rewarded.metrics.items() if name.endswith("/errors")}
    for step in range(first, last + 1):
        diagnostics.check(step, {**row, **errors}, rewarded, batch)


# ---- no signal -----------------------------------------------------------------------------------------------------

SILENT = {
    "none": ({"rewards": (None, None)}, r"all rewards are None: judge applied to no completion; look at the columns"),
    "failed": ({"rewards": "fail", "on_error": "none"}, r"all rewards are None, since judge failed .*on_reward_error"),
    "equal": ({"rewards": (1.0, 1.0)}, r"rewards within each group are all equal; check judge and algo.reward_weights"),
    "some none": ({"rewards": (1.0, None)}, r"are all equal \(1 of 2 are None\); .*algo.num_generations"),
    "same": ({"rewards": (1.0, 1.0), "alike": True}, r"of each group are all the same, .*rollout.temperature"),
    "masked": ({"trained": False}, r"no completion ended by itself.*mask_truncated_completions.*max_tokens_to_gen"),
    "estimator": (
        {"estimator": lambda r, g: torch.zeros(len(r))},
        r"rewards differ, but all advantages are 0; look at algo.advantage_estimator",
    ),
}


@pytest.mark.parametrize("case", SILENT)
def test_steps_without_signal_are_said_with_their_cause_and_an_example(diagnostics, caplog, case):
    options, words = SILENT[case]
    sampled = sample(**options)
    if case not in ("none", "failed"):  # which are said at once: no prompt could change them
        watch(diagnostics, 5, 6, sampled)
        assert said(caplog) == []
    watch(diagnostics, 7, 7, sampled)
    (text,) = said(caplog)
    when = "step 7" if case in ("none", "failed") else "for 3 steps, since step 5"
    assert text.startswith(f"{when}: nothing is learned from the rewards: ")
    assert re.search(words, text), text
    first = options.get("rewards", (1.0,))[0]
    scored = "no reward" if case in ("none", "failed") else f"reward {first}"
    assert f"All completions ended by themselves. To '2+2=' the model said 'four', {scored}." in text


@pytest.mark.parametrize(
    ("status", "limit"),
    [
        ("out of turns", "max_tokens_to_generate"),
        ("out of context", "max_episode_tokens (the environment's words count in it)"),
    ],
)
def test_a_silence_says_how_many_completions_were_truncated(status, limit, diagnostics, caplog):
    rewarded, batch = sample((0.0, 0.0))
    group = rewarded.groups[0]
    truncated = dataclasses.replace(group.completions[0], finish_reason="length", info={"status": status})
    groups = [dataclasses.replace(group, completions=(truncated, group.completions[1]))]
    watch(diagnostics, 1, 3, (dataclasses.replace(rewarded, groups=groups), batch))
    (text,) = said(caplog)
    assert f"50% of the completions were truncated: raise rollout.{limit} if that is why" in text


def test_what_is_set_already_is_no_advice_where_completions_are_truncated(tiny, caplog):
    row = {**FINE, "completions/clipped_ratio": 1.0}
    rollout = tiny.rollout_for(Mode.TRAIN)

    def advice(templated=False, **changes):
        made = SimpleNamespace(**vars(tiny), rollout_for=lambda mode: dataclasses.replace(rollout, **changes))
        made.actor = tiny.actor
        watch(Diagnostics(made, templated=templated), 1, 1, sample(), row)
        (text,) = said(caplog)
        words = ("max_tokens_to_generate", "max_prompt_length", "apply_chat_template", "eos_tokens")
        return [word for word in words if word in text]

    assert advice() == ["max_tokens_to_generate", "apply_chat_template", "eos_tokens"]
    assert advice(templated=True, eos_tokens=(3,)) == ["max_tokens_to_generate"]
    positions = tiny.actor.module.config.max_position_embeddings
    assert advice(templated=True, max_tokens_to_generate=positions - 4)[0] == "max_prompt_length"
    settled = {"max_tokens_to_generate": positions - 60, "max_prompt_length": 60}  # by the longest of all prompts
    assert advice(**settled)[0] == "max_prompt_length"


def test_a_silence_of_an_environment_that_fails_blames_it_and_no_function(diagnostics, caplog):
    rewarded, batch = sample((None, None))
    (group,) = rewarded.groups
    failed = tuple(dataclasses.replace(c, finish_reason="error") for c in group.completions)
    watch(
        diagnostics,
        1,
        1,
        (dataclasses.replace(rewarded, groups=[dataclasses.replace(group, completions=failed)]), batch),
    )
    (text,) = said(caplog)
    assert "since the agent or environment failed in each episode" in text and "failed in 2 of 2 episodes" in text
    assert "judge" not in text and "ended by themselves" not in text


def test_a_silence_is_said_once_and_again_when_it_has_lasted_ten_times_as_long(diagnostics, caplog):
    watch(diagnostics, 1, 3 * REPEAT_FACTOR**2 + 3, sample((1.0, 1.0)))
    assert [text.split(":")[0] for text in said(caplog)] == [f"for {n} steps, since step 1" for n in (3, 30, 300)]
    watch(diagnostics, 304, 304, sample())
    watch(diagnostics, 305, 320, sample((1.0, 1.0)))
    assert said(caplog) == []  # it is no worse than it was


def test_without_advantages_the_rewards_tell(diagnostics, caplog):
    for sampled, count in ((sample((1.0, 1.0)), 1), (sample(), 0), (sample(trained=False), 1)):
        rewarded, batch = sampled
        watch(Diagnostics(diagnostics.cluster), 1, 3, (rewarded, batch.replace(advantages=None)))
        assert len(said(caplog)) == count


# ---- what a row shows ----------------------------------------------------------------------------------------------


def test_a_symptom_is_said_once_and_again_only_when_it_got_worse(tiny, diagnostics, caplog):
    def told(one, **values):
        for step, row in enumerate(zip(*values.values(), strict=True), 1):
            watch(one, step, step, sample(), {**FINE, **dict(zip(values, row, strict=True))})
        return [text.split(";")[0] for text in said(caplog)]

    shares = told(diagnostics, **{"completions/clipped_ratio": (0.4, 0.6, 0.6, 0.7, 0.2, 0.8, 0.95)})
    assert [text[:18] for text in shares] == ["step 2: 60% of com", "for 2 steps, since"]  # at 0.6, and at 0.95
    kl = {"kl": (0.9, 0.9, 0.9, 0.9, 0.1, 0.9, 0.9, 0.9, 3.0)}
    assert told(diagnostics, **kl) == [
        "for 3 steps, since step 1: kl is 0.9, above 0.5",
        "for 4 steps, since step 6: kl is 3, above 0.5",
    ]
    assert told(Diagnostics(tiny, bands={"kl": Band(above=5.0)}), **kl) == []
    missed = told(
        Diagnostics(tiny, bands={"grad_nrm": Band(above=1.0), "eval/x": Band(above=1.0)}),
        loss=(1.0,) * 5,
    )
    assert missed == [
        "trainer.warn_when.eval/x: 3 rows, and none had that metric",
        "trainer.warn_when.grad_nrm: 3 rows, and none had that metric",
    ]
    assert told(Diagnostics(tiny, bands={"x": Band(above=1.0)}), x=(0.0,) * 5) == []


# ---- collapse ------------------------------------------------------------------------------------------------------


def test_gradients_of_zero_under_advantages_are_said(diagnostics, caplog):
    watch(diagnostics, 1, 9, sample(), {"grad_norm": 0.0})
    watch(diagnostics, 10, 11, sample((1.0, 1.0)), {"grad_norm": 0.0})  # no wonder: these steps don't tell
    watch(diagnostics, 12, 12, sample(), {})  # all updates skipped: nor does this one
    assert said(caplog) == []
    watch(diagnostics, 13, 13, sample(), {"grad_norm": 0.0})
    (text,) = said(caplog)
    assert text.startswith("for 10 steps, since step 1: the gradient is exactly 0") and "algo.policy_loss_fn" in text
    watch(diagnostics, 14, 14, sample(), {"grad_norm": 1e-30})
    watch(diagnostics, 15, 23, sample(), {"grad_norm": 0.0})
    assert said(caplog) == []


@pytest.mark.parametrize("entropy", [0.0, 1e-5])
def test_a_policy_that_is_certain_of_everything_is_said(diagnostics, caplog, entropy):
    watch(diagnostics, 3, 11, sample(), {"entropy/token_mean": entropy})
    watch(diagnostics, 12, 12, sample(), {})
    watch(diagnostics, 13, 13, sample(), {"entropy/token_mean": math.nan})
    (sooner,) = said(caplog)  # it has left its band
    assert sooner.startswith("for 5 steps, since step 3: entropy/token_mean is ")
    watch(diagnostics, 14, 5 + REPEAT_FACTOR * 10, sample(), {"entropy/token_mean": entropy})
    first, second = [text for text in said(caplog) if "is certain" in text]
    assert first.startswith("for 10 steps, since step 3: the policy is certain of every token (entropy")
    assert "actor.optim.lr" in first and "trainer.allow_config_change=true" in first
    assert second.startswith("for 100 steps, since step 3: ")


@pytest.mark.parametrize(("processors", "choices"), [({}, 264), ({"top_k": 20}, 20), ({"forbidden_ids": (0, 5)}, 262)])
def test_a_policy_that_draws_evenly_is_said(caplog, processors, choices, monkeypatch, diagnostics):
    monkeypatch.setattr(diagnostics.cluster.actor, "processors", LogitsProcessors(**processors))
    watch(diagnostics, 1, 20, sample(), {"entropy/token_mean": math.log(choices) * 0.99})
    assert said(caplog) == []
    watch(diagnostics, 21, 30, sample(), {"entropy/token_mean": math.log(choices)})
    (text,) = said(caplog)
    assert text.startswith(f"for 10 steps, since step 21: the policy samples nearly uniformly from {choices} tokens")


def test_how_many_tokens_can_be_drawn():
    assert (
        num_choices(LogitsProcessors(top_p=0.9), 10) == 9
        and num_choices(LogitsProcessors(top_k=3, full=True), 10) == 10
    )
    assert num_choices(LogitsProcessors(constrained=True), 10) is None
    assert num_choices(LogitsProcessors(forbidden_ids=(1, 1, 99)), 10) == 9


# ---- resuming ------------------------------------------------------------------------------------------------------


def reloaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_what_is_kept_makes_a_resumed_watch_warn_as_the_uninterrupted_one(tiny, diagnostics, caplog):
    watch(diagnostics, 1, 50, sample((None, None)))
    truncated = {"completions/clipped_ratio": 0.6}
    watch(diagnostics, 51, 57, sample(), {"grad_norm": 0.0, "entropy/token_mean": 0.0, **truncated})
    state = reloaded(diagnostics.state())
    said(caplog)
    other = Diagnostics(tiny)
    other.restore(state)
    texts = []
    for one in (diagnostics, other):
        watch(one, 58, 60, sample(), {"grad_norm": 0.0, "entropy/token_mean": 0.0, **truncated})
        texts.append(said(caplog))
    assert texts[0] == texts[1] and len(texts[0]) == 2


def test_a_resumed_run_says_since_which_step_of_the_whole_run(tmp_path, caplog):
    def nothing(completions, **_):
        return [0.0] * len(completions)

    def train(**training):
        c = cluster(run_dir=str(tmp_path), **training)
        algo, data = GRPOConfig(num_generations=2, beta=0.0), DataConfig(batch_size=1, shuffle=False)
        GRPOLearner(c, algo, nothing, data=data).train(rows(4))
        return [m for m in caplog.messages if "since step" in m]

    assert train(max_steps=2) == []
    (text,) = train(max_steps=3, resume="latest")
    assert text.startswith("for 3 steps, since step 1: nothing is learned") and "check nothing and" in text


def test_the_distance_of_sampler_and_trainer_is_said_with_the_engine_and_the_dtype_that_run(diagnostics, caplog):
    watch(diagnostics, 1, 2, sample(), {**FINE, "sampling/sampling_logp_difference/mean": 0.3})
    (found,) = said(caplog)
    assert found.startswith("for 2 steps, since step 1: sampler and trainer are 0.3 nats apart")
    assert "(embedded engine, float32)" in found and "rollout_engine" not in found and "actor.dtype" not in found
