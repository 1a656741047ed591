"""Rounds on Apache Beam: populations in files of any size, on one machine or on many."""

from __future__ import annotations

import functools
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from fedpax.deploy.batch_job import check_program, fitting_block_size, make_work, read_results
from fedpax.deploy.batch_work import (
    CLIENT,
    PARTICIPANT,
    BatchWork,
    Clients,
    check_clients,
    split_states,
    stack_states,
)
from fedpax.errors import ArgumentError, MissingPackageError
from fedpax.transforms.stages import stages

try:
    import apache_beam as beam
    from apache_beam.io.filesystems import FileSystems
    from apache_beam.options.pipeline_options import PipelineOptions
except ImportError:  # run_beam raises
    beam = None

LOCAL_RUNNERS = ("FnApiRunner", "DirectRunner", "BundleBasedDirectRunner")


def run_beam(
    program: Callable[..., Any],
    *args: Any,
    clients: Callable[[], Clients],
    rounds: int = 1,
    first_round: int = 0,
    flags: Sequence[str] = (),
    folder: str | None = None,
    block_size: int | None = None,
) -> list[Any]:
    """Run rounds of a program on Apache Beam, in one pipeline.

    The server's results replace its arguments in the next round, as in
    `round(state, cohort) -> (state, metrics)`. States of participants stay in the pipeline. All
    answer, or the pipeline fails.

    Args:
        program: a function decorated with `fedpax.program`, such as the `round` of an algorithm.
            Its last argument is the data of the participants.
        *args: its other arguments: arrays.
        clients: a function without arguments, which is pickled, that opens the clients in each
            process (`fedpax.data.cohort_rounds`, `fedpax.deploy.EachClient`).
        rounds: number of rounds.
        first_round: number of the first round.
        flags: flags of the pipeline, such as `["--runner=FlinkRunner", ...]`. Default: Beam's
            FnApiRunner in this process.
        folder: a folder that all workers reach. Default None: `--temp_location`, or a temporary
            folder for runners on this machine.
        block_size: number of clients whose data a worker reads at once. Default None: as many as
            have 32 MB, at most 64.

    Returns:
        For each round the result of the program. Of all but the last round, values that the next
        round replaces are types (`jax.ShapeDtypeStruct`).

    Raises:
        ValueError: the program cannot be divided (`fedpax.stages`), the server reads the data of
            the participants, or the workers of a runner reach no folder.
        MissingPackageError: the package apache-beam is missing.

    Example:
        >>> import fedpax, jax.numpy as jnp
        >>> from fedpax.deploy import EachClient
        >>> from fedpax.deploy.beam import run_beam
        >>> @fedpax.program(clients=100)
        ... def step_towards_mean(w, x):
        ...     gap = fedpax.federated_map(lambda x: x - w, x)
        ...     return w + 0.5 * fedpax.federated_mean(gap), fedpax.federated_max(jnp.abs(gap))
        >>> def open_clients():
        ...     return EachClient(lambda client: jnp.float32(client), num_clients=100)
        >>> results = run_beam(  # doctest: +SKIP
        ...     step_towards_mean, 0.0, clients=open_clients, rounds=2
        ... )
        >>> [float(gap) for _, gap in results], float(results[-1][0])  # doctest: +SKIP
        ([99.0, 74.25], 37.125)
    """
    options = pipeline_options("run_beam", flags)
    if rounds < 1:
        raise ArgumentError(f"run_beam(): rounds={rounds}, expected at least 1.")
    parent = _folder(folder, options)
    opened = clients()
    check_clients(opened)
    # Types alone: the stages have no mesh.
    divided = stages(program, *jax.tree.map(_type, args), opened.shapes)
    leaves: list[Any] = jax.tree.leaves(args)
    check_program("run_beam", divided, len(leaves), rounds)
    work, arguments, differing = make_work(divided, leaves, clients)
    size = block_size or fitting_block_size(opened)
    with tempfile.TemporaryDirectory() as temporary:
        where = FileSystems.join(parent or temporary, work.job)
        if not FileSystems.exists(where):
            FileSystems.mkdirs(where)
        try:
            _write(FileSystems.join(where, "arguments"), arguments)
            for kind, content in differing.items():
                _write(FileSystems.join(where, f"first-{kind}"), content)
            with beam.Pipeline(options=options) as pipeline:
                numbers = range(first_round, first_round + rounds)
                _Job(pipeline, work, where, numbers, size, set(differing)).build()
            return read_results(
                divided,
                leaves,
                [_read(FileSystems.join(where, f"results-{n}")) for n in numbers],
                map(_read, _matching(FileSystems.join(where, "states-*"))),
            )
        finally:
            FileSystems.delete([where])


