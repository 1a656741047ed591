import functools
import http.server
import string
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federated_archives import Fields, serialize, write_archive
from federated_rows import CLIENTS, SPLITS, builder_of, random_example, random_rows

from fedpax.data import load, partition_by_field, partition_natural, token_rounds
from fedpax.populations.client_arrays import ContiguousClients
from fedpax.sources.data_sets import FEDERATED
from fedpax.sources.federated_archive import Archive


def assert_same(actual: Fields, expected: Fields) -> None:
    assert set(actual) == set(expected)
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            assert actual[name].dtype == value.dtype
            np.testing.assert_array_equal(actual[name], value)
        else:
            assert actual[name] == value


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve the folder tmp_path / "served" over HTTP."""
    monkeypatch.setenv("no_proxy", "*")
    (tmp_path / "served").mkdir()
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "served")
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def published(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Serve an archive with given rows at the data set's URL, without a known SHA-256."""

    def publish(name: str, rows: list[tuple[str, str, bytes]]) -> Path:
        builder = builder_of(name)
        path = write_archive(tmp_path / "served" / builder.ARCHIVE.filename, rows)
        monkeypatch.setattr(builder, "ARCHIVE", Archive(f"{server}/{path.name}"))
        return path

    return publish


@pytest.fixture
def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # a port without a listener
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)


def prepared(data_dir: Path) -> list[str]:
    """List the files in a data set's folder, without locks and TFDS's own files."""
    return [
        str(path.relative_to(data_dir))
        for path in data_dir.rglob("*")
        if path.is_file()
        and "downloads" not in path.parts
        and path.suffix != ".lock"
        and path.name != ".config"
        and path.name != "metadata.json"
    ]


@pytest.mark.parametrize("name", SPLITS)
def test_examples_equal_the_archive_sorted_by_client(
    tmp_path: Path,
    published: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
    name: str,
) -> None:
    monkeypatch.setattr(builder_of(name), "EXAMPLES_PER_SHARD", 7)  # so 24 need four files
    rows, expected = random_rows(name, rng)
    published(name, rows)
    data_dir = tmp_path / "data"
    for split, examples in expected.items():
        source = load(name, split, data_dir=data_dir)
        assert source.name == f"{name}/1.0.0:{split}"
        assert len(source) == len(examples) == sum(CLIENTS.values())
        for result, example in zip(source, examples, strict=True):
            assert_same(result, example)
        parts = partition_by_field(source, "client", len(CLIENTS))
        held = {source[int(part[0])]["client"].decode(): len(part) for part in parts}
        assert held == CLIENTS
        assert all((np.diff(part) == 1).all() for part in parts)
        assert source.client_starts is not None
        clients = ContiguousClients(source.client_starts)
        for result, part in zip(clients, partition_natural(source, "client"), strict=True):
            np.testing.assert_array_equal(result, part)
        assert len(list(source.folder.glob(f"*-{split}.array_record*"))) == 4
    # The temporary database has been deleted.
    assert not list(data_dir.rglob("*.sqlite"))
    assert not list(data_dir.rglob("incomplete.*"))


@pytest.mark.parametrize("part", ["train[3:11]", "train[:20%]+test[5:]"])
def test_a_part_of_a_split_has_its_own_clients(
    tmp_path: Path, published: Callable[..., Path], rng: np.random.Generator, part: str
) -> None:
    rows, _ = random_rows("federated_shakespeare", rng)
    published("federated_shakespeare", rows)
    source = load("federated_shakespeare", part, data_dir=tmp_path)
    names = list(source.column("client"))
    starts = source.client_starts
    assert starts is not None
    assert starts[[0, -1]].tolist() == [0, len(source)]
    changes = [k for k in range(1, len(names)) if names[k] != names[k - 1]]
    ends_of_parts = {len(source)} if "+" not in part else {round(0.2 * 24), len(source)}
    assert set(starts[1:].tolist()) == {*changes} | ends_of_parts


def test_a_data_set_prepared_without_the_index_of_clients_has_none(
    tmp_path: Path, published: Callable[..., Path], rng: np.random.Generator
) -> None:
    rows, _ = random_rows("federated_shakespeare", rng)
    published("federated_shakespeare", rows)
    folder = load("federated_shakespeare", "train", data_dir=tmp_path).folder
    (folder / "client_starts.npz").unlink()
    assert load("federated_shakespeare", "train", data_dir=tmp_path).client_starts is None


