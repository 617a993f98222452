"""The docstrings' few marks of reStructuredText as Markdown, for the pages of the reference (mkdocs.yml names this).

``:func:`name``` becomes a link where the reference has the name, ``::`` before an indented block a plain colon, and
lines that each begin with a parameter's name a list. Stars and brackets of formulas are no markup.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|data|attr|mod):`(~?)([\w.]+)`")
_CODE = re.compile(r"(``.+?``|`[^`]+`|<autoref.*?</autoref>)", re.DOTALL)
_PARAMETER = re.compile(r"``(\w+)``")


class Docstrings(griffe.Extension):
    """Rewrites every docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each module, class, function and attribute, once the whole package is known."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value, obj)


def markdown(text: str, obj: griffe.Object) -> str:
    """A docstring as Markdown."""
    paragraphs: list[str] = []
    in_code = False
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.splitlines()
        in_code = in_code and paragraph.startswith(" ")
        if in_code:
            paragraphs.append(paragraph)
            continue
        if paragraph.startswith(">>> "):
            paragraphs.append(f"```pycon\n{paragraph}\n```")
            continue
        if lines and lines[-1].endswith("::"):
            lines[-1], in_code = lines[-1][:-1], True
        paragraphs.append("\n".join(_items([_prose(line, obj) for line in lines], _listed(obj))))
    return "\n\n".join(paragraphs)


def _items(lines: list[str], names: set[str]) -> list[str]:
    """The lines of a paragraph, as a list if it begins with a name and has more such lines."""
    begins = [bool(found and found[1] in names) for found in map(_PARAMETER.match, lines)]
    if sum(begins) < 2 or not begins[0]:
        return lines
    return [("- " if begin else "  ") + line for begin, line in zip(begins, lines)]


def _listed(obj: griffe.Object) -> set[str]:
    """The names that may begin an item: parameters of a function, members of a class."""
    return {p.name for p in obj.parameters} if isinstance(obj, griffe.Function) else set(obj.members)


def _prose(line: str, obj: griffe.Object) -> str:
    """A line outside of code blocks: roles as links, stars, brackets and angles of formulas as themselves."""
    line = _ROLE.sub(lambda found: _link(found, obj), line)
    parts = _CODE.split(line)
    return "".join(part if n % 2 else re.sub(r"(?<!^)([*\[\]<])", r"\\\1", part) for n, part in enumerate(parts))


def _link(found: re.Match[str], obj: griffe.Object) -> str:
    name = found[2]
    shown = name.rsplit(".", 1)[-1] if found[1] else name.removeprefix("openconv.")
    try:
        target = name if name.startswith("openconv.") else obj.resolve(name)
    except griffe.NameResolutionError:
        target = name
    return f'<autoref identifier="{escape(target)}" optional><code>{escape(shown)}</code></autoref>'
