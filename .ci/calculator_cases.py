"""What the memory calculator is asked: models, counts and settings by the names of plan's options, and what cannot be."""

import itertools
import random

GPT2_SHAPES = [
    # layers, width, heads, context, vocab
    ("12", "768", "12", "1024", "50257"),
    ("48", "1600", "25", "1024", "50257"),
    ("1", "1", "1", "1", "1"),
    ("1", "2", "1", "3", "5"),
    ("3", "35", "7", "11", "97"),
    ("2", "64", "2", "64", "256"),
    ("5", "1023", "3", "77", "1009"),
    ("4", "256", "4", "128", "256"),
    ("24", "1024", "16", "2048", "32003"),
]
LLAMA_SHAPES = [
    # layers, width, heads, context, vocab, hidden, kv-heads
    ("32", "4096", "32", "4096", "32000", "11008", ""),
    ("80", "8192", "64", "4096", "32000", "28672", "8"),
    ("1", "2", "1", "1", "1", "1", ""),
    ("2", "60", "6", "13", "97", "161", "3"),
    ("2", "64", "4", "64", "256", "176", "2"),
    ("7", "330", "11", "129", "1021", "881", "1"),
    ("16", "2048", "32", "8192", "128256", "8192", "8"),
]
COUNTS = ["7.5B", "1", "63", "124439808", "350M", "1.10K", "70b", "1T", "1000T", "999999999999999", "7."]
RANKS = ["1", "2", "3", "4", "7", "8", "16", "33", "64", "100", "513", "4096", "1048576"]
CARDS = ["", "80GiB", "24GB", "80 GiB", "1.5MiB", ".5TiB", "123456789", "7K"]
DTYPES = ["f32", "bf16", "f16"]
PRECISIONS = list(itertools.product(DTYPES, ["", "f32", "parameter"], ["", *DTYPES]))
OPTIMIZERS = ["adamw", "sgd", "sgd-momentum"]
CAPS = ["", "1", "50", "1024", "1025", "4096", "102400"]


def gpt2(layers, width, heads, context, vocab, **more):
    sizes = {"layers": layers, "width": width, "heads": heads, "context": context, "vocab": vocab}
    return {"architecture": "gpt2", **sizes, **more}


def llama(layers, width, heads, context, vocab, hidden, kv_heads="", **more):
    model = {**gpt2(layers, width, heads, context, vocab), "hidden": hidden, "kv-heads": kv_heads}
    return {**model, "architecture": "llama", **more}


# Each says something that the drawn ones may miss.
CHOSEN = [
    # More ranks than parameters: padding is most of it.
    gpt2("1", "1", "1", "1", "1", ranks="1048576", dtype="bf16"),
    {"params": "3", "ranks": "1048576", "dtype": "f16"},
    # One bucket: one buffer. No state at all.
    gpt2("1", "4", "2", "2", "2", ranks="2", optimizer="sgd"),
    # The last norm and one matrix fill the first bucket to its cap, exactly.
    llama("1", "256", "4", "8", "97", "15", ranks="3", **{"bucket-kib": "16"}),
    # The largest sizes; many tensors.
    gpt2("7", "1048576", "1", "1", "1", ranks="3", dtype="f32"),
    gpt2("10000", "16", "2", "8", "256", ranks="5", **{"bucket-kib": "1"}),
    gpt2("1", "8", "1", "1048576", "8", batch="64", ranks="2"),
    llama("1", "2", "1", "8", "1048576", "1048576", ranks="9", dtype="f16"),
    # A Llama with a tied head, a GPT-2 with its own.
    llama("2", "64", "4", "64", "256", "176", "4", head="tied", ranks="6", dtype="bf16"),
    gpt2("2", "64", "4", "64", "256", head="untied", ranks="6", dtype="f16", batch="3"),
    # A vocabulary that is nearly all.
    gpt2("1", "64", "1", "1", "1000000", ranks="1024", dtype="bf16", optimizer="sgd", batch="1", card="1GiB"),
    # Numbers as Rust reads them.
    gpt2("+2", "064", "4", "64", "256", ranks="8"),
    # Figure 1 of the ZeRO paper.
    {"params": "7.5B", "ranks": "64", "dtype": "bf16", "card": "80GiB"},
    # A card that is full to the last byte.
    {"params": "7.5B", "ranks": "64", "dtype": "bf16", "card": "31406250000"},
]


