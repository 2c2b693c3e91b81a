"""The documents say what the code does: made parts are current, links and names resolve, examples run."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from gateway import schemes
from gateway.cli import _parser
from gateway.core import fields, routing
from gateway.core.guarantee import LOWERS
from gateway.demo import POLICY, REWARD, WELCOME
from gateway.settings import Settings
from tests import docs_tables, faults
from tests.harness import MODEL, FakeWorker, gateway, pool

ROOT = docs_tables.ROOT
DOCUMENTS = list(docs_tables.documents())

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def read(name: str) -> str:
    return (ROOT / name).read_text()


def blocks(language: str) -> Iterator[tuple[Path, str]]:
    """The code blocks of a language in all documents."""
    for document in DOCUMENTS:
        for block in re.findall(rf"^```{language}(?: [^\n]*)?\n(.*?)^```$", document.read_text(), re.M | re.S):
            yield document, block


def rows(text: str, columns: int) -> list[list[str]]:
    """The rows of the tables that have so many columns, without their heads."""
    lines = [line.strip("|").split(" | ") for line in text.splitlines() if re.match(r"\| (?!---|--)", line)]
    return [[cell.strip() for cell in line] for line in lines if len(line) == columns]


# --- documents as such


@each_document
def test_parts_made_from_the_code_are_current(document: Path) -> None:
    text = document.read_text()
    assert docs_tables.rendered(text) == text, "run: python -m tests.docs_tables"


@each_document
def test_links_resolve(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        found = (document.parent / name).resolve() if name else document
        assert found.exists(), target
        assert found.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(found.read_text()), target


def anchors(text: str) -> set[str]:
    """What the headings of a document are linked by."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_every_document_is_linked_from_the_readme(readme: str) -> None:
    linked = set(re.findall(r"\]\((docs/[^)#]+)", read(readme)))
    ours = {str(document.relative_to(ROOT)) for document in DOCUMENTS if document.is_relative_to(docs_tables.DOCS)}
    assert {name for name in ours - linked if not name.startswith("docs/decisions/0")} == set()


@each_document
def test_no_path_of_a_machine_is_told(document: Path) -> None:
    assert re.findall(r"(?<![\w.])/(?:home|root|tmp|work|Users)\b", document.read_text()) == []


@each_document
def test_named_files_and_tests_are_there(document: Path) -> None:
    for name, _, test in re.findall(r"`((?:gateway|tests)/[\w./-]+?)(::(\w+))?`", document.read_text()):
        path = ROOT / name
        assert path.exists(), name
        if test:
            assert re.search(rf"^(?:(?:async )?def|class) {test}\b|^{test} = ", path.read_text(), re.M), (name, test)


@each_document
def test_named_modules_and_functions_are_there(document: Path) -> None:
    for dotted in re.findall(r"`(?:python -m )?((?:gateway|tests)(?:\.\w+)+)", document.read_text()):
        module, _, attribute = dotted.rpartition(".")
        try:
            import_module(dotted)
        except ModuleNotFoundError:
            assert hasattr(import_module(module), attribute), dotted


# --- commands and configurations


def command_lines() -> list[str]:
    written = [line for _, block in blocks("sh") for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    inline = re.findall(r"`(detgate [^`]+)`", "\n".join(document.read_text() for document in DOCUMENTS))
    lines = {line.partition(" || ")[0] for line in [*written, *inline]}
    return sorted(line for line in lines if line.startswith("detgate "))


@pytest.mark.parametrize("line", command_lines())
def test_commands_are_understood(line: str) -> None:
    words = shlex.split(line.replace("IDENTITY", "17:3").replace("INDEX", "0"))[1:]
    if words == ["sim"]:
        words += ["--engine", "vllm"]
    if words[-1] == "--help":
        with pytest.raises(SystemExit, match="0"):
            _parser().parse_args(words)
    else:
        assert _parser().parse_args(words).command


@pytest.mark.parametrize("document", sorted((ROOT / "docs/how-to").glob("*.md")), ids=lambda path: path.name)
def test_replicas_are_named_where_the_engines_that_the_page_starts_listen(document: Path) -> None:
    started = re.findall(r"^detgate (launch-profile .*)$", document.read_text(), re.M)
    ports = {_parser().parse_args(shlex.split(line)).port for line in started}
    named = [Settings.load(None, {}, yaml.safe_load(block)) for at, block in blocks("yaml") if at == document]
    urls = {replica.url for settings in named for pool in settings.pools for replica in pool.replicas}
    assert not started or {urlsplit(url).port for url in urls} == ports


def test_targets_of_make_are_there() -> None:
    there = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.M))
    told = {target for document in DOCUMENTS for target in re.findall(r"`make ([a-z-]+)", document.read_text())}
    assert told <= there


