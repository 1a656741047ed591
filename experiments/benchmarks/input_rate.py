"""Measure how fast a host prepares its share of the tokens of a pretraining run.

    python -m fedpax.experiments.benchmarks.input_rate
    python -m fedpax.experiments.benchmarks.input_rate --tokenizer=tokenizer.json --chip=H100 \
        --chips_per_host=8

The need is the rate of Llama 3.1 8B at a given model FLOPs utilization. Documents, as long as C4's,
are pieces of the Python standard library in array_record files. CPU time is of all threads. The
waiting is measured in a loop that leaves the CPU idle while the accelerators would compute.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from fedpax.chips import CHIPS
from fedpax.data import Source, Tokenizer, TokenRounds, load, load_tokenizer, train_tokenizer
from fedpax.data import token_rounds as make_rounds
from fedpax.experiments.benchmarks import timing
from fedpax.experiments.benchmarks.cohort_input import waiting
from fedpax.experiments.benchmarks.harness import Benchmark, Row, command, option
from fedpax.models import presets

MODEL = presets.llama_3_1_8b()
MEAN_BYTES = 2200  # of a document, as in C4's English split


class InputRate(Benchmark):
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
    columns = (
        "tokenizer {tokenizer:14} | tokens {vocab_size:7,} | CPU ns per token: read {read:.1f} "
        "| tokenize {tokenize:.1f} | pack {pack:6.1f} | tokens/s per core {tokens_per_core:,.0f} "
        "| cores at the need {cores:.3f} | waiting for input {waiting:.3%}"
    )

    @property
    def hosts(self) -> int:
        return self.chips // self.chips_per_host

    @property
    def rows(self) -> int:
        return max(1, self.batch_size // self.hosts)

    @property
    def need(self) -> float:
        """The tokens per second that one host's chips take; MaxText reports 7,207 per chip."""
        peak = self.chips_per_host * CHIPS[self.chip].peak_flops
        return peak * self.mfu / MODEL.flops_per_token(self.seq_len)

    def measure(self) -> Iterator[Row]:
        print(
            f"Llama 3.1 8B on {self.chips} {self.chip} at {self.mfu:.1%} MFU, "
            f"{MODEL.flops_per_token(self.seq_len) / 1e9:.1f} GFLOPs per token: "
            f"{self.need:,.0f} tokens/s for each of {self.hosts} hosts"
        )
        with timing.new_folder() as folder:
            source = write_documents(folder, self.documents)
            for name in [*(self.tokenizer or ("bytes", None))]:
                if name is None:
                    texts = (source[n]["text"] for n in range(0, len(source), 4))
                    path = folder / "tokenizer.json"
                    tokenizer = train_tokenizer(texts, vocab_size=32_000, path=path)
                else:
                    tokenizer = load_tokenizer(name)
                yield self.measure_tokenizer(source, tokenizer)

    def measure_tokenizer(self, source: Source, tokenizer: Tokenizer) -> Row:
        seconds: dict[str, float] = defaultdict(float)
        own: Any = _timed(seconds, "tokenize", tokenizer.encode_all)
        rounds = self._share(TimedSource(source, seconds), tokenizer._replace(encode_batch=own))
        tokens = self.steps * self.rows * self.seq_len
        next(rounds)
        seconds.clear()
        # As many rounds as fit: whole windows, whatever the rounds' size.
        start, count = time.process_time(), 0
        while time.process_time() - start < self.cpu_seconds:
            next(rounds)
            count += 1
        nanoseconds = 1e9 / (count * tokens)
        every = nanoseconds * (time.process_time() - start)
        read, tokenize = nanoseconds * seconds["read"], nanoseconds * seconds["tokenize"]
        stream = HostRows(self._share(source, tokenizer), self.rows)
        rate = self.need
        return Row(
            tokenizer=tokenizer.name.partition(":")[0],
            vocab_size=tokenizer.vocab_size,
            read=read,
            tokenize=tokenize,
            pack=every - read - tokenize,
            tokens_per_core=1e9 / every,
            cores=rate * every / 1e9,
            waiting=waiting(stream, tokens / rate, self.rounds),
            tokens_per_second=rate,
        )

    def _share(self, source: Any, tokenizer: Tokenizer) -> TokenRounds:
        rows = np.zeros((1, self.steps, self.batch_size), np.bool_)
        rows[..., : self.rows] = True
        return make_rounds(
            source,
            islands=1,
            local_steps=self.steps,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            tokenizer=tokenizer,
            rows=rows,
        )


def write_documents(folder: Path, count: int) -> Source:
    """Write pieces of the standard library's text as documents."""
    library = load("stdlib_text", "train")
    text = b"".join(library[index]["text"] for index in range(len(library)))
    random = np.random.default_rng(0)
    starts = random.integers(0, len(text) - 20 * MEAN_BYTES, count)
    lengths = random.gamma(1.0, MEAN_BYTES, count).astype(int).clip(100, 20 * MEAN_BYTES)
    path = str(folder / "train.array_record")
    writer = ArrayRecordWriter(path, "group_size:1")
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        writer.write(text[start : start + length].decode(errors="ignore").encode())
    writer.close()
    return load(path, "train")


def _timed(seconds: dict[str, float], stage: str, fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that also adds the CPU time of its calls, in all threads, to a stage."""

    def run(argument: Any) -> Any:
        start = time.process_time()
        result = fn(argument)
        seconds[stage] += time.process_time() - start
        return result

    return run


class TimedSource(Sequence[Any]):
    """A source whose reads of several documents are timed."""

    def __init__(self, source: Source, seconds: dict[str, float]) -> None:
        self._source, self.read = source, _timed(seconds, "read", source.__getitems__)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> Any:
        return self._source[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return self.read(indices)


class HostRows:
    """The rows of one host as arrays, for a loop on this machine alone."""

    def __init__(self, rounds: TokenRounds, rows: int) -> None:
        self._rounds, self._rows = rounds, rows
        self.get_state, self.set_state = rounds.get_state, rounds.set_state

    def __next__(self) -> Any:
        return jax.tree.map(lambda array: array[:, :, : self._rows], next(self._rounds))


main = command(InputRate)
