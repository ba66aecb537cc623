"""Log lines in a notebook or a script, where nobody has set up logging."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("setup", "printed"),
    [
        ("pass", "warning: the loss is NaN\n"),
        ("logging.basicConfig()", "WARNING:whet:the loss is NaN\n"),
        ("logging.getLogger('whet').addHandler(logging.StreamHandler())", "the loss is NaN\n"),
        ("from whet.observe import setup_logging; setup_logging()", "warning: the loss is NaN\n"),
    ],
)
def test_a_warning_begins_with_its_level_and_is_printed_once(setup, printed):
    code = f"import logging, whet; {setup}; logging.getLogger('whet').warning('the loss is %s', 'NaN')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == printed


def test_a_warning_goes_through_the_stream_that_a_progress_bar_has_put_in_place():
    code = """
import io, logging, sys, whet
sys.stderr = bar = io.StringIO()
bar.rich_proxied_file = sys.__stderr__
logging.getLogger("whet").warning("low")
print(bar.getvalue(), end="")
sys.stderr = None
logging.getLogger("whet").warning("low")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("warning: low\n", "")
