"""Takes a picture of each page of a built book, at the width of a desktop and of a phone, light and dark.

usage: book-screenshots.py BOOK OUT [--page NAME...]

Needs Chromium, see chromium.py. Fails where a page is wider than the window, an image is missing, text or pictures stick out of
the page, a page asks for something that is not there, or its scripts fail. Each picture is the whole page: OUT/PAGE-WIDTH-THEME.jpg.
"""

import argparse
import sys
from pathlib import Path

sys.dont_write_bytecode = True  # nothing is left in the folder of the checks
from chromium import Chromium

WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
# mdBook's themes of these names; it remembers the reader's choice under `mdbook-theme`.
THEMES = {"light": "light", "dark": "navy"}
# Pages that are made of others, or shown at other addresses.
LEFT_OUT = {"404.html", "toc.html", "print.html"}

# What is wrong with the layout, as a list of texts. Wide tables and code scroll inside a box of their own.
LAYOUT = """(width) => {
    const errors = [], root = document.documentElement;
    if (root.scrollWidth > width) errors.push(`page is ${root.scrollWidth} wide, window ${width}`);
    for (const image of document.images)
        if (!image.complete || image.naturalWidth === 0) errors.push(`image is missing: ${image.src}`);
    // Not of the whole text: it would scroll as well.
    const scrolls = e => {
        for (; e.tagName !== 'MAIN'; e = e.parentElement)
            if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(e).overflowX) && e.scrollWidth > e.clientWidth) return true;
        return false;
    };
    for (const e of document.querySelectorAll('main *')) {
        const box = e.getBoundingClientRect();
        if (box.width > 0 && box.right > width + 1 && !scrolls(e))
            errors.push(`<${e.tagName.toLowerCase()}> ends at ${Math.round(box.right)}: ${(e.textContent || '').trim().slice(0, 60)}`);
    }
    // Labels of a picture that lie on each other, or leave it.
    for (const svg of document.querySelectorAll('main figure svg')) {
        const frame = svg.getBoundingClientRect(), boxes = [...svg.querySelectorAll('text')].map(t => [t, t.getBoundingClientRect()]);
        for (const [t, b] of boxes) {
            if (b.left < frame.left - 1 || b.right > frame.right + 1 || b.bottom > frame.bottom + 1)
                errors.push(`label leaves its picture: ${t.textContent}`);
            for (const [u, c] of boxes)
                if (t !== u && t.compareDocumentPosition(u) & 4
                    && Math.min(b.right, c.right) - Math.max(b.left, c.left) > 1 && Math.min(b.bottom, c.bottom) - Math.max(b.top, c.top) > 4)
                    errors.push(`labels lie on each other: ${t.textContent} / ${u.textContent}`);
        }
    }
    return errors;
}"""


def look(browser, book, pages, out):
    """Takes all pictures; returns what is wrong."""
    errors = []
    for width_name, (width, height) in WIDTHS.items():
        browser.resize(width, height)
        for theme_name, theme in THEMES.items():
            browser.prefer(theme_name)
            with browser.before_each_page(f"localStorage.setItem('mdbook-theme', '{theme}')"):
                for path in pages:
                    name = path.relative_to(book).as_posix()
                    browser.open(path.as_uri())
                    said = browser.evaluate(f"({LAYOUT})({width})")
                    shown = browser.evaluate("document.documentElement.classList.value")
                    if theme not in shown.split():
                        said.append(f"the theme is not {theme}: {shown}")
                    picture = out / f"{name.removesuffix('.html').replace('/', '-')}-{width_name}-{theme_name}.jpg"
                    browser.screenshot(picture)
                    errors += [f"{name}, {width_name}, {theme_name}: {text}" for text in said + browser.complaints()]
    return errors


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("book", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--page", nargs="*", help="names like concepts/zero.html; all pages unless given")
    options = parser.parse_args()
    book = options.book.resolve()
    pages = [p for p in sorted(book.rglob("*.html")) if p.name not in LEFT_OUT]
    if options.page:
        pages = [p for p in pages if p.relative_to(book).as_posix() in options.page]
    if not pages:
        sys.exit(f"{book}: no pages")
    options.out.mkdir(parents=True, exist_ok=True)
    with Chromium() as browser:
        errors = look(browser, book, pages, options.out)
    pictures = len(pages) * len(WIDTHS) * len(THEMES)
    print(f"{pictures} pictures of {len(pages)} pages in {options.out}, {len(errors)} errors")
    if errors:
        sys.exit("\n".join(errors))


if __name__ == "__main__":
    main()
