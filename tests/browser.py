"""A real Chromium without a window: what it shows, and what its keys do.

    async with browser() as tab:
        await tab.open(url)
        await tab.press("Tab", "Enter")
        assert await tab.run("document.title") == "…"

`chromium` finds it, and `CONTRAST` is a script that finds text that is hard to read; the rest speaks to it by its own
debugging protocol.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Literal

import aiohttp

QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run")

CONTRAST = """
const channel = value => value <= .03928 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4;
const light = ([r, g, b]) => .2126 * channel(r / 255) + .7152 * channel(g / 255) + .0722 * channel(b / 255);
const colour = text => text.match(/[\\d.]+/g).map(Number);
const behind = element => {
  for (let each = element; each; each = each.parentElement) {
    const found = colour(getComputedStyle(each).backgroundColor);
    if (found.length === 3 || found[3] > 0) return found;
  }
  return [255, 255, 255];
};
const faintIn = selector => [...document.querySelectorAll(selector)].filter(element =>
  element.checkVisibility() && element.tagName !== "SCRIPT" &&
  [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim()))
  .map(element => {
    const [a, b] = [light(colour(getComputedStyle(element).color)), light(behind(element))];
    return [element.textContent.slice(0, 30), (Math.max(a, b) + .05) / (Math.min(a, b) + .05)];
  }).filter(([, ratio]) => ratio < 4.5);
"""
"""Defines `light`, `colour`, and `faintIn(selector)`: texts of less contrast than WCAG AA asks, with their ratio."""

_KEYS = {"Tab": 9, "Enter": 13, " ": 32, "End": 35, "Home": 36, "ArrowUp": 38, "ArrowDown": 40}


def chromium() -> str:
    """Where the browser is."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert found is not None, "a browser is needed: apt-get install chromium"
    return found


class Tab:
    """One page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.session = ""
        self.complaints: list[str] = []
        """What the browser logged as an error: what its policy blocked, what it could not load."""
        self.fetched: list[str] = []
        """The addresses that were asked for."""

    async def listen(self) -> None:
        """Hear what the browser says."""
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif told["method"] == "Network.requestWillBeSent":
                self.fetched.append(told["params"]["request"]["url"])
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.complaints.append(told["params"]["entry"]["text"])
            elif told["method"] == "Runtime.exceptionThrown":
                self.complaints.append(told["params"]["exceptionDetails"]["text"])

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        about = {"sessionId": self.session} if self.session else {}
        await self._socket.send_json({"id": number, "method": method, "params": params, **about})
        async with asyncio.timeout(60):
            told = await answer
        assert "error" not in told, (method, told)
        result: dict[str, Any] = told["result"]
        return result

    async def open(self, url: str) -> None:
        """Go to an address, and wait until the page is there."""
        self._loaded.clear()
        await self.ask("Page.navigate", url=url)
        await self._here()

    async def _here(self) -> None:
        async with asyncio.timeout(60):
            await self._loaded.wait()

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        told = await self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def press(self, *keys: str) -> None:
        """Press keys, one after the other; one letter writes itself."""
        for key in keys:
            text = "\r" if key == "Enter" else key if len(key) == 1 else ""
            event = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS.get(key, 0), "text": text}
            await self.ask("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **event)
            await self.ask("Input.dispatchKeyEvent", type="keyUp", **event)

    async def follow(self, *keys: str) -> None:
        """Press keys, and wait for the page that the last one leads to."""
        self._loaded.clear()
        await self.press(*keys)
        await self._here()

    async def look(self, width: int, height: int, scheme: Literal["light", "dark"]) -> None:
        """Be a screen of that size, for a reader who likes it light or dark."""
        await self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.ask("Emulation.setScrollbarsHidden", hidden=True)
        await self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def shot(self, file: Path) -> None:
        """A picture of the whole page."""
        told = await self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        await asyncio.to_thread(file.write_bytes, base64.b64decode(told["data"]))


@asynccontextmanager
async def browser() -> AsyncIterator[Tab]:
    """A browser with one page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            chromium(),
            *QUIET,
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(60):
                while not (line := (await process.stderr.readline()).decode()).startswith("DevTools listening on "):
                    assert line or process.returncode is None, "the browser ended"
            silent = asyncio.create_task(_drain(process.stderr))
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(line.split()[-1], max_msg_size=0) as socket,
            ):
                tab = Tab(socket)
                hearing = asyncio.create_task(tab.listen())
                target = await tab.ask("Target.createTarget", url="about:blank")
                attached = await tab.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
                tab.session = attached["sessionId"]
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await tab.ask(f"{domain}.enable")
                yield tab
                hearing.cancel()
            silent.cancel()
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(65536):
        pass
