"""describe_contents: files that hold another format than their suffix says."""

from fedpax.user_files.finding import DataFile

_HEAD = 1 << 12  # bytes
_SAVE_AS_CSV = "Save it as CSV in UTF-8, or read it with pandas.read_excel and pass the table"
_SIGNATURES = {
    b"\x1f\x8b": ("is compressed by gzip", "Rename it to {path}.gz"),
    b"\x28\xb5\x2f\xfd": ("is compressed by zstd", "Rename it to {path}.zst"),
    b"BZh": ("is compressed by bzip2", "Rename it to {path}.bz2"),
    b"PK\x03\x04": ("is a zip archive", "Extract it with unzip, and name the files in it"),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ("is an Excel file", _SAVE_AS_CSV),
    b"PAR1": ("is a Parquet file", "Give it the suffix .parquet"),
    b"ARROW1": ("is an Arrow file", "Give it the suffix .arrow"),
    b"\x89HDF": ("is an HDF5 file", "Give it the suffix .h5"),
    b"%PDF": ("is a PDF file", "Export the table as CSV"),
    b"SQLite format 3": ("is an SQLite database", "Export the table as CSV"),
}
_OWN = {  # what files of a suffix begin with
    ".npz": b"PK\x03\x04",
    ".parquet": b"PAR1",
    ".pq": b"PAR1",
    ".arrow": b"ARROW1",
    ".feather": b"ARROW1",
    ".h5": b"\x89HDF",
    ".hdf5": b"\x89HDF",
}
_COMPRESSED = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd", ".bz2": b"BZh"}

SUFFIX_REMEDIES = {
    **dict.fromkeys((".xlsx", ".xls", ".ods"), _SAVE_AS_CSV),
    **dict.fromkeys(
        (".zip", ".7z", ".rar", ".tgz"), "Extract the archive, and name the files in it"
    ),
    **dict.fromkeys((".txt", ".dat"), "Rename a table to .csv, and set delimiter="),
    ".dta": "Read it with pandas.read_stata, and pass the table",
    ".sav": "Read it with pandas.read_spss, and pass the table",
    ".sas7bdat": "Read it with pandas.read_sas, and pass the table",
}
"""How to read files whose suffix names no format of `formats.py`."""


def describe_contents(file: DataFile) -> str | None:
    """Return an error for a file that holds nothing, or another format than its suffix says."""
    with file.open_seekable() as opened:
        head: bytes = opened.read(_HEAD)
    path, expected = file.path, f"expected {file.suffix[1:]}"
    if not head.strip() and len(head) < _HEAD:
        return (
            f"{path} is empty, expected at least one example. Leave the file out, or copy it again "
            "if it had contents."
        )
    if file.is_compressed:
        suffix = next(suffix for suffix in _COMPRESSED if path.lower().endswith(suffix))
        if head.startswith(_COMPRESSED[suffix]):
            return None
        return (
            f"{path} is not compressed, {expected} compressed as {suffix[1:]}. Rename it to "
            f"{path[: -len(suffix)]}, or copy it again."
        )
    if head.lstrip(b"\xef\xbb\xbf \r\n\t").lower().startswith((b"<!doctype html", b"<html")):
        return (
            f"{path} is an HTML page, such as a page to sign in, {expected}. Open the address in a "
            "browser, and download the file itself."
        )
    for signature, (kind, remedy) in _SIGNATURES.items():
        if head.startswith(signature) and _OWN.get(file.suffix) != signature:
            if signature == b"PK\x03\x04" and (b"[Content_Types]" in head or b"xl/" in head):
                kind, remedy = "is an Excel file", _SAVE_AS_CSV
            return f"{path} {kind}, {expected}. {remedy.format(path=path)}."
    return None
