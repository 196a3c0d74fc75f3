"""The folder that brings our plugin into an engine of another environment."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from stallwatch.inject import InjectionImpossible, needed, prepare


@pytest.fixture
def site(tmp_path):
    """A prepared site folder."""
    changes = prepare(tmp_path, environ={})
    assert changes == {"PYTHONPATH": str(tmp_path / "site")}
    return tmp_path / "site"


def run_isolated(site: Path, code: str, **environment: str) -> str:
    """Run code in a bare interpreter that sees the site folder and no installed package of ours."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_the_entry_point_is_found_and_register_is_inert_without_a_board(site):
    """vLLM discovers the plugin by the folder's metadata, and loading it outside a board does nothing."""
    code = (
        "import importlib.metadata as m, sys\n"
        "found = m.entry_points(group='vllm.general_plugins')\n"
        "before = list(sys.meta_path)\n"
        "[e.load()() for e in found]\n"
        "print([e.name for e in found], sys.meta_path == before, 'stallwatch.heartbeat' in sys.modules)"
    )
    assert run_isolated(site, code) == "['stallwatch'] True False"


@pytest.mark.slow
def test_the_plugin_attaches_under_a_board_with_nothing_but_the_copied_files(site):
    """Every module that a vLLM process needs from us is in the folder: -S hides all site-packages."""
    code = (
        "import multiprocessing, sys\n"
        "multiprocessing.current_process().name = 'EngineCore'\n"
        "from stallwatch_engine import vllm_plugin as p\n"
        "p.register()\n"
        "p.register()\n"
        "i = p._installer\n"
        "print(len(sys.meta_path) and type(sys.meta_path[0]).__name__, len(i.waiting) > 5, i.missing)"
    )
    out = run_isolated(site, code, STALLWATCH_BOARD="/nonexistent")
    assert out == "_ImportHook True {}"


def test_the_site_holds_only_the_leaf_and_the_plugin(site):
    """Nothing of the supervisor travels, and nothing imports outside the standard library and itself."""
    assert sorted(path.name for path in site.iterdir()) == [
        "stallwatch",
        "stallwatch_engine",
        *(path.name for path in site.glob("*.dist-info")),
    ]
    assert {path.name for path in (site / "stallwatch").iterdir()} == {"__init__.py", "heartbeat"}
    known = set(sys.stdlib_module_names) | {"stallwatch", "stallwatch_engine"}
    for path in site.rglob("*.py"):
        for node in ast.parse(path.read_text(), feature_version=(3, 11)).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= known, path


def test_preparing_does_not_import_the_engine_package(tmp_path):
    """The supervisor finds the plugin's files and stays ignorant of the engine."""
    code = (
        "import sys, pathlib\n"
        "from stallwatch.inject import prepare\n"
        f"prepare(pathlib.Path({str(tmp_path)!r}))\n"
        "print(any(m.startswith('stallwatch_engine') for m in sys.modules), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "False False"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, None),
        ({"VLLM_PLUGINS": "lora"}, "lora,stallwatch"),
        ({"VLLM_PLUGINS": "stallwatch,lora"}, "stallwatch,lora"),
        ({"VLLM_PLUGINS": ""}, "stallwatch"),
    ],
)
def test_a_users_plugin_list_is_extended_and_never_invented(tmp_path, before, after):
    """A list that names other plugins would drop ours; no list loads all of them."""
    assert prepare(tmp_path, environ=before).get("VLLM_PLUGINS") == after


def test_a_users_python_path_keeps_its_place_behind_ours(tmp_path):
    """The user's folders still work."""
    changes = prepare(tmp_path, environ={"PYTHONPATH": "/a::/b"})
    assert changes["PYTHONPATH"] == f"{tmp_path / 'site'}:/a:/b"


def test_preparing_again_in_the_same_folder_works(tmp_path):
    """A restart reuses the run folder."""
    assert prepare(tmp_path, environ={}) == prepare(tmp_path, environ={})


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path):
    """The operator learns which folder and what to look at."""
    (tmp_path / "site").write_text("in the way")
    with pytest.raises(InjectionImpossible, match="site") as caught:
        prepare(tmp_path, environ={})
    assert caught.value.hint


def script(tmp_path: Path, first_line: str) -> str:
    path = tmp_path / "vllm"
    path.write_text(f"{first_line}\n")
    path.chmod(0o755)
    return str(path)


def test_our_own_interpreter_needs_no_injection(tmp_path):
    """The plugin's entry point is installed beside the supervisor."""
    assert not needed([sys.executable, "-m", "vllm"])
    assert not needed([script(tmp_path, f"#!{sys.executable} -s"), "serve"])


@pytest.mark.parametrize(
    "first_line",
    [
        "#!/opt/other/bin/python3",
        "#!/usr/bin/env -S python3 -X dev",
        "#!/bin/sh",
        "#!",
        "no script at all",
    ],
)
def test_another_or_an_unknown_interpreter_needs_it(tmp_path, first_line):
    """When unsure, inject: an engine without lanes is worse than a few copied files."""
    assert needed([script(tmp_path, first_line), "serve"])


def test_a_virtual_environment_of_the_same_python_is_another_environment(tmp_path):
    """All virtual environments link to one python; the folder tells them apart."""
    other = tmp_path / "bin"
    other.mkdir()
    (other / "python").symlink_to(sys.executable)
    assert needed([str(other / "python"), "-m", "vllm"])


@pytest.mark.parametrize("command", [[], ["no-such-program-anywhere"], ["sh", "-c", "vllm serve"]])
def test_a_command_that_cannot_be_resolved_needs_it(command):
    """Also here: yes when unsure."""
    assert needed(command)
