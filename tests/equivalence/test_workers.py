"""Every family through a worker: with the layers' other forwards, and with its own, the same gradients."""

import families
import pytest
from helpers import rounding

from whet.config import OptimConfig
from whet.models.load import load_model
from whet.ops import nll
from whet.train.worker import ModelWorker


def gradients(worker):
    """Of a batch's likelihood, by name."""
    batch = families.BATCH
    worker.forward_backward(batch.replace(weights=batch.mask.float()), nll)
    return families.gradients(worker.module)


@pytest.mark.parametrize("family", [*families.PACKABLE, *families.REFUSED])
def test_a_worker_trains_every_family_with_and_without_fast_layers(family):
    worker = ModelWorker(load_model(families.tiny(family)), optim=OptimConfig(lr=1e-3))
    got, worker.fast_layers = gradients(worker), None
    want = gradients(worker)
    # sums of at most 64 numbers, there and back, in either way of computing them
    limits = rounding(lambda: gradients(worker).values(), list(worker.module.parameters()), roundings=2 * 64)
    assert got.keys() == want.keys() and got
    for name, limit in zip(want, limits, strict=True):
        assert (got[name] - want[name]).abs().max() <= 2 * limit, name
