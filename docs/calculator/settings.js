// From texts, as a form or a link has them, to a model and its settings, or to what is wrong with them.
//
// Keys, defaults and limits are those of the options of `plan`, so a link reads like its command line.

"use strict";

const dpSettings = (() => {
    const LARGEST = 1n << 20n; // dp_examples::options::LARGEST
    const MOST_LAYERS = 10_000n; // dp_examples::memory_check
    const MOST_TOKENS = 1n << 26n;
    const MOST_PARAMETERS = 100_000_000_000_000n;
    const MOST_COUNTED = 1_000_000_000_000_000n; // dp_examples::sizes
    const MOST_BYTES = (1n << 64n) - 1n; // dp_examples::sizes: what no longer fits into 64 bits

    const DTYPES = ["f32", "bf16", "f16"];
    // Which choice each key allows. An empty text is the default.
    const CHOICES = {
        head: ["tied", "untied"],
        dtype: DTYPES,
        optimizer: ["adamw", "sgd", "sgd-momentum"],
        "grad-accum-dtype": ["f32", "parameter"],
        "communication-dtype": DTYPES,
        strategy: dpPlan.STRATEGIES,
    };
    // The keys of each kind of subject, in the order of the form.
    const SUBJECTS = {
        gpt2: ["layers", "width", "heads", "context", "vocab", "head", "batch"],
        llama: ["layers", "width", "heads", "kv-heads", "hidden", "context", "vocab", "head", "batch"],
        count: ["params"],
    };
    const TRAINING = ["ranks", "dtype", "optimizer", "grad-accum-dtype", "communication-dtype", "bucket-kib", "card", "strategy"];
    const DEFAULTS = { batch: "1", ranks: "8", dtype: "f32", optimizer: "adamw", strategy: "zero2" };
    const OPTIONAL = ["kv-heads", "head", "grad-accum-dtype", "communication-dtype", "bucket-kib", "card"];

    // All keys that count for this kind of subject.
    const keysOf = (kind) => [...SUBJECTS[kind], ...(kind === "count" ? withoutBuckets : TRAINING)];
    // The formulas know no buckets.
    const withoutBuckets = TRAINING.filter((key) => key !== "bucket-kib");

    const grouped = (number) => number.toString().replace(/\B(?=(\d{3})+$)/g, ",");

    class Wrong extends Error {}

    // A whole number of at least 1: dp_examples::options::positive.
    function positive(text) {
        if (!/^\+?\d+$/.test(text)) {
            throw new Wrong(`expected a whole number, got "${text}"`);
        }
        const value = BigInt(text.replace("+", ""));
        if (value === 0n) {
            throw new Wrong("must be at least 1");
        }
        if (value > LARGEST) {
            throw new Wrong(`must be at most ${grouped(LARGEST)}`);
        }
        return value;
    }

    // A number of parameters, exactly: dp_examples::sizes::count.
    function count(text) {
        const parts = /^(\d+)(?:\.(\d*))?([KMBT]?)$/i.exec(text);
        if (parts === null) {
            throw new Wrong(`expected a count such as 7.5B, 350M, 1T or 120000, got "${text}"`);
        }
        const digits = { "": 0, K: 3, M: 6, B: 9, T: 12 }[parts[3].toUpperCase()];
        const fraction = (parts[2] ?? "").replace(/0+$/, "");
        if (fraction.length > digits) {
            throw new Wrong("is not a whole number of parameters");
        }
        const value = BigInt(parts[1] + fraction + "0".repeat(digits - fraction.length));
        if (value === 0n) {
            throw new Wrong("must be at least 1");
        }
        if (value > MOST_COUNTED) {
            throw new Wrong("must be at most 1000T");
        }
        return value;
    }

    // A card's memory in bytes, as the crate bytesize reads it: powers of 1024 with an i, else of 1000.
    function bytes(text) {
        const parts = /^(\d+\.?\d*|\.\d+)\s*([KMGTPE]?)(i?)B?$/i.exec(text);
        const unitless = parts !== null && parts[2] === "" && (parts[3] !== "" || !/b$/i.test(text));
        if (parts === null || (unitless && !/^\d+$/.test(text))) {
            throw new Wrong(`expected a size such as 80GiB, 24GB or 512MiB, got "${text}"`);
        }
        const power = BigInt(" KMGTPE".indexOf(parts[2].toUpperCase() || " "));
        const factor = (parts[3] === "" ? 1000n : 1024n) ** power;
        const isWhole = !parts[1].includes(".");
        const value = isWhole ? BigInt(parts[1]) * factor : BigInt(Math.trunc(Number(parts[1]) * Number(factor)));
        if (value === 0n) {
            throw new Wrong("must be at least 1 byte");
        }
        if (value >= MOST_BYTES) {
            throw new Wrong("must be less than 16 EiB");
        }
        return value;
    }

    function oneOf(choices) {
        return (text) => {
            if (!choices.includes(text)) {
                throw new Wrong(`expected ${choices.slice(0, -1).join(", ")} or ${choices.at(-1)}, got "${text}"`);
            }
            return text;
        };
    }

    const parserOf = (key) =>
        key in CHOICES ? oneOf(CHOICES[key]) : { params: count, card: bytes }[key] ?? positive;

    // `texts` by key, of a `kind` of subject, to `{ subject, settings, card, strategy }`, or to `{ errors }`: words by key.
    function read(kind, texts) {
        const errors = {};
        const values = {};
        for (const key of keysOf(kind)) {
            const text = (texts[key] ?? DEFAULTS[key] ?? "").trim();
            try {
                if (text !== "") {
                    values[key] = parserOf(key)(text);
                } else if (!OPTIONAL.includes(key)) {
                    throw new Wrong("is missing");
                }
            } catch (error) {
                if (!(error instanceof Wrong)) {
                    throw error;
                }
                errors[key] = error.message;
            }
        }
        const model = kind === "count" ? undefined : modelOf(kind, values);
        if (model !== undefined) {
            Object.assign(errors, wrongTogether(model, values.batch), errors);
        }
        if (Object.keys(errors).length > 0) {
            return { errors };
        }
        return {
            subject: model === undefined ? { numParams: values.params } : { model },
            settings: {
                ranks: values.ranks,
                dtype: values.dtype,
                optimizer: values.optimizer,
                gradAccum: values["grad-accum-dtype"] ?? defaultOf("grad-accum-dtype", kind),
                communicationDtype: values["communication-dtype"],
                bucketCap: values["bucket-kib"] && values["bucket-kib"] * 1024n,
                batch: values.batch,
            },
            card: values.card,
            strategy: values.strategy,
        };
    }

    function modelOf(kind, values) {
        return {
            architecture: kind,
            layers: values.layers,
            width: values.width,
            heads: values.heads,
            kvHeads: values["kv-heads"] ?? values.heads,
            hidden: values.hidden,
            context: values.context,
            vocab: values.vocab,
            tiedHead: (values.head ?? defaultOf("head", kind)) === "tied",
        };
    }

    // What a choice that is left open is, where that depends on the subject.
    function defaultOf(key, kind) {
        switch (key) {
            case "head":
                return kind === "gpt2" ? "tied" : "untied";
            case "grad-accum-dtype":
                return kind === "count" ? "parameter" : "f32";
        }
    }

    // Sizes that do not go together: GptConfig::validate, LlamaConfig::validate, memory_check::within_limits. Those that are
    // missing or wrong by themselves are undefined.
    function wrongTogether(model, batch) {
        const { architecture, layers, width, heads, kvHeads, context, vocab, hidden = 0n } = model;
        const isLlama = architecture === "llama";
        const known = (...sizes) => sizes.every((size) => size !== undefined);
        const errors = {};
        if (known(width, heads) && width % heads !== 0n) {
            errors.width = `width must be a multiple of heads (${heads})`;
        } else if (isLlama && known(width, heads) && (width / heads) % 2n !== 0n) {
            errors.width = `width / heads (${width} / ${heads}) must be even, since features are rotated in pairs`;
        }
        if (isLlama && known(heads, kvHeads) && heads % kvHeads !== 0n) {
            errors["kv-heads"] = `heads (${heads}) must be a multiple of kv heads`;
        }
        if (layers > MOST_LAYERS) {
            errors.layers = `must be at most ${grouped(MOST_LAYERS)}`;
        } else if (
            known(layers, width, vocab) &&
            (layers * (12n * width + 3n * hidden) + 2n * vocab) * width > MOST_PARAMETERS
        ) {
            errors.layers = "layers, width, hidden and vocabulary make more than 100T parameters";
        }
        if (known(batch, context) && batch * context > MOST_TOKENS) {
            errors.batch = `batch x context (${context}) must be at most ${grouped(MOST_TOKENS)} tokens`;
        }
        return errors;
    }

    return { read, keysOf, defaultOf, grouped, SUBJECTS, TRAINING, DEFAULTS };
})();
