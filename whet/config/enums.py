"""The two enumerations of a run: modes and roles."""

from __future__ import annotations

from enum import Enum

__all__ = ["Mode", "Role"]


class Mode(str, Enum):  # noqa: UP042 - str(Mode.TRAIN) is "Mode.TRAIN", which StrEnum would change
    """The purpose of a rollout: training or evaluation.

    >>> Mode("eval"), Mode.TRAIN == "train", str(Mode.TRAIN)
    (<Mode.EVAL: 'eval'>, True, 'Mode.TRAIN')
    """

    TRAIN = "train"
    EVAL = "eval"


class Role(str, Enum):  # noqa: UP042
    """The role of a model.

    >>> Role("actor"), Role.TEACHER.value
    (<Role.ACTOR: 'actor'>, 'teacher')
    """

    ACTOR = "actor"
    CRITIC = "critic"
    REFERENCE = "reference"
    REWARD = "reward"
    TEACHER = "teacher"

    @property
    def section(self) -> str:
        """The section of a configuration that has its model.

        >>> Role.REWARD.section, Role.ACTOR.section
        ('reward_model', 'actor')
        """
        return "reward_model" if self is Role.REWARD else self.value
