"""The first minutes on a GPU: what no CPU can show, the most doubtful first.

    python benchmarks/first_run_gpu.py                       everything, in this order
    python benchmarks/first_run_gpu.py --checks flex,tokens  some of it
    python benchmarks/first_run_gpu.py --list                what there is

A line of JSON for each check: its name, `ok` (null where it was skipped, with the reason), seconds, and what it found
or the error with its place. A check that fails leaves the others alone; where it has lost the device, those that are
left run in a new process. Exit code 0: none failed; 1: some did; 2: there is no CUDA device. Models are random and
small, but for `recipe` and `update`, which take the sizes of recipes/gsm8k_qwen3_0.6b.yaml; `recipe` stays in 24 GB.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tasks

SIZE = 256
"""Rows and columns of the products that are captured."""
LIMIT_S = 900
"""Seconds of a check in a process of its own."""
FAMILIES = ("Qwen3", "Llama", "Mistral")
"""Models whose tokens are compared."""
MAX_TOKENS = 48
"""Tokens of a completion."""
BOUND = 600
"""Places of a KV cache in which 24 completions are not all at once."""
ALONE = """
import os
import whet.models.forward

def lengths(completions, **_):
    return [float(sum(map(ord, text)) % 7) for text in completions]

def lengths_and_fault(completions, **_):
    if os.environ["RANK"] == "1":
        whet.models.forward.model_stats = None
    return lengths(completions)
"""
"""Rewards of two processes; after the second one rank 1 fails in its forward pass, where rank 0 waits for it."""


class SkipError(Exception):
    """A check that means nothing here."""


def need(true: Any, said: str) -> None:
    """Fails the check, and says why."""
    if not true:
        raise RuntimeError(said)


def agree(found: Any, wanted: Any, where: str) -> None:
    """Fails the check where a replay gives other numbers than the step itself, but for rounding."""
    off = float((found - wanted).abs().max() / wanted.abs().max())
    need(off < 1e-4, f"{where}: a replay is {off:.1e} from the step itself")


# ---- the checks: each takes the device and gives what it found -------------------------------------------------------


def captures(device: Any) -> dict[str, Any]:
    """Captures after all graphs are gone, while something of the old ones is held."""
    from whet.rollout.engine.cuda_graph import StepGraphs

    graphs, held = StepGraphs(device), []
    body, feed, want = _product(device)
    for epoch in range(3):
        for step in range(4):
            feed(4 * epoch + step)
            (out,) = graphs.step("a", epoch, body)
            agree(out, want(), f"epoch {epoch}, step {step}")
        held.append(out)
    need(graphs.failure is None, graphs.path)
    return {"path": graphs.path}


def engines(device: Any) -> dict[str, Any]:
    """Graphs of one engine are destroyed while those of another are replayed."""
    from whet.rollout.engine.cuda_graph import StepGraphs

    first, second = StepGraphs(device), StepGraphs(device)
    sides = [(g, *_product(device, seed)) for seed, g in enumerate((first, second))]
    for step in range(12):
        for graphs, body, feed, want in sides:
            feed(step)
            (out,) = graphs.step("a", step // 4 if graphs is first else 0, body)
            agree(out, want(), f"step {step}")
    need(first.failure is None and second.failure is None, f"{first.path}; {second.path}")
    return {"path": second.path}


def second_device(device: Any) -> dict[str, Any]:
    """The same on a device that is not the current one."""
    import torch

    if device.type != "cuda" or torch.cuda.device_count() < 2:
        raise SkipError("there is one device")
    other = torch.device("cuda", 1)
    return {"device": str(other), **captures(other), **engines(other)}


def fallback(device: Any) -> dict[str, Any]:
    """A capture that fails leaves eager steps and a device that works, other engines' captures included."""
    import torch

    from whet.rollout.engine.cuda_graph import StepGraphs

    graphs, x = StepGraphs(device), torch.full((4,), 3.0, device=device)
    for _ in range(3):
        (out,) = graphs.step("a", 0, lambda: (x * x.sum().item(),))
        need(out.tolist() == [36.0] * 4, f"a step that can't be captured gives {out.tolist()}")
    need(device.type != "cuda" or graphs.failure, "a step that waits for the device was captured")
    return {"said": graphs.path, **captures(device)}


