"""Measure how fast a host prepares its share of the tokens of a pretraining run.

    python -m fedpax.experiments.benchmarks.input_rate
    python -m fedpax.experiments.benchmarks.input_rate --tokenizer=tokenizer.json --chip=H100 \
        --chips_per_host=8

The need is the rate of Llama 3.1 8B at a given model FLOPs utilization. Documents of the length of
C4's are pieces of the Python standard library, in array_record files. One host's rows of a step are
read, tokenized, shuffled and packed as in `fedpax train`: each host's share of `--batch_size` rows.

CPU time is that of all threads. The waiting time is that of a loop that asks for a round, and then
leaves the CPU idle for as long as the accelerators would compute, while the next round is prepared
on a thread.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from jax.sharding import NamedSharding, PartitionSpec

from fedpax.data import Source, Tokenizer, TokenRounds, load, load_tokenizer, train_tokenizer
from fedpax.data import token_rounds as make_rounds
from fedpax.experiments.benchmarks.timing import write
from fedpax.models import presets
from fedpax.parallel.chips import CHIPS
from fedpax.training.prefetch import Prefetch

MEAN_BYTES = 2200
"""Bytes of a document on average, as in C4's English split."""


class Need(NamedTuple):
    """The tokens that one host must prepare, and the assumptions.

    Attributes:
        tokens_per_second: tokens per second and host.
        hosts: number of hosts.
        flops_per_token: FLOPs of forward and backward, with all pairs of tokens in attention.
    """

    tokens_per_second: float
    hosts: int
    flops_per_token: float


class Row(NamedTuple):
    """The measurements with one tokenizer.

    Attributes:
        tokenizer: its name.
        vocab_size: number of tokens.
        read: CPU nanoseconds per token to read documents.
        tokenize: CPU nanoseconds per token to tokenize.
        pack: CPU nanoseconds per token for all else: order, shuffle, packing.
        tokens_per_core: tokens per second of CPU time.
        cores: cores that are busy with input at the rate that is needed.
        waiting: fraction of the time in which the loop waits for input at this rate, in the median
            round, because other load on the machine delays single ones.
    """

    tokenizer: str
    vocab_size: int
    read: float
    tokenize: float
    pack: float
    tokens_per_core: float
    cores: float
    waiting: float


