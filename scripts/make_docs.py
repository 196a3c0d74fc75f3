"""Write the pages that are generated from data: docs/kinds.md, the tables of docs/configuration.md.

python scripts/make_docs.py           # write
python scripts/make_docs.py --check   # exit 1 if one is stale, and say which
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "supervisor"), str(ROOT / "scripts")]

import config_reference  # noqa: E402 - after the path is set

from stallwatch.evidence import kindpage  # noqa: E402 - after the path is set


def pages() -> dict[Path, str]:
    """Every generated page by its path."""
    configuration = ROOT / "docs" / "configuration.md"
    return {
        ROOT / "docs" / "kinds.md": kindpage.markdown(),
        configuration: config_reference.fill(configuration.read_text()),
    }


def main() -> int:
    try:
        made = pages()
    except LookupError as error:  # a key without a description, a table without a place
        sys.stderr.write(f"{error.args[0]}\n")
        return 1
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            sys.stderr.write(f"{path.relative_to(ROOT)} is stale: run scripts/make_docs.py\n")
        return int(bool(stale))
    for path in stale:
        path.write_text(made[path])
        sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
