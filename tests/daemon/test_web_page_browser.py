"""Tests of the daemon's web page in a browser: it shows the ranks' metrics live, and is accessible on any screen."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import socket
from collections.abc import Iterator
from itertools import pairwise

import pytest

from support.browser import PROGRAM, Tab, browser
from support.counted_rank import CountedRank
from support.daemon_process import daemon, talk

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed")

CONTRAST = """(() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = channels(color).map((value) => value / 255)
      .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if ((channels(color)[3] ?? 1) > 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest("script, noscript")) continue;
    const style = getComputedStyle(element);
    const color = element instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(color), light(ground(element))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), walker.currentNode.data]);
  }
  return found;
})()"""
"""JavaScript that returns the contrast ratio and the text of every visible text node."""


@pytest.fixture(scope="module")
def shared_tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """One browser for all tests."""
    with browser(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@pytest.fixture
def tab(shared_tab: Tab) -> Iterator[Tab]:
    """Tab on a blank page; fails at the end if the page has logged an error."""
    shared_tab.emulate()
    shared_tab.errors.clear()
    yield shared_tab
    shared_tab.open("about:blank")
    # The page may have tried to reconnect, because the daemon of a test ends first.
    assert [error for error in shared_tab.errors if "ERR_CONNECTION_REFUSED" not in error] == []


def open_page(tab: Tab, port: int) -> None:
    """Open the page and set a variable that a reload would clear."""
    tab.open(f"http://127.0.0.1:{port}/")
    tab.until("document.querySelector('#status')?.innerText === 'live'")
    tab.value("window.marker = 'not reloaded'")


def figure(name: str, run: int = 0) -> str:
    """Return a JavaScript expression for a labeled figure of a run."""
    return f"""([...document.querySelectorAll("#runs > article")[{run}].querySelectorAll(".figures dt")]
        .find((name) => name.innerText === {name!r} && name.checkVisibility())?.nextElementSibling.innerText)"""


def test_the_page_shows_runs_ranks_drives_and_reservations(tab, tmp_path):
    settings = tmp_path / "infinityd.toml"
    settings.write_text(f'[drives]\npaths = ["{tmp_path}"]\nendurance = {{ "{tmp_path}" = "600TB" }}\n')
    ranks = [CountedRank(tmp_path, run="one", rank=rank, world_size=2, paths=[tmp_path]) for rank in (0, 1)]
    other = CountedRank(tmp_path, run="two")
    for _ in range(3):
        for rank in (*ranks, other):
            rank.step(loss=2.5, tokens=1000)
    ranks[0].save_checkpoint(), ranks[1].save_checkpoint()
    with daemon(tmp_path, "--config", str(settings)) as process:
        measured = {
            "op": "record_bandwidth",
            "rates": {str(tmp_path): {"read": 2e9, "write": 1e9}},
            "source": "run",
        }
        reserve = {"op": "reserve", "path": str(tmp_path), "bytes": 3 << 20, "run_id": "one"}
        assert all(answer["ok"] for answer in talk(tmp_path, measured, reserve))
        open_page(tab, process.port)
        assert tab.value("[...document.querySelectorAll('#runs h3')].map((e) => e.innerText).sort()") == ["one", "two"]
        run = 0 if tab.value("document.querySelector('#runs h3').innerText") == "one" else 1
        assert tab.value(figure("Tokens per second", run)) == "4,000"
        assert tab.value(figure("Loss", run)) == "2.500"
        assert tab.value(figure("Step time", run)) == "500 ms"
        assert "s ago" in tab.value(figure("Last checkpoint", run))
        card = f"document.querySelectorAll('#runs > article')[{run}]"
        text = tab.value(f"{card}.innerText")
        assert "Host cache: 96.0 MiB of 128 MiB in use" in text
        assert "90.0 % of page requests" in text
        assert tab.value(f"{card}.querySelectorAll('tbody tr').length") == 2
        row = tab.value(f"[...{card}.querySelectorAll('tbody tr')[1].children].map((cell) => cell.innerText)")
        assert row[:6] == ["1", "running", "3", "500 ms", "2,000", "20.0 %"]
        assert row[8:] == ["48.0 MiB of 64.0 MiB", "0", str(os.getpid())]
        tab.until("document.querySelector('#drives')?.innerText.includes('of 2.00 GB/s')")
        drives = tab.text("#drives")
        assert "of 1.00 GB/s" in drives
        assert "rated for 600 TB" in drives
        assert str(tmp_path) in drives
        ranks[1].stats.counter("io_errors_total", op="read", reason="eio").add(2)
        tab.until("document.querySelector('#runs').innerText.includes('2 page transfers failed')")
        tab.until("document.querySelector('#space tbody')?.innerText.includes('3.00 MiB')")
        assert (
            tab.value("[...document.querySelectorAll('#space tbody tr > *')].map((cell) => cell.innerText)")[0] == "one"
        )
        assert talk(tmp_path, {"op": "release", "path": str(tmp_path), "run_id": "one"})[0]["released_bytes"] == 3 << 20
        tab.until("document.querySelector('#no-space').checkVisibility()")


def test_the_page_shows_name_user_target_and_remaining_time(tab, tmp_path):
    rank = CountedRank(tmp_path, name="tiny in mine", steps_before="1000")
    rank.stats.gauge("training_target_steps").set(243)
    for _ in range(3):
        rank.step()
    with daemon(tmp_path) as process:
        open_page(tab, process.port)
        tab.until(f"{figure('Remaining time')}")
        assert tab.value("document.querySelector('#runs h3').innerText") == "tiny in mine"
        assert f"run-1 · {getpass.getuser()} · 1 rank" in tab.text("#runs")
        assert tab.value(figure("Steps")) == "1,003 of 1,243"
        assert tab.value(figure("Remaining time")) == "2 min"


def test_unknown_values_are_not_shown_as_zero(tab, tmp_path):
    """A run before its first step has no loss, speed or curves."""
    rank = CountedRank(tmp_path, paths=[tmp_path])
    with daemon(tmp_path) as process:
        open_page(tab, process.port)
        tab.until("document.querySelector('#drives article')")
        shown = tab.text("#runs")
        for name in ("Loss\n", "Tokens per second\n", "Step time\n", "Host cache:"):
            assert name not in shown
        assert shown.count("no data yet") == 2
        drives = tab.text("#drives")  # read once, because the page may change in between
        assert "not profiled" in drives or "Reads" not in drives
        assert "Wear\nunknown" in tab.text("#drives")
        rank.stats.gauge("training_loss").set(float("nan"))
        rank.step()
        tab.until(f"{figure('Loss')} === 'nan'")
        assert "The loss is not finite." in tab.text("#runs")


def test_markup_in_names_is_shown_as_text(tab, tmp_path):
    odd = "<img src=x onerror=document.title='taken'><b>bold</b>"
    (tmp_path / odd).mkdir(parents=True)
    CountedRank(tmp_path, paths=[tmp_path / odd], version=f"<script>document.title='taken'</script>{odd}").step()
    with daemon(tmp_path) as process:
        open_page(tab, process.port)
        tab.until("document.querySelector('#drives article')")
        assert odd in tab.text("#drives")
        assert odd in tab.text("#runs")
        assert tab.value("document.querySelectorAll('main img, main b, main script').length") == 0
        assert "taken" not in tab.value("document.title")


def test_a_run_links_to_its_dashboards_on_other_nodes(tab, tmp_path):
    """Only if the port can be reached from other machines. The link leads to the run."""
    domain = "".join(socket.gethostname().partition(".")[1:])
    hosts = json.dumps([socket.gethostname(), f"node1{domain}", "10.0.0.1"])
    for run in ("one", "two", "three"):
        for rank in (0, 1, 3):
            CountedRank(tmp_path, run=run, rank=rank, world_size=6, hosts=hosts)
    links = """[...document.querySelectorAll('#runs > article:last-child .nodes a')]
        .map((link) => [link.innerText, link.href])"""
    with daemon(tmp_path, "--host", "0.0.0.0") as process:
        open_page(tab, process.port)
        assert "ranks 0\u20131, 3 of 6 on this node" in tab.text("#runs")
        assert tab.text("#runs .nodes").split("\n") == [f"node1{domain}", "10.0.0.1"]
        last = tab.value("document.querySelector('#runs > article:last-child h3').innerText")
        assert tab.value(links) == [[f"node1{domain}", f"http://node1{domain}:{process.port}/#{last}"]]
        assert tab.value("scrollY") == 0
        tab.open("about:blank")
        tab.open(f"http://127.0.0.1:{process.port}/#{last}")
        tab.until("scrollY > 0")
        top = tab.value("document.querySelector('#runs > article:last-child').getBoundingClientRect().top")
        assert tab.value("document.querySelector('.top').getBoundingClientRect().bottom") <= top < 900
    with daemon(tmp_path) as process:
        open_page(tab, process.port)
        assert tab.value(links) == []
        assert f"node1{domain}" in tab.text("#runs")


def test_both_themes_have_sufficient_contrast(tab, tmp_path):
    """The contrast ratio is at least 4.5 (WCAG level AA)."""
    rank = CountedRank(tmp_path, paths=[tmp_path])
    rank.step(loss=float("inf"))
    rank.step()
    rank.stats.counter("io_retries_total", op="read").add()
    pictures = []
    with daemon(tmp_path) as process:
        open_page(tab, process.port)
        tab.until("document.querySelector('#drives article')")
        tab.value("document.querySelector('#pause').click()")  # so that the screenshots differ only in the theme
        for dark in (False, True):
            tab.emulate(dark=dark)
            pictures.append(tab.screenshot())
            found = tab.value(CONTRAST)
            assert len(found) > 60
            assert [entry for entry in found if entry[0] < 4.5] == []
            tab.value("document.querySelector('#pause').blur()")
    assert pictures[0] != pictures[1]


def test_the_page_fits_the_screen_width(subtests, tab, tmp_path):
    """Long names wrap, and tables scroll inside their cards."""
    name = "a-run-with-a-name-as-long-as-it-may-be-" + "x" * 80
    folder = tmp_path / ("folder" * 20)
    folder.mkdir()
    ranks = [CountedRank(tmp_path, run=name, rank=rank, world_size=3, paths=[folder]) for rank in range(3)]
    for rank in ranks:
        for _ in range(3):
            rank.step(loss=1e-9, tokens=10**9)
    overflowing = """[...document.querySelectorAll('.card *')].filter((e) => !e.closest('.scroll'))
        .filter((e) => e.getBoundingClientRect().right > innerWidth + 0.5).length"""
    table = "(() => { const e = document.querySelector('.scroll'); return [e.scrollWidth, e.clientWidth]; })()"
    with daemon(tmp_path) as process:
        for width in (360, 768, 1280):
            with subtests.test(width=width):
                tab.emulate(width=width, height=780)
                open_page(tab, process.port)
                tab.until("document.querySelector('#drives article')")
                assert tab.value("document.documentElement.scrollWidth") <= width
                content, visible = tab.value(table)
                assert content > visible or width > 360
                assert tab.value(overflowing) == 0


def test_the_page_can_be_used_by_keyboard(tab, tmp_path):
    """Focus moves in page order, is visible, reaches tables so that they can be scrolled, and survives updates."""
    rank = CountedRank(tmp_path, run="one")
    CountedRank(tmp_path, run="two").step()
    rank.step()
    focused = "document.activeElement"
    with daemon(tmp_path) as process:
        open_page(tab, process.port)
        seen, tops = [], []
        while True:
            tab.press("Tab")
            if tab.value(f"{focused} === document.body") or len(seen) > 20:
                break
            assert tab.value(f"getComputedStyle({focused}).outlineStyle") == "solid"
            assert tab.value(
                f"(() => {{ const r = {focused}.getBoundingClientRect(); return r.top >= 0 && r.height > 0; }})()"
            )
            seen.append(tab.value(f"({focused}.ariaLabel ?? {focused}.innerText).trim()"))
            tops.append(tab.value(f"{focused}.getBoundingClientRect().top + scrollY"))
        tables = [text for text in seen if text.startswith("Ranks of")]
        assert sorted(tables) == ["Ranks of one", "Ranks of two"]
        assert [text for text in seen if text not in tables] == [
            "Skip to main content", "Pause", "metrics", "health", "state as JSON",
        ]  # fmt: skip
        assert all(above <= below + 40 for above, below in pairwise(tops[1:]))
        tab.press("Tab"), tab.press("Enter")
        assert tab.value(f"{focused}.id") == "main"
        tab.press("Tab")
        assert tab.value(f"{focused}.ariaLabel") in tables
        before = tab.value(figure("Steps"))
        rank.step()
        tab.until(f"[{figure('Steps')}, {figure('Steps', 1)}].includes('2')")
        assert tab.value(f"{focused}.ariaLabel") in tables, before


def test_the_page_exposes_accessible_names_and_roles(tab, tmp_path):
    """Only one live region exists, and it is not announced at every update."""
    rank = CountedRank(tmp_path, run="one", paths=[tmp_path])
    with daemon(tmp_path) as process:
        open_page(tab, process.port)
        for number in (1, 2, 3):
            rank.step(loss=4.0 - number)
            tab.until(f"{figure('Steps')} === '{number}'")
        tab.until("document.querySelectorAll('.chart .curve').length === 2")
        nodes = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tab.accessibility_nodes()]
        roles = {role for role, _ in nodes}
        assert {"banner", "main", "contentinfo", "heading", "status", "table", "columnheader", "rowheader"} <= roles
        assert {name for role, name in nodes if role == "article"} >= {"one"}
        assert {name for role, name in nodes if role == "region"} >= {"Runs", "Drives", "Ranks of one"}
        pictures = [name for role, name in nodes if role in ("img", "image")]
        assert "Loss by step: 3 at step 1, 1 at step 3, lowest 1, highest 3" in pictures
        assert all(pictures)
        assert all(name for role, name in nodes if role in ("button", "link", "textbox", "columnheader", "heading"))
        assert tab.value("document.documentElement.lang") == "en"
        assert (
            tab.value("document.querySelectorAll('[aria-live], [role=status], [role=alert]:not([hidden])').length") == 1
        )
        assert tab.value("""(() => { const all = [...document.querySelectorAll('h1,h2,h3,h4')]
            .filter((e) => e.checkVisibility()).map((e) => Number(e.tagName[1]));
            return all.every((level, at) => at === 0 ? level === 1 : level <= all[at - 1] + 1); })()""")
        tab.value("""new Promise((done) => { window.changes = 0;
            new MutationObserver((all) => { window.changes += all.length; })
              .observe(document.querySelector('#status'), { childList: true, characterData: true, subtree: true });
            done(); })""")
        for number in (4, 5):
            rank.step()
            tab.until(f"{figure('Steps')} === '{number}'")
        assert tab.value("window.changes") == 0  # the updates were not announced


def test_updates_can_be_paused(tab, tmp_path):
    rank = CountedRank(tmp_path)
    rank.step()
    with daemon(tmp_path) as process:
        open_page(tab, process.port)
        tab.value("document.querySelector('#pause').click()")
        assert tab.text("#status") == "paused"
        assert tab.value("document.querySelector('#pause').ariaPressed") == "true"
        rank.step()
        tab.value("""new Promise((done) => { let states = 0; const events = new EventSource("api/events");
            events.onmessage = ({ data }) => { states += JSON.parse(data).runs[0].steps === 2;
              if (states === 2) { events.close(); done(); } }; })""")
        assert tab.value(figure("Steps")) == "1"  # the page did not show the states that another client received
        tab.value("document.querySelector('#pause').click()")
        tab.until(f"{figure('Steps')} === '2'")
        assert tab.text("#status") == "live"


def test_the_page_prompts_for_a_token_and_stores_it_per_tab(tab, tmp_path):
    """A wrong token is reported; the right one does not appear in the URL, and can be cleared."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    token.chmod(0o600)
    CountedRank(tmp_path, run="one").step()
    prompts = "document.querySelector('#ask')?.checkVisibility() && !document.querySelector('#state').checkVisibility()"
    with daemon(tmp_path, "--token-file", str(token)) as process:
        tab.open(f"http://127.0.0.1:{process.port}/")
        tab.until(prompts)
        assert tab.text("#status") == "token required"
        assert not tab.value("document.querySelector('#ask-wrong').checkVisibility()")
        for typed in ("wrong", "0123456789abcdef"):
            tab.until("document.activeElement.id === 'token'")
            tab.write(typed)
            tab.press("Enter")
            if typed == "wrong":
                tab.until("document.querySelector('#ask-wrong').checkVisibility()")
        tab.until("document.querySelector('#runs h3')?.innerText === 'one'")
        assert not tab.value("document.querySelector('#ask').checkVisibility()")
        tab.open(f"http://127.0.0.1:{process.port}/")
        tab.until("document.querySelector('#runs h3')?.innerText === 'one'")
        assert "0123" not in tab.value("location.href + document.documentElement.outerHTML + document.cookie")
        tab.value("document.querySelector('#forget').click()")
        tab.until(prompts)
        assert tab.value("sessionStorage.length") == 0
    assert tab.errors
    assert all("401" in error for error in tab.errors), tab.errors  # the browser logs the status itself
    tab.errors.clear()


def test_the_page_reconnects_to_a_restarted_daemon(tab, tmp_path):
    """Until then, the page reports the lost connection and keeps the last figures."""
    rank = CountedRank(tmp_path)
    rank.step()
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(daemon(tmp_path))
        port = process.port
        open_page(tab, port)
        stack.close()
        tab.until("document.querySelector('#status').innerText === 'not connected, retrying'")
        assert tab.value(figure("Steps")) == "1"
        rank.step()
        with daemon(tmp_path, "--port", str(port)):
            tab.until("document.querySelector('#status').innerText === 'live'")
            tab.until(f"{figure('Steps')} === '2'")
            assert tab.value("window.marker") == "not reloaded"
    # Requests in flight at shutdown fail, too.
    connection_errors = ("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_INCOMPLETE")
    assert all(any(word in error for word in connection_errors) for error in tab.errors), tab.errors
    tab.errors.clear()
