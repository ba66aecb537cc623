"""One copy of a LoRA policy's frozen weights for the trainer and vLLM: the trainer's are views of vLLM's tensors.

    vLLM's qkv_proj [n_q + n_k + n_v, in]     q_proj = rows 0..n_q, k_proj = the next n_k, v_proj = the last n_v
    vLLM's gate_up_proj [2 m, in]             gate_proj = rows 0..m, up_proj = the rest
    vLLM's embed_tokens [V + padding, h]      embed_tokens = rows 0..V

vLLM then adds the adapter itself, y = W x + s B A x, and each update sends it A and B alone. A parameter becomes a view
only where shape, dtype and device are the same and every number is equal; the others stay copies, and the log counts
them. vLLM gives up its KV alone while a step is trained (`LLM.release_kv_cache_memory`), so the weights stay where they
are, and it must never load others.
Left out on purpose: weights that are trained, packed in 4 bits, or divided among processes; adapters that are more than
s B A, of several ranks, or of experts.
Dim legend: V vocabulary, h hidden size, m of the MLP, r rank.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from whet.errors import EngineError
from whet.models.lora_layers import BASE_LAYER, Adapter, base_parameters, plain_linear
from whet.models.quantized import is_quantized_layer
from whet.util.tensor_subclasses import is_sharded

__all__ = ["SharedWeights", "sharing_obstacle", "views_of_fused"]

log = logging.getLogger("whet")

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM reserves memory."""
GB = 1e9


def sharing_obstacle(module: nn.Module) -> str | None:
    """Returns why a policy can't share its frozen weights with vLLM; None = it can.

    >>> sharing_obstacle(nn.Linear(2, 2))
    'the policy has no adapter, so all its weights change'
    """
    if (adapter := Adapter.from_module(module)) is None:
        return "the policy has no adapter, so all its weights change"
    if any(is_quantized_layer(x.get_base_layer()) for x in adapter.layers.values()):
        return "the policy's weights are in 4 bits"
    if any(plain_linear(x) is None or x.merged for x in adapter.layers.values()):
        return "its adapter is more than a product of two matrices, or is merged"
    if len({name for x in adapter.layers.values() for name in x.lora_A}) > 1:
        return "it has several adapters"
    if len(ranks := sorted({r for x in adapter.layers.values() for r in x.r.values()})) > 1 or ranks[0] > RANKS[-1]:
        return f"its adapter has the ranks {ranks}, and vLLM takes one, of at most {RANKS[-1]}"
    if any(is_sharded(p) for p in module.parameters()):
        return "several processes divide its weights"
    own = {id(p) for p in adapter.parameters()}
    if trained := [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in own]:
        return f"{trained[0]} is trained too"
    return None


def views_of_fused(
    tensors: Mapping[str, Tensor], fused: Mapping[str, Sequence[str]], shapes: Mapping[str, torch.Size]
) -> Iterator[tuple[str, Tensor]]:
    """(name, view) of each weight that lies in a tensor of vLLM: whole, without padded rows, or as rows of a fused one.

    Args: tensors: of vLLM's model, by its names. fused: name of a fused layer -> the layers in it, in order. shapes: of
        the weights, by their names. Returns: also those whose shape or dtype differ.

    >>> tensors = {"qkv.base_layer.weight": torch.arange(4.0)[:, None], "embed.weight": torch.zeros(64, 2)}
    >>> shapes = {"q.weight": torch.Size([2, 1]), "k.weight": torch.Size([1, 1]), "v.weight": torch.Size([1, 1])}
    >>> views = dict(views_of_fused(tensors, {"qkv": ["q", "k", "v"]}, shapes | {"embed.weight": torch.Size([60, 2])}))
    >>> views["k.weight"], len(views["embed.weight"])
    (tensor([[2.]]), 60)
    """
    for path, tensor in tensors.items():
        layer, _, kind = BASE_LAYER.sub("", path).rpartition(".")
        before, _, last = layer.rpartition(".")
        names = [".".join(filter(None, (before, part, kind))) for part in fused.get(last, [last])]
        if not tensor.dim() or any(name not in shapes for name in names):
            continue
        rows = [shapes[name][0] for name in names]
        if sum(rows) <= len(tensor):
            yield from zip(names, tensor[: sum(rows)].split(rows), strict=True)


