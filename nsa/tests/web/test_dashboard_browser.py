"""The dashboard in headless Chromium: it draws, follows, zooms, fits, and asks nobody else.

`make browser` installs what these tests need and runs them; elsewhere they are left out.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nsa.records import TRAINING, VAL, TrainingRow, ValRow, read_rows, write_env
from nsa.records.alarms import Alarm, append_alarm
from nsa.records.numbers import CHARTS
from nsa.records.results import Sample, append_sample
from nsa.tests.support.recording import dead_pid
from nsa.web.access import Access
from nsa.web.server import Server
from nsa.web.source import Sources
from scripts.demo_run import DemoRun, arguments

pytestmark = pytest.mark.browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDE, NARROW = (1440, 900), (390, 844)
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="make browser installs it")
    if CHROMIUM is None:
        pytest.skip("no chromium here; make browser installs it")
    with playwright.sync_playwright() as driver:
        # CI runs as root, where Chromium's sandbox cannot start; it opens only our own page.
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


def demo(folder: Path, *flags: str) -> DemoRun:
    sizes = ("--steps", "2000", "--done", "200", "--log-every", "10")
    run = DemoRun(folder, arguments([str(folder), *sizes, *flags]))
    while run.step < 200:
        run.advance()
    run.write_status("running")
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[DemoRun]:
    """Three runs that no test changes."""
    folder, names = tmp_path_factory.mktemp("runs"), ("first", "second", "third")
    return [demo(folder / name, "--seed", str(i)) for i, name in enumerate(names)]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Serve runs, and open the page; what goes wrong in it fails the test."""
    opened: list[Any] = []
    complaints: list[str] = []
    hosts: set[str] = set()

    def open_page(
        *runs: DemoRun,
        size: tuple[int, int] = WIDE,
        theme: str = "light",
        token: str | None = None,
    ) -> Any:
        sources = Sources([run.folder for run in runs])
        server = Server("127.0.0.1", 0, Access.of("127.0.0.1", token), sources)
        sources.start()
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=theme
        )
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.extend([said.text] * (said.type == "error")))
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        opened.append((server, sources, context))
        page.goto(server.url)
        if token is None:
            page.locator("#link", has_text="live ").wait_for()
        return page

    yield open_page
    for server, sources, context in opened:
        context.close()
        server.shutdown()
        server.server_close()
        sources.stop()
    # A request that fails is the page's to report; tests look at what it says.
    assert [text for text in complaints if not text.startswith("Failed to load resource")] == []
    assert all(host.startswith("127.0.0.1:") for host in hosts), "it works offline"


def inked(page: Any, selector: str) -> int:
    """Pixels of a canvas that are not empty."""
    script = """(canvas) => {
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        let count = 0;
        for (let i = 3; i < data.length; i += 4) count += data[i] > 0;
        return count;
    }"""
    return int(page.locator(selector).first.evaluate(script))


def test_every_chart_of_a_run_is_drawn(tmp_path: Path, open_page: Open) -> None:
    run = demo(tmp_path)
    while run.step < 1000:  # the first evaluation
        run.advance()
    run.write_status("running")
    page = open_page(run)
    for name in (chart.id for chart in CHARTS):
        assert inked(page, f"#chart-{name} canvas") > 300, name
        assert page.locator(f"#chart-{name} .empty").is_hidden(), name
    assert page.locator("#selection-maps figure").count() == 12
    assert inked(page, "#selection-maps figure canvas") > 100
    assert inked(page, "#distances canvas") > 300
    assert page.locator(".strip-row").count() == 2
    assert page.locator("#run-0 .pill").inner_text() == "healthy"
    assert "1,000 of 2,000 steps (50.0%)" in page.locator("#run-0").inner_text()


