"""Lists and patterns of paths."""

from pathlib import Path

from fedpax.path_patterns import (
    escape_commas,
    expand_home,
    split_list,
    split_names,
    split_treatments,
)


def test_a_list_is_split_at_commas_but_for_those_of_names() -> None:
    assert split_list("runs/a,b,runs/c", {"runs/a,b"}.__contains__) == ["runs/a,b", "runs/c"]
    assert split_names(r"note,größe\, cm") == ["note", "größe, cm"]
    assert escape_commas("größe, cm") == r"größe\, cm"


def test_the_home_folder_is_expanded() -> None:
    assert expand_home("~/data") == Path.home() / "data"


def test_treatments_are_split_at_commas_but_for_those_in_parentheses() -> None:
    text = "age=number,größe, cm=number:error,kind=category(a,b|c)"
    treatments = ["age=number", "größe, cm=number:error", "kind=category(a,b|c)"]
    assert split_treatments(text) == treatments
