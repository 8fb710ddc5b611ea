"""Checks the sources of the book, and the repository's own pages (README.md and the like): Rust code is that of files that are
compiled and run, names of this project exist, links lead somewhere.

usage: check-book-sources.py      (in the root of the repository)

1. A block ```rust of the book has only `{{#include FILE:ANCHOR}}`, and comments and closing brackets that say that code is left out.
   So has a block ```python, of a file of docs/snippets.
   FILE is an example of dp-zero, which .ci/run compiles and runs, or a program of examples/. FILE and ANCHOR exist, for other
   blocks, too. README.md cannot include: there `<!-- code: FILE:ANCHOR -->` stands before the block, which has the text of it.
2. Blocks begin with ``` and one of LANGUAGES. Lines `$ ...` stand in blocks whose commands are run, which are not indented.
3. In the text, `Type::name`, where Type is one of this project, `crate::path` of its crates and `trainer.name(...)` are names that
   its sources define: those of a type in its own declaration, in its `impl`s or in its traits.
4. Options `--name`, keys such as `run.steps`, files such as `docs/book.toml` and the keys of ```json blocks exist.
5. A row of a table whose first column is a `message` quotes one of this project's, unless the row says whose it is.
6. Every page is in SUMMARY.md. Links of the repository's own pages lead to files and headings that are there.
"""

import functools
import re
import sys
import textwrap
from pathlib import Path
from urllib.parse import unquote

SOURCES = Path("docs/src")
CRATES = ["dp-core", "dp-zero", "dp-models"]
INCLUDE = re.compile(r"\{\{#include ([^}:\s]+)(?::([\w-]+))?\}\}")
CODE_OF = re.compile(r"<!-- code: ([^:\s]+):([\w-]+) -->")
LANGUAGES = ["rust,ignore", "console", "sh", "bash", "text", "text,wrap", "json", "toml", "python"]
COMMANDS = ["console", "sh", "bash"]
FENCE = re.compile(r"\s*(```|~~~)\s*(.*)$")
LEFT_OUT = re.compile(r"^\s*(//.*|[})\]];?)?$")
CODE = re.compile(r"`([^`\n]+)`")
# Pages that are read in the repository, outside of the book.
REPOSITORY = ["*.md", "dp-*/README.md"]
LINK = re.compile(r"\]\(([^)\s]+)\)|<a href=\"([^\"]+)\"")
# What a name before a dot is in the text: `trainer.step()`.
VARIABLES = {"trainer": "Trainer", "store": "ParamStore", "rank": "Rank", "world": "World", "report": "StepReport"}
MEMBER = re.compile(rf"\b({'|'.join(VARIABLES)})\.(\w+)\b(?!\.\w)")
# `report.html` is a file.
FILES = ["html", "json", "rs"]
OF_THE_SYSTEM = "No such file or directory"
# Methods that derived traits have, and the ones that all errors have.
DERIVED = {"Default": "default", "Clone": "clone"}
SECTIONS = ["run", "data", "model", "zero_optimization", "optimizer", "scheduler", "fp16", "bf16", "data_types", "tensorboard"]
# Sections are named by these, too; `model.safetensors` is a file, `model.parameters` and the like are Python, `data.epoch` is of a manifest.
NO_KEYS = ["type", "safetensors", "index", "json", "rs", "parameters", "zero_grad", "param_groups", "step", "epoch", "samples", "seed"]
# Of cargo, mpirun, srun, torchrun, docker and .ci/two-hosts.sh.
OTHER_OPTIONS = set(
    "release bin bench test workspace features all-targets nproc-per-node nnodes no-python host bind-to map-by tag-output"
    " oversubscribe allow-run-as-root cpus-per-task ntasks-per-node logdir check help rate shm-size rdzv-id gpus-per-task"
    " max-restarts".split()
)
DEFINES = r"\b(?:fn|struct|enum|trait|type|const|static|mod)\s+{0}\b|^\s*(?:pub )?{0}\s*(?::(?!:)|[({{,])|\bpub use [^;]*\b{0}\b"


