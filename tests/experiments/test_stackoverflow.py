"""Next-word prediction on archives in the format of Stack Overflow's."""

import dataclasses
import io
import tarfile
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federated_archives import serialize, write_archive

from fedpax.data import load
from fedpax.experiments import fedavg_words as words_module
from fedpax.experiments.fedavg_words import (
    FedAvgWords,
    WordRows,
    fedadam_stackoverflow,
    fedyogi_stackoverflow,
    stackoverflow_words,
)
from fedpax.models.lstm import LSTMConfig, lstm
from fedpax.run_files.metrics import read_metrics, select
from fedpax.sources.federated_archive import Archive
from fedpax.training.trainer import train
from fedpax.training.training_config import TrainingConfig

WORDS = [b"the", b"to", b"be", b"or", b"not", b"that", b"is", b"question"]
USERS = {"u1": 5, "u2": 1, "u3": 12, "u4": 7, "u5": 3}


def write_words(folder: Path, words: list[bytes]) -> Path:
    """Write the archive of word counts: a word and its count per line."""
    lines = b"".join(b"%s %d\n" % (word, 100 - k) for k, word in enumerate(words))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "stackoverflow.word_count.tar.bz2"
    with tarfile.open(path, "w:bz2") as archive:
        member = tarfile.TarInfo("stackoverflow.word_count")
        member.size = len(lines)
        archive.addfile(member, io.BytesIO(lines))
    return path


def sentence(rng: np.random.Generator) -> bytes:
    """Draw a sentence: the words in their order, from any one on, and a rare word at times."""
    length, first = int(rng.integers(1, 9)), int(rng.integers(len(WORDS)))
    words = [WORDS[(first + k) % len(WORDS)] for k in range(length)]
    return b" ".join(words + [b"zymurgy"] * int(rng.integers(0, 2)))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stackoverflow")
    manual = folder / "downloads" / "manual"
    rng = np.random.default_rng(0)
    fields = {"creation_date": b"2018-02-28 19:06:18.34 UTC", "tags": b"c|d", "title": b"edit :"}
    rows = [
        (split, user, serialize({**fields, "type": b"answer", "score": 3, "tokens": sentence(rng)}))
        for split in ("train", "heldout", "test")
        for user, count in USERS.items()
        for _ in range(count)
    ]
    write_archive(manual / "stackoverflow.sqlite.lzma", rows)
    write_words(manual, [*WORDS, b"rare"])
    return folder


