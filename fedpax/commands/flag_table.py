"""The flags of all commands: what `fedpax --help` says of them, their defaults and their bounds."""

import math
import textwrap
from collections.abc import Collection
from typing import Any, NamedTuple

_INDENT = 20  # columns before the text of a flag
_WIDTH = 100


class Flag(NamedTuple):
    """A flag of the command line."""

    text: str  # what it sets, without its default
    default: Any = None
    # str, int, float, or a tuple of the words that it takes. None: the default's type, else str.
    type: Any = None
    least: float | None = None
    most: float | None = None
    has_commas: bool = False  # several values, separated by commas

    def describe(self, name: str) -> str:
        """Return its lines in `fedpax --help`."""
        is_shown = self.default not in (None, False, [], math.inf)
        shown = f"{self.default:g}" if isinstance(self.default, float) else self.default
        text = f"{self.text} (default {shown})" if is_shown else self.text
        indent = " " * _INDENT
        lines = textwrap.fill(
            text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
        head = f"  --{name}"
        return (
            f"{head:{_INDENT}}{lines[_INDENT:]}" if len(head) < _INDENT - 1 else f"{head}\n{lines}"
        )


FLAGS = {
    "exp": Flag(
        "a name from `fedpax list`, my_package.my_module:function or path/to/file.py:function; the "
        "function has no arguments and returns an Experiment, or an ExperimentGroup, of which "
        "GROUP:NAME is an experiment. Commands that read the run of such a function need it again"
    ),
    "job_log_dir": Flag(
        "the folder for config.json, metrics.jsonl, tensorboard/ and checkpoints/; one process at "
        "a time can use it. Commands that read a run also take its --training.checkpoint_dir, such "
        "as gs://BUCKET/FOLDER"
    ),
    "allow_config_change": Flag(
        "fields whose values may differ from those in the folder, separated by commas, such as "
        "training.rounds,mesh; mesh allows all mesh.* fields. Raising --training.rounds of a "
        "finished run does not need this flag",
        [],
    ),
    "target": Flag(
        "a held-out metric and its value, such as accuracy=0.85 or loss=0.5; default: the group's "
        "target"
    ),
    "participant_states": Flag(
        "what islands and clients keep between rounds when a run resumes with another number of "
        "them: average keeps its mean, copy gives island i the state of saved island i modulo "
        "their number",
        "average",
        ("average", "copy"),
    ),
    "engine": Flag(
        "beam: run the rounds as jobs on Apache Beam, with the rounds up to the next evaluation or "
        "checkpoint in each; evaluate: read the held-out data there. prepare: "
        "sort the files there. out_of_core: run them here, "
        "with the data of a few clients in memory. flower: evaluate on Flower's nodes, each on its "
        "own held-out data",
        type=("beam", "out_of_core"),
    ),
    "beam_flags": Flag(
        'flags of the pipeline, such as "--runner=FlinkRunner --temp_location=..." (default: this '
        "process)"
    ),
    "chunk_size": Flag(
        "clients whose data --engine=out_of_core has in memory (default 16)", type=int, least=1
    ),
    "num_shards": Flag("the most shards that --engine=beam sorts into", type=int, least=1),
    "flower_flags": Flag('arguments of "flwr run", such as the name of a SuperLink'),
    "multihost": Flag(
        "train, or join a syncer as one island, with all processes of a cluster, each started with "
        "the same command. They find each other by JAX_COORDINATOR_ADDRESS=HOST:PORT (of process "
        "0), JAX_NUM_PROCESSES and JAX_PROCESS_ID (from 0), else in a Slurm step (srun) or on a "
        "TPU pod by themselves",
        False,
    ),
    "join_timeout": Flag("seconds to wait for the other processes", 300.0),
    "heartbeat_timeout": Flag(
        "seconds until a process that sends nothing counts as dead", 100, least=5
    ),
    "elastic": Flag(
        "restart with the remaining processes when one is lost, and include it when it returns; "
        "processes find each other as with --multihost",
        False,
    ),
    "keeper": Flag(
        "the command that decides which processes train: first, the command of process 0; alone: "
        "this command, which does not train; elsewhere: the command with --keeper=alone",
        "first",
        ("first", "alone", "elsewhere"),
    ),
    "copy_every": Flag(
        "rounds between copies of the state in each host's memory, from which an elastic run "
        "restarts; 0: restart from the newest checkpoint",
        1,
        least=0,
    ),
    "copy_dir": Flag("the folder in the host's memory for these copies (default /dev/shm)"),
    "listen": Flag(
        "the syncer's address for islands, HOST:PORT; without --certificates a loopback address"
    ),
    "syncer": Flag("the address of the syncer that an island joins, HOST:PORT"),
    "heartbeat_seconds": Flag(
        "seconds between the heartbeats of an island or a site", 1.0, least=0.05
    ),
    "free_shard_after": Flag(
        "seconds without a message of an island after which another island can take its shard",
        1800.0,
        least=0,
    ),
    "islands_per_certificate": Flag(
        "the most islands of one certificate; they count once in a quorum and in a median",
        1,
        least=1,
    ),
    "goodbye_seconds": Flag("seconds after the end in which islands can learn it", 60.0, least=0),
    "messages_per_minute": Flag(
        "the most messages that a site may send in a minute; beyond them it is muted",
        math.inf,
        least=1,
    ),
    "bytes_per_minute": Flag(
        "the most bytes that a site may send in a minute; beyond them it is muted",
        math.inf,
        least=1,
    ),
    "allow_older_state": Flag(
        "continue from a saved state that is older than the newest merge, such as a copy", False
    ),
    "min_sites": Flag(
        "sites that the first round waits for, and that each round needs", 2, least=1
    ),
    "round_seconds": Flag(
        "seconds after which a round waits for no further site", 600.0, least=0.1
    ),
    "silent_after": Flag(
        "seconds without a message of a site after which no round waits for it", 30.0, least=1
    ),
    "missed_rounds": Flag(
        "deadlines that a site misses until no round waits for it; an answered round takes one "
        "back",
        3,
        least=1,
    ),
    "clients_per_site": Flag("the most clients of a site in rounds", 10_000, least=1),
    "weights": Flag(
        "what a client weighs: examples, equal, or capped:N, at most N examples", "examples"
    ),
    "down": Flag(
        "the codec of what all sites receive in rounds: float32, e3m0, drive or sign", "float32"
    ),
    "up": Flag(
        "the codec of the sums that sites send in rounds: float32, e3m0, drive or sign", "float32"
    ),
    "norm_factor": Flag(
        "drop a site's reply whose norm is above this number of medians of recent norms",
        type=float,
        least=1,
    ),
    "accept_if": Flag(
        "drop replies that harm the model on the coordinator's data, by a rule such as loss+0.01"
    ),
    "secure_sums": Flag("learn the sums of what sites send alone", False),
    "secure_threshold": Flag(
        "sites that have to stay in a secure sum; default: one more than half", type=int, least=2
    ),
    "give_up_after": Flag(
        "seconds without an answer after which an island that waits for its syncer stops",
        600.0,
        least=0,
    ),
    "only_sums_of": Flag(
        "send values in secure sums of at least this number of sites alone; 0: the syncer chooses",
        0,
        least=0,
    ),
    "no_metrics": Flag("send no metrics on this site's held-out examples", False),
    "personal": Flag("evaluate a model of each client's own after the rounds over sites", False),
    "certificates": Flag("this site's folder, as `fedpax certificates` makes one for each name"),
    "name": Flag("the island's or site's name; default: its certificate's, or its folder's"),
    "shard": Flag("the island's shard of the data, from 0; default: a free one", type=int, least=0),
    "server_name": Flag("the name in the syncer's certificate; default: the host of --syncer"),
    "names": Flag(
        "the host name of the syncer, and a name for each site, separated by commas",
        has_commas=True,
    ),
    "days": Flag("days until certificates expire", 365),
    "authority": Flag("the folder of an existing authority, which signs"),
    "request": Flag("make a private key and a request for a certificate", False),
    "sign": Flag("the file of the request to sign"),
    "replace": Flag("sign for a name that another request was given", False),
    "reason": Flag("why a site is expelled; it is told", "by the coordinator"),
    "seeds": Flag(
        "seeds of the compared runs, each as --seed sets it, such as 0,1,2", has_commas=True
    ),
    "metric": Flag(
        "the metrics for the second table and the picture, such as accuracy,loss; default: all in "
        "the table, the loss in the picture",
        has_commas=True,
    ),
    "seed": Flag(
        "sets all seeds of an experiment, of its model, data and cohorts; a seed that is stated by "
        "its own name, such as --training.seed=0, keeps its value. For generate: the seed of the "
        "tokens",
        0,
        least=-(2**31),
        most=2**32 - 1,
    ),
    "FIELD=VALUE": Flag(
        "overrides a field of the experiment, such as --model.num_layers=4; `fedpax train "
        "--exp=NAME --help` shows all fields"
    ),
    "model.weights": Flag(
        "the Hugging Face folder that an experiment on text begins from, with its architecture and "
        "tokenizer; --lora.rank=8 trains adapters of it (LoRA)"
    ),
    "topology": Flag(
        "v5e:16x16, v4:4x4x4 (also v5p, v6e, tpu7x) with libtpu installed; cpu:8; gpu"
    ),
    "slices": Flag("the number of slices, joined by the data center's network", 1),
    "bandwidth": Flag(
        "Gbit/s out of a slice, in each direction; default: the published bandwidth of its chips "
        "together",
        type=float,
    ),
    "json": Flag("the file for the report or the metrics"),
    "picture": Flag(
        "the PNG for the mesh (plan), the losses (show) or the clients (partition, data)"
    ),
    "hlo": Flag("the file for the compiled text (HLO) of the round"),
    "by_client": Flag("measure each client", False),
    "client": Flag(
        "the column of files that names clients; default: {client} in the path, else each of "
        "several files is a client"
    ),
    "label": Flag("the column of files with the label"),
    "partition": Flag(
        "clients for files that have none: iid:CLIENTS, dirichlet:ALPHA:CLIENTS, "
        "shards:SHARDS:CLIENTS or quantity:ALPHA:CLIENTS, and :SEED, default 0"
    ),
    "split": Flag("the text for {split} in the path of files"),
    "columns": Flag(
        "the columns of files to read, separated by commas or spaces; \\, in a name; default: all",
        has_commas=True,
    ),
    "optional_columns": Flag(
        "columns that some files lack, separated by commas or spaces; \\, in a name: their values "
        "are missing there",
        has_commas=True,
    ),
    "types": Flag(
        "types of Arrow for columns of files, separated by commas or spaces, such as zip=string",
        has_commas=True,
    ),
    "delimiter": Flag("the character between the columns of CSV"),
    "decimal_point": Flag("a comma for numbers such as 1,5 in CSV"),
    "image_size": Flag("the height and width to which images are resized"),
    "on_bad_row": Flag(
        "skip: leave out and count damaged rows and those without a client",
        "error",
        ("error", "skip"),
    ),
    "heldout_fraction": Flag(
        "the share of the examples that --split=heldout has and --split=train has not, chosen by a "
        "hash of their content",
        0.0,
    ),
    "heldout_by": Flag("what is hashed: example, client or a column", "example"),
    "memory": Flag("the memory for sorting; default: half of the machine's"),
    "round": Flag(
        "the checkpoint's round, or best: the round of the best held-out metric "
        "(--training.keep_best); default: the newest"
    ),
    "out": Flag("the folder or file to write"),
    "stages": Flag("export the round, not the model", False),
    "flower": Flag("export an app for Flower", False),
    "format": Flag(
        "huggingface, orbax, npz or safetensors; default: by the suffix of --out, else huggingface",
        type=("huggingface", "orbax", "npz", "safetensors"),
    ),
    "dtype": Flag(
        "casts the exported parameters: float32, bfloat16 or float16",
        type=("float32", "bfloat16", "float16"),
    ),
    "prompt": Flag("the text to continue"),
    "num_tokens": Flag("the number of new tokens", 100, most=2**31 - 1),
    "temperature": Flag("sampling temperature; 0 always takes the most likely token", 1.0),
    "top_p": Flag("samples from the smallest set of tokens with this total probability", 1.0),
}
"""The flags, in the order of `fedpax --help`, with `FIELD=VALUE` for the fields of experiments."""


def describe_flags(names: Collection[str]) -> str:
    """Return what `fedpax --help` says of some flags."""
    return "\n".join(flag.describe(name) for name, flag in FLAGS.items() if name in names)