def threads(device: Any) -> dict[str, Any]:
    """Another thread asks for memory while something is captured."""
    import torch

    from whet.rollout.engine.cuda_graph import StepGraphs

    graphs, stop, held = StepGraphs(device), threading.Event(), []
    body, feed, want = _product(device)

    def allocate() -> None:
        while not stop.is_set() and len(held) < 64:
            held.append(torch.empty((len(held) + 1) << 20, dtype=torch.uint8, device=device))
            time.sleep(0.002)

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        for epoch in range(20):
            for step in range(3):
                feed(step)
                agree(graphs.step("a", epoch, body)[0], want(), f"epoch {epoch}, step {step}")
    finally:
        stop.set()
        thread.join()
    need(graphs.failure is None, graphs.path)
    return {"allocations": len(held)}


def flex(device: Any) -> dict[str, Any]:
    """FlexAttention against the plain path, as models call it."""
    import torch

    from whet.models.flex import FlexCase, flex_unsupported_reason

    refused, seconds = {}, {}
    for dtype in (torch.bfloat16, torch.float32):
        for size in (64, 96, 128, 256):
            for grad in (True, False):
                name = f"{str(dtype).removeprefix('torch.')} {size} {'trained' if grad else 'scored'}"
                case = FlexCase(device, dtype, 8, 2, size, size, False, False, size**-0.5, (grad,) * 3)
                start = time.perf_counter()
                if reason := flex_unsupported_reason(case._replace(pitches=(8 * size, 2 * size, 2 * size))):
                    refused[name] = reason
                seconds[name] = round(time.perf_counter() - start, 1)
    usual = [name for name in refused if name.startswith(("bfloat16 64", "bfloat16 128"))]
    need(not usual, f"the plain path serves in flex's place: {refused}")
    return {"refused": refused, "compiled_s": seconds}


def varlen(device: Any) -> dict[str, Any]:
    """torch's varlen_attn where sequences are empty or short, heads grouped, windows small and keys cut off."""
    import torch

    try:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn
    except ImportError as error:
        raise SkipError(f"torch {torch.__version__} has no varlen_attn: {error}") from error
    from whet.models.varlen import head_options, takes

    dtype = _dtype(device)
    lengths, found, refused = (5, 0, 1, 130, 64), {}, {}
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    total, longest = sum(lengths), max(lengths)
    used = torch.tensor([min(n, 40) for n in lengths], dtype=torch.int32, device=device)
    cases = {
        "causal": {"window_size": (-1, 0)},
        "window": {"window_size": (7, 0)},
        "all": {"window_size": (-1, -1)},
        **({"keys cut off": {"window_size": (-1, -1), "seqused_k": used}} if takes("seqused_k") else {}),
    }
    for size in (64, 128, 256):
        torch.manual_seed(size)
        wide = torch.randn(total, 16, size, device=device, dtype=dtype)
        q, k, v = (x.detach().requires_grad_() for x in (wide[:, :8], wide[:, 8:10], wide[:, 10:12]))  # strided views
        for name, options in cases.items():
            where, trained = f"{name}, {size}", "seqused_k" not in options
            with torch.set_grad_enabled(trained):
                try:
                    sides = (ends, ends, longest, longest)
                    out, lse = varlen_attn(
                        q, k, v, *sides, return_aux=AuxRequest(lse=True), scale=0.1, **head_options(q, k), **options
                    )
                except (NotImplementedError, RuntimeError) as error:
                    refused[where] = str(error).splitlines()[0][:200]
                    continue
                wanted, wanted_lse = _segments(q, k, v, lengths, options)
                pairs = {"out": (out, wanted), "lse": (lse.nan_to_num(neginf=0.0), wanted_lse)}
                if trained:
                    weight = torch.randn_like(wanted)
                    own, other = (torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (out.float(), wanted))
                    pairs |= {f"d{n}": pair for n, *pair in zip("qkv", own, other, strict=True)}
            found[where] = {n: round(_apart(*pair), 4) for n, pair in pairs.items()}
            need(all(x < 2e-2 for x in found[where].values()), f"{where} differs from the formula: {found[where]}")
    if not found and device.type != "cuda":
        raise SkipError(f"varlen_attn does not run on {device.type}")
    need(found and not refused, f"refused: {refused}")
    if device.type == "cuda":  # as training calls it: keys of ancestors before a segment's own
        from whet.models.flex import FlexCase
        from whet.models.varlen import varlen_unsupported_reason

        for size in (64, 128, 256):
            for grad in (True, False):
                case = FlexCase(device, dtype, 8, 2, size, size, False, False, size**-0.5, (grad,) * 3)
                if reason := varlen_unsupported_reason(case._replace(pitches=(8 * size, 2 * size, 2 * size))):
                    refused[f"{size}, {'trained' if grad else 'scored'}"] = reason
        need(not refused, f"training does without varlen_attn: {refused}")
        from whet.rollout.engine.kv_pool import PoolCase, pool_unsupported_reason

        for size, kv in ((64, 2), (128, 8), (128, 1), (256, 2)):
            if reason := pool_unsupported_reason(PoolCase(device, dtype, 8, kv, size, size**-0.5)):
                refused[f"decode, {size}, {kv} KV heads"] = reason
        need(not refused, f"decode steps do without varlen_attn: {refused}")
    return {"off": found}


