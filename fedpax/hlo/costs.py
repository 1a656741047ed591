"""How much a compiled program computes, reads and writes, loops multiplied, from its text.

What a compiled program says of itself (`cost_analysis`) counts the body of a loop once.
"""

from __future__ import annotations

import functools
import math
import re
from typing import NamedTuple

import numpy as np

from fedpax.hlo import trip_counts
from fedpax.hlo.parsing import Computation, Instruction, Module

# Instructions that only name what is there already, or whose parts are counted where they stand.
_FREE = {
    "after-all",
    "async-done",
    "async-start",
    "async-update",
    "bitcast",
    "call",
    "call-start",
    "conditional",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
    "while",
}
_SLICES = ("dynamic-slice", "gather", "slice")


class Work(NamedTuple):
    """What one device does in one execution of a program.

    Attributes:
      products: operations of matrix products and convolutions, of any type.
      int8: of these, those of 8-bit integers.
      fp8: of these, those of 8-bit floats.
      traffic: bytes read from and written to the device's main memory.
      host: bytes moved between it and the host's memory, in either direction.
      silent: names of the kernels (custom calls) that do not say what they compute.
      once: names of the loops whose length only running them can tell; they count as one turn.
    """

    products: float
    int8: float
    fp8: float
    traffic: float
    host: float
    silent: tuple[str, ...]
    once: tuple[str, ...]


def count(module: Module) -> Work:
    """Counts a program's products and its memory traffic.

    Every instruction reads its operands and writes its result, a fusion of several as one. Of an
    array that is only sliced, or updated in place, the slice counts; what a TPU keeps in its
    vector memory does not. Of a conditional's branches the costliest counts, and a loop of unknown
    length as one turn. Kernels that are custom calls are counted where they say what they cost, as
    are splash attention and the products of cuBLAS.

    Args:
      module: the program.

    Returns:
      The counts.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedpax.hlo import parsing
      >>> def squared(x):
      ...     return jax.lax.scan(lambda x, _: (jnp.sin(x @ x), None), x, length=7)[0]
      >>> text = jax.jit(squared).lower(jnp.ones((4, 4))).compile().as_text()
      >>> int(count(parsing.read(text)).products)  # 7 products of 4 x 4 x 4
      896
    """
    trips = trip_counts.trip_counts(module)
    silent: list[str] = []
    once: list[str] = []

    @functools.cache
    def cost(name: str) -> _Cost:
        computation, total = module.computations[name], _NOTHING
        for instruction in computation.instructions.values():
            done = _products(computation, instruction)
            if done is None:
                silent.append(instruction.name)
            own = _Cost.of_products(done or 0.0, _type(computation, instruction))._replace(
                traffic=_traffic(module, computation, instruction),
                host=_host(computation, instruction),
            )
            total = total.plus(own)
            total = total.plus(called(instruction))
        return total

    def called(instruction: Instruction) -> _Cost:
        """What an instruction runs besides itself."""
        match instruction.opcode:
            case "while":
                turns = trips[instruction.name]
                if turns is None:
                    once.append(instruction.name)
                return _NOTHING.plus(
                    cost(instruction.refers("body")), times=1 if turns is None else turns
                )
            case "conditional":
                branches = [cost(name) for name in trip_counts.callees(instruction)]
                return _Cost(*(max(values) for values in zip(*branches, strict=True)))
            case "fusion":  # one instruction for the memory
                return cost(instruction.refers("calls"))._replace(traffic=0.0, host=0.0)
            case "call" | "call-start" | "async-start":
                return functools.reduce(
                    _Cost.plus, map(cost, trip_counts.callees(instruction)), _NOTHING
                )
        return _NOTHING  # what it applies to its elements is part of it

    return Work(*cost(module.entry), tuple(silent), tuple(once))


class _Cost(NamedTuple):
    """What one execution of a computation costs."""

    products: float
    int8: float
    fp8: float
    traffic: float
    host: float

    @classmethod
    def of_products(cls, products: float, dtype: str) -> _Cost:
        """The cost of products of numbers of a type."""
        int8 = products if dtype in ("s8", "u8") else 0.0
        fp8 = products if dtype.startswith("f8") else 0.0
        return cls(products, int8, fp8, 0.0, 0.0)

    def plus(self, other: _Cost, times: int = 1) -> _Cost:
        """Adds what runs some times."""
        return _Cost(*(a + times * b for a, b in zip(self, other, strict=True)))


_NOTHING = _Cost(0.0, 0.0, 0.0, 0.0, 0.0)


# Products.


