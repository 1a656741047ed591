"""leaf_clients: LEAF's synthetic federated data, clients with models in clusters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpax.checks import check_integers
from fedpax.errors import ArgumentError
from fedpax.primitives.casts import checked_cast, real_number


def leaf_clients(
    num_clients: int,
    *,
    cluster_probabilities: Sequence[float] = (1.0,),
    num_features: int = 60,
    num_classes: int = 5,
    seed: int = 0,
) -> tuple[dict[str, NDArray[Any]], list[NDArray[np.int64]]]:
    """Generate clients as LEAF's code does: few examples each, and models in clusters.

    With p clusters, client k draws its cluster c by `cluster_probabilities`, and labels its inputs
    by a linear model W_k, which depends on a description u_k of size p:

        Q ~ N(0, 1), [num_features + 1, num_classes, p];   m_c ~ N(l_c, 1),  l_c ~ N(0, 1);
        u_k ~ N(m_c, 0.1^2);   W_k = Q u_k;
        x ~ N(v_k, diag(j^-1.2)),  v_k ~ N(B_k, 1),  B_k ~ N(0, 1);
        y = argmax((1, x) W_k + e),  e ~ N(0, 0.1^2).

    Q and the m_c are the same for all clients. The first row of W_k is the bias, and inputs are
    returned without the 1. The numbers of examples are 5 + exp(N(3, 2^2)), rounded down and at most
    1,000. `fedpax.populations.leaf_clients` generates another data set, the
    synthetic(alpha, beta) of FedProx.

    Args:
        num_clients: number of clients; LEAF's example has 1,000.
        cluster_probabilities: for each cluster, the probability that a client belongs to it. They
            are positive, and their sum is 1. Default: one cluster, as in LEAF's code.
        num_features: size of an input.
        num_classes: number of labels.
        seed: random seed.

    Returns:
        Examples, `{"image": float32 [examples, num_features], "label": int32 [examples]}`, and for
        each client the indices of its examples, for `cohort_rounds`.

    Raises:
        ValueError: a size is below 1, or the probabilities are not positive with sum 1.

    Example:
        >>> examples, population = leaf_clients(30, cluster_probabilities=(0.5, 0.5))
        >>> examples["image"].shape[1], len(population), min(map(len, population)) >= 5
        (60, 30, True)

    Reference:
        Caldas et al., LEAF, arXiv:1812.01097, appendix. Built here: the form of the authors' code,
        TalwalkarLab/leaf, data/synthetic/data_generator.py and main.py.
    """
    check_logistic_sizes(num_clients, num_features, num_classes)
    probabilities = checked_cast(cluster_probabilities, np.float64, "cluster_probabilities")
    if (
        probabilities.ndim != 1
        or not np.all(probabilities > 0)
        or abs(probabilities.sum() - 1) > 1e-6
    ):
        raise ArgumentError(
            f"cluster_probabilities is {cluster_probabilities}, expected positive numbers with sum "
            "1, one for each cluster, such as (0.5, 0.5)."
        )
    num_clusters = len(probabilities)
    rng = np.random.default_rng(seed)
    sizes = np.minimum(5 + rng.lognormal(3, 2, num_clients), 1000).astype(np.int64)
    descriptions_to_weights = rng.normal(size=(num_features + 1, num_classes, num_clusters))
    centers = rng.normal(rng.normal(size=(num_clusters, 1)), 1, (num_clusters, num_clusters))
    deviation = np.arange(1, num_features + 1) ** -0.6
    clients = []
    for size in sizes:
        cluster = rng.choice(num_clusters, p=probabilities)
        weights = descriptions_to_weights @ rng.normal(centers[cluster], 0.1)
        center = rng.normal(rng.normal(), 1, num_features)
        image = center + deviation * rng.normal(size=(size, num_features))
        logits = weights[0] + image @ weights[1:] + rng.normal(0, 0.1, (size, num_classes))
        clients.append((image, logits))
    return gather_examples(clients)


# logistic_clients: the synthetic(alpha, beta) federated data of FedProx.
def logistic_clients(
    num_clients: int,
    *,
    alpha: float,
    beta: float,
    num_features: int = 60,
    num_classes: int = 10,
    seed: int = 0,
) -> tuple[dict[str, NDArray[Any]], list[NDArray[np.int64]]]:
    """Generate clients with different logistic models and different inputs.

    Client k labels its inputs by a model of its own, y = argmax(W_k x + b_k):

        W_k, b_k ~ N(u_k, 1),  u_k ~ N(0, alpha);
        x ~ N(v_k, diag(j^-1.2)),  v_k ~ N(B_k, 1),  B_k ~ N(0, beta).

    `alpha` is the variance of the models between clients, `beta` the variance of their inputs. The
    numbers of examples follow a power law: 50 + exp(N(4, 2^2)), at most 5,000. LEAF's synthetic
    data is another one: `fedpax.populations.leaf_clients`.

    Args:
        num_clients: number of clients; the paper has 30.
        alpha: variance of the means u_k, at least 0.
        beta: variance of the means B_k, at least 0.
        num_features: size of an input.
        num_classes: number of labels.
        seed: random seed.

    Returns:
        Examples, `{"image": float32 [examples, num_features], "label": int32 [examples]}`, and for
        each client the indices of its examples, for `cohort_rounds`.

    Raises:
        ValueError: a size is below 1, or a variance is below 0.

    Example:
        >>> examples, population = logistic_clients(30, alpha=1.0, beta=1.0)
        >>> examples["image"].shape[1], len(population), sum(map(len, population)) > 1500
        (60, 30, True)

    Reference:
        Li et al., Federated Optimization in Heterogeneous Networks, arXiv:1812.06127, section 5.1.
    """
    check_logistic_sizes(num_clients, num_features, num_classes)
    for name, variance in ("alpha", alpha), ("beta", beta):
        if not 0 <= real_number(name, variance) < np.inf:
            raise ArgumentError(f"{name} is {variance}, expected a finite variance of at least 0.")
    rng = np.random.default_rng(seed)
    sizes = np.minimum(50 + rng.lognormal(4, 2, num_clients), 5000).astype(np.int64)
    deviation = np.arange(1, num_features + 1) ** -0.6
    clients = []
    for size in sizes:
        u, b = rng.normal(0, np.sqrt(alpha)), rng.normal(0, np.sqrt(beta))
        weights = rng.normal(u, 1, (num_features, num_classes))
        bias = rng.normal(u, 1, num_classes)
        center = rng.normal(b, 1, num_features)
        image = center + deviation * rng.normal(size=(size, num_features))
        clients.append((image, image @ weights + bias))
    return gather_examples(clients)


def gather_examples(
    clients: Sequence[tuple[NDArray[Any], NDArray[Any]]],
) -> tuple[dict[str, NDArray[Any]], list[NDArray[np.int64]]]:
    """Concatenate inputs, and labels from logits, of clients; return the indices of each client."""
    images, labels = (np.concatenate(values) for values in zip(*clients, strict=True))
    ends = np.cumsum([len(image) for image, _ in clients])
    examples = {
        "image": images.astype(np.float32),
        "label": np.argmax(labels, axis=1).astype(np.int32),
    }
    return examples, np.split(np.arange(len(images)), ends[:-1])


def check_logistic_sizes(num_clients: int, num_features: int, num_classes: int) -> None:
    """Check the sizes of a population with logistic models."""
    check_integers(num_clients=num_clients, num_features=num_features, num_classes=num_classes)
    if min(num_clients, num_features, num_classes) < 1:
        raise ArgumentError(
            f"num_clients is {num_clients}, num_features {num_features} and num_classes "
            f"{num_classes}, expected at least 1 each."
        )
