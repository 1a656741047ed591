"""The remedies of `fedpax.data.load` in flags, for the command line."""

import ast
import re
import shlex

from fedpax.comma_lists import escape_commas

_VALUE = r"\{[^{}]*\}|\[[^\[\]]*\]|'[^']*'"
# After a verb: the value that is wrong has the name that it has in Python.
_ARGUMENT = re.compile(
    r"(?:(?<=[Ss]et )|(?<=[Gg]ive )|(?<=[Ll]eave )|(?<=with )|(?<=or ))"
    rf"(optional_columns|types|decimal_point|delimiter|client|partition)=({_VALUE})"
)
# An experiment reads all columns: `--data.columns` states treatments.
_COLUMNS = re.compile(
    r",? or (?:name common columns|leave the column out) with columns=(?:\[[^\[\]]*\]|[^.]*)"
)
_OTHERWISE = {
    "Read some columns with columns=, or sort": "Sort",
    "Read some columns with columns=, train": "Train",
    "otherwise leave it out with columns=": "otherwise rename it in the files",
}
_OF_COMMANDS = re.compile(r" \(--types[ =][^)]*\)")


def with_flags(text: str, prefix: str = "--data.") -> str:
    """Return an error of `fedpax.data.load` whose remedies are flags."""
    if prefix == "--":
        text = _OF_COMMANDS.sub("", text)
        text = re.sub(rf"(?<![\w.-])(columns)=({_VALUE})", lambda m: _as_flag(m, prefix), text)
        text = re.sub(r"(?<![\w.-])columns=", "--columns=", text)
    else:
        text = _COLUMNS.sub("", _OF_COMMANDS.sub("", text))
        for remedy, other in _OTHERWISE.items():
            text = text.replace(remedy, other)
    text = re.sub(r"(?<![\w.-])heldout_fraction=", f"{prefix}heldout_fraction=", text)
    no_client = "leave --client out" if prefix == "--" else f"set {prefix}client=None"
    text = text.replace("set client=None", no_client)
    size = "--image_size=HEIGHTxWIDTH" if prefix == "--" else f"{prefix}image_size HEIGHT WIDTH"
    text = text.replace("image_size=(height, width)", size)
    return _ARGUMENT.sub(lambda match: _as_flag(match, prefix), text)


def _as_flag(match: re.Match[str], prefix: str) -> str:
    try:
        value = ast.literal_eval(match[2])
    except (SyntaxError, ValueError):
        return match[0]
    if isinstance(value, dict):
        value = [f"{name}={data_type}" for name, data_type in value.items()]
    if isinstance(value, str):
        text = value.replace("\t", "\\t")  # which CSV takes for a tab
        return f"{prefix}{match[1]}={shlex.quote(text)}"
    words = [escape_commas(str(word)) for word in value]
    if prefix == "--":
        return f"{prefix}{match[1]}={shlex.quote(','.join(words))}"
    return f"{prefix}{match[1]} {shlex.join(words)}"
