"""Lists of columns among the fields of an experiment, which take commas as flags of files do."""

from collections.abc import Sequence

from fedpax.path_patterns import split_names

_LISTS = ("data.optional_columns", "data.types")


def split_columns(words: Sequence[str]) -> list[str]:
    """Divide lists of columns at their commas, for tyro, which divides values at spaces.

    Example:
        >>> split_columns(["--data.optional_columns=note,size", "--data.types", "a=int8,b=int8"])
        ['--data.optional_columns', 'note', 'size', '--data.types', 'a=int8', 'b=int8']
    """
    divided, is_list = list[str](), False
    for word in words:
        if not word.startswith("--"):
            divided += split_names(word) if is_list else [word]
            continue
        flag, equals, text = word.partition("=")
        is_list = flag[2:].replace("-", "_") in _LISTS
        names = split_names(text) if is_list and equals else [text]
        # One value stays behind "=", since it can begin with a dash.
        divided += [flag + equals + names[0]] if len(names) == 1 else [flag, *names]
    return divided
