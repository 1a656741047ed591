"""Users' files as clients: the clients of a split, and their examples in order."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from fedpax.errors import ArgumentError
from fedpax.settings.table_data import FilesConfig
from fedpax.user_files.arrow_numpy import encode_values, to_numpy


def test_clients_of_the_held_out_split_alone_follow_the_others(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("who,x,y\nå,1,0\nc,2,1\nå,3,\nb,4,\n")
    (tmp_path / "test.csv").write_text("who,x,y\na,5,1\nå,6,0\nc,7,\n")
    files = (str(tmp_path / "{split}.csv"),)
    data = FilesConfig(files=files, client="who", label="y", missing_label="skip")
    opened = data.open()
    assert opened.names == ["c", "å", "a"]  # b has no label
    assert opened.columns["x"].to_pylist() == [2, 1, 6, 5]
    assert opened.owners.tolist() == [0, 1, 1, 2]
    assert opened.heldout.tolist() == [False, False, True, True]
    assert opened.is_other.tolist() == [False, False, True]
    assert opened.notes[0] == (
        "3 clients, 4 examples: 1 held out within clients, 1 of 1 client without training examples"
    )
    assert {name: rows.tolist() for name, rows in opened.parts(opened.training).items()} == {
        "c": [0],
        "å": [1],
    }


@pytest.mark.parametrize("gray", ["train", "test"])
def test_gray_images_of_a_split_become_rgb_as_those_of_the_other_split(
    tmp_path: Path, gray: str
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 5, 3), np.uint8)
    for split in ("train", "test"):
        for k, image in enumerate(pixels):
            path = tmp_path / split / f"of {split}" / f"{k % 2}" / f"{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[..., 0] if split == gray else image).save(path)
    files = (str(tmp_path / "{split}/{client}/{label}/*.png"),)
    opened = FilesConfig(files=files, label="label").open()
    images = to_numpy(opened.columns["image"])
    order = [0, 2, 1]  # by label
    assert images.shape == (6, 4, 5, 3)
    of_gray = (gray == "test") == opened.heldout
    np.testing.assert_array_equal(images[~of_gray], pixels[order])
    np.testing.assert_array_equal(images[of_gray], np.repeat(pixels[order, ..., :1], 3, axis=-1))


def test_splits_of_other_types_and_sizes_are_told(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("who,x,y\na,1,0\n")
    (tmp_path / "test.csv").write_text("who,x,y\na,one,0\n")
    data = FilesConfig(files=(str(tmp_path / "{split}.csv"),), client="who", label="y")
    words = "column 'x' is string in the split 'test' and int64 in others, expected one type"
    with pytest.raises(ArgumentError, match=words) as raised:
        data.open()
    assert "--data.types x=string" in raised.value.in_flags
    for split, size in ("train", 4), ("test", 5):
        x = np.zeros((2, size, size, 1), np.uint8)
        np.savez(tmp_path / f"{split}.npz", x=x, who=np.arange(2), y=np.arange(2))
    data = FilesConfig(files=(str(tmp_path / "{split}.npz"),), client="who", label="y")
    with pytest.raises(ArgumentError, match=r"'x' is .*5,5,1.* 'test' .* Set image_size="):
        data.open()


@pytest.mark.parametrize("values", [["b", "é", None, "a"], [3, None, -1, 3], [2.5, float("nan")]])
@pytest.mark.parametrize("dictionary", [False, True])
def test_values_are_encoded_in_ascending_order(values: list[object], dictionary: bool) -> None:
    chosen = np.random.default_rng(0).integers(0, len(values), 50)
    array = pa.array([values[k] for k in chosen], pa.array(values).type)
    chunks = [array.slice(0, 20), array.slice(20, 0), array.slice(20)]
    parts = [part.dictionary_encode() for part in chunks] if dictionary else chunks
    distinct, places = encode_values(pa.chunked_array(parts))
    known = sorted({x for x in values if x is not None and x == x})
    last = [x for x in values if x is None or x != x]
    np.testing.assert_equal(distinct.to_pylist(), [*known, *last])
    np.testing.assert_equal(distinct.take(pa.array(places)).to_pylist(), array.to_pylist())
    distinct, places = encode_values(pa.chunked_array([], array.type))
    assert (len(distinct), places.dtype, places.shape) == (0, np.int64, (0,))
