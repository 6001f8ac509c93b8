"""The page of `draftsmith demo` in a real browser: needs the packages gradio and selenium, and Debian's chromium."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from commands import printed
from forked import free_port

pytestmark = pytest.mark.slow
WAITS = 120
"""Seconds until the page is there, and until both texts are."""


@pytest.fixture
def page(tiny_target_folder: Path) -> Iterator[str]:
    """The address of a demo of the tiny target, which drafts for itself."""
    pytest.importorskip("gradio")
    port = free_port()
    program = "import sys; from draftsmith.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", program, "demo", "--target", str(tiny_target_folder), "--port", str(port)]
    command += ["--drafter", f"self={tiny_target_folder}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        address, deadline = f"http://127.0.0.1:{port}/", time.monotonic() + WAITS
        while True:
            try:
                urlopen(address).close()
                break
            except URLError:
                assert server.poll() is None, server.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.2)
        yield address
        server.terminate()
        expected = f"next: draftsmith eval --target {tiny_target_folder} --drafter {tiny_target_folder}"
        assert expected in server.stderr.read()


@pytest.fixture
def browser() -> Iterator[Any]:
    pytest.importorskip("selenium")
    from selenium import webdriver

    programs = shutil.which("chromium"), shutil.which("chromedriver")
    if None in programs:
        pytest.skip("no chromium with its driver")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,960"):
        options.add_argument(argument)
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
    yield started
    started.quit()


def test_a_prompt_is_decoded_side_by_side(page: str, browser: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    wait = WebDriverWait(browser, WAITS)

    def shown(name: str) -> str:
        return browser.find_element("css selector", f"#{name}").text

    browser.get(page)
    box = wait.until(lambda driver: driver.find_element("css selector", "#prompt textarea"))
    box.clear()
    box.send_keys("abc <i>x</i>")
    browser.find_element("css selector", "#decode").click()
    wait.until(lambda _: "texts" in shown("comparison"))
    assert "the texts are identical" in shown("comparison")
    alone, drafted = (browser.find_element("css selector", f"#{name} .lane").text for name in ("alone", "drafted"))
    assert alone == drafted
    assert alone.startswith("abc <i>x</i>"), "a prompt is text, not markup"
    assert len(alone) > 60
    assert browser.find_elements("css selector", "#drafted .drafted")
    assert not browser.find_elements("css selector", "#alone .drafted")
    assert "100%" in shown("acceptance"), "a target that drafts for itself is always accepted"
    if folder := os.environ.get("DRAFTSMITH_SCREENSHOTS"):
        browser.save_screenshot(str(Path(folder) / "demo.png"))
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    elsewhere = [address for address in loaded if not address.startswith((page, "data:", "blob:"))]
    assert len(loaded) > 5
    assert not elsewhere, elsewhere
    errors = [line for line in browser.get_log("browser") if "SEVERE" in line["level"]]
    assert not errors, errors


def test_a_port_in_use_is_refused(tiny_target_folder: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("gradio")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = printed(capsys, "demo", "--target", tiny_target_folder, "--drafter", "suffix", "--port", port)
    assert (code, f"port={port}: " in err) == (2, True)
