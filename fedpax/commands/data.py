"""`fedpax data`, `prepare` and `partition`: the clients of files and of experiments."""

import datetime
import functools
import itertools
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from numpy.typing import NDArray

from fedpax.commands.parts.file_flags import check_engine_flags, flags_in_errors, parse_files
from fedpax.commands.parts.options import configure, parse
from fedpax.commands.parts.output_files import output_file
from fedpax.console import count_of, markdown_table, print_error, print_line
from fedpax.data import load, partition_statistics, plot_partition
from fedpax.data import prepare as prepare_files
from fedpax.data.tables import ColumnSummary, infer_treatments, summarize_columns
from fedpax.data.tables.labels import MAX_CLASSES
from fedpax.errors import UsageError
from fedpax.extras import optional
from fedpax.populations.client_arrays import ContiguousClients
from fedpax.populations.partition_plot import plot_statistics
from fedpax.text.conversation import with_role
from fedpax.user_files.formats import LoadOptions

_MOST_CLIENTS = 20  # in the table of clients
_MOST_FILES = 20  # whose skipped rows are told
_MOST_LABELS = 1000  # labels with more distinct values are numbers


@flags_in_errors()
def data(arguments: Sequence[str]) -> int:
    """Print the columns, types, missing values and clients of files, and their label skew."""
    options, files, reading = parse_files("data", arguments)
    picture = output_file("picture", options.picture, ".png")
    named = files if len(files) > 1 else files[0]
    if _is_large(named, options.partition, reading):
        return _survey(named, LoadOptions(partition=options.partition, **reading), picture)
    source: Any = load(named, partition=options.partition, **reading)
    clients = None if source.client is None else len(source.client_names)
    _print_head(source.name, len(source), clients)
    repeated, shared = _count_equal(source, options.partition)
    table = {name: source.table.column(name) for name in source.fields}
    summaries = summarize_columns(table, infer_treatments(table))
    _print_columns(
        summaries,
        source.table.schema,
        source.client,
        source.label,
        reading["types"],
        [
            *source.notes,
            *_note_encoded(source),
            *_note_chats(source),
            *_note_repeated(f"{repeated:,}", len(source)),
        ],
    )
    if source.client is None:
        return _without_clients(picture)
    population = ContiguousClients(source.client_starts)
    names, labels = _labels(source)
    top = None if labels is None else _most_frequent(source.client_starts, labels)
    _print_clients(source.client_names, np.diff(source.client_starts), names, top)
    print_line("")
    print_line(str(partition_statistics(population, labels)))
    if shared:
        print_line("")
        print_line(
            f"{shared:,} of {count_of(len(source), 'example')} have the values of an example of "
            "another client. If they are copies of one record, keep one of them."
        )
    if picture:
        plot_partition(
            population,
            labels,
            picture,
            class_names=names,
            participant_names=source.client_names,
        )
    return 0


@flags_in_errors()
def prepare(arguments: Sequence[str]) -> int:
    """Prepare files, and print what was written and which rows were skipped."""
    options, files, reading = parse_files("prepare", arguments)
    if not options.out:
        raise UsageError(
            "`fedpax prepare` has no --out, expected a new folder. Set for example "
            "--out=data/events."
        )
    prepared = _find_engine(options)(
        files if len(files) > 1 else files[0],
        options.out,
        on_bad_row=options.on_bad_row,
        memory=options.memory,
        heldout_fraction=options.heldout_fraction,
        heldout_by=options.heldout_by,
        **reading,
    )
    for path, count in itertools.islice(prepared.skipped.items(), _MOST_FILES):
        first = prepared.first_skipped[path]
        print_error(f"Skipped {count_of(count, 'row')} of {path}, the first of them {first!r}.")
    if (more := len(prepared.skipped) - _MOST_FILES) > 0:
        print_error(f"Skipped rows of {count_of(more, 'more file')}.")
    for line in prepared.notes:
        print_line(line)
    clients = (
        "" if prepared.num_clients is None else f" of {count_of(prepared.num_clients, 'client')}"
    )
    print_line(f"Wrote {count_of(prepared.num_examples, 'example')}{clients} to {options.out}.")
    return 0


