"""report.html as its readers use it: in a browser, from a file, with mouse and keyboard."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any, get_args

import pytest

from meshloom.compiler.core.known import Unknown
from meshloom.compiler.core.traffic import ComputeKind, TrafficSource, TransferKind
from meshloom.compiler.report.views.page import NUM_EVENTS, render_page
from meshloom.compiler.report.views.timeline import lay_out, layer_views
from meshloom.compiler.schema import Event
from support import reports
from support.browser import CHROMIUM, chromium

IN_BROWSER = pytest.mark.skipif(not CHROMIUM, reason="there is no chromium: apt-get install chromium")
ONE_MB = 1_000_000


def in_browser(test: Callable[..., None]) -> Callable[..., None]:
    """A test that opens pages in a browser, which all of them share: one start."""
    return pytest.mark.ci(IN_BROWSER(test))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    paths = {}
    for case, make in reports.CASES.items():
        paths[case] = folder / f"{case}.html"
        report, events = make()
        paths[case].write_text(render_page(report, events, reports.llama_plan()))
    return paths


@pytest.fixture(scope="module")
def browser():
    with chromium() as page:
        yield page


@pytest.fixture
def page(browser, pages):
    """The page of the case that fits, opened anew; without an error at the end."""
    yield browser.open(pages["fits"])
    assert browser.errors == []


class _Links(HTMLParser):
    """All ids, all links and everything that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            elif name == "href" and tag == "a":
                self.links.append(str(value))
            elif name in ("src", "srcset", "href", "data", "poster", "background", "style") or name.startswith("on"):
                self.fetched.append(f"{tag} {name}={value}")


@pytest.mark.parametrize("case", reports.CASES)
def test_a_page_needs_nothing_else_and_its_links_lead_somewhere(case, pages):
    found = _Links()
    found.feed(pages[case].read_text())
    assert found.fetched == []
    assert len(set(found.ids)) == len(found.ids)
    assert {link.removeprefix("#") for link in found.links} <= set(found.ids)


def many_events(count: int) -> tuple[Event, ...]:
    rng, now, events = random.Random(0), 0.0, []
    for n in range(count):
        kind = rng.choice(["matmul", "attention", "all-gather", "reduce-scatter", "exposed"])
        track = "compute" if kind in ("matmul", "attention", "exposed") else "ICI x"
        seconds = rng.expovariate(1e4)
        events.append(Event(track=track, name=f"{kind}.{n}", kind=kind, start_seconds=now, seconds=seconds,
                            arguments={"source": f"layers/mlp/{n % 60}", "bytes": n * 1000}))  # fmt: skip
        now += rng.random() * 2e-4
    return tuple(events)


def test_a_large_report_is_a_small_page():
    report = reports.fits()[0]
    large = report.model_copy(update={"collectives": report.collectives * 6})  # 210 places in the program
    assert len(render_page(report, many_events(2_000), reports.llama_plan()).encode()) < ONE_MB / 2
    page = render_page(large, many_events(20_000), reports.llama_plan())
    assert len(page.encode()) < ONE_MB
    assert f"the longest {NUM_EVENTS:,} of 20,000 events" in page, "what is left out is told"


def test_one_is_no_plural():
    report, events = reports.fits()
    target = report.target.model_copy(update={"num_chips": 1})
    page = render_page(report.model_copy(update={"target": target}), events)
    assert "1 chip" in page
    assert not re.search(r"\b1 (chips|places|arrays)\b", page)


