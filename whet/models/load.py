"""Hugging Face causal language models made ready to train, and saved; the check whether they take a layout.

A model that takes a layout (`packable`) trains on packed rows with shared prefixes; any other trains on padded rows
with its own attention. Whether it does is found by a look at its config and by running 24 tokens: many models that
can't would not raise but return wrong logits. Dim legend: T tokens, V vocabulary.
Left out on purpose: reading them (read.py).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from whet.errors import ConfigError, lookup_error
from whet.models.attention import ATTENTION, KERNELS, SegmentLayout
from whet.models.causal import check_causal
from whet.models.heads import Head, detect_head, with_value_head
from whet.models.read import check_config, read_model
from whet.models.selfcheck import limit_for, probe_tokens

__all__ = ["LoadedModel", "load_model", "save_model", "usable_device"]

logger = logging.getLogger("whet")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
ROLES = ("actor", "critic", "reference")
TOLERANCE = {"wide": 1e-4, "half": 5e-2}
"""Largest difference of packed and separate logits, relative to the largest logit; float64 models do parts in fp32."""
ISOLATION = 0.1
"""Share of that tolerance by which a row may move when another row changes (expert products change shape)."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to train, with what whet found out about it."""

    module: PreTrainedModel
    """In train mode, with every dropout at 0: eval mode would turn activation checkpointing off."""
    packable: bool
    """True = it takes a layout, and its attention is whet's."""
    reasons: tuple[str, ...]
    """Why it is not packable."""
    head: Head
    name: str
    attention: str = "auto"
    """What serves its layouts, one of models.attention.KERNELS."""


def load_model(
    model: str | Path | nn.Module,
    *,
    dtype: str | torch.dtype = "float32",
    device: torch.device | str = "cpu",
    role: str = "actor",
    attention: str = "auto",
) -> LoadedModel:
    """A causal language model from a folder, from the hub, or as given.

    Args: model: a folder (of a model, a finished run, or a checkpoint), a hub name, or a transformers module, which is
        used as it is, its dtype included.
        dtype: of the parameters read: float32, bfloat16, float16, float64. Never that of the checkpoint: master weights
        read in bf16 would lose every small update. device: where it goes. role: actor, critic (value head) or
        reference (no gradient). attention: what computes attention over packed rows: auto, flex or plain.
    Returns: the LoadedModel. Dropouts that were above 0 are logged; so is the reason why a model trains padded.
    Raises: ConfigError: an unknown dtype, role, attention or device, nothing to read there or not all of it, flex
        without CUDA, or not a text-only causal language model.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=8)
    >>> loaded = load_model(LlamaForCausalLM(LlamaConfig(vocab_size=16, num_hidden_layers=1, **sizes)))
    >>> loaded.packable, loaded.head.kind
    (True, 'identity')
    """
    device = usable_device(device)
    _check_words(role, attention, device)
    weight = None
    if isinstance(model, nn.Module):
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(
                f"{type(model).__name__} is not a transformers model; give a PreTrainedModel, a folder or a name"
            )
        module, name = model, model.name_or_path or type(model).__name__
        check_config(module.config, name)
    else:
        module, weight = read_model(str(model), _dtype(dtype), role)
        name = str(model)
    module = module.to(device).train()  # pyright: ignore[reportArgumentType]
    if module.config._attn_implementation == ATTENTION:  # loaded before: the checks below run without a layout
        module.set_attn_implementation("eager")
    _drop_dropout(module, name)
    check_causal(module, name)
    is_critic = "whet_value_head" in vars(module.config)
    head = Head("value") if is_critic else detect_head(module)
    reasons = _refusals(module)
    if not reasons:
        module.set_attn_implementation(ATTENTION)
    else:
        logger.warning("%s trains padded with the hf engine: %s", name, "; ".join(reasons))
        if attention != "auto":
            logger.warning("attention=%s has no effect: padded rows have the model's own attention", attention)
    if vars(module.config).get("router_aux_loss_coef"):
        logger.info("%s: the router's auxiliary loss is not added to the objective", name)
    loaded = LoadedModel(module, not reasons, reasons, head, name, attention)
    if role == "critic" and (weight is not None or not is_critic):
        loaded = with_value_head(loaded, weight)
    if role == "reference":
        module.requires_grad_(False)
    return loaded


