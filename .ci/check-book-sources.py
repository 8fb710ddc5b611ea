"""Checks the sources of the book: Rust code is included from files that are compiled and run, and names of this project exist.

usage: check-book-sources.py      (in the root of the repository)

1. A block ```rust has only `{{#include FILE:ANCHOR}}`, and comments and closing brackets that say that code is left out. FILE is
   an example of dp-zero, which .ci/run compiles and runs, or a program of examples/. FILE and ANCHOR exist, for other blocks, too.
2. In the text, `Type::name`, where Type is one of this project, and `crate::path` of its crates are names that its sources define.
3. Every page is in SUMMARY.md.
"""

import re
import sys
from pathlib import Path

SOURCES = Path("docs/src")
CRATES = ["dp-core", "dp-zero", "dp-models"]
INCLUDE = re.compile(r"\{\{#include ([^}:\s]+)(?::([\w-]+))?\}\}")
LEFT_OUT = re.compile(r"^\s*(//.*|[})\]];?)?$")
CODE = re.compile(r"`([^`\n]+)`")
DEFINES = r"\b(?:fn|struct|enum|trait|type|const|static|mod)\s+{0}\b|^\s*(?:pub )?{0}\s*(?::(?!:)|[({{,])|\bpub use [^;]*\b{0}\b"


class Api:
    """What the crates define, found by text: good enough to notice a name that is gone."""

    def __init__(self):
        texts = {crate: [p.read_text(encoding="utf-8") for p in sorted(Path(crate, "src").rglob("*.rs"))] for crate in CRATES}
        self.text = "\n".join(text for crate in texts.values() for text in crate)
        self.types = set(re.findall(r"\bpub (?:struct|enum|trait) (\w+)", self.text))

    def defines(self, name):
        return bool(re.search(DEFINES.format(re.escape(name)), self.text, re.M))

    def check(self, code):
        """None, or the name that does not exist."""
        for path in re.findall(r"\b\w+(?:::\w+)+", code):
            parts = path.split("::")
            if parts[0] in ("dp_core", "dp_zero", "dp_models"):
                parts = parts[1:]
            elif parts[0] not in self.types:
                continue
            gone = next((part for part in parts if not self.defines(part)), None)
            if gone:
                return f"{path}: nothing is called {gone}"
        return None


def check_include(page, match, errors, where):
    file, anchor = match.groups()
    path = (page.parent / file).resolve()
    if not path.is_file():
        errors.append(f"{where}: no such file: {file}")
        return None
    if anchor and not re.search(rf"ANCHOR: {re.escape(anchor)}$", path.read_text(encoding="utf-8"), re.M):
        errors.append(f"{where}: {file} has no anchor {anchor}")
    return path


def check_page(page, api, compiled, errors):
    fence, counts = None, [0, 0]
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        where = f"{page}:{number}"
        included = [(m, check_include(page, m, errors, where)) for m in INCLUDE.finditer(line)]
        if line.startswith("```"):
            fence = None if fence is not None else line[3:].strip()
        elif fence is not None and re.match(r"rust\b", fence):
            if included:
                counts[0] += 1
                for match, path in included:
                    if path and path not in compiled:
                        errors.append(f"{where}: {match[1]} is no example of dp-zero and no program")
            elif not LEFT_OUT.match(line):
                errors.append(f"{where}: Rust code that is not included from a compiled file: {line}")
        elif fence is None:
            for code in CODE.findall(line):
                counts[1] += 1
                wrong = api.check(code)
                if wrong:
                    errors.append(f"{where}: `{code}`: {wrong}")
    return counts


def main():
    api, errors = Api(), []
    examples = re.findall(r'^path = "(\.\./docs/.+)"', Path("dp-zero/Cargo.toml").read_text(encoding="utf-8"), re.M)
    compiled = {Path("dp-zero", e).resolve() for e in examples}
    compiled |= {p.resolve() for p in Path("examples/src").rglob("*.rs")}
    compiled.add(Path("docs/snippets/task.rs").resolve())  # a module of the others
    for snippet in sorted(Path("docs/snippets").glob("*.rs")):
        if snippet.resolve() not in compiled:
            errors.append(f"{snippet}: not an example in dp-zero/Cargo.toml, so nobody compiles it")
    summary = (SOURCES / "SUMMARY.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(([\w/.-]+\.md)\)", summary))
    pages = [p for p in sorted(SOURCES.rglob("*.md")) if p.name != "SUMMARY.md"]
    totals = [0, 0]
    for page in pages:
        if page.relative_to(SOURCES).as_posix() not in listed:
            errors.append(f"{page}: not in SUMMARY.md, so not in the book")
        totals = [a + b for a, b in zip(totals, check_page(page, api, compiled, errors))]
    print(f"{len(pages)} pages, {totals[0]} pieces of Rust code, {totals[1]} words of code, {len(errors)} errors")
    if errors:
        sys.exit("\n".join(errors))


if __name__ == "__main__":
    main()
