"""GRPOConfig: TRL's, with every field; fields_grpo.py and fields_training.py say what each is here."""

from __future__ import annotations

from typing import Any, ClassVar

from whet.errors import ConfigError
from whet.trl.arguments import Arguments, dataclass_of
from whet.trl.batches import Batches, batches_of
from whet.trl.field import Table
from whet.trl.fields_grpo import COMPAT, GRPO_FIELDS, OLD_GRPO_FIELDS
from whet.trl.fields_training import OLD_TRAINING_FIELDS, TRAINING_FIELDS
from whet.trl.translate_rl import algorithm

__all__ = ["GRPOConfig"]

_RENAMED = {
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "vllm_max_model_len": "vllm_max_model_length",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
}
_SIZES = (
    "num_generations",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_iterations",
    "generation_batch_size",
    "steps_per_generation",
)


class _GRPO(Arguments):
    """What GRPOConfig has besides its fields."""

    TABLE: ClassVar[Table] = {**TRAINING_FIELDS, **GRPO_FIELDS}
    OLD: ClassVar[Table] = {**OLD_TRAINING_FIELDS, **OLD_GRPO_FIELDS}
    COMPAT = COMPAT

    @classmethod
    def renamed(cls) -> dict[str, str]:
        """Field of an earlier release -> the one that takes its value."""
        return {**super().renamed(), **_RENAMED}

    @property
    def batches(self) -> Batches:
        """What a step is made of. Raises ConfigError: one of TRL's rules is broken."""
        return batches_of({name: getattr(self, name) for name in _SIZES})

    def _check(self) -> None:
        """TRL's rules, and what of its values is not there."""
        super()._check()
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        made = self.batches
        self.steps_per_generation, self.generation_batch_size = made.steps_per_generation, made.generation_batch_size
        group = self.num_generations_eval or self.num_generations
        if self.eval_strategy != "no" and self.per_device_eval_batch_size % group:
            up = -(-self.per_device_eval_batch_size // group) * group
            raise ConfigError(
                f"The global eval batch size ({self.per_device_eval_batch_size} * 1) must be divisible by the number "
                f"of generations used for evaluation ({group}); set per_device_eval_batch_size={up}, or "
                f"num_generations_eval to a divisor of {self.per_device_eval_batch_size}"
            )
        if self.use_vllm and self.vllm_mode != "colocate":
            raise ConfigError(
                f"vllm_mode={self.vllm_mode!r} is not taken: vLLM runs in this process; set vllm_mode='colocate'"
            )
        if self.vllm_device not in (None, "auto"):
            raise ConfigError(f"vllm_device={self.vllm_device!r} is not taken: {self.OLD['vllm_device'].note}")
        if (self.liger_kernel_config or {}).get("fused_linear_cross_entropy"):
            raise ConfigError("liger_kernel_config: fused_linear_cross_entropy is not for GRPO; leave it out")
        algorithm(self)  # what it can't express is said here

    def to_whet(self) -> Any:
        """The algorithm as whet's own configuration."""
        return algorithm(self)


GRPOConfig: type[_GRPO] = dataclass_of(
    "GRPOConfig",
    _GRPO,
    """TRL's GRPOConfig: every field by its name, with its default; docs/from-trl.md says what each is here.

    >>> GRPOConfig(num_generations=6, per_device_train_batch_size=8)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    whet.errors.ConfigError: generation_batch_size (8) must be divisible by num_generations (6). Nearest that work: ...
    """,
)
