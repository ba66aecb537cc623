"""RLArguments: the base of GRPOConfig and RLOOConfig: batch sizes and checks."""

from __future__ import annotations

import logging
import math
from typing import Any, ClassVar

from whet.compat.field import Field, Table
from whet.errors import ConfigError
from whet.trl.config.arguments import Arguments
from whet.trl.config.batches import Batches, compute_batches
from whet.trl.config.training import OWN_FIELDS
from whet.trl.config.translate import beam_options

__all__ = ["OWN_RL_FIELDS", "RLArguments"]

log = logging.getLogger("whet")

_RENAMED = {
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "vllm_max_model_len": "vllm_max_model_length",
    "wandb_log_unique_prompts": "log_unique_prompts",
}
_SIZES = (
    "num_generations",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_iterations",
    "generation_batch_size",
    "steps_per_generation",
    "world_size",
)


OWN_RL_FIELDS: Table = {
    "answers_dir": Field(
        None,
        "own",
        "folder in which the answers of tools and environments are recorded, with the rewards of functions that read "
        "the environments: a run whose tools don't repeat themselves is resumed and repeated to the bit",
        str,
    ),
}
"""Fields that TRL does not have."""


class RLArguments(Arguments):
    """The base of GRPOConfig and RLOOConfig."""

    OWN: ClassVar[Table] = {**OWN_FIELDS, **OWN_RL_FIELDS}
    METHOD: ClassVar[str] = ""
    """The method's name in messages."""

    @classmethod
    def renamed(cls) -> dict[str, str]:
        """Field of an earlier release -> the one that takes its value."""
        return {**super().renamed(), **_RENAMED}

    @property
    def batches(self) -> Batches:
        """The batch sizes of a step. Raises ConfigError: sizes that break TRL's rules."""
        return compute_batches({name: getattr(self, name) for name in _SIZES}, method=self.METHOD)

    def _check(self) -> None:
        """Checks TRL's rules, and raises ConfigError for values that whet does not support."""
        super()._check()
        if self.generation_batch_size is not None and self.steps_per_generation is not None and not self._is_copy():
            raise ConfigError(
                "'generation_batch_size' and 'steps_per_generation' can not be both configured at the same time; give "
                f"one: steps_per_generation={self.steps_per_generation} makes a generation_batch_size of "
                f"{self.per_device_train_batch_size * self.world_size * self.steps_per_generation}"
            )
        if self.sync_ref_model and not self.beta:
            raise ConfigError(
                f"You passed `sync_ref_model=True` while `beta={self.beta}`: without the KL there is no reference to "
                "synchronize; set `sync_ref_model=False`, or `beta` to a non-zero value"
            )
        batches = self.batches
        if batches.accumulated != self.gradient_accumulation_steps:
            log.warning(
                "gradient_accumulation_steps=%d with steps_per_generation=%d would mix two rollouts in an update; "
                "using %d instead, which gives %s",
                self.gradient_accumulation_steps, batches.steps_per_generation, batches.accumulated, batches,
            )  # fmt: skip
        self.steps_per_generation = batches.steps_per_generation
        self.generation_batch_size = batches.generation_batch_size
        group = self.num_generations_eval or self.num_generations
        size = self.per_device_eval_batch_size * self.world_size
        if self.eval_strategy != "no" and size % group:
            least = group // math.gcd(group, self.world_size)
            nearest = -(-self.per_device_eval_batch_size // least) * least
            raise ConfigError(
                f"The global eval batch size ({self.per_device_eval_batch_size} * {self.world_size}) must be divisible "
                f"by the number of generations used for evaluation ({group}); set per_device_eval_batch_size={nearest},"
                f" or num_generations_eval to a divisor of {size}"
            )
        if self.use_vllm:
            self._check_vllm()
        if self.vllm_device not in (None, "auto"):
            log.warning("vllm_device=%r is not read: %s", self.vllm_device, self.OLD["vllm_device"].note)
        if beam_options(self):
            log.warning(
                "generation_kwargs: num_beams=%s: as in TRL, beam search does not sample from the policy; it runs "
                "transformers' generate, which is slower than whet's engine",
                (self.generation_kwargs or {})["num_beams"],
            )
        self.to_whet()  # raises for values that whet can't express

    def _is_copy(self) -> bool:
        """Returns whether dataclasses.replace made this object: all fields are set, both sizes included."""
        micro = self.per_device_train_batch_size * self.world_size
        agree = self.generation_batch_size == micro * self.steps_per_generation
        return agree and self._set_fields.issuperset(self.TABLE.keys() - {"output_dir"})

    def _check_vllm(self) -> None:
        """Raises ConfigError for options that don't work with vLLM."""
        if self.vllm_mode != "colocate":
            raise ConfigError(
                f"vllm_mode={self.vllm_mode!r} is not supported: vLLM runs in this process; set vllm_mode='colocate'"
            )
        if (regex := self.vllm_structured_outputs_regex) is not None:
            raise ConfigError(
                f"vllm_structured_outputs_regex={regex!r} is not supported with use_vllm=True: logprobs would be of "
                "the constrained distribution; leave use_vllm out: whet's engine supports it"
            )
        options = {name: getattr(self, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
        options = {name: value for name, value in options.items() if value not in (None, 0, 1.0)}
        if options and self.temperature != 1:
            shown = ", ".join(f"{name}={value}" for name, value in options.items())
            raise ConfigError(
                f"{shown} with use_vllm=True and temperature={self.temperature}: vLLM would report logprobs of the "
                "truncated distribution, and the loss needs the full one; set temperature=1.0, or leave "
                f"{', '.join(options)} or use_vllm out"
            )

    def to_whet(self) -> Any:
        """Returns the algorithm as whet's own configuration."""
        raise NotImplementedError
