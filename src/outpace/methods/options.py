"""The options of a method as data, for interfaces that list or parse them."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from outpace.decoding import OptionError
from outpace.field_types import list_options
from outpace.methods import METHODS, Method

MethodSpec = Method | str | tuple[str, Mapping[str, Any]]
"""A method, its name or "auto", or its name and options."""


def find_method(name: str) -> type[Method]:
    """Return the class of a method; raise `ValueError` for an unknown name."""
    if name not in METHODS:
        raise OptionError(
            "method", name, f"unknown method {name!r}; available: {', '.join(METHODS)}"
        )
    return METHODS[name]


METHOD_FILE = ".py:"
"""Part of a name that denotes a class of a local file."""


def open_method(name: str) -> type[Method]:
    """Return the class of a method: a registered one, or `FILE.py:CLASS`, whose file is executed.

    Only commands and the settings of a server call this, with names that the user typed.

    Raises:
        OptionError: If the method is unknown, or the file cannot be imported.
    """
    if METHOD_FILE not in name:
        return find_method(name)
    path, _, class_name = name.rpartition(":")
    kind = getattr(import_file(Path(path)), class_name, None)
    if not (isinstance(kind, type) and issubclass(kind, Method)) or inspect.isabstract(kind):
        raise OptionError(
            "method", name, f"{path} has no subclass of Method named {class_name!r} with `decode`"
        )
    return kind


def method_name(kind: type[Method]) -> str:
    """Return the name of a method, with which `open_method` finds it."""
    for name, each in METHODS.items():
        if each is kind:
            return name
    return f"{sys.modules[kind.__module__].__file__}:{kind.__qualname__}"


def import_file(path: Path) -> ModuleType:
    """Execute a file once, as a module with which its objects are unpickled in other processes."""
    name = f"outpace_file_{sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    module.__file__ = str(path)  # as typed, for `method_name`
    folder = str(path.resolve().parent)
    try:
        if folder not in sys.path:
            sys.path.append(folder)  # for modules beside the file
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise OptionError("method", str(path), describe_import(path, error)) from error
    return module


def describe_import(path: Path, error: Exception) -> str:
    """Describe why a file cannot be imported, with the line of the file."""
    if isinstance(error, OSError) and not path.is_file():
        return f"there is no file {path}"
    steps = traceback.extract_tb(error.__traceback__)
    lines = [step.lineno for step in steps if Path(step.filename) == path.resolve()]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    place = f"{path}, line {line}" if line else str(path)
    reason = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{place}: {type(error).__name__}: {reason}"


def resolve_method(spec: MethodSpec) -> Method:
    """Return a method from its specification; raise `ValueError` for an invalid one."""
    if isinstance(spec, Method):
        return spec
    pair = (spec, {}) if isinstance(spec, str) else spec
    match pair:
        case [str(name), Mapping() as options]:
            return make_method(find_method(name), options)
    raise OptionError(
        "method", spec, "must be a Method, a name, or a name and a mapping of options"
    )


def method_from_options(kind: type[Method], options: Mapping[str, Any]) -> Method:
    """Return a method with options as in files: `none` means None.

    Raises:
        ValueError: If an option is unknown, or a value invalid.
    """
    values = {option: None if value == "none" else value for option, value in options.items()}
    return make_method(kind, values)


def make_method(
    method: type[Method], options: Mapping[str, Any], spelling: Callable[[str], str] = str
) -> Method:
    """Return a method with the given options.

    Args:
        method: class of the method.
        options: values by name.
        spelling: how an option is written in messages.

    Raises:
        ValueError: an unknown option, a missing option, or an invalid value.
    """
    name, known = method_name(method), list_options(method)
    if unknown := [option for option in options if option not in known]:
        has = f"available: {', '.join(sorted(known))}" if known else "it has none"
        raise OptionError(unknown[0], options[unknown[0]], f"is no option of {name!r}; {has}")
    required = [option.name for option in known.values() if option.is_required]
    if missing := [option for option in required if option not in options]:
        spelled = [spelling(option) for option in missing]
        raise OptionError(
            missing[0], None, f"is missing: method {name!r} needs {', '.join(spelled)}"
        )
    return method(**options)
