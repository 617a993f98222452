"""The page of a report in a browser: it needs no network, follows its filters, and runs nothing from the records."""

from __future__ import annotations

import math
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from openconv.bench.report import Run, write_page
from openconv.bench.report.runs import base_name
from openconv.bench.results import Record, geometric_mean
from openconv.problem import Problem

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
)  # fmt: skip
ENGINES = ("cuda.direct", "cuda.gemm", "cuda.gemm[tile=64]")
CEILINGS = {"copy": 3e12, "f32": 5e13, "f16": 7e14}
MACHINE = {
    "kind": "cuda", "device": "Some GPU", "threads": 1, "torch": "2.13", "cuda": "13.0", "openconv": "0.2",
    "commit": "abcdef0123", "command": "openconv bench some --device cuda",
}  # fmt: skip


def made(at: int, rnd: random.Random) -> Record:
    """A record of some layer, with every field filled in."""
    direction, dtype = rnd.choice(("fprop", "dgrad", "wgrad")), rnd.choice(("f32", "f16"))
    c, r, size = rnd.choice((16, 64, 256)), rnd.choice((1, 3, 7)), rnd.choice((7, 28, 112))
    depthwise = f" g{c}" if rnd.random() < 0.3 else ""
    layout = rnd.choice(("nchw", "nhwc"))
    text = f"{direction} n8 c{c} h{size} w{size} k{c} r{r} s{r} pad{r // 2}{depthwise} {dtype} {layout}"
    problem = Problem.parse(text)
    floor = max(problem.flops / CEILINGS[dtype], problem.min_bytes / CEILINGS["copy"])
    seconds = {}
    for name in (*ENGINES, "torch", "cudnn"):
        median = (floor + 3e-6) * math.exp(rnd.gauss(0.8, 0.5))
        seconds[name] = {"median": median, "p20": 0.97 * median, "p80": 1.04 * median}
    chosen = rnd.choice(ENGINES)
    wrong = [chosen] if at % 50 == 7 else []
    for name in wrong:
        del seconds[name]
    return Record(
        rnd.choice(("resnet50", "vgg16", "unet")), f"layer{at}", str(problem), chosen, seconds,
        {name: took["median"] for name, took in seconds.items() if "." in name},
        dict.fromkeys(seconds, 1.5e-7), wrong, MACHINE, heuristic="cuda.direct", source="database",
        knobs={"cuda.gemm[tile=64]": "tile=64"}, workspace={chosen: 1 << 20}, ceilings=CEILINGS,
        roofline={name: floor / took["median"] for name, took in seconds.items()}, overhead={"torch": 4.2e-6},
        notes={"cudnn": "plan 3 of 12"},
    )  # fmt: skip


def made_run(count: int, name: str = "cuda-a", seed: int = 0) -> Run:
    rnd = random.Random(seed)
    return Run(name, [made(at, rnd) for at in range(count)])


RUNS = [made_run(240), made_run(60, "cuda-b", seed=1)]
RECORDS = [(at, record) for at, run in enumerate(RUNS) for record in run.records]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("there is no chromium, chromium-browser or google-chrome")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture
def opened(browser, tmp_path) -> Iterator[Callable[..., Any]]:
    """Opens the page of some runs; afterwards nothing may have been fetched, logged or thrown."""
    contexts, troubles = [], []

    def open_page(runs: list[Run], **options: Any) -> Any:
        path = write_page(tmp_path / "report.html", runs)
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("request", lambda request: troubles.append(request.url) if request.url != path.as_uri() else None)
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [text for text in troubles if not text.startswith("data:")] == []


def summary(page: Any) -> tuple[int, float, int]:
    """Count, geometric mean and number of slower ones, as the page says."""
    found = page.evaluate("({...document.getElementById('summary').dataset})")
    return int(found["count"]), float(found["mean"]), int(found["slower"])


def expected(keep: Callable[[int, Record], bool], peer: str = "torch", engine: str | None = None) -> Any:
    """The same numbers from the records."""
    kept = [record for at, record in RECORDS if keep(at, record)]
    ratios = [value for record in kept if (value := record.ratio(peer, engine))]
    mean = geometric_mean(ratios)
    assert mean is not None
    return len(kept), pytest.approx(mean, rel=1e-4), sum(value < 1 for value in ratios)


def column(page: Any, name: str) -> list[str]:
    """The cells of a column of the table."""
    at = page.evaluate(
        f"""[...document.querySelectorAll("#problems th")].findIndex(h => h.dataset.column === "{name}")"""
    )
    return page.eval_on_selector_all(
        f"#problems tbody td:nth-child({at + 1})", "found => found.map(c => c.textContent)"
    )


