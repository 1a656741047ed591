"""Lists that users separate by commas."""

from fedpax.comma_lists import escape_commas, split_list, split_names, split_treatments


def test_a_list_is_split_at_commas_but_for_those_of_names() -> None:
    assert split_list("runs/a,b,runs/c", {"runs/a,b"}.__contains__) == ["runs/a,b", "runs/c"]
    assert split_names(r"note,größe\, cm") == ["note", "größe, cm"]
    assert escape_commas("größe, cm") == r"größe\, cm"


def test_treatments_are_split_at_commas_but_for_those_in_parentheses() -> None:
    text = "age=number,größe, cm=number:error,kind=category(a,b|c)"
    treatments = ["age=number", "größe, cm=number:error", "kind=category(a,b|c)"]
    assert split_treatments(text) == treatments
