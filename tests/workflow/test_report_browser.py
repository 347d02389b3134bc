"""Drives report.html in headless Chromium, over the DevTools protocol on a pipe (file descriptors 3 and 4)."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loading import load
from score_centering.figures.experiment import read_experiment
from score_centering.figures.report import render

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.workflow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium"),
]
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip
SCREENS = {"desktop": (1280, 900), "phone": (390, 844)}
DEADLINE_S = 120.0

# Boxes of the texts of each chart that lie on each other or stick out of their chart.
COLLISIONS = """
(() => {
  const found = [];
  for (const svg of document.querySelectorAll('.chart svg')) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')].map((t) => [t.textContent, t.getBoundingClientRect()]);
    texts.forEach(([text, box], i) => {
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 2
          || box.bottom > frame.bottom + 2)
        found.push(svg.parentNode.id + ': ' + text + ' sticks out');
      for (const [other, its] of texts.slice(i + 1)) {
        const width = Math.min(box.right, its.right) - Math.max(box.left, its.left);
        const height = Math.min(box.bottom, its.bottom) - Math.max(box.top, its.top);
        if (width > 1 && height > 2) found.push(svg.parentNode.id + ': ' + text + ' on ' + other);
      }
    });
  }
  return found;
})()
"""

# Smallest WCAG contrast of visible text against the nearest opaque background behind it.
CONTRAST = """
(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const luminance = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  let worst = [21, ''];
  for (const node of document.querySelectorAll('h1,h2,h3,p,li,a,th,td,button,summary,dt,dd,code,pre,text,strong')) {
    if (!node.textContent.trim() || !node.getClientRects().length) continue;
    const style = getComputedStyle(node);
    let behind = node, back = rgba('transparent');
    while (back[3] < 255) {
      back = behind ? rgba(getComputedStyle(behind).backgroundColor) : rgba('white');
      behind = behind?.parentElement;
    }
    const front = rgba(node.matches('text') ? style.fill : style.color);
    const pair = [luminance(front), luminance(back)].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < worst[0]) worst = [ratio, node.textContent.trim().slice(0, 60)];
  }
  return worst;
})()
"""


class Browser:
    """One page of one headless browser."""

    def __init__(self, profile: Path) -> None:
        command_in, self._to = os.pipe()
        self._from, replies_out = os.pipe()
        onto_3_and_4 = f'exec "$@" 3<&{command_in} 4>&{replies_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", onto_3_and_4, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(command_in, replies_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_in)
        os.close(replies_out)
        self._buffer, self._count, self._session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        target = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == self._count:
                assert "error" not in reply, (method, reply)
                return reply["result"]
            self.events.append(reply)

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + DEADLINE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, "Chromium did not answer in time"
            piece = os.read(self._from, 1 << 20)
            assert piece, "Chromium has ended"
            self._buffer += piece
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def evaluate(self, expression: str) -> Any:
        reply = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def open(self, page: Path, width: int, height: int, dark: bool) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.send("Page.navigate", url=page.as_uri())
        end = time.monotonic() + DEADLINE_S
        while not self.evaluate("document.readyState === 'complete' && !!document.querySelector('.chart svg')"):
            assert time.monotonic() < end, "the page did not draw its charts"

    def click(self, selector: str) -> None:
        self._mouse("mousePressed", *self.centre(selector), button="left", clickCount=1)
        self._mouse("mouseReleased", *self.centre(selector), button="left", clickCount=1)

    def point(self, x: float, y: float) -> None:
        self._mouse("mouseMoved", x, y)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def centre(self, selector: str) -> tuple[float, float]:
        self.evaluate(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center', inline: 'center'}})")
        return tuple(
            self.evaluate(
                f"(() => {{ const b = document.querySelector({selector!r}).getBoundingClientRect();"
                " return [b.left + b.width / 2, b.top + b.height / 2]; })()"
            )
        )

    def _mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def screenshot(self, path: Path) -> None:
        picture = self.send("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(picture["data"]))

    def close(self) -> None:
        self._session = None
        self.send("Browser.close")
        self._process.wait(DEADLINE_S)
        os.close(self._to)
        os.close(self._from)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    synthetic = load("unit/figures/synthetic_experiment.py")
    folder = synthetic.write_experiment(tmp_path_factory.mktemp("report") / "tiny", steps=40)
    experiment = read_experiment(folder, list(synthetic.ARMS), [0], control="grpo_bf16")
    output = folder / "report.html"
    output.write_text(render(experiment, dict.fromkeys(synthetic.ARMS, "what it does"), folder), encoding="utf-8")
    return output


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def test_the_summary_table_is_whole_at_1400_pixels(browser: Browser, page: Path):
    browser.open(page, 1400, 900, False)
    inner, outer = browser.evaluate(
        "(() => { const t = document.querySelector('.sortable').parentNode; return [t.scrollWidth, t.clientWidth]; })()"
    )
    assert inner <= outer


def test_the_gates_check_marks_are_whole_on_a_phone(browser: Browser, page: Path):
    """In each row at least one mark shows without scrolling: the first column stays in view."""
    browser.open(page, *SCREENS["phone"], False)
    right = browser.evaluate(
        "[...document.querySelectorAll('tbody tr')].map((row) => [...row.querySelectorAll('.passed, .failed')])"
        ".filter((all) => all.length).map((all) => Math.min(...all.map((m) => m.getBoundingClientRect().right)))"
    )
    assert len(right) >= 5 and max(right) <= SCREENS["phone"][0]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
def test_every_screen_and_scheme(browser: Browser, page: Path, screen: str, dark: bool):
    width, height = SCREENS[screen]
    browser.open(page, width, height, dark)
    assert browser.evaluate("document.querySelectorAll('.chart svg').length") == 11
    assert browser.evaluate("document.querySelectorAll('.bar-row').length") == 6
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(COLLISIONS) == []
    ratio, text = browser.evaluate(CONTRAST)
    assert ratio >= 4.5, text
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(16, 18, 21)" if dark else "rgb(251, 251, 250)")
    faults = [
        e
        for e in browser.events
        if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
    ]
    assert faults == []
    requests = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []


def test_arms_are_switched_off_and_on(browser: Browser, page: Path):
    browser.open(page, *SCREENS["desktop"], False)
    curves = "document.querySelectorAll('.curve[data-arm=\"1\"]').length"
    assert browser.evaluate(curves) == 9
    browser.click('.chip[data-arm="1"]')
    assert browser.evaluate(curves) == 0
    assert browser.evaluate("document.querySelector('.chip[data-arm=\"1\"]').getAttribute('aria-pressed')") == "false"
    assert browser.evaluate("document.querySelectorAll('tr.off').length") == 1
    assert browser.evaluate("document.querySelectorAll('.bar-row').length") == 5
    browser.click('.chip[data-arm="1"]')
    assert browser.evaluate(curves) == 9
    for arm in range(6):
        browser.click(f'.chip[data-arm="{arm}"]')
    assert browser.evaluate("document.querySelectorAll('.chart svg').length") == 0
    assert "No arm is switched on" in browser.evaluate("document.querySelector('#chart-reward').textContent")


def test_values_under_the_pointer_and_the_keys(browser: Browser, page: Path):
    browser.open(page, *SCREENS["desktop"], False)
    x, y = browser.centre("#chart-reward svg")
    browser.point(x, y)
    shown = browser.evaluate("document.getElementById('tooltip').innerText")
    assert shown.startswith("Step ") and "SC + TIS" in shown and "GRPO, BF16 rollouts" in shown
    browser.point(2, 2)
    assert browser.evaluate("document.getElementById('tooltip').hidden")
    browser.evaluate("document.querySelector('#chart-k3_kl svg').focus()")
    browser.press("End")
    assert browser.evaluate("document.getElementById('tooltip').innerText").startswith("Step 40")
    browser.press("ArrowLeft")
    assert browser.evaluate("document.getElementById('tooltip').innerText").startswith("Step 39")
    browser.evaluate("document.querySelector('#chart-reward_vs_k3 svg').focus()")
    browser.press("Home")
    assert "step 10" in browser.evaluate("document.getElementById('tooltip').innerText")


def test_the_table_sorts_with_missing_values_last(browser: Browser, page: Path):
    browser.open(page, *SCREENS["desktop"], False)
    column = "[...document.querySelectorAll('.sortable tbody tr')].map((r) => r.cells[{}].dataset.value)"
    heads = browser.evaluate("[...document.querySelectorAll('.sortable thead th')].map((h) => h.innerText)")
    last = next(i for i, head in enumerate(heads) if head.startswith("Last reward"))
    before = browser.evaluate(column.format(last))
    browser.click(f".sortable thead th:nth-child({last + 1}) button")
    values = [float(value) for value in browser.evaluate(column.format(last))]
    assert values == sorted(values, reverse=True)
    browser.click(f".sortable thead th:nth-child({last + 1}) button")
    assert [float(value) for value in browser.evaluate(column.format(last))] == sorted(values)
    browser.click(f".sortable thead th:nth-child({last + 1}) button")
    assert browser.evaluate(column.format(last)) == before
    collapse = next(i for i, head in enumerate(heads) if head.startswith("Below 10 %"))
    browser.click(f".sortable thead th:nth-child({collapse + 1}) button")
    collapses = browser.evaluate(column.format(collapse))
    assert collapses[0] != "" and collapses[-1] == ""
