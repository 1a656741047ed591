"""JSON lines, whole or in blocks, a JSON list of objects, and LEAF's JSON."""

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import json as arrow_json

from fedpax.errors import ArgumentError
from fedpax.files import BYTE_ORDER_MARK, NESTING, is_utf8, parse_json
from fedpax.user_files.arrow_numpy import concatenate_values, json_values
from fedpax.user_files.finding import DataFile
from fedpax.user_files.formats import ReadOptions, TypeChangedError
from fedpax.user_files.read_table import add_clients
from fedpax.user_files.readers.csv_files import not_utf8
from fedpax.user_files.readers.exact_integers import check_integers_of_floats, integers_in_lines

_LEAF = re.compile(rb'\{\s*"(users|num_samples|user_data|hierarchies)"\s*:\s*[\[{]')
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_NOT_OPENING = bytes(set(range(256)) - set(b"[{\n"))
_OPENING, _CLOSING = np.frombuffer(b"[{", np.uint8), np.frombuffer(b"]}", np.uint8)
_BLOCK = 1 << 26  # the longest line that is read, in bytes
_STREAM_BLOCK = 1 << 24
_LARGEST_BLOCK = (1 << 31) - 1
_CHANGED = re.compile(r"Column\(/.*changed from")  # an error of Arrow: a value of another type
_NULL = re.compile(rb"\n[ \t\r]*null")  # as the first row it ends the process in pyarrow
_ONLY_ARROW = re.compile(rb"-NaN|Inf(?!inity)")  # numbers that Python's parser does not read
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # of a surrogate pair
_EXPONENT = re.compile(r"[eE]\+?\d{3}")  # that can be too large
_AS_TEXTS = "Write the values of {name!r} as texts"


def read_json_lines(file: DataFile, options: ReadOptions) -> pa.Table:
    """Read one JSON object a line."""
    types, num_lines = dict[str, pa.DataType](), 0
    for block, number in _blocks_of_lines(file):
        _check_nesting_of_lines(block, number)
        if not is_utf8(block):
            raise not_utf8(file)
        if _has_null(block):
            _check_objects(block, number)
        types |= _types_in(block, options)
        num_lines += _count_lines(block)
    try:
        table = _parse_lines(file.open, _BLOCK, types)
    except pa.ArrowInvalid:  # again in one block, whose rows the message counts
        try:
            table = _parse_lines(file.open, _LARGEST_BLOCK, types)
        except pa.ArrowInvalid as error:
            for block, number in _blocks_of_lines(file):
                _check_objects(block, number, error)
            raise _located(error) from error
    if table.num_rows > num_lines:
        for block, number in _blocks_of_lines(file):
            _check_objects(block, number)

    def integers_of(name: str) -> Iterator[int]:
        for block, _ in _blocks_of_lines(file):
            yield from integers_in_lines(block.split(b"\n"), name)

    check_integers_of_floats(table, options, integers_of, _AS_TEXTS)
    return table


def stream_json_lines(file: DataFile, options: ReadOptions) -> Iterator[pa.Table]:
    """Read one JSON object a line, in blocks; a block has the types of its own values."""
    kinds: dict[str, pa.DataType] = {}
    for block, number in _blocks_of_lines(file):
        table = _parse_block(block, file, number, options)
        integers_of = functools.partial(integers_in_lines, block.split(b"\n"))
        check_integers_of_floats(table, options, integers_of, _AS_TEXTS)
        for name, data_type in zip(table.column_names, table.schema.types, strict=True):
            known = kinds.setdefault(name, data_type)
            if {pa.types.is_timestamp(known), pa.types.is_timestamp(data_type)} == {True, False}:
                raise TypeChangedError(file.path, name, pa.string())  # not all texts are dates
        yield table


def _blocks_of_lines(file: DataFile) -> Iterator[tuple[bytes, int]]:
    """Yield whole lines, and the number of lines before them."""
    with file.open() as opened:
        rest, number = opened.read(len(BYTE_ORDER_MARK)).removeprefix(BYTE_ORDER_MARK), 0
        while content := opened.read(_STREAM_BLOCK):
            block, newline, rest = (rest + content).rpartition(b"\n")
            if newline:
                yield block, number
                number += block.count(b"\n") + 1
        if rest.strip():
            yield rest, number


