"""The whole configuration of a run: what a recipe holds, and the shorthands of the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, TypeVar

from pydantic import model_validator
from pydantic_core import ArgsKwargs

from whet.config.algo.presets import preset
from whet.config.base import config, section_at
from whet.config.data import Sources
from whet.config.fields import Bool, Float, Name
from whet.config.length_aliases import length_shorthands
from whet.config.loader import dump_tree, load, merge
from whet.config.lora import lora_shorthands
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
    """The command that trains it."""
    TRAINED: ClassVar[str] = "actor"
    """The section of the model that the run makes."""

    actor: RoleConfig = field(default_factory=RoleConfig)
    """The policy."""
    critic: RoleConfig | None = None
    """The value model of `whet ppo`; None = the actor's, with a fresh score head. `whet grpo` has none."""
    reference: RoleConfig | None = None
    """The model that the KL is measured against; None = the actor as it was at the start."""
    teacher: RoleConfig | None = None
    """The model that policy_loss_fn=distillation and gkd learn from, of the actor's tokenizer; None = none."""
    rollout: RunRolloutConfig = field(default_factory=RunRolloutConfig)
    """Sampling."""
    algo: RunGRPOConfig = field(default_factory=RunGRPOConfig)
    """The algorithm; algo.preset names a published method, which the other keys change."""
    data: RunDataConfig = field(default_factory=RunDataConfig)
    """The data set."""
    trainer: RLTrainingConfig = field(default_factory=RLTrainingConfig)
    """The loop."""
    reward: Name | list[Name] | dict[Name, Float] | None = None
    """Reward functions: a built-in name, "file.py:function" or "package.module:function"; a list; or name -> weight.
    The word reward_model among them stands for the model of that section."""
    reward_model: RoleConfig | None = None
    """A reward model (transformers' sequence classifier of one label), whose score is one more reward; of weight 1.0
    unless `reward` names it. None = none."""
    rollout_engine: Name = "embedded"
    """"embedded" = whet's own, "hf" = transformers' generate, "vllm", "sglang", "mock" (for tests),
    or "package.module:Class"."""
    offload_to_cpu: Bool = False
    """Keep on a GPU what the phase needs: the reference while it scores, masters and moments during an update; they lie
    in pinned host memory otherwise. Nothing to do on a CPU."""
    tokenizer: Name | None = None
    """Hub name or folder of the tokenizer; None = the actor's."""

    @model_validator(mode="before")
    @classmethod
    def _sections(cls, given: Any) -> Any:
        """Puts the fields of algo.preset, a published method, under the other keys of algo; takes plain sections."""
        given = take_base_sections(cls, given)
        words = given.kwargs if isinstance(given, ArgsKwargs) else given
        if not isinstance(words, Mapping):
            return given
        algo = words.get("algo")
        if not isinstance(algo, Mapping) or "preset" not in algo:
            return given
        name, own = algo["preset"], {key: value for key, value in algo.items() if key != "preset"}
        fields = {} if name is None else dump_tree(preset(name, section_at(cls, ("algo",))))
        words = {**words, "algo": merge(fields, own)}
        return ArgsKwargs((), words) if isinstance(given, ArgsKwargs) else words

    def __post_init__(self) -> None:
        """Checks what concerns several sections."""
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
        """The reward functions in their order; a reward model that is not listed is the last. Where there is neither,
        the reward_fn of rollout.env_path, if nothing else teaches.
        """
        named = super().reward_names
        if not named and self.teacher is None and isinstance(self.rollout.env_path, str):
            return (f"{self.rollout.env_path}:reward_fn",)
        return named

    @property
    def reward_weights(self) -> tuple[float, ...] | None:
        """Their weights, from `reward` or from `algo`; None = 1.0 each."""
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
    """What a command lacks of model and data, a line each. Args: model, path: as given. of: what a model may be.

    >>> missing_inputs("my/model", None)
    ['no data; write data=<hub name, folder, json, jsonl, csv, parquet or arrow file>']
    """
    data = "no data; write data=<hub name, folder, json, jsonl, csv, parquet or arrow file>"
    return [line for line, given in ((f"no model; write model={of}", model), (data, path)) if given is None]


def check_complete(config: RunConfig, unread: Collection[str] = ()) -> None:
    """Raises ConfigError, all at once, where a run lacks what has no default.

    Args: config: of the run. unread: sections of which nothing is said, since not all that was given is in them.

    >>> check_complete(RunConfig(reward="exact_match"))
    Traceback (most recent call last):
    whet.errors.ConfigError: no model; write model=<hub name or folder>
    no data; write data=<hub name, folder, json, jsonl, csv, parquet or arrow file>
    """
    said = lambda *sections: not {*sections} & {*unread}
    missing = missing_inputs(config.actor.model if said("actor") else "", config.data.path if said("data") else "")
    learns = config.reward_names or (config.teacher is not None and not isinstance(config, PPORunConfig))
    if not learns and said("reward", "rollout", "teacher"):
        missing.append("no reward; write reward=file.py:function, or the name of one of whet's own")
    if config.teacher is not None and config.teacher.model is None and said("teacher"):
        missing.append("teacher has no model; write teacher.model=<hub name or folder>")
    if config.reward_model is not None and config.reward_model.model is None and said("reward_model"):
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
    **lora_shorthands(("actor", "critic")),
    **length_shorthands("rollout.max_tokens_to_generate", "rollout.max_prompt_length"),
}
"""Shorthand -> full key of a RunConfig."""


def load_run(argv: Sequence[str], kind: type[R] = RunConfig) -> R:
    """A RunConfig from `--config run.yaml key=value ...`.

    Args: argv: arguments of the command line after the command. kind: RunConfig, or PPORunConfig for `whet ppo`.
    Raises: ConfigError: every problem at once, a line each.
    """
    return load(kind, argv, SHORTHANDS)
