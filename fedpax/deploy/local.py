"""The stages of a program in one process: the reference for other engines."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from fedpax.errors import ArgumentError
from fedpax.transforms.stages import Stages


def run_local(stages: Stages, *args: Any, participants: Sequence[int] | None = None) -> Any:
    """Run the stages of a program, each participant by itself, in one process.

    Args:
        stages: the stages, as `fedpax.stages` makes them.
        *args: the arguments of the program, all of them arrays.
        participants: the participants that answer. The others keep their states. Default None: all.

    Returns:
        The result of the program.

    Raises:
        ArgumentError: there is no participant of a number in `participants`.

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
    states, known = stages.own(*args), stages.known(*args)
    own = {i: known | {name: rows[i] for name, rows in states.items()} for i in answer}
    kept: dict[int, dict[str, Any]] = {i: {} for i in own}
    server = stages.run(*args)
    reply: Any = None
    while True:
        try:
            request = server.send(reply)
        except StopIteration as end:
            result = end.value
            break
        client, merge = stages.client(request.stage), stages.merge(request.stage)
        merged: Any = ()
        shown: list[Any] = []
        for i in own:
            received = [rows[i] for rows in request.rows]
            terms, seen, new = client(i, request.shared, received, own[i] | kept[i])
            kept[i] |= new
            merged = merge(merged, terms) if shown else terms
            shown.append(seen)
        reply = merged, [jnp.stack(rows) for rows in zip(*shown, strict=True)], list(own)
    for name, rows in states.items():
        changed = [i for i in own if name in kept[i]]
        if changed:
            new_rows = jnp.stack([kept[i][name] for i in changed])
            states[name] = rows.at[jnp.array(changed)].set(new_rows)
    return stages.with_kept(result, args, states)
