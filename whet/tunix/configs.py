"""Tunix's configuration classes: whet's classes, with the fields that only Tunix has.

A field whose docstring says "No effect" is accepted and its type is checked; `core_config` leaves it out when the
configuration reaches whet. A field that "must be" one value raises ConfigError for any other. docs/from-tunix.md lists
every field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BeforeValidator, InstanceOf, model_validator
from pydantic_core import ArgsKwargs

from whet import config as core
from whet.config.algo.base import OverlongBuffer
from whet.config.algo.choices import CHOICES
from whet.config.algo.unused_fields import unread_fields
from whet.config.base import config
from whet.config.engines import SGLangOptions, VLLMOptions
from whet.config.fields import Bool, Count, Float, Fn, Int, Name, Number, Seconds, Tree
from whet.errors import ConfigError, lookup_error, nearest
from whet.tunix.length_aliases import resolve_length_alias
from whet.tunix.roles import Meshes, Role
from whet.util.references import is_ref

__all__ = [
    "FLAT_NAMES",
    "AlgorithmConfig",
    "CacheConfig",
    "CheckpointingOptions",
    "ClusterConfig",
    "DAPOConfig",
    "DrGRPOConfig",
    "GRPOConfig",
    "GrpoConfig",
    "MetricsLoggerOptions",
    "PPOConfig",
    "PerfMetricsOptions",
    "PpoConfig",
    "ProfilerOptions",
    "RLTrainingConfig",
    "RolloutConfig",
    "TrainingConfig",
    "core_config",
]

T = TypeVar("T")

FLAT_NAMES = {
    f"rollout_{prefix}_{f.name}": (section, f.name)
    for prefix, section, options in (("vllm", "vllm", VLLMOptions), ("sglang_jax", "sglang", SGLangOptions))
    for f in dataclasses.fields(options)  # pyright: ignore[reportArgumentType]
}
"""Tunix's name of an engine's field -> its section in whet.RolloutConfig and its name there."""
ENGINE_NAMES = {"vanilla": "embedded", "sglang_jax": "sglang"}
"""Tunix's name of an engine -> whet's."""


def core_config(value: T) -> T:
    """Returns a configuration as whet's own class, without the fields that have no effect there.

    Args: value: a configuration, or a mapping of modes to them; anything else is returned as it is.

    >>> type(core_config(GRPOConfig(algo_variant="mine"))).__module__
    'whet.config.algo.policy'
    """
    if isinstance(value, Mapping):
        return {key: core_config(entry) for key, entry in value.items()}  # pyright: ignore[reportReturnType]
    own = lambda kind: kind.__module__.startswith("whet.tunix.")
    if not own(type(value)):
        return value
    kind: Any = next(base for base in type(value).__mro__ if not own(base))
    names = [f.name for f in dataclasses.fields(kind)]
    fields = {name: core_config(getattr(value, name)) for name in names}
    if isinstance(value, core.PolicyConfig):  # a default of Tunix's that has no effect was not set by the user
        defaults = {f.name: f.default for f in dataclasses.fields(value)}
        for name in unread_fields(value):
            if fields[name] == defaults[name]:
                del fields[name]
    if "eval" in fields:
        fields["eval"] = {name: override for name, override in fields["eval"].items() if name in names}
    return kind(**fields)


def _rename(arguments: Any, tunix_name: str, name: str, default: Any = None) -> Any:
    """Returns the arguments of a configuration, with Tunix's name of a field replaced by whet's.

    Args: default: of the field; where one of the two names has it, the value of the other counts.
    Raises: ConfigError: the field has a value under both of its names.
    """
    values = arguments.kwargs if isinstance(arguments, ArgsKwargs) else arguments
    if not isinstance(values, Mapping) or tunix_name not in values:
        return arguments
    renamed = dict(values)
    value = renamed.pop(tunix_name)
    if renamed.get(name, default) == default:
        renamed[name] = value
    elif value != default:
        raise ConfigError(f"{tunix_name} and {name} are the same key; give it once")
    return ArgsKwargs((), renamed) if isinstance(arguments, ArgsKwargs) else renamed


def _zero_for_none(value: Any) -> Any:
    return 0.0 if value is None else value


# ---- algorithms ------------------------------------------------------------------------------------------------------


@config
class AlgorithmConfig(core.AlgorithmConfig):
    """What every algorithm has."""

    algo_variant: Name = "grpo"
    """The name of the algorithm. No effect: the other fields define the algorithm."""


@config
class GRPOConfig(core.GRPOConfig):
    """Group-relative policy optimisation, with Tunix's defaults.

    >>> GRPOConfig().kl_loss_mode
    'kl'
    """

    algo_variant: Name = "grpo"
    """The name of the algorithm. No effect: the other fields define the algorithm."""
    kl_loss_mode: Name | Fn = "kl"
    """KL estimate. The gradient of "kl" does not depend on the reference; that of "low_var_kl" does."""

    @model_validator(mode="before")
    @classmethod
    def _rename_loss(cls, arguments: Any) -> Any:
        """Reads Tunix's name of the policy loss."""
        values = arguments.kwargs if isinstance(arguments, ArgsKwargs) else arguments
        loss = values.get("loss_algo", "grpo") if isinstance(values, Mapping) else "grpo"
        if loss not in ("grpo", "gspo-token"):
            raise ConfigError(f"loss_algo should be either grpo or gspo-token. Received: {loss}")
        return _rename(arguments, "loss_algo", "policy_loss_fn", "grpo")

    @property
    def loss_algo(self) -> Any:
        """policy_loss_fn."""
        return self.policy_loss_fn


