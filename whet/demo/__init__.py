"""The task, the models and the data of `make demo`, small enough for a CPU; recipes/demo*.yaml name them."""

from whet.demo.model import random_model, sft_model, small_model
from whet.demo.task import (
    demonstration,
    demonstration_rows,
    heldout_demonstrations,
    heldout_preferences,
    heldout_rows,
    preference_rows,
    reward,
    train_rows,
    valid_steps,
    validation_rows,
)

__all__ = [
    "demonstration",
    "demonstration_rows",
    "heldout_demonstrations",
    "heldout_preferences",
    "heldout_rows",
    "preference_rows",
    "random_model",
    "reward",
    "sft_model",
    "small_model",
    "train_rows",
    "valid_steps",
    "validation_rows",
]
