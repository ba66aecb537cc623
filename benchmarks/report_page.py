"""How fast the report's page is, in a headless Chromium, and what the timeline of a run costs.

    python benchmarks/report_page.py --record benchmarks/baselines

- first_paint_s: of a run of --steps steps, from the start of the load to the first contentful paint. Budget: 1 s.
- step_s: from the click that opens a step of --completions completions of 100 tokens to a window full of drawn
  completions, for groups of 8 and for one group. filter_s, sort_s: the same for a filter by reward and for another
  order. Budget: 0.2 s.
- search_s: a search through all texts of that step. No budget; the page stays responsive.
- transcript_s: the same for a step with one transcript of --transcript-mb megabytes. Budget: 0.2 s.
- longest_task_s: the longest time in which the page answered nothing, while the above ran.
- ..._cpu_s: the processor time that the page's process took for it, on all threads, which other programs on the machine
  stretch less than the time on the clock. `load` is how many there were.
- page_bytes: of index.html. Budget: 1 MB.
- trace_share: the time of the spans of a demo step by the time of the step. Budget: 0.01.

It needs playwright and a Chromium. Chromium sets the niceness of its threads, so `nice` does not help on a machine that
others use; --realtime does, and needs the right to set a real-time priority.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common

BODY = ".item .text"
"""The text of the first completion that is drawn."""
PAGER = "document.querySelector('[aria-label=\\'part of the completion\\']')"
BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
FILLED = """!document.querySelector('section > div > .more')
  || [...document.querySelectorAll('.group')].pop().getBoundingClientRect().bottom >= innerHeight"""
"""All groups are drawn, or the last one that is drawn ends below the window."""
TASKS = """window.tasks = []; new PerformanceObserver(list => list.getEntries().forEach(e => tasks.push(e.duration)))
  .observe({ type: "longtask", buffered: true })"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="steps of the run (%(default)s)")
    parser.add_argument("--completions", type=int, default=100_000, help="completions of a step (%(default)s)")
    parser.add_argument("--transcript-mb", type=int, default=100, help="megabytes of the transcript (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="loads of each page (%(default)s)")
    parser.add_argument("--realtime", action="store_true", help="give the browser a real-time priority")
    parser.add_argument("--record", type=Path, default=None, help="also write the result here")
    args = parser.parse_args(argv)
    if min(args.steps, args.completions, args.transcript_mb, args.rounds) < 1:
        parser.error("--steps, --completions, --transcript-mb and --rounds are at least 1")
    return args


def write_run(folder: Path, args: argparse.Namespace) -> None:
    """A run folder: metrics, and completions of step 1 (groups of 8), 2 (one group), and 3 (one transcript)."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    (folder / "completions").mkdir(parents=True)
    (folder / "final").mkdir()
    words = [f"{chr(97 + i % 26)}{i:04d} " for i in range(5000)]
    Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0])).save(
        str(folder / "final/tokenizer.json")
    )
    draw = random.Random(0)
    names = ["reward", "kl", "entropy", "grad_norm", "time/step", "time/rollout", *(f"more/{i}" for i in range(40))]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, args.steps + 1):
            row = {name: draw.random() for name in names}
            file.write(
                json.dumps({"step": step, "mode": "train", "version": step, "num_tokens": 100 * step, **row}) + "\n"
            )
    (folder / "config.yaml").write_text("actor: {optim: {lr: 0.1}}\n")
    write_step(folder, 1, [words] * args.completions, group=8, tokens=100)
    write_step(folder, 2, [words] * args.completions, group=args.completions, tokens=100)
    write_step(folder, 3, [words] * 8, group=8, tokens=args.transcript_mb * 1_000_000 // 6, only_first=True)


def write_step(
    folder: Path, step: int, words: list[list[str]], *, group: int, tokens: int, only_first: bool = False
) -> None:
    """Completions of a step: random tokens, with logprobs. only_first: all but the first have ten tokens."""
    import numpy as np

    from whet.storage.completions import write_completions

    draw, n = np.random.default_rng(step), len(words)
    lengths = [tokens if i == 0 or not only_first else 10 for i in range(n)]
    ids = [draw.integers(0, len(words[0]), k, dtype=np.int32) for k in lengths]
    write_completions(
        folder / "completions" / f"train-{step:06d}.parquet",
        step=step,
        columns={
            "row": [i // group for i in range(n)],
            "generation": [i % group for i in range(n)],
            "prompt": [f"question {i // group}" for i in range(n)],
            "completion": ["".join([words[0][t] for t in some]) for some in ids],
            "tokens": ids,
            "logprobs": [-draw.exponential(0.5, k).astype(np.float32) for k in lengths],
            "reward": [float(r) for r in draw.random(n)],
            "advantage": [float(a) for a in draw.normal(size=n)],
            "finish_reason": ["stop"] * n,
            "version": [step] * n,
        },
        rewards={"exact": [0.5] * n},
    )


def measure(page_file: Path, rounds: int, *, realtime: bool = False) -> dict[str, Any]:
    """Opens the page `rounds` times. Returns: the median of each time, and the longest task of all."""
    if realtime:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))  # the browser inherits it
    from playwright.sync_api import sync_playwright

    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    found: dict[str, list[float]] = {}
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        version = browser.version
        for _ in range(rounds):
            page = browser.new_page(viewport={"width": 1280, "height": 900}, bypass_csp=True)  # for eval
            page.add_init_script(TASKS)
            session = page.context.new_cdp_session(page)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})
            spent = 0.0
            for name, seconds in visits(page, page_file):
                metrics = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
                found.setdefault(name, []).append(seconds)
                if not name.startswith("longest"):
                    found.setdefault(name.replace("_s", "_cpu_s"), []).append(metrics["ProcessTime"] - spent)
                spent = metrics["ProcessTime"]
            page.close()
        browser.close()
    if realtime:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    longest = {name: max(found.pop(name)) for name in list(found) if name.startswith("longest")}
    return {"chromium": version, **{name: statistics.median(values) for name, values in found.items()}, **longest}


def visits(page: Any, page_file: Path) -> Iterator[tuple[str, float]]:
    """What a reader does, with the seconds of each."""
    page.goto(page_file.as_uri())
    page.wait_for_selector(".plot svg")
    paint = "performance.getEntriesByName('first-contentful-paint').map(e => e.startTime)[0]"
    page.wait_for_function(paint)
    yield "first_paint_s", page.evaluate(paint) / 1000
    yield "longest_task_first_s", longest_task(page)
    shown = lambda pattern: f"/^{pattern} of/.test(document.querySelector('.count').textContent)"
    for name, step in (("", 1), ("_one_group", 2)):
        yield f"step{name}_s", timed(page, f"go('completions', '0-train-{step:06d}')", FILLED)
        yield f"longest_task_step{name}_s", longest_task(page)
        yield f"filter{name}_s", timed(page, fill("least reward", "0.999"), f"{shown('[0-9]{1,3}')} && ({FILLED})")
        page.evaluate(fill("least reward", ""))
        yield f"longest_task_filter{name}_s", longest_task(page)
        order = "(s => { s.value = 'best'; s.onchange(); })(document.querySelector('[aria-label=order]'))"
        yield f"sort{name}_s", timed(page, order, FILLED)
        yield f"longest_task_sort{name}_s", longest_task(page)
    yield "search_s", timed(page, fill("find text", "a0000 "), shown("[0-9]+"))
    page.evaluate(fill("find text", ""))
    yield "longest_task_search_s", longest_task(page)
    opened = "whet.view.sort = 'row'; go('completions', '0-train-000003')"
    yield "transcript_s", timed(page, opened, PAGER)
    last = f"(i => {{ i.value = i.max; i.onchange(); }})({PAGER})"
    yield "transcript_end_s", timed(page, last, f"{PAGER}.value === {PAGER}.max")
    yield "longest_task_transcript_s", longest_task(page)


def fill(label: str, text: str) -> str:
    """Sets a field of the page."""
    return f"(i => {{ i.value = {text!r}; i.oninput(); }})(document.querySelector('[aria-label=\"{label}\"]'))"


def timed(page: Any, action: str, until: str) -> float:
    """Seconds from an action to the frame in which a text of a completion is drawn anew and `until` holds."""
    return page.evaluate(
        """([body, action, until]) => new Promise((done, failed) => {
          setTimeout(() => failed(new Error(`not within 60 s: ${action}`)), 60000);
          const text = () => { const found = document.querySelector(body); return found && found.firstChild; };
          const old = text(), start = performance.now();
          const end = () => done((performance.now() - start) / 1000);
          const look = () => {
            if (text() && text() !== old && eval(until)) requestAnimationFrame(() => setTimeout(end));
            else requestAnimationFrame(look);
          };
          eval(action);
          look();
        })""",
        [BODY, action, until],
    )


def longest_task(page: Any) -> float:
    """Seconds of the longest task since the last call."""
    page.wait_for_timeout(300)
    return page.evaluate("Math.max(0, ...tasks.splice(0)) / 1000")


def trace_share() -> dict[str, float]:
    """What the spans of a step cost by the time of the step: counted in a run of the demo's model, timed apart."""
    from whet import ClusterConfig, GRPOConfig, GRPOLearner, RLCluster, RLTrainingConfig, RolloutConfig
    from whet.demo import small_model
    from whet.observe.trace import Trace

    training = RLTrainingConfig(max_steps=5)
    config = ClusterConfig(rollout_config=RolloutConfig(max_tokens_to_generate=16), training_config=training)
    cluster = RLCluster(actor=small_model(seed=0), tokenizer="byte", cluster_config=config)
    reward: Callable[..., list[float]] = lambda prompts, completions, **columns: [float(len(c)) for c in completions]
    run = GRPOLearner(cluster, GRPOConfig(num_generations=8, beta=0.0), reward_fns=[reward]).train(
        [{"prompt": "1+1="}] * 40
    )
    spans = len([event for event in cluster.trace.events() if event["ph"] == "X"]) / len(run.train_rows)
    step = statistics.median(row["time/step"] for row in run.train_rows)
    trace, count = Trace(), 20_000
    start = time.perf_counter()
    for _ in range(count):
        with trace.span("update", step=1):
            pass
    one = (time.perf_counter() - start) / count
    return {"spans_a_step": spans, "span_us": one * 1e6, "step_s": step, "share": spans * one / step}


def main() -> None:
    from whet.report.report import write_report

    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        write_run(Path(folder, "run"), args)
        written = time.perf_counter()
        page = write_report([Path(folder, "run")], Path(folder, "report"), max_mb=1e6)
        report_s = time.perf_counter() - written
        print(f"a run in {written - started:.0f} s, its report in {report_s:.0f} s", flush=True)
        result = {
            "setting": {name: value for name, value in vars(args).items() if name != "record"},
            "write_report_s": report_s,
            "page_bytes": page.stat().st_size,
            "data_bytes": sum(f.stat().st_size for f in (page.parent / "data").iterdir()),
            **measure(page, args.rounds, realtime=args.realtime),
            "trace": trace_share(),
            "load": os.getloadavg()[0],
        }
    common.finish("report_page", result, device="cpu", record=args.record)


if __name__ == "__main__":
    main()
