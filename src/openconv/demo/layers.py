"""The layers of the race: a few from each kind of network, forward and backward."""

from __future__ import annotations

from ..problem import Problem

__all__ = ["layers_text", "race_layers"]

_LAYERS = (
    ("Image filter 3x3", "fprop n1 c1 h1024 w2048 k1 r3 s3 pad1"),
    ("Image filter 7x7", "fprop n1 c1 h1024 w2048 k1 r7 s7 pad3"),
    ("ResNet-50 7x7 s2 3@224", "fprop n1 c3 h224 w224 k64 r7 s7 stride2 pad3"),
    ("ResNet-50 3x3 64@56", "fprop n1 c64 h56 w56 k64 r3 s3 pad1"),
    ("ResNet-50 3x3 256@14", "fprop n1 c256 h14 w14 k256 r3 s3 pad1"),
    ("ResNet-50 1x1 256@56", "fprop n1 c256 h56 w56 k64 r1 s1"),
    ("MobileNetV2 dw 3x3 144@56", "fprop n1 c144 h56 w56 k144 r3 s3 pad1 g144"),
    ("MobileNetV2 dw 3x3 s2 96@112", "fprop n1 c96 h112 w112 k96 r3 s3 stride2 pad1 g96"),
    ("ConvNeXt-T dw 7x7 96@56", "fprop n1 c96 h56 w56 k96 r7 s7 pad3 g96"),
    ("ConvNeXt-T 4x4 s4 3@224", "fprop n1 c3 h224 w224 k96 r4 s4 stride4"),
    ("ViT-B patches 16x16 3@224", "fprop n1 c3 h224 w224 k768 r16 s16 stride16"),
    ("ResNet-50 3x3 64@56, dgrad", "dgrad n1 c64 h56 w56 k64 r3 s3 pad1"),
    ("ResNet-50 3x3 64@56, wgrad", "wgrad n1 c64 h56 w56 k64 r3 s3 pad1"),
    ("MobileNetV2 dw 144@56, dgrad", "dgrad n1 c144 h56 w56 k144 r3 s3 pad1 g144"),
    ("MobileNetV2 dw 144@56, wgrad", "wgrad n1 c144 h56 w56 k144 r3 s3 pad1 g144"),
    ("Image filter 3x3, wgrad", "wgrad n1 c1 h1024 w2048 k1 r3 s3 pad1"),
)
_QUICK = ("ResNet-50 1x1 256@56", "MobileNetV2 dw 3x3 144@56", "ConvNeXt-T 4x4 s4 3@224")


def race_layers(quick: bool = False, kind: str = "cpu") -> list[tuple[str, Problem]]:
    """Names and problems; batch one, f32, nchw, as PyTorch has them by default; on a GPU layers of networks as they are
    run there: batch 32, f16, nhwc. A name ends in channels@size of x."""
    usual = " f16 nhwc" if kind == "cuda" else ""
    found = [(name, Problem.parse(line + usual * (" c1 " not in line))) for name, line in _LAYERS]
    if kind == "cuda":
        found = [(name, problem.with_(n=32) if problem.c > 1 else problem) for name, problem in found]
    return [(name, problem) for name, problem in found if not quick or name in _QUICK]


def layers_text(kind: str) -> str:
    """What the layers have in common."""
    return "batch 32, f16, nhwc; image filters one in f32" if kind == "cuda" else "batch 1, f32, nchw"
