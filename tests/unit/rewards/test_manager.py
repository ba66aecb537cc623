import dataclasses
import functools
import math

import numpy as np
import pytest
from helpers import reward_batch

from whet.config.enums import Mode
from whet.errors import ConfigError, DataError, RewardError
from whet.learners.step_metrics import total_metrics
from whet.metrics import Max, Mean, Min, Sum, flat, merge
from whet.rewards.manager import REWARD_MANAGERS, RewardManager, resolve_reward_manager
from whet.rewards.resolve import resolve_reward
from whet.rewards.reward_batch import RewardBatch, reward_metrics
from whet.types import Completion, Group, Prompt, TokenBatch

NAN = math.nan


def completion(generation, tokens=(65, 256), prefix=None):
    size = len(tokens)
    return Completion(
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=np.zeros(size, dtype=np.float32),
        versions=np.zeros(size, dtype=np.int32),
        finish_reason="stop",
        generation=generation,
        prefix=prefix,
    )


def group(row=0, source="p", size=2, rewards=None, **columns):
    prompt = Prompt(tokens=np.array([5, 6], dtype=np.int32), source=source, columns=columns, row=row)
    return Group(prompt=prompt, completions=tuple(completion(g) for g in range(size)), rewards=rewards or {})


def fixed(values, name="f"):
    def fn(completions, **kwargs):
        return values

    fn.__name__ = name
    return fn


def test_total_is_the_weighted_sum_over_the_functions_that_apply():
    manager = RewardManager([fixed([1, None, None, 2], "a"), fixed([3, 4, None, 0], "b")], weights=[2.0, 0.5])
    out = manager([group(0), group(1)], [["", ""], ["", ""]])
    np.testing.assert_array_equal(out.total, [2 * 1 + 0.5 * 3, 0.5 * 4, NAN, 2 * 2])
    assert list(out.table) == ["a", "b"]
    np.testing.assert_array_equal(out.table["a"], [1, NAN, NAN, 2])
    np.testing.assert_array_equal(out.table["b"], [3, 4, NAN, 0])
    assert np.isnan(out.total).tolist() == [False, False, True, False]
    np.testing.assert_array_equal(out.totals_by_group, [[3.5, 2.0], [NAN, 4.0]])
    assert out.have_spread.tolist() == [True, False] and out.group_of.tolist() == [0, 0, 1, 1]


def test_a_weight_of_zero_logs_a_function_without_using_it():
    out = RewardManager([fixed([5, 7], "seen"), fixed([1, 2], "used")], weights=[0.0, 1.0])([group()], [["", ""]])
    assert out.total.tolist() == [1.0, 2.0] and out.metrics["rewards/seen"].value == 6.0


def test_columns_ids_mode_and_extras_reach_the_functions_one_per_completion():
    seen = {}
    manager = RewardManager(lambda **kw: seen.update(kw) or [0] * 3, algo_fields={"beta": 1})
    grid = np.ones((2, 2))
    manager(
        [group(4, size=1, answer=1, grid=grid), group(9, size=2, answer=2)],
        [["x"], ["y", "z"]],
        mode=Mode.EVAL,
        extras={"log": 1},
    )
    assert seen["prompts"] == ["p"] * 3 and seen["completions"] == ["x", "y", "z"]
    assert seen["completion_ids"] == [[65, 256]] * 3
    assert seen["trajectory_ids"] == ["4_0", "9_0", "9_1"]
    assert seen["answer"] == [1, 2, 2]
    assert np.array_equal(seen["grid"][0], grid) and seen["grid"][0] is not grid  # a copy of its own
    assert seen["grid"][1:] == [
        None,
        None,
    ]  # a ragged row: None where it has no such column
    assert seen["mode"] == "eval" and seen["log"] == 1 and "beta" not in seen


def test_completions_have_the_form_of_the_prompts():
    seen = {}
    messages = [{"role": "user", "content": "hi"}]
    turns = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]
    manager = RewardManager(lambda prompts, completions: seen.update(p=prompts, c=completions) or [0] * 3)
    manager([group(source=messages), group(source="plain", size=1)], [["yo", turns], ["text"]])
    assert seen["p"] == [messages, messages, "plain"]
    assert seen["c"] == [[{"role": "assistant", "content": "yo"}], turns, "text"]


