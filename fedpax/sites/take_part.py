"""The process of a site: asks the coordinator for work until the run is finished."""

import contextlib
import random
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedpax.algorithm import Params
from fedpax.errors import ArgumentError
from fedpax.preemption import PreemptionGuard
from fedpax.run_files.metrics import MetricsWriter, read_metrics, select
from fedpax.run_files.paths import latest_round
from fedpax.sites.downlink import WHOLE, Receiver
from fedpax.sites.heldout_replies import Allowance
from fedpax.sites.run_coordinator import check_supported
from fedpax.sites.secret_terms import SecretTerms
from fedpax.sites.site_experiment import SiteExperiment
from fedpax.sites.site_files import (
    SiteFile,
    read_run,
    save_model,
    write_run,
    write_site_file,
)
from fedpax.sites.site_process import (
    SECONDS_TO_ASK_AGAIN,
    JoinResult,
    identify,
    items_of,
    locked_folder,
    patience,
)
from fedpax.sites.site_worker import SiteWorker, UnknownRoundError
from fedpax.sites.task_exchange import LARGE
from fedpax.sites.tasks import EVALUATION, ROUND, check_task
from fedpax.training.experiment import Experiment
from fedpax.training.progress import Progress, open_progress
from fedpax.transport.admission import CheckedHeader
from fedpax.transport.calls import (
    MAX_MESSAGE_BYTES,
    Connection,
    DisconnectedError,
    RefusedError,
    connect,
)
from fedpax.transport.message import Message
from fedpax.transport.optional_packages import certified_name, signer_of

MOST_MODELS = 8
"""The largest message that a site receives, in models: SCAFFOLD's has two, optimizers a few."""

CALL_SECONDS, TRANSFER_SECONDS = 30.0, 600.0


def take_part(
    experiment: Experiment,
    job_log_dir: str | Path,
    syncer: str,
    *,
    exp: str = "",
    name: str | None = None,
    certificates: str | Path | None = None,
    server_name: str | None = None,
    allow_config_change: Collection[str] = (),
    give_up_after: float = 600.0,
    only_sums_of: int = 0,
    personal: bool = False,
    no_metrics: bool = False,
) -> JoinResult:
    """Train on this site's data, which stay here, in the rounds that a coordinator asks for."""
    if only_sums_of and only_sums_of < 2:
        raise ArgumentError(
            f"only_sums_of={only_sums_of}, expected at least 2: a sum of one site is its value. "
            "Set for example --only_sums_of=3."
        )
    check_supported(experiment)
    assert isinstance(experiment, SiteExperiment)
    with locked_folder(experiment, job_log_dir, "join", exp, allow_config_change) as folder:
        site_name = name or certified_name(certificates) or folder.name
        with (
            connect(syncer, certificates=certificates, server_name=server_name) as connection,
            open_progress(experiment, exp, 0, item_unit=items_of(experiment)[0]) as progress,
            PreemptionGuard() as preemption,
        ):
            site = Site(
                experiment,
                folder,
                connection,
                progress,
                name=site_name,
                exp=exp,
                stop=lambda: preemption.signal is not None,
                give_up_after=give_up_after,
                sums=SecretTerms(
                    site_name,
                    only_sums_of,
                    signer_of(certificates, connection.server_name),
                    folder,
                ),
                personal=personal,
                sends_metrics=not no_metrics,
            )
            if only_sums_of == 2:
                progress.note(
                    "--only_sums_of=2: from a sum of two sites, each learns the terms of the other"
                )
            with contextlib.closing(site):
                site.run()
        stopped = None if site.finished else preemption.signal
        return JoinResult(site.rounds, site.finished, stopped, gave_up=site.gave_up)


