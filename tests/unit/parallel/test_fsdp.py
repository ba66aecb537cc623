"""Models that several processes refuse before they shard them."""

import pytest
import torch
from helpers import tiny_model

from whet.config import Role, RoleConfig, SupervisedTrainingConfig
from whet.errors import ConfigError
from whet.parallel.fsdp import FSDPPlacement
from whet.train.role_workers import RoleWorkers


@pytest.mark.parametrize("own, dtype, named", [
    (torch.float16, None, "not in torch.float16"),
    (torch.float32, torch.float16, "not in torch.float16"),
    (torch.bfloat16, None, "not in torch.bfloat16, torch.float32"),
    (torch.uint8, torch.bfloat16, "not in torch.uint8"),
])  # fmt: skip
def test_a_dtype_other_than_float32_or_bfloat16_and_two_at_once_are_refused(own, dtype, named):
    model = tiny_model().requires_grad_(False)
    changed = model.parameters() if own == torch.float16 else [model.model.norm.weight]
    for p in changed:
        p.data = p.data.to(own)
    with pytest.raises(ConfigError, match=f"{named}; set actor.dtype=bfloat16 or float32"):
        FSDPPlacement(None, None).prepare(model, dtype)


def test_4_bit_weights_are_refused_before_they_are_read():
    workers = RoleWorkers(SupervisedTrainingConfig())
    workers.ranks.size = 2
    with pytest.raises(ConfigError, match="quantization=nf4 does not run on 2 processes: FSDP shards numbers"):
        workers.load(Role.TEACHER, RoleConfig(model="nowhere", quantization="nf4"))
