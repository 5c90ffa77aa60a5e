"""Headless Chromium, controlled with the DevTools protocol over two pipes, without other dependencies."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_ANSWER_SECONDS = 300
_START = "import os, sys; [os.dup2(int(sys.argv[end - 2]), end) for end in (3, 4)]; os.execv(sys.argv[3], sys.argv[3:])"
_KEYS = {"Tab": 9, "Enter": 13}


class Tab:
    """A browser tab. `errors` contains its exceptions, and warnings and errors from its console and log."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers  # descriptors of the pipes
        self._rest = b""  # part of an incomplete message
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], _ANSWER_SECONDS)
            assert ready, "the browser does not respond"
            found = os.read(self._answers, 1 << 20)
            assert found, "the browser has ended"
            self._rest += found
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        about = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(about["exceptionDetails"]))
        elif message.get("method") == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(about["args"]))
        elif message.get("method") == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(json.dumps(about["entry"]))
        return message

    def open(self, address: str) -> None:
        """Navigate to a page."""
        assert "errorText" not in self.send("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression. Promises are awaited."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str, seconds: float = 300) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < end, f"{expression} is not true; text of the page: {self.text()}"
            time.sleep(0.05)

    def text(self, selector: str = "body") -> str:
        """Return the visible text of an element."""
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def emulate(self, *, width: int = 1280, height: int = 900, scale: float = 1, dark: bool = False) -> None:
        """Set the screen size in pixels and the color theme."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=width < 600,
        )  # fmt: skip
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[theme])

    def press(self, key: str) -> None:
        """Press and release a key."""
        code = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        self.send("Input.dispatchKeyEvent", type="keyDown", **code, **({"text": "\r"} if key == "Enter" else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **code)

    def write(self, text: str) -> None:
        """Insert text at the focus."""
        self.send("Input.insertText", text=text)

    def screenshot(self) -> bytes:
        """Return a PNG screenshot of the visible part."""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def accessibility_nodes(self) -> list[dict[str, Any]]:
        """Return the nodes of the accessibility tree that are not ignored."""
        nodes: list[dict[str, Any]] = self.send("Accessibility.getFullAXTree")["nodes"]
        return [node for node in nodes if not node["ignored"]]


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """Yield a tab of a browser whose user data is stored in a folder."""
    assert PROGRAM is not None
    there, commands = os.pipe()
    answers, back = os.pipe()
    # Chromium expects the pipes at descriptors 3 and 4, which are in use in this process.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (there, back)]
    options = [
        "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
        "--hide-scrollbars", "--no-proxy-server", f"--user-data-dir={folder}",
        "--no-sandbox",  # the sandbox is not available to root and in most containers
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-c", _START, *map(str, ends), PROGRAM, *options],
        pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for end in (there, back, *ends):
        os.close(end)
    try:
        yield Tab(commands, answers)
    finally:
        os.close(commands)  # Chromium exits at EOF
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(answers)
