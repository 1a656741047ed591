"""The input of experiments on text: mixtures, restarts on other meshes, and what is refused."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from numpy.typing import NDArray
from pyarrow import parquet

from fedpax.commands.parts.options import configure
from fedpax.experiments.language_model_experiment import TextDataConfig
from fedpax.experiments.parts.client_evaluation import parse_heldout_sets
from fedpax.experiments.pretrain import Pretraining, pretrain_text
from fedpax.experiments.text_experiment import parse_mixture
from fedpax.parallel.mesh import MeshConfig, default_devices


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two corpora of texts of one letter each, in files of one's own."""
    folder = tmp_path_factory.mktemp("corpora")
    for letter in "ab":
        for split in ("train", "heldout"):
            writer = ArrayRecordWriter(f"{folder}/{letter}-{split}.array_record", "group_size:1")
            for n in range(40):
                writer.write(letter.encode() * (100 + n))
            writer.close()
    return folder


def experiment(corpora: Path, **data: Any) -> Pretraining:
    base = pretrain_text()
    sizes = {"local_steps": 3, "batch_size": 8, "seq_len": 16, "heldout_tokens": 256}
    named = {"dataset": f"{corpora}/a-{{split}}.array_record"}
    changed = dataclasses.replace(base.data, **sizes | named | data)
    return dataclasses.replace(base, data=changed)


def in_order(cohort: Any) -> NDArray[np.int32]:
    """Return the rows of a round by number."""
    inputs = cohort.batches["inputs"]
    return inputs.transpose(1, 0, 2, 3).reshape(-1, inputs.shape[-1])


def test_a_mixture_trains_on_its_data_sets_in_their_shares(corpora: Path) -> None:
    names = [f"{corpora}/{letter}-{{split}}.array_record" for letter in "ab"]
    mixed = experiment(corpora, mixture=(f"{names[0]}=1", f"{names[1]}#text=0@0,3@1"))
    cohorts = mixed.build().cohorts
    shares = [(in_order(next(cohorts)) == ord("b")).any(axis=1).mean() for _ in range(2)]
    assert shares == [0.0, 0.75]


def test_a_mixture_needs_no_training_split_of_the_data_set_to_evaluate_on(
    corpora: Path, tmp_path: Path
) -> None:
    shutil.copy(corpora / "a-heldout.array_record", tmp_path / "only-heldout.array_record")
    mixture = (f"{corpora}/b-{{split}}.array_record=1",)
    evaluated = {"dataset": f"{tmp_path}/only-{{split}}.array_record"}
    cohorts = experiment(corpora, mixture=mixture, **evaluated).build().cohorts
    assert (in_order(next(cohorts)) == ord("b")).any()
    with pytest.raises(FileNotFoundError, match="only-train"):
        next(experiment(corpora, **evaluated).build().cohorts)


def test_a_run_continues_on_other_islands_and_devices_with_the_next_rows(corpora: Path) -> None:
    four = dataclasses.replace(experiment(corpora), islands=4, mesh=MeshConfig(islands=4, fsdp=2))
    four = dataclasses.replace(four, data=dataclasses.replace(four.data, batch_size=2))
    cohorts = four.build().cohorts
    next(cohorts)
    state, expected = json.loads(json.dumps(cohorts.get_state())), in_order(next(cohorts))
    with default_devices(jax.devices()[:2]):
        stream = dataclasses.replace(experiment(corpora), mesh=MeshConfig(fsdp=2)).build().cohorts
    stream.set_state(state)
    np.testing.assert_array_equal(in_order(next(stream)), expected)


def test_a_data_set_without_the_field_is_refused_before_training(corpora: Path) -> None:
    name = f"{corpora}/b-train.array_record"
    cohorts = experiment(corpora, mixture=(f"{name}#body=1",)).build().cohorts
    with pytest.raises(KeyError, match="no field 'body', but 'text': name one of these"):
        next(cohorts)
    cohorts = experiment(corpora, mixture=("stdlib_txt=1",)).build().cohorts
    with pytest.raises(ValueError, match=r"no data set 'stdlib_txt'.*Similar names: stdlib_text"):
        next(cohorts)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (["=0.5"], "has '=0.5', which names no data set. Write NAME=WEIGHT"),
        (["c4/en"], "has 'c4/en', which names no data set"),
        (["a=1", "a=2"], "names 'a' twice: add its weights up"),
        (["a=much"], "has 'a=much', whose weight 'much' is not a number. Write"),
        (["a=1,2@3"], "has 'a=1,2@3', whose weight '1,2@3' is not a number"),
        (["a=-1"], "weight of 'a' is -1.0 at round 0"),
        (["a=0", "b=0"], "weights of 'a', 'b' sum to 0 in round 0, expected a positive sum"),
        (["a=1@0,0@50"], "weights of 'a' sum to 0 in round 50"),
    ],
)
def test_malformed_mixtures_are_refused_on_the_command_line(
    capsys: pytest.CaptureFixture[str], items: list[str], words: str
) -> None:
    with pytest.raises(ValueError):
        parse_mixture(items)
    with pytest.raises(SystemExit) as stop:
        configure("pretrain_text", ["--data.mixture", *items])
    assert stop.value.code == 2
    assert words in " ".join(capsys.readouterr().err.replace("│", "").split())