def test_the_head_and_the_legend_show_the_same_losses(tmp_path: Path, open_page: Open) -> None:
    run = demo(tmp_path, "--log-every", "1")
    while run.step < 1000:  # more lines than the chart has points
        run.advance()
    run.write_status("running")
    page = open_page(run)
    rows = read_rows(TrainingRow, run.folder / TRAINING)
    for tile, chart, value in (
        ("Loss", "loss", rows[-1].loss),
        ("Held-out", "val", read_rows(ValRow, run.folder / VAL)[-1].loss),
    ):
        legend = page.locator(f"#chart-{chart} .legend b")
        assert legend.inner_text() == f"{value:.4f}"
        shown = page.locator("#run-0 .tile", has=page.get_by_text(tile, exact=True)).inner_text()
        assert f"{value:.4f}" in shown
    page.locator("#smoothing").fill("0.9")
    smoothed = page.locator("#chart-loss .legend b").inner_text()
    assert smoothed.startswith(f"{rows[-1].loss:.4f}, smoothed ")


def test_the_page_follows_a_run_that_goes_on(tmp_path: Path, open_page: Open) -> None:
    run = demo(tmp_path)
    page = open_page(run)
    page.get_by_text("200 of 2,000 steps").wait_for()
    for _ in range(100):
        run.advance()
    run.write_status("running")
    page.get_by_text("300 of 2,000 steps").wait_for(timeout=20_000)
    append_alarm(run.folder, Alarm(type="loss_spike", text="<b>a spike</b> & more"))
    page.get_by_text("<b>a spike</b> & more").wait_for(timeout=20_000)


def test_the_log_and_the_samples_grow_and_are_never_markup(tmp_path: Path, open_page: Open) -> None:
    run = demo(tmp_path)
    for step in range(1000, 1300):
        run.printed.append(f"step {step} | loss 2.0")
    page = open_page(run)
    box = page.locator("#log-tail .log")
    place = "(box) => [box.scrollTop, box.scrollHeight - box.clientHeight]"
    assert box.locator("div").last.inner_text() == "step 1299 | loss 2.0"
    top, end = box.evaluate(place)
    assert end > 500 and top == pytest.approx(end, abs=2), "it follows the log"
    box.evaluate("(box) => { box.scrollTop = 100; }")
    page.get_by_role("button", name="To the end").wait_for()
    run.printed.append("<img src=x onerror=document.title='bad'> \x1b[31mred\x1b[0m")
    sample = Sample(ts=1.8e9, step=200, prompt="KING.\n", text="<script>no</script>\nend")
    append_sample(run.folder, sample)
    box.get_by_text("<img src=x onerror=document.title='bad'> red").wait_for(state="attached")
    assert box.evaluate(place)[0] == 100, "it stays where somebody reads"
    page.get_by_role("button", name="To the end").click()
    assert box.evaluate(place)[0] > end
    page.get_by_label("Show only lines with this text").fill("IMG")
    assert box.locator("div:visible").count() == 1
    assert page.locator("#log-tail .controls").inner_text().startswith("1 of 201 lines")
    text = page.locator("#samples .text")
    assert text.inner_text() == "KING.\n<script>no</script>\nend"
    assert text.locator(".prompt").inner_text().strip() == "KING."
    assert "step 200" in page.locator("#samples").inner_text()
    assert page.locator("#body img, #body script").count() == 0


def test_a_legend_unfolds_by_keyboard(runs: list[DemoRun], open_page: Open) -> None:
    page = open_page(*runs, size=NARROW)
    legend = page.locator("#chart-memory .legend")
    more, entries = legend.get_by_role("button"), legend.locator(".entry")
    assert entries.count() == 6 and more.inner_text() in ("+5 more", "+4 more")
    more.focus()
    page.keyboard.press("Enter")
    assert more.inner_text() == "less" and more.get_attribute("aria-expanded") == "true"
    box, last = legend.bounding_box(), entries.last.bounding_box()
    assert last["y"] + last["height"] <= box["y"] + box["height"] + 1, "all of them are in view"
    page.keyboard.press("Enter")
    assert legend.bounding_box()["height"] < 26