# Kernels of splash attention (forward, and the gradients of keys and values and of queries): how
# the names of the block sizes in their descriptions end, and how many products of all queries with
# all keys each computes.
_SPLASH = {"": 2, "_dkv": 4, "_dq": 3}


def _products(computation: Computation, instruction: Instruction) -> float | None:
    """Floating-point operations of an instruction; None for a kernel that does not tell."""
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


def _type(computation: Computation, instruction: Instruction) -> str:
    """The type of what a product multiplies, as the text names it; "" where that is not known."""
    cublas = 'custom_call_target="__cublas$' in instruction.attributes
    grouped = instruction.opcode == "custom-call" and instruction.name.startswith("ragged-dot")
    if instruction.opcode not in ("dot", "convolution") and not cublas and not grouped:
        return ""
    # A TPU's kernel of grouped products takes the groups first, and what it multiplies last.
    operand = instruction.operands[-1 if grouped else 0]
    return computation.instructions[operand].shape.partition("[")[0]


def _splash(computation: Computation, instruction: Instruction) -> float | None:
    """Splash attention: [..., heads, queries, features] by blocks; a mask leaves some of them out.

    Its first operand has an entry for each pair of blocks that the kernel visits. A kernel that
    visits all is taken for causal: half of the blocks are empty.
    """
    blocks = {
        ending: [
            int(size)
            for side in ("q", "kv")
            for size in re.findall(rf"\bblock_{side}{ending}\b\W*(\d+)", instruction.attributes)
        ]
        for ending in _SPLASH
    }
    # The forward kernel describes the others' blocks too.
    ending = next((ending for ending, sizes in blocks.items() if len(sizes) == 2), None)
    if ending is None or "splash" not in instruction.name + instruction.attributes:
        return None
    operands = [_sizes(computation.instructions[name].shape) for name in instruction.operands]
    visited, *others = [shape for shape in operands if len(shape) >= 3]
    *heads, queries, features = next(shape for shape in others if shape != visited)
    pairs = math.prod(visited[-2:]) * math.prod(blocks[ending])
    if pairs >= queries * queries:
        pairs = queries * queries // 2
    return 2.0 * _SPLASH[ending] * math.prod(heads) * pairs * features


def _dot(computation: Computation, instruction: Instruction, contracting: str) -> float:
    left = _sizes(computation.instructions[instruction.operands[0]].shape)
    found = re.search(contracting, instruction.attributes)
    inner = math.prod(left[i] for i in _integers(found.group(1))) if found else 1
    return 2.0 * math.prod(_sizes(instruction.shape)) * inner


def _convolution(computation: Computation, instruction: Instruction) -> float:
    """A TPU's products are convolutions; batched ones slide over mostly holes, not counted here."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels is not None, f"{instruction.name} does not say which dimension is which"
    left, right = (computation.instructions[name].shape for name in instruction.operands[:2])
    given = dict(zip(labels[1], _sizes(left), strict=True))
    kernel = dict(zip(labels[2], _sizes(right), strict=True))
    result = dict(zip(labels[3], _sizes(instruction.shape), strict=True))
    found = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    window = dict(re.findall(r"(\w+)=(\S+)", found.group(1))) if found else {}

    def setting(name: str, dimension: int, default: str) -> list[int]:
        text = window.get(name)
        return [int(n) for n in (text.split("x")[dimension] if text else default).split("_")]

    positions = 1
    for dimension in range(len(given) - 2):
        label = str(dimension)
        (stride,) = setting("stride", dimension, "1")
        (holes,) = setting("lhs_dilate", dimension, "1")
        (spread,) = setting("rhs_dilate", dimension, "1")
        before = setting("pad", dimension, "0_0")[0]
        place = (
            np.arange(result[label])[:, None] * stride
            + np.arange(kernel[label])[None, :] * spread
            - before
        )
        inside = (place >= 0) & (place <= (given[label] - 1) * holes) & (place % holes == 0)
        positions *= int(inside.sum())
    return 2.0 * result["b"] * result["f"] * kernel["i"] * positions


# Traffic.


def _traffic(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Bytes that an instruction moves from and to main memory."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done"):
        return 0.0
    shapes = [computation.instructions[name].shape for name in instruction.operands]
    if opcode == "fusion":
        body = module.computations[instruction.refers("calls")]
        read = sum(_read(module, body, i, shape)[0] for i, shape in enumerate(shapes))
        return read + _written(module, body, body.root, instruction.shape)
    if opcode in _SLICES:
        return 2 * _bytes(instruction.shape)
    if opcode in ("dynamic-update-slice", "scatter"):
        return 2 * _bytes(shapes[-1] if opcode == "scatter" else shapes[1])
    own = _bytes(instruction.shape)
    read = sum(map(_bytes, shapes))
    if not opcode.endswith("-start"):
        return read + own
    if opcode == "slice-start":  # it returns its operand too, and then the slice
        slice_shape = _arrays(instruction.shape)[1]
        return _plain_bytes(slice_shape) * (read > 0) + _bytes(slice_shape)
    return max(own, read)  # what others return holds their operands too


_HOST = "S(5)"  # how a layout names the host's memory


def _host(computation: Computation, instruction: Instruction) -> float:
    """Bytes that an instruction moves between the memories of device and host."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode not in ("copy", "slice", "dynamic-slice", "dynamic-update-slice"):
        return 0.0
    shapes = [computation.instructions[name].shape for name in instruction.operands]
    if opcode == "dynamic-update-slice":
        ends = [shapes[1], shapes[0]]
        moved = shapes[1]
    else:
        *_, moved = (s for s in _arrays(instruction.shape) if not s.startswith("u32[]"))
        # Of a copy that starts, the text shows where it goes to and where it comes from.
        ends = _arrays(instruction.shape)[:2] if opcode == "copy" else [shapes[0], moved]
        if len(ends) == 1:
            ends.append(shapes[0])
    crosses = len({_HOST in shape for shape in ends}) == 2
    return _plain_bytes(moved) if crosses else 0.0


