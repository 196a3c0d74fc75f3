"""The operator's pages in a real Chromium, before a real daemon with a real stall."""

from __future__ import annotations

import pytest

from daemon_helpers import daemon, place

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]

LIVE = "document.getElementById('live').textContent === 'live'"
WIDTHS = {"desk": 1280, "phone": 390}


@pytest.fixture(scope="module")
def run(page):
    """A daemon whose worker stalled once and was started again."""
    with place() as folder, daemon(folder) as found:
        found.wait_ready()
        found.order("worker", "stall")
        stall = found.wait_stall()
        found.wait_ready(2)
        found.stall_id = stall["id"]
        found.base = f"http://127.0.0.1:{found.control}"
        yield found


@pytest.fixture(autouse=True)
def plain(page):
    """Each test begins with a desk, in the light, with scripts, and ends with a quiet console."""
    page.look()
    page.console.clear()
    yield
    assert page.console == []


def test_lanes_and_ages_move_without_reload(page, run):
    """The stream keeps lanes fresh: cells change while the document stays the same one."""
    page.go(f"{run.base}/")
    page.js("window.mark = 1; window.first = document.querySelector('#engines').innerText")
    page.until(LIVE)

    page.until("document.querySelector('#engines').innerText !== window.first")
    assert page.js("window.mark") == 1
    assert "worker:0/model" in page.js("document.body.innerText")


def test_a_new_stall_appears_by_itself(page, run):
    """A stall that happens now is in the list of an open page, with its engine's new state."""
    page.go(f"{run.base}/")
    page.until(LIVE)
    before = {s["id"] for s in run.stalls()}
    run.order("worker", "stall")
    fresh = run.wait_stall(before)["id"]

    page.until(f"document.querySelector('#stalls').innerText.includes('{fresh}')")
    run.wait_ready(run.engine()["incarnation"])


def test_the_report_is_read_without_a_script(page, run):
    """Scripts off: sentence, graph, stacks, timeline and text are all there."""
    page.look(script=False)
    page.go(f"{run.base}/stalls/{run.stall_id}")
    report = run.report(run.stall_id)
    text = page.js("document.body.innerText")

    assert report["summary"] in text
    assert "execute_model" in text
    assert "stuck_in_a_call" in text
    assert page.js("document.querySelectorAll('.timeline li').length") == len(report["timeline"])
    assert page.js("document.getElementById('copy').hidden")


def test_copy_as_text_holds_the_whole_report(page, run):
    """The button copies what `stallwatch show` prints."""
    page.call(
        "Browser.grantPermissions",
        origin=run.base,
        permissions=["clipboardReadWrite", "clipboardSanitizedWrite"],
    )
    page.go(f"{run.base}/stalls/{run.stall_id}")
    page.js("document.getElementById('copy').click()")
    page.until("document.getElementById('copied').textContent === 'copied'")

    copied = page.js("navigator.clipboard.readText()")
    assert copied.split() == run.cli("show", run.stall_id).stdout.split()


def test_the_keyboard_reaches_a_report(page, run):
    """Tab shows where it stands, and Enter follows: from the list to a report without a mouse."""
    page.go(f"{run.base}/stalls")
    for _ in range(12):
        page.press("Tab", 9)
        if "/stalls/st-" in (page.js("document.activeElement.href") or ""):
            break
    assert page.js("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press("Enter", 13)

    page.until("location.pathname.startsWith('/stalls/st-')")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", list(WIDTHS.values()), ids=list(WIDTHS))
@pytest.mark.parametrize("name", ["", "engine", "stalls", "stall"])
def test_every_page_fits_and_is_readable(page, run, shots, *, name, width, dark):
    """Nothing runs off the side, and text stands out from its ground by at least 4.5 to 1."""
    path = {
        "": "/",
        "engine": f"/engines/{run.name}",
        "stalls": "/stalls",
        "stall": f"/stalls/{run.stall_id}",
    }[name]
    page.look(width=width, dark=dark)
    page.go(f"{run.base}{path}")
    if name in ("", "engine"):
        page.until(LIVE)
    page.screenshot(shots / f"{name or 'home'}-{width}-{'dark' if dark else 'light'}.png")

    assert page.js("document.documentElement.scrollWidth") <= width
    assert page.js(CONTRAST) == []


# Every element with text of its own, against the nearest ground that is painted (WCAG 2.2, 1.4.3).
CONTRAST = """(() => {
  const light = (c) => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map((v) => {
    v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const bad = [];
  for (const e of document.querySelectorAll('body *')) {
    if (!Array.from(e.childNodes).some((n) => n.nodeType === 3 && n.data.trim())) continue;
    if (!e.checkVisibility() || e.closest('svg, meter')) continue;
    let ground = e;
    while (ground && /(, 0\\)|transparent)$/.test(getComputedStyle(ground).backgroundColor))
      ground = ground.parentElement;
    const a = light(getComputedStyle(e).color);
    const b = ground ? light(getComputedStyle(ground).backgroundColor) : 1;
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.push([e.tagName, e.className, e.textContent.slice(0, 40), ratio]);
  }
  return bad;
})()"""
