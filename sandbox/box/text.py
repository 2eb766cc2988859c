"""Text from a box, made safe to show, to store and to put into a prompt. What it says is still a claim."""

from __future__ import annotations


def clean_text(data: bytes, most: int) -> str:
    """Text for people, stores and prompts: UTF-8 with replacements, printable characters, newlines and tabs."""
    text = data[-4 * most :].decode("utf-8", "replace")
    kept = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    return kept[-most:]
