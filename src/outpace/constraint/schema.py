"""JSON schemas as regular expressions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import unquote

from outpace.constraint.integers import integers
from outpace.constraint.pattern import LONGEST, PLAIN, TooLarge, Unsupported, parsed

DEPTH = 2
"""Arrays and objects within one another where a schema leaves open what a value is."""

MOST_VALUES = 20_000
"""Values of which a schema says something, those of a definition each time that it is used."""

RECURSION = 3
"""How often a definition may lie within itself."""

NOTES = {
    *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description"),
    *("default", "examples", "deprecated", "readOnly", "writeOnly"),
}
"""Keywords that say nothing about which values are right."""

KEYWORDS: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum"},
    "boolean": set(),
    "null": set(),
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
"""Keywords that are followed, by the type of the value."""

NOTHING = r"[^\s\S]"
SPACE = "[ ]?"
COMMA = f"{SPACE},{SPACE}"
NATURAL = "(?:0|[1-9][0-9]*)"
FRACTION = r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?"
LETTER = r'(?:[^"\\\x00-\x1f\x7f]|\\["\\/bfnrt])'
STRING = f'"{LETTER}*"'
SCALAR = f"(?:true|false|null|-?{NATURAL}{FRACTION}|{STRING})"
HEX = "[0-9a-f]"
DATE = "[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-]0[0-9]:[0-5][0-9])"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "uuid": f"{HEX}{{8}}(?:-{HEX}{{4}}){{3}}-{HEX}{{12}}",
}
"""Of strings. No day of a date lies behind the 28th, which every month has."""


def pattern_of(schema: Any) -> str:
    """What JSON text a schema accepts, properties in their order and with one space at most.

    Raises `Unsupported` with the keyword and its place, `TooLarge`, or `ValueError` for what is
    no schema.
    """
    return Writer(schema).value(schema, "#", ())


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes the values of a schema; `at` is the place in it, `refs` are the open references."""

    root: Any
    turns: Iterator[int] = field(default_factory=count)

    def value(self, schema: Any, at: str, refs: tuple[str, ...]) -> str:
        """The text of a value."""
        if next(self.turns) == MOST_VALUES:
            raise TooLarge(f"it is too large: it has more than {MOST_VALUES} values")
        if schema is False:
            return NOTHING
        if not (isinstance(schema, Mapping) or schema is True):
            raise ValueError(f"{schema!r} at {at} is no schema")
        text = anything(DEPTH) if schema is True else self.ruled(schema, at, refs)
        if len(text) > LONGEST:
            raise TooLarge(f"it is too large: what stands at {at} has too many variants")
        return text

    def ruled(self, schema: Mapping[str, Any], at: str, refs: tuple[str, ...]) -> str:
        """The text of a value under some keywords."""
        rules = {name: rule for name, rule in schema.items() if name not in NOTES}
        if not rules:
            return anything(DEPTH)
        for name in ("$ref", "anyOf", "oneOf", "allOf"):
            if name in rules:
                only(rules, {name}, at)
                return self.joined(name, rules[name], at, refs)
        if "enum" in rules or "const" in rules:
            return listed(rules, at)
        return one_of(self.typed(kind, rules, at, refs) for kind in kinds(rules, at))

    def joined(self, name: str, rule: Any, at: str, refs: tuple[str, ...]) -> str:
        """The text of a value under other schemas."""
        if name == "$ref":
            if refs.count(rule) == RECURSION:
                return NOTHING
            return self.value(resolved(self.root, rule, at), str(rule), (*refs, rule))
        parts = need(rule, list, f"{name} at {at}")
        if name == "allOf" and len(parts) != 1:
            raise Unsupported(f"allOf of several schemas at {at} is not supported")
        if name == "oneOf" and not apart(parts):
            raise Unsupported(f"oneOf at {at} is not supported, as several may hold: use anyOf")
        return one_of(
            self.value(part, f"{at}/{name}/{number}", refs) for number, part in enumerate(parts)
        )

    def typed(self, kind: str, rules: Mapping[str, Any], at: str, refs: tuple[str, ...]) -> str:
        """The text of a value of one type."""
        match kind:
            case "string":
                return string(rules, at)
            case "integer":
                return integers(*bounds(rules, at))
            case "number":
                if rules.get("minimum", 0) != 0:
                    raise Unsupported(f"minimum of a number at {at} is not supported, except 0")
                return f"{'' if 'minimum' in rules else '-?'}{NATURAL}{FRACTION}"
            case "array":
                return self.array(rules, at, refs)
            case "object":
                return self.object(rules, at, refs)
        return "null" if kind == "null" else "(?:true|false)"

    def array(self, rules: Mapping[str, Any], at: str, refs: tuple[str, ...]) -> str:
        """The text of an array."""
        least, most = counts(rules, "Items", at)
        if "prefixItems" in rules:
            parts = need(rules["prefixItems"], list, f"prefixItems at {at}")
            if rules.get("items") or not least <= len(parts) <= (
                len(parts) if most is None else most
            ):
                raise Unsupported(f"prefixItems beside other items at {at} is not supported")
            values = [self.value(p, f"{at}/prefixItems/{n}", refs) for n, p in enumerate(parts)]
            return rf"\[{SPACE}{COMMA.join(values)}{SPACE}\]"
        if "items" in rules:
            item = self.value(rules["items"], f"{at}/items", refs)
        else:
            item = anything(DEPTH - 1)
        return rf"\[{SPACE}{several(item, least, most)}{SPACE}\]"

    def object(self, rules: Mapping[str, Any], at: str, refs: tuple[str, ...]) -> str:
        """The text of an object: its properties, or where it names none, any."""
        further = rules.get("additionalProperties", True)
        known = need(rules.get("properties", {}), dict, f"properties at {at}")
        required = need(rules.get("required", []), list, f"required at {at}")
        names = [need(name, str, f"required at {at}") for name in required]
        fields = dict(known) | {name: further for name in names if name not in known}
        if not fields:
            place = f"{at}/additionalProperties"
            value = anything(DEPTH - 1) if further is True else self.value(further, place, refs)
            return rf"\{{{SPACE}{several(f'{STRING}{SPACE}:{SPACE}{value}', 0, None)}{SPACE}\}}"
        parts = []
        for name, rule in fields.items():
            value = self.value(rule, f"{at}/properties/{name}", refs)
            key = re.escape(json.dumps(name, ensure_ascii=False))
            parts.append((f"{key}{SPACE}:{SPACE}{value}", name in required))
        return rf"\{{{SPACE}{chosen(parts)}{SPACE}\}}"


