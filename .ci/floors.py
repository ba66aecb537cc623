"""Pins every dependency of pyproject.toml, extras too, to the oldest release that it admits: constraints for pip."""

import re
import sys
import tomllib
from pathlib import Path


def floors(pyproject: str) -> list[str]:
    """The pins. Args: pyproject: the text of pyproject.toml."""
    project = tomllib.loads(pyproject)["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + [d for name in extras if name not in ("dev", "docs") for d in extras[name]]
    found = (re.match(r"([\w-]+)>=([\d.]+)", line) for line in lines)
    return [f"{match[1]}=={match[2]}.*" for match in found if match]


if __name__ == "__main__":
    sys.stdout.write("\n".join(floors(Path(sys.argv[1]).read_text())) + "\n")
