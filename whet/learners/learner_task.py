"""LearnerTask: the part of a run that reinforcement learning and supervised training have in common."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from whet.config import Mode, dump_tree
from whet.data.checksums import compute_checksums
from whet.data.encoder import Encoder
from whet.data.prompt_stream import PromptStream, batch_to_rows
from whet.data.sources import load_rows
from whet.errors import DataError
from whet.run.provenance import record_inputs
from whet.run.task import Task
from whet.train.role_workers import RoleWorkers
from whet.util.references import is_ref

__all__ = ["LearnerTask", "check_vocabulary"]

log = logging.getLogger("whet")


class LearnerTask(Task):
    """The data of a run, its configuration, and everything that it reads.

    Args:
        learner: the run's.
        roles: its models.
        config: the section trainer.
        eval_ds: rows or a reference to them; None = no evaluation.
    """

    def __init__(self, learner: Any, roles: RoleWorkers, config: Any, eval_ds: Any) -> None:
        self.learner, self.roles, self.config, self.eval_ds = learner, roles, config, eval_ds
        self.has_evaluation = eval_ds is not None
        self._evaluated: list[Any] | None = None

    # ---- what differs --------------------------------------------------------------------------------------------

    def encoder(self, mode: Mode) -> Encoder[Any]:
        """Returns the encoder of the rows of a mode."""
        raise NotImplementedError

    def check_fit(self, items: Sequence[Any], mode: Mode = Mode.TRAIN) -> None:
        """Raises DataError for encoded rows that the model can't read."""
        raise NotImplementedError

    def show_first(self, stream: PromptStream, rows: Any) -> None:
        """Logs the first row as the model receives it. Args: rows: before they were encoded."""
        raise NotImplementedError

    def own_sections(self) -> Mapping[str, Any]:
        """Returns the sections of the configuration besides the models', algo, data and trainer."""
        return {}

    def own_functions(self) -> Iterator[tuple[str, Any]]:
        """Yields the user's functions besides the learner and those that algo names: (description, function)."""
        return iter(())

    # ---- data ----------------------------------------------------------------------------------------------------

    def stream(self, train_ds: Any) -> PromptStream:
        """Returns the encoded training rows in their order.

        Args: train_ds: rows, batches or a reference to them.
        Raises: ConfigError: sizes that don't fit. DataError: rows that can't be trained on.
        """
        data, config, encode = self.learner.data, self.config, self.encoder(Mode.TRAIN)
        rows = load_rows(train_ds, split=data.split)
        stream = PromptStream(
            rows,
            batch_size=data.batch_size,
            seed=config.seed if config.data_shuffle_seed is None else config.data_shuffle_seed,
            shuffle=data.shuffle if data.shuffle is False else None,
            num_epochs=1 if config.num_epochs is None and not config.max_steps else config.num_epochs,
            last_batch=config.last_batch,
            shuffle_buffer=data.shuffle_buffer,
            encode=encode,
            prompt_column=data.prompt_column,
        )
        log.info("data: %s", "; ".join(filter(None, (stream.describe(), encode.describe_counts()))))
        self.show_first(stream, rows)
        if stream.kind == "rows":
            self.check_fit(stream.source)
        return stream

    def first_item(self, stream: PromptStream) -> Any:
        """Returns the first row, encoded; None = the encoder leaves it out."""
        if stream.kind == "rows":
            return stream.source[0]
        is_batch = stream.kind == "batches"
        item = stream.encode(batch_to_rows(stream.first, stream.prompt_column)[0] if is_batch else stream.first)
        stream.encode.reset_counts()  # the row is encoded again when it is read
        return item

    def prepare(self) -> None:
        """Encodes the evaluation data."""
        if not self.has_evaluation or self._evaluated is not None:
            return
        encode, column = self.encoder(Mode.EVAL), self.learner.data.prompt_column
        rows = load_rows(self.eval_ds, split=None)
        stream = PromptStream(rows, batch_size=1, shuffle=False, last_batch="keep", encode=encode, prompt_column=column)
        items = [item for batch in stream for item in batch]
        self.check_fit(items, Mode.EVAL)
        counts = f"{len(items)} {encode.unit}"
        log.info("evaluation data: %s", "; ".join(filter(None, (counts, encode.describe_counts()))))
        self._evaluated = items

    # ---- settings and inputs -------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Returns the whole configuration as plain containers."""
        return dump_tree(self.sections())

    def sections(self) -> Any:
        """Returns the whole configuration, or its sections; models that were given as modules have none."""
        learner = self.learner
        if learner.settings is not None:
            return learner.settings
        models = {role.section: worker.config for role, worker in self.roles.workers.items()}
        return {
            **{name: config for name, config in models.items() if config is not None},
            "algo": learner.algo_config,
            "data": learner.data,
            **self.own_sections(),
            "trainer": self.config,
        }

    def inputs(self) -> dict[str, Any]:
        """Models, tokenizer, evaluation rows and the user's functions."""
        rows, roles = self._evaluated, self.roles
        return record_inputs(
            roles.workers,
            roles.tokenizer,
            functions=self._functions(),
            evaluation=None if rows is None else [len(rows), *compute_checksums(rows)],
            stop_ids=roles.eos_ids,
        )

    def _functions(self) -> Iterator[tuple[str, Any]]:
        """Yields the user's functions and classes that a run calls: (description, function)."""
        learner = self.learner
        yield f"the learner {type(learner).__name__}", type(learner)
        yield from self.own_functions()
        for field in dataclasses.fields(learner.algo_config):
            value = getattr(learner.algo_config, field.name)
            for one in value if isinstance(value, tuple) else (value,):
                if callable(one) or (isinstance(one, str) and is_ref(one)):
                    yield f"algo.{field.name}", one

    def planned_passes(self, batch_size: int) -> dict[str, str]:
        """See RLLearner and SupervisedLearner."""
        return self.learner.planned_passes(batch_size)


def check_vocabulary(row: int, highest: int, vocabulary: int) -> None:
    """Raises DataError: a row has a token that the model does not know. Args: highest: the largest id of the row."""
    if highest >= vocabulary:
        raise DataError(
            f"row {row}: token {highest} is outside the model's vocabulary of {vocabulary}; the tokenizer is another "
            "model's: set tokenizer to this one's"
        )