def drawn(number, seed=9):
    """As many inputs, of all kinds; the same ones at each call."""
    draw = random.Random(seed)
    for i in range(number):
        dtype, accum, sent = PRECISIONS[i % len(PRECISIONS)]
        case = {
            "ranks": draw.choice(RANKS),
            "dtype": dtype,
            "grad-accum-dtype": accum,
            "communication-dtype": sent,
            "optimizer": draw.choice(OPTIMIZERS),
            "card": draw.choice(CARDS),
        }
        of_shape = {
            "batch": draw.choice(["1", "2", "5", "16"]),
            "head": draw.choice(["", "tied", "untied"]),
            "bucket-kib": draw.choice(CAPS),
        }
        kind = draw.choice(["gpt2", "gpt2", "llama", "llama", "count"])
        if kind == "count":
            yield {"params": draw.choice(COUNTS), **case}
        elif kind == "gpt2":
            yield gpt2(*draw.choice(GPT2_SHAPES), **of_shape, **case)
        else:
            yield llama(*draw.choice(LLAMA_SHAPES), **of_shape, **case)


def all_cases():
    """Without the texts that are empty: these are defaults."""
    for case in [*CHOSEN, *drawn(400)]:
        yield {key: text for key, text in case.items() if text != ""}


GPT = gpt2("2", "64", "4", "64", "256", ranks="4")
LLAMA = llama("2", "64", "4", "64", "256", "176", ranks="4")
COUNT = {"params": "7B", "ranks": "4"}

# Inputs that the page and the program refuse: what, and the field and the words by which the page says so. Without a field
# the words stand above the form.
REFUSED = [
    ({**GPT, "width": "30"}, "width", "width must be a multiple of heads (4)"),
    ({**LLAMA, "width": "60"}, "width", "width / heads (60 / 4) must be even"),
    ({**LLAMA, "kv-heads": "3"}, "kv-heads", "heads (4) must be a multiple of kv heads"),
    ({**GPT, "layers": "0"}, "layers", "must be at least 1"),
    ({**GPT, "layers": "10001"}, "layers", "must be at most 10,000"),
    ({**GPT, "layers": "10000", "width": "1048576"}, "layers", "more than 100T parameters"),
    ({**GPT, "width": "1048580"}, "width", "must be at most 1,048,576"),
    ({**GPT, "batch": "1048577"}, "batch", "must be at most 1,048,576"),
    ({**GPT, "batch": "1048576", "context": "65"}, "batch", "must be at most 67,108,864 tokens"),
    ({**GPT, "heads": "four"}, "heads", 'expected a whole number, got "four"'),
    ({**GPT, "heads": "-4"}, "heads", 'expected a whole number, got "-4"'),
    ({**GPT, "vocab": "1e3"}, "vocab", 'expected a whole number, got "1e3"'),
    ({**GPT, "ranks": "0"}, "ranks", "must be at least 1"),
    ({**GPT, "ranks": "2.5"}, "ranks", 'expected a whole number, got "2.5"'),
    ({**GPT, "bucket-kib": "0"}, "bucket-kib", "must be at least 1"),
    ({**GPT, "dtype": "f64"}, "dtype", 'expected f32, bf16 or f16, got "f64"'),
    ({**GPT, "optimizer": "lion"}, "optimizer", 'expected adamw, sgd or sgd-momentum, got "lion"'),
    ({**GPT, "head": "loose"}, "head", 'expected tied or untied, got "loose"'),
    ({**GPT, "grad-accum-dtype": "bf16"}, "grad-accum-dtype", 'expected f32 or parameter, got "bf16"'),
    ({**GPT, "communication-dtype": "u8"}, "communication-dtype", 'expected f32, bf16 or f16, got "u8"'),
    ({**GPT, "card": "80 apples"}, "card", 'expected a size such as 80GiB, 24GB or 512MiB, got "80 apples"'),
    ({**GPT, "card": "1.5"}, "card", "expected a size"),
    ({**GPT, "card": "0GiB"}, "card", "must be at least 1 byte"),
    ({**GPT, "card": "16EiB"}, "card", "must be less than 16 EiB"),
    ({**GPT, "card": "99999999999999999999PB"}, "card", "must be less than 16 EiB"),
    ({**COUNT, "params": "7.5X"}, "params", 'expected a count such as 7.5B, 350M, 1T or 120000, got "7.5X"'),
    ({**COUNT, "params": "0"}, "params", "must be at least 1"),
    ({**COUNT, "params": "1001T"}, "params", "must be at most 1000T"),
    ({**COUNT, "params": "1.5"}, "params", "is not a whole number of parameters"),
    ({**COUNT, "layers": "12"}, None, "layers belongs to a shape, and params is a count"),
    ({**GPT, "hidden": "176"}, None, "hidden is not of the gpt2 shape"),
    ({**GPT, "architecture": "bert"}, None, 'architecture: expected gpt2 or llama, got "bert"'),
    # A name that every object of JavaScript has.
    ({**GPT, "architecture": "toString"}, None, 'architecture: expected gpt2 or llama, got "toString"'),
    ({**GPT, "colour": "red"}, None, "colour: this page knows no such key"),
    ({key: text for key, text in GPT.items() if key != "vocab"}, "vocab", "is missing"),
    ({key: text for key, text in LLAMA.items() if key != "hidden"}, "hidden", "is missing"),
]
