"""Images in folders, tars and tables are held out, resized, skipped and told of alike."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image, ImageOps
from pyarrow import parquet

from fedpax.data import load, prepare
from fedpax.user_files import selection
from fedpax.user_files.held_out import held_out
from fedpax.user_files.readers import arrow_files, tar_files

SITES = ("ann", "bö")
LABELS = ("cat", "dog")


def encode(pixels: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind, **options)
    return stream.getvalue()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same 60 images as files, in a tar, and as bytes in two tables."""
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    rows = [
        {
            "site": SITES[k % 2],
            "species": LABELS[k % 3 % 2],
            "image": encode(rng.integers(0, 256, (6 + k % 2, 5, 3), np.uint8)),
        }
        for k in range(60)
    ]
    with tarfile.open(folder / "a.tar", "w") as archive:
        for k, row in enumerate(rows):
            path = folder / "files" / row["site"] / row["species"] / f"{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(row["image"])
            about = f'{{"site": "{row["site"]}", "species": "{row["species"]}"}}'.encode()
            for suffix, content in (("png", row["image"]), ("json", about)):
                member = tarfile.TarInfo(f"{k}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    parquet.write_table(pa.Table.from_pylist(rows), folder / "bytes.parquet")
    nested = [
        {**row, "image": {"bytes": row["image"], "path": f"{k}"}} for k, row in enumerate(rows)
    ]
    parquet.write_table(pa.Table.from_pylist(nested), folder / "nested.parquet")
    return {
        "files": f"{folder}/files/{{client}}/{{label}}/*.png",
        "labels as clients": f"{folder}/files/*/{{client}}/*.png",
        "tar": f"{folder}/a.tar",
        "bytes": f"{folder}/bytes.parquet",
        "nested": f"{folder}/nested.parquet",
    }


def pixels_of(source: Any, rows: Any = slice(None)) -> set[bytes]:
    return {image.tobytes() for image in source.column("image")[rows]}


@pytest.mark.parametrize("size", [(4, 4), (9, 2)])
def test_held_out_images_depend_on_their_bytes_alone(
    images: dict[str, str], tmp_path: Path, size: tuple[int, int]
) -> None:
    """The share depended on the size, the placeholders and the names of columns."""
    content = parquet.read_table(images["bytes"]).column("image").to_pylist()
    chosen = load(images["bytes"], "heldout", heldout_fraction=0.3).column("image").tolist()
    assert 5 < len(chosen) < 35 and {*chosen} < {*content}
    expected = pixels_of(load({"image": chosen}, image_size=size))
    for name, files in images.items():
        for client in (None, "site", "species") if files.endswith(("tar", "parquet")) else (None,):
            options: dict[str, Any] = {"client": client, "image_size": size}
            held = load(files, "heldout", heldout_fraction=0.3, **options)
            kept = load(files, "train", heldout_fraction=0.3, **options)
            assert pixels_of(held) == expected, (name, client)
            assert len(held) + len(kept) == 60 and not pixels_of(kept) & expected
            assert not any(field.startswith("__") for field in (*held.fields, *held[0]))
    prepared = prepare(images["nested"], tmp_path / "out", client="site", image_size=size).source
    again = load(tmp_path / "out").select(["image"])
    for source in (prepared, again):
        assert pixels_of(source, held_out(source.stored, 0.3)) == expected
        assert {*source.fields} <= {"image", "site", "species"}
    for split in ("train", "heldout"):
        made = prepare(
            images["tar"], tmp_path / split, split=split, heldout_fraction=0.3, image_size=size
        )
        assert (pixels_of(made.source) == expected) == (split == "heldout")


def test_a_column_of_images_can_choose_the_split(images: dict[str, str]) -> None:
    by = {"heldout_fraction": 0.3, "image_size": (4, 4), "client": "site"}
    held = load(images["bytes"], "heldout", heldout_by="image", **by)
    assert pixels_of(held) == pixels_of(load(images["bytes"], "heldout", **by))
    with pytest.raises(ValueError, match=r"one of 'site', 'species', 'image'\.$"):
        load(images["bytes"], "heldout", heldout_by="picture", **by)


def test_examples_without_images_are_held_out_by_their_content() -> None:
    rng = np.random.default_rng(1)
    texts = [f"text {k}" for k in range(200)]
    plain = pa.table({"text": texts, "x": rng.normal(size=200)})
    pictures = [
        encode(rng.integers(0, 256, (2, 2), np.uint8)) if k % 2 else None for k in range(200)
    ]
    mixed = held_out(plain.append_column("image", pa.array(pictures)), 0.5)
    of_images = held_out(pa.table({"i": pictures}), 0.5)
    np.testing.assert_array_equal(mixed[1::2], of_images[1::2])
    assert 0.2 < mixed[::2].mean() < 0.8
    no_images = plain.append_column("image", pa.array([b"no image"] * 200))
    assert 0.2 < held_out(no_images, 0.5).mean() < 0.8


def test_a_folder_of_an_older_version_tells_of_its_held_out_images(
    images: dict[str, str], tmp_path: Path
) -> None:
    prepare(images["files"], tmp_path / "out", image_size=(4, 4))
    assert load(tmp_path / "out").notes == ()
    about = json.loads((tmp_path / "out" / "prepared.json").read_text())
    del about["image_hashes"]
    (tmp_path / "out" / "prepared.json").write_text(json.dumps(about))
    (note,) = load(tmp_path / "out").notes
    assert "prepared by an earlier version" in note and note.endswith("Prepare the files again")


def test_bytes_in_tables_are_resized_like_files(images: dict[str, str]) -> None:
    """`image_size` was ignored for bytes in Parquet, and for structures of bytes and path."""
    files = load(images["files"], image_size=(4, 3))
    assert files.column("image").shape == (60, 4, 3, 3)
    for name in ("tar", "bytes", "nested"):
        assert pixels_of(load(images[name], image_size=(4, 3))) == pixels_of(files)
    table = parquet.read_table(images["nested"])
    assert pixels_of(load(table, image_size=(4, 3))) == pixels_of(files)
    raw = load(images["bytes"]).column("image")
    assert {*raw} == {*parquet.read_table(images["bytes"]).column("image").to_pylist()}
    stated = load(images["bytes"], image_size=(4, 3), types={"image": "binary"}, columns=["image"])
    assert {*stated.column("image")} == {*raw}


def test_a_size_without_an_effect_is_told(images: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    for read in (load, lambda files, **how: prepare(files, tmp_path / "none", **how)):
        with pytest.raises(ValueError, match=r"a\.csv has no encoded images. Leave image_size out"):
            read(tmp_path / "a.csv", image_size=(3, 3))
    prepare(images["files"], tmp_path / "out", image_size=(4, 4))
    assert len(load(tmp_path / "out", image_size=(4, 4))) == 60
    with pytest.raises(ValueError, match=r"'image' as pixels of 4 x 4. Leave image_size out"):
        load(tmp_path / "out", image_size=(5, 4))


def damage(images: dict[str, str], folder: Path, kind: str) -> tuple[str, list[str]]:
    """Copy the images with two damaged ones, and return the files and the words for the damaged."""
    table = parquet.read_table(images["bytes"])
    content = table.column("image").to_pylist()
    content[7], content[12] = content[7][:40], None if kind in ("bytes", "nested") else b""
    if kind == "files":
        for k, value in enumerate(content):
            (folder / f"{k % 2}").mkdir(exist_ok=True)
            (folder / f"{k % 2}" / f"{k:02d}.png").write_bytes(value)
        return f"{folder}/{{client}}/*.png", ["/07.png", "/12.png"]
    if kind == "tar":
        with tarfile.open(folder / "a.tar", "w") as archive:
            for k, value in enumerate(content):
                member = tarfile.TarInfo(f"{k}.png")
                member.size = len(value)
                archive.addfile(member, io.BytesIO(value))
        return f"{folder}/a.tar", ["'7'", "'12'"]
    values: list[Any] = content
    if kind == "nested":
        values = [{"bytes": value, "path": "x"} for value in content]
    table = table.set_column(table.schema.get_field_index("image"), "image", pa.array(values))
    parquet.write_table(table, folder / "a.parquet")
    return f"{folder}/a.parquet", [f"'image' of row {k} (counted from 0)" for k in (7, 12)]


def test_a_damaged_image_before_all_others_is_skipped(
    images: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large images are parts of their own: a damaged first one is no column of other bytes."""
    monkeypatch.setattr(arrow_files, "_BATCH_ROWS", 1)
    table = parquet.read_table(images["bytes"])
    content = [b"damaged", *table.column("image").to_pylist()[1:]]
    table = table.set_column(table.schema.get_field_index("image"), "image", pa.array(content))
    parquet.write_table(table, tmp_path / "a.parquet")
    made = prepare(tmp_path / "a.parquet", tmp_path / "out", image_size=(4, 4), on_bad_row="skip")
    assert made.source.column("image").shape == (59, 4, 4, 3)
    assert made.skipped == {str(tmp_path / "a.parquet"): 1}


@pytest.mark.parametrize("kind", ["files", "tar", "bytes", "nested"])
@pytest.mark.parametrize("at_once", [7, 1000])
def test_damaged_images_are_told_or_skipped(
    images: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, at_once: int
) -> None:
    """Damaged images were not skipped, and an error named one of them without a remedy."""
    monkeypatch.setattr(selection, "_IMAGES_AT_ONCE", at_once)
    if at_once < 1000:  # a part can have no whole image
        monkeypatch.setattr(arrow_files, "_BATCH_ROWS", 1)
        monkeypatch.setattr(tar_files, "_EXAMPLES_AT_ONCE", 1)
    files, words = damage(images, tmp_path, kind)
    with pytest.raises(ValueError) as told:
        load(files, image_size=(4, 4))
    text = str(told.value)
    assert "--on_bad_row=skip" in text and "BytesIO" not in text and ":." not in text
    assert any(word in text for word in words)
    if at_once == 1000:
        assert all(word in text for word in words) and "1 other cannot be read" in text
    if kind != "files":
        assert files in text
    made = prepare(files, tmp_path / "out", image_size=(4, 4), on_bad_row="skip")
    whole = pixels_of(load(images["files"], image_size=(4, 4)))
    assert len(made.source) == 58 and pixels_of(made.source) < whole
    assert sum(made.skipped.values()) == 2
    told_first = [*made.skipped] if kind == "files" else [*made.first_skipped.values()]
    assert all(any(w in t for t in told_first) for w in (words if kind == "files" else words[:1]))
    if kind == "files":  # the folders of the images that are left
        assert "" not in made.first_skipped.values()
        assert np.diff(made.source.client_starts).tolist() == [29, 29]


def test_many_damaged_images_are_counted(images: dict[str, str], tmp_path: Path) -> None:
    for k in range(9):
        (tmp_path / f"{k}.jpg").write_bytes(b"no image" if k else b"")
    with pytest.raises(ValueError) as told:
        load(tmp_path / "*.jpg", image_size=(4, 4))
    text = str(told.value)
    assert "0.jpg is not a readable image: it is empty. Of the 9 images read together, 8" in text
    assert all((f"{k}.jpg" in text) == (k < 5) for k in range(9)) and "and 4 more." in text


def test_a_name_in_braces_that_is_no_placeholder_is_told(images: dict[str, str]) -> None:
    pattern = images["files"].replace("{client}", "{site}")
    with pytest.raises(
        FileNotFoundError, match=r"\{site\} is no placeholder.*Write \*, or \{client"
    ):
        load(pattern)
    with pytest.raises(FileNotFoundError, match=r"\{CLIENT\} is no placeholder"):
        load(pattern.replace("{site}", "{CLIENT}"))


def test_an_image_that_is_a_path_needs_its_bytes() -> None:
    values = [
        {"bytes": None, "path": "a.png"},
        {"bytes": encode(np.zeros((2, 2), np.uint8)), "path": ""},
    ]
    with pytest.raises(ValueError, match=r"row 0 \(counted from 0\).*it has no bytes.*embed"):
        load(pa.table({"image": values}), image_size=(2, 2))


@pytest.mark.parametrize("orientation", range(10))
def test_images_are_turned_upright_by_exif(orientation: int) -> None:
    """Pixels were as stored: images that a viewer shows upright were on their side."""
    pixels = np.random.default_rng(orientation).integers(0, 256, (4, 6, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encode(pixels, "PNG", exif=exif)
    source = load({"image": [content]}, image_size=(6, 6))
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    resized = expected.resize((6, 6), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(source[0]["image"], np.asarray(resized))
    told = "1 image with an EXIF orientation: turned upright" in source.notes
    assert told == (2 <= orientation <= 8)


def test_damaged_exif_leaves_the_pixels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8)
    content = encode(pixels, "PNG", exif=b"Exif\0\0II*\0\xff")
    (tmp_path / "a.png").write_bytes(content)
    np.testing.assert_array_equal(load(tmp_path / "a.png")[0]["image"], pixels)


Change = Callable[[np.random.Generator], bytes]


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda rng: encode(rng.integers(0, 256, (4, 4, 4), np.uint8)), "1 image with alpha"),
        (
            lambda rng: encode(
                rng.integers(0, 256, (4, 4), np.uint8),
                "GIF",
                save_all=True,
                append_images=[Image.fromarray(rng.integers(0, 256, (4, 4), np.uint8))],
            ),
            "1 image with several frames: the first is read",
        ),
        (lambda rng: encode(rng.integers(0, 256, (4, 4), np.uint8)), "1 gray image of 4: all"),
        (lambda rng: encode(rng.integers(0, 256, (4, 2, 3), np.uint8)), "1 image of another ratio"),
    ],
)
def test_what_is_changed_in_images_is_told(tmp_path: Path, change: Change, note: str) -> None:
    rng = np.random.default_rng(5)
    encoded = [encode(rng.integers(0, 256, (4, 4, 3), np.uint8)) for _ in range(3)] + [change(rng)]
    source = load({"image": encoded}, image_size=(4, 4))
    assert len(source.notes) == 1 and source.notes[0].startswith(note)
    parquet.write_table(pa.table({"image": encoded}), tmp_path / "a.parquet")
    made = prepare(tmp_path / "a.parquet", tmp_path / "out", image_size=(4, 4))
    assert made.source.notes == source.notes
    assert load({"image": encoded[:3]}, image_size=(4, 4)).notes == ()
