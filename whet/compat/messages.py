"""Vocabulary: translates whet's errors and log lines for a compatibility layer, with its arguments for whet's keys."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from whet.errors import WhetError
from whet.run.signals import Stopped

__all__ = ["Vocabulary"]


class Vocabulary:
    """The names and fixes of a compatibility layer.

    Args:
        names: whet's key, or key=value -> the layer's argument.
        fixes: an error's `key` -> the layer's fix, with the error's values in braces; "" = no fix.

    >>> words = Vocabulary({"optim.lr": "learning_rate"}, {"data.max_length": "set max_length={limit}"})
    >>> words.translate("optim.lr is 0; lower it", "lower it", "data.max_length", {"limit": 9})
    'learning_rate is 0; set max_length=9'
    """

    def __init__(self, names: Mapping[str, str], fixes: Mapping[str, str]) -> None:
        self._names, self._fixes = names, fixes
        known = "|".join(re.escape(name) for name in sorted(names, reverse=True))
        self._known = re.compile(rf"(?<![\w.])({known})(?!\w)")

    def translate(self, text: str, fix: str = "", key: str = "", values: Mapping[str, Any] | None = None) -> str:
        """Translates a message. Args: fix, key, values: WhetError's attributes."""
        if fix and key in self._fixes:
            front_fix = self._fixes[key].format(**(values or {}))
            text = text.replace(fix, front_fix) if front_fix else text.replace(f"; {fix}", "")
        return self._known.sub(lambda match: self._names[match[1]], text)

    @contextmanager
    def translating(self) -> Iterator[None]:
        """Translates whet's errors and log lines inside the block. Errors keep their class and traceback."""
        log = logging.getLogger("whet")
        log.addFilter(self._translate_record)
        try:
            yield
        except (WhetError, Stopped) as error:
            values = error.values if isinstance(error, WhetError) else None
            error.args = (self.translate(str(error), error.fix, error.key, values),)
            raise
        finally:
            log.removeFilter(self._translate_record)

    def _translate_record(self, record: logging.LogRecord) -> bool:
        fields = vars(record)
        record.msg = self.translate(record.getMessage(), fields.get("fix", ""), fields.get("key", ""))
        record.args = ()
        return True