def test_the_page_opens_with_everything(opened):
    page = opened(RUNS)
    assert summary(page) == expected(lambda at, record: True)
    assert "300 of 300 problems" in page.inner_text("#summary")
    assert page.locator("svg.canvas").count() == 3
    assert page.locator("#problems tbody tr").count() == 100
    assert "1 to 100 of 300" in page.inner_text("#page")
    page.click("#next")
    page.click("#next")
    assert "201 to 300 of 300" in page.inner_text("#page")
    assert page.is_disabled("#next")


@pytest.mark.parametrize(
    ("control", "value", "keep"),
    [
        ("machine", "1", lambda at, r: at == 1),
        ("suite", "vgg16", lambda at, r: r.suite == "vgg16"),
        ("direction", "wgrad", lambda at, r: r.parsed().direction == "wgrad"),
        ("dtype", "f16", lambda at, r: r.parsed().dtypes[0] == "f16"),
        ("layout", "nhwc", lambda at, r: r.parsed().layouts[0] == "nhwc"),
        ("engine", "cuda.gemm", lambda at, r: base_name(r.chosen) == "cuda.gemm"),
    ],
)
def test_filters_and_the_summary_agree_with_the_records(opened, control, value, keep):
    page = opened(RUNS)
    page.select_option(f"#{control}", value)
    assert summary(page) == expected(keep)
    page.click("#reset")
    assert summary(page) == expected(lambda at, record: True)


def test_filters_work_together(opened):
    page = opened(RUNS)
    page.select_option("#suite", "unet")
    page.select_option("#direction", "fprop")
    page.check("#losses")

    def keep(at: int, record: Record) -> bool:
        ratio = record.ratio("torch")
        loses = ratio < 1 if ratio else record.chosen in record.wrong
        return record.suite == "unet" and record.parsed().direction == "fprop" and loses

    assert summary(page) == expected(keep)
    assert all(float(text) < 1 for text in column(page, "ratio") if text)


def test_search_wants_all_words(opened):
    page = opened(RUNS)
    page.fill("#search", "C64 pad1")
    page.wait_for_selector("#summary:not([data-count='300'])")
    assert summary(page) == expected(lambda at, r: " c64 " in r.problem and " pad1 " in r.problem)
    page.fill("#search", "nothing like this")
    page.wait_for_selector("#summary[data-count='0']")
    assert page.locator("svg.canvas").count() == 0
    assert "nothing" in page.inner_text("#page")


def test_ratios_refer_to_the_peer_and_the_contestant_that_are_picked(opened):
    page = opened(RUNS)
    page.select_option("#peer", "cudnn")
    assert summary(page) == expected(lambda at, record: True, peer="cudnn")
    page.select_option("#contestant", "cuda.direct")
    assert summary(page) == expected(lambda at, record: True, peer="cudnn", engine="cuda.direct")
    assert "x cudnn" in page.inner_text("#problems thead")


def test_headings_sort_and_sort_back(opened):
    page = opened(RUNS)
    ratios = [float(text) for text in column(page, "ratio")]
    assert ratios == sorted(ratios)  # the losses first
    page.click("th[data-column=ratio] button")
    ratios = [float(text) for text in column(page, "ratio")]
    assert ratios == sorted(ratios, reverse=True)
    assert page.get_attribute("th[data-column=ratio]", "aria-sort") == "descending"
    page.focus("th[data-column=suite] button")
    page.keyboard.press("Enter")
    suites = column(page, "suite")
    assert suites == sorted(suites)
    assert page.get_attribute("th[data-column=suite]", "aria-sort") == "ascending"
    assert page.get_attribute("th[data-column=ratio]", "aria-sort") == "none"


def test_wrong_results_are_shown(opened):
    page = opened(RUNS)
    wrong = sum(bool(record.wrong) for _, record in RECORDS)
    assert f"{wrong} with a wrong result" in page.inner_text("#summary")
    page.check("#losses")
    page.click("th[data-column=engine] button")
    before = page.get_attribute("#summary", "data-count")
    page.fill("#search", RECORDS[7][1].label)
    page.wait_for_selector(f"#summary:not([data-count='{before}'])")
    assert any("WRONG" in text for text in column(page, "engine"))


def mark_of(page: Any, chart: str) -> tuple[float, float]:
    """Where the first mark of a chart is, found by keyboard."""
    page.focus(f"#{chart} svg.canvas")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    box = page.locator(f"#{chart} .ring").bounding_box()
    page.keyboard.press("Escape")
    assert page.is_hidden("#details")
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


