"""Tests of `fedpax data` and `fedpax prepare`."""

import csv
import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from small_runs import Command

from fedpax.data import load, partition_natural, partition_statistics


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name, size in [("north", 30), ("Åre", 50), ("south", 5)]:
        ages = [f"{a}" if a > 30 else "" for a in rng.integers(20, 90, size)]
        rows = [f"{a},{rng.choice(['f', 'm'])},{k % 3 == 0}\n" for k, a in enumerate(ages)]
        (tmp_path / f"{name}.csv").write_text("age,sex,outcome\n" + "".join(rows))
    return tmp_path


def test_columns_and_clients_of_files_are_shown(command: Command, hospitals: Path) -> None:
    picture = hospitals / "new" / "clients.png"
    status, output, errors = command(
        "data", f"{hospitals}/*.csv", "--label=outcome", f"--picture={picture}"
    )
    assert (status, errors) == (0, "")
    source = load(hospitals / "*.csv")
    assert output.startswith(f"{hospitals}/*.csv: 85 examples of 3 clients\n")
    missing = np.ma.getmaskarray(source.column("age")).sum()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines()]
    (age,) = [row for row in cells if row[:1] == ["age"]]
    assert (
        age[1:3] == ["int64", str(missing)]
        and age[4] == f"{source.column('age').min()} to {source.column('age').max()}"
    )
    assert ["Åre", "50", "False (66%)"] in cells and ["south", "5", "False (60%)"] in cells
    labels = source.column("outcome").astype(np.int64)
    statistics = partition_statistics(partition_natural(source, "client"), labels)
    assert output.endswith(f"{statistics}\n")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_many_clients_and_numbers_as_labels(command: Command, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = [f"{u},{x}\n" for u, x in zip(rng.integers(0, 99, 999), rng.random(999), strict=True)]
    (tmp_path / "a.csv").write_text("user,x\n" + "".join(rows))
    status, output, _ = command("data", f"{tmp_path}/a.csv", "--client=user", "--label=x")
    assert status == 0 and "| ..." in output and "most frequent" not in output
    status, output, _ = command("data", f"{tmp_path}/a.csv")
    assert status == 0 and "999 examples\n" in output and "participants" not in output


def test_images_by_client_and_label(command: Command, tmp_path: Path) -> None:
    for client, label in [("ann", "cat"), ("ann", "dog"), ("bö", "cat")]:
        (tmp_path / client / label).mkdir(parents=True)
        Image.new("RGB", (4, 3)).save(tmp_path / client / label / "1.png")
    status, output, _ = command("data", f"{tmp_path}/{{client}}/{{label}}/*.png", "--label=label")
    assert status == 0 and "3 examples of 2 clients" in output and "uint8[3, 4, 3]" in output
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines()]
    assert ["bö", "1", "cat (100%)"] in cells and ["labels per participant", "1.5"] in cells


def test_prepared_files_are_those_of_load(command: Command, hospitals: Path) -> None:
    (hospitals / "north.csv").write_text("age,sex,outcome\n70,f,True,9\n60,m,False\n")
    arguments = ("prepare", f"{hospitals}/*.csv", "--types=age=float64", "--on_bad_row=skip")
    status, output, errors = command(*arguments, f"--out={hospitals}/out")
    assert status == 0 and output == f"Wrote 56 examples of 3 clients to {hospitals}/out.\n"
    assert "Skipped 1 row of" in errors and "north.csv, the first of them '70,f,True,9'" in errors
    loaded = load(hospitals / "out")
    assert loaded.column("age").dtype == np.float64 and loaded.client_names == [
        "north",
        "south",
        "Åre",
    ]
    status, output, _ = command("data", f"{hospitals}/out", "--label=sex")
    assert status == 0 and "56 examples of 3 clients" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("data",),
            "`fedpax data` names no files. Run for example `fedpax data 'hospitals/*.csv'`",
        ),
        (
            ("data", "a.csv", "--clint=x"),
            "got '--clint=x', which it does not have. Did you mean --client",
        ),
        (("data", "no.csv"), "No file matches 'no.csv'"),
        (("data", "{}/north.csv", "--client=x"), "client='x' is not a column of"),
        (("data", "{}/north.csv", "--picture=x.png"), "the files have none. Set --client"),
        (("data", "{}/north.csv", "--types=string"), "--types has 'string', expected COLUMN=TYPE"),
        (("data", "{}/north.csv", "--types=a=int8,a=bool"), "--types names 'a' 2 times, expected"),
        (("data", "{}/north.csv", "--image_size=3"), "--image_size=3, expected HEIGHTxWIDTH"),
        (("prepare", "{}/north.csv"), "`fedpax prepare` has no --out"),
        (("prepare", "{}/north.csv", "--out={}"), "exists, expected a new folder"),
        (
            ("prepare", "{}/north.csv", "--out={}/new", "--memory=much"),
            "memory is 'much', expected",
        ),
        (
            ("prepare", "{}/north.csv", "--out={}/new", "--num_shards=2"),
            "--num_shards=2 without --engine=beam, expected both",
        ),
        (
            ("prepare", "{}/north.csv", "--out={}/new", "--beam_flags=--x"),
            "--beam_flags=--x without --engine=beam, expected both",
        ),
    ],
)
def test_arguments_that_are_refused(
    command: Command, hospitals: Path, arguments: tuple[str, ...], words: str
) -> None:
    status, _, errors = command(*(word.replace("{}", str(hospitals)) for word in arguments))
    assert status and words in errors and "Traceback" not in errors


