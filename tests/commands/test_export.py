"""Tests of `fedpax export`."""

import dataclasses
import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file
from small_runs import NAMED, Command

from fedpax.checkpoints import load_params
from fedpax.checkpoints.exports import named_arrays, write_safetensors
from fedpax.commands.parts.options import configure
from fedpax.data import load_tokenizer, train_tokenizer
from fedpax.errors import MissingPackageError
from fedpax.experiments.parts.weights import write_huggingface
from fedpax.models import TransformerConfig, huggingface, transformer
from fedpax.models.huggingface.config import differing_fields
from fedpax.run_files.configuration import (
    read_configuration,
    read_configuration_json,
    without_paths,
)
from fedpax.settings.trace_settings import TraceConfig
from fedpax.training.folder_owners import JobDirLock


def assert_same_bits(tree: Any, other: Any) -> None:
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for leaf, two in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert (leaf.dtype, np.asarray(leaf).tobytes()) == (two.dtype, np.asarray(two).tobytes())


def test_the_exported_model_is_the_trained_one_bit_by_bit(
    command: Command, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "models" / "exported"
    status, output, errors = command("export", f"--job_log_dir={text}", f"--out={out}")
    assert status == 0 and "exporting round 2" in errors
    assert output.endswith(f"parameters in {out}: config.json, model.safetensors\n")
    config, params = huggingface.load(out)
    _, experiment = read_configuration(text)
    assert differing_fields(config, experiment.model) == []
    assert_same_bits(params, load_params(text))
    assert [path.name for path in out.parent.iterdir()] == ["exported"]  # no draft is left

    status, output, errors = command("export", f"--job_log_dir={text}", f"--out={out}")
    assert (status, output) == (2, "")
    assert "has files, expected a new or an empty folder. Give another --out" in errors


@pytest.mark.slow
def test_a_model_can_be_exported_while_it_trains_and_cast(
    command: Command, text: Path, tmp_path: Path
) -> None:
    with JobDirLock(text):
        status, _, _ = command(
            "export", f"--job_log_dir={text}", f"--out={tmp_path}/new", "--dtype=bfloat16"
        )
    _, params = huggingface.load(tmp_path / "new")
    assert status == 0
    assert_same_bits(params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), load_params(text)))


@pytest.mark.parametrize(
    "name", ["tokenizer.json", pytest.param("tokenizer.model", marks=pytest.mark.slow)]
)
def test_the_tokenizer_and_the_files_beside_it_are_exported(
    command: Command, text: Path, tmp_path: Path, name: str
) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "original" / name
    path.parent.mkdir()
    train_tokenizer(["to be or not"], vocab_size=257, path=path)
    if name == "tokenizer.model":
        path.write_bytes(b"\nmodel")  # SentencePiece's; it is only copied
    (path.parent / "tokenizer_config.json").write_text('{"eos_token": "<|end_of_text|>"}')
    status, output, _ = command(
        "export", f"--job_log_dir={text}", f"--out={tmp_path}/new", f"--data.tokenizer={path}"
    )
    assert status == 0
    listed = ", ".join(sorted([name, "tokenizer_config.json"]))
    assert f"config.json, model.safetensors, {listed}" in output
    assert (tmp_path / "new" / name).read_bytes() == path.read_bytes()


