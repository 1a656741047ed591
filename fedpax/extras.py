"""Extras: the optional packages of fedpax, and the message that names the extra to install."""

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any, NamedTuple

from fedpax.errors import MissingPackageError


class Extra(NamedTuple):
    """An optional dependency."""

    use: str  # what it adds
    package: str  # the distribution whose version `fedpax doctor` shows
    modules: tuple[str, ...]  # the modules that it adds, by the names under which they are imported


EXTRAS = {
    "plot": Extra("pictures", "matplotlib", ("matplotlib",)),
    "tfds": Extra(
        "data sets of TFDS and TensorFlow Federated, and array_record files",
        "tensorflow-datasets",
        ("array_record", "grain", "tensorflow_datasets"),
    ),
    "tpu": Extra("training on TPUs, and plans of TPU pods without one", "libtpu", ("libtpu",)),
    "cuda": Extra("training on NVIDIA GPUs", "jax-cuda13-plugin", ("jax_cuda13_plugin",)),
    "huggingface": Extra("weights in Hugging Face folders", "safetensors", ("safetensors",)),
    "tokenizers": Extra(
        "vocabularies and chat templates", "tokenizers", ("jinja2", "sentencepiece", "tokenizers")
    ),
    "files": Extra(
        "clients from your own files",
        "duckdb",
        ("duckdb", "google_crc32c", "h5py", "PIL", "pyarrow"),
    ),
    "sites": Extra("islands with runtimes of their own", "grpcio", ("cryptography", "grpc")),
    "gcs": Extra("checkpoints in a bucket of Google Cloud Storage", "gcsfs", ("fsspec", "gcsfs")),
    "quantization": Extra("int8 and fp8 matmuls", "qwix", ("qwix",)),
    "privacy": Extra("epsilon of private means", "dp-accounting", ("dp_accounting",)),
    "wandb": Extra("metrics at Weights & Biases", "wandb", ("wandb",)),
    "mlflow": Extra("metrics at MLflow", "mlflow-skinny", ("mlflow",)),
    "trackio": Extra("metrics at trackio", "trackio", ("trackio",)),
    "bench": Extra("benchmarks against DrJAX", "drjax", ("drjax",)),
    "beam": Extra("rounds as batch jobs on Apache Beam", "apache-beam", ("apache_beam",)),
    "flower": Extra("rounds on the nodes of Flower", "flwr", ("flwr",)),
    "deploy": Extra("rounds as files for other engines", "flatbuffers", ("flatbuffers",)),
    "docs": Extra("the documentation site", "sphinx", ("sphinx",)),
    "peers": Extra("tests against Flower, Opacus and PyTorch", "opacus", ("opacus", "torch")),
}
"""The extras by name. `pip install 'fedpax[NAME]'` installs one."""

_EXTRA_OF = {module: name for name, extra in EXTRAS.items() for module in extra.modules}


class LazyModule:
    """A module of an extra that is imported when one of its names is first read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it: that can take seconds."""
    return importlib.util.find_spec(module) is not None


def check_installed(module: str, use: str) -> None:
    """Check that an optional module can be imported; a message begins with `use`, what needs it."""
    if not is_installed(module):
        raise MissingPackageError(describe_missing(module, use))


def describe_missing(module: str, use: str) -> str:
    """Name the extra that installs a module, for a message."""
    return (
        f"{use} needs the package {module}, which is not installed. Run: pip install "
        f"'fedpax[{_EXTRA_OF[module]}]'"
    )


@contextlib.contextmanager
def optional(use: str) -> Iterator[None]:
    """Name the extra to install if an import in the block fails because its package is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _EXTRA_OF:
            raise
        raise MissingPackageError(describe_missing(module, use)) from error
