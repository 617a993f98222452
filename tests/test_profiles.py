"""Profiles: what Nsight Compute writes is read kernel by kernel, and told apart by markers. No profiler is needed."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from openconv.bench import profiles
from openconv.bench.profiles import ProfileRecord, parse, profile, read_profiles, rows, write_profiles
from openconv.cli import app
from openconv.problem import Problem

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","Section Name","Metric Name","Metric Unit","Metric Value","Rule Name"'
)
SPIN = "at::cuda::spin_kernel(long)"


def line(number: int, kernel: str, metric: str, unit: str, value: str) -> str:
    cells = (number, 7, "python", "127.0.0.1", kernel, 1, 7, "(256, 1, 1)", "(62500, 1, 1)", 0, "9.0", "S", metric)
    return ",".join(f'"{cell}"' for cell in (*cells, unit, value, ""))


def written() -> str:
    return "\n".join(
        [
            "==PROF== Connected to process 7", HEAD,
            line(0, SPIN, "Duration", "us", "1.50"),
            line(1, "naive(Params)", "Duration", "us", "1,041.25"),
            line(1, "naive(Params)", "DRAM Throughput", "%", "12.5"),
            line(1, "naive(Params)", "Registers Per Thread", "register/thread", "32"),
            line(1, "naive(Params)", "dram__bytes_read.sum", "Mbyte", "64.5"),
            line(1, "naive(Params)", "A metric that nobody asked for", "", "3"),
            line(2, SPIN, "Duration", "us", "1.50"),
            line(3, "im2col(Params)", "Duration", "ns", "960"),
            line(4, "gemm", "Duration", "ms", "2"),
        ]
    )  # fmt: skip


def test_kernels_go_with_the_marker_before_them():
    (naive,), (im2col, gemm) = parse(written())
    assert naive == {
        "name": "naive(Params)", "grid": "(62500, 1, 1)", "block": "(256, 1, 1)", "seconds": pytest.approx(1041.25e-6),
        "dram_percent": 12.5, "registers": 32.0, "dram_read_bytes": 64.5e6,
    }  # fmt: skip
    assert im2col["seconds"] == pytest.approx(960e-9)
    assert gemm["seconds"] == pytest.approx(2e-3)


def test_nothing_profiled_is_nothing():
    assert parse("==ERROR== no permission") == []


def fake(tmp_path, text: str, code: int = 0) -> str:
    """A program that writes what ncu would, to the file that it is told."""
    source = tmp_path / "text"
    source.write_text(text)
    program = tmp_path / "ncu"
    program.write_text(
        '#!/bin/sh\nwhile [ "$1" != --log-file ]; do shift; done\n'
        f'cat "{source}" > "$2"\ncat > "{tmp_path / "jobs"}"\nexit {code}\n'
    )
    program.chmod(0o755)
    return str(program)


JOBS = [
    ("ladder", "photo", Problem.parse("fprop n1 c1 h8 w8 k1 r3 s3 pad1 f32 nchw"), engine)
    for engine in ("cuda.naive", "cuda.im2col_gemm")
]


def test_each_job_gets_its_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "environment", lambda place, command: {"device": "a GPU", "command": command})
    records = profile(JOBS, ncu=fake(tmp_path, written()), command="openconv profile")
    assert [record.engine for record in records] == ["cuda.naive", "cuda.im2col_gemm"]
    assert [len(record.kernels) for record in records] == [1, 2]
    assert '"cuda.im2col_gemm"' in (tmp_path / "jobs").read_text()
    assert [row["engine"] for row in rows(records)] == ["cuda.naive", *["cuda.im2col_gemm"] * 2]
    path = tmp_path / "results" / "profile.jsonl"
    write_profiles(path, records[:1])
    write_profiles(path, records)
    assert read_profiles(path) == records
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="line 1"):
        read_profiles(path)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM", 1, "ended with 1: ==ERROR== ERR_NVGPUCTRPERM"),
        ("==WARNING== No kernels were profiled.", 0, "profiled 0 calls; wanted 2"),
    ],
)
def test_a_profiler_that_does_not_profile_is_an_error_with_its_words(tmp_path, text, code, said):
    with pytest.raises(RuntimeError, match=said):
        profile(JOBS, ncu=fake(tmp_path, text, code))


def test_no_profiler_is_an_error():
    with pytest.raises(RuntimeError, match="is not on PATH"):
        profile(JOBS, ncu="no-such-ncu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to profile on")
def test_the_command_without_a_gpu_is_one_line():
    done = CliRunner().invoke(app, ["profile", "ladder:photo_3x3", "--engine", "cuda.naive"])
    assert done.exit_code == 2
    assert "finds no CUDA device" in done.output


def test_records_are_kept_apart(tmp_path):
    assert read_profiles(tmp_path / "none") == []
    one = ProfileRecord("ladder", "photo", "p", "cuda.naive", [])
    assert one.key == ("ladder", "photo", "p", "cuda.naive")
