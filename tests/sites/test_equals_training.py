"""Rounds over sites equal `fedpax train` on the same files."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from fedpax.experiments.fedavg_image_files import FedAvgImageFiles, fedavg_images
from fedpax.experiments.fedavg_table import FedAvgTable
from fedpax.main import main
from fedpax.run_files.configuration import write_configuration
from fedpax.settings.client_methods import method
from fedpax.settings.cohort_settings import CohortConfig
from fedpax.settings.table_data import TableConfig
from fedpax.sites.site_experiment import ClientRange
from fedpax.training.progress import Progress
from fedpax.training.training_config import TrainingConfig
from sites.federation import run, write_hospitals

SIZES = {"a": (40, 25), "b": (33,), "c": (21, 50)}
TWO_SITES = {"a": (40, 25), "b": (33, 21)}


def experiment(
    *files: str, rounds: int = 2, columns=(), batch_size: int = 8, **fields
) -> FedAvgTable:
    return FedAvgTable(
        data=TableConfig(files=files, label="outcome", columns=columns),
        cohort=CohortConfig(size=10, batch_size=batch_size),
        client_learning_rate=0.1,
        training=TrainingConfig(rounds=rounds, evaluate_every=rounds, checkpoint_every=0),
        **fields,
    )


def train_together(whole: FedAvgTable, rounds: int) -> list[np.ndarray]:
    built = whole.build()
    state = jax.jit(built.algorithm.init)(built.init(jax.random.key(0)))
    step = jax.jit(built.algorithm.round)
    for _ in range(rounds):
        state, _ = step(state, next(built.cohorts))
    return jax.device_get(jax.tree.leaves(state.params))


@pytest.mark.parametrize("name", ["fedavg", pytest.param("scaffold", marks=pytest.mark.slow)])
def test_equals_training_on_all_files(tmp_path: Path, name: str) -> None:
    write_hospitals(tmp_path / "data", SIZES)
    fields = {"method": method(name)}
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", **fields) for s in SIZES}
    outcome = run(experiment(**fields), sites, tmp_path / "runs")
    whole = experiment(f"{tmp_path}/data/*/*.csv", **fields)
    for leaf, other in zip(outcome.params, train_together(whole, 2), strict=True):
        assert np.abs(other).max() > 0.01
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)


# Together Crédit Åland is the first client; over sites it comes after those of site a.
FOREIGN = {"a": ("Łódź", "Zürcher"), "b": ("Crédit Åland", "Банк")}
# Together oslo2_a is the first client: "2" comes before "_". Over sites, oslo comes before oslo2.
PREFIXES = {"oslo": ("oslo_a", "oslo_b"), "oslo2": ("oslo2_a", "oslo2_b")}
NUMBERED = {"oslo1": ("oslo1_a", "oslo1_b"), "oslo2": ("oslo2_a", "oslo2_b")}


@pytest.mark.parametrize(
    ("names", "batch_size", "is_equal"),
    [
        (FOREIGN, 8, False),
        (FOREIGN, 64, True),
        (PREFIXES, 8, False),
        pytest.param(PREFIXES, 64, True, marks=pytest.mark.slow),
        pytest.param(NUMBERED, 8, True, marks=pytest.mark.slow),
    ],
)
def test_the_order_of_names_decides_the_order_of_examples(
    tmp_path: Path, names: dict[str, tuple[str, str]], batch_size: int, is_equal: bool
) -> None:
    sizes = dict(zip(names, TWO_SITES.values(), strict=True))
    write_hospitals(tmp_path / "data", sizes)
    for site, clients in names.items():
        paths = sorted((tmp_path / "data" / site).iterdir())
        for path, client in zip(paths, clients, strict=True):
            path.rename(path.with_stem(client))
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", batch_size=batch_size) for s in names}
    outcome = run(experiment(batch_size=batch_size), sites, tmp_path / "runs")
    whole = experiment(f"{tmp_path}/data/*/*.csv", batch_size=batch_size)
    pairs = zip(outcome.params, train_together(whole, 2), strict=True)
    difference = max(np.abs(leaf - other).max() for leaf, other in pairs)
    assert difference < 1e-6 if is_equal else difference > 1e-3


def test_a_site_with_one_file_for_each_split(tmp_path: Path) -> None:
    write_hospitals(tmp_path / "data", {"a": (40, 12)})
    for name, split in (("h1", "train"), ("h2", "test")):
        (tmp_path / "data" / "a" / f"{name}.csv").rename(tmp_path / f"{split}.csv")
    site = experiment(f"{tmp_path}/{{split}}.csv")
    assert site.describe_site()["clients"] == 1
    assert (site.opened.training.sum(), site.opened.heldout.sum()) == (40, 12)


@pytest.mark.parametrize(("size", "expected"), [(10, 5), (4, 4)])
def test_a_round_at_a_site_has_the_clients_of_all_sites(
    tmp_path: Path, size: int, expected: int
) -> None:
    """The site has two of five clients."""
    write_hospitals(tmp_path, {"a": (40, 25)})
    whole = experiment(f"{tmp_path}/a/*.csv")
    cohort = dataclasses.replace(whole.cohort, size=size)
    site = dataclasses.replace(whole, cohort=cohort).at_site(ClientRange(1, 2, 5))
    assert site.cohort_size == expected and len(site.names) == 2
    assert site.draw(0, [1]).client_ids.shape == (expected,)


def test_the_classes_of_all_sites_are_told(tmp_path: Path, notes: list[str]) -> None:
    write_hospitals(tmp_path / "data", {"a": (40, 25), "b": (33,)})
    (path,) = (tmp_path / "data" / "b").iterdir()
    path.write_text(path.read_text().replace(",ill\n", ",stray\n", 3))
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", rounds=1) for s in "ab"}
    run(experiment(rounds=1), sites, tmp_path / "runs")
    told = [line for line in notes if "label 'outcome': classification, ill, stray, well" in line]
    assert len(told) == 1 + len(sites)
    assert [line for line in notes if " alone" in line] == ["class 'stray' is at site b alone"]


def test_a_site_tells_which_missing_values_it_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hospitals(tmp_path / "data", {"a": (40, 12), "b": (33, 9)})
    for site in "ab":
        folder = tmp_path / "data" / site
        for path, split in zip(sorted(folder.iterdir()), ("train", "test"), strict=True):
            path.rename(folder / f"{split}.csv")
    path = tmp_path / "data" / "a" / "test.csv"
    head, *rows = [line.split(",") for line in path.read_text().splitlines()]
    place = head.index("age")
    blank = [[*row[:place], "", *row[place + 1 :]] for row in rows]
    path.write_text("".join(",".join(row) + "\n" for row in [head, *blank]))
    noted = list[str]()
    monkeypatch.setattr(Progress, "note", lambda self, text: noted.append(text))
    sites = {s: experiment(f"{tmp_path}/data/{s}/{{split}}.csv", rounds=1) for s in "ab"}
    run(experiment(rounds=1), sites, tmp_path / "runs")
    filled = [line for line in noted if line.startswith("missing values, of which training has")]
    assert len(filled) == 1 and "12 of 'age' become the mean" in filled[0]


def test_the_range_of_a_label_holds_at_sites(tmp_path: Path, notes: list[str]) -> None:
    write_hospitals(tmp_path / "data", {"a": (40, 25), "b": (33,)})
    path = next((tmp_path / "data" / "b").iterdir())
    head, *rows = [line.split(",") for line in path.read_text().splitlines()]
    place = head.index("age")
    for row in rows:  # in months
        row[place] = str(12 * float(row[place] or 50))
    path.write_text("".join(",".join(row) + "\n" for row in [head, *rows]))

    def make(*files: str) -> FedAvgTable:
        base = experiment(*files, columns=("age=number(0..120)",))
        return dataclasses.replace(
            base, data=dataclasses.replace(base.data, label="age", missing_label="skip")
        )

    outcome = run(make(), {s: make(f"{tmp_path}/data/{s}/*.csv") for s in "ab"}, tmp_path / "runs")
    told = [line for line in notes if line.startswith("values beyond the stated ranges")]
    assert told == ["values beyond the stated ranges, clipped to them: 33 of 33 of 'age'"]
    saved = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    sent = [part for line in outcome.lines.values() for part in (*line.sent, *line.received)]
    assert saved and sent
    assert not any(b"beyond the" in part for part in (*sent, *(p.read_bytes() for p in saved)))
    whole = make(f"{tmp_path}/data/*/*.csv")
    assert np.ptp(whole.prepared.labels[whole.opened.owners == 2]) == 0
    for leaf, other in zip(outcome.params, train_together(whole, 2), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_equals_training_on_all_images(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    # Clients are in the order of their names, here that of the sites too: it decides their batches.
    for ward, count in {"a/north": 9, "a/south": 6, "b/west": 12}.items():
        for number in range(count):
            label = "ill" if number % 3 else "well"
            (tmp_path / "data" / ward / label).mkdir(parents=True, exist_ok=True)
            pixels = random.normal(90 + 60 * (label == "ill"), 40, (8, 8)).clip(0, 255)
            path = tmp_path / "data" / ward / label / f"{number}.png"
            Image.fromarray(pixels.astype(np.uint8)).save(path)

    def make(*files: str) -> FedAvgImageFiles:
        base = fedavg_images()
        return dataclasses.replace(
            base,
            data=dataclasses.replace(base.data, files=files),
            filters=(4, 4),
            hidden_dim=8,
            cohort=CohortConfig(size=10, batch_size=4),
            training=TrainingConfig(rounds=2, evaluate_every=2, checkpoint_every=0),
        )

    sites = {s: make(f"{tmp_path}/data/{s}/{{client}}/{{label}}/*.png") for s in "ab"}
    outcome = run(make(), sites, tmp_path / "runs")
    whole = make(f"{tmp_path}/data/*/{{client}}/{{label}}/*.png")
    wanted = train_together(whole, 2)
    for leaf, other in zip(outcome.params, wanted, strict=True):
        assert np.abs(other).max() > 1e-3
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)


def test_evaluating_the_folder_of_a_coordinator_names_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_hospitals(tmp_path / "data", {"a": (40, 25), "b": (33,)})
    sites = {s: experiment(f"{tmp_path}/data/{s}/*.csv", rounds=1) for s in "ab"}
    run(experiment(rounds=1), sites, tmp_path / "runs")
    folder = tmp_path / "runs" / "coordinator"
    write_configuration(folder, experiment(rounds=1), "fedavg_table")
    command = ["evaluate", f"--job_log_dir={folder}"]
    assert main(command) == 2
    words = "is the folder of a coordinator, which has no data, expected files with the columns of"
    message = capsys.readouterr().err
    assert words in message and f"`fedpax show --job_log_dir={folder}` has the metrics" in message
    assert main([*command, f"--data.files={tmp_path}/data/b/*.csv"]) == 0
    assert "round 1: held-out loss" in capsys.readouterr().out
