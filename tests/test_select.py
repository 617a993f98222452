"""Choosing an engine: the ranking, the limits of a policy, forced engines, and that none of it needs torch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import openconv
import openconv.engine
from openconv import Policy, Problem, UnsupportedProblem, policy
from openconv.device import Device
from openconv.engine import Engine, Knobs, Traits, engine_named
from openconv.select import DEFAULT, choose, current_policy, rank

DEVICE = Device(kind="cpu", name="test", threads=2)
PROBLEM = Problem.parse("fprop n2 c8 h9 w9 k8 r3 s3 pad1 f32 nchw")
STRIDED = PROBLEM.with_(stride=2)


@dataclass(frozen=True)
class Tile(Knobs):
    size: int


class Fake(Engine):
    """An engine that is only ever asked."""

    seconds = 1.0

    def refusals(self, problem, device):
        yield from ()

    def traits(self, problem, knobs):
        return Traits("f32", 1e-6)

    def cost(self, problem, device, knobs):
        return self.seconds

    def build(self, problem, device, knobs):
        raise AssertionError("a choice builds nothing")


class Fast(Fake):
    name, seconds = "fake.fast", 1.0

    def refusals(self, problem, device):
        if problem.stride != (1, 1):
            yield f"stride is {problem.stride}; wanted (1, 1)"
        if problem.groups != 1:
            yield f"groups is {problem.groups}; wanted 1"


class Tiled(Fake):
    """Its workspace and cost go with the knobs; only the default depends on the batch."""

    name = "fake.tiled"
    asked: list[int] = []  # noqa: RUF012

    def knobs(self, problem, device):
        for size in (64, 8, 16, 1):
            self.asked.append(size)
            yield Tile(size)

    def traits(self, problem, knobs):
        return Traits("f32", 1e-6, batch_invariant=knobs.size < 64)

    def workspace_bytes(self, problem, device, knobs):
        return 100 * knobs.size

    def cost(self, problem, device, knobs):
        return 2.0 + 1.0 / knobs.size


class Inexact(Fake):
    name, seconds = "fake.inexact", 0.5

    def traits(self, problem, knobs):
        return Traits("f32", 1e-3, plain_sum=False)


class Racy(Fake):
    name, seconds = "fake.racy", 0.25

    def traits(self, problem, knobs):
        return Traits("f32", 1e-6, deterministic=False)


class Last(Fake):
    name, seconds = "fake.last", 9.0


class Elsewhere(Fake):
    name, device, seconds = "fake.elsewhere", "cuda", 0.0


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """The fake engines in place of the real ones, through the registry's own text form."""
    module = types.ModuleType("fake_engines")
    classes = (Fast, Tiled, Inexact, Racy, Elsewhere, Last)
    for cls in classes:
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, "fake_engines", module)
    monkeypatch.setattr(openconv.engine, "ENGINES", tuple(f"fake_engines:{cls.__name__}" for cls in classes))
    Tiled.asked.clear()


def order(problem=PROBLEM, **limits):
    accepted, _ = rank(problem, DEVICE, Policy(**limits))
    return [candidate.engine.name for candidate in accepted]


def reasons(problem=PROBLEM, **limits):
    _, refused = rank(problem, DEVICE, Policy(**limits))
    return {refusal.engine.name: " ".join(refusal.reasons) for refusal in refused}


# -- ranking -----------------------------------------------------------------------------------------------------


def test_cheapest_first_among_those_that_accept():
    assert order() == ["fake.inexact", "fake.fast", "fake.tiled", "fake.last"]
    assert order(STRIDED) == ["fake.inexact", "fake.tiled", "fake.last"]
    best = choose(PROBLEM, DEVICE, DEFAULT)
    assert (best.engine.name, best.cost, best.workspace, best.knobs) == ("fake.inexact", 0.5, 0, Knobs())


def test_a_tie_goes_to_the_earlier_in_the_registry(monkeypatch):
    monkeypatch.setattr(Last, "seconds", Fast.seconds)
    assert order(accuracy="strict")[:2] == ["fake.fast", "fake.last"]
    monkeypatch.setattr(openconv.engine, "ENGINES", tuple(reversed(openconv.engine.ENGINES)))
    assert order(accuracy="strict")[:2] == ["fake.last", "fake.fast"]


