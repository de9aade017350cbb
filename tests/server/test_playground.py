"""The playground in a browser, with mouse and keyboard, against a server of the zoo."""

import json
import re
from collections.abc import Iterator
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser, Page, expect

from running import serving
from shown import ROOT
from toolbox import TOOLS, tool_model

PICTURES = ROOT / "build" / "screenshots"

ZOO = (
    "At the zoo 3 birds eat 12 apples each. There were 23 apples and Nina brings 28 more. "
    "How many apples are left after the birds eat?"
)
D2F_LINK = {"prompt": ZOO, "temperature": 0, "a.model": "tiny-d2f", "a.method": "d2f"}
RACE = D2F_LINK | {"mode": "race", "b.model": "tiny-ar", "b.method": "autoregressive"}
SLOW = D2F_LINK | {"a.model": "tiny-llada", "a.method": "diffusion", "max_tokens": 320}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving() as process:
        yield process.url


class Visitor:
    """Opens the page and records everything that the browser reports."""

    def __init__(self, browser: Browser, server: str) -> None:
        self.browser = browser
        self.server = server
        self.errors: list[str] = []
        self.refused: list[str] = []
        self.urls: list[str] = []

    def __call__(self, link: dict[str, object] | None = None, *, ready: bool = True, **how) -> Page:
        width = how.pop("width", 1440)
        context = self.browser.new_context(viewport={"width": width, "height": 900}, **how)
        page = context.new_page()
        page.on("console", self.note)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.urls.append(request.url))
        page.goto(f"{self.server}/#{urlencode(link or {})}")
        if ready:
            expect(page.locator("#status")).to_have_text(re.compile(r"^Ready: \d+ model"))
        return page

    def note(self, message) -> None:
        """Count rejected requests; record any other console message as an error."""
        if message.type in ("error", "warning"):
            refusal = message.text.startswith("Failed to load resource")
            (self.refused if refusal else self.errors).append(message.text)


@pytest.fixture
def visit(browser: Browser, server: str) -> Iterator[Visitor]:
    """Open the page; assert afterwards that no error occurred and no other origin was requested."""
    visitor = Visitor(browser, server)
    yield visitor
    for context in browser.contexts:
        context.close()
    assert visitor.errors == []
    assert {url for url in visitor.urls if not url.startswith((visitor.server, "data:"))} == set()


def run(page: Page) -> None:
    page.locator("#status").evaluate("said => { said.textContent = '' }")
    page.keyboard.press("Control+Enter")
    expect(page.locator("#status")).not_to_be_empty()
    expect(page.locator("#stop")).to_be_disabled(timeout=60_000)


def overflow(page: Page) -> int:
    return page.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )


def post(page: Page, path: str, method: str, **body: object) -> dict:
    body |= {"temperature": 0, "seed": 0, "outpace": {"method": method, "fill": "prompt" in body}}
    return page.request.post(f"{page.url.partition('#')[0]}v1/{path}", data=body).json()


def check_figures(page: Page, reply: dict) -> list[int]:
    """Check counts and the selected piece; return the forward of each piece."""
    figures = reply["outpace"]
    counts = f"^Finished: {figures['tokens']} tokens in {figures['forwards']} forwards?\\.$"
    expect(page.locator("#status")).to_have_text(re.compile(counts))
    page.locator(".piece").first.hover()
    expect(page.locator(".piece").first).to_have_class(re.compile("chosen"))
    expect(page.locator(".detail b")).to_have_text(re.compile(r"^Forward \d+ "))
    rows = page.locator(".piece").evaluate_all("pieces => pieces.map(piece => piece.row)")
    assert len(set(rows)) <= figures["forwards"]
    assert len(set(rows)) > 1 or figures["forwards"] == 1
    return rows