def _read(module: Module, body: Computation, index: int, shape: str) -> tuple[float, bool]:
    """Bytes that a fusion reads of one of its operands, and whether it returns the operand."""
    whole = _bytes(shape)
    users = _users(body)
    start = next(
        line.name
        for line in body.instructions.values()
        if line.opcode == "parameter" and int(line.arguments) == index
    )
    needed, waiting, returned = 0.0, [start], False
    while waiting:
        name = waiting.pop()
        returned |= name == body.root.name
        for user in users.get(name, []):
            first = user.operands[0] == name
            if user.opcode in ("bitcast", "get-tuple-element", "tuple"):
                waiting.append(user.name)
            elif user.opcode in _SLICES and first:
                needed += _plain_bytes(user.shape)
            elif user.opcode == "dynamic-update-slice" and first:
                pass  # in place
            elif user.opcode == "fusion":  # inside the fusion, such as a bitcast's
                inner = module.computations[user.refers("calls")]
                for position, operand in enumerate(user.operands):
                    if operand == name:
                        own, same = _read(module, inner, position, shape)
                        needed += own
                        waiting += [user.name] if same else []
            else:
                return whole, returned
    return min(needed, whole), returned


def _written(module: Module, body: Computation, root: Instruction, shape: str) -> float:
    """Bytes that a fusion writes."""
    while root.opcode == "bitcast":
        root = body.instructions[root.operands[0]]
    if root.opcode == "tuple":
        parts = _arrays(shape)
        lines = [body.instructions[name] for name in root.operands]
        if len(parts) == len(lines):
            return sum(
                _written(module, body, line, part) for line, part in zip(lines, parts, strict=True)
            )
    if root.opcode == "dynamic-update-slice":
        return min(_plain_bytes(body.instructions[root.operands[1]].shape), _bytes(shape))
    if root.opcode == "fusion":
        inner = module.computations[root.refers("calls")]
        return _written(module, inner, inner.root, shape)
    return _bytes(shape)


def _users(body: Computation) -> dict[str, list[Instruction]]:
    users: dict[str, list[Instruction]] = {}
    for line in body.instructions.values():
        for name in line.operands:
            users.setdefault(name, []).append(line)
    return users


def _arrays(shape: str) -> list[str]:
    """The arrays of a shape, with their layouts."""
    return re.findall(r"\w+\[[\d,<=]*\](?:\{[^}]*\})?", shape)


def _bytes(shape: str) -> float:
    """Bytes of a shape in main memory; S(1) and above are other memories."""
    return sum(_plain_bytes(array) for array in _arrays(shape) if not re.search(r"S\([1-9]", array))


def _plain_bytes(shape: str) -> float:
    """Bytes of a shape in whichever memory."""
    total = 0.0
    for dtype, sizes in re.findall(r"(\w+)\[([\d,<=]*)\]", shape):
        width = re.search(r"\d+", dtype)  # bf16, f8e4m3fn, s4; the ones without are pred, token
        bits = 0 if dtype == "token" else int(width.group()) if width else 8
        total += math.prod(_integers(sizes)) * bits / 8
    return total


def _sizes(shape: str) -> list[int]:
    found = re.search(r"\[([\d,<=]*)\]", shape)
    return _integers(found.group(1)) if found else []


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
