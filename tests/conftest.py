"""Fixtures and settings of the whole suite: one thread (or WHET_TEST_THREADS), no network, fixed seeds."""

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import random
import signal

import numpy as np
import pytest
import torch

from whet.observe import plot_curves

for ignored, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(ignored) == signal.SIG_IGN:  # by a shell's background job, or nohup; tests send them
        signal.signal(ignored, handler)
torch.set_num_threads(int(os.environ.get("WHET_TEST_THREADS", "1")))
pytest.register_assert_rewrite("contract", "tiny")  # what they assert is shown as in a test


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Workers of `-n auto`: one a processor, as every test has one thread; each takes about 1 GB."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items):
    """Leaves the other parameter sets of a test with `spread(n)` to `make check-full`."""
    from helpers import spread

    sets = {}
    for item in items:
        mark = item.get_closest_marker("spread")
        if mark is not None and hasattr(item, "callspec") and item.get_closest_marker("full") is None:
            sets.setdefault((item.path, item.originalname), (mark.args[0], []))[1].append(item)
    for n, group in sets.values():
        kept = spread([tuple((k, id(v)) for k, v in item.callspec.params.items()) for item in group], n)
        for i, item in enumerate(group):
            if i not in kept:
                item.add_marker(pytest.mark.full)


@pytest.fixture(autouse=True)
def imports(tmp_path_factory):
    """What a test has imported from its own folder is no longer there for the next."""
    path, known = [*sys.path], {*sys.modules}
    yield
    sys.path[:] = path
    own = str(tmp_path_factory.getbasetemp())
    for name in sys.modules.keys() - known:
        if str(vars(sys.modules[name]).get("__file__")).startswith(own):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def variables():
    """A test leaves the environment's variables of whet as they were: the tests behind it read them too."""
    before = {k: v for k, v in os.environ.items() if k.startswith("WHET_")}
    yield
    after = {k: v for k, v in os.environ.items() if k.startswith("WHET_")}
    if after != before:
        for name in after.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
    assert after == before


@pytest.fixture(autouse=True)
def seeds():
    """The global generators start each test at the same place; whet itself draws from none of them."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def one_panel(variables, monkeypatch):  # variables first: what monkeypatch sets is taken back before it looks
    """What commands draw in the test's own process has one panel: all eight cost more than most runs do."""
    from whet.cli import commands

    panels = {"reward or loss": ["reward", "loss"]}
    monkeypatch.setattr(commands, "plot_curves", lambda rows, path: plot_curves(rows, path, panels))


@pytest.fixture(scope="session")
def tokenizer():
    from whet.data.tokenizer import byte_tokenizer

    return byte_tokenizer()


@pytest.fixture
def model():
    """A tiny Qwen3 over bytes, new for each test."""
    from helpers import tiny_model

    return tiny_model()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, tokenizer):
    """The same with its tokenizer, as a folder; nothing may write to it."""
    from helpers import tiny_model

    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def set_threads():
    """Sets torch's threads for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of built kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "whet"


@pytest.fixture
def rewrite(tmp_path, monkeypatch):
    """Puts other words into a copy of the kernels' sources, which are what is built from then on."""
    from whet.native import build

    def change(old, new):
        sources = {x.name: x.read_text() for x in build.SOURCE.iterdir()}
        assert sum(old in text for text in sources.values()) == 1
        (tmp_path / "kernels").mkdir()
        for name, text in sources.items():
            (tmp_path / "kernels" / name).write_text(text.replace(old, new))
        monkeypatch.setattr(build, "SOURCE", tmp_path / "kernels")

    return change
