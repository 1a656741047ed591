"""Fragments: a partition of the parameters, cut and put back without loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from fedpax.algorithms.parts.fragments import (
    Fragment,
    fragment_runs,
    layer_fragments,
    make_fragments,
)


def random_model(num_layers=6, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {
        "embedding": (5, 3),
        "layers": {"kernel": (num_layers, 3, 2), "scale": (num_layers,)},
        "norm": (),
    }
    return jax.tree.map(
        lambda shape: np.float32(rng.normal(size=shape)),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


@settings(max_examples=6)
@given(
    st.integers(1, 7),
    st.integers(1, 6),
    st.sampled_from(["strided", "sequential"]),
)
def test_fragments_partition_the_parameters(num_layers, num_fragments, pattern):
    """Putting every fragment of one model into another gives the first; each is put once."""
    num_fragments = min(num_fragments, num_layers + 1)
    model, other = random_model(num_layers), random_model(num_layers, seed=1)
    fragments = make_fragments(layer_fragments(num_fragments, pattern), model)
    assert len(fragments) == num_fragments
    sizes = [sum(x.size for x in jax.tree.leaves(jax.eval_shape(f.take, model))) for f in fragments]
    assert min(sizes) > 0 and sum(sizes) == sum(x.size for x in jax.tree.leaves(model))

    @jax.jit
    def put_all(other, model):
        for fragment in fragments:
            other = fragment.put(other, fragment.take(model))
        return other

    jax.tree.map(np.testing.assert_array_equal, put_all(other, model), model)


@settings(max_examples=6)
@given(
    st.integers(1, 9),
    st.integers(1, 6),
    st.sampled_from(["strided", "sequential"]),
)
def test_runs_have_the_fragments_in_order(num_layers, num_fragments, pattern):
    """A fragment of a run, at a traced index, takes and puts what the fragment does."""
    num_fragments = min(num_fragments, num_layers + 1)
    model, other = random_model(num_layers), random_model(num_layers, seed=1)
    fragments = make_fragments(layer_fragments(num_fragments, pattern), model)
    runs = fragment_runs(fragments)
    assert sum(run.length for run in runs) == num_fragments
    if num_fragments > 1 and num_layers % (num_fragments - 1) == 0:
        assert len(runs) == 2  # the layers, and the other parameters
    rest = iter(jax.jit(lambda *models: [move(f, *models) for f in fragments])(other, model))
    for run in runs:
        moved = jax.jit(lambda i, *models, run=run: move(run.at(i), *models))
        for i in range(run.length):
            jax.tree.map(np.testing.assert_array_equal, moved(i, other, model), next(rest))


def move(fragment, other, model):
    """Return a fragment of a model, and another model with it."""
    part = fragment.take(model)
    return part, fragment.put(other, part)


def test_layers_are_dealt_in_strides_or_in_runs():
    model = random_model()
    for pattern, rows in (("strided", [0, 3]), ("sequential", [0, 1])):
        first, *_ = make_fragments(layer_fragments(4, pattern), model)
        part, replaced = jax.jit(lambda model, first=first: double(first, model))(model)
        assert part["embedding"] is None and part["norm"] is None
        np.testing.assert_array_equal(part["layers"]["kernel"], model["layers"]["kernel"][rows])
        expected = model["layers"]["scale"].copy()
        expected[rows] *= 2
        np.testing.assert_array_equal(replaced["layers"]["scale"], expected)


def double(fragment, model):
    """Return a fragment of a model, and the model with twice the fragment."""
    part = fragment.take(model)
    return part, fragment.put(model, jax.tree.map(lambda x: 2 * x, part))


def test_under_vmap():
    """Rows are cut with static slices and written without a scatter."""
    models = jax.tree.map(lambda a, b: np.stack([a, b]), random_model(), random_model(seed=1))
    fragment = make_fragments(3, random_model())[1]
    doubled = jax.jit(lambda model: double(fragment, model)[1])
    together = jax.vmap(doubled)(models)
    for i in (0, 1):
        alone = doubled(jax.tree.map(lambda x, i=i: x[i], models))
        jax.tree.map(
            lambda x, y, i=i: np.testing.assert_array_equal(x[i], y),
            jax.device_get(together),
            alone,
        )
    text = str(jax.make_jaxpr(jax.vmap(doubled))(models))
    assert "scatter" not in text and "gather" not in text


@pytest.mark.parametrize("axis_types", ["automatic", "explicit"])
def test_on_a_sharded_axis(clients_fsdp, axis_types):
    """The other axes keep their sharding."""
    mesh, kernel = clients_fsdp(axis_types), np.float32(np.arange(48)).reshape(6, 4, 2)
    sharding = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    with jax.set_mesh(mesh):
        model = {"layers": jax.device_put(kernel, sharding)}
        fragment = make_fragments(layer_fragments(3), model | {"norm": jnp.ones(2)})[0]
        fragment = Fragment(fragment.rows[:1])

        @jax.jit
        def double(model):
            part = fragment.take(model)
            return part, fragment.put(model, jax.tree.map(lambda x: 2 * x, part))

        part, doubled = double(model)
    assert part["layers"].sharding.is_equivalent_to(sharding, 3)
    assert doubled["layers"].sharding.is_equivalent_to(sharding, 3)
    kernel[::2] *= 2
    np.testing.assert_array_equal(doubled["layers"], kernel)


@pytest.mark.parametrize(
    ("fragments", "error", "words"),
    [
        (0, ValueError, "expected at least 1"),
        (2.0, TypeError, r"Pass for example fragments=4, or layer_fragments\(4"),
        (True, TypeError, "expected an int or a function"),
        (9, ValueError, "has 6 layers.*Pass at most fragments=7"),
        (lambda path, leaf: -1, ValueError, "Count from 0"),
        (
            lambda path, leaf: None,
            TypeError,
            "assigned to None, expected an int.*Return the number",
        ),
        (lambda path, leaf: [0.5] * 6, TypeError, "expected an int, or a sequence of one int"),
        (lambda path, leaf: 2 * (path == "norm"), ValueError, "fragment 1 of 3 has no parameters"),
        (lambda path, leaf: [0, 1], ValueError, "one number, or one for each row of axis 0"),
        (
            lambda path, leaf: [0, 0, 1, 0, 1, 1] if "layers" in path else 0,
            ValueError,
            r"rows \[0, 1, 3\].*expected equally spaced",
        ),
    ],
)
def test_invalid_fragments_raise(fragments, error, words):
    with pytest.raises(error, match=words):
        make_fragments(fragments, random_model())


@pytest.mark.parametrize("params", [{"w": jnp.ones((3, 3))}, {"layers": jnp.ones((3, 3))}])
def test_a_model_without_stacked_layers_or_without_others_needs_a_function(params):
    with pytest.raises(ValueError, match="For a model without one of these, pass a function"):
        make_fragments(2, params)


def test_layers_in_a_list_are_refused():
    params = {"layers": [{"kernel": jnp.ones((4, 3))}, {"kernel": jnp.ones((4, 3))}], "head": 1.0}
    with pytest.raises(ValueError, match=r"layers/0/kernel is an entry of a sequence.*Stack the"):
        make_fragments(3, params)
    by_index = make_fragments(lambda path, leaf: int(path[7]) if "layers" in path else 2, params)
    assert by_index[1].take(params)["layers"][0] == {"kernel": None}


def test_numbers_of_fragments_may_be_numpy_integers():
    numbered = lambda path, leaf: np.arange(6) % 2 if "layers" in path else np.int64(2)
    assert make_fragments(numbered, random_model()) == make_fragments(3, random_model())


def test_an_unknown_pattern_is_refused():
    with pytest.raises(ValueError, match="expected 'strided' or 'sequential'"):
        layer_fragments(2, "random")
