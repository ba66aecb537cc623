"""A worker's files: the files of one model in a checkpoint, and the exported model.

    whole weights     model.safetensors, config.json                         under the module's own names
    an adapter        adapter_model.safetensors, adapter_config.json         PEFT's format: no weight of the base
                      generation_config.json                                 of a language model's whole weights
    and               optimizer.safetensors, state.pt                        by the name of the parameter
    sharded           the configs and state.pt; all tensors are in the shards of the checkpoint (parallel/shards.py)
    a learned prompt  prompt_encoder.safetensors                             what makes the adapter

Optimizer, state and prompt encoder may be in a folder `whet` beside the weights, since some programs take every
safetensors file of a folder for weights. A saved adapter is copied into the one that the run created from its settings,
so that it is never applied twice.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from whet.errors import CheckpointError, ConfigError
from whet.models.load import DTYPES, save_model
from whet.models.loaded_model import LoadedModel
from whet.models.lora import adapter_tensors, load_adapter_weights, save_adapter, save_adapter_config
from whet.models.prompt_tuning import ENCODER, is_prompt_tuned
from whet.storage.checkpoint import (
    CHECKPOINT_FORMAT,
    check_format,
    check_same_weights,
    load_weights,
    named_weights,
    read_state,
    save_weights,
    write_state,
)
from whet.storage.model_paths import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_PREFIX
from whet.train.optimizer import Optim

if TYPE_CHECKING:
    from whet.parallel.shards import ShardReader

__all__ = ["ModelFiles", "separate_training_state"]

STATE_FOLDER = "whet"
"""The folder beside the weights that may hold the training state."""
_RESUMED = ("optimizer.safetensors", "state.pt")


class ModelFiles:
    """The files of one model.

    Args: loaded: the model. optim: its optimizer; None = it is not trained. has_masters: the model's own parameters are
        the optimizer's masters, gathered from several processes.

    Example: `ModelFiles(worker.loaded, worker.optim).write(folder, version=3)`.
    """

    def __init__(self, loaded: LoadedModel, optim: Optim | None, *, has_masters: bool = False) -> None:
        self.loaded, self.optim = loaded, optim
        self.masters = {} if optim is None or has_masters else optim.masters_by_name()
        self.adapted = loaded.adapter is not None

    def paths(self, folder: Path) -> list[Path]:
        """Returns the model's files in its folder of a checkpoint."""
        weights = (ADAPTER_WEIGHTS, ADAPTER_CONFIG) if self.adapted else ("model.safetensors", "config.json")
        rest = _RESUMED[1:] if self.optim is None else _RESUMED
        rest = (*rest, ENCODER) if is_prompt_tuned(self.loaded.module) else rest
        return [*(folder / name for name in weights), *(_state_folder(folder) / name for name in rest)]

    def write(self, folder: Path | None, version: int) -> None:
        """Writes everything that a resumed worker needs.

        Args: folder: None = another rank writes; this one gives it its shards of the optimizer's state. version: of the
            policy.
        """
        if folder is None:
            if self.optim is not None:
                self.optim.save(None)
            return
        if self.adapted:
            save_adapter(self.loaded.module, folder, self.masters)
        else:
            save_weights(self.loaded.module, folder / "model.safetensors", self.masters)
            self._write_config(folder)
        state: dict[str, Any] = {"format": CHECKPOINT_FORMAT, "version": version}
        if self.optim is not None:
            state["optim"] = self.optim.save(folder / "optimizer.safetensors")
        write_state(state, folder / "state.pt")

    def _write_config(self, folder: Path) -> None:
        config = copy.deepcopy(self.loaded.module.config)
        config.dtype = self.loaded.saved_dtype  # the model's own; what lies here is its fp32 masters
        config.save_pretrained(folder)
        if self.loaded.module.can_generate():  # as it is: transformers' save_pretrained refuses some that run
            self.loaded.module.generation_config.to_json_file(folder / "generation_config.json")  # pyright: ignore

    def shards(self) -> tuple[dict[str, Tensor], Any]:
        """Returns what a resumed worker needs: this process's shards of the tensors, and the optimizer's plain state.

        Returns: "model.<parameter>" and "optim.<parameter>.<key>" -> tensor; the state, for `write_plain`.
        """
        tensors = {f"model.{name}": tensor for name, tensor in self._weights().items()}
        if self.optim is None:
            return tensors, None
        moments, rest = self.optim.state(sharded=True)
        return {**tensors, **{f"optim.{name}": tensor for name, tensor in moments.items()}}, rest

    def write_plain(self, folder: Path, version: int, rest: Any) -> None:
        """Writes the files of a sharded checkpoint besides the shards. Args: rest: from `shards`."""
        if not self.adapted:
            self._write_config(folder)
        elif not is_prompt_tuned(self.loaded.module):
            save_adapter_config(self.loaded.module, folder)
        state = {"format": CHECKPOINT_FORMAT, "version": version}
        write_state(state if rest is None else {**state, "optim": rest}, folder / "state.pt")

    def _weights(self) -> dict[str, Tensor]:
        """Returns the weights that a checkpoint holds, by the module's names, an adapter's by PEFT's; masters in place
        of parameters.
        """
        module = self.loaded.module
        if self.adapted and not is_prompt_tuned(module):
            masters = {id(p): self.masters.get(n, p) for n, p in module.named_parameters()}
            return {n: masters.get(id(p), p).detach() for n, p in adapter_tensors(module).items()}
        if self.adapted:
            return {n: self.masters.get(n, p).detach() for n, p in module.named_parameters() if p.requires_grad}
        return {n: t.detach() for n, t in {**named_weights(module), **self.masters}.items()}

    def read_shards(self, folder: Path, shards: ShardReader) -> int:
        """Restores what `shards` and `write_plain` gave. Returns: the version.

        Args: folder: the model's folder in the checkpoint. shards: a reader of this model's names.
        Raises: CheckpointError: it doesn't fit this model; nothing is changed if names or shapes differ.
        """
        state = read_state(folder / "state.pt", needs=("version",) if self.optim is None else ("version", "optim"))
        check_format(folder / "state.pt", state.get("format"), weights=folder)
        weights, saved = self._weights(), shards.with_prefix("model.")
        check_same_weights(saved.folder, weights, {name: shape for name, (shape, _) in saved.tensors.items()})
        saved.read(weights)
        for name, p in self.loaded.module.named_parameters():
            if self.masters.get(name, p) is not p:
                p.data.copy_(self.masters[name])
        if self.optim is not None:
            of_optim = shards.with_prefix("optim.")
            moments = {n: self.optim.empty_moment(n, *kind) for n, kind in of_optim.tensors.items()}
            of_optim.read(moments)
            self.optim.load(folder / "optimizer.safetensors", state["optim"], moments)
        return state["version"]

    def check(self, folder: Path) -> None:
        """Raises CheckpointError if a checkpoint holds an adapter and this model has none, or the reverse."""
        there, whole = (folder / ADAPTER_WEIGHTS).is_file(), (folder / "model.safetensors").is_file()
        if there != self.adapted and (there or whole):
            raise CheckpointError(
                f"{folder} holds {'an adapter' if there else 'whole weights'}, and this run trains "
                f"{'all weights' if there else 'an adapter'}; resume with {'its' if there else 'no'} section lora, or "
                "start a new run from those weights"
            )

    def read(self, folder: Path) -> int:
        """Restores what `write` wrote. Returns: the version. Raises CheckpointError if it doesn't fit this model."""
        self.check(folder)
        path = _state_folder(folder) / "state.pt"
        state = read_state(path, needs=("version",) if self.optim is None else ("version", "optim"))
        check_format(path, state.get("format"), weights=folder)
        if self.adapted:
            learned = is_prompt_tuned(self.loaded.module)
            path = _state_folder(folder) / ENCODER if learned else folder / ADAPTER_WEIGHTS
            try:
                adapter = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in load_file(path).items()}
                load_adapter_weights(self.loaded.module, adapter, str(path), self.masters)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{path} can't be read ({error}); resume from an earlier step-* folder"
                ) from error
            except ConfigError as error:
                raise CheckpointError(str(error)) from error
        else:
            load_weights(self.loaded.module, folder / "model.safetensors", self.masters)
        if self.optim is not None:
            self.optim.load(_state_folder(folder) / "optimizer.safetensors", state["optim"])
        return state["version"]

    def export(self, folder: Path, tokenizer: Any, *, merge: bool, dtype: str = "auto") -> None:
        """Writes the model in Hugging Face's format, from the fp32 masters if there are any.

        Args: tokenizer: saved with it; None = none. merge: write an adapted model whole, with the adapter merged.
            dtype: of the weights; auto = that of the model's files, fp32 for an adapter.
        """
        own = None if self.adapted and not merge else self.loaded.saved_dtype
        with self._masters_in():
            written = own if dtype == "auto" else DTYPES[dtype]
            save_model(self.loaded, tokenizer, folder, merge=merge, dtype=written)

    @contextmanager
    def _masters_in(self) -> Iterator[None]:
        """Returns a context in which the module's parameters are the fp32 masters."""
        masters = self.masters
        params = dict(self.loaded.module.named_parameters())
        originals = {n: p.data for n, p in params.items() if n in masters and masters[n] is not p}
        try:
            for name in originals:
                params[name].data = masters[name].data
            yield
        finally:
            for name, data in originals.items():
                params[name].data = data


def separate_training_state(folder: Path) -> None:
    """Moves the training state from a model's folder to the folder `whet` in it."""
    (folder / STATE_FOLDER).mkdir()
    for name in (*_RESUMED, ENCODER):
        if (folder / name).exists():
            (folder / name).rename(folder / STATE_FOLDER / name)


def _state_folder(folder: Path) -> Path:
    """Returns the folder of a model's training state."""
    return folder / STATE_FOLDER if (folder / STATE_FOLDER).is_dir() else folder
