"""Sending a run's model to the hub while it trains, and when it is done: trainer.hub_model_id and trainer.hub_strategy.

What can't be sent ends no run: it is logged, with the command that sends it later.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from whet.config import TrainingConfig
from whet.errors import ConfigError, format_exception
from whet.hub.push import FINAL, check_hub_token, push_to_hub
from whet.run.observer import Observed, Observer

__all__ = ["PushToHub", "check_push", "pushers"]

log = logging.getLogger("whet")


def check_push(config: TrainingConfig) -> None:
    """Asks the hub whether it takes what the run is to send. Raises ConfigError where it doesn't."""
    if config.hub_model_id is None:
        return
    if config.run_dir is None:
        raise ConfigError("trainer.hub_model_id sends what lies in the run folder; set trainer.run_dir")
    check_hub_token()


def pushers(config: TrainingConfig) -> list[Observer]:
    """The observer that sends a run's model, where its configuration asks for that."""
    return [] if config.hub_model_id is None else [PushToHub(config)]


class PushToHub(Observer):
    """Sends the final model, and with hub_strategy=every_save each checkpoint's, in a thread beside the training.

    A checkpoint that is written while the one before is still being sent is not sent.

    Args: config: with hub_model_id, hub_strategy and hub_private_repo.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self._sending: threading.Thread | None = None

    def on_run_begin(self, run: Observed) -> None:
        """Asks the hub before anything is trained."""
        check_push(self.config)

    def on_save(self, run: Observed, folder: Path) -> None:
        """Begins to send a checkpoint."""
        if self.config.hub_strategy != "every_save" or run.folder is None:
            return
        if self._sending is not None and self._sending.is_alive():
            log.info("%s is not sent: the checkpoint before is still on its way", folder.name)
            return
        self._sending = threading.Thread(target=self._send, args=(run.folder.path, folder.name), daemon=True)
        self._sending.start()

    def on_run_end(self, run: Observed, error: BaseException | None) -> None:
        """Waits for what is on its way, and sends the final model of a run that has finished."""
        if self._sending is not None:
            self._sending.join()
        if error is None and run.folder is not None:
            self._send(run.folder.path, FINAL)

    def _send(self, run: Path, which: str) -> None:
        config = self.config
        try:
            pushed = push_to_hub(run, config.hub_model_id, which=which, private=config.hub_private_repo)
        except Exception as error:  # of whet, the hub's client, the network
            retry = f"whet push {run} repo={config.hub_model_id}" + (f" which={which}" if which != FINAL else "")
            log.warning("%s was not sent: %s; later: %s", which, format_exception(error), retry)
        else:
            log.info("%s is sent: %s", which, pushed.url)
