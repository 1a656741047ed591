"""The treatment of columns: the rule, what is stated, and what is shown."""

import datetime

import numpy as np
import pyarrow as pa
import pytest

from fedpax.data.tables import infer_treatments, parse_treatment, summarize_columns
from fedpax.data.tables.values import arrow_column, is_missing, numbers, texts

RNG = np.random.default_rng(0)
TABLE = {
    "age [years]": pa.array([31, None, 60, 45]),
    "weight": np.array([70.5, np.nan, 81.0, 64.0]),
    "smoker": [True, False, None, True],
    "kön": ["kvinna", "man", "", "man"],
    "ward": ["A", "B", "B", "A"],
    "note": ["came late", "no pain", "dizzy", "tired"],
    "admitted": [datetime.date(2024, 1, day) for day in (1, 2, 3, 4)],
    "empty": [None] * 4,
    "scores": [[1.0], [2.0], [3.0], [4.0]],
}


def test_the_rule() -> None:
    treatments = {t.name: (t.describe(), t.reason) for t in infer_treatments(TABLE)}
    assert treatments == {
        "age [years]": ("number:mean", "numbers"),
        "weight": ("number:mean", "numbers"),
        "smoker": ("boolean:false", "booleans"),
        "kön": ("left_out", "text of 2 distinct values in 3 of 4 examples"),
        "ward": ("category:category", "text of 2 distinct values in 4 examples"),
        "note": ("left_out", "text of 4 distinct values in 4 examples"),
        "admitted": ("date:mean", "dates or times"),
        "empty": ("left_out", "no values"),
        "scores": ("left_out", "values of type list<item: double>"),
    }


def test_text_with_many_distinct_values_is_left_out() -> None:
    table = {"zip": [f"{n:03}" for n in range(60)] * 3}
    assert infer_treatments(table)[0].kind == "left_out"
    assert infer_treatments(table, max_categories=60)[0].kind == "category"


@pytest.mark.parametrize("absent", [None, ""])
@pytest.mark.parametrize("in_pieces", [False, True])
def test_missing_values_are_no_examples_of_a_text(absent: str | None, in_pieces: bool) -> None:
    cells = RNG.permutation(np.array([f"note {n}" for n in range(50)] + [absent] * 120, object))
    column = pa.chunked_array([cells[:90], cells[90:]])
    (treatment,) = infer_treatments({"note": column if in_pieces else column.combine_chunks()})
    assert treatment.kind == "left_out"
    assert treatment.reason == "text of 50 distinct values in 50 of 170 examples"
    twice = np.concatenate([cells, cells])
    assert infer_treatments({"note": list(twice)})[0].kind == "category"


def test_stated_treatments_and_patterns() -> None:
    stated = ["age [years]=category", "*=left_out", "note=category(dizzy|tired):error"]
    treatments = {t.name: t for t in infer_treatments(TABLE, stated)}
    assert treatments["age [years]"].kind == "category"
    assert treatments["weight"].kind == "left_out"
    assert treatments["note"].values == ("dizzy", "tired") and treatments["note"].missing == "error"
    brackets = infer_treatments({"x[1]": [1.0], "x1": [1.0]}, ["x[1*=left_out"])
    assert [t.kind for t in brackets] == ["left_out", "number"]


@pytest.mark.parametrize(
    "text", ["age=number(0..120):error", "a=b=category(f|m):category", "x=date(-10..10):mean"]
)
def test_described_treatments_parse_to_themselves(text: str) -> None:
    treatment = parse_treatment(text)
    assert f"{treatment.name}={treatment.describe()}" == text
    assert parse_treatment(f"{treatment.name}={treatment.describe()}") == treatment


