"""Pages of Markdown that keep their word: each Python block is run, the text behind one is what it prints, and commands
of openconv are parsed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from textwrap import dedent
from traceback import extract_tb, format_exception_only
from types import CodeType
from typing import Any, NamedTuple

import pytest
import torch
from typer.main import get_command

from openconv.bench.suites import suite_names
from openconv.cli import app
from openconv.problem import Problem

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^(?P<indent> *)```(\w+) *\n(.*?)^(?P=indent)``` *$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language, the line of the page before its first, its text, and what it is said to print."""

    language: str
    line: int
    text: str
    shown: str | None


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page. One of ``text`` with nothing but blanks before it is what a Python block prints."""
    text = page.read_text()
    found = list(_BLOCK.finditer(text))
    for match, after in zip_longest(found, found[1:]):
        shown = after is not None and after[2] == "text" and not text[match.end() : after.start()].strip()
        line, code = text.count("\n", 0, match.start(3)), dedent(match[3])
        yield Block(match[2], line, code, dedent(after[3]) if after and shown else None)


def facts(text: str) -> list[str]:
    """Lines without what predictions decide, times, ratios of them and knobs, without the policy that tests run under,
    and without the widths of columns."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("knobs ", "limits: "))]
    whole = re.sub(r"─+", "─", "\n".join(lines))
    whole = re.sub(r"\b[\d.]+ (s|ms|us|ns)\b", "TIME", whole)
    whole = re.sub(r"\b[\d.]+x\)", "RATIO)", whole)
    return [" ".join(line.split()) for line in whole.splitlines() if line.strip()]


def run_page(path: Path, capsys: pytest.CaptureFixture[str], names: dict[str, Any]) -> int:
    """Run every Python block in the namespace ``names``, and compare what it prints with the text block behind it.
    Without a GPU, ``device="cuda"`` in a block is the CPU; with one, what such a block prints is not compared. With
    pytest's option --rewrite the page gets what was printed instead. The number of blocks that ran."""
    gpu, where = torch.cuda.is_available(), path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    torch.manual_seed(0)
    capsys.readouterr()
    count = 0
    for block in blocks(path):
        if block.language != "python":
            continue
        code = block.text if gpu else block.text.replace('device="cuda"', 'device="cpu"')
        if failed := _failure(compile("\n" * block.line + code, str(path), "exec"), names):
            pytest.fail(f"{where}: {failed}", pytrace=False)
        printed = capsys.readouterr().out
        if block.shown is not None and not (gpu and '"cuda"' in code) and facts(printed) != facts(block.shown):
            assert capsys.request.config.getoption("--rewrite"), f"{where}:{block.line} prints\n{printed}"
            path.write_text(rewritten(path.read_text(), block, printed))
        count += 1
    return count


def _failure(code: CodeType, names: dict[str, Any]) -> str:
    """What ``code`` of a page raised, and at which of its lines; nothing if it ran. A page is no Python file: pytest
    would show all of it, prose and tables, and lose the error in it."""
    try:
        exec(code, names)
    except Exception as error:
        lines = [f"line {at.lineno}" for at in extract_tb(error.__traceback__) if at.filename == code.co_filename]
        return f"{', '.join(lines)}: {''.join(format_exception_only(error)).strip()}"
    return ""


def rewritten(page: str, block: Block, printed: str) -> str:
    """The page with what a Python block printed in its text block; neither may be indented."""
    assert block.shown is not None
    at = page.index(f"```text\n{block.shown}```", page.index(block.text)) + len("```text\n")
    lines = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
    return page[:at] + lines + page[at + len(block.shown) :]


def command_lines(page: Path) -> Iterator[tuple[int, list[str]]]:
    """The line and the words behind ``openconv`` of each command of a page: in its ``sh`` blocks, where variables and
    comments may stand around it, and in code within a sentence, unless that is the name of a command alone."""
    for block in blocks(page):
        if block.language == "sh":
            text, line = block.text, block.line
            while (end := text.find("\n")) >= 0:
                while text[:end].endswith("\\"):
                    end = text.index("\n", end + 1)
                yield from ((line + 1, words) for words in _commands(text[:end].replace("\\\n", " ")))
                line, text = line + text[: end + 1].count("\n"), text[end + 1 :]
    plain = _BLOCK.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())
    for span in re.finditer(r"(?<!`)`(openconv [a-z][^`|]*?)`(?!`)", plain):
        if "..." not in span[1]:
            line = plain.count("\n", 0, span.start()) + 1
            yield from ((line, words) for words in _commands(span[1]) if _command(words)[2])


def _commands(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word.strip("|&;<>"):
            words.append(word)
            continue
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words and words[0] == "openconv":
            yield words[1:]
        words = []


def _command(words: list[str]) -> tuple[list[str], Any, list[str]]:
    """The names of the command that words lead to, as far as they do, the command, and the words behind."""
    command: Any = get_command(app)
    path: list[str] = []
    while words and words[0] in getattr(command, "commands", {}):
        path, command, words = [*path, words[0]], command.commands[words[0]], words[1:]
    return path, command, words


def parse_command(words: list[str]) -> list[str]:
    """Parse a command line of openconv as it would be run, without running it, and look its problems and suites up; the
    names of the command. An error says what is wrong."""
    path, command, words = _command(words)
    if hasattr(command, "commands"):
        raise ValueError(f"{' '.join(['openconv', *path])} has no command {words[:1]}; wanted one of "
                         f"{', '.join(command.commands)}")  # fmt: skip
    try:
        context = command.make_context(" ".join(path), list(words))
    except Exception as error:
        if hasattr(error, "format_message"):
            raise ValueError(f"openconv {' '.join(path)}: {error.format_message()}") from None
        raise
    given = context.params
    if path == ["explain"]:
        Problem.parse(" ".join(given["problem"]))
    for what in (given.get("what") or ()) if path in (["bench"], ["tune"]) else ():
        if " " in what:
            Problem.parse(what)
        elif ":" not in what and what not in suite_names():
            raise ValueError(f"openconv {path[0]}: there is no suite {what!r}")
    return path
