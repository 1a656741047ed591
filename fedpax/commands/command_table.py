"""The commands: where each is, what `fedpax --help` says of it, and its flags."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from fedpax.commands.flag_table import FLAGS, Flag, describe_flags


class Command(NamedTuple):
    """A command."""

    place: str  # `module:function`; the module is imported when the command runs
    usage: str
    flags: Mapping[str, Flag] = {}
    words: tuple[str, ...] = ()  # that can follow the command
    # The flags of which one names the experiment whose fields `--help` shows.
    fields_of: tuple[str, ...] = ()


def _command(
    place: str,
    usage: str,
    more: str = "",
    *,
    words: tuple[str, ...] = (),
    fields_of: tuple[str, ...] = (),
    **changes: Any,
) -> Command:
    """Make a command with the flags in its usage and `more` ones, some changed for this command."""
    names = {*re.findall(r"--(\w+)", usage), *more.split()}
    flags = {name: flag for name, flag in FLAGS.items() if name in names}
    flags |= {name: flags[name]._replace(**change) for name, change in changes.items()}
    return Command(place, usage, flags, words, fields_of)


_PROCESSES = "multihost join_timeout heartbeat_timeout"
_ENGINE = "engine beam_flags chunk_size"

COMMANDS = {
    "list": _command(
        "fedpax.commands.list_experiments:list_experiments",
        """\
  fedpax list [GROUP]
      Show the experiments and the groups of experiments that come with fedpax, or the names of a
      group's experiments.
""",
    ),
    "train": _command(
        "fedpax.commands.train:train",
        """\
  fedpax train --exp=NAME --job_log_dir=DIR [--FIELD=VALUE ...]
      Train an experiment in a folder, or resume the run that the folder holds.
""",
        f"allow_config_change participant_states {_PROCESSES} elastic keeper copy_every copy_dir "
        f"{_ENGINE}",
        fields_of=("exp",),
    ),
    "compare": _command(
        "fedpax.commands.compare:compare",
        """\
  fedpax compare --exp=NAME,NAME,... --job_log_dir=DIR [--seeds=0,1,2] [--metric=NAME,...]
                 [--target=METRIC=VALUE] [--FIELD=VALUE ...]
      Train each experiment in DIR/NAME, print tables, and write DIR/comparison.png and
      DIR/comparison.json. NAME can be a group, such as methods_digits or ./mine.py:group. With
      seeds, train in DIR/NAME_seed_0, ..., and show means and standard deviations. With a target,
      print and write (DIR/target.png, DIR/target.json) the rounds, bytes and FLOPs until it is
      reached.
""",
        "allow_config_change",
        fields_of=("exp",),
    ),
    "plan": _command(
        "fedpax.commands.plan:plan",
        """\
  fedpax plan --exp=NAME --topology=v5p:4x8x8 [--slices=4] [--bandwidth=GBIT] [--json=FILE]
              [--picture=FILE.png] [--hlo=FILE] [--FIELD=VALUE ...]
      Compile an experiment's round without the hardware, and report its memory,
      collectives, a lower bound on the step time, and for each transfer between slices the
      local steps that hide it and the time that stays exposed.
""",
        fields_of=("exp",),
    ),
    "show": _command(
        "fedpax.commands.show:show",
        """\
  fedpax show --job_log_dir=DIR,DIR,... [--metric=NAME,...] [--picture=FILE.png]
      Show the progress and the metrics of runs, running or finished, and draw their losses over
      items, bytes and wall time.
""",
        job_log_dir={"default": []},
    ),
    "evaluate": _command(
        "fedpax.commands.evaluate:evaluate",
        """\
  fedpax evaluate --job_log_dir=DIR [--by_client] [--picture=FILE.png] [--round=N] [--json=FILE]
                  [--engine=beam] [--FIELD=VALUE ...]
      Measure the model of a run on held-out data. With --by_client, print for each metric the
      worst client, the 10th percentile, the mean and the best client, and draw all clients.
""",
        f"exp {_ENGINE} flower_flags",
        engine={"type": ("beam", "out_of_core", "flower")},
        fields_of=("job_log_dir",),
    ),
    "generate": _command(
        "fedpax.commands.generate:generate",
        """\
  fedpax generate --job_log_dir=DIR --prompt=TEXT [--num_tokens=100] [--temperature=1] [--top_p=1]
              [--seed=0] [--round=N] [--FIELD=VALUE ...]
      Continue a text with the model of a run on text.
""",
        "exp",
        fields_of=("job_log_dir",),
    ),
    "export": _command(
        "fedpax.commands.export:export",
        """\
  fedpax export --job_log_dir=DIR --out=FOLDER [--format=huggingface] [--dtype=bfloat16] [--round=N]
              [--FIELD=VALUE ...]
      Write the model of a run to a new folder: config.json, safetensors and tokenizer.json, or with
      --format=orbax a checkpoint of the parameters. --out=FILE.npz and --out=FILE.safetensors write
      the parameters of any model, by name. Adapters are merged into their model.
  fedpax export --stages --job_log_dir=DIR --out=FOLDER [--FIELD=VALUE ...]
      Write the round of a run as the parts of its server and of one participant, which run with JAX
      and NumPy alone.
""",
        "exp flower",
        fields_of=("job_log_dir", "exp"),
    ),
    "inspect": _command(
        "fedpax.commands.export:inspect",
        """\
  fedpax inspect FOLDER
      Show what exported stages receive, have, send and keep, their FLOPs and temporary bytes, and
      whether devices without JAX can run them.
""",
    ),
    "partition": _command(
        "fedpax.commands.data:partition",
        """\
  fedpax partition --exp=NAME [--picture=FILE.png] [--FIELD=VALUE ...]
      Show how the clients of an experiment differ in the amounts and labels of their examples.