def anything(depth: int) -> str:
    """The text of any value, with arrays and objects so deep."""
    if depth <= 0:
        return SCALAR
    inner = anything(depth - 1)
    pair = f"{STRING}{SPACE}:{SPACE}{inner}"
    array, mapping = several(inner, 0, None), several(pair, 0, None)
    return rf"(?:{SCALAR}|\[{SPACE}{array}{SPACE}\]|\{{{SPACE}{mapping}{SPACE}\}})"


def one_of(texts: Iterator[str]) -> str:
    """One of several texts."""
    return f"(?:{'|'.join(texts)})"


def several(text: str, least: int, most: int | None) -> str:
    """A text `least` to `most` times, with commas between."""
    if most == 0 or (most is not None and most < least):
        return NOTHING if least else ""
    more = f"(?:{COMMA}{text}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
    return f"{text}{more}" if least else f"(?:{text}{more})?"


def chosen(parts: Sequence[tuple[str, bool]]) -> str:
    """Texts in their order with commas between; those that are not required may be missing."""
    first = next((place for place, (_, required) in enumerate(parts) if required), None)
    if first is None:
        heads = range(len(parts))
        if sum((place + 1) * len(parts[place][0]) for place in heads) > LONGEST:
            raise TooLarge("it is too large: it has too many properties that may be missing")
        return f"(?:{'|'.join(parts[n][0] + tail(parts[n + 1 :]) for n in heads)})?"
    front = "".join(f"(?:{text}{COMMA})?" for text, _ in parts[:first])
    return front + parts[first][0] + tail(parts[first + 1 :])


def tail(parts: Sequence[tuple[str, bool]]) -> str:
    """Texts that each come behind a comma."""
    return "".join(f"(?:{COMMA}{text}){'' if required else '?'}" for text, required in parts)


def string(rules: Mapping[str, Any], at: str) -> str:
    """The text of a string."""
    least, most = counts(rules, "Length", at)
    special = [name for name in ("pattern", "format") if name in rules]
    if len(special) > 1 or (special and (least or most is not None)):
        raise Unsupported(f"{special[0]} beside other bounds at {at} is not supported")
    if "pattern" in rules:
        pattern = need(rules["pattern"], str, f"pattern at {at}")
        try:
            parsed(pattern)  # alone, since what is half of a group would change what is around
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"pattern at {at} is malformed: {error}") from error
        return f'"{PLAIN.format(f"(?:{pattern})")}"'
    if "format" in rules:
        if need(rules["format"], str, f"format at {at}") not in FORMATS:
            raise Unsupported(f"format {rules['format']!r} at {at} is not supported")
        return f'"{FORMATS[rules["format"]]}"'
    if most is not None and most < least:
        return NOTHING
    return f'"{LETTER}{{{least},{"" if most is None else most}}}"'


