"""The way down in few bits: differences against what sites have, and their errors."""

from pathlib import Path

import numpy as np
import pytest

from fedpax.run_files.metrics import read_metrics
from fedpax.sites.downlink import CODECS, Downlink, Receiver, whole
from fedpax.sites.round_rules import RoundRules
from sites.federation import run
from sites.small_experiment import small


def walk(seed: int, rounds: int, size: int = 2000) -> list[dict[str, np.ndarray]]:
    """Make a model that moves, beside a small array and integers."""
    random, x = np.random.default_rng(seed), np.zeros((4, size // 4), np.float32)
    collected = []
    for _ in range(rounds):
        x = x + np.float32(random.normal(size=x.shape)) * 0.1
        collected.append({"shared 0": x, "shared 1": np.float32([1, 2]), "shared 2": np.int32([3])})
    return collected


@pytest.mark.parametrize("codec", CODECS)
def test_a_site_has_what_the_coordinator_thinks_that_it_has(codec: str) -> None:
    down, site, errors = Downlink(codec, "epoch"), Receiver(codec), []
    for number, arrays in enumerate(walk(0, 8)):
        packet = down.pack(arrays)
        header, sent = packet.for_site(site.have)
        got = site.unpack(header, sent)
        assert got is not None and got.keys() == arrays.keys()
        for name in ("shared 1", "shared 2"):
            np.testing.assert_array_equal(got[name], arrays[name])
        np.testing.assert_array_equal(got["shared 0"], packet.whole["shared 0"])
        errors.append(np.abs(got["shared 0"] - arrays["shared 0"]).mean())
        size = sum(x.nbytes for x in sent.values())
        assert size < 1100 * (1 + 7 * (number == 0)), "at most 4.4 bits an entry"
    assert errors[0] == 0 and 0 < max(errors) < 0.3
    assert errors[-1] < 2.5 * errors[1], "errors do not add up"


def test_a_site_that_missed_rounds_gets_the_whole_model() -> None:
    down, site = Downlink("e3m0", "epoch"), Receiver("e3m0")
    first, second, third = walk(1, 3)
    assert site.unpack(*down.pack(first).for_site(site.have)) is not None
    down.pack(second)
    header, sent = (packet := down.pack(third)).for_site(site.have)
    assert header["base"] is None
    got = site.unpack(header, sent)
    assert got is not None
    np.testing.assert_array_equal(got["shared 0"], packet.whole["shared 0"])
    again = site.unpack(*packet.for_site(site.have))  # its reply was lost
    assert again is not None
    np.testing.assert_array_equal(again["shared 0"], packet.whole["shared 0"])


def test_a_site_whose_sums_differ_asks_for_the_whole_model() -> None:
    down, site = Downlink("e3m0", "epoch"), Receiver("e3m0")
    first, second = walk(2, 2)
    site.unpack(*down.pack(first).for_site(site.have))
    header, sent = (packet := down.pack(second)).for_site(site.have)
    assert site.unpack({**header, "checksum": header["checksum"] ^ 1}, sent) is None
    assert site.have is None
    got = site.unpack(*packet.for_site(site.have))
    assert got is not None
    np.testing.assert_array_equal(got["shared 0"], packet.whole["shared 0"])


def test_without_a_codec_arrays_are_what_they_were() -> None:
    arrays = walk(3, 1)[0]
    assert Downlink("float32", "epoch").pack(arrays) == whole(arrays)
    assert whole(arrays).for_site("anything") == ({}, arrays)
    with pytest.raises(ValueError, match="down='zip', expected one of float32, e3m0"):
        RoundRules(down="zip").check()


@pytest.mark.slow
def test_a_federation_reaches_the_same_loss_with_an_eighth_of_the_bytes(tmp_path: Path) -> None:
    sizes = {"a": 2, "b": 2}
    losses, sent = {}, {}
    for down in ("float32", "e3m0"):
        sites = {
            name: small("fedavg", 12, clients=clients, data_seed=seed, features=600)
            for seed, (name, clients) in enumerate(sizes.items())
        }
        outcome = run(
            small("fedavg", 12, features=600),
            sites,
            tmp_path / down,
            rules=RoundRules(2, 60.0, down=down),
        )
        lines = read_metrics(outcome.folder / "coordinator")
        losses[down] = [x["loss"] for x in lines if x["kind"] == "training"][-1]
        sent[down] = [x["sent_bytes"] for x in lines if x["kind"] == "training"][-1]
    assert losses["e3m0"] == pytest.approx(losses["float32"], rel=5e-3)
    assert sent["e3m0"] < sent["float32"] / 7
