"""Every family through a worker: with the layers' other forwards, and with its own, the same gradients."""

import families
import pytest
from helpers import gap

from whet.config import OptimConfig
from whet.models.load import load_model
from whet.ops import nll
from whet.train.worker import ModelWorker


def gradients(family, *, fast):
    worker = ModelWorker(load_model(families.tiny(family)), optim=OptimConfig(lr=1e-3))
    if not fast:
        worker.fast_layers = None
    batch = families.BATCH
    worker.forward_backward(batch.replace(weights=batch.mask.float()), nll)
    return {n: p.grad.clone() for n, p in worker.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", [*families.PACKABLE, *families.REFUSED])
def test_a_worker_trains_every_family_with_and_without_fast_layers(family):
    got, want = (gradients(family, fast=fast) for fast in (True, False))
    assert got and gap(got, want) <= 2e-5 * max(g.abs().max() for g in want.values())
