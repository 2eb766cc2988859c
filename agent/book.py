"""The prompt book: templates filled from a situation, and strict readers of what models answer.

Pure functions over strings; the calls are `agent.models.calls`' work. A prompt is kept within
TOTAL_TOKENS and its source by shortening the history, the lessons and what the latest candidates
changed, never by cutting a source.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import prompts
from agent import diffs
from agent.feedback import cut, findings, profile, table, word
from agent.models.base import BadFormat, Prompt, Role, Schema
from agent.models.pricing import CHARS_PER_TOKEN
from agent.types import Direction, Proposal, Situation, Task, Tried
from sandbox.artifact import Buffer
from sandbox.verdict import Verdict

TOTAL_TOKENS = 60_000
"""Of a prompt but for the one source it shows, which has at most MAX_SOURCE_CHARS (82,000 tokens)."""
MAX_LESSONS = 5
MAX_SOURCE_CHARS = 256 << 10
_FENCE = re.compile(r"^```[ \t]*(\w*)[^\n]*\n(.*?)^```[ \t]*$", re.M | re.S)
_GAIN = re.compile(r"predicted gain:?\**\s*([0-9]*\.?[0-9]+)\s*(%|x)?", re.I)

PLAN_SCHEMA: Schema = {
    "type": "object",
    "additionalProperties": False,
    "required": ["directions"],
    "properties": {
        "directions": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["title", "mechanism", "risk", "predicted_gain", "parent"],
                "properties": {
                    "title": {"type": "string"},
                    "mechanism": {"type": "string"},
                    "risk": {"type": "string"},
                    "predicted_gain": {"type": "number"},
                    "parent": {"type": "integer"},
                },
            },
        }
    },
}
LESSON_SCHEMA: Schema = {
    "type": "object",
    "additionalProperties": False,
    "required": ["lessons"],
    "properties": {"lessons": {"type": "array", "items": {"type": "string"}}},
}


class Book:
    """`agent.models.base.PromptBook` over the templates in `prompts/`."""

    def plan(self, s: Situation) -> Prompt:
        def body(fit: Situation) -> str:
            return prompts.render(
                "plan.md.j2", s=fit, standing=word(s.incumbent), profile=profile(s.incumbent),
                history=table(fit.history),
            )  # fmt: skip

        return self._fitted("plan", s, body, 8000, len(s.incumbent_source))

    def propose(self, s: Situation, d: Direction, parent_source: str) -> Prompt:
        parent = next((x for x in s.history if x.seq == d.parent), s.incumbent)

        def body(fit: Situation) -> str:
            return prompts.render(
                "propose.md.j2", s=fit, d=d, source=parent_source, parent_word=word(parent),
                profile=profile(parent),
            )  # fmt: skip

        return self._fitted("propose", replace(s, history=()), body, beside=len(parent_source))

    def repair(self, s: Situation, source: str, failed: Verdict) -> Prompt:
        assert failed.failure is not None
        where = failed.failure.where
        line = where.get("line") if isinstance(where.get("line"), int) else None
        lines = source.splitlines()
        body = prompts.render(
            "repair.md.j2", source=source, verdict=failed, line=line, hint=cut(where.get("hint")),
            message=cut(failed.failure.message), found=cut(findings(failed)),
            line_text=cut(lines[line - 1].strip()) if line and line <= len(lines) else "",
        )  # fmt: skip
        return Prompt("repair", self.stable(s.task), body)

    def reflect(self, s: Situation) -> Prompt:
        latest = tuple(x for x in s.history if x.round == s.round)

        def body(fit: Situation) -> str:
            return prompts.render(
                "reflect.md.j2", s=fit, history=table(fit.history), most=MAX_LESSONS
            )

        return self._fitted("reflect", replace(s, history=latest), body, 4000)

    def stable(self, task: Task) -> str:
        """The part that is the same for a whole run: primer, playbook, task."""
        return _stable(task)

    def schema(self, role: Role) -> Schema | None:
        return {"plan": PLAN_SCHEMA, "reflect": LESSON_SCHEMA}.get(role)

    def read_plan(self, text: str, k: int) -> tuple[Direction, ...]:
        items = _list(_object(text), "directions")
        out: list[Direction] = []
        for item in items:
            if not isinstance(item, dict) or not isinstance(item.get("title"), str):
                raise BadFormat('each direction needs a "title"')
            parent = item.get("parent", 0)
            if isinstance(parent, bool) or not isinstance(parent, int) or parent < 0:
                raise BadFormat('"parent" is the number of a candidate')
            found = Direction(
                title=item["title"][:200],
                detail=_detail(item),
                parent=parent,
                predicted_gain=_gain(item.get("predicted_gain")),
            )
            if not any(_same(found, x) for x in out):
                out.append(found)
        if not out:
            raise BadFormat("there is no direction in the answer")
        return tuple(out[:k])

    def read_proposal(self, text: str, parent_source: str) -> Proposal:
        blocks = [(kind.lower(), body) for kind, body in _FENCE.findall(text)]
        wanted = [b for b in blocks if b[0] in ("python", "py", "diff", "patch")]
        if len(wanted) != 1:
            raise BadFormat(
                f"the answer has {len(wanted)} ```python or ```diff blocks; send exactly one: the whole file or a diff"
            )
        kind, body = wanted[0]
        if kind in ("diff", "patch"):
            try:
                source = diffs.apply(parent_source, body)
            except diffs.BadDiff as error:
                raise BadFormat(
                    f"the diff does not apply: {error}. Send the whole file instead."
                ) from error
        else:
            source = body
        if len(source) > MAX_SOURCE_CHARS:
            raise BadFormat(f"the file has {len(source)} characters, more than {MAX_SOURCE_CHARS}")
        if not source.strip():
            raise BadFormat("the block is empty")
        outside = _FENCE.sub("", text)
        return Proposal(
            source=source, note=outside.strip()[:2000], predicted_gain=stated_gain(outside)
        )

    def read_lessons(self, text: str) -> tuple[str, ...]:
        lessons = _list(_object(text), "lessons")
        if not all(isinstance(x, str) for x in lessons):
            raise BadFormat('"lessons" is a list of sentences')
        return tuple(x.strip()[:600] for x in lessons[:MAX_LESSONS] if x.strip())

    def _fitted(
        self,
        role: Role,
        s: Situation,
        body: Callable[[Situation], str],
        answer: int = 32_000,
        beside: int = 0,
    ) -> Prompt:
        """Within TOTAL_TOKENS and the `beside` characters of its source: the older half of the history goes first, then
        that of the lessons, then of the changes.
        """
        stable = self.stable(s.task)
        while True:
            text = body(s)
            fits = (len(stable) + len(text) - beside) / CHARS_PER_TOKEN <= TOTAL_TOKENS
            if fits or not (s.history or s.lessons or s.changes):
                return Prompt(role, stable, text, max_output_tokens=answer)
            if len(s.history) > len(s.lessons):
                s = replace(s, history=_shorter(s.history))
            elif s.lessons:
                s = replace(s, lessons=s.lessons[(len(s.lessons) + 1) // 2 :])
            else:
                s = replace(s, changes=s.changes[: len(s.changes) // 2])


def _detail(item: Mapping[str, Any]) -> str:
    """Mechanism and risk in one text; answers recorded before there was a risk have `detail`."""
    mechanism = str(item.get("mechanism") or item.get("detail") or "")[:4000]
    risk = str(item.get("risk") or "")[:1000]
    return f"{mechanism}\nRisk: {risk}" if risk else mechanism


def _same(a: Direction, b: Direction) -> bool:
    """The same thing to try, in the same words but for case and spaces."""
    one, other = (" ".join(f"{x.title} {x.detail}".lower().split()) for x in (a, b))
    return one == other and a.parent == b.parent


def _shorter(rows: tuple[Tried, ...]) -> tuple[Tried, ...]:
    """Drop the older half, but keep what was promoted."""
    middle = (len(rows) + 1) // 2
    kept = tuple(x for x in rows[:middle] if x.promoted) + rows[middle:]
    return kept if len(kept) < len(rows) else rows[1:]


def _stable(task: Task) -> str:
    lines = [describe(b) for b in task.buffers]
    filled = prompts.render("task.md.j2", task=task, buffers=folded(lines))
    return prompts.render(
        "system.md.j2",
        primer=prompts.text("primer.md"),
        playbook=prompts.text("playbook.md"),
        task=filled,
    )


def describe(b: Buffer) -> str:
    """`t.weights.layers[3].w_in: bf16 [6288, 7168]`."""
    path = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", b.name)
    return f"t.{path}: {b.dtype} {list(b.shape)}"


def folded(lines: list[str]) -> list[str]:
    """One line for buffers that differ in their list indices only, in order of first appearance."""
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(re.sub(r"\[\d+\](?=[.:])", "[*]", line), []).append(line)
    out = []
    for key, same in groups.items():
        indices = [re.findall(r"\[(\d+)\](?=[.:])", x) for x in same]
        if len(same) == 1:
            out.append(same[0])
        else:
            names = ", ".join("/".join(i) for i in indices)
            out.append(f"{key} for {names}")
    return out


def stated_gain(text: str) -> float | None:
    """The number after `Predicted gain:`, as a ratio; `5 %` means 1.05."""
    found = _GAIN.search(text)
    if not found:
        return None
    value = float(found[1])
    return _gain(1 + value / 100 if found[2] == "%" else value)


def _gain(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and 0 < value < 1000 else None


def _object(text: str) -> Mapping[str, Any]:
    """The one JSON object of an answer, bare or in a fence. Raises BadFormat."""
    fenced = [body for kind, body in _FENCE.findall(text) if kind.lower() in ("json", "")]
    raw = fenced[0] if len(fenced) == 1 else text
    try:
        value = json.loads(raw.strip())
    except (ValueError, RecursionError) as error:
        raise BadFormat(
            f"the answer is no JSON ({str(error)[:100]}); send the JSON object alone"
        ) from error
    if not isinstance(value, dict):
        raise BadFormat("the answer is no JSON object")
    return value


def _list(value: Mapping[str, Any], key: str) -> list[Any]:
    found = value.get(key)
    if not isinstance(found, list):
        raise BadFormat(f'the object has no list "{key}"')
    return found