@in_browser
@pytest.mark.parametrize("case", reports.CASES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_is_drawn_without_errors_or_requests(browser, pages, case, scheme, width):
    browser.open(pages[case], width=width, scheme=scheme)
    browser.drawn()
    assert browser.errors == []
    assert browser.requests == [pages[case].resolve().as_uri()]
    assert browser.js("document.documentElement.scrollWidth") <= width, "only tables scroll sideways"
    red, green, blue = json.loads(
        browser.js("getComputedStyle(document.body).backgroundColor.replace('rgb(', '[').replace(')', ']')")
    )
    assert (red + green + blue > 600) == (scheme == "light")
    assert len(browser.screenshot()) > 20_000


@in_browser
def test_text_is_easy_to_read_in_both_schemes(browser, pages):
    """WCAG 2.2, 1.4.3: contrast of 4.5 to 1, of the colours that text has against what lies behind it."""
    script = """(() => {
      const parse = (text) => text.match(/[\\d.]+/g).map(Number);
      const light = (rgb) => rgb.slice(0, 3).map((v) => v / 255)
        .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
      const behind = (node) => {
        for (let at = node; at; at = at.parentElement) {
          const colour = parse(getComputedStyle(at).backgroundColor);
          if (colour.length === 3 || colour[3] > 0) return colour;
        }
        return [255, 255, 255];
      };
      const low = new Set();
      for (const node of document.querySelectorAll("body *:not(svg *, script, style)")) {
        const text = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
        if (!text || !node.getClientRects().length) continue;
        const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
        if ((a + 0.05) / (b + 0.05) < 4.5) low.add(`${node.tagName}.${node.className} ${(a + 0.05) / (b + 0.05)}`);
      }
      return [...low];
    })()"""
    for case in ("does not fit", "unknowns"):
        for scheme in ("light", "dark"):
            assert browser.open(pages[case], scheme=scheme).js(script) == []


COLUMN = """((name) => {
  const table = document.getElementById("collectives-table");
  const heading = [...table.querySelectorAll("th")].find((th) => th.textContent.trim().startsWith(name));
  const column = [...heading.parentNode.children].indexOf(heading);
  return {sort: heading.getAttribute("aria-sort"), groups: [...table.tBodies].map((group) => [...group.rows].map(
    (row) => row.cells[column].dataset.value ?? null))};
})"""


def _is_in_order(values, *, reverse):
    """Numbers or texts, with what is unknown at the end."""
    known = [value for value in values if value is not None]
    return known == sorted(known, reverse=reverse) and values == known + [None] * (len(values) - len(known))


def _focus(page, name):
    page.js(
        "[...document.querySelectorAll('#collectives-table th button')]"
        f".find(button => button.textContent.startsWith('{name}')).focus()"
    )


def _check_sorted(column, *, reverse, read: Callable[[str], Any] = int):
    """Groups by their sums, and places within their group."""
    groups = [[None if value is None else read(value) for value in group] for group in column["groups"]]
    assert _is_in_order([group[0] for group in groups], reverse=reverse)
    assert all(_is_in_order(group[1:], reverse=reverse) for group in groups)
    assert max(map(len, groups)) > 3


@in_browser
def test_columns_sort_by_keyboard_both_ways(page):
    _focus(page, "bytes")
    for sort in ("descending", "ascending"):
        page.press("Enter")
        column = page.js(COLUMN + "('bytes')")
        assert column["sort"] == sort
        _check_sorted(column, reverse=sort == "descending")
    _focus(page, "source")
    page.press("Enter")
    _check_sorted(page.js(COLUMN + "('source')"), reverse=False, read=str)
    assert page.js(COLUMN + "('bytes')")["sort"] is None
    places = [value for group in page.js(COLUMN + "('source')")["groups"] for value in (group[1:] or group)]
    assert sorted(places) == sorted(c.source for c in reports.fits()[0].collectives), "none is lost"


@in_browser
def test_unknown_ones_are_last_however_sorted(browser, tmp_path):
    report, events = reports.fits()
    some = [
        replace(c, exposed_seconds=Unknown("no price")) if n % 5 == 0 else c for n, c in enumerate(report.collectives)
    ]
    path = tmp_path / "page.html"
    path.write_text(render_page(report.model_copy(update={"collectives": tuple(some)}), events, reports.llama_plan()))
    browser.open(path)
    _focus(browser, "exposed")
    for reverse in (True, False):
        browser.press("Enter")
        column = browser.js(COLUMN + "('exposed')")
        _check_sorted(column, reverse=reverse, read=float)
        assert sum(value is None for group in column["groups"] for value in (group[1:] or group)) == len(some[::5])
    assert browser.errors == []


PLACES = (
    "[...document.querySelectorAll('#collectives-table .place:not([hidden])')].map(row => row.cells[0].dataset.value)"
)


@in_browser
def test_collectives_are_groups_that_unfold(page):
    """By kind, axes, link and pass; their sums are those of all."""
    collectives = reports.fits()[0].collectives
    passes = [re.search(r", (forward|recomputed|backward|update)$", c.source) for c in collectives]
    groups = Counter((c.kind, c.mesh_axes, c.link, p and p[1]) for c, p in zip(collectives, passes, strict=True))
    column = page.js(COLUMN + "('bytes')")["groups"]
    assert sorted(max(1, len(group) - 1) for group in column) == sorted(groups.values())
    assert sum(int(group[0]) for group in column) == sum(c.bytes for c in collectives)
    folded = page.js(PLACES)
    assert len(folded) == sum(number == 1 for number in groups.values())
    page.js("document.querySelector('#collectives-table .sum button').focus()")
    page.press("Enter")
    first = max(len(group) - 1 for group in column[:1])
    assert len(page.js(PLACES)) == len(folded) + first
    page.press("Enter")
    assert page.js(PLACES) == folded


@in_browser
def test_other_declarations_are_drawn_beside_the_own_one_on_its_scales(page):
    rows = page.js(
        "[...document.querySelectorAll('#alternatives tbody tr')].map(row => [row.cells[0].innerText.trim(),"
        " row.querySelector('rect.compute').getBBox().width, row.querySelector('rect.memory-other').getBBox().width,"
        " row.querySelector('line.mark').x1.baseVal.value, row.innerText.includes('does not fit')])"
    )
    names, compute, memory, limits, too_large = zip(*rows, strict=True)
    assert names == ("as declared", "remat=save_dots", "remat=none")
    assert sorted(compute, reverse=True) == list(compute)
    assert [each / memory[2] for each in memory[:2]] == pytest.approx([7.4 / 31, 11.2 / 31], rel=0.01)
    assert [each / memory[2] for each in limits] == pytest.approx([15.75 / 31] * 3, rel=0.01)
    assert too_large == (False, False, True)


@in_browser
def test_the_filter_leaves_what_was_asked_for(page):
    report = reports.fits()[0]
    page.js("document.getElementById('filter').focus()")
    page.press(*"mlp/up reduce")
    assert page.js(PLACES) == ["layers/mlp/up_EM, backward"]
    page.js("document.getElementById('filter').value = ''; document.getElementById('only-exposed').click()")
    assert sorted(page.js(PLACES)) == sorted(c.source for c in report.collectives if c.exposed_seconds)
    exposed = sum(bool(c.exposed_seconds) for c in report.collectives)
    assert page.js("document.getElementById('shown').textContent") == f"{exposed} of {len(report.collectives)}"


DRAWN = "[...document.querySelectorAll('.pane:not([hidden]) rect[data-index]')].map(r => Number(r.dataset.index))"
DETAIL = "document.getElementById('detail').textContent"
FIRST_PANE = "document.querySelector('#chart .lanes')"


@in_browser
def test_the_timeline_opens_on_a_layer_forward_and_one_backward(page):
    """Both in one scale, named by what they do; and the whole step when it is asked for."""
    slices, views = lay_out(reports.fits()[1]), layer_views(reports.fits()[1])
    assert [view.name for view in views] == ["layers, forward, iteration 2", "layers, backward, iteration 2"]
    drawn = page.js("[...document.querySelectorAll('.pane')].map(pane => [...pane.querySelectorAll("
                    "'rect[data-index]')].map(r => Number(r.dataset.index)))")  # fmt: skip
    for view, seen in zip(views, drawn, strict=True):
        own = {n for n, s in enumerate(slices) if s.start_ns < view.end_ns and s.end_ns > view.start_ns}
        wide = {n for n in own if slices[n].end_ns - slices[n].start_ns > (view.end_ns - view.start_ns) / 500}
        assert wide <= set(seen), "all of the layer"
    captions = page.js("[...document.querySelectorAll('.pane p')].map(p => p.textContent)")
    assert [caption.partition(": ")[0] for caption in captions] == [view.name for view in views]
    labels = "[...document.querySelectorAll('#chart text.inside')].map(t => t.textContent).join(' ')"
    assert "matmul mlp/up_EM" in page.js(labels)
    page.js("document.getElementById('by-hlo').click()")
    page.drawn()
    assert "matmul mlp/up_EM" not in page.js(labels)
    assert "mlp/up_EM." in page.js(labels)
    page.js("document.getElementById('zoom-all').click()")
    page.drawn()
    assert page.js("[...document.querySelectorAll('.pane')].filter(pane => !pane.hidden).length") == 1
    page.js("document.getElementById('zoom-views').click()")
    page.drawn()
    assert page.js("[...document.querySelectorAll('.pane p')].map(p => p.textContent)") == captions


@in_browser
def test_labels_of_the_time_axis_differ_at_every_zoom(page):
    page.js(f"{FIRST_PANE}.focus()")
    ticks = "[...document.querySelectorAll('.pane:not([hidden]) .grid + text')].map(t => t.textContent)"
    page.press("0", "ArrowRight")
    for _ in range(24):
        labels = page.js(ticks)
        assert len(set(labels)) == len(labels) > 1
        page.press("+")


@in_browser
def test_no_two_classes_of_a_chart_share_a_colour(browser, pages):
    script = """((names) => {
      const svg = document.querySelector('svg');
      return names.map((name) => {
        const rect = document.createElementNS(svg.namespaceURI, 'rect');
        rect.setAttribute('class', name); svg.append(rect);
        return getComputedStyle(rect).fill;
      });
    })"""
    timeline = [*get_args(TransferKind), *get_args(ComputeKind), "exposed", "loop"]
    memory = [f"memory-{name}" for name in (
        "parameters", "master", "optimizer", "scalars", "batch", "outputs", "working_parameters",
        "gathered_weights", "gradients", "activations", "temporaries", "code", "reserved", "other",
    )]  # fmt: skip
    for scheme in ("light", "dark"):
        for names in (timeline, memory):
            colours = browser.open(pages["fits"], scheme=scheme).js(f"{script}({json.dumps(names)})")
            assert len(set(colours)) == len(names), dict(zip(names, colours, strict=True))


@in_browser
def test_the_timeline_is_walked_and_zoomed_by_keyboard(page):
    events = reports.fits()[1]
    compute = sorted((e for e in events if e.track == "compute"), key=lambda e: e.start_seconds)
    stalls = sorted((s for s in lay_out(events) if s.event.kind == "exposed"), key=lambda s: s.start_ns - s.end_ns)
    exposed = [s.event for s in stalls]
    page.js(f"{FIRST_PANE}.focus()")
    page.press("0")
    whole = len(page.js(DRAWN))
    page.press("n")
    assert page.js(DETAIL).startswith(f"{compute[0].name} {compute[0].kind} on compute, from 0, for")
    assert page.js(DETAIL).endswith(f"HLO {compute[0].instruction}")
    page.press("n", "n", "p")
    assert page.js(DETAIL).startswith(compute[1].name)
    page.press("e")
    assert page.js(DETAIL).startswith(f"{exposed[0].name} exposed on compute")
    assert 0 < len(page.js(DRAWN)) < whole
    page.press("e")
    assert page.js(DETAIL).startswith(f"{exposed[1].name} exposed on compute")
    page.press("0")
    assert len(page.js(DRAWN)) >= whole
    page.press(*"++++")
    slices, drawn = lay_out(events), set(page.js(DRAWN))
    middle = max(s.end_ns for s in slices) / 2
    first, last = middle * (1 - 1 / 16), middle * (1 + 1 / 16)
    seen = {n for n, s in enumerate(slices) if s.end_ns >= first and s.start_ns <= last}
    wide = {n for n in seen if slices[n].end_ns - slices[n].start_ns > (last - first) / 500}
    assert wide <= drawn <= seen, "of a sixteenth of the step all but what falls on one pixel"
    assert len(wide) > 30
    page.press("ArrowRight")
    assert page.js(DRAWN)


@in_browser
def test_the_timeline_is_dragged_and_zoomed_by_mouse_and_leaves_scrolling_alone(page):
    page.js(f"{FIRST_PANE}.scrollIntoView()")
    box = page.js(f"{FIRST_PANE}.getBoundingClientRect().toJSON()")
    x, y = box["left"] + 300, box["top"] + 40
    ticks = "[...document.querySelectorAll('#chart text')].map(t => t.textContent).join()"
    whole, top = page.js(ticks), page.js("scrollY")
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-400, modifiers=2)
    page.drawn()
    zoomed = page.js(ticks)
    assert zoomed != whole
    assert page.js("scrollY") == top
    page.mouse("mousePressed", x, y, button="left", clickCount=1)
    page.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
    page.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
    page.drawn()
    assert page.js(ticks) != zoomed
    page.js("scrollTo(0, 0)")
    page.mouse("mouseWheel", x, 300, deltaX=0, deltaY=200)
    page.js("new Promise(done => setTimeout(done, 300))")
    assert page.js("scrollY") > 0