def partition(arguments: Sequence[str]) -> int:
    """Print how an experiment's clients differ, and draw a picture."""
    # `read_population` returns the indices of each client's examples, and the labels or None.
    options, fields = parse("partition", arguments)
    picture = output_file("picture", options.picture, ".png")
    experiment = configure(options.exp, fields, command="partition")
    read_population = getattr(experiment, "read_population", None)
    if read_population is None:
        raise UsageError(
            f"--exp={options.exp} has no population, expected an experiment with a method "
            "read_population, such as fedavg_digits. Choose another one from `fedpax list`."
        )
    population, labels = read_population()
    print_line(str(partition_statistics(population, labels)))
    if picture:
        plot_partition(population, labels, picture)
    return 0


def _note_encoded(source: Any) -> list[str]:
    """Tell of columns of images that are not decoded."""
    from fedpax.user_files.image_hashes import has_encoded_images

    return [
        f"{name}: encoded images; --image_size=HEIGHTxWIDTH decodes and resizes them"
        for name in source.fields
        if has_encoded_images(source.table.column(name).slice(0, 100))
    ]


def _note_chats(source: Any) -> list[str]:
    """Tell what columns of chat messages hold."""
    import pyarrow as pa

    notes = []
    for name in source.fields:
        column = source.table.column(name)
        item = getattr(column.type, "value_type", None)
        keys = {field.name for field in item} if isinstance(item, pa.StructType) else set()
        if not ({"role", "content"} <= keys or {"from", "value"} <= keys):
            continue
        values = [chat or () for chat in column.to_pylist()]
        chats = [[with_role(m) for m in chat if m is not None] for chat in values]
        roles = [[m.get("role") for m in chat] for chat in chats]
        nulls = sum(map(len, values)) - sum(map(len, chats))
        messages = [m for chat in chats for m in chat if not m.get("tool_calls")]
        answers = [m.get("content") for m in messages if m.get("role") == "assistant"]
        counts = Counter(itertools.chain(*roles)).most_common(5)
        notes.append(
            f"{name}: {count_of(len(chats), 'conversation')}, messages by role: "
            f"{', '.join(f'{role} {n:,}' for role, n in counts)}. Without an assistant: "
            f"{sum('assistant' not in own for own in roles):,}; answers of null: "
            f"{answers.count(None):,}; messages of null: {nulls:,} (training raises at each); "
            f"empty answers: {answers.count('')}"
        )
    return notes


def _note_repeated(repeated: str, examples: int) -> list[str]:
    if repeated == "0":
        return []
    return [
        f"{repeated} of {count_of(examples, 'example')} equal an earlier one in all columns. If "
        "they are copies, leave them out: SELECT DISTINCT * of DuckDB, drop_duplicates() of pandas."
    ]