def test_the_forks_of_an_episode_are_one_trajectory_judged_by_the_last():
    forks = (completion(0), completion(1, (66, 256)), completion(0, (67, 256), np.array([5, 6, 65], dtype=np.int32)))
    one = Group(prompt=Prompt(tokens=np.array([5, 6]), source="p"), completions=forks)
    seen = {}
    out = RewardManager(lambda completions, completion_ids: seen.update(c=completions, i=completion_ids) or [1, 2])(
        [one], [["first", "other", "last"]]
    )
    assert seen == {"c": ["last", "other"], "i": [[67, 256], [66, 256]]}
    batch = TokenBatch.from_groups(out.groups)
    assert out.total.tolist() == [1.0, 2.0] and out.trajectory_of.tolist() == batch.trajectory_of.tolist() == [0, 1, 0]


def test_no_function_sees_a_failed_episode_whatever_forks_come_before_it():
    failed = dataclasses.replace(completion(1), messages=(), finish_reason="error")
    forks = (completion(0), completion(0, prefix=np.array([5, 6, 65], dtype=np.int32)), failed)
    one = Group(prompt=Prompt(tokens=np.array([5, 6]), source="p"), completions=forks)
    out = RewardManager(lambda completions: [float(text == "last") for text in completions])(
        [one], [["first", "last", "failed"]]
    )
    assert out.total.tolist() == pytest.approx([1.0, NAN], nan_ok=True)


def test_the_id_of_a_trajectory_is_its_row_and_generation_wherever_its_forks_stand():
    forks = (completion(1), completion(0), completion(0, prefix=np.array([5, 6, 65], dtype=np.int32)))
    one = Group(prompt=Prompt(tokens=np.array([5, 6]), source="p", row=7), completions=forks)
    seen = []
    RewardManager(lambda trajectory_ids: seen.extend(trajectory_ids) or [1, 2])([one], [["a", "b", "c"]])
    assert seen == ["7_1", "7_0"]


def test_rewards_that_groups_bring_count_with_weight_one_and_a_second_call_changes_nothing():
    manager = RewardManager(fixed([1, 2, 3, 4]), weights=[10.0])
    groups = [group(rewards={"env": np.array([0.5, NAN])}), group()]
    out = manager(groups, [["", ""], ["", ""]])
    assert out.total.tolist() == [10.5, 20.0, 30.0, 40.0]
    assert manager(out.groups, [["", ""], ["", ""]]).total.tolist() == [10.5, 20.0, 30.0, 40.0]
    with pytest.raises(DataError, match=r"has rewards 'env' of shape \[3\] for 2 trajectories"):
        manager([group(rewards={"env": np.zeros(3)}), group()], [["", ""], ["", ""]])


def test_functions_of_one_name_get_a_suffix():
    manager = RewardManager(
        [fixed([1, 1], "f"), fixed([2, 2], "f"), fixed([3, 3], "f_2"), functools.partial(fixed([4, 4], "f"))]
    )
    out = manager([group()], [["", ""]])
    assert {n: v[0] for n, v in out.table.items()} == {"f": 1, "f_2": 2, "f_2_2": 3, "f_3": 4}


def test_failures_are_raised_or_counted():
    with pytest.raises(RewardError, match="f returned 1 reward;"):
        RewardManager(fixed([1]))([group()], [["", ""]])
    out = RewardManager([fixed([1], "bad"), fixed([1, 2], "good")], on_error="none")([group()], [["", ""]])
    assert out.total.tolist() == [1.0, 2.0]
    assert out.metrics["rewards/bad/errors"] == Sum(2.0) and "rewards/good/errors" not in out.metrics
    assert math.isnan(out.metrics["rewards/bad"].value)


def metrics(rewards, total, sizes):
    """What a step logs of its rewards: of the functions, and of what the batch is trained on."""
    batch = reward_batch(total, np.repeat(np.arange(len(sizes)), sizes))
    return {**reward_metrics(rewards), **total_metrics(batch)}


