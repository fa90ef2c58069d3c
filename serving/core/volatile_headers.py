"""Opt-in: takes what changes with every request out of the head of a prompt, so that prefixes can be reused at all.

Claude Code begins its system prompt with a line `x-anthropic-billing-header: ...; cch=<5 hex>;` whose last value
differs in every request. It stands in the first block, so no block behind it has a hash that was seen before. The line
says nothing to the model, yet it is part of what the client sent: whoever turns this on accepts that the model sees
another line (freeze) or none (strip).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class VolatileHeader:
    """A line that begins with ``prefix``; ``value`` finds what changes in it, in its first group."""

    prefix: str
    value: re.Pattern[str]

    def __post_init__(self) -> None:
        if not self.prefix or "\n" in self.prefix:
            raise ValueError(f"prefix={self.prefix!r} must be the beginning of one line")
        if self.value.groups != 1:
            raise ValueError(f"value={self.value.pattern!r} has {self.value.groups} groups, not one")


BILLING = VolatileHeader("x-anthropic-billing-header:", re.compile(r"\bcch=([0-9a-fA-F]+)"))


class HeaderCanonicaliser:
    """Freezes or strips volatile header lines. Local, without state but for ``changed``.

    It looks at the lines with which a prompt begins, and stops at the first that is no such header: the same words
    further down are somebody's text and stay.

    Args:
        headers: what to look for.
        mode: "freeze" puts as many zeros for the value, so that token counts hardly move; "strip" removes the line.
    """

    def __init__(
        self, headers: Sequence[VolatileHeader] = (BILLING,), *, mode: Literal["freeze", "strip"] = "freeze"
    ) -> None:
        if mode not in ("freeze", "strip"):
            raise ValueError(f"mode={mode!r} is neither 'freeze' nor 'strip'")
        self.headers, self.mode = tuple(headers), mode
        self.changed = 0  # prompts

    def text(self, prompt: str) -> str:
        """A prompt in text form. Idempotent."""
        result = self._head(prompt)
        self.changed += result != prompt
        return result

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Messages of a chat request: the first one's head, if it is of the system. Others are returned as they are.

        ``content`` may be a string or a list of parts, of which the first is looked at.
        """
        result = list(messages)
        if not result or result[0].get("role") not in ("system", "developer"):
            return result
        content = result[0].get("content")
        if isinstance(content, str):
            result[0] = {**result[0], "content": self._head(content)}
        elif isinstance(content, list) and content and isinstance(content[0], Mapping):
            if isinstance(text := content[0].get("text"), str):
                result[0] = {**result[0], "content": [{**content[0], "text": self._head(text)}, *content[1:]]}
        self.changed += result[0] != messages[0]
        return result

    def _head(self, prompt: str) -> str:
        lines = prompt.splitlines(keepends=True)
        for i, line in enumerate(lines):
            header = next((header for header in self.headers if line.startswith(header.prefix)), None)
            if header is None:
                break
            lines[i] = "" if self.mode == "strip" else header.value.sub(_zeros, line)
        return "".join(lines)


def _zeros(found: re.Match[str]) -> str:
    start, stop = found.start(1) - found.start(), found.end(1) - found.start()
    whole = found.group()
    return whole[:start] + "0" * (stop - start) + whole[stop:]