def test_the_ends_of_dates_are_those_of_the_column() -> None:
    column = pa.array([datetime.date(1969, 12, 31), datetime.date(2024, 2, 29)])
    ends = tuple(numbers(column))
    assert parse_treatment("t=date(1969-12-31..2024-02-29)").bounds == ends
    noon = parse_treatment("t=date(1970-01-02T12:00..1970-01-03T00:00+06:00)").bounds
    assert noon == (1.5, 1.75)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age=number(2024-01-01..2024-12-31)", "with LOW below HIGH"),
        ("day=date(31.01.2024..2024-12-31)", r"dates such as 2024-01-31"),
        ("age", "expected NAME=KIND"),
        ("age=float", "expected NAME=KIND with KIND one of number, date, boolean"),
        ("age=number:category", "becomes error or mean, not category"),
        ("smoker=boolean:category", "becomes error or false, not category"),
        ("age=left_out:error", "becomes nothing, not error"),
        ("age=number(9..1)", "with LOW below HIGH"),
        ("age=number(a..b)", "with LOW below HIGH"),
        ("sex=category(f|f)", "with different values"),
        ("smoker=boolean(1..2)", "with different values"),
    ],
)
def test_malformed_treatments_raise(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"data\.columns has"):
        parse_treatment(text)
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        parse_treatment(text)


def test_the_mean_of_a_boolean_is_an_old_name_of_false() -> None:
    with pytest.warns(DeprecationWarning, match="Use boolean:false"):
        assert parse_treatment("smoker=boolean:mean").describe() == "boolean:false"


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (["day=left_out, age=number"], r"Separate several columns by spaces: 'age=number' 'ward"),
        (["ages=number"], r"states 'ages', expected one of the columns 'age \[years\]'"),
        (["weight=number", "weight=date"], "'weight' 2 times, expected once"),
        (["note=number"], r"note=number, but its values are not numbers .*note=category"),
        (["kön=boolean"], "kön=boolean, but it has the value 'kvinna'"),
        (["smoker=date"], "smoker=date, but its values are bool"),
        (["note=date"], r"note=date, but .* Set --data.types 'note=timestamp\[s\]' for texts"),
    ],
)
def test_treatments_that_do_not_fit_raise(stated: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        infer_treatments(TABLE, stated)


def test_the_summary_shows_types_missing_values_and_ranges() -> None:
    treatments = infer_treatments(TABLE)
    cells = {row[0]: row[1:5] for row in (s.cells() for s in summarize_columns(TABLE, treatments))}
    assert cells["age [years]"] == ["int64", "1", "3", "31 to 60"]
    assert cells["weight"] == ["double", "1", "3", "64 to 81"]
    assert cells["kön"] == ["string", "1", "2", ""]
    assert cells["admitted"][3] == "2024-01-01 to 2024-01-04"
    assert cells["scores"] == ["list<item: double>", "", "", ""]


def test_the_summary_shows_times_that_python_has_not() -> None:
    table = {
        "ns": pa.array([1, 2], pa.timestamp("ns")),
        "took": pa.array([86_400_000_000_000, None], pa.duration("ns")),
    }
    ranges = [s.range for s in summarize_columns(table, infer_treatments(table))]
    assert ranges == [
        "1970-01-01 00:00:00.000000001 to 1970-01-01 00:00:00.000000002",
        "1 to 1 d",
    ]


def test_values_of_every_form_are_equal() -> None:
    x = RNG.normal(size=20).astype(np.float32)
    mask = RNG.random(20) < 0.3
    expected = np.where(mask, np.nan, x)
    forms = [
        np.ma.MaskedArray(x, mask),
        expected,
        pa.array(expected, from_pandas=True),
        pa.chunked_array([pa.array(expected[:7], from_pandas=True), pa.array(expected[7:])]),
        [None if m else float(v) for m, v in zip(mask, x, strict=True)],
    ]
    for form in forms:
        column = arrow_column(form)
        np.testing.assert_array_equal(is_missing(column), mask)
        np.testing.assert_array_equal(numbers(column), expected)


def test_texts_of_numbers_and_booleans() -> None:
    assert texts(arrow_column([3.0, 4.0, None])).tolist() == ["3", "4", None]
    assert texts(arrow_column([3, 4])).tolist() == ["3", "4"]
    assert texts(arrow_column([True, None])).tolist() == ["true", None]
    assert texts(arrow_column(np.array([b"\xc3\xa5"]))).tolist() == ["å"]
    with pytest.raises(TypeError, match="several types"):
        arrow_column([1, "a"])
