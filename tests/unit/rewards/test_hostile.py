"""Reward and metric functions that return or raise what nobody expects: named or counted, never bare, never a hang."""

import asyncio
import dataclasses
import gc
import warnings

import numpy as np
import pytest
import torch

from whet.errors import RewardError
from whet.rewards.call import RewardInputs, call_rewards
from whet.rewards.metric_fns import call_metric_fns

INPUTS = RewardInputs(
    prompts=["p", "p"],
    completions=["aa", "b"],
    completion_ids=[[97, 97, 256], [98, 256]],
    trajectory_ids=["7_0", "7_1"],
)


def call(fn, inputs=INPUTS, **options):
    return call_rewards({"f": fn}, inputs, **{"timeout_s": 5.0, **options})


class Broken:
    """Whatever is asked of it raises; `length` aside, where it is given."""

    def __init__(self, length=None):
        self.length = length

    def __len__(self):
        if self.length is None:
            raise ZeroDivisionError("no length")
        return self.length

    def __iter__(self):
        raise ZeroDivisionError("no entries")

    def __float__(self):
        raise ZeroDivisionError("no number")

    def __repr__(self):
        raise ZeroDivisionError("no words")


class Lying(list):
    """Says two and holds endlessly many."""

    def __len__(self):
        return 2

    def __iter__(self):
        return iter(int, 1)


class Mute(Exception):
    def __str__(self):
        raise SystemExit("no words")

    __repr__ = __str__


