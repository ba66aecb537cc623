"""A prediction of whet's speed on GPUs, to be refuted by the first run on one: counted kernels and bytes.

    python benchmarks/predict_gpu.py      the table of docs/one-gpu.md, in Markdown

Kernels are counted with models of one and of two layers: a decode step by its operations on the processor, in the form
that runs on a GPU, with a norm and an attention as one kernel each; forward and backward passes on the meta device,
with transformers' own layers, attention as one kernel, a norm as one forward and two backward, and what is compiled as
one for each function. A decode step takes
its kernels' time in a graph, and the time to read weights and KV. A pass of training takes what is longer, the launches
or the work: products at a share of the peak, and what is kept for the backward pass written once and read twice. What
these leave out makes a GPU slower: gaps in rollouts, the kernels that varlen_attn launches besides its own, rewards.
"""

from __future__ import annotations

import collections
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import tasks
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from whet.config import RoleConfig
from whet.models import compiled, varlen
from whet.models.attention import ATTENTION
from whet.models.fast_layers import FastLayers
from whet.models.rotary import rotate
from whet.rollout.base import Request, Sampling
from whet.rollout.engine.engine import EmbeddedEngine
from whet.train.memory_plan import ModelSizes, ShapesLayout, measure_model

NODE_S, LAUNCH_S = 1.7e-6, 6e-6
"""Seconds of a small kernel in a graph, and of one that Python launches: assumed."""
PRODUCT_SHARE, COPY_SHARE = 0.6, 0.8
"""Shares of the peak rate of products and of the bandwidth that kernels reach: assumed."""
ROWS, PROMPT, COMPLETION = 256, 128, 512
"""The step of recipes/gsm8k_qwen3_0.6b.yaml: 32 prompts with 8 completions; their mean lengths are assumed."""


class Device(NamedTuple):
    """Rates by the maker's data sheet: bytes a second, and bf16 operations a second without sparsity."""

    name: str
    bandwidth: float
    peak: float


DEVICES = (
    Device("H200", 4.8e12, 989e12),
    Device("H100", 3.35e12, 989e12),
    Device("A100 80 GB", 2.04e12, 312e12),
    Device("RTX 4090", 1.01e12, 165e12),
    Device("L4", 0.30e12, 121e12),
)


