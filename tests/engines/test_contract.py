"""The engine contract over mock, hf and the embedded engine."""

from contract import *  # noqa: F403
