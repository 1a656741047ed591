"""Learning rate schedules that optax does not have: warmup-stable-decay, and warm restarts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax


def stable_decay(
    peak: float, final: float, *, stable_steps: int, decay_steps: int
) -> optax.Schedule:
    """Make a schedule that is constant first and decays at the end (WSD, without its warmup).

    With t steps so far, S stable steps and D decay steps:

        eta(t) = peak                                                        t < S
        eta(t) = final + (peak - final) (1 - sqrt((t - S) / D))              S <= t < S + D
        eta(t) = final                                                       S + D <= t.

    No step of the stable phase depends on the length of the run, so a run can be extended while it
    is in this phase. MiniCPM leaves the form of the decay open, and uses an exponential; this is
    the form that Hägele et al. found best, "1-sqrt".

    Returns:
        The learning rate as a function of the number of steps so far.

    Example:
        >>> rate = stable_decay(1.0, 0.1, stable_steps=6, decay_steps=4)
        >>> [round(float(rate(t)), 3) for t in (0, 6, 7, 9, 10)]
        [1.0, 1.0, 0.55, 0.221, 0.1]

    Reference:
        Hu et al., MiniCPM, arXiv:2404.06395, section 4 (WSD). Hägele et al., Scaling Laws and
        Compute-Optimal Training Beyond Fixed Training Durations, arXiv:2405.18392, section 3
        (1-sqrt).
    """

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        done = jnp.clip((jnp.asarray(count) - stable_steps) / max(decay_steps, 1), 0, 1)
        if not decay_steps:
            done = (jnp.asarray(count) >= stable_steps).astype(jnp.float32)
        return final + (peak - final) * (1 - jnp.sqrt(done))

    return rate


def warm_restarts(
    peak: float, final: float, *, num_steps: int, first_cycle: int, factor: int = 2
) -> optax.Schedule:
    """Make a schedule of cosine cycles, each from the peak and longer than the one before (SGDR).

    Cycle i has T_i = T_0 f^i steps. With T_cur steps since its start:

        eta = final + (peak - final) (1 + cos(pi T_cur / T_i)) / 2.

    Args:
        peak: learning rate at the start of each cycle.
        final: learning rate that a cycle approaches at its end.
        num_steps: steps of the schedule, at least 1; the last cycle can be incomplete.
        first_cycle: T_0, steps of the first cycle, at least 1.
        factor: f, T_mult in the paper, at least 1: with 1 all cycles have the same length.

    Returns:
        The learning rate as a function of the number of steps so far.

    Example:
        >>> rate = warm_restarts(1.0, 0.0, num_steps=28, first_cycle=4)  # cycles of 4, 8, 16
        >>> [round(float(rate(t)), 3) for t in (0, 2, 4, 8, 12, 20)]
        [1.0, 0.5, 1.0, 0.5, 1.0, 0.5]

    Reference:
        Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts,
        arXiv:1608.03983, equation 5. The paper anneals after each batch, as here.
    """
    starts, lengths = [0], [first_cycle]
    while starts[-1] + lengths[-1] < num_steps:
        starts.append(starts[-1] + lengths[-1])
        lengths.append(lengths[-1] * factor)

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        count = jnp.asarray(count)
        cycle = jnp.searchsorted(np.array(starts), count, side="right") - 1
        done = (count - jnp.array(starts)[cycle]) / jnp.array(lengths)[cycle]
        return final + (peak - final) * (1 + jnp.cos(jnp.pi * jnp.clip(done, 0, 1))) / 2

    return rate
