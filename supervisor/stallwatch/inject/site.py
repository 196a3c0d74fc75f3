"""The folder that goes on an engine's PYTHONPATH: the heartbeat library, the vLLM plugin, its dist-info.

Only files that need nothing but the standard library of Python 3.11 are copied, so the folder works
in any engine's environment and shadows nothing there. The engine package is found on the import path
but never imported: the supervisor knows no engine.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from stallwatch import __version__
from stallwatch.errors import StallwatchError

PLUGIN = "stallwatch"  # its name in VLLM_PLUGINS
ENTRY_POINTS = "[vllm.general_plugins]\nstallwatch = stallwatch_engine.vllm_plugin:register\n"
ENGINE_FILES = ("__init__.py", "phasemap.py", "hcu.py")
ENGINE_FOLDERS = ("vllm_plugin",)


class InjectionImpossible(StallwatchError):
    """The plugin's files cannot be found or copied."""


def prepare(folder: Path, *, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Make `folder/site` and return the environment changes that an engine needs to load it.

    `environ` is the engine's environment before these changes (default: ours). PYTHONPATH is
    prepended to, and VLLM_PLUGINS extended if it is set: a user's list would drop ours silently.
    """
    known = os.environ if environ is None else environ
    site = folder / "site"
    try:
        _fill(site)
    except OSError as problem:
        raise InjectionImpossible(
            f"cannot write the plugin folder {site}: {problem.strerror or problem}",
            hint="check the space and the permissions of the run folder",
        ) from problem
    changes = {"PYTHONPATH": _prepended(str(site), known.get("PYTHONPATH", ""))}
    if "VLLM_PLUGINS" in known:
        changes["VLLM_PLUGINS"] = _extended(known["VLLM_PLUGINS"])
    return changes


def plugins_only(environ: Mapping[str, str]) -> dict[str, str]:
    """The changes when the plugin is installed in the engine's own environment."""
    if "VLLM_PLUGINS" not in environ:
        return {}
    return {"VLLM_PLUGINS": _extended(environ["VLLM_PLUGINS"])}


def _prepended(first: str, rest: str) -> str:
    return os.pathsep.join([first, *(part for part in rest.split(os.pathsep) if part)])


def _extended(plugins: str) -> str:
    names = [name for name in plugins.split(",") if name.strip()]
    return ",".join(names if PLUGIN in names else [*names, PLUGIN])


def _fill(site: Path) -> None:
    heartbeat, engine = _package("stallwatch.heartbeat"), _package("stallwatch_engine")
    ours = site / "stallwatch"
    ours.mkdir(parents=True, exist_ok=True, mode=0o700)
    (ours / "__init__.py").write_text(
        f'"""The heartbeat library of Stallwatch, without the supervisor."""\n\n'
        f'__version__ = "{__version__}"\n',
        encoding="utf-8",
    )
    _copy_sources(heartbeat, ours / "heartbeat")
    theirs = site / "stallwatch_engine"
    theirs.mkdir(exist_ok=True, mode=0o700)
    for name in ENGINE_FILES:
        shutil.copyfile(engine / name, theirs / name)
    for name in ENGINE_FOLDERS:
        _copy_sources(engine / name, theirs / name)
    _dist_info(site / f"stallwatch_inject-{__version__}.dist-info")


def _copy_sources(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True, mode=0o700)
    for path in sorted(source.glob("*.py")):
        shutil.copyfile(path, target / path.name)


def _dist_info(folder: Path) -> None:
    # Another name than the distribution's: an installed stallwatch of another version keeps its own.
    folder.mkdir(exist_ok=True, mode=0o700)
    metadata = f"Metadata-Version: 2.1\nName: stallwatch-inject\nVersion: {__version__}\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    (folder / "RECORD").write_text("", encoding="utf-8")


def _package(name: str) -> Path:
    """The folder of a package, found by its spec; only parents that are ours get imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise InjectionImpossible(
            f"the package {name} is not installed beside the supervisor",
            hint="reinstall stallwatch: its wheel holds both packages",
        )
    return Path(spec.submodule_search_locations[0])
