"""From the configuration of preference training to its objective: names, refusals, and the page of the losses."""

import re

import pytest
from preference_inputs import ALL_PARAMETERS, NEEDED, config

from tools.docs.algorithms import equation, source
from tools.docs.preference import PREFERENCE_KNOWN
from whet.config import PreferenceConfig, RewardModelConfig
from whet.config.introspection import choices
from whet.errors import ConfigError
from whet.learners.from_config import keyword_arguments
from whet.learners.preference_from_config import (
    describe_preference_objective,
    make_preference_objective,
    make_reward_loss,
)
from whet.ops.preference import PREFERENCE_LOSSES, REWARD_LOSSES

NAMES = [(field, name) for field, known in PREFERENCE_KNOWN.items() for name in known]


@pytest.mark.parametrize("field", PREFERENCE_KNOWN)
def test_what_help_lists_is_what_there_is(field):
    assert choices(PreferenceConfig, field).keys() == PREFERENCE_KNOWN[field].keys()
    assert all(when and len(when) <= 90 for when in choices(PreferenceConfig, field).values())
    assert choices(RewardModelConfig, "loss_type").keys() == REWARD_LOSSES.keys()


@pytest.mark.parametrize(("field", "name"), NAMES)
def test_every_name_states_its_equation_and_its_source(field, name):
    fn = PREFERENCE_KNOWN[field][name]
    assert re.search(r"[=]", equation(fn)) and len(source(fn)) > 4


OTHER = {"beta": 0.7, "label_smoothing": 0.1, "discopop_tau": 0.2, "simpo_gamma": 0.9, "cpo_alpha": 0.4, "alpha": 0.1}
OTHER |= {"desirable_weight": 2.0, "undesirable_weight": 2.0}


@pytest.mark.parametrize("name", sorted(PREFERENCE_LOSSES))
def test_a_parameter_is_taken_or_refused(name):
    taken = keyword_arguments(PREFERENCE_LOSSES[name])
    assert set(OTHER) == ALL_PARAMETERS
    for field, value in OTHER.items():
        if field in taken:
            made = config(name, **{field: value})
            (loss,) = make_preference_objective(made).losses.values()
            assert loss.keywords[field] == value
        elif field not in NEEDED.get(name, {}):
            with pytest.raises(ConfigError, match=rf"{field}={value} has no effect without loss_type=.* leave"):
                config(name, **{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_type": "sigmod"}, "unknown loss_type 'sigmod'; did you mean sigmoid"),
        ({"loss_type": []}, "loss_type is empty"),
        ({"loss_type": ["ipo", "ipo"]}, "loss_type has 'ipo' twice"),
        ({"loss_type": ["ipo", "sft"], "loss_weights": [1.0]}, "loss_weights has 1 number for 2 losses"),
        ({"beta": 0.0}, "beta must be positive, got 0.0"),
        ({"label_smoothing": 0.5}, "label_smoothing must be at least 0 and less than 0.5, got 0.5"),
        ({"loss_type": "exo_pair"}, "loss_type=exo_pair divides by label_smoothing, got 0.0; its paper has 1e-3"),
        ({"ld_alpha": 1.5}, "ld_alpha must be between 0 and 1, got 1.5"),
        ({"f_alpha_divergence_coef": 0.3}, "f_alpha_divergence_coef=0.3 has no effect without f_divergence_type="),
        ({"ref_model_mixup_alpha": 0.3}, "ref_model_mixup_alpha=0.3 has no effect without sync_ref_model=True"),
        ({"sync_ref_model": True, "precompute_ref_log_probs": True}, "reads the reference once, and sync_ref_model"),
        ({"sync_ref_model": True, "reference_free": True}, "sync_ref_model=True has no effect with reference_free"),
        ({"f_divergence_type": "forward_kl", "reference_free": True}, "is a divergence from the reference"),
        ({"f_divergence_type": "forward_kl", "loss_type": "kto"}, "loss 'kto' is not a function of the difference"),
        (
            {"loss_type": "simpo", "precompute_ref_log_probs": True},
            "probs=True has no effect without loss_type=sigmoid",
        ),
        (
            {"loss_type": "cpo", "reference_free": True},
            "reference_free=True has no effect without loss_type=sig",
        ),
        ({"loss_type": ["sigmoid", "kto"]}, "losses of pairs and of rows with a label can't be mixed"),
        ({"loss_type": lambda p, other: p}, r"loss_type lambda\(p, other\) can't be called as fn\(p\)"),
        ({"use_weighting": True, "loss_type": "aot"}, "loss 'aot' ranks the batch"),
        ({"cpo_alpha": -1.0}, "cpo_alpha must not be negative"),
        ({"ref_model_mixup_alpha": 1.5, "sync_ref_model": True}, "ref_model_mixup_alpha must be at most 1, got 1.5"),
        ({"padding_free": True}, "padding_free: rows are packed wherever the model takes it"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        make_preference_objective(PreferenceConfig(**fields))


def test_reward_models_refuse_too():
    with pytest.raises(ConfigError, match="unknown loss_type 'bradly_terry'; did you mean bradley_terry"):
        make_reward_loss(RewardModelConfig(loss_type="bradly_terry"))
    assert make_reward_loss(RewardModelConfig(center_rewards_coefficient=0.01)).keywords == {
        "center_rewards_coefficient": 0.01
    }


def test_a_run_says_what_it_has_composed():
    assert describe_preference_objective(PreferenceConfig(ld_alpha=0.5)) == (
        "sigmoid(beta=0.1, label_smoothing=0.0); ld_alpha=0.5"
    )
    assert describe_preference_objective(PreferenceConfig(loss_type="kto")).startswith(
        "kto(beta=0.1, desirable_weight=1.0"
    )


def test_a_loss_from_a_file_is_given_the_fields_it_asks_for(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def own(p, *, beta, simpo_gamma):\n    return beta * (p.rejected.logps - p.chosen.logps) + simpo_gamma\n"
    )
    made = make_preference_objective(PreferenceConfig(loss_type=f"{tmp_path}/mine.py:own", simpo_gamma=2.0))
    (loss,) = made.losses.values()
    assert loss.keywords == {"beta": 0.1, "simpo_gamma": 2.0} and made.needs.reference
