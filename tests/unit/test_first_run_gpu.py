"""The script for the first minutes on a GPU, on a CPU: its checks run there too, and show less."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import needs_gloo

FOLDER = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("first_run_gpu")
    for name in ("first_run_gpu", "tasks"):
        sys.modules.pop(name, None)


@pytest.fixture
def started(script, monkeypatch):
    """Processes that the script would start."""
    commands = []
    done = subprocess.CompletedProcess([], 0, stdout="", stderr="")
    monkeypatch.setattr(script.subprocess, "run", lambda command, **_: (commands.append(command), done)[1])
    return commands


def test_without_a_gpu_it_says_so_and_ends_with_2(script, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_checks_are_ordered_by_risk_and_may_be_chosen(script, capsys):
    names = list(script.CHECKS)
    assert names[:2] == ["captures", "engines"] and names.index("flex") < names.index("tokens") < names.index("update")
    assert script.main(["--list"]) == 0
    assert capsys.readouterr().out.count("\n") == len(names)
    with pytest.raises(SystemExit):
        script.arguments(["--checks", "captures,speed"])
    assert "--checks speed: known are captures" in capsys.readouterr().err


def test_a_check_that_fails_leaves_the_others_alone(script, monkeypatch, started):
    def wrong(device):
        raise ValueError("bad tokens")

    def skipped(device):
        raise script.SkipError("one device")

    checks = {"wrong": wrong, "skipped": skipped, "right": lambda device: {"bytes": 3}}
    monkeypatch.setattr(script, "CHECKS", checks)
    said = []
    assert script.run(list(checks), CPU, lambda row: said.append(json.loads(json.dumps(row)))) == 1
    assert [row["ok"] for row in said] == [False, None, True] and started == []
    assert said[0]["error"] == "ValueError: bad tokens" and said[0]["where"].startswith("test_first_run_gpu.py:")
    assert said[1]["skipped"] == "one device" and said[2]["found"] == {"bytes": 3}
    assert script.run(["right", "skipped"], CPU, said.append) == 0


def test_where_the_device_is_lost_the_rest_runs_in_a_new_process(script, monkeypatch, started):
    def illegal(device):
        raise torch.AcceleratorError("illegal memory access")

    monkeypatch.setattr(script, "CHECKS", {"illegal": illegal, "a": lambda d: {}, "b": lambda d: {}})
    monkeypatch.setattr(script, "lost", lambda device: True)
    said = []
    assert script.run(["illegal", "a", "b"], CPU, said.append) == 1
    assert len(said) == 1 and started == [[sys.executable, script.__file__, "--checks", "a,b"]]
    assert script.run(["illegal"], CPU, said.append) == 1 and len(started) == 1


def test_the_checks_themselves_pass_on_a_cpu(script, started, monkeypatch):
    monkeypatch.setattr(script, "FAMILIES", ("Mistral",))
    monkeypatch.setattr(script, "MAX_TOKENS", 4)
    small = {"shape": "tiny", "batch": 2, "most": 4}
    monkeypatch.setitem(script.CHECKS, "update", lambda d: script.update(d, **small))
    monkeypatch.setitem(script.CHECKS, "recipe", lambda d: script.recipe(d, **small))
    said = []
    script.run([name for name in script.CHECKS if name not in ("flex", "rest", "processes")], CPU, said.append)
    assert [row["check"] for row in said if row["ok"] is False] == [], said
    skipped = {row["check"] for row in said if row["ok"] is None}
    assert skipped >= {"second_device", "varlen", "vllm", "shared", "compiled"}
    found = {row["check"]: row.get("found") for row in said}
    assert any("microbatch" in line for line in found["recipe"]["chosen"])
    assert found["kept"]["captures"] == {"first": 0, "again": 0, "after an update": 0}
    assert found["tokens"]["Mistral"] == "48 of 48 completions are equal" and found["kernels"]["steps"] > 4
    assert found["adapters"].keys() >= {"product", "layer", "gradient 2"}
    assert script._dtype(torch.device("cuda")).itemsize == 2  # fp32 steps are not captured
    assert any("captures,engines,tokens" in command for command in started)  # in processes of their own


def test_flex_that_refuses_a_usual_model_is_a_failure(script):
    row = script.check("flex", CPU)
    assert row["ok"] is False and "no backward pass on cpu" in row["error"]


def test_compiled_functions_are_compared_with_torchs(script, monkeypatch):
    from whet.models import compiled

    monkeypatch.setattr(compiled, "DEVICE", "cpu")
    monkeypatch.setattr(compiled, "MIN_ROWS", 4)
    parts = {"gate_grads (3072,)", "rotated (8, 128)", "gated (3072,)"}
    for change in (lambda y: y, lambda y: y + 1):

        def kernel(case, change=change):
            return lambda *x: change(case.function(*x)) if case.function is compiled.gated else case.function(*x)

        monkeypatch.setattr(compiled, "_kernel", kernel)
        monkeypatch.setitem(script.CHECKS, "compiled", lambda d: script.compiled(d, rows=6))
        row = script.check("compiled", CPU)
        assert "from torch's" in row["error"] if change(0) else parts < row["found"].keys(), row
    monkeypatch.setattr(compiled, "_kernel", lambda case: None)
    assert "is not compiled" in script.check("compiled", CPU)["error"]


def test_varlen_is_compared_with_its_formula(script, monkeypatch):
    import torch.nn.attention.varlen as module

    def attend(q, k, v, cu_q, cu_k, max_q, max_k, *, return_aux, scale, enable_gqa, **options):
        return script._segments(q, k, v, torch.diff(cu_q).tolist(), options)

    monkeypatch.setattr(module, "varlen_attn", attend)
    row = script.check("varlen", CPU)
    assert row["ok"] and len(row["found"]["off"]) == 12 and not any(row["found"]["off"]["keys cut off, 64"].values())
    monkeypatch.setattr(module, "varlen_attn", lambda *a, **o: tuple(x + 0.1 for x in attend(*a, **o)))
    assert "differs from the formula" in script.check("varlen", CPU)["error"]


class Rounded(torch.autograd.Function):
    """Attention of one segment, [H T D] and [KV S D], that rounds to bfloat16 where flash attention does."""

    @staticmethod
    def forward(ctx, q, k, v, seen):
        share = len(q) // len(k)
        keys, values = (x.repeat_interleave(share, 0).float() for x in (k, v))
        p = (q.float() @ keys.mT * 0.1).masked_fill(~seen, -torch.inf).softmax(-1)
        out = (p.bfloat16().float() @ values).bfloat16()
        ctx.save_for_backward(q, keys, values, p, out)
        ctx.share = share
        return out

    @staticmethod
    def backward(ctx, grad):
        q, keys, values, p, out = ctx.saved_tensors
        grad, sums = grad.float(), (grad.float() * out.float()).sum(-1, keepdim=True)
        ds = (p * (grad @ values.mT - sums)).bfloat16().float()
        of_heads = [(0.1 * ds.mT @ q.float()).bfloat16(), (p.bfloat16().float().mT @ grad).bfloat16()]
        dk, dv = (x.unflatten(0, (-1, ctx.share)).sum(1) for x in of_heads)
        return (0.1 * ds @ keys).bfloat16(), dk, dv, None


def test_a_kernel_that_rounds_as_flash_attention_does_is_taken(script, monkeypatch):
    import torch.nn.attention.varlen as module

    def attend(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, seqused_k=None, **options):
        outs, (left, right) = [], window_size
        used = torch.diff(cu_k).tolist() if seqused_k is None else seqused_k.tolist()
        for own, keys in zip(torch.arange(len(q)).split(torch.diff(cu_q).tolist()), used, strict=True):
            row, column = torch.arange(len(own))[:, None], torch.arange(keys)
            seen = (column >= row - left if left >= 0 else column >= 0) & (column <= row if right == 0 else column >= 0)
            a, b, c = (x[own].transpose(0, 1) for x in (q, k, v))
            outs.append(Rounded.apply(a, b[:, :keys], c[:, :keys], seen).transpose(0, 1))
        options = {"window_size": window_size, **({} if seqused_k is None else {"seqused_k": seqused_k})}
        return torch.cat(outs), script._segments(q, k, v, torch.diff(cu_q).tolist(), options)[1]

    monkeypatch.setattr(module, "varlen_attn", attend)
    monkeypatch.setattr(script, "_dtype", lambda device: torch.bfloat16)
    row = script.check("varlen", CPU)
    assert row["ok"] and 1e-3 < row["found"]["off"]["causal, 256"]["dv"] < 1e-2, row


@needs_gloo
@pytest.mark.full
@pytest.mark.timeout(500)
def test_two_processes_train_and_end_soon_where_one_fails(script, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    row = script.check("processes", CPU)
    assert row["ok"] and row["found"]["seconds"].keys() == {"lengths", "lengths_and_fault"}, row
