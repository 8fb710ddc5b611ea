// Works a strategy out: each category's formula, the same with the numbers put in, and its bytes.

"use strict";

const dpFormula = (() => {
    const { grouped } = dpSettings;

    // Definitions for the strategy that was chosen. `sized` says bytes in the page's unit.
    function of(plan, { subject, settings, strategy }, sized) {
        const chosen = plan.plans.find((p) => p.strategy === strategy);
        const isCount = subject.model === undefined;
        const lines = isCount ? ofCount(plan, chosen, settings) : ofShape(plan, chosen, subject.model, settings);
        const list = lines.map(([title, key, formula, numbers, bytes]) => [
            dpView.h("dt", {}, dpView.h("span", { class: `calc-swatch calc-${key}` }), title),
            dpView.h(
                "dd",
                {},
                dpView.h("code", {}, formula),
                dpView.h("span", { class: "calc-numbers" }, `= ${numbers}`),
                dpView.h("strong", {}, `= ${grouped(bytes)} bytes`),
                ` (${sized(bytes)})`,
            ),
        ]);
        return [dpView.h("p", { class: "calc-note" }, legend(plan, settings)), dpView.h("dl", {}, ...list.flat())];
    }

    // What the letters are.
    function legend({ bytes, elements, layout, numNamed }, { ranks }) {
        const element =
            `p = ${bytes.parameter} bytes of a parameter, g = ${bytes.gradient} of its gradient, ` +
            `s = ${bytes.sent} of it as it travels, o = ${bytes.optimizer} of optimizer state`;
        const states = bytes.master === 0n ? "" : ` (${4n * bytes.states} and a f32 master of 4)`;
        const sizes = `N = ${grouped(ranks)} cards, P = ${grouped(elements)} parameters`;
        if (layout === undefined) {
            return `${sizes}; per parameter ${element}${states}.`;
        }
        const buckets = layout.numBuckets === 1n ? "1 bucket" : `${grouped(layout.numBuckets)} buckets`;
        return (
            `${sizes} in ${grouped(numNamed)} tensors. Their gradients fill ${buckets}, each padded to a multiple of N: ` +
            `G = ${grouped(layout.padded)} elements, L = ${grouped(layout.longest)} in the longest. Of each element ${element}${states}.`
        );
    }

    function ofCount({ bytes, elements }, chosen, { ranks }) {
        const stage = dpPlan.STRATEGIES.indexOf(chosen.strategy);
        const [n, p] = [grouped(ranks), grouped(elements)];
        const held = (title, key, letter, size, shardedFrom, total) =>
            stage >= shardedFrom
                ? [title, key, `${letter} ceil(P / N)`, `${size} x ceil(${p} / ${n})`, total]
                : [title, key, `${letter} P`, `${size} x ${p}`, total];
        const { parameter, gradient, sent, optimizer } = bytes;
        const [further, numbers] = [
            ["2 s", `2 x ${sent}`],
            ["(s + p)", `(${sent} + ${parameter})`],
            ["(s + p)", `(${sent} + ${parameter})`],
            ["(s + 2 p)", `(${sent} + 2 x ${parameter})`],
        ][stage];
        return [
            held("parameters", "parameters", "p", parameter, 3, chosen.parameters),
            held("gradients", "gradients", "g", gradient, 2, chosen.gradients),
            held("optimizer state", "optimizer", "o", optimizer, 1, chosen.optimizer),
            ["total", "sum", "their sum", addends(chosen, ["parameters", "gradients", "optimizer"]), chosen.total],
            [
                "sent per step",
                "sent",
                `${further} (N - 1) ceil(P / N)`,
                `${numbers} x ${grouped(ranks - 1n)} x ${grouped(dpPlan.ceilDiv(elements, ranks))}`,
                chosen.bytesSent,
            ],
        ];
    }

    function ofShape(plan, chosen, model, settings) {
        const { bytes, elements, layout } = plan;
        const stage = dpPlan.STRATEGIES.indexOf(chosen.strategy);
        const [n, g] = [grouped(settings.ranks), grouped(layout.padded)];
        const held = (title, key, letter, size, isSharded, total) =>
            isSharded
                ? [title, key, `${letter} G / N`, `${size} x ${g} / ${n}`, total]
                : [title, key, `${letter} G`, `${size} x ${g}`, total];
        const lines = [
            stage === 3
                ? held("parameters", "parameters", "p", bytes.parameter, true, chosen.parameters)
                : ["parameters", "parameters", "p P", `${bytes.parameter} x ${grouped(elements)}`, chosen.parameters],
            held("gradients", "gradients", "g", bytes.gradient, stage >= 2, chosen.gradients),
            held("optimizer state", "optimizer", "o", bytes.optimizer, stage >= 1, chosen.optimizer),
        ];
        if (chosen.communication > 0n) {
            lines.push(buffers(chosen, layout));
        }
        lines.push(activations(plan, { model, settings }), total(chosen), sent(plan, chosen, settings));
        return lines;
    }

    // Two buffers, or one where there is one bucket, for each of the uses of this strategy.
    function buffers(chosen, layout) {
        const letters = { reduce: "g", gather: "p", convert: "s" };
        const count = chosen.pools[0].count;
        const terms = chosen.pools.map((pool) => `${count} ${letters[pool.use]} L to ${pool.use}`);
        const numbers = chosen.pools.map((pool) => `${count} x ${pool.size} x ${grouped(layout.longest)}`);
        return ["communication buffers", "communication", terms.join(" + "), numbers.join(" + "), chosen.communication];
    }

    // The formula of dp_models::activations: R rows of D features, T tokens a sequence, e bytes a number.
    function activations({ activations: { kept, peak } }, { model, settings }) {
        const { layers, width, vocab, context, hidden } = model;
        const rows = settings.batch * context;
        const e = dpPlan.SIZE[settings.dtype];
        const [r, l, d, v, t] = [rows, layers, width, vocab, context].map(grouped);
        let formula = "e R (14 L D + 2 D + V) + e T^2 + 20 R";
        let numbers = `${e} x ${r} x (14 x ${l} x ${d} + 2 x ${d} + ${v}) + ${e} x ${t}^2 + 20 x ${r}`;
        if (model.architecture === "llama") {
            const q = grouped(dpModels.qkvWidth(model));
            formula = "e R (L (7 D + Q + 2 F) + 2 D + V) + e T^2 + 20 R + 4 T E";
            numbers =
                `${e} x ${r} x (${l} x (7 x ${d} + ${q} + 2 x ${grouped(hidden)}) + 2 x ${d} + ${v})` +
                ` + ${e} x ${t}^2 + 20 x ${r} + 4 x ${t} x ${grouped(width / model.heads)}`;
        }
        return [
            "activations, estimate",
            "activations",
            `${formula} + the fullest moment of backward`,
            `${numbers} + ${grouped(peak - kept)}`,
            peak,
        ];
    }

    function total(chosen) {
        const keys = ["parameters", "gradients", "optimizer", "communication", "activations"];
        return ["total", "sum", "their sum", addends(chosen, keys), chosen.total];
    }

    const addends = (chosen, keys) =>
        keys
            .map((key) => chosen[key])
            .filter((bytes) => bytes > 0n)
            .map(grouped)
            .join(" + ");

    // The summary of a step tells all ranks its loss, its weight and which of the tensors were used.
    function sent({ bytes, layout }, chosen, { ranks }) {
        const slice = `${grouped(ranks - 1n)} x ${grouped(layout.padded / ranks)}`;
        const { sent: s, parameter: p } = bytes;
        const [formula, numbers] = {
            ddp: ["2 s (N - 1) G / N", `2 x ${s} x ${slice}`],
            zero3: ["(s + 2 p) (N - 1) G / N", `(${s} + 2 x ${p}) x ${slice}`],
        }[chosen.strategy] ?? ["(s + p) (N - 1) G / N", `(${s} + ${p}) x ${slice}`];
        const more = [
            [" + the step's summary", chosen.summary],
            [" + who has overflowed", chosen.overflow],
        ].filter(([, bytes]) => bytes > 0n);
        return [
            "sent per step",
            "sent",
            formula + more.map(([words]) => words).join(""),
            numbers + more.map(([, bytes]) => ` + ${grouped(bytes)}`).join(""),
            chosen.bytesSent,
        ];
    }

    return { of };
})();
