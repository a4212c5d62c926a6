"""What mkdocs needs so that the pages under docs/ stay as GitHub shows them.

README, CONTRIBUTING, SECURITY and CHANGELOG lie above docs/, where mkdocs does not look. They become pages of the site,
and links between them and docs/ are rewritten to where both lie there.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

__all__ = ["ABOVE", "on_files", "on_page_markdown", "rewritten"]

ABOVE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages above docs/, and what they are called in the site."""

_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def rewritten(text: str, source: str) -> str:
    """A page with its links as they are in the site. source is where it lies in the repository, such as docs/x.md."""

    def there(link: re.Match[str]) -> str:
        target = link[2]
        if ":" in target:
            return link[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        name = ABOVE.get(place, place.removeprefix("docs/"))
        return f"{link[1]}{name}{link[3] or ''}{link[4]}"

    parts = _CODE.split(text)
    return "".join(part if at % 2 else _LINK.sub(there, part) for at, part in enumerate(parts))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie above docs/."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - the tests of rewritten need no mkdocs

    root = Path(config.config_file_path).parent
    for source, name in ABOVE.items():
        text = rewritten((root / source).read_text(encoding="utf-8"), source)
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Rewrite the links of a page of docs/ that lead out of it."""
    lies_above = page.file.src_uri in ABOVE.values()
    return markdown if lies_above else rewritten(markdown, f"docs/{page.file.src_uri}")