def test_run_colours_the_answer_by_forward(visit):
    page = visit(D2F_LINK)
    run(page)
    messages = [{"role": "user", "content": ZOO}]
    options = {"model": "tiny-d2f", "messages": messages, "max_tokens": 128}
    reply = post(page, "chat/completions", "d2f", **options)
    figures = reply["outpace"]
    expect(page.locator(".answer")).to_have_text(reply["choices"][0]["message"]["content"])
    expect(page.locator(".forwards")).to_have_text(str(figures["forwards"]))
    expect(page.locator(".rate")).to_have_text(f"{figures['tokens_per_forward']:.2f}")
    rows = check_figures(page, reply)
    assert all(one != other for one, other in zip(rows, rows[1:], strict=False))


@pytest.mark.nightly
@pytest.mark.parametrize("width", [375, 1440])
def test_race_says_who_was_first(visit, width):
    page = visit(RACE, width=width)
    run(page)
    times = page.evaluate("lanes.map((lane) => lane.finished)")
    first = ("d2f on tiny-d2f", "autoregressive on tiny-ar")[times.index(min(times))]
    is_close = max(times) < 1.05 * min(times)  # which the page calls a dead heat
    expect(page.locator("#verdict")).to_contain_text("heat" if is_close else first)
    left, right = (page.locator(".lane").nth(side).bounding_box() for side in range(2))
    beside = left["x"] + left["width"] <= right["x"] and left["y"] == right["y"]
    below = left["y"] + left["height"] <= right["y"] and left["x"] == right["x"]
    assert beside if width == 1440 else below
    assert overflow(page) <= 0


@pytest.mark.nightly
def test_page_opens_with_the_default_against_plain(browser):
    name = "qwen2.5-coder-0.5b-instruct-q4_k_m"
    with serving("--model", f"{name}=tiny-aux") as process:
        visit = Visitor(browser, process.url)
        for width in (375, 1440):
            page = visit(width=width)
            expect(page.locator(".method").nth(0)).to_have_value("lookup")
            expect(page.locator(".method").nth(1)).to_have_value("autoregressive")
            for link in (page, visit({"mode": "one"}, width=width)):
                model = link.locator(".model").first
                expect(model).to_have_value(name)
                room = model.evaluate(
                    "e => { const pen = document.createElement('canvas').getContext('2d');"
                    "pen.font = getComputedStyle(e).font; const style = getComputedStyle(e);"
                    "return e.clientWidth - parseFloat(style.paddingLeft) "
                    "- parseFloat(style.paddingRight) - 20 - pen.measureText(e.value).width }"
                )
                assert room >= 0  # beside the arrow
                assert overflow(link) <= 0
        assert visit.errors == visit.refused == []


@pytest.mark.nightly
def test_first_use_shows_the_default_against_plain(browser):
    with serving("tiny-ar") as process:
        visit = Visitor(browser, process.url)
        for width in (375, 1440):
            page = visit(width=width)
            expect(page.locator(".method").nth(0)).to_have_value("dflash")
            expect(page.locator(".method").nth(1)).to_have_value("autoregressive")
            run(page)
            expect(page.locator("#verdict")).not_to_be_empty()
            rates = page.locator(".rate").all_inner_texts()
            assert float(rates[0]) > float(rates[1])
            page.screenshot(path=PICTURES / f"first-use-{width}.png", full_page=True)
        assert visit.errors == visit.refused == []


@pytest.mark.parametrize(
    ("link", "control"),
    [
        ({"a.options.add": 7}, "[name=add]"),
        ({"prompt": "word " * 700}, "#prompt"),
        ({"tools": "[1]"}, "#tools"),
    ],
)
@pytest.mark.nightly
def test_error_is_shown_at_its_field(visit, link, control):
    page = visit(D2F_LINK | link)
    run(page)
    field = page.locator(control)
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_be_focused()
    error = page.locator(f"[id='{field.get_attribute('id')}-error']")
    expect(error).to_be_visible()
    expect(page.locator("#status")).to_have_text(re.compile("^Refused: "))
    field.fill({"[name=add]": "0.5", "#tools": ""}.get(control, "0"))
    expect(error).to_be_hidden()
    assert len(visit.refused) == 1


