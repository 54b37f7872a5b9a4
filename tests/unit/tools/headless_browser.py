"""A real browser without a screen: Chromium's headless shell, spoken to through a pair of pipes in
the protocol of its developer tools.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from debian_packages import install

PACKAGE = "chromium-headless-shell"
PROGRAMS = (PACKAGE, "chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
ANSWER_SECONDS = 60


def missing_browser() -> str | None:
    """Why there is no browser here; None when there is one, after installing Debian's package where
    it lacks and may be installed.
    """
    if program() is not None:
        return None
    reason = install(PACKAGE)
    if reason is not None:
        return f"none of {', '.join(PROGRAMS)} is installed: {reason}"
    return None if program() else f"{PACKAGE} was installed and is not on PATH"


def program() -> str | None:
    """Path of the first browser that is installed."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page. `complaints` are the errors that its pages logged or raised."""

    def __init__(self, folder: Path) -> None:
        self.complaints: list[str] = []
        self._number = 0
        self._unread = b""
        theirs_in, self._out = _pipe()
        self._in, theirs_out = _pipe()

        def connect() -> None:  # the browser reads its third file and writes its fourth
            os.dup2(theirs_in, 3)
            os.dup2(theirs_out, 4)

        self._process = subprocess.Popen(
            [
                program(),
                "--headless",
                "--remote-debugging-pipe",
                "--no-sandbox",  # which root may not have
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
                "--no-first-run",
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            preexec_fn=connect,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session: str | None = None
        (page, *_) = (
            one for one in self.send("Target.getTargets")["targetInfos"] if one["type"] == "page"
        )
        attached = self.send("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(ANSWER_SECONDS)
        os.close(self._in)
        os.close(self._out)

    def open(self, page: Path, width: int = 1280, height: int = 900, script: bool = True) -> float:
        """Loads a file and waits until it is drawn; the seconds that this took. Whatever the page
        asks of anything but its own file is a complaint.
        """
        self.complaints.clear()
        self.send("Emulation.setScriptExecutionDisabled", value=not script)
        self.size(width, height)
        start = time.monotonic()
        self.send("Page.navigate", url=page.resolve().as_uri())
        while not self.run("location.protocol === 'file:' && document.readyState === 'complete'"):
            assert time.monotonic() - start < ANSWER_SECONDS, f"{page} does not load"
        self.send("Page.captureScreenshot", clip=_clip(1, 1))  # waits for the first frame
        return time.monotonic() - start

    def size(self, width: int, height: int = 900) -> None:
        """Of the window, in CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, pressed: bool = False) -> None:
        """`kind` is mouseMoved, mousePressed or mouseReleased."""
        self.send(
            "Input.dispatchMouseEvent",
            type=kind,
            x=x,
            y=y,
            button="none" if kind == "mouseMoved" and not pressed else "left",
            buttons=int(pressed),
            clickCount=int(kind != "mouseMoved"),
        )

    def screenshot(
        self, path: Path, width: int, height: int, top: int = 0, scale: float = 1
    ) -> None:
        """`height` pixels of the page from `top` on, as a PNG with `scale` as many across."""
        clip = {**_clip(width, height), "y": top, "scale": scale}
        answer = self.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a call of the protocol; events that come before it are looked at."""
        self._number += 1
        call: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            call["sessionId"] = self._session
        message = json.dumps(call).encode() + b"\0"
        while message:
            message = message[os.write(self._out, message) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._notice(answer)

    def _notice(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning"):
                self.complaints.append(json.dumps(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.complaints.append(parameters["entry"]["text"])
            case "Network.requestWillBeSent" if parameters["type"] != "Document":
                self.complaints.append(f"asks for {parameters['request']['url']}")

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._in], [], [], ANSWER_SECONDS)
            assert ready, f"the browser has not answered for {ANSWER_SECONDS} s"
            read = os.read(self._in, 1 << 20)
            assert read, "the browser has ended"
            self._unread += read
        message, self._unread = self._unread.split(b"\0", 1)
        return json.loads(message)


def _pipe() -> tuple[int, int]:
    """Read end and write end, numbered above those that the browser gets."""
    low = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low)
    for end in low:
        os.close(end)
    return high


def _clip(width: int, height: int) -> dict[str, float]:
    return {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
