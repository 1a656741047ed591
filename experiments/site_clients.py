"""Client experiments over sites: a site's clients among those of all sites."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpax.clients.cohort import Cohort
from fedpax.clients.cohort_stream import CohortStream
from fedpax.data import ClientSampler, CohortRounds, Partition


class SitePopulation(Sequence[NDArray[np.int64]]):
    """The clients of all sites, of which those of other sites have no examples here.

    Args:
        own: the examples of each client of this site.
        first: number of its first client.
        total: number of clients of all sites.
    """

    def __init__(self, own: Partition, first: int, total: int) -> None:
        self._own, self._first, self._total = own, first, total

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, client: Any) -> Any:
        place = int(client) - self._first
        if 0 <= place < len(self._own):
            return self._own[place]
        return np.zeros(0, np.int64)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        return (self[client] for client in range(self._total))


class ChosenClients(ClientSampler):
    """A sampler whose clients the coordinator has chosen."""

    chosen: Sequence[int] = ()

    def sample(self, round_number: int) -> NDArray[np.int64]:
        """Return the chosen clients."""
        return np.array(self.chosen, np.int64)


def drawer(
    rounds: CohortRounds, stream: CohortStream, sampler: ChosenClients
) -> Callable[[int, Sequence[int]], Cohort]:
    """Return the function `(round, clients) -> cohort` of a site."""
    start: Any = stream.get_state()

    def draw(round_number: int, clients: Sequence[int]) -> Cohort:
        object.__setattr__(sampler, "chosen", tuple(clients))
        stream.set_state({**start, "round": round_number})
        return next(stream)

    return draw
