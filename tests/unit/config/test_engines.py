import pytest

from whet.config import RolloutConfig, RunConfig, VLLMOptions, config_from_dict, dump, load
from whet.errors import ConfigError


def test_the_sections_are_read_and_written():
    config = config_from_dict(RunConfig, {"rollout": {"vllm": {"hbm_utilization": 0.4, "async_scheduling": True}}})
    assert config.rollout.vllm == VLLMOptions(hbm_utilization=0.4, async_scheduling=True)
    assert "async_scheduling: true" in dump(config)
    assert load(RunConfig, ["rollout.vllm.max_num_seqs=8"]).rollout.vllm == VLLMOptions(max_num_seqs=8)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"vllm": {"max_num_seq": 8}}, r"vllm\.max_num_seq; did you mean .*max_num_seqs"),
        ({"vllm": {"max_num_seqs": "many"}}, r"vllm\.max_num_seqs"),
        ({"eval": {"vllm": {}}}, r"eval\.vllm belongs to the engine"),
    ],
)
def test_what_is_wrong_is_named(given, said):
    with pytest.raises(ConfigError, match=said):
        RolloutConfig(**given)
