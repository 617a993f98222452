"""Errors against float64 and the map of the fastest engine: measured, recorded, drawn, and put into the documents."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from typer.testing import CliRunner, Result

from openconv.bench.errors import (
    FILE_NAME,
    ROUNDED,
    ErrorLedger,
    ErrorRecord,
    computed_dtypes,
    error_problems,
    measure_errors,
    read_errors,
    terms_of,
)
from openconv.bench.report import Run, load, write_documents, write_plots
from openconv.bench.report.documents import picture_sources
from openconv.bench.report.drawing import looks
from openconv.bench.report.errors import draw_errors
from openconv.bench.report.winners import draw_winners
from openconv.bench.results import Record, read, write
from openconv.bench.run import Limits, measure
from openconv.cli import app
from openconv.engine import engines
from openconv.plan import device_of
from openconv.problem import DIRECTIONS, Problem
from openconv.reference import Inputs, Reference, expected, random_inputs

CPU = torch.device("cpu")
TINY = Problem.parse("fprop n1 c3 h6 w7 k4 r3 s3 pad1 f32 nchw")
MACHINE = {"kind": "cpu", "device": "Some CPU", "isa": "AVX2", "threads": 2, "torch": "2.0"}
ROOT = Path(__file__).parents[1]


def openconv(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


# -- the distance to float64 ------------------------------------------------------------------------------------------


def test_a_distance_is_that_of_the_whole_result():
    x, w = torch.tensor([[[3.0, -1.0, 2.0]]]), torch.tensor([[[2.0]]])
    problem = Problem.parse("fprop n1 c1 w3 k1 s1 f32 nchw")
    reference = Reference(problem, Inputs(x, w))
    found = reference.distance(torch.tensor([[[6.0, -2.0, 5.0]]]))  # 1 off in one of three, whose sizes reach 6
    assert (found.rms, found.max) == pytest.approx(((1 / 3) ** 0.5 / 6, 1 / 6))
    assert found.l2 == pytest.approx(1 / (36 + 4 + 16) ** 0.5)
    assert reference.distance(torch.tensor([[[6.0, -2.0, torch.nan]]])).max == torch.inf
    assert reference.rounding(torch.float32).max == 0


def test_nothing_is_nearer_than_float64_rounded():
    inputs = random_inputs(TINY)
    reference = Reference(TINY, inputs)
    exact = expected(TINY, inputs)
    floor = reference.rounding(torch.float32)
    assert floor == reference.distance(exact.float())
    assert 0 < floor.max < 2**-24
    assert 0 < floor.l2 < 2**-24
    assert reference.distance(exact.half()).l2 > 1000 * floor.l2


def test_a_sample_of_a_large_problem_tells_much_the_same():
    problem = TINY.with_(n=8, c=16, k=16)
    inputs = random_inputs(problem)
    got = expected(problem, inputs).half().float()
    whole = Reference(problem, inputs).distance(got)
    part = Reference(problem, inputs, most_macs=1e5).distance(got)
    assert part != whole
    assert part.l2 == pytest.approx(whole.l2, rel=0.2)


# -- the problems -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sums_grow_with_what_is_summed_over_and_work_stays_small(direction):
    found = list(error_problems((4, 1024), [direction], ["f32"]))
    assert {p.direction for p in found} == {direction}
    assert {p.rank for p in found} == {1, 2}
    assert any(p.is_depthwise for p in found)
    lengths = [terms_of(p) for p in found]
    assert max(lengths) >= 256 * min(lengths)
    assert max(p.macs for p in found) < 3e8
    assert len({*found}) == len(found)


def test_lengths_are_those_of_the_sums():
    for direction, length in (("fprop", 3 * 9), ("dgrad", 4 * 9), ("wgrad", 6 * 7)):
        assert terms_of(TINY.with_(direction=direction)) == length


def test_a_cpu_computes_f32_and_casts_what_is_shorter():
    assert computed_dtypes(CPU) == ["f32"]


# -- measured and recorded ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_engine_that_accepts_is_compared(direction):
    problem = TINY.with_(direction=direction)
    found = measure_errors(problem, CPU)
    assert {"cpu.naive", "cpu.im2col_gemm", "torch", ROUNDED} <= set(found.error)
    assert found.wrong == []
    assert set(found.allowed) == {name for name in found.error if "." in name}
    for name, error in found.error.items():
        assert found.error[ROUNDED]["max"] <= error["max"] < 1e-6, name
        assert error["rms"] <= error["max"]
    assert found.machine["threads"] == torch.get_num_threads()


def test_only_what_is_named_or_quick_takes_part():
    assert set(measure_errors(TINY, CPU, only=["cpu.naive"]).error) == {"cpu.naive", "torch", ROUNDED}
    found = measure_errors(TINY, CPU, longest=0.0)
    assert set(found.error) == {"torch", ROUNDED}
    assert "at most 0 s are waited for" in found.notes["cpu.naive"]


def test_what_is_beyond_its_bound_is_wrong(monkeypatch):
    monkeypatch.setattr("openconv.bench.errors.allowed_error", lambda *_: 1e-12)
    assert "cpu.im2col_gemm" in measure_errors(TINY, CPU).wrong


def test_records_replace_those_of_the_same_problem_and_damage_is_named(tmp_path):
    path = tmp_path / "deep" / FILE_NAME
    assert read_errors(path) == []
    first, second = made("fprop", 9), made("wgrad", 64)
    ledger = ErrorLedger(path)
    ledger.add(first)
    ledger.add(second)
    better = dataclasses.replace(first, notes={"torch": "was away"})
    ErrorLedger(path).add(better)
    assert read_errors(path) == [better, second]
    for line, words in (
        ("{", "line 3: "),
        ('{"problem": "fprop"}', "line 3: not a record of errors"),
        (json.dumps(json.loads(first.to_json()) | {"terms": 0}), "line 3: terms are not above 0"),
        (json.dumps(json.loads(first.to_json()) | {"problem": "forward"}), "line 3: .*'forward'"),
    ):
        path.write_text(f"{first.to_json()}\n{second.to_json()}\n{line}\n")
        with pytest.raises(ValueError, match=words):
            read_errors(path)


# -- drawn ------------------------------------------------------------------------------------------------------------


def made(direction: str, terms: int, dtype: str = "f32", **errors: float) -> ErrorRecord:
    """A record of made-up errors: of two engines and torch, unless told."""
    names = {name.replace("cpu_", "cpu."): value for name, value in errors.items()}
    names = names or {"cpu.direct": 3e-7, "cpu.new": 1e-6, "torch": 2e-7, ROUNDED: 1e-8}
    error = {name: {"rms": value, "max": 3 * value, "l2": 2 * value} for name, value in names.items()}
    problem = TINY.with_(direction=direction, c=terms, dtypes=(dtype,) * 3)
    return ErrorRecord(str(problem), terms, error, machine=MACHINE)


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_figure_has_a_panel_for_each_pass_and_measure_and_a_line_for_each_engine():
    records = [made(direction, terms) for direction in DIRECTIONS for terms in (9, 10, 100)]
    records += [made("fprop", 1000, cpu_direct=0.0, torch=float("inf"), rounded=1e-9)]
    figure = draw_errors(records, "Some CPU")["errors"]
    assert len(figure.axes) == 9
    assert legend(figure) == ["cpu.direct", "cpu.new", "torch", "float64, rounded"]
    lines: dict[Any, Any] = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert list(lines["cpu.new"].get_xdata()) == pytest.approx([90**0.5, 100])  # 9 and 10 lie in one octave
    assert list(lines["cpu.direct"].get_ydata()) == pytest.approx([3e-7, 3e-7])  # an exact result has no place
    assert list(lines["float64, rounded"].get_ydata()) == pytest.approx([1e-8, 1e-8, 1e-9])
    below: dict[Any, Any] = {line.get_label(): line for line in figure.axes[6].get_lines()}
    assert below["torch"].get_ydata()[0] == pytest.approx(4e-7)


def test_each_dtype_has_a_figure_of_its_own():
    found = draw_errors([made("fprop", 9), made("fprop", 9, "bf16")], "Some CPU")
    assert list(found) == ["errors", "errors-bf16"]
    assert draw_errors([], "Some CPU") == {}


def test_engines_have_looks_of_their_own():
    names = [f"cpu.engine{at}" for at in range(20)]
    found = looks(names)
    assert len({(look.colour, look.hatch) for look in found.values()}) == 20
    assert list(looks(["cpu.new", "cpu.naive", "cpu.filter2d"])) == ["cpu.filter2d", "cpu.naive", "cpu.new"]


def timed(problem: str, **milliseconds: float) -> Record:
    seconds = {name.replace("cpu_", "cpu."): {"median": v / 1e3} for name, v in milliseconds.items()}
    return Record("map", "cell", problem, "cpu.a", seconds, {}, {}, machine=MACHINE)


CELLS = [
    timed("fprop n1 c4 h8 w8 k4 r1 s1 f32 nchw", cpu_a=1, cpu_b=2, torch=3),
    timed("fprop n1 c4 h8 w8 k4 r3 s3 pad1 f32 nchw", cpu_a=4, cpu_b=2, torch=1),
    timed("fprop n1 c16 h8 w8 k16 r3 s3 pad1 f32 nchw", cpu_a=1, cpu_b=2),
    timed("wgrad n1 c16 h8 w8 k16 r3 s3 pad1 f32 nhwc", cpu_a=1, torch=40),
    timed("fprop n1 c16 h8 w8 k16 r3 s3 pad1 g16 f32 nchw", cpu_c=1, torch=1.04),
]


def test_the_map_shows_the_fastest_engine_of_each_cell():
    figure = draw_winners(Run("cpu-x", CELLS))
    assert figure is not None
    assert legend(figure) == ["cpu.a", "cpu.b", "cpu.c"]
    assert figure.legends[0].get_title().get_text().split("\n") == [
        "number: times as fast as torch",
        "framed: torch is faster",
        "in brackets: over the runner-up, torch was not timed",
    ]
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    assert len(figure.axes) == 2 * 3  # two passes; dense in both layouts, and depthwise
    dense = figure.axes[0]
    assert dense.get_title() == "dense, nchw"
    assert [text.get_text() for text in dense.texts] == ["3.0", "0.50", "(2.0)"]
    cells: list[Any] = [patch for patch in dense.patches if isinstance(patch, Rectangle)]
    look = looks(["cpu.a", "cpu.b", "cpu.c"])
    assert [(c.get_label(), to_hex(c.get_facecolor())) for c in cells if c.get_fill()] == [
        (name, look[name].colour) for name in ("cpu.a", "cpu.b", "cpu.a")
    ]
    assert sum(not c.get_fill() for c in cells) == 1  # the frame of the loss
    assert [text.get_text() for axes in figure.axes for text in axes.texts].count("40") == 1


def test_a_single_call_of_torch_is_marked_as_one(monkeypatch):
    small = Problem.parse("fprop n1 c4 h8 w8 k4 r3 s3 pad1 f32 nchw")
    monkeypatch.setattr("openconv.bench.run._once", lambda call, place, longest: (call(), 99.0))
    found = measure("map", "cell", small, CPU, Limits(budget=0.001, peers=("torch",)))
    figure = draw_winners(Run("cpu-x", [found]))
    assert figure is not None
    assert [text.get_text()[-1] for text in figure.axes[0].texts] == ["*"]
    assert "*: by a single call of torch, not verified" in figure.legends[0].get_title().get_text()


def test_the_map_is_drawn_of_its_own_suite_alone():
    other = [dataclasses.replace(record, suite="some") for record in CELLS]
    assert draw_winners(Run("cpu-x", other)) is None
    chosen = timed("fprop n1 c4 h8 w8 k4 r1 s1 f32 nchw", cpu_b=3, torch=3)
    tuned = dataclasses.replace(chosen, seconds=chosen.seconds | {"cpu.a[block=8]": {"median": 1e-3}})
    figure = draw_winners(Run("cpu-x", [tuned]))
    assert figure is not None
    assert "cpu.a" in legend(figure)


# -- reports and documents ----------------------------------------------------------------------------------------


def test_a_run_holds_the_errors_beside_its_records(tmp_path):
    write(tmp_path / "cpu-x" / "map.jsonl", CELLS)
    ErrorLedger(tmp_path / "cpu-x" / FILE_NAME).add(made("fprop", 9))
    run = load([tmp_path])[0]
    assert (len(run.records), run.errors) == (len(CELLS), [made("fprop", 9)])
    assert run.only(["map"], ["fprop"]).errors == run.errors
    names = [path.name for path in write_plots(run, tmp_path)]
    assert {"cpu-x-map.png", "cpu-x-errors.png"} <= set(names)


def test_errors_alone_are_drawn(tmp_path):
    ErrorLedger(tmp_path / "cpu-x" / FILE_NAME).add(made("fprop", 9))
    for what in (tmp_path, tmp_path / "cpu-x" / FILE_NAME):
        assert load([what])[0].title == "Some CPU, AVX2, 2 threads, torch 2.0"
    done = openconv("report", tmp_path, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["cpu-x-errors.png"]


@pytest.mark.usefixtures("one_engine")
def test_documents_show_the_pictures_of_machines_that_have_them(tmp_path):
    folder = tmp_path / "benchmarks" / "results"
    (tmp_path / "README.md").write_text("<!-- begin results -->\n<!-- end results -->\n")
    write(folder / "cpu-x" / "map.jsonl", CELLS)
    write(folder / "cpu-bare" / "some.jsonl", [dataclasses.replace(record, suite="some") for record in CELLS])
    ErrorLedger(folder / "cpu-x" / FILE_NAME).add(made("fprop", 9))
    stale = tmp_path / "docs" / "results" / "cpu-gone-map.png"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"")
    assert all(write_documents(tmp_path).values())
    assert not any(write_documents(tmp_path).values())
    assert {path.name for path in stale.parent.glob("*.png")} == {"cpu-x-map.png", "cpu-x-errors.png"}
    text = (tmp_path / "docs" / "results.md").read_text()
    assert "](results/cpu-x-map.png)" in text
    assert "](results/cpu-x-errors.png)" in text
    assert "cpu-bare-" not in text
    for run in load([folder]):
        for name, source in picture_sources(run).items():
            assert source.encode() in (stale.parent / name).read_bytes()
    ErrorLedger(folder / "cpu-x" / FILE_NAME).add(made("fprop", 99))
    changed = write_documents(tmp_path)
    assert [path.name for path in changed if changed[path]] == ["cpu-x-errors.png"]


def test_the_pictures_of_the_documents_are_those_of_the_records():
    wanted: dict[str, str] = {}
    for run in load([ROOT / "benchmarks" / "results"]):
        wanted |= picture_sources(run)
    folder = ROOT / "docs" / "results"
    assert {path.name for path in folder.glob("*.png")} == set(wanted), "run `make docs`"
    for name, source in wanted.items():
        assert source.encode() in (folder / name).read_bytes(), f"{name} is not of these records; run `make docs`"


# -- the commands -------------------------------------------------------------------------------------------------


def test_the_command_records_prints_and_draws(tmp_path):
    done = openconv(
        "bench-errors", "--channels", 4, "--channels", 8, "--direction", "fprop", "--out", tmp_path / "cpu-x",
        "--pictures", tmp_path / "pictures",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    records = read_errors(tmp_path / "cpu-x" / FILE_NAME)
    assert len(records) == len(list(error_problems((4, 8), ["fprop"], ["f32"])))
    for record in records:
        problem = Problem.parse(record.problem)
        accepting = {e.name for e in engines("cpu") if e.proven and not [*e.refusals(problem, device_of(CPU))]}
        assert set(record.error) == accepting | {"torch", ROUNDED}
        assert all(name in done.output for name in accepting)
    (picture,) = (tmp_path / "pictures").iterdir()
    assert picture.name.endswith("-errors.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert records[0].machine["command"].startswith("openconv")


def test_half_precision_is_compared_if_asked_for(tmp_path):
    done = openconv(
        "bench-errors", "--channels", 4, "--direction", "wgrad", "--dtype", "f16", "--engine", "cpu.naive",
        "--no-record", "--pictures", tmp_path,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert [path.name.rpartition("-errors")[2] for path in tmp_path.iterdir()] == ["-f16.png"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--channels", 0), "channels are 0; wanted 1 or more"),
        (("--direction", "forward"), "direction is 'forward'; wanted one of fprop"),
        (("--dtype", "i8"), "dtype is 'i8'; wanted one of f32"),
        (("--engine", "cpu.none"), "there is no engine 'cpu.none'"),
        (("--engine", "cuda.naive"), "engine is 'cuda.naive', which does not run on cpu"),
        (("--device", "tpu"), "device is 'tpu'; wanted cpu or cuda"),
    ],
)
def test_wrong_options_are_told_before_anything_runs(tmp_path, arguments, words):
    done = openconv("bench-errors", *arguments, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_cells_of_the_map_are_measured_like_any_suite(tmp_path, monkeypatch):
    suite = "# Which engine wins where: two cells of it.\n% cpu:\n" + "".join(
        f"cell{r}: fprop n1 c4 h8 w8 k4 r{r} s{r}{f' pad{r // 2}' * (r > 1)} f32 nchw\n" for r in (1, 3)
    )
    (tmp_path / "suites").mkdir()
    (tmp_path / "suites" / "map.txt").write_text(suite)
    monkeypatch.setattr("openconv.bench.suites.suites_folder", lambda: tmp_path / "suites")
    done = openconv("bench", "map", "--peer", "torch", "--budget", "0.001", "--out", tmp_path / "cpu-x")
    assert done.exit_code == 0, done.output
    records = read(tmp_path / "cpu-x" / "map.jsonl")
    figure = draw_winners(Run("cpu-x", records))
    assert figure is not None
    winners = {min(r.engines, key=lambda name: r.seconds[name]["median"]).partition("[")[0] for r in records}
    assert winners <= set(legend(figure))
    assert len(figure.axes[0].texts) == 2
