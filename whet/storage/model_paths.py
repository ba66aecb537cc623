"""Resolves the source of a model: a folder, a run, a checkpoint, or a hub name.

The weights of a sharded checkpoint are put together once, in a folder in the user's cache.

Left out on purpose: downloads of hub names without a revision, which transformers does.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from whet.errors import CheckpointError, ConfigError, format_exception, format_value, nearest
from whet.util.conversion_cache import convert_once
from whet.util.gguf import convert_gguf, gguf_file
from whet.util.references import check_access

__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_WEIGHTS",
    "PEFT_PREFIX",
    "check_hub",
    "find_runs",
    "hub_unreachable_reason",
    "list_folders",
    "model_folder",
    "resolved_path_message",
    "split_revision",
]

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
"""The prefix of every name in PEFT's files: the name of the model inside PEFT's wrapper, which is not used here."""
MODEL_FILES = ("config.json", ADAPTER_CONFIG, "tokenizer.json", "tokenizer_config.json")
"""A folder with one of these files has a model or a tokenizer, and so has the hub cache."""
RUN_FILES = ("metrics.jsonl", "config.yaml")
"""A folder with one of these files is a run."""
UNREACHABLE = {"ConnectError", "ConnectTimeout", "ConnectionError", "OfflineModeIsEnabled", "ProxyError"}
"""Classes of errors that mean that the hub did not answer, for any HTTP library of the hub client."""


UNUSED_FILES = ("*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.pth", "*.tflite", "onnx/*", "original/*")
"""Files of a hub repository that whet does not read."""


def split_revision(name: str) -> tuple[str, str | None]:
    """Returns a hub name and its revision after "@": a branch, tag or commit; None = the main branch.

    >>> split_revision("Qwen/Qwen3-0.6B@v1.0"), split_revision("Qwen/Qwen3-0.6B")
    (('Qwen/Qwen3-0.6B', 'v1.0'), ('Qwen/Qwen3-0.6B', None))
    """
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)@([\w./-]+)", name)
    return (match[1], match[2]) if match else (name, None)


def model_folder(source: str | Path) -> str:
    """Returns the folder of a model or tokenizer, or a hub name.

    Args: source: a folder of a model; of a finished run (its final/ is taken); of a checkpoint step-... (its actor/);
        of several runs (the newest finished one); or a hub name. With a revision (name@v1) its files are downloaded.
    Returns: the folder, or the hub name unchanged.
    Raises: ConfigError: a missing path; a run that has not finished (the error names its newest checkpoint); a folder
        without a model or a run.

    >>> model_folder("Qwen/Qwen3-0.6B")
    'Qwen/Qwen3-0.6B'
    """
    name, folder = str(source), Path(source)
    if not str(source).strip():
        raise ConfigError("the name of a model or tokenizer is empty; give a folder or a hub name")
    try:
        folder = folder.expanduser()
        check_access(folder)
        exists, parent_exists = folder.exists(), folder.parent.is_dir()
    except (OSError, RuntimeError) as error:  # a name too long, a folder that may not be read, no such user
        raise ConfigError(f"can't look for {format_value(name)}: {error}; give a folder or a hub name") from error
    if not exists:
        if split_revision(name)[1] is not None:
            return _snapshot(*split_revision(name))
        if name.startswith(("/", ".", "~")) or name.count("/") > 1:
            parent = folder.parent
            hint = nearest(folder.name, _list_names(parent)) if parent_exists else f"; there is no {parent}"
            raise ConfigError(f"there is no folder {name}, and it is not a valid hub name{hint}")
        return name
    if (file := gguf_file(folder)) is not None:
        return convert_gguf(file)
    for path in folder.glob("*.safetensors"):
        if path.stat().st_size < 1024 and path.read_bytes().startswith(b"version https://git-lfs"):
            raise ConfigError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in {name}")
    if folder.is_file():
        raise ConfigError(f"{name} is a file; give its folder")
    for place in (folder, folder / "actor"):
        if _is_model(place) and (place.parent / "shards").is_dir() and not any(place.glob("*.safetensors")):
            return _assemble_shards(place)
    if any((folder / file).is_file() for file in MODEL_FILES):
        return str(folder)
    for part in (folder / "final", folder / "actor"):
        if _is_model(part):
            return str(part)
    is_run, newest = _is_run(folder), _newest_checkpoint(folder)
    state = "is a run that has not finished" if is_run else "has checkpoints, but no model"
    if newest is not None:
        raise ConfigError(f"{name} {state}; resume with trainer.resume=latest, or give its newest checkpoint: {newest}")
    if is_run:
        raise ConfigError(f"{name} {state}, and it has no checkpoint; give the model that it started from")
    if runs := find_runs(folder):
        return _newest_final(name, runs)
    if not any((folder / file).is_file() for file in _list_names(folder)):
        check_access(folder / "config.json")
        content = ", ".join(sorted(_list_names(folder))[:8]) or "nothing"
        raise ConfigError(f"{name} has no model, tokenizer or run, but {content}; give the folder of one")
    return str(folder)


def _assemble_shards(place: Path) -> str:
    """Puts the weights of a model or an adapter in a sharded checkpoint together, if the cache lacks them.

    Args: place: the model's folder in the checkpoint, with its config and tokenizer; the weights are in `shards` beside
        it.
    Returns: the folder in the user's cache. It holds the fp32 master weights, as a whole checkpoint does.
    Raises: ConfigError: the shards can't be read, or the cache can't be written.
    """
    sums = place.parent / "sums.json"
    digest = hashlib.blake2b(sums.read_bytes() if sums.is_file() else str(place.resolve()).encode(), digest_size=8)
    name = f"checkpoints/{place.parent.name}-{place.name}-{digest.hexdigest()}"
    try:
        return convert_once(place, name, lambda folder: _write_assembled(place, folder))
    except ConfigError:
        raise
    except Exception as error:
        cause = error if isinstance(error, CheckpointError) else f"can't assemble {place}: {format_exception(error)}"
        raise ConfigError(f"{cause}; take another checkpoint, or final/ of the finished run") from error


def _write_assembled(place: Path, folder: Path) -> None:
    """Writes the weights, and copies the other files of the model, to an empty folder."""
    import torch
    from safetensors.torch import save_file

    from whet.storage.shards import read_tensors, saved_tensors

    shards, prefix = place.parent / "shards", f"{place.name}.model."
    weights = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in saved_tensors(shards, prefix).items()}
    read_tensors(shards, weights, prefix)
    is_adapter = (place / ADAPTER_CONFIG).is_file()
    name, start = (ADAPTER_WEIGHTS, PEFT_PREFIX) if is_adapter else ("model.safetensors", "")
    save_file({f"{start}{key}": tensor for key, tensor in weights.items()}, folder / name, metadata={"format": "pt"})
    for file in place.iterdir():
        if file.name != "state.pt":
            shutil.copy(file, folder)


def _snapshot(name: str, revision: str | None) -> str:
    """Downloads a hub name at a revision. Returns: its folder in the cache. Raises: ConfigError: that failed."""
    from huggingface_hub import HfApi, constants, snapshot_download

    try:
        skip: list[str] = [*UNUSED_FILES]
        if not constants.HF_HUB_OFFLINE:
            files = HfApi().list_repo_files(name, revision=revision)
            skip += ["*.bin"] if any(file.endswith(".safetensors") for file in files) else []
        return str(snapshot_download(name, revision=revision, ignore_patterns=skip))
    except Exception as error:  # the client does not wrap the errors of its HTTP library
        why = hub_unreachable_reason(error) or format_exception(error, 200)
        raise ConfigError(
            f"{name!r} at revision {revision!r} can't be downloaded from the hub ({why}); check the name, the branch, "
            "tag or commit after the @, and the network"
        ) from error


def resolved_path_message(source: str, folder: str) -> str:
    """Returns the log message for a path that model_folder has resolved. Args: source: the path. folder: the result."""
    newer = []
    for run in reversed(find_runs(Path(source).expanduser())):
        if _is_model(run / "final"):
            break
        newer.append(run.name)
    unfinished = f" ({', '.join(newer)}: newer, and not finished)" if newer else ""
    return f"{source}: using {folder}{unfinished}"


def find_runs(folder: Path) -> list[Path]:
    """Returns the runs in a folder, the most recently written one last."""
    if _is_run(folder) or not folder.is_dir():
        return []
    runs = [folder / name for name in _list_names(folder) if (folder / name).is_dir() and _is_run(folder / name)]
    last_write = lambda run: max((run / n).stat().st_mtime_ns for n in (*RUN_FILES, "final") if (run / n).exists())
    return sorted(runs, key=lambda run: (last_write(run), run.name))


def _newest_final(name: str, runs: Sequence[Path]) -> str:
    """Returns the final model of the newest finished run. Raises ConfigError: none has finished; it lists their
    checkpoints.
    """
    finished = [run for run in runs if _is_model(run / "final")]
    if finished:
        return str(finished[-1] / "final")
    lines = [f"  {run.name}: {_newest_checkpoint(run) or 'no checkpoint'}" for run in reversed(runs)]
    raise ConfigError(
        f"{name} has {len(runs)} run{'s' * (len(runs) != 1)}, and none has finished; give a checkpoint, or finish a "
        "run with trainer.resume=latest:\n" + "\n".join(lines[:8])
    )


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG))


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in RUN_FILES)


def _newest_checkpoint(folder: Path) -> Path | None:
    steps = (*folder.glob("checkpoints/step-*[0-9]"), *folder.glob("step-*[0-9]"))
    return max((p for p in steps if (p / "actor").is_dir()), key=lambda p: p.name, default=None)


def check_hub(name: str) -> None:
    """Asks the hub once for a name that is neither a folder nor cached; transformers would retry for half a minute.

    Raises: ConfigError: the hub does not answer, there is no such model, or the name is invalid. Other errors are left
        to transformers.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(name).expanduser().exists():
        return
    hint = nearest(name, list_folders())
    try:
        if any(isinstance(try_to_load_from_cache(name, file), str) for file in MODEL_FILES):
            return
        HfApi().model_info(name, timeout=10)
    except HFValidationError as error:
        raise ConfigError(f"there is no folder {name!r}, and it is not a valid hub name{hint}") from error
    except Exception as error:  # the client does not wrap the errors of its HTTP library
        if (why := hub_unreachable_reason(error)) is not None:
            raise ConfigError(
                f"there is no folder {name!r} here, and the hub can't be reached ({why}); check "
                f"the path or the network{hint}"
            ) from error
        classes = set(_class_names(error))
        if "RepositoryNotFoundError" in classes and "GatedRepoError" not in classes:
            raise ConfigError(
                f"there is no folder {name!r} here, and no model of that name on the hub that you can access; check "
                f"the name, or log in: hf auth login{hint}"
            ) from error


def list_folders() -> list[str]:
    """Returns names of the folders in the working folder, for messages; [] if it can't be read."""
    return [name for name in _list_names(Path()) if Path(name).is_dir()]


def _list_names(folder: Path) -> list[str]:
    """Returns names of the files and folders in a folder; [] if it can't be read."""
    try:
        return [p.name for p in folder.iterdir()]
    except OSError:
        return []


def hub_unreachable_reason(error: BaseException) -> str | None:
    """Returns why the hub did not answer, from an error of its client; None = another kind of error.

    >>> hub_unreachable_reason(ConnectionError("refused")), hub_unreachable_reason(KeyError())
    ('refused', None)
    """
    classes = set(_class_names(error))
    if "OfflineModeIsEnabled" in classes:
        return "HF_HUB_OFFLINE is set"
    return (str(error) or type(error).__name__).splitlines()[0] if classes & UNREACHABLE else None


def _class_names(error: BaseException | None) -> Iterator[str]:
    """Yields names of the classes of an error and its causes, base classes included."""
    while error is not None:
        yield from (cls.__name__ for cls in type(error).__mro__)
        error = error.__cause__ or error.__context__