def test_columns_that_some_files_lack(command: Command, tmp_path: Path) -> None:
    (tmp_path / "Oslo.csv").write_text("age,outcome\n1,0\n2,1\n")
    (tmp_path / "Lund.csv").write_text("age,dose,outcome\n1,3,0\n2,4,1\n")
    files, out = str(tmp_path / "*.csv"), f"--out={tmp_path / 'prepared'}"
    for words in (["data", files], ["prepare", files, out]):
        status, _, error = command(*words)
        assert status == 2
        assert "or give --optional_columns=dose if its values are missing there, or" in error
        assert "with --columns=age,outcome." in error, "the file's name is no column of it"
        status, output, _ = command(*words, "--optional_columns=dose")
        assert status == 0 and "4 examples of 2 clients" in output


def test_commas_separate_columns_in_all_commands(command: Command, tmp_path: Path) -> None:
    texts = {"Oslo": "age,note,outcome", "Lund": 'age,"dose, mg",outcome', "Umeå": "age,outcome"}
    for name, head in texts.items():
        width = len(next(csv.reader([head])))
        rows = [",".join([str(k)] * (width - 1) + ["yn"[k % 2]]) for k in range(9)]
        (tmp_path / f"{name}.csv").write_text("\n".join([head, *rows]) + "\n")
    files, lists = str(tmp_path / "*.csv"), (r"note,dose\, mg", "note")
    status, output, _ = command("data", files, rf"--optional_columns={lists[0]}")
    assert status == 0 and "| dose, mg " in output and "| note " in output
    words = ("--columns", "age", "note,outcome", files, "--optional_columns", "note", r"dose\, mg")
    status, listed, _ = command("data", *words)
    assert status == 0 and "| note " in listed and "dose" not in listed
    assert (
        r"give --optional_columns='dose\, mg'"
        in command("data", files, "--optional_columns=note")[2]
    )
    train = ("train", "--exp=fedavg_table", f"--data.files={files}", "--data.label=outcome")
    for k, words in enumerate(
        [
            (rf"--data.optional_columns={lists[0]}",),
            ("--data.optional_columns", lists[0]),
            (
                "--data.optional_columns",
                "note",
                r"dose\, mg",
                "--data.types",
                "age=float,note=string",
                "--data.columns",
                "dose, mg=category(1,5|2),note=left_out",
                "age=number(0..9):error",
            ),
        ]
    ):
        folder = tmp_path / f"run{k}"
        status, _, errors = command(
            *train, *words, "--training.rounds=1", f"--job_log_dir={folder}"
        )
        assert status == 0, errors
        saved = json.loads((folder / "config.json").read_text())["configuration"]["data"]
        assert saved["optional_columns"] == ["note", "dose, mg"]
    assert saved["types"] == ["age=float", "note=string"]
    assert saved["columns"] == [
        "dose, mg=category(1,5|2)",
        "note=left_out",
        "age=number(0..9):error",
    ]


