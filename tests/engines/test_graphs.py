"""Steps of fixed shape: what a CUDA graph would replay, run on a CPU."""

import logging
import threading

import pytest
import torch
from cuda_standin import Machine
from tiny import build, prompts, requests, run

from whet.rollout.base import Sampling
from whet.rollout.engine import EmbeddedEngine
from whet.rollout.engine.cuda_graph import MAX_GRAPHS, FixedTensors, StepGraphs, padded_rows

STOPS = tuple(range(0, 64, 6))


def same(a, b):
    assert {i: o.tokens.tolist() for i, o in a.items()} == {i: o.tokens.tolist() for i, o in b.items()}
    for i in a:
        torch.testing.assert_close(torch.tensor(a[i].logprobs), torch.tensor(b[i].logprobs), atol=1e-5, rtol=1e-5)


def test_every_count_of_rows_has_a_bucket_that_holds_it():
    for most in (1, 7, 16, 40, 256):
        sizes = [padded_rows(n, most) for n in range(1, most + 1)]
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
        layout, backbone = runner.layout, runner.forward._backbone
        tables = [t for asks, back in layout._head_tables.values() for t in (*asks, back)]
        for b in layout._buckets:
            tables += [b.row_index, b.lengths, b.hidden, *b.store.layer(1, None, None)]
        drawn = runner.completion_store.layer(1, None, None)
        return [t.data_ptr() for t in (*tables, *drawn, backbone._cos, backbone._sin, runner.state)]

    def capture(body):
        made.append(Replay(body, addresses))
        return made[-1], made[-1].out

    engine._fix_shapes()
    runner.graphs._captures, runner.graphs._capture = True, capture
    return made


@pytest.mark.spread(5)
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
    assert "fixed shapes" in engine.backends["steps"]
    same(run(engine, work), want)
    assert (sum(g.count for g in made) > 10) == graphs
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    engine.update_weights(1)
    fresh = EmbeddedEngine(model, max_batch=11)
    same(run(engine, work), run(fresh, work))


@pytest.mark.parametrize("bound", [440, 700, 1500])
def test_a_bounded_cache_counts_the_padding_of_replayed_steps(bound):
    model, held = build(gain=3.0), []
    work = requests(prompts((3, 70, 40, 9, 1, 33)), Sampling(max_tokens=45, stop_ids=STOPS), group=4)
    want = run(EmbeddedEngine(model, max_batch=24), work)
    engine = EmbeddedEngine(model, max_batch=24, kv_cache_tokens=bound)
    made = captured(engine)
    features = engine._runner.forward.features
    engine._runner.forward.features = lambda *a: (features(*a), held.append(engine._runner.kv_tokens))[0]
    same(run(engine, work), want)
    assert max(held) <= bound and sum(g.count for g in made) > len(made)


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
    for i in range(MAX_GRAPHS + 1):
        graphs.step(i, 1, body)
    assert len(graphs._graphs) <= MAX_GRAPHS


# ---- captures, replays and memory by the rules of torch.cuda's graphs: see cuda_standin.py


@pytest.fixture
def machine(monkeypatch):
    return Machine().install(monkeypatch)


WORK = Sampling(max_tokens=45, stop_ids=STOPS)


def small(seed=0):
    return build(gain=3.0, seed=seed, num_hidden_layers=1)


def on_gpu(model, index=1, **options):
    """An engine whose steps are captured on a device that is not the current one."""
    engine = EmbeddedEngine(model, max_batch=11, native=False, **options)
    engine._fix_shapes()
    engine._runner.graphs = StepGraphs(torch.device("cuda", index))
    return engine


def plainly(model, work):
    return run(EmbeddedEngine(model, max_batch=11, native=False), work)


def test_graphs_come_and_go_with_their_memory_and_draw_what_eager_steps_draw(machine):
    model, work = small(), requests(prompts((3, 70, 40, 9)), WORK, group=4)
    engine, want = on_gpu(model), plainly(model, work)
    for version in range(2):
        same(run(engine, work), want)
        assert machine.captured > 2 and machine.replayed > machine.captured
        engine.update_weights(version)  # all graphs go, and new ones come
    done = machine.captured
    same(run(engine, work), want)
    assert machine.captured > done and machine.pools == 1
    engine.sleep()
    assert machine.destroyed == machine.captured and not machine.live and machine.pools == 0
    assert machine.device == 0 and machine.stream is None


