"""What a browser makes of the page: tables sort, points tell their values, and the policy lets our script run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from test_report_plots import drawn

from ablate.report import page

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")

TABLE = """\
# t

| name | value | words |
|:-----|------:|:------|
| 00012 | 1,536 † | b10 |
| 1e5 | n/a | b9 |
| a | **×0.25** (n=2) | a |
| b | ≥ 65,536 | — |
| c | diverged (2) | c |
| d | -1.5e-05 [-2, +3] no clear difference | c |

![a plot](plots/1-x.svg)
"""

LOOK = """
const found = [];
const table = document.querySelector("table");
const names = () => [...table.tBodies[0].rows].map((row) => row.cells[0].innerText.trim());
for (const column of [1, 1, 1, 0, 2]) {
  const head = table.rows[0].cells[column];
  head.querySelector("button").click();
  found.push([head.getAttribute("aria-sort"), ...names()]);
}
const plot = document.querySelector("svg.plot");
const spots = [...plot.querySelectorAll(".spots circle")];
const at = (spot, below) => {
  const box = spot.getBoundingClientRect();
  const clientX = box.x + box.width / 2, clientY = box.y + box.height / 2 + below;
  plot.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY }));
  return told.hidden ? null : told.textContent;
};
found.push([at(spots[1], 3), at(spots[1], -200), at(spots[2], 0), plot.querySelectorAll(".near").length]);
const out = document.createElement("pre");
out.id = "found";
out.textContent = JSON.stringify(found);
document.body.append(out);
"""


def seen(folder: Path) -> list[list[Any]]:
    """What the script of the test finds in the page, which its policy lets run beside ours alone."""
    html = page.written([TABLE], {"plots/1-x.svg": drawn(marker="o")}).decode("utf-8")
    digest = base64.b64encode(hashlib.sha256(LOOK.encode()).digest()).decode()
    html = html.replace("script-src ", f"script-src 'sha256-{digest}' ").replace(
        "</body>", f"<script>{LOOK}</script></body>"
    )
    (folder / "report.html").write_text(html, encoding="utf-8")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=2000", "--dump-dom", (folder / "report.html").as_uri()],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    (text,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout)
    found: list[list[Any]] = json.loads(unescape(text))
    return found


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is here")
def test_tables_sort_and_points_tell_their_values(tmp_path: Path) -> None:
    up, down, back, by_name, by_word, told = seen(tmp_path)
    assert up == ["ascending", "d", "a", "00012", "b", "1e5", "c"], "what is no number stays below"
    assert down == ["descending", "b", "00012", "a", "d", "1e5", "c"]
    assert back == [None, "00012", "1e5", "a", "b", "c", "d"]
    assert by_name == ["ascending", "1e5", "00012", "a", "b", "c", "d"]
    assert by_word[1:] == ["a", "1e5", "00012", "c", "d", "b"]
    assert told == ["_v 0 <&>\nx: 1.0000\ny: 0", None, "_v 0 <&>\nx: 2.0000\ny: 0", 1]
