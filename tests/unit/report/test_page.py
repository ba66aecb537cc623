"""The page in a headless Chromium: every tab, filter and key does what it says, and nothing is logged as an error."""

import json
import math
import random
import shutil
import threading

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from whet.report.report import write_report
from whet.report.server import LiveRuns, make_server
from whet.storage.completions import write_completions

BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
GROUPS, SIZE = 40, 4


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of two runs, of 600 steps, whose completions are of steps 300 and 600 and of an evaluation."""
    folder = tmp_path_factory.mktemp("runs")
    for name, final in (("a", 0.9), ("b", 0.4)):
        draw = random.Random(name)
        (folder / name / "completions").mkdir(parents=True)
        rows = [
            {
                "step": s,
                "mode": "train",
                "version": s,
                "reward": final * s / 600 + draw.gauss(0, 0.03),
                "entropy": 1 / s,
                "num_tokens": 100 * s,
                "time/step": 2.0,
                "time/rollout": 1.2,
                "time/update": 0.7,
            }
            for s in range(1, 601)
        ]
        rows.append({"step": 600, "mode": "eval", "version": 600, "reward": final, "accuracy": final})
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        (folder / name / "config.yaml").write_text(f"actor: {{lr: {final}}}\nalgo: {{beta: 0}}\n")
        for file, step in (("train-000300", 300), ("train-000600", 600), ("eval-000600", 600)):
            n = GROUPS * SIZE
            texts = [f"<b>answer {i}</b> " + "word " * (i % 7) for i in range(n)]
            texts[3] = "long " * 9_998 + "at the end"
            call = {"function": {"name": "add", "arguments": {"a": 1}}}
            turns = [("assistant", "Let me see."), ("tool", "<b>2</b>"), ("user", [{"k": 1}, {"text": "and"}])]
            messages = [{"role": role, "content": content} for role, content in turns]
            texts[4] = json.dumps([messages[0] | {"tool_calls": [call]}, *messages[1:]])
            texts[5] = '[{"role": 1}]'
            texts[6] = json.dumps([{"role": "user", "content": f"turn {k}, " + "word " * 200} for k in range(60)])
            write_completions(
                folder / name / "completions" / f"{file}.parquet",
                step=step,
                columns={
                    "row": [i // SIZE for i in range(n)],
                    "generation": [i % SIZE for i in range(n)],
                    "prompt": [f"question {i // SIZE}" for i in range(n)],
                    "completion": texts,
                    "tokens": [[1] * (i % 7 + 1) for i in range(n)],
                    "logprobs": [[-0.5] * (i % 7 + 1) for i in range(n)],
                    "trainer_logprobs": [[-0.6] * (i % 7 + 1) if i > 3 else None for i in range(n)],
                    "entropy": [[1.5] * (i % 7 + 1) if i > 3 else None for i in range(n)],
                    "reward": [float(i % SIZE == 0) if i // SIZE % 2 else 0.5 for i in range(n)],
                    "advantage": [1.0 - i % 2 for i in range(n)],
                    "finish_reason": ["length" if i % 10 == 9 else "stop" for i in range(n)],
                    "version": [step] * n,
                },
                rewards={"exact": [0.0] * n, "form": [1.0] * n},
            )
    (folder / "b/final").mkdir()
    Tokenizer(WordLevel({"?": 0, "a": 1}, unk_token="?")).save(str(folder / "b/final/tokenizer.json"))
    return write_report([folder / "a", folder / "b"], folder / "report")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, report):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    problems = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(report.as_uri())
    yield page
    assert problems == []
    page.close()


def count(page, shown):
    """Waits until the page says how many completions it shows."""
    page.wait_for_function("text => document.querySelector('.count').textContent === text", arg=shown, timeout=5000)


def test_every_tab_draws(page):
    assert page.title() == "a · b · whet" and page.locator(".plot svg").count() >= 4
    for tab, wanted in (
        ("metrics", "details"),
        ("completions", ".group"),
        ("evaluations", "td:has-text('± ')"),
        ("time", "rect"),
        ("config", "tr.differs:has-text('actor.lr')"),
    ):
        page.click(f"#tab-{tab}")
        page.wait_for_selector(wanted)
        assert page.get_attribute(f"#tab-{tab}", "aria-selected") == "true"
    assert page.locator("tr:not(.differs):has-text('algo.beta')").count() == 1
    page.check("input[aria-label='differences alone']")
    assert page.locator("td:first-child").all_inner_texts() == ["actor.lr"]
    page.uncheck("input[aria-label='differences alone']")
    page.fill("input[aria-label='find a setting']", "beta")
    assert page.locator("td:first-child").all_inner_texts() == ["algo.beta"]


def test_the_tabs_follow_the_arrow_keys(page):
    page.focus("#tab-overview")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-metrics"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.id") == "tab-config"


def test_the_keyboard_alone_reaches_the_completions_of_a_step_and_their_filters(page):
    focus = lambda: page.evaluate(
        "(document.activeElement.getAttribute('aria-label') || document.activeElement.textContent).split(':')[0]"
    )

    def tab_to(name):
        for _ in range(60):
            page.keyboard.press("Tab")
            if focus() == name:
                return
        raise AssertionError(f"{name} can't be reached")

    tab_to("Overview")
    tab_to("smoothing")
    page.keyboard.press("Home")
    assert page.locator("path.raw").count() == 0
    tab_to("reward")
    page.keyboard.press("ArrowLeft")
    assert page.locator(".plot header span").first.inner_text().startswith("step 600")
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    assert page.locator(".plot header span").first.inner_text().startswith("step 597")
    page.keyboard.press("Enter")
    page.wait_for_selector(".group")
    assert page.evaluate("location.hash") == "#completions/0-train-000600"
    tab_to("previous step")
    page.keyboard.press("Enter")
    page.wait_for_url("**/0-train-000300")
    page.wait_for_selector(".group")
    tab_to("finish reason")
    page.keyboard.press("End")
    count(page, "16 of 160 completions")
    tab_to("find text")
    page.keyboard.type("question 2")
    count(page, "5 of 160 completions")
    tab_to("link")
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash").startswith("#completions/0-train-000300/")


def test_a_click_on_a_curve_opens_the_completions_of_its_step(page):
    svg = page.locator(".plot", has_text="reward").first.locator("svg")
    box = svg.bounding_box()
    svg.hover(position={"x": box["width"] * 0.55, "y": 40})
    assert page.locator(".plot header span").first.inner_text().startswith("step 2")
    svg.click(position={"x": box["width"] * 0.55, "y": 40})
    page.wait_for_selector(".group")
    assert page.evaluate("location.hash") == "#completions/0-train-000300"


def test_smoothing_and_axis_redraw_the_curves(page):
    before = page.locator("path.smooth").first.get_attribute("d")
    page.fill(".bar input[type=range]", "0.5")
    assert page.locator("path.smooth").first.get_attribute("d") != before
    page.fill(".bar input[type=range]", "0")
    assert page.locator("path.raw").count() == 0
    page.select_option(".bar select", "hours")
    assert "0.333" in page.locator(".plot svg").first.text_content()
    page.select_option(".bar select", "tokens")
    assert "60k" in page.locator(".plot svg").first.text_content()


def test_a_curve_can_be_made_large_and_a_part_of_it_and_of_the_runs_be_shown_alone(page):
    page.click("button:text-is('reward')")
    large = page.locator(".plot.large svg")
    assert large.bounding_box()["width"] > 1000 and page.evaluate("document.activeElement.textContent") == "reward"
    page.keyboard.press("Enter")
    assert large.count() == 0
    box = page.locator(".plot svg").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 30)
    page.mouse.up()
    fields = [page.input_value(f"input[aria-label='{end} on the horizontal axis']") for end in ("from", "to")]
    assert 150 < int(fields[0]) < 250 and 400 < int(fields[1]) < 500
    assert page.locator(".plot svg").first.text_content().endswith(fields[1])
    page.select_option(".bar select", "tokens")
    assert page.input_value("input[aria-label='to on the horizontal axis']") == ""
    paths = page.locator(".plot").first.locator("path.smooth")
    linear = paths.first.get_attribute("d")
    assert paths.count() == 2
    page.click("button[aria-label='run b']")
    assert paths.count() == 1 and page.evaluate("document.activeElement.textContent") == "b"
    assert page.locator(".tile b").first.inner_text() == "a"
    page.click("button[aria-label='run a']")
    assert paths.count() == 1  # one stays
    page.click("button[aria-label='run b']")
    entropy = page.locator(".plot", has_text="entropy").locator("svg")
    page.check("input[aria-label='logarithmic']")
    assert paths.first.get_attribute("d") == linear  # some rewards are below 0
    assert {"1", "0.1", "0.01"} <= set(entropy.locator("text").all_text_contents())


def test_filters_and_orders_of_completions(page):
    page.goto(page.url.partition("#")[0] + "#completions/0-train-000600")
    page.wait_for_selector(".group")
    count(page, "160 of 160 completions")
    assert page.locator(".item b", has_text="answer").count() == 0  # a text is no HTML
    page.select_option("select[aria-label='finish reason']", "length")
    count(page, "16 of 160 completions")
    page.select_option("select[aria-label='finish reason']", "")
    page.fill("input[aria-label='least reward']", "0.9")
    count(page, "20 of 160 completions")
    page.fill("input[aria-label='least reward']", "")
    page.fill("input[aria-label='find text']", "question 39")
    count(page, "4 of 160 completions")
    page.fill("input[aria-label='find text']", "nowhere")
    page.wait_for_selector("text=No completion fits")
    page.fill("input[aria-label='find text']", "")
    page.fill("input[aria-label='find text']", "at the end")
    count(page, "1 of 160 completions")
    assert page.input_value("input[aria-label='part of the completion']") == "3"
    assert page.evaluate("[...CSS.highlights.get('found')].map(String)") == ["at the end"]
    page.click("text=from the beginning")
    assert page.inner_text(".item .text").startswith("long long")
    page.fill("input[aria-label='find text']", "")
    page.fill("input[aria-label='least tokens']", "3")
    page.fill("input[aria-label='most tokens']", "4")
    count(page, "46 of 160 completions")
    assert page.inner_text(".item header >> nth=0").split("\n")[2] == "3 tokens"
    page.click("text=clear")
    count(page, "160 of 160 completions")
    for order, row in (("worst", "row 1"), ("best", "row 0"), ("spread", "row 1"), ("long", "row 1"), ("row", "row 0")):
        page.select_option("select[aria-label='order']", order)
        page.wait_for_selector(f".group header b >> nth=0 >> text='{row}'")
    page.click("button[aria-label='previous step']")
    page.wait_for_url("**/0-train-000300")
    assert page.is_disabled("button[aria-label='previous step']")


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_are_put_in_order_without_a_function(page, sign):
    values = [0.5, -0.25, None, -0.0, 0, 1e-5, -3, 0.5, 12345, -12345, -12346, 0.99999, 1, None, -0.25]
    found = page.evaluate("([v, sign]) => [...inOrder(Float64Array.from(v, x => x ?? NaN), sign)]", [values, sign])
    key = lambda i: math.inf if values[i] is None else sign * values[i]
    assert found == sorted(range(len(values)), key=key)  # equal ones in their order


def test_tokens_are_coloured_by_what_is_asked_for(page):
    page.goto(page.url.partition("#")[0] + "#completions/1-train-000600")
    page.wait_for_selector(".group")
    token = page.locator(".item").nth(6).locator(".tok").first
    colours = set()
    for by in ("logprob", "ratio", "entropy", "advantage"):
        page.select_option("select[aria-label='colour']", by)
        page.wait_for_timeout(50)
        colours.add(token.get_attribute("style"))
    assert len(colours) == 4 and None not in colours
    token.hover()
    title = "p 0.607, logprob -0.50, ratio 0.90, entropy 1.50, version 600"
    assert token.get_attribute("title") == title
    page.select_option("select[aria-label='colour']", "entropy")
    page.wait_for_selector("text=no entropy")
    assert "no entropy of tokens" in page.locator(".item").first.inner_text()
    assert "no entropy" not in page.locator(".item").nth(6).inner_text()


def test_long_lists_and_long_texts_are_drawn_in_parts(page):
    page.goto(page.url.partition("#")[0] + "#completions/0-train-000600")
    page.wait_for_selector(".group")
    assert page.locator(".group").count() < GROUPS
    page.locator(".text button.more").first.click()
    length = "document.querySelectorAll('.text')[3].textContent.length"
    assert page.evaluate(length) > 4000
    page.fill("input[aria-label='part of the completion']", "3")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('.text')[3].textContent.startsWith('long')")
    for _ in range(20):
        page.locator(".text >> nth=3").evaluate("node => { node.scrollTop = node.scrollHeight }")
        page.wait_for_timeout(20)
    assert page.evaluate(length) == 10_000  # the third part of 50,000 characters
    page.mouse.move(600, 60)
    for _ in range(20):
        page.mouse.wheel(0, 20_000)
        page.wait_for_timeout(50)
    assert page.locator(".group").count() == GROUPS


def test_a_completion_has_an_address_and_a_file(page):
    page.goto(page.url.partition("#")[0] + "#completions/1-eval-000600")
    page.wait_for_selector(".group")
    page.locator(".item button", has_text="link").nth(5).click()
    assert page.evaluate("location.hash") == "#completions/1-eval-000600/1/1"
    page.reload()
    page.wait_for_selector(".item.linked")
    assert page.inner_text(".item.linked .text").split() == ["a"] * 6
    with page.expect_download() as download:
        page.locator(".item.linked button", has_text="save").click()
    saved = json.loads(download.value.path().read_text())
    assert saved["prompt"] == "question 1" and saved["step"] == 600 and saved["functions"] == ["exact", "form"]


def test_a_transcript_is_shown_by_its_messages_where_tokens_have_no_colour(page):
    page.goto(page.url.partition("#")[0] + "#completions/0-train-000600")
    page.wait_for_selector(".group")
    message = page.locator(".item").nth(4).locator(".message")
    shown = ['assistant Let me see.\nadd({"a":1})', "tool <b>2</b>", 'user {"k":1}\nand']
    assert message.all_inner_texts() == shown
    assert page.locator(".item").nth(5).locator(".message").count() == 0  # no roles
    long, message = page.locator(".item").nth(6), page.locator(".item").nth(6).locator(".message")
    message.first.wait_for()
    assert message.count() == 20 and not long.locator("input").count()  # 20,000 characters of 60,000, and no parts
    long.locator(".text").evaluate("node => { node.scrollTop = node.scrollHeight }")
    message.nth(39).wait_for()
    assert message.count() == 40 and message.nth(39).inner_text().startswith("user turn 39, word")
    page.fill("input[aria-label='find text']", "turn 57")
    count(page, "1 of 160 completions")
    assert page.inner_text(".message >> nth=0").startswith("user turn 57,")
    page.click("text=from the beginning")
    assert page.inner_text(".message >> nth=0").startswith("user turn 0,")


def test_missing_data_are_named(browser, report, tmp_path):
    alone = tmp_path / "index.html"
    alone.write_text(report.read_text())
    page = browser.new_page()
    page.goto(alone.as_uri())
    assert "data/runs.js is missing" in page.inner_text("main")
    page.close()


CONTRAST = """() => {
  const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const background = node => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const texts = [...document.querySelectorAll("h1, h2, a, b, span, td, th, button, p, label")];
  return Math.min(...texts.filter(n => n.textContent.trim() && !n.disabled && n.checkVisibility()).map(n => {
    const [a, b] = [parse(getComputedStyle(n).color), background(n)].map(luminance);
    return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  }));
}"""
"""The least contrast of a text and what is behind it, as WCAG defines it; 4.5 can be read."""


@pytest.mark.parametrize("width", [380, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_tab_fits_its_window_and_can_be_read(browser, report, scheme, width):
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.goto(report.as_uri())
    for tab in ("overview", "metrics", "completions", "evaluations", "time", "config"):
        page.click(f"#tab-{tab}")
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, tab
        assert page.evaluate(CONTRAST) >= 4.5, tab
    page.close()


def write_answers(run, step):
    columns = {
        "row": [0], "generation": [0], "prompt": ["p"], "completion": [f"answer {step}"], "tokens": [[1]],
        "logprobs": [[0.0]], "reward": [1.0], "finish_reason": ["stop"], "version": [step],
    }  # fmt: skip
    (run / "completions").mkdir(exist_ok=True)
    write_completions(run / f"completions/train-{step:06d}.parquet", step=step, columns=columns, rewards={})


def test_the_live_page_draws_new_rows(browser, tmp_path):
    (tmp_path / "run").mkdir()
    metrics = tmp_path / "run/metrics.jsonl"
    row = lambda step: json.dumps({"step": step, "mode": "train", "version": step, "reward": step / 10}) + "\n"
    metrics.write_text(row(1) + row(2))
    with make_server(LiveRuns([tmp_path / "run"]), "127.0.0.1", 0, None) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_address[1]}/")
        assert page.inner_text(".tile b >> nth=0") == "2"
        metrics.write_text(row(1) + row(2) + row(3))
        page.wait_for_selector(".tile b:text-is('3')")
        page.click("#tab-completions")
        assert page.inner_text("#main") == "The run folder has no completions."
        write_answers(tmp_path / "run", 3)
        page.wait_for_selector(".text:has-text('answer 3')")
        assert page.is_disabled("button[aria-label='next step']")
        write_answers(tmp_path / "run", 4)
        page.click("button[aria-label='next step']:enabled")
        page.wait_for_selector(".text:has-text('answer 4')")
        page.click("#tab-overview")
        page.focus("button[aria-label='reward, large']")
        metrics.write_text(row(1))  # resumed from its first step
        page.wait_for_selector(".tile b:text-is('1')")
        assert page.inner_text("#live") == "live"
        assert page.evaluate("document.activeElement.textContent") == "reward"
        server.shutdown()
        page.close()
