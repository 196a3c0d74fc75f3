"""Markup built from elements: text is cleaned and escaped by whoever puts it in, not by who remembers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from stallwatch.evidence.clean import clean

TEXT_CAP = 600
_VOID = frozenset({"meta", "link", "line", "path", "rect", "marker"})


class Html(str):
    """Markup that `el` made. The only text that is not escaped again."""

    __slots__ = ()


def el(tag: str, *children: object, **attributes: object) -> Html:
    """One element. A child is Html, or text that is cleaned (control characters, bidirectional
    overrides) and escaped; None and False are left out.

    Attribute names: a trailing underscore goes (class_), the others become hyphens (data_label).
    An attribute that is None or False is left out, True stands alone.
    """
    found = "".join(_attribute(name, value) for name, value in attributes.items())
    body = "".join(_child(each) for each in children)
    if not body and tag in _VOID:
        return Html(f"<{tag}{found}>" if tag in ("meta", "link") else f"<{tag}{found}/>")
    return Html(f"<{tag}{found}>{body}</{tag}>")


def join(parts: Iterable[Html]) -> Html:
    """Markup after markup."""
    return Html("".join(parts))


def link(href: str, text: object, **attributes: object) -> Html:
    """A link to a path of ours."""
    return el("a", text, href=href, **attributes)


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], *, id_: str = "", label: str = ""
) -> Html:
    """A table whose cells know their heading, so that a narrow screen can stack them."""
    top = el("tr", *(el("th", each, scope="col") for each in head))
    body = [
        el("tr", *(el("td", cell, data_label=name) for name, cell in zip(head, row, strict=True)))
        for row in rows
    ]
    attributes = {"id": id_ or None, "aria_label": label or None}
    return el("table", el("thead", top), el("tbody", *body), **attributes)


def _child(value: object) -> str:
    if value is None or value is False:
        return ""
    return value if isinstance(value, Html) else escape(clean(str(value), TEXT_CAP))


def _attribute(name: str, value: object) -> str:
    if value is None or value is False:
        return ""
    key = name.rstrip("_").replace("_", "-")
    # "-" of aria-label, but not of SVG's camel case, which arrives as it is
    return f" {key}" if value is True else f' {key}="{escape(clean(str(value), TEXT_CAP))}"'
