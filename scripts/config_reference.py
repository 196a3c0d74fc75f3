"""The tables of docs/configuration.md, from the models of the configuration itself.

The page is written by hand; between `<!-- generated: NAME -->` and `<!-- end -->` stands what this
module makes of the table NAME. A table without a place in the page, and a key without a description,
is an error.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from stallwatch.config.base import reloadable
from stallwatch.config.duration import parse_duration, parse_limit, show_duration
from stallwatch.config.load import TABLES
from stallwatch.config.model import Config
from stallwatch.watch import limits
from stallwatch.watch.policy import DEFAULT_PHASE_LIMITS, Policy

LIMITS = "engines.*.limits"
_PLACE = re.compile(r"(<!-- generated: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_WORDS: Mapping[Any, str] = {bool: "boolean", int: "integer", str: "string", Path: "path"}
_DURATIONS = {parse_duration: "duration", parse_limit: "duration above 0"}


def fill(page: str) -> str:
    """The page with every generated part made anew. LookupError: it has no place for a table."""
    made = dict(tables())
    placed = [match[2] for match in _PLACE.finditer(page)]
    if sorted(placed) != sorted(made):
        odd = ", ".join(sorted(set(made) ^ set(placed))) or "one of them twice"
        raise LookupError(f"docs/configuration.md and the tables differ: {odd}")
    return _PLACE.sub(lambda match: f"{match[1]}{made[match[2]]}{match[4]}", page)


def tables() -> Iterator[tuple[str, str]]:
    """Every table by its name, '*' for an engine's."""
    top = {name.partition(".")[0] for name in TABLES}
    unknown = set(Config.model_fields) - top - {"source"}
    if unknown:
        raise LookupError(f"no table is generated for {', '.join(sorted(unknown))}")
    for name, model in TABLES.items():
        yield name, _table(name, model)
    yield LIMITS, _limits()


def _table(name: str, model: type[BaseModel]) -> str:
    changes = _reload(name)
    mixed = changes not in (frozenset(), frozenset(model.model_fields))
    rows = [("key", "type", "default", *(["SIGHUP"] if mixed else []), "meaning")]
    for key, field in model.model_fields.items():
        if not field.description:
            raise LookupError(f"[{name}] {key} has no description")
        took = (["yes" if key in changes else "no"]) if mixed else []
        rows.append((f"`{key}`", _type(field), _default(field), *took, field.description))
    said = "" if mixed else f"{_said(taken=bool(changes))}\n\n"
    return said + _markdown(rows)


def _reload(name: str) -> frozenset[str]:
    """The keys of a table that SIGHUP takes; all of them where its own key in the engine is one."""
    model, above = TABLES[name], name.rpartition(".")
    if above[0] in TABLES and above[2] in reloadable(TABLES[above[0]]):
        return frozenset(model.model_fields)
    return reloadable(model)


def _said(*, taken: bool) -> str:
    return "`SIGHUP` takes changes." if taken else "A change takes a restart of the daemon."


def _limits() -> str:
    policy = Policy()
    ns = {key: getattr(policy, field) for key, field in limits.FIELDS.items()}
    ns |= DEFAULT_PHASE_LIMITS
    rows = [("key", "type", "default", "meaning")]
    kind = f"{_DURATIONS[parse_limit]}, to {limits.LONGEST_S / 86400:.0f}d"
    for key, value in ns.items():
        rows.append((f"`{key}`", kind, f'`"{show_duration(value / 1e9)}"`', limits.MEANINGS[key]))
    rows.append(("any other", kind, "learned, or `default`", "Phases of that name"))
    return f"{_said(taken='limits' in reloadable(TABLES['engines.*']))}\n\n{_markdown(rows)}"


def _markdown(rows: list[tuple[str, ...]]) -> str:
    head, *body = [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in r)} |" for r in rows
    ]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body]) + "\n"


def _type(field: FieldInfo) -> str:
    """The type as the file has it, with its bounds."""
    return _typed(field.annotation, tuple(field.metadata))


def _typed(kind: Any, metadata: tuple[Any, ...]) -> str:
    if get_origin(kind) is Annotated:
        inner, *more = get_args(kind)
        return _typed(inner, (*more, *metadata))
    for each in metadata:
        if isinstance(each, BeforeValidator) and each.func in _DURATIONS:
            return _DURATIONS[each.func]
    if get_origin(kind) in (Union, types.UnionType):  # all of ours are `X | None`
        inner = next(each for each in get_args(kind) if each is not type(None))
        return _typed(inner, metadata)
    if get_origin(kind) is Literal:
        return " or ".join(f'`"{each}"`' for each in get_args(kind))
    if get_origin(kind) is tuple:
        return f"list of {_plural(_typed(get_args(kind)[0], ()))}"
    if get_origin(kind) is dict:
        return f"table of {_plural(_typed(get_args(kind)[1], ()))}"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "table"
    return _WORDS[kind] + _bounds(metadata)


def _plural(word: str) -> str:
    first, space, rest = word.partition(" ")
    return word if word.startswith("`") else f"{first}s{space}{rest}"


def _bounds(metadata: tuple[Any, ...]) -> str:
    """' from 1 to 65535'; '' without bounds. Field(ge=...) wraps its bounds in a FieldInfo."""
    flat = [
        x for each in metadata for x in (each.metadata if isinstance(each, FieldInfo) else [each])
    ]
    low = [each.ge for each in flat if isinstance(each, annotated_types.Ge)]
    high = [each.le for each in flat if isinstance(each, annotated_types.Le)]
    return f" from {low[0]} to {high[0]}" if low and high else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    assert value is not PydanticUndefined
    if isinstance(value, BaseModel):
        return "its defaults"
    if value is None or value in ("", (), {}):
        return "none"
    return f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):  # every number with a fraction is a duration
        return f'"{show_duration(value) if value else "0s"}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value) if isinstance(value, int) else f'"{value}"'
