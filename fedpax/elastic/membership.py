"""The part of a training process in an elastic job: which participants train, and its copies."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

import jax

from fedpax.algorithm import State
from fedpax.checkpoints.run_position import StreamState, gather_stream_state
from fedpax.console import print_error
from fedpax.elastic.host_copies import (
    HostCopies,
    HostCopy,
    remove_copies,
    rows_on_this_process,
)
from fedpax.processes.communication import all_agree, gather_json

MEMBERSHIP = "FEDPAX_MEMBERSHIP"
"""The environment variable with which the supervisor tells its training process the membership."""


@dataclasses.dataclass(frozen=True)
class Membership:
    """The part of a training process in an elastic job."""

    folder: str  # the folder in the host's memory for this process's copies of the state
    job: str
    copy_every: int  # rounds between copies; 0: none
    # The round whose copies the processes resume from. None: from the newest checkpoint.
    round: int | None
    # The participants that train, such as islands 0, 1 and 3 of 4. None: they do not depend on the
    # processes.
    participants: list[int] | None

    def to_json(self) -> str:
        """Return the membership as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Membership":
        """Return the membership that `to_json` has written."""
        return cls(**json.loads(text))

    @property
    def copies(self) -> HostCopies:
        """This process's copies."""
        return HostCopies(Path(self.folder), self.job)

    def find_copy(self) -> HostCopy | None:
        """Return the copy to resume from; None unless every process has one. A collective."""
        if self.round is None:
            return None
        copy = self.copies.load(self.round)
        return copy if all_agree(copy is not None) else None

    def restore(self, copy: HostCopy, like: State) -> State | None:
        """Restore a state; None unless every process has the values that it needs. A collective."""
        state = copy.restore(like, self.participants)
        return state if all_agree(state is not None) else None

    def rejoin(self, state: State, saved: Sequence[int]) -> State:
        """Give participants that were absent from a checkpoint the state of their newest copy."""
        # From the newest round of which all processes of a participant have a copy; without one,
        # its state does not change. A collective.
        participants = self.participants or []
        absent = [number for number in participants if number not in saved]
        if not absent:
            return state
        copies = {number: self.copies.load(number) for number in self.copies.rounds()}
        held_here = [
            number for number in absent if number in rows_on_this_process(state, participants)
        ]
        held = {
            number: [
                round_number
                for round_number, copy in copies.items()
                if copy is not None and number in (copy.participants or ())
            ]
            for number in held_here
        }
        everyone = gather_json(list(held.items())) if jax.process_count() > 1 else [held.items()]
        for number in held_here:
            rounds = [
                set(rounds_held)
                for each in everyone
                for other, rounds_held in each
                if other == number
            ]
            copy = copies.get(max(set.intersection(*rounds), default=-1))
            if copy is not None:
                state = copy.replace_rows(state, participants, [number])
        return state


def find_membership() -> Membership | None:
    """Return the membership of this process; None if no supervisor has started it."""
    text = os.environ.get(MEMBERSHIP)
    return Membership.from_json(text) if text else None


class CopiesOfRounds:
    """The copies that a process makes while it trains; none without a membership."""

    def __init__(self, membership: Membership | None) -> None:
        self._membership = membership
        self._full = False

    def is_due(self, round_number: int) -> bool:
        """Return whether the state after a round is copied."""
        every = 0 if self._membership is None else self._membership.copy_every
        return every > 0 and round_number % every == 0

    def clear(self) -> None:
        """Remove the copies."""
        if self._membership is not None:
            remove_copies(Path(self._membership.folder))

    def save(self, round_number: int, state: State, stream_state: StreamState) -> None:
        """Copy the state after a round. A collective."""
        # If the memory is full, a message says so, and this process makes no more copies.
        assert self._membership is not None
        complete = gather_stream_state(stream_state)
        if self._full:
            return
        try:
            self._membership.copies.save(
                round_number, state, complete, self._membership.participants
            )
        except OSError as error:
            self._full = True
            print_error(
                f"fedpax: elastic: no copy of the state fits {self._membership.folder} "
                f"({error.strerror or error}): after a failure the run resumes from its "
                "checkpoint. Set --copy_dir to a folder with room for two copies of this "
                "process's state, or --copy_every=0."
            )
