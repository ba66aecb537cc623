"""The engine contract over mock, hf and the embedded engine."""

import pytest

pytest.register_assert_rewrite("contract", "tiny")

from contract import *  # noqa: E402, F403