def compiled(device: Any, rows: int = 16384) -> dict[str, Any]:
    """Gates and rotary embeddings of Qwen3-0.6B in one kernel: torch's numbers, and milliseconds of both."""
    import torch

    from whet.models import compiled as functions

    if device.type != functions.DEVICE:
        raise SkipError(f"nothing is compiled for {device.type}")
    gate, head, found = [(3072,)], [(128,), (128,)], {}
    cases = [
        *((functions.gated, 2 * gate), (functions.gate_grads, 3 * gate), (functions.gate_grads_and_product, 3 * gate)),
        *((functions.rotated, [(heads, 128), *head]) for heads in (16, 8)),
    ]
    for function, shapes in cases:
        name = f"{function.__name__} {shapes[0]}"
        for count in (functions.MIN_ROWS, functions.MIN_ROWS + 1, rows):
            inputs = [torch.randn(count, *shape, device=device).to(torch.bfloat16) for shape in shapes]
            run, start = lambda: functions.in_one_kernel(function, *inputs), time.perf_counter()  # noqa: B023
            ours, seconds = run(), time.perf_counter() - start
            need(ours is not None, f"{name} is not compiled; the log says why")
            found.setdefault(name, {"compiled_s": round(seconds, 1)})
            found[name]["ms"] = round(_milliseconds(run, device), 3)
            found[name]["torch_ms"] = round(_milliseconds(lambda: function(*inputs), device), 3)  # noqa: B023
            for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (ours, function(*inputs))), strict=True):
                found[name]["differ"] = float((a != b).float().mean())
                off = float((a - b).abs().max() / b.abs().max())
                need(off < 2e-2, f"{name} is {off:.1e} from torch's, of the largest number, with {count} rows")
    return found


def tokens(device: Any) -> dict[str, Any]:
    """Steps that are replayed draw what the same steps draw one by one; and where rows wait for places, and move."""
    from whet.rollout.engine.engine import EmbeddedEngine

    found = {}
    for family, bound in [*((family, None) for family in FAMILIES), (FAMILIES[0], BOUND)]:
        drawn = []
        for eagerly in (False, True):
            engine = EmbeddedEngine(_model(family, device), max_batch=24, kv_cache_tokens=bound)
            graphs = getattr(engine._runner, "graphs", None)
            need(device.type != "cuda" or graphs is not None, f"steps are not captured: {engine.backends['steps']}")
            if graphs is not None:
                graphs._captures &= not eagerly
            drawn.append(_drawn(engine))
            need(graphs is None or graphs.failure is None, engine.backends["steps"])
        equal, name = sum(a == b for a, b in zip(*drawn)), family if bound is None else f"{family}, {bound} places"
        found[name] = f"{equal} of {len(drawn[0])} completions are equal"
        need(equal == len(drawn[0]), f"{name}: {found[name]}")
    return found


