"""Suites: the file format and its errors, what is varied, and the files that are shipped."""

from __future__ import annotations

import re

import pytest

from openconv.bench.suites import (
    DEVICES,
    Suite,
    Variation,
    load_suite,
    parse_suite,
    suite_names,
    suites_folder,
    variants,
)
from openconv.problem import Problem

TINY = Problem.parse("fprop n1 c3 h6 w7 k4 r3 s3 pad1 f32 nchw")
LINE = Problem.parse("fprop n1 c3 w16 k4 s3 pad1 f32 nchw")
FUSED = Problem.parse("fprop n1 c3 h6 w7 k4 r3 s3 pad1 f32 nchw +bias+relu")
ALL = ("fprop", "dgrad", "wgrad")


def varied(*problems: Problem, **values: tuple) -> list[Problem]:
    return [p for _, p in variants([(str(at), p) for at, p in enumerate(problems)], Variation(**values))]


def test_a_file_holds_a_title_what_is_varied_and_named_problems():
    text = f"""
    # What it is: in one line.
    # More about it.
    % cpu: batch 1 8; direction fprop wgrad
    % cuda: dtype f16 bf16; layout nhwc; batch 64
    first: {TINY}

    # A comment between.
    second: {LINE}
    """
    assert parse_suite("some", text) == Suite(
        "some",
        "What it is: in one line.",
        (("first", TINY), ("second", LINE)),
        {"cpu": Variation((1, 8), ("fprop", "wgrad")), "cuda": Variation((64,), (), ("f16", "bf16"), ("nhwc",))},
    )


def test_a_device_alone_keeps_the_problems_own_values_and_one_that_is_absent_is_not_meant():
    assert parse_suite("some", "% cuda:\n").varied == {"cuda": Variation()}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("just words", "line is 'just words'; wanted 'name: problem'"),
        (f": {TINY}", "wanted 'name: problem'"),
        ("name: fprop n1 c3", "lacks k, w, s; wanted sizes n c k w s"),
        ("name: forward n1", "starts with 'forward'; wanted one of fprop, dgrad, wgrad"),
        ("% cpu batch 1", "line is 'cpu batch 1'; wanted '% device: key value ...; key value ...'"),
        ("% tpu: batch 1", "device is 'tpu'; wanted one of cpu, cuda"),
        ("% cpu: size 1", "key is 'size'; wanted one of batch, direction, dtype, layout"),
        ("% cpu: batch", "values of batch are ''; wanted at least one"),
        ("% cpu: batch 8 1 8", "values of batch are '8 1 8'; wanted at least one, and each once"),
        ("% cpu: batch 0", "batch is '0'; wanted an integer >= 1"),
        ("% cpu: batch eight", "batch is 'eight'; wanted an integer >= 1"),
        ("% cpu: direction forward", "direction is 'forward'; wanted one of fprop, dgrad, wgrad"),
        ("% cpu: dtype float", "dtype is 'float'; wanted one of f64, f32"),
        ("% cpu: layout chwn", "layout is 'chwn'; wanted one of nchw, nhwc"),
        ("% cpu: batch 1; batch 8", "batch is given twice"),
        ("% cuda: batch 8", "device 'cuda' stands in line 2 already"),
        (f"tiny: {LINE}", "label 'tiny' stands in line 3 already"),
        (f"again: {TINY}", "the problem of 'again' stands in line 3 already"),
        (f"again: {TINY}".removesuffix(" f32 nchw"), "the problem of 'again' stands in line 3 already"),
    ],
)
def test_an_error_names_the_line_what_was_seen_and_what_was_wanted(line, words):
    with pytest.raises(ValueError, match=r"^some\.txt, line 5: ") as caught:
        parse_suite("some", f"# Title.\n% cuda: batch 1\ntiny: {TINY}\n\n{line}\n")
    assert words in str(caught.value)


def test_a_suite_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(ValueError, match=r"no suite 'nothing'; wanted one of .*resnet50"):
        load_suite("nothing")
    with pytest.raises(ValueError, match=r"no suite '\.\./suites/resnet50'"):
        load_suite("../suites/resnet50")


