"""Islands with other data than the islands of the run: refused, with both named."""

from pathlib import Path

import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from islands.site_problem import Sites
from islands.syncer_methods import parts
from site_processes import Processes, wait_until
from small_regression import regression

from fedpax.errors import ConfigurationError
from fedpax.islands.method_parts import MAX_DATA_SETS, build_parts, describe_other_data, shorten
from fedpax.islands.syncer.syncer_store import SyncerStore
from fedpax.parallel.mesh import SINGLE_DEVICE
from fedpax.transport.calls import RefusedError

# On one worker, where each method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("sites")

OSLO, ROME = {"corpus": "200 documents, sample 0a"}, {"corpus": "200 documents, sample 0b"}


def test_an_island_with_other_data_is_refused(tmp_path: Path) -> None:
    sites = Sites(parts(), store=SyncerStore(tmp_path))
    sites.add("a", data=OSLO)
    sites.add("b", data=OSLO)
    for _ in range(2):
        with pytest.raises(
            RefusedError,
            match=r"island 'c' has other data than island 'a': 'corpus' has 200 documents, sample "
            "0b, and at 'a' 200 documents, sample 0a. .* Give all islands the same files",
        ):
            sites.add("c", data=ROME)
        with pytest.raises(RefusedError, match="island 'a' has other data than island 'b'"):
            sites.add("a", process="a-2", data=ROME)
        sites.start_syncer()  # it is saved
    assert len(sites.syncer.islands()) == 2
    sites.add("c")  # a stream of one's own has no fingerprint


def test_the_only_island_may_correct_its_data() -> None:
    sites = Sites(parts())
    sites.add("a", data=ROME)
    sites.add("a", process="a-2", data=OSLO)
    sites.add("b", data=OSLO)
    sites.now += 1801
    assert sites.add("c", data=ROME).shard == 2  # a and b have kept no shard


def test_any_fingerprint_fits_a_message() -> None:
    sites = Sites(parts())
    names = {"\x1b[2J": "1", "x" * 500: "y" * 500, "": "\ud800"}
    sites.add("a", data=shorten(names))
    many = {str(k): "1" for k in range(MAX_DATA_SETS + 1)}
    assert len(shorten(many)) == 1 and shorten(many) != shorten(many | {"0": "2"})
    for wrong in (many, {"a": 1}, {"": "1"}, [], "text"):
        with pytest.raises(RefusedError, match="expected"):
            sites.add("b", data=wrong)


@pytest.mark.slow
def test_a_site_with_a_corpus_of_its_own_is_refused(tmp_path: Path) -> None:
    """With the same name, and as many documents."""
    processes = Processes(tmp_path)
    corpora = {"a": "one", "b": "another"}
    for name, words in corpora.items():
        (tmp_path / name).mkdir()
        for split in ("train", "heldout"):
            path = tmp_path / name / f"corpus-{split}.array_record"
            writer = ArrayRecordWriter(str(path), "group_size:1")
            for number in range(200):
                writer.write(f"{words} document {number}".encode())
            writer.close()
    flags = [
        "--exp=decoupled_diloco_text",
        "--islands=2",
        "--decoupled.quorum=1",
        "--training.rounds=100000",
    ]
    flags += ["--data.dataset=corpus-{split}.array_record", "--data.seq_len=8"]
    flags += ["--model.num_layers=4", "--model.embed_dim=16", "--model.mlp_dim=16"]
    try:
        processes.start("syncer", "syncer", *flags)
        processes.start("join", "a", *flags, cwd=tmp_path / "a")
        wait_until(lambda: "island a (shard 0)" in processes.log("syncer"), processes)
        assert processes.start("join", "b", *flags, cwd=tmp_path / "b").wait(240) == 2
        assert "island 'b' has other data than island 'a'" in processes.log("b")
    finally:
        processes.end()


def test_a_difference_is_described():
    oslo, rome = {"corpus": "200 documents"}, {"corpus": "400 documents"}
    text = describe_other_data("oslo", oslo, "rome", rome)
    assert text is not None
    assert text.startswith(
        "island 'oslo' has other data than island 'rome': 'corpus' has 200 documents, and at "
        "'rome' 400 documents. The islands of a run divide one corpus"
    )
    assert describe_other_data("oslo", oslo, "rome", oslo) is None
    assert describe_other_data("oslo", {}, "rome", rome) is None  # unknown


def test_clients_are_referred_to_their_base_class() -> None:
    with pytest.raises(ConfigurationError) as raised:
        build_parts(regression(), SINGLE_DEVICE, "./mine.py:exp")
    message = str(raised.value)
    assert message.startswith("--exp=./mine.py:exp runs as one program only")
    assert "For clients, inherit from fedpax.experiments.ClientExperiment" in message
