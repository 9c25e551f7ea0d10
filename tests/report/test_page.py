"""The page in a real browser: nothing in the console, every picture has its size and its words, also without scripts.

Needs Chromium (Debian, Ubuntu: apt-get install chromium); skipped where there is none, see CONTRIBUTING.
"""

import html
import os
import re
import shutil
import signal
import subprocess

import pytest
from support.checkpoints import make_text, texts

from linearize.evaluation.options import InputOptions, ReportOptions
from linearize.evaluation.report.page import write_report

NAMES = ("chromium", "chromium-browser", "google-chrome", "/usr/bin/chromium")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --enable-logging=stderr --v=0 --virtual-time-budget=5000"""
# Put into a copy of the page, to write into its text what a browser made of it.
PROBE = """<script>
window.addEventListener('error', e => { document.body.dataset.errors = e.message; }, true);
window.addEventListener('load', () => {
  const facts = i => [i.complete, i.naturalWidth, i.naturalHeight, i.width, i.height, i.alt.length];
  const outside = performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:'));
  document.body.dataset.images = JSON.stringify([...document.images].map(facts));
  const areas = [...document.querySelectorAll('.scroll')].filter(a => a.scrollWidth > a.clientWidth + 1);
  const hinted = a => a.previousElementSibling !== null && a.previousElementSibling.offsetHeight > 0;
  document.body.dataset.width = window.innerWidth;
  document.body.dataset.wide = document.documentElement.scrollWidth > window.innerWidth;
  document.body.dataset.hints = [...document.querySelectorAll('.hint')].filter(h => h.offsetHeight > 0).length;
  document.body.dataset.slid = areas.length;
  document.body.dataset.lost = areas.filter(a => !hinted(a)).length;
  document.body.dataset.requests = outside.length;
  parent.postMessage(document.body.cloneNode(false).outerHTML, '*');
});
</script></head>"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium; install it: apt-get install chromium")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    inputs = InputOptions(str(texts(root)), "text", inputs=2, max_length=16)
    folder = make_text(root / "bert")
    write_report(ReportOptions(str(folder), inputs=inputs, lengths=(), device="cpu"), str(root / "out"))
    return root / "out" / "index.html"


def browse(file, profile, *flags):
    """Open a file in a process group of its own, and end that group."""
    command = [BROWSER, *FLAGS.split(), f"--user-data-dir={profile}", *flags, file.as_uri()]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err[-2000:]
    return out, err


@pytest.mark.parametrize("width", [1280, 420])
def test_the_page_in_chromium(page, width, tmp_path):
    """At 420 pixels in a frame: a window of the browser is never so narrow."""
    probed = page.with_name("probed.html")
    probed.write_text(page.read_text().replace("</head>", PROBE))
    frame = page.with_name("frame.html")
    frame.write_text(f"""<body><iframe src="probed.html" style="width:{width}px;height:900px;border:0"></iframe><script>
    window.addEventListener('message', e => {{ document.body.setAttribute('data-probe', e.data); }});</script>""")
    out, err = browse(frame, tmp_path / "profile", "--window-size=1400,900", "--dump-dom")
    assert "CONSOLE" not in err
    body = html.unescape(re.search(r"<body[^>]*>", out).group(0))
    assert "data-errors" not in body
    assert f'data-width="{width}"' in body
    assert 'data-wide="false"' in body, "the page is wider than the window"
    shown, inside, outside = (int(re.search(rf'data-{name}="(\d+)"', body)[1]) for name in ("hints", "slid", "lost"))
    assert (shown > 0 and inside > 0) == (width == 420) and outside == 0, "what is wide scrolls, and says so"
    assert 'data-requests="0"' in body
    images = re.findall(r"\[(true|false),(\d+),(\d+),(\d+),(\d+),(\d+)\]", body)
    pictures = [*(page.parent / "images").iterdir()]
    assert len(images) == page.read_text().count("<img ") == len(pictures) >= 3
    for complete, *sizes, words in images:
        assert complete == "true" and all(int(size) > 50 for size in sizes) and int(words) > 20


def test_the_page_as_it_is_has_a_picture(page, tmp_path):
    shot = tmp_path / "shot.png"
    _, err = browse(page, tmp_path / "profile", f"--screenshot={shot}")
    assert "CONSOLE" not in err
    assert shot.read_bytes().startswith(b"\x89PNG") and shot.stat().st_size > 10_000
