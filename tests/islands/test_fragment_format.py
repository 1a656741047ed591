"""The format of a fragment: an update survives its encoding, and other arrays are described."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedpax.aggregators import codecs
from fedpax.algorithms import decoupled_diloco_parts
from fedpax.islands.fragment_format import FragmentFormat, describe_other_arrays


def test_a_codec_encodes_an_update_and_decodes_it():
    parts = decoupled_diloco_parts(
        lambda w, x: (0.0, None),
        islands=2,
        inner_optimizer=optax.sgd(0.1),
        steps_per_sync=1,
        codec=codecs.e3m0(),
    )
    gradient = {"w": jnp.array([2.0, -1.0, 0.25]), "b": None}
    fragment = FragmentFormat(parts, gradient)
    words = fragment.encode(gradient, shard=1, count=7)
    assert words["w"].dtype == np.uint32 and fragment.wire_shapes["w"].shape == (2, 1)
    np.testing.assert_array_equal(fragment.decode(words, shard=1, count=7)["w"], gradient["w"])


def test_other_arrays_are_described():
    expected = {"w": jax.ShapeDtypeStruct((3,), "float32")}
    assert describe_other_arrays({"w": np.zeros(3, np.float32)}, expected) is None
    for other, described in (
        (np.zeros(2), "float64[2]"),
        (np.zeros(2, np.float32), "float32[2]"),
        (np.zeros(3), "float64[3]"),
    ):
        difference = describe_other_arrays({"w": other}, expected)
        assert difference == f"array 'w' is {described}, expected float32[3]"
