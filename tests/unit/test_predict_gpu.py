"""The prediction in docs/one-gpu.md is what its script calculates."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("predict_gpu")
    for name in ("predict_gpu", "tasks"):
        sys.modules.pop(name, None)


def test_a_layer_is_the_difference_of_two_models(script):
    assert script.per_layer(lambda layers: 7 + 5 * layers) == (5, 7)
    page = (ROOT / "docs/one-gpu.md").read_text(encoding="utf-8")
    assert all(f"| {device.name} |" in page for device in script.DEVICES)


@pytest.mark.full
def test_the_page_has_the_numbers_of_the_script(script):
    page = (ROOT / "docs/one-gpu.md").read_text(encoding="utf-8").replace("\n", " ")
    assert script.table().replace("\n", " ") in page