@in_browser
def test_text_of_a_config_does_nothing_in_the_page(browser, tmp_path):
    evil = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>{{ 7 * 7 }}\u2028"
    report, events = reports.fits()
    report = report.model_copy(
        update={
            "program": report.program.model_copy(update={"model": evil}),
            "overrides": (evil,),
            "compiled": report.compiled.model_copy(update={"mfu": Unknown(evil)}),
            "collectives": tuple(
                replace(c, origin=TrafficSource(activation=evil), name=evil) for c in report.collectives
            ),
            "findings": tuple(f.model_copy(update={"what": evil}) for f in report.findings),
        }
    )
    events = tuple(e.model_copy(update={"name": evil, "arguments": {evil: evil}}) for e in events)
    path = tmp_path / "page.html"
    path.write_text(render_page(report, events, reports.llama_plan()))
    browser.open(path)
    browser.js(f"{FIRST_PANE}.focus()")
    browser.press("n")
    assert browser.js("window.hacked ?? 'no'") == "no"
    assert browser.js("document.querySelectorAll('img').length") == 0
    assert browser.js("document.querySelector('#collectives-table tbody code').textContent") == evil
    assert browser.js(DETAIL).startswith(evil)
    embedded = browser.js("document.getElementById('report').textContent")
    assert json.loads(embedded) == reports.in_page(report)
    assert browser.errors == []


