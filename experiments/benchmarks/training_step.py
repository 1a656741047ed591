"""A training step of one island, compared with the same step written in plain JAX.

    python -m fedpax.experiments.benchmarks.training_step --model=base_1m --mesh=fsdp=2
    python -m fedpax.experiments.benchmarks.training_step \
        --model=base_100m --batch_size=2 --seq_len=256

The hand-written step is `jax.jit` of `jax.value_and_grad` and an optax update, with the same model
and loss and without fedpax programs. Both steps are compiled, compared and timed in
interleaved calls. The command exits with status 1 if their collectives differ.
`--topology=v5e:4x4` compiles for a TPU pod without the hardware and runs nothing; it needs the
extra `tpu`.
"""

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import fedpax
from fedpax.algorithm import LossFn, Metrics, Params
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

Batches: TypeAlias = chex.ArrayTree
HandState: TypeAlias = tuple[Params, optax.OptState]


class Step(NamedTuple):
    """A compiled round of training steps.

    Attributes:
        compiled: `(state, batches) -> (state, metrics)`; the state is donated.
        types: the shapes, dtypes and shardings of the arguments.
    """

    compiled: jax.stages.Compiled
    types: tuple[Any, Any]


class Structure(NamedTuple):
    """Collectives and memory of a compiled program.

    Attributes:
        collectives: number of collectives by kind, mesh axes, shapes and executions per round.
        argument_bytes: bytes of the arguments on a device.
        temporary_bytes: bytes of temporaries on a device.
    """

    collectives: Counter[tuple[str, tuple[str, ...], tuple[str, ...], int | None]]
    argument_bytes: int
    temporary_bytes: int


class Row(NamedTuple):
    """The comparison of the island's program with the hand-written one.

    Attributes:
        model: name of the transformer.
        device: kind of the devices.
        devices: number of devices.
        collectives: number of collectives in the island's program.
        same_collectives: whether both programs have the same collectives.
        argument_bytes: bytes of arguments on a device: the island's, and the hand-written one's.
        temporary_bytes: bytes of temporaries on a device, likewise.
        island_seconds: seconds of each call of the island's program; empty if nothing ran.
        hand_seconds: seconds of each call of the hand-written program.
        ratio: seconds of the island's program divided by the hand-written one's (paired); None if
            nothing ran.
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


def hand_written_round(
    loss_fn: LossFn, optimizer: optax.GradientTransformation
) -> Callable[[HandState, Batches], tuple[HandState, Metrics]]:
    """Make a round of training steps in plain JAX."""

    def step(state: HandState, batch: Batches) -> tuple[HandState, Metrics]:
        params, optimizer_state = state
        (loss, aux), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        params = optax.apply_updates(params, updates)
        return (params, optimizer_state), {**(aux or {}), "loss": loss}

    def hand_round(state: HandState, batches: Batches) -> tuple[HandState, Metrics]:
        state, metrics = jax.lax.scan(step, state, batches)
        return state, jax.tree.map(jnp.mean, metrics)

    return hand_round


def compile_both(
    config: TransformerConfig, mesh: Mesh, *, batch_size: int, seq_len: int, steps: int = 1
) -> dict[str, Step]:
    """Compile steps of one island, and the same steps written in plain JAX.

    Args:
        config: the transformer.
        mesh: the mesh, without an axis of several islands.
        batch_size: rows in a step.
        seq_len: tokens in a row.
        steps: number of steps in a round.

    Returns:
        The programs "island" and "hand".
    """
    model, loss_fn = transformer(config), transformer_loss(config)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    island = data_parallel(loss_fn, islands=1, optimizer=optimizer)
    replicated = NamedSharding(mesh, P())
    # The mesh's devices may not be present: nothing may run on them.
    key = jax.eval_shape(lambda: jax.random.key(0))
    with use_abstract_mesh(mesh.abstract_mesh):
        params = jax.eval_shape(model.init, key)
        state = jax.eval_shape(island.init, params)
        state_sharding: Any = state_shardings(
            state,
            params,
            shardings(model.logical_axes, params, mesh),
            mesh,
            placement="islands",
            num_participants=1,
        )
        state = with_shardings(state, state_sharding)
        rows = partition_spec(("batch", "sequence"), mesh, shape=(batch_size, seq_len))
        shapes = token_round_shapes(
            islands=1, local_steps=steps, batch_size=batch_size, seq_len=seq_len
        )

        def with_leading_axes(count: int) -> fedpax.Cohort:
            """Return the batches' types with the last `count` of the axes islands and steps."""
            spec = P(*[None] * count, *rows)
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(
                    x.shape[2 - count :], x.dtype, sharding=NamedSharding(mesh, spec)
                ),
                shapes,
            )

        def compiled(
            fn: Callable[..., Any], state: chex.ArrayTree, sharding: Any, batches: chex.ArrayTree
        ) -> Step:
            step = jax.jit(fn, donate_argnums=0, out_shardings=(sharding, replicated))
            return Step(step.lower(state, batches).compile(), (state, batches))

        return {
            "island": compiled(island.round, state, state_sharding, with_leading_axes(2)),
            "hand": compiled(
                hand_written_round(loss_fn, optimizer),
                tuple(state),
                tuple(state_sharding),
                with_leading_axes(1).batches,
            ),
        }


