// The models of dp-models, as far as memory is concerned: their parameters in creation order, and what one micro-batch takes.
//
// The rules are those of dp_models::{Gpt, Llama} and of dp_models::activations, whose pages explain them. All numbers are BigInt,
// since bytes of large models leave 53 bits. `.ci/check-calculator.py` compares the results with those of `plan`.

"use strict";

const dpModels = (() => {
    const max = (...numbers) => numbers.reduce((a, b) => (a > b ? a : b));
    const min = (a, b) => (a < b ? a : b);

    // Names and numbers of elements, in the order in which the model asks its VarBuilder for them. `model` has BigInts
    // `layers`, `width`, `heads`, `context`, `vocab`, for a Llama `kvHeads` and `hidden`, and the boolean `tiedHead`.
    function params(model) {
        const all = [];
        const add = (name, elements) => all.push({ name, elements });
        const { width: d, vocab, context } = model;
        add("wte.weight", vocab * d);
        if (model.architecture === "gpt2") {
            add("wpe.weight", context * d);
        }
        for (let i = 0n; i < model.layers; i++) {
            const block = model.architecture === "gpt2" ? gpt2Block(d) : llamaBlock(model);
            block.forEach(([name, elements]) => add(`blocks.${i}.${name}`, elements));
        }
        if (model.architecture === "gpt2") {
            add("lnf.weight", d);
            add("lnf.bias", d);
        } else {
            add("normf.weight", d);
        }
        if (!model.tiedHead) {
            add("head.weight", vocab * d);
        }
        return all;
    }

    function gpt2Block(d) {
        return [
            ["ln1.weight", d],
            ["ln1.bias", d],
            ["qkv.weight", 3n * d * d],
            ["qkv.bias", 3n * d],
            ["proj.weight", d * d],
            ["proj.bias", d],
            ["ln2.weight", d],
            ["ln2.bias", d],
            ["fc.weight", 4n * d * d],
            ["fc.bias", 4n * d],
            ["out.weight", 4n * d * d],
            ["out.bias", d],
        ];
    }

    function llamaBlock(model) {
        const { width: d, hidden } = model;
        return [
            ["norm1.weight", d],
            ["qkv.weight", qkvWidth(model) * d],
            ["proj.weight", d * d],
            ["norm2.weight", d],
            ["gate_proj.weight", hidden * d],
            ["up_proj.weight", hidden * d],
            ["down_proj.weight", d * hidden],
        ];
    }

    // `Q`, features of queries, keys and values.
    function qkvWidth({ heads, kvHeads, width }) {
        return (heads + 2n * kvHeads) * (width / heads);
    }

    // ModelConfig::activations: bytes of one micro-batch of `batch` sequences of the model's context, `size` bytes a number.
    // `kept` from forward to backward, `peak` at the fullest moment, in backward.
    function activations(model, batch, size) {
        const { layers, width, vocab, context: len } = model;
        const rows = batch * len;
        const node = nodes(rows, size);
        const block = model.architecture === "gpt2" ? gpt2Moments(width, node) : llamaMoments(model, node);
        const angles = model.architecture === "llama" ? 4n * len * (width / model.heads) : 0n;
        const kept =
            size * rows * (layers * block.kept + 2n * width + vocab) + size * len * len + 20n * rows + angles;

        // The gradient of the tied head waits for that of the embedding, that of the residual stream for its block.
        const waiting = (model.tiedHead ? size * vocab * width : 0n) + size * rows * width;
        const first = max(3n * size * rows * vocab, node.linear(width, vocab), waiting + block.fullest);
        return { kept, peak: kept + max(first, node.embedding(vocab, width)) };
    }

    // Of one block: numbers per row that it keeps, bytes of its fullest moment.
    function gpt2Moments(width, node) {
        return {
            kept: 14n * width,
            fullest: max(
                node.activatedLinear(4n * width, width, 1n),
                node.linear(width, 4n * width),
                node.linear(width, width),
                node.attention(width, 3n * width),
                node.linear(width, 3n * width),
            ),
        };
    }

    function llamaMoments(model, node) {
        const { width, hidden } = model;
        const qkv = qkvWidth(model);
        return {
            kept: 7n * width + qkv + 2n * hidden,
            fullest: max(
                node.activatedLinear(hidden, width, 2n),
                node.linear(width, hidden) + node.size * node.rows * hidden,
                node.linear(width, width),
                node.attention(width, qkv),
                node.linear(width, qkv),
            ),
        };
    }

    // Bytes of the fullest moment in the backward of one node, for `rows` rows of numbers of `size` bytes.
    function nodes(rows, size) {
        const PACKED_ROWS = 512n;
        // What is widened to f32 inside a node, and what is rounded back, is a copy only for 16-bit numbers.
        const wide = (elements) => (size < 4n ? 4n * elements : 0n);
        const rounded = (elements) => (size < 4n ? size * elements : 0n);
        const linear = (input, output) => {
            const [x, y, weight] = [rows * input, rows * output, input * output];
            const packed = 4n * min(rows, PACKED_ROWS) * output;
            const computingX = wide(y) + 4n * x + max(wide(weight), rounded(x));
            const computingWeight = wide(y) + size * x + 4n * weight + max(wide(x) + packed, rounded(weight));
            const adding = size * (x + weight + 2n * max(x, weight));
            return size * y + max(computingX, computingWeight, adding);
        };
        // A linear layer of a function of `args` tensors, which is computed once more.
        const activatedLinear = (input, output, args) => {
            const [x, y, weight] = [rows * input, rows * output, input * output];
            const packed = 4n * min(rows, PACKED_ROWS) * output;
            const computingX = 4n * x + wide(weight);
            const activating = (args + 1n) * 4n * x + max(args * wide(x), rounded(x));
            const computingWeight = args * size * x + 4n * x + 4n * weight + max(packed, rounded(weight));
            const adding = size * (args * x + weight + 2n * max(x, weight));
            return size * y + max(wide(y) + max(computingX, activating, computingWeight), adding);
        };
        const attention = (width, qkv) => size * rows * (width + 3n * qkv);
        const embedding = (vocab, width) => {
            const [result, table] = [rows * width, vocab * width];
            const computing = wide(result) + 4n * table + rounded(table);
            return size * result + max(computing, 3n * size * table);
        };
        return { rows, size, linear, activatedLinear, attention, embedding };
    }

    return { params, activations, qkvWidth, max, min };
})();
