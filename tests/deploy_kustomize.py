"""As much of kustomize as our manifests use, so that they can be judged without kubectl.

Resources, config maps from files (merged or replaced, without the hash in their names) and
strategic merge patches. Where kubectl is at hand a test holds this against it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

# Lists that are merged by a key; every other list is replaced.
KEYS = {
    "containers": "name",
    "volumes": "name",
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
}

Doc = dict[str, Any]


def render(folder: Path) -> list[Doc]:
    """Every object that `kubectl apply -k FOLDER` would send."""
    plan = yaml.safe_load((folder / "kustomization.yaml").read_text())
    docs: list[Doc] = []
    for name in plan["resources"]:
        path = folder / name
        docs += render(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for given in plan.get("configMapGenerator", ()):
        made = _config_map(folder, given)
        docs = [d for d in docs if d["kind"] != "ConfigMap"] if "behavior" in given else docs
        docs.append(made)
    for given in plan.get("patches", ()):
        docs = _patched(docs, yaml.safe_load((folder / given["path"]).read_text()))
    return docs


def _config_map(folder: Path, given: Doc) -> Doc:
    assert given.get("behavior", "replace") == "replace"
    data = {name: (folder / name).read_text() for name in given["files"]}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": given["name"]},
        "data": data,
    }


def _patched(docs: list[Doc], patch: Doc) -> list[Doc]:
    def meant(doc: Doc) -> bool:
        return bool(
            doc["kind"] == patch["kind"] and doc["metadata"]["name"] == patch["metadata"]["name"]
        )

    assert any(map(meant, docs)), f"a patch for nothing: {patch['kind']}"
    if patch.get("$patch") == "delete":
        return [doc for doc in docs if not meant(doc)]
    return [merge(doc, patch) if meant(doc) else doc for doc in docs]


def merge(old: Any, new: Any, name: str = "") -> Any:
    """Strategic merge: tables are joined, keyed lists by their key, everything else is replaced."""
    if isinstance(old, dict) and isinstance(new, dict):
        joined = dict(old)
        for key, value in new.items():
            if value is None:
                joined.pop(key, None)
            else:
                joined[key] = merge(old[key], value, key) if key in old else value
        return joined
    if isinstance(old, list) and isinstance(new, list) and name in KEYS:
        key = KEYS[name]
        found = {item[key]: item for item in old}
        for item in new:
            found[item[key]] = merge(found[item[key]], item) if item[key] in found else item
        return list(found.values())
    return new
