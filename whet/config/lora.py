"""Low-rank adapters of a model: the section lora of actor, critic and reward model. The names are PEFT's."""

from __future__ import annotations

from typing import Literal

from whet.config.base import config
from whet.config.fields import Bool, Count, Float, Name, Strings
from whet.errors import ConfigError

__all__ = ["LORA_LR", "LoraConfig"]

LORA_LR = 1e-4
"""Default learning rate of adapters: they need about ten times that of a whole model, and 1e-6 trains nothing."""


@config
class LoraConfig:
    """A low-rank adapter: y = W x + s B A x. A and B are trained, W is frozen.

    >>> LoraConfig(r=8).lora_alpha
    32
    """

    r: Count = 16
    """Rank of A [r, in] and B [out, r]."""
    lora_alpha: Count = 32
    """α: the scale s is α / r, or α / √r with use_rslora."""
    target_modules: Name | list[Name] = "all-linear"
    """Layers that get an adapter: "all-linear" = all linear layers but the heads; a list of names or of their ends
    ([q_proj, v_proj]); another string is a regular expression of whole names."""
    lora_dropout: Float = 0.0
    """Dropout of the adapter's input in training; a resumed run repeats its random numbers. 0.0 = off. The actor of RL
    must have 0.0, because the sampler would otherwise use another policy than the trainer."""
    use_rslora: Bool = False
    """Scale by α / √r, so that a higher rank learns as fast (arXiv:2312.03732)."""
    modules_to_save: Strings = ()
    """More modules that are trained in full and saved with the adapter, by name or the end of it: lm_head,
    embed_tokens, norm. The score head of a critic or reward model is always trained."""
    init_lora_weights: Literal["default", "gaussian"] = "default"
    """Initial values of A: "default" (Kaiming uniform) or "gaussian". B starts at 0, so the adapter adds nothing at
    first."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if not 0 <= self.lora_dropout < 1:
            raise ConfigError(f"lora_dropout must lie in [0, 1), got {self.lora_dropout!r}; 0.0 turns it off")
        if isinstance(self.target_modules, list) and not self.target_modules:
            raise ConfigError('target_modules names no layer; leave it at "all-linear", or leave out the section lora')
