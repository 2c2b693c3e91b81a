"""The parts of the chart's `values.schema.json` that are the gateway's own settings.

python -m tests.deploy.values        brings the file up to date
"""

from __future__ import annotations

import copy
import json
from typing import Any

from gateway import schemes
from gateway.settings import Settings
from tests.deploy.chart import CHART

FILE = CHART / "values.schema.json"

THE_CHARTS = ("pools", "state", "host", "port", "insecure", "auth", "admin_port", "admin_host", "tls")
"""Settings that have values of their own."""

OF_POOLS = ("role", "models", "lane", "routing", "deterministic", "isolate_cache", "priority")
"""What a pool has in the chart as in gateway.yaml."""

EXACT = 2**53 - 1
"""Helm reads numbers as floats: larger ones would be rounded, and are written in quotes."""

WORDS = ("title", "default", "description", "format", "ge", "le", "lt", "discriminator")


def current(schema: dict[str, Any]) -> dict[str, Any]:
    """A chart's schema with these parts as the settings have them now."""
    made = Settings.model_json_schema()
    sections = made["$defs"]
    properties = made["properties"]
    properties["scheme"]["enum"] = list(schemes.names())
    sections["Routing"]["properties"]["slack"] = {"anyOf": [{"type": "number", "minimum": 0}, {"enum": ["inf"]}]}
    schema = copy.deepcopy(schema)
    schema["properties"]["settings"] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {name: _part(each) for name, each in properties.items() if name not in THE_CHARTS},
    }
    pool = schema["$defs"]["pool"]
    pool["properties"] |= {name: _part(sections["Pool"]["properties"][name]) for name in OF_POOLS}
    used: list[str] = []
    _references([schema["properties"]["settings"], pool], sections, used)
    own = {name: each for name, each in schema["$defs"].items() if name[0].islower()}
    schema["$defs"] = own | {name: _part(sections[name]) for name in sorted(used)}
    return schema


def _part(told: Any) -> Any:
    """A part of the settings' schema as the chart has it: words left out, and numbers as Helm can hand them on."""
    if isinstance(told, list):
        return [_part(each) for each in told]
    if not isinstance(told, dict):
        return told
    kind = told.get("type")
    if kind in ("integer", "number"):
        return _number(told, kind)
    part = {key: _part(value) for key, value in told.items() if key not in WORDS}
    if "properties" in told:
        part["properties"] = {name: _part(each) for name, each in told["properties"].items()}
    return part


def _number(told: dict[str, Any], kind: str) -> dict[str, Any]:
    least = told.get("ge", told.get("minimum", told.get("exclusiveMinimum")))
    most = told.get("le", told.get("maximum"))
    number: dict[str, Any] = {"type": kind}
    if least is not None:
        number["minimum"] = least
    if kind == "integer":
        number["maximum"] = min(EXACT, EXACT if most is None else most)
    digits = r"^[0-9]+$" if kind == "integer" else r"^[0-9]+(\.[0-9]+)?$"
    return {"anyOf": [number, {"type": "string", "pattern": digits}]}


def _references(told: Any, sections: dict[str, Any], used: list[str]) -> None:
    """Note the sections that a part refers to, and those that these refer to."""
    if isinstance(told, list):
        for each in told:
            _references(each, sections, used)
    elif isinstance(told, dict):
        name = str(told.get("$ref", "")).removeprefix("#/$defs/")
        if name in sections and name not in used:
            used.append(name)
            _references(sections[name], sections, used)
        _references(list(told.values()), sections, used)


def written(schema: dict[str, Any]) -> str:
    """As the file has it."""
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(written(current(json.loads(FILE.read_text()))))
