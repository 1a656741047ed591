"""Sites whose images differ: gray ones beside ones in color, and classes of one site alone."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedpax.data.tables.labels import infer_label
from fedpax.data.tables.shared_treatment import describe_label
from fedpax.errors import ArgumentError
from fedpax.experiments.fedavg_image_files import CHANNELS, FedAvgImageFiles, fedavg_images
from fedpax.settings.cohort_settings import CohortConfig
from fedpax.sites.agreement import count_votes
from fedpax.sites.round_rules import RoundRules
from fedpax.training.training_config import TrainingConfig
from sites.federation import run
from sites.test_equals_training import train_together

STATED = ("label=category(well|ill|rare)",)


def write_images(folder: Path, site: str, labels: str, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(ord(site))
    for number, label in enumerate(labels.split() * 4):
        split = "test" if number % 4 == 3 else "train"
        path = folder / split / site / f"ward_{site}" / label / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 200, shape) + 50 * (label == "ill")
        Image.fromarray(pixels.astype(np.uint8)).save(path)


def make(*files: str, **data: Any) -> FedAvgImageFiles:
    base = fedavg_images()
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, files=files, **data),
        filters=(4, 4),
        hidden_dim=8,
        cohort=CohortConfig(size=10, batch_size=4),
        training=TrainingConfig(rounds=2, evaluate_every=2, checkpoint_every=0),
    )


def of_site(folder: Path, site: str, **data: Any) -> FedAvgImageFiles:
    return make(f"{folder}/{{split}}/{site}/{{client}}/{{label}}/*.png", **data)


@pytest.mark.parametrize("data", [{}, {"channels": 3}])
def test_a_site_with_gray_images(tmp_path: Path, data: dict[str, Any]) -> None:
    folder, shapes = tmp_path / "data", {"a": (8, 8, 3), "c": (8, 8)}
    if not data:  # the others decide
        shapes["b"] = (8, 8, 3)
    for site, shape in shapes.items():
        write_images(folder, site, "well ill", shape)
    sites = {site: of_site(folder, site, **data) for site in shapes}
    outcome = run(
        make(**data),
        sites,
        tmp_path / "runs",
        rules=RoundRules(2, 60.0),
        first_round_needs=len(sites),
        may_be_refused=["c"],
    )
    if not data:
        assert (
            "the number of channels of images is '1' at this site, expected '3', as 2 of 3 sites "
            "have it (set --data.channels=3 at the syncer and at each site"
        ) in outcome.refused["c"]
        return
    assert not outcome.refused
    wanted = train_together(of_site(folder, "*", **data), 2)
    for leaf, other in zip(outcome.params, wanted, strict=True):
        assert np.abs(other).max() > 1e-3
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-6)


def test_one_of_two_sites_learns_how_to_agree() -> None:
    sites = {"a": {CHANNELS: "1"}, "b": {CHANNELS: "3"}}
    told = "the number of channels of images is '1' at a, '3' at b (set --data.channels=3"
    assert (count_votes(sites, {}).undecided or "").startswith(told)
    experiment = make(channels=3, image_size=(8, 8))
    refused, undecided = count_votes(sites, experiment.stated_properties())
    assert {*refused} == {"a"} and undecided is None


@pytest.mark.parametrize("columns", [(), STATED])
def test_a_class_that_a_late_site_has_alone(tmp_path: Path, columns: tuple[str, ...]) -> None:
    """Site a has one class alone, and site c joins after the first round."""
    for site, labels in {"a": "well", "b": "well ill", "c": "rare ill"}.items():
        write_images(tmp_path, site, labels, (8, 8, 3))
    site = {s: of_site(tmp_path, s, columns=columns) for s in "abc"}
    descriptions = [site[s].describe_site() for s in "ab"]
    coordinator = make(columns=columns)
    votes = {s: coordinator.shared_properties(d) for s, d in zip("ab", descriptions, strict=True)}
    assert count_votes(votes, coordinator.stated_properties()) == ({}, None)
    with pytest.raises(StopIteration) as agreed:
        next(coordinator.agree(descriptions))
    inputs = agreed.value.value
    late = site["c"].with_inputs(inputs)
    if not columns:
        assert inputs["label"]["classes"] == ("ill", "well")
        with pytest.raises(ArgumentError, match=r"'rare'.* --data\.columns 'label=category\(A\|B"):
            _ = late.prepared
        return
    assert late.label.classes == ("well", "ill", "rare")
    values = late.opened.columns["label"].to_pylist()
    wanted = [late.label.classes.index(value) for value in values]
    assert list(late.prepared.labels) == wanted and {*wanted} == {1, 2}


def test_a_late_site_with_images_of_another_shape(tmp_path: Path) -> None:
    write_images(tmp_path, "c", "well ill", (8, 6))
    site = of_site(tmp_path, "c")
    inputs = {"label": infer_label("label", ["ill", "well"]).to_json(), "image_shape": [8, 8, 3]}
    message = r"images are 8 x 6 x 1, .* takes 8 x 8 x 3.*image_size 8 8 and --data\.channels=3"
    with pytest.raises(ArgumentError, match=message):
        _ = site.with_inputs(inputs).prepared
    other = of_site(tmp_path, "c", channels=3, image_size=(8, 8)).with_inputs(inputs)
    assert other.prepared.examples["image"].shape == (8, 8, 8, 3)


def test_one_class_at_all_sites_is_not_trained(tmp_path: Path) -> None:
    write_images(tmp_path, "a", "well", (8, 8))
    with pytest.raises(ArgumentError, match=r"the class 'well' alone at all sites"):
        next(make().agree([of_site(tmp_path, "a").describe_site()] * 2))


def test_an_image_shape_is_checked() -> None:
    described = describe_label(
        infer_label("label", ["a", "b"]), ["a", "b"], has_stated_classes=False
    )
    for shape in ([1 << 20, 1 << 20, 3], [28, 28], [28.0, 28, 1], [-1, 8, 1], ["28", 28, 1]):
        with pytest.raises(ArgumentError, match="expected height, width and channels"):
            fedavg_images().shared_properties({**described, "image_shape": shape})


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({"name": "ward"}, "'ward' as the label, expected 'label'.*: --data.label"),
        ({"task": "regression"}, "'label' as a label for regression, expected classification"),
        ({"classes": ["ill"]}, r"'label' as classes \('ill',\), expected .*, as stated"),
    ],
)
def test_a_site_takes_no_label_that_it_does_not_state(
    tmp_path: Path, lie: dict[str, Any], message: str
) -> None:
    write_images(tmp_path / "data", "a", "well ill", (8, 8))
    site = of_site(tmp_path / "data", "a", columns=STATED)
    site.describe_site()
    inputs = dict(site.inputs)
    site.with_inputs(inputs)
    with pytest.raises(ArgumentError, match=message):
        site.with_inputs({**inputs, "label": {**inputs["label"], **lie}})
    with pytest.raises(ArgumentError, match="inputs are malformed"):
        site.with_inputs({})