class SharedWeights:
    """The frozen weights of a policy with an adapter, and where their memory is: its own, or vLLM's.

    Args: module: a model for which `sharing_obstacle` is None.
    """

    def __init__(self, module: nn.Module) -> None:
        adapter = Adapter.from_module(module)
        assert adapter is not None, "sharing_obstacle says so before"
        self._adapter, self._module = adapter, module
        self._base = {name: p for name, (p, _) in base_parameters(module).items()}
        self.device = next(iter(self._base.values())).device
        self.rank = next(iter(next(iter(adapter.layers.values())).r.values()))
        """Rank of the adapter."""
        self.shared_bytes = 0
        """Bytes of the weights that lie in vLLM's memory."""

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of vLLM's LLM for one adapter like this one."""
        return {
            "enable_lora": True,
            "max_loras": 1,
            "max_cpu_loras": 1,
            "max_lora_rank": next(rank for rank in RANKS if rank >= self.rank),
            "lora_target_modules": sorted({name.rpartition(".")[2] for name in self._adapter.layers}),
        }

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the frozen weights, which vLLM loads once."""
        yield from ((name, p.detach()) for name, p in self._base.items())

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(the module's own name, tensor) of A and B of each layer, trained or not."""
        own = {id(p) for p in self._adapter.parameters()}
        yield from ((name, p.detach()) for name, p in self._module.named_parameters() if id(p) in own)

    def to_host(self) -> None:
        """Moves the weights to the host, so that the device has room for vLLM, or vLLM may free its tensors."""
        for p in self._distinct():
            p.data = p.data.to("cpu", copy=True)
        self.shared_bytes = 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # vLLM reads what the driver has left

    def to_device(self) -> None:
        """Moves the weights to the device, into memory of their own; no effect where they are there."""
        for p in self._distinct():
            p.data = p.data.to(self.device)

    def share(self, llm: Any) -> None:
        """Makes each weight a view of vLLM's tensor that holds it, and copies the others to the device.

        Args: llm: vLLM's LLM, which has loaded `base_weights`.
        """
        tensors, fused = llm.apply_model(_tensors_of)[0]
        views = dict(views_of_fused(tensors, fused, {name: p.shape for name, p in self._base.items()}))
        names = {id(p): name for name, p in reversed(self._base.items())}
        total, copied = 0, []
        for p in self._distinct():
            own, name = p.data.to(self.device), names[id(p)]
            if (view := views.get(name)) is not None and _is_equal(view, own):
                p.data = view
                self.shared_bytes += own.nbytes
            else:
                p.data = own
                copied.append(name)
            total += own.nbytes
        message = "LoRA's base weights are shared with vLLM: %.3f of %.3f GB; %d of %d tensors are copies%s"
        some = f" ({', '.join(copied[:3])}{', ...' if len(copied) > 3 else ''})" if copied else ""
        level = logging.WARNING if copied else logging.INFO
        log.log(level, message, self.shared_bytes / GB, total / GB, len(copied), len(names), some)

    def write_adapter(self, weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
        """Writes the adapter as vLLM reads it, in PEFT's format with s in B: A [r in], s B [out r], of each layer.

        Args: weights: (the module's own name, tensor) of A and B, as ModelWorker.trained_weights. folder: exists.
        Raises: EngineError: a tensor is missing; vLLM would leave out its layer.
        """
        given, tensors = dict(weights), dict[str, Tensor]()
        for path, layer in self._adapter.layers.items():
            for name, scale in layer.scaling.items():
                for kind, factor in (("lora_A", 1.0), ("lora_B", scale)):
                    if (tensor := given.get(f"{path}.{kind}.{name}.weight")) is None:
                        raise EngineError(
                            f"the weights leave out {kind} of {path}; send all that are trained, as "
                            "ModelWorker.trained_weights does"
                        )
                    tensors[f"base_model.model.{path}.{kind}.weight"] = (tensor.float() * factor).cpu().contiguous()
        save_file(tensors, folder / "adapter_model.safetensors")
        targets = self.arguments()["lora_target_modules"]
        config = {"peft_type": "LORA", "r": self.rank, "lora_alpha": self.rank, "target_modules": targets}
        (folder / "adapter_config.json").write_text(json.dumps(config))

    def _distinct(self) -> list[nn.Parameter]:
        """Returns the weights, a shared one once."""
        return list({id(p): p for p in self._base.values()}.values())


def _is_equal(view: Tensor, own: Tensor) -> bool:
    """Returns whether a tensor of vLLM can stand for one of the trainer's: the same numbers, and autograd takes it."""
    kinds = [(t.shape, t.dtype, t.device) for t in (view, own)]
    return kinds[0] == kinds[1] and not view.is_inference() and torch.equal(view, own)


def _tensors_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Returns the tensors of vLLM's model by its names, and the layers that each of its fused layers has."""
    return {name: p.data for name, p in model.named_parameters()}, dict(getattr(model, "packed_modules_mapping", {}))
