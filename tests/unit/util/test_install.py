"""The distribution's name, and the commands that install an extra."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from whet._version import __version__
from whet.util import install

ROOT = Path(__file__).parents[3]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_name_and_the_repository_are_those_of_pyproject():
    assert PYPROJECT["project"]["name"] == install.DISTRIBUTION
    assert all(url.startswith(install.REPOSITORY) for url in PYPROJECT["project"]["urls"].values())
    own = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"][0]["replacement"]
    assert own == f"]({install.REPOSITORY}/blob/main/\\1)"


def test_the_citation_has_the_version_and_the_repository():
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {__version__}\n" in text and f"repository-code: {install.REPOSITORY}\n" in text


def test_no_text_tells_to_install_the_strangers_distribution():
    """`whet[lora]` is another distribution's extra, and the index has no whet-rl: a text installs a checkout, or
    install_hint gives the command.
    """
    folders = [ROOT / name for name in ("whet", "docs", "examples", "benchmarks", "recipes")]
    files = [p for f in folders for p in f.rglob("*") if p.suffix in (".py", ".md", ".yaml")] + [ROOT / "README.md"]
    wrong = re.compile(r"whet\[[a-z]+\]|pip install[^\n`]* ['\"]?whet(-rl\[| |`|$)")
    assert [str(p) for p in files if wrong.search(p.read_text())] == []


def test_every_package_that_whet_imports_is_declared():
    """A package that only comes with a dependency is gone when that dependency changes, as httpx did."""
    project = PYPROJECT["project"]
    listed = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    declared = {re.match(r"[\w-]+", line)[0].lower().replace("-", "_") for line in listed}
    declared |= {"yaml", "pydantic_core", "latex2sympy2_extended"}  # of pyyaml, pydantic, math-verify
    declared |= {"comet_ml", "IPython"}  # a callback's, whose user has it; a notebook's, where it is already imported
    pattern = re.compile(r"^ *(?:import|from) ([A-Za-z]\w*)(?:\.[\w.]+)?(?: import \(?\w| as \w|$)", re.MULTILINE)
    code = {p: re.sub(r'""".*?"""', "", p.read_text(), flags=re.DOTALL) for p in (ROOT / "whet").rglob("*.py")}
    imported = {(name, p.name) for p, text in code.items() for name in pattern.findall(text)}
    known = declared | set(sys.stdlib_module_names) | {"whet"}
    assert {("torch", "forward.py"), ("jinja2", "tool_calls.py")} <= imported
    assert {(name, file) for name, file in imported if name not in known} == set()


def test_every_extra_that_a_hint_names_exists():
    named = [
        m for p in (ROOT / "whet").rglob("*.py") for m in re.findall(r"install_hint\([\"']([a-z]+)", p.read_text())
    ]
    assert len(set(named)) >= 7 and set(named) <= {*PYPROJECT["project"]["optional-dependencies"]}


def test_a_checkout_is_installed_from_its_folder():
    assert install.install_hint("lora") == f"pip install -e '{ROOT}[lora]'"


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        (None, "pip install 'whet-rl[lora]'"),
        ({"url": "file:///d/w.whl", "archive_info": {}}, "pip install 'whet-rl[lora] @ file:///d/w.whl'"),
        ({"url": "file:///a%20b", "dir_info": {}}, "pip install '/a b[lora]'"),
        (
            {"url": "https://x/w.git", "vcs_info": {"vcs": "git", "commit_id": "ab1"}},
            "pip install 'whet-rl[lora] @ git+https://x/w.git@ab1'",
        ),
    ],
)
def test_an_installed_package_is_installed_again_from_where_it_came(noted, command, tmp_path, monkeypatch):
    folder = tmp_path / "whet_rl-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: whet-rl\nVersion: 0.1.0\n")
    if noted is not None:
        (folder / "direct_url.json").write_text(json.dumps(noted))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(install, "PACKAGE", tmp_path / "whet")
    assert install.install_hint("lora") == command


@pytest.mark.parametrize(("entry", "warned"), [("", True), ("[console_scripts]\nwhet = whet.cli:main\n", False)])
def test_importing_whet_says_that_the_strangers_distribution_is_there(entry, warned, tmp_path):
    folder = tmp_path / "whet-0.2.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: whet\nVersion: 0.2.1\n")
    (folder / "entry_points.txt").write_text(entry)
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import whet"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert ("whet 0.2.1" in told and "pip uninstall whet" in told) == warned
