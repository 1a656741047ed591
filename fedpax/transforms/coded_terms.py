"""The terms of a stage from the words in which a participant sends its update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedpax.primitives._jax import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Var,
    aval_of,
    eliminate_dead_code,
    evaluate,
)
from fedpax.transforms.client_stages import ClientStage, Value
from fedpax.transforms.marks import SENT


class CodedStage:
    """A stage whose terms are decoded by the server."""

    def __init__(
        self, stage: ClientStage, head: ClosedJaxpr, tail: ClosedJaxpr, values: tuple[Value, ...]
    ) -> None:
        self.values = values
        self._stage, self._tail = stage, tail
        self._sent = stage._replace(body=head, sent=tuple(range(len(values))))
        self.send, self.terms = jax.jit(self._send), jax.jit(self._terms)

    @property
    def nbytes(self) -> int:
        """The bytes of a participant's values."""
        return sum(value.nbytes for value in self.values)

    def _send(
        self, index: Any, shared: Sequence[Any], rows: Sequence[Any], own: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the values that a participant sends, and what it keeps."""
        values, _, kept = self._sent.client(index, shared, rows, own)
        return values, kept

    def _terms(
        self, index: Any, shared: Sequence[Any], rows: Sequence[Any], values: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Return the terms of a participant from its values."""
        of_server, of_rows = iter(shared), iter(rows)
        unplaced = [next(of_server) for name in self._stage.unplaced if name is None]
        slices = [next(of_rows) for name in self._stage.slices if name is None]
        return tuple(evaluate(self._tail, jnp.int32(index), *unplaced, *slices, *values))


def code_terms(stage: ClientStage) -> CodedStage | None:
    """Divide the body of a stage where words are sent; None if no words make its terms smaller."""
    jaxpr, number = stage.body.jaxpr, len(stage.stored)
    inputs = jaxpr.invars
    names = [None, *stage.unplaced, *stage.slices]
    of_server = [v for v, name in zip(inputs, names, strict=True) if name is None]
    words = {v for eqn in jaxpr.eqns if _is_word(eqn) for v in eqn.outvars}
    if not words or stage.shown:
        return None
    outputs = [jaxpr.outvars[number + i] for i in stage.sent]
    tail, needed = _server_part(jaxpr, words, {*of_server, *jaxpr.constvars}, outputs)
    computed = {v for eqn in tail for v in eqn.outvars} | {*of_server, *jaxpr.constvars}
    sent = [v for v in needed if v not in computed]
    values = tuple(
        Value("word" if v in words else "value", tuple(aval_of(v).shape), aval_of(v).dtype)
        for v in sent
    )
    coded = CodedStage(
        stage,
        _with(stage.body, jaxpr.invars, [*jaxpr.outvars[:number], *sent], jaxpr.eqns),
        _with(stage.body, [*of_server, *sent], outputs, tail),
        values,
    )
    return coded if coded.nbytes < sum(v.nbytes for v in stage.messages.terms) else None


def _is_word(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "name" and str(eqn.params["name"]).startswith(SENT)


def _server_part(
    jaxpr: Jaxpr, words: set[Var], known: set[Var], outputs: Sequence[Any]
) -> tuple[list[JaxprEqn], list[Var]]:
    """Return the equations from words and the server's values to outputs, and what they read."""
    decoded, known = set(words), set(known)
    for eqn in jaxpr.eqns:
        if _is_word(eqn):
            continue
        operands = [v for v in eqn.invars if isinstance(v, Var)]
        if any(v in decoded for v in operands):
            decoded.update(eqn.outvars)
        elif all(v in known for v in operands) and not eqn.effects:
            known.update(eqn.outvars)
    needed = dict.fromkeys(v for v in outputs if isinstance(v, Var))
    tail: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        computed = not _is_word(eqn) and all(v in decoded or v in known for v in eqn.outvars)
        if computed and any(v in needed for v in eqn.outvars):
            tail.append(eqn)
            needed |= dict.fromkeys(v for v in eqn.invars if isinstance(v, Var))
    return tail[::-1], list(needed)


def _with(
    body: ClosedJaxpr, inputs: Sequence[Var], outputs: Sequence[Any], eqns: Sequence[JaxprEqn]
) -> ClosedJaxpr:
    jaxpr = body.jaxpr.replace(
        invars=list(inputs),
        outvars=list(outputs),
        eqns=list(eqns),
        debug_info=body.jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    return eliminate_dead_code(ClosedJaxpr(jaxpr, body.consts))
