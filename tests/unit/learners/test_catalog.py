"""The names that can be chosen, where they are shown: help, docs/algorithms.md, the log of a run."""

import pytest
from helpers import cluster, length_reward, rows

from tools.docs.algorithms import KNOWN, equation, source
from whet.config import DataConfig, GRPOConfig, PolicyConfig, RunConfig, help_text
from whet.config.introspection import choices
from whet.learners.from_config import describe_objective
from whet.learners.grpo import GRPOLearner

PUBLIC = [(field, name) for field, known in KNOWN.items() for name in known]


@pytest.mark.parametrize("field", KNOWN)
def test_what_help_lists_is_what_there_is(field):
    assert choices(GRPOConfig, field).keys() == KNOWN[field].keys()
    assert all(when and len(when) <= 90 for when in choices(GRPOConfig, field).values())


@pytest.mark.parametrize(("field", "name"), PUBLIC)
def test_every_name_states_its_equation_and_what_is_public_its_source(field, name):
    fn = KNOWN[field][name]
    assert any(sign in equation(fn) for sign in "=/()|⁰") or " 0 " in equation(fn)
    if field in ("advantage_estimator", "policy_loss_fn", "value_loss_fn", "loss_masks", "sampler_is"):
        assert len(source(fn)) > 4


def test_help_shows_the_names_under_their_field():
    lines = help_text(RunConfig).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  algo.loss_masks"))
    shown = [line.split()[0] for line in lines[at + 2 :][: len(KNOWN["loss_masks"])]]
    assert sorted(shown) == sorted(KNOWN["loss_masks"])
    assert max(map(len, lines)) <= 120


def test_a_run_says_what_it_has_composed():
    config = GRPOConfig(
        beta=0.0, sampler_is="token", loss_masks=("off-policy",), entropy_coef=0.01, advantage_estimator="rloo"
    )
    made = GRPOLearner(cluster(engine="mock", max_steps=1), config, length_reward, data=DataConfig(batch_size=2))
    passes = made.planned_passes(2)
    assert passes["advantages"] == "rloo(advantage_eps=1e-06, advantage_ddof=1, normalize_advantages=False)"
    first, *factors = passes["loss"].removesuffix(" - 0.01 * entropy").split(" * ")
    assert first.startswith("grpo(") and "epsilon=0.2" in first and "delta" not in first
    assert [f.partition("(")[0] for f in factors] == ["token", "off-policy"]
    assert passes["aggregation"] == "sequence-mean-token-mean over trained sequences"
    made.train(rows(2))


def test_a_function_of_ones_own_and_a_kl_elsewhere_are_named_too():
    def mine(x, *, epsilon):
        return x.logprobs

    config = PolicyConfig(policy_loss_fn=mine, beta=0.5, kl_type="reward", kl_loss_mode="kl", epsilon=0.3)
    assert describe_objective(config) == {
        "advantages": "grpo(scale_rewards=group, advantage_eps=1e-06, advantage_ddof=1) - 0.5 * kl (in the reward)",
        "loss": "mine(epsilon=0.3)",
        "aggregation": "sequence-mean-token-mean over trained sequences",
    }
