"""Finds out whether a model can run packed rows, on a small random twin with the same configuration.

The code and the configuration, not the weights, decide whether a model is causal, supports a layout and calls its
attention layers in order, and how its LM head computes logits. So these capabilities are tested on a twin: the same
class with two layers, a small vocabulary and random weights on the CPU. The model's own weights are not run, and a
model on the meta device can be tested too. The test is needed because many models without support for a layout would
not raise an error, but return wrong logits.

The model itself is tested in two cases: its structure differs from that of its class and configuration (a replaced
layer, a hook), or its twin can't run a layout, which may be due to the twin's sizes. The twin keeps the head size, the
numbers of heads and experts, the rotary tables and all factors, because families tie them to one another.
Dim legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from whet.errors import ConfigError, format_exception
from whet.models.attention import ATTENTION, SegmentLayout
from whet.models.causality_check import check_causal
from whet.models.heads import Head, detect_head, has_score_head
from whet.models.lora_layers import BASE_LAYER, Adapter
from whet.models.self_check import probe_tokens, tolerance_for

__all__ = ["ModelCapabilities", "find_capabilities", "probe_capabilities"]

TOLERANCE = {"wide": 1e-4, "half": 5e-2}
"""Largest accepted difference of packed and separate logits, relative to the largest logit; float64 uses the limit of
fp32, because models compute parts in fp32."""
ISOLATION = 0.1
"""The share of that tolerance by which a sequence may change when another one changes (experts get other shapes)."""
TWIN_LAYERS = 2
TWIN_VOCABULARY = 64
TWIN_WIDTH = 64
"""Width of MLPs, and of the hidden states if the head size does not follow from it."""
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim", "n_inner")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass(frozen=True)
class ModelCapabilities:
    """The head of a model, and whether the model is packable."""

    head: Head
    unpackable_reasons: tuple[str, ...]
    """Why the model is not packable; empty = it is packable."""


@dataclass(frozen=True)
class _TwinSpec:
    """The class and configuration of a twin; a process tests equal ones once."""

    cls: type[PreTrainedModel]
    config_json: str
    config: PretrainedConfig = field(compare=False, repr=False)


def find_capabilities(module: PreTrainedModel, name: str) -> ModelCapabilities:
    """Returns the capabilities of a model. If its twin can be tested, its own weights are not run.

    Args: module: a causal language model or a sequence classifier of transformers with its own attention, on any
        device, including the meta device. name: for messages.
    Raises: ConfigError: the model can't run, or it is not causal.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> with torch.device("meta"):
    ...     model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3))
    >>> find_capabilities(model, "llama")
    ModelCapabilities(head=Head(kind='identity', scale=1.0, softcap=None), unpackable_reasons=())
    """
    if next(module.parameters()).device.type == "meta":
        if (twin := _plan_twin(module)) is None:
            raise ConfigError(f"{name}: transformers has no causal language model for its configuration")
        return _twin_capabilities(twin)
    twin = _plan_twin(module) if _is_unmodified(module) else None
    capabilities = None
    if twin is not None:
        with contextlib.suppress(Exception):  # the twin's sizes may not fit each other; then the model itself is tested
            capabilities = _twin_capabilities(twin)
    return probe_capabilities(module, name) if capabilities is None or capabilities.unpackable_reasons else capabilities


def probe_capabilities(module: PreTrainedModel, name: str) -> ModelCapabilities:
    """Returns the capabilities found by running the module itself. Args, Raises: see find_capabilities.

    A critic has no logits to compare. If it was modified, it trains padded.
    """
    if has_score_head(module):
        reasons = _layout_obstacles(module) or ("its layers are not those of its class and configuration",)
        return ModelCapabilities(Head("none"), reasons)
    check_causal(module, name)
    return ModelCapabilities(detect_head(module), _layout_obstacles(module) or _compare_packed(module))


def _plan_twin(module: PreTrainedModel) -> _TwinSpec | None:
    """Returns the twin's class and configuration."""
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(module.config), None) if has_score_head(module) else type(module)
    if cls is None:
        return None
    config = copy.deepcopy(module.config)
    sizes: dict[str, Any] = vars(config)
    layers = config.num_hidden_layers
    layer_indices = _choose_layers(sizes.get("layer_types") or [None] * layers)
    for key, value in list(sizes.items()):
        if isinstance(value, list) and len(value) == layers and layers > len(layer_indices):
            setattr(config, key, [value[i] for i in layer_indices])
    config.num_hidden_layers = min(layers, len(layer_indices))
    config.vocab_size = min(config.vocab_size, TWIN_VOCABULARY)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = sizes.get(key)
        if isinstance(value, int) and value >= config.vocab_size:
            setattr(config, key, 0)
    for key in WIDTHS:
        if isinstance(value := sizes.get(key), int):
            setattr(config, key, min(value, TWIN_WIDTH))
    if isinstance(sizes.get("head_dim"), int) and "dim_model_base" not in sizes:
        config.hidden_size = min(config.hidden_size, TWIN_WIDTH)
    config.dtype = next(module.parameters()).dtype
    return _TwinSpec(cls, config.to_json_string(use_diff=False), config)


def _choose_layers(kinds: list[Any]) -> list[int]:
    """Returns the first layer of each kind; if these are fewer than two, also the first of the remaining layers."""
    first = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    rest = [i for i in range(len(kinds)) if i not in first]
    return sorted(first + rest[: max(0, TWIN_LAYERS - len(first))])


