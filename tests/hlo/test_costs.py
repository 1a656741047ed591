from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from communicating_programs import STEPS
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpax.hlo import parsing
from fedpax.hlo.costs import ProgramCosts, count_costs

RECORDED = Path(__file__).parent / "compiled"


def costs_of(function, *shapes: tuple[int, ...]) -> ProgramCosts:
    """Count the costs of a function of float32 arrays."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return count_costs(parsing.parse(jax.jit(function).lower(*arguments).compile().as_text()))


SIZE = st.integers(2, 9)


@settings(max_examples=8)
@given(SIZE, SIZE, SIZE, SIZE)
def test_flops_of_batched_matmuls(batch: int, rows: int, inner: int, columns: int):
    counted = costs_of(
        lambda x, y: jnp.einsum("bri,bic->brc", x, y), (batch, rows, inner), (batch, inner, columns)
    )
    assert counted.matmul_flops == 2 * batch * rows * inner * columns


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "holes", "spread", "padding", "groups"),
    [(7, 3, 1, 1, 1, 1, 1), (8, 3, 2, 1, 2, 2, 2), (6, 4, 1, 2, 1, 3, 1), (9, 2, 3, 3, 2, 0, 2)],
)
def test_flops_of_convolutions(size, kernel, stride, holes, spread, padding, groups):
    """Multiplications with padding and with the holes of a dilated input do not count."""

    def convolve(x, y):
        sides = ((padding, padding), (0, 0))
        return jax.lax.conv_general_dilated(
            x, y, (stride, 1), sides, (holes, 1), (spread, 1), feature_group_count=groups
        )

    shapes = (3, 4, size, 5), (6, 4 // groups, kernel, 2)
    counted = costs_of(convolve, *shapes)
    # All inputs are 1, so each output is the number of multiplications in its sum.
    assert counted.matmul_flops == 2 * float(convolve(*map(jnp.ones, shapes)).sum())


def test_flops_of_a_batched_matmul_that_a_tpu_writes_as_a_convolution():
    """16 matmuls of 256 x 128 and 128 x 512, as one convolution of a dilated input."""
    text = """HloModule m, num_partitions=1

ENTRY %main (a: bf16[16,256,128], b: bf16[16,512,128]) -> bf16[16,256,512] {
  %a = bf16[16,256,128]{2,1,0} parameter(0)
  %b = bf16[16,512,128]{2,1,0} parameter(1)
  ROOT %c = bf16[16,256,512]{2,1,0} convolution(%a, %b), window={size=16 stride=15 \
pad=0_0 lhs_dilate=16}, dim_labels=0bf_0oi->0bf
}
"""
    counted = count_costs(parsing.parse(text))
    assert counted.matmul_flops == 2 * 16 * 256 * 128 * 512
    assert counted.memory_traffic == 2 * 16 * (256 * 128 + 512 * 128 + 256 * 512)


def test_loops_multiply_flops_and_traffic():
    def layers(length: int):
        def program(x, weights):
            return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

        return costs_of(program, (8, 64), (length, 64, 64))

    short, long = layers(10), layers(40)
    assert (short.matmul_flops, long.matmul_flops) == (10 * 2 * 8 * 64 * 64, 40 * 2 * 8 * 64 * 64)
    # Every layer reads its own weights, not the whole stack.
    assert 10 * 4 * 64 * 64 < short.memory_traffic < 4 * 10 * 4 * 64 * 64
    assert long.memory_traffic == pytest.approx(4 * short.memory_traffic, rel=0.1)


def test_a_conditional_in_a_loop_counts_its_costliest_branch_in_every_iteration():
    def program(x, weights):
        def layer(x, w):
            return jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: jnp.tanh(x)), None

        return jax.lax.scan(layer, x, weights)[0]

    done = costs_of(program, (8, 64), (10, 64, 64))
    assert done.matmul_flops == 10 * 2 * 2 * 8 * 64 * 64
    assert done.memory_traffic > 10 * 2 * 4 * 64 * 64
    assert done.unknown_trip_counts == ()


def test_a_loop_of_unknown_trip_count_counts_once_and_is_named():
    def program(x, w):
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: jnp.tanh(x @ w), x)

    done = costs_of(program, (8, 64), (64, 64))
    assert done.matmul_flops == 2 * 8 * 64 * 64
    assert len(done.unknown_trip_counts) == 1


def test_an_update_in_place_writes_the_updated_slice():
    def program(x, rows):
        def step(x, i):
            return jax.lax.dynamic_update_slice(x, rows * i, (i, 0)), None

        return jax.lax.scan(step, x, jnp.arange(50))[0]

    counted = costs_of(program, (64, 4096), (1, 4096))
    whole = 4 * 64 * 4096
    assert counted.memory_traffic < 50 * whole / 4
    assert counted.memory_traffic > 50 * 2 * 4 * 4096


@pytest.mark.parametrize("is_asynchronous", [False, True])  # as a GPU's independent fusions
def test_a_matmul_in_a_fusion_reads_through_nested_fusions(is_asynchronous: bool):
    text = """HloModule m, num_partitions=1

