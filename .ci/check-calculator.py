"""Checks the book's memory calculator in headless Chromium against the program `plan`: every number of hundreds of inputs, by
links and by keys; what both refuse; names of controls, and focus. How the page looks is for book-screenshots.py.

usage: check-calculator.py BOOK PLAN

BOOK is the folder of the built book, PLAN the program.
"""

import itertools
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

sys.dont_write_bytecode = True  # nothing is left in the folder of the checks
from calculator_cases import REFUSED, all_cases
from chromium import Chromium

# Rows of the page's table, and what they are in plan's JSON.
ROWS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer state": "optimizer",
    "communication buffers": "communication",
    "activations, estimate": "activations",
    "total": "total",
    "sent per step": "bytes_sent_per_step",
    "buckets": "num_buckets",
}
STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]

# The table as its readers see it: by row and column, the exact number where a cell has it.
TABLE = """Object.fromEntries([...document.querySelectorAll("#calc-table tbody tr")].map((row) => [
    row.querySelector("th").textContent,
    [...row.querySelectorAll("td")].map((cell) => (cell.querySelector("small") ?? cell).textContent),
]))"""
ANSWER = """document.getElementById("calc-answer").textContent"""
NOTE = """document.querySelector("#calc-bars .calc-note").textContent"""
# Error by field, and what stands above the form.
ERRORS = """({
    fields: Object.fromEntries([...document.querySelectorAll(".calc-field:not([hidden])")]
        .map((field) => [field.querySelector("input, select"), field.querySelector(".calc-error").textContent])
        .filter(([control, words]) => words !== "" || control.getAttribute("aria-invalid") === "true")
        .map(([control, words]) => [control.name, words])),
    above: document.getElementById("calc-problems").innerText,
    results: [...document.querySelectorAll(".calc-result")].filter((part) => part.checkVisibility()).map((part) => part.innerText),
})"""
# What the page's keys act on now.
FOCUS = """(({ name = "", value = "", type = "" }) => ({ name, value, type }))(document.activeElement)"""


