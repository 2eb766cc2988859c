"""The documented coverage is the code's."""

from __future__ import annotations

from sandbox.devices.cpu.coverage import PAGE, page


def test_the_page_says_what_the_table_of_lowerings_says() -> None:
    assert PAGE.read_text() == page()
