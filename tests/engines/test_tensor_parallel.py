"""Engines that divide a model: the first process's calls, as the others repeat them. Both are in this process here."""

import pytest
from tiny import build, prompts, requests

from whet.errors import EngineError
from whet.models.load import load_model
from whet.parallel.ranks import Ranks
from whet.rollout.base import EngineStats, Sampling
from whet.rollout.engine import EmbeddedEngine
from whet.rollout.tensor_parallel import TensorParallelEngine


class Told(Ranks):
    """A process that tells the other one its calls, or is told them."""

    size = 2

    def __init__(self, rank, calls):
        self.rank, self.calls = rank, calls

    def broadcast(self, value):
        if self.rank > 0:
            return self.calls.pop(0)
        self.calls.append(value)
        return value


def test_the_others_repeat_each_call_of_the_first_and_only_their_own_errors_end_them():
    calls = []
    first, other = (TensorParallelEngine(load_model(build()), native=True) for _ in range(2))
    assert first.backends == EmbeddedEngine(load_model(build()), native=False).backends
    first.join(Told(0, calls), lambda draws: None), other.join(Told(1, calls), lambda draws: None)
    work = requests(prompts(), Sampling(max_tokens=9))
    with first.leading() as leads:
        assert leads
        first.submit(work)
        with pytest.raises(EngineError):
            first.submit(work)  # which are in flight: an error of the program, which goes on
        first.step(0.0)
        (gone,) = first.abort([3])
        done = first.step()
    assert [call for call in calls if isinstance(call, bool)] == [True]  # the first one's clock has decided
    with other.leading() as leads:
        assert not leads
    assert not calls and other.stats() == EngineStats() and first.stats().generated > 0
    assert EmbeddedEngine.stats(other) == first.stats() and len(gone.tokens) and done
    calls += [("step", None), None]
    other.sleep()
    with pytest.raises(EngineError, match="asleep"), other.leading():
        pass
    assert not calls
