"""A syncer and its islands in one process, without sockets and threads, on a clock of their own."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fedpax
from fedpax.algorithm import FederatedAlgorithm
from fedpax.algorithms import decoupled_diloco_parts
from fedpax.islands.island.island import Island
from fedpax.islands.island.link import Link
from fedpax.islands.island.local_model import LocalModel
from fedpax.islands.syncer.outer_model import OuterModel
from fedpax.islands.syncer.syncer import Syncer
from fedpax.sites.site_process import Identity
from fedpax.training.experiment import Run, Shardings
from fedpax.transport.calls import DisconnectedError
from fedpax.transport.message import Message

FEATURES, BATCH, TOKENS_PER_STEP = 5, 3, 12.0
FRAGMENT = {"embedding": 1, "kernel": 0, "scale": 1}
IDENTITY = Identity("1", {"seed": 0}, {"w": "float32[3]"})
INNER = optax.adam(0.05)
OUTER = optax.sgd(0.6, momentum=0.8, nesterov=True)


def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    hidden = jnp.tanh(batch["x"] @ params["embedding"])
    loss = jnp.mean((params["scale"] * (hidden @ params["kernel"]) - batch["y"]) ** 2)
    return loss, {"doubled": 2 * loss}


def random_params(seed: int = 0) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = {"embedding": (FEATURES, 4), "kernel": (4,), "scale": ()}
    return {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)}


def random_batches(shape: tuple[int, ...], seed: int = 1) -> dict[str, np.ndarray]:
    """Return batches of shape [*shape, BATCH, ...]."""
    rng = np.random.default_rng(seed)
    draw = lambda *tail: rng.normal(size=(*shape, BATCH, *tail)).astype(np.float32)
    return {"x": draw(FEATURES), "y": draw()}


@functools.cache
def make_parts(fragments: int = 2, **settings: Any) -> Any:
    return decoupled_diloco_parts(
        loss_fn,
        **{
            "islands": 3,
            "inner_optimizer": INNER,
            "outer_optimizer": OUTER,
            "fragments": 1 if fragments == 1 else (lambda path, leaf: FRAGMENT[path]),
            "steps_per_sync": 2,
        }
        | settings,
    )


def make_run(parts: Any) -> Run:
    mesh = fedpax.make_mesh(islands=1, devices=jax.devices()[:1])
    replicated = NamedSharding(mesh, P())
    return Run(
        algorithm=FederatedAlgorithm(lambda x: x, lambda state, cohort: (state, {}), parts),
        init=lambda key: random_params(),
        cohorts=iter(()),  # type: ignore[arg-type]
        evaluate=lambda params: {"loss": 0.0},
        mesh=mesh,
        shardings=Shardings(jax.tree.map(lambda x: replicated, random_params()), replicated),
        items_per_round=1,
        placement="islands",
    )


@functools.cache
def compiled(parts: Any) -> tuple[Run, LocalModel, OuterModel, list[Any]]:
    """Compile a method once for all tests: the models, and the initial state of the outer one."""
    run, outer = make_run(parts), OuterModel(parts, random_params())
    return run, LocalModel(run), outer, list(outer.fragments)


class Sites:
    """A syncer and its islands; each exchange happens when a test asks for it.

    The rules of the syncer in `policy`, such as the quorum, replace the rules of `parts`. `options`
    are further arguments of the syncer, such as `free_shard_after`.
    """

    def __init__(
        self,
        parts: Any,
        *,
        num_merges: int = 10**6,
        store: Any = None,
        options: dict[str, Any] | None = None,
        **policy: Any,
    ) -> None:
        self.run, self.model, self.outer, self.initial = compiled(parts)
        self.parts, self.now, self.reports = parts._replace(**policy), 0.0, []
        self.store, self.num_merges, self.options = store, num_merges, options or {}
        self.islands: list[Island] = []
        self.links: list[Link] = []
        self.messages: list[Message] = []
        self.down = self.lose_answers = False
        self.start_syncer()

    def start_syncer(self) -> None:
        self.outer.fragments[:] = self.initial
        self.syncer = Syncer(
            self.parts,
            self.outer,
            IDENTITY,
            num_merges=self.num_merges,
            tokens_per_step=TOKENS_PER_STEP,
            store=self.store,
            clock=lambda: self.now,
            on_merge=self.reports.append,
            **self.options,
        )

    def call(self, message: Message, timeout: float = 0.0, peer: str = "") -> Message:
        if self.down:
            raise DisconnectedError("down")
        self.messages.append(message)
        answer = self.syncer.handle(peer, message)
        if self.lose_answers:
            raise DisconnectedError("the answer is lost")
        return answer

    def push(self, name: str, value: float, peer: str = "", **fields: Any) -> str:
        """Send an update of fragment 0 that is `value` everywhere; return the answer's status."""
        arrays = {
            path: np.full(like.shape, value, np.float32)
            for path, like in self.model.formats[0].shapes.items()
        }
        header = {"kind": "push", "steps": 2, "fragment": 0, "merge": self.syncer.merges}
        header |= {"count": 0, "base": 0, "sequence": 1, "update_steps": 2, "loss": 1.0}
        header |= {"tokens": TOKENS_PER_STEP * fields.get("update_steps", 2)}
        message = Message(self.header(name, f"{name}-1") | header | fields, arrays)
        return self.call(message, peer=peer).header["status"]

    def header(self, name: str, process: str, **more: Any) -> dict[str, Any]:
        return {
            "island": name,
            "incarnation": process,
            "folder": f"folder of {name}",
            "identity": IDENTITY._asdict(),
        } | more

    def add(self, name: str, process: str = "", **more: Any) -> Island:
        """Start an island, and give it the outer model."""
        header = self.header(name, process or f"{name}-1", **more)
        link = Link(self.call, header, self.model.formats, [-1] * len(self.model.formats))
        membership = link.join()
        with jax.set_mesh(self.run.mesh):
            island = Island(
                self.parts,
                self.model,
                link,
                shard=membership.shard,
                process=header["incarnation"],
                tokens_per_step=TOKENS_PER_STEP,
            )
            link.exchange()
            island.receive()
        assert island.has_model
        self.islands.append(island)
        self.links.append(link)
        return island

    def phase(self, island: Island, batches: Any = None) -> None:
        """Take a phase on an island, and send what it has to send."""
        with jax.set_mesh(self.run.mesh):
            island.train(random_batches((2,), seed=island.steps) if batches is None else batches)
            island._hand_over()
        with contextlib.suppress(DisconnectedError):
            island._link.exchange()

    def receive(self, island: Island) -> None:
        with jax.set_mesh(self.run.mesh):
            with contextlib.suppress(DisconnectedError):
                island._link.exchange()
            island.receive()

    def params(self) -> dict[str, np.ndarray]:
        """Return the outer model."""
        return jax.tree.map(np.asarray, self.outer.params())

    def round(self, batches: Any) -> None:
        """Take a phase on every island, each on its row of `[islands, S, batch, ...]`."""
        for row, island in enumerate(self.islands):
            self.phase(island, jax.tree.map(lambda x, row=row: x[row], batches))
        for island in self.islands:
            self.receive(island)
