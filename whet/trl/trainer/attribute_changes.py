"""What a script sets on a trainer, or on its arguments, after the trainer was made.

transformers reads its arguments as it goes, so that scripts lower `trainer.args.learning_rate` or set `max_steps`
before train(). What a run can take up at its beginning is taken up then; of the rest a change is refused.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from whet.errors import ConfigError
from whet.trl.config.arguments import Arguments
from whet.trl.config.translate import optimizer

__all__ = ["Read", "TakesUp"]

_UNREAD = object()

_NAMES = """
adam_beta1 adam_beta2 adam_epsilon eval_delay eval_on_start eval_steps eval_strategy learning_rate logging_first_step
logging_steps logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps num_train_epochs optim
output_dir save_only_model save_steps save_strategy save_total_limit warmup_steps weight_decay
"""
_TAKEN_UP = frozenset(_NAMES.split())
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
                    f"now; set it in {type(self._args).__name__}(...) and make another trainer, with "
                    "model=trainer.model to keep the weights"
                )


class TakesUp:
    """What a trainer takes up of it when it trains: a part of Trainer."""

    args: Any
    models: Any
    worker: Any
    callback_handler: Any
    scheduler: Any
    max_steps: int
    eval_dataset: Any
    """As it was given, or set since."""
    eval_rows: Any
    eval_sets: Any
    _read: Read
    _seen: dict[str, Any]
    _of_class: bool

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute. Raises: ConfigError: it stands for an argument that was read when the trainer was made."""
        held = vars(self)
        argument = name not in held and not hasattr(type(self), name) and "_read" in held and name in self.args.TABLE
        if argument and getattr(self, name) != value:
            raise ConfigError(
                f"{type(self).__name__}.{name} = {value!r} would change nothing: the argument was read when the "
                f"trainer was made; set {name} in {type(self.args).__name__}(...) and make another trainer, with "
                "model=trainer.model to keep the weights"
            )
        super().__setattr__(name, value)

    @property
    def resumable_root(self) -> str | None:
        """Where checkpoints lie from which a run can be resumed; None = none are written."""
        return None if self.args.save_strategy == "no" or self.args.save_only_model else self.args.output_dir

    def begin_anew(self) -> None:
        """Takes up what was set since the trainer was made; the schedule begins at its beginning."""
        self._read.check()
        self.take_up()
        root = self.resumable_root
        self.models.checkpoints.root = None if root is None else Path(root).absolute()
        held = self.worker.optim
        if held is not None and held.config is not None:
            held.begin_anew(optimizer(self.args, self.max_steps or None))
            self.callback_handler.optimizer = held.optimizer
        elif self._of_class and held is not None and held.updates:
            raise ConfigError(
                "optimizer_cls_and_kwargs: its schedule is at its end, and train() a second time would train nothing; "
                "make another trainer of trainer.model, or give optimizers=(optimizer, scheduler)"
            )

    def has_read(self, name: str) -> bool:
        """Whether an attribute is what it was the last time. Args: name: of it."""
        before, self._seen[name] = self._seen.get(name, _UNREAD), getattr(self, name)
        return before is self._seen[name]

    def take_eval_data(self) -> None:
        """Reads eval_dataset where it is another than before."""
        if not self.has_read("given_eval"):
            self.eval_rows = self.eval_sets(self.given_eval)

    @property
    def given_eval(self) -> Any:
        """The evaluation data as they were given or set since."""
        return self.eval_dataset

    def take_up(self) -> None:
        """Reads again what may have been set since: data, length, functions."""
        raise NotImplementedError
