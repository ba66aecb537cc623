"""The table of the fields that functions read agrees with their signatures, and with the numbers that they compute."""

import copy

import preference_inputs
import pytest
import torch
from surrogates import changed as with_columns
from surrogates import random_inputs

from tools.write_fields_read import tables
from whet.config import GRPOConfig, PPOConfig, PreferenceConfig
from whet.config.algo import fields_read as written
from whet.config.algo.unused_fields import SWITCHES, unread_fields
from whet.errors import ConfigError
from whet.learners import from_config, preference_from_config
from whet.learners.from_config import bind_fields, make_estimator, make_objective
from whet.ops import (
    VALUE_LOSSES,
    AdvantageInputs,
    advantages_and_returns,
    estimate,
    generalized_jsd,
    token_weights,
)

OTHER = {
    "advantage_ddof": 0,
    "advantage_eps": 1.0,
    "cispo_epsilon_low": 0.1,
    "clip_range_value": 0.01,
    "delta": 1.05,
    "dppo_threshold": 0.01,
    "dppo_threshold_high": 0.02,
    "epsilon": 0.05,
    "epsilon_c": 1.2,
    "epsilon_high": 0.02,
    "gae_lambda": 0.3,
    "gamma": 0.5,
    "gkd_beta": 0.9,
    "global_norm": True,
    "importance_sampling_level": "sequence",
    "kl_clamp_value": 0.01,
    "kl_loss_mode": "kl",
    "kl_mask_threshold": 0.001,
    "loss_agg_norm": 3.0,
    "loss_agg_units": "all",
    "norm_var": True,
    "normalize_advantages": True,
    "off_policy_mask_threshold": 0.0,
    "rejection_level": "token",
    "rejection_lower": 0.5,
    "rejection_threshold": 2.0,
    "sampler_is_current": True,
    "sampler_is_kl": True,
    "sampler_is_lower": 0.9,
    "sampler_is_mode": "mask",
    "sampler_is_normalize": True,
    "sampler_is_threshold": 1.05,
    "sapo_temperature_neg": 3.0,
    "sapo_temperature_pos": 3.0,
    "scale_rewards": "none",
    "teacher_coef": 0.3,
    "top_entropy_quantile": 0.2,
    "use_bias_correction_kl": True,
    "vespo_k_neg": 1.0,
    "vespo_k_pos": 1.0,
    "vespo_lambda_neg": 1.0,
    "vespo_lambda_pos": 1.0,
    "whiten_advantages": False,
}
"""Another value of each field than its default."""
NEEDED = {
    ("advantage_estimator", "reinforce"): {"norm_var": True},
    ("advantage_estimator", "rloo"): {"normalize_advantages": True},
    ("policy_loss_fn", "cispo-trl"): {"epsilon": 1.1},
    ("loss_masks", "sampler-rejection"): {"rejection_lower": 0.9, "rejection_threshold": 1.1},
    ("sampler_is", "geometric"): {"sampler_is_threshold": 1.01},
    ("sampler_is", "sequence"): {"sampler_is_threshold": 1.1},
    ("sampler_is", "token"): {"sampler_is_threshold": 1.1},
    ("loss_masks", "off-policy"): {"off_policy_mask_threshold": 0.5},
    ("loss_masks", "sampler-kl"): {"kl_mask_threshold": 0.05},
    ("loss_masks", "top-entropy"): {"top_entropy_quantile": 0.6},
}
"""Fields that a choice can't do without, or without which others of its fields do nothing."""
CASES = [
    *(({choice: (name,) if choice == "loss_masks" else name} | NEEDED.get((choice, name), {}))
      for choice, readers in written.POLICY_READS.items() for name in readers),
    {},
    {"beta": 0.0},
    {"policy_loss_fn": "reinforce", "use_bias_correction_kl": True},
    {"loss_agg_mode": "sequence-mean-token-sum-norm", "loss_agg_norm": 2.0},
    {
        "loss_agg_mode": "sequence-mean-token-sum-norm",
        "loss_agg_norm": 2.0,
        "value_loss_agg_mode": "seq-mean-token-sum",
    },
]  # fmt: skip


def with_value(config, field, value):
    """A configuration with another value of a field, unchecked."""
    made = copy.copy(config)
    object.__setattr__(made, field, value)
    return made


