"""Names of the models of a command line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from outpace.checkpoints.name import distinct_name, name_of
from outpace.errors import OptionError


def name_role_models(roles: Mapping[str, str], further: Mapping[str, str]) -> dict[str, str]:
    """Name the model of each role as in `further`, or by its file with a number if ambiguous."""
    places = dict(further)
    names = {}
    for role, path in roles.items():
        same = (name for name, place in places.items() if place == path)
        names[role] = next(same, None) or distinct_name(name_of(path), places)
        places[names[role]] = path
    return names


def name_models(model: str | None, others: Iterable[str]) -> dict[str, str]:
    """Name the models of a command line: `name=path`, or a path alone.

    Raises:
        OptionError: If a name is given twice.
    """
    unnamed = [] if model is None else [model]
    named_paths: dict[str, str] = {}
    for text in others:
        name, equals, path = text.partition("=")
        if not equals or os.path.exists(text):
            unnamed.append(text)
        elif not (name and path):
            message = f"--model must be name=path, or a path, got {text!r}"
            raise OptionError("model", text, message)
        elif name in named_paths:
            raise OptionError("model", text, f"--model: the name {name} is given twice")
        else:
            named_paths[name] = path
    models: dict[str, str] = {}
    for path in unnamed:
        models[distinct_name(name_of(path), {*named_paths, *models})] = path
    return models | named_paths