class Site:
    """The conversation of a site with its coordinator."""

    def __init__(
        self,
        experiment: Any,
        folder: Path,
        connection: Connection,
        progress: Progress,
        *,
        name: str,
        exp: str,
        stop: Callable[[], bool],
        give_up_after: float,
        sums: SecretTerms | None = None,
        personal: bool = False,
        sends_metrics: bool = True,
    ) -> None:
        self._experiment, self._folder, self._exp = experiment, folder, exp
        self._connection, self._progress, self._stop = connection, progress, stop
        self._give_up_after, self._name = give_up_after, name
        self._incarnation = secrets.token_hex(8)
        self._closed = threading.Event()
        self._metrics = contextlib.ExitStack()
        self.finished, self.gave_up = False, False
        # Rounds, also of earlier processes; a restarted coordinator repeats some.
        lines = read_metrics(folder)
        self._answered = {line["round"] for line in select(lines, "training")}
        evaluations = len(select(lines, "evaluation"))
        self._sums = sums or SecretTerms(name)
        self._worker = SiteWorker(
            experiment,
            folder,
            seed=experiment.training.seed,
            save=self._save,
            on_metrics=self._note_metrics,
            sums=self._sums,
            personal=personal,
            allowance=Allowance(self._answered, evaluations, sends=sends_metrics),
        )
        self._file = read_run(folder)
        self._run = self._file.run
        self._has_inputs = self._opened = False
        self._heartbeat_seconds, self._rounds = 2.0, 0
        self._noted = ""  # the last reason to wait
        self._withheld = ""  # why metrics were last not sent
        self._waits = False  # for rounds: a run that was finished has more of them
        self._per_example = items_of(experiment)[1]
        content = experiment.shared_content()
        self._identity = identify(experiment, {}, content)._asdict()
        self._receiver = Receiver(WHOLE)
        self._last_answer = time.monotonic()

    @property
    def rounds(self) -> int:
        """The number of rounds in which this site took part, over all of its processes."""
        return len(self._answered)

    def close(self) -> None:
        """Tell the coordinator that this site leaves, and close the files."""
        self._closed.set()
        self._metrics.close()
        with contextlib.suppress(DisconnectedError, RefusedError):
            failed = not (self.finished or self.gave_up or self._stop())
            self._call("leave", timeout=2.0, failed=failed)

    def run(self) -> None:
        """Work until the run is finished, a signal asks to stop, or no coordinator answers."""
        joined, pause = False, 0.1
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        note_waiting = patience(self._progress)
        while not self._stop():
            try:
                if not joined:
                    joined = self._join()
                    if not joined:
                        time.sleep(1.0)
                        continue
                joined, pause = self._step(), 0.1
                if self.finished:
                    return
            except DisconnectedError as error:
                is_over = self._file.finished and not self._waits
                most = SECONDS_TO_ASK_AGAIN if is_over else self._give_up_after
                if time.monotonic() - self._last_answer > min(most, self._give_up_after):
                    self.gave_up, self.finished = True, self._file.finished
                    return
                note_waiting(error)
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, 2.0)

    def _join(self) -> bool:
        if self._run is None and (told := getattr(self._experiment, "note_values", "")):
            self._note_once(told)
        answer = self._call(
            "join",
            identity=self._identity,
            run=self._run,
            follows=self._file.process,
            description=self._experiment.describe_site(),
        )
        if answer.header["status"] == "wait":
            self._note_once(f"waiting: {answer.header['reason']}")
            return False
        seconds = CheckedHeader(answer.header).number("heartbeat_seconds")
        self._heartbeat_seconds = min(max(seconds, 0.05), 60.0)
        self._receiver = Receiver(CheckedHeader(answer.header).text("down"))
        self._has_inputs = False
        if self._run is None:
            self._run = CheckedHeader(answer.header).text("run")
        self._file = self._file._replace(process=self._incarnation)
        write_site_file(self._folder, self._file)
        self._progress.note(f"joined {self._connection.address} as {self._name}")
        self._rounds = CheckedHeader(answer.header).count("rounds")
        self._sums.rounds = self._rounds
        self._progress.set_rounds(self._rounds)
        return True

    def _step(self) -> bool:
        """Ask for work and do it; False if the site must join again."""
        have, known = self._receiver.have, self._has_inputs
        answer = self._call("work", timeout=TRANSFER_SECONDS, inputs=known, have=have)
        header = answer.header
        match header["status"]:
            case "join":
                return False
            case "finished":
                self.finished = True
                if self._opened:
                    self._note_last_model()
            case "wait" if not self._has_inputs:
                self._waits = True
                self._note_once(f"waiting for {str(header.get('waits_for'))[:1000]}")
            case "inputs":
                self._set_inputs(header["inputs"])
            case "task":
                self._work(answer)
        return True

    def _note_once(self, text: str) -> None:
        if text != self._noted:
            self._noted = text
            self._progress.note(text)

    def _set_inputs(self, inputs: Mapping[str, Any]) -> None:
        types = self._worker.set_inputs(inputs)
        for line in self._worker.notes:
            self._progress.note(line)
        self._connection.max_message_bytes = max(
            MAX_MESSAGE_BYTES, MOST_MODELS * self._worker.model_bytes
        )
        self._experiment = self._experiment.with_inputs(inputs)
        if self._call("ready", types=types).header["status"] != "join":
            self._has_inputs = True
            self._open()

    def _open(self) -> None:
        """Write the folder, once the coordinator has taken this site."""
        if self._opened:
            return
        self._opened = True
        self._file = SiteFile(self._run, process=self._incarnation)
        write_run(self._folder, self._experiment, self._exp, self._file)
        metrics = MetricsWriter(self._folder, after=2**31)
        self._writer = self._metrics.enter_context(metrics)

    def _work(self, task: Message) -> None:
        began = time.perf_counter()
        check_task(task.header, self._rounds)
        received = self._receiver.unpack(task.header, task.arrays)
        if received is None:
            return  # and ask for the whole arrays
        try:
            fields, arrays = self._worker.work(task.header, received)
        except UnknownRoundError:
            fields, arrays = {"fault": "this process began after the round"}, {}
        if task.header["task"] == EVALUATION and task.header["save"]:
            self._note_last_model()
        if (why := fields.get("withheld", "")) and why != self._withheld:
            self._progress.note(f"sends no metrics {why}")
        self._withheld = why or self._withheld
        place = {"token": task.header["token"], "stage": task.header["stage"]}
        try:
            answer = self._reply(arrays, **place, fields=fields)
        except DisconnectedError:  # once more: the coordinator may have it, and ask no more
            answer = self._reply(arrays, **place, fields=fields)
        if "fault" in fields:
            self._progress.note(f"no reply: {fields['fault']}")
        elif answer.header["status"] == "dropped":
            self._progress.note(f"the syncer does not count the reply: {answer.header['reason']}")
        elif answer.header["status"] == "late":
            self._progress.note("the reply came too late for its round")
        elif task.header["task"] == ROUND and answer.header["status"] != "join":
            seconds, examples = time.perf_counter() - began, fields["examples"]
            number, rate = task.header["round"], self._per_example * examples / seconds
            if task.header["stage"] == task.header["last_stage"]:
                self._answered.add(number)
                clients = len(task.header["clients"])
                values = {"clients": clients, "examples": examples, "seconds": seconds}
                self._writer.write("training", number, {**values, "items_per_second": rate})
            self._progress.show_round(number, None, rate)

    def _reply(self, arrays: Mapping[str, np.ndarray], **fields: Any) -> Message:
        """Send a reply; a large one when the coordinator has room for it."""
        if sum(x.nbytes for x in arrays.values()) >= LARGE:
            while (answer := self._call("offer")).header["status"] == "later" and not self._stop():
                time.sleep(random.uniform(0.1, 0.5))
            if answer.header["status"] == "join":  # another coordinator, which asks anew
                return answer
        return self._call("reply", arrays, TRANSFER_SECONDS, **fields)

    def _call(
        self,
        kind: str,
        arrays: Mapping[str, np.ndarray] | None = None,
        timeout: float = CALL_SECONDS,
        **fields: Any,
    ) -> Message:
        header = {"kind": kind, "site": self._name, "incarnation": self._incarnation, **fields}
        answer = self._connection.call(Message(header, arrays or {}), timeout)
        self._last_answer = time.monotonic()
        return answer

    def _beat(self) -> None:
        while not self._closed.wait(self._heartbeat_seconds):
            with contextlib.suppress(DisconnectedError, RefusedError):
                self._call("heartbeat", timeout=5.0)

    def _note_last_model(self) -> None:
        """Write that this site has the model of the last round, and what is made of it."""
        self._file, self._waits = self._file._replace(finished=True), False
        write_site_file(self._folder, self._file)

    def _note_metrics(self, round_number: int, metrics: dict[str, float]) -> None:
        self._writer.write("evaluation", round_number, metrics)
        self._progress.show_evaluation(round_number, metrics)

    def _save(self, round_number: int, params: Params, below: str) -> None:
        folder = self._folder / below
        if latest_round(folder) == round_number:  # the coordinator asks again
            return
        if below:
            write_run(folder, self._experiment, self._exp, SiteFile(self._run))
        save_model(folder, round_number, params, self._experiment)
