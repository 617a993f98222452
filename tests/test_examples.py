"""The examples, with small sizes: each one runs, and does what it says."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner, Result

import openconv
from openconv.engine import engine_named, unregister

ROOT = Path(__file__).parent.parent
NAMES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.fixture(autouse=True)
def _somewhere(tmp_path, monkeypatch) -> Iterator[None]:
    """In a folder of its own, with the engine that an example registered taken out again."""
    monkeypatch.chdir(tmp_path)
    yield
    if any(engine.name == "cpu.shifted_adds" for engine in openconv.engine.engines("cpu")):
        unregister("cpu.shifted_adds")


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def run(module: ModuleType, *options: object) -> Result:
    app = typer.Typer()
    app.command()(module.main)
    return CliRunner().invoke(app, [str(option) for option in options])


def told(module: ModuleType, *options: object) -> str:
    """What it prints, where all went well."""
    result = run(module, *options)
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return re.sub(r"\s+", " ", result.output)


@pytest.mark.parametrize("name", NAMES)
def test_each_says_what_it_is_and_how_to_run_it(name):
    module = example(name)
    assert module.__doc__ is not None
    assert f"python examples/{name}.py" in module.__doc__
    assert f"`examples/{name}.py`" in (ROOT / "README.md").read_text()
    assert "Usage" in told(module, "--help")
    for line in re.findall(rf"examples/{name}\.py(.*)", module.__doc__):
        for option in re.findall(r"--([a-z]+)", line.partition("#")[0]):
            assert option in module.main.__annotations__, f"--{option} is no option of it"


# -- train_small_cnn --------------------------------------------------------------------------------------------------


def test_trainings_of_torch_and_openconv_go_the_same_way(tmp_path):
    text = told(example("train_small_cnn"), "--steps", 50, "--out", tmp_path / "new")
    assert "3 convolutions swapped for openconv's" in text
    rows = re.findall(r"│ (torch|openconv|torch, moved) │ ([\d.]+) │ ([\d.]+) │ ([\d.]+)% │", text)
    assert [row[0] for row in rows] == ["torch", "openconv", "torch, moved"]
    for _, first, last, _ in rows:
        assert float(last) < float(first) - 0.1
    assert abs(float(rows[0][2]) - float(rows[1][2])) < 0.02
    first, most = map(float, re.findall(r"losses of openconv and torch: (\S+) in .*? (\S+) at the most", text)[0])
    assert first < 1e-6
    assert first <= most < 0.02
    assert (tmp_path / "new" / "train_small_cnn.png").read_bytes().startswith(b"\x89PNG")


def test_in_double_they_are_the_same():
    """What is left is rounding: in float64 nothing of the difference remains."""
    module = example("train_small_cnn")
    torch.manual_seed(0)
    model = module.network().double()
    ours = openconv.convert(model, inplace=False, engine="cpu.direct").model
    found = [module.train(each, 12, 8, 32, "", Console(quiet=True)).losses for each in (model, ours)]
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-10)
    assert found[0] != found[1], "another order of additions"


# -- filter_gigapixel -------------------------------------------------------------------------------------------------


def whole(image: np.ndarray[Any, Any], module: ModuleType) -> torch.Tensor:
    """The image sharpened in one piece, in float64, by torch."""
    padded = F.pad(torch.from_numpy(image).double()[None, None], (3, 3, 3, 3), mode="replicate")
    return F.conv2d(padded, module.sharpening().double())[0, 0].add(2048).div(4096).floor().clamp(0, 255)


@pytest.mark.parametrize(
    "shape, tile", [((300, 420), 128), ((300, 420), 97), ((300, 420), 512), ((3, 200), 64), ((1, 1), 8)]
)
def test_tiles_are_the_whole(shape, tile, tmp_path):
    module, image = example("filter_gigapixel"), np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    np.save(tmp_path / "image.npy", image)
    text = told(module, "--image", tmp_path / "image.npy", "--tile", tile, "--out", tmp_path)
    assert re.search(r"where four tiles meet, 0 of [1-9]\d* pixels differ", text)
    result = np.load(tmp_path / "gigapixel-sharp.npy")
    assert (result.shape, result.dtype) == (shape, np.uint8)
    assert torch.equal(torch.from_numpy(result).double(), whole(image, module))
    assert len(np.unique(result)) > 1 or shape == (1, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "filter_gigapixel.png", "gigapixel-sharp.npy", "image.npy",
    ]  # fmt: skip


def test_no_piece_is_larger_than_a_tile_and_its_halo(tmp_path, monkeypatch):
    module, seen = example("filter_gigapixel"), []
    sharpened = module.sharpened

    def watched(pixels, *rest):
        seen.append(pixels.shape)
        return sharpened(pixels, *rest)

    monkeypatch.setattr(module, "sharpened", watched)
    assert "1500 x 1500" in told(module, "--size", 1500, "--tile", 400, "--out", tmp_path)
    assert len(seen) == 16
    assert max(max(shape) for shape in seen) == 406


def test_a_wrong_result_is_found(tmp_path):
    module = example("filter_gigapixel")
    with Progress(disable=True) as progress:
        module.draw(tmp_path / "a.npy", 300, progress)
        module.filter_file(tmp_path / "a.npy", tmp_path / "b.npy", 100, "cpu", progress)
    assert module.mistakes(tmp_path / "a.npy", tmp_path / "b.npy", 100)[0] == 0
    result = np.load(tmp_path / "b.npy", mmap_mode="r+")
    result[99, 100] ^= 1
    result.flush()
    assert module.mistakes(tmp_path / "a.npy", tmp_path / "b.npy", 100)[0] == 1


def test_what_is_no_image_and_what_has_no_room_is_told(tmp_path, monkeypatch):
    module = example("filter_gigapixel")
    np.save(tmp_path / "image.npy", np.zeros((4, 4, 3)))
    result = run(module, "--image", tmp_path / "image.npy", "--out", tmp_path)
    assert "has shape (4, 4, 3) of float64; wanted (rows, columns) of uint8" in str(result.exception)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100}))
    result = run(module, "--size", 16, "--out", tmp_path)
    assert "needs 256 bytes" in str(result.exception)
    assert "has 100 free: name another --out" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["image.npy"]


def test_ctrl_c_leaves_no_half_written_result(tmp_path):
    np.lib.format.open_memmap(tmp_path / "image.npy", mode="w+", dtype=np.uint8, shape=(20000, 20000))
    before = b"the result of another day"
    (tmp_path / "gigapixel-sharp.npy").write_bytes(before)
    script = str(ROOT / "examples" / "filter_gigapixel.py")
    command = [sys.executable, script, "--image", "image.npy", "--out", ".", "--tile", "256"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 120
        while not list(tmp_path.glob(".gigapixel-sharp.npy.*")):
            assert process.poll() is None, process.stdout and process.stdout.read()
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) != 0
    finally:
        process.kill()
        process.communicate()
    assert (tmp_path / "gigapixel-sharp.npy").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gigapixel-sharp.npy", "image.npy"]


# -- run_converted_resnet ---------------------------------------------------------------------------------------------


def test_a_converted_resnet_gives_what_torch_gives():
    text = told(example("run_converted_resnet"), "--size", 64, "--seconds", 0.1)
    assert "53 convolutions are openconv's now" in text
    assert "fused into them: 53 batch norms, 16 sums, 49 activations" in text
    rows = re.findall(r"│ (torch|converted|fused) │ [\d.]+ ms │ [\d.]+ │ (\S+) │ (\d+)% │", text)
    assert [row[0] for row in rows] == ["torch", "converted", "fused"]
    for _, off, same in rows:
        assert 0 < float(off) < 1e-4
        assert same == "100"


# -- fused_block_as_graph ---------------------------------------------------------------------------------------------


def test_a_block_is_two_kernels_and_comes_back_from_its_file(tmp_path):
    module, path = example("fused_block_as_graph"), tmp_path / "block.json"
    text = told(module, "--batch", 2, "--channels", 8, "--size", 12, "--out", path)
    assert "7 nodes -> 2 kernels" in text
    assert "its scale is in the weights of conv_fprop" in text
    assert "the same bits as before: True; one image alone: (1, 8, 12, 12)" in text
    torch.manual_seed(0)
    block, x = module.Block(8), torch.randn(2, 8, 12, 12)
    torch.testing.assert_close(openconv.Graph.load(path)(x), block(x), rtol=1e-4, atol=1e-4)


# -- custom_engine ----------------------------------------------------------------------------------------------------


def test_the_custom_engine_is_chosen_and_right():
    module = example("custom_engine")
    text = told(module, "--size", 96, "--generations", 6)
    assert "runs cpu.shifted_adds: Integer filters of one channel and stride 1" in text
    assert re.search(r"│ cpu.shifted_adds │ 6 │ [\d.]+ ms │ │ cpu.naive │ 5 │", text)
    assert "both engines give the same boards: True" in text
    glider = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    for row, column in ((0, 1), (1, 2), (2, 0), (2, 1), (2, 2)):
        glider[0, 0, row, column] = 1
    board = glider
    for _ in range(4):
        board = module.generation(board)
    assert torch.equal(board, glider.roll((1, 1), (2, 3))), "after four generations it has moved by one"


def test_the_custom_engine_adds_as_the_reference_does():
    """Every kind of integer, which wraps, with padding that exceeds the filter, and the image."""
    engine = engine_named(example("custom_engine").ShiftedAdds.name)
    lines = ("n2 c1 h9 w7 k1 r3 s3 pad1", "n1 c1 h5 w40 k1 r1 s9 pad0,4", "n1 c1 h3 w4 k1 r5 s6 pad2:4,3:9",
             "n3 c1 h13 w12 k1 r3 s2 dil3,4 pad2:0", "n1 c1 h2 w1 k1 r2 s2 pad5,4", "n1 c1 h6 w6 k1 r6 s6")  # fmt: skip
    for line, dtype in itertools.product(lines, (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)):
        problem = openconv.Problem.parse(f"fprop {line} {'u8' if dtype is torch.uint8 else f'i{dtype.itemsize * 8}'}")
        assert list(engine.refusals(problem, openconv.plan.device_of(torch.device("cpu")))) == []
        limits = torch.iinfo(dtype)
        x, w = (torch.randint(max(limits.min, -(2**40)), min(limits.max, 2**40), shape, dtype=dtype)
                for shape in (problem.x_shape, problem.w_shape))  # fmt: skip
        found = []
        for name in ("cpu.naive", engine.name):
            plan = openconv.plan.make_plan(problem, openconv.plan.device_of(x.device), openconv.Policy(engine=name))
            found.append(plan(x, w))
        assert torch.equal(*found), f"{problem}"


@pytest.mark.parametrize("line, reason", [
    ("fprop n1 c1 h9 w9 k1 r3 s3 f32", "dtype is f32; wanted an integer"),
    ("fprop n1 c2 h9 w9 k1 r3 s3 i8", "C is 2 and K is 1; wanted 1 and 1"),
    ("fprop n1 c1 h9 w9 k1 r3 s3 stride2,1 u8", "stride is (2, 1)"),
    ("wgrad n1 c1 h9 w9 k1 r3 s3 i32", "direction is wgrad with 2 axes"),
    ("fprop n1 c1 w9 k1 s3 i32", "direction is fprop with 1 axes"),
])  # fmt: skip
def test_the_custom_engine_says_what_it_does_not_take(line, reason):
    example("custom_engine")
    told = openconv.explain(line)
    refused = {refusal.name: refusal.reasons for refusal in told.refusals}
    assert any(text.startswith(reason) for text in refused["cpu.shifted_adds"])
