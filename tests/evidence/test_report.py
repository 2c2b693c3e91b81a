"""The page that shows where two runs parted, as a real browser draws it."""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from gateway.evidence.causes import CAUSES, MARKS
from tests.browser import CONTRAST, QUIET, chromium
from tests.evidence.ledger import request, write

HOSTILE = '</script><img src=x onerror="document.title=1">'

WATCH = """<script>
window.errors = [];
addEventListener("error", event => errors.push(event.message));
addEventListener("securitypolicyviolation", event => errors.push("blocked: " + event.violatedDirective));
</script>"""

LOOK = (
    f"<script>{CONTRAST}"
    + """
const cells = () => [...document.querySelectorAll(".cell")];
const chosen = () => document.querySelector(".cell[aria-selected=true]").getAttribute("aria-label");
const press = key => document.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
const found = {
  verdict: document.querySelector("h1").textContent,
  first: document.querySelector("#first p").textContent,
  cells: cells().map(cell => cell.getAttribute("aria-label")),
  start: chosen(),
  detail: document.querySelector("#detail").textContent,
  differs: [...document.querySelectorAll("#detail tr.differs th")].map(each => each.textContent),
  bars: document.querySelectorAll("#strip rect").length,
  legend: [...document.querySelectorAll("#legend button[data-cause]")].map(each => each.textContent),
  names: [...document.querySelectorAll(".name")].map(each => each.textContent),
  images: document.images.length,
  fetched: performance.getEntriesByType("resource").length,
  page: light(colour(getComputedStyle(document.body).backgroundColor)),
  overflow: document.documentElement.scrollWidth - innerWidth,
  faint: faintIn("main *"), keys: {},
};
for (const key of ["n", "n", "p", "End", "Home", "ArrowDown", "ArrowRight", "ArrowLeft", "ArrowUp"]) {
  press(key);
  (found.keys[key] ||= []).push(chosen());
}
press("End");
document.querySelector("#jump").click();
found.jumped = [chosen(), document.activeElement.getAttribute("aria-label")];
const button = document.querySelector("#legend button[data-cause]");
button.click();
found.hidden = [button.getAttribute("aria-pressed"), document.querySelectorAll(".cell.out").length];
found.stops = cells().filter(cell => cell.tabIndex === 0).length;
found.errors = errors;
document.body.append(Object.assign(document.createElement("pre"), {id: "found", textContent: JSON.stringify(found)}));
</script>"""
)


