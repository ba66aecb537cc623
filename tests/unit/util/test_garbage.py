"""The collector of reference cycles is paused, and works again afterwards."""

import gc
import weakref

import pytest

from whet.util.garbage import pause_collector


class Cycle:
    def __init__(self):
        self.own = self


def test_the_collector_is_on_again_after_an_error():
    with pytest.raises(ValueError), pause_collector(), pause_collector():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


def test_cycles_made_in_a_pause_are_still_collected():
    with pause_collector():
        cycle = weakref.ref(Cycle())
    gc.collect()
    assert cycle() is None


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with pause_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
