import doctest
import importlib

import pytest

MODULES = [f"whet.rewards.{m}" for m in ("contract", "manager", "metric_fns", "text")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert failed == 0 and tried > 0


@pytest.mark.parametrize("name", MODULES)
def test_public_names_are_sorted_documented_and_there(name):
    module = importlib.import_module(name)
    assert module.__all__ == sorted(module.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    for public in module.__all__:
        value = getattr(module, public)
        if callable(value) and hasattr(value, "__module__") and value.__module__ == name:
            assert value.__doc__, public
