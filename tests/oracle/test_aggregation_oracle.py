"""Token weights against loops over rows, as the peers define their aggregations on a padded [B, T] batch."""

import random

import pytest
import torch

from whet.ops import LOSS_AGG_MODES, aggregate, token_weights


def naive(mode: str, losses: list[list[float]], masks: list[list[bool]], norm: float | None) -> float:
    sums = [sum(v for v, m in zip(row, kept, strict=True) if m) for row, kept in zip(losses, masks, strict=True)]
    counts = [sum(kept) for kept in masks]
    rows = max(sum(c > 0 for c in counts), 1)
    if mode == "token-mean":
        return sum(sums) / max(sum(counts), 1)
    if mode == "sequence-mean-token-mean":
        return sum(s / max(c, 1) for s, c in zip(sums, counts, strict=True)) / rows
    if mode == "sequence-mean-token-scale":
        return sum(s / norm for s in sums) / rows
    if mode == "seq-mean-token-sum":
        return sum(sums) / rows
    if mode == "prompt-mean-token-mean":  # two rows each
        pairs = [(sum(sums[i : i + 2]), sum(counts[i : i + 2])) for i in range(0, len(sums), 2)]
        return sum(s / max(c, 1) for s, c in pairs) / max(sum(c > 0 for _, c in pairs), 1)
    return sum(sums) / (rows if norm is None else norm)


@pytest.mark.parametrize("mode", sorted(LOSS_AGG_MODES))
@pytest.mark.parametrize("seed", range(5))
def test_weights_equal_the_loop(mode, seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 12) for _ in range(8)]
    losses = [[rng.gauss(0, 1) for _ in range(n)] for n in lengths]
    masks = [[rng.random() < 0.7 for _ in range(n)] for n in lengths]
    masks[3], masks[6], masks[7] = ([False] * lengths[i] for i in (3, 6, 7))
    flat = torch.tensor([v for row in losses for v in row], dtype=torch.float64)
    mask = torch.tensor([m for row in masks for m in row])
    trajectory = torch.repeat_interleave(torch.arange(8), torch.tensor(lengths))
    for norm in (12.0, None):
        if norm is None and mode == "sequence-mean-token-scale":
            continue
        got = aggregate(flat, token_weights(mask, trajectory, mode, norm=norm, prompt=trajectory // 2)).item()
        assert got == pytest.approx(naive(mode, losses, masks, norm), rel=1e-12, abs=1e-12)
