"""Looks up each test that the book's page of guarantees names: the file is there, and has a function of that name.

usage: check-guarantees.py docs/src/guarantees.md      (in the root of the repository)
"""

import re
import sys
from pathlib import Path

FOLDERS = {"core": "dp-core/tests", "zero": "dp-zero/tests"}


def main(page):
    errors, found = [], 0
    for number, line in enumerate(Path(page).read_text(encoding="utf-8").splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 2 or cells[1] in ("tests", "---"):
            continue
        if cells[1].startswith("doc tests of "):
            continue
        for part in cells[1].split("; "):
            match = re.fullmatch(r"`([\w/.-]+\.rs)`: (`\w+`(?:, `\w+`)*)", part)
            if not match:
                errors.append(f"{page}:{number}: not `file.rs`: `test`, ...: {part}")
                continue
            folder, _, rest = match[1].partition("/")
            path = Path(FOLDERS.get(folder, folder)) / rest
            source = path.read_text(encoding="utf-8") if path.is_file() else ""
            for test in re.findall(r"`(\w+)`", match[2]):
                found += 1
                if not re.search(rf"\bfn {test}\(", source):
                    errors.append(f"{page}:{number}: {path} has no test `{test}`")
    print(f"{found} tests, {len(errors)} errors")
    if errors or not found:
        sys.exit("\n".join(errors))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
