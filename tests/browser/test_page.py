"""The page in a real browser: it changes when the context does, stays small, and works on phones and by keyboard.

GPU_ACTORS_BROWSER: the path of a Chromium; by default the one on PATH. GPU_ACTORS_SCREENSHOTS: a folder to which the
pictures of the documentation are written.
"""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside.server import history
from PIL import Image
from support.page import kill, lived, page_application, pool_application, service_of, worker_of
from support.served import Served
from support.service import Scripted, ask, eventually, raises

import gpu_actors as ga
from gpu_actors.status import report
from gpu_actors.testing import FaultPlan

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

EVIL = "</script><img src=x onerror=\"document.body.dataset.caught='yes'\"><b>bold</b>"
PHONE = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = os.environ.get("GPU_ACTORS_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on PATH, and GPU_ACTORS_BROWSER names none")
    with playwright.sync_playwright() as started:
        # The sandbox needs rights that a container may lack. Only pages of this test are opened.
        opened = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--js-flags=--expose-gc"])
        yield opened
        opened.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page. No page may report an error of a script, a refused file or the content policy."""
    contexts, said = [], []

    def open_page(url: str, allowed: tuple[str, ...] = (), **settings: Any) -> Any:
        context = browser.new_context(**settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)

        def note(text: str) -> None:
            if not any(each in text for each in allowed):
                said.append(text)

        page.on("console", lambda message: note(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: note(str(error)))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


def shows(page: Any, selector: str, text: str, timeout: float = 60.0) -> None:
    page.wait_for_function(
        "([where, what]) => document.querySelector(where)?.textContent.includes(what)",
        arg=[selector, text],
        timeout=timeout * 1e3,
    )


def elsewhere(work: Callable[..., Any], *arguments: Any) -> Any:
    """Call on another thread: playwright runs an event loop on this one, so no reply may be waited for here."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *arguments).result(60)


def fails(reply: ga.Reply[Any]) -> None:
    assert isinstance(elsewhere(_error_of, reply), ga.GpuActorsError)


def _error_of(reply: ga.Reply[Any]) -> BaseException | None:
    try:
        reply.result(60)
    except ga.GpuActorsError as error:
        return error
    return None


@contextmanager
def opened_cache(context: ga.GpuContext, pages: int) -> Iterator[ga.KvCache]:
    cache = context.kv_cache(num_blocks=pages, page_size=16, kv_heads=1, head_dim=64, dtype="float16")
    elsewhere(cache.__enter__)
    try:
        yield cache
    finally:
        elsewhere(cache.__exit__, None, None, None)


def picture(page: Any, name: str) -> None:
    folder = os.environ.get("GPU_ACTORS_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        image = Image.open(io.BytesIO(page.screenshot(full_page=True, scale="css")))
        # Few colours are enough for a page and need a third of the bytes.
        image.convert("RGB").quantize(64).save(Path(folder) / f"{name}.png", optimize=True)


def work(context: ga.GpuContext, requests: int = 40) -> None:
    """Requests alone and together, so that every histogram has something to show."""
    for _ in range(requests):
        ask(context).result(60)
    for reply in [ask(context) for _ in range(requests)]:
        reply.result(60)


def filled(cache: ga.KvCache) -> None:
    new = np.zeros((90, 1, 64), np.float16)
    for length in (90, 33, 57, 80):
        sequence = cache.create().result(60)
        cache.append(sequence, new[:length], new[:length]).result(60)
    cache.fork(sequence).result(60)
    kept = cache.create(list(range(65))).result(60)
    cache.append(kept, new[:65], new[:65], tokens=np.arange(65)).result(60)
    cache.free(kept).result(60)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_tree_changes_when_a_child_is_restarted(visit: Callable[..., Any], scheme: str) -> None:
    app = page_application()
    with Served(app) as served:
        context = service_of(app).context
        size = {"width": 1180, "height": 900}
        page = visit(served.url, color_scheme=scheme, viewport=size)
        shows(page, "#state", "Ready")
        with opened_cache(context, 96) as cache:
            elsewhere(filled, cache)
            elsewhere(work, context)
            lived(app)
            row = '#actors > li[data-key="scripted"]'
            assert "restart" not in page.inner_text(f"{row} summary")
            page.click(f"{row} summary")
            fails(context.actor(Scripted).submit(raises(RuntimeError("a launch table was torn"))))
            shows(page, f"{row} summary", "1 restart")
            shows(page, "#events", "actor.restarted")
            shows(page, "#events", "RuntimeError: a launch table was torn")
            assert page.locator(f"{row} details").get_attribute("open") is not None, "it stays open while it changes"
            shows(page, "#caches p", "96 pages of 16 tokens")
            shows(page, "#charts figure figcaption", "median")
            shows(page, row, "ActorFailed")
            colours = page.evaluate(
                """() => { const canvas = document.querySelector('#caches canvas'), seen = new Set();
                const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
                for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) seen.add(data.slice(i, i + 3).join());
                return seen.size; }"""
            )
            assert colours >= 4, "free, kept, used and shared pages differ"
            picture(page, f"page-{scheme}")
            ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, ground[4:-1].split(","))) > 384) == (scheme == "light")
        page.close()


