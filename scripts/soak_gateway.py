"""Stall after stall behind the gateway while clients stream: every request ends in exactly one explicit way.

    make soak-gateway                                     # 1,000 stalls of the embedded engine, 32 clients
    python scripts/soak_gateway.py --quick                # 60 stalls, as a test runs it
    python scripts/soak_gateway.py --vllm 20              # stalls of a real vLLM

Several engines stand behind one gateway and are stalled in turn, each as soon as it serves again, so that
the machine is busy while one waits for its limit or its evidence. A complete answer is compared with the
one that was given in peace: the embedded engine decodes greedily and batch-invariantly, so a single missing
token shows; of vLLM, whose batches round differently, the tokens are counted.

The last line on stdout is the result as JSON. Exit status 1 when a client hung, was cut off without a word,
took a truncated answer for complete, or heard of a failure that the ledger does not know; when a fault was
not found; and when the counts of clients, gateway, ledger and metrics differ in one.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "vllm")]

from daemon_helpers import STALLWATCH, Daemon, daemon, free_port, place, tag  # noqa: E402
from soak_clients import Clients  # noqa: E402
from soak_watch import Watch, order  # noqa: E402
from stallwatch.chaos.card import fault_done, grade  # noqa: E402

FAULTS = ("stop", "kill", "gil", "spin", "block")
RETURN_S = 600.0  # from a fault to a serving engine, on a starved machine
SUPERVISOR = """
[supervisor]
control = "127.0.0.1:{control}"
state_dir = "{state}"
chaos = true
max_stalls = 10000
max_evidence_mib = 20000
[gateway]
listen = "127.0.0.1:{gateway}"
hold = "2s"
drain = "5s"
"""
ENGINE = """
[engines.{name}]
command = {command}
port = {port}
drain = "1s"
stop_grace = "5s"
limits = {limits}
restart = {{ policy = "always", budget = 1000, window = "10m", backoff = ["10ms"] }}
"""
EMBEDDED_LIMITS = (
    '{ default = "3s", compile = "3s", loop = "3s", no_progress = "5s", start = "180s" }'
)
VLLM_LIMITS = '{ default = "6s", compile = "90s", loop = "4s", no_progress = "15s", start = "600s", degraded = "24h" }'


@dataclass(frozen=True)
class Plan:
    """What is stalled, and by what."""

    engines: str  # their tables
    names: tuple[str, ...]
    processes: tuple[str, ...]
    exact: bool  # an answer has one right text


def embedded(folder: Path, models: Path, count: int) -> Plan:
    """Tiny engines of two processes each, the last one of three: its tables are in the offload process."""
    model = models / "tiny"
    subprocess.run(
        [STALLWATCH, "engine", "make-tiny", str(model)], check=True, stdout=subprocess.DEVNULL
    )
    names = tuple(f"{tag(folder)}-{n}" for n in range(count))
    tables = []
    for name in names:
        backend = "process" if name == names[-1] else "resident"
        command = [
            STALLWATCH, "engine", "serve", "--model", str(model), "--served-name", "tiny",
            "--port", "{port}", "--ple-backend", backend, "--max-num-seqs", "4",
            "--max-batched-tokens", "128", "--max-model-len", "256",
        ]  # fmt: skip
        tables.append(_table(name, command, EMBEDDED_LIMITS))
    return Plan("".join(tables), names, ("worker:0", "offload:0", "api:0"), exact=True)


def vllm(folder: Path, models: Path) -> Plan:
    """One vLLM; what its processes are called is known once it serves."""
    from running import PYTHON, write_model  # noqa: PLC0415 - needs the vLLM environment

    command = [
        str(PYTHON), "-m", "vllm.entrypoints.launchers.api_server.entry",
        "--model", str(write_model(models / "tiny-vllm")), "--served-model-name", "tiny",
        "--host", "127.0.0.1", "--port", "{port}",
        "--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "16",
    ]  # fmt: skip
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(PYTHON.parents[1] / "stallwatch-cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(PYTHON.parents[1] / "stallwatch-cache" / "inductor"),
    }
    name = f"{tag(folder)}-vllm"
    lines = [f"[engines.{name}.env]", *(f"{k} = {json.dumps(v)}" for k, v in env.items())]
    table = _table(name, command, VLLM_LIMITS) + 'ready = { http = "/health" }\n'
    return Plan(table + "\n".join(lines) + "\n", (name,), (), exact=False)


def _table(name: str, command: Sequence[str], limits: str) -> str:
    return ENGINE.format(name=name, command=json.dumps(command), port=free_port(), limits=limits)


class Stalls:
    """One fault after the other into each engine, each graded by the product's own card."""

    def __init__(self, run: Daemon, watch: Watch, plan: Plan, *, count: int, seed: int) -> None:
        self.grades: collections.Counter[str] = collections.Counter()
        self.done = 0
        self.failures_counted: dict[str, int] = {}  # by the gateway, which remembers the latest
        self.ledger: set[str] = set()  # gathered on the way: one answer lists few
        self.wrong: list[str] = []
        self.misnamed: list[str] = []
        self._run, self._watch, self._plan = run, watch, plan
        self._left, self._count, self._seed = count, count, seed
        self._lock = threading.Lock()
        self._refused = 0
        self._began = time.monotonic()

    def work(self, clients: Clients) -> None:
        """All of them. Raises whatever broke."""
        broken: list[BaseException] = []

        def guarded(number: int, name: str) -> None:
            try:
                self._engine(number, name, clients)
            except BaseException as error:
                broken.append(error)
                with self._lock:
                    self._left = 0

        threads = [
            threading.Thread(target=guarded, args=each) for each in enumerate(self._plan.names)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.stderr.write("\n")
        if broken:
            raise broken[0]

    def _engine(self, number: int, name: str, clients: Clients) -> None:
        chance = random.Random(self._seed * 1000 + number)
        while self._take():
            incarnation = self._watch.serving(name, RETURN_S)
            self._busy(name)
            if not self._stall(name, chance):
                self._give_back(name)
                continue
            self.gather()
            self._show(clients)
            self._watch.serving(name, RETURN_S, after=incarnation)

    def _take(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0

    def _give_back(self, name: str) -> None:
        with self._lock:
            self._left += 1
            self._refused += 1
            self.grades["refused"] += 1
            if self._refused > max(10, self._count):
                raise SystemExit(f"{name} takes no fault")

    def _busy(self, name: str) -> None:
        """A stall that no client meets shows nothing."""
        with contextlib.suppress(AssertionError):
            self._run.wait(lambda: self._pending(name), "a request in the engine", 20)

    def _pending(self, name: str) -> int:
        known = self._run.engine(name).get("processes", ())
        return sum(p["pending"] for p in known if p["address"] == "api:0")

    def _stall(self, name: str, chance: random.Random) -> bool:
        """False: the engine took no fault."""
        known = [p["address"] for p in self._run.engine(name).get("processes", ())]
        where = chance.choice(sorted(set(known) & set(self._plan.processes)) or known)
        fault, seed = chance.choice(FAULTS), chance.randrange(1 << 30)
        since = self._watch.last
        body = {"fault": fault, "on": where, "seed": seed, "seconds": 0.0}
        said = order(self._run.state / "control.sock", f"/v1/engines/{name}:chaos", body)
        if "process" not in said:
            return False
        found = self._watch.stall(name, since, float(said["seconds"]) + 15.0)
        if found:
            self._watch.gone(name, since, RETURN_S)  # then the report's kind is final
        card = grade(fault_done(said), self._run.report(found) if found else None)
        with self._lock:
            self.done += 1
            self.grades[f"{fault} {card.grade}"] += 1
            if not found:
                self.wrong.append(f"{fault} into {where} of {name} was not found")
            elif (
                card.grade == "wrong"
            ):  # a matter of the diagnosis: told, and no fault of this soak
                self.misnamed.append(f"{fault} into {where}: {'; '.join(card.wrong)} [{found}]")
        return True

    def gather(self) -> None:
        """What daemon and gateway tell of the latest stalls only."""
        counted = self._run.json("/v1/gateway").get("failures", {})
        listed = self._run.json("/v1/stalls?limit=50").get("items", ())
        with self._lock:
            self.ledger |= {str(each["id"]) for each in listed}
            for each, times in counted.items():
                self.failures_counted[each] = max(times, self.failures_counted.get(each, 0))

    def _show(self, clients: Clients) -> None:
        with self._lock:
            left = (time.monotonic() - self._began) / max(1, self.done) * (self._count - self.done)
            grades = {g: n for g, n in self.grades.items() if not g.endswith(" right")}
            sys.stderr.write(
                f"\r{self.done}/{self._count} stalls, {clients.sent} requests, "
                f"{clients.ends['complete']} complete, not right: {grades or 0}, "
                f"{left / 60:.0f} min left   "
            )
            sys.stderr.flush()


def gateway_counts(run: Daemon) -> dict[str, int]:
    rows = run.get("/metrics")[1].decode().splitlines()
    found = [r for r in rows if r.startswith("stallwatch_gateway_requests_total{")]
    return {
        r.partition('end="')[2].partition('"')[0]: int(float(r.rpartition(" ")[2])) for r in found
    }


def reconcile(run: Daemon, clients: Clients, stalls: Stalls, told: set[str]) -> list[str]:
    """What does not agree, in sentences. `told`: the stalls that events spoke of."""
    wrong, ledger = [*clients.faults[:20], *stalls.wrong[:20]], stalls.ledger
    counts = gateway_counts(run)

    def same(what: str, ours: int, theirs: int) -> None:
        if ours != theirs:
            wrong.append(f"{what}: {ours} by the clients' count, {theirs} by the gateway's")

    same("requests", clients.sent, sum(counts.values()))
    same("answers", clients.answered, counts["answered"])
    same("answers that broke unexplained", clients.unexplained, counts["broken"])
    same("failures and refusals", clients.told, counts["failed"] + counts["refused"])
    if sum(clients.ends.values()) != clients.sent:
        wrong.append(f"{clients.sent - sum(clients.ends.values())} requests have no end")
    if unknown := set(clients.failures) - ledger:
        wrong.append(f"{len(unknown)} failure ids that clients saw are not in the ledger")
    for each, times in clients.failures.items():
        if times != stalls.failures_counted.get(each):
            counted = stalls.failures_counted.get(each)
            wrong.append(f"{each}: {times} clients saw it, the gateway counts {counted}")
    if (counted := int(run.metric("stallwatch_stalls_total{"))) != len(ledger):
        wrong.append(f"metrics count {counted} stalls, the ledger {len(ledger)}")
    if told != ledger:
        wrong.append(f"events told {len(told)} stalls, {len(told ^ ledger)} others than the ledger")
    return wrong


@contextlib.contextmanager
def running(chosen: argparse.Namespace) -> Iterator[tuple[Daemon, Plan, int]]:
    """A daemon, what it runs, and the gateway's port."""
    with place() as folder, tempfile.TemporaryDirectory() as models:
        plan = vllm(folder, Path(models)) if chosen.vllm else embedded(folder, Path(models), chosen.engines)  # fmt: skip
        control, gateway = free_port(), free_port()
        text = SUPERVISOR.format(control=control, gateway=gateway, state=folder / "state")
        with daemon(folder, text=text + plan.engines) as run:
            run.control = control
            run.name = plan.names[0]
            yield run, plan, gateway


def soak(run: Daemon, plan: Plan, gateway: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """The whole of it; the result."""
    for name in plan.names:
        run.wait_state("ready", name=name, seconds=RETURN_S)
    run.wait_state("ready", name="gateway", seconds=60)
    clients = Clients(gateway, chosen.clients, exact=plan.exact)
    clients.learn()
    stalls_asked = chosen.vllm or chosen.stalls
    with Watch(run) as watch:
        stalls = Stalls(run, watch, plan, count=stalls_asked, seed=chosen.seed)
        clients.start()
        began = time.monotonic()
        try:
            stalls.work(clients)
            took = time.monotonic() - began
        finally:
            clients.stop()
        run.wait(
            lambda: sum(gateway_counts(run).values()) >= clients.sent, "the gateway's last report", 30
        )  # fmt: skip
        stalls.gather()
        wrong = reconcile(run, clients, stalls, watch.stalls())
        return {
            "stalls": stalls.done,
            "engines": len(plan.names),
            "clients": chosen.clients,
            "requests": clients.sent,
            "ends": dict(clients.ends.most_common()),
            "gateway": gateway_counts(run),
            "ledger": len(stalls.ledger),
            "grades": dict(stalls.grades.most_common()),
            "misnamed": stalls.misnamed[:20],
            "failures_seen": len(clients.failures),
            "seconds_a_stall": round(took / max(1, stalls.done), 2),
            "shares": watch.shares(),
            "wrong": wrong,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stalls", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument(
        "--engines", type=int, default=3, help="behind the gateway, stalled in turn"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="60 stalls")
    parser.add_argument("--vllm", type=int, default=0, metavar="N", help="N stalls of a real vLLM")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.stalls = 60
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # an engine's threads that spin take a core
    with running(chosen) as (run, plan, gateway):
        result = soak(run, plan, gateway, chosen)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(each.ru_utime + each.ru_stime for each in used)
    result["cpu_seconds_a_stall"] = round(cpu / max(1, result["stalls"]), 2)  # of everything
    print(json.dumps(result))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
