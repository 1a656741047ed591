"""Settings of functions as configuration: a field for each argument that has a plain value."""

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar, Literal, Self, TypeVar

from docstring_parser import google

from fedpax.checks import CheckedConfig
from fedpax.errors import ArgumentError, ArgumentTypeError, did_you_mean

PLAIN = (float, int, bool, str)
Class = TypeVar("Class", bound=type)
Made = TypeVar("Made", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class FunctionSettings(CheckedConfig):
    """The settings of one of several functions; the base of classes that are made from functions.

    Its fields are the arguments of a function that are numbers, texts or choices.
    """

    function: ClassVar[Callable[..., Any]]
    given: ClassVar[Mapping[str, Any]]
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @classmethod
    def functions(cls) -> Mapping[str, Callable[..., Any]]:
        """Return the functions by name."""
        raise NotImplementedError

    @classmethod
    def of(cls, function: str | Callable[..., Any]) -> type[Self]:
        """Return the class of a function, or of one in `functions` by its name."""
        if isinstance(function, str):
            if function not in (functions := cls.functions()):
                raise ArgumentError(
                    f"{cls.group}={function}: expected one of {', '.join(functions)}."
                    f"{did_you_mean(function, functions)} Set --{cls.group} to one of them."
                )
            function = functions[function]
        made: type[Self] = _settings_class(cls, inspect.unwrap(function))  # type: ignore[arg-type]
        return made

    @classmethod
    def required(cls) -> list[str]:
        """Return the names of the settings without a default."""
        return [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]

    @classmethod
    def configure(cls, function: str | Callable[..., Any], settings: Mapping[str, Any]) -> Self:
        """Return the settings of a function; raise if a required one has no value."""
        made = cls.of(function)
        if missing := [name for name in made.required() if name not in settings]:
            name = made.function.__name__
            raise ArgumentTypeError(
                f"{cls.group}={name.strip('_')}: {', '.join(missing)} has no value and no default, "
                f"expected one. Pass {missing[0]}=..., or add a row {name!r} to "
                f"{cls.__name__}.defaults of {cls.__module__}."
            )
        return made(**settings)

    @classmethod
    def chooser(cls) -> type["FunctionSettings"]:
        """Return the base class that lists the functions."""
        return next(base for base in reversed(cls.__mro__) if "given" in vars(base))

    @classmethod
    def summaries(cls) -> dict[str, str]:
        """Return the first line of each function's docstring, by name."""
        return {
            name: (inspect.getdoc(function) or "").partition("\n")[0]
            for name, function in cls.functions().items()
        }

    @classmethod
    def named(cls, name: str) -> type[Self]:
        """Return the class of this name in any case, for configurations of older versions."""
        for function in () if name.startswith("_") else cls.functions():
            if function.replace("_", "") == name.lower():
                return cls.of(function)
        raise AttributeError(f"there is no {cls.group} {name}")

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        try:
            self.call(self.given)
        except (TypeError, ValueError) as error:
            raise self._naming_flags(error) from None

    def call(self, given: Mapping[str, Any]) -> Any:
        """Call the function with its settings."""
        return type(self).function(**accepted(self.function, given), **vars(self))

    def _naming_flags(self, error: Exception) -> Exception:
        """Name the flag of the setting that a function's own message names."""
        text = re.fullmatch(r"\w+\(\): (\w+) is (.*?), (\w+ .*?)\. .*", str(error))
        if text is None or text[1] not in vars(self):
            return error
        flag, problem = f"{self.group}.{text[1]}", text[3]
        remedy = f"Set --{flag} to a value in this range."
        if not problem.startswith("expected "):
            remedy = f"Leave out --{flag}, or set the other flag."
        return ArgumentError(f"{flag}={getattr(self, text[1])}: {problem}. {remedy}")


def documented_by(*functions: Callable[..., Any]) -> Callable[[Class], Class]:
    """Take the texts of a configuration's fields from the arguments that they set.

    A default that the field does not have is left out.
    """

    def document(class_: Class) -> Class:
        stated = {text.arg_name for text in google.parse(inspect.getdoc(class_) or "").params}
        lines = [inspect.getdoc(class_) or "", *(["", "Attributes:"] if not stated else [])]
        for name in (name for name in inspect.get_annotations(class_) if name not in stated):
            function = next(f for f in functions if name in inspect.signature(f).parameters)
            text = argument_texts(function)[name]
            if vars(class_).get(name) != inspect.signature(function).parameters[name].default:
                text = text.partition(" Default ")[0].partition("\nDefault ")[0]
            lines.append(_text(name, text))
        class_.__doc__ = "\n".join(lines)
        return class_

    return document


def passes_on(*functions: Callable[..., Any], sets: Collection[str]) -> Callable[[Made], Made]:
    """Give a function with `**arguments` the types, defaults and texts of the arguments it passes.

    It passes all arguments of `functions` but those of `sets`.
    """

    def decorate(made: Made) -> Made:
        parts: list[Callable[..., Any]] = [*functions, made]
        texts = {n: t for f in parts for n, t in argument_texts(f).items()}
        parameters = {
            name: parameter.replace(annotation=_hint(inspect.unwrap(f), name))
            for f in parts
            for name, parameter in inspect.signature(f).parameters.items()
            if name not in sets and parameter.kind is not parameter.VAR_KEYWORD
        }
        lines = [(inspect.getdoc(made) or "").partition("\n")[0], "", "Args:"]
        lines += [_text(name, texts[name]) for name in parameters if name in texts]
        settings: Any = made
        settings.__doc__ = "\n".join(lines)
        settings.__annotations__ = {n: p.annotation for n, p in parameters.items()} | {
            "return": _hint(made, "return")
        }
        settings.__signature__ = inspect.Signature(
            [p.replace(kind=p.KEYWORD_ONLY) for p in parameters.values()]
        )
        return made

    return decorate


def accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function has."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


def arguments_of(function: Callable[..., Any], config: Any) -> dict[str, Any]:
    """Return the fields of a configuration's own class that are arguments of a function."""
    names = inspect.get_annotations(type(config))
    return accepted(function, {name: getattr(config, name) for name in names})


def argument_texts(function: Callable[..., Any]) -> dict[str, str]:
    """Return the texts of a function's arguments, by name."""
    docstring = google.parse(inspect.getdoc(function) or "")
    return {text.arg_name: text.description or "" for text in docstring.params}


def _text(name: str, text: str) -> str:
    return f"    {name}: " + text.replace("\n", "\n        ")


def is_choice(function: Callable[..., Any], given: Mapping[str, Any], returned: type) -> bool:
    """Return whether a function returns a class, and its required arguments are plain or given."""
    hint = _hint(inspect.unwrap(function), "return")
    if returned not in (hint, typing.get_origin(hint)):
        return False
    try:
        list(_fields(function, given))
    except TypeError:
        return False
    return True


@functools.cache
def _settings_class(base: type[Any], function: Callable[..., Any]) -> type[Any]:
    """Make the settings of a function. Equal functions have one class, so settings are equal."""
    defaults = base.defaults.get(function.__name__, {})
    fields = [
        (name, hint, dataclasses.field(default=defaults.get(name, default)))
        for name, hint, default in _fields(function, base.given)
    ]
    texts = argument_texts(function)
    summary = (inspect.getdoc(function) or "").partition("\n")[0]
    lines = [summary or function.__name__, "", "Attributes:"]
    for name, _, _ in fields:
        lines.append(_text(name, texts.get(name, "")))
    shipped = function.__module__.startswith("fedpax.")
    made = dataclasses.make_dataclass(
        "".join(part.capitalize() for part in function.__name__.strip("_").split("_")),
        fields,
        bases=(base,),
        namespace={"__doc__": "\n".join(lines), "function": staticmethod(function)},
        frozen=True,
        kw_only=True,
    )
    made.__module__ = base.__module__ if shipped else function.__module__
    return made


def _fields(
    function: Callable[..., Any], given: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the plain type and the default of each setting of a function."""
    function = inspect.unwrap(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if name in given or parameter.kind is parameter.VAR_KEYWORD:
            continue
        hint, default = _plain_type(_hint(function, name)), parameter.default
        if parameter.annotation is parameter.empty and type(default) in PLAIN:
            hint = type(default)
        if hint is not None and parameter.kind is not parameter.VAR_POSITIONAL:
            yield name, hint, dataclasses.MISSING if default is parameter.empty else default
        elif default is parameter.empty:
            raise ArgumentTypeError(
                f"{function.__name__}: {name} has the type {_hint(function, name)}, expected a "
                f"number, a text, a choice, or one of the arguments {', '.join(given)}. Give the "
                "argument a default, or write a function around this one that sets it."
            )


def _hint(function: Callable[..., Any], name: str) -> Any:
    """Return an annotation; Any if it is missing, or names what does not exist."""
    hint = inspect.get_annotations(function).get(name, Any)
    try:
        return eval(hint, function.__globals__) if isinstance(hint, str) else hint
    except (AttributeError, NameError):
        return Any


def _plain_type(hint: Any) -> Any:
    """Return the type of values that a command line can hold; None: there are none."""
    if hint in PLAIN or typing.get_origin(hint) is Literal:
        return hint
    members = typing.get_args(hint)
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return None
    plain = [member for member in (*PLAIN, *members) if member in members and _plain_type(member)]
    if not plain:
        return None
    return plain[0] | None if types.NoneType in members else plain[0]
