"""fedavg_images: image files become clients, batches and metrics by client."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from fedpax.data import prepare
from fedpax.experiments.fedavg_image_files import (
    FedAvgImageFiles,
    ImagesConfig,
    _with_channels,
    fedavg_images,
)
from fedpax.experiments.parts import file_experiments
from fedpax.experiments.parts.file_experiments import ServerState
from fedpax.settings.client_aggregators import aggregator
from fedpax.settings.client_methods import method
from fedpax.training.training_config import TrainingConfig

CLIENTS = {"Zoë": 9, "Ana": 14, "Bo": 5}
LABELS = ("katt", "hund")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bright images of one label and dark ones of the other, of two sizes."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for client, count in CLIENTS.items():
        for k in range(count):
            label = LABELS[k % 2]
            low = 0 if label == "katt" else 128
            path = folder / client / label / f"{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            size = (12, 10, 3) if client == "Bo" else (8, 8, 3)
            Image.fromarray(rng.integers(low, low + 128, size, np.uint8)).save(path)
    return folder


def make(folder: Path, **data: Any) -> FedAvgImageFiles:
    base = fedavg_images()
    files = (f"{folder}/{{client}}/{{label}}/*.png",)
    return dataclasses.replace(
        base,
        data=ImagesConfig(
            **{"files": files, "image_size": (8, 8), "heldout_fraction": 0.3, **data}
        ),
        filters=(4, 4),
        hidden_dim=8,
        cohort=dataclasses.replace(base.cohort, batch_size=4),
        training=TrainingConfig(rounds=1, evaluate_every=0, checkpoint_every=0),
    )


def test_images_become_clients_and_are_learned(photos: Path) -> None:
    experiment = make(photos)
    run = experiment.build()
    assert list(experiment.opened.names) == ["Ana", "Bo", "Zoë"]
    images = experiment.prepared.examples["image"]
    assert images.shape == (28, 8, 8, 3) and images.dtype == np.uint8
    # The pixels of the files, in the files' places.
    owner = experiment.opened.owners == list(experiment.opened.names).index("Ana")
    ana = images[owner & (experiment.prepared.examples["label"] == 1)]
    expected = [np.asarray(Image.open(path)) for path in (photos / "Ana" / "katt").glob("*.png")]
    result = {image.tobytes() for image in ana}
    assert result == {image.tobytes() for image in expected}

    cohort = next(run.cohorts)
    assert cohort.batches["image"].dtype == np.float32 and cohort.batches["image"].max() <= 1
    with jax.set_mesh(run.mesh):
        state = run.algorithm.init(jax.jit(run.init)(jax.random.key(0)))
        step = jax.jit(run.algorithm.round)
        for _ in range(8):
            state, _ = step(state, cohort)
            cohort = next(run.cohorts)
        together, by_client = run.evaluate(state.params), run.evaluate_clients(state.params)
    assert together["accuracy"] > 0.8
    present = by_client.num_examples > 0
    for name in ("loss", "accuracy"):
        mean = np.average(by_client.metrics[name][present], weights=by_client.num_examples[present])
        assert mean == pytest.approx(together[name], rel=1e-4)


def test_clients_of_the_test_split_alone_are_marked_as_new(photos: Path, tmp_path: Path) -> None:
    for split, client in ("train", "Ana"), ("train", "Zoë"), ("test", "Bo"), ("test", "Ana"):
        (tmp_path / split).mkdir(exist_ok=True)
        (tmp_path / split / client).symlink_to(photos / client)
    experiment = make(tmp_path, files=(f"{tmp_path}/{{split}}/{{client}}/{{label}}/*.png",))
    assert (
        "14 held out within clients, 5 of 1 client without training" in experiment.opened.notes[0]
    )
    model = experiment.make_model()
    by_client = experiment.make_client_evaluation(model)(model.init(jax.random.key(0)))
    present = np.flatnonzero(by_client.num_examples)
    assert [by_client.names[k] for k in present] == ["Ana", "Bo (new)"]
    assert by_client.num_examples[present].tolist() == [14, 5]


def test_images_of_several_sizes_and_other_columns_are_told(photos: Path) -> None:
    with pytest.raises(ValueError, match=r"image_size"):
        make(photos, image_size=None).build()
    with pytest.raises(ValueError, match=r"data\.image='picture' is not a column of .*'image'"):
        make(photos, image="picture").build()


def test_rows_of_numbers_lists_and_encoded_images_are_images(tmp_path: Path) -> None:
    """LEAF's FEMNIST and TFRecords have no axes of images: they could not be trained."""
    x = np.random.default_rng(1).integers(0, 256, (12, 4, 3), np.uint8)
    encoded = [io.BytesIO() for _ in x]
    for image, stream in zip(x, encoded, strict=True):
        Image.fromarray(image).save(stream, "PNG")
    rows = pa.array(x.reshape(12, -1).tolist())
    columns = {"list": rows, "row": rows.cast(pa.list_(pa.int64(), 12)), "label": [0, 1] * 6}
    columns |= {"png": [stream.getvalue() for stream in encoded], "user": [0] * 5 + [1] * 7}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    for name in ("list", "row", "png"):
        data = ImagesConfig(
            files=(str(tmp_path / "a.parquet"),), client="user", image=name, image_size=(4, 3)
        )
        experiment = dataclasses.replace(fedavg_images(), data=data)
        np.testing.assert_array_equal(experiment.prepared.examples["image"], x[..., None])
    wrong = dataclasses.replace(data, image="row", image_size=(3, 3))
    message = r"has 12 numbers, expected 9, a gray image of 3 x 3 pixels\. Set --data\.image_size"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(experiment, data=wrong).build()
    wrong = dataclasses.replace(data, image="row", image_size=None)
    with pytest.raises(ValueError, match="gray images that are rows of numbers"):
        dataclasses.replace(experiment, data=wrong).build()
    wrong = dataclasses.replace(data, image="row", label="row")
    with pytest.raises(ValueError, match=r"label 'row' has values of type fixed_size_list.*Choose"):
        dataclasses.replace(experiment, data=wrong).build()


