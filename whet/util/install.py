"""The name of the distribution, where this installation came from, and the command that installs an extra.

The distribution is `whet-rl`; the package and the command are `whet`. The distribution `whet` on the package index is
another project.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["DISTRIBUTION", "REPOSITORY", "conflicting_version", "install_hint", "is_checkout"]

DISTRIBUTION = "whet-rl"
"""The name of the distribution, as in pyproject.toml."""
REPOSITORY = "https://github.com/whet-rl/whet"
"""The repository; the URLs in pyproject.toml begin with it."""
PACKAGE = Path(__file__).parents[1]


def install_hint(extra: str = "", options: str = "") -> str:
    """Returns the command that installs whet with an extra, from the source of this installation.

    A checkout is installed from its folder, a wheel or a commit from its URL, anything else from the index.
    Args: extra: an extra of pyproject.toml. options: further arguments of pip.

    >>> install_hint("lora").startswith("pip install ") and "[lora]" in install_hint("lora")
    True
    """
    import shlex

    extras = f"[{extra}]" if extra else ""
    source = _source()
    if source is None:
        target = DISTRIBUTION + extras
    elif source.startswith("/"):
        target = ("-e " if is_checkout() else "") + shlex.quote(source + extras)
    else:
        target = shlex.quote(f"{DISTRIBUTION}{extras} @ {source}")
    if source is None and extras:
        target = f"'{target}'"
    return " ".join(word for word in ("pip install", options, target) if word)


def conflicting_version() -> str | None:
    """Returns the version of the other project's distribution `whet`; None = it is not installed.

    An installation from the time when this project had that name is recognised by its command.
    """
    folders = (Path(entry) for entry in sys.path)
    if not any(next(folder.glob("whet-*.dist-info"), None) for folder in folders):  # cheaper than importing metadata
        return None
    from importlib import metadata

    distribution = metadata.distribution("whet")
    is_ours = any(entry.value == "whet.cli:main" for entry in distribution.entry_points)
    return None if is_ours else distribution.version


def is_checkout() -> bool:
    """Returns whether the package is in a checkout of the repository."""
    return (PACKAGE.parent / "pyproject.toml").is_file() and (PACKAGE.parent / "recipes").is_dir()


def _source() -> str | None:
    """Returns the folder or the URL that whet was installed from; None = the index."""
    if is_checkout():
        return str(PACKAGE.parent)
    import json
    from importlib import metadata

    try:
        direct_url = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")  # PEP 610; None from an index
    except metadata.PackageNotFoundError:
        return None
    if direct_url is None:
        return None
    content = json.loads(direct_url)
    url = str(content["url"])
    if "vcs_info" in content:
        return f"{content['vcs_info']['vcs']}+{url}@{content['vcs_info']['commit_id']}"
    if "dir_info" in content and url.startswith("file://"):
        from urllib.parse import unquote

        return unquote(url.removeprefix("file://"))
    return url
