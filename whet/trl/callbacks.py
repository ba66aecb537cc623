"""TRL's callbacks: a table of completions, a win rate, a reference that follows the policy, a progress view.

They are callbacks of transformers and call the model's own `generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import TrainerCallback

from whet.errors import ConfigError
from whet.models.modes import eval_mode, transformers_attention
from whet.trl.data_utils import maybe_apply_chat_template

__all__ = ["LogCompletionsCallback", "RichProgressCallback", "SyncRefModelCallback", "WinRateCallback"]


class SyncRefModelCallback(TrainerCallback):
    """Moves a reference towards the policy every ref_model_sync_steps: π_ref = α π + (1 − α) π_ref, α
    ref_model_mixup_alpha. The trainers do so themselves with sync_ref_model=True.

    Args: ref_model: the reference, e.g. trainer.ref_model. accelerator: not needed.
    """

    def __init__(self, ref_model: Any, accelerator: Any = None) -> None:
        self.ref_model, self.accelerator = ref_model, accelerator

    @staticmethod
    @torch.no_grad()
    def sync_target_model(model: Any, target_model: Any, alpha: float) -> None:
        """Moves one model's parameters towards another's. Args: alpha: the share of `model`."""
        for target, own in zip(target_model.parameters(), model.parameters(), strict=True):
            target.lerp_(own.to(target), alpha)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Moves it, where the step is one of those."""
        if self.ref_model is not None and state.global_step % args.ref_model_sync_steps == 0:
            self.sync_target_model(kwargs["model"], self.ref_model, args.ref_model_mixup_alpha)


class _PromptCallback(TrainerCallback):
    """What generates for the prompts of the evaluation data, every `freq` steps."""

    def __init__(self, trainer: Any, generation_config: Any, num_prompts: int | None, freq: int | None) -> None:
        given = getattr(trainer, "raw_eval_dataset", None)  # where eval_dataset shows token ids
        data = trainer.eval_dataset if given is None else given
        if data is None:
            raise ConfigError(f"Trainer must have an evaluation dataset to use the {type(self).__name__}; give it one")
        self.trainer, self.generation_config, self.freq = trainer, generation_config, freq
        self.prompts = [row["prompt"] for row in data][:num_prompts]
        self._last = -1

    def is_due(self, args: Any, state: Any) -> bool:
        """Whether this step is one of those, and was not done."""
        every = self.freq or state.eval_steps or args.eval_steps
        if not every or state.global_step % every or state.global_step == self._last:
            return False
        self._last = state.global_step
        return True

    def formatted_prompts(self, tokenizer: Any) -> list[str]:
        """The prompts as texts."""
        return [maybe_apply_chat_template({"prompt": prompt}, tokenizer)["prompt"] for prompt in self.prompts]

    @torch.no_grad()
    def completions(self, model: Any, tokenizer: Any, batch_size: int) -> list[str]:
        """One for each prompt."""
        texts, found, side = self.formatted_prompts(tokenizer), [], tokenizer.padding_side
        tokenizer.padding_side = "left"
        try:
            with eval_mode(model):
                for i in range(0, len(texts), batch_size):
                    batch = tokenizer(texts[i : i + batch_size], return_tensors="pt", padding=True)
                    ids, mask = batch["input_ids"].to(model.device), batch["attention_mask"].to(model.device)
                    made = model.generate(input_ids=ids, attention_mask=mask, generation_config=self.generation_config)[
                        :, ids.shape[1] :
                    ]
                    found += [tokenizer.decode(row, skip_special_tokens=True) for row in made]
        finally:
            tokenizer.padding_side = side
        return found


