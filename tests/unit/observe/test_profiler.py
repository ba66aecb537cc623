import errno
import gzip
import json
import logging
import os
import tempfile

import pytest
import torch
from helpers import cluster, length_reward, rows, tiny_model
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from whet.config import DataConfig, GRPOConfig, ProfilerOptions
from whet.demo import small_model
from whet.errors import ConfigError
from whet.learners.grpo import GRPOLearner
from whet.native.build import Unavailable
from whet.native.decode import decode_kernels
from whet.observe import Trace
from whet.observe.profiler import OperationCost, StepProfiler, cost_table, operation_costs
from whet.storage.files import write_error

X = torch.randn(64, 64)


def profiled(body):
    """The costs of what runs in a step, and the seconds from its first operation to its last."""
    trace = Trace()
    trace.annotate = lambda name: record_function(f"whet: {name}")
    with profile(activities=[ProfilerActivity.CPU]) as seen, record_function("whet: step"):
        body(trace)
    events = seen.events()
    whole = next(e for e in events if e.name == "whet: step")
    return operation_costs(events), whole.time_range.elapsed_us() / 1e6


def calls(found, phase, name):
    return sum(c.calls for c in found if (c.phase, c.name) == (phase, name))


# ---- where an operation is counted ---------------------------------------------------------------------------------


def test_an_operation_counts_in_the_phase_that_it_ran_in_and_all_sum_to_the_step():
    def body(trace):
        X @ X
        with trace.span("rollout"):
            X @ X, X @ X
        with trace.span("rewards"):
            pass
        with trace.span("rollout"):
            X @ X

    found, seconds = profiled(body)
    assert [calls(found, p, "mm") for p in ("rollout", "rewards", "other")] == [3, 0, 1]
    assert list(dict.fromkeys(c.phase for c in found)) == ["rollout", "rewards", "other"]
    assert sum(c.cpu_s for c in found) == pytest.approx(seconds, rel=1e-3)


def test_a_span_inside_another_belongs_to_the_outer_one():
    def body(trace):
        with trace.span("eval"):
            with trace.span("rewards"):
                X @ X
            X @ X

    found, _ = profiled(body)
    assert calls(found, "eval", "mm") == 2 and {c.phase for c in found} == {"eval", "other"}


def test_backward_and_optimizer_are_parts_of_their_phase():
    layer = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)

    def body(trace):
        with trace.span("rollout"):
            layer(X)
        with trace.span("update"):
            layer(X).square().sum().backward()
            optimizer.step()

    found, _ = profiled(body)
    phases = list(dict.fromkeys(c.phase for c in found))
    assert phases == ["rollout", "update: forward, loss, clipping", "update: backward", "update: optimizer", "other"]
    assert calls(found, "update: backward", "mm") == 1  # the weight's gradient; the input needs none
    assert calls(found, "update: optimizer", "_fused_adamw_") == 1
    assert calls(found, phases[1], "addmm") == calls(found, "rollout", "addmm") == 1


def test_the_dearest_operations_come_first_and_the_others_are_one_line():
    found = [
        OperationCost(phase="update", name=n, calls=1, cpu_s=s, device_s=0.0)
        for n, s in (("a", 0.5), ("b", 0.3), ("c", 0.2))
    ]
    lines = cost_table(found, rows=1).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["update", "a", "2"]
    assert (
        lines[1].endswith("100.0 %")
        and lines[2].endswith("50.0 %")
        and lines[3].split() == ["2", "others", "2", "500.0", "50.0", "%"]
    )


def test_with_a_gpu_the_share_is_of_its_time():
    found = [
        OperationCost(phase="p", name="a", calls=1, cpu_s=3.0, device_s=0.5),
        OperationCost(phase="p", name="b", calls=1, cpu_s=1.0, device_s=1.5),
    ]
    text = cost_table(found)
    assert "GPU ms" in text and text.splitlines()[2].split()[:5] == ["a", "1", "500.0", "3000.0", "25.0"]


# ---- a run ---------------------------------------------------------------------------------------------------------


