"""The notebook: valid, without outputs, and right from top to bottom."""

from __future__ import annotations

import ast
import json
import linecache
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "notebooks" / "openconv.ipynb"


@pytest.fixture(scope="module")
def notebook() -> dict[str, Any]:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def sources(notebook: dict[str, Any], kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_it_is_a_notebook_of_format_4(notebook):
    """What nbformat's schema asks of version 4.5, as far as a notebook without outputs has it."""
    assert sorted(notebook) == ["cells", "metadata", "nbformat", "nbformat_minor"]
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        code = ["execution_count", "outputs"] if cell["cell_type"] == "code" else []
        assert sorted(cell) == sorted(["cell_type", "id", "metadata", "source", *code])
        assert cell["cell_type"] in ("markdown", "code")
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        assert isinstance(cell["metadata"], dict)
        assert cell["source"]
        assert all(isinstance(line, str) and line.endswith("\n") for line in cell["source"][:-1])
        assert not cell["source"][-1].endswith("\n")


def test_no_outputs_are_stored(notebook):
    """They hold times of somebody's machine; recorded ones are elsewhere."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], f"{cell['id']}: clear the outputs before committing"
            assert cell["execution_count"] is None, f"{cell['id']}: clear the outputs before committing"


def test_cells_are_plain_python(notebook):
    """No magics and no shell lines, so that a test can run them."""
    for text in sources(notebook, "code"):
        ast.parse(text)


def test_its_links_lead_somewhere(notebook):
    links = [link for text in sources(notebook, "markdown") for link in re.findall(r"\]\(([^)#]+)", text)]
    assert len(links) > 4
    for link in links:
        if link.startswith("https://") or not (ROOT / Path(link).parts[1]).exists():  # an sdist has no docs
            continue
        assert (NOTEBOOK.parent / link).exists(), f"{link} leads nowhere"


def test_it_runs_from_top_to_bottom(notebook, monkeypatch, tmp_path, capsys):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn: list[int] = []

    def show() -> None:
        drawn.extend(len(pyplot.figure(number).axes) for number in pyplot.get_fignums())
        pyplot.close("all")

    monkeypatch.setattr(pyplot, "show", show)
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "__main__"}
    for at, text in enumerate(sources(notebook, "code"), 1):
        name = f"<cell {at} of {NOTEBOOK.name}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # for tracebacks
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            exec(compile(text, name, "exec"), space)
    printed = capsys.readouterr().out

    device = space["device"]
    assert drawn == [4, 1, 1, 1, 1], "four pictures; errors; two ladders; the map of choices"
    for times in (space["on_photo"], space["on_layer"]):
        assert {"torch", f"{device}.naive"} < set(times)
        assert list(times.values()) == sorted(times.values(), reverse=True)
        assert min(times.values()) > 0
    if device == "cpu":
        assert "cpu.filter2d" in space["on_photo"]
        assert {"cpu.direct", "cpu.winograd", "cpu.fft", "cpu.im2col_gemm"} < set(space["on_layer"])
    assert max(space["errors"].values()) < 1e-5
    assert space["told"].winner.name in printed
    assert "refused" in printed
    assert len(space["graph"].explain(device).kernels) < 5, "fused"
    assert len(space["converted"].swapped) == 5
    assert sum(bool(each.norm) for each in space["fused"].fused) == 5, "every batch norm went into its convolution"
    assert list(tmp_path.iterdir()) == [], "the notebook writes no files"
