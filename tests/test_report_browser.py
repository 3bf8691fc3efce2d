"""The page of a report in a real browser: it loads alone, draws every number, answers the pointer, and holds on any screen."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.api import plan_rl, serve_estimate
from planner.explicit import explicit_plan
from planner.mixed.mixed_plan import priced_plan
from planner.plan_file import load_plan
from planner.questions.best_plan import resolved_of
from planner.questions.mixed.mixed_document import build_mixed
from planner.questions.report.build import build
from planner.questions.report.document import Document
from planner.questions.report.page import page, start_library
from planner.questions.report.scaling import at_size
from planner.questions.report.subject import Spending
from planner.questions.rl.rl_document import build_rl
from planner.questions.serve.serve_document import build_serving
from tests.mixed_samples import LLAMA_CUT, export_of
from tests.test_rl_search import SMALL

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND", "--hide-scrollbars",
)  # fmt: skip
BARS, POINTS = ".mark-rect.role-mark path", ".mark-symbol.role-mark path"
MARKS = {
    "waterfall": BARS, "operators": BARS, "memory": BARS, "heatmap": BARS, "pareto": POINTS, "scaling": POINTS, "accuracy": BARS,
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


CUT = """
return [...document.querySelectorAll('.drawing svg')].flatMap(svg => {
  const room = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('.role-mark text')].filter(one => {
    const box = one.getBoundingClientRect(), shown = parseFloat(one.getAttribute('opacity') ?? '1') > 0;
    return shown && box.width > 0 && (box.right > room.right + 2 || box.left < room.left - 2);
  }).map(one => one.textContent);
})"""
"""Texts beside the marks of charts that leave the picture."""


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
        "operators": sum(1 + (row[4] > 0) for row in document.chart("operators").rows),  # each with a mark at the peak
        "memory": len(document.chart("memory").rows),
        "heatmap": len(document.chart("heatmap").rows) + 1,  # and the frame of the plan's cell
        "pareto": len(document.chart("pareto").rows),
        "scaling": sum((row[4] is not None) + (row[11] is not None) for row in document.chart("scaling").rows),
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


@pytest.mark.proof
def test_the_pointer_gets_answers_with_units(driver: Any, document: Document) -> None:
    opened(driver)
    first = document.chart("waterfall").cells()[1][0]
    text = hovered(driver, "waterfall", BARS)
    assert first[0] in text and first[1] in text, text
    action = hovered(driver, "pipeline", BARS, 3)
    assert "microbatch" in action and "takes" in action and (" s" in action or " ms" in action), action
    assert "GiB" in hovered(driver, "memory", BARS, 1)


@pytest.mark.proof
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
    for width in (390, 720, 1000):
        opened(driver, width=width)
        assert driver.execute_script(CUT) == [], width
    opened(driver, width=420)
    wide = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    assert driver.execute_script(wide) == [420, 420], "nothing but charts and tables scrolls sideways"
    assert driver.execute_script("return document.querySelectorAll('.drawing svg, .drawing canvas').length") == 10
    assert driver.get_log("browser") == []


@pytest.mark.parametrize("width", [1440, 1100, 390])
def test_contents_stay_and_what_is_wider_than_the_screen_says_so(driver: Any, width: int) -> None:
    opened(driver, width=width)
    ground = "return ['nav', 'body'].map(name => getComputedStyle(document.querySelector(name)).backgroundColor)"
    assert len(set(driver.execute_script(ground))) == 1, "what scrolls below the contents is not seen through them"
    if width == 1440:
        wide = "const nav = document.querySelector('nav'); return nav.scrollWidth <= nav.clientWidth"
        assert driver.execute_script(wide), "all of the contents are seen on a wide screen"
    for name in ("run", "pipeline", "assumptions"):
        driver.execute_script("document.querySelector('nav a[href=\"#' + arguments[0] + '\"]').click()", name)
        where = """const [bar, head] = [document.querySelector('nav'), document.querySelector('#' + arguments[0] + ' h2')];
            const [one, other] = [bar, head].map(found => found.getBoundingClientRect()), now = bar.querySelector('[aria-current]');
            return [one.top, one.bottom, other.top, now ? now.hash : '']"""
        for _ in range(40):
            top, bottom, heading, current = driver.execute_script(where, name)
            if current == f"#{name}":
                break
            time.sleep(0.02)
        assert top == 0 and bottom <= heading, (name, top, bottom, heading)
        assert current == f"#{name}" or name == "assumptions"  # the last section may be shorter than the screen
    driver.execute_script("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    hints = """return Array.from(document.querySelectorAll('.side + .hint'), one => [
        one.previousElementSibling.scrollWidth > one.previousElementSibling.clientWidth + 2, one.offsetHeight > 0])"""
    for _ in range(40):
        found = driver.execute_script(hints)
        if all(wider == told for wider, told in found):
            break
        time.sleep(0.02)
    assert len(found) >= 20 and all(wider == told for wider, told in found)
    assert width > 390 or sum(wider for wider, _ in found) >= 5
    cut = """return Array.from(document.querySelectorAll('.drawing svg'), svg => Array.from(svg.querySelectorAll('text'), one =>
        one.getBoundingClientRect().right > svg.getBoundingClientRect().right + 1 ? one.textContent : '')).flat().filter(Boolean)"""
    assert driver.execute_script(cut) == [], "no label ends outside of its chart"
    assert driver.execute_script("return document.documentElement.scrollWidth") == width, (
        "only tables and charts scroll sideways"
    )


def test_commands_are_copied_and_the_plan_is_saved(driver: Any, document: Document, tmp_path: Path) -> None:
    opened(driver)
    origin = {"origin": driver.address, "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    with contextlib.suppress(
        Exception
    ):  # a file has no origin in some versions; the click is a gesture of the user anyway
        driver.execute_cdp_cmd("Browser.grantPermissions", {"permissions": origin["permissions"]})
    buttons = driver.find_elements("css selector", "#run .command button")
    shown = [one.text for one in driver.find_elements("css selector", "#run .command code")]
    assert [" ".join(one.split()) for one in shown] == [one["command"] for one in document.run] and len(buttons) == len(
        shown
    )
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", buttons[0])
    buttons[0].click()
    for _ in range(40):
        if buttons[0].text in ("Copied", "Selected"):
            break
        time.sleep(0.05)
    assert buttons[0].text == "Copied"
    assert driver.execute_async_script(
        "const done = arguments[0]; navigator.clipboard.readText().then(done, error => done('no: ' + error))"
    ) == document.run[0]["command"]  # fmt: skip
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    for link in driver.find_elements("css selector", "#run a.save"):
        driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", link)
        link.click()
        name = link.get_attribute("download")
        for _ in range(100):
            if (tmp_path / name).exists() and (tmp_path / name).stat().st_size > 0:
                break
            time.sleep(0.05)
    assert load_plan(tmp_path / "plan.yaml").to_dict() == document.plan
    assert json.loads((tmp_path / "plan.json").read_text()) == json.loads(json.dumps(document.plan))
    assert driver.get_log("browser") == []


def test_the_cost_of_the_readers_own_tokens(driver: Any, document: Document) -> None:
    if driver.current_url != driver.address:  # it needs no screen of its own
        opened(driver)
    field = driver.find_element("id", "tokens")
    rates = document.rates

    def answer(text: str) -> str:
        field.clear()
        field.send_keys(text)
        return str(driver.find_element("id", "budget-answer").text)

    by_label = {one.label: one for one in document.figures}
    first = driver.find_element("id", "budget-answer").text
    assert by_label["Cost"].text in first and f"{by_label['GPU-hours'].text} GPU-hours" in first
    assert by_label["Energy"].text in first
    days = math.ceil(15e12 / rates["tokens_per_step"]) * rates["step_s"] / 86400.0
    assert answer("15T").startswith(f"{days:,.0f} days") and answer(" 15000b ").startswith(f"{days:,.0f} days")
    assert field.get_attribute("aria-invalid") == "false"
    for wrong in ("many", "-3T", "0", "1e400"):
        assert answer(wrong) == "write a number of tokens, like 15T or 800B", wrong
        assert field.get_attribute("aria-invalid") == "true"


@pytest.mark.proof
def test_the_page_of_a_serve_plan(driver: Any, tmp_path: Path) -> None:
    plan = serve_estimate(model="llama-8b", gpus=2, hardware="h100-sxm", tp=2, engine="vllm", concurrency=16)
    served = build_serving(plan.file, None, lambda _: None)
    file, before = tmp_path / "serve.html", driver.address
    file.write_text(page(served, start_library()()), encoding="utf-8")
    driver.address = f"file://{file}"
    driver.get_log("browser")
    try:
        for width in (1440, 720, 390):
            opened(driver, width)
            assert driver.get_log("browser") == [] and driver.execute_script(CUT) == [], width
            assert not driver.execute_script("return document.documentElement.scrollWidth > window.innerWidth")
        opened(driver)
        count = "return document.querySelectorAll('#' + arguments[0] + ' ' + arguments[1]).length"
        marks = {name: len(served.chart(name).rows) for name in ("serve-front", "serve-step", "serve-memory")}
        assert marks == {
            name: driver.execute_script(count, name, POINTS if name == "serve-front" else BARS) for name in marks
        }
        assert driver.execute_script(count, "serve-load", POINTS) == 3 * len(served.chart("serve-load").rows)
        assert driver.execute_script("return document.getElementById('tokens')") is None
        assert "TPOT" in hovered(driver, "serve-front", POINTS)
    finally:
        driver.address = before


@pytest.mark.proof
@pytest.mark.parametrize("of", ["mixed plan", "RL plan"])
def test_the_pages_of_mixed_and_rl_plans(driver: Any, tmp_path: Path, of: str) -> None:
    """Every chart draws, on a desk and on a phone, without an error or a page that scrolls sideways."""
    if of == "RL plan":
        made = build_rl(plan_rl(**SMALL)[0].file, None, lambda _: None)
    else:
        mixed = export_of(LLAMA_CUT, None, "megatron", model="llama-8b")
        made = build_mixed(priced_plan(mixed.job, "megatron", LLAMA_CUT), Spending(), lambda _: None)
    file, before = tmp_path / "page.html", driver.address
    file.write_text(page(made, start_library()()), encoding="utf-8")
    driver.address = f"file://{file}"
    driver.get_log("browser")
    try:
        for width, scheme in ((1440, "light"), (400, "dark")):
            opened(driver, width, scheme=scheme)
            assert driver.get_log("browser") == [] and driver.execute_script(CUT) == [], width
            assert not driver.execute_script("return document.documentElement.scrollWidth > window.innerWidth")
            drawn = driver.execute_script("return document.querySelectorAll('.drawing svg, .drawing canvas').length")
            assert drawn == len(made.charts)
        name = "rl-memory" if of == "RL plan" else "mixed-memory"
        count = "return document.querySelectorAll('#' + arguments[0] + ' ' + arguments[1]).length"
        opened(driver)
        assert driver.execute_script(count, name, BARS) >= len(made.chart(name).rows)
        assert "GiB" in hovered(driver, name, BARS)
    finally:
        driver.address = before


def test_browser_tests_are_not_forgotten() -> None:
    script = (Path(__file__).resolve().parent.parent / ".ci" / "run").read_text()
    assert "chromium" in script and "NOT CHECKED" in script
