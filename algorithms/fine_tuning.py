"""Fine-tuning evaluation."""

from __future__ import annotations

from collections.abc import Callable

import chex
import optax

from fedpax.algorithm import LossFn, Metrics, Params
from fedpax.algorithms.parts.local_steps import local_metrics, local_steps
from fedpax.algorithms.parts.method_checks import check_optimizer
from fedpax.algorithms.parts.participation import participant_weights, rematerialized_map
from fedpax.clients.cohort import Cohort, NumSteps, check_cohort
from fedpax.primitives import federated_mean
from fedpax.primitives.placement import ChunkSize
from fedpax.transforms.program import program


def fine_tuning_evaluation(
    loss_fn: LossFn,
    *,
    cohort_size: int,
    client_optimizer: optax.GradientTransformation,
    chunk_size: ChunkSize = None,
) -> Callable[[Params, Cohort, Cohort], Metrics]:
    """Make a program that evaluates a model on each client before and after fine-tuning.

    Args:
        loss_fn: `(params, batch) -> (loss, metrics)`.
        cohort_size: number of clients.
        client_optimizer: any optax optimizer.
        chunk_size: as in `fedavg`.

    Returns:
        `evaluate(params, cohort, heldout) -> metrics`, a fedpax program. `cohort` holds the
        training batches and `heldout` the same clients' batches for evaluation. Metrics, averaged
        by the weights of `heldout`: `"loss"` and the metrics of `loss_fn` before fine-tuning, and
        after it the same names with `"fine_tuned_"` in front.

    Raises:
        TypeError, ValueError: as in `fedavg`, for either cohort.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2) / 2, {})
        >>> evaluate = fine_tuning_evaluation(
        ...     loss_fn, cohort_size=2, client_optimizer=optax.sgd(0.5))
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]] * 3, [[5.0]] * 3]))  # three steps
        >>> metrics = jax.jit(evaluate)(jnp.float32(3.0), cohort, cohort)
        >>> metrics["loss"].item(), metrics["fine_tuned_loss"].item()
        (2.0, 0.03125)

    Reference:
        Yu et al., arXiv:2002.04758, section 3.
    """
    check_optimizer("fine_tuning_evaluation", "client_optimizer", client_optimizer)

    @program(clients=cohort_size, chunk_size=chunk_size)
    def evaluate(params: Params, cohort: Cohort, heldout: Cohort) -> Metrics:
        check_cohort("fine_tuning_evaluation", cohort, cohort_size)
        check_cohort("fine_tuning_evaluation", heldout, cohort_size)

        def local_evaluate(
            batches: chex.ArrayTree,
            num_steps: NumSteps,
            held_out: chex.ArrayTree,
            held_out_steps: NumSteps,
        ) -> Metrics:
            tuned, *_ = local_steps(
                loss_fn, client_optimizer, params, client_optimizer.init(params), batches, num_steps
            )
            before, after = (
                local_metrics(loss_fn, model, held_out, held_out_steps) for model in (params, tuned)
            )
            return before | {f"fine_tuned_{name}": value for name, value in after.items()}

        metrics = rematerialized_map(
            local_evaluate,
            cohort.batches,
            cohort.num_steps,
            heldout.batches,
            heldout.num_steps,
            chunk_size=chunk_size,
        )
        return federated_mean(metrics, participant_weights(heldout))

    return evaluate
