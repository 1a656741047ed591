"""Held-out texts: the split that every run evaluates on, and further data sets by name."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float, Int64

from fedpax.algorithm import LossFn, Params
from fedpax.checks import check_distinct
from fedpax.data.rounds.stream import LocalRows, addressable_rows
from fedpax.errors import ArgumentError
from fedpax.text.packing import Batch
from fedpax.training.evaluation import placed_evaluator
from fedpax.user_files.formats import FILE_NAME


class HeldoutSet(NamedTuple):
    """A data set to evaluate on beside the run's own."""

    name: str  # its name in the metrics
    dataset: str  # a name for `fedpax.data.load`
    field: str | None  # the field of an example with its text. None: as in the run's own data.
    split: str | None  # the split. None: as in the run's own data.


class EvaluationRows(Protocol):
    """Rows to evaluate on, as `fedpax.data.rounds.heldout_tokens.HeldoutRows` has them."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    @property
    def num_targets(self) -> Int64[np.ndarray, " rows"]:
        """The number of targets of each row."""
        ...

    def read(self, rows: Int64[np.ndarray, " n"]) -> Batch:
        """Return arrays `[n, ...]` of some rows; row -1 is padding."""
        ...


class HeldoutSets(NamedTuple):
    """The rows to evaluate on."""

    main: EvaluationRows  # the rows of the run's own held-out split
    others: Mapping[str, EvaluationRows]  # the rows of further data sets by name


_FORM = re.compile(
    rf"(?P<name>[\w.+-]+)=(?P<dataset>[^=@#\s]+|{FILE_NAME})"
    r"(#(?P<field>[^=@#\s]+))?(@(?P<split>[^=@#\s]+))?"
)


def parse_heldout_sets(texts: Sequence[str]) -> tuple[HeldoutSet, ...]:
    """Parse data sets to evaluate on, as `data.heldout_sets` has them."""
    # Returns the sets.
    sets = []
    for text in texts:
        match = _FORM.fullmatch(text)
        if match is None:
            raise ArgumentError(
                f"data.heldout_sets has {text!r}, expected NAME=DATASET or "
                "NAME=DATASET#FIELD@SPLIT. Set for example "
                "--data.heldout_sets web=c4/en:3.1.0@validation code=stdlib_text."
            )
        sets.append(HeldoutSet(**match.groupdict()))
    names = [heldout.name for heldout in sets]
    remedy = "Rename one of the sets: the name before '=' is free."
    check_distinct("data.heldout_sets", names, remedy=remedy)
    return tuple(sets)


def heldout_evaluator(
    loss_fn: LossFn,
    sets: HeldoutSets,
    *,
    batch_size: int,
    placement: str,
    num_participants: int,
    sharding: NamedSharding | None = None,
) -> Callable[[Params], dict[str, float]]:
    """Make a function that evaluates a language model on every held-out set."""
    # The perplexity of a set is `exp(loss)`, where the loss is the mean cross-entropy of its target
    # tokens in nats. Perplexities of models with different tokenizers are not comparable. A process
    # reads only the rows of its own devices.

    def make(rows: EvaluationRows) -> Callable[[Params], dict[str, float]]:
        return placed_evaluator(
            loss_fn,
            *place_rows(rows, batch_size, num_participants, sharding),
            placement=placement,
            sharding=sharding,
        )

    main, others = make(sets.main), {name: make(rows) for name, rows in sets.others.items()}

    def evaluate(params: Params) -> dict[str, float]:
        metrics = _with_perplexity(main(params))
        for name, evaluate_other in others.items():
            result = _with_perplexity(evaluate_other(params))
            metrics |= {f"heldout/{name}/{key}": value for key, value in result.items()}
        return metrics

    return evaluate


def place_rows(
    rows: EvaluationRows, batch_size: int, num_participants: int, sharding: NamedSharding | None
) -> tuple[Any, Float[np.ndarray, "participants steps"]]:
    """Read the rows of this process's devices, as arrays over all participants."""
    # Returns arrays `[participants, steps, batch, ...]`, which are
    # `fedpax.data.rounds.stream.LocalRows` if the process does not need all rows, and the
    # number of targets in each batch.
    num_steps = -(-len(rows) // (batch_size * num_participants))
    shape = (num_participants, num_steps, batch_size)
    numbers = np.full(math.prod(shape), -1)
    numbers[: len(rows)] = np.arange(len(rows))
    targets = np.zeros(math.prod(shape), np.float32)
    targets[: len(rows)] = rows.num_targets
    weights = targets.reshape(shape).sum(axis=2)
    if sharding is None:
        mask = np.ones(shape, np.bool_)
    else:
        over_rows = PartitionSpec(*sharding.spec[:3])  # a row's tokens can be sharded too
        mask = addressable_rows(NamedSharding(sharding.mesh, over_rows), shape)
    read = rows.read(numbers[mask.ravel()])
    if mask.all():
        return {
            name: array.reshape(*shape, *array.shape[1:]) for name, array in read.items()
        }, weights
    return {name: LocalRows(array, mask) for name, array in read.items()}, weights


def _with_perplexity(metrics: Mapping[str, float]) -> dict[str, float]:
    """Add the perplexity; inf if it exceeds the largest float."""
    try:
        perplexity = math.exp(metrics["loss"])
    except OverflowError:
        perplexity = math.inf
    return {"loss": metrics["loss"], "perplexity": perplexity, **metrics}
