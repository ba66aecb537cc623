import logging
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from whet.errors import ConfigError
from whet.observe import Progress, progress, setup_logging, sparkline
from whet.observe.live_view import NotebookView, make_progress
from whet.observe.trace import Trace


def test_a_sparkline_spans_its_own_range_and_skips_nan():
    assert sparkline([0.0, float("nan"), 1.0]) == "▁█"
    assert sparkline([3.0, 3.0]) == "▁▁" and sparkline([]) == "" == sparkline([float("nan")])


def test_a_long_sparkline_is_averaged_into_its_width():
    line = sparkline([float(i) for i in range(1000)], width=10)
    assert line[0] == "▁" and line[-1] == "█" and len(line) == 10 and list(line) == sorted(line)


def test_in_a_pipe_few_lines_and_always_the_last(capsys):
    with Progress(30) as bar:
        for step in range(1, 31):
            bar.update(step, value=step / 30, tokens_per_s=5200.0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0] == "Training 30/30  reward 1  5.2k tok/s  0:00:00 left"


def test_in_a_pipe_a_slow_first_step_is_shown_at_once(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with Progress(None) as bar:
        for step, now, shown in ((1, 4.0, "Training 1  reward 0  1 tok/s\n"), (2, 8.0, ""), (3, 12.0, "")):
            clock[0] = now
            bar.update(step, value=0.0, tokens_per_s=1.0)
            assert capsys.readouterr().err == shown


def test_without_a_pause_every_step_is_said_once(capsys):
    with Progress(None, description="x", every_s=0.0) as bar:
        for step in (1, 2):
            bar.update(step, value=0.5, tokens_per_s=1.0, fields={"kl": "0.25"})
    expected = [f"x {s}  reward 0.5  kl 0.25  1 tok/s" for s in (1, 2)]
    assert capsys.readouterr().err.splitlines() == expected


def test_a_line_has_80_columns_at_most_and_what_does_not_fit_comes_on_the_next(capsys):
    with Progress(20000) as bar:
        shown = {"len": "1024", "truncated": "100%", "kl": "0.0123", "my/own_metric": "1.23e-05"}
        bar.update(12345, value=-0.123456, tokens_per_s=123456.0, fields=shown)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "Training 12345/20000  reward -0.123  len 1024  truncated 100%  kl 0.0123"
    assert second.startswith("  my/own_metric 1.23e-05  123k tok/s  0:00:0")


@pytest.mark.parametrize("quiet", ["rank", "description"])
def test_other_ranks_and_no_description_show_nothing(quiet, capsys, monkeypatch):
    if quiet == "rank":
        monkeypatch.setenv("RANK", "1")
    with Progress(2, description=None if quiet == "description" else "x", every_s=0.0) as bar:
        bar.update(2, value=0.5, tokens_per_s=1.0)
    assert capsys.readouterr().err == ""


def test_a_step_that_takes_long_says_what_it_does(capsys):
    trace, err = Trace(), ""

    def wait_for(pattern):
        nonlocal err
        end = time.monotonic() + 30
        while not re.search(pattern, err, re.MULTILINE) and time.monotonic() < end:
            time.sleep(0.01)
            err += capsys.readouterr().err
        assert re.search(pattern, err, re.MULTILINE), err

    with Progress(5, every_s=0.02, bar=False, phase=lambda: trace.status) as bar:
        with trace.span("rollout"):
            trace.count(12, 32, "completions")
            wait_for(r"^Training 0/5  next step: rollout \d s, 12 of 32 completions$")
            bar.every_s = 2.0
            bar.update(1, value=0.5, tokens_per_s=1.0)  # whoever waited for the step sees it at once
            err += capsys.readouterr().err
            assert re.search(r"^Training 1/5  reward 0.5  1 tok/s  .* left$", err, re.MULTILINE)
            bar.every_s = 0.02
        with trace.span("update"):  # what was counted in another phase is not said of this one
            wait_for(r"^Training 1/5  next step: update \d s$")


def in_terminal(code, *words, columns):
    """The lines that a program has written to a terminal, without control codes."""
    import pty

    main, side = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    child = subprocess.Popen([sys.executable, "-c", code, *words], stdin=side, stdout=side, stderr=side, env=env)
    os.close(side)
    out = b""
    while True:
        try:
            out += (piece := os.read(main, 65536))
        except OSError:
            break
        if not piece:
            break
    assert child.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.decode())
    return [line.rstrip() for line in re.split(r"[\r\n]+", text)]


