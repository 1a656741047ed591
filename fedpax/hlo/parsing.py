"""A parser of XLA's compiled text (HLO): a program's computations and their instructions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fedpax.errors import ArgumentError

_END = r'\}(, execution_thread="\w+")?$'  # the last line of a computation


class Instruction(NamedTuple):
    """One line of a computation: `name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    arguments: str  # the text between the parentheses: names, or the value of a constant
    attributes: str

    @property
    def operands(self) -> list[str]:
        """Names of the instructions whose results are the operands."""
        return re.findall(r"%([\w.\-]+)", self.arguments)

    def reference(self, name: str) -> str:
        """Return the computation in the attribute `name`, as in `body=%region_0`; "" if absent."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return match.group(1) if match else ""


class Computation(NamedTuple):
    """A function of the program, such as the body of a loop, a fusion, or the entry."""

    name: str
    instructions: Mapping[str, Instruction]
    root: Instruction


class Module(NamedTuple):
    """A compiled program."""

    computations: Mapping[str, Computation]
    entry: str
    num_devices: int


def parse(text: str) -> Module:
    """Parse the compiled text of a program: `jax.jit(f).lower(...).compile().as_text()`."""
    computations: dict[str, Computation] = {}
    entry = ""
    header: re.Match[str] | None = None
    instructions: dict[str, Instruction] = {}
    root: Instruction | None = None
    for line in _lines(text):
        if header is None:
            header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            instructions, root = {}, None
        elif re.match(_END, line):
            name = header.group(2)
            assert root is not None, f"computation {name} has no root"
            computations[name] = Computation(name, instructions, root)
            entry = name if header.group(1) else entry
            header = None
        elif instruction := _instruction(line):
            instructions[instruction.name] = instruction
            root = instruction if line.lstrip().startswith("ROOT ") else root
    if not entry:
        raise ArgumentError(
            f"text is not a compiled program: it has no ENTRY computation: {text[:60]!r}... "
            "Pass jax.jit(f).lower(...).compile().as_text()."
        )
    first_line = text[: text.find("\n")]
    sizes = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", first_line)
    return Module(computations, entry, math.prod(int(size) for size in sizes))


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of the text; joins instructions whose kernel metadata has line breaks."""
    pending = ""
    for line in text.splitlines():
        starts = re.match(rf"\s+(ROOT )?%?[\w.\-]+ = |\S.*\{{$|{_END}", line)
        if starts or not pending.startswith(" "):
            yield pending
            pending = line
        else:
            pending += line
    yield pending


def _instruction(line: str) -> Instruction | None:
    match = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)", re.sub(r"/\*.*?\*/", "", line))
    if not match:
        return None
    name, rest = match.groups()
    if rest.startswith("("):  # a tuple, whose layouts can have parentheses
        end = _closing(rest, 0) + 1
    else:
        end = rest.index(" ")
    shape, rest = rest[:end], rest[end + 1 :]
    opcode, parenthesis, _ = rest.partition("(")
    if not parenthesis:
        return None
    end = _closing(rest, len(opcode))
    return Instruction(name, shape, opcode, rest[len(opcode) + 1 : end], rest[end + 1 :])


def _closing(text: str, start: int) -> int:
    """Return the position of the parenthesis that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return len(text)


# ---- shapes as HLO writes them, such as "f32[64,512]{1,0}": their arrays, dimensions and bytes


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
