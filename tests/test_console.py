"""Texts for a terminal."""

from fedpax.console import count_of, escape_controls


def test_control_characters_are_escaped() -> None:
    assert escape_controls("loss\x1b[2J\n") == "loss\\x1b[2J\\x0a"
    assert escape_controls("a\nb", keep="\n") == "a\nb"


def test_a_number_has_its_noun() -> None:
    assert (count_of(1, "client"), count_of(1200, "client")) == ("1 client", "1,200 clients")
