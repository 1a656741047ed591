"""Shapes as HLO writes them, such as "f32[64,512]{1,0}": their arrays, dimensions and bytes."""

from __future__ import annotations

import math
import re


def arrays(shape: str) -> list[str]:
    """Split the shape of a tuple into its arrays, with their layouts."""
    return re.findall(r"\w+\[[\d,<=]*\](?:\{[^}]*\})?", shape)


def dimensions(shape: str) -> list[int]:
    """Return the dimensions of the first array of a shape."""
    match = re.search(r"\[([\d,<=]*)\]", shape)
    return integers(match.group(1)) if match else []


def shape_bytes(shape: str) -> float:
    """Return the bytes of all arrays of a shape, in any memory."""
    total = 0.0
    for dtype, sizes in re.findall(r"(\w+)\[([\d,<=]*)\]", shape):
        width = re.search(r"\d+", dtype)  # bf16, f8e4m3fn, s4; pred and token have no digits
        bits = 0 if dtype == "token" else int(width.group()) if width else 8
        total += math.prod(integers(sizes)) * bits / 8
    return total


def main_memory_bytes(shape: str) -> float:
    """Return the bytes of the arrays in main memory; layouts S(1) and above are other memories."""
    return sum(shape_bytes(array) for array in arrays(shape) if not re.search(r"S\([1-9]", array))


def integers(text: str) -> list[int]:
    """Return the integers of a list such as "64,512"."""
    return [int(number) for number in re.findall(r"\d+", text)]