@config
class DAPOConfig(GRPOConfig):
    """DAPO (arXiv:2503.14476) with Tunix's defaults; those of the paper: whet.presets.dapo().

    >>> DAPOConfig(beta=0.1)
    Traceback (most recent call last):
    whet.errors.ConfigError: DAPO does not support KL penalty, so beta must be None. Got: 0.1; GRPOConfig has one
    """

    algo_variant: Name = "dapo"
    """The name of the algorithm. No effect: the other fields define the algorithm."""
    loss_agg_mode: Name | Fn = "token-mean"
    """How the losses of tokens become one: a name, or a function that gives every token its weight."""
    beta: Annotated[Float, BeforeValidator(_zero_for_none)] = 0.0
    """Weight of the KL to the reference: must be None or 0.0, since DAPO has no KL."""
    epsilon_high: Float | None = 0.28
    """The ratio is clipped above 1 + ε_high, which is at least epsilon; None = epsilon."""
    dynamic_sampling: Bool = True
    """Leave out groups whose rewards are all equal, and sample further batches of prompts until the step has as many
    groups as a batch has prompts. Needs max_steps of the training configuration."""
    overlong_buffer: OverlongBuffer = field(default_factory=lambda: OverlongBuffer(enable=True))
    """Soft punishment of completions that come near the limit of length."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        if self.beta != 0:
            raise ConfigError(
                f"DAPO does not support KL penalty, so beta must be None. Got: {self.beta!r}; GRPOConfig has one"
            )
        low, high = self.clip_range
        if high < low:
            raise ConfigError(
                f"epsilon_high must be greater than or equal to epsilon. Got: {high!r} and {low!r}; GRPOConfig takes "
                "any two"
            )


@config
class DrGRPOConfig(GRPOConfig):
    """Dr. GRPO (arXiv:2503.20783) with Tunix's defaults; those of the paper: whet.presets.dr_grpo().

    >>> DrGRPOConfig().advantage_estimator
    'drgrpo'
    """

    algo_variant: Name = "drgrpo"
    """The name of the algorithm. No effect: the other fields define the algorithm."""
    advantage_estimator: Name | Fn = "drgrpo"
    """Rewards -> advantages: a name, a function or "package.module:function"."""
    loss_agg_mode: Name | Fn = "sequence-mean-token-scale"
    """How the losses of tokens become one: a name, or a function that gives every token its weight."""


@config
class PPOConfig(core.PPOConfig):
    """Proximal policy optimisation with a critic."""

    algo_variant: Name = "ppo"
    """The name of the algorithm. No effect: the other fields define the algorithm."""

    REFUSED: ClassVar[dict[str, str]] = {"mini_batch_size": "set it in RLTrainingConfig"}

    @model_validator(mode="before")
    @classmethod
    def _rename_kl(cls, arguments: Any) -> Any:
        """Reads Tunix's name of the KL estimate."""
        values = arguments.kwargs if isinstance(arguments, ArgsKwargs) else arguments
        mode = values.get("kl_method") if isinstance(values, Mapping) else None
        if isinstance(mode, str) and mode not in CHOICES["kl_loss_mode"] and not is_ref(mode):
            raise lookup_error("kl_method", mode, CHOICES["kl_loss_mode"])
        return _rename(arguments, "kl_method", "kl_loss_mode", "low_var_kl")

    @property
    def kl_method(self) -> Any:
        """kl_loss_mode."""
        return self.kl_loss_mode


GrpoConfig, PpoConfig = GRPOConfig, PPOConfig


# ---- sampling --------------------------------------------------------------------------------------------------------


