import re

import numpy as np
import pytest

from fedpax.data import ClientSampler, cohort_rounds, concatenate_clients


def test_each_client_keeps_its_examples():
    rng = np.random.default_rng(0)
    clients = [
        {"x": rng.normal(size=(n, 2)).astype(np.float32), "y": rng.integers(9, size=n)}
        for n in (3, 0, 1, 5)
    ]
    examples, population = concatenate_clients(clients)
    assert len(population) == 4
    for fields, indices in zip(clients, population, strict=True):
        for name, values in fields.items():
            np.testing.assert_array_equal(examples[name][indices], values)
            assert examples[name].dtype == values.dtype
    rounds = cohort_rounds(
        examples, population, ClientSampler(4, 4), batch_size=2, local_epochs=2, preprocess=dict
    )
    cohort = next(rounds)
    row = np.flatnonzero(cohort.client_ids == 3)[0]
    first_epoch = cohort.batches["y"][row, :3][cohort.batches["mask"][row, :3]]
    assert sorted(first_epoch) == sorted(clients[3]["y"])


def test_a_client_without_examples_needs_no_shape_or_dtype():
    examples, population = concatenate_clients([{"x": []}, {"x": np.ones((2, 3), np.int32)}])
    assert examples["x"].dtype == np.int32
    assert [len(indices) for indices in population] == [0, 2]


@pytest.mark.parametrize(
    ("clients", "error", "words"),
    [
        ([], ValueError, "clients is 0 clients without examples"),
        ([{"x": []}], ValueError, "clients is 1 clients without examples"),
        ([np.ones(3)], TypeError, "Client 0 is array([1., 1., 1.]), expected a dict of arrays"),
        ([{}], TypeError, "Client 0 is {}"),
        ([{"x": 1.0}], ValueError, "Client 0 has fields of shapes {'x': []}"),
        ([{"x": [1, 2], "y": [1]}], ValueError, "the same number of examples in each field"),
        ([{"x": [1]}, {"y": [1]}], ValueError, "Client 1 has the fields 'y', and client 0 'x'"),
        (
            [{"x": [1]}, {"x": [1.0]}],
            ValueError,
            "'x' is float64[] for client 1 and int64[] for client 0",
        ),
        ([{"x": np.ones((1, 2))}, {"x": np.ones((1, 3))}], ValueError, "pad or convert the arrays"),
    ],
)
def test_clients_that_do_not_fit_together_raise(clients, error, words):
    with pytest.raises(error, match=re.escape(words)):
        concatenate_clients(clients)


@pytest.mark.parametrize("values", [(i for i in range(3)), "to be", {"a": 1}])
def test_a_field_that_is_no_array_names_its_type(values):
    with pytest.raises(
        TypeError, match=rf"Client 1 has a field 'x' that is a {type(values).__name__}"
    ):
        concatenate_clients([{"x": [1, 2]}, {"x": values}])
