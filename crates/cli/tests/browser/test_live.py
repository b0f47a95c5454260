"""The pages of `flashcore serve`: live, quick, and clear about errors."""

import http.client
import json
import sqlite3
import subprocess
import urllib.error
import urllib.request

import pytest
from conftest import FLASHCORE, Facts, Tab, demo
from playwright.sync_api import expect


def get(url, **headers):
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def live(tab, serve, ledger, candidates):
    """A server of a ledger with that many candidates, and the live page of its run."""
    demo(ledger, candidates)
    server = serve(ledger)
    page = tab.open(f"{server.url}run/1", allowed=server.url)
    page.wait_for_selector("#live.on")
    return server, page


def test_a_run_grows_before_ones_eyes(tab, serve, tmp_path):
    ledger = tmp_path / "live.ledger"
    server, page = live(tab, serve, ledger, 60)
    page.evaluate("window.sameDocument = true")
    before = page.locator("dl.tiles").inner_text()
    marks = page.locator("svg.progress circle").count()
    demo(ledger, 60, "--more")
    # The run has ended, so the page asks for news at long intervals.
    expect(page.locator("dl.tiles")).not_to_have_text(before, use_inner_text=True, timeout=20_000)
    assert page.evaluate("window.sameDocument"), "changed parts alone are replaced"
    facts = Facts(ledger)
    tried = facts.one("SELECT count(*) FROM candidate WHERE arm IN ('evolution', 'random')")
    assert str(tried) in page.locator("dl.tiles").inner_text()
    assert page.locator("svg.progress circle").count() >= marks
    news = json.loads(get(f"{server.url}api/run/1")[1])
    assert news["candidates"] == tried and news["problems"][0]["speedup"] > 1
    tab.picture("run", full_page=True)
    assert server.stop() == 0
    page.wait_for_selector("#live.off", timeout=20_000)
    # The browser itself reports that the server is gone.
    tab.complaints = [c for c in tab.complaints if "ERR_CONNECTION_REFUSED" not in c]


def test_what_the_server_says_is_shown(tab, serve, tmp_path):
    _, page = live(tab, serve, tmp_path / "gone.ledger", 5)
    for file in tmp_path.glob("gone.ledger*"):
        file.unlink()
    page.wait_for_selector("#live.off", timeout=20_000)
    assert "there is no ledger" in page.locator("#live .text").inner_text()
    # The browser itself reports the status.
    tab.complaints = [c for c in tab.complaints if "503" not in c]


def test_from_the_list_to_a_kernel_and_its_neighbour(tab, serve, ledger):
    server = serve(ledger)
    page = tab.open(server.url)
    tab.picture("runs")
    page.get_by_role("link", name="run 1").click()
    page.get_by_role("link", name="all candidates").click()
    assert page.locator("table.candidates tbody tr").count() == 50
    page.get_by_role("link", name="older candidates").click()
    assert page.locator("table.candidates tbody tr").count() == 50
    best = Facts(ledger).one("SELECT candidate FROM standing WHERE promoted ORDER BY us LIMIT 1")
    page.goto(f"{server.url}candidate/{best}")
    page.wait_for_selector("#kernel pre.heat", state="attached", timeout=60_000)
    assert page.locator("#kernel pre.heat span[style]").count() > 50
    assert "passed" in page.locator("#checks").inner_text() and "race" in page.locator("#times").inner_text()
    tab.picture("candidate", full_page=True)
    page.get_by_role("link", name="side by side").click()
    page.wait_for_selector("table.genes", timeout=60_000)
    assert page.locator("table.genes tr.changed").count() >= 1
    assert page.locator(".pair h3").count() == 2
    assert page.locator(".difference tr").count() > 10
    assert page.evaluate("document.documentElement.scrollWidth") <= 1366
    tab.picture("difference")


def test_the_fastest_and_the_forecasts(tab, serve, ledger):
    server = serve(ledger)
    page = tab.open(f"{server.url}topk", allowed=server.url)
    times = [float(t) for t in page.locator("table.best td:nth-child(4)").all_inner_texts()]
    trials = page.locator("table.best td:nth-child(6)").all_inner_texts()
    # Raced candidates come first, then those with a short timing only; each group is sorted by time.
    ranks = [("race" not in trial, time) for trial, time in zip(trials, times)]
    assert ranks == sorted(ranks) and len(times) > 5 and len({raced for raced, _ in ranks}) == 2, ranks
    tab.picture("topk")
    # A link names the candidate that it shows, so it shows the same candidate when the ledger has grown.
    title = page.locator("h2").inner_text()
    page.get_by_role("link", name=title, exact=True).click()
    page.wait_for_url("**/topk?problem=*&device=*")
    assert page.locator("h2").inner_text() == title
    page.goto(f"{server.url}forecasts")
    assert "Three stages hide the loads of <64 keys>" in page.locator("table.told").inner_text()
    assert page.locator("svg.scatter").count() == 2
    tab.picture("forecasts", full_page=True)


