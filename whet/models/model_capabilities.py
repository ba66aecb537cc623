"""Finds out whether a model can run packed rows, on a small random twin with the same configuration.

The code and the configuration decide whether a model is causal, takes a layout and calls its attention layers in order,
and how its LM head computes logits. The weights do not. So these capabilities are tested on a twin: the same class with
two layers, a small vocabulary and random weights on the CPU. The model's own weights are not run, and a model on the
meta device can be tested too. The test is needed because many models that can't take a layout would not raise an error
but return wrong logits.

The model itself is tested in two cases: its parts differ from those that its class makes of its configuration (an
exchanged layer, a hook), or its twin can't take a layout, which may be due to the twin's sizes. The twin keeps the head
size, the numbers of heads and experts, the rotary tables and all factors, since families tie them to one another.
Dim legend: T tokens, V vocabulary.
Left out on purpose: properties of the numbers (broken weights) and of the machine (kernels).
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
from whet.models.adapters import BASE_LAYER, Adapter
from whet.models.attention import ATTENTION, SegmentLayout
from whet.models.causality_check import check_causal
from whet.models.heads import Head, detect_head, has_score_head
from whet.models.self_check import probe_tokens, tolerance_for

__all__ = ["ModelCapabilities", "find_capabilities", "make_small_twin", "probe_capabilities"]

TOLERANCE = {"wide": 1e-4, "half": 5e-2}
"""Largest difference of packed and separate logits, relative to the largest logit; float64 models do parts in fp32."""
ISOLATION = 0.1
"""Share of that tolerance by which a row may move when another row changes (expert products change shape)."""
TWIN_LAYERS = 2
TWIN_VOCABULARY = 64
TWIN_WIDTH = 64
"""Of the hidden states, where the head size does not follow from it, and of MLPs."""
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim", "n_inner")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass(frozen=True)
class ModelCapabilities:
    """The head of a model, and whether it takes a layout."""

    head: Head
    unpackable_reasons: tuple[str, ...]
    """Why the model can't take a layout; empty = it can."""


@dataclass(frozen=True)
class _TwinSpec:
    """The class and configuration of a twin; equal ones are tested once in a process."""

    kind: type[PreTrainedModel]
    words: str
    """Its configuration as JSON."""
    config: PretrainedConfig = field(compare=False, repr=False)


def find_capabilities(module: PreTrainedModel, name: str) -> ModelCapabilities:
    """The capabilities of a model, without running its weights where its twin can be tested.

    Args: module: a causal language model or a sequence classifier of transformers, on any device, the meta device
        among them; its attention is its own. name: for messages.
    Raises: ConfigError: the model can't run, or looks at later tokens.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> with torch.device("meta"):
    ...     model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3))
    >>> find_capabilities(model, "llama")
    ModelCapabilities(head=Head(kind='identity', scale=1.0, softcap=None), unpackable_reasons=())
    """
    if next(module.parameters()).device.type == "meta":
        if (twin := _plan_twin(module)) is None:
            raise ConfigError(f"{name}: no class of transformers makes a causal language model of its configuration")
        return _twin_capabilities(twin)
    twin = _plan_twin(module) if _is_unmodified(module) else None
    found = None
    if twin is not None:
        with contextlib.suppress(Exception):  # the twin's sizes may not fit each other: the model itself will tell
            found = _twin_capabilities(twin)
    return probe_capabilities(module, name) if found is None or found.unpackable_reasons else found


def probe_capabilities(module: PreTrainedModel, name: str) -> ModelCapabilities:
    """The capabilities found by running this module itself. Args, Raises: as find_capabilities.

    A critic has no logits to compare: where its parts are odd, it trains padded.
    """
    if has_score_head(module):
        return ModelCapabilities(
            Head("none"), _layout_obstacles(module) or ("its parts are not those that its class makes",)
        )
    check_causal(module, name)
    return ModelCapabilities(detect_head(module), _layout_obstacles(module) or _compare_packed(module))


def make_small_twin(module: PreTrainedModel) -> PreTrainedModel | None:
    """A small random causal language model of the same code; None = its configuration has no such class.

    Args: module: the model; its parameters are not read.
    Returns: two layers, in its dtype on the CPU, in train mode, with weights so large that caps and scales show.
    """
    plan = _plan_twin(module)
    return None if plan is None else _make_twin(plan)


