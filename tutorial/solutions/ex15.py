"""A solution of exercise 15."""

from __future__ import annotations

from math import sqrt
from statistics import geometric_mean, median


def choose(predicted: dict[str, float], neighbour: dict[str, tuple[float, float]]) -> str:
    """See the exercise."""
    factors = {name: measured / cost for name, (cost, measured) in neighbour.items() if name in predicted}
    usual = geometric_mean(factors.values()) if factors else 1.0
    return min(predicted, key=lambda name: predicted[name] * factors.get(name, usual))


def undecided(samples: list[list[float]]) -> list[int]:
    """See the exercise."""
    middle = [median(each) for each in samples]
    reach = [2 * _error(each) for each in samples]
    best = min(range(len(samples)), key=lambda at: middle[at])
    left = [at for at in range(len(samples)) if middle[at] - reach[at] <= middle[best] + reach[best]]
    return [best] if all(middle[at] + reach[at] <= 1.02 * middle[best] for at in left) else left


def _error(samples: list[float]) -> float:
    ordered, last = sorted(samples), len(samples) - 1
    spread = ordered[round(0.8 * last)] - ordered[round(0.2 * last)]
    return 1.25 * spread / 1.68 / sqrt(len(samples))