# Finds tables that are wider than the screen and hide their last columns.
HIDDEN = """() => [...document.querySelectorAll(".scroll")]
  .filter((e) => e.scrollWidth > e.clientWidth + 1)
  .map((e) => `${e.firstElementChild.className}: ${e.scrollWidth} of ${e.clientWidth}`)"""


def test_every_column_is_seen_on_a_telephone(browser, serve, ledger):
    server = serve(ledger)
    tab = Tab(browser, viewport={"width": 420, "height": 800})
    best = Facts(ledger).one("SELECT candidate FROM standing WHERE promoted ORDER BY us LIMIT 1")
    for path in ("", "run/1", "run/1/candidates", "topk", "forecasts", f"candidate/{best}", f"diff?a=1&b={best}"):
        page = tab.open(f"{server.url}{path}", allowed=server.url)
        if path.startswith(("candidate", "diff")):
            page.wait_for_selector("table.dearest, table.genes", timeout=60_000)
        assert page.evaluate("document.documentElement.scrollWidth") <= 420, path
        assert page.evaluate(HIDDEN) == [], path
        tab.picture(f"telephone-{path.split('?')[0].replace('/', '-') or 'runs'}", full_page=True)
    page = tab.open(f"{server.url}run/1/candidates", allowed=server.url)
    page.get_by_label("Filter rows").fill("no such candidate")
    assert not any(row.is_visible() for row in page.locator("table.candidates tbody tr").all())
    tab.context.close()
    assert tab.complaints == []


@pytest.mark.parametrize("path, status, words", [
    ("nowhere", 404, "There is no page /nowhere"),
    ("run/99", 404, "has no run 99"),
    ("run/x%3Cb%3E", 400, "&lt;b&gt;"),
    ("run/1/part/nothing", 404, "no section"),
    ("candidate/0", 404, "has no candidate 0"),
    ("candidate/-", 400, "Expected a number"),
    ("diff?a=1", 400, "/diff?a=N&amp;b=M"),
    ("diff?a=1&b=99999", 404, "has no candidate 99999"),
    ("diff/part?a=1&b=99999", 404, "has no candidate 99999"),
    ("topk?problem=1,1,1,1,f16", 400, "what /topk links to"),
    ("?before=soon", 400, "for before"),
    ("api/run/99", 404, "has no run 99"),
])
def test_bad_addresses(serve, ledger, path, status, words):
    server = serve(ledger)
    answered, page = get(server.url + path)
    assert answered == status and words in page, page[-600:]


def test_only_questions_from_here(serve, ledger):
    server = serve(ledger)
    status, page = get(server.url, Host="evil.example")
    assert status == 421 and "not a name of this server" in page
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("POST", "/")
    answer = connection.getresponse()
    assert answer.status == 405 and "only be read" in answer.read().decode()
    assert "script-src 'self'" in answer.headers["content-security-policy"]


def test_ledgers_that_cannot_be_read(serve, tmp_path):
    missing = tmp_path / "missing.ledger"
    server = serve(missing)
    status, page = get(server.url)
    assert status == 503 and "there is no ledger" in page
    demo(missing, 5)
    assert get(server.url)[0] == 200, "begun meanwhile"
    newer = tmp_path / "newer.ledger"
    demo(newer, 5)
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 99")
    status, page = get(serve(newer).url)
    assert status == 503 and "version 99" in page
    text = tmp_path / "text.ledger"
    text.write_text("not a ledger, but long enough to be read as one\n")
    status, page = get(serve(text).url)
    assert status == 503 and "is not a FlashCore ledger" in page
    locked = tmp_path / "locked.ledger"
    demo(locked, 5)
    writer = sqlite3.connect(locked)
    writer.execute("BEGIN IMMEDIATE")
    assert get(serve(locked).url)[0] == 200, "who reads does not wait for who writes"
    writer.rollback()


def test_a_taken_port_and_the_end(serve, ledger):
    server = serve(ledger)
    again = subprocess.run([FLASHCORE, "serve", "--ledger", ledger, "--port", str(server.port)], capture_output=True, text=True, timeout=20)
    assert again.returncode == 3 and f"invalid value '{server.port}' for --port" in again.stderr and "a free port, such as" in again.stderr
    assert server.stop() == 0


def test_it_can_be_ended_as_soon_as_its_address_is_known(serve, ledger):
    assert [serve(ledger).stop() for _ in range(10)] == [0] * 10
