"""The page of a sweep in a browser: every point is there, what is not done is grey, and no value acts on it."""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from meshloom.runtime.sweep.page import front_of, in_value_order, render_sweep
from meshloom.runtime.sweep.read import read_sweep
from meshloom.runtime.sweep.rows import Row
from support.browser import CHROMIUM, Page, chromium
from support.sweeps import GIB, figures, point, sweep_file, write_sweep

NASTY = "</script><script>document.title='acted'</script><b>\"'&"
in_browser = [pytest.mark.ci, pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")]


def _grid(num_fsdp: int, num_tensor: int, num_seeds: int = 1) -> list[Row]:
    """Cells of fsdp and tensor, each with some seeds; tensor=0 does not fit."""
    made = []
    for n in range(num_fsdp * num_tensor * num_seeds):
        fsdp, tensor, seed = n % num_fsdp, n // num_fsdp % num_tensor, n // num_fsdp // num_tensor
        swept = {"mesh.fsdp": fsdp, "mesh.tensor": tensor, "seed": seed}
        if tensor == 0:
            large = figures(peak_bytes=(20 + fsdp) * GIB, fits=False)
            made.append(point(n, swept, status="does_not_fit", why=f"needs {20 + fsdp} GiB", figures=large))
        else:
            seconds = 1 + tensor + 0.1 * fsdp + 0.001 * seed
            made.append(point(n, swept, figures=figures(step_seconds=seconds, peak_bytes=GIB * (15 - fsdp % 8))))
    return made


def _written(directory: Path, rows: list[Row], **changed) -> Path:
    sweep = read_sweep(write_sweep(directory, rows, sweep_file(rows, **changed)))
    page = directory / "sweep.html"
    page.write_text(render_sweep(sweep, page))
    return page


def _embedded(page: Path) -> dict:
    found = re.search(r'<script type="application/json" id="sweep">(.*?)</script>', page.read_text(), re.S)
    assert found
    return json.loads(found[1])


def test_the_page_has_every_point_once_and_the_best_first(tmp_path):
    rows = _grid(4, 3)
    data = _embedded(_written(tmp_path, rows))
    assert sorted(data["points"]["index"]) == [row.index for row in rows]
    assert data["points"]["index"][0] == 4
    assert data["points"]["status"].count("does_not_fit") == 4
    assert [key["name"] for key in data["keys"]] == ["mesh.fsdp", "mesh.tensor"]
    assert data["keys"][1]["influence"] > data["keys"][0]["influence"]


def test_the_page_of_a_sweep_that_runs_has_curves_of_points_that_have_not_ended(tmp_path):
    done = point(0, {"optimizer.learning_rate": 0.001}, directory="optimizer.learning_rate=0.001", figures=figures())
    sweep = read_sweep(write_sweep(tmp_path, [done], sweep_file([done], num_points=3)))
    for rate, num_steps in (("0.001", 8), ("0.01", 5)):
        metrics = tmp_path / f"optimizer.learning_rate={rate}" / "metrics.jsonl"
        metrics.parent.mkdir()
        metrics.write_text("".join(f'{{"step": {n}, "loss": {9 - n}.0}}\n' for n in range(num_steps)))
    for is_running in (True, False):
        page = tmp_path / "sweep.html"
        page.write_text(render_sweep(replace(sweep, is_running=is_running), page))
        data = _embedded(page)
        assert [curve["steps"][-1] for curve in data["curves"]] == ([7, 4] if is_running else [7])
        assert data["points"]["status"] == (["done", "running"] if is_running else ["done"])
        assert data["keys"][0]["values"] == (["0.001", "0.01"] if is_running else ["0.001"])


def test_values_are_text_and_their_order_is_that_of_numbers(tmp_path):
    text = _written(tmp_path, [point(n, {"notes": f"{NASTY}{n}"}, status="failed", why=NASTY) for n in range(2)])
    assert "<script>document" not in text.read_text()
    assert _embedded(text)["reasons"] == [NASTY]
    assert in_value_order(["16", "1e-3", "2", "16"]) == ["1e-3", "2", "16"]
    assert in_value_order(["full", "none", "2"]) == ["full", "none", "2"]


def test_names_are_in_the_order_that_they_were_typed_in(tmp_path):
    rows = [point(n, {"remat": name}, figures=figures(step_seconds=9.0 - n)) for n, name in enumerate("zab")]
    assert _embedded(_written(tmp_path, rows))["keys"][0]["values"] == ["z", "a", "b"]


def test_links_lead_to_reports_whatever_a_directory_is_called(tmp_path):
    rows = [point(0, {"a": 1}, directory="a=1,b=50%#?:é"), point(1, {"a": 2}), point(2, {"a": 3}, directory=None),
            point(3, {"a": 4}, same_as=0), point(4, {"a": 5})]  # fmt: skip
    for row in rows[:1] + rows[3:]:
        (tmp_path / str(row.directory)).mkdir()
    (tmp_path / str(rows[0].directory) / "report.html").write_text("")
    links = _embedded(_written(tmp_path, rows))["points"]["link"]
    report = "./a%3D1%2Cb%3D50%25%23%3F%3A%C3%A9/report.html"
    assert links == [report, None, None, report, "./a%3D5/"]


def test_the_front_has_done_points_alone():
    rows = _grid(9, 2)
    assert {row.status for row in front_of(rows)} == {"done"}
    assert [row.index for row in front_of(rows)] == list(range(9, 17))  # each a bit slower and smaller


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with chromium() as page:
        yield page


class TestInABrowser:
    pytestmark = in_browser

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_three_points(self, tmp_path, browser, scheme):
        rows = [point(n, {"mesh.fsdp": 4 * n}, figures=figures(step_seconds=3.0 - n)) for n in (0, 1)]
        rows += [point(2, {"mesh.fsdp": 8}, status="does_not_fit", why="needs 20 GiB of 16 GiB")]
        (tmp_path / "mesh.fsdp=4").mkdir()
        (tmp_path / "mesh.fsdp=4" / "report.html").write_text("<title>its report</title>")
        page = browser.open(_written(tmp_path, rows), scheme=scheme)
        page.drawn()
        assert (_count(page, "#heat .cell"), _count(page, "#heat .cell.no")) == (3, 1)
        assert _count(page, "#pareto circle") == 2
        assert _count(page, ".bar-row") == 2
        assert _count(page, "#table tbody tr") == 3
        _hover(page, "#heat .cell.no")
        assert "does not fit: needs 20 GiB of 16 GiB" in page.js("document.getElementById('tip').textContent")
        assert (page.errors, page.requests[1:]) == ([], [])
        # An evaluation that is under way when its page is left ends in an error, so the click comes after it.
        best = "document.querySelector('#heat .cell.is-best')"
        page.js(f"setTimeout(() => {best}.dispatchEvent(new MouseEvent('click')), 50); 0")
        time.sleep(0.2)
        while page.js("document.title") != "its report":
            time.sleep(0.05)

    def test_three_thousand_points(self, tmp_path, browser):
        rows = _grid(30, 10, 10)
        page = browser.open(_written(tmp_path, rows))
        page.drawn()
        assert (_count(page, "#heat .cell"), _count(page, "#heat .cell.no")) == (300, 30)
        assert (_count(page, "#pareto circle"), _count(page, "#pareto .out")) == (2700, 300)
        assert page.js("document.getElementById('shown').textContent") == "3,000 of 3,000"
        page.js("document.getElementById('more-points').click()")
        assert _count(page, "#table tbody tr") == 3000
        page.js("document.getElementById('filter').value = 'mesh.tensor=3 seed=7'; 0")
        page.js("document.getElementById('filter').dispatchEvent(new Event('input'))")
        assert page.js("document.getElementById('shown').textContent") == "30 of 3,000"
        page.js("const y = document.getElementById('heat-y'); y.value = -1; y.dispatchEvent(new Event('change'))")
        assert (_count(page, "#heat .cell"), page.errors) == (30, [])

    def test_figures_over_chips_have_bars_and_say_ties(self, tmp_path, browser):
        on = [("v5p", 64, 2.0), ("v5p", 128, 1.1), ("v6e", 256, 1.0)]
        rows = [
            point(n, {"target": f"{chip}-{chips}"}, figures=figures(
                step_seconds=seconds, range_factor=1.2, target=f"{chip}-{chips}", chip=chip, num_chips=chips,
                training_cost=100.0 * chips))
            for n, (chip, chips, seconds) in enumerate(on)
        ]  # fmt: skip
        page = browser.open(_written(tmp_path, rows))
        page.drawn()
        count = "document.querySelectorAll('#chips .{}').length"
        assert page.js(count.format("dot")) == 9
        assert page.js(count.format("whisker")) == 9
        assert page.js("document.getElementById('chips-tie').textContent") == (
            "A tie by step, ringed: v5p-128, v6e-256; none of them is surely the best."
        )
        assert page.js(count.format("tied")) == 6
        axes = page.js("new Parallel(byId('parallel-chart')).axes.map(({ name, ticks }) => [name, ticks])")
        assert ["memory", [[0.5, "8.00 GiB"]]] in axes, "a figure of one value has one tick, where its lines are"
        assert page.errors == []

    def test_a_cell_shows_the_best_of_its_points_and_its_sort_is_by_number(self, tmp_path, browser):
        rows = [point(n, {"a": 1, "b": 1, "seed": n}, figures=figures(step_seconds=3.0 - n)) for n in range(3)]
        rows += [point(3, {"a": 2, "b": 2, "seed": 0}, figures=figures(step_seconds=20.0))]
        page = browser.open(_written(tmp_path, rows))
        for axis, key in (("x", 0), ("y", 1)):
            page.js(f"document.getElementById('heat-{axis}').value = {key}; 0")
        page.js("document.getElementById('heat-x').dispatchEvent(new Event('change'))")
        assert (
            page.js("[...document.querySelectorAll('#heat text.value')].map(t => t.textContent).join()")
            == "★ 1.00 s,20.0 s"
        )
        assert _count(page, "#heat .cell.none") == 2
        step = "[...document.querySelectorAll('#table th')].findIndex(th => th.textContent === 'step')"
        page.js(f"document.querySelectorAll('#table th button')[{step}].click()")
        page.js(f"document.querySelectorAll('#table th button')[{step}].click()")
        assert page.js(f"document.querySelector('#table tbody tr').cells[{step}].textContent") == "20.0 s"

    def test_on_a_telephone_nothing_is_wider_than_the_screen(self, tmp_path, browser):
        page = browser.open(_written(tmp_path, _grid(12, 3)), width=400, height=800)
        page.drawn()
        assert page.js("document.documentElement.scrollWidth <= document.documentElement.clientWidth")

    def test_a_selection_along_an_axis_holds_for_the_table(self, tmp_path, browser):
        page = browser.open(_written(tmp_path, _grid(4, 3)))
        page.js("document.getElementById('parallel').scrollIntoView()")
        page.drawn()
        left, top = page.js("(b => [b.left, b.top])(document.getElementById('parallel-chart').getBoundingClientRect())")
        for kind, y in (("mousePressed", 390), ("mouseMoved", 300), ("mouseReleased", 300)):
            page.mouse(kind, left + 60, top + y, button="left", buttons=1, clickCount=1)
        page.drawn()
        assert page.js("document.getElementById('shown').textContent") == "3 of 12"  # the lowest of four values
        page.js("document.getElementById('clear').click()")
        page.drawn()
        assert page.js("document.getElementById('shown').textContent") == "12 of 12"

    @pytest.mark.cases(plain=1, ci=4)
    @pytest.mark.parametrize("rows", [
        [], [point(0, {})], [point(0, {"a": NASTY}, status="failed", why=NASTY)], [point(0, {"a": 1}, figures=None)],
        [point(n, {"a": n}, figures=figures(step_seconds=0.0, compute_seconds=None, peak_bytes=None)) for n in (0, 1)],
        [point(n, {"a": n}, status="refused", why=f"{n} does not divide 8", directory=None) for n in range(3)],
        [point(n, {f"key{k}": n % (k + 2) for k in range(12)}, figures=figures(step_seconds=1.0)) for n in range(9)],
        [point(n, {"lr": n * 1e-5}, figures=figures(step_seconds=1.0 + n)) for n in range(200)],
    ], ids=["none", "no key", "nasty", "no figures", "unknown", "refused", "many keys", "many values"])  # fmt: skip
    def test_odd_sweeps_draw_without_an_error(self, tmp_path, browser, rows):
        page = browser.open(_written(tmp_path, rows))
        page.drawn()
        assert page.errors == []
        assert "acted" not in page.js("document.title")
        assert page.js("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert "NaN" not in page.js("document.documentElement.innerHTML.replace(/<script[^]*?<.script>/g, '')")

    def test_the_loss_over_a_swept_rate_has_a_logarithmic_axis(self, tmp_path, browser):
        rates = ("1e-4", "1e-3", "1e-2")
        rows = [point(n, {"optimizer.learning_rate": rate, "seed": seed}, figures=figures(final_loss=3.0 - n + seed))
                for n, (seed, rate) in enumerate(product((0, 1), rates))]  # fmt: skip
        page = browser.open(_written(tmp_path, rows, command="train", objective="final_loss"))
        page.drawn()
        dots = page.js("[...document.querySelectorAll('#over .dot')].map(dot => Number(dot.getAttribute('cx')))")
        first, second, third = sorted({round(at, 3) for at in dots})
        assert len(dots) == 6
        assert second - first == pytest.approx(third - second), "each rate is ten times the one before"
        assert "optimizer.learning_rate, logarithmic" in page.js("document.getElementById('over-chart').textContent")
        page.js("const over = document.getElementById('over-x'); over.value = over.options[1].value; "
                "over.dispatchEvent(new Event('change'))")  # fmt: skip
        assert "logarithmic" not in page.js("document.getElementById('over-chart').textContent")
        assert page.errors == []

    def test_curves_of_runs_are_drawn_over_steps_and_tokens(self, tmp_path, browser):
        rows = [point(n, {"seed": n}, figures=figures(final_loss=2.0 + n, evaluation_loss=3.0 + n)) for n in range(3)]
        for row in rows:
            (tmp_path / str(row.directory)).mkdir()
            losses = {step: None if step == 9 else 2.0 + row.index + 9 / step for step in range(1, 51)}
            evaluated = {50: 3.0 + row.index}
            lines = [json.dumps({"step": step, "loss": loss, "eval_loss": evaluated.get(step)})
                     for step, loss in losses.items()]  # fmt: skip
            (tmp_path / str(row.directory) / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        page = browser.open(_written(tmp_path, rows, command="train", objective="evaluation_loss"))
        page.drawn()
        cells = "[...document.querySelectorAll('#runs tbody tr')].map(row => [...row.cells].map(c => c.textContent))"
        told = [[run, steps, last, held_out] for run, steps, last, held_out, *_ in page.js(cells)]
        assert told == [[f"seed={n}", "50", f"{n + 2}.1800", f"{n + 3}.0000"] for n in range(3)]
        for canvas in range(2):  # the best run's colour is on both
            assert (
                page.js(f"""(canvas => {{
                const {{ data }} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                let count = 0;
                for (let n = 0; n < data.length; n += 4)
                  if (data[n] === 0 && data[n + 1] === 114 && data[n + 2] === 178) count += 1;
                return count;
            }})(document.querySelectorAll("canvas.curves")[{canvas}])""")
                > 50
            )
        assert page.errors == []


def _count(page: Page, selector: str) -> int:
    return page.js(f"document.querySelectorAll({json.dumps(selector)}).length")


def _hover(page: Page, selector: str) -> None:
    page.js(f"window.mark = document.querySelector({json.dumps(selector)}); mark.scrollIntoView({{block: 'center'}})")
    x, y = page.js("(b => [b.x + b.width / 2, b.y + b.height / 2])(mark.getBoundingClientRect())")
    page.mouse("mouseMoved", x, y)
    page.drawn()
