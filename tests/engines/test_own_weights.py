"""An engine with weights of its own: what it samples from, and updates that don't fit. The rest is the contract's."""

from types import SimpleNamespace

import pytest
import torch
from helpers import cluster, forest, prompt
from tiny import FORMS, build, prompts, requests, run

from whet.config import OptimConfig
from whet.errors import EngineError, WhetError
from whet.models.load import load_model
from whet.parallel.ranks import Ranks
from whet.rollout.base import Sampling
from whet.rollout.engine import EmbeddedEngine
from whet.rollout.policy_rollouts import PolicyRollouts
from whet.rollout.sync_check import SyncCheck
from whet.run.provenance import weights_digest
from whet.train.worker import ModelWorker

WORK = requests(prompts(), Sampling(max_tokens=6), group=2)


def same(got, want):
    """Whether all outputs are equal to the bit."""
    return got.keys() == want.keys() and all(
        got[i].tokens.tolist() == want[i].tokens.tolist() and got[i].logprobs.tolist() == want[i].logprobs.tolist()
        for i in want
    )


def moved(model):
    """Changes every weight in place, as an optimizer step does."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)


@pytest.mark.parametrize("form", FORMS)
def test_it_samples_from_the_old_weights_until_the_update_and_from_the_new_ones_after(form):
    model = build(gain=3.0)
    shared, own = EmbeddedEngine(model, **FORMS[form]), EmbeddedEngine(model, own_weights=True, **FORMS[form])
    assert (shared.caps.shared_weights, own.caps.shared_weights) == (True, False)
    before = run(shared, WORK)
    assert same(run(own, WORK), before)
    moved(model)
    shared.update_weights(1)
    after = run(shared, WORK)
    assert not same(after, before)
    assert same(run(own, WORK), before)
    own.update_weights(1, iter(model.named_parameters()))
    assert same(run(own, WORK), after) and own.version == 1
    assert not any(p.requires_grad for p in own._model.loaded.module.parameters())


def test_sequences_under_way_go_on_with_the_new_weights():
    model = build(gain=3.0)
    shared, own = EmbeddedEngine(model, max_batch=2), EmbeddedEngine(model, max_batch=2, own_weights=True)
    for engine in (shared, own):
        engine.submit(WORK)
        engine.step(timeout_s=0.0)
    moved(model)
    shared.update_weights(1)
    own.update_weights(1, iter(model.named_parameters()))
    ends = [{}, {}]
    for engine, done in zip((shared, own), ends):
        while outputs := engine.step():
            done |= {o.id: o for o in outputs}
    assert same(*ends) and {int(v) for o in ends[0].values() for v in o.versions} == {0, 1}


def test_updates_that_do_not_fit_are_refused_and_nothing_is_sampled_from_half_of_one():
    model = build(gain=3.0)
    engine = EmbeddedEngine(model, own_weights=True)
    want = run(engine, WORK)
    with pytest.raises(EngineError, match=r"of its own; call update_weights\(version, worker.named_weights\(\)\)"):
        engine.update_weights(1)
    assert same(run(engine, WORK), want)
    names = dict(model.named_parameters())
    first = next(iter(names))
    for given, said in (
        ({"other.weight": torch.zeros(2)}, "has no parameter 'other.weight'"),
        ({first: torch.zeros(2)}, rf"{first} is \(2,\), and \("),
        ({first: names[first]}, rf"no weights were given for .* and {len(names) - 2} others"),
    ):
        with pytest.raises(EngineError, match=said):
            engine.update_weights(1, iter(given.items()))
        engine.submit(WORK[:1])
        with pytest.raises(EngineError, match="failed half-way; give it all of them again"):
            engine.step()
        engine.abort([WORK[0].id])
    engine.update_weights(0, iter(names.items()))
    assert same(run(engine, WORK), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_five_updates_at_a_learning_rate_of_0_change_nothing(dtype):
    """A digest of the engine's tensors is that of the trainer's after each, and what it samples is the same."""
    worker = ModelWorker(load_model(build(gain=3.0)), optim=OptimConfig(lr=0.0, weight_decay=0.1), dtype=dtype)
    engine = EmbeddedEngine(worker.loaded, own_weights=True)
    before, digest = run(engine, WORK), weights_digest(worker.module)
    batch = forest(3, 4, piece=8, vocab=20)
    batch = batch.replace(weights=torch.ones(batch.num_tokens))
    for version in range(1, 6):
        worker.forward_backward(batch, lambda x: (x.logprobs, {}))
        worker.optim_step()
        engine.update_weights(version, worker.named_weights())
        assert weights_digest(engine._model.loaded.module) == weights_digest(worker.module) == digest
        assert same(run(engine, WORK), before) and engine.version == version


def test_an_engine_that_shares_weights_takes_none():
    model = build()
    with pytest.raises(EngineError, match="reads the trainer's own parameters"):
        EmbeddedEngine(model).update_weights(1, iter(model.named_parameters()))


class Own(EmbeddedEngine):
    """An engine with weights of its own, which can leave one of them as it is."""

    kept = None

    def __init__(self, *args, **options):
        super().__init__(*args, own_weights=True, **options)

    def update_weights(self, version, weights=None):
        old = {n: p.detach().clone() for n, p in self.named_weights()}
        super().update_weights(version, weights)
        if self.kept is not None:
            dict(self.named_weights())[self.kept].data.copy_(old[self.kept])


def test_a_check_of_each_sync_finds_a_tensor_that_was_not_updated():
    c = cluster(engine=Own, rollout={"sync_check_every_n_syncs": 2})
    sample = lambda: c.sample([prompt("2+2=")])
    gaps = []
    for _ in range(4):
        c.sync_weights()
        sample()
        gaps.append(c.pop_sync_gap())
    assert gaps[::2] == [None, None] and all(gap < 1e-5 for gap in gaps[1::2])
    moved(c.actor.module)
    c.engine.kept = "model.layers.0.mlp.up_proj.weight"
    c.sync_weights()
    sample()
    moved(c.actor.module)
    c.sync_weights()
    with pytest.raises(EngineError, match=r"differ from the trainer's by .*: model.layers.0.mlp.up_proj.weight differ"):
        sample()


class Pair(Ranks):
    """Two ranks, of which the other has sent another value of one tensor."""

    def all_gather(self, value):
        return [value, value | {"b": "other"}] if isinstance(value, dict) else [value, value]


def test_processes_that_send_other_weights_name_the_tensor():
    check, driver = SyncCheck(1, Pair()), SimpleNamespace(engine=EmbeddedEngine(build()))
    weights = {"a": torch.zeros(2), "b": torch.ones(2)}
    assert dict(check.watch(3, weights.items())) == weights
    said = r"rank 1 has another set of weights for its engine than rank 0: b [0-9a-f]+ and other"
    with pytest.raises(WhetError, match=said):
        check.finish(driver, None, None)


def test_an_engine_that_refuses_weights_leaves_no_process_alone_in_a_gather():
    policy, taken = SimpleNamespace(version=1), []
    policy.named_weights = lambda: (taken.append(name) or (name, torch.zeros(1)) for name in "abc")

    def refuse(version, weights):
        next(weights)
        raise EngineError("no room")

    engine = SimpleNamespace(caps=EmbeddedEngine.caps.__class__(), update_weights=refuse)
    with pytest.raises(EngineError, match="no room"):
        _ = PolicyRollouts(lambda: engine, policy).driver
    assert taken == ["a", "b", "c"]
