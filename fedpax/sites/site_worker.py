"""The work of a site: the clients' part of each stage, on its own data."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from fedpax.algorithm import Params
from fedpax.clients.cohort import Cohort
from fedpax.run_files.metrics import with_quantiles
from fedpax.sites.coordinator_program import batch_types, divide
from fedpax.sites.heldout_replies import Allowance, Measured, hash_model, measure
from fedpax.sites.round_rules import weigh
from fedpax.sites.secret_terms import TASK as SUM
from fedpax.sites.secret_terms import SecretTerms
from fedpax.sites.site_experiment import (
    FINE_TUNED,
    ClientRange,
    Json,
    SiteExperiment,
    SiteRun,
)
from fedpax.sites.site_files import KeptValues, check_names
from fedpax.sites.site_process import items_of
from fedpax.sites.tasks import (
    EVALUATION,
    QUESTION,
    ROUND,
    ROW,
    SHARED,
    SHOWN,
    TERM,
    VALUES,
    WORD,
    from_numbers,
    in_order,
    numbered,
    type_in_message,
)
from fedpax.sites.uplink import Uplink
from fedpax.transforms.client_stages import Value
from fedpax.transforms.stages import Stages
from fedpax.transport.admission import CheckedHeader
from fedpax.transport.calls import RefusedError

Arrays = Mapping[str, np.ndarray]


UNSENT = "\0 what the sums of this site have lost"
"""The name of the losses of sums beside the states of clients; no file has this name."""

MAX_CLIENTS, MOST_QUESTIONS = 10_000_000, 20
"""Different questions before the first round: three for a table, and others of other sites."""


class _Program(NamedTuple):
    """The rounds of a number of clients, as this site runs them."""

    run: SiteRun
    stages: Stages
    state: Any  # initial, also of what clients keep
    frozen: tuple[Any, ...]


class SiteWorker:
    """Answers the coordinator's tasks."""

    def __init__(
        self,
        experiment: Any,
        folder: Path,
        *,
        seed: int,
        save: Callable[[int, Params, str], None],
        on_metrics: Callable[[int, dict[str, float]], None],
        sums: SecretTerms | None = None,
        personal: bool = False,
        allowance: Allowance | None = None,
    ) -> None:
        assert isinstance(experiment, SiteExperiment)
        self._experiment, self._seed = experiment, seed
        self._save, self._on_metrics = save, on_metrics
        self._sums = SecretTerms("site") if sums is None else sums
        self._allowance = allowance or Allowance()
        self._measured: Measured | None = None
        self._kept = KeptValues(folder)
        self._programs: dict[ClientRange, _Program] = {}
        self._questions: dict[str, tuple[Stages, Mapping[str, jax.Array]]] = {}
        self._between: tuple[str, dict[int, dict[str, Any]]] = ("", {})  # kept between stages
        self._unsent: dict[str, np.ndarray] = {}  # what the sums of this round lose
        self._cohorts: tuple[Any, Cohort] | None = None
        self._whole_run: SiteRun | None = None  # as if there were no other site
        self._asked, self._personal = set[str](), personal
        self._inputs: Json | None = None
        self.count = int(experiment.describe_site()["clients"])

    def set_inputs(self, inputs: Json) -> Json:
        """Take over the inputs that all sites share, and return the types of a batch."""
        self._experiment = self._experiment.with_inputs(inputs)
        self._programs, self._inputs = {}, inputs
        # The aggregator can need more clients than this site has: others are without examples.
        cohort_size = getattr(getattr(self._experiment, "cohort", None), "size", 0)
        self._total = max(self.count, cohort_size)
        run = self._whole_run = self._experiment.at_site(ClientRange(0, self.count, self._total))
        batches = run.draw(0, []).batches
        return batch_types(
            {n: jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for n, x in batches.items()}
        )

    @property
    def notes(self) -> Sequence[str]:
        """Lines on the data of this site, which it prints."""
        return () if self._whole_run is None else self._whole_run.notes

    @property
    def model_bytes(self) -> int:
        """The bytes of the model."""
        assert self._whole_run is not None
        like = jax.eval_shape(self._whole_run.init, jax.random.key(0))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(like))

    def work(self, header: Json, arrays: Arrays) -> tuple[Json, Arrays]:
        """Do a task, and return the fields and the arrays of the reply."""
        task = header["task"]
        if task == EVALUATION and "request" not in header:
            return self._evaluate(header, arrays), {}
        if task == SUM:
            return self._sums.answer(header), {}
        if task in (QUESTION, VALUES) and self._whole_run is not None:
            raise RefusedError("the syncer asks about this site's data once the inputs are known.")
        if task == VALUES:
            self._count_question(str(header["columns"]))
            experiment: Any = self._experiment
            return {"values": experiment.list_values(header["columns"])}, {}
        work = {QUESTION: self._answer, ROUND: self._run_stage, EVALUATION: self._sum_metrics}
        if task in work:
            reply = work[task](header, arrays)
            return self._sums.send({**header, "inputs": self._inputs}, arrays, *reply)
        raise RefusedError(
            f"the syncer asks for {str(task)[:50]!r}, expected a round, a question or an "
            "evaluation. Use the same version of fedpax on both sides."
        )

    def _clients(self, header: Json) -> ClientRange:
        task = CheckedHeader(header)
        first, total = task.count("first_client"), task.count("num_clients", 1)
        own = set(range(first, first + self.count))
        clients, slots = (cast(Any, header.get(name)) for name in ("clients", "slots"))
        fits = isinstance(clients, list) and isinstance(slots, list) and len(clients) == len(slots)
        is_whole = fits and all(type(k) is int and 0 <= k < MAX_CLIENTS for k in [*clients, *slots])
        if not is_whole or total > MAX_CLIENTS:
            raise RefusedError("the syncer asks for clients in another form than numbers.")
        if not clients or not own.issuperset(clients) or len({*clients}) < len(clients):
            raise RefusedError(
                f"the syncer asks for the clients {clients[:5]} of this site, expected some of the "
                f"numbers {first} to {first + self.count - 1}, each once."
            )
        return ClientRange(first, self.count, total)

    def _count_question(self, asked: str) -> None:
        """Refuse a question about the data after many others; a repeated one tells nothing new."""
        if len(self._asked | {asked}) > MOST_QUESTIONS:
            raise RefusedError(
                f"the syncer asks more than {MOST_QUESTIONS} different questions about this site's "
                "data. If sites came and went before the first round, start this site again."
            )
        self._asked.add(asked)

    def _answer(self, header: Json, arrays: Arrays) -> tuple[Json, Arrays]:
        token, clients = header["token"], self._clients(header)
        if len(header["clients"]) < self.count:
            raise RefusedError(
                "the syncer asks for averages of some of this site's clients, expected all clients."
            )
        asked = f"{clients} {header['settings']}"
        self._count_question(asked)
        if self._between[0] != token or asked not in self._questions:
            divided, args = self._experiment.answer(header["settings"], clients)
            self._questions = {asked: (divided, divided.own(*args))}
            self._between = token, {}
        divided, own = self._questions[asked]
        kept = self._between[1]
        rows = {
            k: {name: x[k] for name, x in own.items()} | kept.get(k, {}) for k in header["clients"]
        }
        return {}, self._run_clients(divided, header, arrays, rows)

    def _program(self, clients: ClientRange) -> _Program:
        if clients not in self._programs:
            run = self._experiment.at_site(clients)
            check_names(run.names, clients.number)
            params = jax.jit(run.init)(jax.random.key(self._seed))
            state = jax.jit(run.algorithm.init)(params)
            cohort = run.draw(0, [])
            frozen = None if run.frozen is None else run.frozen.load()
            divided = divide(run.algorithm, state, cohort, frozen)
            others = () if frozen is None else (frozen,)
            self._programs = {clients: _Program(run, divided, state, others)}
        return self._programs[clients]

    def _run_stage(self, header: Json, arrays: Arrays) -> tuple[Json, Arrays]:
        own_clients = self._clients(header)
        program, token = self._program(own_clients), header["token"]
        stage, clients = header["stage"], header["clients"]
        names = {k: program.run.names[k - own_clients.first] for k in clients}
        if stage == 0:
            self._allowance.add_round(header["round"])
            self._kept.settle(header["counted"], token)
            self._between, self._unsent = (token, {}), {}
        elif self._between[0] != token:
            raise UnknownRoundError
        asked = token, header["round"], clients, header["weights"]
        if self._cohorts is None or self._cohorts[0] != asked:
            drawn = program.run.draw(header["round"] - 1, clients)
            self._cohorts = asked, weigh(drawn, header["weights"])
        cohort = self._cohorts[1]
        arguments = program.state, cohort, *program.frozen
        own, known = program.stages.own(*arguments), program.stages.known(*arguments)
        places = {int(k): place for place, k in enumerate(np.asarray(cohort.client_ids))}
        states = {value.name for value in program.stages[len(program.stages) - 1].kept}
        rows = {
            k: {name: x[places[k]] for name, x in own.items()}
            | {name: x for name, x in self._kept.read(names[k]).items() if name in own}
            | self._between[1].get(k, {})
            | known
            for k in clients
        }
        result = self._run_clients(program.stages, header, arrays, rows)
        if "up" in header and not header.get("coded"):
            result = self._encode_sums(program.stages, header, own_clients.first, result)
        proposals: dict[str, dict[str, Any]] = {}
        if stage == len(program.stages) - 1:
            kept = self._between[1]
            proposals = {
                names[k]: {n: x for n, x in kept[k].items() if n in states and n in own}
                for k in clients
            }
        if self._unsent and stage == header["last_stage"]:
            proposals[UNSENT] = self._unsent
        if proposals := {name: values for name, values in proposals.items() if values}:
            self._kept.propose(token, proposals)
        weights = np.asarray(cohort.num_examples)
        return {"examples": int(sum(weights[places[k]] for k in clients))}, result

    def _encode_sums(self, divided: Stages, header: Json, first: int, arrays: Arrays) -> Arrays:
        """Return a reply whose sums are encoded, and keep what they lose."""
        stage = header["stage"]
        uplink = Uplink(header["up"], divided[stage], divided.adds(stage))
        if not uplink.is_active:
            return arrays
        zeros, earlier = uplink.zeros(), self._kept.read(UNSENT)
        unsent = [earlier.get(f"{stage} {i}", x) for i, x in enumerate(zeros)]
        unsent = [e if e.shape == x.shape else x for e, x in zip(unsent, zeros, strict=True)]
        encoded, lost = uplink.encode(header["round"], first, arrays, unsent)
        self._unsent |= {f"{stage} {i}": x for i, x in enumerate(lost)}
        return encoded

    def _run_clients(
        self,
        divided: Stages,
        header: Json,
        arrays: Arrays,
        rows: Mapping[int, Mapping[str, Any]],
    ) -> Arrays:
        """Run a stage for clients one by one, and merge their terms."""
        number = header["stage"]
        if divided.least_masked is not None and "request" not in header:
            raise RefusedError(
                "the syncer asks for the terms of this site, expected a secure sum: the aggregator "
                "is secure_mean or private_secure_mean. Start `fedpax syncer` with --secure_sums."
            )
        if number >= len(divided):
            raise RefusedError(
                f"the syncer asks for stage {number}, expected less than {len(divided)}. Use the "
                "same flags and the same version of fedpax on both sides."
            )
        stage, client, merge = divided[number], divided.client(number), divided.merge(number)
        self._sums.expect(divided, number)
        of_all, of_rows = in_order(SHARED, arrays), in_order(ROW, arrays)
        check_arrays(SHARED, stage.shared, of_all, ())
        check_arrays(ROW, stage.rows, of_rows, (len(header["clients"]),))
        shared = [from_numbers(x, v.dtype) for x, v in zip(of_all, stage.shared, strict=True)]
        coded = divided.coded(number) if header.get("coded") else None
        if header.get("coded") and (coded is None or self.count > 1):
            raise RefusedError(
                "the syncer asks for the encoded update of a client, expected the sum over this "
                f"site's {self.count} clients. Use the same version of fedpax on both sides."
            )
        merged, shown = cast(Any, ()), list[Any]()
        for place, (k, slot) in enumerate(zip(header["clients"], header["slots"], strict=True)):
            received = [
                from_numbers(x[place], v.dtype) for x, v in zip(of_rows, stage.rows, strict=True)
            ]
            values = {**rows[k], **divided.draw_noise(number)}
            if coded is not None:
                words, kept = coded.send(slot, shared, received, values)
                self._between[1].setdefault(k, {}).update(kept)
                return numbered(WORD, words)
            terms, seen, kept = client(slot, shared, received, values)
            self._between[1].setdefault(k, {}).update(kept)
            merged = merge(merged, terms) if shown else terms
            shown.append(seen)
        stacked = [np.stack([np.asarray(x) for x in each]) for each in zip(*shown, strict=True)]
        return numbered(TERM, merged) | numbered(SHOWN, stacked)

    def _evaluate(self, header: Json, arrays: Arrays) -> Json:
        run = self._whole_run
        assert run is not None
        self._kept.settle(header["counted"], header["token"])
        like = jax.eval_shape(run.init, jax.random.key(0))
        leaves, tree = jax.tree.flatten(like)
        received = in_order(SHARED, arrays)
        if [(x.shape, x.dtype) for x in leaves] != [(x.shape, x.dtype) for x in received]:
            raise RefusedError(
                "the syncer sent a model of other shapes. Use the same flags and the same version "
                "of fedpax on both sides."
            )
        params = jax.tree.unflatten(tree, [jnp.asarray(x) for x in received])
        if header["save"]:
            self._save(header["round"], params, "")
        tuned = None
        if self._personal and header["save"] and run.fine_tune is not None:
            tuned = run.fine_tune(params)
            self._save(header["round"], tuned, FINE_TUNED)
        why = "of held-out examples: it has none"
        self._measured = None
        if run.evaluate is None or (why := self._allowance.refuse()):
            return {"metrics": {}, "examples": 0, "withheld": why}
        measured = with_quantiles(run.evaluate(params))
        if self._personal and header["save"]:
            measured |= self._evaluate_personal(params)
        if tuned is not None:
            own = with_quantiles(run.evaluate(tuned))
            measured |= {f"{FINE_TUNED}_{name}": value for name, value in own.items()}
        means = {name: float(value) for name, value in measured.items()}
        self._on_metrics(header["round"], dict(run.finish(means)))
        is_summed = self._sums.is_required or header.get("secure_sums", True)
        model = hash_model(received) if is_summed else ""
        per_example = items_of(self._experiment)[1]
        self._measured = measure(run, model, means, is_summed=is_summed, per_example=per_example)
        return self._measured.reply(is_summed=is_summed)

    def _sum_metrics(self, header: Json, arrays: Arrays) -> tuple[Json, Arrays]:
        # Masks are bound to the model. A second sum, of other sites, would tell one site's means.
        measured, session, names = self._measured, header["session"], header["names"]
        if measured is None or header["model"] != measured.model:
            raise UnknownRoundError
        if measured.session not in ("", session) or not {*names} <= measured.heldout.means.keys():
            return {"fault": "this site sends metrics that it has, in one sum alone"}, {}
        self._measured = measured._replace(session=session)
        return {}, measured.terms(names)

    def _evaluate_personal(self, params: Params) -> dict[str, Any]:
        """Evaluate the own models of clients, with the states that they keep."""
        program = self._program(ClientRange(0, self.count, self._total))
        run, divided = program.run, program.stages
        if run.evaluate_personal is None:
            return {}
        state = program.state._replace(params=params)
        for first in range(0, self.count, run.cohort_size):
            chosen = range(first, min(first + run.cohort_size, self.count))
            arguments = state, run.draw(0, chosen), *program.frozen
            own = {name: np.array(x) for name, x in divided.own(*arguments).items()}
            for place, client in enumerate(np.asarray(arguments[1].client_ids)):
                kept = self._kept.read(run.names[client]) if client >= 0 else {}
                for name in kept.keys() & own.keys():
                    own[name][place] = kept[name]
            types = divided.result({})
            written, _ = divided.with_kept(types, arguments, own)
            state = jax.tree.map(  # what the coordinator keeps is a type in `written`
                lambda new, old: old if isinstance(new, jax.ShapeDtypeStruct) else new,
                written,
                state,
            )
        metrics = with_quantiles(run.evaluate_personal(state))
        return {f"personal_{name}": value for name, value in metrics.items()}


class UnknownRoundError(Exception):
    """A later stage of a round whose earlier stages this process has not run."""


def check_arrays(
    word: str, values: Sequence[Value], arrays: Sequence[Any], leading: tuple[int, ...]
) -> None:
    """Refuse arrays of the coordinator whose types differ from this site's program."""
    types = [type_in_message(value.shape, value.dtype) for value in values]
    expected = [((*leading, *shape), dtype) for shape, dtype in types]
    received = [(np.shape(x), np.dtype(x.dtype)) for x in arrays]
    if expected != received:
        pairs = itertools.zip_longest(expected, received)
        wanted, got = next((a, b) for a, b in pairs if a != b)
        raise RefusedError(
            f"the syncer sent {word} values of another program: {got}, expected {wanted}. Use the "
            "same flags and the same version of fedpax on both sides."
        )
