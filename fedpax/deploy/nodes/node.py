"""A node: one participant's part of a program, on its own data and its own disk."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from fedpax.clients.cohort import Cohort
from fedpax.data.rounds.cohort_rounds import CohortRounds, cohort_rounds
from fedpax.deploy.encoded_values import decode_list, encode_list
from fedpax.deploy.nodes.kept_state import KeptState, KeptStateError
from fedpax.deploy.nodes.node_sums import KIND, NodeSums
from fedpax.deploy.nodes.vectors import to_vector
from fedpax.deploy.packets import Packet
from fedpax.deploy.round_program import RoundProgram
from fedpax.deploy.runtime import ArtifactError
from fedpax.errors import ArgumentError, ArgumentTypeError, FedpaxError
from fedpax.files import read_file
from fedpax.populations.client_sampler import ClientSampler
from fedpax.transforms.stage_noise import draw_noise

_LOG = logging.getLogger("fedpax")


class Node(NamedTuple):
    """What a function that loads a participant's data is told.

    Attributes:
        participant: the participant's number in the population, from 0.
        num_participants: size of the population.
        config: `--node-config` of `flower-supernode`; in a simulation `partition-id` and
            `num-partitions`.
        steps: the most local steps of a round; further batches are left out.
    """

    participant: int
    num_participants: int
    config: Mapping[str, Any]
    steps: int


Examples: TypeAlias = Any
"""Examples as `fedpax.data.cohort_rounds` takes them: a dict of arrays `[examples, ...]`."""
LoadData: TypeAlias = Callable[[Node], Examples | Callable[[int], Cohort]]
"""A function that returns a participant's examples, or `round -> Cohort` of it alone."""


