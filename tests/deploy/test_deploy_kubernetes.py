"""The manifests of every overlay: what the API server would take, and what must hold in each pod."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from daemon_helpers import daemon, place
from deploy_helpers import DEPLOY, DOCS
from deploy_kustomize import KEYS, render
from stallwatch.config import load
from stallwatch.daemon import main as daemon_main

ROOT = DEPLOY / "kubernetes"
OVERLAYS = sorted(path.name for path in (ROOT / "overlays").iterdir())
CONFIGS = sorted(ROOT.rglob("*.toml"))
VERSIONS = ("1.33.0", "1.36.0")
# Kinds of operators: no schema of theirs is in Kubernetes itself.
CUSTOM = {
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
}
GIB = {"Mi": 1 / 1024, "Gi": 1.0}


def objects(overlay: str) -> dict[str, dict]:
    return {doc["kind"]: doc for doc in render(ROOT / "overlays" / overlay)}


def pods(overlay: str) -> list[dict]:
    """The pod specifications of an overlay, whatever holds them."""
    found = objects(overlay)
    if "Deployment" in found:
        return [found["Deployment"]["spec"]["template"]["spec"]]
    group = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return [group["leaderTemplate"]["spec"], group["workerTemplate"]["spec"]]


def every_pod() -> list:
    return [
        pytest.param(pod, id=f"{overlay}-{number}")
        for overlay in OVERLAYS
        for number, pod in enumerate(pods(overlay))
    ]


def container(pod: dict) -> dict:
    (found,) = pod["containers"]
    return found


def gib(text: str) -> float:
    return float(text[:-2]) * GIB[text[-2:]]


def test_the_overlays_are_all_here():
    """One per way of running it; each is judged below."""
    assert OVERLAYS == ["amd", "cpu", "leader-worker-set", "multi-gpu-tp", "single-gpu"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_knows_every_field(overlay, version):
    """Strict validation against the schemas of two releases; kinds of operators are named."""
    check = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    unknown = set()
    for doc in render(ROOT / "overlays" / overlay):
        if doc["kind"] in CUSTOM:
            assert doc["apiVersion"] == CUSTOM[doc["kind"]]
            unknown.add(doc["kind"])
        else:
            check.validate(doc, version, strict=True)
    assert unknown <= set(CUSTOM)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_pods_of_a_group_are_pods(version):
    """A LeaderWorkerSet has no schema here, its pods do: each is checked as a Pod."""
    check = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for pod in pods("leader-worker-set"):
        doc = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": pod}
        check.validate(doc, version, strict=True)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubectl_renders_the_same(overlay):
    """`kubectl kustomize` makes what these tests judge, but for the hash of the config map."""
    argv = ["kubectl", "kustomize", str(ROOT / "overlays" / overlay)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    text = re.sub(
        r"name: stallwatch-[a-z0-9]{10}$", "name: stallwatch", done.stdout, flags=re.MULTILINE
    )
    theirs = {doc["kind"]: ordered(doc) for doc in yaml.safe_load_all(text)}
    assert theirs == {kind: ordered(doc) for kind, doc in objects(overlay).items()}


def ordered(part, name: str = ""):
    """Keyed lists in the order of their keys: a patch puts its items first or last."""
    if isinstance(part, dict):
        return {key: ordered(value, key) for key, value in part.items()}
    if isinstance(part, list) and name in KEYS:
        return sorted(map(ordered, part), key=lambda item: str(item.get(KEYS[name])))
    return part


@pytest.mark.parametrize("pod", every_pod())
def test_only_the_daemons_own_liveness_kills(pod):
    """Liveness and startup ask /livez and nothing else; readiness follows the engine; all by health."""
    found = container(pod)
    paths = {
        name: found[f"{name}Probe"]["httpGet"]["path"]
        for name in ("startup", "liveness", "readiness")
    }
    assert paths == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}
    ports = {p["name"]: p["containerPort"] for p in found["ports"]}
    for name in paths:
        probe = found[f"{name}Probe"]
        assert probe["httpGet"]["port"] == "health"
        assert probe["timeoutSeconds"] >= 2  # the default of 1 s is how a busy node kills
    startup = found["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 30 * 60
    assert ports["health"] == 9471
    assert "lifecycle" not in found  # SIGTERM drains: no preStop is needed


@pytest.mark.parametrize("pod", every_pod())
def test_a_pod_has_no_right_that_it_can_do_without(pod):
    """Non-root, no capability, no escalation, the runtime's seccomp, read-only root, no token."""
    outer, inner = pod["securityContext"], container(pod)["securityContext"]
    assert outer["runAsNonRoot"] is True
    assert outer["runAsUser"] > 0
    assert outer["seccompProfile"] == {"type": "RuntimeDefault"}
    assert inner == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False  # VLLM_PORT of a Service called vllm
    assert not {"hostPID", "hostIPC", "hostNetwork", "shareProcessNamespace"} & set(pod)


