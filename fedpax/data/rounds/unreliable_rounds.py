"""unreliable_rounds: clients that drop out of a round, and stragglers that miss its end."""

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy.typing import ArrayLike

from fedpax.clients.cohort import Cohort
from fedpax.data.rounds.cohort_stream import CohortRounds
from fedpax.data.rounds.stream_parts import check_state
from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives.casts import checked_cast
from fedpax.sources.shuffle import hash_key

_DROPOUT, _DELAY = 1, 2  # part of the keys, so that the draws are independent of each other


class RoundOutcome(NamedTuple):
    """Outcome of a round for its clients.

    Attributes:
        reported: booleans `[clients]`, True where the server received the client's update.
        seconds: float64 `[clients]`, when the client's update arrives, from the start of the round;
            infinity where there is none.
        round_seconds: when the round ends.
    """

    reported: Bool[np.ndarray, " clients"]
    seconds: Float64[np.ndarray, " clients"]
    round_seconds: float


class _Failures(NamedTuple):
    """When clients fail or are late; the arguments of `unreliable_rounds`."""

    dropout_probability: float
    seconds_per_step: Float64[np.ndarray, " population"]
    seconds_per_report: float
    delay_spread: float
    deadline: float  # infinity without one
    num_reports: int | None
    seed: int


class UnreliableRounds:
    """An endless iterator over the rounds of clients that can fail; made by `unreliable_rounds`.

    Attributes:
        outcome: the outcome of the last round; None before the first one.
        shapes: as of `CohortRounds`.
        items_per_round: the number of items of a round.
        item_unit: the unit of an item.
        num_clients: the number of clients of the population.
        settings: as of `CohortRounds`.
    """

    def __init__(
        self,
        rounds: CohortRounds,
        failures: _Failures,
        settings: dict[str, int | str],
    ) -> None:
        self.outcome: RoundOutcome | None = None
        self.shapes, self.item_unit = rounds.shapes, rounds.item_unit
        self.items_per_round, self.num_clients = rounds.items_per_round, rounds.num_clients
        self.settings = settings
        self._rounds, self._failures = rounds, failures

    def __iter__(self) -> Iterator[Cohort]:
        return self

    def fingerprint(self) -> dict[str, str]:
        """Return the fingerprint of the data: see `IdentifiedStream`."""
        return self._rounds.fingerprint()

    def __next__(self) -> Cohort:
        round_number = int(self._rounds.get_state()["round"])
        cohort = next(self._rounds)
        ids = np.asarray(cohort.client_ids, np.int64)
        self.outcome = self._play(round_number, ids, np.asarray(cohort.num_steps))
        reported = self.outcome.reported
        num_examples, num_steps = np.asarray(cohort.num_examples), np.asarray(cohort.num_steps)
        return cohort._replace(
            num_examples=np.where(reported, num_examples, 0),
            num_steps=np.where(reported, num_steps, 0),
            client_ids=checked_cast(np.where(reported, ids, -1), np.int32, "client_ids"),
        )

    def _play(
        self, round_number: int, ids: Int64[np.ndarray, " clients"], num_steps: np.ndarray
    ) -> RoundOutcome:
        """Compute who reports when; it depends on seed, round and client alone."""
        failures = self._failures

        def uniform(draw: int) -> Float64[np.ndarray, " clients"]:
            bits = hash_key(failures.seed, draw, round_number, ids) >> np.uint64(12)
            return (bits + 0.5) * 2.0**-52

        # A lognormal factor by the Box-Muller transformation.
        normal = np.sqrt(-2 * np.log(uniform(_DELAY))) * np.cos(2 * np.pi * uniform(_DELAY + 1))
        computing = num_steps * failures.seconds_per_step[np.maximum(ids, 0)]
        seconds = (computing + failures.seconds_per_report) * np.exp(failures.delay_spread * normal)
        lost = (ids < 0) | (num_steps == 0) | (uniform(_DROPOUT) < failures.dropout_probability)
        seconds = np.where(lost, np.inf, seconds)
        in_time = np.isfinite(seconds) & (seconds <= failures.deadline)
        order = np.lexsort((ids, seconds))
        wanted = len(ids) if failures.num_reports is None else failures.num_reports
        reported = np.zeros(len(ids), np.bool_)
        reported[order[:wanted]] = True
        reported &= in_time
        last = float(seconds[reported].max(initial=0.0))
        # Without enough reports the server waits until the deadline, if there is one.
        expected = wanted if failures.num_reports is not None else int(np.sum(ids >= 0))
        waits = reported.sum() < expected and np.isfinite(failures.deadline)
        return RoundOutcome(reported, seconds, failures.deadline if waits else last)

    def get_state(self) -> dict[str, Any]:
        """Return the stream's position after the last round, as JSON values."""
        return {"settings": dict(self.settings), "rounds": self._rounds.get_state()}

    def set_state(self, state: Any) -> None:
        """Move to a saved position."""
        self._rounds.set_state(check_state(state, self.settings, "rounds"))
        self.outcome = None


