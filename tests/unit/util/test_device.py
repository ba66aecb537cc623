from types import SimpleNamespace

import pytest
import torch
from helpers import cluster, length_reward, rows

from whet.config import DataConfig, GRPOConfig
from whet.learners.grpo import GRPOLearner
from whet.observe.trace import Trace
from whet.util.device import PhaseMemory, empty_cache, memory_metrics, on_device

HERE, THERE = torch.device("cpu"), torch.device("cuda", 1)


def test_a_cpu_is_asked_nothing():
    with on_device(HERE):
        empty_cache(HERE)
    assert memory_metrics(HERE) == {}


@pytest.fixture
def log(monkeypatch):
    """What torch.cuda is told, on a machine without it."""
    log = []

    class Current:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            log.append(f"in {self.device}")

        def __exit__(self, *error):
            log.append("out")

    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("empty"))
    return log


def test_a_gpu_is_current_while_something_is_done_on_it(log):
    empty_cache(THERE)
    with on_device(THERE):
        log.append("work")
    assert log == ["in cuda:1", "empty", "out", "in cuda:1", "work", "out"]


def test_metrics_say_what_is_reserved_beside_what_is_allocated(monkeypatch):
    for i, name in enumerate(("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")):
        monkeypatch.setattr(torch.cuda, name, lambda device, i=i: i + 10 * device.index)
    found = memory_metrics(THERE)
    assert list(found.values()) == [10.0, 11.0, 12.0, 13.0]
    assert list(found) == ["memory/allocated", "memory/reserved", "memory/peak_allocated", "memory/peak_reserved"]


def test_a_run_notes_memory_with_each_step(monkeypatch):
    monkeypatch.setattr("whet.run.run.memory_metrics", lambda device: {"memory/reserved": 7.0})
    learner = GRPOLearner(cluster(max_steps=1), GRPOConfig(beta=0.0), length_reward, data=DataConfig(batch_size=2))
    assert [row["memory/reserved"] for row in learner.train(rows(2)).rows] == [7.0]


def test_each_phase_has_the_peak_of_its_spans_and_the_run_that_of_all(monkeypatch):
    memory = SimpleNamespace(now=100, peak=100)

    def use(size):
        memory.now = size
        memory.peak = max(memory.peak, size)

    def reset():
        memory.peak = memory.now

    trace = Trace()
    trace.memory = PhaseMemory(THERE, read=lambda: (memory.peak, 2 * memory.peak), reset=reset)
    use(500), use(100)  # while the models are loaded
    with trace.span("rollout"):
        use(300), use(200)
        with trace.span("prefill"):
            use(250), use(150)
    with trace.span("update"):
        use(400), use(150)
    with pytest.raises(KeyError), trace.span("update"):
        use(450), use(150)
        raise KeyError
    assert trace.memory.pop_metrics() == {
        "memory/rollout/peak_allocated": 300.0,
        "memory/prefill/peak_allocated": 250.0,
        "memory/update/peak_allocated": 450.0,
        "memory/peak_allocated": 500.0,
        "memory/peak_reserved": 1000.0,
    }
    with trace.span("update"):
        use(160)
    later = trace.memory.pop_metrics()
    assert later["memory/update/peak_allocated"] == 160.0 and later["memory/peak_allocated"] == 500.0
    assert "memory/rollout/peak_allocated" not in later
