"""The chart rendered by Helm itself, without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

from gateway.settings import Settings
from tests.deploy import image

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "detgate"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))

Manifest = dict[str, Any]

SECRETS = {"api-keys": "one two", "admin-key": "three", "url": "redis://:secret@redis:6379/0", "token": "hf"}
"""What stands in the secrets that the examples name, by key."""


def example(name: str) -> dict[str, Any]:
    """The values of an example."""
    values: dict[str, Any] = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text())
    return values


def rendered(values: dict[str, Any], *, name: str = "demo", namespace: str = "inference") -> list[Manifest]:
    """The manifests that an installation would make. Raises `helm.HelmError`."""
    with helm.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name=name, namespace=namespace)
    texts = (text for file, text in files.items() if file.endswith(".yaml"))
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


def of(manifests: list[Manifest], kind: str, name: str | None = None) -> list[Manifest]:
    """Those of a kind, and of a name."""
    return [each for each in manifests if each["kind"] == kind and name in (None, each["metadata"]["name"])]


def gateway(manifests: list[Manifest]) -> Manifest:
    """The gateways' own StatefulSet."""
    [found] = [
        each
        for each in of(manifests, "StatefulSet")
        if each["metadata"]["labels"]["app.kubernetes.io/component"] == "gateway"
    ]
    return found


def container(manifest: Manifest) -> dict[str, Any]:
    """The only container of a StatefulSet's pods."""
    [found] = manifest["spec"]["template"]["spec"]["containers"]
    return dict(found)


def port(manifest: Manifest, name: str) -> int:
    """The port of the container that has this name."""
    [found] = [each["containerPort"] for each in container(manifest)["ports"] if each["name"] == name]
    return int(found)


def environment(manifest: Manifest) -> dict[str, str]:
    """The variables of the container, secrets filled in."""
    env = {}
    for each in container(manifest).get("env", []):
        key = each.get("valueFrom", {}).get("secretKeyRef", {}).get("key")
        env[each["name"]] = SECRETS[key] if key is not None else each["value"]
    return env


def settings(manifests: list[Manifest], folder: Path) -> Settings:
    """What the gateway reads in its pod."""
    [configured] = [each for each in of(manifests, "ConfigMap") if "gateway.yaml" in each["data"]]
    file = folder / "gateway.yaml"
    file.write_text(configured["data"]["gateway.yaml"])
    return Settings.load(file, image.environment(image.stages()[1]) | environment(gateway(manifests)), {})
