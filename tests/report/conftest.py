"""One browser for the tests of all pages."""

from collections.abc import Iterator
from typing import Any

import pytest

from browser import WIDTHS_PX, complaints, open_browser


@pytest.fixture(scope="session")
def started_browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def browser(started_browser: Any) -> Any:
    """It shows an empty page, and has forgotten what the pages of other modules said."""
    started_browser.open("about:blank")
    started_browser.set_size(WIDTHS_PX[0], 900)
    complaints(started_browser, own="")
    return started_browser