@pytest.fixture
def small(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> FedAvgWords:
    """The experiment on the small archives, with a small network."""
    monkeypatch.setattr(words_module, "ARCHIVE", Archive(words_module.ARCHIVE.url))
    base = fedadam_stackoverflow()
    return dataclasses.replace(
        base,
        data_dir=str(data_dir),
        vocab_size=len(WORDS),
        seq_len=6,
        heldout_batch_size=8,
        heldout_examples=21,
        model=LSTMConfig(vocab_size=len(WORDS) + 4, embed_dim=8, hidden_dim=16),
        population=dataclasses.replace(base.population, max_examples=6),
        cohort=dataclasses.replace(base.cohort, size=4, batch_size=2),
        training=TrainingConfig(rounds=30, evaluate_every=30, checkpoint_every=0),
    )


def test_the_settings_are_those_of_the_paper() -> None:
    experiment = fedadam_stackoverflow()
    shapes = jax.eval_shape(lstm(experiment.model).init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 4_050_748
    assert (experiment.vocab_size, experiment.seq_len) == (10_000, 20)
    assert (experiment.cohort.size, experiment.cohort.batch_size) == (50, 16)
    assert fedyogi_stackoverflow().server.optimizer == "yogi"


def test_a_client_has_its_first_sentences_and_weighs_its_number_of_targets(
    small: FedAvgWords, data_dir: Path
) -> None:
    run = small.build()
    cohort = next(run.cohorts)
    chex.assert_trees_all_equal_shapes_and_dtypes(cohort, run.cohort_shapes)
    source = load("federated_stackoverflow", "train", data_dir=data_dir)
    rows = WordRows(WORDS, seq_len=6)
    users = sorted(USERS)
    for k, client in enumerate(cohort.client_ids):
        own = [x["text"] for x in source if x["client"].decode() == users[client]][:6]
        expected = rows({"text": np.array(own, object)})
        mask = cohort.batches["mask"][k]
        assert cohort.num_examples[k] == mask.sum() == expected["mask"].sum()
        assert cohort.num_steps[k] == -(-len(own) // 2)
        taken = cohort.batches["targets"][k][mask.any(-1)]
        assert sorted(taken.tolist()) == sorted(expected["targets"].tolist())
    assert len(small.read_population()[0]) == len(USERS)


@pytest.mark.slow
def test_accuracy_leaves_out_padding_unknown_words_and_ends(
    small: FedAvgWords, data_dir: Path
) -> None:
    run = small.build()
    params = jax.tree.map(lambda leaf: 20 * leaf, jax.jit(run.init)(jax.random.key(1)))
    source = load("federated_stackoverflow", "test", data_dir=data_dir)
    chosen = np.linspace(0, len(source) - 1, 21).astype(int)
    texts = np.array([source[int(k)]["text"] for k in chosen], object)
    batch = WordRows(WORDS, seq_len=6)({"text": texts})
    logits = jax.jit(lstm(small.model).apply)(params, batch["inputs"])
    known = (batch["targets"] >= 1) & (batch["targets"] <= len(WORDS))
    right = np.asarray(jnp.argmax(logits, -1)) == batch["targets"]
    log_shares = np.asarray(jax.nn.log_softmax(logits))
    losses = -np.take_along_axis(log_shares, batch["targets"][..., None], -1)[..., 0]
    result = run.evaluate(params)
    assert 0.05 < right[known].mean() != right[batch["mask"]].mean()
    assert result["accuracy"] == pytest.approx(right[known].mean(), rel=1e-5)
    assert result["loss"] == pytest.approx(losses[batch["mask"]].mean(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "yogi"])
def test_training_predicts_the_next_word(
    small: FedAvgWords, tmp_path: Path, optimizer: str
) -> None:
    server = dataclasses.replace(small.server, optimizer=optimizer)
    outcome = train(dataclasses.replace(small, server=server), tmp_path)
    assert outcome.evaluation["accuracy"] > 0.6  # 1 in 8 words by chance
    rounds = select(read_metrics(tmp_path), "training")
    assert rounds[-1]["loss"] < 0.8 * rounds[0]["loss"]
    assert rounds[-1]["accuracy"] > rounds[0]["accuracy"]


def test_without_a_network_the_errors_name_both_archives(
    small: FedAvgWords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # a port without a listener
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    experiment = dataclasses.replace(small, data_dir=str(tmp_path))
    manual = tmp_path / "downloads" / "manual"
    words = rf"cannot be reached\. Put https://.*/stackoverflow\.word_count\.tar\.bz2 into {manual}"
    with pytest.raises(ConnectionError, match=words):
        experiment.build()
    write_words(manual, WORDS)
    words = rf"cannot be reached\. Put https://.*/stackoverflow\.sqlite\.lzma into {manual}"
    with pytest.raises(ConnectionError, match=words):
        experiment.build()


def test_the_most_frequent_words_come_first(small: FedAvgWords, data_dir: Path) -> None:
    assert stackoverflow_words(3, data_dir=data_dir) == WORDS[:3]
    with pytest.raises(ValueError, match="has 9 words, expected 10: ask for fewer"):
        stackoverflow_words(10, data_dir=data_dir)


def test_a_damaged_archive_of_words_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_words(tmp_path / "downloads" / "manual", WORDS)
    with pytest.raises(OSError, match=r"has SHA-256 .*replace it with a new copy of https"):
        stackoverflow_words(3, data_dir=tmp_path)
    monkeypatch.setattr(words_module, "ARCHIVE", Archive(words_module.ARCHIVE.url))
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(OSError, match="replace it with a new copy of https"):
        stackoverflow_words(3, data_dir=tmp_path)


def test_a_network_with_another_vocabulary_raises() -> None:
    with pytest.raises(ValueError, match=r"model\.vocab_size=10004, expected vocab_size=500 and 4"):
        dataclasses.replace(fedadam_stackoverflow(), vocab_size=500)


def test_metrics_by_user_are_those_of_all_targets(small: FedAvgWords) -> None:
    run = small.build()
    params = jax.jit(run.init)(jax.random.key(1))
    with jax.set_mesh(run.mesh):
        together, result = run.evaluate(params), run.evaluate_clients(params)
    assert set(result.names) <= set(USERS) and len(result.names) == len(set(result.names))
    mean = np.average(result.metrics["loss"], weights=result.num_examples)
    assert mean == pytest.approx(together["loss"], rel=1e-5)
    assert np.all((result.metrics["accuracy"] >= 0) & (result.metrics["accuracy"] <= 1))
