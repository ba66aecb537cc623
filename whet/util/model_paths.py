"""Where a model lies: in a folder, in a run's folder, in one of its checkpoints, or on the hub under a name.

Left out on purpose: downloads of a name without a revision, which are transformers'.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from whet.errors import ConfigError, format_exception, format_value, nearest
from whet.util.gguf import convert_gguf, gguf_file

__all__ = [
    "check_hub",
    "find_runs",
    "hub_unreachable_reason",
    "list_folders",
    "model_folder",
    "resolved_path_message",
    "split_revision",
]

MODEL_FILES = ("config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json")
"""Files of which a folder, or what the cache has of a name, holds one where there is something to read."""
RUN_FILES = ("metrics.jsonl", "config.yaml")
"""Files of which the folder of a run holds one."""
UNREACHABLE = {"ConnectError", "ConnectTimeout", "ConnectionError", "OfflineModeIsEnabled", "ProxyError"}
"""Classes of the hub client's errors, whichever HTTP library it has, that mean that the hub did not answer."""


UNUSED_FILES = ("*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.pth", "*.tflite", "onnx/*", "original/*")
"""Files of a hub repository that whet reads nothing of."""


def split_revision(name: str) -> tuple[str, str | None]:
    """A hub name and what stands behind its "@": a branch, tag or commit; None = its main branch.

    >>> split_revision("Qwen/Qwen3-0.6B@v1.0"), split_revision("Qwen/Qwen3-0.6B")
    (('Qwen/Qwen3-0.6B', 'v1.0'), ('Qwen/Qwen3-0.6B', None))
    """
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)@([\w./-]+)", name)
    return (match[1], match[2]) if match else (name, None)


def model_folder(source: str | Path) -> str:
    """The folder of a model or tokenizer; a hub name as it is, and the downloaded files of one with a revision.

    Args: source: a folder, one of a finished run, which stands for its final/, one of a checkpoint (step-...), which
        stands for its actor/, one that runs lie in, which stands for the newest that has finished, or a hub name.
    Returns: the folder or the name.
    Raises: ConfigError: a path to nothing; a run that has not finished, with the folder to give instead; a folder
        without a model or a run, with what it has.

    >>> model_folder("Qwen/Qwen3-0.6B")
    'Qwen/Qwen3-0.6B'
    """
    named, folder = str(source), Path(source)
    if not str(source).strip():
        raise ConfigError("the name of a model or tokenizer is empty; give a folder or a hub name")
    try:
        folder = folder.expanduser()
        there, above = folder.exists(), folder.parent.is_dir()
    except (OSError, RuntimeError) as error:  # a name too long, a folder that may not be read, no such user
        raise ConfigError(f"can't look for {format_value(named)}: {error}; give a folder or a hub name") from error
    if not there:
        if split_revision(named)[1] is not None:
            return _snapshot(*split_revision(named))
        if named.startswith(("/", ".", "~")) or named.count("/") > 1:
            here = folder.parent
            near = nearest(folder.name, _inside(here)) if above else f"; there is no {here}"
            raise ConfigError(f"there is no folder {named}, and no hub name looks like that{near}")
        return named
    if (file := gguf_file(folder)) is not None:
        return convert_gguf(file)
    for path in folder.glob("*.safetensors"):
        if path.stat().st_size < 1024 and path.read_bytes().startswith(b"version https://git-lfs"):
            raise ConfigError(f"{path} is a pointer of Git LFS, not the weights; run `git lfs pull` in {named}")
    if folder.is_file():
        raise ConfigError(f"{named} is a file; give the folder that it lies in")
    if any((folder / name).is_file() for name in MODEL_FILES):
        return str(folder)
    for part in (folder / "final", folder / "actor"):
        if _is_model(part):
            return str(part)
    run, newest = _is_run(folder), _newest_checkpoint(folder)
    what = "is a run that has not finished" if run else "holds checkpoints, and no model itself"
    if newest is not None:
        raise ConfigError(f"{named} {what}; resume with trainer.resume=latest, or give its newest checkpoint: {newest}")
    if run:
        raise ConfigError(f"{named} {what}, and it has no checkpoint; give the model that it began with")
    if runs := find_runs(folder):
        return _of_newest(named, runs)
    if not any((folder / name).is_file() for name in _inside(folder)):
        inside = ", ".join(sorted(_inside(folder))[:8]) or "nothing"
        raise ConfigError(f"{named} holds no model, tokenizer or run, but {inside}; give the folder of one")
    return str(folder)