def pipeline_options(function: str, flags: Sequence[str]) -> PipelineOptions:
    """Return the options of a pipeline for a function that needs Beam."""
    if beam is None:
        raise MissingPackageError(
            f"{function}() needs the package apache-beam. Install it in an environment of its own: "
            "pip install 'fedpax[beam]' --constraint constraints-beam.txt."
        )
    return PipelineOptions([*flags] if _has_runner(flags) else ["--runner=FnApiRunner", *flags])


def _type(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x


def _has_runner(flags: Sequence[str]) -> bool:
    return any(flag.partition("=")[0] in ("--runner", "-r") for flag in flags)


def _folder(folder: str | None, options: PipelineOptions) -> str | None:
    """Return the folder of the messages of jobs; None: a temporary one will do."""
    given = options.get_all_options()
    place: str | None = folder or given.get("temp_location")
    if place is None and given["runner"] not in LOCAL_RUNNERS:
        raise ArgumentError(
            f"run_beam(): the workers of --runner={given['runner']} may be on other machines, "
            "expected a folder that they and this process reach. Pass folder=, or the flag "
            "--temp_location, such as gs://BUCKET/FOLDER."
        )
    return place


class _Job:
    """Builds the pipeline of a job."""

    def __init__(
        self,
        pipeline: Any,
        work: BatchWork,
        where: str,
        rounds: range,
        size: int,
        differing: set[int],
    ) -> None:
        self.pipeline, self.work, self.where = pipeline, work, where
        self.rounds, self.size, self.differing = rounds, size, differing
        # Pickled once: each step has the name of the file alone.
        path = FileSystems.join(where, "work")
        _write(path, beam.coders.CloudpickleCoder().encode(work._replace(noise_key=b"")))
        self.step = functools.partial(functools.partial, _do, path, work.noise_key)

    def build(self) -> None:
        start = self.pipeline | "start" >> beam.Create([0])
        path = FileSystems.join(self.where, "arguments")
        arguments = start | "read arguments" >> beam.Map(lambda _: _read(path))
        states = {kind: self._first_states(kind) for kind in (PARTICIPANT, CLIENT)}
        for number in self.rounds:
            results, states = self._round(number, arguments, states)
            is_last = number == self.rounds[-1]
            written = (
                results
                if is_last
                else results | f"{number}: metrics" >> beam.Map(self.step("metrics"))
            )
            out = FileSystems.join(self.where, f"results-{number}")
            _ = written | f"{number}: write" >> beam.Map(functools.partial(_write, out))
            if not is_last:
                arguments = arguments | f"{number}: carry" >> beam.Map(
                    self.step("next_arguments"), beam.pvalue.AsSingleton(results)
                )
        for kind, state in states.items():
            if state is not None:
                out = FileSystems.join(self.where, f"states-{kind}")
                _ = (
                    state
                    | f"batch states {kind}" >> _blocks(self.size)
                    | f"write states {kind}" >> beam.Map(functools.partial(_write_states, out))
                )

    def _first_states(self, kind: int) -> Any:
        """Return the states at the start that differ from the first one; None: no such states."""
        if not self.work.states[kind]:
            return None
        paths = [FileSystems.join(self.where, f"first-{kind}")] if kind in self.differing else []
        return (
            self.pipeline
            | f"files of states {kind}" >> beam.Create(paths)
            | f"read states {kind}" >> beam.FlatMap(lambda path: split_states(_read(path)))
        )

    def _round(
        self, number: int, arguments: Any, states: Mapping[int, Any]
    ) -> tuple[Any, dict[int, Any]]:
        """Add a round; return its results and the states after it."""
        label = f"{number}: "
        members = (
            self.pipeline
            | f"{label}round" >> beam.Create([number])
            | f"{label}sample" >> beam.FlatMap(self.step("sample"))
            | f"{label}spread" >> beam.Reshuffle()
        )
        left: dict[int, Any] = dict(states)
        for kind, state in states.items():
            if state is not None:
                members, left[kind] = self._join(f"{label}{kind}", kind, members, state)
        served = arguments | f"{label}server" >> (_outputs(self.step("start"), "values", "request"))
        for stage in range(self.work.num_stages):
            step = f"{label}stage {stage}"
            run = functools.partial(_run_clients, self.step("run_clients", stage, number), stage)
            request = beam.pvalue.AsSingleton(served["request"])
            ran = (
                members
                | f"{step}: block" >> _blocks(self.size)
                | f"{step}: clients"
                >> _outputs(run, "terms", "shown", "members", *_STATES.values(), sides=[request])
            )
            members = ran["members"]
            merge = self.step("merge", stage)
            terms = ran["terms"] | f"{step}: merge" >> (
                beam.CombineGlobally(merge).without_defaults()
            )
            serve = self.step("serve", stage)
            sides = [beam.pvalue.AsSingleton(terms), beam.pvalue.AsList(ran["shown"])]
            served = served["values"] | f"{step}: server" >> (
                _outputs(serve, "values", "request", "results", sides=sides)
            )
        after: dict[int, Any] = {}
        for kind, rest in left.items():
            after[kind] = None
            if rest is not None:
                new = ran[_STATES[kind]]
                after[kind] = (rest, new) | f"{label}keep {kind}" >> beam.Flatten()
        return served["results"], after

    def _join(self, label: str, kind: int, members: Any, states: Any) -> tuple[Any, Any]:
        """Give members their states; return them, and the states of all others."""
        join = self.step("join")
        keyed = members | f"{label}: key" >> beam.Map(lambda member: (member[kind], member))
        joined = (
            {"members": keyed, "states": states}
            | f"{label}: group" >> beam.CoGroupByKey()
            | f"{label}: join"
            >> _outputs(
                lambda group: join(group[0], group[1]["members"], group[1]["states"]),
                "members",
                "states",
            )
        )
        return joined["members"], joined["states"]


_STATES = {kind: f"states {kind}" for kind in (PARTICIPANT, CLIENT)}


def _do(path: str, noise_key: bytes, name: str, *args: Any) -> Any:
    """Call a method of the work of a job, which is in a file without its key."""
    return getattr(_load_work(path)._replace(noise_key=noise_key), name)(*args)


@functools.lru_cache(maxsize=2)
def _load_work(path: str) -> BatchWork:
    """Load the work of a job once in a process."""
    work: BatchWork = beam.coders.CloudpickleCoder().decode(_read(path))
    return work


def _run_clients(
    run: Callable[..., Iterator[tuple[str, Any]]],
    stage: int,
    members: Sequence[Any],
    request: bytes,
) -> Iterator[tuple[str, Any]]:
    count = beam.metrics.Metrics.counter
    count("fedpax", f"participants of stage {stage}").inc(len(members))
    count("fedpax", f"blocks of stage {stage}").inc()
    return run(members, request)


def _outputs(
    function: Callable[..., Iterator[tuple[str, Any]]], *names: str, sides: Sequence[Any] = ()
) -> Any:
    """Return a step that sends what a function yields to outputs by name."""

    def run(*args: Any) -> Iterator[Any]:
        return (beam.pvalue.TaggedOutput(name, value) for name, value in function(*args))

    return beam.FlatMap(run, *sides).with_outputs(*names)


def _blocks(size: int) -> Any:
    return beam.BatchElements(min_batch_size=size, max_batch_size=size)


def _matching(pattern: str) -> list[str]:
    return [match.path for match in FileSystems.match([pattern])[0].metadata_list]


def _read(path: str) -> bytes:
    with FileSystems.open(path) as file:
        return bytes(file.read())


def _write(path: str, content: bytes) -> None:
    with FileSystems.create(path) as file:
        file.write(content)


def _write_states(start: str, states: Sequence[tuple[int, bytes]]) -> None:
    """Write states to a file named by its content."""
    content = stack_states(states)
    _write(f"{start}-{hashlib.sha256(content).hexdigest()}", content)
