"""Takes the pictures in docs/pictures that show reports: python -m tools.write_pictures --reading a/report ...

It needs playwright, Pillow and a Chromium. The runs of each picture are named on the page that shows it.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

WIDE, NARROW = {"width": 1180, "height": 760}, {"width": 390, "height": 760}
READING = {"learning": ("Learning", "Completions"), "policy": ("Policy", "Optimizer")}
"""Picture -> its first and its last section of the overview."""
BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")


def main() -> None:
    """The command."""
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, runs in (
        ("reading", "the three runs of docs/reading-a-run.md"),
        ("report", "the two runs of docs/report.md"),
        ("smollm2", "the run of docs/real-model.md"),
    ):
        parser.add_argument(f"--{name}", type=Path, metavar="REPORT", help=f"folder of the report of {runs}")
    parser.add_argument(
        "--compare", type=Path, metavar="PAGE", help="what whet compare --html wrote, for docs/report.md"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), help="folder of the pictures (%(default)s)")
    args = parser.parse_args()
    with sync_playwright() as started:
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        if args.reading:
            page = opened(browser, args.reading, {"width": 960, "height": 3000})
            for name, sections in READING.items():
                save(args.out / f"reading-{name}.png", page.screenshot(clip=page.evaluate(BETWEEN, sections)))
        if args.report:
            save(args.out / "report-overview.png", opened(browser, args.report, WIDE).screenshot())
            page = opened(browser, args.report, {**WIDE, "height": 620}, "#completions/0-train-000010")
            page.select_option("[aria-label=order]", "spread")
            page.wait_for_timeout(500)
            save(args.out / "report-completions.png", page.screenshot())
            shots = [opened(browser, args.report, NARROW, f"#{tab}", "dark") for tab in ("", "completions", "time")]
            save(args.out / "report-narrow-dark.png", *(shot.screenshot() for shot in shots))
        if args.smollm2:
            save(args.out / "smollm2-report.png", opened(browser, args.smollm2, WIDE).screenshot())
            page = opened(browser, args.smollm2, {**WIDE, "height": 630}, "#completions/0-train-000010")
            page.select_option("[aria-label=order]", "spread")
            page.select_option("[aria-label=colour]", "entropy")
            page.wait_for_timeout(500)
            save(args.out / "smollm2-completions.png", page.screenshot())
        if args.compare:
            page = browser.new_page(viewport={"width": 900, "height": 700})
            page.goto(args.compare.resolve().as_uri())
            save(args.out / "report-compare.png", page.screenshot(full_page=True))
        browser.close()


BETWEEN = """([first, last]) => {
  const titles = [...document.querySelectorAll("h2")], of = text => titles.find(h2 => h2.textContent === text);
  const top = of(first).getBoundingClientRect().top - 10;
  const bottom = of(last).nextSibling.getBoundingClientRect().bottom + 10;
  return { x: 16, y: top, width: innerWidth - 32, height: bottom - top };
}"""
"""The rectangle of the overview from one section to another."""


def opened(browser: Any, report: Path, viewport: Mapping[str, int], address: str = "", scheme: str = "light") -> Any:
    """A page of a report, drawn. Args: address: what follows #. scheme: "light" or "dark"."""
    page = browser.new_page(viewport=dict(viewport), color_scheme=scheme)
    page.goto((report / "index.html").resolve().as_uri() + address)
    page.wait_for_timeout(1000)
    return page


def save(out: Path, *pictures: bytes) -> None:
    """Writes pictures of the same height beside each other, in 256 colours."""
    from PIL import Image

    images = [Image.open(BytesIO(picture)) for picture in pictures]
    whole = Image.new("RGB", (sum(image.width + 20 for image in images) - 20, images[0].height), "white")
    place = 0
    for image in images:
        whole.paste(image, (place, 0))
        place += image.width + 20
    whole.quantize(256).save(out, optimize=True)


if __name__ == "__main__":
    main()
