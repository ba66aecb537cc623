import dataclasses
import gc
import logging
import weakref

import pytest
import torch
from helpers import cluster, length_reward, random_batch, rows, same, tiny_model, weights_of

from whet.config import ClusterConfig, DataConfig, GRPOConfig, OptimConfig, RLTrainingConfig, RolloutConfig
from whet.learners.grpo import GRPOLearner
from whet.models.load import load_model
from whet.ops import clipped_surrogate
from whet.parallel.placement import Placement
from whet.train.offload import Offload, OffloadPlacement, PinnedBuffers
from whet.train.worker import Divergence, ModelWorker
from whet.types import TokenBatch

DEVICE, HOST = torch.device("cpu"), torch.device("cpu:0")  # two names of one place: what moves is seen all the same


class Moves:
    """A copy that notes where each tensor went. What lies on the host is NaN, so that whoever reads it there spoils
    his numbers; the truth is kept aside."""

    def __init__(self):
        self.log, self.kept = [], {}

    def __call__(self, tensor, place):
        self.log.append((place, tensor.numel()))
        if place == HOST:
            there = torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else torch.zeros_like(tensor)
            self.kept[there.data_ptr()] = (there, tensor.clone())
            return there
        return self.kept.pop(tensor.data_ptr())[1]

    def taken(self):
        """(place, numbers moved) since the last call, runs to one place added up."""
        out = []
        for place, count in self.log:
            if out and out[-1][0] == place:
                out[-1] = (place, out[-1][1] + count)
            else:
                out.append((place, count))
        self.log = []
        return out


def pair(optim, dtype=torch.bfloat16, plain_copy=False):
    """A worker that offloads and one that does not, otherwise equal; and the moves of the first."""
    moves = Moves()
    options = {"optim": optim, "dtype": dtype, "max_tokens": 64}
    offload = Offload(DEVICE, HOST) if plain_copy else Offload(DEVICE, HOST, copy=moves)
    if plain_copy:  # as on a GPU: what is away is views of one buffer per dtype
        offload._pinned = PinnedBuffers(pinned=False)
    away = ModelWorker(load_model(tiny_model()), placement=OffloadPlacement(offload), **options)
    return away, ModelWorker(load_model(tiny_model()), **options), moves


def batch(seed=0):
    made: TokenBatch = random_batch((5, [4, 6]), (7, [3, 3]), seed=seed)
    return made.replace(weights=torch.ones(made.num_tokens) / made.num_tokens)


def update(worker, seed):
    worker.forward_backward(batch(seed), clipped_surrogate)
    return worker.optim_step()


SIZE = sum(p.numel() for p in tiny_model().parameters())


# ---- Offload -------------------------------------------------------------------------------------------------------


def test_a_round_trip_changes_no_bit_and_no_object():
    tensors = [torch.randn(3, 4).t(), torch.randn(5).bfloat16(), torch.tensor([torch.nan, -0.0]), torch.arange(3)]
    before = [t.clone() for t in tensors]
    offload = Offload(DEVICE, HOST)
    offload.to_host(tensors)
    assert offload.held_bytes == 12 * 4 + 5 * 2 + 2 * 4 + 3 * 8
    offload.to_device(tensors)
    assert offload.held_bytes == 0
    for t, b in zip(tensors, before):
        assert t.stride() == b.stride() and torch.equal(
            t.view(torch.uint8) if t.dim() == 1 else t, b.view(torch.uint8) if b.dim() == 1 else b
        )


def test_places_of_one_buffer_per_dtype_are_kept():
    tensors = [torch.randn(3, 4).t(), torch.randn(5), torch.randn(6, 2)[:, 0], torch.zeros(0), torch.arange(3)]
    before = [t.clone() for t in tensors]
    offload = Offload(DEVICE, HOST)
    offload._pinned = PinnedBuffers(pinned=False)
    offload.to_host(tensors)
    places = [t.data_ptr() for t in tensors]
    assert len({t.untyped_storage()._cdata for t in tensors}) == 2 and all(map(torch.equal, tensors, before))
    offload.to_device(tensors)
    assert all(map(torch.equal, tensors, before)) and len({t.untyped_storage()._cdata for t in tensors}) == 5
    tensors[1].add_(1)
    offload.to_host(tensors)
    assert [t.data_ptr() for t in tensors][:2] == places[:2] and torch.equal(tensors[1], before[1] + 1)
    assert len(offload._pinned._places) == 5
    offload.to_device(tensors)
    tensors[0].data, tensors[1].data = tensors[0].contiguous(), tensors[1].double() / 3  # these take new places
    before = [t.clone() for t in tensors]
    offload.to_host(tensors)
    for t, b in zip(tensors, before):
        assert torch.equal(t, b) and (t.dtype, t.stride()) == (b.dtype, b.stride())
    offload.clear()
    assert not len(offload._pinned._places)


