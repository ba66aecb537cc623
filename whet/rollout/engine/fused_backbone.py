"""FusedBackbone: the decoder blocks of the Llama family, written out with fewer products and without module dispatch.

It reads the parameters of the Hugging Face module. When the engine is built, both run a prompt and are compared: where
the parts don't fit, or the numbers differ, the module itself runs (`FusedBackbone.from_model` returns the reason).
Scale, window and soft-cap of each layer are recorded from the module's own calls of attention.
Dim legend: B rows, T tokens of a row, N = B T, d hidden size, H query heads, K KV heads, D head size.
Left out on purpose: experts, blocks with further norms or multipliers, partial rotary: the module runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whet.errors import format_exception
from whet.models.attention import Layout
from whet.models.loaded_model import LoadedModel
from whet.models.lora_layers import Adapter, plain_linear
from whet.models.modes import eval_mode, max_positions
from whet.models.self_check import PROBE_LENGTH, probe_tokens, tolerance_for
from whet.native.build import Unavailable
from whet.native.decode import DecodeKernels, decode_kernels, unsupported_sizes
from whet.rollout.engine.kv_cache import KVStore
from whet.rollout.engine.kv_pool import PoolCase, PoolLayout
from whet.rollout.engine.native_step import NativeLayer, NativeLayout
from whet.rollout.engine.packed_linear import PackedLinear
from whet.rollout.engine.prefill import PrefillLayout, PrefillSpan

__all__ = ["FusedBackbone"]

BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
ATTENTION_NORMS = {"q_norm", "k_norm"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
TOLERANCE = {"wide": 2e-5, "half": 5e-2}
"""Largest difference from the module's hidden states, relative to the largest of them."""
SILU = {"SiLU", "SiLUActivation"}
"""Activations that the native kernels implement."""


class _UnfitError(Exception):
    """The model has a part that this code does not know."""


