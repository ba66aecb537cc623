"""What a script sets on a trainer, or on its arguments, after the trainer was made.

transformers reads its arguments as it goes, so that scripts lower `trainer.args.learning_rate` or set `max_steps` before
train(). What a run can take up at its beginning is taken up then; of the rest a change is refused, with the field.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from whet.errors import ConfigError
from whet.trl.config.arguments import Arguments

__all__ = ["Read"]

_TAKEN_UP = frozenset(
    """
    adam_beta1 adam_beta2 adam_epsilon eval_delay eval_on_start eval_steps eval_strategy learning_rate logging_first_step
    logging_steps logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps num_train_epochs optim
    output_dir save_only_model save_steps save_strategy save_total_limit warmup_steps weight_decay
    """.split()
)
"""Fields that each train() reads anew."""


class Read:
    """The arguments as a trainer has read them. Args: args: they."""

    def __init__(self, args: Arguments) -> None:
        self._args = args
        self._values = self._now()

    def _now(self) -> dict[str, Any]:
        return {f.name: getattr(self._args, f.name) for f in dataclasses.fields(self._args)}  # pyright: ignore

    def check(self) -> None:
        """Raises ConfigError for a field that was changed and can't be taken up."""
        self._args.words()
        table = {**self._args.TABLE, **self._args.OWN}
        for name, value in self._now().items():
            before = self._values[name]
            idle = name in _TAKEN_UP or (name in table and table[name].state == "no effect")
            if value != before and not idle:
                raise ConfigError(
                    f"args.{name} was {before!r} when the trainer was made, which has read it then, and is {value!r} "
                    f"now; set it in {type(self._args).__name__}(...), and make the trainer anew, of trainer.model to go on"
                )
