"""A small model of a syncer whose merges are stored and loaded."""

import functools
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from fedpax.islands.syncer.outer_model import FragmentState
from fedpax.islands.syncer.syncer_store import SyncerStore

FRAGMENTS = 3


@functools.cache
def state(p: int, version: int) -> FragmentState:
    """Return random arrays of the types of fragment p, a function of its version."""
    rng = np.random.default_rng((p, version))
    params = {"w": rng.normal(size=(4, 1 + p)).astype(np.float32), "b": np.float32(version)}
    momentum = {
        name: rng.normal(size=np.shape(x)).astype(ml_dtypes.bfloat16) for name, x in params.items()
    }
    return FragmentState(
        jax.tree.map(np.asarray, params), (momentum, np.int32(version)), np.zeros((0, 2)), version
    )


def versions_after(merges: int) -> list[int]:
    return [(merges + FRAGMENTS - 1 - p) // FRAGMENTS for p in range(FRAGMENTS)]


def manifest(merges: int) -> dict[str, object]:
    return {"merges": merges, "versions": versions_after(merges), "islands": {"a": [merges]}}


class Model:
    """The fragments that a store reads and replaces."""

    def __init__(self) -> None:
        self.fragments = [state(p, 0) for p in range(FRAGMENTS)]

    def put(self, p: int, new: FragmentState) -> None:
        self.fragments[p] = new


def merge(store: SyncerStore, merges: int) -> None:
    """Save merge number `merges`, from 1."""
    p = (merges - 1) % FRAGMENTS
    store.log({"merge": merges, "fragment": p}, [])
    store.save(p, state(p, versions_after(merges)[p]), manifest(merges))


def begin(folder: Path, merges: int = 0) -> SyncerStore:
    store = SyncerStore(folder)
    store.save_all(Model(), manifest(0))
    for number in range(1, merges + 1):
        merge(store, number)
    return store


def load(folder: Path) -> int:
    """Restore the state, check it, and return the number of its merges."""
    model, store = Model(), SyncerStore(folder)
    loaded = store.load(model)
    assert loaded is not None and loaded == manifest(loaded["merges"])
    for p, version in enumerate(versions_after(loaded["merges"])):
        assert model.fragments[p].version == version
        jax.tree.map(np.testing.assert_array_equal, model.fragments[p], state(p, version))
        dtypes = [x.dtype for x in jax.tree.leaves(model.fragments[p][:3])]
        assert dtypes == [x.dtype for x in jax.tree.leaves(state(p, version)[:3])]
    store.close()
    return loaded["merges"]
