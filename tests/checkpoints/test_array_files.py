"""Parameters of any model in one file."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax

from fedpax.checkpoints.exports import named_arrays, write_npz, write_safetensors
from fedpax.models.classifiers import CNNConfig, MLPConfig, cnn, mlp
from fedpax.models.lstm import LSTMConfig, lstm

OWN = {
    "file": [jnp.arange(3), (np.float32(2.5), jnp.ones((2, 3)).T)],
    "a/b": {"": np.ones((0, 4), bool)},
    "transposed": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
}


def random_like(init: Callable[[jax.Array], Any]) -> Any:
    """Draw parameters of a model's types, without compiling its `init`."""
    rng = np.random.default_rng(0)
    types = jax.eval_shape(init, jax.random.key(0))
    return jax.tree.map(lambda t: jnp.asarray(rng.normal(size=t.shape), t.dtype), types)


LSTM = LSTMConfig(vocab_size=7, embed_dim=4, hidden_dim=5)
MAKERS: dict[str, Callable[[], Any]] = {
    "mlp": lambda: random_like(mlp(MLPConfig()).init),
    "cnn": lambda: random_like(cnn(CNNConfig()).init),
    "lstm": lambda: random_like(lstm(LSTM).init),
    "own": lambda: OWN,
    "array": lambda: jnp.ones(3),
}


@pytest.mark.parametrize("name", MAKERS)
def test_any_pytree_is_read_back(name: str, tmp_path: Path) -> None:
    params = MAKERS[name]()
    paths, leaves = zip(*jax.tree.leaves_with_path(params), strict=True)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") or "params" for path in paths]
    write_npz(tmp_path / "a.npz", params)
    write_safetensors(tmp_path / "a.safetensors", params)
    npz = np.load(tmp_path / "a.npz")
    tensors = safetensors.flax.load_file(tmp_path / "a.safetensors")
    assert npz.files == names and tensors.keys() == set(names)
    for key, leaf in zip(names, leaves, strict=True):
        for result in (npz[key], tensors[key]):
            assert result.dtype == jax.dtypes.canonicalize_dtype(leaf.dtype) or name == "own"
            np.testing.assert_array_equal(result, leaf, strict=name != "own")
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "a.npz").stat().st_mode
    assert sorted(os.listdir(tmp_path)) == ["a.npz", "a.safetensors"]


def test_what_a_format_cannot_hold_raises(tmp_path: Path) -> None:
    params = {"layer": {"w": jnp.ones(3, jnp.bfloat16)}}
    with pytest.raises(ValueError, match=r"layer.w has dtype bfloat16.*--dtype=float32, or .*saf"):
        write_npz(tmp_path / "a.npz", params)
    write_safetensors(tmp_path / "a.safetensors", params)
    (loaded,) = safetensors.flax.load_file(tmp_path / "a.safetensors").values()
    np.testing.assert_array_equal(loaded, params["layer"]["w"], strict=True)
    with pytest.raises(ValueError, match=r"cannot hold a parameter .*complex128"):
        write_safetensors(tmp_path / "b.safetensors", {"w": np.ones(2, np.complex128)})
    with pytest.raises(ValueError, match=r"'a\.b', expected different names"):
        named_arrays({"a": {"b": np.ones(1)}, "a.b": np.ones(1)})
    with pytest.raises(ValueError, match="key has dtype key<fry>, expected numbers"):
        named_arrays({"key": jax.random.key(0)})
