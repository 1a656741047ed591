"""decode_features: Hugging Face's features in Arrow tables, such as encoded images."""

import json

import pyarrow as pa

from fedpax.user_files.formats import ReadOptions


def decode_features(table: pa.Table, options: ReadOptions) -> pa.Table:
    """Decode the columns that the schema's metadata calls images; other columns stay."""
    for name in image_columns(table.schema):
        if not options.columns or name in options.columns:
            from fedpax.user_files.readers.image_files import decode_column

            position = table.column_names.index(name)
            table = table.set_column(position, name, decode_column(table.column(name), options))
    return table


def image_columns(schema: pa.Schema) -> list[str]:
    """Return the columns whose feature is an image."""
    metadata = (schema.metadata or {}).get(b"huggingface")
    try:
        features = json.loads(metadata or "{}")["info"]["features"]
        names = [name for name, feature in features.items() if feature["_type"] == "Image"]
    except (ValueError, KeyError, TypeError, AttributeError):  # a form that is not known here
        return []
    return [
        name
        for name in names
        if name in schema.names and pa.types.is_struct(schema.field(name).type)
    ]
