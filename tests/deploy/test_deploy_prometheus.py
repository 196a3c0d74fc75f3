"""Metrics, rules and dashboard against the real thing: promtool, and a Prometheus that scrapes a stall."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from daemon_helpers import Daemon, daemon, free_port, place, request, until
from deploy_helpers import DEPLOY, DOCS, ROOT, tool
from stallwatch.control.server import ControlServer
from stallwatch.testing.service import FakeService

RULES = DEPLOY / "prometheus/stallwatch.rules.yaml"
DASHBOARD = DEPLOY / "grafana/stallwatch.json"
PACKAGE = "apt install prometheus"


def rules() -> list[dict]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict]:
    return [rule for rule in rules() if "alert" in rule]


def promtool(*argv: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tool("promtool", PACKAGE), *argv],
        input=given,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=RULES.parent,
        check=False,
    )


def expressions() -> list[tuple[str, str]]:
    """Every (title, expression) of the dashboard, its variables filled in as Grafana would."""
    board = json.loads(DASHBOARD.read_text())
    found = [(mark["name"], mark["expr"]) for mark in board["annotations"]["list"]]
    for panel in board["panels"]:
        found += [(panel["title"], target["expr"]) for target in panel.get("targets", ())]
    filled = {"$__rate_interval": "15s", "$__range": "1h", "$engine": ".*"}
    for name, value in filled.items():
        found = [(title, expr.replace(name, value)) for title, expr in found]
    return found


class Desk:
    """A desk that no gateway has spoken to yet."""

    def heard(self, report) -> None:
        raise AssertionError("a scrape only reads")

    def view(self) -> dict:
        return {"age_s": None}


def exported() -> set[str]:
    """The name of every series that a daemon's server exports, as written on the wire."""
    server = ControlServer(FakeService(), control="127.0.0.1:0", desk=Desk())
    server.start()
    try:
        port = int(server.control_address.rpartition(":")[2])
        status, body = request("GET", port, "/metrics")
    finally:
        server.stop()
    assert status == 200
    rows = body.decode().splitlines()
    return {re.split(r"[ {]", row)[0] for row in rows if row and row[0] != "#"}


