import numpy as np
import pytest

from whet.errors import ConfigError, RewardError
from whet.rewards.call import RewardInputs
from whet.rewards.metric_fns import call_metric_fns


def call(*fns, extras=None, **columns):
    inputs = RewardInputs(
        prompts=["p"],
        completions=["c"],
        completion_ids=[[99]],
        trajectory_ids=["0_0"],
        columns=columns,
        extras=extras or {},
    )
    return call_metric_fns(fns, inputs, advantages=np.array([0.5]), rewards=np.array([1.0]))


def test_arguments_come_by_keyword_and_by_name():
    def full(prompts, completions, advantages, rewards, **kwargs):
        return {"n": (len(prompts) + len(completions) + advantages[0] + rewards[0] + kwargs["answer"][0], np.mean)}

    def named(answer):
        return {"answer": (answer, None)}

    assert call(full, named, answer=[3]) == {"n": (6.5, np.mean), "answer": ([3], None)}


def test_they_are_offered_what_reward_functions_are_extras_too():
    def full(trajectory_ids, completion_ids, mode, judge):
        return {"seen": ((trajectory_ids, completion_ids, mode, judge), None)}

    assert call(full, extras={"judge": "strict"})["seen"][0] == (["0_0"], [[99]], "train", "strict")


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
