"""What experiments on users' files share: examples in parts, saved inputs, personal models."""

import dataclasses
import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from fedpax.algorithm import Params
from fedpax.clients.cohort import Cohort
from fedpax.console import first_ten
from fedpax.data import CohortRounds
from fedpax.data.open_client_files import OpenFiles, PreparedFiles
from fedpax.data.rounds.cohort_stream import client_steps, shorter_lengths
from fedpax.data.tables import Label, TableFeatures
from fedpax.errors import ArgumentError
from fedpax.models.losses import ModelLoss
from fedpax.run_files.paths import write_atomically
from fedpax.settings.client_aggregators import AggregatorConfig
from fedpax.settings.client_methods import MethodConfig
from fedpax.settings.cohort_settings import CohortConfig
from fedpax.settings.table_data import FilesConfig
from fedpax.sites.site_experiment import SiteRun
from fedpax.training.client_metrics import ClientMetrics
from fedpax.training.exchanged_bytes import tree_bytes
from fedpax.training.experiment import Run

MOST_BYTES = 2**28
"""The bytes of a part, models included. All examples stay in memory if they have fewer."""

Part = tuple[Cohort, dict[str, chex.Array]]
"""Training batches, and held-out examples `[clients, examples, ...]` with a mask."""


class _Clients(NamedTuple):
    ids: NDArray[np.int64]  # -1: absent
    num_steps: int  # of the training batches, padding included
    num_heldout: int  # padding included