def test_every_refusal_is_kept_with_the_value_seen():
    refused = reasons(STRIDED.with_(groups=2))
    assert refused["fake.fast"] == "stride is (2, 2); wanted (1, 1) groups is 2; wanted 1"


def test_engines_of_another_device_take_no_part():
    assert "fake.elsewhere" not in order()
    assert "fake.elsewhere" not in reasons()
    accepted, refused = rank(PROBLEM, Device(kind="cuda", name="test"), DEFAULT)
    assert [c.engine.name for c in accepted] == ["fake.elsewhere"]
    assert refused == []


def test_a_choice_without_limits_looks_at_the_default_knobs_alone():
    best = next(c for c in rank(PROBLEM, DEVICE, DEFAULT)[0] if c.engine.name == "fake.tiled")
    assert best.knobs == Tile(64)
    assert Tiled.asked == [64]


# -- limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit, size", [(6400, 64), (6399, 16), (1600, 16), (1599, 8), (100, 1), (200, 1)])
def test_max_workspace_takes_the_cheapest_knobs_that_fit(limit, size):
    best = choose(PROBLEM, DEVICE, Policy(engine="fake.tiled", max_workspace=limit))
    assert best.knobs == Tile(size)
    assert best.workspace == 100 * size <= limit


def test_max_workspace_refuses_with_the_numbers():
    assert "fake.tiled" not in order(max_workspace=99)
    assert reasons(max_workspace=99)["fake.tiled"] == "workspace is 6400 bytes; max_workspace is 99"
    assert order(max_workspace=0) == ["fake.inexact", "fake.fast", "fake.last"]


def test_batch_invariance_takes_other_knobs_or_refuses(monkeypatch):
    best = choose(PROBLEM, DEVICE, Policy(engine="fake.tiled", batch_invariant=True))
    assert best.knobs == Tile(16)
    assert best.traits.batch_invariant
    monkeypatch.setattr(Fast, "traits", lambda self, problem, knobs: Traits("f32", 1e-6, batch_invariant=False))
    assert "fake.fast" not in order(batch_invariant=True)
    assert "batch-invariant" in reasons(batch_invariant=True)["fake.fast"]


def test_limits_hold_together():
    best = choose(PROBLEM, DEVICE, Policy(engine="fake.tiled", batch_invariant=True, max_workspace=900))
    assert best.knobs == Tile(8)


def test_determinism_is_asked_for_unless_waived():
    assert "fake.racy" not in order()
    assert "deterministic" in reasons()["fake.racy"]
    assert order(deterministic=False)[0] == "fake.racy"


def test_strict_accuracy_leaves_out_what_is_no_plain_sum():
    assert "fake.inexact" not in order(accuracy="strict")
    assert "strict" in reasons(accuracy="strict")["fake.inexact"]


# -- forced engines ----------------------------------------------------------------------------------------------


def test_a_forced_engine_is_the_only_one():
    assert order(engine="fake.last") == ["fake.last"]
    assert reasons(engine="fake.last")["fake.fast"] == "engine is forced to fake.last"


def test_a_list_is_tried_in_its_own_order():
    assert order(engine="fake.last,fake.fast") == ["fake.last", "fake.fast"]
    assert order(STRIDED, engine="fake.fast, fake.last") == ["fake.last"]


def test_a_trailing_comma_prefers_without_forcing():
    """The policy of a backward pass: the forward's engine first, any other if it does not take the problem."""
    assert order(engine="fake.last,") == ["fake.last", "fake.inexact", "fake.fast", "fake.tiled"]
    assert order(STRIDED, engine="fake.fast,") == ["fake.inexact", "fake.tiled", "fake.last"]


@pytest.mark.parametrize(
    "engine, backward", [(None, None), ("fake.fast", "fake.fast,"), ("fake.fast,", "fake.fast,"), ("a,b", "a,b,")]
)
def test_backward_prefers_what_forward_forces(engine, backward):
    assert Policy(engine=engine, accuracy="strict").for_backward() == Policy(engine=backward, accuracy="strict")


def test_an_unknown_engine_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match=r"'fake\.nope'.*fake\.fast, fake\.tiled"):
        choose(PROBLEM, DEVICE, Policy(engine="fake.nope"))
    with pytest.raises(ValueError, match=r"'fake\.nope'"):
        engine_named("fake.nope")
    assert engine_named("fake.tiled").name == "fake.tiled"


