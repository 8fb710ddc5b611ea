// The calculator's page: reads form and link, shows the plan. Does nothing on the book's other pages.

"use strict";

(() => {
    const form = document.getElementById("calc-form");
    if (form === null) {
        return;
    }
    const byId = (name) => document.getElementById(`calc-${name}`);
    const kindOf = () => form.elements.kind.value;
    // What the page shows when its address says nothing: Llama 2 7B on 8 cards.
    const DEFAULT_LINK =
        "architecture=llama&layers=32&width=4096&heads=32&hidden=11008&context=4096&vocab=32000&ranks=8&dtype=bf16&card=80GiB";
    // Fields that the address is not about hold these until they are needed.
    const IN_RESERVE = { ...Object.fromEntries(new URLSearchParams(DEFAULT_LINK)), params: "7.5B" };
    // The book's search adds it to the address.
    const OF_THE_BOOK = ["highlight"];

    // Fills the form from an address, and returns what is wrong with it beyond the values of fields.
    function fromLink(query) {
        const link = new URLSearchParams(query);
        OF_THE_BOOK.forEach((key) => link.delete(key));
        const texts = new URLSearchParams(link.size === 0 ? DEFAULT_LINK : link);
        const problems = [];
        const architecture = texts.get("architecture") ?? "gpt2";
        const isCount = texts.has("params");
        const kind = isCount ? "count" : architecture;
        const isKnown = ["gpt2", "llama"].includes(architecture);
        if (!isKnown) {
            problems.push(`architecture: expected gpt2 or llama, got "${architecture}"`);
        }
        form.elements.kind.value = isKnown || isCount ? kind : "gpt2";
        const keys = [...new Set(Object.values(dpSettings.SUBJECTS).flat().concat(dpSettings.TRAINING))];
        for (const key of new Set(texts.keys())) {
            if (texts.getAll(key).length > 1) {
                problems.push(`${key} is there twice`);
            }
            if (key !== "architecture" && !keys.includes(key)) {
                problems.push(`${key}: this page knows no such key`);
            } else if (key !== "architecture" && !dpSettings.keysOf(kindOf()).includes(key)) {
                problems.push(
                    isCount
                        ? `${key} belongs to a shape, and params is a count; give one of them`
                        : `${key} is not of the ${architecture} shape`,
                );
            }
        }
        for (const key of keys) {
            const absent = dpSettings.keysOf(kindOf()).includes(key) ? "" : (IN_RESERVE[key] ?? "");
            setField(key, texts.get(key) ?? dpSettings.DEFAULTS[key] ?? absent);
        }
        const strategy = texts.get("strategy") ?? dpSettings.DEFAULTS.strategy;
        if (!dpPlan.STRATEGIES.includes(strategy)) {
            problems.push(`strategy: expected ${dpPlan.STRATEGIES.join(", ")}, got "${strategy}"`);
            setField("strategy", dpSettings.DEFAULTS.strategy);
        }
        return problems;
    }

    // Also a value that is no choice is shown as it is: an error will name it.
    function setField(key, text) {
        const field = form.elements[key];
        if (field instanceof HTMLSelectElement) {
            field.querySelectorAll("[data-unknown]").forEach((option) => option.remove());
            if (![...field.options].some((option) => option.value === text)) {
                const option = new Option(text, text);
                option.dataset.unknown = "";
                field.add(option);
            }
        }
        field.value = text;
    }

    const textsOf = (kind) =>
        Object.fromEntries(dpSettings.keysOf(kind).map((key) => [key, form.elements[key].value]));

    // What the form says, as `key=value` of a link and of `plan`'s options.
    function pairsOf(kind) {
        const texts = Object.entries(textsOf(kind)).filter(([, text]) => text.trim() !== "");
        const pairs = texts.map(([key, text]) => [key, text.trim()]);
        return kind === "count" ? pairs : [["architecture", kind], ...pairs];
    }

    function toLink() {
        const url = new URL(location.href);
        url.search = new URLSearchParams(pairsOf(kindOf()));
        history.replaceState(history.state, "", url);
    }

    function update(problems) {
        const kind = kindOf();
        document.querySelectorAll(".calc-field").forEach((field) => {
            field.hidden = !field.dataset.kinds.split(" ").includes(kind);
        });
        nameDefaults(kind);
        const read = dpSettings.read(kind, textsOf(kind));
        showErrors(read.errors ?? {}, problems);
        if (read.errors !== undefined || problems.length > 0) {
            dpView.clear();
            const wrong = Object.entries(read.errors ?? {}).map(([key, words]) => `${labelOf(key)}: ${words}`);
            byId("answer").textContent = `Nothing is computed. ${[...problems, ...wrong].join(". ")}.`;
            return;
        }
        const plan = dpPlan.all(read.subject, read.settings);
        dpView.show(plan, read);
        byId("command").textContent = command(kind);
    }

    // The texts of choices that are left open say what they are.
    function nameDefaults(kind) {
        const heads = { tied: "tied (default)", untied: "its own (default)" };
        const gradients = { f32: "f32 (default)", parameter: "as parameters" };
        form.elements.head.options[0].text = heads[dpSettings.defaultOf("head", kind)];
        form.elements["grad-accum-dtype"].options[0].text = gradients[dpSettings.defaultOf("grad-accum-dtype", kind)];
    }

    const labelOf = (key) => form.querySelector(`label[for="calc-${key}"]`)?.textContent ?? key;

    function showErrors(errors, problems) {
        for (const field of document.querySelectorAll(".calc-field")) {
            const control = field.querySelector("input, select");
            const words = errors[control.name] ?? "";
            control.setAttribute("aria-invalid", String(words !== ""));
            byId(`${control.name}-error`).textContent = words;
        }
        const box = byId("problems");
        const rest = "The address of this page has an error. Change any field to go on with what the form shows.";
        const lines = problems.length === 0 ? [] : [rest, ...problems];
        box.hidden = lines.length === 0;
        box.replaceChildren(...lines.map((words) => Object.assign(document.createElement("p"), { textContent: words })));
    }

    // The same plan from a terminal. `strategy` is only what this page works out.
    function command(kind) {
        const options = pairsOf(kind).filter(([key]) => key !== "strategy");
        const words = options.map(([key, text]) => `--${key} ${/^[\w.+-]+$/.test(text) ? text : `'${text}'`}`);
        const lines = ["cargo run --release --bin plan --"];
        for (const word of words) {
            if (lines.at(-1).length + word.length > 80) {
                lines.push("   ");
            }
            lines.push(`${lines.pop()} ${word}`);
        }
        return lines.join(" \\\n");
    }

    // Radios of the strategy stand outside of the form element, and are still its own.
    for (const element of form.elements) {
        element.addEventListener("input", () => {
            toLink();
            update([]);
        });
    }
    // The book's arrow keys turn pages; here they scroll.
    for (const region of document.querySelectorAll(".calc-scroll")) {
        region.addEventListener("keydown", (event) => event.stopPropagation());
    }
    form.addEventListener("submit", (event) => event.preventDefault());
    const showLink = () => update(fromLink(location.search));
    window.addEventListener("popstate", showLink);
    showLink();
})();
