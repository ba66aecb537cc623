"""Decode steps from a KVPool: the tokens of the stores, and steps captured once, by stand-ins of what needs a GPU."""

import logging
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import tiny
import torch
from cuda_standin import FixedMemory, Machine
from tiny import build, prompts, requests, run

from tests.varlen_standin import varlen_attn, varlen_attn_2_11
from whet.config.lora import LoraConfig
from whet.errors import EngineError
from whet.models import varlen
from whet.models.config_sizes import kv_bytes_per_token
from whet.models.load import load_model
from whet.rollout.base import Sampling
from whet.rollout.engine import EmbeddedEngine, pool_runner, scheduler
from whet.rollout.engine.cuda_graph import StepGraphs
from whet.rollout.engine.growing_memory import GrowingMemory
from whet.rollout.engine.kv_pool import KVPool, PoolCase, _difference
from whet.rollout.engine.places import Places
from whet.rollout.engine.runner import StepOutput

STOPS = tuple(range(0, 64, 6))
BOUND = 600


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)


def same(a, b):
    assert {i: o.tokens.tolist() for i, o in a.items()} == {i: o.tokens.tolist() for i, o in b.items()}
    for i in a:
        torch.testing.assert_close(torch.tensor(a[i].logprobs), torch.tensor(b[i].logprobs), atol=1e-5, rtol=1e-5)


def pooled(model, *, kv_cache_tokens=BOUND, make=FixedMemory, **options):
    """An engine on the CPU with a KVPool; its steps are not captured."""
    engine = EmbeddedEngine(model, max_batch=11, native=False, kv_cache_tokens=kv_cache_tokens, **options)
    engine._use_pool(make=make)
    return engine


SEVERAL = [{"top_k": 4}, {"repetition_penalty": 1.3}, {"temperature": 0.5, "return_logits": True}]


@pytest.mark.parametrize(
    ("family", "samplings"), [("qwen3", SEVERAL), ("mistral_window", [{}]), ("qwen2", [{"temperature": 0.0}])]
)
def test_a_pool_draws_the_tokens_that_stores_draw(family, samplings):
    model = build(family, gain=3.0)
    work = requests(prompts((3, 70, 40, 1, 33)), Sampling(), group=3)
    kinds = [Sampling(max_tokens=25, stop_ids=STOPS, **k) for k in samplings]
    work = [type(r)(**{**vars(r), "sampling": kinds[r.id % len(kinds)]}) for r in work]
    engine = pooled(model, prefill_tokens=16)
    want = run(EmbeddedEngine(model, max_batch=11), work)
    same(run(engine, work), want)
    assert engine._runner.places.used == sum(len(p.tokens) for p in engine._prefixes.values())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    engine.update_weights(1)
    same(run(engine, work), run(EmbeddedEngine(model, max_batch=11), work))


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_joined_weights_are_the_models_own_which_is_trained_and_saved_as_before(family, tmp_path):
    model, twin = build(family, gain=3.0), build(family, gain=3.0)
    engine = pooled(model)
    for layer in model.model.layers:
        weights = [layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight]
        assert len({p.untyped_storage().data_ptr() for p in weights}) == 1
        weights[1].data = weights[1].data.clone()  # what offloading does
    ids = torch.arange(12)[None]
    for m in (model, twin):
        m.set_attn_implementation("eager")
        m(input_ids=ids).logits.square().mean().backward()
        torch.optim.SGD(m.parameters(), lr=0.1).step()
        m.save_pretrained(tmp_path / str(m is twin))
    engine.update_weights(1)
    work = requests(prompts((3, 20)), Sampling(max_tokens=5), group=2)
    same(run(engine, work), run(EmbeddedEngine(twin, max_batch=11), work))
    for (name, a), b in zip(model.named_parameters(), twin.parameters()):
        assert torch.equal(a, b) and torch.equal(a.grad, b.grad), name
    weights = [safetensors.torch.load_file(tmp_path / name / "model.safetensors") for name in ("True", "False")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])
    assert len({p.untyped_storage().data_ptr() for p in model.model.layers[0].self_attn.parameters()}) < 7