@pytest.mark.nightly
def test_another_model_follows_a_stopped_one(visit):
    page = visit(SLOW)
    page.locator("#run").click()
    expect(page.locator("#stop")).to_be_enabled()
    with page.expect_event("requestfailed"):
        page.keyboard.press("Escape")
    expect(page.locator("#status")).to_have_text(re.compile(r"^Stopped after \d+ tokens?\.$"))
    page.locator(".method").select_option("fast_dllm")
    expect(page.locator(".options [name=factor]")).to_have_count(1)
    page.locator(".model").select_option("tiny-wedlm")
    expect(page.locator(".method")).to_have_value("wedlm")
    expect(page.locator(".options [name=factor]")).to_have_count(0)
    run(page)
    expect(page.locator("#status")).to_have_text(re.compile("^Finished: "))


@pytest.mark.nightly
def test_keyboard_reaches_everything_and_shows_where_it_is(visit):
    page = visit(D2F_LINK)
    run(page)
    page.evaluate("document.activeElement.blur()")
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        place, outline = page.evaluate(
            "() => { const e = document.activeElement; return [e.id || e.name || e.className || "
            "e.tagName, getComputedStyle(e).outlineStyle] }"
        )
        if place == "BODY":
            break
        assert outline != "none", place
        seen.add(place)
    wanted = {"theme", "prompt", "max_tokens", "temperature", "seed", "raw", "mode", "run"}
    assert wanted | {"A-model", "A-method", "view", "plain reply", "answer", "CANVAS"} <= seen
    page.locator(".answer").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".detail b")).to_have_text(re.compile("^Forward 1 "))
    page.locator(".timeline canvas").focus()
    page.keyboard.press("End")
    expect(page.locator(".detail b")).to_have_text(
        re.compile(f"^Forward {page.locator('.forwards').inner_text()} ")
    )


def stream(*events: object, end: bool = True) -> str:
    data = [json.dumps(event, ensure_ascii=False) for event in events] + ["[DONE]"] * end
    return "".join(f"data: {each}\n\n" for each in data)


def chunk(text: str) -> dict:
    step = {"model": "target", "start": 0, "rows": 4, "visible": 4, "committed": 1, "seconds": 0.01}
    step |= {"pattern": "causal", "holes": []}
    outpace = {"index": 0, "steps": [step], "tokens": 1, "forwards": 1}
    return {"choices": [{"index": 0, "delta": {"content": text}}], "outpace": outpace}


def fault(message: str, param: str | None = None) -> dict:
    return {"error": {"message": message, "type": "server_error", "param": param}}


HTML = {"content_type": "text/html", "body": "<h1>Bad gateway</h1>"}
EVENTS = {"content_type": "text/event-stream"}
RETRY = {"headers": {"Retry-After": "3"}}
FAULTS: list[tuple[dict | None, str]] = [
    ({"status": 429, "json": fault("the queue is full"), **RETRY}, "the queue is full.* 3 seconds"),
    ({"status": 503, "json": fault("draining")}, "draining"),
    ({"status": 502, **HTML}, "502.*Bad Gateway"),
    ({**EVENTS, "body": stream(chunk("Some"), fault("lost"), end=False)}, "lost"),
    ({**EVENTS, "body": stream(chunk("Some"), end=False)}, "connection ended"),
    ({**EVENTS, "body": "data: {\n\n"}, "JSON"),
    (None, "cannot be reached"),
]


@pytest.mark.parametrize(("reply", "shown"), FAULTS, ids=range(len(FAULTS)))
@pytest.mark.nightly
def test_faults_of_the_server_are_shown_above_the_answer(visit, reply, shown):
    page, path = visit(D2F_LINK), "**/v1/chat/completions"
    page.route(
        path, lambda route: route.fulfill(**reply) if reply else route.abort("connectionrefused")
    )
    run(page)
    expect(page.locator(".notice")).to_have_text(re.compile(shown))
    if "Some" in str(reply):
        expect(page.locator(".answer")).to_have_text("Some")
        expect(page.locator("#status")).to_have_text("Failed after 1 token.")
    page.unroute(path)
    run(page)
    expect(page.locator(".notice")).to_be_hidden()