@pytest.mark.parametrize("block", [block for _, block in blocks("yaml")])
def test_configurations_are_valid(block: str, tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(block)
    assert Settings.load(file, {}, {}).warnings() == []


def test_the_first_request_is_the_one_that_the_demo_prints() -> None:
    printed = WELCOME.format(url="http://127.0.0.1:8000", run="", policy=POLICY, reward=REWARD)
    (curl,) = (block for document, block in blocks("sh") if "curl" in block and document.name == "README.md")
    assert squeezed(curl) in squeezed(printed)


def squeezed(text: str) -> str:
    return re.sub(r"[\s\\]+", " ", text).strip()


def test_what_the_readme_says_of_the_first_answer_is_computed() -> None:
    seed = schemes.load("v1").seed(42, "demo", 0, None)
    replica = routing.best("demo:0", ["policy-0", "policy-1"])
    assert f"\nx-detgate-seed: {seed}\nx-detgate-replica: {replica}\n" in read("README.md")


async def test_the_python_of_the_readme_runs() -> None:
    (block,) = (block for document, block in blocks("python") if document.name == "README.md")
    async with FakeWorker() as worker, gateway(pool("policy", worker.url)) as gate:
        program = block.replace("http://127.0.0.1:8000", gate.url).replace(POLICY, MODEL)
        await asyncio.to_thread(exec, compile(program, "README.md", "exec"), {})
        assert [record["request_id"] for record in gate.records() if record["event"] == "opened"] == ["17:3:0"]


# --- what the tables say


def test_every_reason_is_explained() -> None:
    explained = {cells[0].strip("`"): cells[1] for cells in rows(section("docs/guarantees.md", "Reasons"), 4)}
    del explained["reason"]
    assert explained.keys() == LOWERS.keys() | {
        "unverified", "retry-shared", "replicas-differ", "engine-doubted", "cloned",
    }  # fmt: skip
    given = set(reasons_given())
    assert {"racing", "home-down", "unverified"} <= given
    assert given <= explained.keys()
    for reason, level in explained.items():
        assert level == LOWERS.get(reason, "–"), reason


def reasons_given() -> Iterator[str]:
    """The reasons that the code names where it gives one."""
    for source in faults.sources():
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Call) and re.search(r"(flags|reasons)\.append$", ast.unparse(node.func)):
                yield from words(*node.args)
            elif isinstance(node, ast.List) and source.name == "statement.py":
                yield from words(*node.elts)
            elif isinstance(node, ast.keyword) and node.arg == "reason" and source.parent.name == "findings":
                yield from words(*(part for part in ast.walk(node.value) if isinstance(part, ast.expr)))
            elif isinstance(node, ast.Call | ast.Tuple) and source.name == "indexing.py":
                parts = node.args if isinstance(node, ast.Call) else node.elts
                yield from (word for word in words(*parts) if word == "racing" or word.startswith("retry-"))


def words(*nodes: ast.expr) -> Iterator[str]:
    yield from (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def section(name: str, heading: str) -> str:
    """A document's section, up to the next heading of its level."""
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", read(name), re.M | re.S)
    assert found, heading
    return found[1]


def test_every_error_code_is_explained_with_its_status() -> None:
    told = [(cells[1].strip("`"), int(cells[0])) for cells in rows(read("docs/errors.md"), 4) if cells[0].isdecimal()]
    assert len(set(told)) == len(told)
    assert set(told) == faults.raised()


def test_every_header_that_is_read_or_given_is_explained() -> None:
    told = {name.lower() for name in re.findall(r"`([A-Za-z-]+)(?:: [^`]*)?`", read("docs/headers.md"))}
    sources = [inspect.getsource(import_module(f"gateway.{name}")) for name in ("core.identity", "reader", "keys")]
    wanted = set(re.findall(r'(?:get\(|\[)b"([a-z-]+)"', "".join(sources)))
    assert {"x-session-id", "x-detgate-pool", "authorization"} <= wanted
    source = inspect.getsource(import_module("gateway.statement"))
    given = set(re.findall(r"(?:\b|\\n|%b)(x-[a-z-]+|retry-after)(?=: |\")", source))
    assert {"x-detgate-seed", "x-detgate-guarantee"} <= given
    assert wanted | given <= told
    stay = {name.decode() for name in fields._NOT_UPSTREAM - fields.HOP_BY_HOP}
    assert stay - {"content-length", "host"} <= told


# --- the worked example


async def test_the_worked_example_comes_out_as_it_is_told() -> None:
    text = read("docs/request-path.md")
    body = re.search(r"^\{\"model\".*\}$", text, re.M)
    assert body
    async with FakeWorker() as one, FakeWorker() as other:
        fleet = pool("policy", one.url, other.url, models=[POLICY])
        async with gateway(fleet) as gate:
            answer = await gate.http.post("/sessions/demo/v1/chat/completions", content=body[0])
            (opened,) = (record for record in gate.records() if record["event"] == "opened")
    (seen,) = one.seen + other.seen
    told = answer.headers
    for value in (opened["digest"], told["x-detgate-seed"], told["x-detgate-request-id"], seen.header("x-request-id")):
        assert f"`{value}`" in text
    assert f"\n{seen.body.decode()}\n" in text
    for name in ("policy-0", "policy-1"):
        assert re.search(rf"`{name}`\s(is )?{routing.score('demo:0', name)}", text)
    assert f"{routing.score('demo:0', told['x-detgate-replica'])}: `{told['x-detgate-replica']}`" in text
    assert f"`X-Detgate-Guarantee: {told['x-detgate-guarantee']}`" in text


def test_the_functions_of_the_path_are_there() -> None:
    names = set(re.findall(r"`([A-Za-z_]+\.[a-z_]+)`", read("docs/request-path.md"))) - {"auth.api_keys"}
    assert len(names) > 15
    defined = "\n".join(f"{source.stem}\n{source.read_text()}" for source in faults.sources())
    for name in names:
        holder, _, function = name.partition(".")
        assert re.search(rf"^class {holder}\b|^{holder}$", defined, re.M), name
        assert re.search(rf"^ *(?:async )?def {function}\b", defined, re.M), name
