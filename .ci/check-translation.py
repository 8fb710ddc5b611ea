"""Checks that the Chinese pages keep in step with the English ones: README.zh-CN.md, and docs/src/zh/PAGE for docs/src/PAGE.

Each Chinese page begins with the git blob hash of the English text that it translates, and the check fails once that text is
another. It also compares the two pages block by block (headings, paragraphs, list items, table cells, code, figures), in
order: code and included files must be the same, comments in code may be translated. The numbers, `code` and links of a block
may come in another order, as the words of the two languages do. A link to a page that is translated leads to its translation.
"""

import argparse
import hashlib
import posixpath
import re
import sys
from collections import Counter
from pathlib import Path

BOOK, CHINESE_BOOK = "docs/src/", "docs/src/zh/"
LINK = re.compile(r'\]\(([^)\s]+)\)|<a href="([^"]+)"')
INCLUDE = re.compile(r"\{\{#include ([^}:\s]+)(:\w+)?\}\}")
COMMENT = re.compile(r"(?:^|\s+)(?://|#) (.*)$")
CODE = re.compile(r"`[^`]+`")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
# Marks that a page may have and its counterpart need not: the hash, the language, a target of links.
MARK = re.compile(r'<(?:!--.*--|/?div.*|a id="[^"]+"></a)>')


def pairs(root):
    """Chinese path -> English path, both from the root."""
    pages = {"README.zh-CN.md": "README.md"}
    for path in sorted((root / CHINESE_BOOK).rglob("*.md")):
        page = path.relative_to(root).as_posix()
        pages[page] = BOOK + page.removeprefix(CHINESE_BOOK)
    return pages


def stamp(root, english):
    content = (root / english).read_bytes()
    # The name that git gives to a file of this content, so that `git diff` finds what has changed since.
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return f"<!-- Translates {english}, git blob {blob} -->"


def blocks(text):
    """[(line number, kind, text)]. A code block's text is all of it; a table's row is followed by its cells."""
    found, open_block = [], False
    lines = enumerate(text.splitlines(), 1)
    for number, line in lines:
        if line.startswith("```"):
            code = []
            for _, inner in lines:
                if inner.startswith("```"):
                    break
                code.append(inner)
            found.append((number, line, "\n".join(code)))
            open_block = False
        elif not line.strip() or MARK.fullmatch(line):
            open_block = False
        elif match := re.match(r"#+ ", line):
            found.append((number, f"heading {match[0].strip()}", line))
            open_block = False
        elif line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            found.append((number, f"row of {len(cells)}", ""))
            found += [(number, "cell", cell) for cell in cells]
        elif match := re.match(r"- |\d+\. ", line):
            found.append((number, f"item {match[0].strip()}", line[match.end() :]))
            open_block = True
        elif open_block:
            start, kind, so_far = found[-1]
            found[-1] = (start, kind, f"{so_far}\n{line}")
        else:
            found.append((number, "figure or HTML" if line.startswith("<") else "paragraph", line))
            open_block = True
    return found


class Page:
    def __init__(self, root, path, counterpart, translated):
        """`translated`: English path -> Chinese path, for the links of an English page; {} for a Chinese one."""
        self.path, self.translated = path, translated
        self.blocks = []
        self.links_counterpart = False
        for block in blocks((root / path).read_text(encoding="utf-8")):
            match = re.fullmatch(r"\[[^]]+\]\(([^)]+)\)", block[2].strip())
            if match and self.resolve(match[1], {}) == counterpart:
                self.links_counterpart = True
            else:
                self.blocks.append(block)

    def resolve(self, target, translated):
        if re.match(r"\w+:", target):
            return target
        path, sharp, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(self.path), path)) if path else self.path
        return translated.get(path, path) + sharp + anchor

    def facts(self, kind, text):
        """What a translation must not change, each with the number of times it occurs."""
        facts = Counter()
        if kind.startswith("```"):
            code = []
            for line in text.splitlines():
                line = INCLUDE.sub(lambda m: f"{{{{{self.resolve(m[1], {})}{m[2] or ''}}}}}", line)
                code.append(COMMENT.sub("", line))
            facts["code block:\n" + "\n".join(code)] += 1
            text = "\n".join(m[1] for line in text.splitlines() if (m := COMMENT.search(line)))
        facts.update("include " + self.resolve(m[1], {}) + (m[2] or "") for m in INCLUDE.finditer(text))
        text = INCLUDE.sub(" ", text)
        facts.update("link to " + self.resolve(m[1] or m[2], self.translated) for m in LINK.finditer(text))
        text = LINK.sub(" ", text)
        facts.update(" ".join(m[0].split()) for m in CODE.finditer(text))
        facts.update(NUMBER.findall(CODE.sub(" ", text)))
        return facts


def differences(root, chinese, english, pages):
    zh = Page(root, chinese, english, {})
    en = Page(root, english, chinese, {e: c for c, e in pages.items()})
    if not zh.links_counterpart:
        yield f"{chinese}: no line that links to {english}"
    for (line, kind, text), (en_line, en_kind, en_text) in zip(zh.blocks, en.blocks):
        if kind != en_kind:
            yield f"{chinese}:{line}: {kind}, where {english}:{en_line} has {en_kind}; not compared from here on"
            return
        here, there = zh.facts(kind, text), en.facts(en_kind, en_text)
        for what, side in ((there - here, "missing"), (here - there, "not in the English text")):
            for fact in what.elements():
                yield f"{chinese}:{line}: {side} ({english}:{en_line}): {fact}"
    if len(zh.blocks) != len(en.blocks):
        yield f"{chinese}: {len(zh.blocks)} blocks, {english} has {len(en.blocks)}"


def main(root, update=None):
    pages = pairs(root)
    if update and update not in pages:
        sys.exit(f"{update}: not one of {', '.join(pages)}")
    errors = []
    for concept in sorted((root / BOOK / "concepts").glob("*.md")):
        if not (root / CHINESE_BOOK / "concepts" / concept.name).is_file():
            errors.append(f"{concept}: there is no Chinese page of this concept")
    for chinese, english in pages.items():
        if not (root / english).is_file():
            errors.append(f"{chinese}: there is no {english}")
            continue
        found = list(differences(root, chinese, english, pages))
        errors += found
        first, _, rest = (root / chinese).read_text(encoding="utf-8").partition("\n")
        if first == stamp(root, english):
            continue
        if chinese == update and not found:
            rest = rest if first.startswith("<!-- Translates ") else f"{first}\n{rest}"
            (root / chinese).write_text(f"{stamp(root, english)}\n{rest}", encoding="utf-8")
        else:
            blob = re.search(r"git blob (\w+)", first)
            hint = f"See `git diff {blob[1]} {english}`" if blob else "The page does not begin with its hash"
            errors.append(
                f"{chinese}: {english} is not the text that it translates. {hint}, translate, then run "
                f"`python3 .ci/check-translation.py --update {chinese}`"
            )
    print(f"{len(pages)} translated pages, {len(errors)} errors")
    if errors:
        sys.exit("\n".join(errors))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", default=".", type=Path, help="of the repository; by default the current folder")
    parser.add_argument("--update", metavar="PAGE", help="record that PAGE, a Chinese one, translates the English text of now")
    arguments = parser.parse_args()
    main(arguments.root, arguments.update)