@pytest.mark.nightly
def test_text_is_never_markup(visit):
    bad = "<img src=x onerror=\"document.title='bad'\"><script>document.title='bad'</script>"
    page = visit(D2F_LINK | {"prompt": bad, "a.model": bad, "a.method": bad})
    expect(page.locator(".notice")).to_contain_text(bad)
    canvas = {"choices": [], "outpace": {"index": 0, "canvas": [bad, None]}}
    fake(page, chunk(bad), canvas, fault(bad, bad), end=False)
    run(page)
    expect(page.locator(".answer")).to_contain_text(bad)
    expect(page.locator(".notice")).to_contain_text(bad)
    expect(page.locator("img, main script")).to_have_count(0)
    expect(page).to_have_title("outpace playground")


HOLES = {
    "raw": "fill",
    "prompt": "Tom has 3+4=<<3+4={{1:[0-9]}}>>{{..3:[0-9]{1,2}}}{{4}} are his.",
    "temperature": 0,
    "a.model": "tiny-dream",
}


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["apd", "d2f", "left_to_right"])
def test_holes_are_shown_filled(visit, method):
    page = visit(HOLES | {"a.method": method})
    expect(page.locator("#max_tokens")).to_be_hidden()
    expect(page.locator("#must")).to_be_hidden()
    run(page)
    prompt = HOLES["prompt"]
    reply = post(page, "completions", method, model="tiny-dream", prompt=prompt)
    expect(page.locator(".answer")).to_have_text(reply["choices"][0]["text"])
    texts = "(all) => all.map((each) => each.textContent).join('')"
    assert page.locator(".piece").evaluate_all(texts) == "".join(reply["outpace"]["holes"])
    given = "Tom has 3+4=<<3+4=>> are his."
    assert page.locator(".given").evaluate_all(texts) == given
    assert set(check_figures(page, reply)) <= set(range(reply["outpace"]["forwards"]))


@pytest.mark.nightly
def test_key_is_asked_for_and_kept_in_memory(browser):
    with serving("tiny-aux", "--api-key", "secret-key") as process:
        visit = Visitor(browser, process.url)
        page = visit({"mode": "one"}, ready=False)
        expect(page.locator("#key-value-error")).to_contain_text("API key")
        expect(page.locator("#key-value")).to_be_focused()
        for given in ("wrong", "secret-key"):
            page.locator("#key-value").fill(given)
            page.keyboard.press("Enter")
            expect(page.locator("#key")).to_be_visible(visible=given == "wrong")
        expect(page.locator("#status")).to_have_text("Ready: 1 model.")
        run(page)
        expect(page.locator("#status")).to_have_text(re.compile("^Finished: "))
        stored = page.evaluate("location.href + JSON.stringify([localStorage, document.cookie])")
        assert "secret-key" not in stored
        assert not visit.errors and len(visit.refused) == 2
        page.context.close()


MARKDOWN = """# Sorting & more

A *merge* of `a < b` and **two** lists, see [the page](https://example.org/x?a=1&b=2):

```python
def merge(a, b):
    return sorted(a + b) if "</script>" else ["<b>", "&lt;", "a rather long line that needs room"]
```

| n | square |
|--:|-------:|
| 2 | 4 |

- one
- two<br>lines
"""
HOSTILE = """<script>document.title='bad'</script> <img src=x onerror="document.title='bad'">

<iframe src="javascript:document.title='bad'"></iframe>
<svg onload="document.title='bad'"><a href="https://example.org" onclick="bad()">raw</a>

[one](javascript:document.title='bad') [two](JaVaScRiPt:document.title='bad')
[three](java&#10;script:bad) [four](data:text/html,<script>bad</script>) [five](//example.org)
[six](https://example.org "x\" onclick=\"document.title='bad'") ![seven](https://example.org/x.png)
<javascript:document.title='bad'>

```"><img src=x onerror="document.title='bad'">
</code></pre><script>document.title='bad'</script>
```
"""


