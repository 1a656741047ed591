"""`fedpax partition`: the clients of an experiment, as a table and a picture."""

from collections.abc import Sequence

from fedpax.commands.parts.options import configure, output_file, parse
from fedpax.console import print_line
from fedpax.data import partition_statistics, plot_partition
from fedpax.errors import UsageError


def partition(arguments: Sequence[str]) -> int:
    """Print how an experiment's clients differ, and draw the picture that is asked for."""
    # The experiment has a method `read_population`, without arguments, that returns for each client
    # the indices of its examples, and the label of each example or None.
    options, fields = parse("partition", arguments)
    picture = output_file("picture", options.picture, ".png")
    experiment = configure(options.exp, fields)
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
