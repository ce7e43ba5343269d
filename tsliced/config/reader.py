"""From TOML files to checked values that know where they come from.

Several files are merged: a later one wins, tables are merged key by key, arrays are replaced.
Nothing stops at the first mistake: whoever starts a daemon on a hundred hosts wants to see all.
"""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import tomllib

#: The way to a value through the tables, such as ``("daemon", "socket")``.
Key = tuple[str, ...]
Settings = TypeVar("Settings")

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?(B|KiB|MiB|GiB|TiB)")
_UNITS: Final = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}


class Origin(NamedTuple):
    """Where a value was set."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class Problem(NamedTuple):
    """One mistake, fit to be shown."""

    origin: Origin
    #: Dotted; empty where it is the file that is wrong.
    key: str
    text: str

    def __str__(self) -> str:
        key = f"{self.key}: " if self.key else ""
        return f"{self.origin}: {key}{self.text}"


class ConfigError(Exception):
    """The configuration cannot be used. `problems` has every mistake that was found."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        title = "1 problem" if count == 1 else f"{count} problems"
        return "\n".join([f"{title} in the configuration:", *(f"  {one}" for one in self.problems)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a value may be, beyond its type; numbers are positive unless `least` says otherwise."""

    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    #: A text, or each of an array, must match it whole; `meaning` says in words what it asks for.
    pattern: str = ""
    meaning: str = ""
    #: An array of one text may be written as that text.
    may_be_one: bool = False


def ruled(default: Any, **rule: Any) -> Any:
    """Return a dataclass field with a default and a `Rule`."""
    return field(default=default, metadata={"rule": Rule(**rule)})


class Source:
    """One file, or what was said on the command line."""

    def __init__(self, name: str, data: Mapping[str, Any], text: str = "") -> None:
        self.name = name
        self.data = data
        self._lines = find_lines(text)

    def origin(self, path: Key) -> Origin:
        """Return the place of a key, or of the nearest table around it that has a line."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._lines:
                return Origin(self.name, self._lines[path[:length]])
        return Origin(self.name)


def read_source(path: Path) -> Source | Problem:
    """Read a TOML file, or say what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
        return Source(str(path), tomllib.loads(text), text)
    except tomllib.TOMLDecodeError as exc:
        match = re.search(r" \(at line (\d+), column \d+\)", str(exc))
        line = int(match.group(1)) if match else None
        return Problem(Origin(str(path), line), "", f"this is not TOML: {exc}")
    except UnicodeDecodeError as exc:
        return Problem(Origin(str(path)), "", f"this is not UTF-8 text: {exc}")
    except OSError as exc:
        return Problem(Origin(str(path)), "", f"cannot be read: {exc.strerror}")


def nest(values: Mapping[str, object]) -> dict[str, Any]:
    """Return nested tables for dotted keys."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *tables, last = key.split(".")
        table = tree
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value
    return tree


_STRING: Final = re.compile(r'"(?:\\.|[^"\\])*"|\'[^\']*\'')
_NAME: Final = r"(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')"
_HEADER: Final = re.compile(rf"\[\[?\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*\]")
_KEY: Final = re.compile(rf"({_NAME}(?:\s*\.\s*{_NAME})*)\s*=")


def find_lines(text: str) -> dict[Key, int]:
    """Return the line of each table and key of a TOML document.

    tomllib keeps no positions. This is for messages only, so it may miss an odd spelling, but it
    is not led astray by what looks like a key inside of a longer value.
    """
    lines: dict[Key, int] = {}
    table: Key = ()
    depth, quote = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if quote:
            quote = "" if quote in line else quote
            continue
        if not depth:
            if match := _HEADER.match(line.strip()):
                table = _split(match.group(1))
                lines.setdefault(table, number)
                continue
            if match := _KEY.match(line.strip()):
                lines.setdefault(table + _split(match.group(1)), number)
        for mark in ('"""', "'''"):
            if line.count(mark) % 2:
                quote = mark
        bare = _STRING.sub("", line).partition("#")[0]
        depth = max(0, depth + bare.count("[") - bare.count("]"))
    return lines


def _split(dotted: str) -> Key:
    return tuple(name.strip("\"' \t") for name in re.findall(_NAME, dotted))


class Reader:
    """Merges sources and reads sections out of them, collecting what is wrong."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.origins: dict[Key, Origin] = {}
        self.problems: list[Problem] = []
        #: Keys that nobody knows: a mistake only if the configuration says so.
        self.unknown: list[Problem] = []

    def add(self, source: Source) -> None:
        """Lay a source over those before."""
        self._merge(self.tree, source.data, source, ())

    def section(
        self,
        path: Key,
        kind: type[Settings],
        *,
        rules: Mapping[str, Rule] | None = None,
        fixed: Mapping[str, Any] | None = None,
    ) -> Settings:
        """Return a table as a dataclass, with defaults where a value is missing or wrong.

        `rules` stand in for fields that carry none. `fixed` fields are not read from the table.
        """
        table = self.table(path)
        hints = typing.get_type_hints(kind)
        values: dict[str, Any] = dict(fixed or {})
        for item in fields(typing.cast(Any, kind)):
            if item.name in values or item.name not in table:
                continue
            rule = item.metadata.get("rule") or (rules or {}).get(item.name) or Rule()
            is_size = "_bytes" in item.name
            try:
                values[item.name] = convert(
                    table[item.name], hints[item.name], rule, is_size=is_size
                )
            except ValueError as exc:
                self.fail((*path, item.name), str(exc))
        return kind(**values)

    def table(self, path: Key) -> dict[str, Any]:
        """Return the table at a path; empty if there is none."""
        value: Any = self.tree
        for length, name in enumerate(path, 1):
            value = value.get(name, {})
            if not isinstance(value, dict):
                self.fail(path[:length], f"this must be a table: [{'.'.join(path[:length])}]")
                return {}
        return typing.cast(dict[str, Any], value)

    def has_table(self, path: Key) -> bool:
        """Return whether there is a table at a path."""
        value: Any = self.tree
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return isinstance(value, dict)

    def expect(self, path: Key, known: Iterable[str]) -> None:
        """Note each key of a table that is not among those known."""
        names = list(known)
        for name in self.table(path):
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
                place = (*path, name)
                self.unknown.append(
                    Problem(self.origin(place), ".".join(place), f"nobody knows this key; {hint}")
                )

    def fail(self, path: Key, text: str) -> None:
        """Note a mistake at a key."""
        self.problems.append(Problem(self.origin(path), ".".join(path), text))

    def origin(self, path: Key) -> Origin:
        """Return where a key, or a table around it, was set."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return Origin("default")

    def _merge(
        self, into: dict[str, Any], data: Mapping[str, Any], source: Source, path: Key
    ) -> None:
        for name, value in data.items():
            here = (*path, name)
            if isinstance(value, Mapping):
                if not isinstance(into.get(name), dict):
                    into[name] = {}
                self.origins[here] = source.origin(here)
                self._merge(into[name], value, source, here)
            else:
                into[name] = value
                self.origins[here] = source.origin(here)


def convert(value: object, hint: Any, rule: Rule, *, is_size: bool = False) -> Any:
    """Return a TOML value as the type of a field, or raise ValueError saying what is allowed."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        # TOML has no null: None is what a key that is left out means.
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if hint is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{value!r} is not allowed: it must be true or false")
        return value
    if typing.get_origin(hint) is tuple:
        return tuple(_texts([value] if rule.may_be_one and isinstance(value, str) else value, rule))
    if hint is str:
        return _text(value, rule)
    if is_size and isinstance(value, str):
        value = _size(value)
    return _number(value, hint, rule)


def _texts(value: object, rule: Rule) -> Iterator[str]:
    if not isinstance(value, list):
        raise ValueError(f'{value!r} is not allowed: it must be an array such as ["a", "b"]')
    for item in value:
        if isinstance(item, bool) or not isinstance(item, str | int):
            raise ValueError(f"{item!r} is not allowed: each item must be a text or a whole number")
        yield _text(str(item), rule)


def _text(value: object, rule: Rule) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not allowed: it must be a text in quotes")
    if rule.choices and value not in rule.choices:
        raise ValueError(f"{value!r} is not allowed: use one of {', '.join(rule.choices)}")
    if rule.pattern and not re.fullmatch(rule.pattern, value):
        raise ValueError(f"{value!r} is not allowed: it must be {rule.meaning}")
    return value


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f'{text!r} is not allowed: use bytes, or a size such as "512 MiB"')
    return int(float(match.group(1)) * (1 << _UNITS[match.group(2)]))


def _number(value: object, hint: type, rule: Rule) -> int | float:
    wanted = "a whole number" if hint is int else "a number"
    if isinstance(value, bool) or not isinstance(value, int if hint is int else int | float):
        raise ValueError(f"{value!r} is not allowed: it must be {wanted}")
    if not math.isfinite(value):
        raise ValueError(f"{value!r} is not allowed: it must be finite")
    if rule.least is None and value <= 0:
        raise ValueError(f"{value!r} is not allowed: it must be more than 0")
    if rule.least is not None and value < rule.least:
        raise ValueError(f"{value!r} is not allowed: it must be at least {rule.least:g}")
    if rule.most is not None and value > rule.most:
        raise ValueError(f"{value!r} is not allowed: it must be at most {rule.most:g}")
    return int(value) if hint is int else float(value)