def test_variants_cross_what_is_asked_for():
    found = varied(TINY, batches=(1, 8), directions=("fprop", "wgrad"), dtypes=("f16", "f32"), layouts=("nchw", "nhwc"))
    assert len(set(found)) == len(found) == 16
    assert {(p.n, p.direction, p.dtypes[2], p.layouts[1]) for p in found} >= {(8, "wgrad", "f16", "nhwc")}


def test_nothing_asked_for_keeps_the_problems_as_they_are():
    own = (TINY, LINE.with_(layouts="nhwc"), FUSED, TINY.with_(dtypes=("i8", "i8", "i32"), direction="dgrad"))
    assert varied(*own) == list(own)


def test_one_axis_is_nchw_whatever_layouts_are_asked_for():
    assert varied(LINE, layouts=("nchw", "nhwc")) == [LINE]
    assert varied(LINE, layouts=("nhwc",)) == [LINE]


def test_an_epilogue_stays_with_its_own_direction():
    transposed = FUSED.with_(direction="dgrad")
    assert varied(FUSED, transposed, directions=ALL) == [FUSED, transposed]
    assert varied(FUSED, directions=("dgrad", "wgrad")) == []


def test_what_becomes_equal_is_kept_once():
    assert varied(TINY, TINY.with_(n=8), batches=(4,)) == [TINY.with_(n=4)]


def test_a_pass_with_a_line_of_its_own_keeps_that_name():
    problems = [("down", TINY), ("up", TINY.with_(direction="dgrad"))]
    found = [(label, p.direction) for label, p in variants(problems, Variation((4,), ALL))]
    assert found == [("down", "fprop"), ("down", "wgrad"), ("up", "dgrad")]


def test_options_go_over_the_defaults_of_the_suite():
    default = Variation((1, 8), ALL, ("f16",), ())
    assert Variation().over(default) == default
    assert Variation((2,), layouts=("nhwc",)).over(default) == Variation((2,), ALL, ("f16",), ("nhwc",))


def test_the_suites_that_are_promised_are_there():
    assert set(suite_names()) >= {
        "resnet50", "vgg16", "mobilenet_v2", "efficientnet_b0", "convnext_tiny", "resnext50",
        "stable_diffusion_unet", "stable_diffusion_vae", "deeplab", "wavenet", "mamba", "audio", "video", "patch_embed",
        "dcgan", "depthwise", "first_rungs", "image_filters", "stems", "reported", "reported_cpu", "reported_large",
        "fused", "long_filters", "low_precision", "map", "overhead", "smoke",
    }  # fmt: skip


@pytest.mark.parametrize("name", suite_names())
def test_shipped_suites_parse_and_say_what_they_are_and_where_they_run(name):
    suite = load_suite(name)
    assert suite.problems
    assert re.fullmatch(r"[A-Z].{20,}\.", suite.title)
    assert suite.varied
    assert all(re.fullmatch(r"[\w.]+", label) for label, _ in suite.problems)
    for variation in suite.varied.values():
        found = list(variants(suite.problems, variation))
        assert {label for label, _ in found} == {label for label, _ in suite.problems}


@pytest.mark.parametrize("name", suite_names())
def test_shipped_problems_are_written_as_they_print(name):
    text = (suites_folder() / f"{name}.txt").read_text()
    assert all(f"\n{label}: {problem}\n" in text for label, problem in load_suite(name).problems)


def test_a_cpu_is_asked_for_what_it_can_hold():
    for name in suite_names():
        suite = load_suite(name)
        for label, p in variants(suite.problems, suite.varied["cpu"]) if "cpu" in suite.varied else ():
            assert p.min_bytes < 2e9, (name, label)
            assert p.flops < 1e12, (name, label)


@pytest.mark.parametrize("device", DEVICES)
def test_smoke_is_small_and_has_one_of_each_sort(device):
    suite = load_suite("smoke")
    found = [p for _, p in variants(suite.problems, suite.varied[device])]
    assert max(p.macs for p in found) < 1_000_000  # the definition is timed up to there
    assert {p.rank for p in found} == {1, 2, 3}
    assert {p.direction for p in found} == set(ALL)
    for wanted in (
        lambda p: p.is_depthwise,
        lambda p: 1 < p.groups < p.c,
        lambda p: p.c == 1,
        lambda p: p.filter == (1, 1),
        lambda p: p.stride[-1] == 2,
        lambda p: p.stride == p.filter != (1, 1),
        lambda p: p.dilation[-1] == 2,
        lambda p: not p.epilogue.is_identity,
    ):
        assert any(map(wanted, found))