class Api:
    """What the crates define, found by text: good enough to notice a name that is gone."""

    def __init__(self):
        files = sorted(path for crate in CRATES for path in Path(crate, "src").rglob("*.rs"))
        texts = [path.read_text(encoding="utf-8") for path in files]
        self.text = "\n".join(texts)
        self.types = set(re.findall(r"\bpub (?:struct|enum|trait) (\w+)", self.text))
        self.of_type = {name: [] for name in self.types}
        self.traits = {name: set() for name in self.types}
        for text in texts:
            self.read_items(text)
        # Messages may be broken over lines.
        programs = [path.read_text(encoding="utf-8") for path in sorted(Path("examples/src").rglob("*.rs"))]
        self.literals = re.sub(r"\\?\s+", " ", "\n".join(texts + programs).replace("\\\n", " "))

    def read_items(self, text):
        """Declarations and `impl`s, each to the line that closes it at its own indentation."""
        lines = text.splitlines()
        for at, line in enumerate(lines):
            item = re.match(r"( *)(?:pub(?:\([^)]*\))? )?(?:unsafe )?(struct|enum|trait|impl)\b(.*)", line)
            if not item:
                continue
            indent, kind, rest = item.groups()
            last = at
            if not line.rstrip().endswith((";", "}")):
                while last + 1 < len(lines) and not re.match(rf"{indent}\}}", lines[last]):
                    last += 1
            first = at
            while first and re.match(r" *(#\[|///)", lines[first - 1]):
                first -= 1
            text = "\n".join(lines[first : last + 1])
            header = rest.split("{")[0] if kind == "impl" else (re.match(r" (\w+)", rest) or [""])[0]
            if kind == "impl" and "{" not in line:
                header = " ".join(lines[at : last + 1]).split("{")[0]
            trait, _, implementor = re.sub(r"<[^<>]*>|<.*?>(?= )", "", header).rpartition(" for ")
            for name in set(re.findall(r"\w+", implementor or header)) & self.types:
                self.of_type[name].append(text)
                self.traits[name] |= set(re.findall(r"\w+", trait)) & self.types

    @functools.cache
    def defines(self, name, text=None):
        return bool(re.search(DEFINES.format(re.escape(name)), self.text if text is None else text, re.M))

    @functools.cache
    def type_defines(self, owner, name):
        texts = list(self.of_type[owner])
        for trait in self.traits[owner]:
            texts += self.of_type[trait]
        derives = re.findall(r"derive\(([^)]*)\)", "\n".join(texts))
        return any(self.defines(name, text) for text in texts) or any(
            method == name for trait, method in DERIVED.items() if any(trait in d for d in derives)
        )

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
            for owner, name in zip(parts, parts[1:]):
                if owner in self.types and not self.type_defines(owner, name):
                    return f"{path}: {owner} has no {name}"
        for variable, name in MEMBER.findall(code):
            if name not in FILES and not self.type_defines(VARIABLES[variable], name):
                return f"{variable}.{name}: {VARIABLES[variable]} has no {name}"
        return None

    def says(self, message):
        """Whether a message of the sources has the words of this one, between its numbers and names."""
        for piece in re.split(r"\[\.\.\.\]|\d+\w*|[=:;]", message.removesuffix(OF_THE_SYSTEM)):
            words = [re.escape(word) for word in piece.split()]
            # One word may stand where the source has a `{name}`.
            like = [words, *([*words[:i], r"\{[^}]*\}\S*", *words[i + 1 :]] for i in range(len(words)))]
            if len(words) >= 3 and not any(re.search(" ".join(way), self.literals) for way in like):
                return False
        return True


