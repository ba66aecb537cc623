"""What is private in torch is asked for: where a release lacks it, results are the same."""

import ast
from pathlib import Path

import torch

from whet.rollout.engine import layouts
from whet.train import optimizer
from whet.util.tensor_subclasses import is_wrapper_subclass

ROOT = Path(__file__).parents[3]


def test_gradients_are_scaled_alike_without_the_call_for_many_tensors(monkeypatch):
    grads = [torch.arange(4.0), torch.ones(2, 2)]
    alone = [g.clone() for g in grads]
    optimizer._scale(grads, 0.3)
    monkeypatch.setattr(optimizer, "_SCALE_ALL", None)
    optimizer._scale(alone, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(grads, alone, strict=True))


def test_attention_in_the_engine_does_without_torchs_fused_operator(monkeypatch):
    q, k, v = (torch.randn(1, 2, 3, 8) for _ in range(3))
    monkeypatch.setattr(layouts, "MAX_SCORES", 0)
    with_it = layouts.partial_attention(q, k, v, None, scale=1.0, softcap=None)
    monkeypatch.setattr(layouts, "FLASH", "_no_such_operator")
    torch.testing.assert_close(layouts.partial_attention(q, k, v, None, scale=1.0, softcap=None), with_it)


def test_a_tensor_that_wraps_others_is_known_as_torch_knows_it():
    from torch.testing._internal.two_tensor import TwoTensor
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    for tensor in (torch.ones(2), torch.nn.Parameter(torch.ones(2)), TwoTensor(torch.ones(2), torch.ones(2))):
        assert is_wrapper_subclass(tensor) == is_traceable_wrapper_subclass(tensor)


def test_nothing_imports_a_private_module_of_torch():
    found = [
        f"{path.name}: {name}"
        for path in (ROOT / "whet").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        if name.startswith("torch.") and "._" in name
    ]
    assert found == []
