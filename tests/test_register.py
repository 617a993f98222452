"""Engines of other programs: registered, chosen, named by explain, measured, taken out again."""

from __future__ import annotations

import importlib
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import openconv
from openconv import engine as registry
from openconv.engine import Engine, Traits, engine_named, engines, register, unregister, when_engines_change
from openconv.explanation import CandidateReport
from openconv.plan import device_of, lower
from openconv.select import Policy, rank
from openconv.select.database import Database, Entry, Measurement, user_store
from openconv.support import support_table

KNOWN = "fprop n1 c1 h40 w40 k1 r3 s3 pad1 i32 nchw"


class Shifted(Engine):
    """Integer filters of one channel, tap by tap."""

    name = "cpu.shifted"
    builds = 0

    def refusals(self, problem, device):
        if problem.direction != "fprop" or problem.rank != 2:
            yield f"direction is {problem.direction}, rank {problem.rank}; wanted a fprop of 2 axes"
        elif problem.dtypes[0] != "i32" or problem.c > 1 or problem.k > 1 or problem.stride != (1, 1):
            yield f"'{problem}' is no integer filter of one channel and stride 1"

    def traits(self, problem, knobs):
        return Traits("i32", 0.0)

    def cost(self, problem, device, knobs):
        return 1e-9

    def build(self, problem, device, knobs):
        Shifted.builds += 1
        (top, bottom), (left, right) = problem.padding

        def run(a, b, out, workspace, bias):
            padded = F.pad(a, (left, right, top, bottom))
            out.zero_()
            for (r, s), weight in zip(torch.cartesian_prod(*map(torch.arange, b.shape[2:])), b.flatten(), strict=True):
                out.add_(padded[..., r : r + out.shape[2], s : s + out.shape[3]], alpha=int(weight))

        return run


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    for engine in registry._registered:
        unregister(engine.name)


def winner(*call: Any, **options: Any) -> CandidateReport:
    found = openconv.explain(*call, **options).winner
    assert found is not None
    return found


def images() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(-9, 9, (1, 1, 40, 40), dtype=torch.int32)
    return x, torch.randint(-9, 9, (1, 1, 3, 3), dtype=torch.int32)


def test_it_is_chosen_named_by_explain_and_right():
    x, w = images()
    before = openconv.conv2d(x, w, padding=1)
    assert winner(openconv.conv2d, x, w, padding=1).name == "cpu.naive"
    assert register(Shifted) is Shifted, "a decorator gives the class back"
    built = Shifted.builds
    assert torch.equal(openconv.conv2d(x, w, padding=1), before)
    assert Shifted.builds == built + 1, "the plan from before it was there is not used any more"
    told = openconv.explain(openconv.conv2d, x, w, padding=1)
    assert told.winner is not None
    assert (told.winner.name, told.winner.source) == ("cpu.shifted", __file__)
    assert "cpu.shifted: Integer filters of one channel, tap by tap." in str(told)
    refused = openconv.explain(openconv.conv2d, x, w, stride=2).refusals
    assert any(r.name == "cpu.shifted" and "stride 1" in r.reasons[0] for r in refused)
    unregister("cpu.shifted")
    assert winner(openconv.conv2d, x, w, padding=1).name == "cpu.naive"
    openconv.conv2d(x, w, padding=1)
    assert Shifted.builds == built + 1
    with pytest.raises(ValueError, match=r"there is no engine 'cpu\.shifted'"):
        openconv.conv2d(x, w, engine="cpu.shifted")


def test_it_stands_before_the_package_s_and_the_reference_stays_last():
    register(Shifted)
    names = [engine.name for engine in engines("cpu")]
    assert (names[0], names[-1]) == ("cpu.shifted", "cpu.naive")
    assert "cpu.shifted" not in [engine.name for engine in engines("cuda")]
    assert engines()[0] is engine_named("cpu.shifted") is engines("cpu")[0]


def test_the_table_of_engines_has_it_while_it_is_there(monkeypatch):
    monkeypatch.setattr(registry, "ENGINES", ("openconv.cpu.naive:Naive",))  # each takes a second to be asked

    def names() -> list[str]:
        return [row.name for row in support_table()]

    assert names() == ["cpu.naive"]
    register(Shifted)
    assert names() == ["cpu.shifted", "cpu.naive"]
    unregister("cpu.shifted")
    assert names() == ["cpu.naive"]


def test_what_is_no_engine_is_told_why():
    with pytest.raises(TypeError, match="the class itself"):
        register(Shifted())  # type: ignore[type-var]
    with pytest.raises(TypeError, match="wanted a subclass"):
        register(dict)  # type: ignore[type-var]

    class Half(Engine):
        name = "cpu.half"

        def refusals(self, problem, device):
            yield from ()

    with pytest.raises(TypeError, match="Half lacks build, cost, traits;"):
        register(Half)
    for name in ("shifted", "cuda.shifted", "cpu.", "cpu.a,b", "cpu.a b", None):
        with pytest.raises(ValueError, match=r"name is .*; wanted a text such as 'cpu\.wrong'"):
            register(type("Wrong", (Shifted,), {"name": name}))
    with pytest.raises(ValueError, match="device is 'tpu'; wanted 'cpu' or 'cuda'"):
        register(type("Wrong", (Shifted,), {"device": "tpu", "name": "tpu.wrong"}))
    with pytest.raises(ValueError, match=r"'cpu\.other' was not registered; registered now: none"):
        unregister("cpu.other")
    with pytest.raises(ValueError, match=r"'cpu\.naive' was not registered"):
        unregister("cpu.naive")


