"""Features of tables, and labels: equal to those made by hand with NumPy."""

import functools
import json
import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpax.data.tables import TableFeatures, fit_features, infer_label, infer_treatments
from fedpax.data.tables.labels import Label

RNG = np.random.default_rng(0)
SIZE = 60
CLIENTS = np.sort(RNG.integers(0, 5, SIZE))
AGE = np.where(RNG.random(SIZE) < 0.2, np.nan, RNG.integers(20, 90, SIZE))
SEX = np.where(RNG.random(SIZE) < 0.1, None, RNG.choice(["f", "m"], SIZE))
DAY = np.datetime64("2024-01-01") + RNG.integers(0, 300, SIZE)
SMOKER = RNG.random(SIZE) < 0.5
TABLE = {"age": AGE, "kön": SEX, "day": DAY, "smoker": SMOKER, "id": np.arange(SIZE).astype(str)}


def fit(table=TABLE, stated=(), **settings):
    return fit_features(table, infer_treatments(table, stated), CLIENTS, 5, **settings)


FITTED = functools.cache(fit)


def standardized(x):
    return (x - np.nanmean(x)) / np.nanstd(x)


def test_equals_features_made_by_hand():
    features = fit()
    assert features.names == (
        "age", "age is missing", "kön=f", "kön=m", "kön is missing", "day", "smoker",
    )  # fmt: skip
    days = (DAY - np.datetime64("1970-01-01")).astype(float)
    expected = np.stack(
        [
            np.nan_to_num(standardized(AGE)),
            np.isnan(AGE),
            SEX == "f",
            SEX == "m",
            np.array([value is None for value in SEX]),
            standardized(days),
            SMOKER,
        ],
        axis=1,
    )
    np.testing.assert_allclose(features(TABLE), expected, atol=2e-5)
    assert features(TABLE).dtype == np.float32


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=20))
def test_features_of_an_example_do_not_depend_on_others(rows):
    features = FITTED()
    part = {name: np.asarray(values)[rows] for name, values in TABLE.items()}
    np.testing.assert_array_equal(features(part), features(TABLE)[rows])


def test_unseen_values_and_absent_columns_have_no_features():
    features = fit()
    result = features({"age": [None, 50.0], "kön": ["annat", "m"], "day": [None, None]})
    assert result[0, 2:].tolist() == [0, 0, 0, 0, 0]
    assert result[:, 1].tolist() == [1, 0] and result[1, 3] == 1
    # smoker had no missing value in training: its feature is the mean of booleans' coding, 0.
    assert result[:, 6].tolist() == [0, 0]


def test_rare_categories_share_a_feature():
    table = {"town": ["a", "a", "b", "b", "c", "c"] * 10}
    clients = np.repeat([0, 1], 30)
    table["town"][-1] = "only here"
    features = fit_features(table, infer_treatments(table), clients, 2, min_clients=2)
    assert features.names == ("town=a", "town=b", "town=c", "town is another")
    assert features(table)[-1].tolist() == [0, 0, 0, 1]
    assert features({"town": ["unseen"]}).tolist() == [[0, 0, 0, 1]]


def test_stated_categories_and_ranges():
    features = fit(stated=["kön=category(m|f|x)", "age=number(0..100)", "day=left_out"],
                   standardize="federated")  # fmt: skip
    assert features.names[2:5] == ("kön=m", "kön=f", "kön=x")
    ranged = fit({"age": AGE}, ["age=number(0..100)"], standardize="range")
    np.testing.assert_allclose(ranged(TABLE)[:, 0], np.nan_to_num((AGE - 50) / 50), atol=1e-6)
    with pytest.raises(ValueError, match=r"2 columns .* no range, such as 'age', expected a range"):
        fit(standardize="range")
    with pytest.raises(ValueError, match=r"'age=number\(LOW..HIGH\)', or '\*=number"):
        fit(limit=lambda entries: 1.0)


def test_a_constant_column_is_zero_and_missing_values_can_be_errors():
    table = {"one": np.full(SIZE, 7.25), "age": AGE}
    assert not fit(table)(table)[:, 0].any()
    first = int(np.argmax(np.isnan(AGE)))
    with pytest.raises(ValueError, match=rf"'age' has no value in .* example {first}, but .*error"):
        fit(table, ["age=number:error"])
    for value in (np.inf, -1e300):
        with pytest.raises(ValueError, match=re.escape(f"'age' is {value:g} in example 3")):
            fit({"age": np.where(np.arange(SIZE) == 3, value, AGE)})


