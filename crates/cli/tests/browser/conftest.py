"""A real browser that can reach only the page under test, and a demonstration ledger to show in it."""

import os
import re
import signal
import sqlite3
import subprocess
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

FLASHCORE = os.environ["FLASHCORE_BIN"]
DEMO = os.environ["FLASHCORE_DEMO"]
CHROMIUM = os.environ["FLASHCORE_CHROMIUM"]
PICTURES = Path(os.environ["FLASHCORE_PICTURES"])

# The screen of a laptop.
LAPTOP = {"width": 1366, "height": 768}


@pytest.fixture(scope="session")
def browser():
    quiet = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    # In a container, root has no user namespaces for Chromium's sandbox. The pages are FlashCore's own.
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=quiet + sandbox)
        yield browser
        browser.close()


class Tab:
    """A page, and everything that went wrong on it."""

    def __init__(self, browser, **options):
        self.context = browser.new_context(**{"viewport": LAPTOP, **options})
        self.page = self.context.new_page()
        self.complaints = []
        self.allowed = "file:///"
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(f"page error: {error}"))
        self.page.route("**/*", self._asked)

    def _heard(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def _asked(self, route):
        if route.request.url.startswith(self.allowed):
            return route.continue_()
        self.complaints.append(f"request to {route.request.url}")
        return route.abort()

    def open(self, url, allowed=None):
        self.allowed = allowed or url
        self.page.goto(url)
        return self.page

    def picture(self, name, **options):
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=PICTURES / f"{name}.png", **options)


@pytest.fixture
def tab(browser):
    tab = Tab(browser)
    yield tab
    tab.context.close()
    assert tab.complaints == []


def demo(*args):
    subprocess.run([DEMO, *map(str, args)], check=True, stdout=subprocess.DEVNULL, timeout=120)


@pytest.fixture(scope="session")
def ledger(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "demo.ledger"
    demo(path, 150)
    return path


@pytest.fixture(scope="session")
def report(ledger):
    out = ledger.with_name("report.html")
    subprocess.run([FLASHCORE, "report", "--ledger", ledger, "--out", out], check=True, stdout=subprocess.DEVNULL, timeout=120)
    return out


class Facts:
    """The facts of the ledger, read with plain SQL, not with FlashCore's queries."""

    def __init__(self, path):
        self.connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)

    def one(self, sql):
        return self.connection.execute(sql).fetchone()[0]


@pytest.fixture
def facts(ledger):
    return Facts(ledger)


def ignore_interrupts():
    """Ignores SIGINT, as a shell makes programs do that it runs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Server:
    def __init__(self, ledger, port=0):
        command = [FLASHCORE, "serve", "--ledger", ledger, "--port", str(port)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=ignore_interrupts
        )
        self.url = self.process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", self.url), self.process.stderr.read()
        self.port = int(self.url.rsplit(":", 1)[1].strip("/"))

    def stop(self):
        """Sends SIGINT, as Ctrl-C does, and returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=10)


@pytest.fixture
def serve():
    servers = []

    def start(ledger, port=0):
        servers.append(Server(ledger, port))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
