"""The LM head, which computes logits from the last hidden states, and the score head of a critic or reward model.

Training needs the logits of a few rows. The head's transform is detected once, so that only these rows are computed.
Dim legend: V vocabulary.
Left out on purpose: heads that slice or mix the vocabulary. Such a model computes all its logits.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from whet.errors import ConfigError
from whet.models.lora_layers import is_adapter_layer
from whet.ops.masked import to_fp32

__all__ = ["Head", "add_score_head", "detect_head", "has_score_head", "score_layer"]


@dataclass(frozen=True)
class Head:
    """The transform of the LM head after its linear layer.

    logits = cap(scale · (W h + b)), cap(x) = c tanh(x / c), c = softcap.
    Example: Gemma2 is Head("softcap", softcap=30.0), Granite Head("scale", scale=0.125), a critic's Head("none").
    """

    kind: Literal["identity", "scale", "softcap", "unknown", "none"]
    """"unknown": only the model's own forward makes its logits. "none": there is no LM head."""
    scale: float = 1.0
    softcap: float | None = None

    @property
    def linear(self) -> bool:
        """Whether the logits can be computed from hidden states and the head's weight."""
        return self.kind in ("identity", "scale", "softcap")

    def logits(self, products: Tensor) -> Tensor:
        """Returns the logits from W h + b, for sampling and training alike: converted to fp32 first.

        transformers scales and caps in the model's dtype; in bf16 that rounds every logit once more than here.
        Args: products: [n V], in the model's dtype.
        Returns: [n V] in fp32, or float64 where they are.

        >>> Head("scale", scale=0.5).logits(torch.tensor([[3.0]], dtype=torch.bfloat16))
        tensor([[1.5000]])
        """
        x = to_fp32(products)
        x = x if self.scale == 1.0 else x * self.scale
        return x if self.softcap is None else self.softcap * torch.tanh(x / self.softcap)