def test_a_run_that_died_says_what_to_do(tmp_path: Path, open_page: Open) -> None:
    run = demo(tmp_path, "--ranks", "1")
    (beats,) = tmp_path.glob("heartbeat_rank*.jsonl")
    beats.write_text(beats.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {dead_pid()}'))
    (tmp_path / "checkpoint_step150.pt").write_bytes(b"x")
    write_env(tmp_path, ["/opt/bin/nsa", "train", "--config", "base.yaml"])
    page = open_page(run, size=NARROW)
    card = page.locator("#run-0")
    assert card.locator(".pill").inner_text() == "died at step 200"
    assert card.locator("code").inner_text() == "nsa train --config base.yaml"
    said = card.locator(".next").inner_text()
    assert "goes on from the checkpoint of step 150: 50 steps are done again" in said
    card.get_by_role("link", name="log").click()
    assert page.locator("#log").bounding_box()["y"] < NARROW[1], "it is in view"
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW[0]


def test_three_runs_lie_side_by_side_and_can_be_hidden(
    runs: list[DemoRun], open_page: Open
) -> None:
    page = open_page(*runs)
    legend = page.locator("#chart-loss .legend")
    assert page.locator(".run").count() == 3
    for name in ("first", "second", "third"):
        assert name in legend.inner_text()
    page.get_by_label("Hide the curves of second").click()
    assert "second" not in legend.inner_text() and "third" in legend.inner_text()
    assert "env time" in page.locator("#settings-table").inner_text(), "they differ in that"


def test_the_pointer_reads_out_and_a_drag_zooms(runs: list[DemoRun], open_page: Open) -> None:
    page = open_page(runs[0])
    chart = page.locator("#chart-loss .plot")
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 60)
    hint = page.locator("#chart-toks .hint")
    hint.get_by_text("step").wait_for()
    assert page.locator("#chart-loss .hint").inner_text() == hint.inner_text(), (
        "all charts share it"
    )
    page.mouse.down()
    page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 60)
    page.mouse.up()
    reset = page.locator("#reset-zoom")
    reset.wait_for()
    chart.press("ArrowLeft")
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 60)
    step = int(page.locator("#chart-loss .hint").inner_text().split()[1].replace(",", ""))
    assert 75 < step < 170, "within what was dragged over"
    reset.click()
    assert reset.is_hidden()


@pytest.mark.parametrize(
    ("axis", "unit"), [("tokens", r"[\dkM] tokens$"), ("time", r"\d s$")], ids=["tokens", "time"]
)
def test_the_axis_counts_tokens_or_time_and_a_drag_zooms_there_too(
    runs: list[DemoRun], open_page: Open, axis: str, unit: str
) -> None:
    page = open_page(runs[0])
    box = page.locator("#chart-loss .plot").bounding_box()
    middle, hint = box["x"] + 0.5 * box["width"], page.locator("#chart-loss .hint")
    page.mouse.move(middle, box["y"] + 60)
    hint.get_by_text("step").wait_for()
    step = int(hint.inner_text().split()[1].replace(",", ""))
    page.locator("#axis").select_option(axis)
    page.mouse.move(middle + 1, box["y"] + 60)
    hint.get_by_text(re.compile(unit)).wait_for()
    if axis == "tokens":  # 10.2k tokens, say, are that many steps of 4096
        told = float(hint.inner_text().split()[0].rstrip("kM"))
        told *= {"k": 1e3, "M": 1e6}.get(hint.inner_text().split()[0][-1], 1)
        assert abs(told / runs[0].metrics.tokens_per_step - step) < 5
    page.mouse.down()
    page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 60)
    page.mouse.up()
    page.locator("#reset-zoom").wait_for()
    with page.expect_download() as waiting:
        page.get_by_title("Download Loss as CSV", exact=True).click()
    rows = waiting.value.path().read_text().splitlines()[1:]
    assert step - 10 <= int(rows[0].split(",")[1]) <= step + 20, "it begins where the drag did"
    page.locator("#axis").select_option("step")
    page.locator("#reset-zoom").wait_for(state="hidden")