def test_a_lost_context_is_seen(visit: Callable[..., Any]) -> None:
    app = page_application(fault_plan=FaultPlan().lose_context(launch=2))
    with Served(app) as served:
        page = visit(served.url, viewport={"width": 1180, "height": 500})
        shows(page, "#state", "Ready")
        assert page.get_attribute("#verdict", "data-state") == "good"
        fails(ask(service_of(app).context))
        page.wait_for_selector('#verdict[data-state="bad"]')
        assert "lost" in page.inner_text("#reason")
        assert page.inner_text("#state") == "Failed"
        assert page.title().startswith("Failed")
        assert page.locator('[data-state="good"]').count() == 0, "no actor looks well on a lost context"
        shows(page, "#events", "context.lost")
        picture(page, "page-lost")
        page.close()


@pytest.mark.perf
def test_a_lost_context_is_seen_within_a_second(visit: Callable[..., Any]) -> None:
    """At the median of three contexts."""
    seconds = []
    for _ in range(3):
        app = page_application(fault_plan=FaultPlan().lose_context(launch=2))
        with Served(app) as served:
            page = visit(served.url)
            shows(page, "#state", "Ready")
            began = time.monotonic()
            fails(ask(service_of(app).context))
            page.wait_for_selector('#verdict[data-state="bad"]')
            seconds.append(time.monotonic() - began)
            page.close()
    assert sorted(seconds)[1] < 1.0, seconds


def test_a_degraded_context_that_takes_nothing_is_red_and_says_why(visit: Callable[..., Any]) -> None:
    app = page_application(degraded_after=1, fault_plan=FaultPlan().fail(launch=2, error=ga.LaunchError))
    with Served(app) as served:
        page = visit(served.url)
        shows(page, "#state", "Ready")
        context = service_of(app).context
        context._children.on_failing = lambda: None  # so that no probe ends the degraded state
        fails(ask(context))
        shows(page, "#state", "Degraded")
        assert page.get_attribute("#verdict", "data-state") == "bad"
        assert "No requests are taken" in page.inner_text("#reason")
        assert "LaunchError" in page.inner_text("#reason")
        page.close()


def test_a_page_whose_stream_breaks_says_so_and_recovers(visit: Callable[..., Any]) -> None:
    app = page_application()
    with Served(app) as served:
        page = visit(served.url, ("ERR_INTERNET_DISCONNECTED", "ERR_INCOMPLETE"))
        shows(page, "#state", "Ready")
        page.context.set_offline(True)
        service_of(app).board.end_streams()
        page.wait_for_selector('body[data-stream="broken"]')
        assert page.get_attribute("#verdict", "data-state") == "unknown"
        assert "The last state was ready" in page.inner_text("#reason")
        assert page.locator("#verdict[data-state=good], #root-state[data-state=good]").count() == 0
        service_of(app).board.ending = False
        page.context.set_offline(False)
        page.wait_for_selector('#verdict[data-state="good"]')
        assert page.get_attribute("body", "data-stream") == "live"
        page.close()


