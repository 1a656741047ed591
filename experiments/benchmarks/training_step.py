"""A training step of one island against the same step written by hand: they must be one program.

    python -m fedpax.experiments.benchmarks.training_step --model=demo --mesh=fsdp=2
    python -m fedpax.experiments.benchmarks.training_step --model=base_100m --batch=2 --length=256

The hand-written step is `jax.jit` of `jax.value_and_grad` and an optax update of the same model and
loss; it knows of no program, no placement and no method. Both are compiled, compared, and timed in
turn. `--topology=v5e:4x4` compiles for a pod that is not there and runs nothing; it needs the `tpu`
extra.
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from fedpax.algorithms import data_parallel
from fedpax.data import token_round_shapes
from fedpax.experiments.benchmarks.timing import interleaved, on_devices, paired_ratio, write
from fedpax.hlo.collectives import collectives
from fedpax.models import presets
from fedpax.models.losses import transformer_loss
from fedpax.models.transformer import TransformerConfig, transformer
from fedpax.parallel.axes import partition_spec, shardings
from fedpax.parallel.mesh import MeshConfig
from fedpax.planning import find_topology
from fedpax.training.compiled_round import with_shardings
from fedpax.training.shardings import state_shardings


class Step(NamedTuple):
    """A round of training steps, compiled.

    Attributes:
        compiled: `(state, batches) -> (state, metrics)`; the state is donated.
        types: the types of its arguments, with shardings.
    """

    compiled: jax.stages.Compiled
    types: tuple[Any, Any]


class Structure(NamedTuple):
    """What is to be read from a compiled program.

    Attributes:
        collectives: how often each kind over these axes, of these shapes, stands in it.
        argument_bytes: bytes of the arguments on a device.
        temporary_bytes: bytes of the temporaries on a device.
    """

    collectives: Counter[tuple[str, tuple[str, ...], tuple[str, ...], int | None]]
    argument_bytes: int
    temporary_bytes: int


class Row(NamedTuple):
    """Both programs, compared.

    Attributes:
        model: the transformer's name.
        device: the devices' kind.
        devices: how many there are.
        collectives: how many the one island's program has.
        same_collectives: whether they are the hand-written program's.
        argument_bytes: of one island's program, and of the hand-written one.
        temporary_bytes: likewise.
        island_seconds: of each call of the one island's program; empty where nothing ran.
        hand_seconds: of each call of the hand-written one.
        ratio: seconds of one island over those written by hand, paired.
    """

    model: str
    device: str
    devices: int
    collectives: int
    same_collectives: bool
    argument_bytes: tuple[int, int]
    temporary_bytes: tuple[int, int]
    island_seconds: list[float]
    hand_seconds: list[float]
    ratio: float | None


def by_hand(
    loss_fn: Callable[..., Any], optimizer: optax.GradientTransformation
) -> Callable[..., Any]:
    """Writes training steps as plain JAX does: `round((params, optimizer_state), batches)`."""

    def step(state: Any, batch: Any) -> Any:
        params, optimizer_state = state
        (loss, aux), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), {**aux, "loss": loss}

    def round(state: Any, batches: Any) -> Any:
        state, metrics = jax.lax.scan(step, state, batches)
        return state, jax.tree.map(jnp.mean, metrics)

    return round


def compile_both(
    config: TransformerConfig, mesh: Mesh, *, batch: int, length: int, steps: int = 1
) -> dict[str, Step]:
    """Compiles steps of one island, and the same steps written by hand.

    Args:
        config: the transformer.
        mesh: the mesh, without an axis of islands.
        batch: rows in a step.
        length: tokens in a row.
        steps: how many steps a call takes.

    Returns:
        The programs, "island" and "hand".
    """
    model, loss_fn = transformer(config), transformer_loss(config)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    island = data_parallel(loss_fn, islands=1, optimizer=optimizer)
    everywhere = NamedSharding(mesh, P())
    # The mesh's devices may not be there, so nothing may run on them.
    key = jax.eval_shape(lambda: jax.random.key(0))
    with use_abstract_mesh(mesh.abstract_mesh):
        params = jax.eval_shape(model.init, key)
        state = jax.eval_shape(island.init, params)
        where = state_shardings(
            state,
            params,
            shardings(model.logical_axes, params, mesh),
            mesh,
            placement="islands",
            num_participants=1,
        )
        state = with_shardings(state, where)
        rows = partition_spec(("batch", "sequence"), mesh, shape=(batch, length))
        shapes = token_round_shapes(islands=1, local_steps=steps, batch_size=batch, seq_len=length)

        def placed(front: int) -> Any:
            spec = P(*[None] * front, *rows)
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(
                    x.shape[2 - front :], x.dtype, sharding=NamedSharding(mesh, spec)
                ),
                shapes,
            )

        def compiled(fn: Any, state: Any, where: Any, batches: Any) -> Step:
            step = jax.jit(fn, donate_argnums=0, out_shardings=(where, everywhere))
            return Step(step.lower(state, batches).compile(), (state, batches))

        return {
            "island": compiled(island.round, state, where, placed(2)),
            "hand": compiled(
                by_hand(loss_fn, optimizer), tuple(state), tuple(where), placed(1).batches
            ),
        }


def structure(step: Step, mesh: Mesh) -> Structure:
    """Reads a compiled program."""
    found = collectives(step.compiled.as_text() or "", mesh)
    memory: Any = step.compiled.memory_analysis()
    return Structure(
        Counter((c.kind, c.axes, c.shapes, c.executions) for c in found),
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
    )


def values_of(types: Any) -> Any:
    """Makes values of the types: small positive numbers and tokens, none like its neighbours."""

    def value(x: jax.ShapeDtypeStruct) -> jax.Array:
        # Not random: XLA takes minutes to compile sharded random bits for a CPU.
        i = jnp.zeros(x.shape, jnp.int32)
        for axis, stride in zip(range(x.ndim)[-2:][::-1], (1, 31), strict=False):
            i += stride * jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return (0.02 * (1.01 + jnp.sin(i))).astype(x.dtype)
        return (1 + i % 53).astype(x.dtype)

    where = jax.tree.map(lambda x: x.sharding, types)
    return jax.jit(lambda: jax.tree.map(value, types), out_shardings=where)()


def measure(
    model: str,
    sizes: dict[str, int],
    topology: str | None,
    batch: int,
    length: int,
    steps: int,
    repetitions: int,
) -> Row:
    """Compiles both programs, compares them, and times them in turn.

    Args:
        model: a function of `fedpax.models.presets`.
        sizes: the mesh's axes.
        topology: a pod to compile for, such as `v5e:4x4`; None takes `jax.devices()`.
        batch: rows in a step.
        length: tokens in a row.
        steps: how many steps a call takes.
        repetitions: how often each is timed; 0 runs nothing.

    Returns:
        The comparison.
    """
    config = getattr(presets, model)()
    devices = find_topology(topology).devices if topology else jax.devices()
    mesh = MeshConfig(**sizes).make(devices)
    both = compile_both(config, mesh, batch=batch, length=length, steps=steps)
    island, hand = (structure(both[name], mesh) for name in ("island", "hand"))
    seconds: dict[str, list[float]] = {name: [] for name in both}
    if repetitions and not topology:
        with jax.set_mesh(mesh):
            calls = {name: _stepper(step) for name, step in both.items()}
            seconds = interleaved(calls, (), repetitions)
    return Row(
        model,
        devices[0].device_kind,
        len(devices),
        island.collectives.total(),
        island.collectives == hand.collectives,
        (island.argument_bytes, hand.argument_bytes),
        (island.temporary_bytes, hand.temporary_bytes),
        seconds["island"],
        seconds["hand"],
        paired_ratio(seconds["island"], seconds["hand"]) if seconds["hand"] else None,
    )


def _stepper(step: Step) -> Callable[[], Any]:
    """Makes a function that goes on from where its last call ended, as training does."""
    state, batches = values_of(step.types)

    def call() -> Any:
        nonlocal state
        state, metrics = step.compiled(state, batches)
        return metrics

    return call


def main(argv: Sequence[str] | None = None) -> int:
    """Measures as the arguments say, and prints a table; fails where the programs differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo", help="a function of fedpax.models.presets")
    parser.add_argument("--mesh", default="data=1", help="axes, such as fsdp=4,tensor=2")
    parser.add_argument("--topology", help="a pod to compile for, such as v5e:4x4")
    parser.add_argument("--batch", type=int, default=8, help="rows in a step")
    parser.add_argument("--length", type=int, default=128, help="tokens in a row")
    parser.add_argument("--steps", type=int, default=1, help="of a call")
    parser.add_argument("--repetitions", type=int, default=5, help="0 compiles, and runs nothing")
    parser.add_argument("--json", help="a file for the figures, else printed")
    options = parser.parse_args(argv)
    pairs = (axis.split("=") for axis in options.mesh.split(","))
    sizes = {name: int(size) for name, size in pairs}
    devices = 1
    for size in sizes.values():
        devices *= size
    arguments = (options.batch, options.length, options.steps, options.repetitions)
    row = on_devices(
        devices,
        measure,
        *(options.model, sizes, options.topology, *arguments),
        groups=len(sizes) > 1,
    )
    print(describe(row))
    write(options.json, [row], **vars(options))
    return 0 if row.same_collectives else 1


def describe(row: Row) -> str:
    """The comparison in words."""
    lines = [
        f"{row.model} on {row.devices} {row.device}: {row.collectives} collectives, "
        f"{'the same' if row.same_collectives else 'NOT the same'} as by hand",
        "argument bytes a device: {:,}, by hand {:,}".format(*row.argument_bytes),
        "temporary bytes a device: {:,}, by hand {:,} ({:+.3%})".format(
            *row.temporary_bytes, row.temporary_bytes[0] / max(row.temporary_bytes[1], 1) - 1
        ),
    ]
    if row.ratio is not None:
        medians = map(statistics.median, (row.island_seconds, row.hand_seconds))
        lines.append("seconds a call: {:.4f}, by hand {:.4f}".format(*medians))
        lines.append(f"paired ratio: {row.ratio:.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