def _snapshot(name: str, revision: str | None) -> str:
    """The folder of the cache with the files of a hub name at a revision. Raises ConfigError where it can't be had."""
    from huggingface_hub import HfApi, constants, snapshot_download

    try:
        skip: list[str] = [*UNUSED_FILES]
        if not constants.HF_HUB_OFFLINE:
            files = HfApi().list_repo_files(name, revision=revision)
            skip += ["*.bin"] if any(file.endswith(".safetensors") for file in files) else []
        return str(snapshot_download(name, revision=revision, ignore_patterns=skip))
    except Exception as error:  # the client lets through what its HTTP library raises
        why = hub_unreachable_reason(error) or format_exception(error, 200)
        raise ConfigError(
            f"{name!r} at revision {revision!r} can't be had from the hub ({why}); check the name, the branch, tag or "
            "commit behind the @, and the network"
        ) from error


def resolved_path_message(source: str, folder: str) -> str:
    """What is logged where a folder stands for a model that lies within it. Args: folder: which `model_folder` gave."""
    newer = []
    for run in reversed(find_runs(Path(source).expanduser())):
        if _is_model(run / "final"):
            break
        newer.append(run.name)
    late = f" ({', '.join(newer)}: newer, and not finished)" if newer else ""
    return f"{source}: taking {folder}{late}"


def find_runs(folder: Path) -> list[Path]:
    """The runs that lie in a folder, the one that was written to last at the end."""
    if _is_run(folder) or not folder.is_dir():
        return []
    found = [folder / name for name in _inside(folder) if (folder / name).is_dir() and _is_run(folder / name)]
    written = lambda run: max((run / n).stat().st_mtime_ns for n in (*RUN_FILES, "final") if (run / n).exists())
    return sorted(found, key=lambda run: (written(run), run.name))


def _of_newest(named: str, runs: Sequence[Path]) -> str:
    """The model of the newest run that has finished. Raises ConfigError where none has, with their checkpoints."""
    finished = [run for run in runs if _is_model(run / "final")]
    if finished:
        return str(finished[-1] / "final")
    found = [f"  {run.name}: {_newest_checkpoint(run) or 'no checkpoint'}" for run in reversed(runs)]
    raise ConfigError(
        f"{named} holds {len(runs)} run(s), none of which has finished; give one of their checkpoints, or finish a run "
        "with trainer.resume=latest:\n" + "\n".join(found[:8])
    )


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in RUN_FILES)


def _newest_checkpoint(folder: Path) -> Path | None:
    steps = (*folder.glob("checkpoints/step-*[0-9]"), *folder.glob("step-*[0-9]"))
    return max((p for p in steps if (p / "actor").is_dir()), key=lambda p: p.name, default=None)


def check_hub(name: str) -> None:
    """Asks the hub once for a name that is not a folder and not in its cache: transformers would try for half a minute.

    Raises: ConfigError: the hub does not answer, there is no such model, or no name looks like that. Whatever else goes
        wrong is left to transformers.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(name).expanduser().exists():
        return
    near = nearest(name, list_folders())
    try:
        if any(isinstance(try_to_load_from_cache(name, file), str) for file in MODEL_FILES):
            return
        HfApi().model_info(name, timeout=10)
    except HFValidationError as error:
        raise ConfigError(f"there is no folder {name!r}, and no hub name looks like that{near}") from error
    except Exception as error:  # the client lets through what its HTTP library raises
        if (why := hub_unreachable_reason(error)) is not None:
            raise ConfigError(
                f"there is no folder {name!r} here, and the hub can't be reached to look for that name ({why}); check "
                f"the path or the network{near}"
            ) from error
        classes = set(_names(error))
        if "RepositoryNotFoundError" in classes and "GatedRepoError" not in classes:
            raise ConfigError(
                f"there is no folder {name!r} here, and no model of that name on the hub that you may see; check the "
                f"name, or log in: hf auth login{near}"
            ) from error


def list_folders() -> list[str]:
    """Names of the folders in the working folder, for messages; none where it may not be read."""
    return [name for name in _inside(Path()) if Path(name).is_dir()]


def _inside(folder: Path) -> list[str]:
    """What lies in a folder, as far as it may be read."""
    try:
        return [p.name for p in folder.iterdir()]
    except OSError:
        return []


def hub_unreachable_reason(error: BaseException) -> str | None:
    """Why the hub did not answer, if that is what an error of its client says; None = it did, or that is unknown.

    >>> hub_unreachable_reason(ConnectionError("refused")), hub_unreachable_reason(KeyError())
    ('refused', None)
    """
    classes = set(_names(error))
    if "OfflineModeIsEnabled" in classes:
        return "HF_HUB_OFFLINE is set"
    return (str(error) or type(error).__name__).splitlines()[0] if classes & UNREACHABLE else None


def _names(error: BaseException | None) -> Iterator[str]:
    """The classes of an error and of what caused it, their bases included."""
    while error is not None:
        yield from (cls.__name__ for cls in type(error).__mro__)
        error = error.__cause__ or error.__context__