def test_networks_chain_up():
    """Every image that a layer reads is one that another layer writes, or the network's input, or a pooled one."""
    for name, given in {
        "resnet50": {(3, 224), (64, 56)},
        "resnext50": {(3, 224), (64, 56)},
        "vgg16": {(3, 224), (64, 112), (128, 56), (256, 28), (512, 14)},
        "mobilenet_v2": {(3, 224)},
        "efficientnet_b0": {(3, 224)},
        "convnext_tiny": {(3, 224)},
        "deeplab": {(3, 520), (64, 130), (2048, 1), (1280, 65), (2048, 33)},
        "stable_diffusion_vae": {(3, 512), (8, 64), (4, 64), (512, 256), (256, 512)},
    }.items():
        problems = [p for _, p in load_suite(name).problems]
        written = {(p.k, p.out[0]) for p in problems}
        # Squeeze and excite read what is pooled to 1x1.
        written |= {(p.k, 1) for p in problems if name == "efficientnet_b0"}
        assert {(p.c, p.spatial[0]) for p in problems} <= written | given, name


def test_names_of_diffusion_layers_say_their_channels_and_size():
    counted = 0
    for name in ("stable_diffusion_unet", "stable_diffusion_vae"):
        for label, p in load_suite(name).problems:
            if match := re.fullmatch(r"(res|proj|short|down|up)(\d+)_(?:(\d+)_)?(\d+)", label):
                kind, c, k, size = match[1], int(match[2]), int(match[3] or match[2]), int(match[4])
                assert (p.c, p.k, p.spatial) == (c, k, (size, size))
                assert p.filter == ((1, 1) if kind in ("proj", "short") else (3, 3))
                assert p.out[0] == (size // 2 if kind == "down" else size)
                counted += 1
    assert counted == 50


def test_names_of_image_filters_say_their_sizes():
    for label, p in load_suite("image_filters").problems:
        h, w, r, s, rgb = re.fullmatch(r"(\d+)x(\d+)_(\d+)x(\d+)(_rgb)?", label).groups()  # type: ignore[union-attr]
        assert (p.spatial, p.filter) == ((int(h), int(w)), (int(r), int(s)))
        assert p.c == p.k == p.groups == (3 if rgb else 1)
        assert p.out == p.spatial


def test_the_map_is_a_grid_of_filters_and_channels_over_images_of_one_size():
    cells = set()
    for label, p in load_suite("map").problems:
        sort, c, r, s = re.fullmatch(r"(dense|depthwise)_(\d+)_(\d+)x(\d+)", label).groups()  # type: ignore[union-attr]
        assert (p.c, p.k, p.filter) == (int(c), int(c), (int(r), int(s)))
        assert p.groups == (p.c if sort == "depthwise" else 1)
        assert p.c * p.spatial[0] * p.spatial[1] == 1 << 18
        assert p.out == p.spatial
        cells.add((sort, p.c, p.filter[0]))
    filters = (1, 3, 5, 7, 9, 15, 31, 63)
    too_large = ("dense", 256, 63), ("depthwise", 256, 63)
    assert {("dense", c, r) for c in (1, 4, 16, 64, 256) for r in filters} - {*too_large} <= cells
    assert {("depthwise", c, r) for c in (4, 16, 64, 256) for r in filters[1:]} - {*too_large} <= cells


def test_patches_do_not_overlap_and_short_filters_are_causal():
    assert all(p.stride == p.filter for _, p in load_suite("patch_embed").problems)
    for _, p in load_suite("mamba").problems:
        assert p.is_depthwise
        assert p.out == p.spatial
        assert p.padding[0][1] == 0


def test_every_fused_problem_has_an_epilogue():
    assert all(not p.epilogue.is_identity for _, p in load_suite("fused").problems)


def test_every_reported_size_names_its_thread():
    for name in ("reported", "reported_cpu", "reported_large"):
        lines = (suites_folder() / f"{name}.txt").read_text().splitlines()
        first = next(at for at, line in enumerate(lines) if not line.startswith(("#", "%")))
        assert all(re.match(r"# [\w-]+#\d+", line) for line in lines[first - 1 :] if line.startswith("#"))
        assert re.match(r"# [\w-]+#\d+", lines[first - 1])
