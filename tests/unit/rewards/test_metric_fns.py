import numpy as np
import pytest

from whet.errors import ConfigError, RewardError
from whet.rewards.metric_fns import call_metric_fns


def call(*fns, **columns):
    return call_metric_fns(fns, ["p"], ["c"], np.array([0.5]), np.array([1.0]), **columns)


def test_arguments_come_by_keyword_and_by_name():
    def full(prompts, completions, advantages, rewards, **kwargs):
        return {"n": (len(prompts) + len(completions) + advantages[0] + rewards[0] + kwargs["answer"][0], np.mean)}

    def named(answer):
        return {"answer": (answer, None)}

    assert call(full, named, answer=[3]) == {"n": (6.5, np.mean), "answer": ([3], None)}


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (None, "returned NoneType"),
        ({"a": 1.0}, r"returned 1.0 for 'a'; give \(value, aggregation\)"),
        ({"a": (1.0, "mean")}, r"give \(value, aggregation\)"),
        ({3: (1.0, None)}, "the name 3"),
    ],
)
def test_other_forms_are_refused(made, says):
    with pytest.raises(RewardError, match=says):
        call(lambda rewards: made)


def test_failures_name_the_function():
    def broken(rewards):
        raise ValueError("no")

    with pytest.raises(RewardError, match="metric function broken raised ValueError: no"):
        call(broken)
    with pytest.raises(ConfigError, match=r"metric function lambda needs 'reward'.*did you mean rewards"):
        call(lambda reward: {})
    with pytest.raises(RewardError, match="'a' comes from two functions"):
        call(lambda rewards: {"a": (1, None)}, lambda rewards: {"a": (1, None)})
