"""SupervisedTask: the part of a run that is supervised training: examples in their order, evaluation by the loss."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.config import Mode, OptimConfig, dump_tree
from whet.data.encoder import Encoder
from whet.data.lengths import LengthStats
from whet.data.preview import example_lines
from whet.data.prompt_stream import PromptStream
from whet.data.supervised import RowEncoder
from whet.errors import DataError
from whet.learners.learner_task import LearnerTask, check_vocabulary
from whet.learners.step import ExampleStep
from whet.metrics import flat
from whet.run.run import Run
from whet.train.rehearsal import rehearse
from whet.types import Example

if TYPE_CHECKING:
    from whet.learners.supervised import SupervisedLearner

__all__ = ["SupervisedTask"]

log = logging.getLogger("whet")

LAST_STEPS = 10
"""The mean loss of this many steps at the end of a run is compared with the loss of guessing."""
GUESSING_SHARE = 0.005
"""A loss that is below that of guessing by less than this share is no better than guessing."""


class SupervisedTask(LearnerTask):
    """A supervised learner's part of its run.

    Args: learner: the run's. eval_ds: rows or a reference to them; None = no evaluation.
    """

    required_state = ("models",)
    main_metric, eval_unit = "loss", "rows"

    def __init__(self, learner: SupervisedLearner[Any], eval_ds: Any = None) -> None:
        super().__init__(learner, learner.models, learner.models.config, eval_ds)
        self.learner, self.models = learner, learner.models
        self._longest = 0
        """Tokens of the longest example so far."""

    # ---- data ----------------------------------------------------------------------------------------------------

    def encoder(self, mode: Mode) -> Encoder[Example]:
        """Returns the learner's encoder, which is the same in all modes."""
        return self.learner.encoder()

    def stream(self, train_ds: Any) -> PromptStream:
        """Returns the training examples in their order. Args, Raises: see LearnerTask."""
        stream, longest = super().stream(train_ds), self.learner.data.max_length
        if stream.kind != "rows" and longest is not None:
            self.models.raise_token_budget(longest)
        return stream

    def show_first(self, stream: PromptStream, rows: Any) -> None:
        """Logs the first example as the model receives it, with its trained part."""
        encode = stream.encode
        if not isinstance(encode, RowEncoder):
            return
        if (example := self.first_item(stream)) is not None:
            row = rows[example.row] if stream.kind == "rows" else stream.first
            log.info("first example, %s", "\n".join(example_lines(encode, example, row)))

    @property
    def evaluated_examples(self) -> list[Example]:
        """The evaluation data, encoded; empty where there are none."""
        self.prepare()
        return self._evaluated or []

    def check_fit(self, items: Sequence[Example], mode: Mode = Mode.TRAIN) -> None:
        """Raises DataError for examples that the model can't read; raises the token budget to the longest example."""
        positions, ids = self.models.positions, self.models.trained.loaded.num_ids
        each = [[len(s.prefix) + len(s.tokens) for s in example.sequences] for example in items]
        spread, longest = LengthStats(map(max, each)), 0
        if positions is not None and (over := spread.describe_over(positions, "the model's max_position_embeddings")):
            row = items[int(np.argmax(list(map(max, each))))].row
            fix = f"set data.max_length={positions} with data.on_long=truncate or drop"
            raise DataError(f"{over} (row {row})", fix=fix, key="data.max_length", limit=positions)
        for example, lengths in zip(items, each, strict=True):
            highest = max(int(part.max()) for s in example.sequences for part in (s.prefix, s.tokens))
            check_vocabulary(example.row, highest, ids)
            longest = max(longest, sum(lengths))
        self.models.raise_token_budget(longest)
        self._longest = max(self._longest, longest)

    def rehearse(self) -> None:
        """Runs the largest update, of rows as long as the longest example, or as data.max_length in a stream."""
        if longest := self._longest or self.learner.data.max_length or 0:
            prompt = max(1, longest // 4)
            rehearse(self.models, prompt, max(1, longest - prompt))

    # ---- settings and inputs ----------------------------------------------------------------------------

    def extra_settings(self) -> dict[str, Any]:
        """Returns the settings that were given from Python and have no key in the configuration."""
        optimizer = self.models.optimizer
        return {"from Python": {"optimizer": dump_tree(optimizer) if isinstance(optimizer, OptimConfig) else optimizer}}

    def expected_metrics(self) -> tuple[str, ...]:
        """Returns the loss, and the metrics that the progress bar shows."""
        return ("loss", *self.models.trainer.displayed)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Warns if a run has ended with the loss of a model that guesses."""
        chance = self.learner.chance_loss
        losses = [row["loss"] for row in run.rows if row["mode"] == Mode.TRAIN.value][-LAST_STEPS:]
        if error is not None or chance is None or len(losses) < LAST_STEPS:
            return
        mean = sum(losses) / LAST_STEPS
        if mean >= (1 - GUESSING_SHARE) * chance:
            section = self.models.role.section
            log.warning(
                "the last %d steps have a mean loss of %.4g, and a model that guesses has %.4g: nothing was learned; "
                "raise %s.optim.lr or trainer.max_steps, lower %s.optim.lr where the loss was below that before, and "
                "look at the rows (whet data)",
                LAST_STEPS,
                mean,
                chance,
                section,
                section,
            )

    # ---- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self, run: Run, step: int) -> dict[str, float]:
        """Computes the loss and its metrics over the evaluation data. Returns: the row that is logged."""
        self.prepare()
        examples, started = self._evaluated or [], time.monotonic()
        with self.models.trace.span("eval"):
            measured = self.learner.measure(ExampleStep(index=step, examples=examples, mode=Mode.EVAL))
        row = {**flat(measured.metrics), "rows/count": float(len(examples)), "time/eval": time.monotonic() - started}
        shown = "".join(f"  {name} {row[name]:.4g}" for name in self.models.trainer.displayed if name in row)
        message = "eval, step %d: loss %.4g%s  (%d rows, %.1f s)"
        log.info(message, step, row["loss"], shown, len(examples), row["time/eval"])
        return row

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns the state of the models and the learner."""
        return {"models": self.models.state(), "learner": self.learner.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the learner's. The models' state was used when they were made."""
        self.learner.restore(state["learner"])
