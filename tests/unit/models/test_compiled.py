"""Gates and rotary embeddings in one kernel: torch's numbers, any number of rows, its kernels where it fails."""

import functools
import logging

import pytest
import torch
from torch._inductor import metrics
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from whet.models import compiled, fast_layers, rotary

CONTEXTS = {"full": None, "selective": lambda: create_selective_checkpoint_contexts([torch.ops.aten.mm.default])}
ROUNDS_AS_TORCH = torch.__version__ >= "2.13"
"""Before, the compiler's option has no effect in C++."""
ALL = ["gate_grads", "gate_grads_and_product", "gated", "rotated", "rotated"]
"""The functions; queries and keys have other numbers of heads."""


@pytest.fixture
def compile_as(monkeypatch, caplog):
    """Runs what `compiler` makes of a case, on the CPU without its native kernels."""

    def use(compiler):
        monkeypatch.setattr(fast_layers, "_native", lambda *tensors: None)
        monkeypatch.setattr(compiled, "DEVICE", "cpu")
        monkeypatch.setattr(compiled, "MIN_ROWS", 16)
        monkeypatch.setattr(compiled, "_FAILED", set())
        monkeypatch.setattr(compiled, "_compile", compiler)
        monkeypatch.setattr(compiled, "_kernel", functools.cache(compiled._kernel.__wrapped__))

    caplog.set_level(logging.INFO, "whet")
    return use


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "whet"]


def passes(rows, dtype=torch.bfloat16, checkpointing=None):
    """Outputs and gradients of a gate with and without its down projection, and of a rotary embedding."""
    torch.manual_seed(rows)
    draw = lambda *shape: torch.randn(shape).to(dtype)
    heads = lambda count: draw(1, rows, count, 8).transpose(1, 2)
    cos, sin = draw(1, rows, 8), draw(1, rows, 8)
    inputs = [x.requires_grad_() for x in (draw(1, rows, 48), draw(1, rows, 48), draw(32, 48), heads(4), heads(2))]

    def run(gate, up, weight, q, k):
        products = fast_layers._Gated.apply(gate, up, weight, None), fast_layers._GatedProduct.apply(gate, up)
        return *products, *rotary.rotate(q, k, cos, sin)

    options = {"context_fn": CONTEXTS[checkpointing]} if checkpointing == "selective" else {}
    outputs = checkpoint(run, *inputs, use_reentrant=False, **options) if checkpointing else run(*inputs)
    grads = draw(1, rows, 32), draw(1, rows, 48), heads(4), heads(2)
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, inputs, grads)]


def plain(*args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "DEVICE", "none")
        return passes(*args)


def near(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert a.stride() == b.stride() and (a != b).float().mean() < (0.01 if ROUNDS_AS_TORCH else 1)
        assert (a - b).abs().max() <= (2 if ROUNDS_AS_TORCH else 4) * torch.finfo(b.dtype).eps * b.abs().max()


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_number_of_rows_has_torchs_numbers_from_what_is_compiled_once(dtype, compile_as, caplog, monkeypatch):
    monkeypatch.setitem(compiled.OPTIONS, "fx_graph_cache", False)
    with FakeTensorMode():  # in a CUDA build without a device, what a first thread registers ends with that thread
        pass
    loops = {}

    def compiler(case):
        metrics.reset()
        run = compiled_by(case)
        loops[case.function] = metrics.generated_kernel_count
        return run

    compiled_by = compiled._compile
    compile_as(compiler)
    for rows in (40, 16, 17, 48, 640):
        wanted = plain(rows, dtype)
        for checkpointing in (None, *CONTEXTS):
            near(passes(rows, dtype, checkpointing), wanted)
    assert sorted(line.split()[0] for line in said(caplog)) == ALL
    assert all("compiled to one kernel" in line for line in said(caplog))
    gates = compiled.gated, compiled.gate_grads, compiled.gate_grads_and_product
    assert [loops[gate] for gate in gates] == [
        1,
        1,
        1,
    ]  # in C++ the halves of `rotated` are copied in loops of their own


def test_calls_with_enough_rows_in_order_run_it_to_the_bit(compile_as, caplog, monkeypatch):
    calls = []
    compile_as(lambda case: lambda *rows: calls.append((case.function.__name__, len(rows[0]))) or case.function(*rows))
    for actual, expected in zip(passes(40), plain(40), strict=True):
        assert actual.equal(expected) and actual.stride() == expected.stride()
    assert sorted(name for name, rows in calls if rows == 40) == sorted([*ALL, "gated", "rotated", "rotated"])
    assert len(said(caplog)) == len(ALL)
    calls.clear()
    passes(15)
    x = torch.ones(20, 48)
    assert compiled.in_one_kernel(compiled.gated, x, torch.ones(48, 20).t()) is None and not calls
    assert compiled.in_one_kernel(compiled.gated, x, x).equal(compiled.gated(x, x)) and calls
    monkeypatch.setattr(compiled, "MAX_NUMBERS", 20 * 48 - 1)
    assert compiled.in_one_kernel(compiled.gated, x, x) is None


def fails(case):
    raise RuntimeError("no compiler")


def wrong(case):
    return lambda *rows: case.function(*rows).mul(1 + 0.01 * (case.function is compiled.rotated))


def gives_nan(case):
    return lambda *rows: case.function(*rows).mul(torch.nan if case.function is compiled.rotated else 1)


def forgets_the_last_rows(case):
    last = lambda found: found[len(found) // 16 * 16 :].zero_()
    return lambda *rows: (found := case.function(*rows), last(found))[0]


def rounds_more(case):
    narrow = (lambda x: x.mul(1.5).div(1.5)) if case.function is compiled.rotated else (lambda x: x)
    return lambda *rows: case.function(*map(narrow, rows))


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [(fails, "no compiler"), *((f, "its numbers are") for f in (wrong, gives_nan, forgets_the_last_rows, rounds_more))],
)
def test_what_does_not_compile_or_differs_leaves_torchs_kernels_and_says_so_once(compiler, reason, compile_as, caplog):
    compile_as(compiler)
    for actual, expected in zip(passes(40), plain(40), strict=True):
        assert actual.equal(expected)
    passes(50)
    lines = [line for line in said(caplog) if "using torch's kernels" in line]
    assert len(lines) == 1 and reason in lines[0]


def test_memory_that_is_out_is_no_fault_of_the_kernel(compile_as, caplog):
    def full(case):
        raise torch.OutOfMemoryError("full")

    compile_as(full)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            passes(40)
    assert not said(caplog)


def test_what_rounds_less_often_is_taken(compile_as, caplog):
    results = lambda found: found.bfloat16() if isinstance(found, torch.Tensor) else tuple(x.bfloat16() for x in found)
    compile_as(lambda case: lambda *rows: results(case.function(*(x.float() for x in rows))))
    passes(40)
    assert sorted(line.split()[0] for line in said(caplog) if "compiled to one kernel" in line) == ALL


def test_where_torch_compile_is_off_nothing_is_said_to_be_compiled(compile_as, caplog):
    compile_as(lambda case: case.function)
    with torch._dynamo.config.patch(disable=True):  # monkeypatch would delete the setting afterwards
        passes(40)
    assert "TORCHDYNAMO_DISABLE" in said(caplog)[0] and len(said(caplog)) == 1