def test_a_constant_that_float32_rounds_has_scale_1():
    constants = RNG.normal(size=50)
    clients = np.repeat(np.arange(5), [3, 7, 1, 9, 4])
    table = {f"x{k}": np.full(24, x) for k, x in enumerate(constants)}
    fitted = fit_features(table, infer_treatments(table), clients, 5)
    assert {column.scale for column in fitted.columns} == {1.0}


def test_other_texts_than_booleans_raise():
    table = {"flag": [True, False]}
    fitted = fit_features(table, infer_treatments(table), np.zeros(2, int), 1)
    assert fitted({"flag": ["true", "0"]}).tolist() == [[1.0], [0.0]]
    with pytest.raises(ValueError, match="'flag' has the value 'True', expected true, false, 0"):
        fitted({"flag": ["True", "false"]})


def test_texts_where_training_has_numbers_raise():
    fitted = fit({"age": AGE})
    with pytest.raises(ValueError, match=r"'age' has a value that is no number.*'young'.*Correct"):
        fitted({"age": ["3", "young"]})


def test_texts_where_training_has_dates_raise():
    texts = ["2025-10-29 00:30:00", "2025-10-30T00:30:00"]
    days = np.array(texts, "datetime64[s]")
    table, stated = {"time": days}, ["time=date(2025-01-01..2025-12-31)"]
    fitted = fit_features(table, infer_treatments(table, stated), np.zeros(2, int), 1)
    remedy = r"'time' has texts of type string, expected date.*datetime64\[s\].*time=timestamp\[s\]"
    for encode in (fitted, fitted.encode):
        with pytest.raises(ValueError, match=remedy):
            encode({"time": texts})
    assert np.allclose(fitted({"time": days}), [[-1], [1]], atol=1e-4)


def test_infinite_labels_raise():
    with pytest.raises(ValueError, match="'y' is inf in example 1, expected finite numbers"):
        infer_label("y", [0.5, 1.5]).encode([1.5, np.inf])


def test_large_whole_numbers_are_different_categories():
    assert infer_label("y", [1e19, 2e19], "classification").classes == ("1e+19", "2e+19")


def test_json_restores_equal_features():
    features = fit(stated=["kön=category(m|f|x)", "age=number(0..100)"])
    restored = TableFeatures.from_json(json.loads(json.dumps(features.to_json())))
    assert restored == features
    np.testing.assert_array_equal(restored(TABLE), features(TABLE))


@pytest.mark.parametrize(
    ("values", "task", "classes"),
    [
        (["ja", "nej", None, "ja"], "classification", ("ja", "nej")),
        ([True, False], "classification", ("false", "true")),
        ([10, 9, 9, 2], "classification", ("2", "9", "10")),
        ([1.0, 0.0, 1.0], "classification", ("0", "1")),
        ([1.5, 2.0], "regression", ()),
        (list(range(30)), "regression", ()),
    ],
)
def test_the_rule_of_labels(values, task, classes):
    label = infer_label("outcome", values)
    assert (label.task, label.classes) == (task, classes)
    assert label.num_outputs == (len(classes) or 1)
    present = [value for value in values if value is not None]
    if task == "classification":
        names = {True: "true", False: "false"}
        result = [classes[k] for k in label.encode(present)]
        expected = [names[v] if isinstance(v, bool) else v for v in present]
        assert result == [f"{v:g}" if isinstance(v, int | float) else v for v in expected]
    assert Label.from_json(json.loads(json.dumps(label.to_json()))) == label


def test_labels_that_cannot_be_predicted_raise():
    with pytest.raises(ValueError, match=r"has 1 distinct value, expected at least 2 classes"):
        infer_label("y", ["a", "a"])
    with pytest.raises(ValueError, match=r"expected numbers for --data.task=regression"):
        infer_label("y", ["a", "b"], "regression")
    with pytest.raises(ValueError, match="expected numbers, booleans or text"):
        infer_label("y", pa.array([[1], [2]]))
    with pytest.raises(ValueError, match="but y is the label"):
        infer_label("y", ["a", "b"], stated="y=date")
    label = infer_label("y", ["a", "b"], stated="y=category(b|a|c)")
    assert label.encode(["a", "c"]).tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"value 'd', expected one of 'b', 'a', 'c'"):
        label.encode(["d"])
    with pytest.raises(ValueError, match=r"no value in 1 of 2 examples, .*missing_label=skip"):
        label.encode(["a", None])