class LogCompletionsCallback(_PromptCallback):
    """Logs what the model says to the prompts of the evaluation data, to Weights & Biases and Comet.

    `table` holds the rows, (step, prompt, completion), whatever is logged to.

    Args: trainer: that it is given to. generation_config: of transformers. num_prompts: the first so many; None = all.
        freq: steps between two times; None = eval_steps.
    Raises: ConfigError: the trainer has no evaluation data.
    """

    def __init__(
        self, trainer: Any, generation_config: Any = None, num_prompts: int | None = None, freq: int | None = None
    ) -> None:
        super().__init__(trainer, generation_config, num_prompts, freq)
        self.table: list[tuple[str, str, str]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Generates and logs, where the step is one of those."""
        if not self.is_due(args, state):
            return
        tokenizer = kwargs["processing_class"]
        completions = self.completions(kwargs["model"], tokenizer, args.per_device_eval_batch_size)
        step, prompts = str(state.global_step), self.formatted_prompts(tokenizer)
        self.table += [(step, prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        _log_table(args.report_to, "completions", ["step", "prompt", "completion"], self.table)


class WinRateCallback(_PromptCallback):
    """Logs how often a judge prefers what the model says to what its reference said: eval_win_rate.

    Args: judge: has judge(prompts, pairs, shuffle_order) -> for each pair which is better, 0 or 1; with use_soft_judge
            judge(..., return_scores=True) -> the probability that the first is. trainer: that it is given to.
        generation_config: of transformers. num_prompts: the first so many; None = all.
        shuffle_order: the judge may turn pairs round. use_soft_judge: log eval_avg_win_prob too.
    The reference is trainer.ref_model, or without one the model as it begins. Raises: ConfigError: no evaluation data.
    """

    def __init__(
        self,
        judge: Any,
        trainer: Any,
        generation_config: Any = None,
        num_prompts: int | None = None,
        shuffle_order: bool = True,
        use_soft_judge: bool = False,
    ) -> None:
        super().__init__(trainer, generation_config, num_prompts, None)
        self.judge, self.shuffle_order, self.use_soft_judge = judge, shuffle_order, use_soft_judge
        self.ref_completions: list[str] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Generates what the reference says, and logs what the judge says of it against itself."""
        reference, size = self.trainer.ref_model, args.per_device_eval_batch_size
        with nullcontext() if reference is None else transformers_attention(reference):
            model = kwargs["model"] if reference is None else reference
            self.ref_completions = self.completions(model, kwargs["processing_class"], size)
        self._judge(args, kwargs["processing_class"], self.ref_completions)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Generates what the model says, and has it judged."""
        tokenizer = kwargs["processing_class"]
        said = self.completions(kwargs["model"], tokenizer, args.per_device_eval_batch_size)
        self._judge(args, tokenizer, said)

    def _judge(self, args: Any, tokenizer: Any, said: Sequence[str]) -> None:
        """Logs the rate. Args: said: by the model."""
        pairs = [list(pair) for pair in zip(self.ref_completions, said, strict=True)]
        prompts = self.formatted_prompts(tokenizer)
        logged = {}
        if self.use_soft_judge:
            first = self.judge.judge(prompts, pairs, self.shuffle_order, return_scores=True)
            logged["eval_avg_win_prob"] = sum(1 - p for p in first) / len(first)
            won = [float(p <= 0.5) for p in first]
        else:
            won = [float(better == 1) for better in self.judge.judge(prompts, pairs, self.shuffle_order)]
        self.trainer.log({**logged, "eval_win_rate": sum(won) / len(won)})
        rows = [(p, *pair, str(w)) for p, pair, w in zip(prompts, pairs, won, strict=True)]
        _log_table(args.report_to, "win_rate_completions", ["prompt", "reference", "policy", "won"], rows)


def _log_table(report_to: Sequence[str], name: str, columns: list[str], rows: Sequence[Sequence[str]]) -> None:
    """Sends a table to the loggers that take one."""
    if "wandb" in report_to:
        import wandb  # pyright: ignore[reportMissingImports]

        if wandb.run is not None:
            wandb.log({name: wandb.Table(data=[list(row) for row in rows], columns=list[Any](columns))})
    if "comet_ml" in report_to:
        import comet_ml  # pyright: ignore[reportMissingImports]
        import pandas

        as_dicts = [dict(zip(columns, row, strict=True)) for row in rows]
        if (experiment := comet_ml.get_running_experiment()) is not None:
            experiment.log_table(f"{name}.csv", pandas.DataFrame(as_dicts))


class RichProgressCallback(TrainerCallback):
    """A bar of the run's steps with a table of the last metrics under it, drawn by rich; ConfigError without rich."""

    def __init__(self) -> None:
        try:
            import rich  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"RichProgressCallback requires rich ({error}); pip install rich") from error
        self._live: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Opens the view."""
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._task = self._bar.add_task("training", total=state.max_steps, completed=state.global_step)
        self._live = Live(self._bar)
        self._live.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Moves the bar."""
        if self._live is not None:
            self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Shows the metrics."""
        if self._live is None:
            return
        from rich.console import Group
        from rich.table import Table

        table = Table(title=f"step {state.global_step}", show_header=False)
        for name, value in (logs or {}).items():
            table.add_row(name, f"{value:.4g}" if isinstance(value, int | float) else str(value))
        self._live.update(Group(self._bar, table))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes the view."""
        if self._live is not None:
            self._live.stop()
            self._live = None
