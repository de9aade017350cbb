"""The playground page: one document, and a policy that allows its code and no other."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from importlib.resources import files

from outpace.server.app import PlaygroundPage

OWN_SCRIPTS = [
    path.read_text()
    for path in (files("outpace.server") / "playground").iterdir()
    if path.name.endswith(".js") and path.name != "marked.umd.js"
]


class Elements(HTMLParser):
    """Collects the content of scripts and styles, and what is loaded from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.contents: dict[str, list[str]] = {"script": [], "style": []}
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an address, and begin a script or style."""
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag in self.contents:
            self.contents[tag].append("")

    def handle_data(self, data: str) -> None:
        """Extend the open script or style."""
        if self.cdata_elem in self.contents:
            self.contents[self.cdata_elem][-1] += data


def test_policy_allows_the_code_of_the_page_only() -> None:
    page = PlaygroundPage()
    elements = Elements(page.text)
    assert all(address.startswith("data:") for address in elements.addresses)
    policy = page.headers["Content-Security-Policy"]
    for tag, contents in elements.contents.items():
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in contents]
        (sources,) = re.findall(rf"{tag}-src ([^;]*)", policy)
        assert sources.split() == [f"'sha256-{digest.decode()}'" for digest in digests]
    assert len(elements.contents["script"]) == len(OWN_SCRIPTS) + 1
    assert not re.search("unsafe|http|[*]", policy)
