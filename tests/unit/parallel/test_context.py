"""The parts of a pass that the processes of context parallelism run."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from helpers import forest, tiny_model

from whet.config import SupervisedTrainingConfig
from whet.errors import ConfigError
from whet.models.forward import _turn_positions
from whet.models.load import load_model
from whet.packing.micro_batch_planner import plan_micro_batches
from whet.packing.path_keys import path_keys
from whet.parallel.context import kv_repeats, take_share
from whet.train.role_workers import RoleWorkers


@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_shares_of_a_pass_make_the_whole(size):
    """Keys of dropout and positions in turns do not depend on where a row is cut."""
    for micro in plan_micro_batches(forest(5, 9), max_tokens=200, at_end=True):
        groups = [SimpleNamespace(rank=lambda r=r: r, size=lambda: size) for r in range(size)]
        shares = [take_share(micro, group) for group in groups]
        assert len({share.num_tokens for share in shares}) == 1
        for of_row in (lambda m: m.input_ids, lambda m: m.layout.position_ids, path_keys):
            joined = torch.cat([of_row(share) for share in shares], 1)
            assert joined[:, : micro.num_tokens].equal(of_row(micro)) and joined.shape[1] < micro.num_tokens + size
        at = torch.cat([share.share.targets for share in shares])
        assert at.sort().values.tolist() == [*range(len(micro.targets))]
        for of_target in (lambda m: m.targets, lambda m: m.sequence, _turn_positions):
            assert torch.cat([of_target(share) for share in shares]).equal(of_target(micro)[at])
        place = lambda r, share, index: index + r * share.num_tokens
        found = [place(r, share, share.hidden_index) for r, share in enumerate(shares)]
        assert torch.cat(found).equal(micro.hidden_index[at])
        found = [place(r, share, share.last_index) for r, share in enumerate(shares)]
        assert torch.cat(found).equal(micro.last_index[torch.cat([share.share.sequences for share in shares])])


def test_each_process_has_the_kv_heads_of_its_query_heads():
    for kv, group, size in itertools.product((1, 2, 3, 4, 6), (1, 2, 3, 4, 6), (1, 2, 3, 4, 6, 12)):
        heads = kv * group
        if heads % size:
            continue
        repeated = [head for head in range(kv) for _ in range(kv_repeats(kv, size))]
        assert len(repeated) % size == 0
        for rank in range(size):
            own = repeated[rank * len(repeated) // size : (rank + 1) * len(repeated) // size]
            queries = range(rank * heads // size, (rank + 1) * heads // size)
            assert [own[i // (len(queries) // len(own))] for i in range(len(queries))] == [h // group for h in queries]


@pytest.mark.parametrize("size, context, changes, message", [
    (3, 2, {}, "context_parallel_size=2 does not divide the number of processes, 3"),
    (3, 3, {}, r"has 4 attention heads, which trainer.context_parallel_size=3 does not divide.*\(1, 2, 4\)"),
    (2, 2, {"packable": False, "unpackable_reasons": ("no layout",)}, "trains padded: no layout; set it to 1"),
])  # fmt: skip
def test_models_and_numbers_that_do_not_fit_are_refused(monkeypatch, size, context, changes, message):
    monkeypatch.setattr("whet.train.role_workers.join_processes", lambda _: SimpleNamespace(size=size))
    loaded = load_model(tiny_model())
    for name, value in changes.items():
        object.__setattr__(loaded, name, value)
    with pytest.raises(ConfigError, match=message):
        RoleWorkers(SupervisedTrainingConfig(context_parallel_size=context))._placement(loaded)