def test_labels_have_class_names(
    tmp_path: Path, published: Callable[..., Path], rng: np.random.Generator
) -> None:
    import tensorflow_datasets as tfds

    rows, _ = random_rows("federated_emnist/all", rng)
    published("federated_emnist", rows)
    assert load("federated_emnist", "test", data_dir=tmp_path).name.startswith(
        "federated_emnist/all/"
    )
    names = tfds.builder("federated_emnist", data_dir=tmp_path).info.features["label"].names
    # As EMNIST's description says: 11 is "B", 37 is "b".
    assert names == [*string.digits, *string.ascii_uppercase, *string.ascii_lowercase]
    assert (names[9], names[11], names[37]) == ("9", "B", "b")
    digits = tfds.builder("federated_emnist/digits", data_dir=tmp_path)
    assert digits.info.features["label"].names == list(string.digits)


def test_text_packs_into_rounds(
    tmp_path: Path, published: Callable[..., Path], rng: np.random.Generator
) -> None:
    rows = [
        (split, client, serialize({"snippets": rng.integers(97, 123, 30, np.uint8).tobytes()}))
        for split in ("train", "test")
        for client in "abcd"
    ]
    published("federated_shakespeare", rows)
    source = load("federated_shakespeare", "train", data_dir=tmp_path)
    rounds = token_rounds(
        source,
        islands=2,
        local_steps=1,
        batch_size=2,
        seq_len=8,
        partition=partition_by_field(source, "client", 2),
    )
    assert next(iter(rounds)).batches["inputs"].shape == (2, 1, 2, 8)


def test_without_a_network_a_copied_archive_is_prepared(
    tmp_path: Path,
    without_network: None,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    rows, expected = random_rows("federated_stackoverflow", rng)
    with pytest.raises(ConnectionError) as raised:
        load("federated_stackoverflow", "heldout", data_dir=tmp_path)
    # Follow the message's instructions.
    _, _, rest = str(raised.value).partition(" Put ")
    url, _, rest = rest.partition(" into ")
    folder, _, _ = rest.partition(" and load again")
    write_archive(Path(folder) / url.rpartition("/")[2], rows)
    left = tmp_path / "federated_stackoverflow" / "incomplete.ABCDEF_1.0.0"
    left.mkdir(parents=True)
    (left / "archive.sqlite").write_bytes(b"of a preparation that was killed")
    source = load("federated_stackoverflow", "heldout", data_dir=tmp_path)
    assert not left.exists()
    for result, example in zip(source, expected["heldout"], strict=True):
        assert_same(result, example)


@pytest.mark.parametrize("name", FEDERATED)
def test_without_a_network_the_error_says_what_to_do(
    tmp_path: Path, without_network: None, name: str
) -> None:
    with pytest.raises(ConnectionError) as raised:
        load(name, "train", data_dir=tmp_path)
    message = str(raised.value)
    assert f"Data set '{name}' is not prepared in {tmp_path} and cannot be downloaded" in message
    assert "because storage.googleapis.com cannot be reached" in message
    assert "Put https://storage.googleapis.com/tff-datasets-public/" in message
    assert f"into {tmp_path}/downloads/manual and load again" in message
    assert f"load('{name}" in message
    assert "'train', data_dir='prepared')\"" in message
    assert f"copy its folder prepared/{name} to {tmp_path / name} on this machine" in message
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["served", "manual"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "html"])
def test_a_damaged_archive_raises_and_leaves_no_files(
    tmp_path: Path,
    published: Callable[..., Path],
    rng: np.random.Generator,
    damage: str,
    place: str,
) -> None:
    name = "federated_shakespeare"
    rows, expected = random_rows(name, rng)
    path = published(name, rows)
    whole = path.read_bytes()
    if place == "manual":
        path = tmp_path / "downloads" / "manual" / path.name
        path.parent.mkdir(parents=True)
    contents = bytearray(whole)
    if damage == "flip":  # lzma's older format has no checksum of the end
        contents[20] ^= 0xFF
    path.write_bytes({"truncate": whole[:-200], "html": b"<html></html>"}.get(damage, contents))
    with pytest.raises(RuntimeError, match=r"could not be prepared") as raised:
        load(name, "train", data_dir=tmp_path)
    message = str(raised.value)
    assert "damaged or incomplete" in message or "not hold a valid SQLite database" in message
    assert prepared(tmp_path / name) == []
    if place == "manual":
        assert f"{path}" in message
        assert "replace it with a new copy of http" in message
        assert path.exists()  # a file of the user's is not deleted
        path.write_bytes(whole)
    else:
        assert "it was deleted; load again" in message
        path.write_bytes(whole)
    source = load(name, "train", data_dir=tmp_path)  # as the message says
    for result, example in zip(source, expected["train"], strict=True):
        assert_same(result, example)


