"""Show files from outside `docs/` on the site, so that links work there as they do in a checkout.

`PAGES` have a place in the navigation. Every other file of the repository to which a page links
becomes a page below `source/`, with its text as it is.
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "examples/README.md": "project/examples.md",
    "examples/ci/README.md": "project/ci_example.md",
    "hangdoctor/COLLECTION.md": "project/collection.md",
}
# Other files that are pages: of `reference.py`, and the home page in the place of the README.
ELSEWHERE = {"recorder/FORMAT.md": "reference/format.md", "README.md": "index.md"}
SITE = PAGES | ELSEWHERE
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)")
# A heading of docs/reference.md, which is a page of the site.
REFERENCE = re.compile(r"(?<=\]\()([./]*reference)\.md#(\w+)(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add `PAGES`, and a page for each other file to which a page links."""
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    texts |= {name: (ROOT / name).read_text() for name in PAGES}
    for name, uri in PAGES.items():
        files.append(File.generated(config, uri, content=texts[name]))
    linked = {path for name, text in texts.items() for path in outside(name, text)}
    for path in sorted(linked):
        files.append(File.generated(config, page_of(path), content=source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files of the repository to their pages."""
    uri = page.file.src_uri
    name = next((path for path, at in SITE.items() if at == uri and at != "index.md"), f"docs/{uri}")

    def rewritten(link: re.Match[str]) -> str:
        path = target(name, link[1])
        if path.startswith("docs/") and name.startswith("docs/"):
            return link[1]
        return relpath(page_of(path), PurePosixPath(uri).parent) if (ROOT / path).exists() else link[1]

    verb = f"#areal-debug-{PurePosixPath(uri).stem}" if uri.startswith("verbs/") else ""

    def of_reference(link: re.Match[str]) -> str:
        return f"{link[1]}/{link[2]}.md{verb if link[2] == 'cli' else ''}"

    return REFERENCE.sub(of_reference, LINK.sub(rewritten, markdown))


def target(name: str, link: str) -> str:
    """Return the path in the repository to which a link in the file `name` leads."""
    path = normpath(PurePosixPath(name).parent / link)
    return f"{path}/README.md" if (ROOT / path / "README.md").exists() else path


def outside(name: str, text: str) -> Iterator[str]:
    """Yield the files outside `docs/` to which a text links and which have no page yet."""
    for link in LINK.findall(text):
        path = target(name, link)
        if not path.startswith(("docs/", "..")) and path not in SITE and (ROOT / path).exists():
            yield path


def page_of(path: str) -> str:
    """Return the address of the page that shows a file of the repository."""
    inside = path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"
    return SITE.get(path, inside)


def source_page(path: str) -> str:
    """Return a page with the text of a file, or the names of a folder's files."""
    at = ROOT / path
    language = PurePosixPath(path).suffix[1:]
    text = "\n".join(sorted(file.name for file in at.iterdir())) if at.is_dir() else at.read_text()
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    return f"{head}`````{language or 'text'}\n{text.rstrip()}\n`````\n"
