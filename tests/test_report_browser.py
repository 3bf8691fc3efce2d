"""The page of a report in a real browser: it loads alone, draws every number, answers the pointer, and holds on any screen."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.explicit import explicit_plan
from planner.questions.best_plan import resolved_of
from planner.questions.report.build import build
from planner.questions.report.document import Document
from planner.questions.report.page import page, start_library
from planner.questions.report.scaling import at_size

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND", "--hide-scrollbars",
)  # fmt: skip
BARS, POINTS = ".mark-rect.role-mark path", ".mark-symbol.role-mark path"
MARKS = {
    "waterfall": BARS, "memory": BARS, "heatmap": BARS, "pareto": POINTS, "scaling": POINTS, "accuracy": BARS,
    "sensitivity": BARS,
}  # fmt: skip
"""Elements of each chart; the two of thousands of actions and of areas are counted otherwise."""


def browser_path() -> str:
    """The browser, or a skip that cannot be overlooked."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None or shutil.which("chromedriver") is None:
        pytest.skip("NOT CHECKED: chromium is not installed (apt-get install chromium chromium-driver)")
    return found


@pytest.fixture(scope="module")
def document() -> Document:
    said = {"model": "llama-8b", "num_gpus": 16, "global_batch_size": 64, "hardware": "h100-sxm", "trainer": "megatron"}
    plan = explicit_plan(None, {"tp": 2, "pp": 2, "micro_batch_size": 1, "zero": 1}, said)
    return build(plan, lambda _: [at_size(resolved_of(plan), count) for count in (8, 16, 32)])


@pytest.fixture(scope="module")
def driver(document: Document, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = browser_path()
    webdriver = pytest.importorskip("selenium.webdriver", reason="NOT CHECKED: selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(page(document, start_library()()), encoding="utf-8")
    options = webdriver.ChromeOptions()
    options.binary_location = path
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        chrome = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            chrome.address = f"file://{file}"
            yield chrome
        finally:
            chrome.quit()


def opened(chrome: Any, width: int = 1440, scheme: str = "light", media: str = "") -> None:
    """Load the page on a screen of this width and wait until everything is drawn."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features, "media": media})
    chrome.get(chrome.address)
    end = time.monotonic() + 60
    while chrome.execute_script("return document.documentElement.dataset.ready") != "yes":
        assert time.monotonic() < end, f"not drawn: {chrome.get_log('browser')}"
        time.sleep(0.05)


def requests(chrome: Any) -> list[str]:
    """Every address that the page asked for; the browser's own start page asks for others."""
    events = [json.loads(entry["message"])["message"] for entry in chrome.get_log("performance")]
    sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [one["request"]["url"] for one in sent if one["documentURL"] == chrome.address]


def test_it_loads_alone_and_draws_every_number(driver: Any, document: Document) -> None:
    chrome = driver
    opened(chrome)
    asked = requests(chrome)
    assert chrome.address in asked
    assert [url for url in asked if url != chrome.address and not url.startswith("data:")] == []
    loaded = chrome.execute_script("return performance.getEntriesByType('resource').map(one => one.name)")
    assert [url for url in loaded if not url.startswith("data:")] == []
    assert chrome.get_log("browser") == []
    count = "return document.querySelectorAll('#' + arguments[0] + ' ' + arguments[1]).length"
    expected = {
        "waterfall": len(document.chart("waterfall").rows),
        "memory": len(document.chart("memory").rows),
        "heatmap": len(document.chart("heatmap").rows) + 1,  # and the frame of the plan's cell
        "pareto": len(document.chart("pareto").rows),
        "scaling": sum(row[4] is not None for row in document.chart("scaling").rows),
        "sensitivity": len(document.chart("sensitivity").rows),
        "accuracy": len(document.chart("accuracy").rows) + 1,  # and the band of 10 %
    }
    for name, marks in expected.items():
        found = chrome.execute_script(count, name, MARKS[name])
        assert found == marks, f"{name}: {found} marks for {marks} rows"
    for name in ("pipeline", "memory-timeline"):
        rows = chrome.execute_script("return window.reportViews[arguments[0]].data('rows').length", name)
        assert rows >= len(document.chart(name).rows) > 0
    assert chrome.execute_script("return document.querySelectorAll('#pipeline .mark-rect.role-mark path').length") > 100
    assert chrome.execute_script("return document.querySelectorAll('details table tbody tr').length") > 50
    assert chrome.title == f"{document.title}: plan report"


def hovered(chrome: Any, name: str, selector: str, number: int = 0) -> str:
    """The tooltip over one mark of a chart."""
    from selenium.webdriver.common.action_chains import ActionChains

    marks = chrome.find_elements("css selector", f"#{name} {selector}")
    chrome.execute_script("arguments[0].scrollIntoView({block: 'center'})", marks[number])
    ActionChains(chrome).move_by_offset(0, 0).move_to_element(marks[number]).perform()
    for _ in range(60):
        shown = chrome.find_elements("css selector", "#vg-tooltip-element.visible")
        if shown and shown[0].text:
            return str(shown[0].text)
        time.sleep(0.05)
    return ""


def test_the_pointer_gets_answers_with_units(driver: Any, document: Document) -> None:
    opened(driver)
    first = document.chart("waterfall").cells()[1][0]
    text = hovered(driver, "waterfall", BARS)
    assert first[0] in text and first[1] in text, text
    action = hovered(driver, "pipeline", BARS, 3)
    assert "microbatch" in action and "takes" in action and (" s" in action or " ms" in action), action
    assert "GiB" in hovered(driver, "memory", BARS, 1)


def test_dark_light_narrow_and_print(driver: Any) -> None:
    colours = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
    label = "return getComputedStyle(document.querySelector('#waterfall .role-axis-label text')).fill"
    opened(driver)
    light = driver.execute_script(colours)
    assert driver.execute_script(label) == light[1], "labels have the colour of the text"
    opened(driver, scheme="dark")
    dark = driver.execute_script(colours)
    assert light[0] == "rgb(255, 255, 255)" and dark[0] != light[0] and dark[1] != light[1]
    assert driver.execute_script(label) == dark[1]
    printed = {"media": "print", "features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", printed)
    assert driver.execute_script(colours)[0] == "rgb(255, 255, 255)", "paper is white in dark mode too"
    assert driver.execute_script("return getComputedStyle(document.querySelector('nav')).display") == "none"
    opened(driver, width=420)
    wide = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    assert driver.execute_script(wide) == [420, 420], "nothing but charts and tables scrolls sideways"
    assert driver.execute_script("return document.querySelectorAll('.drawing svg, .drawing canvas').length") == 9
    assert driver.get_log("browser") == []


def test_browser_tests_are_not_forgotten() -> None:
    script = (Path(__file__).resolve().parent.parent / ".ci" / "run").read_text()
    assert "chromium" in script and "NOT CHECKED" in script
