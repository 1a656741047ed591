"""The sizes and names of the house: a file has one idea, a function fits on a screen or two."""

import ast
import collections

from test_layers import ROOT, python_files

FOLDERS = ("fedpax", "algorithms", "experiments")
MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 80  # of code: without its docstring


def lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function without its docstring."""
    docstring = function.body[0] if ast.get_docstring(function) is not None else None
    documented = 0 if docstring is None else (docstring.end_lineno or 0) - docstring.lineno + 1
    return (function.end_lineno or 0) - function.lineno + 1 - documented


def long_functions(source: str) -> list[str]:
    """Return the names of the functions with too many lines, and their numbers of lines."""
    return [
        f"{node.name}, {lines} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := lines_of_code(node)) > MOST_LINES_OF_A_FUNCTION
    ]


def test_functions_are_short() -> None:
    result = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in python_files(*FOLDERS)
        for text in long_functions(path.read_text())
    ]
    assert not result, "\n".join(result)


def test_a_long_function_is_found() -> None:
    def source(lines: int) -> str:
        return 'def f(x):\n    """One.\n\n    Two.\n    """\n' + "    x += 1\n" * lines

    assert long_functions(source(79)) == []
    assert long_functions(source(80)) == ["f, 81 lines"]


def test_files_are_short() -> None:
    paths = {str(path.relative_to(ROOT)): path for path in python_files(*FOLDERS)}
    sizes = {name: len(path.read_text().splitlines()) for name, path in paths.items()}
    long = {name: size for name, size in sizes.items() if size > MOST_LINES_OF_A_FILE}
    assert not long, f"divide by what each part is: {long}"


def repeated_classes(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return the classes of one name that several modules define, with these modules."""
    places = collections.defaultdict(list)
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    return {name: modules for name, modules in places.items() if len(modules) > 1}


def test_a_class_name_has_one_meaning() -> None:
    paths = [path for path in python_files(*FOLDERS) if "benchmarks" not in path.parts]
    assert not repeated_classes({str(p.relative_to(ROOT)): p.read_text() for p in paths})


def test_a_repeated_class_is_found() -> None:
    sources = {"a": "class Message: ...", "b": "if x:\n  class Message: ...", "c": "class C: ..."}
    assert repeated_classes(sources) == {"Message": ["a", "b"]}
