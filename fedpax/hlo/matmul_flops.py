"""FLOPs of matmuls, convolutions and kernels, from their lines of HLO."""

from __future__ import annotations

import math
import re

import numpy as np

from fedpax.hlo.parsing import Computation, Instruction
from fedpax.hlo.shapes import dimensions, integers

# Kernels of splash attention (forward, gradients of keys and values, gradients of queries): the
# suffix of the block sizes in the kernel's metadata -> the number of matmuls of all queries with
# all keys.
_SPLASH = {"": 2, "_dkv": 4, "_dq": 3}


def matmul_flops(computation: Computation, instruction: Instruction) -> float | None:
    """Return the FLOPs of a matmul, convolution or kernel, 2 per multiplication; else 0."""
    # None for a kernel that does not state its FLOPs. The instructions that it calls are not
    # counted.
    attributes = instruction.attributes
    if instruction.opcode == "dot":
        return _dot(computation, instruction, r"lhs_contracting_dims=\{([\d,]*)\}")
    if instruction.opcode == "convolution":
        return _convolution(computation, instruction)
    if instruction.opcode != "custom-call":
        return 0.0
    target = re.search(r'custom_call_target="([^"]*)"', attributes)
    name = target.group(1) if target else ""
    if name.startswith("__cublas$"):
        return _dot(computation, instruction, r'"lhs_contracting_dimensions":\[([\d",]*)\]')
    if name == "tpu_custom_call":
        cost = re.search(r'"cost_estimate":\{"flops":"?(\d+)', attributes)
        return float(cost.group(1)) if cost else _splash(computation, instruction)
    return None if name.startswith(("__cudnn$", "__gpu$")) else 0.0


def operand_dtype(computation: Computation, instruction: Instruction) -> str:
    """Return the dtype of a matmul's operands as HLO writes it, such as "bf16"; "" if unknown."""
    cublas = 'custom_call_target="__cublas$' in instruction.attributes
    grouped = instruction.opcode == "custom-call" and instruction.name.startswith("ragged-dot")
    if instruction.opcode not in ("dot", "convolution") and not cublas and not grouped:
        return ""
    # A TPU's kernel for grouped matmuls takes the group sizes first and the matrices last.
    operand = instruction.operands[-1 if grouped else 0]
    return computation.instructions[operand].shape.partition("[")[0]


def _splash(computation: Computation, instruction: Instruction) -> float | None:
    """Return the FLOPs of a splash attention kernel; None for any other kernel."""
    # Queries are [..., heads, queries, features], computed in blocks. The first operand has an
    # entry for each pair of blocks that the kernel visits; the mask excludes the other pairs. A
    # kernel that visits all pairs is taken for causal attention: half of its blocks are empty.
    blocks = {
        ending: [
            int(size)
            for side in ("q", "kv")
            for size in re.findall(rf"\bblock_{side}{ending}\b\W*(\d+)", instruction.attributes)
        ]
        for ending in _SPLASH
    }
    # The metadata of the forward kernel has the block sizes of the other kernels too.
    ending = next((ending for ending, sizes in blocks.items() if len(sizes) == 2), None)
    if ending is None or "splash" not in instruction.name + instruction.attributes:
        return None
    operands = [dimensions(computation.instructions[name].shape) for name in instruction.operands]
    visited, *inputs = [shape for shape in operands if len(shape) >= 3]
    *heads, queries, features = next(shape for shape in inputs if shape != visited)
    pairs = math.prod(visited[-2:]) * math.prod(blocks[ending])
    if pairs >= queries * queries:
        pairs = queries * queries // 2
    return 2.0 * _SPLASH[ending] * math.prod(heads) * pairs * features


def _dot(computation: Computation, instruction: Instruction, contracting: str) -> float:
    """Return the FLOPs of a matmul; the pattern `contracting` finds its contracted dimensions."""
    left = dimensions(computation.instructions[instruction.operands[0]].shape)
    match = re.search(contracting, instruction.attributes)
    inner = math.prod(left[i] for i in integers(match.group(1))) if match else 1
    return 2.0 * math.prod(dimensions(instruction.shape)) * inner


def _convolution(computation: Computation, instruction: Instruction) -> float:
    """Return the FLOPs of a convolution, without those on padding and on holes of the input."""
    # A TPU writes matmuls as convolutions, and batched matmuls as convolutions over an input that
    # is mostly holes (dilation).
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels is not None, f"{instruction.name} has no dim_labels"
    left, right = (computation.instructions[name].shape for name in instruction.operands[:2])
    given = dict(zip(labels[1], dimensions(left), strict=True))
    kernel = dict(zip(labels[2], dimensions(right), strict=True))
    result = dict(zip(labels[3], dimensions(instruction.shape), strict=True))
    match = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    window = dict(re.findall(r"(\w+)=(\S+)", match.group(1))) if match else {}

    def window_setting(name: str, dimension: int, default: str) -> list[int]:
        text = window.get(name)
        return [int(n) for n in (text.split("x")[dimension] if text else default).split("_")]

    positions = 1
    for dimension in range(len(given) - 2):
        label = str(dimension)
        (stride,) = window_setting("stride", dimension, "1")
        (holes,) = window_setting("lhs_dilate", dimension, "1")
        (spread,) = window_setting("rhs_dilate", dimension, "1")
        before = window_setting("pad", dimension, "0_0")[0]
        position = (
            np.arange(result[label])[:, None] * stride
            + np.arange(kernel[label])[None, :] * spread
            - before
        )
        inside = (
            (position >= 0) & (position <= (given[label] - 1) * holes) & (position % holes == 0)
        )
        positions *= int(inside.sum())
    return 2.0 * result["b"] * result["f"] * kernel["i"] * positions
