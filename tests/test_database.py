"""The tuning database: its file, its layers, neighbours, merging, several processes, damage."""

from __future__ import annotations

import multiprocessing
import warnings
from pathlib import Path

import pytest

from openconv.cpu.device import cpu_device
from openconv.problem import Problem
from openconv.select import database
from openconv.select.database import Database, Entry, Measurement, Store, differences, lookup, read_database

DEVICE = cpu_device(2)
LAYER = "fprop n1 c64 h56 w56 k64 r3 s3 pad1 f32 nchw"


def measurement(engine: str = "cpu.a", us: float = 100.0, knobs: str = "-", version: str = "v1") -> Measurement:
    return Measurement(engine, knobs, version, us * 1e-6, us * 0.9e-6, us * 1.1e-6, 5)


def entry(*measured: Measurement, when: str = "2026-01-01T00:00:00Z", settled: bool = True) -> Entry:
    return Entry(tuple(measured) or (measurement(),), when, settled)


def holding(problem: str = LAYER, found: Entry | None = None, device: str = DEVICE.key) -> Database:
    return Database({device: {problem: found or entry()}})


@pytest.fixture
def user(tmp_path, monkeypatch) -> Store:
    """An empty user's database, and nothing shipped."""
    monkeypatch.setenv("OPENCONV_TUNING_FILE", str(tmp_path / "user.json"))
    monkeypatch.setattr(database, "_SHIPPED", tmp_path / "shipped")
    return database.user_store()


def version_of(engine: str) -> str | None:
    return "v1" if engine.startswith("cpu.") else None


# -- the file -------------------------------------------------------------------------------------------------------


def test_text_parses_back_and_has_one_line_a_measurement():
    made = holding(found=entry(measurement("cpu.a", 10), measurement("cpu.b", 20, "x=1")))
    made.put("cuda nvidia h200", "wgrad n2 c3 w9 k4 s3 f16 nchw", entry(settled=False))
    text = made.to_text()
    assert Database.from_text(text).to_text() == text
    assert sum('"engine"' in line for line in text.splitlines()) == 3
    assert Database.from_text(Database().to_text()) == Database()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting"),
        ("[]", "no tuning database"),
        ('{"format": 2, "devices": {}}', "its format is 2; this version reads 1"),
        ('{"format": 1}', "no tuning database"),
        ('{"format": 1, "devices": {"d": {"p": {"when": "", "settled": true, "measured": [{}]}}}}', "KeyError"),
        (holding().to_text().replace("100.0", "-1"), "wanted positive numbers"),
        (holding().to_text().replace('"v1"', "3"), "wanted texts"),
    ],
)
def test_what_is_no_database_is_refused_with_the_reason(tmp_path, text, words):
    path = tmp_path / "some.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        read_database(path)
    assert "some.json" in str(caught.value)


