"""TRL's callbacks: a table of completions, a win rate, a reference that follows the policy, a progress view.

They are transformers callbacks and call the model's own `generate`.
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
    """Updates the reference every ref_model_sync_steps: π_ref = α π + (1 − α) π_ref, where α is ref_model_mixup_alpha.

    The trainers do this themselves with sync_ref_model=True.

    Args: ref_model: the reference, e.g. trainer.ref_model. accelerator: has no effect.
    """

    def __init__(self, ref_model: Any, accelerator: Any = None) -> None:
        self.ref_model, self.accelerator = ref_model, accelerator

    @staticmethod
    @torch.no_grad()
    def sync_target_model(model: Any, target_model: Any, alpha: float) -> None:
        """Interpolates target_model's parameters towards model's. Args: alpha: the share of `model`."""
        for target, source in zip(target_model.parameters(), model.parameters(), strict=True):
            target.lerp_(source.to(target), alpha)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Updates the reference if it is due."""
        if self.ref_model is not None and state.global_step % args.ref_model_sync_steps == 0:
            self.sync_target_model(kwargs["model"], self.ref_model, args.ref_model_mixup_alpha)


class _PromptCallback(TrainerCallback):
    """The base of callbacks that generate completions for the evaluation prompts every `freq` steps."""

    def __init__(self, trainer: Any, generation_config: Any, num_prompts: int | None, freq: int | None) -> None:
        raw = getattr(trainer, "raw_eval_dataset", None)  # eval_dataset may have token ids only
        data = trainer.eval_dataset if raw is None else raw
        if data is None:
            raise ConfigError(
                f"Trainer must have an evaluation dataset to use the {type(self).__name__}; pass eval_dataset"
            )
        self.trainer, self.generation_config, self.freq = trainer, generation_config, freq
        self.prompts = [row["prompt"] for row in data][:num_prompts]
        self._last = -1

    def is_due(self, args: Any, state: Any) -> bool:
        """Returns whether this step is due and has not been handled yet."""
        every = self.freq or state.eval_steps or args.eval_steps
        if not every or state.global_step % every or state.global_step == self._last:
            return False
        self._last = state.global_step
        return True

    def formatted_prompts(self, tokenizer: Any) -> list[str]:
        """Returns the prompts as texts."""
        return [maybe_apply_chat_template({"prompt": prompt}, tokenizer)["prompt"] for prompt in self.prompts]

    @torch.no_grad()
    def completions(self, model: Any, tokenizer: Any, batch_size: int) -> list[str]:
        """Generates one completion for each prompt."""
        texts, completions, side = self.formatted_prompts(tokenizer), [], tokenizer.padding_side
        tokenizer.padding_side = "left"
        try:
            with eval_mode(model):
                for i in range(0, len(texts), batch_size):
                    batch = tokenizer(texts[i : i + batch_size], return_tensors="pt", padding=True)
                    ids, mask = batch["input_ids"].to(model.device), batch["attention_mask"].to(model.device)
                    output = model.generate(
                        input_ids=ids, attention_mask=mask, generation_config=self.generation_config
                    )
                    new_ids = output[:, ids.shape[1] :]
                    completions += [tokenizer.decode(row, skip_special_tokens=True) for row in new_ids]
        finally:
            tokenizer.padding_side = side
        return completions


class LogCompletionsCallback(_PromptCallback):
    """Logs the model's completions of the evaluation prompts to Weights & Biases and Comet.

    `table` has all rows: (step, prompt, completion).

    Args:
        trainer: the trainer that calls it.
        generation_config: transformers' GenerationConfig.
        num_prompts: how many prompts, from the first; None = all.
        freq: the interval in steps; None = eval_steps.
    Raises: ConfigError: the trainer has no evaluation data.
    """

    def __init__(
        self, trainer: Any, generation_config: Any = None, num_prompts: int | None = None, freq: int | None = None
    ) -> None:
        super().__init__(trainer, generation_config, num_prompts, freq)
        self.table: list[tuple[str, str, str]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Generates and logs completions if the step is due."""
        if not self.is_due(args, state):
            return
        tokenizer = kwargs["processing_class"]
        completions = self.completions(kwargs["model"], tokenizer, args.per_device_eval_batch_size)
        step, prompts = str(state.global_step), self.formatted_prompts(tokenizer)
        self.table += [(step, prompt, text) for prompt, text in zip(prompts, completions, strict=True)]
        _log_table(args.report_to, "completions", ["step", "prompt", "completion"], self.table)


class WinRateCallback(_PromptCallback):
    """Logs how often a judge prefers the model's completion to the reference's: eval_win_rate.

    The reference is trainer.ref_model; without one it is the model before training.

    Args:
        judge: has judge(prompts, pairs, shuffle_order) -> the index of the better completion of each pair; with
            use_soft_judge, judge(..., return_scores=True) -> the probability that the first is better.
        trainer: the trainer that calls it.
        generation_config: transformers' GenerationConfig.
        num_prompts: how many prompts, from the first; None = all.
        shuffle_order: whether the judge may swap the completions of a pair.
        use_soft_judge: whether to log eval_avg_win_prob too.
    Raises: ConfigError: the trainer has no evaluation data.
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
        """Generates the reference's completions, and judges them against themselves."""
        reference, size = self.trainer.ref_model, args.per_device_eval_batch_size
        with nullcontext() if reference is None else transformers_attention(reference):
            model = kwargs["model"] if reference is None else reference
            self.ref_completions = self.completions(model, kwargs["processing_class"], size)
        self._judge(args, kwargs["processing_class"], self.ref_completions)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Generates the model's completions, and judges them."""
        tokenizer = kwargs["processing_class"]
        completions = self.completions(kwargs["model"], tokenizer, args.per_device_eval_batch_size)
        self._judge(args, tokenizer, completions)

    def _judge(self, args: Any, tokenizer: Any, completions: Sequence[str]) -> None:
        """Judges completions against the reference's, and logs the win rate."""
        pairs = [list(pair) for pair in zip(self.ref_completions, completions, strict=True)]
        prompts = self.formatted_prompts(tokenizer)
        metrics = {}
        if self.use_soft_judge:
            ref_wins = self.judge.judge(prompts, pairs, self.shuffle_order, return_scores=True)
            metrics["eval_avg_win_prob"] = sum(1 - p for p in ref_wins) / len(ref_wins)
            won = [float(p <= 0.5) for p in ref_wins]
        else:
            won = [float(better == 1) for better in self.judge.judge(prompts, pairs, self.shuffle_order)]
        self.trainer.log({**metrics, "eval_win_rate": sum(won) / len(won)})
        rows = [(p, *pair, str(w)) for p, pair, w in zip(prompts, pairs, won, strict=True)]
        _log_table(args.report_to, "win_rate_completions", ["prompt", "reference", "policy", "won"], rows)


def _log_table(report_to: Sequence[str], name: str, columns: list[str], rows: Sequence[Sequence[str]]) -> None:
    """Logs a table to the loggers that support tables."""
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
    """Shows a progress bar of the run's steps and a table of the last metrics. Raises ConfigError without rich."""

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
        """Advances the bar."""
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