# -- without a server ----------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.slow
def test_each_alert_fires_when_it_should_and_not_before():
    """`promtool test rules`: written histories in, alerts with all their words out."""
    done = promtool("test", "rules", "stallwatch.rules.test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    tested = yaml.safe_load((RULES.parent / "stallwatch.rules.test.yaml").read_text())
    fired = {
        case["alertname"]
        for each in tested["tests"]
        for case in each["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in alerts()}


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_and_where_to_read_on(rule):
    """Severity, a sentence, and a runbook that exists under exactly this address."""
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"]
    path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE)
    assert anchor == rule["alert"].lower()
    assert rule["alert"] in headings


def test_no_runbook_is_left_of_an_alert_that_is_gone():
    """Every section named Stallwatch... in the runbook belongs to an alert."""
    text = (DOCS / "deploy-monitoring.md").read_text()
    told = set(re.findall(r"^### (Stallwatch\w+)$", text, re.MULTILINE))
    assert told == {rule["alert"] for rule in alerts()}


def test_rules_and_panels_ask_only_for_what_is_exported():
    """A renamed metric breaks this, and not an alert in the night."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    known = exported() | recorded
    asked = [(r.get("alert") or r["record"], r["expr"]) for r in rules()] + expressions()
    for title, expr in asked:
        names = set(re.findall(r"\b(?:\w+:)?stallwatch_\w+(?::\w+)?", expr))
        assert names or expr.startswith("up{"), title
        assert names <= known, f"{title}: {names - known}"


@pytest.mark.process
@pytest.mark.slow
def test_the_configuration_of_the_docs_is_one(tmp_path):
    """The YAML block of docs/deploy-monitoring.md passes `promtool check config` with our rules."""
    (block,) = re.findall(
        r"^```yaml\n(.*?)^```",
        (DOCS / "deploy-monitoring.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    (tmp_path / "prometheus.yml").write_text(block)
    (tmp_path / RULES.name).write_text(RULES.read_text())
    done = promtool("check", "config", str(tmp_path / "prometheus.yml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules())} rules found" in done.stdout


@pytest.mark.process
def test_the_dashboard_is_what_its_generator_makes():
    """`make_dashboard.py --check` is content; a change by hand is refused."""
    argv = [sys.executable, str(ROOT / "scripts/make_dashboard.py"), "--check"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def test_the_dashboard_has_its_rows_and_variables():
    """datasource and engine; every panel under a row, with a description, none over another."""
    board = json.loads(DASHBOARD.read_text())
    assert [v["name"] for v in board["templating"]["list"]] == ["datasource", "engine"]
    rows = [p["title"] for p in board["panels"] if p["type"] == "row"]
    assert rows == [
        "Fleet health",
        "Lanes and phase ages",
        "Stalls by kind",
        "Restarts",
        "Evidence",
        "Gateway",
    ]
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        box = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(box["x"], box["x"] + box["w"])
            for y in range(box["y"], box["y"] + box["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"].endswith("."), panel["title"]
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])


# -- with a server -------------------------------------------------------------------------------


class Prometheus:
    """A real Prometheus on a free port, four scrapes and evaluations a second, the rules as shipped.

    Only the patience (`for`) is taken from them: the unit tests of the rules prove that part.
    """

    def __init__(self, folder: Path, target: int) -> None:
        self.port = free_port()
        self.folder = folder
        short = re.sub(r"^ +for: .*\n", "", RULES.read_text(), flags=re.MULTILINE)
        (folder / "rules.yaml").write_text(short)
        scrape = {
            "job_name": "stallwatch",
            "static_configs": [{"targets": [f"127.0.0.1:{target}"]}],
        }
        config = {
            "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms"},
            "rule_files": [str(folder / "rules.yaml")],
            "scrape_configs": [scrape],
        }
        config["global"]["evaluation_interval"] = "250ms"
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        with (folder / "prometheus.log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    tool("prometheus", PACKAGE),
                    f"--config.file={folder / 'prometheus.yaml'}",
                    f"--storage.tsdb.path={folder / 'tsdb'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def api(self, path: str, **words: str) -> dict:
        status, body = request("GET", self.port, f"/api/v1/{path}?{urllib.parse.urlencode(words)}")
        return json.loads(body) if body[:1] == b"{" else {"status": str(status)}

    def ask(self, expr: str) -> list[dict]:
        """The result of an instant query; an error of the expression fails the test."""
        found = self.api("query", query=expr)
        assert found["status"] == "success", f"{expr}: {found}"
        return list(found["data"]["result"])

    def firing(self) -> dict[str, dict]:
        found = self.api("alerts").get("data", {}).get("alerts", [])
        return {a["labels"]["alertname"]: a for a in found if a["state"] == "firing"}

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


@contextlib.contextmanager
def prometheus(folder: Path, target: int) -> Iterator[Prometheus]:
    inside = folder / "prometheus"
    inside.mkdir()
    found = Prometheus(inside, target)
    try:
        until(lambda: found.api("status/runtimeinfo")["status"] == "success", what="Prometheus")
        yield found
    finally:
        found.end()


@pytest.fixture
def folder() -> Iterator[Path]:
    with place() as path:
        yield path


def lint(run: Daemon, port: int) -> None:
    """What promtool says of a scrape: nothing."""
    status, body = request("GET", port, "/metrics")
    assert status == 200
    done = promtool("check", "metrics", given=body.decode())
    assert (done.returncode, done.stdout + done.stderr) == (0, ""), run.name


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_prometheus_sees_a_stall_and_the_alert_fires(folder):
    """A scraped daemon, one stall: the alert with engine and kind; all panels answer; lint is silent."""
    port = free_port()
    with daemon(folder, supervisor={"health_listen": f"127.0.0.1:{port}"}) as run:
        run.wait_ready()
        lint(run, port)
        with prometheus(folder, port) as found:
            until(lambda: found.ask('up{job="stallwatch"} == 1'), what="a scrape")
            until(lambda: found.ask("stallwatch_stalls_total"), what="the zeros are stored")
            assert "StallwatchEngineStalled" not in found.firing()
            run.order("worker", "stall")
            report = run.wait_stall()
            run.wait_ready(2)
            alert = until(
                lambda: found.firing().get("StallwatchEngineStalled"),
                seconds=30,
                what="the alert fires",
            )
            assert alert["labels"]["engine"] == run.name
            assert alert["labels"]["kind"] == report["kind"]
            assert report["kind"] in alert["annotations"]["summary"]
            never = {"StallwatchDown", "StallwatchSupervisorNotLive", "StallwatchEngineExhausted"}
            assert not never & set(found.firing())
            groups = found.api("rules")["data"]["groups"]
            assert [r["lastError"] for g in groups for r in g["rules"] if r.get("lastError")] == []
            silent = {title for title, expr in expressions() if not found.ask(expr)}
            assert silent <= {"Again"}, silent  # shows what came twice; this came once
            lint(run, port)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_an_engine_given_up_and_a_daemon_gone_are_told(folder):
    """EXHAUSTED while the daemon lives, then the daemon itself gone: two alerts, in that order."""
    port = free_port()
    settings = {"restart": {"policy": "always", "budget": 1, "backoff": ["10ms"]}}
    with daemon(folder, settings, supervisor={"health_listen": f"127.0.0.1:{port}"}) as run:
        run.wait_ready()
        with prometheus(folder, port) as found:
            until(lambda: found.ask('up{job="stallwatch"} == 1'), what="a scrape")
            for number in (1, 2):
                run.order("worker", "stall")
                run.wait(lambda number=number: len(run.stalls()) == number, "a stall")
                if number == 1:
                    run.wait_ready(2)
            run.wait_state("exhausted")
            until(lambda: found.firing().get("StallwatchEngineExhausted"), what="given up")
            assert run.stop() == 0
            began = time.monotonic()
            until(lambda: found.firing().get("StallwatchDown"), what="the daemon is gone")
            assert time.monotonic() - began < 20
