// Shows a plan: the answer in a sentence, stacked bars, the table.

"use strict";

const dpView = (() => {
    const { grouped } = dpSettings;
    // Title and CSS class, in the order of the bars.
    const CATEGORIES = [
        ["parameters", "parameters"],
        ["gradients", "gradients"],
        ["optimizer", "optimizer state"],
        ["communication", "communication buffers"],
        ["activations", "activations, estimate"],
    ];

    const byId = (name) => document.getElementById(`calc-${name}`);

    // An element with attributes and children.
    function h(tag, attributes, ...children) {
        const element = document.createElement(tag);
        Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
        element.append(...children);
        return element;
    }

    // One unit for the whole page: GiB, or smaller where the largest total is.
    function unitOf(plans) {
        const largest = plans.reduce((a, p) => dpModels.max(a, p.total), 0n);
        const power = largest >= 1n << 30n ? 30n : largest >= 1n << 20n ? 20n : 10n;
        return { name: { 30: "GiB", 20: "MiB", 10: "KiB" }[power], bytes: 1n << power };
    }

    // Two digits after the point, three below 1.
    function inUnit(bytes, unit) {
        if (bytes === 0n) {
            return "0";
        }
        const number = Number(bytes) / Number(unit.bytes);
        const digits = number < 1 ? 3 : 2;
        const least = 10 ** -digits;
        return number < least
            ? `< ${least}`
            : number.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
    }

    const sized = (bytes, unit) => `${inUnit(bytes, unit)} ${unit.name}`;

    function clear() {
        ["bars", "table", "formula"].forEach((name) => byId(name).replaceChildren());
        byId("command").textContent = "";
        document.querySelectorAll(".calc-result").forEach((part) => (part.hidden = true));
    }

    function show(plan, read) {
        const unit = unitOf(plan.plans);
        document.querySelectorAll(".calc-result").forEach((part) => (part.hidden = false));
        byId("answer").textContent = answer(plan, read, unit);
        byId("bars").replaceChildren(legend(plan), bars(plan, read, unit));
        byId("table").replaceChildren(table(plan, read, unit));
        byId("formula").replaceChildren(...dpFormula.of(plan, read, (bytes) => sized(bytes, unit)));
    }

    // As Choice of the program `plan`: the strategy that shards least of those that fit and have a trainer.
    function answer(plan, { settings, card, subject }, unit) {
        const cards = settings.ranks === 1n ? "1 card" : `${grouped(settings.ranks)} cards`;
        const what = `${grouped(plan.elements)} parameters on ${cards}: `;
        const [trained, zero3] = [plan.plans.slice(0, 3), plan.plans[3]];
        const rest = subject.model === undefined ? " Activations come on top." : "";
        if (card === undefined) {
            const totals = plan.plans.map((p) => `${p.strategy} ${sized(p.total, unit)}`);
            return `${what}${totals.join(", ")} on each.${rest}`;
        }
        const fitting = trained.find((p) => p.total <= card);
        const size = sized(card, unit);
        if (fitting !== undefined) {
            const total = sized(fitting.total, unit);
            return `${what}${fitting.strategy} is the smallest stage that fits a card of ${size}, with ${total}.${rest}`;
        }
        const less = sized(zero3.total, unit);
        const none =
            zero3.total <= card
                ? `none of ddp, zero1, zero2 fits a card of ${size}; zero3 would with ${less} (estimate), but has no trainer.`
                : `none fits a card of ${size}; zero3 would take ${less} (estimate).`;
        return what + none + rest;
    }

    function legend({ plans }) {
        const known = CATEGORIES.filter(([key]) => plans.some((p) => p[key] > 0n));
        const item = ([key, title]) => h("li", {}, h("span", { class: `calc-swatch calc-${key}` }), title);
        return h("ul", { class: "calc-legend" }, ...known.map(item));
    }

    // All bars have one scale. A card much larger than all of them is said, not drawn.
    function bars({ plans }, { card, strategy }, unit) {
        const longest = plans.reduce((a, p) => dpModels.max(a, p.total), 0n);
        const isDrawn = card !== undefined && card <= 3n * longest;
        const scale = isDrawn ? dpModels.max(longest, card) : longest;
        const percent = (bytes) => `${(Number(bytes) / Number(scale)) * 100}%`;
        const rows = plans.map((p) => {
            const known = CATEGORIES.filter(([key]) => p[key] > 0n);
            const parts = known.map(([key, title]) =>
                h("span", {
                    class: `calc-part calc-${key}`,
                    style: `width: ${percent(p[key])}`,
                    title: `${p.strategy}, ${title}: ${sized(p[key], unit)}`,
                }),
            );
            const line = isDrawn ? [h("span", { class: "calc-card", style: `inset-inline-start: ${percent(card)}` })] : [];
            const fits = card === undefined ? "" : p.total <= card ? "fits" : "too large";
            return h(
                "div",
                { class: `calc-row${p.strategy === strategy ? " calc-chosen" : ""}` },
                h("span", { class: "calc-strategy" }, p.strategy),
                h("span", { class: "calc-track" }, ...parts, ...line),
                h("span", { class: "calc-total" }, sized(p.total, unit)),
                h("span", { class: `calc-fit${fits === "fits" ? " calc-fits" : ""}` }, fits),
            );
        });
        const note = [];
        if (card !== undefined) {
            const times = Number(card) / Number(longest);
            const size = `${sized(card, unit)} (${grouped(card)} bytes)`;
            const beyond = `A card of ${size} holds ${times.toFixed(times < 10 ? 1 : 0)} times the longest bar.`;
            note.push(h("p", { class: "calc-note" }, isDrawn ? `The line is a card of ${size}.` : beyond));
        }
        const label = "Memory per card of each strategy, stacked by category. The table below has the numbers.";
        return h("div", {}, h("div", { class: "calc-bars", role: "img", "aria-label": label }, ...rows), ...note);
    }

    function table({ plans }, { card }, unit) {
        const cell = (bytes) =>
            bytes === null
                ? h("td", {}, h("span", { "aria-label": "not known" }, "-"))
                : h("td", {}, inUnit(bytes, unit), h("small", {}, grouped(bytes)));
        const row = (title, cells, attributes = {}) =>
            h("tr", attributes, h("th", { scope: "row" }, title), ...cells);
        const bytes = (key) => plans.map((p) => cell(p[key]));
        const text = (of) => plans.map((p) => h("td", {}, of(p)));
        const rows = CATEGORIES.map(([key, title]) => row(title, bytes(key)));
        rows.push(row("total", bytes("total"), { class: "calc-sum" }));
        if (card !== undefined) {
            rows.push(row("fits the card", text((p) => (p.total <= card ? "yes" : "no"))));
        }
        rows.push(row("sent per step", bytes("bytesSent")));
        rows.push(row("buckets", text((p) => (p.numBuckets === null ? "-" : grouped(p.numBuckets)))));
        rows.push(row("basis", text((p) => p.basis)));
        return h(
            "table",
            {},
            h("caption", {}, `Each card's memory and what it sends: ${unit.name}, and the exact number of bytes below.`),
            h("thead", {}, h("tr", {}, h("td", {}), ...plans.map((p) => h("th", { scope: "col" }, p.strategy)))),
            h("tbody", {}, ...rows),
        );
    }

    return { show, clear, h };
})();
