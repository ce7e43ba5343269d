"""The page of a report in a browser: it draws, it can be zoomed and asked, in any theme and width.

Screenshots of it are left in build/report, for whoever wants to look.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, browser
from recordings import alone, shared
from selenium.webdriver.support.wait import WebDriverWait

from tsliced.host.history import Event
from tsliced.observe import timeline
from tsliced.observe.report.page import report

SHOTS = Path(__file__).resolve().parents[3] / "build" / "report"
LIMIT_S = 20
#: How many different colours a part of the lanes' canvas has, beside the ground.
COLOURS = """
const canvas = document.querySelector("#lanes canvas"), context = canvas.getContext("2d");
const data = context.getImageData(0, 0, canvas.width, canvas.height).data, seen = new Set();
for (let n = 0; n < data.length; n += 4)
  if (data[n + 3] === 255) seen.add(data.slice(n, n + 3).join());
return seen.size;
"""


TIP = "const tip = document.querySelector('.tip'); return tip.hidden ? '' : tip.textContent"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("report"), shared(1.0), alone(1.0))


def made(directory: Path, events: list[Event], *solo: list[Event]) -> Path:
    path = directory / "report.html"
    recordings = [timeline.read(each) for each in solo]
    path.write_text(report(events, timeline.read(events), recordings, host="n1"))
    return path


@pytest.mark.parametrize(
    ("name", "dark", "width"),
    [("light", False, 1280), ("dark", True, 1280), ("narrow", False, 390)],
)
def test_it_is_drawn_without_a_complaint_and_no_wider_than_the_window(
    window: Browser, page: Path, name: str, dark: bool, width: int
) -> None:
    window.open(page, dark=dark, width=width)
    assert window.complaints() == []
    assert window.run("return document.querySelectorAll('.uplot').length") >= 7
    assert window.run(COLOURS) > 8
    assert window.run("return document.documentElement.scrollWidth") <= width
    ground = window.run("return getComputedStyle(document.documentElement).backgroundColor")
    assert ground == ("rgb(18, 22, 29)" if dark else "rgb(255, 255, 255)")
    SHOTS.mkdir(parents=True, exist_ok=True)
    size = window.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
    window.open(page, dark=dark, width=width, height=int(size["height"]))
    window.driver.save_screenshot(str(SHOTS / f"{name}.png"))


def spans(window: Browser) -> list[tuple[float, float]]:
    return [(begin, end) for begin, end in window.run("return report.span()")]


def test_a_drag_zooms_all_time_lines_and_a_double_click_shows_all_again(
    window: Browser, page: Path
) -> None:
    window.open(page)
    whole = spans(window)[0]
    over = window.find("#lanes .u-over")
    wide = over.size["width"]
    drag = window.mouse().move_to_element_with_offset(over, -wide // 10, 0).click_and_hold()
    drag.move_by_offset(wide // 20, 0).move_by_offset(wide // 20, 0).release().perform()
    zoomed = spans(window)
    assert len(set(zoomed)) == 1, "all of them show the same"
    begin, end = zoomed[0]
    assert end - begin == pytest.approx((whole[1] - whole[0]) / 10, rel=0.1)
    assert begin == pytest.approx(whole[0] + 0.4 * (whole[1] - whole[0]), rel=0.1)
    window.mouse().move_to_element(over).double_click().perform()
    assert spans(window)[0] == pytest.approx(whole)
    assert window.complaints() == []


def test_buttons_zoom_and_change_the_theme(window: Browser, page: Path) -> None:
    window.open(page)
    whole = spans(window)[0]

    def press(text: str) -> None:
        buttons = window.driver.find_elements("css selector", "#tools button")
        next(button for button in buttons if button.text == text).click()

    press("Zoom in")
    begin, end = spans(window)[0]
    assert end - begin == pytest.approx((whole[1] - whole[0]) / 2)
    press("Zoom out")
    assert spans(window)[0] == pytest.approx(whole)
    before = window.run("return getComputedStyle(document.documentElement).backgroundColor")
    press("Light or dark")
    after = window.run("return getComputedStyle(document.documentElement).backgroundColor")
    assert before != after
    assert window.complaints() == []


def test_a_bar_says_what_it_is_and_how_long(window: Browser, page: Path) -> None:
    window.open(page)
    over = window.find("#lanes .u-over")
    window.run("document.querySelectorAll('#tools button')[0].click()")
    found = set()
    high, wide = over.size["height"], over.size["width"]
    for lane in range(4):
        for step in range(8):
            x = -wide // 2 + 10 + step * (wide - 20) // 8
            y = -high // 2 + lane * high // 4 + 14
            window.mouse().move_to_element_with_offset(over, x, y).perform()
            found.add(window.run(TIP))
    told = "\n".join(found)
    assert "a: rollout" in told or "b: rollout" in told, "on a device"
    assert "reward (host)" in told, "of a job"
    assert " from " in told
    assert "trainer GPU-" in told


def test_the_cursor_shows_the_values_of_all_curves_at_one_time(window: Browser, page: Path) -> None:
    window.open(page)
    over = window.find("#time .u-over")
    window.mouse().move_to_element_with_offset(over, 5, 5).perform()

    def legends(_: object) -> bool:
        legends = "return [...document.querySelectorAll('#time .u-legend')].map(l => l.textContent)"
        values = window.run(legends)
        # The time of the cursor stands first in each of them.
        return len(values) >= 2 and all(re.match(r"Time:?\d\d:\d\d", v) for v in values)

    WebDriverWait(window.driver, LIMIT_S).until(legends)


def test_hostile_names_stay_text(window: Browser, tmp_path: Path) -> None:
    name = "1000/</script><img src=x onerror=\"document.title='mine'\">"
    window.open(made(tmp_path, shared(0.3, (name, "1000/<b>b</b>"))))
    assert window.complaints() == []
    assert window.run("return document.title") != "mine"
    assert window.run("return document.querySelectorAll('img, b').length") == 0
    shown = window.run("return document.querySelector('#key').textContent")
    assert "<b>b</b>" not in shown, "an id is what stands behind the last slash"
    assert "b>" in shown


def test_an_empty_span_is_a_page_too(window: Browser, tmp_path: Path) -> None:
    event: Event = {"seq": 1, "at": 1.7e9, "kind": "config", "level": "warning", "reason": "x"}
    window.open(made(tmp_path, [event]))
    assert window.complaints() == []
    assert "No state was moved" in window.run("return document.body.textContent")
