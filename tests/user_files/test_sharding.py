"""Shards in order are what `prepare` writes, however files are divided; without an engine."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import csv, parquet
from user_files.written_tables import all_types, assert_equal, write_arrow

from fedpax.data import load, prepare
from fedpax.user_files import selection
from fedpax.user_files.formats import BadRows, LoadOptions
from fedpax.user_files.prepared import encode_about
from fedpax.user_files.readers import csv_files, json_files
from fedpax.user_files.reading import Reading
from fedpax.user_files.selection import select_files
from fedpax.user_files.sharding import (
    GroupSurvey,
    ShardPlan,
    split_rows,
    survey_group,
    write_shard,
)


def prepare_shards(
    files: Any, out: Path, num_shards: int, *, skip: bool = False, **given: Any
) -> list[int]:
    """Prepare files in one process; return the number of examples of each shard."""
    selected = select_files(files, LoadOptions(**given))
    reading = Reading(selected, LoadOptions(**given), BadRows() if skip else None)
    groups = range(len(selected.groups))
    surveys = [GroupSurvey.decode(survey_group(reading, n).encode()) for n in groups]
    plan = ShardPlan.of(reading, surveys, num_shards)
    rows: dict[int, list[bytes]] = {}
    for number in reversed(groups):
        for shard, content in split_rows(plan, number):
            rows.setdefault(shard, []).insert(0, content)
    out.mkdir()
    sizes, names = [], []
    for shard in sorted(rows):
        names.append(f"shard-{shard:05d}")
        with write_shard(plan, rows[shard], "300MB", str(out)) as folder:
            sizes.append(json.loads((folder / "prepared.json").read_text())["num_examples"])
            folder.rename(out / names[-1])
    about = {**plan.about, "num_examples": sum(sizes), "shards": names}
    (out / "prepared.json").write_text(encode_about(about))
    return sizes


@pytest.mark.each_value
@pytest.mark.parametrize("num_shards", [1, 3, 40])
@pytest.mark.parametrize("client", ["user", None])
def test_values_of_every_type_are_those_of_prepare(
    tmp_path: Path, num_shards: int, client: str | None
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    for number, name in enumerate(("b", "ä")):
        write_arrow(all_types(np.random.default_rng(number), 211), files / f"{name}.arrow")
    given: Any = {"client": client} if client else {"columns": ["kind"], "client": "kind"}
    sizes = prepare_shards(files / "*.arrow", tmp_path / "shards", num_shards, **given)
    made = prepare(files / "*.arrow", tmp_path / "whole", **given).source
    loaded = load(tmp_path / "shards")
    assert loaded.table.schema == made.table.schema
    assert_equal(loaded, made)
    assert sum(sizes) == 422
    assert 1 <= len(sizes) <= num_shards


@pytest.mark.parametrize("at_once", [3, 1000])
def test_images_and_their_hashes_are_those_of_prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(selection, "_IMAGES_AT_ONCE", at_once)
    rng = np.random.default_rng(0)
    for k in range(20):
        (tmp_path / f"{k % 3}").mkdir(exist_ok=True)
        pixels = rng.integers(0, 256, (4, 5, 3) if k % 2 else (4, 5), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{k % 3}" / f"{k}.png")
    (tmp_path / "1" / "13.png").write_bytes(b"damaged")
    files, given = f"{tmp_path}/{{client}}/*.png", {"image_size": (3, 3)}
    prepare_shards(files, tmp_path / "shards", 2, skip=True, **given)
    made = prepare(files, tmp_path / "whole", on_bad_row="skip", **given).source
    assert len(made) == 19 and load(tmp_path / "shards").stored.equals(made.stored)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=30), min_size=1, max_size=4).filter(any),
    st.integers(1, 9),
    st.integers(1, 9),
    st.booleans(),
)
def test_any_clients_in_any_shards(
    tmp_path_factory: Any, files: list[list[int]], rows: int, num_shards: int, by_file: bool
) -> None:
    folder = tmp_path_factory.mktemp("any")
    for k, owners in enumerate(files):
        owner = pa.array(owners, pa.int8() if k % 2 else pa.int64())
        table = pa.table({"u": owner, "n": pa.array(range(len(owners)), pa.int64())})
        write_arrow(table, folder / f"{k}.arrow", rows)
    given: Any = {} if by_file else {"client": "u"}
    prepare_shards(folder / "*.arrow", folder / "shards", num_shards, **given)
    assert_equal(
        load(folder / "shards"), prepare(folder / "*.arrow", folder / "whole", **given).source
    )


@pytest.mark.parametrize("holes", [0, 1])
def test_numbers_of_shards_are_read_side_by_side(tmp_path: Path, holes: int) -> None:
    rng = np.random.default_rng(3)
    values: Any = {name: rng.normal(size=900).astype(np.float32) for name in "xy"}
    mask = np.arange(900) < holes
    table = pa.table({"u": np.arange(900) // 7, **values, "z": pa.array(values["x"], mask=mask)})
    write_arrow(table, tmp_path / "a.arrow")
    prepare_shards(tmp_path / "a.arrow", tmp_path / "out", 4, client="u")
    source = load(tmp_path / "out")
    assert all((tmp_path / "out" / f"shard-0000{k}" / "records.bin").exists() for k in range(4))
    assert ["z" in part.missing for part in source._records] == [bool(holes), False, False, False]
    rows = rng.integers(0, 900, 500)
    for name, taken in source.take(rows).items():
        np.testing.assert_array_equal(taken, source.column(name)[rows])


def test_shards_have_about_equal_numbers_of_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in "ab":
        table = pa.table({"u": rng.permutation(4000) // 2, "x": rng.normal(size=4000)})
        write_arrow(table, tmp_path / f"{name}.arrow", 500)
    sizes = prepare_shards(tmp_path / "*.arrow", tmp_path / "shards", 8, client="u")
    assert len(sizes) == 8
    assert max(sizes) < 1.3 * 8000 / 8
    shard = load(tmp_path / "shards" / "shard-00003")  # opens alone
    assert len(shard) == sizes[3]
    single = prepare_shards(tmp_path / "a.arrow", tmp_path / "plain", 8)
    assert len(single) == 8
    assert max(single) < 1.1 * 500
    assert_equal(load(tmp_path / "plain"), load(tmp_path / "a.arrow"))


def test_types_of_late_parts_and_missing_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_files, "_BLOCK", 256)
    monkeypatch.setattr(json_files, "_STREAM_BLOCK", 256)
    values = ["1"] * 200 + ["2.5"]
    rows = "".join(f"u{n % 3},{value},{n}\n" for n, value in enumerate(values))
    (tmp_path / "a.csv").write_text("user,x,n\n" + rows + "u1,1,2,3\n,4,5\n")
    (tmp_path / "b.csv").write_text("user,x,n\nu1,7,3\n")
    given: Any = {"client": "user", "heldout_fraction": 0.3, "split": "train"}
    prepare_shards(tmp_path / "*.csv", tmp_path / "shards", 2, skip=True, **given)
    made = prepare(tmp_path / "*.csv", tmp_path / "whole", on_bad_row="skip", **given).source
    assert_equal(load(tmp_path / "shards"), made)
    with pytest.raises(ValueError, match=r"a.csv cannot be read as csv: .*expected 3"):
        prepare_shards(tmp_path / "*.csv", tmp_path / "more", 2, **given)
    lines = [{"u": f"u{n % 3}", "x": "2020-01-01" if n < 50 else "soon"} for n in range(100)]
    lines[-1]["new"] = "1"
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prepare_shards(tmp_path / "a.jsonl", tmp_path / "shards2", 2, client="u")
    made = prepare(tmp_path / "a.jsonl", tmp_path / "whole2", client="u").source
    assert_equal(load(tmp_path / "shards2"), made)


def test_damaged_shards_are_told(tmp_path: Path) -> None:
    csv.write_csv(pa.table({"u": np.arange(50) % 7, "x": np.arange(50)}), tmp_path / "a.csv")
    out = tmp_path / "out"
    prepare_shards(tmp_path / "a.csv", out, 3, client="u")
    about = json.loads((out / "prepared.json").read_text())
    for change, message in [
        ({"shards": about["shards"][1:]}, "examples, expected 50"),
        ({"shards": ["../elsewhere"]}, r"damaged: prepared.json has the shards"),
        ({"shards": [*about["shards"], "shard-7"]}, "damaged: the shard shard-7 is missing"),
        ({"client": "x"}, "has the client 'u'"),
    ]:
        (out / "prepared.json").write_text(json.dumps({**about, **change}))
        with pytest.raises(ValueError, match=message):
            load(out)
    (out / "prepared.json").write_text(json.dumps(about))
    content = (out / "shard-00001" / "examples.arrow").read_bytes()
    (out / "shard-00001" / "examples.arrow").write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"shard-00001 is damaged: .*prepare it again"):
        load(out)


def test_tensors_that_pyarrow_makes_of_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (60, 4, 3), np.uint8)
    turned = np.empty((60, 3, 4), np.uint8).transpose(0, 2, 1)  # its axes are permuted in memory
    turned[:] = images
    make = pa.FixedShapeTensorArray.from_numpy_ndarray
    table = pa.table({"u": np.arange(60) % 7, "x": make(images), "y": make(turned)})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=9)
    made = prepare(tmp_path / "a.parquet", tmp_path / "whole", client="u").source
    for source in (made, load(tmp_path / "a.parquet", client="u"), load(table, client="u")):
        expected = images[np.argsort(np.arange(60) % 7, kind="stable")]
        np.testing.assert_array_equal(source.column("x"), expected)
        np.testing.assert_array_equal(source.column("y"), expected)
    valid = pa.array([None if k == 3 else row for k, row in enumerate(images.reshape(60, 12))])
    kind = make(turned).type
    storage = valid.cast(kind.storage_type)
    table = pa.table({"y": pa.ExtensionArray.from_storage(kind, storage)}).slice(2)
    loaded = load(table).column("y")
    np.testing.assert_array_equal(loaded.mask[:, 0, 0], np.arange(58) == 1)
    stored = images.reshape(60, 3, 4).transpose(0, 2, 1)[[2, *range(4, 60)]]
    np.testing.assert_array_equal(loaded.data[loaded.mask[:, 0, 0] == 0], stored)