def test_channels_are_converted_as_pillow_does(photos: Path) -> None:
    paths = sorted((photos / "Zoë" / "hund").glob("*.png"))
    images = np.stack([np.asarray(Image.open(path)) for path in paths])
    gray = np.stack([np.asarray(Image.open(path).convert("L")) for path in paths])
    np.testing.assert_allclose(_with_channels(images, 1)[..., 0], gray, atol=1)
    assert _with_channels(images, 1).dtype == np.uint8
    np.testing.assert_allclose(
        _with_channels(images / 255, 1)[..., 0], gray / 255, atol=1.01 / 255, rtol=0
    )
    color = _with_channels(gray, 3)
    assert color.dtype == np.uint8 and color.shape == images.shape
    assert (color == gray[..., None]).all()
    assert _with_channels(images, None) is images and _with_channels(images, 3) is images
    with pytest.raises(ValueError, match=r"data\.channels=3, but the images have 2, .* 1 and 3"):
        _with_channels(images[..., :2], 3)
    assert make(photos, channels=1).prepared.examples["image"].shape == (28, 8, 8, 1)


@pytest.mark.parametrize(
    "columns",
    [("label=number",), ("label=category",), ("age=category(A|B)",), ("label=category(A|B)",) * 2],
)
def test_columns_state_the_classes_alone(columns: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"--data\.columns 'label=category\(A\|B\)'"):
        ImagesConfig(columns=columns)


def test_held_out_images_are_the_same_for_other_clients_and_sizes(
    photos: Path, tmp_path: Path
) -> None:
    """An evaluation with another placeholder or size measured images that were trained on."""

    def heldout(**data: Any) -> set[bytes]:
        experiment = make(photos, **data)
        return {x.tobytes() for x in experiment.images[experiment.opened.heldout]}

    expected = heldout()
    other = (f"{photos}/{{label}}/{{client}}/*.png",)
    assert expected == heldout(files=other, label="client", client="label")
    sizes = [make(photos, image_size=size).opened.heldout for size in ((8, 8), (5, 3))]
    np.testing.assert_array_equal(*sizes)
    pattern = f"{photos}/{{client}}/{{label}}/*.png"
    prepare(pattern, tmp_path / "out", label="label", image_size=(8, 8))
    assert expected == heldout(files=(f"{tmp_path}/out",))


def test_a_model_of_an_older_version_tells_of_its_held_out_images(
    photos: Path, tmp_path: Path
) -> None:
    make(photos).write_inputs(tmp_path)
    (path,) = tmp_path.iterdir()
    for is_old in (False, True):
        if is_old:
            content = json.loads(path.read_text())
            del content["held_out_by"]
            path.write_text(json.dumps(content))
        again = make(photos)
        again.read_inputs(tmp_path)
        told = "can have been trained on" in " ".join(again.build().cautions)
        assert told == is_old