def test_metrics_by_hand():
    # totals: group 0 = 1, 3 (sample std sqrt 2), group 1 = 2, 2 (0), group 2 = 5 and one n/a (one value: 0)
    a, b = np.array([1.0, 2, NAN, 2, 5, NAN]), np.array([0.0, 1, 2, 0, NAN, NAN])
    total = np.array([1.0, 3, 2, 2, 5, NAN])
    m = metrics({"a": a, "b": b}, total, [2, 2, 2])
    values = flat(m)
    assert values["rewards/a"] == values["rewards/a/mean"] == (1 + 2 + 2 + 5) / 4
    assert values["rewards/a/std"] == pytest.approx(math.sqrt((1.5**2 + 0.5**2 + 0.5**2 + 2.5**2) / 3))
    assert m["reward"] == Mean(13.0, 5) and (m["reward_min"], m["reward_max"]) == (Min(1.0), Max(5.0))
    assert values["reward_std_within_groups"] == pytest.approx(math.sqrt(2) / 3)
    # of 1, 3, 2, 2, 5, whose mean is 2.6
    assert values["reward_std"] == pytest.approx(math.sqrt((1.6**2 + 0.4**2 + 0.6**2 + 0.6**2 + 2.4**2) / 4))
    assert m["frac_reward_zero_std"] == Mean(2.0, 3)


def test_metrics_where_nothing_applies_are_nan_and_merge_away():
    nothing = metrics({"a": np.full(2, NAN)}, np.full(2, NAN), [2])
    assert all(math.isnan(value) for value in flat(nothing).values())
    some = metrics({"a": np.array([1.0, 3.0])}, np.array([1.0, 3.0]), [2])
    assert flat(merge(nothing, some)) == flat(some)


