"""The stages of a program on one machine: the reference for other engines."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from fedpax.deploy.participant_processes import ParticipantProcesses
from fedpax.errors import ArgumentError
from fedpax.transforms.stages import Request, Stages


def run_local(
    stages: Stages,
    *args: Any,
    participants: Sequence[int] | None = None,
    processes: int | None = None,
) -> Any:
    """Run the stages of a program on this machine, each participant by itself.

    Args:
        stages: the stages, as `fedpax.stages` makes them.
        *args: the arguments of the program, all of them arrays.
        participants: the participants that answer. The others keep their states. Default None: all.
        processes: number of processes to which the participants are dealt. A process has the values
            of its participants alone, and runs the exported stages; with the number of
            participants, each has a process of its own. Default None: all run in this process.

    Returns:
        The result of the program.

    Raises:
        ArgumentError: there is no participant of a number in `participants`, or `processes` is
            below 1.
        ParticipantProcessError: a process has ended.

    Example:
        >>> import fedpax, jax.numpy as jnp
        >>> @fedpax.program(clients=3)
        ... def average(w, x):
        ...     return fedpax.federated_mean(fedpax.federated_map(lambda x: w * x, x))
        >>> args = 2.0, jnp.array([1.0, 4.0, 7.0])
        >>> stages = fedpax.stages(average, *args)
        >>> run_local(stages, *args).item(), run_local(stages, *args, participants=[0, 1]).item()
        (8.0, 5.0)
    """
    size = stages.placement.size
    answer = list(range(size) if participants is None else participants)
    for i in answer:
        if not 0 <= i < size:
            raise ArgumentError(
                f"run_local(): participants has {i}, expected numbers from 0 to {size - 1}, of the "
                f"{size} {stages.placement.name}."
            )
    if processes is not None and processes < 1:
        raise ArgumentError(f"run_local(): processes={processes}, expected at least 1, or None.")
    states, known = stages.own(*args), stages.known(*args)
    own = {i: known | {name: rows[i] for name, rows in states.items()} for i in answer}
    if processes is None:
        result, kept = _run(stages, args, _Participants(stages, own))
    else:
        with ParticipantProcesses(stages, own, min(processes, len(own))) as elsewhere:
            result, kept = _run(stages, args, elsewhere)
    for name, rows in states.items():
        changed = [i for i in own if name in kept[i]]
        if changed:
            new_rows = jnp.stack([kept[i][name] for i in changed])
            states[name] = rows.at[jnp.array(changed)].set(new_rows)
    return stages.with_kept(result, args, states)


class _Participants:
    """Participants in this process."""

    def __init__(self, stages: Stages, own: Mapping[int, Mapping[str, Any]]) -> None:
        self._stages, self._own = stages, own
        self._kept: dict[int, dict[str, Any]] = {i: {} for i in own}

    def answers(self, request: Request) -> dict[int, tuple[Sequence[Any], Sequence[Any]]]:
        """Return the terms and the shown values of each participant."""
        client = self._stages.client(request.stage)
        answers: dict[int, tuple[Sequence[Any], Sequence[Any]]] = {}
        for i, own in self._own.items():
            rows = [x[i] for x in request.rows]
            noise = self._stages.draw_noise(request.stage)
            terms, shown, new = client(i, request.shared, rows, {**own, **self._kept[i], **noise})
            self._kept[i] |= new
            answers[i] = terms, shown
        return answers

    def kept(self) -> dict[int, dict[str, Any]]:
        """Return what each participant keeps."""
        return self._kept


def _run(
    stages: Stages, args: Sequence[Any], participants: "_Participants | ParticipantProcesses"
) -> tuple[Any, dict[int, dict[str, Any]]]:
    """Return the result, and what each participant keeps."""
    server = stages.run(*args)
    reply: Any = None
    while True:
        try:
            request = server.send(reply)
        except StopIteration as end:
            return end.value, participants.kept()
        answers = participants.answers(request)
        merge = stages.merge(request.stage)
        merged: Any = ()
        for number, (terms, _) in enumerate(answers.values()):
            merged = merge(merged, terms) if number else terms
        shown = [shown for _, shown in answers.values()]
        reply = merged, [jnp.stack(rows) for rows in zip(*shown, strict=True)], list(answers)