def test_ten_thousand_events_do_not_grow_the_page(visit: Callable[..., Any]) -> None:
    app = page_application()
    with Served(app) as served:
        board = service_of(app).board
        page = visit(served.url)
        shows(page, "#state", "Ready")
        session = page.context.new_cdp_session(page)

        def fill(events: int, name: str) -> tuple[int, int]:
            for number in range(events):
                board.event_log.add("cache.miss", {"variant": f"{name} {number}", "digest": "0" * 64})
                if number % 100 == 99:
                    board._due.set()
                    time.sleep(0.06)
            shows(page, "#events", f"{name} {events - 1}")
            session.send("HeapProfiler.collectGarbage")
            used = session.send("Runtime.getHeapUsage")["usedSize"]
            return used, page.evaluate("document.querySelectorAll('*').length")

        first, nodes = fill(1000, "first")
        last, more = fill(9000, "last")
        assert more <= nodes + 20
        assert last < first + 2_000_000, f"{first} bytes grew to {last}"
        assert page.locator("#events li").count() == 200
        assert len(board.event_log.since(0).items) == 500
        page.click("#pause")
        fill_before = page.locator("#events li").first.inner_text()
        for number in range(1000):
            board.event_log.add("cache.miss", {"variant": f"held {number}"})
        board._due.set()
        shows(page, "#pause", "Resume (200)")
        assert page.locator("#events li").first.inner_text() == fill_before
        page.click("#pause")
        shows(page, "#events", "held 999")
        page.close()


def test_an_error_that_holds_markup_is_a_text(visit: Callable[..., Any]) -> None:
    app = page_application()
    with Served(app) as served:
        page = visit(served.url, ("TrustedHTML",))
        shows(page, "#state", "Ready")
        fails(service_of(app).context.actor(Scripted).submit(raises(RuntimeError(EVIL))))
        shows(page, "#events", EVIL)
        assert page.evaluate("[document.body.dataset.caught ?? '', document.images.length]") == ["", 0]
        refused = page.evaluate(
            "(() => { try { document.body.innerHTML = '<i>x</i>'; } catch (error) { return error.name; } })()"
        )
        assert refused == "TypeError", "Trusted Types keep a script from making HTML out of a text"
        page.close()


def test_a_report_shows_the_same_without_a_server(visit: Callable[..., Any], tmp_path: Path) -> None:
    app = page_application()
    with Served(app):
        fails(service_of(app).context.actor(Scripted).submit(raises(RuntimeError(EVIL))))
        elsewhere(work, service_of(app).context, 5)
        board = service_of(app).board
        eventually(lambda: any(event["name"] == "actor.restarted" for event in board.event_log.since(0).items))
        (tmp_path / "report.html").write_text(report(board.snapshot()), encoding="utf-8")
    page = visit((tmp_path / "report.html").as_uri(), offline=True)
    shows(page, "#state", "Ready")
    assert "not live" in page.inner_text("#stream")
    shows(page, "#events", EVIL)
    shows(page, "#actors", "1 restart")
    assert page.evaluate("[document.body.dataset.caught ?? '', document.images.length]") == ["", 0]
    assert page.evaluate("getComputedStyle(document.querySelector('#verdict')).borderLeftWidth") == "8px"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(visit: Callable[..., Any], scheme: str) -> None:
    app = page_application()
    with Served(app) as served:
        context = service_of(app).context
        settings: Any = {"viewport": PHONE, "is_mobile": True, "has_touch": True, "color_scheme": scheme}
        page = visit(served.url, **settings)
        shows(page, "#state", "Ready")
        with opened_cache(context, 600) as cache:
            elsewhere(filled, cache)
            elsewhere(work, context)
            fails(context.actor(Scripted).submit(raises(RuntimeError("x" * 300))))
            shows(page, "#events", "x" * 300)
            for details in page.locator("#actors details").all():
                details.locator("summary").tap()
            shows(page, "#caches p", "600 pages")
            wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            assert wide[0] <= PHONE["width"], wide
            if scheme == "dark":
                page.evaluate("for (const each of document.querySelectorAll('details[open]')) each.open = false")
                picture(page, "page-phone")
        page.close()


