"""Processes that divide a model's matrices draw the tokens of one process, each with its part of weights and KV."""

from itertools import takewhile

import pytest
import torch
from helpers import full
from processes import needs_gloo, start, wait
from rollout_programs import MODELS, sample_together, sampled

ROUNDINGS = 22
"""Results that are rounded on the way to a logprob: of some ten operations in each of two layers, and two more."""


def assert_same_draws(found, expected, name):
    """The same tokens, and logprobs to rounding; in bf16 up to the first draw that rounding has changed."""
    if name != "bf16":
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        for (_, a), (_, b) in zip(found, expected, strict=True):
            assert a == pytest.approx(b, abs=1e-4)
        return
    same = total = 0
    for (tokens, a), (others, b) in zip(found, expected, strict=True):
        n = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(tokens, others))))
        limit = torch.finfo(torch.bfloat16).eps * ROUNDINGS**0.5 * max(map(abs, b))
        assert a[:n] == pytest.approx(b[:n], abs=limit)
        same, total = same + n, total + len(others)
    assert same > total / 3  # each of 50 likely tokens has a boundary that a draw may lie near


@needs_gloo
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size, tensor, names", [
    (2, 2, ["fused"]),
    full(2, 2, ["bf16"]),
    full(2, 2, ["one KV head", "module", "adapter"]),
    full(4, 2, ["fused", "adapter"]),
    full(4, 4, ["fused"]),
])  # fmt: skip
def test_processes_that_divide_matrices_draw_the_tokens_of_one(tmp_path, size, tensor, names):
    processes = start(size, sample_together, tmp_path, names, tensor)
    try:
        one = {name: sampled(MODELS[name]()) for name in names}
    finally:
        wait(processes, tmp_path, 200)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for name in names:
        calls = []
        for rank, found in enumerate(ranks):
            own, alone = found[name], one[name]
            assert_same_draws(own["drawn"], alone["drawn"], name)
            assert name == "bf16" or own["again"] == alone["again"]  # after an error in the middle of a rollout
            assert own["backbone"].split()[0] == ("module" if name == "module" else "fused")
            assert "the tool is broken" in alone["error"]  # and on the rank that runs the tools
            assert (f" of {size} failed: RuntimeError" if rank % tensor else "the tool is broken") in own["error"]
            calls += own["calls"]
            if rank % tensor:
                assert not own["calls"]
            heads = 1 if name == "one KV head" else 2
            if size == tensor and name != "bf16":  # the same requests on each, and the same lengths
                assert own["kv"] == alone["kv"] / min(tensor, heads)
            outside = sum(p.nbytes for n, p in MODELS[name]().named_parameters() if ".layers." not in n)
            assert own["weights"] < outside + 0.8 * (alone["weights"] - outside)
        assert sorted(calls) == alone["calls"]  # each once