class Words:
    """Options of the programs, keys of configurations and fields, found by text."""

    def __init__(self, api):
        programs = "\n".join(p.read_text(encoding="utf-8") for p in sorted(Path("examples/src").rglob("*.rs")))
        self.all = set(re.findall(r"\w+", api.text + programs))
        fields = set(re.findall(r"^\s+(?:pub(?:\([^)]*\))? )?(\w+): ", programs, re.M))
        self.options = {name.replace("_", "-") for name in fields} | set(re.findall(r'long = "([\w-]+)"', programs))
        reference = (SOURCES / "config-reference.md").read_text(encoding="utf-8")
        self.keys = {key.rpartition(".")[2] for key in re.findall(r"^(?:\| |## )`([\w.]+)`", reference, re.M)}

    def check(self, code):
        """None, or what does not exist."""
        for option in re.findall(r"(?<![\w-])--([a-z][\w-]+)", code):
            if option not in self.options | OTHER_OPTIONS:
                return f"no program has an option --{option}"
        for key in re.findall(rf"(?<![\w./])(?:{'|'.join(SECTIONS)})((?:\.\w+)+)(?![\w(])", code):
            gone = next((k for k in key[1:].split(".") if k not in self.keys | {"params"} and k not in NO_KEYS), None)
            if gone:
                return f"{gone} is no key of docs/src/config-reference.md"
        if re.fullmatch(r"(?:docs|examples|dp-core|dp-zero|dp-models|\.ci)/[\w./-]+", code) and not Path(code).exists():
            return f"{code}: no such file"
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


def code_of(file, anchor):
    """The lines of an anchor, or None."""
    text = Path(file).read_text(encoding="utf-8") if Path(file).is_file() else ""
    found = re.search(rf"// ANCHOR: {anchor}\n(.*?)^ *// ANCHOR_END: {anchor}$", text, re.M | re.S)
    return found and textwrap.dedent(found[1])


def blocks_of(lines):
    """(number of its first line, indentation, language, its lines), and what is wrong with fences."""
    found, errors, block = [], [], None
    for number, line in enumerate(lines, 1):
        fence = FENCE.match(line)
        if block is None and fence:
            block = (number, len(line) - len(line.lstrip()), fence[2].strip(), [])
            if fence[1] != "```" or block[2] not in LANGUAGES:
                errors.append((number, f"a block begins with ``` and one of {', '.join(LANGUAGES)}: {line}"))
        elif block is not None and fence and not fence[2]:
            found.append(block)
            block = None
        elif block is not None:
            block[3].append(line)
    if block is not None:
        errors.append((block[0], "the block does not end"))
    return found, errors


def check_blocks(page, lines, words, compiled, is_book, errors):
    num_rust = 0
    found, wrong = blocks_of(lines)
    errors += [f"{page}:{number}: {words}" for number, words in wrong]
    for first, indent, language, code in found:
        if language in COMMANDS and indent:
            errors.append(f"{page}:{first}: a block of commands is not indented, or they would not be run")
        if language not in COMMANDS and any(line.lstrip().startswith("$ ") for line in code):
            errors.append(f"{page}:{first}: commands stand in a block ```console")
        if language == "json" and (gone := next((k for k in re.findall(r'"(\w+)":', "\n".join(code)) if k not in words.all), None)):
            errors.append(f"{page}:{first}: the sources know no {gone}")
        if language == "python" and any(not INCLUDE.fullmatch(line) for line in code):
            errors.append(f"{page}:{first}: Python code that is not included from docs/snippets, where .ci/run looks at it")
        if not language.startswith("rust"):
            continue
        num_rust += 1
        if page.name == "README.zh-CN.md":
            continue  # .ci/check-translation.py holds it against README.md
        if not is_book:
            source = CODE_OF.fullmatch(lines[first - 2].strip()) if first > 1 else None
            if source is None:
                errors.append(f"{page}:{first}: Rust code without a line `<!-- code: FILE:ANCHOR -->` before it")
            elif Path(source[1]).resolve() not in compiled:
                errors.append(f"{page}:{first}: {source[1]} is no example of dp-zero and no program")
            elif code_of(*source.groups()) != "".join(f"{line}\n" for line in code):
                errors.append(f"{page}:{first}: not the code of {source[1]}:{source[2]}")
            continue
        for number, line in enumerate(code, first + 1):
            included = list(INCLUDE.finditer(line))
            for match in included:
                path = (page.parent / match[1]).resolve()
                if path.is_file() and path not in compiled:
                    errors.append(f"{page}:{number}: {match[1]} is no example of dp-zero and no program")
            if not included and not LEFT_OUT.match(line):
                errors.append(f"{page}:{number}: Rust code that is not included from a compiled file: {line}")
    return num_rust


