"""Processes that divide passes, their tokens and the shards have the gradients of one process."""

import pytest
import torch
from helpers import full
from mesh_programs import models_of, on_meshes, results
from processes import needs_gloo, start, wait

from whet.parallel.placement import Placement


@needs_gloo
@pytest.mark.timeout(400)
@pytest.mark.parametrize("size, meshes, every", [
    (2, [(2, 1, 1), (1, 2, 1), (1, 1, 2)], False),  # FSDP alone is that of test_two_processes.py
    full(2, [(1, 1, 2)], True),
    full(2, [(1, 1, 1), (2, 1, 1), (1, 2, 1)], True),
    full(4, [(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 1, 1)], True),
    full(4, [(1, 1, 2), (2, 1, 2), (1, 2, 2)], True),
    full(4, [(1, 1, 4)], True),
])  # fmt: skip
def test_gradients_are_those_of_one_process_and_context_parallelism_divides_activations(tmp_path, size, meshes, every):
    """Each mesh is (context_parallel_size, data_parallel_replicate_size, tensor_parallel_size)."""
    models = {name: model for mesh in meshes for name, model in models_of(mesh, every).items()}
    processes = start(size, on_meshes, tmp_path, meshes, every)
    try:
        one = results(Placement, every, models)
    finally:
        wait(processes, tmp_path, 300)
    peaks = {}
    for mesh in meshes:
        for rank in range(size):
            found, peaks[mesh, rank] = torch.load(tmp_path / f"{rank}-{'-'.join(map(str, mesh))}.pt")
            assert {*models_of(mesh, every)} == {name.split(", ")[0] for name in found if "," in name}
            for name, tensor in found.items():
                # a bias of keys moves all scores of a query nearly alike, so the terms of its gradient cancel; the
                # gradient of the weight shows their size
                limit = 1e-5 * one[name.replace("k_proj.bias", "k_proj.weight")].abs().max()
                assert (tensor - one[name]).abs().max() <= limit > 0, (mesh, rank, name)
    alone = next(mesh for mesh in meshes if mesh[0] == 1)
    for mesh in meshes:
        context, share = mesh[0], max(peaks[mesh, rank] for rank in range(size)) / peaks[alone, 0]
        assert share <= 1 / context + 0.1, f"{context} processes have {share:.2f} of the activations each"
