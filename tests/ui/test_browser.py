"""The pages in a real browser: by the keyboard alone, light and dark, wide and narrow.

With `UI_SHOTS` set to a folder, pictures of every page are left there, to be looked at.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.browser import CONTRAST, Tab, browser
from tests.evidence.ledger import request, write
from tests.harness import FakeWorker, Gate, Reply, Seen, completion, gateway, pool
from tests.redis_server import RedisServer
from tests.test_joint_lanes import gateways
from tests.ui.test_site import HOSTILE, ask

pytestmark = pytest.mark.first

KEY = "admin key"

CHANGED: dict[tuple[str, int], dict[str, Any]] = {("2:0", 0): {"answer": "other"}, ("7:0", 1): {"seed": 7}}
"""What is not the same in run b."""

PAGES = {
    "replicas": "",
    "lanes": "lanes",
    "sessions": "sessions?run=a",
    "racing": "sessions?run=a&racing=on",
    "requests": "requests?run=a",
    "live": "requests",
    "runs": "runs",
    "diff": "diff?a=a&b=b",
    "error": "requests?run=none",
}

LOOK = f"""(() => {{
  {CONTRAST}
  const shown = [...document.querySelectorAll("details")];
  shown.slice(0, 2).forEach(each => each.open = true);
  return {{
    title: document.title,
    overflow: document.documentElement.scrollWidth - innerWidth,
    faint: faintIn("body *"),
    page: light(colour(getComputedStyle(document.body).backgroundColor)),
    images: document.images.length,
    scripts: document.scripts.length,
    bare: [...document.querySelectorAll(".sign")].filter(each => !/\\p{{L}}|\\d/u.test(each.textContent)).length,
    headings: [...document.querySelectorAll("h1,h2,h3")].map(each => Number(each.tagName[1])),
    wide: [...document.querySelectorAll("main *")].filter(each => each.checkVisibility()
      && each.getBoundingClientRect().right > innerWidth + 1 && !each.closest(".sr, thead"))
      .map(each => each.outerHTML.slice(0, 80)),
  }};
}})()"""

STOP = """(() => {
  const at = document.activeElement, style = getComputedStyle(at), box = at.getBoundingClientRect();
  return {name: at.id || at.textContent.trim(), tag: at.tagName, outline: parseFloat(style.outlineWidth),
    seen: style.outlineStyle !== "none" && box.width > 0 && box.bottom > 0 && box.top < innerHeight};
})()"""


@asynccontextmanager
async def stage(ledger: Path, **settings: Any) -> AsyncIterator[Gate]:
    """A gateway with requests of its own and two runs that part."""
    async with FakeWorker() as worker, FakeWorker() as other:
        pools = (
            pool("policy", worker.url, other.url, lane={"scope": "replica", "limit": 2}),
            pool("reward", other.url, role="reward", models=["scores"]),
        )
        async with gateway(*pools, ledger={"path": str(ledger), "bodies": True}, **settings) as gate:
            for session in (HOSTILE, "17:10", "17:2", "no-space-" * 20):
                await ask(gate, session, HOSTILE)
            for run in "ab":
                folder = gate.ledger / run
                turns = [(f"{task}:0", turn) for task in range(30) for turn in (0, 1)]
                changed = CHANGED if run == "b" else {}
                records = [request(*turn, run=run, **changed.get(turn, {})) for turn in turns]
                hostile = request(HOSTILE, 0, run=run, racing=True, answer=f"{HOSTILE}{run}", replica="policy-1")
                write(folder, *records, hostile)
            yield gate


async def stops(tab: Tab, name: str, most: int = 40) -> list[dict[str, Any]]:
    """Press Tab until that element is reached; where the focus was on the way."""
    found: list[dict[str, Any]] = []
    while not found or found[-1]["name"] != name:
        assert len(found) < most, (name, found)
        await tab.press("Tab")
        found.append(await tab.run(STOP))
    return found


async def test_the_keyboard_alone_leads_from_the_log_in_to_where_two_runs_part(tmp_path: Path) -> None:
    async with stage(tmp_path, auth={"admin_key": KEY}) as gate, browser() as tab:
        await tab.look(1280, 900, "light")
        await tab.open(f"{gate.url}/ui/")
        seen = await stops(tab, "key")
        await tab.press(*"wrong")
        await tab.follow("Enter")
        assert "That is not the admin key." in await tab.run("document.querySelector('[role=alert]').textContent")
        seen += await stops(tab, "key")
        await tab.press(*KEY)
        await tab.follow("Enter")
        assert await tab.run("document.querySelector('h1').textContent") == "Replicas"

        seen += await stops(tab, "Skip to the content", 1)
        await tab.press("Enter")
        assert await tab.run("document.activeElement.id") == "content"
        await tab.open(f"{gate.url}/ui/")
        seen += await stops(tab, "Runs")
        await tab.follow("Enter")
        assert await tab.run("document.querySelector('[aria-current]').textContent") == "Runs"

        for side, run in (("a", "a"), ("b", "b")):
            seen += await stops(tab, f"run-{side}")
            await tab.press(run)
            assert await tab.run(f"document.querySelector('#run-{side}').value") == run
        seen += await stops(tab, "Compare")
        await tab.follow("Enter")
        assert "Different: 3 roots" in await tab.run("document.querySelector('main').textContent")

        while (await tab.run(STOP))["tag"] != "SUMMARY":
            await tab.press("Tab")
            seen.append(await tab.run(STOP))
        await tab.press("Enter")
        assert await tab.run("document.activeElement.parentElement.open") is True
        assert "answer ▲ differs" in await tab.run("document.activeElement.parentElement.innerText")

        seen += await stops(tab, "Compare")
        await tab.open(f"{gate.url}/ui/sessions?run=a")
        seen += await stops(tab, "0:0")
        await tab.follow("Enter")
        assert "Session 0:0" in await tab.run("document.querySelector('main').textContent")
        seen += await stops(tab, "Log out")
        await tab.follow("Enter")
        assert await tab.run("document.querySelector('h1').textContent") == "Log in to detgate"
        await tab.open(f"{gate.url}/ui/")
        assert await tab.run("document.querySelector('h1').textContent") == "Log in to detgate"
        assert [stop for stop in seen if not stop["seen"] or stop["outline"] < 2] == []


async def _looked(tab: Tab, gate: Gate, scheme: Literal["light", "dark"], width: int, *but: str) -> None:
    await tab.look(width, 800, scheme)
    shots = os.environ.get("UI_SHOTS")
    for name, page in PAGES.items():
        if name in but:
            continue
        await tab.open(f"{gate.url}/ui/{page}")
        found = await tab.run(LOOK)
        about = (name, scheme, width, found)
        assert found["title"].endswith(" · detgate"), about
        assert found["overflow"] <= 0, about
        assert found["wide"] == [], about
        assert found["faint"] == [], about
        assert (found["page"] > 0.8) if scheme == "light" else (found["page"] < 0.05), about
        assert (found["images"], found["scripts"], found["bare"]) == (0, 0, 0), about
        assert all(
            after <= before + 1 for before, after in zip([0, *found["headings"]], found["headings"], strict=False)
        )
        tree = (await tab.ask("Accessibility.getFullAXTree"))["nodes"]
        controls = [node for node in tree if node.get("role", {}).get("value") in _CONTROLS]
        assert [node for node in controls if not node["name"]["value"]] == [], about
        if shots is not None:
            await tab.shot(Path(shots) / f"{name}-{scheme}-{width}.png")


_CONTROLS = {"link", "button", "checkbox", "combobox", "textbox", "DisclosureTriangle"}


async def test_every_page_can_be_read_light_and_dark_wide_and_narrow_and_no_name_speaks_in_it(tmp_path: Path) -> None:
    async with stage(tmp_path) as gate, browser() as tab:
        await _looked(tab, gate, "light", 1280, "racing", "live")
        await _looked(tab, gate, "dark", 360, "sessions", "requests", "error")
        own = [address for address in tab.fetched if address.startswith(f"{gate.url}/ui/")]
        assert set(tab.fetched) == set(own)
        assert [each for each in tab.complaints if "404" not in each] == []


ROWS = "[...document.querySelectorAll('main tbody tr')].map(row => [...row.cells].map(cell => cell.innerText.trim()))"
TEXT = "document.querySelector('main').innerText"
REQUESTS = "[...document.querySelectorAll('main summary')].map(each => each.innerText)"


async def test_each_gateway_of_a_store_shows_the_whole_run_to_whoever_logged_in_at_one(tmp_path: Path) -> None:
    met = asyncio.Barrier(2)

    async def script(seen: Seen, reply: Reply) -> None:
        if "race" in seen.body.decode():
            await met.wait()
        reply.json(completion())

    told = {"ledger": {"path": str(tmp_path), "bodies": True}, "auth": {"admin_key": KEY}}
    async with RedisServer() as server, FakeWorker(script) as worker:
        pools = pool("policy", worker.url), pool("reward", worker.url, role="reward", models=["scores"])
        async with gateways(2, server.url, *pools, **told) as (one, two), browser() as tab:
            await ask(one, "17:2", "first")
            await ask(two, "17:2", "second")
            await ask(two, "17:10")
            await asyncio.gather(ask(one, "18:0", "race 1"), ask(two, "18:0", "race 2"))
            write(tmp_path / "before", request("17:2", 0, run="before"), request("17:2", 1, run="before"))

            await tab.open(f"{one.url}/ui/requests")
            await stops(tab, "key")
            await tab.press(*KEY)
            await tab.follow("Enter")
            seen = []
            for gate in (one, two):
                await tab.open(f"{gate.url}/ui/requests")
                seen.append(await tab.run(REQUESTS))
                assert "Not all is here" not in await tab.run(TEXT)
                await tab.open(f"{gate.url}/ui/sessions?racing=on")
                assert [row[0] for row in await tab.run(ROWS)] == ["18:0"]
                await tab.open(f"{gate.url}/ui/lanes")
                assert "for all gateways" in await tab.run(TEXT)
                await tab.open(f"{gate.url}/ui/diff?a=before&b=r")
                assert "Different" in await tab.run(TEXT)
            expected = [
                ["17:2", "index 0", "✓ delivered 200"],
                ["17:2", "index 1", "✓ delivered 200"],
                ["17:10", "index 0", "✓ delivered 200"],
                ["18:0", "index 0", "✓ delivered 200"],
                ["18:0", "index 1", "✓ delivered 200"],
            ]
            for shown in seen:
                assert [each.split("\n")[:3] for each in shown] == expected
            assert seen[0] == seen[1]
            assert [each for each in tab.complaints if "401" not in each] == []