@functools.lru_cache(maxsize=64)
def _twin_capabilities(twin: _TwinSpec) -> ModelCapabilities:
    module = _make_twin(twin)
    return probe_capabilities(module, module.config.model_type)


def _make_twin(twin: _TwinSpec) -> PreTrainedModel:
    """Returns a small random model with the same code, on the CPU, in train mode and in the dtype of the model.

    Its weights are so large that caps and scales have a visible effect.
    """
    config = copy.deepcopy(twin.config)
    if config._attn_implementation == ATTENTION:
        config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        module = twin.cls._from_config(config, dtype=config.dtype)
        for p in module.parameters():
            p.mul_(4) if p.dim() > 1 else p.add_(torch.randn_like(p) * 0.1)
    return module.train()


def _is_unmodified(module: PreTrainedModel) -> bool:
    """Returns whether a model has the layers and sizes of its class and configuration, and no hooks.

    Adapters are ignored: they change the output of a layer, and not its arguments.
    """
    for submodule in module.modules():
        if "forward" in vars(submodule) or any(vars(submodule)[name] for name in HOOKS):
            return False
    config = module.config
    try:
        expected = _class_structure(_TwinSpec(type(module), config.to_json_string(use_diff=False), config))
    except Exception:  # the class needs other arguments, or the config no longer fits it
        return False
    return _structure(module) == expected


@functools.lru_cache(maxsize=64)
def _class_structure(model: _TwinSpec) -> dict[str, object]:
    """Returns the structure of a class with a full-size configuration; cached, because several roles need it."""
    with torch.device("meta"):
        return _structure(model.cls(copy.deepcopy(model.config)))


def _structure(module: PreTrainedModel) -> dict[str, object]:
    """Returns the classes of all modules and the shapes of all parameters, by their names without adapters."""
    adapter = Adapter.from_module(module)
    adapter_ids = set() if adapter is None else {id(p) for p in adapter.parameters()}
    wrapped = set() if adapter is None else set(adapter.layers)
    structure: dict[str, object] = {}
    for name, submodule in module.named_modules():
        parents = [w for w in wrapped if name == w or name.startswith(f"{w}.")]
        if not parents or name == f"{parents[0]}.base_layer":
            structure[BASE_LAYER.sub("", name)] = type(submodule)
    for name, p in module.named_parameters():
        if id(p) not in adapter_ids:
            structure[f"{BASE_LAYER.sub('', name)}:"] = tuple(p.shape)
    return structure


def _layout_obstacles(module: PreTrainedModel) -> tuple[str, ...]:
    """Returns the properties of a model's configuration for which it can't run a layout; empty = none."""
    config = vars(module.config)
    reasons = []
    if not module._can_set_attn_implementation():
        reasons.append("its attention is not behind transformers' attention interface")
    if unknown := set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}:
        reasons.append(f"it has {', '.join(sorted(unknown))} layers")
    if module._is_stateful:
        reasons.append("it has a recurrent state")
    rope = config.get("rope_parameters") or {}
    kinds = {r["rope_type"] for r in (rope, *rope.values()) if isinstance(r, dict) and "rope_type" in r}
    if variable := kinds & {"dynamic", "longrope"}:
        reasons.append(f"its rope ({', '.join(variable)}) depends on the longest sequence of a pass")
    return tuple(reasons)


class _CountedLayout(SegmentLayout):
    """A layout that counts the layers that used it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, attention="plain")  # a kernel is not worth compiling for 24 tokens
        self.calls = 0

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return super().attend(*args, **kwargs)


@torch.no_grad()
def _compare_packed(module: PreTrainedModel) -> tuple[str, ...]:
    """Compares 24 tokens (13, and 7 with a child of 4) run packed with the same run separately, in eager attention."""
    original: Any = module.config._attn_implementation
    device: Any = module.get_input_embeddings().weight.device
    ids = torch.tensor(probe_tokens(module.config.vocab_size), device=device)
    changed = ids.clone()
    changed[5] = (changed[5] + 1) % module.config.vocab_size
    layout = _CountedLayout((13, 7, 4), (-1, -1, 1), device)
    run_packed = lambda x: (
        module(input_ids=x[None], position_ids=layout.position_ids, whet_layout=layout, use_cache=False)
        .logits[0]
        .double()
    )
    try:
        module.set_attn_implementation(ATTENTION)
        packed_logits = run_packed(ids)
        calls, layers = layout.calls, module.config.num_hidden_layers
        if calls != layers:
            return (f"the layout reached {calls} attention calls of {layers} layers",)
        moved = (run_packed(changed) - packed_logits)[13:].abs().max()
        module.set_attn_implementation("eager")
        separate_logits = torch.cat(
            [module(input_ids=x[None], use_cache=False).logits[0].double() for x in (ids[:13], ids[13:])]
        )
    except Exception as error:  # a model's own code may raise anything; then it can't run a layout
        return (format_exception(error),)
    finally:
        module.set_attn_implementation(original)
    if not separate_logits.isfinite().all():
        raise ConfigError(
            f"{module.name_or_path or type(module).__name__} gives logits that are not finite; copy or download its "
            "weights again"
        )
    limit = tolerance_for(next(module.parameters()).dtype, TOLERANCE) * separate_logits.abs().max()
    if not (difference := (packed_logits - separate_logits).abs().max()) <= limit:
        return (f"packed logits differ from separate ones by {difference:.1e}",)
    if not moved <= ISOLATION * limit:
        return (f"outputs of one sequence change by {moved:.1e} when another sequence in the batch changes",)
    return ()
