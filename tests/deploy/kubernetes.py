"""Kubernetes' own schemas, each version read once: its definitions have megabytes."""

from __future__ import annotations

from functools import cache
from typing import Any

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from kubernetes_validate.utils import schema_contents  # type: ignore[import-untyped]
from referencing import Registry, Resource


def check(manifest: dict[str, Any], version: str) -> None:
    """Raises `jsonschema.ValidationError` where this version, such as `1.37`, would refuse it or drop a field."""
    group, _, api = manifest["apiVersion"].rpartition("/")
    name = "-".join(filter(None, (manifest["kind"].lower(), group.partition(".")[0], api)))
    Draft202012Validator(_read(version, name), registry=_definitions(version)).validate(manifest)


def _read(version: str, name: str) -> Any:
    return schema_contents(f"kubernetes-json-schema/v{version}.0-local-strict/{name}.json", version)


@cache
def _definitions(version: str) -> Registry[Any]:
    registry: Registry[Any] = Registry()
    return Resource.from_contents(_read(version, "_definitions")) @ registry
