"""What mkdocs asks us while it builds the site.

The page of all commands is made here. Pages are written so that a Git forge shows them well; what mkdocs understands
otherwise is translated: links to files of the repository, anchors of headings that come twice, marks of code for tests.
"""

import re
import sys
from pathlib import Path, PurePosixPath

from markdown.extensions.toc import slugify
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "src")]

import commands  # noqa: E402

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)]*)?\)")
MARKED = re.compile(r"^```python (?:run|no-run)$", re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@event_priority(-200)  # after the offline plugin, which names a script on another server
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Search from the disk by a script of ours: pages load nothing from the network."""
    config.extra["polyfills"] = ["assets/search-from-disk.js"]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of all commands."""
    files.append(File.generated(config, commands.PAGE, content=commands.render()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Translate one page."""
    folder = PurePosixPath("docs") / PurePosixPath(page.file.src_uri).parent
    text = LINK.sub(lambda link: named(link, folder), MARKED.sub("```python", markdown))
    return with_anchors(text)


def named(link: re.Match[str], folder: PurePosixPath) -> str:
    """A link that leads out of the documentation, to a file of the repository, becomes the file's name."""
    parts: list[str] = []
    for part in (folder / link[2]).parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return link[0] if parts[0] == "docs" else f"`{'/'.join(parts)}`"


def with_anchors(text: str) -> str:
    """Forges call the second heading of a name `name-1`, mkdocs calls it `name_1`."""
    seen: set[str] = set()
    for heading in HEADING.findall(text):
        slug = slugify(heading, "-")
        if slug in seen:
            text = text.replace(f"(#{slug}-1)", f"(#{slug}_1)")
        seen.add(slug)
    return text
