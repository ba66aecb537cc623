"""`whet doctor`: what this machine can run, and what to install where something is missing."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import Qwen3Config

from whet.config import RolloutConfig, RunConfig, load_run
from whet.errors import format_exception
from whet.native import build
from whet.observe.environment import collect_environment
from whet.rollout.base import Sampling
from whet.rollout.vllm import unsuitable_reason
from whet.train.memory_plan import GB, ModelSizes, free_gpu_memory, measure_model, plan_memory

__all__ = ["doctor_text", "largest_models"]

_QWEN3 = {"8B": (36, 4096, 12288, 32), "4B": (36, 2560, 9728, 32), "1.7B": (28, 2048, 6144, 16),
          "0.6B": (28, 1024, 3072, 16)}  # fmt: skip
"""Name -> layers, width, width of the gate, heads."""
_ENGINES = {name: f"install the extra {name} (whet docs engines)" for name in ("vllm", "sglang")}


def doctor_text(memory: float | None = None) -> str:
    """Returns the findings, one a line. Args: memory: bytes of a GPU to plan for; None = what is free on this one."""
    facts, cuda = collect_environment(), torch.cuda.is_available()
    memory = free_gpu_memory() if memory is None else memory
    reason = unsuitable_reason(RolloutConfig(), [Sampling()], device=torch.device("cuda" if cuda else "cpu"))
    kernels = build.load_library("decode")
    compiler = kernels.compiler if isinstance(kernels, build.Library) else f"none ({kernels}); install g++ or clang++"
    lines = {
        "device": ", ".join(facts["devices"]) or f"no GPU; CPU: {facts['cpu']['model']}",
        "driver": _driver() or "no NVIDIA driver found (nvidia-smi does not run)",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "bfloat16": _bfloat16(cuda),
        "C++ compiler": compiler,
        "C++ kernels": "run on the CPU" if isinstance(kernels, build.Library) else "off",
        "Triton": f"{'' if find_spec('triton') else 'not '}installed; it compiles flex attention, gates and rotary "
        "embeddings on a GPU",
        "rollout engine": f"embedded, {'on the GPU' if cuda else 'on the CPU'}",
        "rollout_engine=auto": f"embedded, since {reason}" if reason else "vllm",
        **{
            name: "installed" if find_spec(name) else f"not installed; optional: {how}"
            for name, how in _ENGINES.items()
        },
        "matrix product": _product("cuda" if cuda else "cpu"),
        "free memory": "no GPU; whet plan model=... plans for 24, 40 and 80 GB",
    }
    if memory is not None:
        lines["free memory"] = f"{memory / GB:.1f} GB"
        lines |= {f"largest Qwen3 by plan, {mode}": name or "none" for mode, name in largest_models(memory).items()}
    return "\n".join(f"- {name}: {value}" for name, value in [*lines.items(), *(("to do", x) for x in _to_do(cuda))])


def largest_models(memory: float) -> dict[str, str | None]:
    """Returns the largest Qwen3 that fits by plan in each mode of training, for 512 + 1,024 tokens; None = none does.

    Args: memory: bytes of the GPU.
    """
    lora, nf4 = "actor.lora.r=16", "actor.quantization=nf4"
    modes = {"all weights": (), "LoRA": (lora,), "LoRA on 4 bits": (lora, nf4)}
    return {mode: next((name for name in _QWEN3 if _fits(name, words, memory)), None) for mode, words in modes.items()}


def _fits(name: str, words: tuple[str, ...], memory: float) -> bool:
    config, sizes = _sizes(name, words)
    return plan_memory(config, sizes, memory=memory).peak <= memory


@functools.cache
def _sizes(name: str, words: tuple[str, ...]) -> tuple[RunConfig, ModelSizes]:
    """Returns a run of a Qwen3, and the sizes of the model. Its layers are alike, so models of 1 and 2 give them."""
    layers = _QWEN3[name][0]
    (config, one), (_, two) = (_sizes_of(name, words, count) for count in (1, 2))
    each = {f.name: getattr(one, f.name) for f in dataclasses.fields(one)}
    return config, ModelSizes(**{n: x + (layers - 1) * (getattr(two, n) - x) for n, x in each.items()})


def _sizes_of(name: str, words: tuple[str, ...], layers: int) -> tuple[RunConfig, ModelSizes]:
    """Returns a run of a Qwen3 with so many layers, and the sizes of the model."""
    _, width, gate, heads = _QWEN3[name]
    shape = Qwen3Config(
        vocab_size=151_936,
        hidden_size=width,
        intermediate_size=gate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=name != "8B",
        architectures=["Qwen3ForCausalLM"],
    )
    lengths = ("rollout.max_prompt_length=512", "rollout.max_tokens_to_generate=1024")
    with tempfile.TemporaryDirectory() as folder:
        shape.save_pretrained(folder)
        config = load_run([f"model={folder}", "algo.beta=0", *lengths, *words])
        return config, measure_model(config.actor, trained=True)


def _to_do(cuda: bool) -> Iterator[str]:
    """Yields what is to be installed. Args: cuda: whether torch can use a GPU."""
    if cuda and find_spec("triton"):
        if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
            yield "Triton needs a C compiler: install gcc"
        if not (header := Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
            yield f"Triton needs {header}: install Python's headers (python3-dev)"
    if cuda or _driver() is None:
        return
    if torch.version.cuda is None:
        yield "the driver is there and torch has no CUDA: install a CUDA wheel of torch (pytorch.org)"
        return
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # as a rule the driver is older than the wheel's CUDA
        yield f"torch has CUDA {torch.version.cuda} and finds no GPU: {format_exception(error, 400)}"


def _driver() -> str | None:
    """Returns the version of NVIDIA's driver; None = it is not installed."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.split("\n")[0].strip() or None if result.returncode == 0 else None


def _bfloat16(cuda: bool) -> str:
    if cuda:
        return "in hardware" if torch.cuda.is_bf16_supported(including_emulation=False) else "not in hardware; float32"
    return "no GPU; actor.dtype=auto decides by the CPU"


def _product(device: str) -> str:
    """Returns one measured product of matrices, as its speed."""
    size, dtype = (4096, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    seconds = []
    try:
        x = torch.ones(size, size, dtype=dtype, device=device)
        for _ in range(3):  # the first one loads libraries
            start = time.perf_counter()
            float((x @ x)[0, 0])  # waits for the device
            seconds.append(time.perf_counter() - start)
    except RuntimeError as error:  # the GPU is too old for the wheel, or another program has its memory
        return f"failed: {format_exception(error, 200)}"
    speed = 2 * size**3 / min(seconds)
    text = f"{speed / 1e12:.1f} TFLOP/s" if speed >= 1e12 else f"{speed / 1e9:.1f} GFLOP/s"
    return f"{text} ({size} x {size}, {str(dtype).removeprefix('torch.')}, measured)"