class Kernels(TorchDispatchMode):
    """Counts operations that are kernels on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and counts it if it fills memory: views and the allocation of memory are no kernels."""
        read = {_place(x) for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        made = any(_place(x) not in read for x in tree_iter(out) if isinstance(x, torch.Tensor))
        self.count += func._schema.is_mutable or (made and "empty" not in func.overloadpacket.__name__)
        return out


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def per_layer(count: Callable[[int], int]) -> tuple[int, int]:
    """Kernels of a layer, and outside the layers. Args: count: layers -> kernels."""
    one, two = count(1), count(2)
    return two - one, 2 * one - two


def _varlen_attn(q: Any, *tables: Any, **options: Any) -> Any:
    """One kernel, which returns its log-sum-exp too."""
    return (q.clone(), q.new_empty(q.shape[1], len(q))) if "return_aux" in options else q.clone()


def decode_kernels(layers: int) -> int:
    """Kernels of one decode step of a small Qwen3, as it runs on a GPU: a captured part, the head and the draws."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
        pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(torch.bfloat16).eval()
    engine = EmbeddedEngine(model, max_batch=16, native=False)
    engine._use_pool()
    counts, decode = [], engine._runner.decode

    def counted(steps: int, *args: Any) -> Any:
        with Kernels() as kernels:
            out = decode(steps, *args)
        counts.append((steps, kernels.count))
        return out

    engine._runner.decode = counted  # type: ignore[method-assign]
    prompt = np.arange(40, dtype=np.int32) % 60 + 1
    sampling = Sampling(max_tokens=9, temperature=1.0)
    engine.submit([Request(id=i, tokens=prompt, sampling=sampling, group=0, rng_key=(0, 0, 0, i)) for i in range(4)])
    with (
        mock.patch.object(varlen, "varlen_attn", _varlen_attn),
        mock.patch.object(torch.nn.functional, "rms_norm", lambda x, *options: x.clone()),
    ):
        while engine.step():
            pass
    steps, count = counts[-1]
    return round(count / steps)


class _Attention(torch.autograd.Function):
    """Attention as one kernel, forward and backward."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


class _Layout(ShapesLayout):
    def attend(self, layer: int, q: Any, k: Any, v: Any, **options: Any) -> Any:
        return _Attention.apply(q, k, v)


def pass_kernels(layers: int) -> int:
    """Kernels of a forward and backward pass of a Qwen3 on the meta device, without the head."""
    import transformers
    from transformers.models.qwen3 import modeling_qwen3

    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()
    model.set_attn_implementation(ATTENTION)
    layout, ids, fast = _Layout(64), torch.zeros(1, 64, dtype=torch.long, device="meta"), FastLayers(model)
    kernels = Kernels()

    def one_kernel(case: Any) -> Callable[..., Any]:
        def run(*rows: Any) -> Any:
            kernels.count += 1
            with _disable_current_modes():
                return case.function(*rows)

        return run

    with (
        mock.patch.multiple(compiled, DEVICE="meta", MIN_ROWS=1, _kernel=one_kernel),
        kernels,
        fast.enabled(),
        mock.patch.object(modeling_qwen3, "apply_rotary_pos_emb", rotate),
    ):
        out = model.model(input_ids=ids, position_ids=layout.position_ids, whet_layout=layout, use_cache=False)
        out.last_hidden_state.sum().backward()
    norms = sum(hasattr(x, "variance_epsilon") for x in model.modules())
    return kernels.count + 3 * layers + 3 * norms  # attention forward, and two kernels backward; norms too


def recipe_sizes() -> tuple[ModelSizes, int]:
    """The sizes of Qwen3-0.6B, and its layers."""
    from transformers import Qwen3Config

    s = tasks.SHAPES["qwen3-0.6b"]
    config = Qwen3Config(
        vocab_size=s["vocabulary"], hidden_size=s["width"], intermediate_size=s["mlp"], num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"], num_key_value_heads=s["kv_heads"], head_dim=s["head"],
        tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(Path(folder))
        return measure_model(RoleConfig(model=folder), trained=True), s["layers"]


def table() -> str:
    """The table, with the counts that it follows from."""
    sizes, layers = recipe_sizes()
    (step_layer, step_rest), (pass_layer, pass_rest) = per_layer(decode_kernels), per_layer(pass_kernels)
    step, one_pass = layers * step_layer + step_rest, layers * pass_layer + pass_rest
    kv = ROWS * (PROMPT + COMPLETION // 2) * sizes.kv_bytes
    tokens = ROWS // 8 * PROMPT + ROWS * COMPLETION
    passes = -(-tokens // 16384)
    rows = collections.OrderedDict()
    for device in DEVICES:
        decode = step * NODE_S + (sizes.weight_bytes + kv) / (device.bandwidth * COPY_SHARE)
        products = 6 * sizes.parameters * tokens * 4 / 3 / (device.peak * PRODUCT_SHARE)  # with full checkpointing
        copies = 3 * sizes.activation_bytes * tokens / (device.bandwidth * COPY_SHARE)
        update = max(passes * one_pass * 4 / 3 * LAUNCH_S, products + copies)
        score = update / 3
        rows[device.name] = (ROWS / decode, tokens / update, COMPLETION * decode + score + update)
    lines = [
        f"A decode step is {step:,} kernels ({step_layer} a layer, {step_rest} outside), and reads "
        f"{sizes.weight_bytes / 1e9:.1f} GB of weights and {kv / 1e9:.1f} GB of KV. A forward and backward pass is "
        f"{one_pass:,} kernels ({pass_layer} a layer), without the second forward pass of checkpointing.",
        "",
        "| GPU | rollout, tokens a second | update, tokens a second | step, seconds |",
        "|---|---|---|---|",
    ]
    for name, (rollout, update, step_s) in rows.items():
        lines.append(f"| {name} | {rollout / 1e3:.0f}k | {update / 1e3:.0f}k | {step_s:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