%same (i: f32[64,32]) -> f32[64,32] {
  %i = f32[64,32]{1,0} parameter(0)
  ROOT %b = f32[64,32]{1,0} bitcast(%i)
}

%part (j: f32[8,32,16]) -> f32[32,16] {
  %j = f32[8,32,16]{2,1,0} parameter(0)
  %three = s32[] constant(3)
  %zero = s32[] constant(0)
  %d = f32[1,32,16]{2,1,0} dynamic-slice(%j, %three, %zero, %zero), dynamic_slice_sizes={1,32,16}
  ROOT %b.1 = f32[32,16]{1,0} bitcast(%d)
}

%fused (p: f32[64,32], q: f32[8,32,16]) -> f32[64,16] {
  %p = f32[64,32]{1,0} parameter(0)
  %f.1 = f32[64,32]{1,0} fusion(%p), kind=kLoop, calls=%same
  %q = f32[8,32,16]{2,1,0} parameter(1)
  %f.2 = f32[32,16]{1,0} fusion(%q), kind=kLoop, calls=%part
  ROOT %c = f32[64,16]{1,0} convolution(%f.1, %f.2), dim_labels=bf_io->bf
}

ENTRY %main (a: f32[64,32], w: f32[8,32,16]) -> f32[64,16] {
  %a = f32[64,32]{1,0} parameter(0)
  %w = f32[8,32,16]{2,1,0} parameter(1)
  ROOT %f = f32[64,16]{1,0} fusion(%a, %w), kind=kOutput, calls=%fused
}
"""
    if is_asynchronous:
        start = "%s = ((f32[64,32], f32[8,32,16]), f32[64,16]{1,0}, u32[]) fusion-start("
        text = text.replace("ROOT %f = f32[64,16]{1,0} fusion(", start)
        text = text.removesuffix("}\n") + "  ROOT %f = f32[64,16]{1,0} fusion-done(%s)\n}\n"
    counted = count_costs(parsing.parse(text))
    assert counted.matmul_flops == 2 * 64 * 32 * 16
    assert counted.memory_traffic == 4 * (64 * 32 + 32 * 16 + 64 * 16)


@pytest.mark.parametrize("space", ["", "S(1)"])
def test_asynchronous_copies_and_slices_count_once(space: str):
    """A value that is prefetched into vector memory is read once."""
    text = f"""HloModule m, num_partitions=1

ENTRY %main (a: f32[8,512]) -> f32[2,512] {{
  %a = f32[8,512]{{1,0}} parameter(0)
  %s = ((f32[8,512]{{1,0}}), f32[2,512]{{1,0:{space}}}, s32[]{{:S(2)}}) slice-start(%a), \
slice={{[0:2], [0:512]}}
  %t = f32[2,512]{{1,0:{space}}} slice-done(%s)
  %c = (f32[8,512]{{1,0:{space}}}, f32[8,512]{{1,0}}, u32[]{{:S(2)}}) copy-start(%a)
  %d = f32[8,512]{{1,0:{space}}} copy-done(%c)
  ROOT %r = f32[2,512]{{1,0:S(1)}} negate(%t)
}}
"""
    sliced, whole = 4 * 2 * 512, 4 * 8 * 512
    expected = sliced + whole if space else 3 * sliced + 2 * whole
    assert count_costs(parsing.parse(text)).memory_traffic == expected


def test_values_in_vector_memory_have_no_traffic():
    text = """HloModule m, num_partitions=1

