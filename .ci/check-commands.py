"""Runs the commands of README.md, CONTRIBUTING.md and the book, and compares what they print with what is shown.

usage: check-commands.py [--list] [--build-projects] [--target FOLDER] [PAGE...]      (in the root of the repository)

A command is a line `$ ...` of a block ```console, with the lines that a backslash joins to it. Blocks ```sh and ```bash must
have such lines, too: a block without any is an error, unless it is a script that begins with `#!`. Commands run in the order of
the page, in a copy of the repository whose target/release is that of FOLDER; `cargo run --release --bin X -- ...` is run as target/release/X, which is what cargo would
do. Pages begin anew in the root of the copy; files stay from one page to the next.

In a project that a page has made, Cargo resolves the dependencies, and `cargo run` is run as the example of dp-zero whose source is
the project's src/main.rs, as `cargo test` has left it in target/debug/examples. With --build-projects the project is built, and
Candle with it, which takes some minutes.

A comment in the line before a block says how it is run, the same in the first line of a page for all its blocks:

    <!-- commands: not run, gpu -->            for one of the reasons in REASONS
    <!-- commands: with --set run.steps=5 -->  each command that cargo runs gets these arguments; lines of output that are shown,
                                               to the first empty one, must occur with other numbers
    <!-- commands: fails -->                   the command must fail, and its stderr is compared
    <!-- commands: not compared -->            the output shown is an example

A command that .ci/run has word for word, and whose output is not shown, is not run again.

How output is compared. Space, and the lines of tables, count as one however long they are. A line `...` or `[...]` stands for
any lines, and `...` at the end of a word or line for its rest. Times and speeds (numbers before s, ms, minutes, tokens/s, GB/s,
an ETA, columns of tables with such a unit) may be any. Other numbers with a decimal point may differ by 0.5 % or one in the
last place, because processors round products of matrices differently, and peaks of memory by 5 %, since they depend on which
rank waits for which; not those of `plan`, which trains nothing. Integers, names and texts must be equal. Digests (12 or
more hexadecimal digits) must be equal on a processor like the one they were written down on, with AVX2 and without AVX-512;
elsewhere equal digests must be equal, and different ones different.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

REASONS = {
    "mpi": "needs a build with MPI; .ci/mpi.sh runs its like",
    "machines": "needs several machines",
    "gpu": "needs a GPU",
    "network": "loads models or packages from the network",
    "install": "installs packages of the system",
    "long": "takes longer than the checks have",
    "ci": "is a check that calls this one, or a part of .ci/run in another form",
}
TIMEOUT = 300  # seconds per command
BLOCK = re.compile(r"^```(console|sh|bash)\b")
DIRECTIVE = re.compile(r"^<!-- commands: (?:(not run), (\w+)|(with) (.+)|(fails)|(not compared)) -->$")
CARGO_RUN = re.compile(r"^cargo run --release(?: --quiet)?(?: --bin (?P<bin>[\w-]+))?(?: --(?= |$))?")
DIGEST = re.compile(r"\b[0-9a-f]{12,64}\b")
# What may be any number: before a unit of time or speed.
MEASURED = re.compile(r"\b[\d,]+(?:\.\d+)?(?= (?:s|ms|us|seconds?|minutes?|hours?|tokens/s|GB/s)\b)|(?<=ETA ).*$")
MEASURED_COLUMN = re.compile(r"tokens/s|GB/s|\btime\b|\b\w+_(?:ms|us|gbs)\b")
# What depends on the timing of ranks, as a column or as a word before the number.
PEAK = re.compile(r"\bpeak\b *$")
DECIMAL = re.compile(r"(?<![\w.])-?\d[\d,]*\.\d+(?:e-?\d+)?(?![\w.]*\.\d)")


@dataclass
class Block:
    page: str
    line: int
    mode: str = ""
    argument: str = ""
    commands: list = field(default_factory=list)  # (line, command, lines of output)


def blocks_of(page, text):
    """The command blocks of a page, and errors."""
    found, errors = [], []
    lines = text.splitlines()
    whole_page = DIRECTIVE.match(lines[0]) if lines else None
    at = 0
    while at < len(lines):
        if not BLOCK.match(lines[at]):
            # Blocks of other languages may hold anything.
            if lines[at].startswith("```"):
                at += 1
                while at < len(lines) and not lines[at].startswith("```"):
                    at += 1
            at += 1
            continue
        before = at - 1
        while before >= 0 and not lines[before].strip():
            before -= 1
        directive = DIRECTIVE.match(lines[before]) if before >= 0 else None
        if before >= 0 and lines[before].startswith("<!-- commands") and not directive:
            errors.append(f"{page}:{before + 1}: no such directive: {lines[before]}")
        directive = directive or whole_page
        block = Block(page, at + 1)
        if directive:
            skip, reason, extra, arguments, fails, not_compared = directive.groups()
            block.mode = skip or extra or fails or not_compared
            block.argument = reason or arguments or ""
            if skip and reason not in REASONS:
                errors.append(f"{page}:{before + 1}: {reason} is no reason; there are {', '.join(REASONS)}")
        at += 1
        while at < len(lines) and not lines[at].startswith("```"):
            if lines[at].startswith("$ "):
                number, command = at + 1, lines[at][2:]
                while command.endswith("\\") and at + 1 < len(lines):
                    at += 1
                    command = command[:-1].rstrip() + " " + lines[at].strip()
                block.commands.append((number, without_comment(command), []))
            elif block.commands:
                block.commands[-1][2].append(lines[at])
            at += 1
        at += 1
        if not block.commands and lines[block.line].startswith("#!"):
            continue  # a file, not a command
        if not block.commands:
            errors.append(f"{page}:{block.line}: no line begins with `$ `; is it a command?")
        found.append(block)
    return found, errors


def without_comment(command):
    return re.sub(r"\s{2,}#.*$", "", command).strip()


def without_options(command, arguments):
    """The command without the options that the arguments set anew."""
    for option in set(re.findall(r"--[\w-]+", arguments)) - {"--set"}:
        command = re.sub(rf" {option} \S+", "", command)
    return command


def commands_of_ci():
    text = Path(".ci/run").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = (re.sub(r"\s+", " ", line.strip()) for line in text.splitlines())
    return {line.removeprefix("run ") for line in lines}


# --- Comparing ---------------------------------------------------------------------------------------------------------------


class Digests:
    """Shown digests, and what was printed in their places."""

    def __init__(self):
        self.exact = processor_is_like_the_books()
        self.decimals_exact = False
        self.pairs = {}

    def agree(self, shown, printed, cut):
        if self.exact:
            return printed.startswith(shown) if cut else shown == printed
        if self.pairs.setdefault(shown, printed) != printed:
            return False
        return list(self.pairs.values()).count(printed) == 1


def processor_is_like_the_books():
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return " avx2 " in flags and " avx512f " not in flags


def normal(line):
    line = re.sub(r"[─═]+", "─", line.rstrip())
    return re.sub(r"[ \t]+", " ", line).strip()


def close(shown, printed, tolerance):
    a, b = float(shown.replace(",", "")), float(printed.replace(",", ""))
    mantissa, _, exponent = shown.partition("e")
    last_place = 10.0 ** (int(exponent or 0) - len(mantissa.split(".")[1]))
    return abs(a - b) <= max(tolerance * abs(a), 1.001 * last_place)


def cells(line):
    return [cell.strip() for cell in re.split("[│┆]", line)]


class Lines:
    """Compares lines one after the other; knows the header of the table it is in."""

    def __init__(self, digests):
        self.digests = digests

    def equal(self, shown, printed, header):
        if header and re.match("[│┆]", shown):
            a, b, names = cells(shown), cells(printed), cells(header)
            if len(a) != len(b) or len(a) != len(names):
                return False
            free = [bool(MEASURED_COLUMN.search(name)) for name in names]
            return all(
                f or self.equal_text(x, y, is_peak=bool(PEAK.search(name))) for f, x, y, name in zip(free, a, b, names)
            )
        return self.equal_text(shown, printed)

    def equal_text(self, shown, printed, is_peak=False):
        if shown == printed:
            return True
        cut = shown.endswith("...")
        if cut and not DIGEST.search(shown):
            return self.equal_text(shown[:-3].rstrip(), printed[: len(shown) - 3].rstrip(), is_peak)
        special = re.compile("|".join(p.pattern for p in (DIGEST, MEASURED, DECIMAL)))
        a, b = special.split(shown), special.split(printed)
        if a != b:
            return False
        return all(
            self.equal_token(x, y, cut, is_peak) for x, y in zip(special.finditer(shown), special.finditer(printed))
        )

    def equal_token(self, x, y, cut, is_peak):
        if MEASURED.search(x.string, x.start()) and MEASURED.search(x.string, x.start()).start() == x.start():
            return True
        tolerance = 0.05 if is_peak or PEAK.search(x.string[: x.start()]) else 0.005
        x, y = x[0], y[0]
        if DIGEST.fullmatch(x):
            return bool(DIGEST.fullmatch(y)) and self.digests.agree(x, y, cut)
        return x == y or bool(DECIMAL.fullmatch(y)) and not self.digests.decimals_exact and close(x, y, tolerance)


def masked(line):
    """A line without its numbers, for a run with other arguments; `zero2` stays."""
    return re.sub(r"(?<![A-Za-z\d])[\d.,]*\d(?:e-?\d+)?", "#", MEASURED.sub("#", re.sub(r"ETA .*", "ETA", normal(line))))


def compare_form(shown, printed):
    """None, or the first line, up to the first empty one, whose like was not printed. There may be fewer of a kind than shown."""
    forms = {masked(line) for line in printed}
    for line in shown:
        if not line.strip():
            return None
        if line not in ("...", "[...]") and masked(line) not in forms:
            return f"shown:   {line}\n  printed: no line of this form"
    return None


def compare(shown, printed, digests):
    """None, or what differs first."""
    shown = [normal(line) for line in shown]
    printed = [normal(line) for line in printed]
    while shown and not shown[-1]:
        shown.pop()
    while printed and not printed[-1]:
        printed.pop()
    lines = Lines(digests)
    at, header, skipping = 0, None, False
    for line in shown:
        if line in ("...", "[...]"):
            skipping = True
            continue
        if line.startswith("┌"):
            header = "next"
        elif header == "next":
            header = line
        elif line.startswith("└"):
            header = None
        name = header if header != line else None
        end = len(printed) if skipping else min(at + 1, len(printed))
        hit = next((i for i in range(at, end) if lines.equal(line, printed[i], name)), None)
        if hit is None:
            got = printed[at] if at < len(printed) else "(the end)"
            return f"shown:   {line}\n  printed: {got if not skipping else 'no such line from here on: ' + got}"
        at, skipping = hit + 1, False
    if at < len(printed) and not skipping:
        return f"shown:   (the end)\n  printed: {printed[at]}"
    return None


# --- Running -----------------------------------------------------------------------------------------------------------------


class Runner:
    def __init__(self, root, copy, target, build_projects):
        self.root, self.copy, self.target, self.build_projects = root, copy, target, build_projects
        self.default_bin = re.search(r'^default-run = "(.+)"', (root / "examples/Cargo.toml").read_text(), re.M)[1]
        tracked = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], capture_output=True, check=True)
        for name in filter(None, tracked.stdout.decode().split("\0")):
            source, place = root / name, copy / name
            if source.is_file():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(source.read_bytes())
                place.chmod(source.stat().st_mode)
        (copy / "target").mkdir()
        (copy / "target/release").symlink_to(target / "release")
        (copy / "my-text.txt").write_bytes((root / "LICENSE-APACHE").read_bytes())
        self.begin_page()

    def begin_page(self):
        self.folder, self.old_folder = self.copy, self.copy

    def environment(self):
        environment = os.environ | {"OLDPWD": str(self.old_folder), "CARGO_TERM_COLOR": "never", "RUST_BACKTRACE": "0"}
        environment.pop("CARGO_TARGET_DIR", None)  # projects of pages have their own
        return environment

    def example(self):
        """The program that the project in this folder is, as an example of dp-zero; or what is wrong with it."""
        source = (self.folder / "src/main.rs").read_bytes()
        for snippet in sorted((self.root / "docs/snippets").glob("*.rs")):
            if snippet.read_bytes() == source:
                program = self.target / "debug/examples" / snippet.stem
                if program.is_file():
                    return str(program), None
                return None, f"{program} is not there; cargo test --workspace makes it"
        return None, f"{self.folder}/src/main.rs is no file of docs/snippets"

    def run(self, command, arguments):
        match = CARGO_RUN.match(command)
        if match and self.folder == self.copy:
            name = match["bin"] or self.default_bin
            if not (self.target / "release" / name).is_file():
                return 1, "", f"there is no program {name} in {self.target}/release; build it in release mode first"
            command = f"target/release/{name}{command[match.end():]}"
        elif match and not self.build_projects:
            program, wrong = self.example()
            if wrong:
                return 1, "", wrong
            command = f"cargo metadata --quiet --format-version 1 >resolved.json && {program}{command[match.end():]}"
        if match and arguments:
            command = f"{without_options(command, arguments)} {arguments}"
        with tempfile.NamedTemporaryFile("r") as place:
            script = f'{command}\ncode=$?\nprintf "%s\\n%s" "$PWD" "$OLDPWD" >"{place.name}"\nexit $code'
            try:
                done = subprocess.run(
                    ["bash", "-c", script], cwd=self.folder, env=self.environment(), timeout=TIMEOUT,
                    stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                )
            except subprocess.TimeoutExpired:
                return 1, "", f"not done after {TIMEOUT} s"
            where = place.read().split("\n")
        if len(where) == 2:
            self.folder, self.old_folder = Path(where[0]), Path(where[1] or where[0])
        return done.returncode, done.stdout, done.stderr


def check(block, runner, of_ci, digests, counts, skipped):
    errors = []
    for line, command, shown in block.commands:
        where = f"{block.page}:{line}"
        if block.mode == "not run":
            skipped.append(f"{where}: {command}\n    {block.argument}: {REASONS[block.argument]}")
            continue
        is_shown = any(text.strip() for text in shown)
        if not is_shown and not block.mode and command in of_ci:
            counts["in .ci/run"] += 1
            continue
        print(f"{where}: $ {command}", flush=True)
        begin = time.monotonic()
        code, out, err = runner.run(command, block.argument if block.mode == "with" else "")
        print(f"    code {code}, {time.monotonic() - begin:.1f} s", flush=True)
        counts["run"] += 1
        if (code != 0) != (block.mode == "fails"):
            errors.append(f"{where}: {command}\n  code {code}\n{out[-2000:]}{err[-2000:]}")
        elif is_shown and block.mode in ("", "fails"):
            counts["compared"] += 1
            digests.decimals_exact = " --bin plan" in command
            difference = compare(shown, (err if block.mode == "fails" else out).splitlines(), digests)
            if difference:
                errors.append(f"{where}: {command}\n  {difference}")
        elif is_shown and block.mode == "with":
            counts["compared"] += 1
            difference = compare_form(shown, out.splitlines())
            if difference:
                errors.append(f"{where}: {command}\n  {difference}")
    return errors


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list commands, and run none")
    parser.add_argument("--build-projects", action="store_true", help="build the projects that pages make")
    parser.add_argument("--target", default=os.environ.get("CARGO_TARGET_DIR", "target"), type=Path)
    parser.add_argument("pages", nargs="*", type=Path)
    options = parser.parse_args()
    root = Path.cwd()
    every = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs/src").rglob("*.md"))]
    pages = [p.resolve() for p in options.pages] or every
    errors, skipped, counts = [], [], {"run": 0, "compared": 0, "in .ci/run": 0}
    of_ci, digests = commands_of_ci(), Digests()
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "repository"
        copy.mkdir()
        runner = None if options.list else Runner(root, copy, options.target.resolve(), options.build_projects)
        for page in pages:
            name = str(page.relative_to(root))
            blocks, found = blocks_of(name, page.read_text(encoding="utf-8"))
            errors += found
            if runner:
                runner.begin_page()
            for block in blocks:
                if options.list:
                    for line, command, _ in block.commands:
                        print(f"{name}:{line}: $ {command}   {block.mode} {block.argument}".rstrip())
                else:
                    errors += check(block, runner, of_ci, digests, counts, skipped)
    if skipped:
        print("Not run:\n  " + "\n  ".join(skipped))
    print(f"{counts['run']} commands run, {counts['compared']} outputs compared, {counts['in .ci/run']} more in .ci/run, "
          f"{len(skipped)} not run, {len(errors)} errors; digests compared {'to the digit' if digests.exact else 'with each other'}")
    if errors:
        sys.exit("\n".join(errors))


if __name__ == "__main__":
    main()