def _parse_block(block: bytes, file: DataFile, number: int, options: ReadOptions) -> pa.Table:
    """Parse lines; `number` lines of the file are before them."""
    _check_nesting_of_lines(block, number)
    types = _types_in(block, options)
    decodes = is_utf8(block)
    if not decodes and options.bad_rows is None:
        raise not_utf8(file)
    try:
        if not decodes or _has_null(block):
            raise pa.ArrowInvalid("not UTF-8, or a null")
        table = _parse_lines(lambda: pa.BufferReader(block), _LARGEST_BLOCK, types)
        if table.num_rows > _count_lines(block):
            raise pa.ArrowInvalid("several objects in a line")
        return table
    except pa.ArrowInvalid as error:
        if options.bad_rows is None:
            _check_objects(block, number, error)
            raise _located(error, range(number + 1, _LARGEST_BLOCK)) from error
    kept = {}
    for count, line in enumerate(block.split(b"\n"), number + 1):
        if _fault(line) is not None:
            options.bad_rows.skip(file.path, line.decode(errors="replace"))
        elif line.strip():
            kept[count] = line
    text = b"\n".join(kept.values()) or b"{}"  # Arrow reads no empty text
    try:
        table = _parse_lines(lambda: pa.BufferReader(text), _LARGEST_BLOCK, types)
    except pa.ArrowInvalid as error:
        raise _located(error, [*kept]) from error
    return table if kept else table[:0]


def _has_null(block: bytes) -> bool:
    return _NULL.search(b"\n" + block) is not None


def _count_lines(block: bytes) -> int:
    """Return the number of lines that are not empty."""
    return sum(map(bool, map(bytes.strip, block.split(b"\n"))))


def _located(
    error: pa.ArrowInvalid, lines: Sequence[int] = range(1, _LARGEST_BLOCK)
) -> ArgumentError:
    """Name the line in an error; `lines` are the numbers of the lines of its rows."""
    row = re.compile(r"in row (\d+)\.?")
    text = row.sub(lambda row: f"in line {lines[int(row[1])]}", str(error))
    if "changed from" in text:
        text += ". Write all values of the column as one type, such as texts"
        if "/[]/" in text or "array" in text:
            text += (
                ". Chat messages are a list of objects whose content is a text: join the texts of "
                "parts, and parse messages that are a text with JSON"
            )
    return ArgumentError(text)


def _check_objects(block: bytes, number: int, error: pa.ArrowInvalid | None = None) -> None:
    """Raise an error for the first line that is no JSON object."""
    lines = [] if _CHANGED.search(str(error)) else block.split(b"\n")
    for count, line in enumerate(lines, number + 1):
        if (fault := _fault(line)) is not None:
            text = line.decode(errors="replace").strip()
            raise ArgumentError(
                f"its line {count} is {text[:78]!r}{'...' if text[78:] else ''}, expected one "
                f"whole JSON object{fault}. Correct the line, or leave such lines out: `fedpax "
                "prepare` does with --on_bad_row=skip"
            ) from error


def _fault(line: bytes) -> str | None:
    """Return None for an empty line or one JSON object; for others what a reader may not see."""
    if not line.strip(b" \t\r"):
        return None
    try:
        text = line.decode()
        value = json.loads(
            text, object_pairs_hook=_distinct, parse_int=str, parse_float=_without_large_exponent
        )
        if _HALF.search(line):
            json.dumps(value, ensure_ascii=False).encode()
    except ArgumentError as error:
        return f": {error}"
    except UnicodeEncodeError:
        return ": a surrogate pair is invalid"
    except UnicodeDecodeError:
        return ""
    except json.JSONDecodeError as error:
        if line.strip().startswith(b"{") and _ONLY_ARROW.search(line):
            return _fault_of_arrow(line)
        several = error.msg == "Extra data" and text[error.pos] == "{"
        return ": it has several objects" if several else ""
    except OverflowError:
        return _fault_of_arrow(line)
    return None if isinstance(value, dict) else ""


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ArgumentError(f"the name {twice!r} is in an object twice")
    return value


def _without_large_exponent(number: str) -> str:
    if _EXPONENT.search(number):
        raise OverflowError
    return number


def _fault_of_arrow(line: bytes) -> str | None:
    """Return what `_fault` does, by a slow reader of rare numbers."""
    try:
        is_one = _parse_lines(lambda: pa.BufferReader(line), _LARGEST_BLOCK, {}).num_rows == 1
    except pa.ArrowInvalid as error:
        if _CHANGED.search(str(error)):
            return None
        return ": a number is too large for float64" if "too big" in str(error) else ""
    return None if is_one else ""


def _types_in(block: bytes, options: ReadOptions) -> dict[str, pa.DataType]:
    """Return the types of names that a block has: pyarrow adds a column for any other name."""
    return {
        name: data_type
        for name, data_type in options.types.items()
        if any(json.dumps(name, ensure_ascii=ascii_).encode() in block for ascii_ in (True, False))
    }


