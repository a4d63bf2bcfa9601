"""Headless Chromium by its own protocol (CDP), through a pipe: what a reader does, and what the page asks for."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), "")
START = 'exec "$0" --headless --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe "--user-data-dir=$1" 3<&"$2" 4>&"$3"'  # noqa: E501


class Page:
    """One tab. errors: what its console and its policy said; requests: all that it asked for."""

    def __init__(self, send_to: int, read_from: int, process: "subprocess.Popen[bytes]"):
        self._out, self._in, self._process = send_to, read_from, process
        self._number, self._session, self._buffer = 0, "", b""
        self.errors: list[str] = []
        self.requests: list[str] = []

    def open(self, path: Path, *, width: int = 1280, height: int = 900, scheme: str = "light") -> Self:
        """A file, in a window of this size, by a reader who prefers this colour scheme."""
        if not self._session:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 640)  # fmt: skip
        self.call("Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.errors, self.requests = [], []
        self.call("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + 60
        while self.js("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < until, "the page does not load"
            time.sleep(0.02)
        return self

    def js(self, expression: str) -> Any:
        """The value of an expression; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def drawn(self) -> None:
        """Wait until what was asked for is on the screen."""
        self.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def press(self, *keys: str) -> None:
        """Real key presses, to whatever has the focus."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
            code = {"ArrowRight": 39, "ArrowLeft": 37, "Enter": 13}.get(key, 0)
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)
        self.drawn()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A real event of the mouse: mousePressed, mouseMoved, mouseReleased, mouseWheel."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def screenshot(self, *, full: bool = False) -> bytes:
        """PNG of the window, or of the whole page."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def call(self, method: str, **parameters: Any) -> Any:
        """One command, to its answer; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session and not method.startswith("Target."):
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._keep(answer.get("method"), answer.get("params", {}))

    def _keep(self, method: str | None, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(event["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(event["args"]))
        elif method == "Log.entryAdded":
            self.errors.append(event["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


@contextmanager
def chromium() -> Iterator[Page]:
    """A browser with one page, ended with the `with`."""
    (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            ["/bin/bash", "-c", START, CHROMIUM, profile, str(their_in), str(their_out)],
            pass_fds=(their_in, their_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(their_in)
        os.close(their_out)
        page = Page(our_out, our_in, process)
        try:
            yield page
            page.call("Browser.close")
        finally:
            os.close(our_out)
            os.close(our_in)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
