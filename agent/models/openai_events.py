"""What the events of an OpenAI stream add up to: Responses and chat completions, as they were
written to the wire log.

Pure functions over dictionaries, so that a live stream and the log of a killed one are read by the
same code. Decides nothing about retries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent.models.base import Usage
from agent.models.wire import Event


@dataclass
class Answer:
    """`end` is the provider's word for how it ended, '' while it has not; `failed`: code and
    message; `kept`: the provider holds it under `id`.
    """

    text: str = ""
    usage: Usage = field(default_factory=Usage)
    end: str = ""
    id: str = ""
    kept: bool = False
    refused: bool = False
    failed: tuple[str, str] | None = None


def read(events: Sequence[Event]) -> Answer:
    answer = Answer()
    pieces: list[str] = []
    for event in events:
        kind = str(event.get("type", ""))
        if event.get("object") == "chat.completion.chunk":
            _chunk(answer, pieces, event)
        elif kind in ("response.output_text.delta", "response.refusal.delta"):
            pieces.append(event["delta"])
            answer.refused |= kind == "response.refusal.delta"
        elif kind == "error":
            answer.failed = (str(event.get("code") or ""), str(event.get("message") or "failed"))
        elif kind.startswith("response.") and isinstance(event.get("response"), Mapping):
            _response(answer, kind, event["response"])
    answer.text = answer.text or "".join(pieces)
    if answer.refused and answer.end:
        answer.end = "refusal"
    return answer


def _response(answer: Answer, kind: str, response: Mapping[str, Any]) -> None:
    answer.id = str(response.get("id") or answer.id)
    answer.kept |= bool(response.get("background") and response.get("store") is not False)
    if response.get("usage"):
        answer.usage = _usage(response["usage"])
    if kind in ("response.completed", "response.incomplete"):
        details = response.get("incomplete_details") or {}
        answer.end = details.get("reason") or "completed"
        parts = [p for item in response.get("output") or () for p in item.get("content") or ()]
        answer.text = "".join(p.get("text") or p.get("refusal") or "" for p in parts)
        answer.refused |= any(p.get("type") == "refusal" for p in parts)
    elif kind in ("response.failed", "response.cancelled"):
        error = response.get("error") or {}
        word = kind.partition(".")[2]
        answer.failed = (str(error.get("code") or ""), str(error.get("message") or word))


def _chunk(answer: Answer, pieces: list[str], chunk: Event) -> None:
    answer.id = str(chunk.get("id") or answer.id)
    used = chunk.get("usage")
    if used:
        details = used.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens") or 0
        answer.usage = Usage(used["prompt_tokens"], used["completion_tokens"], cached)
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        pieces.append(delta.get("content") or delta.get("refusal") or "")
        answer.refused |= bool(delta.get("refusal"))
        answer.end = choice.get("finish_reason") or answer.end


def _usage(raw: Mapping[str, Any]) -> Usage:
    """The API's input count already includes cached tokens, as ours does."""
    details = raw.get("input_tokens_details") or {}
    return Usage(
        raw["input_tokens"], raw["output_tokens"], details.get("cached_tokens") or 0,
        details.get("cache_write_tokens") or 0,
    )  # fmt: skip
