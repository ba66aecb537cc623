"""The data set: the section data."""

from __future__ import annotations

from whet.config.base import config
from whet.config.fields import Bool, Count, Float, Name, Size, Text
from whet.errors import ConfigError

__all__ = ["DataConfig"]


@config
class DataConfig:
    """Where prompts come from."""

    path: Name | None = None
    """Hub name, folder, a json, jsonl, csv, parquet or arrow file, "file.py:function" or "package.module:function" that
    returns the rows; None = given from Python."""
    subset: Name | None = None
    """Configuration of a hub data set, e.g. main, of eval_path too; None = its only one."""
    eval_path: Name | None = None
    """The same for evaluation; None = path with eval_split, or a part cut off by eval_fraction."""
    split: Name = "train"
    """Split to train on, where there are several."""
    eval_split: Name | None = None
    """Split to evaluate on; None = eval_path's only one, or the only one named test, validation, dev or the like."""
    eval_fraction: Float = 0.0
    """Share of the rows kept for evaluation and not trained on. 0.0 = off."""
    batch_size: Size = 8
    """Prompts of one step."""
    prompt_column: Name | None = None
    """Column with the prompt; None = prompt, prompts, messages or question, whichever is there."""
    shuffle: Bool = True
    """A new order in each epoch, from the run's seed. No effect on a stream, which keeps its own order."""
    streaming: Bool = False
    """Read the data set during the run, without downloading it first."""
    apply_chat_template: Bool = False
    """Make each plain-text prompt a user's turn in the chat template; conversations always go through it."""
    system_prompt: Text = ""
    """Put before every conversation. "" = off."""
    limit: Count | None = None
    """Use only the first N rows; None = all."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(f"eval_fraction must lie in [0, 1), got {self.eval_fraction!r}; 0.0 turns it off")
        if self.eval_fraction and (self.eval_path or self.eval_split):
            raise ConfigError("eval_fraction cuts rows off the training data; drop it, or eval_path and eval_split")
