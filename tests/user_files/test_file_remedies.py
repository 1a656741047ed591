"""Tests of the remedies of errors of files in flags."""

from pathlib import Path

import pytest

from fedpax.data import load
from fedpax.user_files.file_remedies import with_flags
from fedpax.user_files.table_source import check_columns


def test_remedies_of_an_experiment_name_no_argument_that_it_lacks() -> None:
    column = "Set client='client' if it names the clients; otherwise leave it out with columns=."
    assert with_flags(column) == (
        "Set --data.client=client if it names the clients; otherwise rename it in the files."
    )
    memory = "Read some columns with columns=, or sort the files on the disk once: fedpax prepare"
    assert with_flags(memory) == "Sort the files on the disk once: fedpax prepare"
    assert with_flags(memory, "--").startswith("Read some columns with --columns=, or sort")


def test_the_held_out_share_is_named_by_its_flag() -> None:
    text = "The split 'heldout' has no examples with heldout_fraction=0.1. Set another fraction."
    assert "with --data.heldout_fraction=0.1." in with_flags(text)
    assert "with --heldout_fraction=0.1." in with_flags(text, "--")


def test_a_tab_is_written_as_the_flag_takes_it(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\ty\n1\t2\n")
    with pytest.raises(ValueError, match="does not divide") as error:
        load(tmp_path / "a.csv")
    assert with_flags(str(error.value)).endswith(r"Set --data.delimiter='\t'.")
    assert load(tmp_path / "a.csv", delimiter=r"\t").column("y").tolist() == [2]
    with pytest.raises(ValueError, match=r"delimiter=.::. has 2 characters, expected one"):
        load(tmp_path / "a.csv", delimiter="::")


def test_arguments_of_remedies_are_flags() -> None:
    error = "Give optional_columns=['my dose'], or set types={'zip': 'string'}."
    assert with_flags(error) == (
        "Give --data.optional_columns 'my dose', or set --data.types zip=string."
    )
    assert (
        with_flags(error, "--") == "Give --optional_columns='my dose', or set --types=zip=string."
    )


def test_files_without_the_column_of_clients_name_the_value_without_one() -> None:
    with pytest.raises(ValueError, match="is not a column of new") as error:
        check_columns(["x", "y"], {"client": "site"}, "new.csv")
    text = str(error.value)
    assert text.endswith(
        "'x', 'y'. Name one of them, or set client=None: each file is then a client."
    )
    assert "or set --data.client=None: each file" in with_flags(text)
    assert "or leave --client out: each file" in with_flags(text, "--")