def tokens_needed(*, chip: str, chips: int, chips_per_host: int, mfu: float, seq_len: int) -> Need:
    """Return the rate at which the chips of one host take tokens.

    Args:
        chip: name of the chip, such as "v6e".
        chips: number of chips.
        chips_per_host: chips of a host.
        mfu: model FLOPs utilization.
        seq_len: tokens per row.

    Example:
        >>> need = tokens_needed(chip="v6e", chips=256, chips_per_host=4, mfu=0.4546, seq_len=8192)
        >>> need.hosts, round(need.tokens_per_second / 4)  # MaxText reports 7,207 per chip
        (64, 7206)
    """
    flops = presets.llama_3_1_8b().flops_per_token(seq_len)
    rate = chips_per_host * CHIPS[chip].peak_flops * mfu / flops
    return Need(rate, chips // chips_per_host, flops)


def write_documents(folder: Path, count: int) -> Source:
    """Write pieces of the standard library's text as documents.

    Args:
        folder: the folder for the file.
        count: number of documents.

    Returns:
        The documents.
    """
    library = load("stdlib_text", "train")
    text = b"".join(library[index]["text"] for index in range(len(library)))
    random = np.random.default_rng(0)
    starts = random.integers(0, len(text) - 20 * MEAN_BYTES, count)
    lengths = random.gamma(1.0, MEAN_BYTES, count).astype(int).clip(100, 20 * MEAN_BYTES)
    path = folder / "train.array_record"
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        writer.write(text[start : start + length].decode(errors="ignore").encode())
    writer.close()
    return load(str(path), "train")


class Timer:
    """CPU seconds of all threads, by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the CPU time of a block to a stage."""
        start = time.process_time()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.process_time() - start


class Timed:
    """A source whose reads are timed.

    Args:
        source: the source.
        timer: the timer.
    """

    def __init__(self, source: Source, timer: Timer) -> None:
        self._source, self._timer = source, timer

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        return self._source[index]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Read several documents."""
        with self._timer("read"):
            return self._source.__getitems__(indices)


def timed(tokenizer: Tokenizer, timer: Timer) -> Tokenizer:
    """Return a tokenizer whose batches are timed."""

    def encode_batch(texts: Sequence[str | bytes]) -> list[Any]:
        with timer("tokenize"):
            return tokenizer.encode_all(texts)

    return tokenizer._replace(encode_batch=encode_batch)


def share_of_host(
    source: Any, tokenizer: Tokenizer, options: argparse.Namespace, hosts: int
) -> TokenRounds:
    """Make the stream of one host: its rows of steps of the whole job.

    Args:
        source: the documents.
        tokenizer: the tokenizer.
        options: the options of the command.
        hosts: number of hosts.
    """
    rows = np.zeros((1, options.steps, options.batch_size), np.bool_)
    rows[..., : max(1, options.batch_size // hosts)] = True
    return make_rounds(
        source,
        islands=1,
        local_steps=options.steps,
        batch_size=options.batch_size,
        seq_len=options.seq_len,
        tokenizer=tokenizer,
        rows=rows,
    )


class HostRows:
    """The rows of one host as arrays, for a loop on this machine alone.

    Args:
        rounds: the host's stream.
        rows: number of rows in a step.
    """

    def __init__(self, rounds: TokenRounds, rows: int) -> None:
        self._rounds, self._rows = rounds, rows

    def __next__(self) -> Any:
        """Return the next round's rows."""
        return jax.tree.map(lambda array: array[:, :, : self._rows], next(self._rounds))

    def get_state(self) -> Any:
        """Return the stream's position."""
        return self._rounds.get_state()

    def set_state(self, state: Any) -> None:
        """Move to a position."""
        self._rounds.set_state(state)


def measure(source: Source, tokenizer: Tokenizer, options: argparse.Namespace, need: Need) -> Row:
    """Measure one tokenizer.

    Args:
        source: the documents.
        tokenizer: the tokenizer.
        options: the options of the command.
        need: the rate that is needed.
    """
    timer = Timer()
    rounds = share_of_host(Timed(source, timer), timed(tokenizer, timer), options, need.hosts)
    rows = max(1, options.batch_size // need.hosts)
    tokens = options.steps * rows * options.seq_len
    next(rounds)
    timer.seconds.clear()
    # As many rounds as fit: whole windows, whatever the rounds' size.
    start, count = time.process_time(), 0
    while time.process_time() - start < options.cpu_seconds:
        next(rounds)
        count += 1
    total = time.process_time() - start
    per_token = {stage: 1e9 * s / (count * tokens) for stage, s in timer.seconds.items()}
    waited, computing = [], tokens / need.tokens_per_second
    stream = HostRows(share_of_host(source, tokenizer, options, need.hosts), rows)
    mesh = jax.make_mesh((1,), ("devices",), devices=jax.devices()[:1])
    device = NamedSharding(mesh, PartitionSpec())
    with Prefetch(stream, device, options.rounds) as cohorts:
        cohorts.peek()
        for _ in range(options.rounds):
            asked = time.perf_counter()
            cohorts.next()
            waited.append(time.perf_counter() - asked)
            time.sleep(computing)
    waiting = statistics.median(waited)
    every = 1e9 * total / (count * tokens)
    read, tokenize = per_token.get("read", 0.0), per_token.get("tokenize", 0.0)
    return Row(
        tokenizer=tokenizer.name.partition(":")[0],
        vocab_size=tokenizer.vocab_size,
        read=read,
        tokenize=tokenize,
        pack=every - read - tokenize,
        tokens_per_core=1e9 / every,
        cores=need.tokens_per_second * every / 1e9,
        waiting=waiting / (waiting + computing),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as the arguments say, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chip", default="v6e", choices=sorted(CHIPS), help="kind of chip")
    parser.add_argument("--chips", type=int, default=256, help="number of chips")
    parser.add_argument("--chips_per_host", type=int, default=4, help="chips of a host")
    parser.add_argument("--mfu", type=float, default=0.4546, help="model FLOPs utilization")
    parser.add_argument("--seq_len", type=int, default=8192, help="tokens per row")
    parser.add_argument("--batch_size", type=int, default=256, help="rows of a step of the job")
    parser.add_argument("--steps", type=int, default=1, help="steps of a round")
    parser.add_argument("--documents", type=int, default=20_000, help="documents to write")
    parser.add_argument("--cpu_seconds", type=float, default=5.0, help="CPU time per tokenizer")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the loop that waits")
    trained = "bytes, and a byte-pair encoding of 32,000 tokens that is trained on the text"
    parser.add_argument(
        "--tokenizer", action="append", help=f"'bytes' or a file; repeatable. Default: {trained}"
    )
    parser.add_argument("--json", help="JSON file for the rows; without it they are only printed")
    options = parser.parse_args(argv)
    need = tokens_needed(
        chip=options.chip,
        chips=options.chips,
        chips_per_host=options.chips_per_host,
        mfu=options.mfu,
        seq_len=options.seq_len,
    )
    print(
        f"Llama 3.1 8B on {options.chips} {options.chip} at {options.mfu:.1%} MFU, "
        f"{need.flops_per_token / 1e9:.1f} GFLOPs per token: "
        f"{need.tokens_per_second:,.0f} tokens/s for each of {need.hosts} hosts"
    )
    print("                          CPU ns per token           tokens/s  cores at   waiting")
    print("tokenizer       tokens    read  tokenize    pack     per core  the need  for input")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        source = write_documents(Path(folder), options.documents)
        for name in options.tokenizer or ["bytes", None]:
            if name is None:
                texts = (source[n]["text"] for n in range(0, len(source), 4))
                path = Path(folder, "tokenizer.json")
                tokenizer = train_tokenizer(texts, vocab_size=32_000, path=path)
            else:
                tokenizer = load_tokenizer(name)
            row = measure(source, tokenizer, options, need)
            rows.append(row)
            print(
                f"{row.tokenizer:14}  {row.vocab_size:7,}  {row.read:6.1f}  {row.tokenize:8.1f}  "
                f"{row.pack:6.1f}  {row.tokens_per_core:11,.0f}  {row.cores:8.3f}  "
                f"{row.waiting:9.3%}",
                flush=True,
            )
    if options.json:
        write(options.json, rows, **vars(options) | need._asdict())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
