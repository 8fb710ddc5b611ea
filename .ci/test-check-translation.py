"""Tests of check-translation.py: each change of a pair of pages that agree must be found, and named.

usage: test-check-translation.py
"""

import contextlib
import importlib.util
import io
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True  # nothing is left in the folder of the checks
spec = importlib.util.spec_from_file_location("check", Path(__file__).with_name("check-translation.py"))
check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check)

ENGLISH = """# Title

Stage 1 keeps 8/N bytes, stage 2 keeps `grads` for [the other page](other.md#part)
and [the paper](https://example.org/paper), 1.5 times.

## Part

```rust,ignore
{{#include ../snippets/zero.rs:zero}}
let x = 1; // 4 ranks
```

<figure>
{{#include images/zero.svg}}
<figcaption>4 cards, see <a href="english-only.md">there</a>.</figcaption>
</figure>

| a | b |
|---|---|
| `x\\|y` | 3 |

1. One.
"""
CHINESE = """
<div lang="zh-CN">

# 标题

[English](../page.md)

见[论文](https://example.org/paper)和[另一页](other.md#part)：阶段 2 保留 `grads`，是 1.5 倍，阶段 1 保留 8/N 字节。

<a id="part"></a>

## 部分

```rust,ignore
{{#include ../../snippets/zero.rs:zero}}
let x = 1; // 4 个 rank
```

<figure>
{{#include ../images/zero.svg}}
<figcaption>4 张卡，见<a href="../english-only.md">该处</a>。</figcaption>
</figure>

| 甲 | 乙 |
|---|---|
| `x\\|y` | 3 |

1. 其一。

</div>
"""
PAGE, SOURCE = "docs/src/zh/page.md", "docs/src/page.md"

# (what is replaced in the Chinese page, by what, a part of the error)
CHANGES = [
    ("[English](../page.md)\n", "", f"no line that links to {SOURCE}"),
    ("1.5 倍", "1.6 倍", "missing (docs/src/page.md:3): 1.5"),
    ("1.5 倍", "1.6 倍", "not in the English text (docs/src/page.md:3): 1.6"),
    ("`grads`", "梯度", "missing (docs/src/page.md:3): `grads`"),
    ("example.org/paper", "example.org/else", "missing (docs/src/page.md:3): link to https://example.org/paper"),
    ("](other.md#part)", "](../other.md#part)", "missing (docs/src/page.md:3): link to docs/src/zh/other.md#part"),
    ("](other.md#part)", "](other.md)", "missing (docs/src/page.md:3): link to docs/src/zh/other.md#part"),
    ("../english-only.md", "english-only.md", "missing (docs/src/page.md:13): link to docs/src/english-only.md"),
    ("## 部分", "### 部分", "heading ###, where docs/src/page.md:6 has heading ##"),
    ("zero.rs:zero", "zero.rs:ddp", "missing (docs/src/page.md:8): code block:\n{{docs/snippets/zero.rs:zero}}"),
    ("../../snippets", "../snippets", "code block:\n{{docs/src/snippets/zero.rs:zero}}"),
    ("rust,ignore", "rust", "```rust, where docs/src/page.md:8 has ```rust,ignore"),
    ("x = 1", "x = 2", "code block:\n{{docs/snippets/zero.rs:zero}}\nlet x = 2;"),
    ("// 4 个", "// 3 个", "missing (docs/src/page.md:8): 4"),
    ("../images/zero.svg", "../images/one.svg", "missing (docs/src/page.md:13): include docs/src/images/zero.svg"),
    ("4 张卡", "四张卡", "missing (docs/src/page.md:13): 4"),
    ("| 甲 | 乙 |", "| 甲 |", "row of 1, where docs/src/page.md:18 has row of 2"),
    ("| `x\\|y` | 3 |", "| 3 | `x\\|y` |", "missing (docs/src/page.md:20): `x\\|y`"),
    ("| `x\\|y` | 3 |\n", "", "item 1., where docs/src/page.md:20 has row of 2"),
    ("1. 其一。\n", "", "blocks, docs/src/page.md has"),
    ("1. 其一。\n", "1. 其一。\n\n多余。\n", "blocks, docs/src/page.md has"),
]


class Tests(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.write(SOURCE, ENGLISH)
        self.write(PAGE, check.stamp(self.root, SOURCE) + CHINESE)
        for english, chinese in (("README.md", "README.zh-CN.md"), ("docs/src/other.md", "docs/src/zh/other.md")):
            self.write(english, "Text.\n")
            link = "README.md" if english == "README.md" else "../other.md"
            self.write(chinese, f"{check.stamp(self.root, english)}\n[English]({link})\n\n正文。\n")

    def write(self, path, text):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text, encoding="utf-8")

    def errors(self, update=None):
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                check.main(self.root, update)
            except SystemExit as end:
                return str(end)
        return ""

    def test_pages_that_agree_pass(self):
        self.assertEqual(self.errors(), "")

    def test_every_change_is_found(self):
        page = (self.root / PAGE).read_text(encoding="utf-8")
        for old, new, error in CHANGES:
            with self.subTest(old=old, new=new):
                self.assertEqual(page.count(old), 1)
                self.write(PAGE, page.replace(old, new))
                self.assertIn(error, self.errors())
                self.assertNotIn("--update", self.errors())

    def test_the_hash_is_that_of_git(self):
        self.write(SOURCE, "hello\n")
        self.assertIn("git blob ce013625030ba8dba906f756967f9e9ca394464a ", check.stamp(self.root, SOURCE))

    def test_a_change_of_the_english_words_is_found_until_it_is_translated(self):
        old = check.stamp(self.root, SOURCE).split()[-2]
        self.write(SOURCE, ENGLISH.replace("keeps", "holds"))
        self.assertIn(f"`git diff {old} {SOURCE}`", self.errors())
        self.assertIn(f"--update {PAGE}", self.errors())
        self.assertEqual(self.errors(update=PAGE), "")
        self.assertEqual(self.errors(), "")
        self.assertEqual((self.root / PAGE).read_text(encoding="utf-8"), check.stamp(self.root, SOURCE) + CHINESE)

    def test_update_refuses_a_page_that_differs(self):
        before = (self.root / PAGE).read_text(encoding="utf-8")
        self.write(SOURCE, ENGLISH.replace("1.5", "2.5"))
        self.assertIn("missing (docs/src/page.md:3): 2.5", self.errors(update=PAGE))
        self.assertEqual((self.root / PAGE).read_text(encoding="utf-8"), before)
        self.assertIn("not one of", self.errors(update=SOURCE))

    def test_update_leaves_other_pages_alone(self):
        self.write("README.md", "Other text.\n")
        self.assertIn("--update README.zh-CN.md", self.errors(update=PAGE))

    def test_a_page_without_hash_gets_one(self):
        self.write(PAGE, CHINESE.lstrip())
        self.assertIn("does not begin with its hash", self.errors())
        self.assertEqual(self.errors(update=PAGE), "")
        self.assertEqual((self.root / PAGE).read_text(encoding="utf-8"), check.stamp(self.root, SOURCE) + CHINESE)

    def test_a_page_without_english_page_is_found(self):
        self.write("docs/src/zh/new.md", "新页。\n")
        self.assertIn("docs/src/zh/new.md: there is no docs/src/new.md", self.errors())


if __name__ == "__main__":
    unittest.main()