CODE = """
import logging
from whet.observe import Progress, setup_logging
setup_logging()
with Progress(20, start=5) as bar:
    for step in range(6, 21):
        shown = {"len": "512", "truncated": "12%", "kl": "0.0021"}
        bar.update(step, value=step / 20, tokens_per_s=5200.0, fields=shown)
        if step == 10:
            logging.getLogger("whet.x").info("saved [10] [/INST]")
            logging.getLogger("whet.x").warning("what is long is broken at its words, and goes on further in " * 2)
            print("a plain print [red]x")
"""


@pytest.mark.parametrize("columns", [140, 80])
def test_in_a_terminal_a_bar_with_log_lines_and_prints_kept_whole(columns):
    lines = [line.strip() for line in in_terminal(CODE, columns=columns)]
    text = "\n".join(lines)
    assert "saved [10] [/INST]" in lines and "a plain print [red]x" in text
    assert any("20/20" in line and "len 512  truncated 12%  kl 0.0021  5.2k tok/s" in line for line in lines)
    assert max(map(len, lines)) <= columns and ("▁" in text) == (columns == 140)
    warned = [line for line in lines if "what is long" in line or "goes on further" in line]
    assert warned[0].startswith("warning: what is long is broken at its words") and len(warned) >= 2 - (columns == 140)


