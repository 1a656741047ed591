"""Reads XLA's compiled text (HLO): the computations of a program and their instructions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_END = r'\}(, execution_thread="\w+")?$'  # the line that closes a computation


class Instruction(NamedTuple):
    """One line of a computation: `name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    arguments: str  # the text between the parentheses: names, or the value of a constant
    attributes: str

    @property
    def operands(self) -> list[str]:
        """Names of the instructions whose results it takes."""
        return re.findall(r"%([\w.\-]+)", self.arguments)

    def refers(self, name: str) -> str:
        """The computation that the attribute `name` refers to, as in `body=%region_0`, or ""."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else ""


class Computation(NamedTuple):
    """A function of the program: the body of a loop, a fusion, the entry."""

    name: str
    instructions: Mapping[str, Instruction]
    root: Instruction


class Module(NamedTuple):
    """A compiled program."""

    computations: Mapping[str, Computation]
    entry: str
    partitions: int  # devices that the text is written for


def read(text: str) -> Module:
    """Reads the text of a compiled program.

    Args:
      text: what `jax.jit(f).lower(...).compile().as_text()` returns, of a CPU, GPU or TPU.

    Returns:
      The program's computations, by name.

    Raises:
      ValueError: the text is not that of a compiled program.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> compiled = jax.jit(lambda x: x + 1).lower(jnp.float32(0)).compile()
      >>> module = read(compiled.as_text())
      >>> module.computations[module.entry].root.shape
      'f32[]'
    """
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
        raise ValueError(
            f"text is not a compiled program, it has no ENTRY computation: {text[:60]!r}... "
            "Pass jax.jit(f).lower(...).compile().as_text()."
        )
    first_line = text[: text.find("\n")]
    sizes = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", first_line)
    return Module(computations, entry, math.prod(int(size) for size in sizes))


def _lines(text: str) -> Iterator[str]:
    """Lines of the text; what a kernel says of itself may break the line of its instruction."""
    waiting = ""
    for line in text.splitlines():
        starts = re.match(rf"\s+(ROOT )?%?[\w.\-]+ = |\S.*\{{$|{_END}", line)
        if starts or not waiting.startswith(" "):
            yield waiting
            waiting = line
        else:
            waiting += line
    yield waiting


def _instruction(line: str) -> Instruction | None:
    found = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)", re.sub(r"/\*.*?\*/", "", line))
    if not found:
        return None
    name, rest = found.groups()
    if rest.startswith("("):  # a tuple; its layouts have parentheses too
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
    """Position of the parenthesis that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return len(text)
