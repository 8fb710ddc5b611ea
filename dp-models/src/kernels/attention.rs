//! Causal self-attention, tile by tile: no matrix of all scores is ever kept.
//!
//! After FlashAttention-2 (Dao, arXiv 2307.08691): forward keeps its inputs and its output only; backward computes the
//! probabilities of a tile again. A tile is [`ROWS`] queries of one head against all keys up to the last of them.

use multiversion::multiversion;

use super::matmul::{Mat, matmul};
use super::vector::{exp, max, sum, sum2};

/// Queries of a tile.
const ROWS: usize = 64;

/// How `[B T, (H + 2 K) E]` is cut into heads: a row is all queries, all keys, all values; within each, head after head.
///
/// Consecutive query heads share a head of keys and values, `H / K` of them (grouped-query attention, Ainslie et al.,
/// arXiv 2305.13245); with `K = H` each has its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    /// `T`
    pub len: usize,
    /// `H`, heads of queries
    pub heads: usize,
    /// `K`, heads of keys, and of values; they divide `H`
    pub kv_heads: usize,
    /// `E = D / H`
    pub head_width: usize,
}

impl Heads {
    /// `D`
    pub fn width(&self) -> usize {
        self.heads * self.head_width
    }

    /// `(H + 2 K) E`, numbers of a row of queries, keys and values.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_width
    }

    fn scale(&self) -> f32 {
        (self.head_width as f32).sqrt().recip()
    }

    /// Where in a row part 0 (queries), 1 (keys) or 2 (values) of a query head begins.
    fn offset(&self, part: usize, head: usize) -> usize {
        let kv_head = head / (self.heads / self.kv_heads);
        let before = match part {
            0 => head,
            1 => self.heads + kv_head,
            _ => self.heads + self.kv_heads + kv_head,
        };
        before * self.head_width
    }

    /// `rows` positions from `first` on of part 0 (queries), 1 (keys) or 2 (values) of a query head of one sequence.
    fn part<'a>(
        &self,
        sequence: &'a [f32],
        part: usize,
        head: usize,
        first: usize,
        rows: usize,
    ) -> Mat<'a> {
        let stride = self.qkv_width();
        let start = first * stride + self.offset(part, head);
        Mat::strided(&sequence[start..], rows, self.head_width, stride)
    }

    /// The same of `[T, D]`.
    fn output<'a>(&self, sequence: &'a [f32], head: usize, first: usize, rows: usize) -> Mat<'a> {
        let start = first * self.width() + head * self.head_width;
        Mat::strided(&sequence[start..], rows, self.head_width, self.width())
    }

    fn tiles(self) -> impl Iterator<Item = (usize, usize, usize)> {
        let firsts = (0..self.len).step_by(ROWS);
        (0..self.heads).flat_map(move |head| {
            firsts
                .clone()
                .map(move |first| (head, first, ROWS.min(self.len - first)))
        })
    }
}

/// `softmax(q k^T / sqrt(E) + causal mask) v` for each head of one sequence: `qkv` `[T, (H + 2 K) E]` to `out` `[T, D]`.
pub(crate) fn attention_forward(qkv: &[f32], heads: Heads, out: &mut [f32]) {
    let mut scores = vec![0f32; ROWS.min(heads.len) * heads.len];
    for (head, first, rows) in heads.tiles() {
        let keys = first + rows;
        let scores = &mut scores[..rows * keys];
        probabilities(qkv, heads, head, first, rows, scores);
        let start = first * heads.width() + head * heads.head_width;
        let values = heads.part(qkv, 2, head, 0, keys);
        matmul(
            &mut out[start..],
            heads.width(),
            false,
            Mat::new(scores, rows, keys),
            values,
            1.0,
            false,
        );
    }
}

/// The gradient of `qkv`, from that of the output, for one sequence. `dqkv` is zeros.
///
/// With the probabilities `P` of a tile: `dV += P^T dO`, `dP = dO V^T`, `dS = P (dP - rowsum(dO O)) / sqrt(E)`, `dQ = dS K`,
/// `dK += dS^T Q`. The query heads that share keys and values add to one `dK` and `dV`, one head after the other.
pub(crate) fn attention_backward(
    qkv: &[f32],
    out: &[f32],
    grad: &[f32],
    heads: Heads,
    dqkv: &mut [f32],
) {
    let size = ROWS.min(heads.len) * heads.len;
    let (mut scores, mut grads) = (vec![0f32; size], vec![0f32; size]);
    let stride = heads.qkv_width();
    for (head, first, rows) in heads.tiles() {
        let keys = first + rows;
        let (p, ds) = (&mut scores[..rows * keys], &mut grads[..rows * keys]);
        let (q, k, v) = (
            heads.part(qkv, 0, head, first, rows),
            heads.part(qkv, 1, head, 0, keys),
            heads.part(qkv, 2, head, 0, keys),
        );
        let grad_rows = heads.output(grad, head, first, rows);
        let at = |part: usize, position: usize| position * stride + heads.offset(part, head);
        probabilities(qkv, heads, head, first, rows, p);
        matmul(
            &mut dqkv[at(2, 0)..],
            stride,
            true,
            Mat::new(p, rows, keys).t(),
            grad_rows,
            1.0,
            false,
        );
        matmul(ds, keys, false, grad_rows, v.t(), 1.0, false);
        for row in 0..rows {
            let start = (first + row) * heads.width() + head * heads.head_width;
            let own = start..start + heads.head_width;
            let delta = dot(&out[own.clone()], &grad[own]);
            let range = row * keys..(row + 1) * keys;
            score_gradients(&p[range.clone()], delta, heads.scale(), &mut ds[range]);
        }
        let ds = Mat::new(ds, rows, keys);
        matmul(&mut dqkv[at(0, first)..], stride, false, ds, k, 1.0, false);
        matmul(&mut dqkv[at(1, 0)..], stride, true, ds.t(), q, 1.0, false);
    }
}

/// The probabilities of one tile, `[rows, first + rows]`.
fn probabilities(
    qkv: &[f32],
    heads: Heads,
    head: usize,
    first: usize,
    rows: usize,
    scores: &mut [f32],
) {
    let keys = first + rows;
    let (q, k) = (
        heads.part(qkv, 0, head, first, rows),
        heads.part(qkv, 1, head, 0, keys),
    );
    matmul(scores, keys, false, q, k.t(), heads.scale(), false);
    for (row, scores) in scores.chunks_exact_mut(keys).enumerate() {
        let (seen, hidden) = scores.split_at_mut(first + row + 1);
        softmax(seen);
        hidden.fill(0.0);
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
fn softmax(x: &mut [f32]) {
    let max = max(x);
    for x in x.iter_mut() {
        *x = exp(*x - max);
    }
    let inverse = 1.0 / sum(x, |x| x);
    for x in x.iter_mut() {
        *x *= inverse;
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    sum2(a, b, |a, b| a * b)
}

/// `dp = p (dp - delta) scale`
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
fn score_gradients(p: &[f32], delta: f32, scale: f32, dp: &mut [f32]) {
    for (dp, p) in dp.iter_mut().zip(p) {
        *dp = p * (*dp - delta) * scale;
    }
}