@config
class RolloutConfig(core.RolloutConfig):
    """How completions are drawn.

    The fields of vLLM and SGLang have Tunix's long names (rollout_vllm_..., rollout_sglang_jax_...) or whet's sections
    vllm and sglang.

    >>> config = RolloutConfig(kv_cache_size=256, rollout_vllm_max_num_seqs=8)
    >>> config.vllm.max_num_seqs, config.rollout_vllm_max_num_seqs
    (8, 8)
    """

    kv_cache_size: Count = 1024
    """Tokens of a row's cache. No effect: a row takes the cache it needs, and kv_cache_tokens bounds all rows."""
    data_type: Name | None = None
    """Must be None: the rollout reads the trainer's weights, whose dtype is RoleConfig.dtype."""
    rollout_mapping_config: Any = None
    """Must be None: both sides use Hugging Face's parameter names."""
    tensor_parallel_size: Int = -1
    """Devices that share one copy of the model: must be -1 or 1 with vLLM and SGLang. No effect with others."""
    data_parallel_size: Int = -1
    """Copies of the model: must be -1 or 1 with vLLM and SGLang. No effect with others."""
    expert_parallel_size: Int = 1
    """Devices that share the experts: must be 1 with vLLM and SGLang. No effect with others."""
    return_logprobs: Bool = False
    """Fill RolloutOutput.logprobs. Training uses the sampler's logprobs either way."""
    rollout_vllm_server_mode: Bool = False
    """No effect: vLLM takes requests while it decodes in any case."""
    rollout_vllm_server_mode_submission_threshold: Number = 0
    """Requests to gather before decoding starts. No effect: a step's requests come together."""
    rollout_vllm_server_mode_submission_timeout_s: Seconds = 0.0
    """Longest wait for that many, in seconds. No effect: a step's requests come together."""
    rollout_vllm_lora_config: Tree | None = None
    """Must be None with vLLM: whole weights are sent."""
    rollout_vllm_init_with_random_weights: Bool = True
    """No effect: vLLM starts without weights and takes the actor's at once."""
    rollout_vllm_tpu_backend_type: Name | None = None
    """Must be None: there is no TPU back end."""
    rollout_vllm_enable_dp_attention: Bool = False
    """Must be False with vLLM: it runs on one device."""
    rollout_vllm_delete_dst_buffers: Bool = True
    """No effect: weights are written in place."""
    rollout_vllm_reshard_chunk_size: Count | None = None
    """No effect: parameters are handed over one at a time, by reference."""
    rollout_sglang_jax_init_with_random_weights: Bool = True
    """No effect: SGLang starts without weights and takes the actor's at once."""
    rollout_sglang_jax_use_sort_for_toppk_minp: Bool = True
    """No effect: SGLang's PyTorch engine has no such choice."""
    rollout_sglang_jax_enable_static_lora: Bool = False
    """Must be False with SGLang: whole weights are sent."""
    rollout_sglang_jax_enable_single_process: Bool = True
    """No effect: SGLang's PyTorch engine has no such choice."""
    rollout_sglang_jax_lora_target_modules: list[Name] | None = None
    """Modules with LoRA. No effect: whole weights are sent."""
    rollout_sglang_jax_max_lora_rank: Count | None = None
    """LoRA rank. No effect: whole weights are sent."""
    rollout_sglang_jax_lora_scaling: Float | None = None
    """LoRA scaling. No effect: whole weights are sent."""
    rollout_sglang_jax_precompile_bs_paddings: list[Int] | None = None
    """Batch sizes to compile for. No effect: SGLang's PyTorch engine chooses its graphs by itself."""
    rollout_sglang_jax_precompile_token_paddings: list[Int] | None = None
    """Prefill lengths to compile for. No effect: SGLang's PyTorch engine chooses its graphs by itself."""
    rollout_sglang_jax_load_format: Name = "auto"
    """Format of the weights. No effect: no weights are read."""

    REFUSED: ClassVar[dict[str, str]] = {
        "return_routed_experts": "routed experts are not replayed in training",
        "rollout_vllm_free_kv_cache_during_weight_sync": "the KV cache is kept through a sync",
        "rollout_vllm_overlap_postprocessing": "outputs are handed over as they finish",
        "rollout_vllm_swap_space_size_gb": "vLLM has no swap space any more; leave it out",
    }

    @model_validator(mode="before")
    @classmethod
    def _engine_names(cls, arguments: Any) -> Any:
        """Moves the engines' fields into the sections vllm and sglang, and reads every name of the length limit."""
        arguments = resolve_length_alias(arguments, "max_tokens_to_generate")
        values = arguments.kwargs if isinstance(arguments, ArgsKwargs) else arguments
        if not isinstance(values, Mapping):
            return arguments
        if "eval" in values:
            values = {**values, "eval": resolve_length_alias(values["eval"], "max_tokens_to_generate")}
        sections = {name: value for name, value in values.items() if name not in FLAT_NAMES}
        for flat in FLAT_NAMES.keys() & values.keys():
            section, name = FLAT_NAMES[flat]
            options = sections.get(section, {})
            if not isinstance(options, Mapping) or name in options:
                raise ConfigError(f"{flat} and {section}.{name} are the same key; give it once, as {section}.{name}")
            sections[section] = {**options, name: values[flat]}
        return ArgsKwargs((), sections) if isinstance(arguments, ArgsKwargs) else sections

    def __getattr__(self, name: str) -> Any:
        """Returns an engine's field by its long name."""
        if name not in FLAT_NAMES:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{nearest(name, vars(self))}")
        section, own = FLAT_NAMES[name]
        return getattr(vars(self)[section], own)

    def __post_init__(self) -> None:
        """Checks the ranges."""
        super().__post_init__()
        for name, reason in (
            ("data_type", "the rollout reads the trainer's own weights; choose their dtype with RoleConfig.dtype"),
            ("rollout_mapping_config", "both sides use Hugging Face's parameter names"),
            ("rollout_vllm_tpu_backend_type", "there is no TPU back end"),
        ):
            if (value := getattr(self, name)) is not None:
                raise ConfigError(f"{name} must be None, got {value!r}: {reason}")

    def check_engine(self, engine: Any) -> None:
        """Raises ConfigError for a field that an engine cannot carry out. Args: engine: of ClusterConfig."""
        whole = "whole weights are sent, not adapters"
        flags = {
            "vllm": {"rollout_vllm_enable_dp_attention": "", "rollout_vllm_lora_config": whole},
            "sglang": {"rollout_sglang_jax_enable_static_lora": whole},
        }.get(str(engine))
        if flags is None:
            return
        sizes = ("tensor_parallel_size", "data_parallel_size", "expert_parallel_size")
        refused = [*(n for n in sizes if getattr(self, n) > 1), *(n for n in flags if getattr(self, n))]
        for name in refused:
            raise ConfigError(
                f"{name}={getattr(self, name)!r} can't be done with rollout_engine {engine!r}: "
                f"{flags.get(name) or 'it runs on one device'}; leave it out"
            )