def test_several_processes_leave_the_parameters_where_fsdp_put_them(monkeypatch):
    model = build(gain=3.0)
    before = {n: p.data_ptr() for n, p in model.named_parameters()}
    monkeypatch.setattr(pool_runner.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(pool_runner.dist, "get_world_size", lambda: 2)
    pooled(model)
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == before


@pytest.mark.parametrize("bound", [180, 300])
def test_rows_of_a_bounded_pool_grow_and_are_queued_again_where_there_is_no_place(bound):
    """Lengths are mixed, prompts shared, and rows refilled; the memory of a longest row is not that of every row."""
    model, held, seen = build(gain=3.0), [], {"rows": 0, "moved": 0, "again": 0}
    work = requests(prompts((3, 70, 40, 9, 1, 33)), Sampling(max_tokens=45, stop_ids=STOPS[:2]), group=4)
    kinds = [{}, {"repetition_penalty": 1.3}, {"return_logits": True}]
    work = [replace(r, sampling=replace(r.sampling, **kinds[r.id % 3])) for r in work]
    engine = pooled(model, kv_cache_tokens=bound, make=GrowingMemory)
    runner, scheduler = engine._runner, engine._scheduler
    features, move, resume = runner.forward.features, runner.pool.move, scheduler.resume

    def counted(*args):
        held.append(runner.kv_tokens)
        seen["rows"] = max(seen["rows"], len(engine._rows))
        return features(*args)

    runner.forward.features = counted
    runner.pool.move = lambda *a: (move(*a), seen.__setitem__("moved", seen["moved"] + 1))
    scheduler.resume = lambda flights: (resume(flights), seen.__setitem__("again", seen["again"] + len(flights)))
    got, want = run(engine, work), run(EmbeddedEngine(model, max_batch=11), work)
    same(got, want)
    for i, output in want.items():
        if output.logits is not None:
            torch.testing.assert_close(torch.tensor(got[i].logits), torch.tensor(output.logits), atol=1e-4, rtol=1e-4)
    assert max(held) <= bound and seen["moved"] and seen["again"], seen
    assert seen["rows"] > (bound - 3) // 45, "as many rows as of the longest"
    engine.sleep()
    assert engine.kv_bytes == engine._runner.places.used == 0


class NoMemory(GrowingMemory):
    """Memory of which only the size is known."""

    held = 0

    def resize(self, size):
        self.held = size


@pytest.mark.full
def test_mixed_lengths_take_half_the_steps_that_full_length_takes(monkeypatch):
    """The scheduler at the size of a run on 24 GB, with lengths given and no model; docs/engine.md has the numbers."""
    lengths = np.random.RandomState(1).lognormal(np.log(330), 0.6, 256).clip(10, 1024).astype(int)

    def steps(parts):
        monkeypatch.setattr(scheduler, "PARTS", parts)
        engine = EmbeddedEngine(small(), max_batch=256, native=False, kv_cache_tokens=49_152)
        engine._use_pool(make=NoMemory)
        runner, total, computed = engine._runner, [], []
        runner.pool.move = lambda source, target: None

        def prefill(prefixes, *_):
            for p in prefixes:
                computed.append(len(p.tokens) - p.num_computed_tokens)
                p.last_hidden, p.source = torch.zeros(1), None

        def draw(flights, drawn, count):
            tokens = np.full((count, len(flights)), 5, np.int32)
            for column, (flight, n) in enumerate(zip(flights, drawn)):
                last = lengths[flight.request.id] - len(flight.tokens) - n - 1
                if 0 <= last < count:
                    tokens[last, column] = 2
            return StepOutput(tokens=tokens, logprobs=np.zeros(tokens.shape, np.float32), logits=None)

        def decode(count, drawn, *_):
            total.append(count)
            assert runner.places.end - 1 <= runner.pool.places <= 49_152
            flights = [flight for flight, _ in engine._rows]
            assert all(flight.room >= n - 1 + count for flight, n in zip(flights, drawn))
            return draw(flights, drawn, count)

        runner.prefill, runner.decode = prefill, decode
        runner.add_rows = lambda first, admitted, *_: draw([f for f, _ in admitted], [0] * len(admitted), 1)
        work = requests(prompts([512] * 32), Sampling(max_tokens=1024, stop_ids=(2,)), group=8)
        out = run(engine, [replace(r, tokens=r.tokens % 50 + 8) for r in work])
        assert [len(out[i].tokens) for i in range(256)] == lengths.tolist()
        return sum(total), sum(computed)

    monkeypatch.setitem(tiny.COMMON, "max_position_embeddings", 2048)
    page = (Path(__file__).parents[2] / "docs/engine.md").read_text(encoding="utf-8").replace("\n  ", " ")
    (grown, computed), (reserved, once) = steps(scheduler.PARTS), steps(1)
    assert f"{grown:,} decode steps instead of {reserved:,}, and computes {computed:,} prompt tokens" in page
    assert f"instead of {once:,}" in page and grown < 0.5 * reserved


@pytest.mark.parametrize("bound", [None, 150])
def test_turns_of_conversations_are_copied_from_a_pool_and_into_one_within_its_bound(bound):
    model, runs = build(gain=3.0), []
    for engine in (EmbeddedEngine(model, native=False), pooled(model, kv_cache_tokens=bound, make=GrowingMemory)):
        contexts, out, most = dict(enumerate(prompts((20, 30, 9)))), {}, 0
        for turn in range(3):
            first = requests(list(contexts.values()), Sampling(max_tokens=12))
            keys = [{"id": 9 * turn + i, "conversation": i, "rng_key": (0, turn, i, 0)} for i in contexts]
            engine.submit([replace(r, **k) for r, k in zip(first, keys, strict=True)])
            while done := engine.step():
                most = max(most, engine.stats().kv_tokens)
                for o in done:
                    out[o.id] = o.tokens.tolist()
                    contexts[o.id % 9] = np.concatenate([contexts[o.id % 9], o.tokens, [7, 8]]).astype(np.int32)
        runs.append(out)
    assert runs[0] == runs[1] and engine.stats().reused > 0 and (bound is None or most <= bound)


def test_a_model_whose_steps_are_not_captured_is_said_with_the_reason(caplog):
    engine = EmbeddedEngine(build("qwen3_moe", gain=3.0))
    with caplog.at_level(logging.WARNING, "whet"):
        engine._use_pool_if_it_fits()
    assert "not captured, which makes a rollout several times slower: the backbone is module (" in caplog.text
    assert engine.backends["steps"].startswith("eager (the backbone is module (")


def test_without_a_bound_the_pool_takes_what_is_free_and_refuses_what_never_fits(monkeypatch):
    model = build(gain=3.0)
    free = 200 * kv_bytes_per_token(model.config, 4) / pool_runner.KV_SHARE + 1
    monkeypatch.setattr(pool_runner, "available_memory", lambda device: free)
    engine = pooled(model, kv_cache_tokens=None, make=GrowingMemory)
    assert engine._runner.places.capacity == 200
    work = requests(prompts((3, 70, 40)), Sampling(max_tokens=45, stop_ids=STOPS), group=3)
    same(run(engine, work), run(EmbeddedEngine(model, max_batch=11), work))
    with pytest.raises(EngineError, match=r"70 prompt tokens .* = 201, but the cache holds 200"):
        engine.submit(requests(prompts((70,)), Sampling(max_tokens=131)))


def test_ranges_of_places_do_not_overlap_and_come_back():
    places, random, held = Places(97), torch.Generator().manual_seed(0), {}
    for _ in range(400):
        length = int(torch.randint(1, 30, (), generator=random))
        if (taken := places.take(length)) is not None:
            held[taken[0]] = length
        elif held:
            start = list(held)[int(torch.randint(len(held), (), generator=random))]
            places.free(start)
            del held[start]
        used = [i for start, n in held.items() for i in range(start, start + n)]
        assert len(set(used)) == len(used) == places.used and all(1 <= i <= 97 for i in used)
        assert places.end == max(used, default=0) + 1


@pytest.mark.parametrize("kv", [1, 2, 4])
def test_the_comparison_of_a_gpu_accepts_the_kernel_and_no_other(kv, monkeypatch):
    case = PoolCase(torch.device("cpu"), torch.bfloat16, 4, kv, 8, 0.3)
    for kernel in (varlen_attn_2_11, varlen_attn):
        monkeypatch.setattr(varlen, "varlen_attn", kernel)
        assert _difference(case) is None
    monkeypatch.setattr(varlen, "varlen_attn", lambda *a, **k: varlen_attn(*a, **k, last_key=False))
    assert "from the plain path's" in _difference(case)
    ignores = lambda *a, seqused_k, **k: varlen_attn(*a, **k, seqused_k=seqused_k + 1)
    monkeypatch.setattr(varlen, "varlen_attn", ignores)
    assert "a decode step is" in _difference(case)
    for queries, words in ((8, "a decode step is nan"), (50, "its output is nan")):

        def gives_nan(q, *rest, n=queries, **options):
            out, lse = varlen_attn(q, *rest, **options)
            return out * (torch.nan if len(q) == n else 1), lse

        monkeypatch.setattr(varlen, "varlen_attn", gives_nan)
        assert words in _difference(case)


def test_the_place_of_padding_rows_is_zero_also_in_memory_that_has_come_back():
    class Dirty(GrowingMemory):
        def resize(self, size):
            super().resize(size)
            self.bytes.fill_(255)  # NaN, as what another program may have left

    pool = KVPool(20, torch.device("cpu"), make=Dirty)
    for _ in range(2):
        pool.reserve(10)
        assert not pool.layer(0, torch.ones(1, 2, 8), kv=1)[0].any()
        pool.shrink(0)


# ---- captures, replays and memory by the rules of torch.cuda's graphs: see cuda_standin.py


@pytest.fixture
def machine(monkeypatch):
    return Machine().install(monkeypatch)


WORK = Sampling(max_tokens=45, stop_ids=STOPS)


def small(seed=0):
    return build(gain=3.0, seed=seed, num_hidden_layers=1)


def on_gpu(model, index=1, **options):
    """An engine whose steps are captured on a device that is not the current one."""
    engine = pooled(model, **options)
    engine._runner.graphs = StepGraphs(torch.device("cuda", index))
    return engine


def plainly(model, work):
    return run(EmbeddedEngine(model, max_batch=11, native=False), work)


def test_graphs_are_captured_once_and_serve_updates_sleeps_and_other_samplings(machine):
    model, work = small(), requests(prompts((3, 70, 40, 9)), WORK, group=4)
    engine, want = on_gpu(model), plainly(model, work)
    same(run(engine, work), want)
    done = machine.captured
    assert 2 <= done <= 5 and machine.replayed > done  # 1, 2, 4, 8 and 16 rows
    others = [Sampling(max_tokens=9, **k) for k in ({"temperature": 0.3}, {"top_k": 4}, {"repetition_penalty": 1.2})]
    for version, sampling in enumerate((WORK, *others), 1):
        engine.sleep()
        assert engine.kv_bytes == 0
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.95)
        engine.wake_up()
        engine.update_weights(version)
        rest = requests(prompts((41, 5, 90)), sampling, group=3)
        same(run(engine, rest), plainly(model, rest))
    run(engine, work)
    assert machine.captured <= 5 and machine.destroyed == 0 and machine.pools == 1
    engine.close()
    assert machine.destroyed == machine.captured and not machine.live and machine.pools == 0
    assert machine.device == 0 and machine.stream is None


