"""Nodes in one process: the network that tests of the server of rounds have."""

import functools
import os
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedpax.aggregators import private_secure_mean
from fedpax.algorithms import fedavg, scaffold
from fedpax.data import ClientSampler, cohort_rounds
from fedpax.deploy.nodes.node import NodeProgram
from fedpax.deploy.nodes.node_roster import NodeReply
from fedpax.deploy.round_program import RoundProgram, Settings, pack_program, parse_program

N = int(os.environ.get("FEDPAX_TEST_NODES", "3"))
STEPS, BATCH, FEATURES = 4, 2, 3
SETTINGS = Settings(rounds=3, seed=5, num_clients=N, local_epochs=2, cohort_seed=7)
SIZES = [4, 3, 1, 2]  # of the first N
SGD = optax.sgd(0.1)


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


def loss_fn(params, batch):
    error = (batch["x"] @ params["w"] - batch["y"]) * batch["mask"]
    loss = jnp.sum(error**2) / jnp.maximum(jnp.sum(batch["mask"]), 1)
    return loss, {}


def init(key):
    return {"w": jax.random.normal(key, (FEATURES,))}


def fedavg_of(size=None):
    return fedavg(loss_fn, cohort_size=size or N, client_optimizer=SGD)


def scaffold_of(size=None):
    return scaffold(loss_fn, cohort_size=size or N, num_clients=N, client_optimizer=SGD)


def private_of(size=None):
    aggregator = private_secure_mean(
        max_norm=1.0, noise_multiplier=PRIVATE_NOISE, seed=0, min_participants=3
    )
    return fedavg(loss_fn, cohort_size=size or N, client_optimizer=SGD, aggregator=aggregator)


PRIVATE_NOISE = 1e-3
METHODS = {"fedavg": fedavg_of, "scaffold": scaffold_of}
MASKED_METHODS = {**METHODS, "private": private_of}


def examples(k):
    """The examples of a participant."""
    return {"x": normal(SIZES[k], FEATURES, seed=k), "y": normal(SIZES[k], seed=10 + k)}


def load_data(node):
    return examples(node.participant)


def use_nodes(monkeypatch, number):
    """Have another number of participants, here and in processes that the test starts."""
    monkeypatch.setenv("FEDPAX_TEST_NODES", str(number))
    monkeypatch.setattr(sys.modules[__name__], "N", number)
    settings = SETTINGS._replace(num_clients=number)
    monkeypatch.setattr(sys.modules[__name__], "SETTINGS", settings)


def rounds_of(size=None):
    """The cohorts of all participants, as jit takes them."""
    together = {name: np.concatenate([examples(k)[name] for k in range(N)]) for name in ("x", "y")}
    parts = np.split(np.arange(sum(SIZES[:N])), np.cumsum(SIZES[:N])[:-1])
    sampler = ClientSampler(N, size or N, SETTINGS.cohort_seed)
    return cohort_rounds(
        together,
        parts,
        sampler,
        batch_size=BATCH,
        local_epochs=SETTINGS.local_epochs,
        max_steps=STEPS,
        seed=SETTINGS.cohort_seed,
        preprocess=dict,
    )


def pack(method, size=None):
    return pack_program(MASKED_METHODS[method](size), init, rounds_of(size).shapes, SETTINGS)


def program_of(method, size=None):
    """Pack and parse a program once for each number of participants."""
    return _program_of(method, size, N)


@functools.cache
def _program_of(method, size, number) -> RoundProgram:
    return parse_program(pack(method, size))


@functools.cache
def _compiled(method, number):
    algorithm = MASKED_METHODS[method]()
    return algorithm, jax.jit(algorithm.round)


def by_jit(method, absent=lambda number: ()):
    """The states of a run in one process, a list from the initial one.

    The round's absent participants have id -1, weight 0 and no steps.
    """
    (algorithm, step), rounds = _compiled(method, N), rounds_of()
    state = algorithm.init(init(jax.random.key(SETTINGS.seed)))
    states = [state]
    for number in range(SETTINGS.rounds):
        cohort = rounds.read_clients(number, np.arange(N))
        gone = np.isin(np.arange(N), list(absent(number)))
        cohort = cohort._replace(
            client_ids=np.where(gone, -1, cohort.client_ids),
            num_examples=np.where(gone, 0, cohort.num_examples),
            num_steps=np.where(gone, 0, cohort.num_steps),
        )
        state, _ = step(state, cohort)
        states.append(state)
    return states


class LocalNetwork:
    """Carries packets to nodes in this process, and loses those that `lost` names.

    lost: `(packet values, node) -> "before"`: the node does not get it, `"after"`: the answer
    comes too late, or None.
    """

    def __init__(
        self,
        program,
        folder,
        *,
        lost=lambda values, node: None,
        partitions=None,
        seed=0,
        counts_releases=False,
    ):
        partitions = range(N) if partitions is None else partitions
        self.programs = {
            100 + k: NodeProgram(
                program, load_data, folder / f"disk_{k}", counts_releases=counts_releases
            )
            for k in partitions
        }
        self.config = {}
        self.partitions = {100 + k: k for k in partitions}
        self.lost, self.replies, self.log, self.sent = lost, {}, [], {}
        self.random = random.Random(seed)

    def nodes(self):
        return list(self.programs)

    def push(self, packets, seconds):
        sent = {}
        for node, packet in packets.items():
            message = f"message {len(self.sent)}"
            sent[message] = self.sent[message] = node
            self.log.append((node, packet))
            fate = self.lost(packet.values, node)
            if fate == "before":
                continue
            config = {**self.config, "partition-id": self.partitions[node]}
            answer = self.programs[node].answer(packet, config)
            if fate != "after":
                self.replies[message] = NodeReply(message, answer)
        return sent

    def pull(self, messages):
        there = [m for m in messages if m in self.replies]
        self.random.shuffle(there)
        return [self.replies.pop(m) for m in there]