%fused (p: f32[128,128]) -> f32[128,128] {
  %p = f32[128,128]{1,0} parameter(0)
  ROOT %t = f32[128,128]{1,0:S(1)} tanh(%p)
}

ENTRY %main (a: f32[128,128]) -> f32[128,128] {
  %a = f32[128,128]{1,0} parameter(0)
  %f = f32[128,128]{1,0:T(8,128)S(1)} fusion(%a), kind=kLoop, calls=%fused
  ROOT %n = f32[128,128]{1,0:T(8,128)} negate(%f)
}
"""
    assert count_costs(parsing.parse(text)).memory_traffic == 2 * 4 * 128 * 128


@pytest.mark.parametrize(
    ("name", "devices"),
    [("tpu_two_slices_2x4", 4), ("tpu_two_slices_4x2", 2), ("tpu7x_2x4", 4), ("gpu_4x2", 2)],
)
def test_flops_of_a_recorded_round(name: str, devices: int):
    """Five matmuls per step of 1024 rows: two forward, three backward (none for the input)."""
    counted = count_costs(parsing.parse((RECORDED / f"{name}_round.hlo").read_text()))
    assert counted.matmul_flops == STEPS * 5 * 2 * 1024 * 256 * 512 / devices


SPLASH = """HloModule m, num_partitions=1

ENTRY %main (q: bf16[{rows}4,2048,128], k: bf16[{rows}2,2048,128]) -> bf16[{rows}4,2048,128] {{
  %mask = s8[1,4,{visited}] constant({{...}})
  %q = bf16[{rows}4,2048,128] parameter(0)
  %k = bf16[{rows}2,2048,128] parameter(1)
  ROOT %{name}.1 = bf16[{rows}4,2048,128] custom-call(%mask, %mask, %q, \
%k, %k), custom_call_target="{target}", frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{{blocks}}}"

}}}}
}}
"""
BLOCKS = {
    ending: f'\\"block_q{ending}\\": 512, \\"block_kv{ending}\\": 512'
    for ending in ("", "_dkv", "_dq")
}
ALL_BLOCKS = ", ".join(BLOCKS.values())


@pytest.mark.parametrize(
    ("blocks", "matmuls"), [(ALL_BLOCKS, 2), (BLOCKS["_dkv"], 4), (BLOCKS["_dq"], 3)]
)
@pytest.mark.parametrize(("visited", "share"), [(4, 1 / 2), (2, 2 / 4), (1, 1 / 4)])
@pytest.mark.parametrize("rows", [1, 6])
def test_flops_of_splash_attention_kernels(
    blocks: str, matmuls: int, visited: int, share: float, rows: int
):
    """A kernel that visits all blocks is causal; with a window it visits fewer."""
    text = SPLASH.format(
        name="_splash_attention",
        visited=visited,
        target="tpu_custom_call",
        blocks=blocks,
        rows="" if rows == 1 else f"{rows},",
    )
    counted = count_costs(parsing.parse(text))
    assert counted.matmul_flops == rows * matmuls * 2 * 4 * 2048 * 2048 * 128 * share
    assert counted.uncounted_kernels == ()


@pytest.mark.parametrize(
    ("name", "target", "blocks", "uncounted"),
    [
        ("other", "tpu_custom_call", ALL_BLOCKS, True),
        ("splash", "tpu_custom_call", "", True),
        ("other", "__cudnn$fmhaSoftmax", "", True),
        ("other", "Sharding", "", False),
    ],
)
def test_kernels_that_do_not_state_their_flops_are_named(
    name: str, target: str, blocks: str, uncounted: bool
):
    text = SPLASH.format(name=name, visited=4, target=target, blocks=blocks, rows="")
    counted = count_costs(parsing.parse(text))
    assert counted.matmul_flops == 0
    assert counted.uncounted_kernels == ((f"{name}.1",) if uncounted else ())


def test_a_kernel_that_states_its_flops_counts():
    text = SPLASH.format(name="other", visited=4, target="tpu_custom_call", blocks="", rows="")
    cost = 'backend_config={"cost_estimate":{"flops":"123"}}, custom_call_target='
    text = text.replace("custom_call_target=", cost)
    counted = count_costs(parsing.parse(text))
    assert (counted.matmul_flops, counted.uncounted_kernels) == (123, ())


def test_flops_of_cublas_matmuls():
    text = """HloModule m, num_partitions=1

