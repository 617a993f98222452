"""Which engine, which knobs, and why: pure Python, without torch."""

from .choose import Candidate, Refusal, choose, known_of, rank, search, version_of
from .policy import DEFAULT, Policy, current_policy, policy, tuning, under

__all__ = [
    "DEFAULT",
    "Candidate",
    "Policy",
    "Refusal",
    "choose",
    "current_policy",
    "known_of",
    "policy",
    "rank",
    "search",
    "tuning",
    "under",
    "version_of",
]