def test_what_is_not_on_the_device_stays_and_nothing_moves_twice():
    moves = Moves()
    offload = Offload(DEVICE, HOST, copy=moves)
    weight, elsewhere = torch.ones(4), torch.ones(2, device="meta")
    offload.to_device([weight])  # it was never taken away
    offload.to_host([weight, elsewhere])
    offload.to_host([weight])
    offload.to_device([weight, elsewhere])
    offload.to_device([weight])
    assert moves.taken() == [(HOST, 4), (DEVICE, 4)] and weight.tolist() == [1.0] * 4


def test_one_place_for_both_moves_nothing():
    moves = Moves()
    Offload(DEVICE, DEVICE, copy=moves).to_host([torch.ones(2)])
    assert moves.log == []


# ---- the worker ----------------------------------------------------------------------------------------------------


@pytest.mark.spread(3)
@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_those_without_to_the_bit_and_nothing_is_read_on_the_host(name, dtype):
    away, plain, _ = pair(OptimConfig(name=name, lr=1e-2), dtype)
    for seed in range(3):
        assert update(away, seed) == update(plain, seed)
        assert torch.equal(away.logprobs(batch(9)).logprobs, plain.logprobs(batch(9)).logprobs)
    assert same(weights_of(away.module), weights_of(plain.module))


def test_masters_come_for_the_backward_pass_and_moments_for_the_step_and_both_leave():
    away, _, moves = pair(OptimConfig(lr=1e-2))
    assert moves.taken() == [(HOST, SIZE)]  # the masters, when the worker is made
    update(away, 0)
    counts = len(away.optim.masters)  # AdamW's fused kernel keeps a count per tensor beside the moments
    assert moves.taken() == [(DEVICE, SIZE), (HOST, 3 * SIZE + counts)]
    away.logprobs(batch())
    assert moves.taken() == []  # scoring reads the weights that the model computes with
    away.forward_backward(batch(1), clipped_surrogate)
    assert moves.taken() == [(DEVICE, SIZE)]
    away.forward_backward(batch(2), clipped_surrogate)
    assert moves.taken() == []
    away.optim_step()
    assert moves.taken() == [(DEVICE, 2 * SIZE + counts), (HOST, 3 * SIZE + counts)]


def test_a_model_that_computes_in_fp32_keeps_its_weights_and_sends_its_moments_away():
    away, _, moves = pair(OptimConfig(lr=1e-2), torch.float32)
    update(away, 0)
    assert moves.taken() == [(HOST, 2 * SIZE + len(away.optim.masters))]


def test_a_reference_is_on_its_device_while_it_scores_alone():
    away, plain, moves = pair(None, torch.float32)
    assert moves.taken() == [(HOST, SIZE)] and all(p.isnan().all() for p in away.module.parameters())
    for seed in range(2):
        assert torch.equal(away.logprobs(batch(seed)).logprobs, plain.logprobs(batch(seed)).logprobs)
        assert moves.taken() == [(DEVICE, SIZE), (HOST, SIZE)]
    assert away.device == DEVICE
    with away.rollout_weights():  # engines read them
        assert moves.taken() == [(DEVICE, SIZE)]