def test_a_folder_of_an_older_version_states_no_classes(photos: Path, tmp_path: Path) -> None:
    make(photos).write_inputs(tmp_path)
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    del content["settings"]["columns"]
    path.write_text(json.dumps(content))
    again = make(photos)
    again.read_inputs(tmp_path)
    assert again.label == make(photos).label
    stated = make(photos, columns=("label=category(katt|hund)",))
    with pytest.raises(ValueError, match=r"data\.columns=\['label=category\(katt\|hund\)'\], but"):
        stated.read_inputs(tmp_path)


def test_a_residual_network_has_the_images_channels(photos: Path) -> None:
    experiment = dataclasses.replace(make(photos), network="resnet")
    shapes = jax.eval_shape(experiment.make_model().init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) > 10_000_000


def test_a_private_run_tells_the_classes_and_the_size_as_not_private(photos: Path) -> None:
    private = aggregator("private_mean", noise_multiplier=1.0)
    experiment = dataclasses.replace(make(photos), aggregator=private)
    notes = experiment.build().notes
    told = [line for line in notes if line.startswith("not private: ")][1:]  # after the metrics
    assert [line.rpartition(": ")[2] for line in told] == [
        "--data.columns 'label=category(A|B)'",
        "--data.channels=3",
    ]
    data = dataclasses.replace(
        experiment.data, channels=3, columns=("label=category(katt|hund|ko)",)
    )
    stated = dataclasses.replace(experiment, data=data)
    assert not stated.disclosures and stated.label.classes == ("katt", "hund", "ko")
    files = f"{photos}/Zo?/{{label}}/{{client}}.png"  # of one size
    unsized = dataclasses.replace(
        experiment, data=dataclasses.replace(data, files=(files,), image_size=None)
    )
    (line,) = unsized.disclosures
    assert line.endswith("--data.image_size 8 8")


@pytest.mark.parametrize("name", ["ditto", "reptile"])
def test_own_models_of_very_unequal_clients_are_evaluated_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    rng = np.random.default_rng(2)
    owner = np.repeat(np.arange(31), [200, *rng.integers(3, 9, 30)])
    label = rng.integers(0, 2, len(owner))
    image = rng.integers(0, 128, (len(owner), 8, 8, 1)) + 127 * label[:, None, None, None]
    np.savez(tmp_path / "a.npz", client=owner, label=label, image=image.astype(np.uint8))
    experiment = dataclasses.replace(make(tmp_path), method=method(name))
    data = ImagesConfig(files=(str(tmp_path / "a.npz"),), client="client")
    cohort = dataclasses.replace(experiment.cohort, size=3)
    experiment = dataclasses.replace(experiment, data=data, cohort=cohort)
    count = max(map(len, experiment.training_parts.values()))
    # Rounds of the three largest clients fit the memory, and all clients padded alike do not.
    sizes = {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 10 * count * 8 * 8 * 4}
    monkeypatch.setattr("os.sysconf", sizes.__getitem__)
    with pytest.raises(ValueError, match="but this machine has"):
        experiment.make_rounds_of_all(*experiment.read_clients())
    cohorts = experiment.build().cohorts
    steps = {next(cohorts).batches["mask"].shape[1] for _ in range(40)}
    assert max(steps) > 30 > 3 > min(steps)
    results = []
    for most_bytes in (2**28, 5000):  # of a few small clients with their models
        monkeypatch.setattr(file_experiments, "MOST_BYTES", most_bytes)
        made = dataclasses.replace(experiment)
        run = made.build()
        assert run.evaluate_own_models is not None
        params = jax.tree.map(
            lambda leaf: np.random.default_rng(3).normal(0, 0.3, leaf.shape).astype(leaf.dtype),
            jax.eval_shape(run.init, jax.random.key(0)),
        )
        state = run.algorithm.init(params) if name == "ditto" else ServerState(params)
        results.append((len(made._own_examples._plan), run.evaluate_own_models(state)))
    (few_parts, expected), (many_parts, result) = results
    assert few_parts < 6 < 10 < many_parts
    opened = experiment.opened
    held = np.bincount(opened.owners[opened.heldout], minlength=31)
    np.testing.assert_array_equal(result.num_examples, held)
    for metric, values in expected.metrics.items():
        np.testing.assert_allclose(result.metrics[metric], values, rtol=1e-5, err_msg=metric)