def test_equal_rewards_have_a_standard_deviation_of_exactly_zero():
    total = np.full(3, 0.1)  # numpy's own std of three times 0.1 is 1.7e-17
    m = metrics({"a": total}, total, [3])
    assert (m["reward_std"].value, m["rewards/a/std"].value, m["frac_reward_zero_std"].value) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("fns", "options", "says"),
    [
        ([], {}, r"reward_fns .* is empty"),
        (None, {}, r"reward_fns .* is empty"),
        (["exact_match"], {"weights": [1, 2]}, r"2 reward weights for 1 reward functions \(exact_match\)"),
        (["exact_match"], {"weights": [NAN]}, "reward weight nan"),
        (["exact_match"], {"on_error": "skip"}, "unknown on_error"),
        (["exact_match"], {"timeout_s": 0}, "timeout_s must be above 0, got 0"),
        (["exact_mach"], {}, "did you mean exact_match"),
        ([3], {}, "got int 3"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_at_once(fns, options, says):
    with pytest.raises(ConfigError, match=says):
        RewardManager(fns, **options)


def test_missing_columns_are_known_before_the_first_rollout():
    manager = RewardManager(["exact_match"])
    manager.check(["answer"])
    with pytest.raises(ConfigError, match=r"exact_match needs 'answer'.*did you mean answers"):
        manager.check(["answers"])


def test_texts_that_do_not_match_the_groups_are_refused():
    manager = RewardManager(fixed([1, 2]))
    for groups, texts in (([group()], [["a"]]), ([group()], []), ([group(), group()], [["a", "b"]])):
        with pytest.raises(DataError, match="texts don't match"):
            manager(groups, texts)
    with pytest.raises(DataError, match="no completions"):
        manager([], [])


def test_functions_and_managers_resolve_by_name_reference_or_as_they_are(tmp_path):
    (tmp_path / "mine.py").write_text("def score(completions):\n    return [1.0] * len(completions)\nX = 3\n")
    assert resolve_reward(f"{tmp_path}/mine.py:score")(["a"]) == [1.0]
    assert resolve_reward("whet.rewards.text:exact_match") is resolve_reward("exact_match")
    with pytest.raises(ConfigError, match=r"reward function .*:X' is 3 \(int\), and must be a function or a class"):
        resolve_reward(f"{tmp_path}/mine.py:X")
    assert resolve_reward_manager("sequence-level") is REWARD_MANAGERS["sequence-level"] is RewardManager
    assert resolve_reward_manager("whet.rewards.manager:RewardManager") is RewardManager
    with pytest.raises(ConfigError, match="did you mean sequence-level"):
        resolve_reward_manager("sequence")


def test_what_has_no_name_of_its_own_is_called_as_it_was_referred_to(tmp_path):
    lines = [
        "import functools",
        "from whet.rewards import format_match",
        "tagged = functools.partial(format_match, pattern='a+')",
        "flat = lambda completions: [0.0] * len(completions)",
        "also = format_match",
        "class Rule:",
        "    def __call__(self, completions): return [1.0] * len(completions)",
        "rule = Rule()",
    ]
    (tmp_path / "named.py").write_text("\n".join(lines) + "\n")
    refs = [f"{tmp_path}/named.py:{name}" for name in ("tagged", "flat", "also", "rule", "tagged")]
    manager = RewardManager(refs)
    assert list(manager.fns) == ["tagged", "flat", "format_match", "rule", "tagged_2"]
    assert list(RewardManager([manager.fns["tagged"], manager.fns["rule"]]).fns) == ["format_match", "Rule"]
    assert manager([group()], [["aa", "b"]]).metrics["rewards/tagged"].value == 0.5


# ---- parts judged apart --------------------------------------------------------------------------------------------


def test_parts_judged_apart_are_the_batch_judged_together():
    def spread(completions, answer, **_):
        return [float(len(c) + int(a)) if len(c) != 3 else None for c, a in zip(completions, answer)]

    texts = [["a", "bb", "ccc"], ["dddd", "e", "ff"], ["ggg", "hhh", "ggg"]]
    brought = {"env": np.array([1.0, 2.0, 3.0])}
    groups = [group(i, size=3, rewards=brought if i == 1 else None, answer=str(i)) for i in range(3)]
    manager = RewardManager([spread, "exact_match"], [0.5, 2.0])
    whole = manager(groups, texts)
    parts = [manager(groups[:1], texts[:1]), manager(groups[1:], texts[1:])]
    joined = RewardBatch.cat(parts)
    np.testing.assert_array_equal(joined.total, whole.total)
    known = [{n: m.value for n, m in made.metrics.items() if not n.startswith("time/")} for made in (joined, whole)]
    assert known[0] == pytest.approx(known[1], nan_ok=True) and joined.metrics["time/rewards/spread"].value > 0
    assert joined.weights == whole.weights
    assert joined.texts == whole.texts and joined.groups == list(whole.groups)
    assert joined.inputs.keywords() == whole.inputs.keywords()
    assert joined.table.keys() == whole.table.keys()
    for name, values in whole.table.items():
        np.testing.assert_array_equal(joined.table[name], values)
    assert RewardBatch.cat([whole]) is whole


def test_the_table_is_made_once_of_functions_and_of_what_groups_came_with():
    groups = [group(0, rewards={"env": np.array([0.5, NAN])}), group(1)]
    out = RewardManager(fixed([1, None, 3, 4]))(groups, [["", ""], ["", ""]])
    assert out.table is out.table and list(out.table) == ["f", "env"]
    np.testing.assert_array_equal(out.table["f"], [1, NAN, 3, 4])
    np.testing.assert_array_equal(out.table["env"], [0.5, NAN, NAN, NAN])
    again = RewardManager(fixed([], "g")).from_groups(
        groups, [["", ""], ["", ""]]
    )  # as an evaluation's folder has them
    assert list(again.table) == ["g", "env"] and np.isnan(again.table["g"]).all()
    np.testing.assert_array_equal(again.table["env"], out.table["env"])
    np.testing.assert_array_equal(again.total, out.table["env"])
    with pytest.raises(DataError, match=r"rewards 'env' have shape \[3\] for 4 trajectories"):
        dataclasses.replace(out, table={"env": np.zeros(3)})
    with pytest.raises(DataError, match=r"the total has shape \[3\] for 4 trajectories"):
        out.with_total(np.zeros(3))


def test_totals_that_differ_by_rounding_have_no_spread():
    """0.1 + 0.2 and 0.3 + 0.0: no advantage comes of them, so dynamic sampling leaves the group out."""
    both = [fixed([0.1, 0.3], "a"), fixed([0.2, 0.0], "b")]
    rewards = RewardManager(both)([group()], [["x", "y"]])
    assert rewards.total[0] != rewards.total[1] and rewards.have_spread.tolist() == [False]
