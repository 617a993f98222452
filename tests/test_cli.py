"""The command line: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from typer.testing import CliRunner

from openconv.cli import app
from openconv.engine import engines
from openconv.files import write_atomic
from openconv.pictures import KERNELS, Picture, filter_picture, make_kernel, read_kernel, read_picture, write_picture
from openconv.png16 import read_png16, write_png16
from openconv.rewrites.base import Wrapper

LINE = "fprop n2 c6 h9 w8 k4 r3 s3 pad1 f32 nchw"


def run(*args: object) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def fails(*args: object) -> str:
    """The one line of a failure."""
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert result.stdout == ""
    return str(lines[0])


# -- explain, engines, doctor ----------------------------------------------------------------------------------------


def test_explain_takes_the_problem_quoted_or_in_words():
    quoted, words = run("explain", LINE), run("explain", *LINE.split())
    assert quoted.exit_code == words.exit_code == 0
    assert quoted.stdout == words.stdout
    assert "refused" in quoted.stdout


def test_explain_json_and_limits():
    result = run("explain", LINE, "--json", "--max-workspace", "1K", "--batch-invariant", "--accuracy", "strict")
    data = json.loads(result.stdout)
    assert data["policy"]["max_workspace"] == 1024
    assert data["policy"]["batch_invariant"] is True
    assert data["policy"]["accuracy"] == "strict"
    assert all(c["workspace"] <= 1024 and c["batch_invariant"] for c in data["candidates"])
    forced = json.loads(run("explain", LINE, "--json", "--engine", "cpu.naive", "--measure", "--budget", "0.01").stdout)
    assert forced["winner"] == "cpu.naive"
    assert forced["candidates"][0]["measured"] > 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("fprop n1 c1",), "lacks"),
        (("sideways n1",), "wanted one of fprop, dgrad, wgrad"),
        ((LINE, "--engine", "cpu.magic"), "there is no engine"),
        ((LINE, "--accuracy", "sloppy"), "wanted one of default, strict"),
        ((LINE, "--max-workspace", "much"), "wanted bytes"),
    ],
)
def test_explain_fails_in_one_line(args, words):
    assert words in fails("explain", *args)


def test_engines_lists_them_all():
    names = [e.name for e in engines()]
    text = run("engines").stdout
    rows = json.loads(run("engines", "--json").stdout)
    markdown = run("engines", "--markdown").stdout
    assert [row["name"] for row in rows] == names
    assert all(name in text and f"[`{name}`](src/openconv/" in markdown for name in names)
    table, _, needs = markdown.partition("\n\nWhat they are, and what they need:\n\n")
    assert len(table.splitlines()) == 2 + len(names)
    assert len({line.count(" | ") for line in table.splitlines() if not line.startswith("|---")}) == 1
    assert [line.split("`")[1] for line in needs.splitlines()] == names


def test_the_support_table_is_what_the_engines_say():
    rows = {row["name"]: row for row in json.loads(run("engines", "--json").stdout)}
    naive, filter2d = rows["cpu.naive"], rows["cpu.filter2d"]
    assert naive["needs"] == []
    assert naive["passes"] == ["fprop", "dgrad", "wgrad"]
    assert naive["ranks"] == [1, 2, 3]
    assert "f16" in naive["through"]
    assert "i8" in naive["dtypes"]
    assert "i8" not in filter2d["dtypes"] + filter2d["through"]
    assert filter2d["ranks"] == [1, 2]
    assert any(need.startswith("stride") for need in filter2d["needs"])
    assert not any("rank" in need or "dtype" in need for need in filter2d["needs"])
    assert rows["cpu.gemm_1x1"]["batch_invariant"] == "on request"


def test_doctor_is_content_here():
    result = run("doctor")
    assert result.exit_code == 0, result.stdout
    findings = json.loads(run("doctor", "--json").stdout)
    areas = {finding["area"] for finding in findings}
    assert {"versions", "CPU", "CUDA", "kernel cache", "optional", "engines"} <= areas
    assert [f["what"] for f in findings if f["area"] == "engines"] == [e.name for e in engines() if e.device == "cpu"]
    assert "torch" in result.stdout


def test_doctor_names_an_engine_that_is_forced():
    import openconv
    from openconv.doctor import _tuning

    for engine, text in (("cpu.direct", "cpu.direct alone may run"), ("cpu.direct,", "cpu.direct preferred")):
        with openconv.policy(engine=engine):
            [found] = [finding for finding in _tuning() if finding.what == "engine"]
        assert (found.status, text in found.value) == ("note", True)
    assert "engine" not in [finding.what for finding in _tuning()]


def test_doctor_names_what_is_broken_and_what_is_missing(monkeypatch, tmp_path):
    import openconv.doctor
    import openconv.engine

    def broken() -> None:
        raise ImportError("libfoo is gone")

    monkeypatch.setattr(openconv.engine, "engines", broken)
    monkeypatch.setattr(openconv.doctor, "_OPTIONAL", (("nothing_such", "nothing-such", "extra", "do magic"),))
    monkeypatch.setenv("OPENCONV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("OPENCONV_KEEP_MB", "-3")
    result = run("doctor")
    assert result.exit_code == 1
    assert "unset OPENCONV_KEEP_MB" in result.stdout
    assert "libfoo is gone" in result.stdout
    assert "pip install 'openconv[extra]'" in result.stdout
    cache = next(f for f in openconv.doctor.examine() if f.area == "kernel cache")
    assert cache.what == str(tmp_path / "cache" / "cpu")
    assert "empty; writable" in cache.value


# -- filter ----------------------------------------------------------------------------------------------------------


def reference(pixels: np.ndarray, kernel: np.ndarray, border: str) -> np.ndarray:
    """Each tap as a shifted picture in float64: (H, W, channels) and (R, S)."""
    taps_r, taps_s = kernel.shape
    low = ((taps_r - 1) // 2, (taps_s - 1) // 2)
    pads = ((low[0], taps_r - 1 - low[0]), (low[1], taps_s - 1 - low[1]), (0, 0))
    padded = np.pad(pixels.astype(np.float64), pads, mode="edge" if border == "replicate" else "constant")
    height, width, _ = pixels.shape
    total = np.zeros(pixels.shape)
    for r in range(taps_r):
        for s in range(taps_s):
            total += kernel[r, s] * padded[r : r + height, s : s + width]
    return total


def levels(values: np.ndarray, dtype: Any) -> np.ndarray:
    return np.clip(np.rint(values), 0, np.iinfo(dtype).max).astype(dtype)


def almost_equal(got: np.ndarray, wanted: np.ndarray) -> None:
    """A sum that lies between two levels may be rounded to either; no level is skipped."""
    difference = np.abs(got.astype(int) - wanted.astype(int))
    assert difference.max() <= 1
    assert (difference == 0).mean() > 0.99


def picture(channels: int, dtype: Any = np.uint8, height: int = 13, width: int = 17) -> np.ndarray:
    most = np.iinfo(dtype).max
    return np.random.default_rng(0).integers(0, most + 1, (height, width, channels)).astype(dtype)


@pytest.mark.parametrize("border", ["replicate", "zero"])
@pytest.mark.parametrize(("name", "size"), [("box", 3), ("gaussian", 4), ("sharpen", 5), ("emboss", None), ("edge", 4)])
def test_filter_writes_what_float64_says(tmp_path, name, size, border):
    pixels = picture(3)
    Image.fromarray(pixels).save(tmp_path / "in.png")
    sized = ["--size", size] if size else []
    result = run("filter", tmp_path / "in.png", "--kernel", name, *sized, "--border", border, "-o", tmp_path / "o.png")
    assert result.exit_code == 0, result.output
    got = np.asarray(Image.open(tmp_path / "o.png"))
    wanted = reference(pixels, make_kernel(name, size).weights[0], border)
    almost_equal(got, levels(wanted, np.uint8))
    assert "by cpu." in result.stdout


def test_filter_sobel_is_the_gradient(tmp_path):
    pixels = picture(1)
    Image.fromarray(pixels[..., 0]).save(tmp_path / "in.png")
    assert run("filter", tmp_path / "in.png", "-k", "sobel", "-o", tmp_path / "o.png").exit_code == 0
    x = torch.from_numpy(pixels[..., 0].astype(np.float64))[None, None]
    slope = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]], dtype=torch.float64) / 4
    both = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), torch.stack([slope, slope.T])[:, None])
    wanted = levels(both.square().sum(1).sqrt()[0].numpy(), np.uint8)
    almost_equal(np.asarray(Image.open(tmp_path / "o.png")), wanted)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_filter_keeps_alpha_depth_and_identity(tmp_path, channels, dtype):
    pixels = picture(channels, dtype)
    write_picture(tmp_path / "in.png", Picture(pixels, channels in (2, 4)))
    read = read_picture(tmp_path / "in.png")
    np.testing.assert_array_equal(read.pixels, pixels)
    assert (read.alpha, read.pixels.dtype) == (channels in (2, 4), dtype)
    same = filter_picture(read, make_kernel("identity"))
    np.testing.assert_array_equal(same.pixels, pixels)
    blurred = filter_picture(read, make_kernel("box", 3), "zero")
    assert not np.array_equal(blurred.pixels[..., : read.colours], pixels[..., : read.colours])
    np.testing.assert_array_equal(blurred.pixels[..., read.colours :], pixels[..., read.colours :])


def test_filter_reads_palettes_bits_and_turned_jpegs(tmp_path):
    palette = Image.fromarray(picture(3)).quantize(7)
    palette.save(tmp_path / "palette.png")
    np.testing.assert_array_equal(read_picture(tmp_path / "palette.png").pixels, np.asarray(palette.convert("RGB")))
    Image.fromarray(picture(1)[..., 0] > 99).save(tmp_path / "bits.png")
    assert set(np.unique(read_picture(tmp_path / "bits.png").pixels)) == {0, 255}
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(picture(3)).save(tmp_path / "turned.jpg", exif=exif)
    assert read_picture(tmp_path / "turned.jpg").pixels.shape == (17, 13, 3)


def test_filter_takes_kernels_from_files(tmp_path):
    rows = np.array([[0.0, 1, 0.5], [-1, 2, 0]])
    (tmp_path / "k.txt").write_text("# two rows\n0, 1, 0.5\n\n-1 2 0  # the second\n")
    np.save(tmp_path / "k.npy", rows)
    for file in ("k.txt", "k.npy"):
        np.testing.assert_array_equal(read_kernel(tmp_path / file).weights, rows[None])
    pixels = picture(1)
    Image.fromarray(pixels[..., 0]).save(tmp_path / "in.png")
    assert run("filter", tmp_path / "in.png", "-k", tmp_path / "k.txt", "-o", tmp_path / "o.jpeg").exit_code == 0
    assert Image.open(tmp_path / "o.jpeg").format == "JPEG"
    assert run("filter", tmp_path / "in.png", "-k", tmp_path / "k.npy", "-o", tmp_path / "o.png").exit_code == 0
    almost_equal(
        np.asarray(Image.open(tmp_path / "o.png"))[..., None], levels(reference(pixels, rows, "replicate"), np.uint8)
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Image.fromarray(picture(3)).save(tmp_path / "in.png")
    Image.fromarray(picture(4)).save(tmp_path / "alpha.png")
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "cut.png").write_bytes((tmp_path / "in.png").read_bytes()[:200])
    (tmp_path / "ragged.txt").write_text("1 2 3\n4 5\n")
    (tmp_path / "words.txt").write_text("1 two 3\n")
    (tmp_path / "empty.txt").write_text("# nothing\n")
    (tmp_path / "nan.txt").write_text("nan\n")
    np.save(tmp_path / "cube.npy", np.zeros((2, 2, 2)))
    return tmp_path


@pytest.mark.parametrize(
    ("source", "kernel", "target", "more", "words"),
    [
        ("gone.png", "box", "o.png", (), "there is no file"),
        ("text.png", "box", "o.png", (), "no PNG or JPEG image"),
        ("cut.png", "box", "o.png", (), "cannot be read"),
        ("in.png", "magic", "o.png", (), "wanted one of identity, box"),
        ("in.png", "ragged.txt", "o.png", (), "line 2 has 2 numbers; wanted 3"),
        ("in.png", "words.txt", "o.png", (), "line 1"),
        ("in.png", "empty.txt", "o.png", (), "no numbers"),
        ("in.png", "nan.txt", "o.png", (), "finite"),
        ("in.png", "cube.npy", "o.png", (), "wanted a matrix"),
        ("in.png", "ragged.txt", "o.png", ("--size", 3), "leave --size out"),
        ("in.png", "box", "o.png", ("--size", 0), "wanted 1 to"),
        ("in.png", "sobel", "o.png", ("--size", 2), "wanted 3 or more"),
        ("in.png", "box", "o.png", ("--border", "wrap"), "wanted one of replicate, zero"),
        ("in.png", "box", "o.gif", (), "wanted .png"),
        ("in.png", "box", "gone/o.png", (), "no folder"),
        ("in.png", "box", "in.png", (), "--overwrite"),
        ("alpha.png", "box", "o.jpg", (), "write a .png"),
    ],
)
def test_filter_fails_in_one_line_and_writes_nothing(folder, source, kernel, target, more, words):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    chosen = folder / kernel if "." in kernel else kernel
    assert words in fails("filter", folder / source, "-k", chosen, "-o", folder / target, *more)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_filter_overwrites_its_picture_only_when_asked(folder):
    before = (folder / "in.png").read_bytes()
    assert run("filter", folder / "in.png", "-k", "box", "-o", folder / "in.png", "--overwrite").exit_code == 0
    assert (folder / "in.png").read_bytes() != before


def test_every_kernel_has_the_sum_that_its_name_promises():
    for name in KERNELS:
        for size in (3, 4, 7):
            total = make_kernel(name, size).weights.sum(axis=(1, 2))
            np.testing.assert_allclose(total, 0 if name in ("edge", "sobel") else 1, atol=1e-12)


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path, monkeypatch):
    write_atomic(tmp_path / "a.txt", "old")

    def refuse(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(tmp_path / "a.txt", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_written_files_have_the_usual_permissions(tmp_path):
    (tmp_path / "plain").write_text("")
    assert write_atomic(tmp_path / "atomic", "").stat().st_mode == (tmp_path / "plain").stat().st_mode


# -- PNG of 16 bits --------------------------------------------------------------------------------------------------


def png_with_filters(pixels: np.ndarray) -> bytes:
    """A PNG whose rows use filters 0 to 4 in turn, encoded byte by byte."""
    height, width, channels = pixels.shape
    rows = pixels.astype(">u2").tobytes()
    step, length = 2 * channels, 2 * channels * width
    data = bytearray()
    for row in range(height):
        kind = row % 5
        data.append(kind)
        for at in range(length):
            value = rows[row * length + at]
            a = rows[row * length + at - step] if at >= step else 0
            b = rows[(row - 1) * length + at] if row else 0
            c = rows[(row - 1) * length + at - step] if row and at >= step else 0
            nearest = min((abs(b - c), 0, a), (abs(a - c), 1, b), (abs(a + b - 2 * c), 2, c))[2]
            data.append((value - (0, a, b, (a + b) // 2, nearest)[kind]) & 255)
    head = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(bytes(data))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks
    )


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_png16_reads_every_row_filter(channels):
    pixels = picture(channels, np.uint16, 11, 6)
    np.testing.assert_array_equal(read_png16(png_with_filters(pixels)), pixels)
    np.testing.assert_array_equal(read_png16(write_png16(pixels)), pixels)


def test_png16_agrees_with_opencv(tmp_path):
    cv2 = pytest.importorskip("cv2")
    pixels = picture(3, np.uint16)
    write_picture(tmp_path / "ours.png", Picture(pixels))
    np.testing.assert_array_equal(cv2.imread(str(tmp_path / "ours.png"), cv2.IMREAD_UNCHANGED)[..., ::-1], pixels)
    cv2.imwrite(str(tmp_path / "theirs.png"), np.ascontiguousarray(pixels[..., ::-1]))
    np.testing.assert_array_equal(read_picture(tmp_path / "theirs.png").pixels, pixels)


def test_png16_says_what_is_damaged():
    content = write_png16(picture(3, np.uint16))
    flipped = bytearray(content)
    flipped[60] ^= 1
    with pytest.raises(ValueError, match="IDAT chunk is damaged"):
        read_png16(bytes(flipped))
    with pytest.raises(ValueError, match="cut off"):
        read_png16(content[:100])


# -- demo ------------------------------------------------------------------------------------------------------------


def test_demo_leaves_a_page_that_needs_nothing_else(tmp_path):
    result = run("demo", "--quick", "--out", tmp_path / "demo")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "demo" / "openconv-demo.html").read_text()
    sources = re.findall(r'(?:src|srcset)="([^"]*)"', page)
    assert len(sources) >= 8
    assert all(source.startswith("data:image/") for source in sources)
    assert not re.search(r"https?://|<script|<link|@import", page)
    files = {path.name for path in (tmp_path / "demo").iterdir()}
    names = {"scene", "gaussian", "sharpen", "emboss", "edge", "sobel", "speed"}
    assert files == {f"{name}.png" for name in names} | {"openconv-demo.html", "results.json"}
    assert set(re.findall(r'href="([^"]*)"', page)) == {f"{name}.png" for name in names - {"speed"}}
    results = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert results["wrong"] == []
    assert [check["name"] for check in results["checks"]] == [e.name for e in engines() if e.device == "cpu"]
    others = {e.name for e in engines("cpu") if isinstance(e, Wrapper)}  # some are for large problems alone
    assert all(check["taken"] > 0 for check in results["checks"] if check["name"] not in others)
    assert {check["name"] for check in results["checks"] if check["taken"]} & others
    assert all(layer["seconds"][layer["chosen"]]["median"] > 0 for layer in results["layers"])
    assert "openconv explain" in result.stdout
    edges, scene = (np.asarray(Image.open(tmp_path / "demo" / f"{n}.png")) for n in ("sobel", "scene"))
    assert edges.shape == scene.shape == (256, 512)
    assert 0 < edges.mean() < scene.mean()


def test_demo_shows_a_wrong_engine_and_fails(tmp_path, monkeypatch):
    import openconv.demo.run
    from openconv.cpu.naive import Naive
    from openconv.demo.checks import check_problems

    build = Naive.build

    def wrong(self: Any, problem: Any, device: Any, knobs: Any) -> Any:
        runner = build(self, problem, device, knobs)

        def run_wrong(a: Any, b: Any, out: Any, workspace: Any, bias: Any) -> None:
            runner(a, b, out, workspace, bias)
            out.view(-1)[-1] += 1

        return run_wrong

    problems = [p.with_(n=3) for p in check_problems(quick=True)][:1]  # a batch of its own: no plan from another test
    monkeypatch.setattr(Naive, "build", wrong)
    monkeypatch.setattr(openconv.demo.run, "FILTERS", (("box", 3),))
    monkeypatch.setattr(openconv.demo.run, "check_problems", lambda quick, kind: problems)
    monkeypatch.setattr(openconv.demo.run, "race_layers", lambda quick, kind: [])
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sys.prefix", str(tmp_path / "venv"))
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").touch()
    result = run("demo", "--quick", "--out", tmp_path)
    assert result.exit_code == 1, result.output
    assert "WRONG" in result.stdout
    assert "nothing to check" in result.stdout  # of engines that refused the one problem: they are not right
    assert not re.search(r"^│ [a-z0-9_.]+ +│ +0 │.*right", result.stdout, re.MULTILINE)
    assert "what to run next, after '. " in result.stdout
    assert f"cpu.naive: {problems[0]}" in json.loads((tmp_path / "results.json").read_text())["wrong"][0]
    assert "1 wrong" in (tmp_path / "openconv-demo.html").read_text()


def test_demo_fails_in_one_line_where_it_cannot_write(tmp_path):
    (tmp_path / "file").write_text("")
    assert "file" in fails("demo", "--quick", "--out", tmp_path / "file")


def test_help_and_no_command():
    assert "explain" in run("--help").output
    assert run("--version").output.startswith("openconv 0.")
    assert all(run(command, "--help").exit_code == 0 for command in ("explain", "engines", "doctor", "filter", "demo"))
    assert run().exit_code == 2