def adapters(device: Any) -> dict[str, Any]:
    """Layers with LoRA in the engine's products and in training, against PEFT's own: outputs and gradients."""
    import importlib.util

    import torch

    from whet.models.fast_layers import _run_adapted
    from whet.rollout.engine.packed_linear import PackedLinear

    if importlib.util.find_spec("peft") is None:
        raise SkipError("peft is not installed")
    import peft

    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    dtype = _dtype(device)
    model = peft.inject_adapter_in_model(config, _model("Qwen3", device)).to(device, dtype)
    attention, limit, found = model.model.layers[0].self_attn, 8 * torch.finfo(dtype).eps, {}
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    x = torch.randn(9, 128, device=device, dtype=dtype, requires_grad=True)
    product = PackedLinear(layers)
    if dtype.itemsize == 2:  # in fp32 adapters are merged
        product.join()
    with torch.no_grad():
        sides = {"product": (product(x), torch.cat([layer(x) for layer in layers], -1))}
    layer = layers[0]
    inputs = (x, layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    outputs = [run(layer, x) for run in (_run_adapted, type(layer).forward)]
    sides["layer"] = (outputs[0], outputs[1])
    grads = [torch.autograd.grad(y.square().sum(), inputs) for y in outputs]
    sides |= {f"gradient {i}": pair for i, pair in enumerate(zip(*grads))}
    for name, (ours, own) in sides.items():
        found[name] = float((ours - own).detach().abs().max() / own.detach().abs().max())
        need(found[name] < limit, f"{name} is {found[name]:.1e} from PEFT's, relative to the largest number")
    return found


def kept(device: Any) -> dict[str, Any]:
    """Captures of a first rollout, of the same again, and of one after a sleep and an update: some, none and none."""
    import torch

    from whet.rollout.engine import cuda_graph
    from whet.rollout.engine.engine import EmbeddedEngine

    made, capture = [0], cuda_graph.StepGraphs._capture

    def counted(graphs: Any, body: Any) -> Any:
        made[-1] += 1
        return capture(graphs, body)

    cuda_graph.StepGraphs._capture = counted  # type: ignore[method-assign]
    try:
        model = _model("Qwen3", device)
        engine = EmbeddedEngine(model, max_batch=24)
        for version in (0, 0, 1):
            if version:
                engine.sleep()
                with torch.no_grad():
                    model.lm_head.weight.mul_(1.01)
                engine.wake_up()
                engine.update_weights(version)
            _drawn(engine)
            made.append(0)
    finally:
        cuda_graph.StepGraphs._capture = capture  # type: ignore[method-assign]
    need(device.type != "cuda" or made[0], f"nothing was captured: {engine.backends['steps']}")
    need(not any(made[1:]), f"steps were captured again: {made}")
    return {"captures": dict(zip(("first", "again", "after an update"), made, strict=False))}


def vllm(device: Any) -> dict[str, Any]:
    """vLLM in this process: what a sleep frees, the same tokens after a reload, and how many whet draws too."""
    import importlib.util

    import torch

    from whet.config import RolloutConfig
    from whet.rollout.engine.engine import EmbeddedEngine

    if importlib.util.find_spec("vllm") is None:
        raise SkipError("vLLM is not installed")
    from whet.rollout.vllm import VLLMEngine

    model = _model("Qwen3", device).to(torch.bfloat16)
    engine = VLLMEngine(model, decode=lambda ids: "", config=RolloutConfig(max_batch_size=24, max_prompt_length=128))
    free = lambda: torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    try:
        first, awake = _drawn(engine), free()
        engine.sleep()
        freed = free() - awake
        engine.wake_up()
        engine.update_weights(1, iter(model.named_parameters()))
        again = _drawn(engine)
        backends = dict(engine.backends)
    finally:
        engine.close()
    need(again == first, f"{sum(a == b for a, b in zip(first, again))} of {len(first)} completions are equal")
    need(device.type != "cuda" or freed > 0, "a sleep frees nothing")
    own = _drawn(EmbeddedEngine(model, max_batch=24))[24:]  # the greedy ones
    equal = sum(a == b for a, b in zip(own, first[24:], strict=True))
    return {**backends, "freed": freed, "greedy as the embedded engine's": f"{equal} of {len(own)}"}


def shared(device: Any) -> dict[str, Any]:
    """LoRA's frozen weights as views of vLLM's tensors: they stay while its KV goes, and the gradients are the same."""
    import importlib.util

    import torch

    from whet.config import RolloutConfig, VLLMOptions

    if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("peft") is None:
        raise SkipError("vLLM or peft is not installed")
    import peft

    from whet.rollout.vllm import VLLMEngine

    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model: Any = peft.inject_adapter_in_model(lora, _model("Qwen3", device)).to(device, torch.bfloat16)
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    values = {name: p.detach().cpu() for name, p in model.named_parameters()}
    free = lambda: torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0

    def gradients() -> list[Any]:
        logits = model(torch.arange(64, device=device)[None]).logits
        return [g.cpu() for g in torch.autograd.grad(logits.float().square().mean(), [p for _, p in trained])]

    def is_kept() -> bool:
        return all(torch.equal(p.detach().cpu(), values[name]) for name, p in model.named_parameters())

    wanted = gradients()
    options = RolloutConfig(max_batch_size=24, max_prompt_length=128, vllm=VLLMOptions(share_weights=True))
    engine = VLLMEngine(model, decode=lambda ids: "", config=options)
    try:
        base, first = sum(p.nbytes for p in model.parameters() if not p.requires_grad), _drawn(engine)
        share = engine.shared_bytes / base
        need(share == 1 or (device.type == "cpu" and share > 0), f"only {share:.1%} of the bytes are shared")
        awake = free()
        engine.sleep()
        freed = free() - awake
        need(device.type != "cuda" or freed > 0, "a sleep frees nothing")
        need(is_kept(), "the weights are others while vLLM sleeps")
        asleep = gradients()
        engine.wake_up()
        engine.update_weights(1, iter(trained))
        need(is_kept(), "the weights are others after vLLM woke")
        again, found = _drawn(engine), {"bytes": base, "shared": share, "freed": freed}
    finally:
        engine.close()
    need(is_kept(), "the weights are others after vLLM was closed")
    need(all(torch.equal(a, b) for a, b in zip(wanted, asleep, strict=True)), "the gradients differ while vLLM sleeps")
    need(again == first, f"{sum(a == b for a, b in zip(first, again))} of {len(first)} completions are equal")
    return {**found, **engine.backends}


def masked(device: Any) -> dict[str, Any]:
    """Grouped heads under a mask: neither scores nor repeated keys are held."""
    import torch

    from whet.models.sdpa import masked_attention

    count = 8192 if device.type == "cuda" else 512
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(1, h, count, 128, device=device, dtype=dtype) for h in (16, 4, 4))
    place = torch.arange(count, device=device)
    mask = (place[:, None] >= place) & (place[:, None] - place < count // 2)
    before = _peak(device)
    out = masked_attention(q, k, v, mask, scale=0.1)
    taken, scores = _peak(device) - before, 2 * 16 * count * count
    rows = slice(count - 32, count)
    keys, values = (x.float().repeat_interleave(4, 1) for x in (k, v))
    s = (q[:, :, rows].float() @ keys.mT * 0.1).masked_fill(~mask[rows], -torch.inf)
    off = float((out[:, :, rows].float() - s.softmax(-1) @ values).abs().max())
    need(off < 3e-2, f"it differs from the formula by {off:.1e}")
    need(taken < scores / 2, f"it takes {taken:,} bytes; all scores are {scores:,}")
    return {"bytes": taken, "off": off}


def rest(device: Any) -> dict[str, Any]:
    """An engine that sleeps has given back what it took."""
    import torch

    from whet.rollout.engine.engine import EmbeddedEngine
    from whet.util.device import empty_cache, memory_metrics

    engine = EmbeddedEngine(_model("Qwen3", device), max_batch=24)
    seen = []
    for _ in range(3):
        _drawn(engine)
        awake = memory_metrics(device)
        engine.sleep()
        empty_cache(device)
        seen.append((awake, memory_metrics(device)))
        engine.wake_up()
    need(engine.kv_bytes == 0, f"{engine.kv_bytes} bytes of KV are held")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        first, last = seen[0][1], seen[-1][1]
        for name in ("memory/allocated", "memory/reserved"):
            grown = last[name] - first[name]
            need(grown < 4 << 20, f"{name} grows by {grown:,.0f} bytes over two rollouts")
    return {"awake": seen[-1][0], "asleep": seen[-1][1]}


def blocking(device: Any) -> dict[str, Any]:
    """The same with every kernel waited for: an error then names its own operation."""
    return _again("captures,engines,tokens", env={"CUDA_LAUNCH_BLOCKING": "1"})


def sanitizer(device: Any) -> dict[str, Any]:
    """The same under compute-sanitizer: no access beyond what is allocated."""
    if (tool := shutil.which("compute-sanitizer")) is None:
        raise SkipError("compute-sanitizer is not on the path")
    before = [tool, "--tool", "memcheck", "--error-exitcode", "9"]
    return _again("captures,engines,tokens", before=before, env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"})


def kernels(device: Any) -> dict[str, Any]:
    """Kernels and launches of a rollout, and for which share of it the device is busy."""
    from torch.profiler import ProfilerActivity, profile

    from whet.rollout.engine.engine import EmbeddedEngine

    engine = EmbeddedEngine(_model("Qwen3", device), max_batch=24)
    _drawn(engine)
    before, start = engine.stats(), time.perf_counter()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiled:
        _drawn(engine)
    seconds, events = time.perf_counter() - start, profiled.key_averages()
    ran = [e for e in events if e.device_type.name == "CUDA"]
    calls = lambda name: sum(e.count for e in events if name in e.key)
    return {
        "steps": engine.stats().since(before).steps,
        "kernels": sum(e.count for e in ran),
        "kernel_launches": calls("LaunchKernel"),
        "graph_launches": calls("GraphLaunch"),
        "busy": round(sum(e.self_device_time_total for e in ran) / 1e6 / seconds, 3),
    }


def update(device: Any, shape: str = "qwen3-0.6b", batch: int = 32, most: int = 1024) -> dict[str, Any]:
    """One step of the gsm8k recipe with random weights; where the memory went lies in first_run_gpu.pickle."""
    import torch

    import whet
    from whet.config import ClusterConfig, DataConfig, RLTrainingConfig, RoleConfig, RolloutConfig
    from whet.util.device import memory_metrics

    tokenizer = tasks.char_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        tasks.make_model(Path(folder), shape, tokenizer)
        config = ClusterConfig(
            rollout_config=RolloutConfig(max_prompt_length=512, max_tokens_to_generate=most),
            training_config=RLTrainingConfig(max_steps=1, mini_batch_size=batch, pbar_description=None),
        )
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        actor = RoleConfig(model=folder, dtype=dtype, gradient_checkpointing="full")
        if device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=200_000)
            torch.cuda.reset_peak_memory_stats(device)
        cluster = whet.RLCluster(actor=actor, tokenizer=tokenizer, cluster_config=config)
        algo = whet.GRPOConfig(num_generations=8, beta=0.0)
        rows = tasks.make_rows(tasks.Workload(prompt=128, max_tokens=most, prompts=batch), 1, tokenizer)
        learner = whet.GRPOLearner(cluster, algo, tasks.letters_reward, data=DataConfig(batch_size=batch))
        try:
            run = learner.train(rows)
        finally:
            if device.type == "cuda":
                torch.cuda.memory._dump_snapshot("first_run_gpu.pickle")
                torch.cuda.memory._record_memory_history(enabled=None)
        row = {n: v for n, v in run.rows[0].items() if n.startswith(("time/", "perf/tokens", "sampler_trainer/prob"))}
        found = {"paths": cluster.describe(), **row, **memory_metrics(device)}
        cluster.close()
    return found


def recipe(
    device: Any, shape: str = "qwen3-0.6b", batch: int = 32, most: int = 1024, memory: float = 24e9
) -> dict[str, Any]:
    """Two steps of the gsm8k recipe's sizes by `whet grpo` in 24 GB, with the settings that its plan chooses."""
    import torch

    from whet.cli import commands
    from whet.config import load_run

    tokenizer, usual = tasks.char_tokenizer(), commands.free_gpu_memory
    cuda = device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        tasks.make_model(Path(folder) / "model", shape, tokenizer)
        rows = tasks.make_rows(tasks.Workload(prompt=128, max_tokens=most, prompts=batch), 2, tokenizer)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (Path(folder) / "rows.jsonl").write_text(lines, encoding="utf-8")
        config = load_run(
            [
                f"model={folder}/model", f"data={folder}/rows.jsonl", f"trainer.run_dir={folder}/run",
                f"reward={Path(tasks.__file__)}:letters_reward", "algo.num_generations=8", "algo.beta=0",
                f"data.batch_size={batch}", "rollout.max_prompt_length=512", "trainer.max_steps=2",
                f"rollout.max_tokens_to_generate={most}", "trainer.view=lines", "trainer.rehearse=true",
            ]
        )  # fmt: skip
        free = torch.cuda.mem_get_info(device) if cuda else (memory, memory)
        commands.free_gpu_memory = lambda: min(memory, free[0])
        if cuda:
            torch.cuda.set_per_process_memory_fraction(min(1.0, memory / free[1]), device)
            torch.cuda.reset_peak_memory_stats(device)
        try:
            commands.grpo(config)
        finally:
            commands.free_gpu_memory = usual
            if cuda:
                torch.cuda.set_per_process_memory_fraction(1.0, device)
        lines = (Path(folder) / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        chosen = (Path(folder) / "run/config.yaml").read_text(encoding="utf-8").splitlines()
    kinds = ("time/", "memory/", "perf/tokens", "sampler_trainer/prob")
    last = {n: v for n, v in json.loads(lines[-1]).items() if n.startswith(kinds)}
    keys = ("max_tokens_per_microbatch", "gradient_checkpointing", "kv_cache_tokens")
    return {**last, "chosen": [line.strip() for line in chosen if line.strip().startswith(keys)]}


def processes(device: Any, seconds: int = 240) -> dict[str, Any]:
    """Two processes, over NCCL: two steps of a small run, and how soon a run ends where one process fails alone."""
    import torch

    if device.type == "cuda" and torch.cuda.device_count() < 2:
        raise SkipError("there is one device")
    tokenizer, took = tasks.char_tokenizer(), {}
    with tempfile.TemporaryDirectory() as folder:
        tasks.make_model(Path(folder) / "model", "tiny", tokenizer)
        rows = tasks.make_rows(tasks.Workload(prompt=8, max_tokens=8, prompts=4), 2, tokenizer)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (Path(folder) / "rows.jsonl").write_text(lines, encoding="utf-8")
        (Path(folder) / "rewards.py").write_text(ALONE, encoding="utf-8")
        command = [
            *("timeout", str(seconds), sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node=2", "-m", "whet", "grpo", f"model={folder}/model", f"data={folder}/rows.jsonl"),
            *("algo.num_generations=4", "algo.beta=0", "data.batch_size=4", "rollout.max_prompt_length=8"),
            *("rollout.max_tokens_to_generate=8", "trainer.max_steps=2", "trainer.view=lines"),
        ]
        for code, reward in enumerate(("lengths", "lengths_and_fault")):
            names = [f"reward={folder}/rewards.py:{reward}", f"trainer.run_dir={folder}/{reward}"]
            start = time.perf_counter()
            done = subprocess.run([*command, *names], capture_output=True, text=True)
            took[reward] = round(time.perf_counter() - start, 1)
            said = done.stderr.strip().splitlines()[-20:]
            need(done.returncode == code, f"{reward}: exit code {done.returncode} (124: after {seconds} s): {said}")
    return {"seconds": took}


def offload(device: Any) -> dict[str, Any]:
    """What lies on the host between uses comes back to the bit."""
    import torch

    from whet.train.offload import Offload

    kinds = (torch.float32, torch.bfloat16, torch.int64)
    here = [torch.randn(300, 40, device=device).mul(9).to(dtype).t() for dtype in kinds]
    here.append(torch.ones((), device=device))
    before, away = [x.clone() for x in here], Offload(device, "cpu" if device.type == "cuda" else "cpu:0")
    away.to_host(here)
    bytes_away = away.held_bytes
    need(bytes_away == sum(x.nbytes for x in before), f"{bytes_away} bytes lie on the host")
    pinned = all(x.device.type == "cpu" and x.is_pinned() for x in here) if device.type == "cuda" else True
    need(pinned, "it is not on the host, or not pinned")
    away.to_device(here)
    need(all(a.device == b.device and a.equal(b) for a, b in zip(here, before)), "it came back changed")
    return {"bytes": bytes_away}


CHECKS: dict[str, Callable[[Any], dict[str, Any]]] = {
    f.__name__: f
    for f in (
        captures, engines, second_device, fallback, threads, flex, varlen, compiled, tokens, adapters, kept, masked,
        rest, vllm, shared, blocking, sanitizer, kernels, recipe, update, offload, processes,
    )
}  # fmt: skip
"""By name, in order: what would give wrong tokens or end a run, then memory, then speed."""


# ---- what they share -------------------------------------------------------------------------------------------------


def _product(device: Any, seed: int = 0) -> tuple[Callable[[], Any], Callable[[int], Any], Callable[[], Any]]:
    """A step that is a product, what feeds it, and what it should give."""
    import torch

    torch.manual_seed(seed)
    x, w = (torch.randn(SIZE, SIZE, device=device) for _ in range(2))
    start = x.clone()
    step = lambda: (torch.relu(x @ w) @ w,)
    return step, lambda number: x.copy_(start * (number + 1)), lambda: step()[0]


def _segments(q: Any, k: Any, v: Any, lengths: Sequence[int], options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Attention within segments by its formula, in fp32: the result, and the log-sum-exp [heads, tokens]."""
    import torch

    left, right = options["window_size"]
    used = options["seqused_k"].tolist() if "seqused_k" in options else lengths
    outs, sums, start = [], [], 0
    for count, keys in zip(lengths, used, strict=True):
        own = slice(start, start + count)
        a, b, c = (x[own].float().transpose(0, 1) for x in (q, k, v))
        b, c = (x[:, :keys].repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (b, c))
        row, column = torch.arange(count, device=q.device)[:, None], torch.arange(keys, device=q.device)
        seen = (column >= row - left if left >= 0 else column >= 0) & (column <= row if right == 0 else column >= 0)
        scores = (a @ b.mT * 0.1).masked_fill(~seen, -torch.inf)
        outs.append((scores.softmax(-1) @ c).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
        start += count
    return torch.cat(outs), torch.cat(sums, 1)


def _apart(found: Any, wanted: Any) -> float:
    """The largest difference, as a share of the largest number."""
    return float((found.detach().float() - wanted.detach()).abs().max() / wanted.detach().abs().max())


def _model(family: str, device: Any) -> Any:
    """A random model of 2 layers, sliding windows in Mistral's; on a GPU in bfloat16: no fp32 steps are captured."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, initializer_range=0.2, bos_token_id=None,
        eos_token_id=None, pad_token_id=0, **({"sliding_window": 24} if family == "Mistral" else {}),
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval().to(device, _dtype(device))


def _dtype(device: Any) -> Any:
    import torch

    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _drawn(engine: Any) -> list[list[int]]:
    """Completions of 6 prompts, 4 each, drawn and then greedy."""
    import numpy as np

    from whet.rollout.base import Request, Sampling

    out: dict[int, list[int]] = {}
    for temperature in (1.0, 0.0):
        sampling = Sampling(max_tokens=MAX_TOKENS, temperature=temperature, stop_ids=tuple(range(0, 512, 40)))
        for i in range(24):
            prompt = np.random.RandomState(i // 4).randint(1, 512, 5 + 13 * (i // 4)).astype(np.int32)
            request = Request(id=i, tokens=prompt, sampling=sampling, group=i // 4, rng_key=(0, 0, i // 4, i % 4))
            engine.submit([request])
        while done := engine.step():
            out |= {o.id + 24 * (temperature == 0.0): o.tokens.tolist() for o in done}
    return [out[i] for i in sorted(out)]


def _milliseconds(run: Callable[[], Any], device: Any, count: int = 10) -> float:
    """Of a call, when it has run once."""
    import torch

    wait = lambda: torch.cuda.synchronize(device) if device.type == "cuda" else None
    run()
    wait()
    start = time.perf_counter()
    for _ in range(count):
        run()
    wait()
    return (time.perf_counter() - start) / count * 1e3


def _peak(device: Any) -> int:
    """The most bytes that were allocated since the last time that this was asked."""
    import torch

    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    found = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return found


def _again(checks: str, *, before: Sequence[str] = (), env: Mapping[str, str]) -> dict[str, Any]:
    """Some checks in a process of their own."""
    command = [*before, sys.executable, __file__, "--checks", checks]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=LIMIT_S)
    said = (done.stdout + done.stderr).strip().splitlines()[-20:]
    need(done.returncode == 0, f"exit code {done.returncode}: {said}")
    return {"checks": checks}


# ---- the run ---------------------------------------------------------------------------------------------------------


def check(name: str, device: Any) -> dict[str, Any]:
    """One check's line."""
    start, row = time.perf_counter(), {"check": name}
    try:
        row |= {"ok": True, "found": CHECKS[name](device)}
    except SkipError as why:
        row |= {"ok": None, "skipped": str(why)}
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        row |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000], "where": place}
    return {**row, "seconds": round(time.perf_counter() - start, 2)}


def lost(device: Any) -> bool:
    """Whether the device answers no more: after an illegal access nothing runs in this process."""
    import torch

    try:
        return torch.ones(2, device=device).sum().item() != 2.0
    except RuntimeError:
        return True


def run(names: Sequence[str], device: Any, emit: Callable[[dict[str, Any]], Any]) -> int:
    """Makes the checks. Returns: the exit code."""
    failed = 0
    for i, name in enumerate(names):
        row = check(name, device)
        emit(row)
        failed |= row["ok"] is False
        if row["ok"] is False and names[i + 1 :] and lost(device):
            left = [sys.executable, __file__, "--checks", ",".join(names[i + 1 :])]
            return subprocess.run(left).returncode or 1
    return int(failed)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", default=",".join(CHECKS), help="names, by commas (all)")
    parser.add_argument("--list", action="store_true", help="say what there is")
    args = parser.parse_args(argv)
    args.checks = args.checks.split(",")
    if unknown := [name for name in args.checks if name not in CHECKS]:
        parser.error(f"--checks {','.join(unknown)}: known are {', '.join(CHECKS)}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Makes the checks that were asked for. Returns: the exit code."""
    args = arguments(argv)
    if args.list:
        for name, made in CHECKS.items():
            print(f"{name:14s} {(inspect.getdoc(made) or '').splitlines()[0]}")
        return 0
    import torch

    if not torch.cuda.is_available():
        print(f"no CUDA device: torch {torch.__version__} sees none", file=sys.stderr)
        return 2
    return run(args.checks, torch.device("cuda", 0), lambda row: print(json.dumps(row), flush=True))


if __name__ == "__main__":
    sys.exit(main())
