"""The description in /openapi.json and what the server does are the same thing, for every number and every method.

What schemathesis would find (docs/security.md says how to run it), held without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from decimal import Decimal
from typing import Any

import pytest

from control_helpers import STALL, TOKEN, Running, serving
from stallwatch.control.gateway import GatewayReport
from stallwatch.testing.service import FakeService, engine_view, stall_report

pytestmark = [pytest.mark.http, pytest.mark.slow]

METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"})
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
TYPES: Mapping[str, Any] = {
    "string": str,
    "integer": int,
    "number": int | float,
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
Make = Callable[[Any], Any]
Leaf = tuple[str, Mapping[str, Any], Make]  # where it stands, its schema, a document that holds it


class Desk:
    """Takes every report."""

    def heard(self, report: GatewayReport) -> Collection[str]:
        return ()

    def view(self) -> Mapping[str, Any]:
        return {}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    service = FakeService([engine_view()])
    service.reports[STALL] = stall_report(STALL)
    with serving(tmp_path_factory.mktemp("c"), service, desk=Desk()) as found:
        yield found


@pytest.fixture(scope="module")
def described(running: Running):
    text = running.ask("/openapi.json").text
    return json.loads(text, parse_float=Decimal, parse_int=Decimal)


def operations(described) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for path, found in described["paths"].items():
        for method, operation in found.items():
            yield method.upper(), path, operation


def real(path: str) -> str:
    """The path with names in place of its variables."""
    return path.format(name="chat", stall_id=STALL)


class Schemas:
    """Documents that a schema allows, and the numbers in them."""

    def __init__(self, described: Mapping[str, Any]) -> None:
        self._named = described["components"]["schemas"]

    def _of(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        if "$ref" in schema:
            return self._named[schema["$ref"].rpartition("/")[2]]
        return schema["anyOf"][0] if "anyOf" in schema else schema

    def least(self, schema: Mapping[str, Any]) -> Any:
        """The smallest document."""
        found = self._of(schema)
        if found["type"] in ("integer", "number"):
            return int(found["exclusiveMinimum"]) + 1 if "exclusiveMinimum" in found else 0
        if found["type"] == "object":
            wanted = found.get("required", ())
            return {name: self.least(found["properties"][name]) for name in wanted}
        return {"string": "x", "array": [], "boolean": False}[found["type"]]

    def misfits(self, schema: Mapping[str, Any], value: Any, where: str) -> Iterator[str]:
        """Where a document is not of the types that the schema names."""
        if "anyOf" in schema:
            if all(list(self.misfits(each, value, where)) for each in schema["anyOf"]):
                yield where
            return
        found = self._of(schema)
        if not isinstance(value, TYPES[found["type"]]) or value not in found.get("enum", (value,)):
            yield where
        elif found["type"] == "array":
            for each in value:
                yield from self.misfits(found["items"], each, f"{where}[]")
        elif found["type"] == "object":
            known = found.get("properties", {})
            yield from (
                f"{where}.{name} is missing" for name in set(found.get("required", ())) - set(value)
            )
            for name, each in value.items():
                below = known[name] if name in known else found["additionalProperties"]
                yield from self.misfits(below, each, f"{where}.{name}")

    def numbers(self, schema: Mapping[str, Any], where: str) -> Iterator[Leaf]:
        """Every number below `schema`."""
        found = self._of(schema)
        if found["type"] in ("integer", "number"):
            yield where, found, lambda value: value
        elif found["type"] == "array":
            for below, leaf, make in self.numbers(found["items"], f"{where}[]"):
                yield below, leaf, lambda value, make=make: [make(value)]
        elif found["type"] == "object":
            yield from self._fields(found, where)

    def _fields(self, found: Mapping[str, Any], where: str) -> Iterator[Leaf]:
        base = self.least(found)
        fields = found.get("properties") or {"x": found["additionalProperties"]}
        for name, each in fields.items():
            for below, leaf, make in self.numbers(each, f"{where}.{name}"):
                yield below, leaf, lambda value, n=name, make=make: {**base, n: make(value)}


def in_bodies(described) -> Iterator[tuple[str, str, Leaf]]:
    schemas = Schemas(described)
    for method, path, operation in operations(described):
        if body := operation.get("requestBody"):
            schema = body["content"]["application/json"]["schema"]
            for leaf in schemas.numbers(schema, path):
                yield method, real(path), leaf


def in_queries(described) -> Iterator[tuple[str, str, Leaf]]:
    """The documents are queries. Flags are false: a stream has no end."""
    schemas = Schemas(described)
    for method, path, operation in operations(described):
        given = [p for p in operation.get("parameters", ()) if p["in"] == "query"]
        flags = "".join(
            f"&{p['name']}=false" for p in given if p["schema"].get("type") == "boolean"
        )
        for p in given:
            for where, leaf, _ in schemas.numbers(p["schema"], f"{path}?{p['name']}"):
                query = f"{p['name']}={{}}{flags}"
                yield method, real(path), (where, leaf, query.format)


def test_there_are_numbers_to_look_at(described):
    """The walk finds what it is for: numbers in the bodies of three operations, and in queries."""
    assert {path for _, path, _ in in_bodies(described)} == {
        "/v1/engines/chat:pause",
        "/v1/engines/chat:chaos",
        "/v1/gateway",
    }
    assert len(list(in_bodies(described))) >= 15
    assert len(list(in_queries(described))) >= 4


def test_every_bound_is_exact(described):
    """A bound that a double cannot carry means another number to whoever reads it."""
    for _, _, (where, leaf, _) in (*in_bodies(described), *in_queries(described)):
        assert {"maximum", "exclusiveMaximum"} & set(leaf), where
        for name in set(BOUNDS) & set(leaf):
            assert Decimal(float(leaf[name])) == leaf[name], (where, name)


def test_no_number_in_a_body_is_a_truth_or_a_text(running: Running, described):
    """true is not 1 and "1" is not 1, in any field; the same document with a number is taken."""
    for method, path, (where, leaf, make) in in_bodies(described):
        for value in (True, False, "1"):
            found = running.ask(path, method=method, body=make(value))
            assert found.status == 422, (where, value)
        most = int(leaf["maximum"])
        for value, status in ((most, 200), (most + 1, 422)):
            assert running.ask(path, method=method, body=make(value)).status == status, where


def test_whole_numbers_may_have_a_point(running: Running, described):
    """JSON knows one sort of number: 1.0 is an integer, 1.5 is none."""
    for method, path, (where, leaf, make) in in_bodies(described):
        whole = leaf["type"] == "integer"
        assert running.ask(path, method=method, body=make(1.0)).status == 200, where
        found = running.ask(path, method=method, body=make(1.5)).status
        assert found == (422 if whole else 200), where


def test_a_number_in_a_query_is_digits(running: Running, described):
    """Nothing but digits within the bounds is a number there."""
    for method, path, (where, leaf, query) in in_queries(described):
        most = int(leaf["maximum"])
        taken = {str(most): 200, str(most + 1): 422}
        refused = dict.fromkeys(("true", "1.0", "1_0", "%201", "%2B1", "-1", "", "%D9%A3"), 422)
        for value, status in (taken | refused).items():
            found = running.ask(f"{path}?{query(value)}", method=method)
            assert found.status == status, (where, value)


def test_an_answer_is_what_is_described(running: Running, described):
    """Where an answer's model is named, the answer has its fields and no others, of those types."""
    schemas, seen = Schemas(described), 0
    for method, path, operation in operations(described):
        content = operation["responses"]["200"].get("content", {})
        schema = content.get("application/json", {}).get("schema")
        if not schema:
            continue
        body = None
        if given := operation.get("requestBody"):
            body = schemas.least(given["content"]["application/json"]["schema"])
        found = running.ask(real(path), method=method, body=body)
        assert found.status == 200, path
        assert not list(schemas.misfits(schema, found.json, path))
        seen += 1
    assert seen >= 4


def test_a_method_that_is_not_described_is_refused(running: Running, described):
    """With the token every other method of every path is a 405 that names those it has."""
    for path, found in described["paths"].items():
        allowed = {method.upper() for method in found}
        if "GET" in allowed and path != "/v1/events":
            allowed.add("HEAD")
        for method in METHODS - allowed:
            answer = running.ask(real(path), via="tcp", method=method, token=TOKEN)
            assert (answer.status, answer.json["code"]) == (405, "method-not-allowed"), path
            assert answer.headers["allow"] == ", ".join(sorted(allowed)), (path, method)


def test_without_the_token_a_refusal_comes_first(running: Running):
    """Who may change nothing is not told which paths would take a POST: on purpose 401, not 405."""
    answer = running.ask("/livez", via="tcp", method="POST")

    assert (answer.status, answer.json["code"]) == (401, "token-needed")