def train(folder, steps=3, **training):
    few = {"max_tokens_to_generate": 3}  # a profile costs time for each operation
    training |= {"run_dir": folder and str(folder), "max_steps": steps}
    c = cluster(tiny_model(), reference=tiny_model(1), rollout=few, **training)
    algo = GRPOConfig(num_generations=2, beta=0.02)
    return GRPOLearner(c, algo, length_reward, data=DataConfig(batch_size=2)).train(rows(8))


def numbers(run):
    return [{k: repr(v) for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in run.rows]


def names(folder):
    return sorted(p.name for p in folder.iterdir() if "profile" in p.name)


def test_profile_writes_a_timeline_and_a_table_of_the_second_step_and_changes_no_number(tmp_path):
    plain, seen = train(tmp_path / "a"), train(tmp_path / "b", profile=True)
    assert names(tmp_path / "a") == []
    assert names(tmp_path / "b") == ["profile-step-000002.json.gz", "profile-step-000002.txt"]
    with gzip.open(tmp_path / "b" / "profile-step-000002.json.gz") as file:
        events = json.load(file)["traceEvents"]
    ranges = {e["name"] for e in events if e.get("name", "").startswith("whet: ")}
    assert ranges >= {"whet: step", "whet: rollout", "whet: rewards", "whet: ref_logprobs", "whet: update"}
    text = (tmp_path / "b" / "profile-step-000002.txt").read_text()
    assert text.startswith("profile of step 2: ") and "\nupdate: backward " in text and "\nrollout " in text
    assert numbers(plain) == numbers(seen)


def test_the_options_choose_the_steps_and_the_folder(tmp_path):
    options = ProfilerOptions(log_dir=str(tmp_path / "profiles"), skip_first_n_steps=0, profiler_steps=2)
    train(tmp_path / "run", profiler_options=options)
    assert names(tmp_path / "run") == [] and len(names(tmp_path / "profiles")) == 4
    assert (tmp_path / "profiles" / "profile-step-000001.txt").is_file()


def test_a_resumed_run_counts_from_where_it_begins_and_may_ask_for_a_profile(tmp_path):
    train(tmp_path / "run", steps=1)
    train(tmp_path / "run", steps=3, resume="latest", profile=True)
    assert names(tmp_path / "run") == ["profile-step-000003.json.gz", "profile-step-000003.txt"]


def test_a_run_too_short_for_the_options_has_its_last_step_profiled_and_says_so(tmp_path, caplog):
    train(tmp_path, steps=2, profiler_options=ProfilerOptions(skip_first_n_steps=2))
    assert names(tmp_path) == ["profile-step-000002.json.gz", "profile-step-000002.txt"]
    assert "the run is no longer than skip_first_n_steps=2; profiling its last step" in caplog.text
    for steps, first in ((1, 0), (4, 3), (5, 4), (6, 5), (7, 5)):
        profiler = StepProfiler(ProfilerOptions(skip_first_n_steps=5), folder=None, trace=Trace())
        profiler.set_num_steps(steps)
        assert profiler._first == first


def test_a_run_of_unknown_length_that_is_over_before_says_so(caplog):
    profiler = StepProfiler(ProfilerOptions(), folder=None, trace=Trace())
    profiler.set_num_steps(None)
    with profiler.step(1):
        pass
    profiler.close()
    assert "no step was profiled: the run made 1 and the first 1 are skipped" in caplog.text


def one_step(folder):
    """Profiles a step; what goes wrong in that raises nothing."""
    with StepProfiler(ProfilerOptions(skip_first_n_steps=0), folder=folder, trace=Trace()).step(1):
        X @ X


def _fails(self, path):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _half(self, path):
    """What torch leaves where the place of its temporary file is full: no error, and half a file."""
    with gzip.open(path, "wt") as file:
        file.write('{"traceEvents": [')


@pytest.mark.parametrize(("export", "why"), [(_fails, "No space left on device"), (_half, "half of the timeline")])
def test_a_profile_on_a_full_disk_costs_no_step_and_says_what_to_free(tmp_path, monkeypatch, caplog, export, why):
    monkeypatch.setattr(profile, "export_chrome_trace", export)
    one_step(tmp_path)
    assert names(tmp_path) == ["profile-step-000001.txt"]
    assert f"the profile of step 1 could not be written to {tmp_path}: " in caplog.text and why in caplog.text
    assert f"training continues. Make room there and in {tempfile.gettempdir()}" in caplog.text


def test_a_log_dir_that_cannot_be_written_is_an_error_before_the_run_and_names_its_key(tmp_path):
    (tmp_path / "file").write_text("")
    options = ProfilerOptions(log_dir=str(tmp_path / "file" / "profiles"))
    with pytest.raises(ConfigError, match=r"trainer\.profiler_options\.log_dir=.*profiles can't be written"):
        train(tmp_path / "run", profiler_options=options)


@pytest.mark.parametrize("part", ["start", "stop", "events"])
def test_a_profiler_that_fails_costs_no_step(tmp_path, monkeypatch, caplog, part):
    def fails(self):
        if part == "stop":
            stop(self)
        raise RuntimeError("it is in use")

    profiler = StepProfiler(ProfilerOptions(skip_first_n_steps=0), folder=tmp_path, trace=Trace())
    stop, done = profile.stop, []
    monkeypatch.setattr(profile, part, fails)
    with profiler.step(1):
        done.append(X @ X)
    assert len(done) == 1 and profiler.trace.annotate is None
    assert "step 1 has no profile: RuntimeError: it is in use" in caplog.text


def test_a_table_that_the_disk_did_not_take_is_no_reason_to_resume(tmp_path, monkeypatch, caplog):
    def full(path, content):
        raise write_error(path, OSError(errno.ENOSPC, "full")) from OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("whet.observe.profiler.write_atomic", full)
    assert train(tmp_path, steps=2, profile=True).step == 2
    assert "could not be written" in caplog.text and "resume" not in caplog.text and names(tmp_path) == []


def test_without_a_folder_the_table_is_logged_and_that_is_said(caplog):
    with caplog.at_level(logging.INFO, "whet"):
        one_step(None)
    assert "profile of step 1" in caplog.text and "was not written: neither run_dir" in caplog.text


def test_off_it_marks_nothing_and_other_ranks_write_nothing(monkeypatch, tmp_path):
    trace = Trace()
    with StepProfiler(None, folder=None, trace=trace).step(1):
        assert trace.annotate is None
    monkeypatch.setenv("RANK", "1")
    with StepProfiler(ProfilerOptions(skip_first_n_steps=0), folder=tmp_path, trace=trace).step(1):
        assert trace.annotate is None
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_raises_leaves_no_mark_and_no_file(tmp_path):
    trace = Trace()
    profiler = StepProfiler(ProfilerOptions(skip_first_n_steps=0), folder=tmp_path, trace=trace)
    with pytest.raises(KeyError), profiler.step(1):
        raise KeyError
    assert trace.annotate is None and list(tmp_path.iterdir()) == []


def test_a_negative_number_of_steps_is_refused():
    with pytest.raises(ConfigError, match="skip_first_n_steps must not be negative, got -1"):
        ProfilerOptions(skip_first_n_steps=-1)


@pytest.mark.skipif(isinstance(decode_kernels(), Unavailable), reason=f"no native kernels here: {decode_kernels()}")
def test_native_decode_steps_have_rows_of_their_own():
    c = cluster(small_model(0), rollout={"eos_tokens": [1]})
    prompts = [c.encoder()({"prompt": "1+1="}, 0)]
    assert c.engine.backends["kernels"].startswith("native")
    assert c.describe()["rollout"]["kernels"] == c.engine.backends["kernels"]

    def body(trace):
        with trace.span("rollout"):
            c.sample(prompts)

    found, _ = profiled(body)
    assert calls(found, "rollout", "native: decoder layers") >= 1 <= calls(found, "rollout", "native: product")
