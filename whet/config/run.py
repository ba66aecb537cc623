"""The whole configuration of an RL run, as recipes have it, and the shorthands of the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, TypeVar

from pydantic import model_validator
from pydantic_core import ArgsKwargs

from whet.config.algo.presets import preset
from whet.config.base import config
from whet.config.data import Sources
from whet.config.fields import Bool, Float, Name
from whet.config.introspection import section_at
from whet.config.loader import dump_tree, load, merge
from whet.config.model import OptimConfig, RoleConfig
from whet.config.rewards import RewardFields
from whet.config.run_sections import RunDataConfig, RunGRPOConfig, RunPPOConfig, RunRolloutConfig, take_base_sections
from whet.config.training import RLTrainingConfig
from whet.errors import ConfigError

__all__ = ["SHORTHANDS", "PPORunConfig", "RunConfig", "check_complete", "load_run", "missing_inputs"]

R = TypeVar("R", bound="RunConfig")


@config
class RunConfig(RewardFields):
    """Everything that `whet grpo` needs.

    >>> load_run(["model=my/model", "actor.lr=2e-6", "data=train.jsonl"]).actor.optim.lr
    2e-06
    """

    COMMAND: ClassVar[str] = "grpo"
    """The command of this configuration."""
    TRAINED: ClassVar[str] = "actor"
    """The section of the model that is trained."""

    actor: RoleConfig = field(default_factory=RoleConfig)
    """The policy."""
    critic: RoleConfig | None = None
    """The value model of `whet ppo`; None = the actor's model with a new score head. `whet grpo` has no critic."""
    reference: RoleConfig | None = None
    """The reference model of the KL; None = the actor as it was at the start."""
    teacher: RoleConfig | None = None
    """The teacher of policy_loss_fn=distillation and gkd, which must have the actor's tokenizer; None = no teacher."""
    rollout: RunRolloutConfig = field(default_factory=RunRolloutConfig)
    """Sampling."""
    algo: RunGRPOConfig = field(default_factory=RunGRPOConfig)
    """The algorithm. algo.preset names a published method; the other keys change it."""
    data: RunDataConfig = field(default_factory=RunDataConfig)
    """The data set."""
    trainer: RLTrainingConfig = field(default_factory=RLTrainingConfig)
    """The loop."""
    reward: Name | list[Name] | dict[Name, Float] | None = None
    """Reward functions: a built-in name, "file.py:function" or "package.module:function"; a list; or name -> weight.
    The name reward_model means the model of that section."""
    reward_model: RoleConfig | None = None
    """A reward model (transformers' sequence classifier with one label). Its score is another reward, with the weight
    1.0 unless `reward` has one for it. None = no reward model."""
    rollout_engine: Name = "embedded"
    """"embedded" = whet's own, "hf" = transformers' forward in a loop, "vllm", "sglang", "mock" (for tests),
    or "package.module:Class"; "auto" = vllm on a GPU where it is installed and can do what is asked, else embedded."""
    offload_to_cpu: Bool = False
    """Keep models on the GPU only while they are needed: the reference while it scores, master weights and moments
    during an update. Otherwise they are in pinned host memory. No effect on a CPU."""
    tokenizer: Name | None = None
    """Hub name or folder of the tokenizer; None = the actor's."""

    @model_validator(mode="before")
    @classmethod
    def _sections(cls, arguments: Any) -> Any:
        """Fills algo with the fields of algo.preset, except keys that are set. Accepts objects of base sections."""
        arguments = take_base_sections(cls, arguments)
        words = arguments.kwargs if isinstance(arguments, ArgsKwargs) else arguments
        if not isinstance(words, Mapping):
            return arguments
        algo = words.get("algo")
        if not isinstance(algo, Mapping) or "preset" not in algo:
            return arguments
        name, own = algo["preset"], {key: value for key, value in algo.items() if key != "preset"}
        fields = {} if name is None else dump_tree(preset(name, section_at(cls, ("algo",))))
        words = {**words, "algo": merge(fields, own)}
        return ArgsKwargs((), words) if isinstance(arguments, ArgsKwargs) else words

    def __post_init__(self) -> None:
        """Checks rules that concern several sections."""
        for role in ("actor", "critic"):
            if getattr(self.trainer, f"{role}_optimizer") is not None:
                raise ConfigError(f"trainer.{role}_optimizer is for Python; in a run's configuration set {role}.optim")
        if isinstance(self.reward, dict) and self.algo.reward_weights is not None:
            raise ConfigError("reward gives weights and algo.reward_weights too; keep one of them")
        self.check_rewards()
        weights, count = self.algo.reward_weights, len(self.reward_names)
        if count and weights is not None and len(weights) != count:
            raise ConfigError(
                f"algo.reward_weights has {len(weights)} values for {count} reward functions; give one each"
            )

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The reward functions in order; a reward model that is not listed comes last. Without any reward and without a
        teacher it is the reward_fn of rollout.env_path.
        """
        named = super().reward_names
        is_file = isinstance(self.rollout.env_path, str) and not self.rollout.has_environment_class
        if not named and self.teacher is None and is_file:
            return (f"{self.rollout.env_path}:reward_fn",)
        return named

    @property
    def reward_weights(self) -> tuple[float, ...] | None:
        """The weights of reward_names, from `reward` or `algo`; None = 1.0 each."""
        return super().reward_weights if isinstance(self.reward, dict) else self.algo.reward_weights


@config
class PPORunConfig(RunConfig):
    """Everything that `whet ppo` needs.

    >>> load_run(["model=my/model", "algo.gae_lambda=0.9"], PPORunConfig).algo.gae_lambda
    0.9
    """

    COMMAND: ClassVar[str] = "ppo"

    algo: RunPPOConfig = field(default_factory=RunPPOConfig)  # pyright: ignore[reportIncompatibleVariableOverride]
    """The algorithm."""


def missing_inputs(model: str | None, path: Sources | None, of: str = "<hub name or folder>") -> list[str]:
    """Returns the messages about a missing model and missing data, a line each.

    Args: model, path: as given. of: the kinds of model that the message names.

    >>> missing_inputs("my/model", None)
    ['no data; write data=<hub name, folder, json, jsonl, csv, parquet or arrow file>']
    """
    data = "no data; write data=<hub name, folder, json, jsonl, csv, parquet or arrow file>"
    return [line for line, value in ((f"no model; write model={of}", model), (data, path)) if value is None]


def check_complete(config: RunConfig, unread: Collection[str] = ()) -> None:
    """Raises ConfigError, with all problems, if a required key of a run is missing.

    Args: config: of the run. unread: sections with keys that could not be read; they are not checked.

    >>> check_complete(RunConfig(reward="exact_match"))
    Traceback (most recent call last):
    whet.errors.ConfigError: no model; write model=<hub name or folder>
    no data; write data=<hub name, folder, json, jsonl, csv, parquet or arrow file>
    """
    readable = lambda *sections: not {*sections} & {*unread}
    missing = missing_inputs(
        config.actor.model if readable("actor") else "", config.data.path if readable("data") else ""
    )
    learns = (
        config.reward_names
        or config.rollout.agent is not None
        or config.rollout.has_environment_class
        or (config.teacher is not None and not isinstance(config, PPORunConfig))
    )
    if not learns and readable("reward", "rollout", "teacher"):
        missing.append(
            "no reward; write reward=file.py:function, or one of whet's own, such as last_number (whet docs rewards)"
        )
    if config.teacher is not None and config.teacher.model is None and readable("teacher"):
        missing.append("teacher has no model; write teacher.model=<hub name or folder>")
    if config.reward_model is not None and config.reward_model.model is None and readable("reward_model"):
        missing.append("reward_model has no model; write reward_model.model=<hub name or folder>")
    if config.critic is not None and not isinstance(config, PPORunConfig):
        missing.append("critic: GRPO has no critic; leave it out, or train with whet ppo")
    if missing:
        raise ConfigError("\n".join(missing))


SHORTHANDS: dict[str, str] = {
    "model": "actor.model",
    "data": "data.path",
    "reward_workers": "trainer.reward_workers",
    "data.chat_template_kwargs": "rollout.chat_template_kwargs",
    **{
        f"{role}.{f.name}": f"{role}.optim.{f.name}"
        for role in ("actor", "critic")
        for f in dataclasses.fields(OptimConfig)
    },
    "max_tokens": "rollout.max_tokens_to_generate",
    "max_tokens_to_generate": "rollout.max_tokens_to_generate",
    "max_prompt_length": "rollout.max_prompt_length",
}
"""Shorthand -> full key of a RunConfig."""


def load_run(argv: Sequence[str], kind: type[R] = RunConfig) -> R:
    """Returns a RunConfig from `--config run.yaml key=value ...`.

    Args: argv: arguments of the command line after the command. kind: RunConfig, or PPORunConfig for `whet ppo`.
    Raises: ConfigError: every problem at once, a line each.
    """
    return load(kind, argv, SHORTHANDS)
