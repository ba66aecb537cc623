"""Steps of fixed shape: what a CUDA graph would replay, run on a CPU."""

import pytest
import torch
from tiny import build, prompts, requests, run

from whet.rollout.base import Sampling
from whet.rollout.engine import EmbeddedEngine
from whet.rollout.engine.cuda_graph import CAPTURED, FixedTensors, StepGraphs, bucket_rows

STOPS = tuple(range(0, 64, 6))


def same(a, b):
    assert {i: o.tokens.tolist() for i, o in a.items()} == {i: o.tokens.tolist() for i, o in b.items()}
    for i in a:
        torch.testing.assert_close(torch.tensor(a[i].logprobs), torch.tensor(b[i].logprobs), atol=1e-5, rtol=1e-5)


def test_every_count_of_rows_has_a_bucket_that_holds_it():
    for most in (1, 7, 16, 40, 256):
        sizes = [bucket_rows(n, most) for n in range(1, most + 1)]
        assert all(n <= s <= most for n, s in enumerate(sizes, 1)) and sizes == sorted(sizes)
        assert len(set(sizes)) <= 5 + most // 16
        assert all(s <= 1.5 * n or s - n < 16 for n, s in enumerate(sizes, 1))


def test_a_fixed_tensor_moves_only_when_its_shape_does():
    fixed = FixedTensors()
    a = fixed.keep("a", torch.tensor([1, 2]))
    assert fixed.keep("a", torch.tensor([3, 4])) is a and a.tolist() == [3, 4] and fixed.epoch == 1
    b = fixed.keep("a", torch.tensor([3, 4, 5]))
    assert b is not a and a.tolist() == [3, 4] and fixed.epoch == 2


class Replay:
    """Stands for a captured graph: works into the tensors that the capture returned, at the addresses it saw."""

    def __init__(self, body, addresses):
        self.body, self.addresses, self.now = body, addresses(), addresses
        self.out = tuple(torch.zeros_like(x) for x in self.peek())
        self.count = 0

    def peek(self):
        return (torch.zeros(64, dtype=torch.long), torch.zeros(64))

    def replay(self):
        assert self.now() == self.addresses
        self.count += 1
        for kept, new in zip(self.out, self.body()):
            kept[: len(new)] = new


def captured(engine):
    """Makes the engine's steps go through stand-ins of captured graphs; the list of them."""
    runner, made = engine._runner, []

    def addresses():
        layout, trunk = runner.layout, runner.forward._trunk
        tables = [t for asks, back in layout._head_tables.values() for t in (*asks, back)]
        for b in layout._buckets:
            tables += [b.row_index, b.lengths, b.hidden, *b.store.layer(1, None, None)]
        return [t.data_ptr() for t in (*tables, *runner.own.layer(1, None, None), trunk._cos, trunk._sin, runner.state)]

    def capture(body):
        made.append(Replay(body, addresses))
        return made[-1], made[-1].out

    runner.fix_shapes()
    runner.graphs._captures, runner.graphs._capture = True, capture
    return made


@pytest.mark.parametrize("family", ["qwen3", "mistral_window"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"temperature": 0.7}])
@pytest.mark.parametrize("graphs", [True, False])
def test_padding_rows_and_replayed_steps_change_no_token(family, sampling, graphs):
    model = build(family, gain=3.0)
    work = requests(prompts((3, 70, 40, 9, 1, 33)), Sampling(max_tokens=45, stop_ids=STOPS, **sampling), group=4)
    want = run(EmbeddedEngine(model, max_batch=11), work)
    engine = EmbeddedEngine(model, max_batch=11)
    made = captured(engine)
    engine._runner.graphs._captures = graphs
    assert "fixed shapes" in engine.paths["steps"]
    same(run(engine, work), want)
    assert (sum(g.count for g in made) > 10) == graphs
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    engine.update(1)
    fresh = EmbeddedEngine(model, max_batch=11)
    same(run(engine, work), run(fresh, work))


def test_steps_with_penalties_truncation_or_several_plans_run_eagerly_among_fixed_shapes():
    model = build(gain=3.0)
    for kinds in ([{"top_k": 4}], [{"repetition_penalty": 1.3}], [{}, {"temperature": 0.5}], [{"return_logits": True}]):
        samplings = [Sampling(max_tokens=12, stop_ids=STOPS, **k) for k in kinds]
        work = requests(prompts(), samplings[0], group=3)
        work = [type(r)(**{**vars(r), "sampling": samplings[r.id % len(samplings)]}) for r in work]
        engine = EmbeddedEngine(model)
        made = captured(engine)
        same(run(engine, work), run(EmbeddedEngine(model), work))
        assert made == []


def test_graphs_are_captured_at_the_second_step_and_forgotten_when_addresses_change():
    graphs, ran = StepGraphs(torch.device("cpu")), []
    graphs._captures = True
    body = lambda: (ran.append(1), (torch.zeros(1),))[1]
    graphs._capture = lambda body: (Replay(body, lambda: 0), (torch.zeros(1),))
    for _ in range(4):
        graphs.step("a", 0, body)
    assert len(ran) == 4 and graphs._graphs["a"][0].count == 3
    graphs.step("b", 0, body)
    assert set(graphs._graphs) == {"a", "b"}
    graphs.step("b", 1, body)
    assert graphs._graphs == {"b": None}
    for i in range(CAPTURED + 1):
        graphs.step(i, 1, body)
    assert len(graphs._graphs) <= CAPTURED