@in_browser
def test_the_policy_of_the_page_lets_nothing_in_or_out(browser, pages):
    browser.open(pages["fits"])
    browser.js("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.in = 1'}))")
    assert browser.js("window.in ?? 'no'") == "no"
    assert browser.js("fetch('https://example.org/').then(() => 'sent', () => 'refused')") == "refused"
    assert all("Content Security Policy" in error for error in browser.errors)
    assert len(browser.errors) >= 2


PAPER_WIDTH = 718  # of A4 without margins, in CSS pixels


@in_browser
@pytest.mark.parametrize("case", reports.CASES)
def test_on_paper_all_is_open_light_and_within_the_margins(browser, pages, case):
    browser.open(pages[case], width=PAPER_WIDTH, scheme="dark")
    folded = browser.js("document.querySelectorAll('details:not([open])').length")
    assert folded > 5
    browser.js("""addEventListener('beforeprint', () => {
      window.folded = document.querySelectorAll('details:not([open])').length })""")
    assert browser.pdf().startswith(b"%PDF")
    assert browser.js("window.folded") == 0
    assert browser.js("document.querySelectorAll('details:not([open])').length") == folded
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.js("for (const part of document.querySelectorAll('details')) part.open = true")
    browser.drawn()
    assert browser.js("document.documentElement.scrollWidth") <= PAPER_WIDTH
    assert browser.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@in_browser
def test_thousands_of_events_are_drawn(browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(render_page(reports.fits()[0], many_events(2_000), reports.llama_plan()))
    browser.open(path)
    browser.drawn()
    assert 100 < len(browser.js(DRAWN)) <= 2_000
    assert browser.errors == []
