"""The page in a headless Chromium, against a real server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser import CHROMIUM, needs_browser
from tests.service.conftest import Serve, Server
from tests.service.upstream import Upstream, answering
from titans.text.records import Record

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LESSON = "Ada's piano lesson is on Tuesday at five."
HOSTILE = (
    "<script>document.title = 'stolen'</script><img src=x onerror=\"document.title = 'stolen'\">",
    "\u202eturned around\u2066 and never back",
    "مرحبا، الدرس يوم الثلاثاء",
    "long" * 5_000,
)
MANY = 10_000
Open = Callable[..., "Page"]


def test_the_page_is_served_with_a_strict_policy(server: Server) -> None:
    answer = server.http.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert (answer.headers["x-content-type-options"], answer.headers["referrer-policy"]) == ("nosniff", "no-referrer")
    for name in re.findall(r'(?:src|href)="(page/[^"]+)"', answer.text):
        assert server.http.get(f"/{name}").headers["content-security-policy"] == policy
    for name in ("page.py", "..%2fpage.py", "%00", "index.html/x"):
        assert server.http.get(f"/page/{name}").status_code == 404


def test_no_file_of_the_page_makes_markup_of_a_text_or_names_another_server(server: Server) -> None:
    page = server.http.get("/").text
    scripts = ["app.js"]
    for name in scripts:
        source = server.http.get(f"/page/{name}").text
        scripts += [other for other in re.findall(r'from "\./([^"]+)"', source) if other not in scripts]
        page += source
    page += server.http.get("/page/style.css").text
    assert len(scripts) > 5
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|style=|onclick=\"", page)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)


def test_the_state_of_a_scope_says_what_was_written_to_it(server: Server) -> None:
    server.http.post("/memories", json={"texts": [f"Fact {i}." for i in range(18)], "user_id": "state", "run_id": "r"})
    state = server.http.get("/state", params={"user_id": "state", "run_id": "r"}).json()
    assert (state["texts"], state["open"], state["chunk_size"]) == (18, 2, 16)
    (layer,) = state["layers"]
    assert layer["learned"] > 0 and layer["momentum"] > 0
    empty = server.http.get("/state", params={"user_id": "state"}).json()
    assert (empty["texts"], empty["layers"][0]["learned"]) == (0, 0)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens pages that complain of nothing: no console errors, no violations of the policy, no other servers."""
    contexts, wrong = [], []

    def start(server: Server, user: str = "", view: str = "", refused: int | None = None, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1100, "height": 850}, "locale": "en-GB", **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)

        def note(message: Any) -> None:
            # Chromium itself writes a line for an answer that is a refusal, which some tests ask for.
            if message.type in ("error", "warning") and not (refused and f"status of {refused}" in message.text):
                wrong.append(message.text)

        page.on("console", note)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda sent: None if sent.url.startswith((server.url, "data:")) else wrong.append(sent.url))
        scope = json.dumps({"user_id": user})
        page.add_init_script(f"sessionStorage['titans-scope'] ??= {json.dumps(scope)}")
        page.goto(f"{server.url}/#{view}")
        return page

    yield start
    for context in contexts:
        context.close()
    assert not wrong


def tell(server: Server, user: str, *texts: str, **more: Any) -> list[dict[str, Any]]:
    answer = server.http.post("/memories", json={"texts": texts, "user_id": user, **more})
    results: list[dict[str, Any]] = answer.json()["results"]
    return results


def texts_of(page: Page, place: str) -> list[str]:
    return page.locator(f"{place} .memory .text").all_inner_texts()


@needs_browser
@pytest.mark.slow
def test_a_search_shows_the_parts_of_each_score_while_one_types(server: Server, open_page: Open) -> None:
    tell(server, "search", LESSON, "The cat sleeps on the sofa.", "The dentist is on Monday.")
    page = open_page(server, "search")
    page.keyboard.press("/")
    page.keyboard.type("piano lesson", delay=20)
    page.locator("#results .memory").nth(2).wait_for()
    assert texts_of(page, "#results")[0] == LESSON
    parts = page.locator("#results .parts").first.inner_text()
    assert all(name in parts for name in ("Score", "Meaning", "Words", "Memory", "#1"))
    page.locator("#threshold").fill("0.5")
    page.locator("#search-notes", has_text="2 fell below the cosine of 0.50").wait_for()
    assert texts_of(page, "#results") == [LESSON]
    page.locator("#query").press("ArrowDown")
    page.keyboard.press("Enter")
    page.locator("#details[open]").wait_for()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.className") == "open"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Escape")
    page.locator("#search-notes", has_text="Results appear while you type.").wait_for()


