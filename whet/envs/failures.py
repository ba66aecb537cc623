"""EpisodeFailures: what follows when an episode fails, by whose failure it was, and the record of how episodes end.

    status   finished        the environment ended the episode, or the agent returned
             out of turns    the model has had rollout.max_turns turns
             out of context  no room was left for a turn
             timed out       a time limit has passed
             error           something raised, or returned what it may not
    failure  model           for out of turns and out of context: the episode keeps its reward
             environment     the user's code failed; trainer.on_reward_error decides
             infrastructure  what the code depends on failed, or the engine; rollout.on_infrastructure_failure decides

A failure of the environment or the infrastructure is not a reward of 0: the episode has no reward, counts in no
baseline and in no denominator of the loss, and is not trained.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import math
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from whet.errors import InfrastructureError, RewardError
from whet.rewards.checked_values import OnError
from whet.rollout.driver import Episode, Turns
from whet.rollout.external_calls import CallTimeoutError, ExternalCall
from whet.types import Group

__all__ = ["EpisodeFailures", "OnInfrastructureFailure", "Owner", "Status", "classify", "num_failed"]

LOG = logging.getLogger("whet")

Status = Literal["finished", "out of turns", "out of context", "timed out", "error"]
"""How an episode has ended."""
Owner = Literal["model", "environment", "infrastructure"]
"""Whose failure it was."""
OnInfrastructureFailure = Literal["mask", "retry", "refill"]
"""What follows a failure of the infrastructure."""
MAX_WARNINGS = 3
"""Failed episodes of a run that have a warning each."""
RETRY_WAIT_S = 0.5
"""The time before an episode is run again; it doubles with each attempt."""
_INFRASTRUCTURE = (InfrastructureError, ConnectionError, TimeoutError, socket.gaierror)
_RESOURCES = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)
"""Errors of the operating system that say that it has run out of something."""


class _RetryError(Exception):
    """The episode is to be run again."""


def classify(error: BaseException) -> tuple[Status, Owner]:
    """Returns how an episode ended by an error, and whose failure that is.

    The infrastructure's are InfrastructureError, errors of connections and time limits of the user's own clients,
    exhausted resources of the machine, and errors that one of these has caused. A time limit of whet that has passed is
    the environment's.

    >>> classify(RewardError("interact raised KeyError")), classify(ConnectionResetError())
    (('error', 'environment'), ('error', 'infrastructure'))
    """
    chain = list(_chain(error))
    timed_out = any(isinstance(e, CallTimeoutError) for e in chain)
    infrastructure = any(
        (isinstance(e, _INFRASTRUCTURE) and not isinstance(e, CallTimeoutError))
        or (isinstance(e, OSError) and e.errno in _RESOURCES)
        for e in chain
    )
    return "timed out" if timed_out else "error", "infrastructure" if infrastructure else "environment"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, and the errors that caused it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ if error.__cause__ is not None or error.__suppress_context__ else error.__context__


class EpisodeFailures:
    """What follows when an episode fails: it is run again, it has no reward, or the run ends.

    Args:
        on_error: for failures of the environment. "raise": the run ends; "none": the episode has no reward, with a
            warning for each of the first MAX_WARNINGS failures, and later for the 10th, the 100th and so on.
        on_infrastructure: for those of the infrastructure. "retry": the episode is run again with the same random
            draws, at most max_retries times, and has no reward then; "mask" and "refill": it has no reward ("refill"
            is the learner's: it replaces the group).
        max_retries: of an episode.
        max_share: of a step's episodes that may fail by the infrastructure; the run ends above it.

    >>> EpisodeFailures().add(RewardError("the agent raised KeyError: 'x'"), _an_episode())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    whet.errors.RewardError: the agent raised KeyError: 'x'; in the episode of row 3, generation 0; trainer.on_reward...
    """

    def __init__(
        self,
        on_error: OnError = "raise",
        *,
        on_infrastructure: OnInfrastructureFailure = "retry",
        max_retries: int = 2,
        max_share: float = 0.25,
    ) -> None:
        self.on_error: OnError = on_error
        self.on_infrastructure: OnInfrastructureFailure = on_infrastructure
        self.max_retries, self.max_share = max_retries, max_share
        self.count = 0
        """Failed episodes so far."""
        self.last_error = ""
        """The message of the last infrastructure failure."""

    def add(self, error: RewardError, episode: Episode) -> dict[str, str]:
        """Decides about a failed episode, and counts it.

        Args: error: the failure. episode: run by `run_with_retries`.
        Returns: entries for Completion.info: status, failure, error.
        Raises: RewardError: the run ends. _RetryError: the episode is to be run again, which `run_with_retries` does.
        """
        status, owner = classify(error)
        row, generation = episode.prompt.row, episode.generation
        if owner == "infrastructure":
            self.last_error = str(error)
            if self.on_infrastructure == "retry" and episode.attempts <= self.max_retries:
                raise _RetryError(str(error))
        elif self.on_error == "raise":
            raise RewardError(
                f"{error}; in the episode of row {row}, generation {generation}; trainer.on_reward_error=none goes on "
                "without its reward"
            ) from error.__cause__
        self.count += 1
        if self.count <= MAX_WARNINGS:
            metric = "turns/replaced" if self.on_infrastructure == "refill" else "turns/failed"
            last = f"; the next ones are only counted, in {metric}" if self.count == MAX_WARNINGS else ""
            LOG.warning("%s; row %d, generation %d has no reward%s", error, row, generation, last)
        elif math.log10(self.count).is_integer():
            LOG.warning("%d episodes have failed so far; row %d, generation %d: %s", self.count, row, generation, error)
        return {"status": status, "failure": owner, "error": str(error)}

    def run_with_retries(self, episode: Episode, attempt: Callable[[], Turns]) -> Turns:
        """Runs an episode, and again after a failure of its infrastructure.

        An attempt has the random draws of the one before, so what the model says does not depend on failures. With
        other draws the episodes that cause failures would be exchanged for others.
        Args: attempt: gives the generator of one attempt.
        """
        while True:
            try:
                return (yield from attempt())
            except _RetryError as error:
                wait = RETRY_WAIT_S * 2 ** (episode.attempts - 1)
                LOG.info("row %d, generation %d is run again: %s", episode.prompt.row, episode.generation, error)
            episode.restart()
            sleep = functools.partial(asyncio.sleep, wait)
            yield ExternalCall(function=sleep, name="the wait before a retry", phase="retry", only_waits=True)

    def check_share(self, groups: Sequence[Group]) -> None:
        """Raises RewardError: more than max_share of a step's episodes failed by the infrastructure."""
        failed, episodes = num_failed(groups), sum(len(g.last) for g in groups)
        if failed > self.max_share * episodes:
            raise RewardError(
                f"{failed} of {episodes} episodes of the step failed by their infrastructure, more than "
                f"rollout.max_failed_share={self.max_share:g}; the last one: {self.last_error}; repair that and "
                "resume, or raise the share"
            )


def num_failed(groups: Sequence[Group]) -> int:
    """Returns the number of episodes that failed by their infrastructure."""
    return sum(g.completions[place].info.get("failure") == "infrastructure" for g in groups for place in g.last)


def _an_episode() -> Episode:
    """Returns an episode of row 3, for the example."""
    import numpy as np

    from whet.rollout.base import Sampling
    from whet.rollout.driver import single_turn
    from whet.types import Prompt

    return single_turn(Prompt(tokens=np.array([1]), source="", row=3), Sampling(max_tokens=1), rng_key=(0, 0, 0, 0))