@pytest.mark.parametrize("chart", ["ratio", "roofline", "growth"])
def test_pointing_at_a_mark_shows_all_of_its_record(opened, chart):
    page = opened(RUNS)
    record = next(record for _, record in RECORDS if not record.wrong)
    page.fill("#search", f"{record.label} {record.problem}")
    page.wait_for_selector("#summary[data-count='1']")
    x, y = mark_of(page, chart)
    page.mouse.move(x + 2, y + 1)
    page.wait_for_selector("#details", state="visible")
    text = page.inner_text("#details")
    ratio = record.ratio("torch")
    for part in (
        record.problem, record.chosen, record.label, f"{ratio:.2f}x torch", "tile=64", "cuda.direct", "cudnn",
        "p20 to p80", "1.5e-7", "of roofline", "1.05 MB", "4.20 us", "database", "plan 3 of 12", "abcdef0123",
        "openconv bench some --device cuda", "torch 2.13", "cuda 13.0", "copy 3.00 TB/s", "predicted",
    ):  # fmt: skip
        assert part in text, part
    page.mouse.click(x + 2, y + 1)
    page.mouse.move(5, 5)
    assert page.is_visible("#details")  # a click keeps it
    page.click("#details .close")
    assert page.is_hidden("#details")


def test_rows_and_charts_take_the_keyboard(opened):
    page = opened(RUNS)
    page.focus("#problems th:last-child button")
    page.keyboard.press("Tab")
    assert page.is_visible("#details")
    first = page.inner_text("#details h3")
    assert first == column(page, "problem")[0]
    page.keyboard.press("Escape")
    assert page.is_hidden("#details")
    page.focus("#growth svg.canvas")
    page.keyboard.press("ArrowRight")
    one = page.inner_text("#details h3 >> nth=0")
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#details h3") != one
    page.keyboard.press("Enter")
    assert "pinned" in page.get_attribute("#details", "class")


def test_speed_can_be_measured_in_bytes(opened):
    page = opened(RUNS)
    assert "FLOP/s" in page.locator("#growth svg.canvas").text_content()
    page.select_option("#measure", "bytes")
    assert "reached, bytes/s" in page.locator("#growth svg.canvas").text_content()


def test_text_from_the_records_stays_text(opened):
    evil = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1><!--<script>"
    source = RUNS[0].records[0]
    seconds = {f"cpu.{evil}": source.seconds["torch"], f"peer{evil.replace('.', '')}": source.seconds["torch"]}
    record = Record(
        evil, evil, source.problem, f"cpu.{evil}", seconds, {f"cpu.{evil}": 1.0}, {evil: math.nan}, [evil],
        {"device": evil, "torch": "&lt;b&gt;", evil: {"x": evil}}, heuristic=evil, source=evil,
        knobs={evil: evil}, workspace={evil: 3}, ceilings={"copy": math.inf, evil: 2.0}, notes={evil: evil},
    )  # fmt: skip
    page = opened([Run(evil, [record])])
    page.click("#problems tbody tr")
    assert evil in page.inner_text("#details")
    assert "&lt;b&gt;" in page.inner_text("#details")
    assert column(page, "suite") == [evil]
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2


def test_peers_alone_make_a_page_too(opened):
    source = RUNS[0].records[0]
    seconds = {name: source.seconds[name] for name in ("torch", "cudnn")}
    page = opened([Run("cuda-x", [Record("some", "a", source.problem, "", seconds, {}, {})])])
    assert "none has times of both openconv and torch" in page.inner_text("#summary")
    assert page.locator("svg.canvas").count() == 2
    page.select_option("#contestant", "cudnn")
    assert page.locator("svg.canvas").count() == 3


def test_thousands_of_records_stay_quick(opened):
    runs = [made_run(4000)]
    began = time.perf_counter()
    page = opened(runs)
    assert summary(page)[0] == 4000
    assert time.perf_counter() - began < 20  # a machine under load; about one second otherwise
    took = page.evaluate("""() => {
        const began = performance.now();
        for (const [id, value] of [["suite", "vgg16"], ["suite", ""], ["direction", "fprop"], ["direction", ""]]) {
            document.getElementById(id).value = value;
            document.getElementById(id).dispatchEvent(new Event("change"));
        }
        document.querySelector("th[data-column=time] button").click();
        return (performance.now() - began) / 5;
    }""")
    assert took < 500
    assert page.locator("#problems tbody tr").count() == 100
    assert Path(page.url.removeprefix("file://")).stat().st_size < 8e6


def test_a_phone_shows_it_without_scrolling_sideways(opened, tmp_path):
    page = opened(RUNS, viewport={"width": 375, "height": 740}, is_mobile=True, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    page.tap("#problems tbody tr")
    box = page.locator("#details").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 375
    assert box["y"] + box["height"] == pytest.approx(740, abs=1)
    page.screenshot(path=tmp_path / "phone.png")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_light_or_dark_as_the_reader_likes(opened, tmp_path, scheme):
    page = opened(RUNS, color_scheme=scheme)
    colours = page.evaluate("""(() => { const style = getComputedStyle(document.body);
        return [style.backgroundColor, style.color]; })()""")
    back, text = ([int(v) for v in colour[4:-1].split(",")] for colour in colours)
    assert (sum(back) > sum(text)) is (scheme == "light")
    assert abs(sum(back) - sum(text)) > 450
    page.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