def test_an_exported_folder_names_the_token_that_ends_a_document(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    config = TransformerConfig(num_layers=1, vocab_size=300, scale_embeddings=False)
    params = transformer(config).init(jax.random.key(0))
    path = tmp_path / "original" / "tokenizer.json"
    path.parent.mkdir()
    train_tokenizer(["to be or not"], vocab_size=258, path=path)
    entries = json.loads(path.read_text())
    entries["added_tokens"].append({**entries["added_tokens"][0], "id": 299, "content": "<|e|>"})
    path.write_text(json.dumps(entries))
    (path.parent / "config.json").write_text('{"eos_token_id": 299}')
    for given in (None, "<|end_of_text|>"):
        expected = load_tokenizer(str(path), end_of_document=given)
        assert expected.end_of_document == (given or "<|e|>")
        out = tmp_path / f"{given}"
        write_huggingface(out, config, params, tokenizer=str(path), end_of_document=given)
        assert load_tokenizer(str(out / "tokenizer.json")).separator == expected.separator
        assert json.loads((out / "config.json").read_text())["eos_token_id"] == expected.separator
        named = json.loads((out / "tokenizer_config.json").read_text())["eos_token"]
        assert named == expected.end_of_document


def test_an_exported_model_of_bytes_names_their_separator(tmp_path: Path) -> None:
    config = TransformerConfig(num_layers=1, scale_embeddings=False)
    params = transformer(config).init(jax.random.key(0))
    write_huggingface(tmp_path, config, params, tokenizer="bytes", end_of_document=None)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 255
    assert load_tokenizer("bytes").separator == 255


def test_an_exported_tokenizer_begins_a_document_as_the_training_does(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    config = TransformerConfig(num_layers=1, vocab_size=300, scale_embeddings=False)
    params = transformer(config).init(jax.random.key(0))
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["to be or not"], vocab_size=258, path=path)
    out = tmp_path / "out"
    write_huggingface(out, config, params, tokenizer=str(path), end_of_document=None)
    trained = load_tokenizer(str(path))  # whose only special token separates documents
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == trained.separator
    named = json.loads((out / "tokenizer_config.json").read_text())["eos_token"]
    assert named == trained.end_of_document
    # The page's line: the token, then the prompt, as `fedpax generate` begins a document.
    exported = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    expected = [trained.separator, *trained.encode("to be").tolist()]
    assert exported.encode(named + "to be").ids == expected


def test_a_missing_package_is_named_without_a_traceback(
    command: Command, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)  # as if it were not installed
    status, output, errors = command("export", f"--job_log_dir={text}", f"--out={tmp_path}/new")
    assert (status, output) == (2, "") and "Traceback" not in errors
    assert "package safetensors, which is not installed: install fedpax[huggingface]" in errors
    assert not (tmp_path / "new").exists()


def test_any_model_can_be_exported_as_a_checkpoint_of_its_own(
    command: Command, regression: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is as good as none
    arguments = ("export", NAMED, f"--job_log_dir={regression}", f"--out={out}")
    status, output, errors = command(*arguments)
    assert (status, output) == (2, "")
    assert "a Regression, expected a transformer for --format=huggingface" in errors
    assert "--format=orbax writes the parameters of any model" in errors
    status, output, _ = command(*arguments, "--format=orbax", "--round=2")
    assert status == 0 and output.endswith("config.json, params\n")
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(out / "params")
    assert_same_bits(restored, load_params(regression, 2))
    assert read_configuration_json(out) == read_configuration_json(regression)


def test_any_model_can_be_exported_as_a_file_of_arrays(
    command: Command, regression: Path, tmp_path: Path
) -> None:
    expected = named_arrays(load_params(regression, 2))
    arguments = ("export", NAMED, f"--job_log_dir={regression}", "--round=2")
    status, output, errors = command(*arguments, f"--out={tmp_path}/model.npz")
    assert (status, output.endswith(f"parameters in {tmp_path}/model.npz\n")) == (0, True), errors
    assert_same_bits(dict(np.load(tmp_path / "model.npz")), expected)
    assert command(*arguments, f"--out={tmp_path}/model.safetensors")[0] == 0
    assert_same_bits(load_file(tmp_path / "model.safetensors"), expected)
    assert sorted(path.name for path in tmp_path.glob("*model*")) == [
        "model.npz", "model.safetensors",
    ]  # fmt: skip
    status, output, _ = command(*arguments, f"--out={tmp_path}/new", "--format=npz")
    assert status == 0 and output.endswith("config.json, params.npz\n")
    assert_same_bits(dict(np.load(tmp_path / "new" / "params.npz")), expected)

    for out, more, words in [
        ("model.npz", (), "model.npz is a file, expected a new file. Give another --out"),
        ("a.npz", ("--format=orbax",), "the name of a file, expected a folder for --format=orbax"),
        ("b.npz", ("--dtype=bfloat16",), "has dtype bfloat16, which a .npz file cannot hold"),
    ]:
        status, output, errors = command(*arguments, f"--out={tmp_path}/{out}", *more)
        assert (status, output) == (2, "") and words in errors
    assert not [*tmp_path.glob("*b.npz*")]


def test_a_model_without_a_hugging_face_form_is_refused_with_the_reason(
    command: Command, text: Path, tmp_path: Path
) -> None:
    arguments = (f"--job_log_dir={text}", f"--out={tmp_path}/new", "--model.logit_softcap=30")
    status, output, errors = command("export", *arguments)
    assert (status, output) == (2, "")
    assert "logit_softcap=30.0: no supported Hugging Face family" in errors
    assert "Only logit_softcap=None can be saved. Train with this value" in errors
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--job_log_dir is missing, expected a folder"),
        (("--job_log_dir=nowhere",), "--job_log_dir=nowhere does not exist"),
        (("--job_log_dir=.",), "--job_log_dir=. holds no run, expected a folder with config.json"),
        (("--job_log_dir=.", "--format=onnx"), "--format"),
    ],
)
def test_folders_that_are_refused(command: Command, arguments: Any, words: str) -> None:
    status, output, errors = command("export", *arguments)
    assert (status, output) == (2, "") and words in errors


