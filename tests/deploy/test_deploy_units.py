"""The unit files: what systemd says of them, and what must stay true of each setting."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy_helpers import BIN, DEPLOY, tool, unit
from stallwatch.config import load
from stallwatch.daemon import main as daemon

UNITS = DEPLOY / "systemd"
SERVICES = sorted(path.name for path in UNITS.glob("*.service"))
# systemd 254 knows them; what an older one says of them is exactly this and nothing else.
YOUNG = re.compile(r"Unknown key (name )?'Restart(Steps|MaxDelaySec)' in section .*ignoring\.$")
# Addresses, files and directories: everything that an instance has of its own.
OWN = {
    "Unit.Description",
    "Service.ExecStart",
    "Service.StateDirectory",
    "Service.RuntimeDirectory",
    "Service.RuntimeDirectoryPreserve",
    "Service.Environment",
}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units with the program where it is here, and one instance of the template."""
    for name in SERVICES:
        text = (UNITS / name).read_text().replace("/opt/stallwatch/bin/", f"{BIN}/")
        (tmp_path / name).write_text(text)
    shutil.copy(tmp_path / "stallwatch@.service", tmp_path / "stallwatch@chat.service")
    return tmp_path


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["stallwatch.service", "stallwatch@chat.service", "stallwatch-gateway.service"]
)
def test_systemd_understands_every_line(installed, name):
    """`systemd-analyze verify` says nothing but that two keys need a younger systemd."""
    argv = [tool("systemd-analyze", "apt install systemd"), "verify", "--man=no"]
    found = subprocess.run(
        [*argv, installed / name], capture_output=True, text=True, timeout=60, check=False
    )
    said = [line for line in found.stderr.splitlines() if not YOUNG.search(line)]
    assert said == []
    assert found.returncode == 0


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most"), [("stallwatch.service", 2.5), ("stallwatch-gateway.service", 1.5)]
)
def test_the_exposure_does_not_grow(installed, name, most):
    """`systemd-analyze security` scores each unit; one more thing left open makes this fail."""
    argv = [tool("systemd-analyze", "apt install systemd"), "security", "--offline=true"]
    found = subprocess.run(
        [*argv, f"--threshold={most * 10:g}", "--no-pager", installed / name],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 0, found.stdout


def test_an_instance_differs_only_by_its_places():
    """stallwatch@.service is stallwatch.service with other folders: no setting drifts apart."""
    plain, instance = (unit(UNITS / n) for n in ("stallwatch.service", "stallwatch@.service"))
    assert set(plain) - set(instance) == {"Service.RuntimeDirectoryPreserve"}
    assert {k for k in instance if plain.get(k) != instance[k]} <= OWN
    for key in ("StateDirectory", "RuntimeDirectory"):
        assert instance[f"Service.{key}"] == ["stallwatch/%i"]


@pytest.mark.parametrize("name", ["stallwatch.service", "stallwatch@.service"])
def test_the_daemon_is_restarted_only_when_that_can_help(name):
    """Codes that need a person prevent a restart; the pauses grow and the start limit is in reach."""
    service = unit(UNITS / name)
    prevented = {int(n) for n in service["Service.RestartPreventExitStatus"][0].split()}
    assert prevented == {daemon.EXIT_BUDGET, daemon.EXIT_NEVER_READY, 78, daemon.EXIT_DEVICE}
    assert daemon.EXIT_INTERNAL not in prevented
    assert service["Service.Restart"] == ["on-failure"]
    assert service["Service.RestartSteps"] == ["5"]  # the maximum is ignored without it
    # The slowest: every pause at its maximum. The default interval of 10 s would never be reached.
    burst, longest = int(service["Unit.StartLimitBurst"][0]), 60
    assert service["Service.RestartMaxDelaySec"] == [str(longest)]
    assert service["Unit.StartLimitIntervalSec"] == ["15min"]
    assert burst * longest <= 15 * 60


@pytest.mark.parametrize("name", ["stallwatch.service", "stallwatch@.service"])
def test_nothing_of_the_unit_hinders_supervision(name):
    """What would close the GPU, hide the host, forbid evidence or kill the engine with one process."""
    service = unit(UNITS / name)
    for key in ("PrivateDevices", "ProtectClock", "ProtectControlGroups", "ProcSubset"):
        assert f"Service.{key}" not in service
    assert not any(key.startswith(("Service.Device", "Service.MemoryDeny")) for key in service)
    assert service["Service.OOMPolicy"] == ["continue"]
    assert service["Service.KillMode"] == ["mixed"]
    assert service["Service.Delegate"] == ["yes"]
    assert service["Service.SystemCallFilter"] == ["@system-service ptrace"]
    assert service["Service.CapabilityBoundingSet"] == []  # reset: none
    assert service["Service.NoNewPrivileges"] == ["yes"]


def test_every_hardening_left_open_has_its_reason():
    """The list at the end of the unit names each exception that the security report could show."""
    text = (UNITS / "stallwatch.service").read_text().partition("# Left open, and why:")[2]
    named = set(re.findall(r"^# ([A-Z][A-Za-z_]+=?)", text, re.MULTILINE))
    assert named >= {
        "CAP_SYS_PTRACE",
        "PrivateDevices=",
        "ProtectClock=",
        "ProtectControlGroups=",
        "ProcSubset=",
        "MemoryDenyWriteExecute=",
        "PrivateUsers=",
        "RemoveIPC=",
        "PrivateNetwork=",
    }


def test_the_stop_is_given_the_time_that_the_daemon_takes():
    """TimeoutStopSec covers drain, grace and the kill of the shipped configuration."""
    config = load(UNITS / "stallwatch.toml")
    longest = max(e.drain + e.stop_grace for e in config.engines.values()) + 35
    assert unit(UNITS / "stallwatch.service")["Service.TimeoutStopSec"] == ["2min"]
    assert longest <= 120


def test_daemon_gateway_and_client_meet_at_one_socket():
    """The unit's socket is where clients look last, and where the gateway's unit looks."""
    from stallwatch import paths

    socket = "STALLWATCH_SOCKET=/run/stallwatch/control.sock"
    for name in ("stallwatch.service", "stallwatch-gateway.service"):
        assert socket in unit(UNITS / name)["Service.Environment"]
    assert paths.client_sockets({"HOME": "/root"})[-1] == socket.partition("=")[2]
    accounts = {tuple(unit(UNITS / n)["Service.User"]) for n in SERVICES}
    assert accounts == {("stallwatch",)}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="owners of files are set by root alone")
def test_the_account_and_its_folders_are_made(tmp_path):
    """systemd-sysusers and systemd-tmpfiles, in a root of their own: account, owners, rights."""
    (tmp_path / "etc").mkdir()
    for program, flags, name in (
        ("systemd-sysusers", [], "stallwatch.sysusers.conf"),
        ("systemd-tmpfiles", ["--create"], "stallwatch.tmpfiles.conf"),
    ):
        argv = [tool(program, "apt install systemd"), f"--root={tmp_path}", *flags, UNITS / name]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    row = next(
        r for r in (tmp_path / "etc/passwd").read_text().splitlines() if r.startswith("stallwatch:")
    )
    _, _, uid, gid, _, home, shell = row.split(":")
    assert (home, shell.rpartition("/")[2]) == ("/var/lib/stallwatch", "nologin")
    assert 0 < int(uid) < 1000
    made = {name: (tmp_path / name).stat() for name in ("etc/stallwatch", "run/stallwatch")}
    assert {s.st_mode & 0o777 for s in made.values()} == {0o750}
    assert [s.st_uid for s in made.values()] == [0, int(uid)]
    assert {s.st_gid for s in made.values()} == {int(gid)}
