"""The page of a report in a browser: complete without network, and it fits."""

import dataclasses
import html
import json
import re
import subprocess
from pathlib import Path

import pytest

from meanformer.experiments.framework import atlas, records, registry

TOY = Path(__file__).parents[1] / "experiments" / "toys" / "toy_holds.py"
MEASURE = """
<script>
  const size = (name) => {
    const box = document.querySelector(name).getBoundingClientRect();
    return [box.width, box.height];
  };
  const found = {
    width: document.documentElement.scrollWidth - window.innerWidth,
    figure: size("figure svg"),
    formula: size("math"),
    links: [...document.querySelectorAll("a[href^='#']")].map(
      (a) => document.getElementById(decodeURIComponent(a.hash.slice(1))) !== null),
    loaded: performance.getEntriesByType("resource").map((one) => one.name),
  };
  document.body.dataset.found = JSON.stringify(found);
</script>
"""


@pytest.fixture
def page(tmp_path):
    """The page about a toy experiment, with a script that measures it."""
    experiment = registry.find(str(TOY))
    record = records.perform(experiment, experiment.settings())
    shown = atlas.blank([experiment], "meanformer atlas")
    shown = dataclasses.replace(shown, records={experiment.name: record})
    atlas.publish(shown, tmp_path)
    path = tmp_path / "index.html"
    path.write_text(path.read_text().replace("</body>", MEASURE + "</body>"))
    return path


def opened(page, width):
    """What the script finds in a window of this width."""
    profile = page.parent / "profile"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    window = [f"--window-size={width},900", f"--user-data-dir={profile}"]
    command = ["chromium", *options, *window, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    found = re.search(r'data-found="(.*?)"', done.stdout)
    assert found, done.stderr
    return json.loads(html.unescape(found[1]))


@pytest.mark.browser
@pytest.mark.parametrize("width", [500, 1280])
def test_the_page_draws_figures_and_formulas_and_fits_the_window(page, width):
    found = opened(page, width)
    assert found["width"] <= 0
    assert min(found["figure"]) > 100
    assert min(found["formula"]) > 5
    assert all(found["links"])
    assert not [name for name in found["loaded"] if not name.startswith("data:")]
