"""One stage of a program over sites: what is asked of them, and the merge of their replies."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedpax.errors import FedpaxError
from fedpax.sites.rounds.contract import Json
from fedpax.sites.rounds.coordinator_program import check_masks, expected_arrays
from fedpax.sites.rounds.downlink import Downlink, whole
from fedpax.sites.rounds.exchange import (
    ROW,
    SHARED,
    SHOWN,
    TERM,
    Exchange,
    Reply,
    Task,
    in_order,
    new_token,
    numbered,
)
from fedpax.sites.rounds.round_rules import RoundRules
from fedpax.sites.rounds.secret_terms import ask_for_sums, check_is_sum
from fedpax.sites.rounds.update_rows import UpdateRows
from fedpax.transforms.stages import Request, Stages


class Participants(NamedTuple):
    """The clients that take part in a stage, by site.

    Attributes:
        clients: their numbers among the clients of all sites.
        slots: their places in the program.
        firsts: the number of each site's first client.
    """

    clients: Mapping[str, Sequence[int]]
    slots: Mapping[str, Sequence[int]]
    firsts: Mapping[str, int]

    def of(self, sites: Mapping[str, Any]) -> "Participants":
        """Return those of some sites."""
        parts = [{n: x for n, x in part.items() if n in sites} for part in self]
        return Participants(*parts)


class StageCalls:
    """Asks sites for the stages of programs."""

    def __init__(
        self,
        exchange: Exchange,
        rules: RoundRules,
        folder: Path,
        note: Callable[[str], None],
        stop: Callable[[], bool],
    ) -> None:
        self._exchange, self._rules, self._note, self._stop = exchange, rules, note, stop
        self._folder = folder  # of large updates
        self._downlink = Downlink(rules.down, new_token())

    def ask(
        self,
        divided: Stages,
        request: Request,
        token: str,
        header: Json,
        who: Participants,
        quorum: int,
    ) -> dict[str, Reply] | None:
        """Ask for a stage, as `Exchange.ask` does."""
        rows = [np.asarray(x) for x in request.rows]
        shared = numbered(SHARED, request.shared)
        is_model = header["task"] == "round" and request.stage == 0
        packet = self._downlink.pack(shared) if is_model else whole(shared)
        own = {}
        for name, chosen in who.clients.items():
            site = self._exchange.sites.get(name)
            assert site is not None
            slots = who.slots[name]
            fields: dict[str, Any] = {"clients": list(chosen), "slots": list(slots)}
            fields |= {"counted": site.counted, "first_client": who.firsts[name]}
            own[name] = fields, numbered(ROW, [x[np.array(slots)] for x in rows])
        task = Task(
            token,
            {**header, "stage": request.stage, "last_stage": len(divided) - 1},
            packet,
            own,
            expected_arrays(divided[request.stage]),
        )
        rules = self._rules
        check_masks(divided, rules.secure_sums)
        if not rules.secure_sums:
            return self._exchange.ask(task, quorum, rules.round_seconds, self._stop)
        stage = divided[request.stage]
        check_is_sum(stage, divided.adds(request.stage))
        try:
            return ask_for_sums(
                self._exchange,
                task,
                stage,
                quorum,
                rules.round_seconds,
                self._stop,
                threshold=rules.secure_threshold,
                clients={name: len(chosen) for name, chosen in who.clients.items()},
                least_clients=divided.least_masked or 0,
            )
        except FedpaxError as error:
            self._note(f"no secure sum: {error}")
            return None

    def merge(
        self,
        divided: Stages,
        request: Request,
        replies: Mapping[str, Reply],
        slots: Mapping[str, Sequence[int]],
    ) -> tuple[Any, Any, list[int]]:
        """Merge the terms of sites, in the order of their names."""
        merge = divided.merge(request.stage)
        merged: Any = ()
        values = divided[request.stage].shown
        with UpdateRows(values, divided.placement.size, self._folder) as shown:
            for name, reply in without_faults(replies).items():
                arrays = reply.arrays
                if terms := in_order(TERM, arrays):  # the first reply has all of a secure sum
                    merged = merge(merged, terms) if merged else terms
                shown.add(slots[name], in_order(SHOWN, arrays))
            return (tuple(jnp.asarray(x) for x in merged), *shown.finish())


def without_faults(replies: Mapping[str, Reply]) -> dict[str, Reply]:
    """Return the replies that count."""
    return {name: reply for name, reply in replies.items() if "fault" not in reply.header}