def test_names_are_taken_once_but_a_cell_may_run_twice():
    with pytest.raises(ValueError, match=r"'cpu\.direct' is taken by openconv\.cpu\.direct\.Direct"):
        register(type("Mine", (Shifted,), {"name": "cpu.direct"}))
    register(Shifted)
    first = engine_named("cpu.shifted")
    with pytest.raises(ValueError, match=r"'cpu\.shifted' is taken by .*\.Shifted; give the engine another one"):
        register(type("Other", (Shifted,), {}))
    assert engine_named("cpu.shifted") is first
    again = type("Shifted", (Shifted,), {"__module__": Shifted.__module__})
    register(again)
    assert type(engine_named("cpu.shifted")) is again
    assert [engine.name for engine in engines()].count("cpu.shifted") == 1


def test_an_engine_typed_at_a_prompt_has_no_file_and_a_version_of_its_own():
    def typed() -> Engine:
        space: dict[str, object] = {"Shifted": Shifted, "__name__": "a_prompt"}
        exec("class Typed(Shifted):\n    name = 'cpu.typed'\n", space)
        register(space["Typed"])  # type: ignore[type-var]
        return engine_named("cpu.typed")

    one = typed()
    assert one.source == "?"
    assert one.version == one.version
    other = typed()
    assert other is not one
    assert other.version != one.version, "a time measured for the first says nothing of the second"
    assert winner(KNOWN).name == "cpu.typed"


def test_the_version_follows_the_file(tmp_path, monkeypatch):
    text = textwrap.dedent(
        """
        from tests.test_register import Shifted

        class Filed(Shifted):
            name = "cpu.filed"
            def cost(self, problem, device, knobs):
                return 1e-9
            def knobs(self, problem, device):
                return ("one",)
        """
    )
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two versions of a second look alike to its cache
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for old, new in (("", ""), ("1e-9", "2e-9"), ("one", "other")):
        (tmp_path / "filed_engine.py").write_text(text.replace(old, new) if old else text)
        importlib.invalidate_caches()
        register(importlib.import_module("filed_engine").Filed)
        found.append(engine_named("cpu.filed").version)
        del sys.modules["filed_engine"]
    assert found[0] == found[1], "predictions are no part of what a measured time holds for"
    assert found[1] != found[2], "the class of the same place takes the name, and its code counts as new"


def test_measured_times_hold_while_the_engine_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENCONV_TUNING_FILE", str(tmp_path / "tuning.json"))
    register(Shifted)
    device, version = device_of(torch.device("cpu")), engine_named("cpu.shifted").version
    rewrites = engine_named("cpu.phases").version
    naive = engine_named("cpu.naive")
    measured = (
        Measurement("cpu.naive", "-", naive.version, 1e-6, 1e-6, 1e-6, 9),
        Measurement("cpu.shifted", "-", version, 5e-6, 5e-6, 5e-6, 9),
    )
    core = lower(openconv.Problem.parse(KNOWN), device)
    user_store().update(Database({device.key: {str(core): Entry(measured, "2026-01-01T00:00:00Z", True)}}))
    known = Policy(tuning="heuristic")
    first, second = rank(core, device, known)[0][:2]
    assert (first.engine.name, first.measured) == ("cpu.naive", 1e-6)
    assert (second.engine.name, second.measured) == ("cpu.shifted", 5e-6)
    unregister("cpu.shifted")
    assert "cpu.shifted" not in [c.engine.name for c in rank(core, device, known)[0]]
    assert engine_named("cpu.phases").version != rewrites, "any engine may be inside of a rewrite"


def test_a_saved_graph_is_planned_anew_without_the_engine():
    x, w = (each.float() for each in images())

    class FloatShifted(Shifted):
        name = "cpu.float_shifted"

        def refusals(self, problem, device):
            yield from super().refusals(problem.with_(dtypes=("i32",) * 3), device)

    register(FloatShifted)
    with openconv.Graph() as graph:
        graph.conv_fprop(x, w, padding=1)
    y = graph(x, w)
    text = graph.to_json()
    assert "cpu.float_shifted" in text
    unregister("cpu.float_shifted")
    with pytest.warns(UserWarning, match=r"another cpu\.float_shifted.*planned anew"):
        loaded = openconv.Graph.from_json(text)
    torch.testing.assert_close(loaded(x, w), y)


def test_others_convolve_while_engines_come_and_go():
    """Each thread sees one list of engines or the other; what is left behind is the last one."""
    x, w = images()
    expected, ends, failures = openconv.conv2d(x, w), threading.Event(), []

    def convolve() -> None:
        while not ends.is_set():
            try:
                assert torch.equal(openconv.conv2d(x, w), expected)
                assert engines("cpu")[-1].name == "cpu.naive"
            except BaseException as failure:
                failures.append(failure)
                return

    threads = [threading.Thread(target=convolve) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        register(Shifted)
        unregister("cpu.shifted")
    register(Shifted)
    ends.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert engines("cpu")[0].name == "cpu.shifted"


def test_who_keeps_choices_is_told():
    told: list[int] = []
    when_engines_change(lambda: told.append(len(engines("cpu"))))
    try:
        register(Shifted)
        unregister("cpu.shifted")
    finally:
        registry._watchers.pop()
    assert told == [len(engines("cpu")) + 1, len(engines("cpu"))]
