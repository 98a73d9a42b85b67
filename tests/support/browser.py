"""A headless Chromium, driven over its DevTools protocol: loads a page, runs its script, and tells what it asked for and
what it complained of.

    with Browser() as browser:
        browser.open(f"http://{service.http_address}/")
        browser.evaluate("document.title")
        assert browser.complaints == []

Debian's `chromium`; without it a test is skipped with a message.
"""

import base64
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import unittest

START_SECONDS = 60


class WebSocket:
    """As much of RFC 6455 as DevTools needs: text messages, whole or in fragments."""

    def __init__(self, port, path):
        self.socket = socket.create_connection(("127.0.0.1", port), START_SECONDS)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        self.stream = self.socket.makefile("rb")
        status = self.stream.readline()
        if b" 101 " not in status:
            raise AssertionError(f"no websocket: {status!r}")
        while self.stream.readline() != b"\r\n":
            pass

    def send(self, text):
        data, mask = text.encode(), os.urandom(4)
        if len(data) < 126:
            length = bytes([0x80 | len(data)])
        elif len(data) < 1 << 16:
            length = bytes([0x80 | 126]) + len(data).to_bytes(2, "big")
        else:
            length = bytes([0x80 | 127]) + len(data).to_bytes(8, "big")
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
        self.socket.sendall(b"\x81" + length + mask + masked)

    def close(self):
        self.stream.close()
        self.socket.close()

    def receive(self):
        text = b""
        while True:
            head = self.stream.read(2)
            if len(head) < 2:
                raise AssertionError("Chromium is gone")
            length = head[1] & 0x7f
            if length >= 126:
                length = int.from_bytes(self.stream.read(2 if length == 126 else 8), "big")
            part = self.stream.read(length)
            if head[0] & 0x0f in (0, 1):
                text += part
                if head[0] & 0x80:
                    return text.decode()


class Browser:
    def __init__(self, width=1280, height=900, dark=False):
        """`dark`: the page is told that its reader prefers dark colours."""
        program = shutil.which("chromium")
        if program is None:
            raise unittest.SkipTest("there is no chromium; deploy/install_packages.sh installs it")
        self.complaints, self.requests = [], []
        self.socket = None
        self.folder = tempfile.TemporaryDirectory(prefix="kvasir-browser-", ignore_cleanup_errors=True)
        self.process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-background-networking", "--remote-debugging-port=0", f"--user-data-dir={self.folder.name}",
             f"--window-size={width},{height}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True)
        try:
            self._connect()
            self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
            self._call("Emulation.setEmulatedMedia",
                       features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
            for domain in ("Page", "Runtime", "Log", "Network"):
                self._call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def _connect(self):
        told = pathlib.Path(self.folder.name) / "DevToolsActivePort"
        deadline = time.monotonic() + START_SECONDS
        while not (told.exists() and told.read_text().count("\n") == 1):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError("Chromium does not start")
            time.sleep(0.05)
        port, path = told.read_text().split("\n")
        self.socket, self.last, self.session = WebSocket(int(port), path), 0, {}
        [page] = [target for target in self._call("Target.getTargets")["targetInfos"] if target["type"] == "page"]
        attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self.session = {"sessionId": attached["sessionId"]}

    def _call(self, method, **params):
        self.last += 1
        self.socket.send(json.dumps({"id": self.last, "method": method, "params": params, **self.session}))
        while True:
            message = json.loads(self.socket.receive())
            if message.get("id") != self.last:
                self._note(message.get("method"), message.get("params", {}))
            elif "error" in message:
                raise AssertionError(f"{method}: {message['error']}")
            else:
                return message["result"]

    def _note(self, method, params):
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))

    def open(self, url):
        self._call("Page.navigate", url=url)

    def evaluate(self, expression):
        """Returns the value of a JavaScript expression; None while it throws, as before the page is there."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        return None if "exceptionDetails" in answer else answer["result"].get("value")

    def wait_for(self, expression, timeout_s=30):
        """Waits until the expression is true, and returns its value."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.evaluate(expression)):
            if time.monotonic() > deadline:
                raise AssertionError(f"{expression} is still {value!r}; complaints: {self.complaints}")
            time.sleep(0.1)
        return value

    def screenshot(self, path):
        image = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        pathlib.Path(path).write_bytes(base64.b64decode(image["data"]))

    def close(self):
        if self.socket is not None:
            self.socket.close()
        os.killpg(self.process.pid, signal.SIGKILL)  # with its children
        self.process.wait()
        self.folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
