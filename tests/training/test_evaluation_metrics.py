"""What `Run.evaluate` returns: numbers by names, or an error that names the metric."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fedpax.training.evaluation import map_examples
from fedpax.training.round_logger import as_floats


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({3: 1.0}, r"a metric named 3, expected a text"),
        ({None: 1.0}, r"a metric named None"),
        ({("a", 1): 1.0}, r"a metric named \('a', 1\)"),
        ({"m": None}, r"metrics\['m'\] as a NoneType, expected a number"),
        ({"m": 10**400}, r"metrics\['m'\] as a int, expected a number"),
        ({"m": "x"}, r"metrics\['m'\] as a str"),
        ({"m": np.ones((2, 2))}, r"metrics\['m'\] as an array \[2, 2\].*vector"),
    ],
)
def test_a_metric_that_is_no_number_is_named(metrics: dict[Any, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        as_floats({"loss": 0.5} | metrics)


def test_numbers_of_any_kind_are_floats_and_vectors_have_quantiles() -> None:
    values = {"loss": np.float32(0.5), "count": 3, "flag": True, "nan": np.nan, "v": np.arange(3.0)}
    floats, vectors = as_floats(values)
    assert floats["loss"] == 0.5 and floats["count"] == 3 and np.isnan(floats["nan"])
    assert floats["v/p50"] == 1.0 and vectors["v"].tolist() == [0, 1, 2]


def test_a_model_is_applied_to_each_example() -> None:
    double = map_examples(lambda w, batch: w * batch["x"][0], {"x": np.arange(3.0)})
    assert double(jnp.float32(2.0)).tolist() == [0.0, 2.0, 4.0]
