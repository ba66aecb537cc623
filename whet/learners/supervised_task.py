"""SupervisedTask: the part of a run that is supervised training: examples in their order, evaluation by the loss."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from whet.config import Mode, OptimConfig, dump_tree
from whet.data.checksums import compute_checksums
from whet.data.lengths import LengthStats
from whet.data.preview import example_lines
from whet.data.prompt_stream import PromptStream
from whet.data.sources import load_rows
from whet.data.supervised import RowEncoder
from whet.errors import DataError
from whet.learners.step import ExampleStep
from whet.metrics import flat
from whet.run.provenance import record_inputs
from whet.run.run import Run
from whet.run.task import Task
from whet.train.rehearsal import rehearse
from whet.types import Example
from whet.util.references import is_ref

if TYPE_CHECKING:
    from whet.learners.supervised import SupervisedLearner

__all__ = ["SupervisedTask"]

log = logging.getLogger("whet")

LAST_STEPS = 10
"""The mean loss of this many steps at the end of a run is compared with the loss of guessing."""
GUESSING_SHARE = 0.005
"""A loss that is below that of guessing by less than this share is no better than guessing."""


class Encoder(Protocol):
    """Turns rows into examples, and counts the outcomes."""

    @property
    def counts(self) -> Mapping[Any, int]:
        """Outcome ("encoded", "dropped", "truncated") -> number of rows."""
        ...

    def __call__(self, row: Mapping[str, Any], number: int = 0) -> Example | None:
        """Encodes a row. Returns: None = it is left out."""
        ...


class SupervisedTask(Task):
    """A supervised learner's part of its run.

    Args: learner: the run's. eval_ds: rows or a reference to them; None = no evaluation.
    """

    required_state = ("models",)
    main_metric, eval_unit = "loss", "rows"

    def __init__(self, learner: SupervisedLearner[Any], eval_ds: Any = None) -> None:
        self.learner, self.models = learner, learner.models
        self.eval_ds = eval_ds
        self.has_evaluation = eval_ds is not None
        self._evaluated: list[Example] | None = None
        self._longest = 0
        """Tokens of the longest example so far."""

    # ---- data ----------------------------------------------------------------------------------------------------

    def stream(self, train_ds: Any) -> PromptStream:
        """Returns the training examples in their order.

        Args: train_ds: rows, or a reference to them.
        Raises: ConfigError: sizes that don't fit. DataError: rows that can't be trained on.
        """
        data, config, encode = self.learner.data, self.models.config, self.learner.encoder()
        epochs = 1 if config.num_epochs is None and not config.max_steps else config.num_epochs
        rows = load_rows(train_ds, split=data.split)
        stream = PromptStream(
            rows,
            batch_size=data.batch_size,
            seed=config.seed if config.data_shuffle_seed is None else config.data_shuffle_seed,
            shuffle=data.shuffle if data.shuffle is False else None,
            num_epochs=epochs,
            last_batch=config.last_batch,
            shuffle_buffer=data.shuffle_buffer,
            encode=encode,
        )
        log.info("data: %s%s", stream.describe(), describe_counts(encode))
        self._show_first(stream, rows)
        if stream.kind == "rows":
            self.check_fit(stream.source)
        elif data.max_length is not None:
            self.models.raise_token_budget(self.learner.data.max_length or 0)
        return stream

    def _show_first(self, stream: PromptStream, rows: Any) -> None:
        """Logs the first example as the model receives it, with its trained part."""
        encode = stream.encode
        if not isinstance(encode, RowEncoder):
            return
        example = stream.source[0] if stream.kind == "rows" else encode(stream.first)
        if stream.kind != "rows":
            encode.reset_counts()  # the row is encoded again when it is read
        if example is not None:
            row = rows[example.row] if stream.kind == "rows" else stream.first
            log.info("first example, %s", "\n".join(example_lines(encode, example, row)))

    def prepare(self) -> None:
        """Encodes the evaluation data."""
        if not self.has_evaluation or self._evaluated is not None:
            return
        encode = self.learner.encoder()
        stream = PromptStream(
            load_rows(self.eval_ds, split=None), batch_size=1, shuffle=False, last_batch="keep", encode=encode
        )
        self._evaluated = [example for batch in stream for example in batch]
        log.info("evaluation data: %d rows%s", len(self._evaluated), describe_counts(encode))
        self.check_fit(self._evaluated)

    @property
    def evaluated_examples(self) -> list[Example]:
        """The evaluation data, encoded; empty where there are none."""
        self.prepare()
        return self._evaluated or []

    def check_fit(self, examples: Sequence[Example]) -> None:
        """Raises DataError for examples that the model can't read; raises the token budget to the longest example."""
        positions, ids = self.models.positions, self.models.trained.loaded.num_ids
        each = [[len(s.prefix) + len(s.tokens) for s in example.sequences] for example in examples]
        spread, longest = LengthStats(map(max, each)), 0
        if positions is not None and (over := spread.describe_over(positions, "the model's max_position_embeddings")):
            row = examples[int(np.argmax(list(map(max, each))))].row
            fix = f"set data.max_length={positions} with data.on_long=truncate or drop"
            raise DataError(f"{over} (row {row})", fix=fix, key="data.max_length", limit=positions)
        for example, lengths in zip(examples, each, strict=True):
            highest = max(int(part.max()) for s in example.sequences for part in (s.prefix, s.tokens))
            if highest >= ids:
                raise DataError(
                    f"row {example.row}: token {highest} is outside the model's vocabulary of {ids}; the tokenizer is "
                    "another model's: set tokenizer to this one's"
                )
            longest = max(longest, sum(lengths))
        self.models.raise_token_budget(longest)
        self._longest = max(self._longest, longest)

    def rehearse(self) -> None:
        """Runs the largest update, of rows as long as the longest example, or as data.max_length in a stream."""
        if longest := self._longest or self.learner.data.max_length or 0:
            prompt = max(1, longest // 4)
            rehearse(self.models, prompt, max(1, longest - prompt))

    # ---- settings and inputs ----------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Returns the whole configuration as plain containers."""
        return dump_tree(self.sections())

    def sections(self) -> Any:
        """Returns the whole configuration, or its sections; models that were given as modules have none."""
        learner, models = self.learner, self.models
        if learner.settings is not None:
            return learner.settings
        roles = {role.section: worker.config for role, worker in models.workers.items()}
        return {
            **{name: config for name, config in roles.items() if config is not None},
            "algo": learner.algo_config,
            "data": learner.data,
            "trainer": models.config,
        }

    def extra_settings(self) -> dict[str, Any]:
        """Returns the settings that were given from Python and have no key in the configuration."""
        optimizer = self.models.optimizer
        return {"from Python": {"optimizer": dump_tree(optimizer) if isinstance(optimizer, OptimConfig) else optimizer}}

    def inputs(self) -> dict[str, Any]:
        """Models, tokenizer, evaluation rows and the user's functions."""
        rows = self._evaluated
        return record_inputs(
            self.models.workers,
            self.models.tokenizer,
            functions=self._functions(),
            evaluation=None if rows is None else [len(rows), *compute_checksums(rows)],
            stop_ids=self.models.eos_ids,
        )

    def _functions(self) -> Iterator[tuple[str, Any]]:
        """Yields the user's functions and classes that a run calls: (description, function)."""
        yield f"the learner {type(self.learner).__name__}", type(self.learner)
        for field in dataclasses.fields(self.learner.algo_config):
            value = getattr(self.learner.algo_config, field.name)
            for one in value if isinstance(value, tuple) else (value,):
                if callable(one) or (isinstance(one, str) and is_ref(one)):
                    yield f"algo.{field.name}", one

    def expected_metrics(self) -> tuple[str, ...]:
        """Returns the loss, and the metrics that the progress bar shows."""
        return ("loss", *self.models.trainer.displayed)

    def planned_passes(self, batch_size: int) -> dict[str, str]:
        """See SupervisedLearner."""
        return self.learner.planned_passes(batch_size)

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Warns if a run has ended with the loss of a model that guesses."""
        chance = self.learner.chance
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


def describe_counts(encode: Encoder) -> str:
    """Returns the outcomes of encoding, for the log; "" if each row became one example.

    >>> from types import SimpleNamespace
    >>> describe_counts(SimpleNamespace(counts={"encoded": 5, "dropped": 2, "truncated": 0}))
    '; 2 dropped'
    """
    counts = [f"{number} {outcome}" for outcome, number in encode.counts.items() if number and outcome != "encoded"]
    return f"; {', '.join(counts)}" if counts else ""
