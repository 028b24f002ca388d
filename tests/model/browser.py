"""Chromium without a window, asked over a pipe: what a page logs, requests and looks like."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)
# Chromium reads commands from descriptor 3 and writes to 4.
LAUNCH = (
    "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 13); os.dup2(w, 14); os.dup2(13, 3); os.dup2(14, 4); "
)
LAUNCH += "os.execv(sys.argv[3], sys.argv[3:])"


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A tab. `problems` are errors and warnings of its console, `requests` the addresses it asked for."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._sent, self._rest = commands, answers, 0, b""
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._sent:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = os.read(self._answers, 1 << 16)
            assert chunk, "Chromium ended"
            self._rest += chunk
        first, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(first)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(f"{params['type']}: {params['args']}")
        elif method == "Log.entryAdded":
            self.problems.append(params["entry"]["text"])
        elif method == "Page.loadEventFired":
            self._loaded = True

    def open(self, path: Path, *, width: int, height: int, scheme: str) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._loaded = False
        self.call("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._receive()

    def value(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path: Path) -> None:
        image = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(image["data"]))


@contextlib.contextmanager
def chromium(program: str, profile: Path) -> Iterator[Page]:
    """A page of a Chromium that is started for it, and ended."""
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    command = [
        sys.executable,
        "-c",
        LAUNCH,
        str(their_in),
        str(their_out),
        program,
        *FLAGS,
        f"--user-data-dir={profile}",
    ]
    process = subprocess.Popen(
        command,
        pass_fds=(their_in, their_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(their_in)
    os.close(their_out)
    try:
        page = Page(our_out, our_in)
        yield page
        page._session = None
        page.call("Browser.close")
    finally:
        os.close(our_out)
        os.close(our_in)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