class NodeProgram:
    """Answers the packets of a server with a program."""

    def __init__(
        self,
        program: RoundProgram,
        load_data: LoadData,
        folder: Path,
        *,
        counts_releases: bool = False,
    ) -> None:
        self.program, self.folder = program, folder
        self._counts_releases = counts_releases
        self._load_data = load_data
        self._cohorts: dict[int, Callable[[int], Cohort]] = {}
        self._least_masked = program.artifact.manifest["least_masked"]
        self._sums = NodeSums(self._least_masked or 0)

    def answer(self, packet: Packet, config: Mapping[str, Any]) -> Packet:
        """Return the answer to a packet: the answer of a stage, or a refusal in words."""
        values = packet.values
        identity = {"program": self.program.program, "jax": jax.__version__}
        try:
            if values["program"] != self.program.program:
                raise ArgumentError(
                    f"This node has program {self.program.program[:12]}, and the server "
                    f"{str(values['program'])[:12]}, expected the same. Start the same app on both."
                )
            if values["kind"] == "greeting":
                return Packet({**identity, "partition": int(config.get("partition-id", -1))})
            if values["kind"] == KIND:
                count = functools.partial(self._count, values, values["session"], config)
                return self._sums.answer(packet, before_opening=count)
            return self._train(packet, config)
        except Exception as error:  # the server tells it; the run continues without this node
            return Packet({**identity, "refusal": refusal_words(error)})

    def _train(self, packet: Packet, config: Mapping[str, Any]) -> Packet:
        values = packet.values
        if self._least_masked is not None and not {"session", "secure_bound"} & values.keys():
            raise ArgumentError(
                "The server asks for terms without masks, expected secure=true: the program has "
                "secure_mean() or private_secure_mean()."
            )
        least, threshold = self._least_masked, int(values.get("secure_threshold", 0))
        if least is not None and "secure_bound" in values and threshold < least:
            raise ArgumentError(
                f"The server's sum opens with {threshold} participants, expected at least "
                f"min_participants={least}, with which the noise has the stated size. Set a "
                "larger quorum at the server."
            )
        stage, key, counted = int(values["stage"]), str(values["key"]), str(values["counted"])
        participant, seed = int(values["participant"]), int(values["seed"])
        messages = self.program.artifact.manifest["stages"]
        shared, rows = (decode_list(x) for x in packet.arrays)
        kept = self._kept(str(values["run"]), participant)
        state = kept.read(counted) if counted else self.program.initial_own(seed, participant)
        if state is None:
            raise KeptStateError(
                f"{kept.folder} has no state of round {counted}, expected the state that the "
                f"server counted of participant {participant}. Copy the folder from the node's "
                "former disk, or start a new run."
            )
        between = kept.read(f"{key}-{stage - 1}") if stage else {}
        if between is None:
            raise KeptStateError(
                f"{kept.folder} has no values of stage {stage - 1} of round {key}: this node "
                "started again within the round. It takes part in the next round."
            )
        data = self._data(participant, int(values["round"]), config)
        own = self._own(stage, data | state | between) | draw_noise(messages[stage]["noise"])
        client = self.program.artifact.client(stage)
        terms, shown, new = client(int(values["index"]), shared, rows, own)
        new = between | new
        if stage + 1 == len(messages):
            kept.write(key, {name: new.get(name, value) for name, value in state.items()})
            kept.keep_only([key, counted] if counted else [key])
        else:
            kept.write(f"{key}-{stage}", new)
        if "session" in values:
            return self._sums.answer(packet, terms)
        if "secure_bound" in values:
            # Flower's own protocol does not tell this program when the sum is opened.
            self._count(values, key, config)
            bound, levels = float(values["secure_bound"]), int(values["secure_levels"])
            sent = [to_vector(terms, bound, levels)]
        else:
            sent = [encode_list(terms), encode_list(shown)]
        return Packet({"program": self.program.program}, sent)

    def _count(self, values: Mapping[str, Any], name: str, config: Mapping[str, Any]) -> None:
        """Count a sum that is opened if it is private, or raise if there have been too many."""
        has_noise = [bool(stage["noise"]) for stage in self.program.artifact.manifest["stages"]]
        if self._counts_releases and has_noise[int(values["stage"])]:
            folder = self.folder / ".releases" / self.program.program[:16]
            count_release(
                folder / str(int(values["participant"])),
                f"{values['run']} {name} {values['stage']}",
                rounds=int(config.get(ROUNDS_FIELD, self.program.settings.rounds)),
                sums=sum(has_noise),
            )

    def _kept(self, run: str, participant: int) -> KeptState:
        if not run.replace("-", "").replace("_", "").isalnum():
            raise ArgumentError(f"The run is named {run!r}, expected letters and digits.")
        return KeptState(self.folder / run / self.program.program[:16] / str(participant))

    def _data(
        self, participant: int, round_number: int, config: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the participant's values of a round's cohort, by name."""
        if participant not in self._cohorts:
            steps = (self.program.batch or (0, 0))[0]
            node = Node(participant, self.program.settings.num_clients, config, steps)
            data = _without_values(self._load_data, node)
            self._cohorts[participant] = _cohorts(self.program, node, data)
        cohort = self._cohorts[participant](round_number)
        names, values = self.program.names["cohort"], {}
        for path, leaf in jax.tree.leaves_with_path(cohort):
            if (name := names.get(jax.tree_util.keystr(path))) is not None:
                values[name] = np.asarray(leaf)[0]
        return values

    def _own(self, stage: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a stage's own values, with the dtypes and shapes that it takes."""
        own = {}
        for described in self.program.artifact.manifest["stages"][stage]["own"]:
            name, shape, dtype = described["name"], described["shape"], described["dtype"]
            if name not in values:
                raise ArgumentError(
                    f"load_data() gives no {name}, expected {dtype}{shape}. Return examples with "
                    "this field, or a function round -> Cohort that sets it."
                )
            value = values[name]
            if list(value.shape) != shape or str(value.dtype) != dtype:
                raise ArgumentTypeError(
                    f"load_data() gives {name} as {value.dtype}{list(value.shape)}, expected "
                    f"{dtype}{shape}: a participant's steps and examples, without the axis of "
                    "participants. Convert the examples, or export the program again."
                )
            own[name] = value
        return own


def refusal_words(error: Exception) -> str:
    """Return what the server is told of an error: words of fedpax, or the error's type alone."""
    if isinstance(error, FedpaxError | ArtifactError | ImportError):
        return str(error)
    return _type_alone(error)


def _type_alone(error: Exception) -> str:
    """Return the type of an error, whose message the log of this node keeps."""
    _LOG.error("An error at this node", exc_info=error)
    return (
        f"{type(error).__name__}. The log of its node has the message, which can have values of "
        "the data."
    )


class OneParticipant(Sequence[Any]):
    """A population of which one participant has examples here."""

    def __init__(self, number: int, participant: int, examples: NDArray[np.int64]) -> None:
        self._number, self._participant, self._examples = number, participant, examples

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, i: Any) -> Any:
        return self._examples if i == self._participant else self._examples[:0]


