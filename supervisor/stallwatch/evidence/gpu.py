"""Device facts, by the vendors' own tools. Bounded children only: nvidia-smi may hang in D state."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import shutil
import sys
import time
from typing import Any

from stallwatch.evidence.clean import clean
from stallwatch.evidence.tool import ToolRegistry, ToolResult, run

MAX_DEVICES = 64
MAX_HOLDERS = 256
_FIELDS = (
    "index", "uuid", "name", "utilization.gpu", "utilization.memory", "memory.used", "memory.total",
    "power.draw", "power.limit", "temperature.gpu", "clocks.sm", "pstate",
)  # fmt: skip
_NVIDIA = (f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
_HOLDERS = ("--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits")
# Utilisation and power together: 96 % at 15 W means a spinning kernel, not work (vLLM 46097).
_OTHERS = {
    "amd-smi": ("metric", "--usage", "--power", "--mem-usage", "--temperature", "--json"),
    "rocm-smi": ("--showuse", "--showpower", "--showmemuse", "--showtemp", "--json"),
    "hy-smi": ("--showuse", "--showpower", "--showmemuse", "--showtemp", "--json"),
}
_NVML = """
import json, pynvml as n
n.nvmlInit()
rows = []
for i in range(n.nvmlDeviceGetCount()):
    h = n.nvmlDeviceGetHandleByIndex(i)
    u, m = n.nvmlDeviceGetUtilizationRates(h), n.nvmlDeviceGetMemoryInfo(h)
    rows.append({"index": i, "utilization.gpu": u.gpu, "utilization.memory": u.memory,
                 "memory.used": m.used >> 20, "memory.total": m.total >> 20,
                 "power.draw": n.nvmlDeviceGetPowerUsage(h) / 1000})
print(json.dumps(rows))
"""


def facts(registry: ToolRegistry, *, deadline_s: float = 5.0) -> dict[str, Any]:
    """{"available", "tool", "devices": [...], "holders": [...]} or {"available": False, "why"}."""
    until = time.monotonic() + deadline_s
    why: list[str] = []
    if path := shutil.which("nvidia-smi"):
        found = _nvidia(registry, path, until)
        if found["available"]:
            return found
        why.append(found["why"])
    elif importlib.util.find_spec("pynvml") is not None:
        argv = [sys.executable, "-I", "-c", _NVML]
        return _as_json("pynvml", run(registry, argv, deadline_s=_left(until)))
    for name, arguments in _OTHERS.items():
        if (path := shutil.which(name)) and _left(until) > 0.01:
            found = _as_json(name, run(registry, [path, *arguments], deadline_s=_left(until)))
            if found["available"]:
                return found
            why.append(found["why"])
    return {"available": False, "why": "; ".join(why) or "no device tool is installed"}


def _left(until: float) -> float:
    return max(0.01, until - time.monotonic())


def _nvidia(registry: ToolRegistry, path: str, until: float) -> dict[str, Any]:
    asked = run(registry, [path, *_NVIDIA], deadline_s=_left(until))
    if not asked.ok:
        return _unavailable("nvidia-smi", asked)
    devices = [dict(zip(_FIELDS, row, strict=False)) for row in _rows(asked.stdout)[:MAX_DEVICES]]
    held = run(registry, [path, *_HOLDERS], deadline_s=_left(until))
    keys = ("pid", "uuid", "memory.used")
    rows = _rows(held.stdout)[:MAX_HOLDERS] if held.ok else []
    holders = [dict(zip(keys, row, strict=False)) for row in rows]
    return {"available": True, "tool": "nvidia-smi", "devices": devices, "holders": holders}


def _rows(raw: bytes) -> list[list[str]]:
    """CSV rows, cleaned; numbers stay text, for '[N/A]' is a legal value."""
    text = raw.decode("utf-8", "replace").replace("\0", "")
    try:
        rows = list(csv.reader(io.StringIO(text), skipinitialspace=True))
    except csv.Error:
        return []
    return [[clean(cell, 80) for cell in row[:32]] for row in rows if row]


def _as_json(tool: str, result: ToolResult) -> dict[str, Any]:
    if not result.ok:
        return _unavailable(tool, result)
    try:
        data: Any = json.loads(result.stdout)
    except (ValueError, RecursionError):
        return {"available": False, "why": f"{tool} gave no JSON"}
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data if isinstance(data, list) else [])
    )
    devices = [{"index": clean(str(key), 40), **_flat(value)} for key, value in items]
    return {"available": True, "tool": tool, "devices": devices[:MAX_DEVICES], "holders": []}


def _flat(value: object) -> dict[str, str]:
    """Two levels of a device's record as plain strings."""
    flat: dict[str, str] = {}
    for key, inner in list(value.items())[:64] if isinstance(value, dict) else []:
        pairs = list(inner.items())[:16] if isinstance(inner, dict) else [("", inner)]
        for name, leaf in pairs:
            where = f"{key}.{name}" if name else str(key)
            flat[clean(where, 80)] = clean(
                json.dumps(leaf) if isinstance(leaf, dict | list) else str(leaf), 80
            )
    return flat


def _unavailable(tool: str, result: ToolResult) -> dict[str, Any]:
    said = clean(result.stderr.decode("utf-8", "replace").strip() or "", 120)
    why = result.problem or f"{tool} failed"
    return {"available": False, "why": f"{why}: {said}" if said else why}
