from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fedpax.models.classifiers import CNNConfig, MLPConfig, cnn, mlp
from fedpax.models.nnx_functional import FunctionalModel, to_functional
from fedpax.models.transformer import TransformerConfig, transformer
from fedpax.parallel.axes import RULES


class Tower(nnx.Module):
    """Nested modules, with and without names of the parameters' axes."""

    def __init__(self, *, rngs: nnx.Rngs):
        metadata = {"logical_axes": ("embed", "mlp")}
        self.first = nnx.Linear(3, 4, rngs=rngs, kernel_metadata=metadata)
        self.second = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
        return scale * self.second(nnx.relu(self.first(x)))


def test_equals_the_module() -> None:
    model = to_functional(Tower)
    params = model.init(jax.random.key(3))
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    module = Tower(rngs=nnx.Rngs(jax.random.key(3)))
    np.testing.assert_allclose(model.apply(params, x, scale=2.0), 2 * module(x), rtol=1e-6)


def test_parameters_are_nested_dicts_of_arrays() -> None:
    model = to_functional(Tower)
    params = model.init(jax.random.key(3))
    assert type(params) is dict and type(params["first"]) is dict
    assert all(type(leaf) is type(jnp.ones(())) for leaf in jax.tree.leaves(params))
    assert model.logical_axes == {
        "first": {"kernel": ("embed", "mlp"), "bias": (None,)},
        "second": {"kernel": (None, None), "bias": (None,)},
    }


@pytest.mark.parametrize(
    "model",
    [
        transformer(TransformerConfig(num_layers=2, embed_dim=16, num_heads=2)),
        mlp(MLPConfig((6, 5, 4))),
        cnn(CNNConfig(image_height=8, image_width=8)),
    ],
    ids=["transformer", "mlp", "cnn"],
)
def test_logical_axes_fit_every_parameter(model: FunctionalModel) -> None:
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    names = jax.tree.map(lambda leaf, axes: (leaf.ndim, axes), shapes, model.logical_axes)
    for ndim, axes in jax.tree.leaves(names, is_leaf=lambda x: isinstance(x, tuple)):
        assert len(axes) == ndim and set(axes) <= {None, *RULES}


def test_init_depends_only_on_the_key() -> None:
    model = to_functional(Tower)
    first, same, other = (model.init(jax.random.key(seed)) for seed in (3, 3, 4))
    chex.assert_trees_all_equal(first, same)
    assert not np.array_equal(first["first"]["kernel"], other["first"]["kernel"])


def test_apply_under_jit_vmap_and_grad() -> None:
    model = to_functional(Tower)
    stacked = jax.jit(jax.vmap(model.init))(jax.random.split(jax.random.key(0), 4))
    x = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)

    def objective(params: Any, x: Any) -> jax.Array:
        return jnp.sum(model.apply(params, x) ** 2)

    gradients = jax.jit(jax.vmap(jax.grad(objective)))(stacked, x)
    gradient = jax.jit(jax.grad(objective))
    for i in range(4):
        expected = gradient(jax.tree.map(lambda leaf, i=i: leaf[i], stacked), x[i])
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-6),
            gradients,
            expected,
        )


def test_state_besides_parameters_raises() -> None:
    with pytest.raises(ValueError, match=r"mean, var.*Use layers without such state"):
        to_functional(partial(nnx.BatchNorm, 3))


def test_a_wrong_number_of_axis_names_raises() -> None:
    with pytest.raises(ValueError, match=r"\(3, 2\).*logical_axes=\('embed',\): expected one name"):
        to_functional(partial(nnx.Linear, 3, 2, kernel_metadata={"logical_axes": ("embed",)}))


def test_equal_configurations_have_the_same_functions() -> None:
    """So that a model that is made again is not traced again."""
    sizes = (3, 4, 2)
    first, again, other = mlp(MLPConfig(sizes)), mlp(MLPConfig(sizes)), mlp(MLPConfig((3, 5, 2)))
    assert (again.init, again.apply) == (first.init, first.apply)
    assert other.apply != first.apply
    listed = mlp(MLPConfig([*sizes]))  # type: ignore[arg-type]
    key = jax.random.key(0)
    chex.assert_trees_all_equal(listed.init(key), first.init(key))
    again.logical_axes.clear()
    assert mlp(MLPConfig(sizes)).logical_axes == first.logical_axes != {}