def structure(step: Step, mesh: Mesh) -> Structure:
    """Read the collectives and the memory of a compiled program."""
    found = collectives(step.compiled.as_text() or "", mesh)
    memory: Any = step.compiled.memory_analysis()
    return Structure(
        Counter((c.kind, c.axes, c.shapes, c.executions) for c in found),
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
    )


def values_of(types: Any) -> Any:
    """Make arrays of the types: small positive numbers and tokens that differ from neighbors."""

    def value(x: jax.ShapeDtypeStruct) -> jax.Array:
        # Not random: XLA needs minutes to compile sharded random bits for a CPU.
        i = jnp.zeros(x.shape, jnp.int32)
        for axis, stride in zip(range(x.ndim)[-2:][::-1], (1, 31), strict=False):
            i += stride * jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return (0.02 * (1.01 + jnp.sin(i))).astype(x.dtype)
        return (1 + i % 53).astype(x.dtype)

    sharding = jax.tree.map(lambda x: x.sharding, types)
    return jax.jit(lambda: jax.tree.map(value, types), out_shardings=sharding)()


def measure(
    model: str,
    mesh_sizes: dict[str, int],
    topology: str | None,
    batch_size: int,
    seq_len: int,
    steps: int,
    repetitions: int,
) -> Row:
    """Compile both programs, compare them, and time interleaved calls.

    Args:
        model: name of a function of `fedpax.models.presets`.
        mesh_sizes: sizes of the mesh's axes.
        topology: a pod to compile for, such as `v5e:4x4`; None: `jax.devices()`.
        batch_size: rows in a step.
        seq_len: tokens in a row.
        steps: number of steps in a call.
        repetitions: number of timed calls of each program; 0: compile only.

    Returns:
        The comparison.
    """
    config = getattr(presets, model)()
    devices = find_topology(topology).devices if topology else jax.devices()
    mesh = MeshConfig(**mesh_sizes).make(devices)
    both = compile_both(config, mesh, batch_size=batch_size, seq_len=seq_len, steps=steps)
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
    """Make a function that runs one round, starting from the state of its previous call."""
    state, batches = values_of(step.types)

    def call() -> Any:
        nonlocal state
        state, metrics = step.compiled(state, batches)
        return metrics

    return call


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as the arguments say, and print the comparison; return 1 if collectives differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", default="base_1m", help="name of a function of fedpax.models.presets"
    )
    parser.add_argument(
        "--mesh", default="data=1", help="sizes of the mesh's axes, such as fsdp=4,tensor=2"
    )
    parser.add_argument("--topology", help="TPU pod to compile for, such as v5e:4x4")
    parser.add_argument("--batch_size", type=int, default=8, help="rows in a step")
    parser.add_argument("--seq_len", type=int, default=128, help="tokens in a row")
    parser.add_argument("--steps", type=int, default=1, help="steps in a call")
    parser.add_argument(
        "--repetitions", type=int, default=5, help="timed calls of each; 0: compile only"
    )
    parser.add_argument(
        "--json", help="JSON file for the measurements; without it they are printed"
    )
    options = parser.parse_args(argv)
    pairs = (axis.split("=") for axis in options.mesh.split(","))
    mesh_sizes = {name: int(size) for name, size in pairs}
    devices = math.prod(mesh_sizes.values())
    arguments = (options.batch_size, options.seq_len, options.steps, options.repetitions)
    row = on_devices(
        devices,
        measure,
        *(options.model, mesh_sizes, options.topology, *arguments),
        subgroups=len(mesh_sizes) > 1,
    )
    print(describe(row))
    write(options.json, [row], **vars(options))
    return 0 if row.same_collectives else 1


def describe(row: Row) -> str:
    """Describe the comparison in words."""
    lines = [
        f"{row.model} on {row.devices} {row.device}: {row.collectives} collectives, "
        f"{'the same as' if row.same_collectives else 'DIFFERENT from'} the hand-written step's",
        "argument bytes per device: {:,}, hand-written {:,}".format(*row.argument_bytes),
        "temporary bytes per device: {:,}, hand-written {:,} ({:+.3%})".format(
            *row.temporary_bytes, row.temporary_bytes[0] / max(row.temporary_bytes[1], 1) - 1
        ),
    ]
    if row.ratio is not None:
        medians = map(statistics.median, (row.island_seconds, row.hand_seconds))
        lines.append("seconds per call: {:.4f}, hand-written {:.4f}".format(*medians))
        lines.append(f"paired ratio: {row.ratio:.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
