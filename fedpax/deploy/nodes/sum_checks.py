"""Checks of a program before secure sums of its terms."""

from typing import Any

import numpy as np

from fedpax.errors import ArgumentError

LEAST_PARTICIPANTS = 3
"""Of a sum of two, each of them learns the other's terms."""


def check_program(program: Any, quorum: int, least: int = 2, most: int | None = None) -> None:
    """Raise an ArgumentError if a program sends anything else than terms of sums."""
    if most is not None and program.size > most:
        raise ArgumentError(
            f"secure=true with {program.size} participants in a round, expected at most {most}: "
            "each of them gets a share of each other one's secrets. Export again with a smaller "
            'cohort, or secure-protocol="secagg+".'
        )
    if 2 * quorum <= program.size:
        raise ArgumentError(
            f"secure=true with quorum={quorum} of {program.size}, expected more than half: the "
            "quorum's shares open the masks. Set a larger quorum."
        )
    if program.size < LEAST_PARTICIPANTS:
        raise ArgumentError(
            f"secure=true with {program.size} participants in a round, expected at least "
            f"{LEAST_PARTICIPANTS}: with fewer, the sum tells each its neighbour's terms."
        )
    if quorum < least:
        raise ArgumentError(
            f"secure=true with quorum={quorum}, expected at least {least}: from a sum of two, each "
            'learns the other\'s terms. Set a larger quorum, or secure-protocol="secagg+".'
        )
    random = np.random.default_rng(0)
    for number, stage in enumerate(program.artifact.manifest["stages"]):
        if stage["shown"]:
            raise ArgumentError(
                f"secure=true, but the server reads {stage['shown'][0]['name']} of each "
                "participant, expected a program that sends sums and means alone. Use the "
                "aggregator mean(), or secure=false."
            )
        some, others = (
            [(8 * random.normal(size=t["shape"])).astype(t["dtype"]) for t in stage["terms"]]
            for _ in range(2)
        )
        merged = program.artifact.merge(number)(some, others)
        for term, a, b, c in zip(stage["terms"], some, others, merged, strict=True):
            if not np.allclose(np.asarray(c, np.float64), a.astype(np.float64) + b, atol=1e-1):
                raise ArgumentError(
                    f"secure=true, but {term['name']} is not a sum, expected a program that sends "
                    "sums and means alone. Use other reductions, or secure=false."
                )


def check_masks(program: Any, quorum: int, *, is_secure: bool) -> None:
    """Raise an ArgumentError if a program needs masks, and the run opens sums without them."""
    least = program.artifact.manifest["least_masked"]
    if least is None:
        return
    if not is_secure:
        raise ArgumentError(
            "secure=false, but the program has secure_mean() or private_secure_mean(), whose terms "
            "must be masked. Run with --run-config 'secure=true'."
        )
    if quorum < least:
        raise ArgumentError(
            f"quorum={quorum}, expected at least min_participants={least}, with which the noise of "
            "private_secure_mean() has the stated size. Set a larger quorum, or export again with "
            "a smaller min_participants."
        )