def _plan_twin(module: PreTrainedModel) -> _TwinSpec | None:
    """The twin's class and configuration."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(module.config), None) if has_score_head(module) else type(module)
    if kind is None:
        return None
    config = copy.deepcopy(module.config)
    sizes: dict[str, Any] = vars(config)
    layers = config.num_hidden_layers
    kept = _kept_layers(sizes.get("layer_types") or [None] * layers)
    for key, value in list(sizes.items()):
        if isinstance(value, list) and len(value) == layers and layers > len(kept):
            setattr(config, key, [value[i] for i in kept])
    config.num_hidden_layers = min(layers, len(kept))
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
    return _TwinSpec(kind, config.to_json_string(use_diff=False), config)


def _kept_layers(kinds: list[Any]) -> list[int]:
    """The first layer of each kind, and more from the front where these are fewer than two."""
    first = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    rest = [i for i in range(len(kinds)) if i not in first]
    return sorted(first + rest[: max(0, TWIN_LAYERS - len(first))])


@functools.lru_cache(maxsize=64)
def _twin_capabilities(twin: _TwinSpec) -> ModelCapabilities:
    module = _make_twin(twin)
    return probe_capabilities(module, module.config.model_type)


def _make_twin(twin: _TwinSpec) -> PreTrainedModel:
    config = copy.deepcopy(twin.config)
    if config._attn_implementation == ATTENTION:
        config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        module = twin.kind._from_config(config, dtype=config.dtype)
        for p in module.parameters():
            p.mul_(4) if p.dim() > 1 else p.add_(torch.randn_like(p) * 0.1)
    return module.train()


def _is_unmodified(module: PreTrainedModel) -> bool:
    """Whether a model has the layers and sizes that its class makes of its configuration, and no hook.

    Adapters are ignored: they change the numbers of a layer and not its arguments.
    """
    for part in module.modules():
        if "forward" in vars(part) or any(vars(part)[name] for name in HOOKS):
            return False
    config = module.config
    try:
        made = _class_structure(_TwinSpec(type(module), config.to_json_string(use_diff=False), config))
    except Exception:  # a class with arguments of its own, or a config that no longer fits
        return False
    return _structure(module) == made


@functools.lru_cache(maxsize=64)
def _class_structure(model: _TwinSpec) -> dict[str, object]:
    """The structure that a class makes of a full-size configuration; cached, since several roles need it."""
    with torch.device("meta"):
        return _structure(model.kind(copy.deepcopy(model.config)))


def _structure(module: PreTrainedModel) -> dict[str, object]:
    """The classes of all parts and the sizes of all parameters, by name, as they would be without adapters."""
    adapter = Adapter.from_module(module)
    inside = set() if adapter is None else {id(p) for p in adapter.parameters()}
    wrapped = set() if adapter is None else set(adapter.layers)
    shape: dict[str, object] = {}
    for name, part in module.named_modules():
        above = [w for w in wrapped if name == w or name.startswith(f"{w}.")]
        if not above or name == f"{above[0]}.base_layer":
            shape[BASE_LAYER.sub("", name)] = type(part)
    for name, p in module.named_parameters():
        if id(p) not in inside:
            shape[f"{BASE_LAYER.sub('', name)}:"] = tuple(p.shape)
    return shape


def _layout_obstacles(module: PreTrainedModel) -> tuple[str, ...]:
    """The reasons in a model's configuration why it can't take a layout; empty = none."""
    config = vars(module.config)
    why = []
    if not module._can_set_attn_implementation():
        why.append("its attention is not behind transformers' attention interface")
    if odd := set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}:
        why.append(f"it has {', '.join(sorted(odd))} layers")
    if module._is_stateful:
        why.append("it has a recurrent state")
    rope = config.get("rope_parameters") or {}
    kinds = {r["rope_type"] for r in (rope, *rope.values()) if isinstance(r, dict) and "rope_type" in r}
    if long := kinds & {"dynamic", "longrope"}:
        why.append(f"its rope ({', '.join(long)}) depends on the longest position of a pass")
    return tuple(why)


class _CountedLayout(SegmentLayout):
    """A layout that counts the layers that used it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, attention="plain")  # 24 tokens are not worth a kernel
        self.calls = 0

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return super().attend(*args, **kwargs)


@torch.no_grad()
def _compare_packed(module: PreTrainedModel) -> tuple[str, ...]:
    """Compares 24 tokens run packed (13, and 7 with a child of 4) with the same run apart under eager attention."""
    before: Any = module.config._attn_implementation
    device: Any = module.get_input_embeddings().weight.device
    ids = torch.tensor(probe_tokens(module.config.vocab_size), device=device)
    other = ids.clone()
    other[5] = (other[5] + 1) % module.config.vocab_size
    layout = _CountedLayout((13, 7, 4), (-1, -1, 1), device)
    packed = lambda x: (
        module(input_ids=x[None], position_ids=layout.position_ids, whet_layout=layout, use_cache=False)
        .logits[0]
        .double()
    )
    try:
        module.set_attn_implementation(ATTENTION)
        together = packed(ids)
        calls, layers = layout.calls, module.config.num_hidden_layers
        if calls != layers:
            return (f"the layout reached {calls} attention calls of {layers} layers",)
        moved = (packed(other) - together)[13:].abs().max()
        module.set_attn_implementation("eager")
        alone = torch.cat([module(input_ids=x[None], use_cache=False).logits[0].double() for x in (ids[:13], ids[13:])])
    except Exception as error:  # a model's own code may raise anything; whatever it is, it can't take a layout
        return (format_exception(error),)
    finally:
        module.set_attn_implementation(before)
    if not alone.isfinite().all():
        raise ConfigError(
            f"{module.name_or_path or type(module).__name__} gives logits that are not finite; its weights are broken"
        )
    limit = tolerance_for(next(module.parameters()).dtype, TOLERANCE) * alone.abs().max()
    if not (apart := (together - alone).abs().max()) <= limit:
        return (f"packed logits differ from separate ones by {apart:.1e}",)
    if not moved <= ISOLATION * limit:
        return (f"outputs of one sequence change by {moved:.1e} when another sequence in the batch changes",)
    return ()
