"""Exercise 15: choose from predictions and a neighbour, and know when a race is decided.

Grade it with `make exercise N=15`.
"""

from __future__ import annotations


def choose(predicted: dict[str, float], neighbour: dict[str, tuple[float, float]]) -> str:
    """The engine that is expected to be the fastest.

    `predicted` has the seconds that each engine predicts for a problem. `neighbour` has, for some of them, what they
    predicted for a similar problem and what they were measured to take there, both in seconds.

    An engine that was measured is expected to be off by the same factor here. One that was not is expected to be off by
    the geometric mean of those factors, and without any measurement by none. Of equals the earlier one in `predicted`
    is chosen.
    """
    raise NotImplementedError("your turn: expected seconds of each engine, then the least")


def undecided(samples: list[list[float]]) -> list[int]:
    """Which contestants may still be the fastest, in their order: an index for each. One index: the race is decided.

    Each has a list of measured seconds. The middle of a list is its median. Its error is 1.25 * s / sqrt(n), where n is
    the number of samples and s the distance between their 20th and 80th percentile over 1.68, which for a normal
    distribution is the standard deviation, and is not moved by a few outliers.

    - A contestant is out if its middle, less twice its error, lies above that of the best with twice its own.
    - If of those that are left none can be more than 2% slower than the best, that is if each middle with twice its
      error is at most 1.02 times the best middle, the best alone is returned: they are as good as equal.
    """
    raise NotImplementedError("your turn: medians, errors, who is out, and whether the rest are equal")
