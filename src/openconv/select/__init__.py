"""Which engine, which knobs, and why: pure Python, without torch."""

from .choose import Candidate, Refusal, choose, rank
from .policy import DEFAULT, Policy, current_policy, policy

__all__ = ["DEFAULT", "Candidate", "Policy", "Refusal", "choose", "current_policy", "policy", "rank"]