@pytest.mark.parametrize("pod", every_pod())
def test_every_place_that_is_written_is_a_volume(pod):
    """State, cache, /tmp and /dev/shm; shared memory is large enough and within the memory limit."""
    found = container(pod)
    volumes = {v["name"]: v for v in pod["volumes"]}
    mounts = {m["mountPath"]: volumes[m["name"]] for m in found["volumeMounts"]}
    assert set(mounts) == {
        *("/etc/stallwatch", "/var/lib/stallwatch", "/var/cache/stallwatch"),
        *("/tmp", "/dev/shm"),
    }
    shm = mounts["/dev/shm"]["emptyDir"]
    assert shm["medium"] == "Memory"
    limit = gib(found["resources"]["limits"]["memory"])
    assert 2 <= gib(shm["sizeLimit"]) <= limit / 2
    several = int(found["resources"]["limits"].get("nvidia.com/gpu", "1")) > 1
    assert gib(shm["sizeLimit"]) >= (16 if several else 2)
    written = [e["value"] for e in found["env"] if e.get("value", "").startswith("/")]
    assert all(w.startswith(("/var/lib/stallwatch", "/var/cache/stallwatch")) for w in written)


@pytest.mark.parametrize("pod", every_pod())
def test_images_are_pinned(pod):
    """A tag or digest, and never `latest`: two replicas run the same thing."""
    image = container(pod)["image"]
    assert re.search(r"(:[\w.-]+|@sha256:[0-9a-f]{64})$", image)
    assert not image.endswith(":latest")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_configuration_is_valid_and_fits_its_pod(path):
    """`stallwatch config check` takes it; its addresses are the pod's ports; the stop has its time."""
    config = load(path)
    assert config.supervisor.control.startswith("127.0.0.1:")  # off loopback it needs a token
    assert config.supervisor.health_listen == "0.0.0.0:9471"
    assert str(config.supervisor.state_dir).startswith("/var/lib/stallwatch/")
    longest = max(e.drain + e.stop_grace for e in config.engines.values()) + 35
    every = [p for o in OVERLAYS for p in pods(o)]
    assert all(longest <= pod["terminationGracePeriodSeconds"] for pod in every)
    starts = max(e.limits["start"] for e in config.engines.values())
    assert starts <= objects("single-gpu")["Deployment"]["spec"]["progressDeadlineSeconds"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_container_finds_its_configuration(overlay):
    """The file that `serve -c` names is a key of the mounted config map."""
    data = objects(overlay)["ConfigMap"]["data"]
    named = {Path(container(pod)["args"][-1]).name for pod in pods(overlay)}
    assert named == set(data)


def test_a_group_lives_and_dies_together():
    """policy never, exit_when any, on every node; and the group is recreated with its pod."""
    group = objects("leader-worker-set")["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    for text in objects("leader-worker-set")["ConfigMap"]["data"].values():
        config = tomllib.loads(text)
        assert config["supervisor"]["exit_when"] == "any"
        assert [e["restart"]["policy"] for e in config["engines"].values()] == ["never"]
        for engine in config["engines"].values():
            assert engine["command"][2].startswith("exec ")  # SIGTERM reaches the engine itself
    assert "Deployment" not in objects("leader-worker-set")
    selector = objects("leader-worker-set")["Service"]["spec"]["selector"]
    assert selector["leaderworkerset.sigs.k8s.io/worker-index"] == "0"


def test_pods_of_a_group_are_pods_of_the_base():
    """Two manifests of one pod would drift: they differ by file, size, device and port alone."""
    (base,) = [d for d in render(ROOT / "base") if d["kind"] == "Deployment"]
    ours = plain(base["spec"]["template"]["spec"])
    for pod in pods("leader-worker-set"):
        assert plain(pod) == ours


def plain(pod: dict) -> dict:
    """A pod without what a group changes on purpose."""
    found = {k: v for k, v in pod.items() if k not in ("containers", "volumes", "tolerations")}
    inner = {k: v for k, v in container(pod).items() if k not in ("args", "resources", "ports")}
    volumes = {v["name"]: v for v in pod["volumes"] if v["name"] != "shm"}
    return {**found, "container": inner, "volumes": volumes}


def test_nothing_speaks_to_the_api_server():
    """A service account without a token, and no role or binding anywhere."""
    for overlay in OVERLAYS:
        found = objects(overlay)
        assert found["ServiceAccount"]["automountServiceAccountToken"] is False
        assert not [kind for kind in found if "Role" in kind]


def test_a_node_can_be_drained():
    """One pod at a time, and a pod that does not serve is never in the way."""
    spec = objects("single-gpu")["PodDisruptionBudget"]["spec"]
    assert spec["maxUnavailable"] == 1
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    rollout = objects("single-gpu")["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    assert rollout == {"maxSurge": 0, "maxUnavailable": 1}  # no second accelerator is waited for


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_everything_selects_the_pods(overlay):
    """Service, budget and monitor select by labels that the pods carry, and ports that they have."""
    found = objects(overlay)
    holder = found.get("Deployment", found.get("LeaderWorkerSet"))["spec"]
    if "leaderWorkerTemplate" in holder:
        labels = holder["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["labels"]
        # set by the controller
        labels = {**labels, "leaderworkerset.sigs.k8s.io/worker-index": "0"}
    else:
        labels = holder["template"]["metadata"]["labels"]
    ports = {p["name"] for p in container(pods(overlay)[0])["ports"]}
    selectors = [
        found["Service"]["spec"]["selector"],
        found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        found["PodMonitor"]["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    assert {p["targetPort"] for p in found["Service"]["spec"]["ports"]} <= ports
    assert {p["port"] for p in found["PodMonitor"]["spec"]["podMetricsEndpoints"]} <= ports


def test_the_operators_rules_are_the_rules():
    """PrometheusRule holds the groups of the tested rule file, letter by letter."""
    ours = yaml.safe_load((DEPLOY / "prometheus/stallwatch.rules.yaml").read_text())
    assert objects("cpu")["PrometheusRule"]["spec"] == ours


def test_every_exit_code_is_mapped():
    """docs/deploy-kubernetes.md says of each code of the daemon what a pod makes of it."""
    text = (DOCS / "deploy-kubernetes.md").read_text()
    told = {int(n) for n in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    codes = {getattr(daemon_main, name) for name in vars(daemon_main) if name.startswith("EXIT_")}
    assert told == codes | {78}


@pytest.fixture
def folder() -> Iterator[Path]:
    with place() as path:
        yield path


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("name", ["leader", "worker"])
def test_a_stall_on_one_node_ends_that_pod(folder, name):
    """With the group's own settings a stall is a report, and exit 1: what the controller waits for."""
    given = tomllib.loads((ROOT / f"overlays/leader-worker-set/{name}.toml").read_text())
    settings = {"restart": given["engines"]["chat"]["restart"]}
    supervisor = {"exit_when": given["supervisor"]["exit_when"]}
    with daemon(folder, settings, supervisor=supervisor) as run:
        run.wait_ready()
        run.order("worker", "stall")
        assert run.wait_exit() == daemon_main.EXIT_BUDGET
        shown = run.cli("stalls", "-o", "json")
        assert "worker:0/model" in shown.stdout
        assert run.log().count("engine up") == 1  # it was not started again
