"""The playground page, with a security policy that allows only its inline code."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import Response

LINKED_FILE = re.compile(
    r'<link rel="stylesheet" href="(?P<style>[\w.]+)">|<script src="(?P<script>[\w.]+)"></script>'
)
"""Reference to a file beside the page."""


class PlaygroundPage:
    """The page with its styles and scripts inline, and its headers."""

    def __init__(self) -> None:
        self.folder = files("outpace.server") / "playground"
        self.hashes: dict[str, list[str]] = {"style": [], "script": []}
        self.text = LINKED_FILE.sub(self.embed_file, self.read_file("page.html"))
        self.headers = {
            "Content-Security-Policy": (
                "default-src 'none'; connect-src 'self'; img-src data:; "
                f"script-src {' '.join(self.hashes['script'])}; "
                f"style-src {' '.join(self.hashes['style'])}; "
                "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            ),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }

    def read_file(self, name: str) -> str:
        """Return the text of a file of the page."""
        return (self.folder / name).read_text(encoding="utf-8")

    def embed_file(self, reference: re.Match[str]) -> str:
        """Return the element with the content of a file, and allow its hash."""
        tag = reference.lastgroup or ""
        content = self.read_file(reference[tag])
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        self.hashes[tag].append(f"'sha256-{digest}'")
        return f"<{tag}>{content}</{tag}>"

    def to_response(self) -> Response:
        """Return the page as a response."""
        return Response(self.text, headers=self.headers, media_type="text/html")
