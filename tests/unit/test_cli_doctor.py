"""The checks, against made-up machines."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from stallwatch.doctor import engine, host, ptrace
from stallwatch.doctor.check import Level, ok, run, run_all
from stallwatch.doctor.report import CHECKS, exit_code


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_check_that_hangs_or_raises_fails_alone():
    """One bad check neither holds up nor hides the others, and the order stays."""
    release = threading.Event()

    def hangs():
        release.wait(30)
        return ok("a", "x")

    def raises():
        raise RuntimeError("boom")

    try:
        found = run_all({"a": hangs, "b": raises, "c": lambda: ok("c", "fine")}, 0.2)
    finally:
        release.set()

    assert [(r.name, r.level) for r in found] == [
        ("a", Level.FAIL),
        ("b", Level.FAIL),
        ("c", Level.OK),
    ]
    assert "boom" in found[1].message
    assert exit_code(found) == 1
    assert exit_code(found[2:]) == 0


def test_a_child_that_hangs_is_killed_with_its_children():
    """The deadline holds even when a grandchild keeps the pipe open."""
    code = (
        "import subprocess,sys;subprocess.run([sys.executable,'-c','import time;time.sleep(60)'])"
    )
    found = run([sys.executable, "-c", code], 0.2)

    assert found is not None
    assert found.code is None
    assert run(["/no/such/tool"], 1.0) is None


@pytest.mark.parametrize(
    ("scope", "capable", "level"),
    [
        ("0", False, "ok"),
        ("1", False, "ok"),
        ("2", False, "fail"),
        ("2", True, "ok"),
        ("3", True, "fail"),
    ],
)
def test_yama(tmp_path, scope, capable, level):
    """Yama 2 needs the capability; Yama 3 refuses everybody."""
    write(tmp_path / "sys/kernel/yama/ptrace_scope", f"{scope}\n")
    found = ptrace.yama(tmp_path, capable=capable)

    assert found.level == level
    assert bool(found.remedy) is (level == "fail")


def test_no_yama(tmp_path):
    """A kernel without Yama is fine."""
    assert ptrace.yama(tmp_path, capable=False).level is Level.OK


@pytest.mark.parametrize(
    ("eff", "bnd", "level"), [("80000", "80000", "ok"), ("0", "80000", "ok"), ("0", "0", "warn")]
)
def test_capabilities(tmp_path, eff, bnd, level):
    """Only a missing bounding capability is worth a warning."""
    write(tmp_path / "self/status", f"CapEff:\t{eff}\nCapBnd:\t{bnd}\n")

    assert ptrace.capabilities(tmp_path).level == level


@pytest.mark.parametrize(
    ("conf", "uid", "level"),
    [
        (None, 1000, "warn"),
        ("RemoveIPC=no", 1000, "ok"),
        ("#RemoveIPC=no", 1000, "warn"),
        ("RemoveIPC=yes", 999, "ok"),
        ("RemoveIPC=", 1000, "warn"),
    ],
)
def test_remove_ipc(tmp_path, conf, uid, level):
    """logind's default deletes a regular user's shared memory; a system user is safe."""
    (tmp_path / "run/systemd/users").mkdir(parents=True)
    if conf:
        write(tmp_path / "etc/systemd/logind.conf", f"[Login]\n{conf}\n")

    assert host.remove_ipc(tmp_path, uid).level == level


def test_remove_ipc_drop_in_wins(tmp_path):
    """A drop-in overrides the file, and a broken file is no crash."""
    (tmp_path / "run/systemd/users").mkdir(parents=True)
    write(tmp_path / "etc/systemd/logind.conf", "RemoveIPC=yes without a section")
    write(tmp_path / "etc/systemd/logind.conf.d/10.conf", "[Login]\nRemoveIPC=no\n")

    assert host.remove_ipc(tmp_path, 1000).level is Level.OK


def test_cgroup(tmp_path):
    """Version 1 is a warning; version 2 that we may write is delegated."""
    assert host.cgroup(tmp_path).level is Level.WARN
    for name in ("cgroup.controllers", "me/cgroup.procs", "me/cpu.stat", "me/memory.events"):
        write(tmp_path / "sys/fs/cgroup" / name, "")
    write(tmp_path / "proc/self/cgroup", "1:x:/y\n0::/me\n")

    assert host.cgroup(tmp_path).message == "version 2, delegated (/me)"


def test_small_shared_memory(tmp_path):
    """A missing place is a failure with a remedy for containers."""
    found = host.shm(tmp_path / "none")

    assert found.level is Level.FAIL
    assert "--shm-size" in found.remedy


def test_slow_clock(tmp_path):
    """A clock source that needs a device access is a warning."""
    write(tmp_path / "sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n")

    assert host.clock(tmp_path).level is Level.WARN


def test_gpu_without_tools(tmp_path, monkeypatch):
    """A GPU that nothing can read is a warning; no GPU is fine."""
    monkeypatch.setattr(engine.shutil, "which", lambda _: None)
    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda _: None)
    assert engine.gpu(tmp_path).level is Level.OK
    write(tmp_path / "nvidia0", "")
    assert engine.gpu(tmp_path).level is Level.WARN


class TestVllm:
    def script(self, tmp_path, first):
        path = tmp_path / "vllm"
        path.write_text(f"{first}\n")
        return str(path)

    def test_injection_works(self, tmp_path):
        """An ordinary interpreter takes the plugin from PYTHONPATH."""
        found = engine.vllm(self.script(tmp_path, f"#!{sys.executable}"))

        assert found.level is Level.OK
        assert "can be injected" in found.message

    def test_isolated_interpreter(self, tmp_path):
        """-I in the first line shuts PYTHONPATH out: a failure that names the flag."""
        found = engine.vllm(self.script(tmp_path, f"#!{sys.executable} -I"))

        assert found.level is Level.FAIL
        assert "-I" in found.remedy

    def test_broken_interpreter(self, tmp_path):
        """An interpreter that is gone is a failure; no vLLM at all is none."""
        assert engine.vllm(self.script(tmp_path, "#!/no/python")).level is Level.FAIL
        assert engine.vllm(self.script(tmp_path, "\x7fELF")).level is Level.WARN
        assert engine.vllm("").level is Level.OK

    def test_env_interpreter(self, tmp_path):
        """`env python` in the first line is understood."""
        path = self.script(tmp_path, "#!/usr/bin/env python3 -E")

        assert engine.interpreter_of(path) == ["python3", "-E"]


def test_pyspy_missing_and_refused(tmp_path):
    """No py-spy names pip; a py-spy that fails says which rung is left."""
    assert "pip install" in ptrace.pyspy("").remedy
    fake = tmp_path / "py-spy"
    fake.write_text("#!/bin/sh\necho 'Permission Denied' >&2\nexit 1\n")
    fake.chmod(0o755)
    found = ptrace.pyspy(str(fake))

    assert found.level is Level.FAIL
    assert "Permission Denied" in found.message
    assert "faulthandler" in found.message


def test_native_frames_refused(tmp_path):
    """A py-spy that works but for native frames is a warning that names the rung."""
    fake = tmp_path / "py-spy"
    fake.write_text('#!/bin/sh\ncase "$*" in *--native*) exit 1;; esac\necho "[]"\n')
    fake.chmod(0o755)

    assert ptrace.pyspy(str(fake)).level is Level.WARN


def test_the_throwaway_child_is_gone():
    """The child that py-spy tries is reaped."""
    with ptrace.throwaway() as pid:
        assert pid is not None
    assert (
        subprocess.run(["/bin/kill", "-0", str(pid)], capture_output=True, check=False).returncode
        != 0
    )


def test_all_checks_are_listed():
    """What is needed at three in the morning is all there."""
    assert len(CHECKS) == 12
