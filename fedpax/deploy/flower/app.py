"""Flower: the rounds of a program on Flower's simulation, and on its SuperLink and SuperNodes."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpax.deploy.flower import secagg
from fedpax.deploy.flower.node_worker import forward, resolve, state_dir
from fedpax.deploy.flower.secagg import read_record, write_record
from fedpax.deploy.packets import Packet
from fedpax.errors import ArgumentError, MissingPackageError
from fedpax.files import replacing

if TYPE_CHECKING:
    from fedpax.deploy.nodes.node import LoadData, NodeProgram
    from fedpax.deploy.nodes.node_roster import NodeReply
    from fedpax.deploy.nodes.round_server import SecureSum
    from fedpax.training.experiment import Experiment

_LOG = logging.getLogger("flwr")
FEDPAX, SECAGG = "fedpax", "secagg+"
STATE_FILE, METRICS_FILE, POSITION_FILE = "state.npz", "metrics.jsonl", "position.bin"


def server_app(program: str | Path | Experiment, **settings: Any) -> Any:
    """Make the `ServerApp` that trains a program on Flower's nodes.

    Args:
        program: `program.json`, from `fedpax export --flower`; or an experiment, which is exported
            at the first message, into the folder of states.
        **settings: defaults of the settings of a run, which `flwr run --run-config` overrides:

            - rounds: number of rounds. Default: the experiment's number.
            - seed: seed of the initial parameters. Default: the experiment's seed.
            - quorum: the fewest answers of a round. Default 0: all.
            - enough: answers after which a round ends (over-selection). Default 0: all.
            - deadline: seconds after which `quorum` answers suffice. Default 0: none.
            - wait: seconds to wait for nodes. Default 600.
            - secure: mask the terms, so that the server sees their sum alone. Default False.
            - secure-protocol: "fedpax", the default, or "secagg+", Flower's own, which also runs in
              a simulation.
            - secure-bound: the largest absolute value of a term in floats for SecAgg+. Default 64.
            - out: folder of the result, on the machine of the SuperLink. Default: a folder in
              `~/.fedpax/flower/results`.
            - resume: continue the run in `out`. Default False.
            - print-results: log all results of the last round as JSON. Default False.

    Returns:
        A `flwr.serverapp.ServerApp`.

    Raises:
        MissingPackageError: flwr is not installed.
    """
    _check_installed()
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        from fedpax.deploy.round_program import read_program

        chosen = {**settings, **context.run_config}
        path = program_path(program, state_dir({}))
        train(FlowerNetwork(grid), read_program(path), str(context.run_id), chosen)

    return app


def client_app(program: str | Path | Experiment, load_data: LoadData | str) -> Any:
    """Make the `ClientApp` of a participant.

    Args:
        program: the same as the server's.
        load_data: loads the data of this node (`fedpax.deploy.nodes.node.LoadData`), a function of
            a module, or its name `"module:function"`.

    Returns:
        A `flwr.clientapp.ClientApp`.

    Raises:
        MissingPackageError: flwr is not installed.
    """
    _check_installed()
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app = ClientApp()
    programs: list[NodeProgram] = []

    def compute(packet: Packet, context: Any) -> Packet:
        config = dict(context.node_config)
        if Path(sys.argv[0]).name == "flwr-clientapp":  # a process for one message
            return _forward(packet, config, context.node_id)
        if not programs:
            programs.append(_load(program, load_data, config))
        return programs[0].answer(packet, config)

    def answer(message: Any, context: Any) -> Any:
        if secagg.is_secure(message):
            return secagg.answer(message, context, lambda packet: compute(packet, context))
        packet = read_record(message.content)
        reply = secagg.answer_unmasked(packet, lambda packet: compute(packet, context))
        return Message(write_record(reply), reply_to=message)

    def _forward(packet: Packet, config: Mapping[str, Any], node: int) -> Packet:
        specification = {
            "program": str(program_path(program, state_dir(config))),
            "load_data": load_data if isinstance(load_data, str) else _name_of(load_data),
            "state_dir": str(state_dir(config)),
            "supernode": os.getppid(),
        }
        return forward(
            Packet({**packet.values, "config": config}, packet.arrays), node, specification
        )

    app.train()(answer)
    app.query()(answer)
    return app


def _check_installed() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise MissingPackageError(
            "fedpax.deploy.flower needs the package flwr. Install it in an environment of its own: "
            "pip install 'fedpax[flower]'."
        )


def _name_of(load_data: Any) -> str:
    return f"{load_data.__module__}:{load_data.__qualname__}"


def program_path(program: str | Path | Experiment, folder: Path) -> Path:
    """Return the path of a program; an experiment is exported to a folder of states first."""
    if isinstance(program, str | Path):
        return Path(program).absolute()
    from fedpax.deploy.round_program import program_file

    return program_file(program, folder / "programs")


def _load(
    program: str | Path | Experiment, load_data: Any, config: Mapping[str, Any]
) -> NodeProgram:
    """Load a program in this process, as a simulation does."""
    from fedpax.deploy.nodes.node import NodeProgram
    from fedpax.deploy.round_program import read_program

    function = resolve(load_data) if isinstance(load_data, str) else load_data
    folder = state_dir(config)
    return NodeProgram(read_program(program_path(program, folder)), function, folder)


class FlowerNetwork:
    """The nodes of a run, by Flower's grid."""

    def __init__(self, grid: Any) -> None:
        self.grid = grid

    def nodes(self) -> list[int]:
        """Return the ids of the nodes that are connected."""
        return list(self.grid.get_node_ids())

    def push(self, packets: Mapping[int, Packet], seconds: float | None) -> dict[str, int]:
        """Send a packet to each node; return the node of each message that was sent."""
        from flwr.app import Message

        messages = [
            Message(
                write_record(packet),
                node,
                "query" if packet.values["kind"] == "greeting" else "train",
                ttl=seconds,
            )
            for node, packet in packets.items()
        ]
        sent = self.grid.push_messages(messages)
        return {message: node for message, node in zip(sent, packets, strict=False) if message}

    def pull(self, messages: Iterable[str]) -> list[NodeReply]:
        """Return the replies that are there, matched by the message that they answer."""
        from fedpax.deploy.nodes.node_roster import NodeReply

        replies = []
        for message in self.grid.pull_messages(list(messages)):
            answered = message.metadata.reply_to_message_id
            if message.has_error():
                error = f"{message.error.reason} (Flower's error {message.error.code})"
                replies.append(NodeReply(answered, None, error))
            else:
                replies.append(NodeReply(answered, read_record(message.content)))
        return replies


