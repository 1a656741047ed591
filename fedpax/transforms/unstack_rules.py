"""The axes along which the equations of each primitive can be split into independent slices."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fedpax.primitives._jax import JaxprEqn, aval_of
from fedpax.primitives.unit_axis import ARITHMETIC


class AxisMap(NamedTuple):
    """One axis along which an equation can be split."""

    # the axis in each operand; None if each slice of the result needs the whole operand
    operands: tuple[int | None, ...]
    # the axis in each result; None if the result combines the slices
    results: tuple[int | None, ...]


def axis_maps(eqn: JaxprEqn) -> Iterator[AxisMap]:
    """Yield the axes along which an equation can be split."""
    rule = RULES.get(eqn.primitive.name)
    return iter(()) if rule is None else rule(eqn)


Rule = Callable[[JaxprEqn], Iterator[AxisMap]]


def _shape(eqn: JaxprEqn, operand: int = 0) -> tuple[int, ...]:
    return aval_of(eqn.invars[operand]).shape


def _everywhere(eqn: JaxprEqn, excluded: Sequence[int] = ()) -> Iterator[AxisMap]:
    """Yield the axes that operands and results share; an operand may broadcast an axis."""
    out = aval_of(eqn.outvars[0])
    for axis in range(out.ndim):
        if axis not in excluded:
            operands = (
                axis
                if v.ndim == out.ndim and (v.shape[axis] != 1 or out.shape[axis] == 1)
                else None
                for v in map(aval_of, eqn.invars)
            )
            yield AxisMap(tuple(operands), (axis,) * len(eqn.outvars))


def _except(name: str) -> Rule:
    """Return the rule of a primitive that works along the axes that a parameter names."""

    def rule(eqn: JaxprEqn) -> Iterator[AxisMap]:
        named = eqn.params[name]
        axes = named if isinstance(named, tuple | list) else (named,)
        return _everywhere(eqn, [axis % len(_shape(eqn)) for axis in axes])

    return rule


def _removes(name: str, combines: bool = False) -> Rule:
    """Return the rule of a primitive that removes the axes that a parameter names."""

    def rule(eqn: JaxprEqn) -> Iterator[AxisMap]:
        removed = eqn.params[name]
        operands = [v.ndim > 0 for v in map(aval_of, eqn.invars)]  # the rest are initial values
        for axis in range(len(_shape(eqn))):
            result = None if axis in removed else axis - sum(r < axis for r in removed)
            if result is not None or combines:
                yield AxisMap(
                    tuple(axis if o else None for o in operands), (result,) * len(eqn.outvars)
                )

    return rule


def _batch_axes(*core_ranks: int) -> Rule:
    """Return the rule of a batched primitive, given the other axes of each operand and the rest."""

    def rule(eqn: JaxprEqn) -> Iterator[AxisMap]:
        ranks = [len(_shape(eqn, i)) for i in range(len(eqn.invars))]
        cores = (*core_ranks, *[core_ranks[-1]] * len(ranks))
        for axis in range(min(r - c for r, c in zip(ranks, cores, strict=False))):
            yield AxisMap((axis,) * len(ranks), (axis,) * len(eqn.outvars))

    return rule


def _broadcast_in_dim(eqn: JaxprEqn) -> Iterator[AxisMap]:
    position = {d: i for i, d in enumerate(eqn.params["broadcast_dimensions"])}
    for axis, length in enumerate(eqn.params["shape"]):
        operand = position.get(axis)
        if operand is not None and _shape(eqn)[operand] != length:
            operand = None  # of size 1, the same for all slices
        yield AxisMap((operand,) + (None,) * (len(eqn.invars) - 1), (axis,))


def _iota(eqn: JaxprEqn) -> Iterator[AxisMap]:
    for axis in range(len(eqn.params["shape"])):
        if axis != eqn.params["dimension"]:
            yield AxisMap((None,) * len(eqn.invars), (axis,))


def _reshape(eqn: JaxprEqn) -> Iterator[AxisMap]:
    """Yield an axis if the number of elements before it, and its size, do not change."""
    old, new = _shape(eqn), eqn.params["new_sizes"]
    if eqn.params["dimensions"] is not None or 0 in old:
        return
    pairs = [
        (a, b)
        for a in range(len(old))
        for b in range(len(new))
        if old[a] == new[b] and math.prod(old[:a]) == math.prod(new[:b])
    ]
    for a, b in sorted(pairs, key=lambda pair: pair[0] != pair[1]):
        yield AxisMap((a,) + (None,) * (len(eqn.invars) - 1), (b,))


def _stack(eqn: JaxprEqn) -> Iterator[AxisMap]:
    for axis in range(len(_shape(eqn))):
        yield AxisMap((axis,) * len(eqn.invars), (axis + (axis >= eqn.params["axis"]),))


def _unstack(eqn: JaxprEqn) -> Iterator[AxisMap]:
    for axis in range(len(_shape(eqn))):
        if axis != eqn.params["axis"]:
            yield AxisMap((axis,), (axis - (axis > eqn.params["axis"]),) * len(eqn.outvars))


def _tile(eqn: JaxprEqn) -> Iterator[AxisMap]:
    added = aval_of(eqn.outvars[0]).ndim - len(_shape(eqn))
    for axis in range(len(_shape(eqn))):
        if eqn.params["reps"][axis + added] == 1:
            yield AxisMap((axis,), (axis + added,))


def _transpose(eqn: JaxprEqn) -> Iterator[AxisMap]:
    for result, axis in enumerate(eqn.params["permutation"]):
        yield AxisMap((axis,), (result,))


def _slice(eqn: JaxprEqn) -> Iterator[AxisMap]:
    p, shape = eqn.params, _shape(eqn)
    for axis, length in enumerate(shape):
        stride = 1 if p["strides"] is None else p["strides"][axis]
        if (p["start_indices"][axis], p["limit_indices"][axis], stride) == (0, length, 1):
            yield AxisMap((axis,), (axis,))


def _dynamic_slice(eqn: JaxprEqn) -> Iterator[AxisMap]:
    # A start index is clamped to 0 along an axis that is taken in full.
    for axis, length in enumerate(_shape(eqn)):
        if eqn.params["slice_sizes"][axis] == length:
            yield AxisMap((axis,) + (None,) * (len(eqn.invars) - 1), (axis,))


def _dynamic_update_slice(eqn: JaxprEqn) -> Iterator[AxisMap]:
    for axis, length in enumerate(_shape(eqn)):
        if _shape(eqn, 1)[axis] == length:
            yield AxisMap((axis, axis) + (None,) * (len(eqn.invars) - 2), (axis,))


def _pad(eqn: JaxprEqn) -> Iterator[AxisMap]:
    for axis, amounts in enumerate(eqn.params["padding_config"]):
        if tuple(amounts) == (0, 0, 0):
            yield AxisMap((axis, None), (axis,))


def _dot_general(eqn: JaxprEqn) -> Iterator[AxisMap]:
    (left_contracted, right_contracted), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    for result, (left, right) in enumerate(zip(left_batch, right_batch, strict=True)):
        yield AxisMap((left, right), (result,))
    result = len(left_batch)
    for left in range(len(_shape(eqn, 0))):
        if left not in (*left_contracted, *left_batch):
            yield AxisMap((left, None), (result,))
            result += 1
    for right in range(len(_shape(eqn, 1))):
        if right not in (*right_contracted, *right_batch):
            yield AxisMap((None, right), (result,))
            result += 1
    for left, right in zip(left_contracted, right_contracted, strict=True):
        yield AxisMap((left, right), (None,))


def _conv(eqn: JaxprEqn) -> Iterator[AxisMap]:
    p, numbers = eqn.params, eqn.params["dimension_numbers"]
    if p["batch_group_count"] == 1:
        yield AxisMap((numbers.lhs_spec[0], None), (numbers.out_spec[0],))
    if p["batch_group_count"] == p["feature_group_count"] == 1:
        yield AxisMap((None, numbers.rhs_spec[0]), (numbers.out_spec[1],))
        yield AxisMap((numbers.lhs_spec[1], numbers.rhs_spec[1]), (None,))


def _gather(eqn: JaxprEqn) -> Iterator[AxisMap]:
    p, numbers, shape = eqn.params, eqn.params["dimension_numbers"], _shape(eqn)
    removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    window = [axis for axis in range(len(shape)) if axis not in removed]
    for axis, result in zip(window, numbers.offset_dims, strict=True):
        if axis not in numbers.start_index_map and p["slice_sizes"][axis] == shape[axis]:
            yield AxisMap((axis, None), (int(result),))
    rank = aval_of(eqn.outvars[0]).ndim
    results = [axis for axis in range(rank) if axis not in numbers.offset_dims]
    batched = dict(
        zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    )
    for axis, result in enumerate(results):  # the axes of the indices but the last
        operand = batched.get(axis)
        yield AxisMap((None if operand is None else int(operand), axis), (result,))


def _scatter(eqn: JaxprEqn) -> Iterator[AxisMap]:
    numbers, shape, updates = eqn.params["dimension_numbers"], _shape(eqn), _shape(eqn, 2)
    removed = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [axis for axis in range(len(shape)) if axis not in removed]
    for axis, update in zip(window, numbers.update_window_dims, strict=True):
        targeted = axis in numbers.scatter_dims_to_operand_dims
        if not targeted and updates[update] == shape[axis]:
            yield AxisMap((axis, None, int(update)), (axis,))
    scattered = [a for a in range(len(updates)) if a not in numbers.update_window_dims]
    batched = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    for axis, index in batched:
        yield AxisMap((int(axis), int(index), scattered[index]), (int(axis),))


def _window(eqn: JaxprEqn) -> Iterator[AxisMap]:
    """Yield the axes along which a sliding window has size 1, stride 1 and no padding."""
    p, rank = eqn.params, len(_shape(eqn))
    ones = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    windowed = [
        axis
        for axis in range(rank)
        if any(name in p and p[name][axis] != 1 for name in ones)
        or tuple(p["padding"][axis]) != (0, 0)
    ]
    return _everywhere(eqn, windowed)


def _bitcast(eqn: JaxprEqn) -> Iterator[AxisMap]:
    for axis in range(min(len(_shape(eqn)), aval_of(eqn.outvars[0]).ndim)):
        if _shape(eqn)[axis] == aval_of(eqn.outvars[0]).shape[axis]:
            yield AxisMap((axis,), (axis,))


def _random(eqn: JaxprEqn) -> Iterator[AxisMap]:
    """Yield the axes of the keys, which come first in the result."""
    for axis in range(len(_shape(eqn))):
        yield AxisMap((axis,), (axis,))


ELEMENTWISE = ARITHMETIC | {
    "federated_mask",
    "random_clone",
    "random_fold_in",
    "random_gamma",
    "random_seed",
    "reshard",
    "threefry2x32",
}
RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _everywhere),
    **dict.fromkeys(["cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"], _except("axis")),
    **dict.fromkeys(["split", "top_k"], _except("axis")),
    **dict.fromkeys(["concatenate", "sort"], _except("dimension")),
    "approx_top_k": _except("reduction_dimension"),
    "rev": _except("dimensions"),
    **dict.fromkeys(["argmax", "argmin"], _removes("axes")),
    **dict.fromkeys(["reduce_prod", "reduce_xor"], _removes("axes")),
    **dict.fromkeys(
        ["reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"],
        _removes("axes", combines=True),
    ),
    "reduce": _removes("dimensions"),
    "squeeze": _removes("dimensions"),
    "broadcast_in_dim": _broadcast_in_dim,
    "conv_general_dilated": _conv,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "iota": _iota,
    "pad": _pad,
    "reshape": _reshape,
    "slice": _slice,
    "stack": _stack,
    "tile": _tile,
    "transpose": _transpose,
    "unstack": _unstack,
    "bitcast_convert_type": _bitcast,
    **dict.fromkeys(["random_bits", "random_split", "random_unwrap"], _random),
    **dict.fromkeys(
        ["scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"],
        _scatter,
    ),
    **dict.fromkeys(
        """
        reduce_window reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add
        select_and_scatter_add
        """.split(),
        _window,
    ),
    **dict.fromkeys(
        ["cholesky", "eig", "eigh", "geqrf", "lu", "qr", "schur", "svd", "triangular_solve"],
        _batch_axes(2),
    ),
    "householder_product": _batch_axes(2, 1),
    "tridiagonal_solve": _batch_axes(1, 1, 1, 2),
    **dict.fromkeys(["lu_pivots_to_permutation", "random_wrap"], _batch_axes(1)),
    "fft": lambda eqn: _batch_axes(len(eqn.params["fft_lengths"]))(eqn),
}