def numbers(c):
    """Everything that a step computes from a PPOConfig: advantages, losses, token weights."""
    x = random_inputs(0, (4, 3, 5, 2, 3, 6), spread=0.3)
    mask, unit = torch.ones_like(x.mask), x.sequence
    g = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.rand(*shape, generator=g, dtype=torch.float64)
    values, logits = draw(len(mask)), draw(2, len(mask), 7).log_softmax(-1)
    columns = {
        "divergence": generalized_jsd(logits[0], logits[1], gkd_beta=c.gkd_beta),
        "entropy_rank": torch.linspace(0, 1, len(mask), dtype=torch.float64),
        "sampler_is_mean": torch.full_like(values, 0.7),
        "values": values,
        "new_values": values + draw(len(mask)) - 0.5,
    }
    step = AdvantageInputs(
        rewards=torch.tensor([0.2, 1.0, 0.5, 0.0, 3.0, 0.1]),
        group_of=torch.tensor([0, 0, 1, 1, 2, 2]),
        trajectory=unit,
        mask=mask,
        values=values,
        greedy_rewards=torch.tensor([0.5, 0.4, 0.3]),
    )
    returns = bind_fields(advantages_and_returns, c)(step)[1]
    x = with_columns(x, mask=mask, returns=returns, **columns)
    norm = 4.0 if c.loss_agg_norm is None and c.loss_agg_mode == "sequence-mean-token-scale" else c.loss_agg_norm
    trained = mask & (unit < 5)  # the last trajectory has nothing to train
    num_units = 6.0 if c.loss_agg_units == "all" else None
    prompt = step.group_of[unit] + (unit == 5)
    critic_norm = 4.0 if c.value_loss_agg_mode == "sequence-mean-token-scale" else None
    found = [
        estimate(make_estimator(c), step),
        make_objective(c)(x)[0],
        bind_fields(VALUE_LOSSES[c.value_loss_fn], c)(x)[0],
        token_weights(trained, unit, c.loss_agg_mode, norm=norm, num_units=num_units, prompt=prompt),
        token_weights(trained, unit, c.value_loss_agg_mode, norm=critic_norm, num_units=num_units, prompt=prompt),
    ]
    return torch.cat([part.flatten().double() for part in found])


@pytest.fixture
def unchecked(monkeypatch):
    for module in (from_config, preference_from_config):
        monkeypatch.setattr(module, "check_fields_read", lambda *_: None)


def test_the_table_agrees_with_the_signatures():
    for name, table in tables().items():
        assert getattr(written, name) == table, "write the table again: python -m tools.write_fields_read"
    assert {name for readers in written.POLICY_READS.values() for names in readers.values() for name in names} <= {
        *OTHER
    }


@pytest.mark.parametrize("fields", CASES, ids=lambda fields: ", ".join(f"{k}={v}" for k, v in fields.items()))
def test_a_field_changes_the_numbers_where_it_is_read_and_nowhere_else(fields, unchecked):
    config = PPOConfig(**{"num_generations": 2, "kl_type": "loss", "beta": 0.1, **fields})
    unread, before = unread_fields(config), numbers(config)
    for field, value in OTHER.items():
        if getattr(config, field) == value:
            continue
        acts = not torch.equal(before, numbers(with_value(config, field, value)))
        assert acts == (field not in unread), f"{field}={value!r} {'acts' if acts else 'changes nothing'}"


@pytest.mark.parametrize(
    "fields",
    [
        *(
            {"loss_type": name} | preference_inputs.NEEDED.get(name, {})
            for name in written.PREFERENCE_READS["loss_type"]
        ),
        *({"f_divergence_type": name} for name in written.PREFERENCE_READS["f_divergence_type"]),
    ],
    ids=lambda fields: ", ".join(map(str, fields.values())),
)
def test_a_field_changes_the_preference_loss_where_it_is_read_and_nowhere_else(fields, unchecked):
    config = PreferenceConfig(**fields)
    batch, logprobs = preference_inputs.random_batch(config.loss_type[0])

    def loss(config):
        made = preference_from_config.make_preference_objective(config)
        x = preference_inputs.inputs(preference_inputs.prepared(made, batch, logprobs), logprobs)
        return made(x)[0]

    other = {"beta": 0.7, "label_smoothing": 0.1, "discopop_tau": 0.2, "simpo_gamma": 0.9, "cpo_alpha": 0.4}
    other |= {"alpha": 0.1, "desirable_weight": 2.0, "undesirable_weight": 3.0}
    other |= {"reference_free": True, "f_alpha_divergence_coef": 0.2}
    tabled = {name for readers in written.PREFERENCE_READS.values() for names in readers.values() for name in names}
    assert {*other} == tabled - {"precompute_ref_log_probs", "sync_ref_model"}  # no number of a step depends on them
    unread, before = unread_fields(config), loss(config)
    for field, value in other.items():
        acts = not torch.equal(before, loss(with_value(config, field, value)))
        assert acts == (field not in unread), f"{field}={value!r} {'acts' if acts else 'changes nothing'}"


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_that_is_off_takes_the_effect_of_its_fields(switch):
    on = {"sampler_is": "token", "target_kl": 0.1}.get(switch, True)
    config = GRPOConfig(beta=0.1, **{switch: on}) if switch != "use_adaptive_entropy" else None
    assert {*SWITCHES[switch]} <= unread_fields(GRPOConfig()).keys()
    assert config is None or not {*SWITCHES[switch]} & unread_fields(config).keys()


def own(x, *, gamma):
    """A mask of the user's own that reads a parameter of an estimator."""
    return torch.ones_like(x.logprobs) * gamma


def test_a_function_of_the_user_s_own_reads_what_it_asks_for():
    assert make_objective(GRPOConfig(loss_masks=(own,), gamma=0.5))
    with pytest.raises(ConfigError, match=r"norm_var=True has no effect without advantage_estimator=reinforce; set"):
        make_objective(GRPOConfig(loss_masks=(own,), norm_var=True))
