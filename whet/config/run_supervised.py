"""The whole configuration of a supervised run (`whet sft`, `rm`, `dpo`), and its shorthands."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, fields
from typing import Any, ClassVar, TypeVar

from pydantic import model_validator

from whet.config.algo.preference import PreferenceConfig, RewardModelConfig
from whet.config.algo.sft import SFTConfig
from whet.config.base import config
from whet.config.fields import Bool, Name
from whet.config.loader import load
from whet.config.model import OptimConfig, RoleConfig
from whet.config.run import missing_inputs
from whet.config.run_sections import RunSupervisedDataConfig, take_base_sections
from whet.config.training import SupervisedTrainingConfig
from whet.errors import ConfigError

__all__ = [
    "DPORunConfig",
    "RMRunConfig",
    "SFTRunConfig",
    "SupervisedRunConfig",
    "check_supervised",
    "load_supervised",
    "shorthands",
]

R = TypeVar("R", bound="SupervisedRunConfig")


@config
class SupervisedRunConfig:
    """The fields of every supervised run."""

    COMMAND: ClassVar[str] = "sft"
    """The command of this configuration."""
    TRAINED: ClassVar[str] = "actor"
    """The section of the model that is trained."""

    data: RunSupervisedDataConfig = field(default_factory=RunSupervisedDataConfig)
    """The data set."""
    trainer: SupervisedTrainingConfig = field(default_factory=SupervisedTrainingConfig)
    """The loop."""
    offload_to_cpu: Bool = False
    """Keep models on the GPU only while they are needed: the reference while it scores, master weights and moments
    during an update. Otherwise they are in pinned host memory. No effect on a CPU."""
    tokenizer: Name | None = None
    """Hub name or folder of the tokenizer; None = the model's."""

    @model_validator(mode="before")
    @classmethod
    def _sections(cls, arguments: Any) -> Any:
        """Accepts objects of the base sections."""
        return take_base_sections(cls, arguments)

    @property
    def trained(self) -> RoleConfig:
        """The model that is trained."""
        return getattr(self, self.TRAINED)


@config
class SFTRunConfig(SupervisedRunConfig):
    """Everything that `whet sft` needs.

    >>> load_supervised(["model=my/model", "actor.lr=2e-5", "data=train.jsonl"], SFTRunConfig).actor.optim.lr
    2e-05
    """

    actor: RoleConfig = field(default_factory=RoleConfig)
    """The model."""
    algo: SFTConfig = field(default_factory=SFTConfig)
    """The objective."""


@config
class RMRunConfig(SupervisedRunConfig):
    """Everything that `whet rm` needs.

    >>> load_supervised(["model=my/model", "reward_model.lr=1e-5", "data=pairs.jsonl"], RMRunConfig).reward_model.model
    'my/model'
    """

    COMMAND: ClassVar[str] = "rm"
    TRAINED: ClassVar[str] = "reward_model"

    reward_model: RoleConfig = field(default_factory=RoleConfig)
    """The model; one without a score head gets one, which starts at 0."""
    algo: RewardModelConfig = field(default_factory=RewardModelConfig)
    """The objective."""


@config
class DPORunConfig(SupervisedRunConfig):
    """Everything that `whet dpo` needs.

    >>> load_supervised(["model=my/model", "algo.loss_type=simpo", "algo.beta=2"], DPORunConfig).algo.loss_type
    ('simpo',)
    """

    COMMAND: ClassVar[str] = "dpo"

    actor: RoleConfig = field(default_factory=RoleConfig)
    """The model."""
    reference: RoleConfig | None = None
    """The reference model; None = the actor's model before training. Only for an algo.loss_type that reads a
    reference."""
    algo: PreferenceConfig = field(default_factory=PreferenceConfig)
    """The objective."""


def shorthands(kind: type[SupervisedRunConfig]) -> Mapping[str, str]:
    """Shorthand -> full key of a supervised run.

    >>> shorthands(SFTRunConfig)["model"], shorthands(SFTRunConfig)["actor.lr"]
    ('actor.model', 'actor.optim.lr')
    """
    role = kind.TRAINED
    optim = {f"{role}.{f.name}": f"{role}.optim.{f.name}" for f in fields(OptimConfig)}
    return {"model": f"{role}.model", "data": "data.path", **optim}


def load_supervised(argv: Sequence[str], kind: type[R]) -> R:
    """Returns the configuration of a supervised run from `--config run.yaml key=value ...`.

    Args: argv: arguments of the command line after the command. kind: of the command.
    Raises: ConfigError: every problem at once, a line each.
    """
    return load(kind, argv, shorthands(kind))


def check_supervised(config: SupervisedRunConfig, unread: Collection[str] = ()) -> None:
    """Raises ConfigError, with all problems, if a required key of a run is missing.

    Args: as check_complete.

    >>> check_supervised(SFTRunConfig())
    Traceback (most recent call last):
    whet.errors.ConfigError: no model; write model=<hub name or folder>
    no data; write data=<hub name, folder, json, jsonl, csv, parquet or arrow file>
    """
    model = "" if config.TRAINED in unread else config.trained.model
    if missing := missing_inputs(model, "" if "data" in unread else config.data.path):
        raise ConfigError("\n".join(missing))