@needs_browser
@pytest.mark.slow
def test_a_memory_is_changed_and_erased_only_after_a_confirmation(server: Server, open_page: Open) -> None:
    (written,) = tell(server, "edit", LESSON)
    page = open_page(server, "edit", "timeline")
    page.locator("#days .open").click()
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("New text").fill("It is on Friday now.")
    page.get_by_label("Keep the old text").check()
    page.get_by_role("button", name="Save…").click()
    page.get_by_role("button", name="Cancel").last.click()
    assert server.memory.get(written["id"], user="edit").text == LESSON
    page.get_by_role("button", name="Save…").click()
    page.get_by_role("button", name="Replace", exact=True).click()
    page.locator(".versions li").nth(1).wait_for()
    page.keyboard.press("Escape")
    page.locator("#days .open:focus").wait_for()  # though the list was drawn anew
    page.keyboard.press("Enter")
    page.locator(".versions li").nth(1).wait_for()
    assert LESSON in page.locator(".versions").inner_text()
    assert server.memory.get(written["id"], user="edit").text == "It is on Friday now."
    page.get_by_role("button", name="Erase").click()
    assert "There is no undo" in page.locator("#confirm").inner_text()
    page.keyboard.press("Escape")
    assert server.memory.get(written["id"], user="edit") is not None
    page.get_by_role("button", name="Erase").click()
    page.get_by_role("button", name="Erase for good").click()
    page.get_by_text("There are no memories of this scope yet.").wait_for()
    assert server.memory.get(written["id"], user="edit") is None


@needs_browser
@pytest.mark.slow
def test_a_newer_version_leads_to_the_older_and_back(server: Server, open_page: Open) -> None:
    tell(server, "versions", "Ada's favourite colour is blue.")
    tell(server, "versions", "Ada's favourite colour is green.")
    page = open_page(server, "versions")
    page.locator("#query").fill("Which is Ada's favourite colour?")
    page.get_by_text("a newer version exists").wait_for()
    page.locator("#results .open").first.click()
    page.get_by_role("button", name="the older version").click()
    page.locator("#details .full", has_text="blue").wait_for()
    page.get_by_role("button", name="a newer version").click()
    page.locator("#details .full", has_text="green").wait_for()


@needs_browser
@pytest.mark.slow
def test_hostile_texts_are_shown_as_they_are(server: Server, open_page: Open) -> None:
    tell(server, "<b>hostile</b>", *HOSTILE)
    page = open_page(server, "<b>hostile</b>", "timeline", viewport={"width": 360, "height": 740})
    page.locator("#days .memory").nth(3).wait_for()
    assert HOSTILE[0] in page.locator("#days").inner_text()
    assert page.title() == "Titans memory"
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.locator("#days .open").first.click()  # the longest
    assert len(page.locator("#details .full").inner_text()) == len(HOSTILE[3])
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@needs_browser
@pytest.mark.slow
def test_the_key_is_asked_for_and_never_in_the_address(serve: Serve, open_page: Open) -> None:
    server = serve()
    tell(server, "ada", LESSON)
    key = server.app.state.keys.add("page", user="ada")
    page = open_page(server, refused=401)
    page.get_by_text("The key is missing").first.wait_for()
    page.locator("#key-field").fill("titans_000000000000_wrong")
    page.keyboard.press("Enter")
    page.get_by_text("The key is unknown or was revoked").first.wait_for()
    page.locator("#key-field").fill(key)
    page.keyboard.press("Enter")
    page.get_by_text("1 memory").wait_for()
    page.locator("#query").fill("piano")
    page.locator("#results .memory").wait_for()
    assert key not in page.url and key not in page.content()
    page.reload()
    page.get_by_text("1 memory").wait_for()


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with answering("Your", " lesson", " is", " on", " Tuesday", ".") as running:
        yield running


@needs_browser
@pytest.mark.slow
def test_a_chat_shows_the_memories_it_used(serve: Serve, upstream: Upstream, open_page: Open) -> None:
    server = serve(upstream=upstream.url)
    tell(server, "zoë", LESSON)
    page = open_page(server, "zoë", "chat")
    page.locator("#model option[value=words]").wait_for(state="attached")
    page.locator("#message").fill("When is Ada's piano lesson?")
    page.keyboard.press("Enter")
    page.get_by_text("Your lesson is on Tuesday.").first.wait_for()
    page.locator(".used button").wait_for()
    assert "Ada's piano lesson" in page.locator(".used").inner_text()
    assert re.search(r"\d\.\d\d (expected|familiar|new|surprising)", page.locator(".said.user").inner_text())
    page.get_by_text("3 memories").wait_for()  # the message and the answer were remembered
    page.locator("#remember").uncheck()
    page.locator("#message").fill("And now?")
    page.keyboard.press("Enter")
    page.get_by_text("not remembered").wait_for()
    page.locator(".said.assistant").nth(1).get_by_text("Tuesday.").first.wait_for()
    assert len(server.memory.records(user="zoë")) == 3


