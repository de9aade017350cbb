"""The playground page, with a security policy that allows only its inline code."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import Response


class PlaygroundPage:
    """The HTML file with its inline scripts and styles, and its headers."""

    def __init__(self) -> None:
        self.text = (files("outpace.server") / "playground.html").read_text(encoding="utf-8")
        self.headers = {
            "Content-Security-Policy": (
                f"default-src 'none'; connect-src 'self'; img-src data:; "
                f"script-src {self.hash_sources('script')}; style-src "
                f"{self.hash_sources('style')}; "
                "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            ),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }

    def hash_sources(self, tag: str) -> str:
        """Return the policy's hash sources for all inline elements of a tag."""
        contents = re.findall(rf"<{tag}(?:\s[^>]*)?>(.*?)</{tag}>", self.text, re.DOTALL)
        digests = (hashlib.sha256(text.encode()).digest() for text in contents)
        sources = (f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
        return " ".join(sources) or "'none'"

    def to_response(self) -> Response:
        """Return the page as a response."""
        return Response(self.text, headers=self.headers, media_type="text/html")
