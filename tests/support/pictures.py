"""Write the pictures of docs/images that show the live page, from a finished run.

python tests/support/pictures.py runs/mini docs/images
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from agentrig.view.watch.app import serving

COLOURS = 255
"""Of a picture: the page has few, and such a picture is half as large."""


def save(page: Page, path: Path) -> None:
    """Write what is in the window, with few colours."""
    Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def main(run: Path, folder: Path) -> None:
    with serving(run) as link, sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        page.goto(link)
        page.wait_for_function("() => !document.querySelector('[data-empty]')")
        save(page, folder / "watch-run.png")
        page.goto(f"{link}run/{run.name}/traces")
        page.wait_for_function("() => !document.querySelector('.reading')")
        save(page, folder / "watch-traces.png")
        page.locator(".score.wrong").first.click()
        page.wait_for_selector(".trace")
        save(page, folder / "watch-rollout.png")
        page.get_by_role("button", name="compare").click()
        page.wait_for_selector("table.diff")
        save(page, folder / "watch-two.png")
        chromium.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