def test_what_a_layout_keeps_of_a_captured_step_goes_when_the_engine_sleeps(machine):
    engine = on_gpu(small())
    run(engine, requests(prompts((3, 9)), WORK, group=4))
    layout = engine._runner.layout
    assert layout._drawn_bias and layout._write_at
    engine.sleep()
    assert not (layout._drawn_bias or layout._prompt_bias or layout._write_at)


def test_two_engines_of_a_process_do_not_break_each_others_graphs(machine):
    models = [small(seed) for seed in range(2)]
    work = requests(prompts((3, 9)), Sampling(max_tokens=60), group=3)
    engines, done = [on_gpu(m, 0) for m in models], [{}, {}]
    for engine in engines:
        engine.submit(work)
    while len(done[0]) < len(work) or len(done[1]) < len(work):  # block by block, in turn
        for engine, out in zip(engines, done):
            out |= {o.id: o for o in engine.step(timeout_s=0.0)}
        if len(machine.live) == 2 and machine.replayed < 20:
            engines[0].update_weights(1)  # its graphs go while those of the other live on
    assert machine.captured > 4 and machine.replayed > 40
    for model, out in zip(models, done):
        same(out, plainly(model, work))


def test_a_capture_that_fails_leaves_eager_steps_and_says_so_once(machine, caplog):
    model, work = small(), requests(prompts((3, 70, 9)), WORK, group=4)
    engine = on_gpu(model)
    machine.faults.append(RuntimeError("operation not permitted when stream is capturing\nmore"))
    with caplog.at_level(logging.WARNING, "whet"):
        for _ in range(2):
            same(run(engine, work), plainly(model, work))
    assert machine.captured == 0 and machine.stream is None  # not the capture's, which torch leaves behind
    assert machine.pools == 0
    assert caplog.text.count("are no longer captured") == 1
    assert "RuntimeError: operation not permitted when stream is capturing more (runner.py:" in caplog.text
    assert engine.backends["steps"].startswith("eager (") and "not permitted" in engine.backends["steps"]


def test_the_error_of_a_capture_is_its_own_and_not_one_that_was_being_handled(machine):
    graphs = StepGraphs(torch.device("cuda", 0))
    body = lambda: (torch.zeros(1) + 1,)
    graphs.step("a", 0, body)
    machine.faults.append(RuntimeError("bad operator"))
    try:
        raise KeyError("unrelated")
    except KeyError:
        assert graphs.step("a", 0, body)[0].tolist() == [1.0]
    assert "RuntimeError: bad operator" in graphs.failure


def test_an_interrupt_in_a_capture_is_no_failure_of_it(machine):
    model, work = small(), requests(prompts((3, 9)), Sampling(max_tokens=30), group=4)
    engine = on_gpu(model)
    machine.faults.append(KeyboardInterrupt())
    engine.submit(work)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert machine.stream is None
    out = {}
    while found := engine.step():
        out |= {o.id: o for o in found}
    same(out, plainly(model, work))
    assert machine.captured > 0 and "graphs on cuda, experimental" in engine.backends["steps"]


def test_captures_stand_memory_that_other_threads_ask_for(machine):
    graphs = StepGraphs(torch.device("cuda", 0))

    def body():
        thread = threading.Thread(target=machine.allocate)
        thread.start()
        thread.join()
        return (torch.ones(2) * 2,)

    for _ in range(3):
        assert graphs.step("a", 0, body)[0].tolist() == [2.0, 2.0]
    assert (machine.captured, machine.replayed) == (1, 2)


def test_work_is_done_with_the_models_device_as_the_current_one(machine):
    model = small()
    for engine in (on_gpu(model), EmbeddedEngine(model, fast=False)):
        forward, seen = engine._runner.forward, []
        forward.device = torch.device("cuda", 3)
        features = forward.features
        forward.features = lambda *a: (seen.append(machine.device), features(*a))[1]
        run(engine, requests(prompts((3,)), Sampling(max_tokens=2)))
        assert set(seen) == {3} and machine.device == 0


def test_work_after_penalised_work_is_captured_as_if_it_came_first(machine):
    engine, work = on_gpu(small()), requests(prompts((3, 9)), WORK, group=4)
    run(engine, requests(prompts((3, 9)), Sampling(max_tokens=20, repetition_penalty=1.2), group=4))
    assert machine.captured == 0
    run(engine, work)
    assert machine.captured > 0
