"""What the site needs beyond Markdown: hooks of MkDocs, which ``make docs`` runs (mkdocs.yml names this file).

Pages are written so that they read well where they lie, in a checkout or on a forge. The site differs in three ways:

- it has the pages of ``tutorial`` besides those of ``docs``, and the report that
  ``make docs`` left in ``build/report``;
- marks (openconv/bench/report/includes.py) become the lines that they ask for, ``<!-- site: TEXT -->`` becomes TEXT,
  and comments around generated numbers go;
- a link to a file that is no page leads to a page that shows the file, and one to a folder to a list of its files.
  Such pages exist for what is linked alone.

Places are named by their path in the repository (``docs/graphs.md``) wherever MkDocs does not want its own name for
them (``graphs.md``).
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor
from markdown_it import MarkdownIt
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

from openconv.bench.report.includes import expand, fenced, language, unfenced

WHOLE = 400_000
"""Files with more characters are shown by their first lines; the page has a link to all of them."""
FIRST_LINES = 200

_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|^ {0,3}\[[^\]]+\]:\s*<?([^\s>]+)")
_LINES = re.compile(r"L(\d+)(-L\d+)?")
_SITE = re.compile(r"<!--\s*site:\s*(.*?)\s*-->")
_CLOSE = re.compile(r"(?<=\S)(?=<!--\s*site:)")  # a sentence of the site's own, right behind another one
_NUMBER = re.compile(r"<!--=.*?-->|<!--/-->")
_PATTERN = re.compile(r"[*?\[]")

log = get_plugin_logger("openconv")


class Site:
    """The pages and files of the site by their places in the repository, and the page that is being rendered."""

    def __init__(self, config: MkDocsConfig) -> None:
        self.config = config
        self.root = Path(config.config_file_path).parent
        self.docs = Path(config.docs_dir).relative_to(self.root).as_posix()
        self.uris: dict[str, str] = {}
        self.places: dict[str, str] = {}
        self.made: list[File] = []
        self.shown: dict[str, int] = {}
        self.page: Page | None = None

    def add(self, place: str, file: File) -> None:
        """Name a file of the site by its place in the repository."""
        self.uris[place] = file.src_uri
        self.places[file.src_uri] = place

    def make(self, place: str, uri: str, content: str | None = None, *, hidden: bool = True) -> None:
        """Add a page with this content, or the repository's file as it is."""
        inclusion = InclusionLevel.NOT_IN_NAV if hidden else InclusionLevel.UNDEFINED
        if content is not None:
            file = File.generated(self.config, uri, content=content, inclusion=inclusion)
        else:
            file = File.generated(self.config, uri, abs_src_path=str(self.root / place), inclusion=inclusion)
        self.made.append(file)
        self.add(place, file)

    def show(self, place: str) -> str | None:
        """Make what a link to this place leads to; returns the text of a page that may have links of its own."""
        path = self.root / place
        uri = f"source/{place}"
        if path.is_dir():
            self._show_folder(place, path)
            return None
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            self.make(place, uri)  # a picture, say
            return None
        if path.suffix == ".md":
            self.make(place, uri, _unsearched(path.name) + text)
            return text
        if path.suffix == ".ipynb":
            body = _notebook(text)
        elif len(text) <= WHOLE:
            body = fenced(text, f'{language(place)} linenums="1"')
            self.shown[f"{uri}.md"] = len(text.splitlines())
        else:
            lines = text.splitlines()
            self.made.append(File.generated(self.config, uri, abs_src_path=str(path)))
            cut = "\n".join(line if len(line) <= 500 else line[:500] + " ..." for line in lines[:FIRST_LINES])
            body = f"The first {FIRST_LINES} of {len(lines)} lines; [the whole file]({path.name}).\n\n"
            body += fenced(cut, f'{language(place)} linenums="1"')
        self.make(place, f"{uri}.md", f"{_unsearched(path.name)}# `{place}`\n\n{body}\n")
        return body if path.suffix == ".ipynb" else None

    def _show_folder(self, place: str, path: Path) -> None:
        """A folder leads to the page that introduces it, else to a list of its files."""
        for name in ("README.md", "index.md"):
            if inside := self.uris.get(posixpath.normpath(f"{place}/{name}")):
                self.uris[place] = inside
                return
        entries = [e for e in sorted(path.iterdir()) if not e.name.startswith(".") and e.name != "__pycache__"]
        rows = [f"- {e.name}/" if e.is_dir() else f"- [{e.name}]({e.name})" for e in entries]
        text = f"{_unsearched(path.name)}# `{place}/`\n\n" + "\n".join(rows) + "\n"
        self.make(f"{place}/index.md", posixpath.normpath(f"source/{place}/index.md"), text)
        self.uris[place] = self.uris[f"{place}/index.md"]
        for entry in entries:
            inner = posixpath.normpath(f"{place}/{entry.name}")
            if entry.is_file() and inner not in self.uris:
                self.show(inner)

    def resolve(self, place: str, url: str) -> tuple[str, str] | None:
        """The place in the repository that a link in the file at ``place`` leads to, and the anchor there."""
        parts = urlsplit(url)
        if parts.scheme or parts.netloc or not parts.path or parts.path.startswith("/"):
            return None
        return posixpath.normpath(posixpath.join(posixpath.dirname(place), unquote(parts.path))), parts.fragment

    def link(self, uri: str, url: str) -> str:
        """The link of a page as MkDocs understands it; what leads to nothing stays, for MkDocs to warn of."""
        found = self.resolve(self.places.get(uri, uri), url)
        if found is None or found[0] not in self.uris:
            return url
        target, anchor = self.uris[found[0]], found[1]
        if target in self.shown and (lines := _LINES.fullmatch(anchor)):
            anchor = f"__codelineno-0-{lines[1]}"
        return posixpath.relpath(target, posixpath.dirname(uri) or ".") + (f"#{anchor}" if anchor else "")


