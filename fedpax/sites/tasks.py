"""What the coordinator asks of sites, what they answer, and the checks of the answers."""

import json
import math
import re
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.files import read_file, replace_file
from fedpax.sites.downlink import DownlinkArrays
from fedpax.sites.site_experiment import Json
from fedpax.transport.admission import CheckedHeader
from fedpax.transport.calls import MalformedError, RefusedError
from fedpax.transport.message import ChecksumError, Message, decode, encode

SHARED, ROW, TERM, SHOWN, WORD = "shared", "row", "term", "shown", "word"
"""First words of the names of arrays."""


ROUND, EVALUATION, QUESTION, VALUES = "round", "evaluate", "question", "values"
"""The kinds of tasks. Each task that is not an evaluation is part of a round."""

ArrayTypes = tuple[tuple[int | None, ...], np.dtype]


class Task(NamedTuple):
    """What the coordinator asks of sites.

    Attributes:
        token: names the task, of all stages of a round.
        own: fields and arrays of each site that is asked.
        expected: the types of a reply's arrays; a shape's first None is the site's number of
            clients.
        coded: the same for a site that sends encoded words: one whose fields have `"coded"`.
        weights: for each array that is a sum of weights, the most that a client weighs.
        weighted: arrays that are divided by a weight, with the name of this weight.
    """

    token: str
    header: Mapping[str, Any]
    packet: DownlinkArrays
    own: Mapping[str, tuple[Mapping[str, Any], Mapping[str, np.ndarray]]]
    expected: Mapping[str, ArrayTypes]
    weights: Mapping[str, float] = {}
    weighted: Mapping[str, str] = {}
    coded: Mapping[str, ArrayTypes] = {}

    @property
    def kind(self) -> str:
        """ROUND or EVALUATION."""
        task = self.header.get("of", self.header["task"])  # a phase of a secure sum is of a task
        return EVALUATION if task == EVALUATION else ROUND

    def is_encoded(self, own: Mapping[str, Any]) -> bool:
        """Tell whether a site with these fields encodes its terms, to be checked once decoded."""
        return bool(own.get("coded")) or "up" in self.header


class SiteReply(NamedTuple):
    """The answer of a site to a task."""

    header: Mapping[str, Any]
    content: Mapping[str, np.ndarray] | Path  # arrays, or the file that has them

    @property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """The arrays, read when they are needed."""
        return read_message(self.content).arrays if isinstance(self.content, Path) else self.content


def new_token() -> str:
    """Return a token that no other task has."""
    return secrets.token_hex(8)


def numbered(word: str, arrays: Sequence[Any]) -> dict[str, np.ndarray]:
    """Return arrays by name: `word` and a number."""
    return {f"{word} {i}": to_numbers(x) for i, x in enumerate(arrays)}