def test_a_damaged_file_is_set_aside_with_one_warning(user):
    user.path.write_text("{ half")
    with pytest.warns(UserWarning, match=r"moved to user\.json\.damaged") as caught:
        assert len(user.load()) == 0
    assert len(caught) == 1
    assert [p.read_text() for p in user.path.parent.glob("*damaged*")] == ["{ half"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(user.load()) == 0
        user.update(holding())
    assert len(user.load()) == 1


def test_a_damaged_file_is_not_overwritten_by_an_update(user):
    user.path.write_text("{ half")
    with pytest.warns(UserWarning, match="moved"):
        user.update(holding())
    assert len(read_database(user.path)) == 1
    assert len(list(user.path.parent.glob("*damaged*"))) == 1


def test_a_changed_file_is_read_again(user):
    assert len(user.load()) == 0
    Store(user.path).update(holding())
    assert len(user.load()) == 1
    user.path.unlink()
    assert len(user.load()) == 0


def _add(path: Path, number: int) -> None:
    for at in range(5):
        Store(path).update(holding(f"fprop n{number} c{at + 1} h8 w8 k8 r3 s3 f32 nchw"))


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    path = tmp_path / "shared.json"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_add, args=(path, number)) for number in range(1, 5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert len(read_database(path)) == 20


# -- together -------------------------------------------------------------------------------------------------------


def test_a_later_measurement_replaces_and_others_stay():
    old = entry(measurement("cpu.a", 10), measurement("cpu.b", 20), measurement("cpu.c", 30, version="v0"))
    new = entry(measurement("cpu.a", 25), measurement("cpu.c", 5, "x=1"), when="2026-02-01T00:00:00Z")
    for first, second in ((old, new), (new, old)):
        merged = holding(found=first).merge(holding(found=second)).devices[DEVICE.key][LAYER]
        assert [(m.engine, m.knobs, round(m.seconds * 1e6)) for m in merged.measured] == [
            ("cpu.c", "x=1", 5),
            ("cpu.b", "-", 20),
            ("cpu.a", "-", 25),
        ]
        assert merged.when == "2026-02-01T00:00:00Z"


def test_differences_name_winners_ratios_noise_and_what_one_lacks():
    before = holding(found=entry(measurement("cpu.a", 100), measurement("cpu.b", 110)))
    before.put(DEVICE.key, "fprop n1 c1 w9 k1 s3 f32 nchw", entry())
    after = holding(found=entry(measurement("cpu.b", 50), measurement("cpu.a", 101)))
    gone, moved = differences(before, after)
    assert (gone.after, gone.ratio, gone.moved) == (None, None, False)
    assert moved.moved
    assert moved.ratio == pytest.approx(2)
    assert not moved.noise
    assert differences(before, before) == []
    near = differences(holding(found=entry(measurement(us=100))), holding(found=entry(measurement(us=105))))
    assert near[0].noise


def test_a_part_of_it_is_taken_by_device_and_problem():
    made = holding().merge(holding(device="cuda nvidia h200"))
    assert [d for d, _, _ in made.only(lambda device, problem: "h200" in device)] == ["cuda nvidia h200"]


def test_the_fastest_knobs_of_each_engine_are_all_that_a_choice_needs():
    found = entry(measurement("cpu.a", 1, "x=1"), measurement("cpu.b", 2), measurement("cpu.a", 3, "x=2"))
    kept = holding(found=found).fastest_knobs().devices[DEVICE.key][LAYER]
    assert [(m.engine, m.knobs) for m in kept.measured] == [("cpu.a", "x=1"), ("cpu.b", "-")]


# -- what is known of a problem ---------------------------------------------------------------------------------------


def test_the_user_s_file_comes_before_the_shipped_one(user):
    problem = Problem.parse(LAYER)
    assert lookup(problem, DEVICE, version_of) is None
    shipped = database.shipped_file(DEVICE.key)
    Store(shipped).update(holding(found=entry(measurement(us=1))))
    known = lookup(problem, DEVICE, version_of)
    assert known is not None
    assert (known.layer, known.distance) == ("shipped", 0)
    user.update(holding(found=entry(measurement(us=7))))
    known = lookup(problem, DEVICE, version_of)
    assert known is not None
    assert (known.layer, round(known.entry.best.seconds * 1e6)) == ("user", 7)


def test_what_the_code_of_an_engine_has_outgrown_counts_for_nothing(user):
    user.update(holding(found=entry(measurement(version="v0"))))
    assert lookup(Problem.parse(LAYER), DEVICE, version_of) is None
    user.update(holding(found=entry(measurement("cuda.other", 1))))  # an engine that is not here
    assert lookup(Problem.parse(LAYER), DEVICE, version_of) is None


def test_another_kind_of_device_is_not_looked_at(user):
    user.update(holding(device="cpu another, 8 lanes, 2 threads"))
    assert lookup(Problem.parse(LAYER), DEVICE, version_of) is None


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (LAYER.replace("n1", "n2"), True),
        (LAYER.replace("h56 w56", "h48 w48"), True),
        (LAYER + " +bias", True),
        (LAYER.replace("pad1", "pad0"), True),
        (LAYER.replace("n1", "n4"), False),  # two doublings
        (LAYER.replace("r3 s3", "r5 s5"), False),
        (LAYER.replace("fprop", "dgrad"), False),
        (LAYER.replace("nchw", "nhwc"), False),
        (LAYER.replace("f32", "f64"), False),
        (LAYER.replace("pad1", "stride2 pad1"), False),
        (LAYER.replace("pad1", "pad1 g64"), False),  # depthwise
        (LAYER.replace("pad1", "pad1 g2"), False),  # grouped
    ],
)
def test_neighbours_differ_in_sizes_alone_and_are_near(user, asked, found):
    user.update(holding())
    known = lookup(Problem.parse(asked), DEVICE, version_of)
    assert (known is not None) == found
    if known:
        assert known.distance > 0
        assert str(known) == f"neighbour '{LAYER}' (user database, 2026-01-01)"


def test_the_nearest_neighbour_is_taken(user):
    user.update(holding(LAYER.replace("h56 w56", "h40 w40"), entry(measurement(us=3))))
    user.update(holding(LAYER.replace("h56 w56", "h52 w52"), entry(measurement(us=5))))
    known = lookup(Problem.parse(LAYER), DEVICE, version_of)
    assert known is not None
    assert "h52" in known.problem


def test_a_device_s_key_leaves_out_clock_and_trade_marks():
    assert DEVICE.key.startswith("cpu ")
    assert "(" not in DEVICE.key
    assert "@" not in DEVICE.key
    assert DEVICE.key.endswith(f"{DEVICE.lanes} lanes, 2 threads")


def test_shipped_databases_can_be_read_and_are_named_by_their_device():
    for found in database.shipped_databases():
        assert len(found.devices) == 1
        assert database.shipped_file(next(iter(found.devices))).is_file()
        for _, problem, known in found:
            assert str(Problem.parse(problem)) == problem
            assert list(known.measured) == sorted(known.measured, key=lambda m: m.seconds)
