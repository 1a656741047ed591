"""Values of a table's column."""

from fedpax.data.tables.fitted_column import value_range
from fedpax.data.tables.values import TextValues, arrow_column, encode_texts


def test_whole_numbers_are_texts_without_a_decimal_point() -> None:
    distinct, places = encode_texts(arrow_column([3.0, None, 4.0, 3.0]))
    assert (distinct, places.tolist()) == (["3", "4"], [0, -1, 1, 0])


def test_a_mark_among_numbers_is_told() -> None:
    values = TextValues()
    values.add(["1.5", "?", "2", "?", "7"])
    assert values.describe("age").startswith("'age' is text, because it has '?' among 3 numbers.")


def test_a_column_of_nan_alone_has_no_range() -> None:
    assert value_range(arrow_column([float("nan"), float("nan")])) == ""
    assert value_range(arrow_column([float("nan"), 2.0, 1.5])) == "1.5 to 2"
