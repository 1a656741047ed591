"""Tables: the treatment of columns, and features that clients standardize without pooling data.

- `infer_treatments` states what each column becomes, and `summarize_columns` shows it.
- `federated_moments` computes means and variances over clients with any aggregator.
- `fit_features` makes the function from a table's columns to features, a `TableFeatures`.
- `infer_label` states what is predicted, a `Label`.
"""

from fedpax.data.tables.features import TableFeatures as TableFeatures
from fedpax.data.tables.features import fit_features as fit_features
from fedpax.data.tables.fitted_column import ColumnSummary as ColumnSummary
from fedpax.data.tables.fitted_column import FittedColumn as FittedColumn
from fedpax.data.tables.fitted_column import summarize_columns as summarize_columns
from fedpax.data.tables.labels import Label as Label
from fedpax.data.tables.labels import infer_label as infer_label
from fedpax.data.tables.moments import Moments as Moments
from fedpax.data.tables.moments import federated_moments as federated_moments
from fedpax.data.tables.treatments import Treatment as Treatment
from fedpax.data.tables.treatments import infer_treatments as infer_treatments
from fedpax.data.tables.treatments import parse_treatment as parse_treatment
from fedpax.lazy_names import public_names as _public_names

__all__ = _public_names(globals())
