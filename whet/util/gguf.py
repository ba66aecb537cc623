"""GGUF, llama.cpp's format of model files: a file is converted once to a Hugging Face folder in the user's cache.

transformers reads the weights, the config, the tokenizer and its chat template. All other code then works on an
ordinary folder, so GGUF files need no code path elsewhere.
Left out on purpose: training in a GGUF file's own quantisation, and writing GGUF files.
"""

from __future__ import annotations

import functools
import hashlib
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

from whet.errors import ConfigError, format_exception
from whet.util.conversion_cache import convert_once
from whet.util.garbage import pause_collector
from whet.util.install import install_hint

__all__ = ["convert_gguf", "gguf_file"]

FORMAT = 1
"""Version of the converted folder; a part of the hash in its name."""
AGAIN = "download it again, or give the Hugging Face folder or name of the model"


def gguf_file(source: Path) -> Path | None:
    """Returns the GGUF file of a path: the file itself, or the only one in a folder without a Hugging Face model.

    Args: source: a path that exists.
    Returns: None if there is no GGUF file.
    Raises: ConfigError: a folder with several GGUF files.
    """
    if source.is_dir():
        files = [] if (source / "config.json").is_file() else sorted(source.glob("*.gguf"))
        if len(files) > 1:
            names = ", ".join(file.name for file in files[:8])
            raise ConfigError(f"{source} has {len(files)} GGUF files ({names}); give one of them: {files[0]}")
        return files[0] if files else None
    return source if source.suffix == ".gguf" else None


def convert_gguf(file: Path) -> str:
    """Converts a GGUF file to a Hugging Face folder with model and tokenizer, if the cache lacks it.

    The weights are written in the dtype of the file's matrices if all have one unquantised dtype, else in bfloat16.

    Args: file: the GGUF file.
    Returns: the folder in the user's cache; its name has a hash of the file.
    Raises: ConfigError: the package gguf is missing, the file is no GGUF file or damaged, transformers can't read this
        kind of model, or the cache can't be written.

    Example: convert_gguf(Path("SmolLM2-135M-Instruct.Q4_1.gguf")).
    """
    try:
        import gguf  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"{file} is a GGUF model, which needs the package gguf: {install_hint('gguf')}") from error
    _check_start(file)
    try:
        with pause_collector():
            return convert_once(file, f"gguf/{file.stem}-{_digest(file)}", lambda folder: _convert(file, folder))
    except ConfigError:
        raise
    except Exception as error:  # transformers' reader raises errors of any class
        known = f"it reads {', '.join(_known_architectures())}; " if "architecture" in str(error) else ""
        raise ConfigError(
            f"transformers can't read {file}: {format_exception(error)}; {known}give the Hugging Face folder or name "
            "of the model instead"
        ) from error


def _check_start(file: Path) -> None:
    """Raises ConfigError for a file that can be seen from its first bytes not to be a GGUF model."""
    try:
        with file.open("rb") as f:
            start = f.read(40)
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error}") from error
    if not start:
        raise ConfigError(f"{file} is empty; download it again")
    if start.startswith(b"version https://git-lfs"):
        raise ConfigError(f"{file} is a Git LFS pointer, not the model; run `git lfs pull` in {file.parent}")
    if not start.startswith(b"GGUF"):
        raise ConfigError(f"{file} is not a GGUF file: it starts with {start[:16]!r}; {AGAIN}")


def _convert(file: Path, folder: Path) -> None:
    """Writes the model, the tokenizer and a model card with license and base model to an empty folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": file.name}
    hidden_progress = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    with _read_once(file) as reader, hidden_progress:  # transformers' progress bars would fill a log
        if "general.architecture" not in reader.fields:
            raise ConfigError(f"{file} names no architecture (general.architecture), so it is not a model; {AGAIN}")
        kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
        dtype = {"F32": torch.float32, "F16": torch.float16}.get(kinds.pop()) if len(kinds) == 1 else None
        config = AutoConfig.from_pretrained(file.parent, **source)
        model = AutoModelForCausalLM.from_pretrained(file.parent, config=config, dtype=torch.float32, **source)
        unquantized = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        unquantized.load_state_dict(model.state_dict())
        unquantized.to(dtype or torch.bfloat16).save_pretrained(folder)
        AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(folder)
    read_text = lambda key: str(reader.fields[key].contents()) if key in reader.fields else ""
    metadata = {"license": read_text("general.license"), "base_model": read_text("general.base_model.0.repo_url")}
    metadata["base_model"] = metadata["base_model"].removeprefix("https://huggingface.co/")
    lines = [f"{key}: {value}" for key, value in metadata.items() if value]
    card = "\n".join(["---", *lines, "---", "", f"Converted from {file.name}.", ""])
    (folder / "README.md").write_text(card, encoding="utf-8")


@contextmanager
def _read_once(file: Path) -> Iterator[Any]:
    """Reads a file's metadata once; transformers would read it for the config, the weights and the tokenizer.

    Slices of a plain array are several times faster than those of the numpy.memmap that the package gguf uses.
    """
    import gguf  # pyright: ignore[reportMissingImports]
    import numpy as np

    class Reader(gguf.GGUFReader):
        data = property(lambda self: self.array, lambda self, mapped: setattr(self, "array", np.asarray(mapped)))

    try:
        reader = Reader(file)
    except Exception as error:  # of any class
        raise ConfigError(
            f"{file} is cut off or damaged at {file.stat().st_size} bytes: {format_exception(error)}; compare its size "
            f"with the original's, and {AGAIN}"
        ) from error
    originals = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader = lambda path: reader if Path(path).samefile(file) else originals[0](path)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    try:
        yield reader
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = originals


def _digest(file: Path) -> str:
    """Returns a digest of the file's size and of its first and last megabyte, which hold its metadata and weights."""
    size, part = file.stat().st_size, 1 << 20
    digest = hashlib.blake2b(f"{FORMAT} {size}".encode(), digest_size=8)
    with file.open("rb") as f:
        digest.update(f.read(part))
        f.seek(max(0, size - part))
        digest.update(f.read(part))
    return digest.hexdigest()


def _known_architectures() -> list[str]:
    """Returns the architectures whose GGUF files transformers reads."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    return sorted({*GGUF_SUPPORTED_ARCHITECTURES} - {"general", "tokenizer"})
