"""The errors of whet: one class per boundary, each also the nearest class of the standard library.

WhetError
├── ConfigError      (ValueError)    what the user asked for: a field, a name, a keyword, a model that can't do it
├── DataError        (ValueError)    what the user brought: rows, columns, prompts, tensors of the wrong shape
├── RewardError      (RuntimeError)  what a reward function returned, raised or never returned
│   ├── RewardValueError (ValueError)    it returned something else than one number or None a completion
│   └── InfrastructureError              what a reward, an environment or an agent depends on failed
├── EngineError      (RuntimeError)  generation: a request that can't fit, an engine that failed
├── OtherRankError                   another process of the run failed, whose own message says why
├── TrainingError    (RuntimeError)  a run whose numbers went wrong: gradients that are not finite
└── CheckpointError  (RuntimeError)  saving, loading, resuming

A message says the value, the rule and the fix. Some errors hold the fix apart, under the key of the configuration that
it names: a compatibility layer (whet.trl) finds its own words by that key.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EngineError",
    "InfrastructureError",
    "OtherRankError",
    "RewardError",
    "RewardValueError",
    "RolloutStopped",
    "TrainingError",
    "WhetError",
    "format_exception",
    "format_value",
    "lookup_error",
    "lost_process",
    "nearest",
    "raise_all",
]


class WhetError(Exception):
    """Base of every error that whet raises on purpose.

    Args:
        message: the value and the rule.
        fix: what to do; `str()` is "message; fix".
        key: the key of the configuration that the fix names, where a compatibility layer has a fix of its own for it.
        values: what such a fix may quote, by name.

    >>> str(WhetError("the row has 9 tokens", fix="raise data.max_length", key="data.max_length"))
    'the row has 9 tokens; raise data.max_length'
    """

    def __init__(self, *message: object, fix: str = "", key: str = "", **values: object) -> None:
        self.fix, self.key, self.values = fix, key, values
        super().__init__(*([f"{message[0]}; {fix}"] if fix else message))


class ConfigError(WhetError, ValueError):
    """A configuration that can't be carried out."""


class DataError(WhetError, ValueError):
    """Input data that breaks a rule: a missing column, an empty data set, a prompt over the limit."""


class RewardError(WhetError, RuntimeError):
    """A reward function failed: wrong length, NaN, an exception, a timeout."""


class RewardValueError(RewardError, ValueError):
    """A reward function returned something else than a number or None for each completion."""


class InfrastructureError(RewardError):
    """What a reward, an environment or an agent depends on failed: a sandbox, a search server, a machine.

    Raise it in a tool, an environment or an agent: the episode then has no reward, whoever asked for what has failed.
    """


class EngineError(WhetError, RuntimeError):
    """Generation failed or a request could never be served."""


class OtherRankError(WhetError):
    """Another process of the run failed; its own message says why."""


class TrainingError(WhetError, RuntimeError):
    """A run went wrong in its numbers, not in what was asked for: it diverged."""


class CheckpointError(WhetError, RuntimeError):
    """A checkpoint can't be written, read, or does not fit this run."""


class RolloutStopped(KeyboardInterrupt):
    """A run that was asked to stop has given up its rollout: what the episodes waited for did not end."""


def lost_process(error: BaseException) -> str | None:
    """Returns what gloo's error says of another process, in one sentence; None = the error is another one.

    >>> lost_process(RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"))
    'another process ended; its own message says why'
    """
    text = str(error) if isinstance(error, RuntimeError) else ""
    if "gloo" not in text:
        return None
    if "by peer" in text or "Broken pipe" in text:
        return "another process ended; its own message says why"
    if "Timed out waiting" in text:
        return "another process did not answer within trainer.collective_timeout_s; it hangs, or needs longer than that"
    return None


def nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns the end of a message that names the nearest known words.

    Args: word: what was given. known: what is accepted. prefix: put before each.
    Returns: "; did you mean a or b?", or "" when nothing is near.

    >>> nearest("epsilom", ["epsilon", "beta"])
    '; did you mean epsilon?'
    """
    near = difflib.get_close_matches(word, list(known), 3, 0.6)
    return f"; did you mean {' or '.join(prefix + one for one in near)}?" if near else ""


def lookup_error(kind: str, word: object, known: Iterable[str]) -> ConfigError:
    """Returns the error for an unknown name: what was given, the nearest match, and every known name.

    Args: kind: what the name stands for, e.g. "advantage estimator". word: what was given. known: accepted names.
    Returns: the ConfigError, to be raised by the caller.

    >>> print(lookup_error("loss", "ppoo", ["grpo", "ppo"]))
    unknown loss 'ppoo'; did you mean ppo? Known: grpo, ppo
    """
    known = sorted(known)
    return ConfigError(f"unknown {kind} {word!r}{nearest(str(word), known) or '.'} Known: {', '.join(known)}")


def raise_all(checks: Iterable[Callable[[], object]]) -> None:
    """Makes every check, and raises what they found: one error as it is, several as one ConfigError, a line each.

    Args: checks: each raises a WhetError where something is wrong.

    >>> raise_all([lambda: int("1"), lambda: nearest("a", []), lambda: float("1")])
    """
    distinct: dict[str, WhetError] = {}
    for check in checks:
        try:
            check()
        except WhetError as error:
            for line in str(error).split("\n"):
                distinct.setdefault(line, error)
    errors = list(dict.fromkeys(distinct.values()))
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigError("\n".join(distinct)) from errors[0]


def format_value(value: object, limit: int = 200) -> str:
    """Returns a value for a message: its repr, shortened where it is long; its type where it has no repr.

    Args: value: anything. limit: characters that are kept.

    >>> format_value("a" * 9, limit=5), format_value(10**5000)
    ("'aaaa...", '<int>')
    """
    try:
        text = repr(value)
    except Exception:  # of a number with thousands of digits, of what is nested deeply, of a class of the user's own
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[:limit]}..."


def format_exception(error: BaseException, limit: int = 500) -> str:
    r"""Returns an exception for a message, in one line: its class and what it says; of a group, its first member too.

    Args: error: any. limit: characters of its text that are kept.

    >>> format_exception(ValueError("a\n  b")), format_exception(KeyError())
    ('ValueError: a b', 'KeyError')
    >>> format_exception(ExceptionGroup("two failed", [KeyError("a"), ValueError("b")]))
    "ExceptionGroup: two failed (2 sub-exceptions), the first KeyError: 'a'"
    """
    try:
        text = " ".join(str(error).split())
    except BaseException as other:  # its own __str__ fails; an interrupt here too, since the error is on its way
        text = f"<no text: {type(other).__name__}>"
    if len(text) > limit:
        text = f"{text[:limit]}..."
    if isinstance(error, BaseExceptionGroup):
        text += f", the first {format_exception(error.exceptions[0], limit)}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
