import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpax.data import Source, load, partition_by_field, partition_natural
from fedpax.sources.data_sets import _builder

VERSION = f"{sys.implementation.name}-{sys.version.split()[0]}"

# Prepare and read with a fake TensorFlow that fails when it is imported.
SCRIPT = """
import hashlib, importlib.machinery, random, sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "tensorflow" else None
    def create_module(self, spec):
        raise SystemExit("TensorFlow was imported")
sys.meta_path.insert(0, Broken())
random.seed(0)  # TFDS names its temporary folders with this generator
from fedpax.data import load
source = load("stdlib_text", "train", data_dir=sys.argv[1])
value = hashlib.sha256()
for example in source:
    value.update(example["text"])
assert "tensorflow" not in sys.modules
print(value.hexdigest(), len(source))
"""


def start(data_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(data_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def copy(data_dir: Path, digits: Callable[[str], Source], tmp_path: Path) -> Path:
    """A copy of the prepared digits, in its own data_dir."""
    shutil.copytree(digits("train").folder, tmp_path / "digits" / "1.0.0")
    return tmp_path / "digits" / "1.0.0"


def test_stdlib_text_is_the_standard_library(text: Callable[[str], Source]) -> None:
    library = Path(sysconfig.get_path("stdlib"))
    paths: dict[str, set[str]] = {}
    for split in ("train", "heldout"):
        source = text(split)
        assert source.name == f"stdlib_text/{VERSION}/1.0.0:{split}"
        for example in source:
            path = example["path"].decode()
            assert example["text"] == (library / path).read_bytes()
            assert example["client"].decode() == path.split("/")[0].removesuffix(".py")
            assert example["text"].decode()
            assert not {"test", "tests", "idle_test", "site-packages"} & set(path.split("/"))
            paths.setdefault(split, set()).add(path)
        assert len(paths[split]) == len(source)
    assert not paths["train"] & paths["heldout"]
    together = paths["train"] | paths["heldout"]
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= together
    # At the top level only empty files and files excluded by name are missing.
    modules = {path.name for path in library.glob("*.py") if path.stat().st_size}
    missing = modules - together
    assert all(
        name.startswith(("_sysconfigdata_", "sitecustomize", "usercustomize")) for name in missing
    )
    assert 0.05 < len(paths["heldout"]) / len(together) < 0.15


def test_the_split_of_a_file_is_fixed(text: Callable[[str], Source]) -> None:
    from fedpax.sources.embedded import is_heldout

    # All machines and versions of Python must agree on the held-out files.
    heldout = [path for path in ("argparse.py", "json/decoder.py", "ast.py", "sysconfig.py")
               if is_heldout(path)]  # fmt: skip
    assert heldout == ["sysconfig.py"]
    assert b"sysconfig.py" in {example["path"] for example in text("heldout")}


def test_digits_equal_scikit_learn(digits: Callable[[str], Source]) -> None:
    from sklearn import datasets

    original = datasets.load_digits()
    expected = {
        (image.astype(np.uint8).tobytes(), int(label))
        for image, label in zip(original.images, original.target, strict=True)
    }
    collected = []
    for split in ("train", "test"):
        for example in digits(split):
            assert example["image"].shape == (8, 8, 1)
            assert example["image"].dtype == np.uint8
            pixels = np.rint(example["image"] * (16 / 255)).astype(np.uint8)
            collected.append((pixels.tobytes(), int(example["label"])))
    assert len(collected) == 1797
    assert set(collected) == expected
    assert 0.15 < len(digits("test")) / 1797 < 0.25


def test_a_source_is_a_sequence(digits: Callable[[str], Source]) -> None:
    source = digits("test")
    assert len(list(source)) == len(source)
    assert source[np.int64(2)]["label"] == source[2]["label"]
    assert np.array_equal(source[-1]["image"], source[len(source) - 1]["image"])
    with pytest.raises(
        IndexError, match=f"Index {len(source)} is out of range: .* has {len(source)} ex"
    ):
        source[len(source)]
    assert "digits/1.0.0:test" in repr(source)


def test_a_part_of_a_split_can_be_loaded(data_dir: Path, digits: Callable[[str], Source]) -> None:
    part = load("digits", "train[10:15]", data_dir=data_dir)
    whole = digits("train")
    assert load("digits:1.0.0", "train[10:15]", data_dir=data_dir).folder == part.folder
    assert [int(x["label"]) for x in part] == [int(whole[n]["label"]) for n in range(10, 15)]


def test_tensorflow_is_not_imported(tmp_path: Path, text: Callable[[str], Source]) -> None:
    process = start(tmp_path)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert out.split()[1] == str(len(text("train")))
    assert errors == ""  # preparing was silent


def test_importing_is_cheap_and_silent() -> None:
    script = """
        import sys
        import numpy, jax
        before = set(sys.modules)
        import time
        start = time.process_time()
        import fedpax.data
        seconds = time.process_time() - start
        heavy = {"grain", "tensorflow_datasets", "tensorflow", "sklearn", "absl.flags"}
        assert not heavy & (set(sys.modules) - before), heavy & set(sys.modules)
        assert seconds < 0.5, seconds
        fedpax.data.token_rounds([{"text": "a"}], islands=1, local_steps=1, batch_size=1, seq_len=1)
        from absl import flags
        assert not flags.FLAGS.is_parsed()
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), "--no_such_flag"],
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.slow
def test_two_processes_can_prepare_the_same_data_set_at_once(tmp_path: Path) -> None:
    processes = [start(tmp_path) for _ in range(2)]
    results = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert len({out for out, _ in results}) == 1
    folders = {path.name for path in (tmp_path / "stdlib_text" / VERSION).iterdir()}
    assert folders == {"1.0.0", ".1.0.0.lock"}


def incomplete(data_dir: Path) -> Iterator[Path]:
    return data_dir.glob("stdlib_text/*/incomplete.*")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="POSIX only")
@pytest.mark.parametrize("delay", [pytest.param(0.0, marks=pytest.mark.slow), 0.05])
def test_the_remains_of_a_killed_preparation_are_never_read(
    tmp_path: Path, text: Callable[[str], Source], delay: float
) -> None:
    process = start(tmp_path)
    deadline = time.monotonic() + 120
    while not any(incomplete(tmp_path)) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL  # it was not done yet
    source = load("stdlib_text", "train", data_dir=tmp_path)
    whole = text("train")
    assert len(source) == len(whole)
    assert all(source[n]["text"] == whole[n]["text"] for n in range(len(whole)))
    assert not any(incomplete(tmp_path))


def test_the_environment_variable_sets_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "here"))
    assert load("digits", "test[:9]").folder == tmp_path / "here" / "digits" / "1.0.0"


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove"])
def test_a_damaged_file_raises(copy: Path, damage: str, rng: np.random.Generator) -> None:
    (file,) = copy.glob("*-train.array_record*")
    contents = bytearray(file.read_bytes())
    if damage == "flip":
        for place in rng.integers(0, len(contents), 500):
            contents[place] ^= 0xFF
    file.unlink()
    if damage != "remove":
        file.write_bytes(contents[: {"truncate": 70_000, "empty": 0}.get(damage)])
    for read in (list, lambda source: list(source.column("label"))):
        with pytest.raises(OSError, match=r"are damaged: delete that folder and load again"):
            read(load("digits", "train", data_dir=copy.parent.parent))


def test_a_column_equals_the_field_of_the_examples(
    text: Callable[[str], Source], digits: Callable[[str], Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = [example["label"] for example in digits("test")]
    clients, texts = zip(*((x["client"], x["text"]) for x in text("heldout")), strict=True)
    assert list(text("heldout").column("text")) == list(texts)
    np.testing.assert_array_equal(
        list(digits("test").column("image")), [example["image"] for example in digits("test")]
    )
    with pytest.raises(KeyError, match="missing"):
        next(digits("test").column("missing"))

    read: list[int] = []
    whole = Source.__getitem__
    monkeypatch.setattr(Source, "__getitem__", lambda self, k: read.append(k) or whole(self, k))
    for source, field, values in (
        (digits("test"), "label", labels),
        (text("heldout"), "client", list(clients)),
    ):
        read.clear()
        assert list(source.column(field)) == values
        assert read == [values.index(value) for value in dict.fromkeys(values)]  # each once


def test_partitions_by_column_equal_those_by_example(digits: Callable[[str], Source]) -> None:
    source = digits("test")
    parts = partition_natural(source, "label")
    wanted = partition_natural(list(source), "label")
    assert parts.names == wanted.names
    assert [part.tolist() for part in parts] == [part.tolist() for part in wanted]
    assert [part.tolist() for part in partition_by_field(source, "label", 3)] == [
        part.tolist() for part in partition_by_field(list(source), "label", 3)
    ]
    with pytest.raises(KeyError, match="no field 'missing', but 'image', 'label'"):
        partition_natural(source, "missing")


@pytest.mark.parametrize("contents", ["", "{", '{"name": "digits"}', None])
def test_damaged_metadata_raise(copy: Path, contents: str | None) -> None:
    information = copy / "dataset_info.json"
    information.unlink()
    if contents is not None:
        information.write_text(contents)
    with pytest.raises(ValueError, match=r"delete "):
        load("digits", "train", data_dir=copy.parent.parent)


def test_a_data_set_prepared_on_another_machine_is_found_by_name(
    copy: Path, digits: Callable[[str], Source]
) -> None:
    # As if TFDS's own "handwriting" had been prepared on a machine with a network.
    folder = copy.parent.parent / "handwriting" / "2.0.0"
    shutil.copytree(copy, folder)
    for path in folder.glob("digits-*"):
        path.rename(folder / path.name.replace("digits-", "handwriting-"))
    information = json.loads((folder / "dataset_info.json").read_text())
    information.update(name="handwriting", version="2.0.0", moduleName="elsewhere")
    (folder / "dataset_info.json").write_text(json.dumps(information))
    source = load("handwriting", "test", data_dir=copy.parent.parent)
    assert source.name == "handwriting/2.0.0:test"
    assert [int(x["label"]) for x in source] == [int(x["label"]) for x in digits("test")]


def test_a_format_that_needs_tensorflow_raises(copy: Path) -> None:
    information = copy / "dataset_info.json"
    values = json.loads(information.read_text())
    values["fileFormat"] = "tfrecord"
    information.write_text(json.dumps(values))
    with pytest.raises(
        OSError, match=r"prepared as tfrecord, which only TensorFlow can read: pass"
    ):
        load("digits", "train", data_dir=copy.parent.parent)


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("stdlib_txt", "stdlib_text"),
        ("digit", "digits"),
        ("mnst", "mnist"),
        ("wikipedai", "wikipedia"),
    ],
)
def test_an_unknown_name_raises_with_a_suggestion(tmp_path: Path, name: str, similar: str) -> None:
    with pytest.raises(
        ValueError, match=rf"no data set '{name}'.*Similar names: [^.]*\b{similar}\b"
    ):
        load(name, "train", data_dir=tmp_path)


def test_a_name_without_similar_ones_raises_with_the_embedded_names(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no data set 'qqqqq'.*Embedded data sets: stdlib_text, dig"
    ):
        load("qqqqq", "train", data_dir=tmp_path)


@pytest.mark.parametrize("name", ["digits/large", "digits:9.9.9", "mnist/large"])
def test_an_unknown_configuration_or_version_raises(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"cannot open data set '{name}'.*(not found|cannot be)"):
        load(name, "train", data_dir=tmp_path)


@pytest.mark.parametrize("name", ["digits", "stdlib_text", "federated_shakespeare"])
def test_no_temporary_folder_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert not _builder(name, tmp_path / "prepared").data_path.exists()
    assert list(tmp_path.iterdir()) == []


def test_unknown_and_empty_splits_raise(data_dir: Path, digits: Callable[[str], Source]) -> None:
    digits("train")
    with pytest.raises(ValueError, match=r"Split 'validation' of digits.*splits are train, test"):
        load("digits", "validation", data_dir=data_dir)
    with pytest.raises(ValueError, match=r"Split 'train\[:0\]' of digits/1.0.0 has no examples"):
        load("digits", "train[:0]", data_dir=data_dir)


@pytest.mark.parametrize("name", ["mnist", "c4", "imdb_reviews", "tiny_shakespeare"])
def test_without_a_network_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # a port without a listener
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    before = time.monotonic()
    with pytest.raises(ConnectionError) as raised:
        load(name, "test", data_dir=tmp_path)
    assert time.monotonic() - before < 15
    message = str(raised.value)
    assert f"Data set '{name}' is not prepared in {tmp_path} and cannot be downloaded" in message
    assert f"load('{name}" in message
    assert "'test', data_dir='prepared')\"" in message
    assert f"copy its folder prepared/{name} to {tmp_path / name} on this machine" in message
    assert not any(tmp_path.iterdir())


def test_a_builder_that_the_user_defines_can_be_loaded(tmp_path: Path) -> None:
    import tensorflow_datasets as tfds

    class OwnNumbers(tfds.core.GeneratorBasedBuilder):
        """Five squares; fails at the fourth while `fails` is set."""

        VERSION = tfds.core.Version("1.0.0")
        fails = True

        def _info(self) -> Any:
            features = {"number": tfds.features.Scalar(np.int32)}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager: Any) -> Any:
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Any:
            for k in range(5):
                if self.fails and k == 3:
                    raise OSError("the connection was lost.")
                yield k, {"number": np.int32(k * k)}

    with pytest.raises(RuntimeError, match=r"(?s)could not be prepared.*connection was lost.*copy"):
        load("own_numbers", "train", data_dir=tmp_path)
    assert not (tmp_path / "own_numbers" / "1.0.0").exists()
    OwnNumbers.fails = False
    source = load("own_numbers", "train", data_dir=tmp_path)
    assert sorted(int(example["number"]) for example in source) == [0, 1, 4, 9, 16]


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="POSIX only")
def test_a_folder_that_cannot_be_written_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RuntimeError, match="pass another data_dir"):
        load("digits", "train", data_dir=tmp_path / "file")
