"""Policy losses by name in a learner: what is bound to them, what they log, and that skipping changes nothing."""

import functools
import inspect

import pytest
import torch
from helpers import cluster, full, length_reward, rows
from surrogates import cases, gradient, random_inputs

from whet.config import DataConfig, GRPOConfig
from whet.errors import ConfigError
from whet.learners.from_config import make_objective
from whet.learners.grpo import GRPOLearner
from whet.ops import CORRECTIONS, POLICY_LOSSES, metrics_without_advantage, vespo

LOGGED = ("pg_clipfrac", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")


def half_flat(prompts, completions, **_):
    """The same for all completions of some prompts, different ones for others."""
    return [1.0 if prompt < "2" else length_reward([text])[0] for prompt, text in zip(prompts, completions)]


SKIPPED = [(n, level) for n, level in cases() if n != "distillation" and level in (None, "token")]
SKIPPED += [("cispo", "sequence"), ("grpo", "sequence")]


@pytest.mark.parametrize(("name", "level"), [*SKIPPED[:2], *(full(*case) for case in SKIPPED[2:-3]), *SKIPPED[-3:]])
def test_skipping_completions_without_an_advantage_changes_neither_weights_nor_clip_metrics(name, level):
    found = []
    fields = {} if level is None else {"importance_sampling_level": level}
    if name != "reinforce" and not name.startswith(("sapo", "vespo")):
        fields["epsilon"] = 1e-3  # so that much is clipped in the second pass
    for skips in (True, False):
        c = cluster(rollout={"eos_tokens": tuple(range(180, 264))}, num_epochs=1, lr=1e-3)
        config = GRPOConfig(num_generations=4, beta=0.0, num_iterations=2, policy_loss_fn=name, **fields)
        made = GRPOLearner(c, config, half_flat, data=DataConfig(batch_size=4, shuffle=False))
        assert made.skips_without_signal
        made.skips_without_signal = skips
        row = made.train(rows(4)).rows[0]
        assert (row["skipped/sequences"] > 0) == skips
        found.append((row, {n: p.detach().clone() for n, p in c.actor.module.named_parameters()}))
    (skipping, ours), (running, theirs) = found
    assert max(float((ours[n] - theirs[n]).abs().max()) for n in ours) < 1e-6
    clips = {label: row[label] for row in (running,) for label in LOGGED if label in row}
    assert {label: skipping[label] for label in clips} == pytest.approx(clips, rel=1e-5)
    assert ("vespo/phi_seq_mean" in running) == (name == "vespo")
    assert sum(clips.values()) > 0 or name in ("reinforce", "sapo", "vespo")


def test_the_clip_of_sequences_is_counted_by_sequence_whatever_chose_the_level():
    by_token, by_sequence = "clip_ratio/high", "sequence_clip_ratio/high"
    for fields, name in (
        ({}, by_token),
        ({"importance_sampling_level": "sequence"}, by_sequence),
        ({"policy_loss_fn": "gspo-token"}, by_sequence),
        ({"policy_loss_fn": "cispo", "importance_sampling_level": "sequence"}, "sequence_cispo_clip_ratio"),
    ):
        surrogate = make_objective(GRPOConfig(**fields)).surrogate
        declared = metrics_without_advantage(surrogate)
        assert declared is not None and name in declared
        assert name in surrogate(random_inputs(0))[1]


def test_vespo_has_the_sampler_s_correction_in_its_weight_and_not_twice():
    corrected = {"sampler_is": "token", "sampler_is_threshold": 1.5, "beta": 0.0}
    objective = make_objective(GRPOConfig(policy_loss_fn="vespo", **corrected))
    assert objective.factors == ()
    x = random_inputs(1)
    weight = (x.old_logprobs - x.sampler_logprobs).exp().clamp(max=1.5)
    expected = gradient(functools.partial(vespo, correction=lambda x: weight), x)
    found = gradient(objective, x)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[2], expected[2])
    plain = make_objective(GRPOConfig(**corrected))
    assert len(plain.factors) == 1


def test_vespo_takes_a_correction_of_tokens_alone(monkeypatch):
    config = GRPOConfig(policy_loss_fn="vespo", sampler_is="token", beta=0.0)
    monkeypatch.setitem(CORRECTIONS, "sequence", CORRECTIONS["token"])
    object.__setattr__(config, "sampler_is", "sequence")
    with pytest.raises(ConfigError, match=r"multiplies the weights of all its tokens: take algo\.sampler_is='token'"):
        make_objective(config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy_loss_fn": "sapo", "epsilon_c": 3.0}, "effect without policy_loss_fn=grpo or ppo or gspo-token;"),
        ({"policy_loss_fn": "reinforce", "epsilon": 0.1}, r"epsilon=0\.1 has no effect .*leave epsilon at 0\.2"),
        ({"sapo_temperature_neg": 2.0}, r"neg=2\.0 has no effect without policy_loss_fn=sapo; set that"),
        (
            {"policy_loss_fn": "gspo-token", "importance_sampling_level": "sequence"},
            "_level='sequence' has no effect",
        ),
    ],
)
def test_a_parameter_that_the_chosen_loss_does_not_take_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        make_objective(GRPOConfig(**fields))


def test_every_parameter_of_a_policy_loss_is_a_field_and_its_default_that_of_the_loss():
    config = GRPOConfig()
    for name, loss in POLICY_LOSSES.items():
        bound = make_objective(GRPOConfig(policy_loss_fn=name)).surrogate
        asked = {k: p.default for k, p in inspect.signature(loss).parameters.items() if k != "x"}
        for keyword, default in asked.items():
            if keyword == "correction" or keyword in getattr(loss, "keywords", {}):
                continue
            assert getattr(config, keyword) == default, (name, keyword)
            assert bound.keywords[keyword] == default