@config
class CacheConfig:
    """The bound on a sequence.

    >>> CacheConfig(cache_size=128).cache_size
    128
    """

    cache_size: Count
    """Most tokens of a prompt and its completion together."""
    num_layers: Count | None = None
    """No effect: the model has a number of layers."""
    num_kv_heads: Count | None = None
    """No effect: the model has a number of heads."""
    head_dim: Count | None = None
    """No effect: the model's heads have a size."""


# ---- the loop --------------------------------------------------------------------------------------------------------


@config
class CheckpointingOptions(core.CheckpointingOptions):
    """When checkpoints are saved and how many are kept."""

    timeout_secs: Count = 1200
    """Longest time of a save, in seconds. No effect: a save ends or raises."""


@config
class MetricsLoggerOptions(core.MetricsLoggerOptions):
    """Where metrics go besides the run folder."""

    enable_opentelemetry: Bool = False
    """Must be False: there is no OpenTelemetry exporter."""

    def __post_init__(self) -> None:
        """Refuses an exporter."""
        if self.enable_opentelemetry:
            raise ConfigError("enable_opentelemetry must be false: there is no exporter; give loggers an object")


@config
class PerfMetricsOptions(core.PerfMetricsOptions):
    """Where the time of a step went."""

    enable_perf_v1: Bool = True
    """Use the first tracer. No effect: time/ metrics are always there."""
    enable_perf_v2: Bool = False
    """Use the second tracer. No effect: time/ metrics are always there."""

    REFUSED: ClassVar[dict[str, str]] = {
        "custom_export_fn_path": "not offered; time/ metrics go to every logger, give loggers an object",
        "custom_export_fn_path_v2": "not offered; time/ metrics go to every logger, give loggers an object",
    }


@config
class ProfilerOptions(core.ProfilerOptions):
    """Which steps are profiled, and where the profile goes."""

    set_profile_options: Bool = True
    """Use the three fields below. No effect: every operation of torch is traced."""
    host_tracer_level: Number = 2
    """Detail of host events. No effect: every operation of torch is traced."""
    python_tracer_level: Number = 1
    """Detail of Python events. No effect: Python shows as one line of each phase."""
    max_num_hosts: Count | None = None
    """Number of hosts that are traced. No effect: only the first process is profiled."""


