"""What tests share that open pages in Debian's chromium.

They need `pip install -e '.[dev,browser]'`, `apt install chromium`, and `make test-all`.
"""

import shutil

import pytest

from .extent import EVERYTHING

sync_api = pytest.importorskip("playwright.sync_api", exc_type=ImportError)
axe_of = pytest.importorskip("axe_playwright_python.sync_playwright")
CHROMIUM = shutil.which("chromium")
IN_BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed"),
    pytest.mark.skipif(not EVERYTHING, reason="make test-all"),
]