# ---- what is returned ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1.0, 0.0]).to_sparse(),
        torch.tensor([1.0, 0.0], requires_grad=True).to_sparse(),
        [torch.tensor(1.0, requires_grad=True) * 1, torch.tensor(0)],
        np.array([1, 0], dtype=object),
        [np.array(1.0), np.bool_(False)],
        [torch.ones(1, 1), np.zeros((1,))],
    ],
    ids=["sparse", "sparse with gradient", "entries with gradient", "objects", "no dims", "one number each"],
)
def test_numbers_in_other_boxes_are_numbers_and_nothing_warns(value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call(lambda completions: value)[0]["f"].tolist() == [1.0, 0.0]


def test_an_array_of_objects_may_hold_none():
    rewards, errors, _ = call(lambda completions: np.array([None, 2], dtype=object))
    assert np.isnan(rewards["f"][0]) and rewards["f"][1] == 2.0 and errors == {"f": 0}


WHOLE = r"return a list of 2 numbers, one per completion"
ENTRY = r"return a finite number up to 1e\+15 in size, or None where it does not apply"
WRONG = {
    "meta": (torch.ones(2, device="meta"), rf"returned a tensor of shape \[2\] on meta that .*no data.*{WHOLE}", 2),
    "meta entry": ([torch.ones((), device="meta"), 1], rf"\(entry 0\), a tensor of shape \[\] on meta; {ENTRY}", 1),
    "complex": ([1, 1 + 2j], rf"returned \(1\+2j\) for row 7, generation 1 \(entry 1\), of type complex; {ENTRY}", 1),
    "numpy's complex": ([np.complex64(1 + 2j), 1], r"\(entry 0\), of type complex64", 1),
    "complex tensors": ([torch.tensor(1 + 0j), 1], r"\(entry 0\), a tensor of shape \[\] on cpu", 1),
    "text as bytes": ([bytearray(b"1"), memoryview(b"2")], r"\(entry 0\), of type bytearray", 2),
    "text without dims": ([np.array("1"), 1], r"\(entry 0\), an array of shape \[\]", 1),
    "text": (["1", 1], r"returned '1' for row 7, generation 0 \(entry 0\), of type str", 1),
    "text as objects": (np.array(["1", 1], dtype=object), r"\(entry 0\), of type str", 1),
    "durations": (np.array([1, 2], "m8[ns]"), r"\(entry 0\), of type timedelta64", 2),
    "huge": ([10**5000, 1], r"\(entry 0\), of type int", 1),
    "huge as a whole": (10**5000, rf"returned int .*{WHOLE}", 2),
    "dict entry": ([{"score": 1}, 1], r"returned \{'score': 1\} for row 7, generation 0 \(entry 0\), of type dict", 1),
    "generator": ((i for i in range(2)), rf"returned generator .*{WHOLE}", 2),
    "frozenset": (frozenset([1, 2]), rf"returned frozenset .*{WHOLE}", 2),
    "class": (list, rf"returned type .*{WHOLE}", 2),
    "broken": (Broken(), rf"returned Broken .*{WHOLE}", 2),
    "broken list": (Broken(2), rf"returned a value of type Broken that .*ZeroDivisionError: no entries.*{WHOLE}", 2),
    "broken entry": ([Broken(), 1], rf"\(entry 0\), of type Broken; {ENTRY}", 1),
    "lying": (Lying(), rf"returned a value of type Lying with more entries than its length, 2; .*{WHOLE}", 2),
    "nested": (
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        rf"returned .*{WHOLE}",
        2,
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_number_is_named_with_its_place_and_type_or_counted(case):
    value, says, failed = WRONG[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if not hasattr(value, "__next__"):
            _, errors, _ = call(lambda completions: value, on_error="none", timeout_s=None)
            assert errors == {"f": failed}
        with pytest.raises(RewardError, match=rf"^reward function f.*{says}"):
            call(lambda completions: value)


# ---- what is raised ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [5.0, None])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_exception_that_cannot_be_put_into_words_is_named_by_its_class(timeout_s, asynchronous):
    def plain(completions):
        raise Mute

    async def together(completions):
        raise Mute

    with pytest.raises(RewardError, match=r"f raised Mute: <no text: SystemExit>") as error:
        call(together if asynchronous else plain, timeout_s=timeout_s)
    assert isinstance(error.value.__cause__, Mute)


def test_the_errors_of_a_task_group_are_named():
    async def fn(completions):
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())

    async def fails():
        raise KeyError("gold")

    with pytest.raises(RewardError, match=r"raised ExceptionGroup: .*KeyError: 'gold'"):
        call(fn)


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, asyncio.CancelledError])
def test_without_a_timeout_all_but_an_interrupt_is_the_functions_own(kind):
    def fn(completions):
        raise kind("stop")

    with pytest.raises(RewardError, match=f"raised {kind.__name__}: stop"):
        call(fn, timeout_s=None)


@pytest.mark.parametrize("timeout_s", [5.0, None])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_what_ends_the_event_loop_is_named_for_every_function_that_it_took_along(kind, timeout_s, capfd):
    async def ends(completions):
        task = asyncio.create_task(inner())
        await asyncio.sleep(30)
        await task

    async def inner():
        raise kind("stop")

    async def other(completions):
        await asyncio.sleep(30)

    with pytest.raises(RewardError, match=rf"ends, other.*{kind.__name__}: stop") as error:
        call_rewards({"ends": ends, "other": other}, INPUTS, timeout_s=timeout_s)
    assert isinstance(error.value.__cause__, kind)
    _, errors, _ = call_rewards({"ends": ends, "other": other}, INPUTS, timeout_s=timeout_s, on_error="none")
    assert errors == {"ends": 2, "other": 2}
    gc.collect()
    assert "Traceback" not in capfd.readouterr().err


def test_a_task_that_nobody_waited_for_is_said_in_a_line(caplog):
    async def forgets(completions):
        task = asyncio.create_task(inner())
        await asyncio.sleep(0.01)
        assert task.done()
        return [1, 1]

    async def inner():
        raise KeyError("gold")

    assert call(forgets)[0]["f"].tolist() == [1.0, 1.0]
    gc.collect()
    (record,) = [r for r in caplog.records if "KeyError: 'gold'" in r.getMessage()]
    assert record.name.startswith("whet") and record.exc_info is None


def test_a_function_that_stops_the_loop_itself_is_not_called_late(capfd):
    async def stops(completions):
        asyncio.get_running_loop().stop()
        await asyncio.sleep(30)

    with pytest.raises(RewardError, match=r"stops.*Event loop stopped"):
        call_rewards({"stops": stops}, INPUTS, timeout_s=None)
    assert "Traceback" not in capfd.readouterr().err


# ---- what is changed -----------------------------------------------------------------------------------------------


class Unique:
    def __deepcopy__(self, memo):
        raise ValueError("there is one of me")


@pytest.mark.parametrize("thing", [Unique(), torch.ones(2, requires_grad=True) * 2], ids=["own copy", "graph"])
def test_a_column_that_cannot_be_copied_is_handed_on_as_it_is(thing):
    inputs = dataclasses.replace(INPUTS, columns={"thing": [thing, thing]})
    assert call(lambda thing: [float(thing[0] is thing[1])] * 2, inputs)[0]["f"].tolist() == [1.0, 1.0]


def measured(fns, prompts=("p",), rewards=(1.0,)):
    """What metric functions say of one trajectory."""
    one = RewardInputs(prompts=prompts, completions=["c"], completion_ids=[[99]], trajectory_ids=["0_0"])
    return call_metric_fns(fns, one, advantages=[0.5], rewards=rewards)


def test_what_a_metric_function_changes_reaches_neither_another_nor_the_record():
    chats = [[{"role": "user", "content": "q"}]]
    rewards = [1.0]

    def vandal(prompts, rewards):
        prompts[0][0]["content"] = "hacked"
        rewards.clear()
        return {}

    def witness(prompts, rewards):
        return {"seen": (rewards[0] + len(prompts[0][0]["content"]), None)}

    assert measured([vandal, witness], chats, rewards)["seen"][0] == 2.0
    assert chats[0][0]["content"] == "q" and rewards == [1.0]


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, Mute])
def test_whatever_a_metric_function_raises_names_it(kind):
    def broken(rewards):
        raise kind("stop")

    with pytest.raises(RewardError, match=f"metric function broken raised {kind.__name__}"):
        measured([broken])


def test_an_interrupt_in_a_metric_function_is_the_users():
    def fn(rewards):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured([fn])


@pytest.mark.parametrize("value", ["text", [Broken()], 1j], ids=["text", "broken", "complex"])
def test_a_metric_that_is_no_number_names_its_function(value):
    with pytest.raises(RewardError, match=r"metric function lambda returned .* for 'a'.*numbers"):
        measured([lambda rewards: {"a": (value, np.mean)}])
    assert "a" in measured([lambda rewards: {"a": (value, None)}])