@pytest.mark.parametrize(("rank", "shown"), [("0", ["info", "warning", "error"]), ("1", ["error"])])
def test_ranks_other_than_0_log_errors_only(rank, shown, monkeypatch, capsys):
    root, own = logging.getLogger(), logging.getLogger("whet")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(root, "handlers", [])  # basicConfig(force=True) closes those it finds, pytest's too
    levels = root.level, own.level
    try:
        setup_logging()
        logging.getLogger("whet.x").info("info")
        logging.getLogger("other").info("not shown anywhere")
        logging.getLogger("other").warning("warning")
        logging.getLogger("other").error("error")
    finally:
        root.setLevel(levels[0])
        own.setLevel(levels[1])
    said = [line.rpartition(" ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said == shown


VIEW = """
import logging, sys, time
from whet.observe import setup_logging
from whet.observe.live_view import make_progress
setup_logging()
with make_progress(sys.argv[1], 20, phase=lambda: "rollout", description="Training") as view:
    for step in range(1, 21):
        row = {"kl": step / 1000, "entropy/token_mean": 2 / step, "completions/clipped_ratio": 0.25}
        row |= {"perf/tokens_per_second": 5200.0, "perf/peak_memory": 2e9}
        view.update(step, value=step / 20, tokens_per_s=5200.0, row=row)
        if step == 10:
            logging.getLogger("whet.x").info("saved [10] [/INST]")
            print("a plain print [red]x")
"""


@pytest.mark.parametrize("columns", [120, 80, 50])
def test_a_live_view_shows_step_phase_metrics_and_curves(columns):
    lines = in_terminal(VIEW, "auto", columns=columns)
    assert "saved [10] [/INST]" in lines and "a plain print [red]x" in lines
    assert max(map(len, lines)) <= columns
    head, *cells = lines[-8 if columns == 50 else -5 :][:-1]
    assert head.startswith("Training 20/20") and "rollout 0 s" in head and "left" in head
    names = ["reward", "KL", "entropy", "truncated", "tokens/s", "memory"]
    assert re.findall(r"reward|KL|entropy|truncated|tokens/s|memory", " ".join(cells)) == names
    assert "2.0 GB" in cells[-1]
    assert "25%" in cells[-3 if columns == 50 else -2] and re.search(r"reward +1 ▁.*█", cells[0])


def test_in_a_notebook_a_table_updates_below_the_cell(monkeypatch):
    drawn, handle = [], SimpleNamespace(update=lambda html: drawn.append(html))
    display = SimpleNamespace(HTML=str, display=lambda html, display_id: drawn.append(html) or handle)
    shell = SimpleNamespace(kernel=object())
    with pytest.raises(ConfigError, match="needs a Jupyter kernel"):
        make_progress("notebook", 2, phase=str)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr("whet.observe.live_view._REDRAW_S", 0.0)
    with make_progress("auto", 2, phase=str) as shown:
        for step in (1, 2):
            shown.update(step, value=step / 4, tokens_per_s=1.0, row={"kl": 0.01, "perf/tokens_per_second": 1500.0})
    assert isinstance(shown, NotebookView) and len(drawn) == 4 and "Training 0/2" in drawn[0]
    assert "<th>reward</th><td>0.25</td>" in drawn[1] and "<th>tokens/s</th><td>1.5k</td>" in drawn[1]
    assert "Training 2/2" in drawn[3] and "left" in drawn[2] and "left" not in drawn[3]
    assert type(make_progress("lines", 2, phase=str)) is Progress


@pytest.mark.parametrize(("view", "terminal"), [("lines", True), ("rich", False), ("auto", False)])
def test_a_view_may_be_lines_in_a_terminal_and_rich_in_a_pipe(view, terminal):
    if terminal:
        lines = in_terminal(VIEW, view, columns=80)
    else:
        run = subprocess.run([sys.executable, "-c", VIEW, view], capture_output=True, text=True, check=True)
        lines = run.stderr.splitlines()
    assert any("saved [10] [/INST]" in line for line in lines)
    assert any(line.startswith("reward ") for line in lines) == (view == "rich")
    assert any(line.startswith("Training 20/20  reward 1  5.2k tok/s") for line in lines) == (view != "rich")


class Dead:
    """A terminal that was closed."""

    encoding = "utf-8"

    def write(self, text):
        raise BrokenPipeError

    flush = lambda self: self.write("")
    isatty = lambda self: True
    fileno = lambda self: 2


@pytest.fixture
def root(monkeypatch):
    """The root logger's handlers and whet's level, put back after the test; a console of the test's own."""
    own = logging.getLogger("whet")
    before = logging.getLogger().level, own.level
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    progress.terminal_console.cache_clear()
    yield
    progress.terminal_console.cache_clear()
    logging.getLogger().setLevel(before[0])
    own.setLevel(before[1])


@pytest.mark.parametrize("terminal", [True, False])
def test_a_dead_stderr_ends_neither_the_bar_nor_the_lines_nor_the_log(terminal, root, monkeypatch):
    monkeypatch.setattr(Dead, "isatty", lambda self: terminal)
    monkeypatch.setattr(sys, "stderr", Dead())
    setup_logging()
    with Progress(2, every_s=0.0) as bar:
        assert (bar._bar is not None) == terminal
        bar.update(1, value=0.5, tokens_per_s=1.0)
        logging.getLogger("whet").warning("x")
        if terminal:
            bar._bar.refresh()
            print("x", file=sys.stderr)  # through the bar


def test_a_forked_child_prints_as_if_there_were_no_bar(root, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Dead())
    setup_logging()
    handler = logging.getLogger().handlers[0]
    live = lambda: (
        getattr(handler.console, "_live_stack", None) or getattr(handler.console, "_live", None)
    )  # of rich 14
    with Progress(2):
        assert hasattr(sys.stdout, "rich_proxied_file") and live()
        if (child := os.fork()) == 0:
            os._exit(int(hasattr(sys.stdout, "rich_proxied_file") or bool(live())))
        assert os.waitpid(child, 0)[1] == 0
    if (child := os.fork()) == 0:  # nothing left to undo
        os._exit(int(progress.terminal_console() is not handler.console))
    assert os.waitpid(child, 0)[1] == 0