def _count_equal(source: Any, partition: str | None) -> tuple[int, int]:
    """Return how many examples equal an earlier one of their client, and one of another client."""
    from fedpax.data.tables.survey import hash_examples

    columns = [name for name in source.fields if not partition or name != source.client]
    table = source.table.select(columns)
    keys, owners = hash_examples(table, None if partition else source.client)
    order = np.argsort(keys)
    is_equal = np.diff(keys[order]) == 0
    rows = order[np.append(is_equal, False) | np.append(False, is_equal)]
    if not len(rows):
        return 0, 0
    keys, owners = keys[rows], owners[rows]
    order = np.lexsort((owners, keys))
    keys, owners = keys[order], owners[order]
    starts = np.flatnonzero(np.diff(keys, prepend=~keys[:1]))
    ends = np.append(starts[1:], len(keys))
    repeated = int(((keys[1:] == keys[:-1]) & (owners[1:] == owners[:-1])).sum())
    shared = int((ends - starts)[owners[starts] != owners[ends - 1]].sum())
    # Where a client has equal examples too, they are of few values, not copies.
    return repeated, shared if 10 * repeated <= min(shared, len(source) // 10) else 0


def _without_clients(picture: Path | None) -> int:
    if picture:
        raise UsageError(
            f"--picture={picture} shows clients, but the files have none. Set --client to the "
            "column that names them."
        )
    return 0


def _is_large(files: Any, partition: str | None, reading: Mapping[str, Any]) -> bool:
    """Return whether files are surveyed in parts."""
    with optional(f"Reading {files!r}"):
        from fedpax.data.tables.survey import is_large

        return is_large(files, LoadOptions(partition=partition, **reading))


def _survey(files: Any, options: LoadOptions, picture: Path | None) -> int:
    from fedpax.data.tables.survey import label_skew, merge_pairs, survey_files

    survey = survey_files(files, options, _MOST_LABELS)
    clients = None if survey.clients is None else len(survey.clients)
    _print_head(survey.name, survey.num_examples, clients)
    _print_columns(
        survey.summaries,
        survey.schema,
        survey.client,
        survey.label,
        options.types or (),
        [*survey.notes, *_note_repeated(survey.repeated, survey.num_examples)],
    )
    if survey.clients is None:
        return _without_clients(picture)
    starts = np.concatenate([[0], np.cumsum(survey.sizes)])
    statistics = partition_statistics(ContiguousClients(starts))
    names, top = None, None
    if survey.labels is not None and survey.pairs is not None:
        owner, label, amount = survey.pairs
        from fedpax.user_files.arrow_numpy import to_numpy

        names, order = _name_labels(to_numpy(survey.labels))
        pairs = merge_pairs(owner, order[label], amount)
        owner, label, amount = pairs
        by_client = np.lexsort((label, -amount, owner))
        first = by_client[np.flatnonzero(np.diff(owner[by_client], prepend=-1))]
        top = label[first], amount[first]
        skew = label_skew(pairs, survey.sizes)
        statistics = statistics._replace(
            classes=np.arange(len(names)),
            label_counts=_count_labels(pairs, len(survey.clients), len(names)) if picture else None,
            labels_per_participant=skew[0],
            label_entropy=skew[1],
            overall_entropy=skew[2],
            total_variation=skew[3],
        )
    _print_clients(survey.clients, survey.sizes, names, top)
    print_line("")
    print_line(str(statistics))
    if picture:
        plot_statistics(statistics, picture, class_names=names, participant_names=survey.clients)
    return 0


def _count_labels(pairs: NDArray[np.int64], num_clients: int, num_labels: int) -> NDArray[np.int64]:
    counts = np.zeros((num_clients, num_labels), np.int64)
    counts[pairs[0], pairs[1]] = pairs[2]
    return counts


def _print_head(name: str, examples: int, clients: int | None) -> None:
    of_clients = "" if clients is None else f" of {count_of(clients, 'client')}"
    print_line(f"{name}: {count_of(examples, 'example')}{of_clients}")


def _print_columns(
    summaries: Sequence[ColumnSummary],
    schema: Any,
    client: str | None,
    label: str | None,
    stated: Collection[str],
    of_images: Sequence[str],
) -> None:
    """Print the table of columns, with the treatment that `fedavg_table` gives them."""
    # `stated` are the columns whose types the user states: they are texts on purpose.
    roles = {client: "client", label: "label"}
    rows = []
    for summary in summaries:
        cells = summary.cells()
        data_type = schema.field(summary.treatment.name).type
        if hasattr(data_type, "value_type") and hasattr(data_type, "shape"):  # a tensor
            cells[1], cells[-1] = f"{data_type.value_type}{list(data_type.shape)}", "an array"
        if role := roles.get(summary.treatment.name):
            cells[-2:] = [role, "stated" if role == "label" else "names the clients"]
        rows.append(cells)
    print_line(f"\n{markdown_table(ColumnSummary.HEAD, rows)}")
    notes = [s.note for s in summaries if s.note and s.treatment.name not in (client, *stated)]
    notes += [*(s.spellings for s in summaries if s.spellings), *of_images]
    if notes:
        print_line("\n".join(["", *notes]))


def _labels(source: Any) -> tuple[list[str] | None, NDArray[np.int64] | None]:
    """Return the names of the labels, and each example's, or None if they are not classes."""
    if source.label is None:
        return None, None
    column = _whole_numbers(source.column(source.label))
    if column.ndim > 1 or column.dtype.kind in "fmM":
        return None, None
    first = next(iter(np.ma.compressed(column)), "") if column.dtype.kind == "O" else ""
    if not isinstance(first, str | datetime.time):
        return None, None  # lists, bytes or structures
    names, labels = _name_labels(column)
    return (names, labels) if len(names) <= _MOST_LABELS else (None, None)


def _whole_numbers(column: NDArray[Any]) -> NDArray[Any]:
    """Return floats and decimals that are classes as integers, and any other column as it is."""
    first = next(iter(np.ma.compressed(column)), None) if column.dtype.kind == "O" else None
    if column.ndim > 1 or (column.dtype.kind != "f" and not isinstance(first, Decimal)):
        return column
    values = np.ma.filled(column, np.nan).astype(np.float64)
    missing = np.isnan(values)
    distinct = np.unique(values[~missing])
    if len(distinct) > MAX_CLASSES or (distinct % 1 != 0).any() or (np.abs(distinct) > 2**53).any():
        return column
    return np.ma.MaskedArray(np.where(missing, 0, values).astype(np.int64), missing)


def _name_labels(column: NDArray[Any]) -> tuple[list[str], NDArray[np.int64]]:
    """Return the names of the labels, numbers in their order, and the place of each value."""
    missing = np.ma.getmaskarray(column)
    texts = np.where(missing, "missing", np.ma.getdata(column).astype(str))
    names, labels = np.unique(texts, return_inverse=True)
    numbers = column.dtype.kind in "iub"
    order = np.argsort(
        [float("inf") if name == "missing" else float(name == "True") if name in ("True", "False")
         else float(name) for name in names]
        if numbers
        else np.arange(len(names)),
        kind="stable",
    )  # fmt: skip
    rank = np.argsort(order, kind="stable")
    return names[order].tolist(), rank[labels].astype(np.int64)


def _most_frequent(
    starts: NDArray[np.int64], labels: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each client's most frequent label, and the number of its examples with it."""
    top = np.zeros((2, len(starts) - 1), np.int64)
    for client, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
        counts = np.bincount(labels[begin:end], minlength=1)
        top[:, client] = counts.argmax(), counts.max()
    return top[0], top[1]


def _print_clients(
    client_names: Any,
    sizes: NDArray[np.int64],
    names: list[str] | None,
    top: tuple[NDArray[np.int64], NDArray[np.int64]] | None,
) -> None:
    by_size = np.argsort(-sizes, kind="stable")
    if len(by_size) > _MOST_CLIENTS:
        half = _MOST_CLIENTS // 2
        by_size = np.concatenate([by_size[:half], [-1], by_size[-half:]])
    head = ["client", "examples"] + ([] if top is None else ["most frequent label"])
    rows = []
    for client in by_size.tolist():
        if client < 0:
            rows.append(["..."] * len(head))
            continue
        row = [str(client_names[client]), f"{sizes[client]:,}"]
        if top is not None and names is not None:
            label, amount = top[0][client], top[1][client]
            row.append(f"{names[label]} ({amount / max(1, sizes[client]):.0%})")
        rows.append(row)
    print_line(f"\n{markdown_table(head, rows)}")


def _find_engine(options: flags.FlagValues) -> Callable[..., Any]:
    check_engine_flags(options)
    if options.engine is None:
        return prepare_files
    from fedpax.deploy.beam_prepare import prepare_beam

    beam_flags = shlex.split(options.beam_flags or "")
    return functools.partial(prepare_beam, num_shards=options.num_shards, flags=beam_flags)