def in_order(word: str, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Return the arrays that `numbered` named."""
    number = sum(name.rpartition(" ")[0] == word for name in arrays)
    names = [f"{word} {i}" for i in range(number)]
    if not arrays.keys() >= set(names):
        raise MalformedError(f"the arrays {sorted(arrays)[:5]} are not numbered from 0.")
    return [arrays[name] for name in names]


def largest_message(task: Task) -> int:
    """Return the bytes of the largest message of a task, either way."""

    def size(types: Iterable[ArrayTypes], rows: int) -> int:
        return sum(
            math.prod(rows if n is None else n for n in shape) * dtype.itemsize
            for shape, dtype in types
        )

    shared = sum(x.nbytes for x in task.packet.whole.values())
    down = [sum(x.nbytes for x in arrays.values()) for _, arrays in task.own.values()]
    rows = [len(fields.get("clients", ())) for fields, _ in task.own.values()]
    up = size([*task.expected.values()], max(rows, default=0)) + size(task.coded.values(), 1)
    return max(shared + max(down, default=0), up)


# ---- messages in files: the chunks of `transport.message`, each behind its length

LARGEST = 1 << 36
"""The largest file that is read, in bytes."""

_LENGTH = struct.Struct("<I")


def write_message(path: Path, message: Message, *, sync: bool = True) -> int:
    """Write a message in place of a file, and return its number of bytes."""
    chunks = encode(message, 1 << 62)
    content = b"".join(_LENGTH.pack(len(chunk)) + chunk for chunk in chunks)
    replace_file(path, content, sync=sync)
    return len(content)


def read_message(path: Path) -> Message:
    """Read a message of `write_message`; raise a `MessageError` if it is damaged."""
    content = read_file(path, LARGEST)
    return decode(_chunks(content), len(content))


def _chunks(content: bytes) -> Iterator[bytes]:
    place = 0
    while place < len(content):
        if place + _LENGTH.size > len(content):
            raise ChecksumError("the file ends inside a length. Restore it from a copy.")
        (length,) = _LENGTH.unpack_from(content, place)
        place += _LENGTH.size
        if place + length > len(content):
            raise ChecksumError("the file ends inside a chunk. Restore it from a copy.")
        yield content[place : place + length]
        place += length


# ---- random keys in messages: arrays of numbers, as `jax.random.key_data` has them

ArrayType = tuple[tuple[int, ...], np.dtype]


def is_key(dtype: Any) -> bool:
    """Return whether values of a dtype are random keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def to_numbers(x: Any) -> np.ndarray:
    """Return an array for a message."""
    return np.asarray(jax.random.key_data(x) if is_key(x.dtype) else x)


def type_in_message(shape: tuple[int, ...], dtype: Any) -> ArrayType:
    """Return the shape and the dtype in a message of a value."""
    if not is_key(dtype):
        return shape, np.dtype(dtype)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
    return data.shape, np.dtype(data.dtype)


def from_numbers(x: Any, dtype: Any) -> jax.Array:
    """Return the value of an array of a message, whose dtype here is given."""
    if not is_key(dtype):
        return jnp.asarray(x)
    names: list[Any] = []
    key = jax.ShapeDtypeStruct((), dtype)
    jax.eval_shape(lambda key: names.append(jax.random.key_impl(key)), key)
    return jax.random.wrap_key_data(jnp.asarray(x), impl=names[0])


# ---- checks of what a coordinator sends to a site

MOST_STAGES = 1000
WEIGHTS = re.compile(r"examples|equal|capped:[1-9][0-9]{0,8}")


def check_task(header: Json, rounds: int) -> None:
    """Raise a `MalformedError` unless each field of a task has its type and range."""
    task = CheckedHeader(header)
    kind = task.text("task")
    task.text("token")
    of_kind = {ROUND: {"counted"}, EVALUATION: {"counted", "save"}}
    is_sum = kind == EVALUATION and "request" in header
    needed = {"model", "names"} if is_sum else of_kind.get(kind, set())
    if lacking := sorted(needed - header.keys()):
        raise MalformedError(f"the syncer asks for {kind!r} without {lacking}.")
    if "request" in header or kind not in (ROUND, EVALUATION, QUESTION, VALUES):
        task.text("session")
    lists = {"names": header.get("names", [])}
    lists |= {"columns": header.get("columns")} if kind == VALUES else {}
    for field, names in lists.items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise MalformedError(f"the syncer asks for the {field} {str(names)[:100]}.")
    for name in ("base", "counted", "model", "target", "up", "weights"):
        task.optional_text(name)
    for name in ("coded", "save", "secure_sums"):
        task.flag(name)
    task.count("round", int(kind == ROUND), rounds)  # a number: a checkpoint's folder has its name
    task.count("stage", 0, task.count("last_stage", 0, MOST_STAGES))
    if header.get("request") is not None:
        task.mapping("request")
    if kind == QUESTION:
        task.mapping("settings")
    if kind == ROUND and not WEIGHTS.fullmatch(task.text("weights")):
        raise MalformedError(f"the syncer's weights are {header['weights']!r}, not of --weights.")
    if "target" in header:
        task.count("checksum")
        if not re.fullmatch(r"\S+ [0-9]{1,9}", task.text("target")):
            raise MalformedError(f"the syncer's model is named {header['target']!r}.")


# ---- checks of what sites send to a coordinator

MOST_METRICS, LONGEST_DESCRIPTION = 100, 1 << 18

MOST_RENUMBERED = 100
"""Times that a site can join with another number of clients than before, at most.

Each time its clients get new numbers, and the coordinator traces its program again."""


def check_size(name: str, description: Json, count: int, most: int) -> None:
    """Raise if a site that joins has a large description, or too many clients."""
    if (size := len(json.dumps(description))) > LONGEST_DESCRIPTION:
        raise MalformedError(
            f"site {name!r} has a description of {size:,} bytes, expected at most "
            f"{LONGEST_DESCRIPTION:,}. State the categories of columns, or leave columns out: "
            "--data.columns NAME=left_out."
        )
    if count > most:
        raise RefusedError(
            f"site {name!r} has {count:,} clients, expected at most {most:,}. Start `fedpax "
            f"syncer` with --clients_per_site={count}, or join with fewer clients."
        )


def check_renumbered(name: str, times: int) -> None:
    """Raise if a site that joins with another number of clients has done so too often."""
    if times >= MOST_RENUMBERED:
        raise RefusedError(
            f"site {name!r} has joined {times} times with another number of clients than before "
            f"and now does so again, expected at most {MOST_RENUMBERED} times. Give the site its "
            "former data, or wait for another run."
        )


def find_fault(task: Task, own: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str | None:
    """Return why a reply cannot be counted, or None."""
    rows = len(own.get("clients", ()))
    expected = task.coded if own.get("coded") else task.expected
    for name, (shape, dtype) in expected.items():
        wanted = tuple(rows if size is None else size for size in shape)
        array = arrays.get(name)
        if array is None or array.shape != wanted or array.dtype != dtype:
            received = "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
            return f"{name} is {received}, expected {dtype}{list(wanted)}"
        if array.dtype.kind not in "biu" and not is_finite(array):
            return f"{name} has NaN or infinity, expected finite values"
    if extra := arrays.keys() - expected.keys():
        return f"{min(extra)} is not asked for"
    return None if task.is_encoded(own) else find_wrong_weight(task, rows, arrays)


def checked_fields(fields: Json) -> Json:
    """Return the fields of a reply; raise a `MalformedError` if a number or a name is none."""
    checked = CheckedHeader(fields)
    if "examples" in fields:
        checked.count("examples")
    checked.optional_text("withheld")
    means, parts = (checked.mapping(n) if n in fields else {} for n in ("metrics", "parts"))
    if max(len(means), len(parts)) > MOST_METRICS:
        raise MalformedError(f"a reply has {len(means)} metrics, at most {MOST_METRICS} fit.")
    for name in (*means, *parts):
        CheckedHeader({"name": name}).text("name")
    for name in means:
        CheckedHeader(means).number(name)
    for name in parts:
        CheckedHeader(parts).count(name)
    return fields


def check_types(types: Json) -> None:
    """Raise a `MalformedError` unless each field of a batch has a dtype and a shape."""
    for name, entry in types.items():
        CheckedHeader({"name": name}).text("name")
        try:
            dtype, shape = entry
            fits = all(type(size) is int and 0 <= size < 2**31 for size in shape)
            np.dtype(dtype)
        except (TypeError, ValueError):
            fits = False
        if not fits or len(shape) > 32:
            raise MalformedError(f"the field {name!r} of a batch is {str(entry)[:100]}.")


def find_wrong_weight(task: Task, rows: int, arrays: Mapping[str, Any]) -> str | None:
    """Return why the weights of some clients cannot be counted, or None."""
    for name, most in task.weights.items():
        weight = float(arrays[name])
        if not 0 <= weight <= rows * most * (1 + 1e-5):  # float32 rounds a sum
            return f"its weight is {weight:g}, expected 0 to {rows * most:g}"
        if not weight and any(arrays[x].any() for x, of in task.weighted.items() if of == name):
            return "its weight is 0 and its values are not"
    return None


def claimed_weight(task: Task, arrays: Mapping[str, np.ndarray]) -> float | None:
    """Return the weight that a site claims for its clients; None if the task asks for none."""
    # With clusters, several weights are parts of the largest.
    return max((float(arrays[name]) for name in task.weights), default=None)


def is_finite(array: np.ndarray) -> bool:
    """Return whether an array has no NaN and no infinity."""
    floats = array if array.dtype.kind in "fc" else array.astype(np.float32)  # such as bfloat16
    return bool(np.all(np.isfinite(floats)))


def shorten_types(types: Json) -> str:
    """Describe the fields of a batch."""
    return ", ".join(f"{name}: {entry}" for name, entry in sorted(types.items()))[:500]
