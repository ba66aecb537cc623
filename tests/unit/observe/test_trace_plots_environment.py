import json
import logging
import threading
import time

import numpy as np
import pytest
from helpers import cluster, length_reward, rows

from whet.config import DataConfig, GRPOConfig, PerfMetricsOptions
from whet.errors import ConfigError
from whet.learners.grpo import GRPOLearner
from whet.observe import Trace, collect_environment, plot_curves, plots
from whet.observe.plots import metric_series
from whet.observe.trace import trace_folder
from whet.rollout.base import Sampling
from whet.rollout.driver import Episode, RolloutDriver, completion
from whet.rollout.external_calls import ExternalCall
from whet.rollout.mock import MockEngine
from whet.types import Prompt


def spans_of(path):
    return [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]


def test_spans_sum_by_name_until_asked():
    trace = Trace()
    for _ in range(2):
        with trace.span("rollout"):
            time.sleep(0.01)
    times = trace.pop_times()
    assert list(times) == ["time/rollout"] and 0.02 <= times["time/rollout"] < 1.0
    assert trace.pop_times() == {}


def test_a_span_in_a_span_counts_for_both_but_in_its_own_name_once():
    trace = Trace()
    with trace.span("outer"), trace.span("inner"), trace.span("inner"):
        time.sleep(0.01)
    times = trace.pop_times()
    assert times["time/inner"] <= times["time/outer"] < 2 * times["time/inner"]


def test_a_span_that_raises_is_counted_and_closed():
    trace = Trace()
    with pytest.raises(KeyError), trace.span("a"):
        raise KeyError
    with trace.span("a"):
        pass
    assert set(trace.pop_times()) == {"time/a"}


def test_the_timeline_is_chrome_trace_json_with_nesting_and_tags(tmp_path):
    trace = Trace()
    with trace.span("step", step=3), trace.span("rollout"):
        pass
    trace.write(tmp_path / "trace.json")
    step, rollout = spans_of(tmp_path / "trace.json")
    assert (step["name"], rollout["name"], step["ph"], step["args"]) == ("step", "rollout", "X", {"step": "3"})
    assert step["ts"] <= rollout["ts"] and rollout["ts"] + rollout["dur"] <= step["ts"] + step["dur"]


def test_the_timeline_keeps_the_latest_spans(tmp_path):
    trace = Trace(keep=2)
    for name in "abc":
        with trace.span(name):
            pass
    trace.write(tmp_path / "t.json")
    assert [e["name"] for e in spans_of(tmp_path / "t.json")] == ["b", "c"]


def test_without_a_timeline_spans_are_summed_and_not_kept():
    trace = Trace()
    trace.keep(0)
    with trace.span("a"):
        trace.add("tool", 0.1)
    assert set(trace.pop_times()) == {"time/a"} and not [e for e in trace.events() if e["ph"] != "M"]


def test_spans_of_other_threads_and_calls_are_on_the_timeline_and_not_in_the_sums(tmp_path):
    trace = Trace()
    with trace.span("rollout"):
        thread = threading.Thread(target=lambda: run_span(trace, "beside"), name="helper")
        thread.start()
        thread.join()
        trace.add("tools", 0.5, episode=3)
        assert trace.phase == "rollout"
    covered = trace.covered_s
    times = trace.pop_times()
    assert list(times) == ["time/rollout"] and covered == pytest.approx(times["time/rollout"]) and not trace.covered_s
    trace.write(tmp_path / "t.json", others=[{"name": "update", "ph": "X", "ts": 0, "dur": 1, "pid": 1, "tid": 0}])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(0, 0): "main", (0, 1): "helper"} and events[-1]["pid"] == 1
    at = {e["name"]: e["tid"] for e in events if e["ph"] == "X"}
    assert (at["rollout"], at["beside"]) == (0, 1)
    begin, end = (next(e for e in events if e["ph"] == kind) for kind in "be")
    assert begin["id"] == end["id"] and end["ts"] - begin["ts"] == pytest.approx(5e5)
    assert begin["args"] == {"episode": "3"}


def test_calls_of_tools_and_the_wait_for_them_are_traced():
    def run(episode):
        output = yield episode.request(episode.prompt.tokens, Sampling(max_tokens=2))
        yield ExternalCall(function=lambda: time.sleep(0.02), name="a tool")
        return completion(output, generation=episode.generation)

    trace, prompt = Trace(), Prompt(tokens=np.array([5, 6], np.int32), source="", row=0)
    with trace.span("rollout"):
        (group,) = RolloutDriver(MockEngine(), trace=trace).run([Episode(prompt, (0, 1, 0, 0), run)])
    assert trace.pop_times()["time/rollout/tool_wait"] >= 0.02 <= group.completions[0].seconds["tools"]
    assert {e["name"] for e in trace.events() if e["ph"] == "b"} == {"tools"}


def run_span(trace, name):
    with trace.span(name):
        pass


