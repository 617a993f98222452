"""Marks in the texts of the tutorial and the guides: filled from records, refused where nobody has measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from openconv.bench.profiles import FILE_NAME as PROFILES
from openconv.bench.profiles import ProfileRecord, write_profiles
from openconv.bench.report.book import DEVICES, Book, book_pages, write_book
from openconv.bench.results import Record, write
from openconv.problem import Problem

ROOT = Path(__file__).parents[1]
COPY, F32 = 4e12, 5e13


def record(direction: str = "fprop", **changes: object) -> Record:
    problem = Problem.parse(f"{direction} n1 c1 h1000 w1000 k1 r3 s3 pad1 f32 nchw")
    seconds = {"cuda.naive": 40e-6, "cuda.tiled": 10e-6, "torch": 20e-6}
    made = {
        "suite": "ladder", "label": "photo", "problem": str(problem), "chosen": "cuda.tiled",
        "seconds": {name: {"median": took, "p20": took, "p80": took} for name, took in seconds.items()},
        "predicted": {"cuda.tiled": 9e-6}, "error": {"cuda.tiled": 2.5e-7, "torch": 1e-7},
        "ceilings": {"copy": COPY, "f32": F32}, "roofline": {"cuda.tiled": 0.2}, "machine": {"device": "a GPU"},
        "notes": {"cuda.fft": "predicted 2 s; at most 1 s are waited for"},
    }  # fmt: skip
    return Record(**(made | changes))  # type: ignore[arg-type]


@pytest.fixture
def results(tmp_path):
    write(tmp_path / DEVICES["h200"] / "ladder.jsonl", [record(), record("wgrad", label="photo", predicted={})])
    return tmp_path


@pytest.mark.parametrize(
    "mark, text",
    [
        ('time("photo", "torch")', "20.0 us"),
        ('time("photo", "chosen", direction="wgrad")', "10.0 us"),
        ('ratio("photo", "cuda.naive", "cuda.tiled")', "4.00"),
        ('bandwidth("photo", "cuda.tiled")', "800 GB/s"),  # 8 MB in 10 us
        ('rate("photo", "cuda.tiled")', "1.80 TFLOP/s"),  # 18 million operations
        ('roofline("photo", "chosen")', "20 %"),
        ('least("photo")', "2.00 us"),
        ('predicted("photo", "cuda.tiled")', "9.00 us"),
        ('error("photo", "torch")', "1.0e-07"),
        ('chosen("photo")', "cuda.tiled"),
        ('ceiling("copy", suite="ladder")', "4.00 TB/s"),
    ],
)
def test_marks_in_a_sentence(results, mark, text):
    book = Book(results)
    filled = book.fill(f"It is <!--= {mark} --><!--/-->, once.")
    assert filled == f"It is <!--= {mark} -->{text}<!--/-->, once."
    assert book.fill(filled) == filled


def test_the_table_has_a_row_an_engine_and_torch_last(results):
    text = '<!-- table: rungs("photo", "cuda.naive", "cuda.tiled") -->\nold\n<!-- end -->\n'
    lines = Book(results).fill(text).splitlines()
    assert lines[0] == text.splitlines()[0]
    assert lines[-1] == "<!-- end -->"
    assert lines[2] == "| time (times as fast as cuDNN) | fprop | wgrad |"
    assert lines[4] == "| `cuda.naive` | 40.0 us (0.50) | 40.0 us (0.50) |"
    assert lines[6] == "| PyTorch (cuDNN) | 20.0 us | 20.0 us |"


def test_profiles_are_a_row_a_kernel_and_what_is_missing_is_said(results):
    kernel = {
        "name": "void ns::naive<float>(Params)", "grid": "(1, 1, 1)", "block": "(256, 1, 1)", "seconds": 12e-6,
        "instructions": 2.42e8, "dram_read_bytes": 64e6, "dram_written_bytes": 63e6, "load_sectors": 90.0,
        "load_requests": 20.0, "l1_hit_percent": 75.0, "l2_hit_percent": 50.0, "occupancy_percent": 62.5,
    }  # fmt: skip
    problem = "fprop n1 c1 h1000 w1000 k1 r3 s3 pad1 f32 nchw"
    made = [ProfileRecord("ladder", "photo", problem, "cuda.naive", [kernel, {"name": "sum", "seconds": 1e-6}])]
    made.append(ProfileRecord("ladder", "photo", problem.replace("fprop", "dgrad"), "cuda.tiled", [kernel]))
    write_profiles(results / DEVICES["h200"] / PROFILES, made)
    text = '<!-- table: profiled("photo", "cuda.naive", "cuda.tiled") -->\n<!-- end -->\n'
    lines = Book(results).fill(text).splitlines()
    assert lines[4] == "| `cuda.naive`, naive | 12.0 us | 242 M | 64.0 MB | 63.0 MB | 4.5 | 75 % | 50 % | 62 % | - |"
    assert lines[5] == "| `cuda.naive`, sum | 1.00 us | - | - | - | - | - | - | - | - |"
    assert "`openconv profile ladder:photo --direction fprop --engine cuda.tiled`" in lines[7]
    assert Book(results).fill("\n".join(lines)) == "\n".join(lines)
    alone = Book(results).fill(text.replace('"cuda.naive", ', ""))
    assert "| kernel" not in alone
    assert "Not recorded" in alone


def test_a_label_may_hold_the_pass(tmp_path):
    both = [record(way, label=f"image_{way}") for way in ("fprop", "wgrad")]
    write(tmp_path / DEVICES["h200"] / "first_rungs.jsonl", both)
    text = '<!-- table: rungs("image_{}", "cuda.naive", suite="first_rungs") -->\n<!-- end -->\n'
    assert "| `cuda.naive` | 40.0 us (0.50) | 40.0 us (0.50) |" in Book(tmp_path).fill(text)


@pytest.mark.parametrize(
    "mark, reason",
    [
        ('time("photo", "cuda.fft")', "at most 1 s are waited for"),
        ('time("photo", "cuda.pixels")', "did not take part"),
        ('time("picture", "torch")', "0 records of 'picture'"),
        ('time("photo", "torch", direction="dgrad")', "0 records"),
        ('time("photo", "torch", on="cpu")', "was not recorded on cpu"),
        ('time("photo", "torch", on="moon")', "wanted one of h200, cpu"),
        ('predicted("photo", "cuda.naive")', "nothing was predicted"),
        ("speed()", "wanted a call of one of"),
        ('__import__("os")', "wanted a call of one of"),
        ("time(", "was never closed"),
    ],
)
def test_what_nobody_recorded_is_an_error_that_names_the_mark(results, mark, reason):
    with pytest.raises(ValueError, match=r"page\.md: ") as error:
        Book(results).fill(f"<!--= {mark} --><!--/-->", "page.md")
    assert reason in str(error.value)


@pytest.mark.parametrize("text", ['<!--= time("photo", "torch") -->', '<!-- table: rungs("photo") -->\n'])
def test_a_mark_without_an_end_is_an_error(results, text):
    with pytest.raises(ValueError, match="has no end"):
        Book(results).fill(text)


def test_pictures_are_drawn_anew_when_their_records_change(tmp_path):
    results = tmp_path / "benchmarks" / "results" / DEVICES["h200"]
    write(results / "ladder.jsonl", [record()])
    page = tmp_path / "tutorial" / "01.md"
    page.parent.mkdir()
    page.write_text(
        '<!-- figure: bars("photo", "cuda.naive") -->\n<!-- end -->\n'
        '<!-- figure: rooflines(suite="ladder") -->\n<!-- end -->\n'
    )
    assert all(write_book(tmp_path).values())
    assert not any(write_book(tmp_path).values())
    shown = re.search(r"]\(figures/(photo-ladder-h200-\w+\.png)\)", page.read_text())
    assert shown is not None
    from openconv.bench.report import book

    book._read.cache_clear()
    write(results / "ladder.jsonl", [record(chosen="cuda.naive")])
    changed = write_book(tmp_path)
    assert [path.name for path, new in changed.items() if new] == [
        shown[1], "rooflines-ladder-h200.png",
    ]  # fmt: skip


def test_texts_say_what_the_records_say():
    stale = [str(path.relative_to(ROOT)) for path in book_pages(ROOT) if _stale(path)]
    assert not stale, "run `make docs`"


def _stale(path: Path) -> bool:
    book = Book(ROOT / "benchmarks" / "results")
    text = path.read_text()
    if book.fill(text, path.name) != text:
        return True
    folder = path.parent / "figures"
    return any(
        not (folder / name).exists() or picture.digest.encode() not in (folder / name).read_bytes()
        for name, picture in book.pictures.items()
    )


def test_every_figure_is_shown_by_a_text():
    shown = "".join(path.read_text() for path in book_pages(ROOT))
    unused = [path.name for path in (ROOT / "tutorial" / "figures").glob("*.png") if path.name not in shown]
    assert not unused


def test_records_of_the_ladders_are_whole():
    """Chapters build on them: each engine that was timed was right, beside torch."""
    for name in DEVICES.values():
        for path in (ROOT / "benchmarks" / "results" / name).glob("ladder*.jsonl"):
            for line in path.read_text().splitlines():
                found = Record.from_json(line)
                assert "torch" in found.seconds, found.problem
                assert not found.wrong, found.problem
                assert json.loads(line)["machine"]["commit"]
