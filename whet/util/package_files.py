"""Recipes and documentation pages: files next to the package in a checkout, and inside it in a wheel."""

from __future__ import annotations

import re
from pathlib import Path

from whet.errors import ConfigError, lookup_error
from whet.util import install

__all__ = ["copy_recipe", "find_in_pages", "list_pages", "list_recipes", "read_page", "recipe_path"]


def list_recipes() -> dict[str, str]:
    """Returns the recipes: name -> a line that describes it.

    >>> list_recipes()["demo"]
    'The demo: a 0.7 M-parameter model learns the order of operations by GRPO.'
    """
    paths = sorted(_folder("recipes").glob("*.yaml"))
    return {path.stem: path.read_text().partition("\n")[0].removeprefix("# ") for path in paths}


def recipe_path(name: str) -> Path:
    """Returns the file of a recipe. Args: name: with or without .yaml. Raises: ConfigError: an unknown recipe.

    >>> recipe_path("demo").name
    'demo.yaml'
    """
    path = _folder("recipes") / f"{name.removesuffix('.yaml')}.yaml"
    if not path.is_file():
        raise lookup_error("recipe", name, list_recipes())
    return path


def copy_recipe(name: str, folder: str | Path = ".") -> list[Path]:
    """Copies a recipe, with the Python files that it refers to.

    Args: name: as for recipe_path. folder: the target, created if missing.
    Returns: the copies, the recipe first.
    Raises: ConfigError: an unknown recipe, or a file that exists already or can't be written.
    """
    source = recipe_path(name)
    names = sorted({*re.findall(r"[\w-]+\.py\b", source.read_text())})
    files = [source, *(path for file in names if (path := source.parent / file).is_file())]
    existing = [str(Path(folder) / path.name) for path in files if (Path(folder) / path.name).exists()]
    if existing:
        raise ConfigError(f"{', '.join(existing)} exists already; name another folder: whet recipes copy {name} FOLDER")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for path in files:
            (Path(folder) / path.name).write_bytes(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{folder}: can't be written: {error.strerror or error}; name another folder") from error
    return [Path(folder) / path.name for path in files]


def list_pages() -> dict[str, str]:
    """Returns the pages of the documentation: name -> its title.

    >>> list_pages()["lora"]
    'LoRA and QLoRA'
    """
    paths = sorted(path for path in _folder("docs").glob("*.md") if path.stem != "README")
    return {path.stem: path.read_text().partition("\n")[0].removeprefix("# ") for path in paths}


def read_page(name: str) -> str:
    """Returns the text of a page, in Markdown. Args: name: with or without docs/ and .md. Raises: ConfigError: no such
    page.
    """
    path = _folder("docs") / f"{name.removeprefix('docs/').removesuffix('.md')}.md"
    if not path.is_file():
        raise lookup_error("page", name, list_pages())
    return path.read_text()


def find_in_pages(word: str) -> dict[str, str]:
    """Returns the pages that have a word or a phrase, in any case: name -> the headings of the parts that have it.

    >>> find_in_pages("ulysses")["scaling"]
    'Long sequences'
    """
    whole = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE)
    found: dict[str, dict[str, None]] = {}
    for name in list_pages():
        heading, last, in_code = "", "", False
        for line in read_page(name).splitlines():
            in_code ^= line.startswith("```")
            if not in_code and re.match("#+ ", line):
                heading = line.lstrip("# ")
            if whole.search(f"{last} {line}"):  # words may stand on two lines
                found.setdefault(name, {})[heading] = None
            last = line
    return {name: "; ".join(headings) for name, headings in found.items()}


def _folder(name: str) -> Path:
    folders = [path for path in (install.PACKAGE.parent / name, install.PACKAGE / name) if path.is_dir()]
    if install.is_checkout() or len(folders) < 2:
        return folders[0] if folders else install.PACKAGE / name
    return folders[1]