class _Links(Treeprocessor):
    """Leads links and pictures of a page from the repository to the site, just before MkDocs looks at them."""

    def run(self, root: Element) -> None:
        if _site.page is None:
            return
        for tag, key in (("a", "href"), ("img", "src")):
            for element in root.iter(tag):
                if url := element.get(key):
                    element.set(key, _site.link(_site.page.file.src_uri, url))


class _LinkExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(_Links(md), "openconv_links", priority=1)  # that of MkDocs has 0


_site: Site


def on_config(config: MkDocsConfig) -> None:
    """Begin a site: its navigation, and anchors as forges make them."""
    global _site
    _site = Site(config)
    config.markdown_extensions.append(_LinkExtension())
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    if config.nav is not None:
        named = {entry for entry in _entries(config.nav) if not _PATTERN.search(entry)}
        config.nav = _expanded(config.nav, sorted(_page_uris()), named)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the tutorial, the report, and a page for each file that a page links to."""
    for file in files:
        if file.src_dir is not None and not file.inclusion.is_excluded():
            _site.add(f"{_site.docs}/{file.src_uri}", file)
    pages = {_site.places[f.src_uri]: f.content_string for f in files.documentation_pages() if f.src_dir is not None}
    for path in _tutorial_files():
        place = path.relative_to(_site.root).as_posix()
        _site.make(place, place, hidden=False)
        if path.suffix == ".md":
            pages[place] = path.read_text()
    for path in sorted((_site.root / "build/report").glob("*")):
        name = path.name
        _site.made.append(File.generated(config, f"report/{name}", abs_src_path=str(path)))
        _site.add(f"{_site.docs}/report/{name}", _site.made[-1])
    waiting = list(pages.items())
    while waiting:
        place, text = waiting.pop()
        for url in _urls(text):
            found = _site.resolve(place, url)
            if found and found[0] not in _site.uris and _in_repository(found[0]):
                inner = _site.show(found[0])
                if inner is not None:
                    waiting.append((found[0], inner))
    for file in _site.made:
        files.append(file)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text of a page as the site has it."""
    _site.page = page
    uri = page.file.src_uri
    if uri in _site.shown:
        return markdown
    if PurePosixPath(uri).match("results/*.md"):
        page.meta["search"] = {"exclude": True}  # every layer of every machine: no words to search for
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]  # its section is itself
    try:
        markdown = expand(_site.root, markdown)
    except ValueError as error:
        log.error(f"{_site.places.get(uri, uri)}: {error}")
    lines = markdown.splitlines()
    for number, line in unfenced(markdown):
        lines[number - 1] = _SITE.sub(r"\1", _CLOSE.sub(" ", _NUMBER.sub("", line)))
    return "\n".join(lines) + "\n"


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the lines of a shown file known as anchors; warn of a page that reads otherwise on a Markdown viewer."""
    uri = page.file.src_uri
    if uri in _site.shown:
        known = page.present_anchor_ids or set()
        page.present_anchor_ids = known | {f"__codelineno-0-{n}" for n in range(1, _site.shown[uri] + 1)}
    elif not uri.startswith(("results", "source/")) and page.markdown and "\n::: " not in page.markdown:
        plain = MarkdownIt("commonmark").enable("table").render(page.markdown)
        for tag, what in (("<li>", "items of lists"), ("<table>", "tables"), ("<pre>", "code blocks")):
            wanted, got = plain.count(tag), html.count(tag)
            if wanted != got:
                log.warning(
                    f"{_site.places.get(uri, uri)}: the site shows {got} {what} and a Markdown viewer {wanted}; "
                    "put blank lines around lists and tables, and four spaces before what is inside of an item"
                )
    return html


# -- parts ------------------------------------------------------------------------------------------------------------


def _tutorial_files() -> list[Path]:
    """The pages of the tutorial and its figures."""
    folder = _site.root / "tutorial"
    figures = [path for path in folder.glob("figures/**/*") if path.is_file() and not path.name.startswith(".")]
    return sorted([*folder.rglob("*.md"), *figures])


def _page_uris() -> set[str]:
    """The pages that may stand in the navigation, by the names that MkDocs has for them."""
    docs = Path(_site.config.docs_dir)
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    return pages | {p.relative_to(_site.root).as_posix() for p in _tutorial_files() if p.suffix == ".md"}


def _entries(nav: Iterable[Any]) -> Iterator[str]:
    """The pages and patterns of a navigation."""
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(value, str):
                yield value
            else:
                yield from _entries(value)


def _expanded(nav: Iterable[Any], pages: list[str], named: set[str]) -> list[Any]:
    """The navigation with patterns replaced by the pages that match and have no other place, empty parts left out."""
    result: list[Any] = []
    for entry in nav:
        title, value = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
        if isinstance(value, list):
            if inner := _expanded(value, pages, named):
                result.append({title: inner})
        elif _PATTERN.search(value):
            depth = value.count("/")
            found = [page for page in pages if page.count("/") == depth and fnmatchcase(page, value)]
            result += [page for page in found if page not in named]
            named.update(found)
        else:
            result.append(entry)
    return result


def _urls(text: str) -> Iterator[str]:
    """The targets of the links of a page."""
    for _, line in unfenced(_SITE.sub(r"\1", text)):
        for found in _LINK.finditer(line):
            yield found[1] or found[2]


def _in_repository(place: str) -> bool:
    return not place.startswith("..") and (_site.root / place).exists()


def _unsearched(title: str) -> str:
    return f"---\ntitle: {json.dumps(title)}\nsearch:\n  exclude: true\nhide:\n  - toc\n---\n"


def _notebook(text: str) -> str:
    """A notebook's cells, with what they printed."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif source:
            parts.append(fenced(source, "python"))
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![output](data:image/png;base64,{''.join(data['image/png']).replace(chr(10), '')})")
            elif printed := "".join(output.get("text", data.get("text/plain", []))):
                parts.append(fenced(printed, "text"))
    return "\n\n".join(parts)
