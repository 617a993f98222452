"""Measure engines and peers side by side: verify first, then time, record everything, losses included."""