def test_a_phone_reaches_every_section(runs: list[DemoRun], open_page: Open) -> None:
    page = open_page(runs[0], size=NARROW)
    links = page.locator("#sections a")
    assert links.count() >= 6
    links.get_by_text("Settings").click()
    section = page.locator("#settings").bounding_box()
    assert section["y"] < NARROW[1], "it is in view"


def test_a_chart_can_be_enlarged_and_its_points_downloaded(
    tmp_path: Path, runs: list[DemoRun], open_page: Open
) -> None:
    page = open_page(*runs[:2])
    chart = page.locator("#chart-loss")
    before = chart.bounding_box()
    page.get_by_title("Enlarge Loss", exact=True).click()
    large = chart.bounding_box()
    assert large["width"] > 1.8 * before["width"] and large["height"] > 1.3 * before["height"]
    with page.expect_download() as waiting:
        page.get_by_title("Download Loss as CSV", exact=True).click()
    waiting.value.save_as(tmp_path / "loss.csv")
    assert waiting.value.suggested_filename == "loss.csv"
    with (tmp_path / "loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows if row["line"].startswith("first")]
    assert {row["line"].split()[0] for row in rows} == {"first", "second"}
    assert steps[-1] == 200 and all(0 < float(row["value"]) < 10 for row in rows if row["value"])
    chart.locator("canvas").last.press("Escape")
    assert chart.bounding_box()["width"] == before["width"]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_nothing_sticks_out_in_either_theme(
    runs: list[DemoRun], open_page: Open, size: tuple[int, int], theme: str
) -> None:
    page = open_page(*runs, size=size, theme=theme)
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    heights = "(all) => all.map((legend) => legend.getBoundingClientRect().height)"
    legends = page.locator("article[id^=chart-] .legend").evaluate_all(heights)
    assert max(legends) < 26, "a legend has one line"
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 26)"
    assert dark == (theme == "dark")
    page.locator("#theme").click()  # auto, then light
    assert page.locator("html").get_attribute("data-theme") == "light"


def test_the_steps_of_maps_and_their_heads_can_be_chosen(
    runs: list[DemoRun], open_page: Open
) -> None:
    page = open_page(runs[0])
    slider = page.get_by_label("Step of the map")
    slider.focus()
    slider.press("Home")
    page.locator("#selection-maps .controls .number", has_text="1").wait_for()
    page.get_by_label("KV head").select_option("1")
    page.locator("#selection-maps canvas").nth(3).hover()
    assert "layer 2: queries" in page.locator("#selection-maps .hint").inner_text()


def test_a_token_opens_the_page_once_and_the_cookie_keeps_it_open(
    runs: list[DemoRun], open_page: Open
) -> None:
    page = open_page(runs[0], token="a-token-of-many-characters")
    page.get_by_label("Token").fill("wrong, but long enough")
    page.get_by_role("button", name="Open").click()
    page.get_by_label("Token").fill("a-token-of-many-characters")
    page.get_by_role("button", name="Open").click()
    page.locator("#link", has_text="live ").wait_for()
    assert "token" not in page.url
    page.reload()
    page.locator("#link", has_text="live ").wait_for()


def test_a_server_that_goes_away_is_said(runs: list[DemoRun], open_page: Open) -> None:
    page = open_page(runs[0])
    page.route("**/api/**", lambda route: route.abort())
    page.get_by_text("no answer").wait_for(timeout=10_000)
    box = page.locator("#chart-loss .plot").bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 60)
    page.mouse.up()
    page.locator("#reset-zoom").click()  # neither finds a server, and the page has no error


def test_an_empty_folder_is_a_page_too(tmp_path: Path, open_page: Open) -> None:
    class Empty:
        folder = tmp_path

    page = open_page(Empty())
    assert "no files of a run in this folder yet" in page.locator("#run-0").inner_text()
    assert page.locator("#chart-loss .empty").is_visible()