def fake(page: Page, *events: object, end: bool = True) -> None:
    """Let the server answer with events."""
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(**EVENTS, body=stream(*events, end=end)),
    )


@pytest.mark.nightly
def test_rendered_answer_has_code_and_lists(visit):
    page = visit(D2F_LINK, permissions=["clipboard-read", "clipboard-write"], width=375)
    fake(page, chunk(MARKDOWN))
    run(page)
    assert page.locator(".answer").text_content() == MARKDOWN
    fenced = "```" + MARKDOWN.split("```")[1] + "```\n"
    texts = "all => all.map((each) => each.textContent).join('')"
    assert page.locator(".mono").evaluate_all(texts) == fenced
    face = "e => getComputedStyle(e).fontFamily"
    assert "monospace" in page.locator(".mono").first.evaluate(face)
    page.locator(".view").check()
    answer = page.locator(".answer")
    expect(answer.locator("h3")).to_have_text("Sorting & more")
    expect(answer.locator("p code")).to_have_text("a < b")
    expect(answer.locator("a")).to_have_attribute("href", "https://example.org/x?a=1&b=2")
    expect(answer.locator("a")).to_have_attribute("rel", "noopener noreferrer nofollow")
    expect(answer.locator("td.right")).to_have_text(["2", "4"])
    expect(answer.locator("li")).to_have_text(["one", "twolines"])
    code = MARKDOWN.split("```")[1].partition("\n")[2].rstrip("\n")
    assert answer.locator("pre").text_content() == code
    font = "e => getComputedStyle(e).fontFamily"
    assert "monospace" in answer.locator("pre code").evaluate(font)
    assert overflow(page) <= 0
    for name, text in (("Copy code", code), ("Copy", MARKDOWN)):
        page.get_by_role("button", name=name, exact=True).click()
        expect(page.locator(":focus")).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == text
    assert "view=rendered" in page.url
    page.locator(".view").uncheck()
    assert answer.text_content() == MARKDOWN
    assert answer.locator(".piece").evaluate_all(texts) == MARKDOWN


@pytest.mark.nightly
def test_rendered_answer_never_runs(visit):
    page = visit(D2F_LINK | {"view": "rendered"})
    fake(page, *map(chunk, HOSTILE))
    run(page)
    answer = page.locator(".answer")
    expect(answer.locator(":is(script, img, iframe, svg, style, form, input)")).to_have_count(0)
    links = answer.locator("a").evaluate_all("all => all.map((a) => a.href)")
    assert links == ["https://example.org/", "https://example.org/x.png"]
    names = "all => [...new Set(all.flatMap((each) => each.getAttributeNames()))].sort()"
    assert not [name for name in answer.locator("*").evaluate_all(names) if name[:2] == "on"]
    expect(answer).to_contain_text("<script>document.title='bad'</script>")
    fake(page, chunk("> " * 5000 + HOSTILE))
    run(page)
    expect(answer).to_have_text("> " * 5000 + HOSTILE)
    expect(page).to_have_title("outpace playground")


@pytest.mark.nightly
def test_turns_and_calls_reach_a_server(browser):
    with serving(tool_model("tiny-aux", "tool_call")) as process:
        visit = Visitor(browser, process.url)
        page = visit({"tools": json.dumps(TOOLS), "tool_choice": "required", "max_tokens": 120})
        run(page)
        name = page.locator(".call b").inner_text()
        assert name in {tool["function"]["name"] for tool in TOOLS}
        page.locator(".reply").click()
        page.keyboard.insert_text("12 degrees")
        run(page)
        expect(page.locator("#status")).to_have_text(re.compile("^Finished: "))
        page.locator(".reply").click()
        expect(page.locator("#conversation li")).to_have_count(2)
        page.locator("[name=raw][value='1']").check()
        expect(page.locator("#conversation")).to_be_hidden()
        assert visit.errors == visit.refused == []
        page.context.close()
