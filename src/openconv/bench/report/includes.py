"""Pieces of the repository's files in pages, by marks that stand alone on a line:

    <!-- include: PATH from "A" to "B" -->    from the first line that contains A to the next one that contains B,
                                              which is left out; without ``to``, to the end of the file
    <!-- include: PATH def NAME -->           a function or class of a Python file, a method as ``Class.method``

The page's text has the mark alone; the site has the lines (docs/hooks.py), and a test that they are there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from textwrap import dedent

__all__ = ["Excerpt", "expand", "fenced", "find", "language", "marks", "unfenced"]

_BEGIN = re.compile(r"<!--\s*include\b")
_MARK = re.compile(r"<!--\s*include:\s*(?P<asked>.*?)\s*-->")
_ASKED = re.compile(r'(?P<path>\S+) (?:from "(?P<start>.+?)"(?: to "(?P<stop>.+?)")?|def (?P<name>[\w.]+))')
_FENCE = re.compile(r" *(?:>|[-*+] |\d+\. )* *(?P<fence>`{3,}|~{3,})(?P<rest>.*)")
_FORMS = '<!-- include: PATH from "A" to "B" --> or <!-- include: PATH def NAME -->'
_LANGUAGES = {
    ".cu": "cuda", ".cuh": "cuda", ".h": "cpp", ".css": "css", ".html": "html", ".js": "js", ".json": "json",
    ".jsonl": "json", ".md": "markdown", ".py": "python", ".sh": "bash", ".toml": "toml", ".yaml": "yaml",
    ".yml": "yaml",
}  # fmt: skip


@dataclass(frozen=True)
class Excerpt:
    """Lines ``first`` to ``last`` of a file, counted from 1, as ``text`` without the indentation they share."""

    path: str
    first: int
    last: int
    text: str


def language(path: str) -> str:
    """The name that Pygments has for the language of a file."""
    place = PurePosixPath(path)
    return "makefile" if place.name == "Makefile" else _LANGUAGES.get(place.suffix, "text")


def fenced(code: str, head: str) -> str:
    """A fenced code block; the fence is longer than any that the code has."""
    longest = max((len(run) for run in re.findall(r"`{3,}", code)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{head}\n{code.rstrip()}\n{fence}"


def unfenced(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a Markdown text that are no part of a fenced code block, with their numbers from 1."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        found = _FENCE.fullmatch(line)
        if fence:
            if found and found["fence"].startswith(fence) and not found["rest"].strip():
                fence = ""
        elif found and not (found["fence"][0] == "`" and "`" in found["rest"]):
            fence = found["fence"]
        else:
            yield number, line


def marks(text: str) -> Iterator[tuple[int, str]]:
    """The marks of a page with the numbers of their lines; ValueError if one shares its line with something else."""
    for number, line in unfenced(text):
        bare = re.sub(r"`[^`]*`", "", line)
        if _BEGIN.search(bare):
            if not _MARK.fullmatch(bare.strip()):
                raise ValueError(f"line {number}: '{line.strip()}' is no mark alone on its line; wanted {_FORMS}")
            yield number, line.strip()


def find(root: Path, mark: str) -> Excerpt:
    """The lines that a mark asks for, in a file below ``root``; ValueError says what was not found."""
    found = _MARK.fullmatch(mark.strip())
    asked = _ASKED.fullmatch(found["asked"]) if found else None
    if not asked:
        raise ValueError(f"'{mark.strip()}' is no mark; wanted {_FORMS}")
    path = asked["path"]
    if not (root / path).resolve().is_relative_to(root.resolve()):
        raise ValueError(f"'{path}' lies outside of the repository; wanted a path from its root")
    try:
        text = (root / path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"'{path}' cannot be read ({type(error).__name__}); wanted a path from the root") from None
    lines = text.splitlines()
    if asked["name"]:
        first, last = _definition(path, text, asked["name"])
    else:
        first, last = _between(path, lines, asked["start"], asked["stop"])
    while not lines[last - 1].strip():
        last -= 1
    return Excerpt(path, first, last, dedent("\n".join(lines[first - 1 : last]) + "\n"))


def _between(path: str, lines: list[str], start: str, stop: str | None) -> tuple[int, int]:
    first = next((n for n, line in enumerate(lines, 1) if start in line), None)
    if first is None:
        raise ValueError(f"no line of '{path}' contains '{start}'; the file may have changed: choose another anchor")
    if stop is None:
        return first, len(lines)
    last = next((n for n in range(first, len(lines)) if stop in lines[n]), None)
    if last is None:
        raise ValueError(f"no line of '{path}' behind line {first} ('{start}') contains '{stop}'; choose another one")
    return first, last


def _definition(path: str, text: str, name: str) -> tuple[int, int]:
    """The lines of a function or class, with its decorators."""
    if not path.endswith(".py"):
        raise ValueError(f"'def {name}' wants a Python file and '{path}' is none; use from \"A\" to \"B\"")
    found: list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]] = []

    def walk(node: ast.AST, inside: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.append((f"{inside}{child.name}", child))
                walk(child, f"{inside}{child.name}.")
            else:
                walk(child, inside)

    try:
        walk(ast.parse(text), "")
    except SyntaxError as error:
        raise ValueError(f"'{path}' is no Python ({error})") from None
    exact = [entry for entry in found if entry[0] == name]
    fits = exact or [entry for entry in found if entry[0].endswith(f".{name}")]
    if not fits:
        raise ValueError(f"'{path}' defines no '{name}'; it may have been renamed")
    if len(fits) > 1:
        places = ", ".join(f"{full} in line {node.lineno}" for full, node in fits)
        raise ValueError(f"'{path}' defines '{name}' more than once ({places}); name its class, or use from and to")
    node = fits[0][1]
    return min([node.lineno, *(one.lineno for one in node.decorator_list)]), node.end_lineno or node.lineno


def expand(root: Path, text: str) -> str:
    """A page with the lines in place of its marks: code blocks under the file's name, with its line numbers."""
    lines = text.splitlines()
    for number, mark in marks(text):
        try:
            found = find(root, mark)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        title = f"{found.path}, line{'s' * (found.last > found.first)} {found.first}"
        title += f" to {found.last}" * (found.last > found.first)
        block = fenced(found.text, f'{language(found.path)} title="{title}" linenums="{found.first}"')
        indent = lines[number - 1][: len(lines[number - 1]) - len(lines[number - 1].lstrip())]
        lines[number - 1] = "\n".join(indent + line if line else line for line in ["", *block.split("\n"), ""])
    return "\n".join(lines) + "\n"
