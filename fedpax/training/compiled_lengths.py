"""CompiledLengths: the compiled round for each length of a cohort's axis of steps."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import jax

from fedpax.clients.cohort import Cohort
from fedpax.clients.cohort_stream import CohortStream
from fedpax.training.compiled_round import CompiledRound, check_same_types


class CompiledLengths:
    """The round of a run, compiled for each length of the axis of steps that it meets.

    All cohorts of a stream have the length of the first one, unless its `pad_to` is "round", as of
    `fedpax.data.cohort_rounds`.

    Args:
        stream: the stream of cohorts.
        first: the first cohort.
        compile: compiles the round for a cohort.
    """

    def __init__(
        self, stream: CohortStream, first: Cohort, compile: Callable[[Cohort], CompiledRound]
    ) -> None:
        self._has_lengths = getattr(stream, "pad_to", None) == "round"
        self._first = jax.tree.map(jax.typeof, first)
        self._compile = compile
        self.first = compile(first)
        self._by_length = {self._length(first): self.first}

    def of(
        self, number: int, cohort: Cohort, compiling: Callable[[], AbstractContextManager[None]]
    ) -> CompiledRound:
        """Return the round for a cohort, whose other types are checked.

        A new length is compiled in the context of `compiling`.
        """
        expected, length = self._first, self._length(cohort)
        if self._has_lengths:
            batches = jax.tree.map(
                lambda x: x.update(shape=(x.shape[0], length, *x.shape[2:])), expected.batches
            )
            expected = expected._replace(batches=batches)
        check_same_types(number, cohort, expected)
        if length not in self._by_length:
            with compiling():
                self._by_length[length] = self._compile(cohort)
        return self._by_length[length]

    def _length(self, cohort: Cohort) -> int:
        if not self._has_lengths:
            return 0
        return int(jax.tree.leaves(cohort.batches)[0].shape[1])