def test_a_keyboard_reaches_and_works_everything(visit: Callable[..., Any]) -> None:
    app = page_application()
    with Served(app) as served:
        page = visit(served.url)
        shows(page, "#state", "Ready")
        shows(page, "#actors", "scripted")
        seen: list[str] = []
        outlined = []
        for _ in range(20):
            page.keyboard.press("Tab")
            name, outline = page.evaluate(
                """() => { const at = document.activeElement; const row = at.closest('#actors > li');
                return [row ? `actor ${row.dataset.key}` : at.id || at.name || at.className || at.tagName,
                        getComputedStyle(at).outlineStyle]; }"""
            )
            if name == "BODY" or (seen and name == seen[0]):
                break
            seen.append(name)
            outlined.append(outline)
            if name == "actor kv_cache":
                page.keyboard.press("Enter")
            if name == "pause":
                page.keyboard.press("Space")
            if name == "window":
                page.keyboard.press("ArrowRight")
        actors = [f"actor {name}" for name in service_of(app).context.stats()]
        assert seen == ["skip", *actors, "pause", "events", "window", "actor", "kernels-scroll"]
        assert set(outlined) == {"solid"}, "the focus is seen"
        assert page.locator('#actors > li[data-key="kv_cache"] details[open]').count() == 1
        assert page.get_attribute("#pause", "aria-pressed") == "true"
        assert page.input_value("input[name=window]:checked") == "300"
        page.keyboard.press("Tab")
        tree = page.locator("main").aria_snapshot()
        for name in ("Supervision", "Events", "Requests", "KV pages", "Kernels"):
            assert f'heading "{name}' in tree
        assert page.locator("[aria-live]").count() == 1, "only the state is announced"
        page.close()


def row(worker: str) -> str:
    return f'#actors > li[data-key="{worker}"]'


def summary(worker: str) -> str:
    return f"{row(worker)} > details > summary"


@contextmanager
def pages_of(app: Any) -> Iterator[None]:
    """A KV cache with some pages on the first worker, and requests at both."""
    one, two = (worker_of(app, name) for name in ("worker-1", "worker-2"))
    with opened_cache(one, 96) as cache:
        elsewhere(filled, cache)
        for context in (one, two):
            elsewhere(work, context, 5)
        yield


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_pool_shows_a_worker_that_is_killed_and_returns(visit: Callable[..., Any], scheme: str) -> None:
    app = pool_application()
    with Served(app) as served, pages_of(app):
        page = visit(served.url, color_scheme=scheme, viewport={"width": 1180, "height": 900})
        shows(page, "#state", "Ready")
        shows(page, "#device", "2 of 2 workers ready")
        shows(page, f"{summary('worker-1')} .dim", "generation 1")
        shows(page, f"{summary('worker-1')} .dim", " of 96 pages")
        shows(page, "#caches p", "worker-1, cache")
        assert "pages" not in page.inner_text(summary("worker-2"))
        page.click(summary("worker-1"))
        shows(page, f"{row('worker-1')} .branch", "flash_attn")
        page.click(f'{row("worker-1")} .branch > li[data-key="flash_attn"] summary')
        kill(worker_of(app, "worker-1"))
        shows(page, f"{summary('worker-1')} .dim", "generation 2")
        shows(page, f"{summary('worker-1')} .badge", "ready")
        shows(page, "#device", "2 of 2 workers ready")
        page.wait_for_selector('#verdict[data-state="good"]')
        shows(page, f"{summary('worker-1')} .dim", "1 restart")
        assert "restart" not in page.inner_text(summary("worker-2"))
        assert page.locator(f"{row('worker-1')} details[open]").count() == 2, "what was open stays open"
        events = page.inner_text("#events")
        assert "context.lost worker-1" in events
        assert "context.lost worker-2" not in events
        picture(page, f"page-pool-{scheme}")
        page.close()


