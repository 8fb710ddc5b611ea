//! How much memory one micro-batch needs beside parameters and their gradients, by formula.
//!
//! `R = B T` rows, `D` width, `V` vocabulary, `L` blocks, `F` hidden features of Llama's MLP, `Q = (H + 2 K) E` features of queries,
//! keys and values (`3 D` where each head has its own), `e` bytes of a number. The graph of a loss keeps the result of each node
//! until the loss is dropped, so one micro-batch keeps, in bytes,
//!
//! ```text
//! e R (L block + 2 D + V) + e T^2 + 20 R
//!
//! block of a GPT:    11 D + Q:       ln1 1 D, qkv Q, attention 1, proj 1, add 1, ln2 1, fc 4, out 1, add 1
//! block of a Llama:  7 D + Q + 2 F:  norm1 1 D, qkv Q, attention 1, proj 1, add 1, norm2 1, gate F, up F, down 1, add 1
//! around the blocks: embedding and last norm 2 D, logits V
//! e T^2:             the mask
//! 20 R:              token ids and targets, twice each, and a f32 of each row for the cross-entropy
//! ```
//!
//! A Llama has `4 context E` bytes of rotary angles besides. Attention keeps no scores, so nothing grows with `T^2` but the mask.
//! The activation of an MLP is not kept, but computed again from its argument.
//!
//! During backward the gradients of one node are there as well. Candle adds each gradient to zeros, so three tensors of its size
//! exist at that moment: zeros, gradient and sum. 16-bit numbers are widened to f32 inside a node, and the product that computes a
//! weight's gradient packs the gradient of the result, up to 512 rows of it, once more. The estimate is the fullest
//! of these moments, of the cross-entropy (`3 e R V`), the linear layers, attention, the gated product and the embedding. In
//! f32 a linear layer of `[R, m]` to `[R, n]` takes `4 (R n + R m + n m + 2 max(R m, n m))`.
//!
//! It is an estimate for the CPU: it leaves out what small things take, scratch memory of threads, and the order in which
//! Candle visits nodes of equal rank.

use candle_core::DType;

use crate::{GptConfig, LlamaConfig, ModelConfig};

/// What one micro-batch takes beside model states, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Activations {
    /// Kept from forward to backward.
    pub kept: u64,
    /// The fullest moment, in backward: with the gradients of one node.
    pub peak: u64,
}

impl ModelConfig {
    /// Estimates what training on one micro-batch of `batch` sequences of `len` tokens takes, in `dtype` (f32, f16 or bf16)
    /// on the CPU. The [module page](crate::activations) has the formula. Tests hold it within 15 % of the
    /// measured peak.
    ///
    /// ```
    /// use candle_core::DType;
    /// use dp_models::{GptConfig, ModelConfig};
    ///
    /// let gpt2 = ModelConfig::from(GptConfig::gpt2());
    /// let estimate = gpt2.activations(4, 1024, DType::F32);
    /// assert_eq!(estimate.kept >> 20, 2829); // MiB
    /// ```
    pub fn activations(&self, batch: usize, len: usize, dtype: DType) -> Activations {
        let node = Node {
            rows: (batch * len) as u64,
            size: dtype.size_in_bytes() as u64,
        };
        let Node { rows, size } = node;
        let (block, tied_head, angles) = match self {
            Self::Gpt2(config) => (Block::gpt2(config, node), config.tied_head, 0),
            Self::Llama(config) => {
                let angles = 4 * config.context * (config.width / config.heads);
                (Block::llama(config, node), config.tied_head, angles as u64)
            }
        };
        let [layers, width, vocab, len] =
            [self.layers(), self.width(), self.vocab_size(), len].map(|n| n as u64);
        let kept = size * rows * (layers * block.kept + 2 * width + vocab)
            + size * len * len
            + 20 * rows
            + angles;

        // The gradient of the tied head waits for that of the embedding, which is added to it; in a block that of the
        // residual stream waits, too.
        let waiting = u64::from(tied_head) * size * vocab * width + size * rows * width;
        let first = (3 * size * rows * vocab)
            .max(node.linear(width, vocab))
            .max(waiting + block.fullest);
        // The embedding's backward comes last.
        let fullest = first.max(node.embedding(vocab, width));
        Activations {
            kept,
            peak: kept + fullest,
        }
    }
}