class _Recorder(PrefillLayout):
    """Records the options with which the module calls its attention."""

    options: list[dict[str, Any]]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        self.options.append({"layer": layer, **options})
        return super().attend(layer, q, k, v, **options)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Block:
    """One decoder layer."""

    number: int
    before: _Norm
    """The norm before attention."""
    after: _Norm
    """The norm before the MLP."""
    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    act: Callable[[Tensor], Tensor]
    qk_norms: tuple[_Norm, _Norm] | None
    qkv_weight: Tensor | None
    """[H + 2 K, D]: the weights of both norms, head by head; those of queries times `q_scale`; zeros for values."""
    q_scale: float
    kv: int
    options: dict[str, Any]

    @property
    def qk_weight(self) -> Tensor | None:
        """[H + K, D]: those of queries and keys."""
        return None if self.qkv_weight is None else self.qkv_weight[: -self.kv]

    def from_pool(self, h: Tensor, cos: Tensor, sin: Tensor, layout: PoolLayout) -> Tensor:
        """[N, d] -> [N, d], in as few kernels as torch has for it; h is written to.

        Norms take their weight in, and sums their product: those are two roundings to half precision less.
        """
        size, kv = cos.shape[-1], self.kv
        qkv = self.qkv(self.before.in_one(h)).view(h.shape[0], -1, size)
        qk = qkv
        if self.qk_norms is not None and self.qkv_weight is not None:  # of values too: a slice would be copied
            qk = F.rms_norm(qkv, (size,), None, self.qk_norms[0].epsilon).mul_(self.qkv_weight)
        turned, qk = qk.roll(size // 2, -1)[:, :-kv], qk[:, :-kv]
        torch.addcmul(qk * cos, turned, sin, out=qkv[:, :-kv])
        options = self.options
        out = layout.attend_joined(self.number, qkv, kv=kv, scale=options["scale"], window=options["window"])
        h = self.out.add_to(h, out.reshape(h.shape[0], -1))
        gate, up = self.gate_up(self.after.in_one(h)).chunk(2, -1)
        return self.down.add_to(h, self.act(gate).mul_(up))

    def __call__(self, h: Tensor, cos: Tensor, sin: Tensor, layout: Layout, shape: tuple[int, int]) -> Tensor:
        """[N, d] -> [N, d]."""
        if isinstance(layout, PoolLayout):
            return self.from_pool(h, cos, sin, layout)
        size, heads = cos.shape[-1], -self.kv
        qkv = self.qkv(self.before(h, self.qkv.gain)).view(h.shape[0], -1, size)
        qk = qkv[:, :heads]
        if self.qk_norms is not None:
            qk = self.qk_norms[0](qk, None, self.qk_weight)
        qk = torch.addcmul(qk * cos, qk.roll(size // 2, -1), sin)
        parts = (qk[:, :heads], qk[:, heads:], qkv[:, heads:])
        if shape[1] == 1:
            q, k, v = (x.unsqueeze(2) for x in parts)
        else:
            q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in parts)
        attended = layout.attend(self.number, q, k, v, **self.options)  # [B, H, T, D]
        h = self.out(attended.transpose(1, 2).reshape(h.shape[0], -1)).add_(h)
        gate, up = self.gate_up(self.after(h, self.gate_up.gain)).chunk(2, -1)
        return self.down(self.act(gate).mul_(up)).add_(h)

    def native(self) -> NativeLayer:
        """Returns the layer's current parts for the native kernels."""
        norms = self.qk_norms
        folded = self.qkv.gain is not None
        return NativeLayer(
            norm=self.qk_weight,
            epsilons=(norms[0].epsilon, norms[1].epsilon) if norms else (0.0, 0.0),
            scale=self.options["scale"],
            window=self.options["window"],
            before=None if folded else self.before.weight,
            after=None if folded else self.after.weight,
            outer_epsilons=(self.before.epsilon, self.after.epsilon),
            products=(self.qkv, self.out, self.gate_up, self.down),
        )


class _Norm:
    """An RMSNorm module, read at each call. Args: module: a plain RMSNorm."""

    def __init__(self, module: nn.Module) -> None:
        if {n for n, _ in module.named_parameters()} != {"weight"} or "variance_epsilon" not in vars(module):
            raise _UnfitError(f"its norm {type(module).__name__} is not a plain RMSNorm")
        self.module = module
        self.epsilon: float = vars(module)["variance_epsilon"]
        self._least = self.weight.detach().new_full((), self.epsilon)

    @property
    def weight(self) -> Tensor:
        """The module's weight."""
        return self.module._parameters["weight"]  # pyright: ignore

    def __call__(self, x: Tensor, folded: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
        """Normalises the last dim. Args: folded: the weight, if the next product contains it. weight: another one."""
        weight = self.weight if weight is None else weight
        if x.is_cuda and x.dtype.itemsize == 2 and weight is self.weight:  # as in training
            return self.in_one(x)
        if x.dtype != torch.float32:
            return F.rms_norm(x, x.shape[-1:], None, self.epsilon).mul_(weight)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        out = x * torch.addcmul(self._least, length, length, value=1 / x.shape[-1]).rsqrt_()
        return out if folded is not None else out.mul_(weight)

    def in_one(self, x: Tensor) -> Tensor:
        """The same with the weight, in one kernel where torch has it."""
        return F.rms_norm(x, x.shape[-1:], self.weight, self.epsilon)


class FusedBackbone:
    """A model's decoder, from token ids to the hidden states after the last norm."""

    def __init__(
        self, module: nn.Module, options: list[dict[str, Any]], *, without_kernels: Unavailable | None = None
    ) -> None:
        backbone: Any = module.get_decoder()  # pyright: ignore
        wrong = {n for n, _ in backbone.named_children()} ^ {"embed_tokens", "layers", "norm", "rotary_emb"}
        if wrong or type(backbone.embed_tokens) is not nn.Embedding:
            raise _UnfitError(f"its decoder stack differs in {', '.join(sorted(wrong)) or 'its embedding'}")
        self._module, self._backbone = module, backbone
        self._norm = _Norm(backbone.norm)
        self.epoch = 0
        """Counts the moves of the rotary tables."""
        self._cos = self._sin = torch.empty(0)
        self.ensure_positions(PROBE_LENGTH)
        size = self._cos.shape[-1]
        layers = list(zip(backbone.layers, options, strict=True))
        make = lambda kernels: [_make_block(i, y, o, size=size, kernels=kernels) for i, (y, o) in enumerate(layers)]
        self._blocks = make(None)
        self.kernels: DecodeKernels | Unavailable = without_kernels or self._fitting_kernels()
        """The kernels of a decode step, or why torch's run."""
        if not isinstance(self.kernels, Unavailable):
            self._blocks = make(self.kernels)
        self._num_refreshes = 0
        self._fill_norms()

    @classmethod
    def from_model(cls, loaded: LoadedModel, *, native: bool) -> FusedBackbone | Unavailable:
        """Returns the fused backbone of a model, compared with the model; or the reason why the model itself has to
        run.

        Args: loaded: a packable model. native: whether to decode with whet's own kernels and packed weights.
        Returns: the backbone, or the reason.
        """
        if not loaded.lm_head.linear:
            return Unavailable("only the module itself can make its logits")
        module = loaded.module
        if module.get_output_embeddings().weight.dtype != module.get_input_embeddings().weight.dtype:  # pyright: ignore
            return Unavailable("its head has another dtype than its embedding")
        device = next(module.parameters()).device
        ids = torch.tensor([probe_tokens(module.config.vocab_size)], device=device)
        layout = _probe_layout(_Recorder, device)
        layout.options = []
        call = {"position_ids": layout.position_ids, "whet_layout": layout, "use_cache": False}
        with torch.no_grad(), eval_mode(module):
            expected = module.get_decoder()(input_ids=ids, **call).last_hidden_state[0]
        calls = [o.pop("layer") for o in layout.options]
        if calls != list(range(len(calls))):
            return Unavailable(f"its attention is called for layers {calls}")
        limit = tolerance_for(expected.dtype, TOLERANCE) * expected.abs().max().double()
        try:
            fused = cls(module, layout.options, without_kernels=None if native else Unavailable("switched off"))
            with torch.no_grad():
                if not isinstance(fused.kernels, Unavailable):
                    off = _max_difference(fused._decode_probe(ids, fused.kernels), expected[-2:])
                    if off > limit:
                        differs = Unavailable(f"a decode step differs by {off:.1e}")
                        fused = cls(module, layout.options, without_kernels=differs)
                off = _max_difference(fused(ids, _probe_layout(PrefillLayout, device)), expected)
        except _UnfitError as error:
            return Unavailable(str(error))
        except (RuntimeError, TypeError, ValueError) as error:
            return Unavailable(format_exception(error))
        return fused if off <= limit else Unavailable(f"its hidden states differ by {off:.1e}")

    def __call__(self, ids: Tensor, layout: Layout) -> Tensor:
        """Hidden states [N, d] of ids [B, T] after the last norm."""
        h = F.embedding(ids.reshape(-1), self._backbone.embed_tokens.weight)
        if isinstance(layout, NativeLayout):
            block = self._blocks[0]
            heads = (block.qkv.width // self._cos.shape[1] - 2 * block.kv, block.kv)
            layout.set_rotary(self._cos, self._sin, heads)
            more = layout.run(h, self._num_refreshes, lambda: [b.native() for b in self._blocks])
            return layout.kernels.norm(h, more, self._norm.weight, self._norm.epsilon)
        place = layout.position_ids.reshape(-1)
        cos, sin = (x.index_select(0, place).unsqueeze(1) for x in (self._cos, self._sin))
        shape = (ids.shape[0], ids.shape[1])
        for block in self._blocks:
            h = block(h, cos, sin, layout, shape)
        return self._norm(h)

    def _decode_probe(self, ids: Tensor, kernels: DecodeKernels) -> Tensor:
        """Hidden states [2, d] of the last two of ids [1, T], decoded one by one after a prompt of the others."""
        count, prompt, store = ids.shape[1] - 2, KVStore(rows=1, length=PROBE_LENGTH), KVStore()
        store.reserve(1, 2)
        span = PrefillSpan(count=1, start=0, length=count, store=prompt, slot=0)
        self(ids[:, :count], PrefillLayout([span]))
        layout, zero = NativeLayout(kernels, store), np.zeros(1, np.int64)
        layout.regroup({PROBE_LENGTH: prompt}, zero + PROBE_LENGTH, zero, zero + count)
        steps = []
        for i in range(2):
            layout.begin(torch.tensor([count + i]), torch.tensor([i]), longest=i, furthest=count + i, equal=True)
            steps.append(self(ids[:, count + i :][:, :1], layout))
        return torch.cat(steps)

    def _fitting_kernels(self) -> DecodeKernels | Unavailable:
        """Returns the native kernels, or why they can't run this model."""
        weight, first = self._backbone.embed_tokens.weight, self._blocks[0]
        if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
            return Unavailable(f"none for {weight.dtype} on {weight.device.type}")
        adapter = Adapter.from_module(self._module)
        merged = (
            set() if adapter is None else {id(p) for p in adapter.parameters()}
        )  # merged into copies of their layers
        read = [(n, p) for n, p in self._module.named_parameters() if id(p) not in merged]
        if wrong := sorted(n for n, p in read if p.dtype != weight.dtype or not p.is_contiguous()):
            return Unavailable(f"{', '.join(wrong[:3])}: of another dtype than the embedding, or not contiguous")
        if any(b.options["softcap"] is not None or b.options["sinks"] is not None for b in self._blocks):
            return Unavailable("soft-capped scores or sinks")
        if any(type(b.act).__name__ not in SILU for b in self._blocks):
            names = sorted({type(b.act).__name__ for b in self._blocks})
            return Unavailable(f"its activations are {', '.join(names)}")
        if any((b.kv, b.qkv.width) != (first.kv, first.qkv.width) for b in self._blocks):
            return Unavailable("heads differ from layer to layer")
        widths = {weight.shape[1], *(b.gate_up.width // 2 for b in self._blocks)}
        kernels = decode_kernels()
        if isinstance(kernels, Unavailable):
            return kernels
        return unsupported_sizes(kernels, self._cos.shape[1], widths) or kernels

    def ensure_positions(self, positions: int) -> None:
        """Makes the rotary tables long enough for this many positions."""
        weight = self._backbone.embed_tokens.weight
        if positions > len(self._cos):
            longest = max_positions(self._module)  # beyond it some kinds of rotary embedding change all their angles
            count = 1 << (positions - 1).bit_length()
            count = count if longest is None else max(positions, min(count, longest))
            cos, sin = self._backbone.rotary_emb(weight, torch.arange(count, device=weight.device).unsqueeze(0))
            low, high = sin[0].chunk(2, -1)
            self._cos, self._sin = cos[0].contiguous(), torch.cat([-low, high], -1)
            self.epoch += 1

    def pool_case(self) -> PoolCase | str:
        """Returns the properties of its attention for a KVPool, or why it can't have one."""
        weight, size = self._backbone.embed_tokens.weight, self._cos.shape[1]
        if any(b.options["softcap"] is not None or b.options["sinks"] is not None for b in self._blocks):
            return "soft-capped scores or sinks"
        cases = {
            PoolCase(weight.device, weight.dtype, b.qkv.width // size - 2 * b.kv, b.kv, size, b.options["scale"])
            for b in self._blocks
        }
        return cases.pop() if len(cases) == 1 else "heads differ from layer to layer"

    def join_products(self) -> None:
        """Makes the weights of queries, keys and values views of one buffer, and those of gate and up."""
        for product in self.products():
            product.join()

    def products(self) -> Iterator[PackedLinear]:
        """Yields all products."""
        for b in self._blocks:
            yield from (b.qkv, b.out, b.gate_up, b.down)

    def refresh(self) -> None:
        """Computes again what is derived from the parameters."""
        for product in self.products():
            product.refresh()
        self._num_refreshes += 1
        self._fill_norms()

    def _fill_norms(self) -> None:
        """Copies the weights of the query and key norms, in place."""
        for b in self._blocks:
            if b.qkv_weight is not None and b.qk_norms is not None:
                with torch.no_grad():
                    b.qkv_weight[: -2 * b.kv] = b.qk_norms[0].weight * b.q_scale
                    b.qkv_weight[-2 * b.kv : -b.kv] = b.qk_norms[1].weight


def _known_children(module: nn.Module, known: set[str], optional: set[str] = frozenset()) -> dict[str, Any]:  # pyright: ignore
    """Returns the children of a module. Raises _UnfitError: others than the known ones, or a linear one that is not
    plain.
    """
    parts = dict(module.named_children())
    if wrong := (set(parts) - optional) ^ known:
        raise _UnfitError(f"its {type(module).__name__} differs in {', '.join(sorted(wrong))}")
    for name, part in parts.items():
        if name.endswith("_proj") and plain_linear(part) is None:
            raise _UnfitError(f"its {name} is a {type(part).__name__}")
    return parts


def _make_block(
    number: int, layer: nn.Module, options: dict[str, Any], *, size: int, kernels: DecodeKernels | None
) -> _Block:
    """Returns the block of one layer. Raises _UnfitError: the layer has another structure."""
    parts = _known_children(layer, BLOCK)
    attention = _known_children(parts["self_attn"], ATTENTION_PARTS, ATTENTION_NORMS)
    mlp = _known_children(parts["mlp"], MLP_PARTS)
    norms, weight, scale = None, None, 1.0
    kv = plain_linear(attention["k_proj"]).weight.shape[0] // size  # pyright: ignore[reportOptionalMemberAccess]
    before, after = _Norm(parts["input_layernorm"]), _Norm(parts["post_attention_layernorm"])
    if ATTENTION_NORMS & set(attention):
        norms = (_Norm(attention["q_norm"]), _Norm(attention["k_norm"]))
        queries = plain_linear(attention["q_proj"]).weight.shape[0]  # pyright: ignore[reportOptionalMemberAccess]
        heads = queries // size + 2 * kv
        weight = norms[0].weight.new_zeros(heads, size)
        if weight.dtype == torch.float32:  # half precision keeps the module's roundings
            scale, options = options["scale"], {**options, "scale": 1.0}
    product = lambda *layers, norm=None: PackedLinear(layers, norm=norm and norm.module, kernels=kernels)
    return _Block(
        number=number,
        before=before,
        after=after,
        qkv=product(attention["q_proj"], attention["k_proj"], attention["v_proj"], norm=before),
        out=product(attention["o_proj"]),
        gate_up=product(mlp["gate_proj"], mlp["up_proj"], norm=after),
        down=product(mlp["down_proj"]),
        act=mlp["act_fn"],
        qk_norms=norms,
        qkv_weight=weight,
        q_scale=scale,
        kv=kv,
        options=options,
    )


def _max_difference(actual: Tensor, expected: Tensor) -> float:
    """Returns the largest difference; infinite for NaN and for different shapes."""
    off = (actual.double() - expected.double()).abs().max().item() if actual.shape == expected.shape else float("inf")
    return float("inf") if off != off else off


def _probe_layout(kind: type, device: torch.device) -> Any:
    """Returns a layout of one short prompt, with its own store."""
    store = KVStore(rows=1, length=PROBE_LENGTH)
    span = PrefillSpan(count=1, start=0, length=PROBE_LENGTH, store=store, slot=0)
    return kind([span], span.positions[None].to(device))