@needs_browser
@pytest.mark.slow
def test_a_chat_says_what_is_wrong_with_the_upstream(serve: Serve, upstream: Upstream, open_page: Open) -> None:
    server = serve(upstream=upstream.url)
    page = open_page(server, "ada", "chat", refused=429)
    page.locator("#model option[value=words]").wait_for(state="attached")
    page.evaluate("document.getElementById('model').append(new Option('limited'), new Option('broken'))")
    for model, words in (("limited", "Slow down."), ("broken", "The upstream broke off.")):
        page.locator("#model").select_option(model)
        page.locator("#message").fill("Hello")
        page.keyboard.press("Enter")
        page.locator("#talk .problem", has_text=words).wait_for()


@needs_browser
@pytest.mark.slow
def test_the_state_says_what_it_expects(server: Server, open_page: Open) -> None:
    tell(server, "expects", "Ada lives in Oslo.", *(f"The bus comes at {i}." for i in range(8)))
    page = open_page(server, "expects", "state")
    page.locator("#layers li").wait_for()
    assert "9" in page.locator("#figures").inner_text()
    page.locator("#statement").fill("Ada lives in Bergen.")
    page.get_by_role("button", name="The memory that it contradicts").click()
    page.locator("#details .full", has_text="Oslo").wait_for()
    assert len(server.memory.records(user="expects")) == 9


@pytest.fixture(scope="module")
def full(serve: Serve) -> Server:
    """A server with many memories of one user."""
    server = serve()
    begin = datetime(2026, 1, 1, tzinfo=timezone.utc)
    topics = ("piano", "garden", "whales", "trains", "bread", "chess", "rain", "maps")
    server.memory.restore([
        Record(
            id=f"{i:08}", text=f"Note {i} about {topics[i % 8]}.", user="many",
            created=(begin + timedelta(minutes=17 * i)).isoformat(), updated=begin.isoformat(),
        )
        for i in range(MANY)
    ])  # fmt: skip
    return server


@needs_browser
@pytest.mark.slow
def test_many_memories_stay_quick(full: Server, open_page: Open) -> None:
    page = open_page(full, "many", "timeline")
    page.get_by_text("10,000 memories").wait_for()
    begun = time.perf_counter()
    page.reload()
    page.locator("#days .memory").first.wait_for()
    timeline = time.perf_counter() - begun
    begun = time.perf_counter()
    for seen in range(100, 1_100, 100):  # the older ones come by themselves
        page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
        page.locator(f"#days .memory >> nth={seen}").wait_for(state="attached")
    scrolling = time.perf_counter() - begun
    page.evaluate("scrollTo(0, 0)")
    page.keyboard.press("/")
    begun = time.perf_counter()
    page.keyboard.type("whales")
    page.locator("#results .memory .text", has_text="whales").first.wait_for()
    search = time.perf_counter() - begun
    begun = time.perf_counter()
    page.locator("#query").fill("Which note is about trains?")
    page.locator("#results .memory .text", has_text="trains").first.wait_for()
    following = time.perf_counter() - begun
    print(f"first memories {timeline:.2f} s, 1,000 more {scrolling:.1f} s")
    print(f"first results {search:.2f} s, next {following:.2f} s")
    assert timeline < 5 and search < 5  # seconds, on a busy machine


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, which finds what keeps people from using a page."""
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("axe")
    if npm is None:
        pytest.skip("there is no npm to get axe-core with")
    done = subprocess.run(
        [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "axe-core@4"],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"npm does not get axe-core: {done.stderr.strip().splitlines()[0]}")
    return Path(folder, "node_modules", "axe-core", "axe.min.js").read_text(encoding="utf-8")


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_keeps_people_from_using_the_page(
    serve: Serve, upstream: Upstream, open_page: Open, axe: str, scheme: str
) -> None:
    server = serve(upstream=upstream.url)
    tell(server, "ada", LESSON, "Ada likes green tea.", "The cat sleeps.", run_id="monday", metadata={"topic": "life"})
    page = open_page(server, "ada", color_scheme=scheme, bypass_csp=True)  # which forbids axe, too
    page.evaluate(axe)

    def check(what: str) -> None:
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        serious = [each for each in found if each["impact"] in ("serious", "critical")]
        assert not serious, f"{what}: {[(each['id'], [node['html'] for node in each['nodes']]) for each in serious]}"

    page.locator("#query").fill("piano lesson")
    page.locator("#results .memory").first.wait_for()
    check("search")
    page.locator("#results .open").first.click()
    page.locator(".versions .text").first.wait_for()
    check("details")
    page.get_by_role("button", name="Erase").click()
    check("confirmation")
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Timeline").click()
    page.locator("#days .memory").first.wait_for()
    check("timeline")
    page.get_by_role("tab", name="Chat").click()
    page.locator("#message").fill("When is the lesson?")
    page.keyboard.press("Enter")
    page.locator(".used button").first.wait_for()
    check("chat")
    page.get_by_role("tab", name="State").click()
    page.locator("#statement").fill("Ada moves to Oslo.")
    page.locator("#surprise .part").first.wait_for()
    check("state")
    page.get_by_role("button", name="Key").click()
    check("key")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Shortcuts").click()
    check("shortcuts")