def unreliable_rounds(
    rounds: CohortRounds,
    *,
    dropout_probability: float = 0.0,
    seconds_per_step: ArrayLike = 1.0,
    seconds_per_report: float = 0.0,
    delay_spread: float = 0.0,
    deadline: float | None = None,
    num_reports: int | None = None,
    seed: int = 0,
) -> UnreliableRounds:
    """Let clients drop out, and end rounds without their stragglers.

    Each round selects the cohort of `rounds`. Client i reports its update after

        (num_steps_i * seconds_per_step_i + seconds_per_report) * exp(delay_spread * N(0, 1))

    seconds, unless it drops out. The round takes the first `num_reports` reports until the
    deadline. Every other client has `num_steps` 0, `num_examples` 0 and `client_ids` -1: it has no
    weight, and its state does not change.

    Args:
        rounds: the result of `cohort_rounds`.
        dropout_probability: probability that a client fails before it reports, from 0 to below 1.
        seconds_per_step: seconds of a local step, of all clients or float `[num_clients]`.
        seconds_per_report: seconds of sending model and update.
        delay_spread: standard deviation of the logarithm of a client's time from round to round.
        deadline: seconds after which the round ends. Default None: none.
        num_reports: number of reports after which the round ends. Default None: of all clients that
            have not dropped out.
        seed: random seed of dropouts and delays.

    Returns:
        An endless iterator over `fedpax.Cohort`, of the shapes of `rounds`. Its attribute `outcome`
        is the `RoundOutcome` of the last round.

    Raises:
        TypeError: `rounds` is not from `cohort_rounds`.
        ValueError: an argument is out of its range; `num_reports` is above the cohort's size.

    Example:
        >>> from fedpax.data import ClientSampler, cohort_rounds, unreliable_rounds
        >>> examples = {"image": np.zeros((40, 2, 2, 1), np.float32), "label": np.arange(40)}
        >>> clients = [np.arange(10 * k, 10 * k + 2 * k + 2) for k in range(4)]
        >>> rounds = cohort_rounds(examples, clients, ClientSampler(4, 4), batch_size=2)
        >>> rounds = unreliable_rounds(rounds, num_reports=3)  # the slowest client is cut
        >>> cohort = next(rounds)
        >>> sorted(cohort.client_ids.tolist()), rounds.outcome.round_seconds
        ([-1, 0, 1, 2], 3.0)

    Reference:
        Bonawitz et al., arXiv:1902.01046, sections 2.2 and 9.
    """
    if not isinstance(rounds, CohortRounds):
        raise ArgumentTypeError(
            f"unreliable_rounds(): rounds is a {type(rounds).__name__}, expected the result of "
            "cohort_rounds(), which has the number of steps and the index of each client. Apply "
            "unreliable_rounds() once, and directly to cohort_rounds()."
        )
    num_clients, cohort_size = (int(rounds.settings[k]) for k in ("num_clients", "cohort_size"))
    speeds = checked_cast(seconds_per_step, np.float64, "seconds_per_step")
    if speeds.shape not in ((), (num_clients,)) or not np.all(np.isfinite(speeds) & (speeds >= 0)):
        raise ArgumentError(
            f"seconds_per_step has shape {list(speeds.shape)}, expected a finite number of at "
            f"least 0, or one for each of the {num_clients} clients."
        )
    if not 0 <= dropout_probability < 1:
        raise ArgumentError(
            f"dropout_probability is {dropout_probability}, expected at least 0 and below 1. If "
            "all clients drop out, no round changes the model."
        )
    for name, value in (("seconds_per_report", seconds_per_report), ("delay_spread", delay_spread)):
        if not 0 <= value < np.inf:
            raise ArgumentError(f"{name} is {value}, expected a finite number of at least 0.")
    if deadline is not None and not deadline > 0:
        raise ArgumentError(
            f"deadline is {deadline}, expected seconds above 0, or None to wait for every client."
        )
    if num_reports is not None and not 1 <= num_reports <= cohort_size:
        raise ArgumentError(
            f"num_reports is {num_reports}, expected 1 to {cohort_size}, the size of the cohort. "
            "Select more clients with ClientSampler(cohort_size=...)."
        )
    settings: dict[str, int | str] = dict(rounds.settings) | {
        "dropout_probability": str(dropout_probability),
        "seconds_per_step": zlib.crc32(speeds.astype("<f8").tobytes()),
        "seconds_per_report": str(seconds_per_report),
        "delay_spread": str(delay_spread),
        "deadline": str(deadline),
        "num_reports": str(num_reports),
        "unreliable_seed": seed,
    }
    failures = _Failures(
        dropout_probability,
        np.broadcast_to(speeds, (num_clients,)),
        seconds_per_report,
        delay_spread,
        np.inf if deadline is None else deadline,
        num_reports,
        seed,
    )
    return UnreliableRounds(rounds, failures, settings)