""",
        fields_of=("exp",),
    ),
    "data": _command(
        "fedpax.commands.data:data",
        """\
  fedpax data FILES [--client=COLUMN] [--label=COLUMN] [--split=NAME] [--columns=NAME,...]
              [--optional_columns=NAME,...]
              [--types=COLUMN=TYPE,...] [--delimiter=';'] [--decimal_point=,]
              [--image_size=32x32] [--partition=dirichlet:0.3:100] [--picture=FILE.png]
      Show the columns, types, missing values, clients and label skew of files, such as
      'hospitals/*.csv' or 'photos/{client}/{label}/*.jpg'.
""",
    ),
    "prepare": _command(
        "fedpax.commands.data:prepare",
        """\
  fedpax prepare FILES --out=DIR [--client=COLUMN] [--label=COLUMN] [--split=NAME]
                 [--columns=NAME,...] [--optional_columns=NAME,...]
                 [--types=COLUMN=TYPE,...] [--delimiter=';']
                 [--decimal_point=,] [--image_size=32x32] [--on_bad_row=skip] [--memory=4GB]
                 [--heldout_fraction=0.1] [--heldout_by=client]
                 [--engine=beam [--beam_flags="..."] [--num_shards=N]]
      Sort files by client once, larger than memory, into a folder of memory-mapped columns, which
      takes the place of the files. --engine=beam sorts on many machines, into shards.
""",
        engine={"type": ("beam",)},
    ),
    "syncer": _command(
        "fedpax.commands.syncer:syncer",
        """\
  fedpax syncer --exp=NAME --listen=HOST:PORT --job_log_dir=DIR [--certificates=DIR]
                [--heartbeat_seconds=1] [--free_shard_after=1800] [--islands_per_certificate=1]
                [--goodbye_seconds=60] [--allow_older_state] [--messages_per_minute=N]
                [--bytes_per_minute=N] [--min_sites=2] [--round_seconds=600]
                [--silent_after=30] [--missed_rounds=3] [--clients_per_site=10000]
                [--weights=examples|equal|capped:N] [--down=e3m0] [--up=e3m0]
                [--norm_factor=3] [--accept_if=loss+0.01] [--secure_sums]
                [--secure_threshold=N] [--FIELD=VALUE ...]
      Hold the outer model of an experiment whose islands are processes of their own, and merge
      their updates. Needs no accelerator; resumes after its last merge. An island keeps its name
      for the run, and its shard until it is silent for --free_shard_after seconds. At the end the
      syncer answers until each island knows it, at most --goodbye_seconds. An experiment with
      clients, such as fedavg_table, runs in rounds over sites that train on files of their own.
""",
        "allow_config_change",
        fields_of=("exp",),
    ),
    "join": _command(
        "fedpax.commands.join:join",
        """\
  fedpax join --exp=NAME --syncer=HOST:PORT --job_log_dir=DIR [--certificates=DIR] [--name=NAME]
              [--shard=K] [--server_name=NAME] [--give_up_after=600] [--multihost]
              [--only_sums_of=3] [--personal] [--no_metrics] [--FIELD=VALUE ...]
      Train one island of an experiment on this machine's devices, or with --multihost on the
      devices of all processes started with the same command, until the syncer has finished. If it
      waits for a syncer that does not answer for --give_up_after seconds, it saves and stops. Of an
      experiment with clients, train on this site's own files, --data.files.
""",
        f"allow_config_change {_PROCESSES}",
        fields_of=("exp",),
    ),
    "sites": _command(
        "fedpax.commands.sites:sites",
        """\
  fedpax sites list --job_log_dir=DIR
  fedpax sites expel NAME --job_log_dir=DIR [--reason=TEXT]
  fedpax sites admit NAME --job_log_dir=DIR
      List the sites of a syncer's run, expel one, or let it return. A running syncer notices it
      within a second. A site is the name of a certificate, or without certificates of an island.
""",
        words=("list", "expel", "admit"),
    ),
    "certificates": _command(
        "fedpax.commands.certificates:certificates",
        """\
  fedpax certificates --out=DIR --names=HOST,NAME,... [--days=365] [--authority=DIR/authority]
      Make the certificates of a syncer and its islands: HOST is the syncer's host name, each
      further NAME a site. --authority adds sites to an existing authority.
  fedpax certificates --request --name=NAME --out=DIR
      At a site: make a private key, which stays there, and a request to send to the coordinator.
  fedpax certificates --sign=REQUEST.pem --authority=DIR/authority --out=DIR [--days=365]
                      [--replace]
      At the coordinator: sign the request of a site, which copies the signed files beside its key.
      --replace signs for a name that another request was given, such as an expired certificate.
""",
        name={"text": "the site's name, which its certificate will have"},
    ),
    "doctor": _command(
        "fedpax.commands.doctor:doctor",
        """\
  fedpax doctor
      Show versions, devices, caches and extras, and what is broken.
""",
    ),
    "completion": _command(
        "fedpax.commands.completion:completion",
        """\
  fedpax completion bash
      Print a script that completes commands, flags and fields, for bash or zsh:
      source <(fedpax completion bash)
""",
        words=("bash", "zsh"),
    ),
}
"""The commands, in the order of `fedpax --help`."""


def help_of(command: str) -> str:
    """Return the usage of a command and the description of its flags."""
    entry = COMMANDS[command]
    names = {*entry.flags, *re.findall(r"--([\w.=]+)", entry.usage)}
    if "FIELD=VALUE" in names:
        names.add("seed")
    parts = (entry.usage, describe_flags(names), "`fedpax --help` shows all commands.\n")
    return "\n".join(part.removesuffix("\n") + "\n" for part in parts if part)