class Plan:
    """The program."""

    def __init__(self, program, folder):
        self.program = program
        self.json = Path(folder) / "plan.json"

    def run(self, arguments):
        command = [self.program, *arguments, "--json", self.json]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    def report(self, case):
        return self.report_of(itertools.chain.from_iterable((f"--{key}", text) for key, text in case.items()))

    def report_of(self, arguments):
        done = self.run(arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(self.json.read_text())


def number(text):
    return None if text == "-" else int(text.replace(",", ""))


def differences(browser, report):
    """What the page shows and the program does not say, in words."""
    table, answer = browser.evaluate(TABLE), browser.evaluate(ANSWER)
    found = []
    for i, row in enumerate(report["rows"]):
        assert row["strategy"] == STRATEGIES[i]
        for title, key in ROWS.items():
            shown = number(table[title][i]) if title in table else "nothing"
            if shown != row[key]:
                found.append(f"{row['strategy']}, {title}: {shown} on the page, {row[key]} in plan")
        if row["basis"] != table["basis"][i].replace(" ", "_"):
            found.append(f"{row['strategy']}: basis {table['basis'][i]}, {row['basis']} in plan")
        if row["fits"] is not None and table["fits the card"][i] != ("yes" if row["fits"] else "no"):
            found.append(f"{row['strategy']}: fits {table['fits the card'][i]}, {row['fits']} in plan")
    if report["card"] and f"({report['card']:,} bytes)" not in browser.evaluate(NOTE):
        found.append(f"{browser.evaluate(NOTE)}: plan's card is {report['card']} bytes")
    for choice in report["choices"]:
        fits, zero3 = choice["smallest"], report["rows"][3]["fits"]
        says = f": {fits} is the smallest stage that fits" if fits else "zero3 would with" if zero3 else ": none fits"
        if says not in answer:
            found.append(f"the answer is `{answer}`, plan's choice {choice}")
    if f"{report['num_params']:,} parameters" not in answer:
        found.append(f"the answer is `{answer}`, plan has {report['num_params']} parameters")
    # What is worked out is the sum of what stands there, and the chosen strategy's.
    worked = browser.evaluate(
        """[...document.querySelectorAll("#calc-formula strong")].map((s) => s.textContent)"""
    )
    row = next(r for r in report["rows"] if r["strategy"] == chosen(browser))
    keys = ["parameters", "gradients", "optimizer", "communication", "activations", "total", "bytes_sent_per_step"]
    expected = [row[key] for key in keys if row[key] or key not in ("communication", "activations")]
    if worked != [f"= {bytes:,} bytes" for bytes in expected]:
        found.append(f"worked out: {worked}, {expected} in plan")
    return found


def chosen(browser):
    return browser.evaluate("""document.querySelector('input[name="strategy"]:checked').value""")


def follow(browser, case):
    """Goes to the link of a case in the page that is open, as the browser's back button does."""
    link = json.dumps("?" + urlencode(case))
    browser.evaluate(f"history.replaceState(null, '', {link}), dispatchEvent(new PopStateEvent('popstate')), 0")


def check_numbers(browser, page, plan):
    """All cases by their links; every sixteenth loads the page anew."""
    errors, cases = [], list(all_cases())
    for i, case in enumerate(cases):
        link = case | {"strategy": STRATEGIES[i % 4]}
        if i % 16 == 0:
            browser.open(f"{page}?{urlencode(link)}")
        else:
            follow(browser, link)
        errors += [f"{case}: {words}" for words in differences(browser, plan.report(case))]
        # The command that the page gives is another one, with the same answer.
        if i % 8 == 1:
            command = browser.evaluate("""document.getElementById("calc-command").textContent""")
            arguments = shlex.split(command.replace("\\\n", " "))
            assert arguments[:6] == ["cargo", "run", "--release", "--bin", "plan", "--"], command
            errors += [f"{command}: {words}" for words in differences(browser, plan.report_of(arguments[6:]))]
    return len(cases), errors


def check_refused(browser, page, plan):
    errors = []
    for i, (case, field, words) in enumerate(REFUSED):
        if i % 4 == 0:
            browser.open(f"{page}?{urlencode(case)}")
        else:
            follow(browser, case)
        said = browser.evaluate(ERRORS)
        above, fields = said["above"], said["fields"]
        right = words in fields.get(field, "") if field else (words in above and not fields)
        if not right or (field and len(fields) > 1):
            errors.append(f"{case}: expected `{words}` at {field or 'the top'}, got {said}")
        if said["results"] or words not in browser.evaluate(ANSWER):
            errors.append(f"{case}: there are numbers, or the answer does not say what is wrong")
        shown = browser.evaluate(f"document.getElementById('calc-form').elements[{json.dumps(field)}]?.value")
        if field and shown != case.get(field, ""):
            errors.append(f"{case}: the field shows {shown}")
        done = plan.run(itertools.chain.from_iterable((f"--{key}={text}",) for key, text in case.items()))
        if done.returncode != 2:
            errors.append(f"{case}: plan ends with code {done.returncode}: {done.stderr}")
    twice = urlencode([("params", "7B"), ("ranks", "4"), ("ranks", "8")])
    browser.open(f"{page}?{twice}")
    if "ranks is there twice" not in browser.evaluate(ERRORS)["above"]:
        errors.append(f"{twice}: nothing is said")
    return errors


def focus(browser, name):
    """Tabs until the control has the focus, and no longer than there are controls."""
    for _ in range(30):
        if browser.evaluate(FOCUS)["name"] == name:
            return
        browser.press("Tab")
    raise AssertionError(f"the key Tab does not come to {name}")


def go_before_form(browser):
    """To the last of the links there, so that Tab need not go through the book's sidebar."""
    browser.evaluate("""document.querySelector(".calc-examples a:last-child").focus(), 0""")


def enter(browser, name, text):
    """Makes a control have this value, by keys alone."""
    focus(browser, name)
    now = browser.evaluate(FOCUS)
    if now["type"] == "text":
        browser.evaluate("document.activeElement.select(), 0")
        if text:
            browser.type(text)
        else:
            browser.press("Backspace")
    for _ in range(10):
        now = browser.evaluate(FOCUS)
        if now["value"] == text:
            return
        key = "ArrowDown"
        if now["type"] == "select-one":
            options = browser.evaluate("[...document.activeElement.options].map((o) => o.value)")
            key = "ArrowDown" if options.index(text) > options.index(now["value"]) else "ArrowUp"
        browser.press(key)
    raise AssertionError(f"{name}: keys make it {now['value']}, not {text}")


def check_keys(browser, page, plan):
    """Some cases by keys alone, each from what the one before has left; the link that comes of it shows the same."""
    errors = []
    cases = [case for case in all_cases() if "params" not in case or "." not in case["params"]][5::50]
    browser.open(page)
    for case in cases:
        kind = "count" if "params" in case else case["architecture"]
        enter_kind(browser, kind)
        fields = browser.evaluate(
            """[...document.querySelectorAll(".calc-field:not([hidden])")].map((f) => f.querySelector("input, select").name)"""
        )
        texts = {"batch": "1", "ranks": "8", "dtype": "f32", "optimizer": "adamw"} | case
        for name in fields:
            enter(browser, name, texts.get(name, ""))
        browser.press("Enter")
        report = plan.report(case)
        errors += [f"keys, {case}: {words}" for words in differences(browser, report)]
        link = browser.evaluate("location.href")
        written = dict(parse_qsl(urlsplit(link).query))
        missing = {key: text for key, text in case.items() if written.get(key) != text}
        if missing:
            errors.append(f"keys, {case}: the link lacks {missing}")
        before = browser.evaluate(TABLE)
        browser.open(link)
        if browser.evaluate(TABLE) != before:
            errors.append(f"keys, {case}: {link} shows another table")
    # An error comes as one types, and goes.
    enter_kind(browser, "gpt2")
    enter(browser, "heads", "4")
    for width, words in [("100", ""), ("101", "width must be a multiple of heads (4)"), ("104", "")]:
        go_before_form(browser)
        enter(browser, "width", width)
        said = browser.evaluate(ERRORS)["fields"]
        if said != ({"width": words} if words else {}):
            errors.append(f"keys, width {width}: {said}")
    # Strategies are chosen by arrows, which here do not turn the book's pages.
    focus(browser, "strategy")
    for strategy in ("zero3", "ddp", "zero1"):
        enter(browser, "strategy", strategy)
        browser.press("ArrowRight")
        browser.press("ArrowLeft")
        if chosen(browser) != strategy:
            errors.append(f"keys: {chosen(browser)} is chosen, not {strategy}")
    browser.evaluate("""document.getElementById("calc-table").focus(), 0""")
    browser.press("ArrowRight")
    if browser.evaluate("location.pathname") != urlsplit(page).path:
        errors.append("keys: an arrow key in the table turns the page")
    return len(cases), errors


def enter_kind(browser, kind):
    go_before_form(browser)
    focus(browser, "kind")
    for _ in range(4):
        if browser.evaluate("document.activeElement.value") == kind and browser.evaluate(
            "document.activeElement.checked"
        ):
            return
        browser.press("ArrowRight")
    raise AssertionError(f"arrow keys do not choose {kind}")


def check_access(browser, page):
    """Each control has a name and a visible focus, the answer is announced, nothing comes from the network."""
    errors = []
    browser.open(page)
    for node in browser.call("Accessibility.getFullAXTree")["nodes"]:
        role, name = (node.get(key, {}).get("value", "") for key in ("role", "name"))
        if not node.get("ignored") and role in ("textbox", "combobox", "radio", "radiogroup", "region") and not name:
            errors.append(f"a {role} has no name")
    for part in ("#calc-bars [role=img][aria-label]", "#calc-table caption", "#calc-table th[scope=col]"):
        if not browser.evaluate(f"document.querySelector('{part}')?.isConnected ?? false"):
            errors.append(f"{part} is not there")
    live = browser.evaluate("""document.getElementById("calc-answer").getAttribute("aria-live")""")
    if live != "polite":
        errors.append(f"the answer is aria-live={live}")
    headers = browser.evaluate("""document.querySelectorAll("#calc-table th:not([scope])").length""")
    if headers:
        errors.append(f"{headers} headers of the table have no scope")
    go_before_form(browser)
    focus(browser, "layers")
    outline = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    if outline == "none":
        errors.append("the focus cannot be seen")
    errors += [f"asks for {url}" for url in browser.requests() if not url.startswith(("file:", "data:"))]
    return errors


def check_other_pages(browser, book):
    errors = []
    for name in ("plan.html", "concepts/zero.html"):
        browser.open((book / name).as_uri())
        if browser.evaluate("document.querySelector('[id^=calc-]') !== null"):
            errors.append(f"{name} has a part of the calculator")
        errors += [f"{name}: {words}" for words in browser.complaints()]
    return errors


def main(book, program):
    page = (book.resolve() / "calculator.html").as_uri()
    with tempfile.TemporaryDirectory() as folder, Chromium() as browser:
        plan = Plan(program, folder)
        browser.resize(1280)
        num_cases, errors = check_numbers(browser, page, plan)
        errors += check_refused(browser, page, plan)
        num_typed, more = check_keys(browser, page, plan)
        errors += more + check_access(browser, page) + browser.complaints()
        errors += check_other_pages(browser, book.resolve())
    print(f"{num_cases} links, {len(REFUSED)} refused, {num_typed} by keys: {len(errors)} errors")
    if errors:
        sys.exit("\n".join(errors[:40]))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*(Path(argument) for argument in sys.argv[1:]))