def test_one_has_no_plural(command: Command, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("ward,note\nA,x\n")
    files, out = str(tmp_path / "a.csv"), f"--out={tmp_path / 'prepared'}"
    _, output, _ = command("data", files, "--client=ward")
    assert output.startswith(f"{files}: 1 example of 1 client\n")
    assert "text of 1 distinct value in 1 example " in output
    assert "Wrote 1 example of 1 client to" in command("prepare", files, "--client=ward", out)[1]
    (tmp_path / "b.csv").write_text("ward,age,outcome\nA,1,0\nA,2,1\nA,3,1\nA,4,0\nA,5,1\n")
    files = (f"--data.files={tmp_path / 'b.csv'}", "--data.client=ward")
    words = (*files, "--data.label=outcome", "--training.rounds=1")
    folder = f"--job_log_dir={tmp_path / 'run'}"
    _, output, errors = command("train", "--exp=fedavg_table", *words, folder)
    assert "1 feature of columns" in output + errors and "of 1 round in" in output + errors
    assert "a round has all 1 client\n" in output + errors


def test_examples_that_two_clients_have_are_counted(command: Command, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [f"{x:.9f},note {k}" for k, x in enumerate(rng.normal(size=90))]
    for name, some in {"A": rows[:50], "B": rows[47:]}.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(["dose,note", *some]) + "\n")
    _, output, _ = command("data", f"{tmp_path}/*.csv")
    assert "\n6 of 93 examples have the values of an example of another client. " in output
    for name in "AB":  # few values: equal examples are of different origin
        (tmp_path / f"{name}.csv").write_text("sex,outcome\n" + "f,0\nm,1\nf,1\n" * 20)
    assert "of another client" not in command("data", f"{tmp_path}/*.csv")[1]


def test_values_that_differ_in_spaces_or_capitals_are_told(
    command: Command, tmp_path: Path
) -> None:
    rows = [
        f"{'AB'[k % 2]}{' ' * (k % 4 == 0)},{['yes', 'yes ', 'no'][k % 3]},n{k},{k}"
        for k in range(40)
    ]
    file = tmp_path / "a.csv"
    file.write_text("\n".join(["ward,outcome,note,age", *rows]) + "\n")
    _, output, _ = command("data", str(file), "--client=ward", "--label=outcome")
    assert "'ward' has the values 'A' and 'A ', which differ in spaces or capitals alone" in output
    assert "'outcome' has the values 'yes' and 'yes ', which" in output
    assert output.count("differ in spaces") == 2
    words = (f"--data.files={file}", "--data.client=ward", "--data.label=outcome")
    folder = f"--job_log_dir={tmp_path / 'run'}"
    errors = command("train", "--exp=fedavg_table", *words, "--training.rounds=1", folder)[2]
    assert "classification, no, yes, 'yes '; text" in errors


def test_whole_floats_and_decimals_are_labels_as_in_runs(command: Command, tmp_path: Path) -> None:
    whole = [None if k % 8 == 0 else float(k % 3) for k in range(40)]
    decimals = [None if x is None else Decimal(int(x)) for x in whole]
    blob = [bytes([k % 2, 255]) for k in range(40)]
    columns = {"u": [k // 8 for k in range(40)], "w": whole, "x": np.arange(40) / 7, "b": blob}
    table = pa.table({**columns, "d": pa.array(decimals, pa.decimal128(5, 1))})
    parquet.write_table(table, tmp_path / "a.parquet")
    file = str(tmp_path / "a.parquet")
    for label in "wd":
        output = command("data", file, "--client=u", f"--label={label}")[1]
        assert "most frequent label" in output and "2 (38%) |" in output
        assert "| labels                   |          4 |" in output  # the missing one too
    assert "bytes that are no text" in output
    assert "most frequent" not in command("data", file, "--client=u", "--label=x")[1]


def test_an_empty_text_of_json_is_missing_in_tables_alone(command: Command, tmp_path: Path) -> None:
    texts = ["a b", "", "c", None]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in texts))
    source = load(tmp_path / "a.jsonl")
    assert [example["text"] for example in source] == texts
    _, output, _ = command("data", f"{tmp_path}/a.jsonl")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.splitlines()]
    assert ["text", "string", "2", "2"] in [row[:4] for row in cells]


def test_conversations_are_counted_as_training_reads_them(command: Command, tmp_path: Path) -> None:
    def chat(*contents: str | None) -> str:
        roles = ["user", "assistant"]
        return json.dumps(
            {"m": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]}
        )

    rows = [chat("a", "b"), chat("a", None), chat("a"), chat("a", ""), '{"m": null}']
    rows.append(chat("", "b").replace("}]", "}, null, null]"))  # null ended in an AttributeError
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    output = command("data", f"{tmp_path}/a.jsonl")[1]
    assert (
        "m: 6 conversations, messages by role: user 5, assistant 4. Without an assistant: 2; "
        "answers of null: 1; messages of null: 2 (training raises at each); empty answers: 1"
        in output
    )
