#!/usr/bin/env python3
"""Writes a C source that defines every function of a library that cudarc may link to.

    stubs.py BINDINGS FEATURE CODE > stubs.c

BINDINGS is a file of cudarc's `sys` modules, FEATURE the version it is built for (such as cuda-13000, or nccl-02030), CODE the
library's status for "not supported". Each function is weak, so that one defined elsewhere takes its place; called, it names itself on
stderr and returns CODE.
"""

import re
import sys

# What cudarc links to is declared in the function that calls it, which may have a condition.
FUNCTION = re.compile(r"(?:#\[cfg\(([^\n]*)\)\]\n)?pub unsafe fn (\w+)\(")
DECLARATION = re.compile(r'extern "C" \{\s+fn (\w+)\(')

HEAD = """#include <stdio.h>
static int not_supported(const char *name) {
    fprintf(stderr, "CUDA simulator: %s is not simulated\\n", name);
    return CODE;
}
#define STUB(name) __attribute__((weak)) int name(void) { return not_supported(#name); }
"""


def main():
    path, feature, code = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        text = file.read()
    linked = set(DECLARATION.findall(text))
    names = [name for cfg, name in FUNCTION.findall(text) if name in linked and (not cfg or f'"{feature}"' in cfg)]
    if not names:
        sys.exit(f"no function for {feature} in {path}")
    print(HEAD.replace("CODE", code))
    for name in sorted(set(names)):
        print(f"STUB({name})")


if __name__ == "__main__":
    main()