def looked_at(page: Path, *flags: str) -> dict[str, Any]:
    """What a real Chromium shows of a page."""
    text = page.read_text().replace("<head>", f"<head>{WATCH}", 1).replace("</body>", f"{LOOK}</body>", 1)
    watched = page.with_name(f"watched-{page.name}")
    watched.write_text(text)
    command = [chromium(), *QUIET, f"--user-data-dir={page.parent}/profile", *flags, "--dump-dom", watched.as_uri()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=90)
    told = re.search(r'<pre id="found">(.*?)</pre>', ran.stdout, re.S)
    assert told is not None, ran.stderr[-2000:]
    found: dict[str, Any] = json.loads(html.unescape(told[1]))
    return found


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page with every cause."""
    turns = range(4)
    a = [request(f"{task}:0", turn) for task in range(10) for turn in turns]
    b = [request(f"{task}:0", turn) for task in range(10) for turn in turns]

    def change(task: int, turn: int, **changes: Any) -> None:
        b[task * 4 + turn] = request(f"{task}:0", turn, **changes)

    change(1, 1, prompt="another")
    for turn in (2, 3):
        change(1, turn, prompt=f"another {turn}")
    change(2, 0, prompt="2:0 1", racing=True)
    change(2, 1, prompt="2:0 0", racing=True)
    change(3, 0, seed=7, answer="other")
    change(4, 0, attempts=[{"replica": "policy-1", "outcome": "answered"}])
    change(5, 0, engine="vllm-2")
    change(
        6, 0, attempts=[{"replica": "policy-0", "outcome": "broken"}, {"replica": "policy-1", "outcome": "answered"}]
    )
    change(7, 3, answer="other")
    b[8 * 4 + 3] = []
    a += [request(HOSTILE, 0)]
    b += [request(HOSTILE, 0, answer="other")]
    write(tmp_path / "a", *a)
    write(tmp_path / "b", *b)
    file = tmp_path / "report.html"
    assert main(["diff", "a", "b", "--ledger", str(tmp_path), "--html", str(file)]) == 1
    return file


def test_what_cannot_be_seen_is_written_out_in_page_and_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unseen = "\u202a\u202e\u2066\u2069\u200e\u200f\u2028\x7f\x9b"
    for run in "ab":
        body = json.dumps({"model": "m", "prompt": f"{unseen}{run}"}, ensure_ascii=False)
        write(tmp_path / run, request(f"s{unseen}", 0, prompt=run, request_body=body))
    file = tmp_path / "report.html"
    assert main(["diff", "a", "b", "--ledger", str(tmp_path), "--html", str(file)]) == 1
    written = "".join(f"\\u{ord(one):04x}" for one in unseen)
    text, page = capsys.readouterr().out, file.read_text()
    assert f"s{written} index 0" in text
    assert f'prompt: "{written}a" in A, "{written}b" in B' in text
    assert json.dumps(f"s{written} index 0")[1:-1] in page
    for shown in (text, page):
        assert [one for one in shown if one in unseen] == []
    assert (
        json.loads(page.split('id="data">')[1].split("</script>")[0])["differences"][0]["where"]
        == f"s{written} index 0"
    )


def test_a_browser_draws_the_page_and_keys_move_in_it(page: Path) -> None:
    found = looked_at(page, "--window-size=1280,900", "--blink-settings=preferredColorScheme=1")
    assert found["errors"] == []
    assert (found["images"], found["fetched"]) == (0, 0)
    assert found["faint"] == []
    assert found["page"] > 0.8
    assert found["verdict"] == "Different: 10 roots, and 2 that follow, of 41 requests"
    assert "digest 1:0 1 in A, another in B" in found["first"]
    assert found["start"] == "1:0 index 1: other-prompt, root"
    assert found["cells"][:4] == [
        "1:0 index 1: other-prompt, root",
        "1:0 index 2: other-prompt, downstream",
        "1:0 index 3: other-prompt, downstream",
        "2:0 index 0: other-order, root",
    ]
    assert {label.split(": ")[-1].split(",")[0] for label in found["cells"]} == set(CAUSES)
    assert HOSTILE in found["names"]
    assert found["differs"] == ["prompt", "answer"]
    assert "1:0 index 1" in found["detail"]
    assert found["bars"] > len(CAUSES)
    assert found["legend"][1] == "Pother-prompt 1  +2 downstream"
    keys = found["keys"]
    assert keys["n"] == ["2:0 index 0: other-order, root", "2:0 index 1: other-order, root"]
    assert keys["p"] == ["2:0 index 0: other-order, root"]
    assert keys["Home"] == [found["cells"][0]]
    assert keys["End"] == [found["cells"][-1]]
    assert keys["ArrowDown"] == ["2:0 index 1: other-order, root"]
    assert keys["ArrowRight"] == ["3:0 index 0: other-seed, root"]
    assert keys["ArrowLeft"] == ["2:0 index 1: other-order, root"]
    assert keys["ArrowUp"] == ["1:0 index 1: other-prompt, root"]
    assert found["jumped"] == [found["start"], found["start"]]
    assert found["hidden"] == ["false", 1]
    assert found["stops"] == 1


def test_it_is_dark_where_the_reader_wants_it_and_narrow_where_the_window_is(page: Path) -> None:
    found = looked_at(page, "--window-size=520,900", "--blink-settings=preferredColorScheme=0")
    assert found["errors"] == []
    assert found["page"] < 0.05
    assert found["faint"] == []
    assert found["overflow"] <= 0


def test_the_page_brings_all_that_it_needs(page: Path) -> None:
    text = page.read_text()
    assert re.findall(r'(?:src|href)="?(?!#)', text.replace(HOSTILE, "").replace("src=x", "")) == []
    assert re.findall(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text) == []
    assert "default-src 'none'" in text
    assert set(MARKS) == set(CAUSES)


def test_equal_runs_have_a_page_that_says_so(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / name, request("s", 0))
    file = tmp_path / "report.html"
    assert main(["diff", "a", "b", "--ledger", str(tmp_path), "--html", str(file)]) == 0
    assert '"equal":true' in file.read_text()


def test_a_page_that_cannot_be_written_is_told_before_anything_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nowhere" / "report.html"
    assert main(["diff", "a", "b", "--ledger", str(tmp_path), "--html", str(file)]) == 2
    assert capsys.readouterr().err == f"detgate: {file}: cannot be written: no such file or directory\n"


def test_a_page_that_can_be_written_no_more_hides_no_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in "ab":
        write(tmp_path / run, request("s", 0))
    monkeypatch.setattr("gateway.evidence.files.unwritable", lambda _: None)
    file = tmp_path / "nowhere" / "report.html"
    assert main(["diff", "a", "b", "--ledger", str(tmp_path), "--html", str(file)]) == 2
    told = capsys.readouterr()
    assert told.out == "equal: 1 requests, 1 sessions\n"
    assert told.err == f"detgate: {file}: cannot be written: no such file or directory\n"
