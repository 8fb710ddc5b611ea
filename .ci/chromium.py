"""Drives headless Chromium by the DevTools protocol over a pipe, with nothing but Python's standard library.

    with Chromium() as browser:
        browser.open("file:///.../page.html")
        browser.evaluate("document.title")

Chromium is that of the PATH, or CHROMIUM=/path/to/it. Every wait has a deadline. See https://chromedevtools.github.io/devtools-protocol/ for the commands.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SECONDS = 60
# Keys that are no character: code and number that Chromium wants with them.
KEYS = {"Tab": 9, "Backspace": 8, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Chromium:
    """One page of a browser of its own, which ends with the `with` block."""

    def __enter__(self):
        command = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
        if not command:
            sys.exit("no chromium on the PATH: apt-get install chromium, or set CHROMIUM")
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self.commands = os.pipe()
        self.answers, from_browser = os.pipe()
        # Chromium reads from descriptor 3 and writes to 4.
        shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        arguments = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--hide-scrollbars",
            f"--user-data-dir={self.profile.name}",
            "--remote-debugging-pipe",
        ]
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", command, *arguments],
            pass_fds=[to_browser, from_browser],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.pending = b""
        self.last_id = 0
        self.session = None
        self.events = []
        page = self.call("Target.createTarget", url="about:blank")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        os.close(self.commands)
        os.close(self.answers)
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.profile.cleanup()

    def call(self, method, **params):
        """The result of a command."""
        self.last_id += 1
        message = {"id": self.last_id, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.commands, data) :]
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self.read(deadline, method)
            if answer.get("id") == self.last_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def read(self, deadline, waits_for):
        while b"\0" not in self.pending:
            ready, _, _ = select.select([self.answers], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"chromium: nothing came of {waits_for} in {SECONDS} s")
            data = os.read(self.answers, 1 << 20)
            if not data:
                raise RuntimeError(f"chromium ended while {waits_for} was under way")
            self.pending += data
        message, self.pending = self.pending.split(b"\0", 1)
        return json.loads(message)

    def open(self, url):
        """Loads a page, and waits until its scripts have run."""
        self.events.clear()
        answer = self.call("Page.navigate", url=url)
        if "errorText" in answer:
            raise RuntimeError(f"{url}: {answer['errorText']}")
        self.wait_for("Page.loadEventFired")

    def wait_for(self, event):
        deadline = time.monotonic() + SECONDS
        while not any(e.get("method") == event for e in self.events):
            self.events.append(self.read(deadline, event))

    def complaints(self):
        """What the page threw or logged as an error since it was opened, and what it could not load."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                found.append(details.get("exception", {}).get("description", details["text"]))
            if event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
                found.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
            if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}".rstrip())
        return found

    def requests(self):
        """Addresses that the page asked for since it was opened."""
        sent = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [e["params"]["request"]["url"] for e in sent]

    def evaluate(self, expression):
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def press(self, key, modifiers=0):
        """Presses and releases a key, as a user's keyboard does."""
        event = {"key": key, "modifiers": modifiers}
        if key in KEYS:
            event |= {"code": key, "windowsVirtualKeyCode": KEYS[key]}
        self.call("Input.dispatchKeyEvent", type="rawKeyDown" if key in KEYS else "keyDown", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text):
        """Types characters into what has the focus."""
        for character in text:
            event = {"key": character, "text": character}
            self.call("Input.dispatchKeyEvent", type="keyDown", **event)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=character)

    def resize(self, width, height=900):
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, scheme):
        """Light or dark, as the system's setting; no movement in any case."""
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        self.call("Emulation.setEmulatedMedia", features=[{"name": n, "value": v} for n, v in features.items()])

    @contextlib.contextmanager
    def before_each_page(self, script):
        """Runs a script in each page that is opened within the `with` block, before its own."""
        script = self.call("Page.addScriptToEvaluateOnNewDocument", source=script)
        yield
        self.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script["identifier"])

    def screenshot(self, path):
        """The whole page, also what is outside of the window, as a JPEG file."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        picture = self.call(
            "Page.captureScreenshot", format="jpeg", quality=80, captureBeyondViewport=True, clip=size | {"scale": 1}
        )
        Path(path).write_bytes(base64.b64decode(picture["data"]))
