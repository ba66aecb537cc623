"""The environment of a run: versions, processor, threads and devices."""

from __future__ import annotations

import functools
import logging
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from whet._version import __version__
from whet.storage.files import read_json
from whet.util.cpu import cpu_info

__all__ = ["collect_environment", "read_environment", "trained_dtype"]

log = logging.getLogger("whet")

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "datasets", "pyarrow", "pydantic")


def collect_environment() -> dict[str, Any]:
    """Collects all facts about the machine and its software that the numbers of a run may depend on.

    Returns: nested dicts of plain values: versions, platform, cpu (model, family, usable cores, relevant vector
        instructions), threads, devices, and the environment variables that change results. No names of users or hosts.

    >>> collect_environment()["versions"]["whet"] == __version__
    True
    """
    return {
        "versions": {"whet": __version__, "python": platform.python_version(), **_versions()},
        "platform": {"system": platform.system(), "release": platform.release(), "machine": platform.machine()},
        "cpu": cpu_info(),
        **_torch(),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
    }


def read_environment(run_dir: str | Path | None) -> dict[str, Any]:
    """Reads environment.json of a run folder. Returns: {} if there is none, or if it can't be read, with a warning.

    An invalid number of threads is left out, with a warning. The other values are only compared.

    >>> read_environment(None)
    {}
    """
    path = None if run_dir is None else Path(run_dir) / "environment.json"
    if path is None or not path.is_file():
        return {}
    try:
        environment = read_json(path)
        if not isinstance(environment, dict):
            raise ValueError(f"it holds a {type(environment).__name__}, not names and values")
    except (OSError, ValueError) as error:
        log.warning("%s can't be read and is ignored: %s", path, error)
        return {}
    threads = environment.get("threads", 1)
    if type(threads) is not int or threads < 1:
        log.warning("%s: %.40r is not a number of threads and is ignored", path, threads)
        del environment["threads"]
    return environment


def trained_dtype(model: str | Path) -> str | None:
    """Returns the dtype that a run's model was trained in; None = the path is not in the folder of a run.

    Args: model: a run's folder, or a folder in it: final/, a checkpoint or its actor/.

    >>> trained_dtype("Qwen/Qwen3-0.6B") is None
    True
    """
    folder = Path(model).expanduser().absolute()
    for place in (folder, *list(folder.parents)[:3]):
        dtypes = read_environment(place).get("compute_dtype")
        if isinstance(dtypes, dict) and isinstance(dtype := dtypes.get("actor"), str):
            return dtype
    return None


_VARIABLES = ("OMP_", "MKL_NUM", "ATEN_", "CUDA_VISIBLE", "CUBLAS_WORKSPACE", "PYTHONHASHSEED", "WHET_NATIVE", "CXX",
              "WORLD_SIZE", "RANK")  # fmt: skip


@functools.cache
def _version(name: str) -> str | None:
    """Returns a package's version, read once in a process; None = it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, str | None]:
    versions = {name: _version(name) for name in _PACKAGES}
    torch = sys.modules.get("torch")
    if torch is not None:  # its own version names the build too ("+cu130")
        versions["torch"] = torch.__version__
    return versions


def _torch() -> dict[str, Any]:
    """Threads and devices, if torch has been imported already; this does not import it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    cuda = torch.cuda.is_available()
    return {
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "cuda": torch.version.cuda,
    }
