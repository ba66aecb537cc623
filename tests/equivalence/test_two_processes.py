"""Two real processes, each with a part of the model, make the update of one."""

import pytest
import torch
from helpers import gap
from processes import needs_gloo, start, wait
from two_processes import eight_bit, moments, one_of, one_update, resume_eight_bit

ROUNDING = 8 * 2 * 64**0.5 * torch.finfo(torch.float32).eps
"""Of logprobs of up to 8, sums of 64 numbers: metrics that would be 0 are differences of such."""

TIED = "lm_head", "model.embed_tokens"
"""The name of a shared tensor, and the other name that it has."""


@needs_gloo
@pytest.mark.timeout(200)
def test_two_processes_make_the_update_of_one(tmp_path):
    processes = start(2, one_of, tmp_path, 3)
    try:
        one = one_update(3, tmp_path / "one")
    finally:
        wait(processes, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    (number, _), *_ = one["passes"]
    assert number % 2 == 1 and number > 1, "a rank would have a pass less, were they not cut again"
    assert [counts for _, counts in ranks[1]["passes"]] == [[True] * (number // 2 + 1)]
    for found in (one, *ranks):
        assert found["layers"] == one["layers"] > 0 and found["plain"] == {True}, "layers are as fast as in one process"
    for found in ranks:
        for name, gradient in one["gradients"].items():
            limit = 1e-5 * gradient.abs().max()
            assert (found["gradients"][name] - gradient).abs().max() <= limit > 0, name
        assert gap(found["weights"], one["weights"]) <= 1e-6
        assert found["exported"].keys() == one["exported"].keys()
        assert all(w.equal(found["weights"][name].bfloat16()) for name, w in found["exported"].items())
        for sent in found["sent"]:  # what an engine with weights of its own gets
            assert sent and all(
                type(w) is torch.Tensor and w.equal(found["weights"][n.replace(*TIED)]) for n, w in sent.items()
            )
        assert found["row"].keys() == one["row"].keys()
        for name, number in one["row"].items():
            assert found["row"][name] == pytest.approx(number, rel=1e-4, abs=ROUNDING), name
    assert ranks[0]["row"] == ranks[1]["row"]
    assert one["imbalance"] is None and 1 < ranks[0]["imbalance"] == ranks[1]["imbalance"] < 1.2
    assert all(0 < len(found["rewarded"]) < 9 for found in ranks)
    assert [ids for found in ranks for ids in found["rewarded"]] == one["rewarded"] and len(one["rewarded"]) == 9


@needs_gloo
@pytest.mark.timeout(200)
def test_moments_of_8_bits_are_resumed_by_two_processes_and_by_one(tmp_path):
    """They are quantised in other blocks then, so they are rounded again; those of a shard that is no whole blocks are
    not quantised.
    """
    pytest.importorskip("torchao", reason="needs the extra quant")
    torch.compiler.set_stance("force_eager")
    try:
        one = eight_bit(None, 3)
        torch.save(one.save(tmp_path / "one.safetensors"), tmp_path / "one.pt")
        wait(start(2, resume_eight_bit, tmp_path), tmp_path)
        again = eight_bit(None, 0)
        again.load(tmp_path / "two.safetensors", torch.load(tmp_path / "two.pt"))
    finally:
        torch.compiler.set_stance("default")
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    (before, _), (resumed, quantised) = moments(one), moments(again)
    assert quantised["rows.exp_avg"] and not quantised["uneven.exp_avg"]
    assert [r["before"][1]["uneven.exp_avg"] for r in ranks] == [False, True]
    for found, kinds in [(resumed, None), *(r[name] for r in ranks for name in ("before", "two", "one"))]:
        assert kinds in (None, ranks[0]["before"][1], ranks[1]["before"][1])
        for name, moment in before.items():
            assert (found[name] - moment).abs().max() <= 0.05 * moment.abs().max() > 0, name
