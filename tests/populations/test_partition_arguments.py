"""Tests of the arguments of partitions."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fedpax.data import (
    ClientSampler,
    cohort_rounds,
    load,
    partition_by_quantity,
    partition_by_shards,
    partition_dirichlet,
    partition_iid,
    partition_natural,
    partition_pachinko,
    partition_statistics,
    read_examples,
)
from fedpax.populations.partition import (
    check_partition,
    index_labels,
)
from fedpax.populations.synthetic_clients import DirichletClients, logistic_clients

ALPHA = "expected a positive, finite number"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: partition_dirichlet([0, 1], 1, alpha=0), f"alpha is 0, {ALPHA}"),
        (
            lambda: partition_dirichlet([0, 1], 1, alpha=-1.0),
            "the smaller it is, the more participants",
        ),
        (lambda: partition_dirichlet([0, 1], 1, alpha=np.nan), f"alpha is nan, {ALPHA}"),
        (lambda: partition_dirichlet([0, 1], 1, alpha=np.inf), f"alpha is inf, {ALPHA}"),
        (lambda: partition_dirichlet([0, 1], 3, alpha=1), "use 2 participants or fewer"),
        (
            lambda: partition_dirichlet([0, 1], 0, alpha=1),
            "num_participants is 0, expected at least 1",
        ),
        (
            lambda: partition_dirichlet(np.arange(9), 4, alpha=1, min_examples=3),
            "with at least 3 each: use 3 participants or fewer",
        ),
        (
            lambda: partition_dirichlet([0, 1], 1, alpha=1, min_examples=0),
            "min_examples is 0, expected at least 1",
        ),
        (
            lambda: partition_dirichlet(np.eye(3, dtype=int), 1, alpha=1),
            r"labels has dtype int64 and shape \[3, 3\], expected one integer.*argmax",
        ),
        (lambda: partition_dirichlet(["a", "b"], 1, alpha=1), "Convert strings with np.unique"),
        (lambda: partition_dirichlet([0.0, 1.0], 1, alpha=1), "labels has dtype float64"),
        (lambda: partition_pachinko([0, 1], ["x", "y"], 1), "coarse_labels has dtype <U1"),
        (
            lambda: partition_pachinko([0, 1], [0], 1),
            "2 labels and 1 coarse labels: give one of each",
        ),
        (
            lambda: partition_pachinko([4, 5, 4], [2, 1, 9], 1),
            "Label 4 has the coarse labels 2 and 9.*use different labels",
        ),
        (lambda: partition_pachinko([0, 1], [0, 0], 3), "use 2 participants or fewer"),
        (lambda: partition_pachinko([0, 1], [0, 0], 1, alpha=0), f"alpha is 0, {ALPHA}"),
        (lambda: partition_pachinko([0, 1], [0, 0], 1, beta=-2), f"beta is -2, {ALPHA}"),
        (lambda: partition_by_shards([0, 1, 2], 2), "at least 2 each: use 1 participants or fewer"),
        (
            lambda: partition_by_shards([0, 1, 2], 2, shards_per_participant=0),
            "shards_per_participant is 0, expected at least 1",
        ),
        (lambda: partition_by_quantity(9, 3), "alpha is None and sigma is None.*give alpha"),
        (lambda: partition_by_quantity(9, 3, alpha=1, sigma=2), "alpha is 1 and sigma is 2"),
        (lambda: partition_by_quantity(9, 3, sigma=0), "the larger it is, the more sizes differ"),
        (lambda: partition_by_quantity(9, 3, alpha=0), "the smaller it is, the more sizes differ"),
        (lambda: partition_by_quantity(9, 10, alpha=1), "use 9 participants or fewer"),
        (lambda: partition_natural([], "x"), "0 values of the field 'x' are too few"),
    ],
)
def test_bad_arguments_raise(make: Callable[[], Sequence[Any]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("value", [0.5 + 1j, "0.5", b"1", None, [0.5], np.array([0.5])], ids=repr)
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("alpha", lambda x: partition_dirichlet([0, 1], 1, alpha=x)),
        ("beta", lambda x: partition_pachinko([0, 1], [0, 0], 1, beta=x)),
        ("alpha", lambda x: partition_by_quantity(9, 3, alpha="none" if x is None else x)),
        ("sigma", lambda x: DirichletClients([0, 1], 2, alpha=1, median_examples=2, sigma=x)),
        ("median_examples", lambda x: DirichletClients([0, 1], 2, alpha=1, median_examples=x)),
        ("alpha", lambda x: logistic_clients(2, alpha=x, beta=1)),
        ("shards_per_participant", lambda x: partition_by_shards([0], 1, shards_per_participant=x)),
        ("num_examples", lambda x: partition_iid(x, 1)),
        ("seed", lambda x: DirichletClients([0, 1], 2, alpha=1, median_examples=2, seed=x)),
    ],
)
def test_a_setting_that_is_not_a_real_number_raises(name: str, make: Any, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{name} is .*, expected (one real number|an integer)"):
        make(value)


def test_any_real_number_is_a_concentration() -> None:
    labels = np.random.default_rng(0).integers(0, 4, 50)
    expected = partition_dirichlet(labels, 3, alpha=0.5)
    for value in (
        np.float32(0.5),
        np.float16(0.5),
        np.array(0.5),
        jnp.float32(0.5),
        Fraction(1, 2),
    ):
        result = partition_dirichlet(labels, 3, alpha=value)  # type: ignore[arg-type]
        assert all(map(np.array_equal, result, expected))


def test_the_column_of_a_data_set_is_labels() -> None:
    source = load("digits", "test")
    labels = read_examples(source)["label"]
    partition = partition_dirichlet(source.column("label"), 5, alpha=0.3)
    for part, same in zip(partition, partition_dirichlet(labels, 5, alpha=0.3), strict=True):
        np.testing.assert_array_equal(part, same)
    statistics = partition_statistics(partition, source.column("label"))
    assert str(statistics) == str(partition_statistics(partition, labels))


def test_unsigned_labels_beyond_int64_raise() -> None:
    with pytest.raises(ValueError, match=r"labels has the value 18446744073709551615.*np\.unique"):
        partition_dirichlet(np.array([0, 2**64 - 1], np.uint64), 2, alpha=1.0)


@pytest.mark.parametrize("name", ["partition", "population"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: (part for part in ([0, 1], [2])), "is a generator, expected.*list\\({}\\)"),
        (lambda: {"a": [0, 1], "b": [2]}, "is a dict, expected.*list\\({}.values\\(\\)\\)"),
    ],
)
def test_a_partition_without_an_order_raises(name: str, make: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} {words.format(name)}"):
        if name == "partition":
            check_partition(make(), 2, 3, "clients")
        else:
            cohort_rounds({"x": np.ones(3)}, make(), ClientSampler(2, 2), batch_size=1)


def test_labels_have_indices_from_0():
    classes, indices = index_labels([7, 3, 7], "labels")
    assert classes.tolist() == [3, 7] and indices.tolist() == [1, 0, 1]
