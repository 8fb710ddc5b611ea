// What each card will hold and send: the rules of dp_zero::TrainerPlan, to the byte.
//
// Each function names the Rust item that it repeats. All parameters of these models have one dtype, so there is one kind of
// bucket. All numbers are BigInt.

"use strict";

const dpPlan = (() => {
    const { max, min } = dpModels;
    const STRATEGIES = ["ddp", "zero1", "zero2", "zero3"];
    const SIZE = { f32: 4n, bf16: 2n, f16: 2n };
    // f32 numbers of optimizer state per element.
    const NUM_STATES = { adamw: 2n, sgd: 0n, "sgd-momentum": 1n };
    // BucketCaps::default, in bytes.
    const FIRST_CAP = 1n << 20n;
    const DEFAULT_CAP = 25n << 20n;
    const LEAST_BUCKETS = 8n;

    const ceilDiv = (a, b) => (a + b - 1n) / b;
    const sum = (numbers) => numbers.reduce((a, b) => a + b, 0n);

    // Bytes of one element: of the parameter, of its gradient as it is kept and as it travels, and of the optimizer state with
    // the f32 master that a 16-bit parameter has.
    function bytesPerElement({ dtype, gradAccum, communicationDtype, optimizer }) {
        const gradDtype = gradAccum === "parameter" ? dtype : "f32";
        const master = dtype === "f32" ? 0n : 4n;
        return {
            parameter: SIZE[dtype],
            gradient: SIZE[gradDtype],
            sent: SIZE[communicationDtype ?? gradDtype],
            optimizer: master + 4n * NUM_STATES[optimizer],
            states: NUM_STATES[optimizer],
            master,
            gradDtype,
            sentDtype: communicationDtype ?? gradDtype,
        };
    }

    // BucketCaps::fit, of the default caps.
    const defaultCap = (gradientBytes) => max(FIRST_CAP, min(DEFAULT_CAP, gradientBytes / LEAST_BUCKETS));

    // BucketLayout::new: padded lengths. Parameters fill buckets in reverse creation order, up to a cap in bytes of gradients.
    function bucketLayout(params, gradSize, cap, ranks) {
        const buckets = [];
        let len = 0n;
        const close = () => buckets.push(ceilDiv(len, ranks) * ranks);
        for (const { elements } of [...params].reverse()) {
            const limit = buckets.length === 0 ? min(cap, FIRST_CAP) : cap;
            if ((len + elements) * gradSize > limit && len > 0n) {
                close();
                len = 0n;
            }
            len += elements;
        }
        close();
        return buckets;
    }

    // PoolSize: the buffers that serve buckets in turn, each as long as the longest bucket.
    function pools(strategy, bytes, settings, layout) {
        const { ranks, dtype } = settings;
        const count = min(2n, layout.numBuckets);
        const pool = (use, size) => ({ use, count, size, bytes: count * layout.longest * size });
        const gathersApart = ranks > 1n && dtype !== bytes.gradDtype;
        const all = [];
        if (strategy === "zero2") {
            all.push(pool("reduce", bytes.gradient));
        }
        if ((strategy === "zero1" || strategy === "zero2") && gathersApart) {
            all.push(pool("gather", bytes.parameter));
        }
        if (bytes.sentDtype !== bytes.gradDtype) {
            all.push(pool("convert", bytes.sent));
        }
        return all;
    }

    // all_reduce_bytes: sent by `rank` of `ranks`, whose slices need not be equal.
    function allReduceBytes(elements, size, ranks, rank) {
        const own = ((rank + 1n) * elements) / ranks - (rank * elements) / ranks;
        return size * (elements - own + (ranks - 1n) * own);
    }

    // What is the same for all strategies.
    function look(model, settings) {
        const bytes = bytesPerElement(settings);
        const params = dpModels.params(model);
        const elements = sum(params.map((p) => p.elements));
        const cap = settings.bucketCap ?? defaultCap(elements * bytes.gradient);
        const buckets = bucketLayout(params, bytes.gradient, cap, settings.ranks);
        const layout = { numBuckets: BigInt(buckets.length), padded: sum(buckets), longest: buckets.reduce((a, b) => max(a, b)) };
        return {
            bytes,
            elements,
            layout,
            numNamed: BigInt(params.length),
            activations: dpModels.activations(model, settings.batch, SIZE[settings.dtype]),
        };
    }

    // TrainerPlan::of_specs and TrainerPlan::peak, in a step of one micro-batch without clipping.
    function ofShape(looked, settings, strategy) {
        const { bytes, layout, elements, activations } = looked;
        const { ranks } = settings;
        const slices = layout.padded / ranks;
        const stage = STRATEGIES.indexOf(strategy);
        const plan = {
            strategy,
            basis: stage === 3 ? "estimate only" : "exact",
            parameters: bytes.parameter * (stage >= 3 ? slices : elements),
            gradients: bytes.gradient * (stage >= 2 ? slices : layout.padded),
            optimizer: bytes.optimizer * (stage >= 1 ? slices : layout.padded),
            communication: null,
            activations: activations.peak,
            numBuckets: null,
        };
        if (stage === 3) {
            plan.bytesSent = (ranks - 1n) * slices * (2n * bytes.parameter + bytes.sent);
            plan.total = plan.parameters + plan.gradients + plan.optimizer + plan.activations;
            return plan;
        }
        plan.pools = pools(strategy, bytes, settings, layout);
        plan.communication = sum(plan.pools.map((pool) => pool.bytes));
        plan.numBuckets = layout.numBuckets;
        // The summary of the step, of the rank that sends most; f16 has a dynamic loss scale, which says who has overflowed.
        const summary = (rank) => allReduceBytes(4n + looked.numNamed, 8n, ranks, rank);
        plan.summary = max(summary(0n), summary(ranks - 1n));
        plan.overflow = settings.dtype === "f16" ? 8n * (ranks - 1n) : 0n;
        const published = stage === 0 ? bytes.sent : bytes.parameter;
        plan.bytesSent = (ranks - 1n) * slices * (bytes.sent + published) + plan.summary + plan.overflow;
        // The rule's other moment, while values come from rank 0 one by one, is never fuller here: all parameters are trained, so
        // gradients or stage 2's buffers take at least as much as the largest of them.
        plan.total = plan.parameters + plan.gradients + plan.optimizer + plan.communication + plan.activations;
        return plan;
    }

    // TrainerPlan::of_count: the formulas of the ZeRO paper.
    function ofCount(numParams, settings, strategy) {
        const bytes = bytesPerElement(settings);
        const { ranks } = settings;
        const shard = ceilDiv(numParams, ranks);
        const stage = STRATEGIES.indexOf(strategy);
        const held = (shardedFrom) => (stage >= shardedFrom ? shard : numParams);
        const further = [bytes.sent, bytes.parameter, bytes.parameter, 2n * bytes.parameter][stage];
        const plan = {
            strategy,
            basis: stage === 3 ? "estimate only" : "formula",
            parameters: bytes.parameter * held(3),
            gradients: bytes.gradient * held(2),
            optimizer: bytes.optimizer * held(1),
            communication: null,
            activations: null,
            numBuckets: null,
            bytesSent: (ranks - 1n) * shard * (bytes.sent + further),
        };
        plan.total = plan.parameters + plan.gradients + plan.optimizer;
        return plan;
    }

    // All strategies, from most memory to least. `subject` is `{ numParams }` or `{ model }`.
    function all(subject, settings) {
        if (subject.model === undefined) {
            const plans = STRATEGIES.map((strategy) => ofCount(subject.numParams, settings, strategy));
            return { plans, elements: subject.numParams, bytes: bytesPerElement(settings) };
        }
        const looked = look(subject.model, settings);
        return { ...looked, plans: STRATEGIES.map((strategy) => ofShape(looked, settings, strategy)) };
    }

    return { all, ceilDiv, STRATEGIES, SIZE };
})();