def _cohorts(program: RoundProgram, node: Node, data: Any) -> Callable[[int], Cohort]:
    """Return `round -> cohort` of a participant's data: the batches that a whole round has."""
    if callable(data):
        return lambda number: _checked_cohort(_without_values(data, number))
    if isinstance(data, CohortRounds):
        rounds = data
    else:
        rounds = _rounds_of(program, node, data)
    own = np.array([node.participant])
    return lambda number: _without_values(rounds.read_clients, number, own)


def _without_values(read: Callable[..., Any], *args: Any) -> Any:
    """Read a participant's data; an error's text, which can have values of them, stays here."""
    try:
        return read(*args)
    except Exception as error:
        raise ArgumentError(
            f"Reading this participant's data raised {_type_alone(error)} Correct the data there."
        ) from error


def _rounds_of(program: RoundProgram, node: Node, examples: Any) -> CohortRounds:
    settings = program.settings
    if program.batch is None:
        raise ArgumentError(
            "load_data() returns examples, but the program reads no batches, expected a function "
            "round -> Cohort."
        )
    columns = examples.values() if isinstance(examples, Mapping) else [examples]
    number = len(next(iter(columns)))
    return cohort_rounds(
        examples,
        OneParticipant(settings.num_clients, node.participant, np.arange(number)),
        ClientSampler(settings.num_clients, 1, settings.cohort_seed),
        batch_size=program.batch[1],
        local_epochs=settings.local_epochs,
        max_steps=program.batch[0],
        seed=settings.cohort_seed,
        preprocess=dict,
    )


def _checked_cohort(cohort: Any) -> Cohort:
    if not isinstance(cohort, Cohort):
        raise ArgumentTypeError(
            f"The function that load_data() returns gave a {type(cohort).__name__}, expected a "
            "fedpax.Cohort of one participant: arrays [1, steps, batch, ...]."
        )
    return cohort


# ---- the private sums that a participant has been part of

ROUNDS_FIELD = "private-rounds"
"""The setting of a node that allows another number of rounds."""
_BYTES = 1 << 26


class PrivacySpentError(FedpaxError):
    """A private sum beyond those for which epsilon is stated."""


def count_release(path: Path, name: str, *, rounds: int, sums: int) -> None:
    """Count a private sum that a participant helps to open, unless it is counted already."""
    try:
        opened = list(filter(None, read_file(path, _BYTES).decode().splitlines()))
    except FileNotFoundError:
        opened = []
    if name in opened:
        return
    if len(opened) >= rounds * sums:
        raise PrivacySpentError(
            f"This participant has been part of {len(opened)} private sums of the program, "
            f"expected at most {rounds * sums}, those of {rounds} rounds: its epsilon is stated "
            "for them, and further ones add to it. To allow more, its owner sets --node-config "
            f"'{ROUNDS_FIELD}=...' to a larger number of rounds, over all runs."
        )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        # A kill can leave half of a line: the next record starts on a new line.
        file.write(f"\n{name}\n".encode())
        file.flush()
        os.fsync(file.fileno())
