import logging

import pytest


@pytest.fixture(autouse=True)
def logging_as_before():
    """The command line sets handlers on the root logger, with a stderr that ends with the test."""
    root, own = logging.getLogger(), logging.getLogger("whet")
    before = root.handlers[:], root.level, own.level
    yield
    root.handlers[:], root.level = before[:2]
    own.setLevel(before[2])
