import dataclasses

import pytest

from whet.config import RolloutConfig, RunConfig, SGLangOptions, VLLMOptions, check, dump, load
from whet.config.engines import FLAT, nested
from whet.errors import ConfigError
from whet.run.provenance import changed_settings


def test_each_field_is_read_under_tunix_name_and_under_its_own():
    assert len(FLAT) == len(dataclasses.fields(VLLMOptions)) + len(dataclasses.fields(SGLangOptions))
    flat = RolloutConfig(rollout_vllm_max_num_seqs=8, rollout_sglang_jax_page_size=16, temperature=0.5)
    own = RolloutConfig(vllm=VLLMOptions(max_num_seqs=8), sglang=SGLangOptions(page_size=16), temperature=0.5)
    assert flat == own and flat.vllm.max_num_seqs == 8 and flat.sglang.page_size == 16
    tree = {"rollout": {"vllm": {"hbm_utilization": 0.4}, "rollout_vllm_async_scheduling": True}}
    assert check(RunConfig, tree).rollout.vllm == VLLMOptions(hbm_utilization=0.4, async_scheduling=True)


def test_words_of_the_command_line_may_have_either_name():
    words = ["rollout.rollout_vllm_max_num_seqs=8", "rollout.vllm.hbm_utilization=0.4"]
    assert load(RunConfig, words).rollout.vllm == VLLMOptions(max_num_seqs=8, hbm_utilization=0.4)


def test_a_dump_has_the_sections_and_reads_back():
    config = check(RunConfig, {"rollout": {"rollout_vllm_kwargs": {"seed": 3}}})
    assert "rollout_vllm" not in dump(config)
    assert check(RunConfig, {"rollout": {"vllm": {"kwargs": {"seed": 3}}}}) == config


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"vllm": {"max_num_seqs": 8}, "rollout_vllm_max_num_seqs": 8}, r"are the same key; give it once, as vllm\."),
        ({"rollout_vllm_tpu_backend_type": "jax"}, "there is no TPU back end"),
        ({"rollout_vllm_max_num_seq": 8}, "rollout_vllm_max_num_seq"),
        ({"vllm": {"max_num_seq": 8}}, r"vllm\.max_num_seq; did you mean .*max_num_seqs"),
        ({"rollout_vllm_max_num_seqs": "many"}, r"vllm\.max_num_seqs"),
        ({"eval": {"rollout_vllm_max_num_seqs": 8}}, r"belongs to the engine, .*set vllm\.max_num_seqs"),
        ({"eval": {"vllm": {}}}, r"eval\.vllm belongs to the engine"),
    ],
)
def test_what_is_wrong_is_named(given, said):
    with pytest.raises(ConfigError, match=said):
        RolloutConfig(**given)


def test_settings_of_earlier_versions_are_compared_under_the_new_names():
    old = {"rollout": {"temperature": 0.9, "rollout_vllm_max_num_seqs": 8, "rollout_vllm_server_mode": False}}
    new = {"rollout": {"temperature": 0.9, "vllm": {"max_num_seqs": 8, "server_mode": False}}}
    assert changed_settings(old, new) == []
    new["rollout"]["vllm"]["max_num_seqs"] = 9
    assert changed_settings(old, new) == ["rollout.vllm.max_num_seqs: 8 -> 9"]
    assert nested({}) == {}
