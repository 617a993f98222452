"""Grades exercise 15: the regret over a table of problems, and races of which the outcome is known."""

from __future__ import annotations

from statistics import NormalDist
from types import ModuleType

import numpy as np
import pytest


def test_without_a_neighbour_the_least_prediction(answer: ModuleType) -> None:
    assert answer.choose({"a": 3e-6, "b": 2e-6, "c": 2e-6}, {}) == "b"


@pytest.mark.parametrize(
    ("predicted", "neighbour", "wanted"),
    [
        ({"a": 10e-6, "b": 12e-6}, {"a": (5e-6, 10e-6), "b": (6e-6, 6e-6)}, "b"),
        # b was not measured: a's factor of 2 says that predictions are short in general, not that a's is.
        ({"a": 10e-6, "b": 12e-6}, {"a": (5e-6, 10e-6)}, "a"),
        # The geometric mean of 4 and 1 is 2, so that c is expected to take 22 us; the arithmetic mean would be 27.5.
        ({"a": 10e-6, "b": 24e-6, "c": 11e-6}, {"a": (1e-6, 4e-6), "b": (3e-6, 3e-6)}, "c"),
        ({"a": 10e-6, "b": 9e-6}, {"a": (4e-6, 2e-6), "gone": (1e-6, 9e-6)}, "b"),
    ],
)
def test_factors(
    answer: ModuleType, predicted: dict[str, float], neighbour: dict[str, tuple[float, float]], wanted: str
) -> None:
    got = answer.choose(dict(predicted), dict(neighbour))
    assert got == wanted, f"predicted {predicted}, neighbour {neighbour}: {got!r}; wanted {wanted!r}"


def test_regret_over_a_table(answer: ModuleType) -> None:
    rng = np.random.default_rng(0)
    names = [f"engine{at}" for at in range(6)]
    ours, alone = [], []
    for _ in range(400):
        # How far off each model is for problems of this kind, and what differs between two neighbours.
        off = np.exp(rng.normal(0, 0.5, 6))
        predicted, before = np.exp(rng.normal(0, 0.4, (2, 6))) * 50e-6
        took, took_before = (p * off * np.exp(rng.normal(0, 0.03, 6)) for p in (predicted, before))
        neighbour = {
            name: (before[at], took_before[at]) for at, name in enumerate(names) if at < 5 or rng.random() < 0.5
        }
        name = answer.choose(dict(zip(names, predicted, strict=True)), neighbour)
        assert name in names, f"{name!r} is none of the engines"
        ours.append(took[names.index(name)] / took.min())
        alone.append(took[predicted.argmin()] / took.min())
    mean, without = (float(np.exp(np.log(each).mean())) for each in (ours, alone))
    assert without > 1.3, "the table is meant to be hard"
    assert mean < 1.05, f"choices take {mean:.3f} times as long as the fastest; wanted less than 1.05"


def _race(*middles: float, count: int, noise: float = 0.02, seed: int = 0) -> list[list[float]]:
    """Samples in random order whose percentiles are those of a normal distribution, without luck."""
    rng, normal = np.random.default_rng(seed), NormalDist()
    spread = [normal.inv_cdf((at + 0.5) / count) for at in range(count)]
    return [[middle * 1e-3 * (1 + noise * each) for each in rng.permutation(spread)] for middle in middles]


@pytest.mark.parametrize("seed", range(10))
def test_a_clear_loser_is_out(answer: ModuleType, seed: int) -> None:
    for middles, wanted in (((1.0, 1.5, 2.0), [0]), ((1.5, 1.0, 2.0), [1])):
        got = answer.undecided(_race(*middles, count=5, seed=seed))
        assert got == wanted, f"medians of {middles} ms, 5 runs that scatter by 2%: {got}; wanted {wanted}"


@pytest.mark.parametrize("seed", range(10))
def test_the_best_has_an_error_too(answer: ModuleType, seed: int) -> None:
    (unsure,), (sure,) = _race(1.0, count=8, noise=0.08, seed=seed), _race(1.04, count=1000, noise=0.02, seed=seed)
    got = answer.undecided([unsure, sure])
    assert got == [0, 1], f"the best has 8 runs that scatter by 8%, and the other is 4% slower: {got}; wanted [0, 1]"


@pytest.mark.parametrize("seed", range(10))
def test_few_runs_do_not_decide_what_many_do(answer: ModuleType, seed: int) -> None:
    few, many = (_race(1.0, 1.05, count=count, noise=0.08, seed=seed) for count in (8, 1500))
    assert answer.undecided(few) == [0, 1], "8 runs that scatter by 8% cannot tell 5% apart"
    assert answer.undecided(many) == [0], "1500 runs that scatter by 8% can tell 5% apart"


@pytest.mark.parametrize("seed", range(10))
def test_equals_are_equal(answer: ModuleType, seed: int) -> None:
    runs = _race(1.0, 1.005, 1.002, count=2000, noise=0.05, seed=seed)
    middle = [float(np.median(each)) for each in runs]
    got, wanted = answer.undecided(runs), [middle.index(min(middle))]
    assert got == wanted, f"2000 runs show that all three are within 2%: {got}; wanted the best alone, {wanted}"
    few = _race(1.0, 1.005, 1.002, count=6, noise=0.15, seed=seed)
    assert len(answer.undecided(few)) > 1, "6 runs that scatter by 15% cannot show that contestants are equal"


@pytest.mark.parametrize("seed", range(10))
def test_interruptions_change_nothing(answer: ModuleType, seed: int) -> None:
    runs = _race(1.0, 1.2, count=40, seed=seed)
    runs[0][seed] *= 50
    runs[0][39 - seed] *= 9
    assert answer.undecided(runs) == [0], "two interrupted runs of forty have moved the middle or its error"


def test_one_contestant(answer: ModuleType) -> None:
    assert answer.undecided([[1e-3, 2e-3]]) == [0]