def test_a_dead_worker_is_amber_and_the_last_one_red(visit: Callable[..., Any]) -> None:
    app = pool_application(max_restarts=0)
    with Served(app) as served:
        page = visit(served.url)
        shows(page, "#state", "Ready")
        kill(worker_of(app, "worker-1"))
        shows(page, f"{summary('worker-1')} .badge", "failed")
        page.wait_for_selector('#verdict[data-state="warn"]')
        assert page.inner_text("#state") == "Degraded"
        shows(page, "#reason", "worker-1: the context is lost")
        shows(page, "#root-text", "1 of 2 workers ready")
        colours = [page.get_attribute(f"{summary(name)} .badge", "data-state") for name in ("worker-1", "worker-2")]
        assert colours == ["bad", "good"]
        page.click(summary("worker-1"))
        shows(page, f"{row('worker-1')} .why", "the context is lost")
        assert page.locator(f'{row("worker-1")} [data-state="good"]').count() == 0, "none of its actors looks well"
        kill(worker_of(app, "worker-2"))
        page.wait_for_selector('#verdict[data-state="bad"]')
        shows(page, "#state", "Failed")
        shows(page, "#reason", "worker-2: the context is lost")
        assert page.locator('[data-state="good"]').count() == 0
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_pool_fits_a_phone(visit: Callable[..., Any], scheme: str) -> None:
    app = pool_application()
    with Served(app) as served, pages_of(app):
        settings: Any = {"viewport": PHONE, "is_mobile": True, "has_touch": True, "color_scheme": scheme}
        page = visit(served.url, **settings)
        shows(page, "#state", "Ready")
        shows(page, f"{summary('worker-1')} .dim", " of 96 pages")
        for name in ("worker-1", "worker-2"):
            page.locator(summary(name)).tap()
            for inner in page.locator(f"{row(name)} .branch summary").all():
                inner.tap()
        assert page.locator("#actors details[open]").count() == 2 + 2 * len(worker_of(app, "worker-1").stats())
        wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= PHONE["width"], wide
        picture(page, f"page-pool-phone-{scheme}")
        page.close()


def test_a_keyboard_opens_a_worker_and_its_actors(visit: Callable[..., Any]) -> None:
    app = pool_application()
    with Served(app) as served, pages_of(app):
        page = visit(served.url)
        shows(page, "#state", "Ready")
        shows(page, "#actors", "worker-2")
        page.focus(summary("worker-1"))
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        inside = page.evaluate("document.activeElement.closest('li').dataset.key")
        assert inside == next(iter(worker_of(app, "worker-1").stats())), "the first actor of the worker"
        page.keyboard.press("Enter")
        assert page.locator(f"{row('worker-1')} details[open]").count() == 2
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.closest('#actors > li').dataset.key") == "worker-2"
        page.check("input[name=window][value='300']")  # longer than this test
        counted = "#charts figure figcaption .dim"
        for name, requests in (("worker-2", 10), ("worker-1", 23), ("", 33)):
            page.select_option("#worker", name)
            shows(page, counted, f"{requests} ·")
        page.close()


def test_a_report_shows_every_worker(visit: Callable[..., Any], tmp_path: Path) -> None:
    app = pool_application()
    with Served(app), pages_of(app):
        text = report(elsewhere(service_of(app).board.snapshot))
    (tmp_path / "report.html").write_text(text, encoding="utf-8")
    page = visit((tmp_path / "report.html").as_uri(), offline=True)
    shows(page, "#state", "Ready")
    shows(page, summary("worker-1"), " of 96 pages")
    shows(page, summary("worker-2"), "generation 1")


STATES: dict[str, tuple[dict[str, int], str, str, str]] = {
    "idle": ({}, "Ready", "good", ""),
    "busy": ({"ok": 200}, "Ready", "good", ""),
    "overloaded": ({"ok": 60, "refused": 40}, "Overloaded", "warn", "40% got 429"),
    "late": ({"ok": 97, "late": 3}, "Misses deadlines", "warn", "3.0% missed their deadline"),
    "failing": ({"failed": 4, "late": 1}, "All fail", "bad", "20% missed their deadline, 80% failed"),
    "refusing": ({"refused": 5}, "Refuses all", "bad", "All 5 requests of the last 10 s got 429."),
}
"""What clients ask for, and what the page then shows: the state, its colour and the shares."""