def usable_device(device: torch.device | str) -> torch.device:
    """The device of a name. Raises ConfigError: there is none, or not on this machine.

    >>> usable_device("cpu")
    device(type='cpu')
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch built without it: AssertionError
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"device {str(device)!r} can't be used here: {why:.200}; give cpu, cuda, cuda:1 ..."
        ) from error
    return found


def _check_words(role: str, attention: str, device: torch.device) -> None:
    """Refuses an unknown role or attention, and flex away from CUDA."""
    for kind, word, known in (("role", role, ROLES), ("attention", attention, KERNELS)):
        if word not in known:
            raise lookup_error(kind, word, known)
    if attention == "flex" and device.type != "cuda":
        raise ConfigError(f"attention flex needs a CUDA device, got {device}; leave it at auto")


def save_model(loaded: LoadedModel, tokenizer: Any, folder: str | Path) -> Path:
    """Writes a model in Hugging Face's format (safetensors); an actor loads with plain transformers.

    Args: loaded: what to save. tokenizer: saved beside it; None = no tokenizer. folder: made where it is missing.
    Returns: the folder.

    Example: `save_model(loaded, tokenizer, "final")`, then `AutoModelForCausalLM.from_pretrained("final")`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # it would write over whet's own
    try:
        loaded.module.save_pretrained(folder)
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a name."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise lookup_error("dtype", dtype, DTYPES)
    return DTYPES[dtype]


def _drop_dropout(module: nn.Module, name: str) -> None:
    """Sets every dropout (and router noise) of config and modules to 0; logs those that were above it."""
    found: dict[str, float] = {}

    def clear(owner: Any, path: str) -> None:
        for key, value in list(vars(owner).items()):
            noisy = any(word in key for word in ("dropout", "pdrop", "layerdrop", "jitter"))
            if noisy and isinstance(value, float) and value > 0:
                setattr(owner, key, 0.0)
                found[f"{path}{key}"] = value

    clear(module.config, "")
    for path, part in module.named_modules():
        if isinstance(part, nn.Dropout) and part.p:
            found[path] = part.p
            part.p = 0.0
        clear(part, f"{path}.")
    if found:
        shown = ", ".join(f"{key} {value:g}" for key, value in list(found.items())[:8])
        logger.warning("%s: %d dropouts set to 0 (%s)", name, len(found), shown)


def _refusals(module: PreTrainedModel) -> tuple[str, ...]:
    """Why a model can't take a layout; empty = it can. Static first, since a probe of an odd model may raise."""
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
    return tuple(why) or _probe(module)


class _CountedLayout(SegmentLayout):
    """A layout that counts the layers that used it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, attention="plain")  # 24 tokens are not worth a kernel
        self.calls = 0

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return super().attend(*args, **kwargs)


@torch.no_grad()
def _probe(module: PreTrainedModel) -> tuple[str, ...]:
    """Runs the probe's 24 tokens packed (13, and 7 with a child of 4) and apart under eager attention, and compares."""
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
        return (f"{type(error).__name__}: {error}".splitlines()[0],)
    finally:
        module.set_attn_implementation(before)
    if not alone.isfinite().all():
        raise ConfigError(
            f"{module.name_or_path or type(module).__name__} gives logits that are not finite; its weights are broken"
        )
    limit = limit_for(next(module.parameters()).dtype, TOLERANCE) * alone.abs().max()
    if not (apart := (together - alone).abs().max()) <= limit:
        return (f"packed logits differ from separate ones by {apart:.1e}",)
    if not moved <= ISOLATION * limit:
        return (f"a row moves by {moved:.1e} when another row changes",)
    return ()
