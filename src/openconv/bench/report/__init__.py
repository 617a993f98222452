"""What was recorded, to look at: tables, plots, a page with filters, comparisons, and the tables of the documents."""

from .compare import Comparison, compare_runs
from .documents import render, replace_part, write_documents
from .page import render_page, write_page
from .plots import write_plots
from .runs import Run, load
from .tables import baseline, choices, details, heuristic_loss, summary

__all__ = [
    "Comparison", "Run", "baseline", "choices", "compare_runs", "details", "heuristic_loss", "load", "render",
    "render_page", "replace_part", "summary", "write_documents", "write_page", "write_plots",
]  # fmt: skip