/// One block of a model.
struct Block {
    /// Numbers per row that it keeps.
    kept: u64,
    /// Bytes of the fullest moment in its backward pass.
    fullest: u64,
}

impl Block {
    fn gpt2(config: &GptConfig, node: Node) -> Self {
        let width = config.width as u64;
        let moments = [
            node.activated_linear(4 * width, width, 1),
            node.linear(width, 4 * width),
            node.linear(width, width),
            node.attention(width, 3 * width),
            node.linear(width, 3 * width),
        ];
        Self {
            kept: 14 * width,
            fullest: moments.into_iter().max().unwrap_or(0),
        }
    }

    fn llama(config: &LlamaConfig, node: Node) -> Self {
        let (width, hidden) = (config.width as u64, config.hidden as u64);
        let heads = config.heads + 2 * config.num_kv_heads();
        let qkv = (heads * (config.width / config.heads)) as u64;
        let one_hidden = node.size * node.rows * hidden;
        let moments = [
            node.activated_linear(hidden, width, 2),
            // The gradient of the other one waits.
            node.linear(width, hidden) + one_hidden,
            node.linear(width, width),
            node.attention(width, qkv),
            node.linear(width, qkv),
        ];
        Self {
            kept: 7 * width + qkv + 2 * hidden,
            fullest: moments.into_iter().max().unwrap_or(0),
        }
    }
}

/// Rows of the right factor that the crate gemm packs at a time; what it packs is limited by the caches, too.
const PACKED_ROWS: u64 = 512;

/// What the backward pass of one node needs at its fullest moment, in bytes: it begins with the gradient of the result, and ends
/// when the gradients of the arguments are added to zeros.
#[derive(Clone, Copy)]
struct Node {
    /// `R`
    rows: u64,
    /// `e`
    size: u64,
}

impl Node {
    /// Bytes of `elements` in f32 where that is a copy, that is, where they are not f32 anyway.
    fn wide(self, elements: u64) -> u64 {
        match self.size < 4 {
            true => 4 * elements,
            false => 0,
        }
    }

    /// Bytes of `elements` after rounding, where that is a copy.
    fn rounded(self, elements: u64) -> u64 {
        match self.size < 4 {
            true => self.size * elements,
            false => 0,
        }
    }

    /// A layer `[R, input]` to `[R, output]`. Its gradients are computed in f32 one after the other and rounded; then they
    /// are added.
    fn linear(self, input: u64, output: u64) -> u64 {
        let Self { rows, size } = self;
        let (x, y, weight) = (rows * input, rows * output, input * output);
        let packed = 4 * rows.min(PACKED_ROWS) * output;
        let computing_x = self.wide(y) + 4 * x + self.wide(weight).max(self.rounded(x));
        let computing_weight = self.wide(y)
            + size * x
            + 4 * weight
            + (self.wide(x) + packed).max(self.rounded(weight));
        let adding = size * (x + weight + 2 * x.max(weight));
        size * y + computing_x.max(computing_weight).max(adding)
    }

    /// [`linear`](Self::linear) of a function of `arguments` tensors `[R, input]`, which are widened, and of which it is computed once
    /// more, in f32, beside their gradients.
    fn activated_linear(self, input: u64, output: u64, arguments: u64) -> u64 {
        let Self { rows, size } = self;
        let (x, y, weight) = (rows * input, rows * output, input * output);
        let packed = 4 * rows.min(PACKED_ROWS) * output;
        let computing_x = 4 * x + self.wide(weight);
        // The gradients of the arguments, and the function's result.
        let activating = (arguments + 1) * 4 * x + (arguments * self.wide(x)).max(self.rounded(x));
        let computing_weight =
            arguments * size * x + 4 * x + 4 * weight + packed.max(self.rounded(weight));
        let adding = size * (arguments * x + weight + 2 * x.max(weight));
        let computing = computing_x.max(activating).max(computing_weight);
        size * y + (self.wide(y) + computing).max(adding)
    }

    /// `[R, Q]` to `[R, D]`.
    fn attention(self, width: u64, qkv: u64) -> u64 {
        self.size * self.rows * (width + 3 * qkv)
    }

    /// `[V, D]` to `[R, D]`, summed up in f32.
    fn embedding(self, vocab: u64, width: u64) -> u64 {
        let (result, table) = (self.rows * width, vocab * width);
        let computing = self.wide(result) + 4 * table + self.rounded(table);
        self.size * result + computing.max(3 * self.size * table)
    }
}
