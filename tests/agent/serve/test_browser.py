"""End to end in a headless Chromium, where there is one: the served pages, a hostile candidate, an approval."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.review.decide import decisions
from tests.agent.review.staged import stage

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
PHONE = 360  # CSS pixels
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium and chromedriver here"),
]


@pytest.fixture
def address(kit: Any) -> Iterator[str]:
    stage(kit)
    command = [sys.executable, "-m", "agent.cli", "serve", "--port", "0", "--db", str(kit.place.db)]
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "USER": "ada"}
    root = Path(__file__).resolve().parents[3]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=root)
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(120)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    selenium = pytest.importorskip("selenium.webdriver")
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", profile):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = selenium.ChromeService(DRIVER)
    driver = selenium.Chrome(options=options, service=service)
    phone = {"width": PHONE, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        yield driver
    finally:
        driver.quit()


WIDER = """
const page = document.documentElement.scrollWidth, phone = arguments[0];
if (page <= phone) return [];
const range = document.createRange();
const right = e => { range.selectNodeContents(e); return range.getBoundingClientRect().right; };
const out = [...document.querySelectorAll("body *")].filter(e => right(e) > phone && !e.closest("pre, svg"));
return [`${page} CSS pixels`, ...out.map(e => e.outerHTML.slice(0, 120))];
"""


def too_wide(browser: Any) -> list[str]:
    """How wide the page is and what sticks out, where it is wider than a phone."""
    return browser.execute_script(WIDER, PHONE) or []


def arrived(browser: Any, at: str) -> None:
    """Wait for the whole page: a click or a key may return while the one before it is still there."""
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.support.ui import WebDriverWait

    place = "return [location.pathname + location.search, document.readyState]"
    wait = WebDriverWait(browser, 120, ignored_exceptions=[WebDriverException])
    wait.until(lambda b: b.execute_script(place) == [at, "complete"], f"no page {at}")


def test_from_the_printed_address_to_an_approval(kit: Any, address: str, browser: Any) -> None:
    from selenium.webdriver.common.by import By

    run = kit.queries.run("last")["id"]
    browser.get(address)
    assert "token" not in browser.current_url
    browser.find_element(By.LINK_TEXT, run).click()
    arrived(browser, f"/runs/{run}")
    assert len(browser.find_elements(By.CSS_SELECTOR, "svg.plot")) == 6
    browser.find_element(By.LINK_TEXT, "candidate 3").click()
    arrived(browser, f"/runs/{run}/candidates/3")
    assert "<script>alert(1)</script>" in browser.find_element(By.TAG_NAME, "main").text
    assert browser.find_elements(By.TAG_NAME, "script") == []
    with pytest.raises(Exception, match="no such alert"):
        browser.switch_to.alert.accept()
    assert too_wide(browser) == [], "the page scrolls sideways at phone width"
    said = [x["message"] for x in browser.get_log("browser")]
    refused = [x for x in said if re.search("Content.Security", x) and "favicon" not in x]
    assert refused == []
    browser.find_element(By.ID, "note").send_keys("seen in a browser")
    browser.find_element(By.CSS_SELECTOR, "button[value=approve]").send_keys("\n")
    arrived(browser, f"/runs/{run}/candidates/3?done=recorded")
    assert "Recorded" in browser.find_element(By.CSS_SELECTOR, "[role=status]").text
    (d,) = decisions(kit.queries, run)
    assert (d.kind, d.note, d.seq) == ("approve", "seen in a browser", 3)


def test_the_report_opens_from_a_file_without_complaints(
    kit: Any, browser: Any, tmp_path: Path
) -> None:
    from selenium.webdriver.common.by import By

    from agent.report.html import html
    from agent.report.views import run_view

    run = stage(kit)
    file = tmp_path / "report.html"
    file.write_text(html(run_view(kit.queries, kit.queries.run(run))))
    browser.get(file.as_uri())
    body = browser.find_element(By.TAG_NAME, "body")
    assert body.value_of_css_property("max-width") != "none", "the style sheet was refused"
    refused = [x for x in browser.get_log("browser") if x["level"] == "SEVERE"]
    assert refused == []