def text_of(lines):
    """(number, line) outside of blocks."""
    in_block = False
    for number, line in enumerate(lines, 1):
        if FENCE.match(line):
            in_block = not in_block
        elif not in_block:
            yield number, line


def check_messages(page, lines, api, errors):
    """Rows of tables of messages."""
    in_table = False
    for number, line in text_of(lines):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] if line.startswith("|") else []
        if not cells:
            in_table = False
        elif cells[0] == "message" and len(cells) > 1 and "more" not in cells[1]:
            in_table = True
        elif in_table and not re.search(r"mpirun|Open MPI|while building", cells[0]):
            for code in CODE.findall(cells[0]):
                if not api.says(code):
                    errors.append(f"{page}:{number}: no message of this project: {code}")


def anchors_of(path):
    headings = (re.match(r"#+ (.*)", line) for _, line in text_of(path.read_text(encoding="utf-8").splitlines()))
    titles = (re.sub(r"`|\[([^]]*)\]\([^)]*\)", r"\1", h[1]).lower() for h in headings if h)
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in titles}


def check_links(page, lines, errors):
    for number, line in text_of(lines):
        for match in LINK.finditer(re.sub(r"`[^`]*`", "", line)):
            target, _, anchor = unquote(match[1] or match[2]).partition("#")
            if re.match(r"\w+:", target):
                continue
            path = page.parent / target if target else page
            if not path.exists():
                errors.append(f"{page}:{number}: no such file: {target}")
            elif anchor and path.suffix == ".md" and anchor not in anchors_of(path):
                errors.append(f"{page}:{number}: {target} has no heading #{anchor}")


def check_page(page, api, words, compiled, is_book, errors):
    lines = page.read_text(encoding="utf-8").splitlines()
    counts = [check_blocks(page, lines, words, compiled, is_book, errors), 0]
    for number, line in enumerate(lines, 1):
        for match in INCLUDE.finditer(line):
            check_include(page, match, errors, f"{page}:{number}")
    for number, line in text_of(lines):
        for code in CODE.findall(line):
            counts[1] += 1
            wrong = api.check(code) or words.check(code)
            if wrong:
                errors.append(f"{page}:{number}: `{code}`: {wrong}")
    check_messages(page, lines, api, errors)
    if not is_book:
        check_links(page, lines, errors)
    return counts


def main():
    api, errors = Api(), []
    words = Words(api)
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
    for page in pages:
        if page.relative_to(SOURCES).as_posix() not in listed:
            errors.append(f"{page}: not in SUMMARY.md, so not in the book")
    others = sorted(p for pattern in REPOSITORY for p in Path().glob(pattern))
    totals = [0, 0]
    for page in [*pages, *others]:
        is_book = page in pages
        counts = check_page(page, api, words, compiled, is_book, errors)
        totals = [a + b for a, b in zip(totals, counts)]
    print(f"{len(pages) + len(others)} pages, {totals[0]} pieces of Rust code, {totals[1]} words of code, {len(errors)} errors")
    if errors:
        sys.exit("\n".join(errors))


if __name__ == "__main__":
    main()