def test_steps_of_more_rows_than_a_graph_has_are_not_captured(machine, monkeypatch):
    monkeypatch.setattr(pool_runner, "MAX_ROWS", 2)
    model, work = small(), requests(prompts((3, 9)), Sampling(max_tokens=9), group=3)
    same(run(on_gpu(model), work), plainly(model, work))
    assert machine.captured == 0
    run(on_gpu(model), work[:2])
    assert machine.captured == 1


def test_graphs_read_adapters_as_they_are_now_also_where_they_have_moved(machine):
    loaded = load_model(small().bfloat16(), dtype=torch.bfloat16, lora=LoraConfig(r=4))
    adapter = [p for n, p in loaded.module.named_parameters() if "lora_" in n]
    work, drawn = requests(prompts((3, 40)), Sampling(max_tokens=12), group=3), []
    for engine in (pooled(loaded), on_gpu(loaded)):
        for version in range(3):
            torch.manual_seed(version)
            for p in adapter:
                torch.nn.init.normal_(p, std=0.3)
                if version == 2:  # what offloading does
                    p.data = p.data.clone()
            engine.update_weights(version)
            drawn.append({i: o.tokens.tolist() for i, o in run(engine, work).items()})
            assert machine.destroyed == 0 or version == 2
    assert drawn[:3] == drawn[3:] and drawn[0] != drawn[1] != drawn[2]
    assert machine.captured == 2 * machine.destroyed == 2  # one, and again where tensors have moved


def test_memory_that_moves_costs_captures_and_no_tokens(machine):
    model, work = small(), requests(prompts((3, 70, 40, 9)), WORK, group=4)
    engine = on_gpu(model, make=GrowingMemory)
    for _ in range(2):
        done = machine.captured
        same(run(engine, work), plainly(model, work))
        assert machine.captured > done and machine.pools == 1
        engine.sleep()
        engine.wake_up()


def test_two_engines_of_a_process_do_not_break_each_others_graphs(machine):
    models = [small(seed) for seed in range(2)]
    work = requests(prompts((3, 9)), Sampling(max_tokens=60), group=3)
    engines, done = [on_gpu(m, 0) for m in models], [{}, {}]
    for engine in engines:
        engine.submit(work)
    while len(done[0]) < len(work) or len(done[1]) < len(work):  # block by block, in turn
        for engine, out in zip(engines, done):
            out |= {o.id: o for o in engine.step(timeout_s=0.0)}
        if len(machine.live) == 2 and not machine.destroyed:
            engines[0]._runner.graphs.clear()  # they go while those of the other live on
    assert machine.captured > 2 and machine.replayed > 40
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
    assert "RuntimeError: operation not permitted when stream is capturing more (" in caplog.text
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
