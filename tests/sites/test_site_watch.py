"""What a coordinator tells of its sites while it waits."""

import contextlib
import json
import time
from pathlib import Path

import pytest

from fedpax.errors import ArgumentError
from fedpax.sites.site_files import SiteWatch, read_run
from fedpax.sites.site_process import identify
from fedpax.sites.site_table import SITES, SiteTable, read_sites
from fedpax.sites.take_part import Site
from fedpax.sites.task_exchange import TaskExchange
from fedpax.training.progress import Progress
from fedpax.transport.message import Message
from sites.federation import Line, run
from sites.small_experiment import small


def test_a_second_process_of_a_name_is_told_once_on_both_sides(
    tmp_path: Path, notes: list[str]
) -> None:
    experiment, table = small(), SiteTable(30.0)
    identity = identify(experiment, {}, {})
    exchange = TaskExchange(
        identity, table, rounds=1, run="r", heartbeat_seconds=1.0, folder=tmp_path / "replies"
    )

    def join(incarnation: str) -> Message:
        header = {"kind": "join", "site": "oslo", "incarnation": incarnation, "run": None}
        described = {"identity": identity._asdict(), "description": {"clients": 1}}
        return exchange.handle("", Message({**header, **described}, {}))

    with Progress("fed", rounds_done=0, rounds=1, enabled=False) as progress:
        watch = SiteWatch(tmp_path, progress, table)
        assert join("a").header["status"] == "ok"
        watch.update()
        answers = [join("b").header for _ in range(2)]
        watch.update()
        watch.update()
    assert {answer["status"] for answer in answers} == {"wait"}
    told = [note for note in notes if "another process calls itself oslo" in note]
    assert "another process of site 'oslo' is connected" in answers[0]["reason"] and len(told) == 1
    for text in (answers[0]["reason"], told[0]):
        assert "when the first one has ended or has sent nothing for 30 s" in text
        assert "another --name only to a site with other data" in text


def test_a_killed_site_returns_at_once_and_in_another_folder_it_waits(
    tmp_path: Path, notes: list[str]
) -> None:
    experiment, table = small(), SiteTable(30.0)
    identity = identify(experiment, {}, experiment.shared_content())
    exchange = TaskExchange(identity, table, rounds=1, run="r")

    def start(folder: str) -> bool:
        """Start a process of the site, which is never closed, as a killed one."""
        (tmp_path / folder).mkdir(exist_ok=True)
        progress = Progress(folder, rounds_done=0, rounds=1, enabled=False)
        line, about = Line(exchange), {"exp": "", "stop": lambda: False, "give_up_after": 5.0}
        site = Site(experiment, tmp_path / folder, line, progress, name="oslo", **about)
        return site._join()

    assert start("oslo") and start("oslo") and start("oslo")
    assert not start("copy")
    assert start("oslo")
    assert [note for note in notes if "waiting: another process of site 'oslo'" in note]
    assert read_run(tmp_path / "oslo").run is None, "no coordinator has agreed yet"


def test_a_site_that_is_started_again_counts_all_of_its_rounds(tmp_path: Path) -> None:
    sites = {name: small(rounds=2, data_seed=seed) for seed, name in enumerate("abc")}
    outcome = run(small(rounds=2), sites, tmp_path)
    line, progress = Line(outcome.coordinator.exchange), Progress("a", rounds_done=0, rounds=2)
    about = {"exp": "", "stop": lambda: False, "give_up_after": 5.0}
    site = Site(sites["a"], tmp_path / "a", line, progress, name="a", **about)
    assert site.rounds == 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_site_that_ends_with_an_error_is_told_as_failed(
    tmp_path: Path, notes: list[str], fails: bool
) -> None:
    experiment, table = small(), SiteTable(30.0)
    identity = identify(experiment, {}, experiment.shared_content())
    exchange = TaskExchange(identity, table, rounds=1, run="r")

    class Faulty(Line):
        def call(self, message: Message, timeout: float) -> Message:
            if message.header["kind"] == "work" and fails:
                raise ArgumentError("The label 'y' has the value 'secret', expected one of")
            assert "secret" not in str(message.header)
            return super().call(message, timeout)

    progress = Progress("fed", rounds_done=0, rounds=1, enabled=False)
    watch = SiteWatch(tmp_path, progress, table)
    end = time.monotonic() + 0.5
    about = {"exp": "", "stop": lambda: time.monotonic() > end, "give_up_after": 5.0}
    site = Site(experiment, tmp_path, Faulty(exchange), progress, name="oslo", **about)
    with contextlib.suppress(ArgumentError), contextlib.closing(site):
        site.run()
    watch.update()
    state = "failed" if fails else "left"
    assert notes[-1] == f"site oslo (1 client): {state}"


def test_the_table_is_read_back_and_a_damaged_one_is_empty(tmp_path: Path) -> None:
    table = SiteTable(30.0)
    table.add("oslo", 3).heldout = {"loss": 0.5}
    with Progress("fed", rounds_done=0, rounds=1, enabled=False) as progress:
        SiteWatch(tmp_path, progress, table).update()
    assert read_sites(tmp_path) == table.reports(0.0)
    (saved,) = json.loads((tmp_path / SITES).read_text())
    wrong = {"name": 1, "clients": "3", "rounds": None, "epsilon": "x", "heldout": {"loss": "x"}}
    for name, value in wrong.items():
        (tmp_path / SITES).write_text(json.dumps([saved | {name: value}]))
        assert read_sites(tmp_path) == [], name