def test_a_reference_leaves_also_after_an_error(monkeypatch):
    away, _, moves = pair(None, torch.float32)
    moves.taken()
    monkeypatch.setattr(away, "micro_batches", None)
    with pytest.raises(TypeError):
        away.logprobs(batch(0))
    assert moves.taken() == [(DEVICE, SIZE), (HOST, SIZE)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_while_away_and_loaded_into_one_that_is_away_it_goes_on_bit_for_bit(dtype, tmp_path):
    config = OptimConfig(lr=1e-2, schedule="linear", total_steps=9)
    away, plain, _ = pair(config, dtype, plain_copy=True)
    for name, worker in {"away": away, "plain": plain}.items():
        update(worker, 0)
        (tmp_path / name).mkdir()
        worker.save(tmp_path / name)
        worker.export(tmp_path / name / "whole")
    moments = [m for m in away.placement._moments() if m.dim()]
    assert len({m.untyped_storage()._cdata for m in moments}) == 1 and len(moments) > 10
    for file in ("optimizer.safetensors", "model.safetensors", "whole/model.safetensors"):
        assert (tmp_path / "away" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    again, _, moves = pair(config, dtype)
    update(again, 5)  # it has a state of its own, which is replaced
    again.load(tmp_path / "away")
    moves.taken()
    update(again, 1), update(plain, 1)
    assert same(weights_of(again.module), weights_of(plain.module))


def test_the_exported_model_is_that_of_the_masters(tmp_path):
    away, plain, _ = pair(OptimConfig(lr=1e-2))
    update(away, 0), update(plain, 0)
    away.export(tmp_path / "a")
    plain.export(tmp_path / "b")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_the_parts_of_a_quantised_moment_move_and_it_stays_what_it_is():
    ao = pytest.importorskip("torchao.optim.subclass_8bit", reason="needs the extra quant")
    state = ao.OptimState8bit.zeros((16, 256), device="cpu", dtype=torch.float32)
    state.codes.copy_(torch.randint(0, 256, (16, 256)))
    before = state.codes.clone(), state.scale.clone()
    moves = Moves()
    offload = Offload(DEVICE, HOST, copy=moves)
    offload.to_host([state])
    assert moves.taken() == [(HOST, 16 * 256 + 16 + 256)] and not torch.equal(state.codes, before[0])
    offload.to_device([state])
    assert torch.equal(state.codes, before[0]) and torch.equal(state.scale, before[1])


# ---- a run ---------------------------------------------------------------------------------------------------------


def trained(monkeypatch=None, offload=False):
    if monkeypatch is not None:  # the CPU as if it were a device of its own
        placement = lambda *_: OffloadPlacement(Offload(DEVICE, HOST, copy=Moves()))
        monkeypatch.setattr("whet.cluster.RLCluster._placement", placement)
    c = cluster(tiny_model(dtype=torch.bfloat16), reference=tiny_model(1), max_steps=3, mini_batch_size=1)
    assert offload is False or isinstance(c.actor.placement, OffloadPlacement)
    algo = GRPOConfig(num_generations=4, beta=0.02, num_iterations=2)
    run = GRPOLearner(c, algo, length_reward, data=DataConfig(batch_size=2)).train(rows(8))
    numbers = [{k: repr(v) for k, v in r.items() if not k.startswith(("time/", "perf/"))} for r in run.rows]
    return numbers, weights_of(c.actor.module)


def test_a_run_with_reference_and_many_updates_is_the_same_run(monkeypatch):
    (plain, expected), (away, found) = trained(), trained(monkeypatch, offload=True)
    assert plain == away and same(expected, found)


def test_on_a_cpu_it_is_accepted_and_said_once(caplog, monkeypatch):
    from whet.cluster import RLCluster

    config = ClusterConfig(
        offload_to_cpu=True, rollout_config=RolloutConfig(), training_config=RLTrainingConfig(pbar_description=None)
    )
    with caplog.at_level(logging.INFO, "whet"):
        c = RLCluster(actor=tiny_model(), reference=tiny_model(), tokenizer="byte", cluster_config=config)
    assert caplog.text.count("offload_to_cpu has nothing to do") == 1
    assert {type(w.placement) for w in c.workers.values()} == {Placement}
    monkeypatch.setattr(c, "device_of", lambda loaded: torch.device("cuda"))
    loaded = c.actor.loaded
    assert type(c._placement(loaded)) is OffloadPlacement
    assert type(c._placement(dataclasses.replace(loaded, is_view=True))) is Placement  # its owner moves the weights


def test_a_closed_worker_holds_neither_masters_nor_moments():
    away, _, _ = pair(OptimConfig(lr=1e-3))
    update(away, 0)
    held = [weakref.ref(t) for t in (*away.placement._masters(), *away.placement._moments())]
    assert away.placement.offload.held_bytes > 0 and len(held) > 10
    away.close()
    gc.collect()
    assert away.placement.offload.held_bytes == 0 and not any(ref() is not None for ref in held)


def test_a_teacher_is_there_for_the_updates_that_learn_from_it():
    moves = Moves()
    away = ModelWorker(load_model(tiny_model(1)), placement=OffloadPlacement(Offload(DEVICE, HOST, copy=moves)))
    here = ModelWorker(load_model(tiny_model(1)))
    moves.taken()
    found = []
    for teacher in (away, here):
        student = ModelWorker(load_model(tiny_model()), optim=OptimConfig())
        loss, needs = lambda x: (x.need("divergence"), {}), {"divergence": Divergence(teacher, 0.5)}
        evaluated = student.evaluate(batch(), loss, **needs)
        metrics = student.forward_backward(batch(), loss, **needs)
        assert metrics["loss"].value == evaluated["loss"].value
        found.append((metrics["loss"].value, {n: p.grad for n, p in student.module.named_parameters()}))
    (loss, ours), (other, theirs) = found
    assert loss == other > 0 and same(ours, theirs)
    assert [place for place, _ in moves.taken()] == [DEVICE, HOST] * 2
