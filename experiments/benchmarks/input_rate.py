"""Measure how fast a host prepares its share of the tokens of a pretraining run.

    python -m fedpax.experiments.benchmarks.input_rate
    python -m fedpax.experiments.benchmarks.input_rate --tokenizer=tokenizer.json --chip=H100 \
        --chips_per_host=8

The need is the rate of Llama 3.1 8B at a given model FLOPs utilization. Documents of the length of
C4's are pieces of the Python standard library, in array_record files. One host's rows of a step are
read, tokenized, shuffled and packed as in `fedpax train`: each host's share of `--batch_size` rows.

CPU time is summed over all threads. The waiting time is measured in a loop that asks for a round,
and then leaves the CPU idle for as long as the accelerators would compute, while the next round is
prepared on a thread.
"""

import dataclasses
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
from fedpax.experiments.benchmarks.harness import Benchmark, Row, option
from fedpax.models import presets
from fedpax.parallel.chips import CHIPS
from fedpax.training.prefetch import Prefetch

MEAN_BYTES = 2200
"""Bytes of a document on average, as in C4's English split."""


class Need(NamedTuple):
    """The tokens that one host must prepare, and the assumptions."""

    tokens_per_second: float
    hosts: int
    flops_per_token: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings."""

    chip: str = option("v6e", "kind of chip", choices=sorted(CHIPS))
    chips: int = option(256, "number of chips")
    chips_per_host: int = option(4, "chips of a host")
    mfu: float = option(0.4546, "model FLOPs utilization")
    seq_len: int = option(8192, "tokens per row")
    batch_size: int = option(256, "rows of a step of the job")
    steps: int = option(1, "steps of a round")
    documents: int = option(20_000, "documents to write")
    cpu_seconds: float = option(5.0, "CPU time per tokenizer")
    rounds: int = option(10, "rounds of the loop that waits")
    tokenizer: list[str] | None = option(
        None,
        "'bytes' or a file; repeatable. Default: bytes, and a byte-pair encoding of 32,000 tokens "
        "that is trained on the text",
        action="append",
    )

    @property
    def need(self) -> Need:
        """The tokens that one host must prepare."""
        return tokens_needed(
            chip=self.chip,
            chips=self.chips,
            chips_per_host=self.chips_per_host,
            mfu=self.mfu,
            seq_len=self.seq_len,
        )


def tokens_needed(*, chip: str, chips: int, chips_per_host: int, mfu: float, seq_len: int) -> Need:
    """Return the rate at which the chips of one host take tokens.

    Example:
        >>> need = tokens_needed(chip="v6e", chips=256, chips_per_host=4, mfu=0.4546, seq_len=8192)
        >>> need.hosts, round(need.tokens_per_second / 4)  # MaxText reports 7,207 per chip
        (64, 7206)
    """
    flops = presets.llama_3_1_8b().flops_per_token(seq_len)
    rate = chips_per_host * CHIPS[chip].peak_flops * mfu / flops
    return Need(rate, chips // chips_per_host, flops)


def write_documents(folder: Path, count: int) -> Source:
    """Write pieces of the standard library's text as documents."""
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
    """A source whose reads are timed."""

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


def share_of_host(source: Any, tokenizer: Tokenizer, settings: Settings, hosts: int) -> TokenRounds:
    """Make the stream of one host: its rows of steps of the whole job."""
    rows = np.zeros((1, settings.steps, settings.batch_size), np.bool_)
    rows[..., : max(1, settings.batch_size // hosts)] = True
    return make_rounds(
        source,
        islands=1,
        local_steps=settings.steps,
        batch_size=settings.batch_size,
        seq_len=settings.seq_len,
        tokenizer=tokenizer,
        rows=rows,
    )


class HostRows:
    """The rows of one host as arrays, for a loop on this machine alone."""

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


def measure_tokenizer(source: Source, tokenizer: Tokenizer, settings: Settings) -> Row:
    """Measure one tokenizer."""
    timer, need = Timer(), settings.need
    rounds = share_of_host(Timed(source, timer), timed(tokenizer, timer), settings, need.hosts)
    rows = max(1, settings.batch_size // need.hosts)
    tokens = settings.steps * rows * settings.seq_len
    next(rounds)
    timer.seconds.clear()
    # As many rounds as fit: whole windows, whatever the rounds' size.
    start, count = time.process_time(), 0
    while time.process_time() - start < settings.cpu_seconds:
        next(rounds)
        count += 1
    total = time.process_time() - start
    per_token = {stage: 1e9 * s / (count * tokens) for stage, s in timer.seconds.items()}
    waited, computing = [], tokens / need.tokens_per_second
    stream = HostRows(share_of_host(source, tokenizer, settings, need.hosts), rows)
    mesh = jax.make_mesh((1,), ("devices",), devices=jax.devices()[:1])
    device = NamedSharding(mesh, PartitionSpec())
    with Prefetch(stream, device, settings.rounds) as cohorts:
        cohorts.peek()
        for _ in range(settings.rounds):
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
        tokens_per_second=need.tokens_per_second,
    )


def measure(settings: Settings) -> Iterator[Row]:
    """Measure each tokenizer on the same documents."""
    need = settings.need
    print(
        f"Llama 3.1 8B on {settings.chips} {settings.chip} at {settings.mfu:.1%} MFU, "
        f"{need.flops_per_token / 1e9:.1f} GFLOPs per token: "
        f"{need.tokens_per_second:,.0f} tokens/s for each of {need.hosts} hosts"
    )
    with tempfile.TemporaryDirectory() as folder:
        source = write_documents(Path(folder), settings.documents)
        names: list[str | None] = [*(settings.tokenizer or ("bytes", None))]
        for name in names:
            if name is None:
                texts = (source[n]["text"] for n in range(0, len(source), 4))
                path = Path(folder, "tokenizer.json")
                tokenizer = train_tokenizer(texts, vocab_size=32_000, path=path)
            else:
                tokenizer = load_tokenizer(name)
            yield measure_tokenizer(source, tokenizer, settings)


main = Benchmark(
    __doc__,
    Settings,
    measure,
    {
        "tokenizer": "{tokenizer:14}",
        "tokens": "{vocab_size:7,}",
        "CPU ns per token: read": "{read:.1f}",
        "tokenize": "{tokenize:.1f}",
        "pack": "{pack:6.1f}",
        "tokens/s per core": "{tokens_per_core:,.0f}",
        "cores at the need": "{cores:.3f}",
        "waiting for input": "{waiting:.3%}",
    },
)


if __name__ == "__main__":
    raise SystemExit(main())