def detect_head(module: nn.Module) -> Head:
    """Finds the head's transform: a ramp replaces the output of the linear layer, and the logits show the transform.

    Args: module: a causal language model of transformers, on any device.
    Returns: the Head. The ramp is logarithmic up to 1e4, because a short linear ramp does not saturate a soft-cap.

    >>> from transformers import CohereConfig, CohereForCausalLM
    >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=8, pad_token_id=0)
    >>> detect_head(CohereForCausalLM(CohereConfig(vocab_size=16, num_hidden_layers=1, logit_scale=0.5, **sizes)))
    Head(kind='scale', scale=0.5, softcap=None)
    """
    layer, backbone = module.get_output_embeddings(), module.get_decoder()  # pyright: ignore[reportCallIssue]
    if type(layer) is not nn.Linear or backbone is module:
        return Head("unknown")
    half = torch.logspace(-2, 4, layer.out_features // 2, device=layer.weight.device)
    middle = half.new_zeros(layer.out_features - 2 * len(half))
    ramp = torch.cat([-half.flip(0), middle, half])  # [V]
    states: dict[str, Tensor] = {}

    def replace_output(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        states["head_input"] = inputs[0]
        return ramp.expand_as(output).clone()

    def record_output(_: nn.Module, inputs: Any, output: Any) -> None:
        states["backbone_output"] = output[0]

    hooks = [layer.register_forward_hook(replace_output), backbone.register_forward_hook(record_output)]
    try:
        ids = torch.arange(8, device=ramp.device)[None] % layer.out_features
        with torch.no_grad():
            logits = module(input_ids=ids, use_cache=False).logits[0, 0].float()
    finally:
        for hook in hooks:
            hook.remove()
    if logits.shape != ramp.shape or not torch.equal(states["head_input"], states["backbone_output"]):
        return Head("unknown")
    if torch.equal(logits, ramp):
        return Head("identity")
    scale, cap = (logits[-1] / ramp[-1]).item(), logits[-1].item()
    if torch.allclose(logits, ramp * scale, rtol=1e-5):
        return Head("scale", scale=scale)
    if cap > 0 and torch.allclose(logits, cap * torch.tanh(ramp / cap), rtol=1e-4):
        return Head("softcap", softcap=cap)
    return Head("unknown")


def has_score_head(module: nn.Module) -> bool:
    """Returns whether a model is a critic or a reward model: it has a score head, and no LM head.

    Args: module: a model of transformers.

    >>> from transformers import LlamaConfig, LlamaForSequenceClassification
    >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=8)
    >>> has_score_head(LlamaForSequenceClassification(LlamaConfig(num_hidden_layers=1, vocab_size=16, **sizes)))
    True
    """
    replaced = "whet_value_head" in vars(module.config)  # pyright: ignore[reportArgumentType]
    return replaced or type(module).__name__.endswith("ForSequenceClassification")


def score_layer(module: nn.Module) -> nn.Linear | None:
    """Returns the layer [1 D] that computes a score from the last hidden state; None = the model has none.

    Args: module: a model of transformers.
    Raises: ConfigError: a classifier with several labels, or with a head that is not one linear layer.
    """
    if "whet_value_head" in vars(module.config):  # pyright: ignore[reportArgumentType]
        return module.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    layer = dict(module.named_children()).get("score")
    if layer is None and not has_score_head(module):
        return None
    base: Any = layer.get_base_layer() if layer is not None and is_adapter_layer(layer) else layer  # pyright: ignore
    if type(base) is not nn.Linear or base.out_features != 1:
        problem = f"{base.out_features} labels" if type(base) is nn.Linear else "no linear layer named score"
        raise ConfigError(
            f"{type(module).__name__} has {problem}; a critic or a reward model needs a single-label score head: load "
            "it with AutoModelForSequenceClassification and num_labels=1, train it, and give that"
        )
    return layer  # pyright: ignore[reportReturnType]


def add_score_head(module: PreTrainedModel, weight: Tensor | None = None, *, shared: bool = False) -> PreTrainedModel:
    """Puts a score head, one linear unit that starts at 0, on the backbone of a causal language model.

    V(s) = w · h(s), where h(s) is the last hidden state; so V = 0 before the first update.
    The result is transformers' sequence classifier with one label, around the same backbone. If transformers has no
    classifier for the family, it is the language model with its LM head replaced.

    Args:
        module: a causal language model; its parameters are shared, not copied.
        weight: [1 D], a score head that was saved.
        shared: keep the LM head too, and add the score head to the module itself.
    Returns: the model; `module` itself if `shared`.

    Example: `load_model(path, role="critic")` ends with it.
    """
    lm_head, embedding = module.get_output_embeddings(), module.get_input_embeddings().weight
    like: Tensor = embedding if lm_head is None else lm_head.weight  # pyright: ignore[reportAssignmentType]
    layer = nn.Linear(like.shape[1], 1, bias=False, device=like.device, dtype=like.dtype)
    with torch.no_grad():
        layer.weight.zero_() if weight is None else layer.weight.copy_(weight)
    if shared:
        module.config.whet_shared_score_head = True  # pyright: ignore[reportAttributeAccessIssue]
        module.score = layer
        return module
    classifier = _make_classifier(module)
    if classifier is not None:
        classifier.score = layer
        return classifier
    module.config.tie_word_embeddings = False
    module.config.whet_value_head = True  # pyright: ignore[reportAttributeAccessIssue]
    module.set_output_embeddings(layer)
    return module


def _make_classifier(module: PreTrainedModel) -> PreTrainedModel | None:
    """Transformers' sequence classifier with one label, around the backbone of a causal model; None = there is none.

    For a model that runs code of its own, the classifier comes from that code.
    """
    cls: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(module.config), None)
    reference = (getattr(module.config, "auto_map", None) or {}).get("AutoModelForSequenceClassification")
    if cls is None and reference is not None and type(module).__module__.startswith("transformers_modules."):
        cls = get_class_from_dynamic_module(reference, module.name_or_path or "")
    prefix = module.base_model_prefix
    if cls is None or cls.base_model_prefix != prefix or module.base_model is module:
        return None
    config = copy.deepcopy(module.config)
    config.num_labels = 1
    config.architectures = [cls.__name__]
    with torch.device("meta"):
        classifier = cls(config)
    tensors = (*classifier.named_parameters(), *classifier.named_buffers())
    outside = {name for name, _ in tensors if not name.startswith(f"{prefix}.")}
    if outside != {"score.weight"} or type(classifier.base_model) is not type(module.base_model):
        return None
    if classifier.base_model.state_dict().keys() != module.base_model.state_dict().keys():
        return None
    setattr(classifier, prefix, module.base_model)
    shared_config: Any = module.base_model.config
    classifier.config = shared_config
    shared_config.num_labels, shared_config.architectures = 1, config.architectures
    return classifier.train(module.training)