def test_limits_bind_forced_engines_too():
    with pytest.raises(UnsupportedProblem, match="max_workspace is 10"):
        choose(PROBLEM, DEVICE, Policy(engine="fake.tiled", max_workspace=10))


def test_unsupported_lists_every_engine_of_the_device(monkeypatch):
    monkeypatch.setattr(Last, "refusals", lambda self, problem, device: iter(["K is 8; wanted 7"]))
    with pytest.raises(UnsupportedProblem) as error:
        choose(STRIDED, DEVICE, Policy(accuracy="strict", max_workspace=50))
    assert set(error.value.refusals) == {"fake.fast", "fake.tiled", "fake.inexact", "fake.racy", "fake.last"}
    text = str(error.value)
    assert str(STRIDED) in text
    for line in (
        "fake.fast: stride is (2, 2); wanted (1, 1)",
        "fake.tiled: workspace is 6400 bytes; max_workspace is 50",
        "fake.inexact: no plain sum of products; accuracy is strict",
        "fake.racy: not deterministic; the policy asks for it",
        "fake.last: K is 8; wanted 7",
    ):
        assert line in text
    assert isinstance(error.value, RuntimeError)


# -- the registry ------------------------------------------------------------------------------------------------


def test_an_engine_says_where_it_is_written():
    engine = engine_named("fake.tiled")
    assert engine.summary == "Its workspace and cost go with the knobs; only the default depends on the batch."
    assert Path(engine.source) == Path(__file__)


def test_knobs_print():
    assert str(Knobs()) == "-"
    assert str(Tile(8)) == "size=8"


# -- policy ------------------------------------------------------------------------------------------------------

POLICIES = st.builds(
    Policy,
    engine=st.none() | st.sampled_from(("cpu.naive", "cpu.a,cpu.b", "cpu.naive,")),
    precision=st.none() | st.sampled_from(("ieee", "tf32", "tf32x3")),
    accuracy=st.sampled_from(("default", "strict")),
    max_workspace=st.none() | st.integers(0, 1 << 40),
    batch_invariant=st.booleans(),
    deterministic=st.booleans(),
)


@given(POLICIES)
def test_policy_text_parses_back(value):
    assert Policy.parse(str(value)) == value
    assert (str(value) == "") == (value == DEFAULT)


@given(POLICIES, POLICIES)
def test_a_policy_over_another_keeps_what_it_says(top, base):
    joined = top.over(base)
    for name in Policy.__dataclass_fields__:
        mine, default = getattr(top, name), getattr(DEFAULT, name)
        assert getattr(joined, name) == (mine if mine != default else getattr(base, name))


def test_but_changes_what_is_given():
    assert DEFAULT.but(engine=None, accuracy=None) is DEFAULT
    assert DEFAULT.but(max_workspace=0, accuracy="strict") == Policy(max_workspace=0, accuracy="strict")


@pytest.mark.parametrize(
    "fields, error, words",
    [
        ({"accuracy": "exact"}, ValueError, ["'exact'", "default, strict"]),
        ({"precision": "f16"}, ValueError, ["'f16'", "ieee, tf32, tf32x3"]),
        ({"engine": 3}, TypeError, ["3", "cpu.naive"]),
        ({"max_workspace": -1}, ValueError, ["-1", "bytes"]),
        ({"max_workspace": 1.5}, ValueError, ["1.5", "bytes"]),
    ],
)
def test_a_policy_refuses_with_the_value_seen(fields, error, words):
    with pytest.raises(error) as raised:
        Policy(**fields)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    "text, word",
    [("speed=1", "'speed'"), ("max_workspace=much", "much"), ("batch_invariant=yes", "'yes'"), ("x", "'x'")],
)
def test_a_policy_text_that_is_none_is_refused(text, word):
    with pytest.raises(ValueError, match=word):
        Policy.parse(text)


def test_blocks_nest_and_restore():
    before = current_policy()
    with policy(batch_invariant=True) as outer:
        assert current_policy() is outer
        with policy(max_workspace=7) as inner:
            assert inner == current_policy() == before.but(batch_invariant=True, max_workspace=7)
        assert current_policy() is outer
        with pytest.raises(ValueError, match="accuracy"), policy(accuracy="wrong"):
            pass
        with policy(batch_invariant=False):
            assert not current_policy().batch_invariant
        with pytest.raises(KeyError), policy(accuracy="strict"):
            raise KeyError
        assert current_policy() is outer
    assert current_policy() is before


