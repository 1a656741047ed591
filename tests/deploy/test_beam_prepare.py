"""Files that Beam sorts are what `prepare` writes, in threads and in several processes."""

import io
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import csv, parquet

from fedpax.data import load, prepare
from fedpax.main import main

pytest.importorskip("apache_beam", reason="Apache Beam needs an environment of its own")
pytestmark = pytest.mark.slow

from fedpax.deploy.beam_prepare import prepare_beam  # noqa: E402

THREADS = [
    "--runner=FnApiRunner",
    "--direct_running_mode=multi_threading",
    "--direct_num_workers=3",
]
PROCESSES = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]


def write_files(folder: Path, clients=40) -> None:
    random = np.random.default_rng(0)
    for k, name in enumerate(("b", "ä", "c")):
        size = 300 + 200 * k
        table = {
            "user": [f"bö {n}" for n in random.integers(clients, size=size)],
            "x": pa.array(random.normal(size=size), mask=random.random(size) < 0.2),
            "image": pa.FixedShapeTensorArray.from_numpy_ndarray(
                random.integers(0, 256, (size, 4, 3), np.uint8)
            ),
            "words": [[*range(n % 4)] for n in range(size)],
        }
        parquet.write_table(pa.table(table), folder / f"{name}.parquet", row_group_size=70)


def assert_same(actual, expected):
    assert actual.table.schema == expected.table.schema
    assert actual.table.equals(expected.table)
    assert (actual.client, actual.label) == (expected.client, expected.label)
    if expected.client_starts is not None:
        assert actual.client_names == expected.client_names
        np.testing.assert_array_equal(actual.client_starts, expected.client_starts)


@pytest.mark.parametrize("flags", [[], THREADS, PROCESSES], ids=["one", "threads", "processes"])
def test_the_folder_is_that_of_prepare(tmp_path, flags):
    write_files(tmp_path)
    files = tmp_path / "*.parquet"
    expected = prepare(files, tmp_path / "whole", client="user", label="x").source
    made = prepare_beam(
        files, tmp_path / "out", client="user", label="x", num_shards=4, flags=flags
    )
    assert made == (1500, 40, 4, {}, {}, ())
    assert_same(load(tmp_path / "out"), expected)
    shard = load(tmp_path / "out" / "shard-00001")
    assert (
        expected.client_names[len(load(tmp_path / "out" / "shard-00000").client_names)]
        == (shard.client_names[0])
    )
    assert {path.name for path in tmp_path.iterdir()} == {
        "b.parquet", "ä.parquet", "c.parquet", "whole", "out",
    }  # fmt: skip


def test_clients_by_file_and_splits(tmp_path):
    write_files(tmp_path)
    given = {"heldout_fraction": 0.3, "split": "heldout", "columns": ["x", "words"]}
    expected = prepare(tmp_path / "*.parquet", tmp_path / "whole", **given).source
    assert prepare_beam(tmp_path / "*.parquet", tmp_path / "out", **given).num_clients == 3
    assert_same(load(tmp_path / "out"), expected)


def test_bad_rows_are_told_or_skipped_and_counted(tmp_path, capsys):
    rows = "user,x\n" + "".join(f"u{n % 5},{n}\n" for n in range(40))
    (tmp_path / "a.csv").write_text(rows + "u1,1,2\n,4\n")
    (tmp_path / "b.csv").write_text(rows + "u9,0.5\n")
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"a.csv cannot be read as csv: .*row 42 has .*expected 2"):
        prepare_beam(tmp_path / "*.csv", out, client="user")
    assert {path.name for path in tmp_path.iterdir()} == {"a.csv", "b.csv"}
    arguments = ["prepare", str(tmp_path / "*.csv"), "--client=user", "--on_bad_row=skip"]
    assert main([*arguments, f"--out={tmp_path / 'whole'}"]) == 0
    expected = capsys.readouterr()
    flags = ["--engine=beam", "--num_shards=2", f"--beam_flags={' '.join(THREADS)}"]
    assert main([*arguments, f"--out={out}", *flags]) == 0
    printed = capsys.readouterr()
    assert printed.out.replace(str(out), str(tmp_path / "whole")) == expected.out
    assert "Skipped 2 rows of" in expected.err
    assert [line for line in printed.err.splitlines() if "Skipped" in line] == (
        expected.err.splitlines()
    )
    assert_same(load(out), load(tmp_path / "whole"))


