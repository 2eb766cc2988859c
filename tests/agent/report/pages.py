"""Reading a page as a browser would: what elements and attributes came out of it, and whether it is well formed."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "col", "hr", "img", "input"}


@dataclass
class Found(HTMLParser):
    """Elements in order with their attributes; `text` without markup; `open` must end empty."""

    elements: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    text: str = ""
    broken: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.broken.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def read(html: str) -> Found:
    found = Found()
    found.feed(html)
    found.close()
    return found


def harmless(html: str) -> Found:
    """Asserts that nothing in the page runs, loads or leaves it."""
    found = read(html)
    assert not found.broken and not found.open, (found.broken, found.open)
    ids = [a["id"] for _, a in found.elements if "id" in a]
    assert len(ids) == len(set(ids)), [x for x in ids if ids.count(x) > 1][:5]
    for tag, attrs in found.elements:
        assert tag not in {"script", "iframe", "object", "embed", "img", "base", "style:"}, tag
        assert not [k for k in attrs if k.startswith("on") or k in ("style", "srcdoc")], attrs
        for key in ("src", "href", "xlink:href", "action", "formaction"):
            assert attrs.get(key, "#").startswith(("#", "/")), attrs
            assert not attrs.get(key, "").startswith("//"), attrs
    return found
