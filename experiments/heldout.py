"""Held-out texts: the split that every run evaluates on, and further data sets by name."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedpax.data.text.packing import Batch
from fedpax.training.algorithm import LossFn, Params
from fedpax.training.evaluation import evaluator


class HeldoutSet(NamedTuple):
    """A data set to evaluate on beside the run's own.

    Attributes:
        name: its name in the metrics.
        dataset: a name for `fedpax.data.load`.
        field: the field of an example with its text. None: that of the run's own data.
        split: the split. None: that of the run's own data.
    """

    name: str
    dataset: str
    field: str | None
    split: str | None


class HeldoutBatches(NamedTuple):
    """The batches to evaluate on.

    Attributes:
        main: those of the run's own held-out split.
        others: those of further data sets by name.
    """

    main: list[Batch]
    others: dict[str, list[Batch]]


_FORM = re.compile(
    r"(?P<name>[\w.+-]+)=(?P<dataset>[^=@#\s]+)(#(?P<field>[^=@#\s]+))?(@(?P<split>[^=@#\s]+))?"
)


def parse_heldout_sets(texts: Sequence[str]) -> tuple[HeldoutSet, ...]:
    """Parse data sets to evaluate on, as `data.heldout_sets` has them.

    Args:
        texts: for each set "NAME=DATASET", "NAME=DATASET@SPLIT", "NAME=DATASET#FIELD" or
            "NAME=DATASET#FIELD@SPLIT". NAME consists of letters, digits and "_.+-".

    Returns:
        The sets.

    Raises:
        ValueError: a text has another form, or two have the same name.

    Example:
        >>> parse_heldout_sets(["web=c4/en:3.1.0@validation", "code=stdlib_text"])[0]
        HeldoutSet(name='web', dataset='c4/en:3.1.0', field=None, split='validation')
    """
    sets = []
    for text in texts:
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(
                f"data.heldout_sets has {text!r}, expected NAME=DATASET or "
                "NAME=DATASET#FIELD@SPLIT. Set for example "
                "--data.heldout_sets web=c4/en:3.1.0@validation code=stdlib_text."
            )
        sets.append(HeldoutSet(**found.groupdict()))
    names = [heldout.name for heldout in sets]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"data.heldout_sets names {name!r} {names.count(name)} times, expected different "
                "names. Rename one of the sets: the name before '=' is free."
            )
    return tuple(sets)


def heldout_evaluator(
    loss_fn: LossFn, batches: HeldoutBatches, **settings: Any
) -> Callable[[Params], dict[str, float]]:
    """Make a function that evaluates a language model on every held-out set.

    The perplexity of a set is `exp(loss)`, where the loss is the mean cross-entropy of its target
    tokens in nats. Perplexities of models with different tokenizers are not comparable.

    Args:
        loss_fn: `(params, batch) -> (cross-entropy, dict of scalars, or None)`.
        batches: the batches of each set.
        **settings: arguments of `fedpax.training.evaluation.evaluator`.

    Returns:
        A function `params -> metrics`: `"loss"`, `"perplexity"` and the metrics of `loss_fn` on the
        run's own split; the same on each further set, as `"heldout/NAME/loss"` and so on.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> uniform = lambda params, batch: (jnp.log(params), None)
        >>> rows = [{"targets": np.zeros((2, 8), np.int32)}]
        >>> sets = HeldoutBatches(rows, {"code": rows})
        >>> evaluate = heldout_evaluator(uniform, sets, placement="islands", num_participants=1)
        >>> metrics = evaluate(jnp.float32(256.0))
        >>> sorted(metrics), round(metrics["heldout/code/perplexity"])
        (['heldout/code/loss', 'heldout/code/perplexity', 'loss', 'perplexity'], 256)
    """
    main = evaluator(loss_fn, batches.main, **settings)
    others = {name: evaluator(loss_fn, rows, **settings) for name, rows in batches.others.items()}

    def evaluate(params: Params) -> dict[str, float]:
        metrics = _with_perplexity(main(params))
        for name, evaluate_other in others.items():
            found = _with_perplexity(evaluate_other(params))
            metrics |= {f"heldout/{name}/{key}": value for key, value in found.items()}
        return metrics

    return evaluate


def _with_perplexity(metrics: Mapping[str, float]) -> dict[str, float]:
    """Add the perplexity; inf if it exceeds the largest float."""
    try:
        perplexity = math.exp(metrics["loss"])
    except OverflowError:
        perplexity = math.inf
    return {"loss": metrics["loss"], "perplexity": perplexity, **metrics}
