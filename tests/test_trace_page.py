"""The page of ``openconv trace`` in a browser: it needs no network, and shows what openconv computed."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from openconv.cli import app
from openconv.cuda.device import device_for
from openconv.problem import DIRECTIONS, Problem
from openconv.trace import page as pages
from openconv.trace.model import totals
from openconv.trace.page import CHOICES, Choice, chosen_problem, page_data, write_page
from openconv.trace.tracers import TRACERS, reasons_against, trace_engine

DEVICE = device_for("sm_90a")
GIVEN = "fprop n1 c8 h12 w40 k8 r3 s3 pad1 f16 nhwc"
SMALL = ("image", ("6", "8")), ("filter", ("1", "3", "5")), ("stride", ("1", "2")), ("padding", ("0", "1")), (
    "dilation", ("1", "2")), ("groups", ("1", "depthwise"))  # fmt: skip
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
)  # fmt: skip


# -- the command ------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["trace", *arguments])


def test_the_command_writes_a_page(tmp_path):
    path = tmp_path / "page.html"
    found = run(GIVEN, "--engine", "cuda.igemm", "--alone", "-o", str(path))
    assert found.exit_code == 0, found.output
    assert "traces" in found.output
    text = path.read_text()
    assert "/*" not in text.split("<script")[0].replace("/* ", "")  # every part was put in its place
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((GIVEN, "--engine", "cuda.fft"), "there is no trace of cuda.fft"),
        ((GIVEN, "--engine", "cuda.none"), "there is no engine 'cuda.none'"),
        (("fprop c8 h6",), "error"),
        (("dgrad n1 c8 h6 w6 k8 r3 s3 stride2 f16 nhwc", "--engine", "cuda.tiled"), "stride is (2, 2)"),
        ((GIVEN, "--knobs", "rows=1"), "name it with --engine"),
        ((GIVEN, "--engine", "cuda.tiled", "--knobs", "rows=3"), "rows=3"),
        ((GIVEN, "--arch", "sm_1"), "sm_1"),
        ((GIVEN, "-o", "no/such/folder/page.html"), "there is no folder"),
        (("fprop n1 c8 d4 h6 w6 k8 t3 r3 s3",), "3 spatial axes"),
        (("fprop n1 c4 h6 w6 k4 r3 s3 complex64",), "no engine that can be traced takes"),
    ],
)
def test_errors_are_one_line(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    found = run(*arguments, "--alone")
    assert found.exit_code == 2
    assert words in found.output
    assert len(found.output.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


# -- the page ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A page with a smaller catalogue."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "CHOICES", tuple(Choice(c.key, c.label, dict(SMALL)[c.key]) for c in CHOICES))
        data = page_data(Problem.parse(GIVEN), DEVICE, engine="cuda.tiled", knobs="rows=1 filters=2")
    return write_page(tmp_path_factory.mktemp("trace") / "trace.html", data)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("there is no chromium, chromium-browser or google-chrome")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture
def opened(browser, written) -> Iterator[Callable[..., Any]]:
    """Opens the page at an address; afterwards nothing may have been fetched, logged or thrown."""
    contexts, troubles = [], []

    def open_page(address: str = "", path: Path | None = None, **options: Any) -> Any:
        context = browser.new_context(**({"viewport": {"width": 1400, "height": 900}} | options))
        contexts.append(context)
        shown, page = path or written, context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("request", lambda asked: None if asked.url.startswith(shown.as_uri()) else troubles.append(asked.url))
        page.goto(shown.as_uri() + address)
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [text for text in troubles if not text.startswith(("data:", "blob:"))] == []


def steps(page: Any) -> tuple[int, int]:
    """Which step is shown, and of how many."""
    words = page.inner_text("#count").replace(",", "").split()
    return int(words[1]), int(words[3])


def counters(page: Any) -> dict[str, float]:
    rows = page.eval_on_selector_all(
        "#counters tr[data-kind]", "rows => rows.map(row => [row.dataset.kind, row.lastElementChild.textContent])"
    )
    return {kind: float(text.replace(",", "")) for kind, text in rows}


def shown_cells(page: Any, role: str, kind: str) -> set[tuple[int, int]]:
    """The cells, row and column, that a path of the given kind covers in a tensor: those in which its parts begin."""
    paths = page.eval_on_selector_all(
        f'.tensor[data-role="{role}"] path.{kind}', "found => found.map(path => path.getAttribute('d'))"
    )
    found = set()
    for part in "".join(paths).split("M")[1:]:
        column, row = part.split("h")[0].split("v")[0].split("a")[0].split()
        found.add((int(np.floor(float(row))), int(np.floor(float(column)))))
    return found


CASES = [
    (name, direction, sizes)
    for name, direction in itertools.product(TRACERS, DIRECTIONS)
    for sizes in (
        ("8", "3", "1", "1", "1", "1"),
        ("8", "3", "2", "1", "1", "depthwise"),
        ("6", "3", "1", "1", "2", "1"),
    )
]


def test_counters_are_those_that_python_adds_up(opened):
    page, compared = opened(), 0
    for name, direction, sizes in CASES:
        problem = Problem.parse(chosen_problem(direction, sizes))
        chosen = "&".join(f"{choice.key}={value}" for choice, value in zip(CHOICES, sizes))
        page.evaluate(f"location.hash = 'pass={direction}&engine={name}&{chosen}&step=999999'")
        if reasons := reasons_against(problem, name, DEVICE):
            page.wait_for_function("!document.getElementById('refused').hidden")
            assert "; ".join(reasons) in page.inner_text("#refused")
            continue
        trace = trace_engine(problem, name, DEVICE)
        page.wait_for_function(f"document.getElementById('caption').textContent.includes('{problem}')")
        page.wait_for_function(f"document.getElementById('caption').textContent.includes('{name}')")
        count = sum(len(block.steps) for block in trace.blocks)
        assert steps(page) == (count, count)
        found, wanted = counters(page), totals(trace)
        for tensor, size in wanted.loaded.items():
            assert found[f"load {tensor}"] == size, f"{name} {problem}: {tensor}"
        for tensor, size in wanted.stored.items():
            assert found[f"store {tensor}"] == size, f"{name} {problem}: {tensor}"
        assert found.get("products", 0) == wanted.products
        assert found.get("points", 0) == wanted.points
        compared += 1
    assert compared > 25


def test_it_opens_with_the_problem_the_engine_and_the_knobs_that_were_asked_for(opened):
    page = opened()
    caption = page.inner_text("#caption")
    for words in ("cuda.tiled", GIVEN, "rows=1 filters=2", "kernels/tiled.cu", "grid 4 × 4", "32 × 8 threads"):
        assert words in caption
    assert page.locator("#knobs option").count() > 1
    page.select_option("#knobs", "1")
    assert "rows=1 filters=2" not in page.inner_text("#caption")
    assert "knobs=" in page.url


def test_steps_go_by_buttons_keys_slider_and_play(opened):
    page = opened("#engine=cuda.tiled&image=8")
    first, count = steps(page)
    assert first == 1
    assert page.is_disabled("#back")
    page.click("#forward")
    page.keyboard.press("ArrowRight")  # the focus is on a button, which has no use for arrows
    assert steps(page) == (3, count)
    page.keyboard.press("ArrowLeft")
    assert steps(page) == (2, count)
    page.keyboard.press("End")
    assert steps(page) == (count, count)
    assert page.is_disabled("#forward")
    page.keyboard.press("Home")
    page.click("#next-block")
    assert "block (0, 1)" in page.inner_text("#says")
    page.locator("#slider").fill("5")
    assert steps(page) == (5, count)
    assert "step=5" in page.url
    page.select_option("#speed", "30")
    page.click("h1")
    page.keyboard.press("Space")
    assert page.inner_text("#play") == "Pause"
    page.wait_for_function("document.getElementById('slider').value > 8")
    page.keyboard.press("Space")
    assert page.inner_text("#play") == "Play"
    now = steps(page)
    page.wait_for_timeout(150)
    assert steps(page) == now


def test_going_back_comes_to_the_same_as_going_forward(opened):
    page = opened("#engine=cuda.igemm_sm90&image=8&step=1")
    seen = []
    for _ in range(40):
        seen.append((page.inner_text("#says"), counters(page), page.inner_html("#tensors")))
        page.click("#forward")
    for was in reversed(seen):
        page.click("#back")
        assert (page.inner_text("#says"), counters(page), page.inner_html("#tensors")) == was


def test_the_address_leads_to_a_view_and_back(opened):
    page = opened("#pass=dgrad&engine=cuda.igemm&stride=2&step=3")
    assert page.get_attribute("#passes button[value=dgrad]", "aria-pressed") == "true"
    assert page.get_attribute("#engines button[value='cuda.igemm']", "aria-pressed") == "true"
    assert page.input_value("#stride") == "2"
    assert steps(page)[0] == 3
    again = opened(page.url[page.url.index("#") :])
    assert again.inner_text("#says") == page.inner_text("#says")
    page.evaluate("location.hash = 'pass=wgrad&engine=cuda.naive&image=6'")
    page.wait_for_function("document.getElementById('caption').textContent.includes('wgrad')")
    assert page.input_value("#image") == "6"


def test_an_address_that_makes_no_sense_shows_something(opened):
    page = opened("#pass=sideways&engine=cuda.none&image=7&stride=x&step=-5&result=-1&knobs=none")
    assert steps(page)[0] == 1
    assert "fprop" in page.inner_text("#caption")


def test_it_opens_with_an_engine_that_takes_the_problem(opened, tmp_path):
    data = page_data(Problem.parse("wgrad n2 c4 w13 k6 s3 stride2 pad1 g2 f32"), DEVICE, alone=True)
    page = opened(path=write_page(tmp_path / "line.html", data))
    assert "cuda.igemm on wgrad n2 c4 w13 k6 s3 stride2 pad1 g2 f32 nchw" in page.inner_text("#caption")
    assert page.is_hidden("#sizes")
    page.keyboard.press("End")
    assert counters(page)["products"] == totals(trace_engine(Problem.parse(page.evaluate(
        "document.querySelector('#caption code').textContent")), "cuda.igemm", DEVICE)).products  # fmt: skip


def test_refused_combinations_are_grey_and_say_why(opened):
    page = opened("#pass=dgrad&engine=cuda.tiled&stride=2&image=8")
    assert page.is_hidden("#stage")
    assert "a dgrad that is a fprop turned around needs (1, 1)" in page.inner_text("#refused")
    assert "refused" in page.get_attribute("#engines button[value='cuda.tiled']", "class")
    assert "cuda.winograd: stride is (2, 2)" in page.inner_text("#refusals")
    page.click("#engines button[value='cuda.igemm']")
    assert page.is_visible("#stage")
    assert page.is_hidden("#refused")
    page.select_option("#image", "6")
    page.select_option("#filter", "5")
    page.select_option("#dilation", "2")
    assert "at least the filter's reach of 9" in page.inner_text("#refused")
    page.select_option("#problem", "given")
    assert GIVEN.replace("fprop", "dgrad") in page.inner_text("#caption")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("engine", ["cuda.naive", "cuda.igemm"])
def test_pointing_at_a_result_lights_what_it_is_made_of(opened, direction, engine):
    page = opened(f"#pass={direction}&engine={engine}&image=8&stride=2&step=2")
    page.uncheck("#follow")
    page.select_option("#slice-c", "3")
    page.select_option("#slice-k", "5")
    box = page.locator("svg.result").bounding_box()
    rim = page.evaluate("document.querySelector('svg.result').viewBox.baseVal.x + 0")
    size = box["width"] / page.evaluate("document.querySelector('svg.result').viewBox.baseVal.width")
    row, column = 1, 2
    page.mouse.move(box["x"] + (column + 0.5 - rim) * size, box["y"] + (row + 0.5 - rim) * size)
    wanted: dict[str, set[tuple[int, int]]] = {"x": set(), "w": set(), "y": set()}
    # y[p, q] is the sum over r, s of x[2p - 1 + r, 2q - 1 + s] * w[r, s], of an image of 8 x 8.
    for p, q, r, s in itertools.product(range(4), range(4), range(3), range(3)):
        h, w = 2 * p - 1 + r, 2 * q - 1 + s
        if (
            0 <= h < 8
            and 0 <= w < 8
            and {"fprop": (p, q), "dgrad": (h, w), "wgrad": (r, s)}[direction] == (row, column)
        ):
            wanted["x"].add((h, w))
            wanted["w"].add((r, s))
            wanted["y"].add((p, q))
    tensors = {"fprop": ("x", "w"), "dgrad": ("y", "w"), "wgrad": ("x", "y")}[direction]
    name = {
        "fprop": f"y[0, 5, {row}, {column}]",
        "dgrad": f"dx[0, 3, {row}, {column}]",
        "wgrad": f"dw[5, 3, {row}, {column}]",
    }
    assert name[direction] in page.inner_text("#hovered")
    count = len(wanted[tensors[0]]) if direction == "wgrad" else 8 * len(wanted["w"])
    assert f"the sum of {count} product" in page.inner_text("#hovered")
    for role, tensor in zip("ab", tensors):
        drawn = page.eval_on_selector(f'.tensor[data-role="{role}"] path.win', "path => path.getAttribute('d')")
        assert inside(drawn) == wanted[tensor]
    page.mouse.down()
    page.mouse.up()
    page.mouse.move(5, 5)
    assert name[direction] in page.inner_text("#hovered")  # a click keeps it
    assert "result=" in page.url
    page.keyboard.press("Escape")
    assert "Point at a result" in page.inner_text("#hovered")


def inside(border: str) -> set[tuple[int, int]]:
    """The cells within a border of unit lines: those to the right of an odd number of its upright lines."""
    upright = set()
    for part in border.split("M")[1:]:
        if "v1" in part:
            column, row = part.split("v")[0].split()
            upright.add((int(row), int(column)))
    return {
        (row, column)
        for row, column in itertools.product(range(20), range(20))
        if sum(line == row and at <= column for line, at in upright) % 2
    }


def test_results_take_the_keyboard(opened):
    page = opened("#engine=cuda.tiled&image=8&step=4")
    page.focus("svg.result")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert "y[0, 0, 1, 1]" in page.inner_text("#hovered")
    assert steps(page)[0] == 4
    page.keyboard.press("Enter")
    page.click("h1")
    assert "y[0, 0, 1, 1]" in page.inner_text("#hovered")


def test_threads_are_those_of_the_kernel(opened):
    # tiled.cu: thread (x, y) owns column x and rows y*rows ... of a tile; naive.cu: thread i has result i in memory.
    page = opened("#engine=cuda.tiled&step=2")  # rows=1
    page.focus("svg.result")
    for key in ("ArrowRight", *["ArrowRight"] * 3, "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    assert "y[0, 0, 2, 3]" in page.inner_text("#hovered")
    assert "thread (3, 2)" in page.inner_text("#hovered")
    page = opened("#engine=cuda.naive&image=8&step=2&result=19")  # y[0, 0, 2, 3]; in nhwc (2 * 8 + 3) * 8
    assert "y[0, 0, 2, 3]" in page.inner_text("#hovered")
    assert "block 0 of naive, thread 152" in page.inner_text("#hovered")


def test_the_step_is_what_lies_in_shared_memory(opened):
    page = opened("#engine=cuda.tiled&image=8&step=1")
    assert "tile: x, 10 × 34" in " ".join(page.inner_text("#slots").split())
    assert shown_cells(page, "a", "new") == set(itertools.product(range(8), range(8)))
    assert shown_cells(page, "a", "dots") == set()
    page.click("#forward")
    assert shown_cells(page, "a", "shared") == set(itertools.product(range(8), range(8)))
    # Column s = 0 of the filter meets columns 0 to 6 of x: the first output's is padding.
    assert shown_cells(page, "a", "dots") == set(itertools.product(range(8), range(7)))
    assert shown_cells(page, "b", "dots") == {(0, 0), (1, 0), (2, 0)}


def test_algorithms_are_compared(opened):
    page = opened("#engine=cuda.naive&image=8")
    page.wait_for_function("document.querySelectorAll('#comparison td.n').length === 30")
    rows = dict(page.eval_on_selector_all(
        "#comparison tr[data-engine]", "rows => rows.map(row => [row.dataset.engine, row.children[2].textContent])"
    ))  # fmt: skip
    for name in TRACERS:
        problem = Problem.parse(chosen_problem("fprop", ("8", "3", "1", "1", "1", "1")))
        assert int(rows[name].replace(",", "")) == sum(totals(trace_engine(problem, name, DEVICE)).loaded.values())


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_it_is_light_or_dark_and_fits_a_phone(opened, tmp_path, scheme):
    for engine in TRACERS:
        page = opened(
            f"#engine={engine}&step=4", viewport={"width": 420, "height": 800}, color_scheme=scheme, is_mobile=True
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= 420, engine
        colours = page.evaluate(
            "(() => { const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]; })()"
        )
        back, text = (sum(int(v) for v in colour[4:-1].split(",")) for colour in colours)
        assert (back > text) is (scheme == "light")
    page.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)


def test_everything_that_acts_has_a_name(opened):
    page = opened("#engine=cuda.tiled&image=8")
    nameless = page.evaluate("""[...document.querySelectorAll("button, select, input")].filter((node) =>
        !(node.getAttribute("aria-label") || node.textContent.trim() || (node.labels && node.labels.length))).length""")
    assert nameless == 0
    page.keyboard.press("Tab")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"


def test_text_of_the_data_stays_text(opened, written, tmp_path):
    evil = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
    data = page_data(Problem.parse("fprop n1 c1 h3 w3 k1 r1 s1 f32"), DEVICE, alone=True)
    data["pools"]["texts"] = [f"{text}{evil}" if " " in text else text for text in data["pools"]["texts"]]
    for given in data["given"].values():
        given["facts"]["text"] = evil
    page = opened(path=write_page(tmp_path / "evil.html", data))
    assert evil in page.inner_text("#caption")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0


@pytest.mark.slow
def test_the_whole_catalogue_is_small(opened, tmp_path):
    seen: list[tuple[int, int]] = []
    data = page_data(Problem.parse(GIVEN), DEVICE, progress=lambda done, of: seen.append((done, of)))
    assert seen[-1][0] == seen[-1][1] == len(seen)
    path = write_page(tmp_path / "whole.html", data)
    assert path.stat().st_size < 2_000_000
    page = opened("#image=12x40&filter=5&stride=2&padding=2&dilation=2&groups=2&pass=wgrad&engine=cuda.igemm", path)
    assert "wgrad n1 c8 h12 w40 k8 r5 s5 stride2 pad2 dil2 g2 f16 nhwc" in page.inner_text("#caption")
