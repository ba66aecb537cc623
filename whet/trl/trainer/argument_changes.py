"""Checks changes to `trainer.args` between the trainer's construction and `train`.

transformers reads arguments during the run, so scripts lower `trainer.args.learning_rate` or set `max_steps` before
train(). `train` reads the fields of `_READ_AGAIN` again, and refuses a change of any other field.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from whet.errors import ConfigError
from whet.trl.config.arguments import Arguments

__all__ = ["ArgumentSnapshot", "change_error"]

_NAMES = """
adam_beta1 adam_beta2 adam_epsilon eval_delay eval_on_start eval_steps eval_strategy learning_rate logging_first_step
logging_steps logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps num_train_epochs optim
output_dir save_only_model save_steps save_strategy save_total_limit warmup_steps weight_decay
"""
_READ_AGAIN = frozenset(_NAMES.split())
"""Fields that each train() reads again."""


def change_error(problem: str, field: str, config: type) -> ConfigError:
    """Returns the error for a change that train() does not read. Args: problem: the change. config: the arguments'
    class.
    """
    return ConfigError(
        f"{problem}; set {field} in {config.__name__}(...) and make another trainer, with model=trainer.model to keep "
        "the weights"
    )


class ArgumentSnapshot:
    """The arguments' values at the trainer's construction. Args: args: the trainer's arguments."""

    def __init__(self, args: Arguments) -> None:
        self._args = args
        self._values = self._current()

    def _current(self) -> dict[str, Any]:
        return {f.name: getattr(self._args, f.name) for f in dataclasses.fields(self._args)}  # pyright: ignore

    def check(self) -> None:
        """Raises ConfigError for a changed field that train() does not read again."""
        self._args.parse_enums()
        table = {**self._args.TABLE, **self._args.OWN}
        for name, value in self._current().items():
            before = self._values[name]
            has_effect = name not in _READ_AGAIN and not (name in table and table[name].state == "no effect")
            if value != before and has_effect:
                problem = f"args.{name} was {before!r} when the trainer was made and read it, and is {value!r} now"
                raise change_error(problem, name, type(self._args))