def test_a_step_reports_what_its_time_went_to(tmp_path):
    """FLOPs of the update: 6 N for each token that is run, N the entries of the matrices; a prompt is run once."""
    batches, options = [], PerfMetricsOptions()
    c = cluster(run_dir=str(tmp_path), max_steps=2, perf_metrics_options=options)
    learner = GRPOLearner(c, GRPOConfig(num_generations=2, beta=0.0), length_reward, data=DataConfig(batch_size=2))
    run_flops, pop = [], c.actor.pop_flops
    c.actor.pop_flops = lambda: run_flops.append(pop()) or run_flops[-1]
    update = learner.update
    learner.update = lambda step, mini: batches.append(mini) or update(step, mini)
    rows_ = learner.train(rows(4)).train_rows
    for row in rows_:
        assert (
            0 <= row["time/data"] < row["time/step"] and 0 < row["time/rollout/first_completion"] <= row["time/rollout"]
        )
        assert 0 <= row["perf/idle_share"] < 1 and "perf/mfu" not in row
    cost, flops = c.actor.cost, run_flops[0]
    lengths = [len(t) for t in batches[0].tokens.split(batches[0].lengths.tolist())]
    targets = sum(lengths)
    prompts = int(batches[0].prefix_lengths.sum())
    # the last token of a completion is a target and not run
    assert flops == 6.0 * (cost.token * (prompts + targets - len(lengths)) + cost.target * targets)
    assert rows_[0]["perf/update_tflops"] == pytest.approx(flops / rows_[0]["time/update"] / 1e12)
    names = {e["name"] for e in spans_of(tmp_path / "trace.json")}
    assert {"data", "rollout", "rewards", "update", "weight_sync", "checkpoint"} <= names


def test_the_environment_is_plain_json_with_versions_and_threads():
    import torch

    found = json.loads(json.dumps(collect_environment()))
    assert found["versions"]["torch"] == torch.__version__ and found["threads"] == torch.get_num_threads()
    assert found["cpu"]["cores"] >= 1


def test_a_trace_dir_that_cannot_be_written_is_an_error_before_the_run_and_names_its_key(tmp_path):
    (tmp_path / "file").write_text("")
    options = PerfMetricsOptions(trace_dir=str(tmp_path / "file"))
    c = cluster(run_dir=str(tmp_path / "run"), perf_metrics_options=options)
    learner = GRPOLearner(c, GRPOConfig(num_generations=2, beta=0.0), length_reward, data=DataConfig(batch_size=2))
    with pytest.raises(ConfigError, match=r"trainer\.perf_metrics_options\.trace_dir=.*file can't be written"):
        learner.train(rows(4))
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_a_timeline_that_cannot_be_written_at_the_end_is_a_warning(tmp_path, caplog):
    place = tmp_path / "traces"

    def spoils(completions, **_):
        if place.is_dir():
            place.rmdir()
            place.write_text("")
        return length_reward(completions)

    c = cluster(run_dir=str(tmp_path / "run"), perf_metrics_options=PerfMetricsOptions(trace_dir=str(place)))
    learner = GRPOLearner(c, GRPOConfig(num_generations=2, beta=0.0), spoils, data=DataConfig(batch_size=2))
    assert learner.train(rows(4)).step == 2
    assert (
        "could not write the timeline" in caplog.text
        and "; nothing else is affected" in caplog.text
        and "resume" not in caplog.text
    )


def test_a_timeline_goes_to_the_run_folder_or_where_trace_dir_says_or_nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert trace_folder(PerfMetricsOptions(), "run") == tmp_path / "run"
    assert trace_folder(PerfMetricsOptions(trace_dir="a/b"), None) == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()
    assert trace_folder(PerfMetricsOptions(), None) is None
    assert trace_folder(PerfMetricsOptions(enable_trace_writer=False, trace_dir="c"), "run") is None


ROWS = [
    {"step": s, "mode": m, "version": s, "reward": r, "kl": None}
    for s, m, r in ((1, "train", 0.25), (2, "train", None), (2, "eval", 0.5), (3, "train", 0.75))
]


def test_series_take_the_first_name_that_has_values():
    assert metric_series(ROWS, ["kl", "reward"], "train") == ([1, 3], [0.25, 0.75])
    assert metric_series(ROWS, ["absent"], "train") == ([], [])


def test_curves_are_a_png_of_the_panels_that_have_values(tmp_path):
    pytest.importorskip("matplotlib")
    path = plot_curves(ROWS, tmp_path / "curves.png", {"reward": ["reward"], "nothing": ["absent"]})
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")


def test_ticks_are_whole_steps_and_labels_lie_inside_the_axes():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    for curves in (
        {"train": ([1, 2, 3], [0.0, 0.5, 1.0]), "eval": ([0, 3], [1.0, 0.0])},
        {"train": (list(range(1, 31)), [float(i % 7) for i in range(30)])},
        {"train": ([1], [0.5])},
    ):
        figure = Figure(figsize=(3.8, 2.6), layout="constrained")
        canvas, axes = FigureCanvasAgg(figure), figure.subplots()
        plots._panel(axes, "reward", curves)
        canvas.draw()
        low, high = axes.get_xlim()
        assert all(tick == int(tick) for tick in axes.get_xticks() if low <= tick <= high)
        inside, legend = axes.get_window_extent(), axes.get_legend().get_window_extent()
        assert inside.x0 <= legend.x0 and legend.x1 <= inside.x1 and inside.y0 <= legend.y0 and legend.y1 <= inside.y1


def test_the_usual_panels_of_a_run_with_rewards_and_of_one_without():
    assert list(plots._PANELS) == [
        "reward",
        "accuracy",
        "completion tokens",
        "share truncated at the limit",
        "KL to the reference",
        "entropy",
        "gradient norm",
    ]
    assert {"loss", "accuracy", "margin", "gradient norm"} <= plots._SUPERVISED.keys()


def test_nothing_to_draw_says_so(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        assert plot_curves([], tmp_path / "curves.png") is None
    assert "no metric to draw" in caplog.text and not (tmp_path / "curves.png").exists()


def test_without_matplotlib_the_reason_is_logged(tmp_path, caplog, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO):
        assert plot_curves(ROWS, tmp_path / "curves.png") is None
    assert "pip install" in caplog.text and "[plot]'" in caplog.text
