"""The report as a file: complete, without network access, on a laptop's screen, in dark mode and on paper."""

import re
import subprocess

from conftest import FLASHCORE, Tab

# Finds texts of a chart that overlap or leave the chart. Boxes are measured as rendered.
COLLISIONS = """() => {
  const found = [];
  for (const svg of document.querySelectorAll("svg.chart")) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].filter((t) => t.textContent.trim());
    const boxes = texts.map((t) => t.getBoundingClientRect());
    boxes.forEach((a, i) => {
      if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.top < frame.top - 1 || a.bottom > frame.bottom + 1)
        found.push(`${svg.classList}: "${texts[i].textContent}" leaves the chart`);
      boxes.slice(i + 1).forEach((b, j) => {
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 1 && high > 3) found.push(`${svg.classList}: "${texts[i].textContent}" covers "${texts[i + 1 + j].textContent}"`);
      });
    });
  }
  return found;
}"""

# Finds elements that reach beyond the right edge of the page. Elements that scroll are allowed to.
OUTSIDE = """() => {
  const width = document.documentElement.clientWidth;
  const own = (e) => e.closest(".scroll, pre, .difference");
  return [...document.body.querySelectorAll("*")]
    .filter((e) => !own(e) && e.getBoundingClientRect().right > width + 1)
    .map((e) => `${e.tagName}.${e.className.baseVal ?? e.className}: ${e.getBoundingClientRect().right}`);
}"""


def test_it_is_one_file_and_silent(tab, report):
    page = tab.open(report.as_uri())
    assert "Run 1" in page.title()
    assert "demonstration, times made up" in page.locator(".lead").inner_text()
    headings = [h.inner_text() for h in page.locator("h2").all()]
    assert len(headings) >= 9 and len(set(headings)) == len(headings), headings
    assert page.locator("script").count() == 0
    text = report.read_text()
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", text) and "@import" not in text
    # Text from the ledger is shown as text, not as markup.
    assert page.locator("of").count() == 0
    tab.picture("report", full_page=True)


def test_charts_show_what_the_ledger_says(tab, report, facts):
    page = tab.open(report.as_uri())
    count = lambda selector: page.locator(selector).count()
    improvements = "SELECT count(*) FROM progress WHERE trial = 'microbench' AND arm IN ('evolution', 'random')"
    # The chart is drawn for a page and for a narrow screen. Short timings are grey.
    for layout in ("roomy", "narrow"):
        assert count(f"svg.progress.{layout} circle.mark.short") == facts.one(improvements)
    assert count("svg.niches g.niche") == facts.one("SELECT count(*) FROM niche")
    assert count("svg.scatter circle.dot") == facts.one("SELECT count(*) FROM pair WHERE author = 'model'")
    reasons = facts.one("SELECT count(*) FROM (SELECT DISTINCT stage, reason FROM death)")
    assert count("svg.rejections g.row") == min(reasons, 14)
    timed = facts.one("SELECT count(DISTINCT subject) FROM standing WHERE us IS NOT NULL AND arm IN ('evolution', 'random')")
    assert count("svg.ranking g.row") == min(timed, 12) + 2
    assert count("table.decisions tbody tr") == facts.one("SELECT count(*) FROM decision")
    # Operators that improved nothing are summed, and random samples are the control group.
    earned = "SELECT count(*) FROM operator_tally WHERE (gain >= 1.0005 OR faster > 0) AND operator <> 'random'"
    assert count("table.operators tbody tr") == facts.one(earned)
    # The page's best is the first in the ledger's order, in which races count more than short timings.
    first = """FROM standing WHERE us IS NOT NULL AND arm IN ('evolution', 'random')
        ORDER BY grade DESC, us, candidate LIMIT 1"""
    best = facts.one(f"SELECT us {first}")
    assert f"{best:.3f}" in page.locator("dl.tiles").inner_text()
    line = f"""WITH RECURSIVE line (id) AS (SELECT candidate FROM (SELECT candidate {first})
        UNION SELECT parent FROM parent JOIN line ON candidate = id) SELECT count(*) FROM line"""
    assert count("svg.lineage g.row") == min(facts.one(line), 40)
    hot = page.locator("pre.heat span[style]")
    assert hot.count() > 50, "lines without a share of the cost"


def test_on_a_laptop(tab, report):
    page = tab.open(report.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 1366
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate(COLLISIONS) == []
    tab.picture("report-laptop")


def test_on_a_telephone(browser, report):
    tab = Tab(browser, viewport={"width": 420, "height": 800})
    page = tab.open(report.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    assert page.evaluate(OUTSIDE) == []
    shown = lambda selector: [e.is_visible() for e in page.locator(selector).all()]
    assert not any(shown(".roomy")) and all(shown("ol.narrow")) and len(shown("ol.narrow")) >= 2
    tab.picture("report-420", full_page=True)
    tab.context.close()
    assert tab.complaints == []


def test_in_the_dark(browser, report):
    tab = Tab(browser, color_scheme="dark")
    page = tab.open(report.as_uri())
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", paper)[:3])) < 150, paper
    tab.picture("report-dark", full_page=True)
    tab.context.close()
    assert tab.complaints == []


def test_on_paper(tab, report, tmp_path_factory):
    page = tab.open(report.as_uri())
    page.emulate_media(media="print")
    # A4 without its margins, at 96 pixels per inch.
    page.set_viewport_size({"width": 688, "height": 1000})
    assert page.evaluate("document.documentElement.scrollWidth") <= 688
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate(COLLISIONS) == []
    tab.picture("report-print", full_page=True)
    pdf = page.pdf(format="A4", prefer_css_page_size=True, path=tmp_path_factory.mktemp("pdf") / "report.pdf")
    pages = len(re.findall(rb"/Type\s*/Page\b", pdf))
    assert 3 <= pages <= 14, pages


def test_what_is_not_there(ledger, tmp_path):
    for args, reason in [
        (["--ledger", ledger, "--run", "99"], "has no run 99"),
        (["--ledger", "nowhere.ledger"], "there is no ledger"),
    ]:
        command = [FLASHCORE, "report", "--out", "r.html", *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert done.returncode == 3 and reason in done.stderr, done.stderr
        assert not (tmp_path / "r.html").exists()