def test_a_missing_out_and_a_file_in_its_place_are_refused(
    command: Command, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "lost").symlink_to("missing")
    for arguments, words in (
        ((), "--out is missing, expected a new folder. Give for example --out=exported"),
        ((f"--out={tmp_path}/file",), "is a file, expected a new or an empty folder"),
        ((f"--out={tmp_path}/link",), "is a link, expected a new or an empty folder"),
        ((f"--out={tmp_path}/lost",), "is a link, expected a new or an empty folder"),
    ):
        status, _, errors = command("export", f"--job_log_dir={text}", *arguments)
        assert status == 2 and words in errors


def test_a_damaged_run_is_refused_and_leaves_nothing(
    command: Command, text: Path, tmp_path: Path
) -> None:
    out = f"--out={tmp_path}/new"
    largest = max((text / "checkpoints" / "2").rglob("d/*"), key=os.path.getsize)
    largest.write_bytes(bytes(byte ^ 1 for byte in largest.read_bytes()))
    status, output, errors = command("export", f"--job_log_dir={text}", out)
    assert (status, output) == (2, "") and "checkpoint of round 2 is damaged" in errors
    shutil.rmtree(text / "checkpoints")
    status, _, errors = command("export", f"--job_log_dir={text}", out)
    assert status == 2 and "has no complete checkpoint" in errors
    (text / "config.json").write_text('{"version": 1, "exp"')
    status, _, errors = command("export", f"--job_log_dir={text}", out)
    assert status == 2 and "config.json cannot be read" in errors
    assert not list(tmp_path.glob("*new*"))


def test_a_file_of_tensors_names_its_own_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(MissingPackageError, match="A safetensors file needs the package"):
        write_safetensors(tmp_path / "model.safetensors", {"w": np.ones(2, np.float32)})


def test_a_folder_that_cannot_be_written_is_told_without_a_traceback(
    command: Command, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip("safetensors")
    full = library.SafetensorError("Error while serializing: I/O error: No space left on device")
    export = ("export", f"--job_log_dir={text}", f"--out={tmp_path}/new")

    def fail(*arguments: Any, **options: Any) -> None:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.numpy.save_file", fail)
        status, output, errors = command(*export)
    assert (status, output) == (1, "")
    assert f"{tmp_path}/new cannot be written: No space left on device. Make room" in errors
    make = Path.mkdir

    def read_only(path: Path, *arguments: Any, **options: Any) -> None:
        if path.name == ".new.draft":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        make(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", read_only)
    status, output, errors = command(*export)
    assert (status, output) == (2, "")
    assert f"--out={tmp_path}/new cannot be made (Read-only file system), expected" in errors
    assert not list(tmp_path.glob("*new*"))


def test_the_configuration_of_an_export_has_no_path_of_data(tmp_path: Path) -> None:
    places = [f"--data_dir={tmp_path}/tfds", f"--training.begin_from={tmp_path}/other"]
    digits = configure("fedavg_digits", places, None)
    text = configure(
        "diloco_text", [f"--data.mixture={tmp_path}/a.jsonl#text=1", "--data.dataset=./b.txt"], None
    )
    flags = [
        f"--data.tokenizer={tmp_path}/gemma/tokenizer.json",
        "--data.chat_template=c/chat.jinja",
    ]
    adapted = without_paths(configure("pretrain_text", flags, None))
    assert adapted.data.tokenizer == "tokenizer.json" and adapted.data.chat_template == "chat.jinja"
    model = dataclasses.replace(text.model, weights=f"{tmp_path}/gemma")
    assert without_paths(dataclasses.replace(text, model=model)).model.weights == "gemma"
    trace = TraceConfig(file=str(tmp_path / "arrivals.csv"))
    assert without_paths(trace).file == "arrivals.csv"
    named = configure("diloco_text", ["--data.mixture=stdlib_text=1", "--data.seed=3"], None)
    for experiment in (digits, text):
        assert "/" in repr(experiment) and str(tmp_path) not in repr(without_paths(experiment))
    assert "b.txt" not in repr(without_paths(text))
    digits.write_model(tmp_path / "model", {"w": jnp.ones(2)}, "fedavg_digits")  # of export_every
    assert str(tmp_path) not in (tmp_path / "model" / "config.json").read_text()
    assert without_paths(named) == named
