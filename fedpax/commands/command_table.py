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


def _flags(names: str, **changes: Any) -> dict[str, Flag]:
    """Return flags of the table, some with another type or default for this command."""
    flags = {name: FLAGS[name] for name in names.split()}
    return flags | {name: flags[name]._replace(**change) for name, change in changes.items()}


_RUN = "exp job_log_dir"
_PROCESSES = "multihost join_timeout heartbeat_timeout"
_ENGINE = "engine beam_flags chunk_size"
_FILES = "client label split columns optional_columns types delimiter decimal_point image_size"

COMMANDS = {
    "list": Command(
        "fedpax.commands.list_experiments:list_experiments",
        """\
  fedpax list [GROUP]
      Show the experiments and the groups of experiments that come with fedpax, or the names of a
      group's experiments.
""",
    ),
    "train": Command(
        "fedpax.commands.train:train",
        """\
  fedpax train --exp=NAME --job_log_dir=DIR [--FIELD=VALUE ...]
      Train an experiment in a folder, or resume the run that the folder holds.
""",
        flags=_flags(
            f"{_RUN} allow_config_change participant_states {_PROCESSES} elastic keeper copy_every "
            f"copy_dir {_ENGINE}"
        ),
        fields_of=("exp",),
    ),
    "compare": Command(
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
        flags=_flags(f"{_RUN} allow_config_change target seeds metric"),
        fields_of=("exp",),
    ),
    "plan": Command(
        "fedpax.commands.plan:plan",
        """\
  fedpax plan --exp=NAME --topology=v5p:4x8x8 [--slices=4] [--bandwidth=GBIT] [--json=FILE]
              [--picture=FILE.png] [--hlo=FILE] [--FIELD=VALUE ...]
      Compile an experiment's round without the hardware, and report its memory,
      collectives, a lower bound on the step time, and for each transfer between slices the
      local steps that hide it and the time that stays exposed.
""",
        flags=_flags("exp topology slices bandwidth json picture hlo"),
        fields_of=("exp",),
    ),
    "show": Command(
        "fedpax.commands.show:show",
        """\
  fedpax show --job_log_dir=DIR,DIR,... [--metric=NAME,...] [--picture=FILE.png]
      Show the progress and the metrics of runs, running or finished, and draw their losses over
      items, bytes and wall time.
""",
        flags=_flags("job_log_dir metric picture", job_log_dir={"default": []}),
    ),
    "evaluate": Command(
        "fedpax.commands.evaluate:evaluate",
        """\
  fedpax evaluate --job_log_dir=DIR [--by_client] [--picture=FILE.png] [--round=N] [--json=FILE]
                  [--engine=beam] [--FIELD=VALUE ...]
      Measure the model of a run on held-out data. With --by_client, print for each metric the
      worst client, the 10th percentile, the mean and the best client, and draw all clients.
""",
        flags=_flags(
            f"{_RUN} round by_client picture {_ENGINE} flower_flags json",
            engine={"type": ("beam", "out_of_core", "flower")},
        ),
        fields_of=("job_log_dir",),
    ),
    "generate": Command(
        "fedpax.commands.generate:generate",
        """\
  fedpax generate --job_log_dir=DIR --prompt=TEXT [--num_tokens=100] [--temperature=1] [--top_p=1]
              [--seed=0] [--round=N] [--FIELD=VALUE ...]
      Continue a text with the model of a run on text.
""",
        flags=_flags(f"{_RUN} round prompt num_tokens temperature top_p seed"),
        fields_of=("job_log_dir",),
    ),
    "export": Command(
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
        flags=_flags(f"{_RUN} round out stages flower format dtype"),
        fields_of=("job_log_dir", "exp"),
    ),
    "inspect": Command(
        "fedpax.commands.export:inspect",
        """\
  fedpax inspect FOLDER
      Show what exported stages receive, have, send and keep, their FLOPs and temporary bytes, and
      whether devices without JAX can run them.
""",
    ),
    "partition": Command(
        "fedpax.commands.data:partition",
        """\
  fedpax partition --exp=NAME [--picture=FILE.png] [--FIELD=VALUE ...]
      Show how the clients of an experiment differ in the amounts and labels of their examples.
""",
        flags=_flags("exp picture"),
        fields_of=("exp",),
    ),
    "data": Command(
        "fedpax.commands.data:data",
        """\
  fedpax data FILES [--client=COLUMN] [--label=COLUMN] [--split=NAME] [--columns=NAME,...]
              [--optional_columns=NAME,...]
              [--types=COLUMN=TYPE,...] [--delimiter=';'] [--decimal_point=,]
              [--image_size=32x32] [--partition=dirichlet:0.3:100] [--picture=FILE.png]
      Show the columns, types, missing values, clients and label skew of files, such as
      'hospitals/*.csv' or 'photos/{client}/{label}/*.jpg'.
""",
        flags=_flags(f"{_FILES} partition picture"),
    ),
    "prepare": Command(
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
        flags=_flags(
            f"{_FILES} out on_bad_row heldout_fraction heldout_by memory engine beam_flags "
            "num_shards",
            engine={"type": ("beam",)},
        ),
    ),
    "syncer": Command(
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
        flags=_flags(
            f"{_RUN} allow_config_change listen certificates heartbeat_seconds free_shard_after "
            "islands_per_certificate goodbye_seconds messages_per_minute bytes_per_minute "
            "allow_older_state min_sites round_seconds missed_rounds "
            "clients_per_site silent_after norm_factor accept_if "
            "secure_sums secure_threshold weights down up"
        ),
        fields_of=("exp",),
    ),
    "join": Command(
        "fedpax.commands.join:join",
        """\
  fedpax join --exp=NAME --syncer=HOST:PORT --job_log_dir=DIR [--certificates=DIR] [--name=NAME]
              [--shard=K] [--server_name=NAME] [--give_up_after=600] [--multihost]
              [--only_sums_of=3] [--personal] [--FIELD=VALUE ...]
      Train one island of an experiment on this machine's devices, or with --multihost on the
      devices of all processes started with the same command, until the syncer has finished. If it
      waits for a syncer that does not answer for --give_up_after seconds, it saves and stops. Of an
      experiment with clients, train on this site's own files, --data.files.
""",
        flags=_flags(
            f"{_RUN} allow_config_change {_PROCESSES} syncer name shard give_up_after "
            "only_sums_of personal certificates server_name"
        ),
        fields_of=("exp",),
    ),
    "sites": Command(
        "fedpax.commands.sites:sites",
        """\
  fedpax sites list --job_log_dir=DIR
  fedpax sites expel NAME --job_log_dir=DIR [--reason=TEXT]
  fedpax sites admit NAME --job_log_dir=DIR
      List the sites of a syncer's run, expel one, or let it return. A running syncer notices it
      within a second. A site is the name of a certificate, or without certificates of an island.
""",
        flags=_flags("job_log_dir reason"),
        words=("list", "expel", "admit"),
    ),
    "certificates": Command(
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
        flags=_flags(
            "out names days authority request name sign replace",
            name={"text": "the site's name, which its certificate will have"},
        ),
    ),
    "doctor": Command(
        "fedpax.commands.doctor:doctor",
        """\
  fedpax doctor
      Show versions, devices, caches and extras, and what is broken.
""",
    ),
    "completion": Command(
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
