"""A token's key depends on the tokens of its path only."""

import pytest
from helpers import forest, seen

from whet.packing.micro_batch_planner import plan_micro_batches
from whet.packing.path_keys import path_keys


@pytest.mark.parametrize("options", [{"packable": True}, {"packable": False}, {"packable": True, "max_sequences": 1}])
def test_tokens_have_one_key_exactly_where_their_paths_are_equal(options):
    batch = forest(3, 12)
    by_path = {}
    for choice in ({"packable": True}, options):
        for micro in plan_micro_batches(batch, max_tokens=400, **choice):
            keys = path_keys(micro).flatten()
            for target, place in enumerate(micro.hidden_index.tolist()):
                path = tuple(seen(micro, target))
                assert by_path.setdefault(path, int(keys[place])) == int(keys[place])
    assert len(set(by_path.values())) == len(by_path) > 50