def bounds(rules: Mapping[str, Any], at: str) -> tuple[int | None, int | None]:
    """Least and most of a whole number."""
    low, high = [], []
    for name, rule in rules.items():
        if name.lower().endswith("minimum"):
            number = need(rule, int | float, f"{name} at {at}")
            low.append(math.floor(number) + 1 if name != "minimum" else math.ceil(number))
        elif name.lower().endswith("maximum"):
            number = need(rule, int | float, f"{name} at {at}")
            high.append(math.ceil(number) - 1 if name != "maximum" else math.floor(number))
    return max(low, default=None), min(high, default=None)


def counts(rules: Mapping[str, Any], what: str, at: str) -> tuple[int, int | None]:
    """`min` and `max` of something that is counted."""
    least = need(rules.get(f"min{what}", 0), int, f"min{what} at {at}")
    most = rules.get(f"max{what}")
    return max(least, 0), None if most is None else need(most, int, f"max{what} at {at}")


def listed(rules: Mapping[str, Any], at: str) -> str:
    """The texts of values that are listed, as far as they are of the right type."""
    only(rules, {"enum", "const", "type"}, at)
    values = need(rules.get("enum", [rules.get("const")]), list, f"enum at {at}")
    if "const" in rules and "enum" in rules:
        values = [value for value in values if json.dumps(value) == json.dumps(rules["const"])]
    if "type" in rules:
        values = [value for value in values if any(is_of(value, k) for k in kinds(rules, at))]
    texts = (re.escape(json.dumps(value, ensure_ascii=False)) for value in values)
    return one_of(texts) if values else NOTHING


def kinds(rules: Mapping[str, Any], at: str) -> list[str]:
    """Types of a value: those that are named, or the first that has the keywords."""
    named = rules.get("type")
    if named is None:
        rest = set(rules) - {"enum", "const"}
        named = next((kind for kind, words in KEYWORDS.items() if words & rest), None)
        if named is None:
            raise Unsupported(f"{min(rest)} at {at} is not supported")
    types = [named] if isinstance(named, str) else need(named, list, f"type at {at}")
    for kind in types:
        if not isinstance(kind, str) or kind not in KEYWORDS:
            raise ValueError(f"{kind!r} at {at} is no type")
    only(rules, {"type", "enum", "const"}.union(*(KEYWORDS[kind] for kind in types)), at)
    return types


def only(rules: Mapping[str, Any], known: set[str], at: str) -> None:
    """Raise `Unsupported` for keywords that are not followed here."""
    if other := sorted(set(rules) - known):
        raise Unsupported(f"{other[0]} at {at} is not supported" + beside(known, rules))


def beside(known: set[str], rules: Mapping[str, Any]) -> str:
    """What a keyword stands beside, where that is what is not supported."""
    found = sorted(known & {"$ref", "anyOf", "oneOf", "allOf", "enum", "const"} & set(rules))
    return f" beside {found[0]}" if found else ""


def apart(schemas: Sequence[Any]) -> bool:
    """Whether no value can fulfil two of some schemas, as seen from their types."""
    types = [kind for schema in schemas for kind in named(schema)]
    return len(schemas) < 2 or (None not in types and len(set(types)) == len(types))


def named(schema: Any) -> set[str | None]:
    """The types of a schema, whole numbers as numbers; with None where it does not say."""
    found = schema.get("type") if isinstance(schema, Mapping) else None
    types = [
        kind if isinstance(kind, str) else None
        for kind in (found if isinstance(found, list) else [found])
    ]
    return {"number" if kind == "integer" else kind for kind in types}


def is_of(value: Any, kind: str) -> bool:
    """Whether a value is of a type."""
    match value:
        case None:
            return kind == "null"
        case bool():
            return kind == "boolean"
        case int() | float():
            return kind == "number" or (kind == "integer" and value == int(value))
        case str():
            return kind == "string"
    return kind == ("array" if isinstance(value, list) else "object")


def need(value: Any, kind: Any, what: str) -> Any:
    """A value of a type; `ValueError` that says what should be one."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{what} must not be {value!r}")
    return value


def resolved(root: Any, reference: Any, at: str) -> Any:
    """The part of a schema that a reference names."""
    if not (isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))):
        raise Unsupported(f"$ref to {reference!r} at {at} is not supported: only to parts (#/…)")
    found = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(name)] if isinstance(found, list) else found[name]
        except (KeyError, IndexError, ValueError, TypeError):
            raise ValueError(f"$ref at {at} names {reference!r}, which is not there") from None
    return found
