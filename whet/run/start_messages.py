"""What a run writes and logs when it opens: the machine it runs on, and how many steps it will take."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from whet.config import TrainingConfig
from whet.observe.environment import collect_environment, read_environment
from whet.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from whet.data.prompt_stream import PromptStream
    from whet.train.role_workers import RoleWorkers

__all__ = ["log_run_length", "write_environment"]

log = logging.getLogger("whet")


def write_environment(folder: RunFolder, roles: RoleWorkers, passes: dict[str, str], *, resumed: bool) -> None:
    """Writes environment.json. A resumed run logs what changed, since that may change the last bits of its numbers.

    Args: passes: the passes that a step runs and those that it skips; they are logged too.
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
    skipped = [name for name, description in passes.items() if description.startswith("skipped: ")]
    for name, description in passes.items():
        if name not in skipped:
            log.info("%s: %s", name, description)
    if skipped:
        log.info("skipped, since not needed: %s (see environment.json)", ", ".join(skipped))
    folder.write_json("environment.json", now)


def log_run_length(config: TrainingConfig, stream: PromptStream, step: int) -> None:
    """Warns if the data end before max_steps, or if a resumed run has no step left.

    Args: config: of the run. stream: its data. step: the number of finished steps.
    """
    in_data, max_steps = steps_in_data(stream), config.max_steps
    short = in_data is not None and max_steps is not None and in_data < max_steps
    if short:
        log.warning(
            "the data end after %d steps, before trainer.max_steps=%d: %s; raise trainer.num_epochs, or leave it out "
            "to train for as many epochs as the steps need",
            in_data,
            max_steps,
            f"{stream.batches_per_epoch} steps per epoch, trainer.num_epochs={stream.num_epochs}",
        )
    total = in_data if short or max_steps is None else max_steps
    if config.resume is None or total is None or step < total:
        return
    limited = not short and max_steps is not None
    key = f"trainer.max_steps={max_steps}" if limited else f"trainer.num_epochs={stream.num_epochs}"
    log.warning("nothing is left to do: step %d is done, and %s allows no more; raise it to train on", step, key)


def steps_in_data(stream: PromptStream) -> int | None:
    """Returns the number of steps that the data give; None if they have no known length or no end."""
    each, epochs = stream.batches_per_epoch, stream.num_epochs
    return None if each is None or epochs is None else each * epochs


def log_data_end(config: TrainingConfig, step: int, begun: int) -> None:
    """Warns if data without a known length have ended before max_steps, or before a resumed run's first step.

    Args: step: the number of finished steps. begun: the same when the run opened.
    """
    if config.resume is not None and step == begun:
        log.warning("nothing was left to do: the data end after %d steps, which are done", step)
    elif config.max_steps is not None and step < config.max_steps:
        log.warning("the data ended after %d steps, before trainer.max_steps=%d", step, config.max_steps)