def _check_nesting_of_lines(block: bytes, number: int = 0) -> None:
    """Raise a ValueError if a line nests too deep: pyarrow's parser would end the process."""
    opening = block.translate(None, delete=_NOT_OPENING).split(b"\n")  # of each line
    deep = [line for line, brackets in enumerate(opening) if len(brackets) > NESTING]
    lines = block.split(b"\n") if deep else []
    for line in deep:  # or one with many short lists
        outside = np.frombuffer(_TEXT.sub(b"", lines[line]), np.uint8)
        steps = np.isin(outside, _OPENING).astype(np.int64) - np.isin(outside, _CLOSING)
        if np.cumsum(steps).max(initial=0) > NESTING:
            raise ArgumentError(
                f"line {number + line + 1} nests lists or objects deeper than {NESTING} levels"
            )


def _parse_lines(
    open_: Callable[[], Any], block_size: int, types: Mapping[str, pa.DataType]
) -> pa.Table:
    """Parse lines; `read_table` casts what is stated as texts."""
    schema = pa.schema(list(types.items())) if types else None
    try:
        with open_() as opened:
            return arrow_json.read_json(
                opened,
                arrow_json.ReadOptions(block_size=block_size),
                arrow_json.ParseOptions(newlines_in_values=False, explicit_schema=schema),
            )
    except pa.ArrowInvalid as error:
        change = r"Column\(/(.*)\) changed from (?:string to|number to string)"
        changed = re.search(change, str(error))
        if changed is None or changed[1] not in types:
            raise
        others = {name: data_type for name, data_type in types.items() if name != changed[1]}
        return _parse_lines(open_, block_size, others)


def read_json(file: DataFile, options: ReadOptions) -> pa.Table:
    """Read a list of objects, LEAF's users, or JSON lines in a file that is named .json."""
    with file.open() as opened:
        start = opened.read(1 << 16).lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"["):
        return _read_list(_parse(file))
    if _LEAF.match(start):
        content = _parse(file)
        if {"users", "user_data"} <= content.keys():
            return read_leaf(content)
    return read_json_lines(file, options)


def _read_list(examples: list[Any]) -> pa.Table:
    for number, example in enumerate(examples):
        if not isinstance(example, dict):
            raise ArgumentError(f"its entry {number} is {example!r:.40}, expected an object")
    # The names of all objects: the first one may lack some.
    names = dict.fromkeys(name for example in examples for name in example)
    columns = {}
    for name in names:
        try:
            columns[name] = json_values([e.get(name) for e in examples])
        except pa.ArrowInvalid as error:
            raise ArgumentError(
                f"its column {name!r} has values of no one type: {error}. "
                f"{_AS_TEXTS.format(name=name)}"
            ) from error
    return pa.table(columns)


def _parse(file: DataFile) -> Any:
    with file.open() as opened:
        return parse_json(opened.read())


def read_leaf(content: Mapping[str, Any]) -> pa.Table:
    """Read LEAF: `user_data` has for each of the `users` lists of equal length by field."""
    users, user_data = content["users"], content.get("user_data")
    if not isinstance(user_data, Mapping) or (missing := [u for u in users if u not in user_data]):
        who = f" of user {missing[0]!r}" if isinstance(user_data, Mapping) else ""
        raise ArgumentError(
            f"it has 'users' but no 'user_data'{who}, expected LEAF's users, num_samples and "
            "user_data"
        )
    if len({*users}) < len(users):
        raise ArgumentError("a user is in 'users' more than once, expected each user once")
    if unlisted := user_data.keys() - {*users}:
        raise ArgumentError(
            f"user {min(unlisted)!r} is in 'user_data' and not in 'users', expected all users there"
        )
    fields: dict[str, list[Any]] = {name: [] for user in users for name in user_data[user]}
    clients: list[str] = []
    num_samples = dict(zip(users, content.get("num_samples") or (), strict=False))
    for user in users:
        sizes = {name: len(user_data[user].get(name, ())) for name in fields}
        sizes |= {"num_samples": num_samples[user]} if user in num_samples else {}
        if len(set(sizes.values())) > 1:
            raise ArgumentError(f"user {user!r} has {sizes} values, expected equal numbers")
        clients += [user] * next(iter(sizes.values()), 0)
        for name, values in fields.items():
            values += user_data[user][name]
    columns = {name: concatenate_values(values) for name, values in fields.items()}
    return add_clients(pa.table(columns), clients)
