"""Examples run: Python blocks of README and docs (those marked `skip` aside), and the doctests of every module."""

import doctest
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from whet.cli.registry import COMMANDS, INFO_COMMANDS, load_command_config
from whet.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGES = [p for p in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if p.is_file()]
MODULES = [
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for p in sorted([*(ROOT / "whet").rglob("*.py"), *(ROOT / "tools").rglob("*.py")])
    if ">>> " in p.read_text()
]
BLOCK = re.compile(r"(?ms)^```python(?P<mark>[^\n]*)\n(?P<code>.*?)^```")


def run_page(text, name):
    """Runs the blocks of a page in order, in one namespace, with the page's own line numbers."""
    space = {"__name__": "page"}
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for block in BLOCK.finditer(text):
        if "skip" in block["mark"]:
            continue
        line = text[: block.start("code")].count("\n")
        if title := re.search(r'title="([\w.]+)"', block["mark"]):
            Path(title[1]).write_text(block["code"])  # a file of the user's, which later blocks and commands read
        if ">>> " in block["code"]:
            test = doctest.DocTestParser().get_doctest(block["code"], space, name, name, line)
            runner.run(test, clear_globs=False)
            space.update(test.globs)
            assert runner.summarize(verbose=False).failed == 0
        else:
            exec(compile("\n" * line + block["code"], name, "exec"), space)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("whet.cli.commands.plot_curves", lambda *_: None)  # most of a tiny run's time; tested elsewhere
    try:
        run_page(page.read_text(), str(page))
    finally:
        sys.modules.pop("rewards", None)  # a page's file, which a block may import


@pytest.mark.parametrize("code", ["raise KeyError", ">>> 1 + 1\n3"])
def test_a_page_that_is_wrong_fails(code, capsys):
    with pytest.raises((KeyError, AssertionError)):
        run_page(f"# x\n\n```python\n{code}\n```\n", "page")
    run_page(f"```python skip\n{code}\n```\n", "page")


def commands(page):
    """The commands of a page with keys, as their name and their words; without files and placeholders."""
    text = page.read_text().replace("\\\n", " ")
    blocks = "".join(re.findall(r"(?ms)^```[^\n]*\n(.*?)^```", text)).split("\n")
    for line in [*blocks, *re.findall("`([^`]+)`", re.sub(r"(?ms)^```.*?^```", "", text))]:
        if (found := re.match(r"(?:.* -m )?whet ([a-z]+) (.*)$", line, re.DOTALL)) and "<" not in line:
            words = [
                w for w in shlex.split(found[2], comments=True) if not w.endswith(("...", ".yaml")) and "$" not in w
            ]
            yield found[1], [w for w in words if w not in ("--config", "--profile", "--print_config", "&")]


def test_the_commands_of_the_pages_are_accepted():
    wrong, count = [], 0
    for page in PAGES:
        for name, words in commands(page):
            if name in ("data", "plan"):
                name = words.pop(0) if words and words[0] in COMMANDS else "grpo"
                words = [w for w in words if not w.startswith(("rows=", "memory_gb=", "num_processes="))]
            if name not in COMMANDS or name in INFO_COMMANDS or "--help" in words:
                continue
            count += 1
            try:
                load_command_config(name, words)
            except ConfigError as error:  # a line for each problem; a file or a placeholder has the missing ones
                wrong += [(page.name, name, line) for line in str(error).split("\n") if not line.startswith("no ")]
    assert wrong == [] and count > 90


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page):
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    local = [link for link in links if link and "://" not in link and not link.startswith("mailto:")]
    assert [link for link in local if not (page.parent / link).exists()] == []


def slugs(page):
    """The anchors of a page: its headings as GitHub spells them."""
    titles = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^```.*?^```", "", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_into_pages_lead_to_headings():
    anchors = {page.resolve(): slugs(page) for page in PAGES}
    for page in PAGES:
        for path, anchor in re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", page.read_text()):
            target = (page.parent / path).resolve() if path else page.resolve()
            assert target not in anchors or anchor in anchors[target], f"{page.name}: {path}#{anchor}"


def test_the_index_lists_every_page_and_pictures_are_small_and_shown():
    text = "".join(page.read_text() for page in PAGES)
    index = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in PAGES if page.name != "README.md" and f"]({page.name})" not in index] == []
    for picture in (ROOT / "docs" / "pictures").iterdir():
        assert picture.stat().st_size < 150_000 and f"](pictures/{picture.name})" in text, picture.name


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_a_module_run(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted and not result.failed
