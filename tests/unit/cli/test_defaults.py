"""The page of defaults is what the classes have, and has all in which a command differs from them."""

import dataclasses

import pytest

from tools.docs.defaults import OF_PPO, SHOWN, differing
from tools.docs.from_tunix import TUNIX_FIELDS
from whet.config import (
    DPORunConfig,
    GRPOConfig,
    PPORunConfig,
    RMRunConfig,
    RolloutConfig,
    RunConfig,
    SFTRunConfig,
    load_run,
)


def test_all_that_a_command_has_otherwise_is_on_the_page():
    assert {key for key, *_ in differing(RunConfig)} <= set(SHOWN)
    assert {key for key, *_ in differing(PPORunConfig)} <= {*SHOWN, *OF_PPO}
    assert [list(differing(kind)) for kind in (SFTRunConfig, RMRunConfig, DPORunConfig)] == [
        [("data.apply_chat_template", "auto", False)]
    ] * 3


def test_from_python_tunixs_values_stay_but_for_the_kl_that_does_not_learn():
    for kind, other in ((GRPOConfig, {"kl_loss_mode"}), (RolloutConfig, set())):
        usual = kind()
        tunix = next(fields for cls, fields in TUNIX_FIELDS.items() if cls.__name__ == kind.__name__)
        for name in ("num_generations", "beta", "kl_loss_mode", "epsilon", "temperature", "max_prompt_length"):
            if name in {f.name for f in dataclasses.fields(kind)} & tunix.keys():
                assert (getattr(usual, name) != tunix[name].default) == (name in other), name
    assert GRPOConfig().kl_loss_mode == "low_var_kl" and RolloutConfig().max_tokens_to_generate == 64


def test_a_section_from_python_stays_what_it_is_in_a_runs_configuration():
    run = RunConfig(algo=GRPOConfig(), rollout=RolloutConfig())
    assert (run.algo.num_generations, run.algo.beta) == (2, 0.04) and run.rollout.max_tokens_to_generate == 64
    assert RunConfig().rollout.max_tokens_to_generate is None


@pytest.mark.parametrize("kind", [RunConfig, PPORunConfig])
def test_the_template_s_options_stand_under_data_too(kind):
    made = load_run(["data.chat_template_kwargs={enable_thinking: true}"], kind)
    assert made.rollout.chat_template_kwargs == {"enable_thinking": True}
