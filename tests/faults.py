"""Which errors the gateway can answer with, read from its code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import gateway
from gateway.core.errors import Fault


def sources() -> list[Path]:
    """The files of the gateway, without the simulated engine."""
    folder = Path(gateway.__file__).parent
    return sorted(source for source in folder.rglob("*.py") if "sim" not in source.relative_to(folder).parts)


def raised() -> set[tuple[str, int]]:
    """Code and status of every fault that is made somewhere."""
    classes = _classes()
    made = {pair for source in sources() for pair in _made(ast.parse(source.read_text()), classes)}
    return {(code, classes[name].status) for name, code in made}


def _classes() -> dict[str, type[Fault]]:
    for module in walk_packages(gateway.__path__, "gateway."):
        if not module.name.startswith(("gateway.sim", "gateway.__main__")):
            import_module(module.name)
    return {fault.__name__: fault for fault in _tree(Fault)}


def _tree(fault: type[Fault]) -> Iterator[type[Fault]]:
    yield fault
    for below in fault.__subclasses__():
        yield from _tree(below)


def _made(module: ast.Module, classes: dict[str, type[Fault]]) -> Iterator[tuple[str, str]]:
    """The class and the code of each fault that a module makes."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
            given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            codes = [value.value for value in given if isinstance(value, ast.Constant)]
            assert len(codes) == len(given), f"the code is not written out: {ast.unparse(node)}"
            yield node.func.id, str(codes[0]) if codes else classes[node.func.id].code
        elif isinstance(node, ast.IfExp):
            for choice in (node.body, node.orelse):
                if isinstance(choice, ast.Name) and choice.id in classes:
                    yield choice.id, classes[choice.id].code
