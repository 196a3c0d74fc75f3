"""Every link of README.md and docs/ leads to a file, and to a heading where it names one."""

from __future__ import annotations

import re

import pytest

from docs_blocks import pages
from docs_reader import ROOT

PAGES = pages(ROOT)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """The headings of a page as a browser's address has them."""
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", head.lower()) for head in heads)
    return {head.replace(" ", "-") for head in plain}


@pytest.mark.parametrize("name", PAGES)
def test_no_link_leads_nowhere(name: str) -> None:
    """Relative links are paths of this repository; what stands behind '#' is a heading there."""
    wrong = []
    for link in _LINK.findall(PAGES[name]):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            wrong.append(link)
    assert not wrong


def test_every_page_is_in_the_index() -> None:
    """docs/README.md leads to every other page of docs/."""
    linked = {link.partition("#")[0] for link in _LINK.findall(PAGES["docs/README.md"])}
    found = {name.removeprefix("docs/") for name in PAGES if name.startswith("docs/")}
    assert found - linked == {"README.md"}