def test_each_thread_has_its_own_policy():
    """A block in one thread is not seen in another, and blocks that overlap in time do not meet."""
    entered, leave, seen = threading.Barrier(3), threading.Event(), {}

    def work(limit):
        with policy(max_workspace=limit):
            entered.wait(10)
            leave.wait(10)
            seen[limit] = current_policy().max_workspace

    before = current_policy()
    workers = [threading.Thread(target=work, args=(limit,)) for limit in (1, 2)]
    for worker in workers:
        worker.start()
    entered.wait(10)
    with policy(max_workspace=3):
        leave.set()
        for worker in workers:
            worker.join()
        assert current_policy().max_workspace == 3
    assert seen == {1: 1, 2: 2}
    assert current_policy() is before


# -- without torch -----------------------------------------------------------------------------------------------


def run_python(code, **environment):
    """Run code that finds the directory of the package in its first argument."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(Path(openconv.__file__).parent)],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_describing_and_choosing_need_neither_torch_nor_numba():
    """problem, epilogue, engine, device and select import nothing but Python, and choose among engines that are given.

    The package's own __init__ imports torch; a stub in its place lets the modules be loaded alone.
    """
    done = run_python(
        """
        import importlib.abc, sys, types

        class Forbid(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("torch", "numba", "llvmlite", "numpy", "cuda", "triton"):
                    raise ImportError(f"the core imports {name}")

        sys.meta_path.insert(0, Forbid())
        package = types.ModuleType("openconv")
        package.__path__ = [sys.argv[1]]
        sys.modules["openconv"] = package

        import openconv.engine, openconv.winograd
        from openconv.device import Device
        from openconv.engine import Engine, Traits, UnsupportedProblem
        from openconv.epilogue import Epilogue
        from openconv.problem import Problem
        from openconv.select import Policy, choose, policy, rank

        class Only(Engine):
            name = "fake.only"
            def refusals(self, problem, device):
                if problem.groups > 1:
                    yield f"groups is {problem.groups}; wanted 1"
            def traits(self, problem, knobs): return Traits("f32", 1e-6)
            def cost(self, problem, device, knobs): return problem.flops / device.flops
            def build(self, problem, device, knobs): raise NotImplementedError

        fakes = types.ModuleType("fakes")
        fakes.Only = Only
        sys.modules["fakes"] = fakes
        openconv.engine.ENGINES = ("fakes:Only",)
        problem = Problem.parse("fprop n1 c4 h8 w8 k4 r3 s3 pad1 f16 nhwc +bias+relu")
        assert problem.epilogue == Epilogue().bias().relu()
        device = Device(kind="cpu", name="test")
        with policy(accuracy="strict") as strict:
            assert choose(problem, device, strict).engine.name == "fake.only"
        try:
            choose(problem.with_(groups=2), device, Policy())
        except UnsupportedProblem as error:
            print(error)
        """
    )
    assert done.returncode == 0, done.stderr
    assert "fake.only: groups is 2; wanted 1" in done.stdout


def test_import_reads_the_environment_and_compiles_nothing():
    """OPENCONV_ENGINE names an engine, OPENCONV_TUNING a mode; engines, and Numba, are imported by the first choice."""
    done = run_python(
        """
        import sys
        sys.path.insert(0, sys.argv[1].rpartition("/")[0])
        from openconv.select import current_policy
        print(current_policy())
        print("numba" in sys.modules, "openconv.cpu.naive" in sys.modules)
        """,
        OPENCONV_ENGINE="cpu.naive",
        OPENCONV_TUNING="measure",
    )
    assert done.stdout.splitlines() == ["engine=cpu.naive;tuning=measure", "False False"], done.stderr


def test_a_gpu_s_choice_does_not_import_the_cpu_s_engines():
    """Also where the tuning database is asked, which looks engines up by name."""
    done = run_python(
        """
        import sys
        sys.path.insert(0, sys.argv[1].rpartition("/")[0])
        from openconv.engine import engine_named
        print(engine_named("cuda.naive").name, "numba" in sys.modules, "openconv.cpu.naive" in sys.modules)
        """
    )
    assert done.stdout.splitlines() == ["cuda.naive False False"], done.stderr
