"""Runs commands as ranks of torchrun, and compares what two runs have written."""

import json
import os
import re
import sys

import pandas
import pytest
import torch
from processes import as_torchrun
from safetensors.torch import load_file

SIZE = re.compile(r" *(context_parallel_size|data_parallel_replicate_size|tensor_parallel_size): \d+\n")
"""The size of a mesh in a configuration."""


def run_commands(rank, size, folder, port, commands):
    """Runs commands of `whet` one after the other in a folder, as one of several ranks."""
    from whet.cli import commands as module
    from whet.cli import main

    as_torchrun(rank, size, port)
    os.chdir(folder)
    module.plot_curves = lambda *_: None
    for words in commands:
        assert main(words) == 0, words


def run_command(rank, size, folder, port, words, more):
    """Runs a command as one of several ranks, and exits with its status.

    Args: folder: of all ranks; a rank runs in its folder rank-<rank> if that has one. more: words of single ranks.
    """
    from whet.cli import main

    as_torchrun(rank, size, port)
    sys.stderr = open(folder / f"stderr-{rank}", "w", buffering=1)
    os.chdir(own if (own := folder / f"rank-{rank}").is_dir() else folder)
    os._exit(main([*words, *more.get(rank, [])]))


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def files_of(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != "curves.png"}


def assert_same_run(one, two, sizes=False):
    """That two run folders differ in times alone, and by rounding in weights and metrics.

    Args: sizes: they may also differ in the sizes of the mesh.
    """
    assert files_of(one) == files_of(two)
    for name in sorted(files_of(one)):
        a, b = one / name, two / name
        if name.endswith(".safetensors"):
            assert_same_tensors(load_file(a), load_file(b), name)
        elif name.endswith(".parquet"):
            assert_same_completions(pandas.read_parquet(a), pandas.read_parquet(b))
        elif name.endswith("environment.json"):
            a, b = (json.loads(p.read_text()) for p in (a, b))
            assert a.keys() == b.keys() and a["rollout"] == b["rollout"] if "rollout" in a else True
        elif name.endswith("state.pt"):
            assert_same_state(torch.load(a, weights_only=True), torch.load(b, weights_only=True), name)
        elif name.endswith((".yaml", "config.json", "adapter_config.json", "tokenizer.json", "latest", "best")):
            text, other = a.read_text().replace(str(one.parent), str(two.parent)), b.read_text()
            assert (SIZE.sub("", text) == SIZE.sub("", other)) if sizes else (text == other), name
    assert_same_rows(rows_of(one), rows_of(two))


def assert_same_tensors(a, b, name=""):
    assert a.keys() == b.keys()
    for key, tensor in a.items():
        assert tensor.dtype == b[key].dtype and tensor.shape == b[key].shape
        assert (tensor - b[key]).abs().max() <= 1e-5 * max(float(tensor.abs().max()), 1e-3), (name, key)


def assert_same_state(a, b, name):
    """Plain containers of a checkpoint, whose numbers may differ by rounding."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), name
        for key in a:
            assert_same_state(a[key], b[key], f"{name}.{key}")
    elif isinstance(a, float):
        assert b == pytest.approx(a, rel=1e-5, nan_ok=True), name
    elif isinstance(a, torch.Tensor):
        assert torch.allclose(a, b), name
    else:
        assert a == b, name


def assert_same_rows(a, b):
    waits = {"time/rollout/tool_wait", "perf/rank_imbalance"}  # there, if the clock has seen one; of several processes
    assert [row.keys() - waits for row in a] == [row.keys() - waits for row in b]
    for row, other in zip(a, b, strict=True):
        for name, value in row.items():
            if not name.startswith(("time/", "perf/", "rollout/mean_batch_size")):  # each rank has an engine
                assert other[name] == (value if value is None or isinstance(value, str) else
                                       pytest.approx(value, rel=1e-4, abs=2e-5)), name  # fmt: skip


def assert_same_completions(a, b):
    assert list(a.columns) == list(b.columns) and len(a) == len(b)
    for name in a.columns.drop("seconds", errors="ignore"):  # of the clock
        for x, y in zip(a[name], b[name], strict=True):
            if name in ("logprobs", "trainer_logprobs", "entropy", "advantages"):
                assert (x is None) == (y is None) and (x is None or x == pytest.approx(y, abs=1e-4, nan_ok=True)), name
            elif isinstance(x, float):
                assert x == pytest.approx(y, rel=1e-4, abs=1e-6, nan_ok=True), name
            else:
                assert str(x) == str(y), name
