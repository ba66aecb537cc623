"""A model and its optimizer: the sections actor, critic and reference."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from whet.config.base import config
from whet.config.fields import Bool, Count, Float, Name, Number, Tree
from whet.config.lora import LoraConfig
from whet.errors import ConfigError

__all__ = ["REWARD_LR", "SFT_LR", "USUAL_LR", "OptimConfig", "RoleConfig"]

USUAL_LR, SFT_LR, REWARD_LR = 1e-6, 2e-5, 1e-4
"""Default learning rates, as TRL's: of policies and critics (RL, preferences), of SFT, of reward models."""


def _recompute(value: Any) -> Any:
    """Returns the mode that a bool means; other values unchanged."""
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


Recompute = Annotated[Literal["auto", "none", "selective", "full"], BeforeValidator(_recompute)]


@config
class OptimConfig:
    """The optimizer of one model.

    >>> OptimConfig(lr="fast")
    Traceback (most recent call last):
    whet.errors.ConfigError: OptimConfig.lr: expected a number, got 'fast'
    """

    name: Name = "adamw"
    """"adamw" (fused where torch has it), "adam" (decay joins the gradient), "sgd", "adamw8bit" (moments of one byte
    each; the extra `quant`), "muon" (matrices of layers; adamw takes embeddings, heads and vectors), or
    "package.module:factory", called with (parameter groups, lr=...)."""
    lr: Float | None = None
    """Learning rate; with a schedule, its peak. None = 2e-5 in `whet sft`, 1e-4 in `whet rm` and for adapters, 1e-6
    elsewhere."""
    betas: tuple[Float, Float] = (0.9, 0.999)
    """Decay of the first and second moment, in adamw, adam and adamw8bit, and in the adamw part of muon."""
    eps: Float = 1e-8
    """ε, added to the root of the second moment; in the same optimizers as betas."""
    momentum: Float | None = None
    """Momentum of sgd and muon: the share of the last step that is kept. None = 0.0 (off) in sgd, 0.95 in muon."""
    weight_decay: Float = 0.0
    """Weight decay of matrices; vectors (norms, biases) never decay. adam and sgd add it to the gradient, the others
    decouple it. 0.0 = off."""
    schedule: Name = "constant"
    """A schedule of transformers.get_scheduler: constant, constant_with_warmup, linear, cosine ..."""
    schedule_kwargs: Tree = field(default_factory=dict)
    """More arguments of the schedule, e.g. {min_lr: 1.0e-7} for cosine_with_min_lr."""
    warmup_steps: Number = 0
    """Updates over which the rate rises from 0. 0 = off."""
    warmup_ratio: Float = 0.0
    """The warmup as a share of all updates, rounded down; set this or warmup_steps. 0.0 = off."""
    total_steps: Count | None = None
    """Length of the schedule in updates; None = all updates of the run."""
    max_grad_norm: Float = 1.0
    """Gradient clipping: scale the gradient down to this norm if it is larger. 0.0 = off."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        for name in ("lr", "weight_decay", "max_grad_norm"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)!r}; 0 turns it off")
        if not 0 <= self.warmup_ratio <= 1:
            raise ConfigError(f"warmup_ratio must lie in [0, 1], got {self.warmup_ratio!r}")
        if self.warmup_ratio and self.warmup_steps:
            raise ConfigError(
                f"warmup_ratio={self.warmup_ratio!r} and warmup_steps={self.warmup_steps} are both set; keep one"
            )
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum must lie in [0, 1), got {self.momentum!r}")
        if self.momentum and self.name in ("adamw", "adam", "adamw8bit"):
            raise ConfigError(f"momentum={self.momentum!r} is for sgd and muon; {self.name} has betas, leave it out")
        if self.eps <= 0:
            raise ConfigError(f"eps must be positive, got {self.eps!r}")
        if any(not 0 <= b < 1 for b in self.betas):
            raise ConfigError(f"betas must lie in [0, 1), got {self.betas!r}")

    @property
    def rate(self) -> float:
        """The learning rate, or its default if lr is None."""
        return USUAL_LR if self.lr is None else self.lr


@config
class RoleConfig:
    """One model: where it is loaded from, how it is computed, and how it is trained."""

    model: Name | None = None
    """Hub name (name@revision pins a branch, tag or commit), folder of a Hugging Face model, or a GGUF file (the
    extra `gguf`). The actor also accepts "file.py:function" or "package.module:function", which makes the model in a
    folder. The critic also accepts "actor": a score head on the actor's backbone, trained with it. A folder or hub
    name of an adapter in PEFT's format loads its base model with that adapter and trains the adapter further. None =
    from Python, or (critic, reference) the actor's model."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter instead of all weights; optim.lr is then 1e-4 by default. None = train all weights."""
    quantization: Literal["nf4", "fp4"] | None = None
    """Store the linear layers of the base in 4 bits (bitsandbytes; the extra `qlora`), for a model that is only read or
    trained with lora. None = off."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; the master weights are always fp32. "auto" = bfloat16 on a GPU that supports it in hardware, and
    for models of width 128 or more on a CPU with instructions for it (AVX-512 BF16, AMX); else float32. A resumed run
    keeps its dtype."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer; no effect on a model that is only read."""
    gradient_checkpointing: Recompute = "auto"
    """Recompute activations in the backward pass: "full" = whole layers (least memory, a fifth to a third more time),
    "selective" = all but matrix products and attention, "none" = nothing. "auto" = "full" where the plan of a GPU's
    memory needs it, else "none". true means "full", false means "none"."""
    attention: Literal["auto", "flex", "plain"] = "auto"
    """Attention over packed sequences: "flex" = FlexAttention (CUDA), "plain" = torch's operator, "auto" = whet's own
    kernels on a CPU; on a GPU torch's varlen_attn in half precision, else flex where plain would need a mask (after a
    check of each), else plain."""
    trust_remote_code: Bool = False
    """Run the Python files in the folders of the weights and the tokenizer, for architectures that transformers does
    not have. Read them first: they run with your permissions."""

    REFUSED: ClassVar[dict[str, str]] = {
        "dropout": "a model's own dropout is off in training, so that sampler and trainer see the same policy; leave "
        "it out, or set lora.lora_dropout of an adapter in supervised training",
    }