class OwnExamples:
    """All clients in parts of similar sizes: a small client is not padded to the largest.

    A part has a multiple of `multiple` clients, absent ones included.
    """

    def __init__(
        self,
        rounds: CohortRounds,
        heldout: Sequence[NDArray[np.int64]],
        read: Callable[[NDArray[np.int64]], dict[str, NDArray[Any]]],
        model: chex.ArrayTree,
        multiple: int,
        *,
        with_batches: bool = True,
    ) -> None:
        self._with_batches = with_batches
        self._rounds, self._heldout, self._read = rounds, heldout, read
        shapes = jax.tree.leaves(rounds.shapes.batches)
        self._batch_size = shapes[0].shape[2]
        self._example_bytes = sum(
            int(np.prod(x.shape[3:], dtype=np.int64)) * x.dtype.itemsize for x in shapes
        )
        self._plan = list(self._divide(multiple, tree_bytes(model)))
        self._kept: list[Part] | None = None

    def __iter__(self) -> Iterator[Part]:
        if self._kept is None:
            parts = map(self._read_part, self._plan)
            if sum(len(part.ids) * self._client_bytes(part) for part in self._plan) > MOST_BYTES:
                return parts
            self._kept = list(parts)
        return iter(self._kept)

    def _divide(self, multiple: int, model_bytes: int) -> Iterator[_Clients]:
        """Group clients by the shortest lengths that hold their examples."""
        ids = np.arange(len(self._heldout))
        num_steps = self._rounds.num_steps(ids) if self._with_batches else np.zeros_like(ids)
        num_heldout = np.array([len(part) for part in self._heldout])
        steps, examples = (
            shorter_lengths(max(1, int(x.max(initial=0)))) for x in (num_steps, num_heldout)
        )
        lengths = list(itertools.zip_longest(steps, examples, fillvalue=1))
        fits = [(num_steps <= s) & (num_heldout <= h) for s, h in lengths[1:]]
        level = np.sum(fits, axis=0, dtype=np.int64) * np.ones(len(num_steps), np.int64)
        for number, length in enumerate(lengths):
            ids = np.flatnonzero(level == number)
            part = _Clients(ids, *length)
            client_bytes = self._client_bytes(part) + model_bytes
            size = min(max(1, MOST_BYTES // client_bytes), max(1, len(ids)))
            size = -(-size // multiple) * multiple
            for begin in range(0, len(ids), size):
                some = ids[begin : begin + size]
                yield part._replace(ids=np.pad(some, (0, size - len(some)), constant_values=-1))

    def _client_bytes(self, part: _Clients) -> int:
        num_training = part.num_steps * self._batch_size if self._with_batches else 0
        return (num_training + part.num_heldout) * self._example_bytes

    def _read_part(self, part: _Clients) -> Part:
        cohort = Cohort({}, client_ids=part.ids.astype(np.int32))
        if self._with_batches:
            cohort = self._rounds.read_clients(0, part.ids, part.num_steps)
        none = np.zeros(0, np.int64)
        own = [none if k < 0 else self._heldout[k] for k in part.ids]
        mask = np.arange(part.num_heldout) < np.array([len(x) for x in own])[:, None]
        rows = np.zeros(mask.shape, np.int64)
        rows[mask] = np.concatenate(own)
        read = self._read(rows.ravel())
        heldout = {name: x.reshape(*rows.shape, *x.shape[1:]) for name, x in read.items()}
        return cohort, {**heldout, "mask": mask.astype(np.float32)}


# ---- what the start of a run tells of its clients and classes

_UNEQUAL_STEPS = 10  # times as many local steps of the largest client as of the smallest


def note_training(
    cohort: CohortConfig,
    method: MethodConfig,
    aggregator: AggregatorConfig,
    prepared: PreparedFiles,
    opened: OpenFiles,
) -> list[str]:
    """Tell what unequal clients mean, and which classes have no example in a part."""
    sizes = np.bincount(opened.owners[opened.training])
    sizes = sizes[sizes > 0]
    notes = cohort.note_left_out(sizes)
    fewest, most = int(sizes.min()), int(sizes.max())
    if aggregator.counts_alike and method.has_aggregator and fewest < most:
        notes.append(
            f"aggregator={aggregator.function.__name__}: each client counts alike, with "
            f"{fewest:,} to {most:,} training examples. --aggregator=mean weighs by examples"
        )
    steps = client_steps([fewest, most], cohort.batch_size, cohort.local_epochs, cohort.max_steps)
    meaning = method.example().unequal_steps
    if meaning is not None and steps[1] >= _UNEQUAL_STEPS * steps[0]:
        notes.append(
            f"method={method.function.__name__}: clients take {steps[0]:,} to {steps[1]:,} local "
            f"steps in a round, and {meaning}. --cohort.max_steps={_UNEQUAL_STEPS * steps[0]} "
            "limits the steps"
        )
    return notes + _note_classes(prepared, opened)


def _note_classes(prepared: PreparedFiles, opened: OpenFiles) -> list[str]:
    label, notes = prepared.label, []
    if label.task == "classification":
        parts = {"training": opened.training, "held-out": ~opened.training}
        for name, chosen in parts.items():
            counts = np.bincount(prepared.labels[chosen], minlength=len(label.classes))
            if chosen.any() and (none := np.flatnonzero(counts == 0)).size:
                shown = first_ten(repr(label.classes[k]) for k in none)
                notes.append(f"no {name} example of {label.name!r} {shown}")
    return notes


# ---- table.json: the label and the columns of a model, saved when its run begins

INPUTS = "table.json"
"""The file's name, in the folder of a run and of an exported model."""

HELD_OUT_BY = "held_out_by"
"""The entry that says by what held-out images are chosen; files of earlier versions lack it."""

# Settings of files and of held-out parts may change.
_SETTINGS = ("label", "task", "columns", "max_categories", "category_clients", "standardize")


def saved_content(
    data: FilesConfig,
    label: Label,
    features: TableFeatures | None = None,
    image_shape: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the inputs of a model as JSON: label, columns or images, and their settings."""
    content: dict[str, Any] = {"settings": _settings(data), "label": label.to_json()}
    if features is not None:
        content["columns"] = features.to_json()
    if image_shape is not None:
        content |= {"image_shape": list(image_shape), HELD_OUT_BY: "image bytes"}
    return content


def write_saved_inputs(path: Path, content: Mapping[str, Any]) -> None:
    """Write the inputs of a model, as `saved_content` makes them."""
    write_atomically(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_saved_inputs(path: Path, data: FilesConfig) -> Mapping[str, Any]:
    """Read what `write_saved_inputs` wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        saved = content["settings"]
        _ = content["label"]["classes"]
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"{path} is damaged ({type(error).__name__}: {error}), expected the file as `fedpax "
            "train` writes it. Restore it from a copy."
        ) from error
    for name, value in _settings(data).items():
        # Older folders of images have no `columns`.
        saved.setdefault(name, [] if isinstance(value, list) else None)
        if saved[name] != value:
            raise ArgumentError(
                f"data.{name}={value!r}, but the model was trained with {saved[name]!r}, "
                f"expected the same. Leave --data.{name} out, or train in another folder."
            )
    inputs: Mapping[str, Any] = content
    return inputs


def _settings(data: FilesConfig) -> dict[str, Any]:
    fields = dataclasses.asdict(data)
    settings = {name: fields[name] for name in _SETTINGS if name in fields}
    return {n: list(value) if isinstance(value, tuple) else value for n, value in settings.items()}


# ---- runs of methods for personal models: models for clusters, and the evaluation of own models

_EXAMPLES = "number of examples"


class ServerState(NamedTuple):
    """The part of an algorithm's state that an evaluation in training reads."""

    params: Params


def with_own_models(
    run: Run,
    method: MethodConfig,
    make_means: Callable[[], Callable[[Any], dict[str, float]]],
    make_by_client: Callable[[], Callable[[Any], ClientMetrics]],
) -> Run:
    """Evaluate clients' own models in a run, and make a model for each cluster."""
    # A method with clusters has no single shared model: all of its metrics come from the own
    # models.

    means, by_client = functools.cache(make_means), functools.cache(make_by_client)

    def evaluate_state(state: Any) -> dict[str, float]:
        return {f"personal_{name}": value for name, value in means()(state).items()}

    run = run._replace(
        evaluate_state=evaluate_state, evaluate_own_models=lambda state: by_client()(state)
    )
    if method.has_shared_model:
        return run
    assert run.shardings is not None
    stacked = jax.tree.map(
        lambda sharding: NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec)),
        run.shardings.params,
    )
    return run._replace(
        init=method.make_init(run.init),
        shardings=run.shardings._replace(params=stacked),
        evaluate=lambda params: means()(ServerState(params)),
        evaluate_clients=None,
    )


def with_clusters(
    run: SiteRun, method: MethodConfig, make_means: Callable[[], Callable[[Any], dict[str, float]]]
) -> SiteRun:
    """Evaluate the own models of a site's clients, if the method has no single shared model."""
    if method.has_shared_model:
        return run
    means = functools.cache(make_means)

    def evaluate(params: Params) -> dict[str, float]:
        return means()(ServerState(params))

    return run._replace(evaluate=evaluate if run.num_heldout else None, fine_tune=None)


def means_over_parts(
    models_of: Callable[[Any, Cohort], Params], loss_fn: ModelLoss, parts: Iterable[Part]
) -> Callable[[Any], dict[str, float]]:
    """Make `state -> metrics`: means over the held-out examples of all clients."""

    @jax.jit
    def add_up(state: Any, cohort: Cohort, heldout: Any) -> dict[str, jax.Array]:
        loss, metrics = jax.vmap(loss_fn)(models_of(state, cohort), heldout)
        weights = heldout["mask"].sum(axis=1)
        sums = {name: jnp.sum(weights * x) for name, x in {**metrics, "loss": loss}.items()}
        return {**sums, _EXAMPLES: weights.sum()}

    def evaluate(state: Any) -> dict[str, float]:
        totals: Counter[str] = Counter()
        for part in parts:
            totals.update({name: float(x) for name, x in add_up(state, *part).items()})
        num_examples = totals.pop(_EXAMPLES)
        return {name: total / num_examples for name, total in totals.items()}

    return evaluate