def test_a_tokenizer_of_another_size_than_the_weights_is_refused() -> None:
    base = pretrain_text()
    trained = dataclasses.replace(base.model, vocab_size=32_000, weights="models/base")
    with pytest.raises(
        ValueError, match=r"has 256 tokens.*for 32,000.*the tokenizer of the weights"
    ):
        dataclasses.replace(base, model=trained).read_tokenizer()
    larger = dataclasses.replace(base.model, vocab_size=200)
    with pytest.raises(ValueError, match=r"model.vocab_size=200.*Set --model.vocab_size to at"):
        dataclasses.replace(base, model=larger).read_tokenizer()


@pytest.mark.parametrize("suffix", ["jsonl.zst", "parquet"])
def test_text_of_json_lines_and_parquet_gives_the_rows_of_the_same_texts(
    corpora: Path, tmp_path: Path, suffix: str
) -> None:
    for split in ("train", "heldout"):
        texts = [letter * (100 + n) for letter in "a" for n in range(40)]
        table = pa.table({"url": [f"u{n}" for n in range(40)], "text": texts})
        if suffix == "parquet":
            parquet.write_table(table, tmp_path / f"{split}.parquet")
        else:
            lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist())
            (tmp_path / f"{split}.jsonl.zst").write_bytes(
                pa.compress(lines.encode(), "zstd", asbytes=True)
            )
    name = f"{tmp_path}/{{split}}.{suffix}"
    run, expected = (experiment(corpora, **d).build() for d in ({"dataset": name}, {}))
    np.testing.assert_array_equal(in_order(next(run.cohorts)), in_order(next(expected.cohorts)))
    mixed = experiment(corpora, mixture=(f"{name}#text=1", f"{corpora}/b-train.array_record=1"))
    rows = in_order(next(mixed.build().cohorts))
    assert (rows == ord("a")).any() and (rows == ord("b")).any()


def test_a_share_of_the_texts_of_files_is_held_out(corpora: Path, tmp_path: Path) -> None:
    rows = [{"id": n, "text": f"text {n % 50}"} for n in range(100)]  # each text occurs twice
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = experiment(corpora, dataset=f"{tmp_path}/a.jsonl", heldout_fraction=0.2).data
    train, held = (
        {example["text"] for example in data.load(data.dataset, split)}
        for split in ("train", data.heldout_split)
    )
    assert len(held) > 2 and not train & held and len(train | held) == 50
    with pytest.raises(ValueError, match=r"data\.heldout_fraction=1"):
        experiment(corpora, heldout_fraction=1)


def test_tokens_alone_of_a_stated_type(corpora: Path, tmp_path: Path) -> None:
    tokens = {"train": b"ab" * 4000, "heldout": b"cd" * 40}
    for split, content in tokens.items():
        np.frombuffer(content, np.uint8).astype(np.uint16).tofile(tmp_path / f"{split}.bin")
    named = {"dataset": f"{tmp_path}/{{split}}.bin", "field": "tokens"}
    run = experiment(corpora, **named, types=("tokens=uint16",)).build()
    assert {*in_order(next(run.cohorts)).ravel().tolist()} == {*b"ab"}
    named_file = named | {"dataset": f"{tmp_path}/train.bin"}
    data = experiment(corpora, **named_file, types=("tokens=uint16",)).data
    (example,) = data.load(data.dataset, "train")
    np.testing.assert_array_equal(example["tokens"], [*tokens["train"]])
    with pytest.raises(ValueError, match=r"--data.types tokens=uint16"):
        next(experiment(corpora, **named).build().cohorts)
    with pytest.raises(ValueError, match=r"data.types has 'uint16', expected COLUMN=TYPE"):
        experiment(corpora, types=("uint16",))
    with pytest.raises(ValueError, match=r"types=.* is for files, but 'stdlib_text' is the name"):
        TextDataConfig(types=("tokens=uint16",)).load("stdlib_text", "train")
    with pytest.raises(ValueError, match=r"data.types names 'x' 2 times, expected once"):
        experiment(corpora, types=("x=uint16", "x=int32"))


@pytest.mark.parametrize("end", ["array_record", "jsonl.zst", "parquet"])
def test_a_path_may_have_the_signs_of_the_form(end: str) -> None:
    path = f"my data@2/date=1#x/{{split}}.{end}"
    for suffix, field in (("", None), ("#body", "body")):
        (item,) = parse_mixture([f"{path}{suffix}=0.5"])
        assert (item.name, item.field, item.weight) == (path, field, 0.5)
        (heldout,) = parse_heldout_sets([f"web={path}{suffix}@test"])
        assert heldout[1:] == (path, field, "test")


def test_a_missing_text_and_a_missing_column_are_told_at_the_start(tmp_path: Path) -> None:
    lines = [json.dumps({"id": n, "body": f"text {n}"}) for n in range(100)]
    for row in ('{"id": 1, "body": null}', '{"id": 1}'):
        lines[60] = row
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
        named = {"dataset": f"{tmp_path}/a.jsonl", "heldout_fraction": 0.2}
        with pytest.raises(ValueError, match=r"'body' of .*a.jsonl has no value.*example 60, "):
            next(experiment(tmp_path, **named, field="body").build().cohorts)
    with pytest.raises(ValueError, match=r"a.jsonl has no column 'text', but.*--data.field=body"):
        next(experiment(tmp_path, **named).build().cohorts)
    mixed = experiment(tmp_path, **named, mixture=(f"{tmp_path}/a.jsonl#words=1",))
    with pytest.raises(ValueError, match=r"no column 'words', but .*a.jsonl#body\."):
        next(mixed.build().cohorts)
    (tmp_path / "a.jsonl").write_text("\n".join(line for line in lines if "body" in line))
    next(experiment(tmp_path, **named, field="body").build().cohorts)
