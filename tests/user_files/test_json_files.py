"""Tests of JSON lines, lists of JSON objects and LEAF's JSON."""

import datetime
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from user_files.written_tables import lines

from fedpax.data import load, prepare
from fedpax.user_files.readers import json_files


def test_a_list_of_json_has_the_names_of_all_objects(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"x": 1}, {"x": 2, "y": 3}]')
    assert load(tmp_path / "a.json").table.to_pydict() == {"x": [1, 2], "y": [None, 3]}
    (tmp_path / "b.json").write_text('[{"x": 1}, 7]')
    with pytest.raises(ValueError, match="its entry 1 is 7, expected an object"):
        load(tmp_path / "b.json")


def test_numbers_of_json_become_texts_if_types_say_so(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1, "day": "2026-01-02"}\n{"x": 20}\n')
    (tmp_path / "b.jsonl").write_text('{"x": "u"}\n{"x": null}\n')
    types = {"x": "string", "day": "string"}
    sources = (
        load(tmp_path / "*.jsonl", types=types),
        prepare(tmp_path / "*.jsonl", tmp_path / "out", types=types).source,
    )
    for source in sources:
        assert source.table.column("x").to_pylist() == ["1", "20", "u", None]
        assert source.table.column("day").to_pylist() == ["2026-01-02", None, None, None]


def test_texts_of_json_become_dates_and_numbers_if_types_say_so(tmp_path: Path) -> None:
    """The error said that the column "changed from number to string in row 0"."""
    (tmp_path / "a.jsonl").write_text('{"day": "2026-01-02", "x": "1"}\n{"day": null}\n')
    types = {"day": "date32", "x": "int64"}
    sources = (
        load(tmp_path / "a.jsonl", types=types),
        prepare(tmp_path / "a.jsonl", tmp_path / "out", types=types).source,
    )
    for source in sources:
        assert source.table.column("day").to_pylist() == [datetime.date(2026, 1, 2), None]
        assert source.table.column("x").to_pylist() == [1, None]


