"""Reward functions of one conversation, RL2's form, among functions of a batch."""

import pytest
from helpers import completion, prompt

from whet.rewards.call import function_name, select_keywords
from whet.rewards.manager import RewardManager
from whet.rewards.resolve import resolve_reward
from whet.types import Group

CHAT = [{"role": "user", "content": "2+2="}]


def reward_fn(messages, answer):
    return messages[-1]["content"] == answer


async def judge(messages, answer, scale=2.0):
    return scale * len(messages)


def of_group(source, text, **columns):
    made = prompt("2+2=", **columns)
    object.__setattr__(made, "source", source)
    return [Group(prompt=made, completions=(completion([52, 256]),))], [[text]]


@pytest.mark.parametrize("source", ["2+2=", CHAT])
@pytest.mark.parametrize("said", ["4", [{"role": "assistant", "content": "?"}, {"role": "tool", "content": "4"}]])
def test_it_is_given_the_whole_conversation(source, said):
    found = RewardManager([reward_fn, judge])(*of_group(source, said, answer="4"))
    assert found.table["reward_fn"].tolist() == [1.0]
    assert found.table["judge"].tolist() == [2.0 * (2 if isinstance(said, str) else 3)]


def test_it_keeps_its_name_and_asks_for_its_column():
    fn = resolve_reward(reward_fn)
    assert function_name(fn) == "reward_fn" and fn is not reward_fn and resolve_reward(fn) is fn
    with pytest.raises(ValueError, match="needs 'answer', which is not a column"):
        select_keywords(fn, {"prompts": [], "completions": []}, {}, name="reward_fn")
    with pytest.raises(ValueError, match="a function of one conversation takes messages and answer, both"):
        select_keywords(lambda messages: 1.0, {"prompts": [], "completions": []}, {}, name="reward_fn")


def test_a_function_of_a_batch_stays_as_it_is():
    def both(completions, messages, answer):
        return []

    assert resolve_reward(both) is both
