"""What a run says of itself when it opens: the machine it runs on, and how many steps there are for it to take."""

from __future__ import annotations

import logging

from whet.config import TrainingConfig
from whet.observe.environment import collect_environment, read_environment
from whet.run.task import Roles, Stream
from whet.storage.run_folder import RunFolder

__all__ = ["log_run_length", "write_environment"]

log = logging.getLogger("whet")


def write_environment(folder: RunFolder, roles: Roles, passes: dict[str, str], *, resumed: bool) -> None:
    """Writes environment.json; a resumed run logs what changed, since that may change the last bits; in
    a folder of its own it has nothing to compare.

    Args: passes: what a step runs and what it leaves out, which is logged too.
    """
    now = {**collect_environment(), **roles.describe(), "passes": passes}
    if roles.checkpoints.root is not None:
        now["run"] = roles.checkpoints.run
    before = read_environment(folder.path)
    parts = ("versions", "cpu", "threads", "devices", "compute_dtype", "training", "rollout")
    changed = [k for k in parts if resumed and before and before.get(k) != now.get(k)]
    if changed:
        old, new = ({k: e.get(k) for k in changed} for e in (before, now))
        log.warning(
            "the environment changed since the checkpoint; results may differ in the last bits: was %s, now %s",
            old,
            new,
        )
    left_out = [name for name, what in passes.items() if what.startswith("skipped: ")]
    for name, what in passes.items():
        if name not in left_out:
            log.info("%s: %s", name, what)
    if left_out:
        log.info("this run does not compute: %s (environment.json has the reasons)", ", ".join(left_out))
    folder.write_json("environment.json", now)


def log_run_length(config: TrainingConfig, stream: Stream, step: int) -> None:
    """Says where the data end before max_steps, and where a resumed run has no step left to take.

    Args: config: of the run. stream: its data. step: steps that are done.
    """
    by_data, asked = steps_in_data(stream), config.max_steps
    short = by_data is not None and asked is not None and by_data < asked
    if short:
        log.warning(
            "the data end after %d steps, before trainer.max_steps=%d: %s; raise trainer.num_epochs, or leave it out: "
            "then there are as many epochs as the steps need",
            by_data,
            asked,
            f"{stream.batches_per_epoch} steps per epoch, trainer.num_epochs={stream.num_epochs}",
        )
    total = by_data if short or asked is None else asked
    if config.resume is None or total is None or step < total:
        return
    key = f"trainer.max_steps={asked}" if not short and asked is not None else f"trainer.num_epochs={stream.num_epochs}"
    log.warning("nothing is left to do: all %d steps of the run are done; raise %s to train on", total, key)


def steps_in_data(stream: Stream) -> int | None:
    """Steps that the data give; None where they have no length or no end."""
    each, epochs = stream.batches_per_epoch, stream.num_epochs
    return None if each is None or epochs is None else each * epochs


def log_data_end(config: TrainingConfig, step: int, begun: int) -> None:
    """Says that data without a known length have ended before max_steps, or before the first step of a resumed run.

    Args: step: steps that are done. begun: those that were done when the run opened.
    """
    if config.resume is not None and step == begun:
        log.warning("nothing was left to do: the data end after %d steps, which are done", step)
    elif config.max_steps is not None and step < config.max_steps:
        log.warning("the data ended after %d steps, before trainer.max_steps=%d", step, config.max_steps)
