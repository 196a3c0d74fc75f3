"""A real Chromium, spoken to over its DevTools socket; the tests skip where there is none."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import aiohttp
import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--remote-debugging-port=0", "--hide-scrollbars",
)  # fmt: skip
START_S, ANSWER_S = 60.0, 30.0
WHERE = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


class Page:
    """One tab. Every method waits for its answer, with a deadline."""

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: aiohttp.ClientWebSocketResponse):
        self._loop, self._socket = loop, socket
        self._ids = itertools.count(1)
        self.console: list[str] = []  # errors and refusals that the page caused

    def call(self, method: str, **params):
        return self._loop.run_until_complete(self._call(method, params))

    async def _call(self, method, params):
        ident = next(self._ids)
        await self._socket.send_json({"id": ident, "method": method, "params": params})
        async with asyncio.timeout(ANSWER_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == ident:
                    assert "error" not in message, (method, message["error"])
                    return message["result"]
                self._heard(message)

    def _heard(self, message):
        params = message.get("params", {})
        if message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.console.append(params["entry"]["text"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.console.append(str(params["exceptionDetails"]))

    def go(self, url):
        """Open a page and wait until it is whole."""
        found = self.call("Page.navigate", url=url)
        assert not found.get("errorText"), found
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def js(self, expression):
        """The value of an expression in the page; a DevTools right, which no CSP refuses."""
        found = self.call(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
            userGesture=True,
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression, seconds=20.0):
        """Wait for an expression to become true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := self.js(expression):
                return value
            time.sleep(0.02)  # a poll with a deadline
        text = self.js("document.body.innerText")
        raise AssertionError(f"never true: {expression}\n{text[:2000]}\n{self.console}")

    def look(self, *, width=1280, height=900, dark=False, script=True):
        """How the reader looks at it."""
        mobile = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=mobile,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not script)

    def press(self, key, code=0):
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key,
                windowsVirtualKeyCode=code, **text,
            )  # fmt: skip

    def screenshot(self, path: Path):
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


class Browser:
    """One Chromium with a profile of its own."""

    def __init__(self, folder: Path) -> None:
        assert WHERE is not None
        self.loop = asyncio.new_event_loop()
        self.profile = folder / "profile"
        with (folder / "chromium.log").open("wb") as log:
            self.process = subprocess.Popen(
                [WHERE, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.session: aiohttp.ClientSession | None = None

    def open(self) -> Page:
        """The first tab, listening to what goes wrong in it."""
        port = self._port()
        page = self.loop.run_until_complete(self._connect(port))
        for domain in ("Page", "Runtime", "Log"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setFocusEmulationEnabled", enabled=True)
        return page

    def _port(self) -> int:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                return int((self.profile / "DevToolsActivePort").read_text().split()[0])
            assert self.process.poll() is None, "chromium ended"
            time.sleep(0.05)  # a poll with a deadline
        raise AssertionError("chromium did not open its port")

    async def _connect(self, port: int) -> Page:
        self.session = aiohttp.ClientSession()
        async with self.session.get(f"http://127.0.0.1:{port}/json") as response:
            tab = next(t for t in await response.json() if t["type"] == "page")
        socket = await self.session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0)
        return Page(self.loop, socket)

    def close(self) -> None:
        if self.session is not None:
            self.loop.run_until_complete(self.session.close())
        self.loop.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A tab of a fresh Chromium."""
    if WHERE is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    try:
        yield browser.open()
    finally:
        browser.close()


@pytest.fixture(scope="module")
def shots(tmp_path_factory) -> Path:
    """Where screenshots go: STALLWATCH_SHOTS keeps them for a person to look at."""
    given = os.environ.get("STALLWATCH_SHOTS")
    if given:
        Path(given).mkdir(parents=True, exist_ok=True)
        return Path(given)
    return tmp_path_factory.mktemp("shots")
