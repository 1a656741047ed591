"""Tables: the treatment of columns, and features that clients standardize without pooling data.

- `infer_treatments` states what each column becomes, and `summarize_columns` shows it.
- `federated_moments` computes means and variances over clients with any aggregator.
- `fit_features` makes the function from a table's columns to features, a `TableFeatures`.
- `infer_label` states what is predicted, a `Label`.
"""

from fedpax.data.tables.features import TableFeatures, fit_features
from fedpax.data.tables.fitted_column import ColumnSummary, FittedColumn, summarize_columns
from fedpax.data.tables.labels import Label, infer_label
from fedpax.data.tables.moments import Moments, federated_moments
from fedpax.data.tables.treatments import (
    Treatment,
    infer_treatments,
    parse_treatment,
)

__all__ = [
    "ColumnSummary",
    "FittedColumn",
    "Label",
    "Moments",
    "TableFeatures",
    "Treatment",
    "federated_moments",
    "fit_features",
    "infer_label",
    "infer_treatments",
    "parse_treatment",
    "summarize_columns",
]
