"""Opens a file of exported weights with Python's safetensors, and compares names, shapes and dtypes with the manifest of the
checkpoint that it was exported from.

usage: check-weights.py WEIGHTS.safetensors MANIFEST.json

It needs the packages safetensors and numpy. The manifest is what `checkpoint inspect --json` prints.
"""

import json
import sys

from safetensors import safe_open

# Candle's names of dtypes, where safetensors has another one than the same in capitals.
OTHER_NAMES = {"f8e4m3": "F8_E4M3"}
# What numpy can hold.
NUMPY = {"U8", "U32", "I16", "I32", "I64", "F16", "F32", "F64"}


def main(weights, manifest):
    with open(manifest, encoding="utf-8") as file:
        parameters = json.load(file)["parameters"]
    expected = {p["name"]: (p["shape"], OTHER_NAMES.get(p["dtype"], p["dtype"].upper())) for p in parameters}
    if not expected:
        sys.exit(f"{manifest}: no parameters")
    errors, found, elements = [], {}, 0
    with safe_open(weights, framework="numpy") as file:
        for name in file.keys():
            tensor = file.get_slice(name)
            found[name] = (list(tensor.get_shape()), tensor.get_dtype())
            if found[name][1] in NUMPY:
                values = file.get_tensor(name)
                elements += values.size
                if values.dtype.kind == "f" and not (abs(values) < float("inf")).all():
                    errors.append(f"{name}: values that are not finite")
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            errors.append(f"{name}: {found.get(name)} in the weights, {expected.get(name)} in the manifest")
    print(f"{len(found)} tensors with {elements} elements, {len(errors)} errors")
    if errors:
        sys.exit("\n".join(errors))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
