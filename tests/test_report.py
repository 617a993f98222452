"""What is made of records: tables, comparisons, plots, the documents, and the command that prints and writes them."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from openconv.bench import report
from openconv.bench.report import Run, compare_runs, load, write_plots
from openconv.bench.report.command import report as report_command
from openconv.bench.report.compare import OURS, comparison_tables
from openconv.bench.report.documents import replace_part, write_documents
from openconv.bench.report.runs import base_name, layer_family, layer_kind
from openconv.bench.report.tables import (
    Ratios,
    baseline,
    choices,
    details,
    heuristic_loss,
    layer_tables,
    mean_table,
    passes,
    share_of_roofline,
    summary,
)
from openconv.bench.results import Record, write
from openconv.engine import engines

DENSE = "fprop n1 c8 h9 w9 k8 r3 s3 f32 nchw"
PADDED = "fprop n1 c8 h9 w9 k8 r3 s3 pad1 f32 nchw"
POINTWISE = "dgrad n1 c8 h9 w9 k8 r1 s1 f32 nchw"
MACHINE = {"device": "Some CPU", "isa": "AVX2", "threads": 2, "torch": "2.0"}
ROOT = Path(__file__).parents[1]


def record(problem: str, suite: str = "some", chosen: str = "cpu.a", **milliseconds: float) -> Record:
    """A record of contestants by their milliseconds; an underscore after the kind of device stands for the dot."""
    names = {name: name.replace("cpu_", "cpu.").replace("cuda_", "cuda.") for name in milliseconds}
    seconds = {
        names[n]: {"median": v / 1e3, "p20": 0.95 * v / 1e3, "p80": 1.05 * v / 1e3} for n, v in milliseconds.items()
    }
    return Record(suite, "layer", problem, chosen, seconds, {}, {}, [], MACHINE)


def changed(found: Record, **fields: Any) -> Record:
    return dataclasses.replace(found, **fields)


LOSS = record(DENSE, cpu_a=2, cpu_b=1, torch=1)
WIN = record(PADDED, cpu_a=1, cpu_b=2, torch=8)
TINY = record("fprop n1 c8 h1 w1 k8 r1 s1 f32 nchw", suite="overhead", cpu_a=9, cpu_b=1, torch=1)
WRONG = changed(record(POINTWISE, cpu_b=1, torch=2), wrong=["cpu.a"])
PEERS_ONLY = changed(
    record(DENSE, suite="other", chosen="", torch=4, torch_compile=2), roofline={"torch": 0.5, "torch_compile": 1.0}
)


def printed(*tables: object) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.export_text()


# -- runs -------------------------------------------------------------------------------------------------------------


def test_sorts_of_layers():
    for problem, kind, family in (
        ("fprop n1 c1 h9 w9 k1 r3 s3 f32 nchw", "one-channel image filter", "image filter"),
        ("fprop n2 c8 h9 w9 k8 r3 s3 g8 f32 nchw", "depthwise 3x3", "depthwise"),
        ("fprop n2 c8 h9 w9 k8 r1 s1 stride2 f32 nchw", "1x1, stride 2", "1x1"),
        ("fprop n2 c8 h8 w8 k8 r2 s2 stride2 f32 nchw", "patches (stride = filter)", "patches"),
        ("fprop n2 c8 h9 w9 k8 r3 s3 g2 f32 nchw", "grouped 3x3", "grouped"),
        ("fprop n2 c8 w9 k8 s3 f32 nchw", "dense 3", "dense"),
    ):
        assert (layer_kind(record(problem)), layer_family(record(problem))) == (kind, family)
    assert layer_kind(TINY) == "tiny problem (the call itself)"
    assert base_name("cpu.a[block=8]") == "cpu.a"


def test_runs_are_the_folders_that_hold_records(tmp_path):
    write(tmp_path / "cpu-one" / "some.jsonl", [LOSS])
    write(tmp_path / "cpu-one" / "some-nhwc.jsonl", [WIN])
    write(tmp_path / "cuda-two" / "other.jsonl", [PEERS_ONLY])
    (tmp_path / "empty").mkdir()
    runs = load([tmp_path])
    assert [(run.name, run.kind, len(run.records)) for run in runs] == [("cpu-one", "cpu", 2), ("cuda-two", "cuda", 1)]
    assert runs[0].peers == ["torch"]
    assert runs[1].peers == ["torch", "torch_compile"]
    assert load([tmp_path / "cpu-one" / "some.jsonl"])[0].records == [LOSS]
    twice = load([tmp_path / "cpu-one", tmp_path / "cpu-one"])
    assert [run.name for run in twice] == [str(tmp_path / "cpu-one")] * 2


def test_what_is_not_there_or_damaged_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder or file '.*nothing'"):
        load([tmp_path / "nothing"])
    with pytest.raises(ValueError, match="there are no records in"):
        load([tmp_path])
    path = tmp_path / "some.jsonl"
    path.write_text(LOSS.to_json() + "\n{not json\n")
    with pytest.raises(ValueError, match=r"some\.jsonl, line 2: "):
        load([tmp_path])
    write(path, [changed(LOSS, problem="fprop <script>")])
    with pytest.raises(ValueError, match=r"some\.jsonl, record of 'fprop <script>': .*not understood"):
        load([tmp_path])
    write(path, [changed(LOSS, seconds={"torch": {"median": 0.0}})])
    with pytest.raises(ValueError, match="a median is not above 0"):
        load([tmp_path])


def test_records_without_the_newer_fields_are_read(tmp_path):
    old = json.loads(LOSS.to_json())
    for name in ("heuristic", "source", "knobs", "workspace", "ceilings", "roofline", "overhead", "notes", "ratio"):
        del old[name]
    (tmp_path / "some.jsonl").write_text(json.dumps(old))
    run = load([tmp_path])[0]
    assert run.records == [LOSS]
    assert heuristic_loss(run.records) == ""
    assert report.render_page([run])


def test_titles_name_the_machine_and_its_conditions():
    assert Run("cpu-x", [LOSS]).title == "Some CPU, AVX2, 2 threads, torch 2.0"
    gpu = changed(PEERS_ONLY, machine={"device": "Some GPU", "threads": 1, "isa": "AVX2", "torch": "2.0"})
    assert Run("cuda-x", [gpu]).title == "Some GPU, torch 2.0"
    assert Run("cpu-x", [changed(LOSS, machine=MACHINE | {"kept_bytes": 0})]).title.endswith(
        "every result on new memory"
    )
    assert "memory" not in Run("cpu-x", [changed(LOSS, machine=MACHINE | {"kept_bytes": 1 << 30})]).title
    assert Run("bare", [changed(LOSS, machine={})]).title == "bare"


# -- tables -----------------------------------------------------------------------------------------------------------


def test_ratios_of_nothing_are_none():
    assert Ratios.of([None]) is None
    assert Ratios.of([0.5, None, 0.5]) == Ratios(count=2, mean=0.5, worst=0.5, best=0.5, slower=2)


def test_tables_keep_losses_and_wrong_choices():
    run = Run("cpu-x", [LOSS, WIN, TINY, WRONG])
    assert "| dense 3x3, fprop | torch | 2 | **2.00** | 0.50 to 8.00 | 1 |" in summary(run)
    assert "within 15% of the fastest engine in 1; the worst choice took 2.00" in choices(run.records)
    assert "| some | **2.00** (0.50 to 8.00), 1 of 2 slower |  |  |" in passes(run, "torch")
    shown = details(run, run.records)
    assert f"| `{DENSE}` | cpu.a | 2000 | 1900 to 2100 | 1000 (**0.50**) | 2.00 |" in shown
    assert f"| `{PADDED}` | cpu.a | 1000 | 950 to 1050 | 8000 (8.00) | 1.00 |" in shown
    assert f"| `{POINTWISE}` | cpu.a **wrong** |  |  | 2000 |  |" in shown


def test_the_printed_tables_show_losses_and_wrong_results():
    run = Run("cpu-x", [LOSS, WIN, WRONG, PEERS_ONLY])
    means = printed(mean_table(run))
    assert "2.00 (1 slower)" in means
    assert "1 WRONG" in means
    every = printed(*layer_tables(run))
    losses = printed(*layer_tables(run, losses=True))
    assert "8.00" in every
    assert "8.00" not in losses
    assert "0.50" in losses
    assert "a WRONG" in losses
    assert "4000 us" in every  # a peer's own time, where there is no engine


def test_problems_given_as_text_are_told_apart_by_it():
    given = printed(*layer_tables(Run("cpu-x", [changed(LOSS, suite="given"), changed(WIN, suite="given")])))
    assert DENSE in given
    assert PADDED in given


def test_choices_by_measurement_say_what_the_heuristic_would_lose():
    tuned = changed(WIN, source="database", heuristic="cpu.b")
    near = changed(WIN, source="neighbour", heuristic="cpu.a", problem=DENSE)
    text = heuristic_loss([tuned, near, LOSS])
    assert "Of 2 problems whose engine was settled by tuning" in text
    assert "1.414 times as long" in text
    assert f"| `{PADDED}` | cpu.b | cpu.a | 2.00 |" in text
    assert DENSE not in text  # it loses nothing there
    assert heuristic_loss([LOSS, changed(tuned, heuristic="cpu.gone")]) == ""
    assert "the choice of openconv was" in choices([tuned])


def test_peers_alone_are_a_baseline():
    run = Run("cuda-x", [PEERS_ONLY, changed(PEERS_ONLY, problem=PADDED, seconds={"torch": {"median": 0.012}})])
    assert share_of_roofline(run.records, "torch") == pytest.approx((0.5 * 4 + 0.5 * 12) / 16)
    assert "| other | fprop | 2 | 16.0 | 2.00 (1) | 50% |" in baseline(run)
    assert "| other, f32 nchw | fprop |" in baseline(run, by_type=True)
    assert passes(run, "torch") == ""
    assert choices(run.records) == ""
    assert f"| `{DENSE}` |  |  |  | 4000 | 2000 |  | 50% |" in details(run, run.records)


# -- comparison -------------------------------------------------------------------------------------------------------


def test_a_comparison_tells_changes_from_noise_and_ours_from_the_machine():
    before = Run("one", [LOSS, WIN, record(POINTWISE, cpu_a=1, torch=1)])
    after = Run("two", [
        record(DENSE, chosen="cpu.b", cpu_b=1, torch=1.02),
        changed(record(PADDED, cpu_a=1.05, torch=4), wrong=["cpu.b"]),
        record(DENSE.replace("n1", "n2"), cpu_a=1, torch=1),
    ])  # fmt: skip
    found = compare_runs(before, after)
    ours = {change.problem: change for change in found.of(OURS)}
    assert ours[DENSE].ratio == pytest.approx(2.0)
    assert not ours[DENSE].noise
    assert ours[PADDED].noise
    assert [c.problem for c in found.moved("torch")] == [PADDED]
    assert found.new == [DENSE.replace("n1", "n2")]
    assert found.gone == [POINTWISE]
    assert [(c.problem, c.before, c.after) for c in found.choices] == [(DENSE, "cpu.a", "cpu.b")]
    assert found.broken == [f"cpu.b on {PADDED}"]
    mean = found.mean(OURS, "some")
    assert mean is not None
    assert mean.mean == pytest.approx((2.0 / 1.05) ** 0.5)
    text = printed(*comparison_tables(found))
    for part in (
        "one to two",
        "1 of 2 problems beyond noise",
        "changed choices: 1",
        "only in the later run: 1",
        "2.00",
    ):
        assert part in text


def test_a_problem_of_several_suites_is_compared_within_its_suite():
    before = Run("one", [LOSS, record(DENSE, suite="other", cpu_a=8, torch=1)])
    after = Run("two", [LOSS, record(DENSE, suite="third", cpu_a=8, torch=1)])
    found = compare_runs(before, after).of(OURS)
    assert [(c.suite, c.ratio) for c in found] == [("some", 1.0), ("third", 1.0)]


# -- plots ------------------------------------------------------------------------------------------------------------


def test_plots_are_drawn_of_what_there_is(tmp_path):
    full = changed(WIN, ceilings={"copy": 1e10, "f32": 1e11, "f64": 5e10}, roofline={"cpu.a": 0.5})
    paths = write_plots(Run("cpu x/y", [LOSS, full, TINY, WRONG, PEERS_ONLY]), tmp_path)
    assert [path.name for path in paths] == [
        f"cpu-x-y-{name}.png" for name in ("ratios", "roofline", "growth", "engines")
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert len(write_plots(Run("peers", [PEERS_ONLY]), tmp_path)) == 3  # there are no ratios
    assert write_plots(Run("nothing", [changed(LOSS, seconds={})]), tmp_path) == []


# -- documents --------------------------------------------------------------------------------------------------------


def test_only_the_marked_part_of_a_text_is_replaced():
    text = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n"
    new = replace_part(text, "x", r"new \1")
    assert new == "a\n<!-- begin x -->\n\nnew \\1\n\n<!-- end x -->\nb\n"
    assert replace_part(new, "x", r"new \1") == new
    with pytest.raises(ValueError, match="there is no part '<!-- begin y -->'"):
        replace_part(text, "y", "")


def checkout(tmp_path: Path) -> Path:
    """A checkout with the files that documents are made of."""
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "README.md").write_text("<!-- begin results -->\n<!-- end results -->\n")
    folder = tmp_path / "benchmarks" / "results"
    write(folder / "cpu-big" / "some.jsonl", [LOSS, changed(WIN, source="database", heuristic="cpu.b"), WRONG])
    write(folder / "cpu-small" / "some.jsonl", [changed(WIN, machine=MACHINE | {"kept_bytes": 0})])
    write(folder / "cuda-x" / "other.jsonl", [changed(PEERS_ONLY, machine={"device": "Some GPU", "torch": "2.0"})])
    return tmp_path


@pytest.mark.usefixtures("one_engine")
def test_the_documents_show_every_machine_and_the_readme_the_best_recorded(tmp_path):
    root = checkout(tmp_path)
    stale = root / "docs" / "results" / "cpu-gone.md"
    stale.write_text("")
    assert all(write_documents(root).values())
    assert not stale.exists()
    assert not any(write_documents(root).values())
    readme = (root / "README.md").read_text()
    assert "**Some CPU, AVX2, 2 threads, torch 2.0**, against torch; [every layer](docs/results/cpu-big.md)" in readme
    assert "| some | **2.00** (0.50 to 8.00), 1 of 2 slower |  |  |" in readme
    assert "- [Some CPU, AVX2, 2 threads, torch 2.0, every result on new memory](docs/results/cpu-small.md)" in readme
    assert "[every layer](docs/results/cuda-x.md)" in readme
    assert "[`cpu.naive`](../src/openconv/cpu/naive.py)" in (root / "docs" / "engines.md").read_text()
    results = (root / "docs" / "results.md").read_text()
    assert "choice by predicted cost alone would take 2.000 times as long" in results
    assert "(report/report.html)" in results
    assert "## Some GPU, torch 2.0" in results
    assert f"`{POINTWISE}` | cpu.a **wrong**" in (root / "docs" / "results" / "cpu-big.md").read_text()


def test_the_tables_of_the_documents_are_those_of_the_records():
    wanted = report.render(ROOT)
    for path, text in wanted.items():
        assert path.read_text() == text, f"{path.name} is not what the records say; run `make docs`"
    assert set((ROOT / "docs" / "results").glob("*.md")) <= set(wanted)


def test_the_readme_names_every_engine():
    text = (ROOT / "README.md").read_text()
    assert [engine.name for engine in engines() if f"`{engine.name}`" not in text] == []


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(report_command)
    return made


def test_the_command_prints_tables_and_writes_plots_and_a_page(tmp_path, app):
    root = checkout(tmp_path)
    out = tmp_path / "deep" / "out"
    folder = root / "benchmarks" / "results"
    done = CliRunner().invoke(app, [str(folder), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert {path.name for path in out.iterdir()} >= {"report.html", "cpu-big-ratios.png", "cuda-x-growth.png"}
    for part in ("x torch", "WRONG", str(out / "report.html"), "1 slower"):
        assert part in done.output
    few = CliRunner().invoke(
        app,
        [str(folder), "--out", str(out), "--suite", "some", "--direction", "dgrad", "--layers", "none", "--no-plots"],
    )
    assert "\nother" not in few.output
    assert "fprop" not in few.output


def test_the_command_compares_two_folders(tmp_path, app):
    write(tmp_path / "one" / "cpu-x" / "some.jsonl", [LOSS, WIN])
    write(tmp_path / "two" / "cpu-x" / "some.jsonl", [WIN, record(DENSE, cpu_a=1, torch=1)])
    done = CliRunner().invoke(app, [str(tmp_path / "one"), str(tmp_path / "two"), "--compare"])
    assert done.exit_code == 0, done.output
    assert "1.414 (+1 -0)" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--compare"], "--compare takes the run before and the run after; got 1 folders, wanted 2"),
        (["--suite", "nothing"], "no record is left; the suites recorded are some"),
        (["--direction", "up"], "direction is 'up'; wanted one of fprop, dgrad, wgrad"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path, app, arguments, words):
    write(tmp_path / "some.jsonl", [LOSS])
    done = CliRunner().invoke(app, [str(tmp_path), "--out", str(tmp_path), *arguments])
    assert isinstance(done.exception, ValueError)
    assert words in str(done.exception)
