"""What is given away works without the checkout: a wheel made from the sdist, alone in a fresh environment."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from whet._version import __version__
from whet.util.install import DISTRIBUTION, REPOSITORY

ROOT = Path(__file__).parents[2]
NAME = f"{DISTRIBUTION.replace('-', '_')}-{__version__}"

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


def run(*command, cwd, **variables):
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"COLUMNS": "200"} | variables
    done = subprocess.run([*map(str, command)], cwd=cwd, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the sdist and the wheel."""
    for needed in ("build", "hatchling", "hatch_fancy_pypi_readme"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The programs of an environment that has the wheel, and this one's packages in place of its dependencies: an
    editable whet is not seen there, as a .pth file leads to folders but not to what their own .pth files name.
    """
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    programs = folder / "venv" / "bin"
    site = run(programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    run(
        programs / "python",
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        built / f"{NAME}-py3-none-any.whl",
        cwd=folder,
    )
    own = {
        sysconfig.get_path("purelib"),
        *(p for p in sys.path if Path(p, "torch").is_dir() or Path(p, "yaml").is_dir()),
    }
    Path(site, "others.pth").write_text("\n".join(own))
    return programs


def test_the_sdist_has_what_its_tests_and_pages_need(built):
    with tarfile.open(built / f"{NAME}.tar.gz") as tar:
        names = {name.removeprefix(f"{NAME}/") for name in tar.getnames()}
    needed = {
        "pyproject.toml",
        "Makefile",
        "LICENSE",
        "README.md",
        "recipes/demo.yaml",
        "docs/lora.md",
        "tests/conftest.py",
        "tools/docs/__main__.py",
    }
    assert needed | {"whet/py.typed", "whet/demo/sft_model.safetensors", ".ci/tested.txt"} <= names


def test_the_index_shows_links_that_lead_somewhere(built, installed, tmp_path):
    code = f"from importlib.metadata import metadata; print(metadata({DISTRIBUTION!r}).get_payload())"
    page = run(installed / "python", "-c", code, cwd=tmp_path)
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert len(links) > 20 and all(link.startswith("https://") for link in links)
    local = [link.removeprefix(f"{REPOSITORY}/blob/main/") for link in links if link.startswith(REPOSITORY)]
    assert [path for path in local if not (ROOT / path.partition("#")[0]).exists()] == []


def test_the_commands_that_print_work_without_a_checkout(installed, tmp_path):
    whet = installed / "whet"
    where = run(installed / "python", "-c", "import whet; print(whet.__file__)", cwd=tmp_path)
    assert where.startswith(str(installed.parent))
    assert run(whet, "version", cwd=tmp_path) == f"whet {__version__}\n"
    assert "not a checkout" in run(whet, "env", cwd=tmp_path)
    page = re.sub(r"\]\(([\w-]+)\.md(?:#[^)]*)?\)", r"](whet docs \1)", (ROOT / "docs" / "lora.md").read_text())
    assert run(whet, "docs", "lora", cwd=tmp_path) == page.replace("```python skip", "```python")
    hint = "from whet.util.install import install_hint as h; print(h('lora'))"
    assert f"'{DISTRIBUTION}[lora] @ file://" in run(installed / "python", "-c", hint, cwd=tmp_path)


def test_a_recipe_is_copied_and_runs_and_so_does_the_demo(installed, tmp_path):
    whet = installed / "whet"
    assert "search " in run(whet, "recipes", cwd=tmp_path)
    run(whet, "recipes", "copy", "search", cwd=tmp_path)
    assert "env_path: search_env.py" in run(whet, "grpo", "--config", "search.yaml", "--print_config", cwd=tmp_path)
    run(whet, "recipes", "copy", "demo", "there", cwd=tmp_path)
    words = ["trainer.max_steps=1", "trainer.eval_every_n_steps=0", "data.batch_size=4", "trainer.mini_batch_size=4"]
    run(whet, "grpo", "--config", "there/demo.yaml", *words, "trainer.run_dir=r", cwd=tmp_path)
    assert (tmp_path / "r" / "final" / "model.safetensors").is_file()
    assert "held-out" in run(whet, "demo", *words, "trainer.run_dir=d", cwd=tmp_path)