ENTRY %main (a: bf16[3,8,16], b: bf16[3,16,32]) -> bf16[3,8,32] {
  %a = bf16[3,8,16]{2,1,0} parameter(0)
  %b = bf16[3,16,32]{2,1,0} parameter(1)
  ROOT %c = bf16[3,8,32]{2,1,0} custom-call(%a, %b), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":\
["2"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"],\
"rhs_batch_dimensions":["0"]}}}
}
"""
    assert count_costs(parsing.parse(text)).matmul_flops == 2 * 3 * 8 * 16 * 32


@pytest.mark.parametrize(("dtype", "counted_as"), [("s8", "int8"), ("f8e4m3fn", "fp8")])
def test_flops_of_eight_bit_matmuls_are_counted_by_dtype(dtype: str, counted_as: str):
    """Also in fusions, and beside matmuls of other dtypes."""
    text = f"""HloModule m, num_partitions=1

%fused (p: {dtype}[8,16], q: {dtype}[16,32]) -> f32[8,32] {{
  %p = {dtype}[8,16]{{1,0}} parameter(0)
  %q = {dtype}[16,32]{{1,0}} parameter(1)
  ROOT %d = f32[8,32]{{1,0}} dot(%p, %q), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

ENTRY %main (a: {dtype}[8,16], b: {dtype}[16,32], c: bf16[8,32]) -> f32[8,8] {{
  %a = {dtype}[8,16]{{1,0}} parameter(0)
  %b = {dtype}[16,32]{{1,0}} parameter(1)
  %f = f32[8,32]{{1,0}} fusion(%a, %b), kind=kOutput, calls=%fused
  %c = bf16[8,32]{{1,0}} parameter(2)
  ROOT %e = f32[8,8]{{1,0}} dot(%c, %c), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
}}
"""
    counted = count_costs(parsing.parse(text))
    own = 2 * 8 * 16 * 32
    assert counted.matmul_flops == own + 2 * 8 * 8 * 32
    assert {"int8": counted.int8_flops, "fp8": counted.fp8_flops} == {"int8": 0, "fp8": 0} | {
        counted_as: own
    }


HOST = "f32[8,64]{1,0:T(8,128)S(5)}"
ROW = "f32[1,64]{1,0:T(1,128)}"


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        (f"copy-start = ({HOST}, f32[8,64]{{1,0}}, u32[]{{:S(2)}}) copy-start(%x)", 8),
        (f"copy-start = (f32[8,64]{{1,0}}, {HOST}, u32[]{{:S(2)}}) copy-start(%h)", 8),
        ("copy-start = (f32[8,64]{1,0:S(1)}, f32[8,64]{1,0}, u32[]{:S(2)}) copy-start(%x)", 0),
        (f"copy = {HOST} copy(%h)", 0),
        (f"copy = {HOST} copy(%x)", 8),
        (
            f"dynamic-slice-start = (({HOST}, s32[], s32[]), {ROW}, u32[]{{:S(2)}}) "
            "dynamic-slice-start(%h, %i, %i), dynamic_slice_sizes={1,64}",
            1,
        ),
        (f"dynamic-slice = {ROW} dynamic-slice(%x, %i, %i), dynamic_slice_sizes={{1,64}}", 0),
        (
            f"dynamic-update-slice-start = (({HOST}, {ROW}, s32[], s32[]), {HOST}, u32[]{{:S(2)}}) "
            "dynamic-update-slice-start(%h, %r, %i, %i)",
            1,
        ),
        ("dynamic-update-slice = f32[8,64]{1,0} dynamic-update-slice(%x, %r, %i, %i)", 0),
    ],
)
def test_transfers_between_device_and_host_are_counted(line: str, rows: int):
    """The TPU compiler's text for offloaded residuals; layout S(5) is the host's memory."""
    text = f"""HloModule m, num_partitions=1

ENTRY %main (x: f32[8,64], h: f32[8,64], r: f32[1,64], i: s32[]) -> s32[] {{
  %x = f32[8,64]{{1,0}} parameter(0)
  %h = {HOST} parameter(1)
  %r = {ROW} parameter(2)
  %i = s32[] parameter(3)
  %{line}
  ROOT %j = s32[] copy(%i)
}}
"""
    assert count_costs(parsing.parse(text)).host_transfers == 4 * 64 * rows
