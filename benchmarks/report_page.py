"""How fast is the report's page: its first paint, the completions of a step, a transcript of 100 MB?

    python benchmarks/report_page.py                      # 100 steps of 1,000 completions, and one long transcript
    python benchmarks/report_page.py --steps 5 --mb 5     # a trial

The run folder is made: metrics of each step, completions with tokens, logprobs and advantages, and a last step whose
one completion is a transcript of --mb megabytes. Playwright opens the report from disk in headless Chromium. Times
are in milliseconds, the median of --rounds:

- first_paint: by the browser's own clock.
- step: from the click on a step to its first completions. filter: from a filter to its result.
- open_long: from the click on the transcript's step to its first text.
- longest_block: the longest time for which the page did not answer while the transcript is opened and read on.

`page_kb` is the page without its data. The last line printed is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import common

from whet.report.report import write_report
from whet.storage.completions import write_completions

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
BLOCKS = """() => { window.blocks = []; new PerformanceObserver(list => window.blocks.push(
    ...list.getEntries().map(e => e.duration))).observe({ type: "longtask" }); }"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="steps of the run")
    parser.add_argument("--completions", type=int, default=1000, help="completions of a step, of about 200 characters")
    parser.add_argument("--mb", type=int, default=100, help="megabytes of the long transcript")
    parser.add_argument("--rounds", type=int, default=3, help="times that each is measured")
    parser.add_argument("--record", type=Path, default=None, help="also write the result here")
    args = parser.parse_args(argv)
    if min(args.steps, args.completions, args.mb, args.rounds) < 1:
        parser.error("--steps, --completions, --mb and --rounds must be at least 1")
    return args


def make_run(folder: Path, args: argparse.Namespace) -> None:
    """Writes a run folder. The last step's completion is the long transcript."""
    draw = random.Random(0)
    (folder / "completions").mkdir(parents=True)
    rows = [
        {"step": s, "mode": "train", "version": s, "reward": draw.random(), "entropy": 1 / s, "time/step": 1.0}
        for s in range(1, args.steps + 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text("algo: {beta: 0}\n")
    for step in range(1, args.steps + 1):
        words = [[f"word{draw.randrange(1000)} " for _ in range(25)] for _ in range(args.completions)]
        write(folder, step, ["".join(w) for w in words], [len(w) for w in words])
    write(folder, args.steps + 1, ["a line of an episode, word by word\n" * (args.mb * 1_000_000 // 36)], [1000])


def write(folder: Path, step: int, texts: list[str], lengths: list[int]) -> None:
    """Writes the completions of a step."""
    n = len(texts)
    columns: dict[str, Any] = {
        "row": [i // 8 for i in range(n)],
        "generation": [i % 8 for i in range(n)],
        "prompt": [f"question {i // 8}" for i in range(n)],
        "completion": texts,
        "tokens": [[1] * length for length in lengths],
        "logprobs": [[-0.5] * length for length in lengths],
        "reward": [float(i % 2) for i in range(n)],
        "advantage": [1.0 - i % 2 for i in range(n)],
        "finish_reason": ["stop"] * n,
        "version": [step] * n,
    }
    write_completions(folder / "completions" / f"train-{step:06d}.parquet", step=step, columns=columns, rewards={})


def measure(browser: Any, page_file: Path, args: argparse.Namespace) -> dict[str, float]:
    """One round, in a new page."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(page_file.as_uri())
    page.wait_for_selector(".plot svg")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    clock = lambda action, seen: page.evaluate(
        f"""() => new Promise(done => {{
            const begun = performance.now();  // the layout counts, the painting does not
            const end = () => {{ document.body.getBoundingClientRect(); done(performance.now() - begun); }};
            const look = () => {seen} ? end() : setTimeout(look, 1);
            {action};
            look();
        }})"""
    )
    middle, final = f"0-train-{max(1, args.steps // 2):06d}", f"0-train-{args.steps + 1:06d}"
    found = {"first_paint": paint}
    found["step"] = clock(f"go('completions', '{middle}')", "document.querySelector('.item')")
    found["filter"] = clock(
        "var low = document.querySelector('[aria-label=\"least reward\"]'); low.value = '1'; low.oninput()",
        f"document.querySelector('.bar .dim').textContent.startsWith('{args.completions // 2} of')",
    )
    page.evaluate("whet.view.low = ''")
    page.evaluate(BLOCKS)
    found["open_long"] = clock(f"go('completions', '{final}')", "document.querySelectorAll('.item').length === 1")
    for _ in range(30):
        page.locator(".text button.more").first.click()
        page.wait_for_timeout(20)
    found["longest_block"] = page.evaluate("Math.max(0, ...window.blocks)")
    page.close()
    return found


def main() -> None:
    """Runs the benchmark."""
    args = arguments()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise SystemExit("this benchmark needs: pip install playwright, and Chromium") from None
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        raise SystemExit(f"no Chromium on PATH: looked for {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as name, sync_playwright() as started:
        make_run(Path(name) / "run", args)
        page = write_report([Path(name) / "run"], Path(name) / "report", max_mb=10_000)
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        rounds = [measure(browser, page, args) for _ in range(args.rounds)]
        result = {
            "ms": {key: round(statistics.median(r[key] for r in rounds), 1) for key in rounds[0]},
            "page_kb": round(page.stat().st_size / 1000, 1),
            "completions": args.steps * args.completions,
            "steps": args.steps,
            "transcript_mb": args.mb,
            "rounds": args.rounds,
            "chromium": browser.version,
        }
        browser.close()
    common.finish("report_page", common.rounded(result), device="cpu", record=args.record)


if __name__ == "__main__":
    main()