def test_an_archive_of_another_size_raises(
    tmp_path: Path,
    published: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    builder = builder_of("federated_cifar100")
    known = builder.ARCHIVE
    rows, _ = random_rows("federated_cifar100", rng)
    published("federated_cifar100", rows)
    monkeypatch.setattr(builder, "ARCHIVE", known._replace(url=builder.ARCHIVE.url))
    with pytest.raises(RuntimeError, match=r"has \d+ bytes, not 153019920: it was deleted"):
        load("federated_cifar100", "train", data_dir=tmp_path)
    assert prepared(tmp_path / "federated_cifar100") == []


def test_a_missing_feature_and_a_missing_split_are_named(
    tmp_path: Path, published: Callable[..., Path], rng: np.random.Generator
) -> None:
    written, _ = random_example("federated_cifar100", rng)
    del written["coarse_label"]
    row = serialize(written)
    published("federated_cifar100", [("train", "0", row), ("test", "0", row)])
    with pytest.raises(RuntimeError, match=r"client '0': no feature 'coarse_label', but 'image', "):
        load("federated_cifar100", "train", data_dir=tmp_path)
    rows, _ = random_rows("federated_shakespeare", rng)
    published("federated_emnist", rows)
    with pytest.raises(RuntimeError, match=r"has no split 'all_train', but 'test', 'train'"):
        load("federated_emnist", "train", data_dir=tmp_path)
    assert prepared(tmp_path / "federated_cifar100") == []
    assert prepared(tmp_path / "federated_emnist") == []


@pytest.mark.parametrize(
    ("name", "field", "value", "words"),
    [
        ("federated_emnist/all", "pixels", np.float32(1.5), "has pixels from .* to 1.5, not from"),
        ("federated_emnist/all", "pixels", np.float32("nan"), "has pixels from nan to nan"),
        ("federated_emnist/digits", "label", 10, "label 10 greater than"),
        ("federated_cifar100", "image", -1, "has pixels from -1 to .*, not from 0 to 255"),
        ("federated_cifar100", "coarse_label", 20, "label 20 greater than"),
    ],
)
def test_values_out_of_range_raise(
    tmp_path: Path,
    published: Callable[..., Path],
    rng: np.random.Generator,
    name: str,
    field: str,
    value: Any,
    words: str,
) -> None:
    written, _ = random_example(name, rng)
    if isinstance(written[field], np.ndarray):
        written[field][3] = value
    else:
        written[field] = value
    rows = [(split, "0", serialize(written)) for split in SPLITS[name].values()]
    published(name, rows)
    with pytest.raises(RuntimeError, match=words):
        load(name, "train", data_dir=tmp_path)
    assert prepared(tmp_path / name.partition("/")[0]) == []


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("federated_emist", "federated_emnist"),
        ("federated_stack_overflow", "federated_stackoverflow"),
        ("federated_cifar10", "federated_cifar100"),
        ("federated_shakespear", "federated_shakespeare"),
    ],
)
def test_a_misspelt_name_raises_with_a_suggestion(tmp_path: Path, name: str, similar: str) -> None:
    with pytest.raises(
        ValueError, match=rf"no data set '{name}'.*Similar names: [^.]*\b{similar}\b"
    ):
        load(name, "train", data_dir=tmp_path)


def test_an_unknown_configuration_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot open data set 'federated_emnist/letters'"):
        load("federated_emnist/letters", "train", data_dir=tmp_path)


@pytest.mark.slow
def test_tensorflow_is_not_imported(tmp_path: Path, rng: np.random.Generator) -> None:
    # Stack Overflow's archive has no published SHA-256, so any archive passes.
    rows, _ = random_rows("federated_stackoverflow", rng)
    write_archive(tmp_path / "downloads" / "manual" / "stackoverflow.sqlite.lzma", rows)
    script = """
import importlib.machinery, sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "tensorflow" else None
    def create_module(self, spec):
        raise SystemExit("TensorFlow was imported")
sys.meta_path.insert(0, Broken())
from fedpax.data import load
source = load("federated_stackoverflow", "train", data_dir=sys.argv[1])
print(sum(len(example["text"]) for example in source), "tensorflow" in sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    source = load("federated_stackoverflow", "train", data_dir=tmp_path)
    total = sum(len(example["text"]) for example in source)
    assert result.stdout.splitlines()[-1] == f"{total} False"


def test_urls_and_checksums_are_those_published() -> None:
    archives = {name: builder_of(name).ARCHIVE for name in FEDERATED}
    assert {archive.filename for archive in archives.values()} == {
        "cifar100.sqlite.lzma",
        "emnist_all.sqlite.lzma",
        "shakespeare.sqlite.lzma",
        "stackoverflow.sqlite.lzma",
    }
    for archive in archives.values():
        assert archive.url.startswith("https://storage.googleapis.com/tff-datasets-public/")
        assert archive.sha256 is None or len(bytes.fromhex(archive.sha256)) == 32
