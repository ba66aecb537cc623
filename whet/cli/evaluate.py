"""`whet eval`: a model measured on a data set, shown as a table and written to a folder."""

from __future__ import annotations

import dataclasses
import logging
from contextlib import suppress

from whet.config.evaluate import EvalRunConfig, check_eval
from whet.errors import ConfigError
from whet.evaluation.eval_folder import make_dated_folder
from whet.evaluation.evaluator import Evaluation, Evaluator
from whet.evaluation.table import print_table
from whet.parallel.processes import join_processes
from whet.run.signals import SignalHandler

__all__ = ["evaluate"]

log = logging.getLogger("whet")


def evaluate(config: EvalRunConfig) -> Evaluation:
    """Evaluates a model, prints the table, and writes results.json and the completions to a folder.

    Args: config: the whole configuration. Without `out` the folder is evals/<date>-<time>.
    Raises: ConfigError: no model, data or reward; the folder holds something else.
    """
    from transformers.utils import logging as transformers_logging

    check_eval(config)
    ranks = join_processes()
    transformers_logging.disable_progress_bar()
    new = ranks.call_on_writer(lambda: make_dated_folder("evals")) if config.out is None else None
    if new is not None:
        config = dataclasses.replace(config, out=str(new))
    log.info("results: %s (after an interruption, out=%s resume=true continues)", config.out, config.out)
    signals = SignalHandler()
    signals.effect = "stopping after this batch"
    try:
        signals.install()
        evaluation = Evaluator(config).run("Evaluating", should_stop=lambda: signals.stop_requested)
    except BaseException:
        if new is not None and ranks.is_writer:
            with suppress(OSError):
                new.rmdir()  # where nothing was written, only the name taken
        raise
    finally:
        signals.uninstall()
    if not ranks.is_writer:
        return evaluation
    try:
        print_table(evaluation.results, evaluation.by_source)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(
            f"standard output can't be written: {error}; the results are in {evaluation.folder}"
        ) from error
    for line in evaluation.examples:
        log.info("%s", line)
    about = evaluation.about
    log.info(
        "%d prompts in %s in %.0f s; results: %s", about["prompts"], about["dtype"], about["seconds"], evaluation.folder
    )
    return evaluation
