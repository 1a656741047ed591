"""What a coordinator tells of its sites while it waits."""

from pathlib import Path

from fedpax.sites.coordinator_files import SiteWatch
from fedpax.sites.exchange import TaskExchange
from fedpax.sites.identity import identify
from fedpax.sites.site_table import SiteTable
from fedpax.training.progress import Progress
from fedpax.transport.message import Message
from sites.small_experiment import small


def test_a_second_process_of_a_name_is_told_once_on_both_sides(
    tmp_path: Path, notes: list[str]
) -> None:
    experiment, table = small(), SiteTable(30.0)
    identity = identify(experiment, {}, experiment.own_fields, {})
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
    assert "another process of site 'oslo' is connected" in answers[0]["reason"]
    told = [note for note in notes if "another process calls itself oslo and waits" in note]
    assert len(told) == 1 and "another --name" in told[0]