FITS = """() => [...document.querySelectorAll("main *")].filter((node) => {
  const { left, right, width } = node.getBoundingClientRect();
  const hidden = node.closest("thead, .tree details:not([open]) > :not(summary)");
  const clips = getComputedStyle(node).overflowX !== "visible" && node.tagName !== "svg";
  const cut = clips && node.scrollWidth > node.clientWidth + 1;
  return width && !hidden && (left < 0 || right > innerWidth + 0.5 || cut);
}).map((node) => `${node.tagName} ${node.id || node.className} ${node.textContent.slice(0, 40)}`)"""
"""Lists the elements that are cut or lie beyond the window."""


def looks(visit: Callable[..., Any], url: str, name: str, title: str, grade: str) -> Any:
    """Nothing of the page is cut on a desktop and on two phones, in light and dark. Returns the desktop's page."""
    page = None
    for width, scheme in ((390, "light"), (360, "dark"), (1280, "dark"), (1280, "light")):
        phone = {"is_mobile": True, "has_touch": True} if width < 500 else {}
        if page is not None:
            page.close()
        page = visit(url, viewport={"width": width, "height": 800}, color_scheme=scheme, **phone)
        shows(page, "#state", title)
        assert page.get_attribute("#verdict", "data-state") == grade
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(FITS) == []
        picture(page, f"state-{name}-{width}-{scheme}")
    return page


@pytest.mark.parametrize("name", STATES)
def test_the_page_says_first_how_clients_fare(
    visit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(history, "SLOT", 0.2)
    asked, title, grade, shares = STATES[name]
    app = page_application()
    with Served(app) as served:
        for kind, count in asked.items():
            for _ in range(count):
                served.ask(f"/answer/{kind}")
        page = looks(visit, served.url, name, title, grade)
        assert shares in page.text_content("#shares")
        assert page.is_visible("#shares") == bool(shares)
        assert page.is_visible("#tiles") == page.is_hidden("#unasked") == bool(asked)
        tile = '#tiles figure[data-key="Answers a second"]'
        assert f"{asked.get('ok', 0)} in the last minute" in page.text_content(tile)
        assert bool(page.get_attribute(f"{tile} path", "d")) == ("ok" in asked)
        for title, kind in (("Refused with 429", "refused"), ("Deadlines missed", "late"), ("Failed", "failed")):
            tile = f'#tiles figure[data-key="{title}"]'
            share = asked.get(kind, 0) / max(1, sum(asked.values()))
            assert page.get_attribute(tile, "data-state") == ("bad" if share >= 0.5 else "warn" if share > 0.01 else "")
            assert (f"{asked.get(kind, 0)} of {sum(asked.values())}" in page.text_content(tile)) == bool(asked)
        assert page.locator("#routes tr").count() == min(1, len(asked))
        page.close()


def test_five_minutes_are_drawn_with_their_axis(visit: Callable[..., Any]) -> None:
    app = page_application()
    with Served(app) as served:
        lived(app)
        page = visit(served.url)
        shows(page, "#state", "Overloaded")
        tops = {
            "Answers a second": "38.8",
            "Refused with 429": "%",
            "Time in the queue": "250 ms",
            "First token": "1 s",
        }
        for title, top in tops.items():
            tile = f'#tiles figure[data-key="{title}"]'
            assert top in page.inner_text(f"{tile} .scale")
            assert page.inner_text(f"{tile} .scale").split()[-1] == "0"
            assert page.inner_text(f"{tile} .axis").split("\n") == ["\N{MINUS SIGN}5 min", "now"]
            assert "over the last 5 minutes: now" in page.get_attribute(f"{tile} svg", "aria-label")
        assert page.get_attribute('#tiles figure[data-key="Answers a second"] path', "d").count("M") >= 59
        picture(page, "state-lived")
        page.close()


def test_a_server_that_leaves_is_amber(visit: Callable[..., Any]) -> None:
    app = page_application()
    with Served(app) as served:
        service_of(app).probes.leave()
        page = looks(visit, served.url, "draining", "Draining", "warn")
        assert page.inner_text("#reason") == "What was accepted is answered: the server is leaving"
        page.close()


def test_a_lost_worker_fits_every_screen(visit: Callable[..., Any]) -> None:
    app = pool_application(max_restarts=0)
    with Served(app) as served:
        kill(worker_of(app, "worker-1"))
        looks(visit, served.url, "worker-lost", "Degraded", "warn").close()