@config
class TrainingConfig(core.TrainingConfig):
    """A training loop of any kind.

    >>> TrainingConfig(max_seq_token_per_tpu=4096).max_tokens_per_microbatch
    4096
    """

    gradient_accumulation_steps: Count | None = None
    """Must be None in reinforcement learning: it is mini_batch_size // train_micro_batch_size."""
    checkpointing_options: CheckpointingOptions | None = None
    """When to save; None = the defaults."""
    metrics_logging_options: MetricsLoggerOptions | None = None
    """Where metrics go; None = the defaults."""
    profiler_options: ProfilerOptions | None = None
    """Which steps are profiled; None = only the second step if `profile` is true, else none."""
    perf_metrics_options: PerfMetricsOptions | None = None
    """Where the time went; None = the defaults without trace.json."""
    data_sharding_axis: tuple[Name, ...] = ("fsdp",)
    """Mesh axes over which a batch is split. No effect: one process holds the whole batch."""
    max_inflight_computations: Count = 2
    """Bound on the steps that are queued on the device. No effect: a step ends before the next begins."""

    REFUSED: ClassVar[dict[str, str]] = {
        "max_logp_positions_per_packed_row": "not needed: logprobs are computed only at completion tokens",
    }

    @model_validator(mode="before")
    @classmethod
    def _rename_budget(cls, arguments: Any) -> Any:
        """Reads Tunix's name of the token budget."""
        return _rename(arguments, "max_seq_token_per_tpu", "max_tokens_per_microbatch")

    @property
    def max_seq_token_per_tpu(self) -> int | None:
        """max_tokens_per_microbatch."""
        return self.max_tokens_per_microbatch


@config
class RLTrainingConfig(TrainingConfig, core.RLTrainingConfig):
    """The loop of GRPO and PPO."""

    compute_logps_chunk_size: Number = 0
    """Positions of a chunk of logits. No effect: logits are always computed a chunk at a time."""

    def __post_init__(self) -> None:
        """Checks the hierarchy of batches as far as it is known without the data."""
        super().__post_init__()
        if self.gradient_accumulation_steps is not None:
            raise ConfigError(
                "gradient_accumulation_steps should be None. For RL training it is automatically derived from: "
                "`mini_batch_size // train_micro_batch_size`."
            )


@config
class ClusterConfig(core.ClusterConfig):
    """Where models lie, the engine, and the configurations of training and rollout.

    >>> ClusterConfig(rollout_engine="vanilla").rollout_engine
    'embedded'
    """

    role_to_mesh: Meshes | None = None
    """The mesh of each role: torch's, jax's, or sizes by axis. It must have axes of data alone, with torchrun's
    processes; None or {} = all of them."""
    role_to_logical_axis_rule: dict[Role, Any] | None = None
    """Must be None: parameters are sharded by mesh axis, there are no logical axes."""
    training_config: RLTrainingConfig = field(default_factory=RLTrainingConfig)
    """The loop."""
    rollout_config: InstanceOf[core.RolloutConfig] | dict[core.Mode, RolloutConfig] = field(  # pyright: ignore
        default_factory=RolloutConfig
    )
    """Sampling: one for both modes (with its `eval`), or one for each."""

    REFUSED: ClassVar[dict[str, str]] = {
        "gc_collect_after_weight_sync": "weights are written in place, nothing is left to collect; leave it out",
    }

    @model_validator(mode="before")
    @classmethod
    def _engine_name(cls, arguments: Any) -> Any:
        """Reads Tunix's names of the engines."""
        values = arguments.kwargs if isinstance(arguments, ArgsKwargs) else arguments
        if not isinstance(values, Mapping):
            return arguments
        engine = values.get("rollout_engine")
        if not isinstance(engine, str) or engine not in ENGINE_NAMES:
            return arguments
        values = {**values, "rollout_engine": ENGINE_NAMES[engine]}
        return ArgsKwargs((), values) if isinstance(arguments, ArgsKwargs) else values

    def __post_init__(self) -> None:
        """Checks the rollout's fields against the engine, and what the base checks."""
        super().__post_init__()
        if self.role_to_logical_axis_rule:
            raise ConfigError("role_to_logical_axis_rule must be None: parameters are sharded by mesh axis")
        rollouts = self.rollout_config.values() if isinstance(self.rollout_config, dict) else [self.rollout_config]
        for rollout in rollouts:
            if isinstance(rollout, RolloutConfig):
                rollout.check_engine(self.rollout_engine)
