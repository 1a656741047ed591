"""The public names of secure sums, for type checkers and `fedpax.lazy_names`."""

from fedpax.secure_sums.arithmetic import SecureSumError as SecureSumError
from fedpax.secure_sums.coordinator_side import CoordinatorSide as CoordinatorSide
from fedpax.secure_sums.message import Message as Message
from fedpax.secure_sums.site_side import SiteSide as SiteSide
