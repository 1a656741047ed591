"""Run the participant's part of exported stages with IREE and NumPy alone, without JAX.

Copy this module to a device, with the files of `fedpax.deploy.compile_client`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ClientFn = Callable[
    [int, Sequence[Any], Sequence[Any], Mapping[str, Any]],
    tuple[list[Any], list[Any], dict[str, Any]],
]


def load_client(folder: str | Path, stage: int = 0) -> ClientFn:
    """Load the participant's part of a stage.

    Args:
        folder: a folder that `fedpax.deploy.compile_client` wrote.
        stage: number of the stage.

    Returns:
        `(index, shared, rows, own) -> (terms, shown, kept)`, as `fedpax.deploy.Artifact.client`.

    Raises:
        ValueError: a file is damaged.
        ImportError: the package iree-base-runtime is missing.
    """
    from iree import runtime

    folder = Path(folder)
    about = json.loads((folder / f"client_{stage}.json").read_text(encoding="utf-8"))
    content = (folder / f"client_{stage}.vmfb").read_bytes()
    if hashlib.sha256(content).hexdigest() != about["sha256"]:
        raise ValueError(
            f"{folder / f'client_{stage}.vmfb'} is damaged: it does not match its sha256. Compile "
            "it again with fedpax.deploy.compile_client()."
        )
    module = runtime.load_vm_flatbuffer(content, driver="local-sync")
    messages, inputs = about["messages"], about["inputs"]
    kinds: list[tuple[str, list[int], str]] = [("index", [], "int32")]
    for name in ("shared", "rows", "own", "noise"):
        kinds += [(v["name"], v["shape"], v["dtype"]) for v in messages[name]]
    first, second = len(messages["terms"]), len(messages["terms"]) + len(messages["shown"])

    def client(
        index: int, shared: Sequence[Any], rows: Sequence[Any], own: Mapping[str, Any]
    ) -> tuple[list[Any], list[Any], dict[str, Any]]:
        names = [value["name"] for value in (*messages["own"], *messages["noise"])]
        values = [index, *shared, *rows, *(own[name] for name in names)]
        given = [_array(values[i], kinds[i]) for i in inputs]
        results = module.main(*given)
        results = results if isinstance(results, list | tuple) else [results]
        out = [np.asarray(x) for x in results]
        kept = {v["name"]: x for v, x in zip(messages["kept"], out[second:], strict=True)}
        return out[:first], out[first:second], kept

    return client


def _array(value: Any, declared: tuple[str, list[int], str]) -> Any:
    """Return a value as an array of its declared type; random keys are given as their data."""
    name, shape, dtype = declared
    if dtype.startswith("key<"):
        return np.ascontiguousarray(value, np.uint32)
    array = np.ascontiguousarray(value, dtype).reshape(np.shape(value))
    if list(array.shape) != shape:
        raise ValueError(f"{name} has shape {list(array.shape)}, expected {shape}.")
    return array