def test_leaf(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    images = {f"f{k}": rng.random((k + 1, 6)).round(3) for k in (3, 0, 2)}
    labels = {user: rng.integers(0, 62, len(x)) for user, x in images.items()}
    for name, users in [("a.json", ["f3", "f0"]), ("b.json", ["f2"])]:
        content = {
            "users": users,
            "num_samples": [len(images[u]) for u in users],
            "user_data": {u: {"x": images[u].tolist(), "y": labels[u].tolist()} for u in users},
        }
        keys = sorted(content, reverse=name == "a.json")  # LEAF's own files have several orders
        (tmp_path / name).write_text(json.dumps({key: content[key] for key in keys}, indent=1))
    source = load(tmp_path / "*.json", label="y")
    assert source.client_names == ["f0", "f2", "f3"] and source.fields == ("x", "y", "client")
    order = ["f0", "f2", "f3"]
    np.testing.assert_array_equal(source.column("x"), np.concatenate([images[u] for u in order]))
    np.testing.assert_array_equal(source.column("y"), np.concatenate([labels[u] for u in order]))
    (tmp_path / "a.json").write_text('{"users": ["u"], "user_data": {}}')
    with pytest.raises(ValueError, match=r"a.json cannot be read as json: .* of user 'u'"):
        load(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(
        '{"users": ["u"], "num_samples": [3], "user_data": {"u": {"x": [0, 1]}}}'
    )
    with pytest.raises(ValueError, match=r"user 'u' has \{'x': 2, 'num_samples': 3\} values"):
        load(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"users": ["u", "u"], "user_data": {"u": {"x": [0, 1]}}}')
    with pytest.raises(ValueError, match="in 'users' more than once"):  # its examples were twice
        load(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"users": ["u"], "user_data": {"u": {"x": [0]}, "v": {}}}')
    with pytest.raises(ValueError, match="user 'v' is in 'user_data' and not in 'users'"):
        load(tmp_path / "a.json")


def test_long_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Python's slow parser reads no file without errors.
    monkeypatch.setattr("fedpax.user_files.readers.json_files._fault", None)
    texts = ["x" * n for n in (1, 70 << 20, 5)]
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": text} for text in texts]))
    assert [len(text) for text in load(tmp_path / "a.jsonl").column("text")] == [1, 70 << 20, 5]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("before", ["", '"b": "]]]}}}", '])
def test_deeply_nested_json_is_told(tmp_path: Path, name: str, opening: str, before: str) -> None:
    """It ended the process: pyarrow's parser overflows the stack."""
    closing = "]" if opening == "[" else "}"
    value = opening * 50_000 + "1" + closing * 50_000
    content = b'{"a": 1}\n{' + f'{before}"a": {value}}}\n'.encode()
    compress = gzip.compress if name.endswith(".gz") else bytes
    (tmp_path / name).write_bytes(compress(content))
    with pytest.raises(ValueError, match=r"line 2 nests lists or objects deeper than 100 levels"):
        load(tmp_path / name)


@pytest.mark.parametrize("depth", [101, 50_000])
def test_a_deep_json_list_is_told(tmp_path: Path, depth: int) -> None:
    (tmp_path / "a.json").write_text("[" * depth + "]" * depth)
    with pytest.raises(ValueError, match="nests lists or objects deeper than 100 levels"):
        load(tmp_path / "a.json")


def test_many_short_lists_and_brackets_in_texts_are_not_deep(tmp_path: Path) -> None:
    examples = [{"a": [[1, 2]] * 300, "t": '[{"\\[' * 400}, {"a": [[3, 4]], "t": "x"}]
    (tmp_path / "a.jsonl").write_bytes(lines(examples))
    loaded = load(tmp_path / "a.jsonl")
    assert len(loaded) == 2 and [example["t"] for example in loaded] == [e["t"] for e in examples]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_byte_that_is_not_utf8_is_told(tmp_path: Path, name: str) -> None:
    content = b'{"text": "abc"}\n' * 3 + b'{"text": "caf\xe9 x"}\n'
    (tmp_path / name).write_bytes((gzip.compress if name.endswith(".gz") else bytes)(content))
    words = r"a.jsonl.* cannot be read.*not UTF-8 in line 4, .*café x.*Correct the line, or"
    with pytest.raises(ValueError, match=words):
        load(tmp_path / name)
    with pytest.raises(ValueError, match=words):
        prepare(tmp_path / name, tmp_path / "prepared")
    prepared = prepare(tmp_path / name, tmp_path / "prepared", on_bad_row="skip")
    assert len(prepared.source) == 3


@pytest.mark.parametrize("line", ['{"id": 2, "text": "unclosed', "[1]", "null", '{"id": nul}'])
def test_a_line_that_is_no_object_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """Counted as an editor does, with empty lines, in any block, and without pyarrow's words."""
    monkeypatch.setattr("fedpax.user_files.readers.json_files._STREAM_BLOCK", 64)
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n' * 10 + f'\n\n{line}\n{{"id": 3}}\n')
    for read in (load, lambda file: prepare(file, tmp_path / "prepared")):
        with pytest.raises(ValueError) as caught:
            read(tmp_path / "a.jsonl")
        assert str(caught.value) == (
            f"{tmp_path}/a.jsonl cannot be read as jsonl: its line 13 is {line!r}, expected one "
            "whole JSON object. Correct the line, or leave such lines out: `fedpax prepare` does "
            "with --on_bad_row=skip."
        )
    prepared = prepare(tmp_path / "a.jsonl", tmp_path / "prepared", on_bad_row="skip")
    assert len(prepared.source) == 11


@pytest.mark.parametrize("line", ['{"id": "\\ud800"}', '{"id": "2", "id": "3"}'])
def test_a_line_that_python_alone_reads_is_told_and_skipped(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "1"}\n\n' + line + " " * 99)  # without a newline
    for read in (load, lambda file: prepare(file, tmp_path / "prepared")):
        match = "its line 3 is .*, expected one whole JSON object: .*(inval|twice)[^.]*[.] Correct"
        with pytest.raises(ValueError, match=match):
            read(tmp_path / "a.jsonl")
    prepared = prepare(tmp_path / "a.jsonl", tmp_path / "prepared", on_bad_row="skip")
    assert [example["id"] for example in prepared.source] == ["1"]


TWO = '{"a": 1}{"a": 2}'


@pytest.mark.parametrize(
    ("text", "kept", "skipped"),
    [
        (f'{TWO}\n{{"a": 3}}\nnot json\n', [3], 2),  # [1, 2] were read
        (f'{TWO}\n{{"a": 3}}\n\n', [3], 1),
        ("\nnot json\n", [], 1),  # it was said to be an empty file
        ('null\n{"a": 3}\n', [3], 1),  # pyarrow ended the process
        ('\ufeff{"a":\r1}\n{"a": 2}\n \t\r\n[1]', [1, 2], 1),
        ('{"a": 0.5}\n{"a": 1e400}\n{"a": 1e-400}\n{"a": 0.01e309}', [0.5, 0, 1e307], 1),
        ('{"a": Inf}\n{"a": -NaN}{}\n{"a": -Infinity}\n{"a": nan}', [np.inf, -np.inf], 2),
        (f'{{"a": 1{"0" * 5000}}}\n{{"a": 1\n', [np.inf], 1),
        ('{"a": "\\ud83d\\ude00"}\n{"a": "\\ude00\\ud83d"}\n', ["\U0001f600"], 1),
    ],
)
def test_each_line_that_is_one_object_is_read(
    tmp_path: Path, text: str, kept: list[Any], skipped: int
) -> None:
    (tmp_path / "a.jsonl").write_text(text, newline="")
    (tmp_path / "b.jsonl").write_text('{"a": null}\n')
    prepared = prepare(tmp_path / "*.jsonl", tmp_path / "prepared", on_bad_row="skip")
    assert prepared.source.table.column("a").to_pylist() == [*kept, None]
    assert sum(prepared.skipped.values()) == skipped


def test_a_line_of_two_objects_is_told(tmp_path: Path) -> None:
    """They were two rows."""
    (tmp_path / "a.jsonl").write_text(f'\n{{"a": 0}}\n{TWO}\n')
    for read in (load, lambda file: prepare(file, tmp_path / "prepared")):
        with pytest.raises(ValueError, match=r"its line 3 is .*, expected .*: it has several obj"):
            read(tmp_path / "a.jsonl")


def test_a_change_of_type_after_a_skipped_line_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"a": 0}\n[1]\n\n{"a": "x"}\n')
    with pytest.raises(ValueError, match="from number to string in line 5"):
        prepare(tmp_path / "a.jsonl", tmp_path / "prepared", on_bad_row="skip")


def test_arrow_parses_no_line_of_a_common_form_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader for each line took 120 times as long."""
    calls = []

    def parse(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    original = json_files._parse_lines
    monkeypatch.setattr(json_files, "_parse_lines", parse)
    (tmp_path / "a.jsonl").write_text(
        '{"a": 1e-300, "t": "\\u00e9"}\n' * 99 + '["x"]\n{"a": 1, "a": 2}'
    )
    prepared = prepare(tmp_path / "a.jsonl", tmp_path / "prepared", on_bad_row="skip")
    assert len(prepared.source) == 99 and len(calls) < 10
