"""Checks a built book: every internal link and anchor exists, nothing is loaded from the network, and no code block is
empty (mdbook includes nothing, without a word, where the name of a snippet is wrong).

usage: check-book.py FOLDER
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Elements that make the browser fetch something while the page loads.
LOADS = {"script", "img", "iframe", "source", "video", "audio", "embed"}
# rel values of <link> that do.
LOADING_RELS = {"stylesheet", "icon", "preload", "modulepreload", "manifest"}


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.ids = set()
        self.links = []  # (line, url, loaded with the page)
        self.empty_code = []  # lines
        self.code = None  # (line, text so far) inside <pre>
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        line = self.getpos()[0]
        if tag == "pre":
            self.code = (line, "")
        if attrs.get("id"):
            self.ids.add(attrs["id"])
        if tag == "a" and attrs.get("name"):
            self.ids.add(attrs["name"])
        loads = tag in LOADS or (tag == "link" and LOADING_RELS & set((attrs.get("rel") or "").split()))
        for name in ("href", "src"):
            if attrs.get(name):
                self.links.append((line, attrs[name], loads))

    def handle_data(self, data):
        if self.code:
            self.code = (self.code[0], self.code[1] + data)

    def handle_endtag(self, tag):
        if tag == "pre" and self.code:
            line, text = self.code
            if not text.strip():
                self.empty_code.append(line)
            self.code = None


def main(root):
    root = root.resolve()
    pages = {path: Page(path) for path in sorted(root.rglob("*.html"))}
    if not pages:
        sys.exit(f"{root}: no pages")
    errors, checked = [], 0
    for path, page in pages.items():
        # 404.html and toc.html are shown at other addresses than their own, so their links have another base.
        if path.name in ("404.html", "toc.html"):
            continue
        errors += [f"{path.relative_to(root)}:{line}: empty code block" for line in page.empty_code]
        for line, url, loads in page.links:
            where = f"{path.relative_to(root)}:{line}: {url}"
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                if loads and parts.scheme != "data":
                    errors.append(f"{where}: loaded from the network")
                continue
            checked += 1
            target = path
            if parts.path:
                base = root if parts.path.startswith("/") else path.parent
                target = (base / unquote(parts.path).lstrip("/")).resolve()
            if target.is_dir():
                target = target / "index.html"
            if not target.is_file():
                errors.append(f"{where}: no such file")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                errors.append(f"{where}: no such anchor")
    print(f"{checked} internal links in {len(pages)} pages, {len(errors)} errors")
    if errors:
        sys.exit("\n".join(errors))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
