import pytest
import torch
from helpers import random_batch

from whet.packing import micro_batch
from whet.packing.micro_batch_planner import plan_micro_batches
from whet.util.transfer import ALIGNMENT, _pack, _starts, _unpack, to_device, to_host

MIXED = [
    torch.tensor([True, False, True]),
    torch.arange(6).view(2, 3).t(),
    torch.tensor(0.5, dtype=torch.float64),
    torch.randn(5).bfloat16(),
    torch.zeros(0, dtype=torch.int32),
    torch.tensor([7, 8], dtype=torch.int32),
]


def test_packed_tensors_come_out_as_they_went_in():
    for got, want in zip(_unpack(_pack(MIXED, pinned=False), MIXED), MIXED, strict=True):
        assert torch.equal(got, want) and got.dtype == want.dtype
    assert all(start % ALIGNMENT == 0 for start in _starts(MIXED))


def test_shapes_and_dtypes_reach_another_device_and_a_gradient_does_not():
    moved = to_device([*MIXED, torch.ones(2, requires_grad=True)], "meta")
    assert [(x.shape, x.dtype, x.device.type) for x in moved[:-1]] == [(x.shape, x.dtype, "meta") for x in MIXED]
    assert not moved[-1].requires_grad and len({x.untyped_storage()._cdata for x in moved}) == 1


def test_what_is_on_the_device_stays_and_nothing_is_copied_on_the_host():
    there = torch.ones(2, device="meta")
    assert to_device([there], "meta")[0] is there
    assert all(a is b for a, b in zip(to_device(MIXED, "cpu"), MIXED, strict=True))
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(to_host(MIXED), MIXED, strict=True))


def test_copies_may_be_trained_on_after_a_pass_in_inference_mode():
    with torch.inference_mode():
        moved = to_device([torch.ones(2)], "meta")
    assert not moved[0].is_inference()


@pytest.mark.parametrize("attention", ["auto", "plain", "flex"])
def test_a_moved_micro_batch_has_all_that_its_attention_reads(monkeypatch, attention):
    batch = random_batch((5, [4, 6]), (7, [3, 3]))
    (micro,) = plan_micro_batches(batch, max_tokens=64, packable=True, attention=attention)
    copied = []
    monkeypatch.setattr(micro_batch, "to_device", lambda xs, device: [(copied.append(x), x.clone())[1] for x in xs])
    moved = micro.to("meta")
    assert moved.on_host is micro and moved.layout.position_ids is not micro.layout.position_ids
    for name in ("input_ids", "targets", "unit_of"):
        assert torch.equal(getattr(moved, name), getattr(micro, name))
    made = vars(moved.layout)
    assert ("bucket_row" in made, "_flex" in made) == (attention != "flex", attention != "plain")
    if attention == "plain":
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, micro.num_tokens, 8) for _ in range(3))
        how = {"scale": 0.3, "window": 4, "softcap": None, "sinks": None}
        assert torch.equal(moved.layout.attend(0, q, k, v, **how), micro.layout.attend(0, q, k, v, **how))
        assert moved.layout.bucket_row._keys is not micro.layout.bucket_row._keys
