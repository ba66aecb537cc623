"""What stands between the last hidden state and the logits, and the value head of a critic.

The log-probabilities of a few rows need a few rows of logits: the head is found out once, so that only these are made.
Dim legend: V vocabulary. Left out on purpose: heads that slice or mix the vocabulary; those models give full logits.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from whet.ops.masked import to_fp32

if TYPE_CHECKING:
    from whet.models.load import LoadedModel

__all__ = ["Head", "detect_head", "with_value_head"]


@dataclass(frozen=True)
class Head:
    """The transform after the head's linear layer.

    logits = cap(scale · (W h + b)), cap(x) = c tanh(x / c), c = softcap.
    Example: Gemma2 is Head("softcap", softcap=30.0), Granite Head("scale", scale=0.125), a critic Head("value").
    """

    kind: Literal["identity", "scale", "softcap", "value", "unknown"]
    """"unknown": only the model's own forward makes its logits."""
    scale: float = 1.0
    softcap: float | None = None

    @property
    def linear(self) -> bool:
        """True where logits can be made from hidden states and the head's weight."""
        return self.kind in ("identity", "scale", "softcap")

    def logits(self, products: Tensor) -> Tensor:
        """What the model makes of W h + b, for sampling and training alike: widened before anything is done to it.

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
    """Finds the head's transform: the linear layer's output is replaced by a ramp, and the logits show what it became.

    Args: module: a causal language model of transformers, on any device.
    Returns: its Head. The ramp is logarithmic up to 1e4, since a short linear one does not saturate a soft-cap.

    >>> from transformers import CohereConfig, CohereForCausalLM
    >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=8, pad_token_id=0)
    >>> detect_head(CohereForCausalLM(CohereConfig(vocab_size=16, num_hidden_layers=1, logit_scale=0.5, **sizes)))
    Head(kind='scale', scale=0.5, softcap=None)
    """
    layer, trunk = module.get_output_embeddings(), module.get_decoder()  # pyright: ignore[reportCallIssue]
    if type(layer) is not nn.Linear or trunk is module:
        return Head("unknown")
    half = torch.logspace(-2, 4, layer.out_features // 2, device=layer.weight.device)
    middle = half.new_zeros(layer.out_features - 2 * len(half))
    ramp = torch.cat([-half.flip(0), middle, half])  # [V]
    got: dict[str, Tensor] = {}

    def replace(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        got["hidden"] = inputs[0]
        return ramp.expand_as(output).clone()

    def keep(_: nn.Module, inputs: Any, output: Any) -> None:
        got["last"] = output[0]

    hooks = [layer.register_forward_hook(replace), trunk.register_forward_hook(keep)]
    try:
        ids = torch.arange(8, device=ramp.device)[None] % layer.out_features
        with torch.no_grad():
            logits = module(input_ids=ids, use_cache=False).logits[0, 0].float()
    finally:
        for hook in hooks:
            hook.remove()
    if logits.shape != ramp.shape or not torch.equal(got["hidden"], got["last"]):
        return Head("unknown")
    return _transform(logits, ramp)


def _transform(logits: Tensor, ramp: Tensor) -> Head:
    """Which transform turned the ramp into these logits."""
    if torch.equal(logits, ramp):
        return Head("identity")
    scale, cap = (logits[-1] / ramp[-1]).item(), logits[-1].item()
    if torch.allclose(logits, ramp * scale, rtol=1e-5):
        return Head("scale", scale=scale)
    if cap > 0 and torch.allclose(logits, cap * torch.tanh(ramp / cap), rtol=1e-4):
        return Head("softcap", softcap=cap)
    return Head("unknown")


def with_value_head(loaded: LoadedModel, weight: Tensor | None = None) -> LoadedModel:
    """A critic: the same trunk, the language head replaced by one linear unit that starts at 0.

    V(s) = w · h(s), h the last hidden state of the state s; so V = 0 before the first update.
    Args: loaded: a model, changed in place. weight: [1 D], a value head saved earlier.
    Returns: the critic; its config says so (`whet_value_head`), and that no weights are tied.

    Example: `load_model(path, role="critic")` ends with it.
    """
    module = loaded.module
    old = module.get_output_embeddings()
    width: Any = module.get_input_embeddings().weight if old is None else old.weight
    layer = nn.Linear(width.shape[1], 1, bias=False, device=width.device, dtype=width.dtype)
    with torch.no_grad():
        layer.weight.zero_() if weight is None else layer.weight.copy_(weight)
    module.config.tie_word_embeddings = False
    module.config.whet_value_head = True
    module.set_output_embeddings(layer)
    return dataclasses.replace(loaded, head=Head("value"))