def test_changes_of_images_are_told(tmp_path, capsys):
    random = np.random.default_rng(3)
    encoded = []
    for channels in (4, 3, 4, 3, 3):
        file = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (5, 4, channels), np.uint8)).save(file, "PNG")
        encoded.append(file.getvalue())
    for name, images in {"a": [b"damaged", *encoded[:2]], "b": encoded[2:]}.items():
        table = pa.table({"user": [name] * len(images), "image": images})
        parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=1)
    arguments = ["prepare", str(tmp_path / "*.parquet"), "--client=user", "--on_bad_row=skip"]
    arguments += ["--image_size=4x4"]
    assert main([*arguments, f"--out={tmp_path / 'out'}"]) == 0
    expected = capsys.readouterr()
    assert "2 images with alpha" in expected.out and "Skipped 1 row" in expected.err
    flags = ["--engine=beam", f"--beam_flags={' '.join(PROCESSES)}"]
    assert main([*arguments, f"--out={tmp_path / 'beam' / 'out'}", *flags]) == 0
    printed = capsys.readouterr()
    assert printed.out.replace("beam/", "") == expected.out
    assert expected.err in printed.err
    assert_same(load(tmp_path / "beam" / "out"), load(tmp_path / "out"))


def test_decimal_commas_are_read_or_told(tmp_path):
    numbers = np.random.default_rng(0).normal(size=40)
    rows = "".join(f"u{n % 5};{x}\n".replace(".", ",") for n, x in enumerate(numbers))
    (tmp_path / "a.csv").write_text(f"user;x\n{rows}")
    options = {"client": "user", "delimiter": ";"}
    with pytest.raises(ValueError, match="Set decimal_point=','"):
        prepare_beam(tmp_path / "a.csv", tmp_path / "out", **options)
    prepare_beam(tmp_path / "a.csv", tmp_path / "out", **options, decimal_point=",")
    order = np.argsort(np.arange(40) % 5, kind="stable")
    np.testing.assert_array_equal(load(tmp_path / "out").column("x"), numbers[order])


def test_missing_clients_and_different_types_are_told(tmp_path):
    (tmp_path / "a.csv").write_text("user,x\nann,1\n,2\n")
    with pytest.raises(ValueError, match=r"a.csv has no client in the column 'user' of example 1"):
        prepare_beam(tmp_path / "a.csv", tmp_path / "out", client="user")
    with pytest.raises(ValueError, match="client='who' is not a column of"):
        prepare_beam(tmp_path / "a.csv", tmp_path / "out", client="who")
    for name, values in (("b", [1, 2]), ("c", [[1.0], [2.0]])):
        table = pa.table({"user": ["u", "v"], "x": values})
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    with pytest.raises(ValueError, match=r"column 'x' is int64 in .*b.parquet and list"):
        prepare_beam(tmp_path / "*.parquet", tmp_path / "out", client="user")
    with pytest.raises(ValueError, match=r"out='.*' exists, expected a new folder"):
        prepare_beam(tmp_path / "a.csv", tmp_path, client="x")
    with pytest.raises(ValueError, match="num_shards is 0, expected at least 1"):
        prepare_beam(tmp_path / "a.csv", tmp_path / "out", client="x", num_shards=0)
    assert not (tmp_path / "out").exists()


def test_a_bucket_has_the_folder_when_prepared_json_is_there(tmp_path):
    import fsspec

    system = fsspec.filesystem("memory")
    write_files(tmp_path)
    files = tmp_path / "*.parquet"
    expected = prepare(files, tmp_path / "whole", client="user").source
    system.pipe("/beam/out/shard-00007/examples.arrow", b"of a job that was interrupted")
    made = prepare_beam(files, "memory://beam/out", client="user", num_shards=3)
    assert made.num_shards == 3
    system.get("/beam/out", str(tmp_path / "copy"), recursive=True)
    assert {path.name for path in (tmp_path / "copy").iterdir()} == {
        "shard-00000", "shard-00001", "shard-00002", "prepared.json",
    }  # fmt: skip
    assert_same(load(tmp_path / "copy"), expected)
    with pytest.raises(ValueError, match="out='memory://beam/out' exists"):
        prepare_beam(files, "memory://beam/out", client="user")
    csv.write_csv(pa.table({"user": [1, None], "x": [1, 2]}), tmp_path / "a.csv")
    with pytest.raises(ValueError, match="has no client"):
        prepare_beam(tmp_path / "a.csv", "memory://beam/more", client="user")
    assert not system.find("/beam/more")


def test_a_step_that_is_repeated_and_a_job_that_fails_leave_no_half_folder(tmp_path, monkeypatch):
    write_files(tmp_path)
    files, out = tmp_path / "*.parquet", tmp_path / "out"
    rename, fails = os.rename, []

    def fail_once(self, to):
        rename(self, to)
        if "shard-00001" in str(to) and not fails:
            fails.append(to)
            raise OSError("the worker is lost")
        return Path(to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_once)
        made = prepare_beam(files, out, client="user", num_shards=3)
    assert (len(fails), made.num_shards) == (1, 3)
    assert_same(load(out), prepare(files, tmp_path / "whole", client="user").source)

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedpax.deploy.beam_prepare.encode_about", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare_beam(files, tmp_path / "more", client="user")
    assert not [path for path in tmp_path.iterdir() if "more" in path.name]