def _secure_sum(network: Any, protocol: str, setting: Any) -> SecureSum:
    """Return the server's part of a protocol for secure sums."""
    from fedpax.deploy.nodes.node_sums import ServerSums
    from fedpax.deploy.nodes.round_server import POLL_SECONDS

    if protocol == FEDPAX:
        return ServerSums(network, _LOG, POLL_SECONDS)
    if protocol == SECAGG:
        return secagg.SecAggSum(network.grid, setting("secure-bound", 64.0), POLL_SECONDS)
    raise ArgumentError(
        f"secure-protocol={protocol!r}, expected {FEDPAX!r} or {SECAGG!r}. Leave it out for "
        f"{FEDPAX!r}."
    )


def train(network: Any, program: Any, run: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Run all rounds, and write the server's state after each."""
    import numpy as np

    from fedpax.deploy.flower.app_files import RESULTS
    from fedpax.deploy.nodes.kept_state import read_position, write_position
    from fedpax.deploy.nodes.node_sums import check_masks, check_program
    from fedpax.deploy.nodes.round_server import RoundServer, Rules, finite_metrics

    def setting(name: str, default: Any) -> Any:
        value = settings.get(name, -1)
        return default if value in (-1, "") else type(default)(value)

    rules = Rules(*(setting(name, Rules._field_defaults[name]) for name in Rules._fields))
    secure = None
    if setting("secure", False):
        secure = _secure_sum(network, setting("secure-protocol", FEDPAX), setting)
    out = Path(setting("out", f"~/.fedpax/flower/results/{run}")).expanduser().absolute()
    out.mkdir(parents=True, exist_ok=True)
    saved = None
    if setting("resume", False):
        saved = read_position(out / POSITION_FILE, program.program)
    run = run if saved is None else saved[0]
    server = RoundServer(
        network,
        program,
        run=run,
        rules=rules,
        secure=secure,
        seed=setting("seed", program.settings.seed),
        log=_LOG,
    )
    check_masks(program, server.quorum, is_secure=secure is not None)
    if secure is not None:
        check_program(program, server.quorum, secure.least, secure.most)
    position = server.begin() if saved is None else saved[1]
    if saved is not None:
        _LOG.info("Run %s continues after round %d", run, position.round)
    metrics: Mapping[str, Any] = {}
    while position.round < setting("rounds", program.settings.rounds):
        first = time.monotonic()
        position, metrics = server.advance(position)
        reported = finite_metrics(metrics)
        reported["seconds"] = time.monotonic() - first
        words = ", ".join(f"{name} {value:.4g}" for name, value in reported.items())
        _LOG.info("Round %d: %s", position.round, words)
        with (out / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"round": position.round, **reported}) + "\n")
        write_state(out / STATE_FILE, position.state)
        write_position(out / POSITION_FILE, run, program.program, position)
    if setting("print-results", False) and metrics:
        all_values = {name: np.asarray(value).tolist() for name, value in metrics.items()}
        _LOG.info("%s%s", RESULTS, json.dumps(all_values))
    _LOG.info("The state after round %d is in %s", position.round, out / STATE_FILE)
    return position.state


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state by name as `.npz`, completely or not at all."""
    import numpy as np

    from fedpax.deploy.encoded_values import numbers_of

    arrays = {name: numbers_of(value) for name, value in state.items()}
    with replacing(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # NumPy types its other keywords
