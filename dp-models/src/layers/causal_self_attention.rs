//! Multi-head causal self-attention.
//!
//! `B` sequences, `T` positions, `D` width, `H` heads, `E = D / H` width of a head.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};
use candle_nn::Linear;

use super::chunks::{Output, map};
use super::values::{Numbers, Values, gradient, is_fusable};
use super::widen::{follow, widen};
use super::{linear, softmax};
use crate::kernels::{self, Heads};

/// Multi-head causal self-attention with one projection for queries, keys and values, as in GPT-2 (Vaswani et al.,
/// arXiv 1706.03762, section 3.2).
///
/// The rows of the `qkv` weight are all queries, then all keys, then all values; within each, head after head.
#[derive(Clone, Debug)]
pub struct CausalSelfAttention {
    qkv: Linear,
    proj: Linear,
    heads: usize,
}

impl CausalSelfAttention {
    /// Attention through `qkv` (weight `[3 D, D]`) and the output projection `proj` (weight `[D, D]`).
    ///
    /// # Errors
    ///
    /// Weights of other shapes, or `heads` that do not divide `D`.
    pub fn new(qkv: Linear, proj: Linear, heads: usize) -> Result<Self> {
        let (width, width_in) = proj.weight().dims2()?;
        if width != width_in || qkv.weight().dims() != [3 * width, width] {
            bail!(
                "attention needs qkv [3 D, D] and proj [D, D], got {:?} and {:?}",
                qkv.weight().shape(),
                proj.weight().shape()
            )
        }
        if heads == 0 || !width.is_multiple_of(heads) {
            bail!("attention of width {width} cannot be split into {heads} heads")
        }
        Ok(Self { qkv, proj, heads })
    }

    /// `x` `[B T, D]` and a [`CausalMask`](super::CausalMask) `[T, T]` to `[B T, D]`.
    ///
    /// `x` has two dimensions, because then a linear layer is one matrix product, without reshapes in the graph; each reshape
    /// costs the backward pass an allocation and an addition.
    ///
    /// # Errors
    ///
    /// The rows of `x` are not a multiple of `T`, or shapes or dtypes do not fit.
    pub fn forward(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (rows, _) = x.dims2()?;
        let len = mask.dim(0)?;
        if len == 0 || !rows.is_multiple_of(len) {
            bail!("attention got {rows} rows, which are not sequences of the mask's length {len}")
        }
        let linear = |x: &Tensor, layer: &Linear| linear(x, layer.weight(), layer.bias());
        let qkv = linear(x, &self.qkv)?;
        linear(&self.heads_of(&qkv, mask)?, &self.proj)
    }

    /// `[B T, 3 D]` to `[B T, D]`
    fn heads_of(&self, qkv: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (rows, width) = (qkv.dim(0)?, qkv.dim(1)? / 3);
        let len = mask.dim(0)?;
        if is_fusable(&[qkv]) {
            let op = Attention(Heads {
                len,
                heads: self.heads,
                head_width: width / self.heads,
            });
            return qkv.contiguous()?.apply_op1(op);
        }
        let mask = follow(mask, qkv)?;
        let qkv = qkv
            .reshape((rows / len, len, 3, self.heads, width / self.heads))?
            .permute((2, 0, 3, 1, 4))?
            // One copy puts all three into the layout [B, H, T, E] that candle's matmul asks for.
            .contiguous()?;
        attention(&qkv.get(0)?, &qkv.get(1)?, &qkv.get(2)?, &mask)?
            .transpose(1, 2)?
            .reshape((rows, width))
    }
}

/// Attention within each head of `[B T, 3 D]`.
struct Attention(Heads);

impl Attention {
    /// Numbers of one sequence in `[B T, 3 D]` and in `[B T, D]`.
    fn sequence(&self) -> (usize, usize) {
        let len_out = self.0.len * self.0.width();
        (3 * len_out, len_out)
    }
}

impl CustomOp1 for Attention {
    fn name(&self) -> &'static str {
        "causal-self-attention"
    }

    fn cpu_fwd(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let qkv = Numbers::of(qkv, layout)?;
        let (len_in, len_out) = self.sequence();
        let output = Output {
            dtype: qkv.dtype(),
            len: qkv.len() / 3,
            chunk: len_out,
        };
        let (out, _) = map([(qkv, len_in)], output, |_, [qkv], out| {
            kernels::attention_forward(qkv, self.0, out);
        })?;
        let (rows, width) = layout.shape().dims2()?;
        Ok((out, Shape::from((rows, width / 3))))
    }

    fn bwd(&self, qkv: &Tensor, out: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        let (qkv_values, out, grad) = (Values::of(qkv), Values::of(out), Values::of(&grad));
        let (numbers, (len_in, len_out)) = (qkv_values.numbers()?, self.sequence());
        let inputs = [
            (numbers, len_in),
            (out.numbers()?, len_out),
            (grad.numbers()?, len_out),
        ];
        let output = Output::rows(numbers, len_in);
        let (dqkv, _) = map(inputs, output, |_, [qkv, out, grad], dqkv| {
            kernels::attention_backward(qkv, out, grad, self.0, dqkv);
        })?;
        Ok(Some(gradient(dqkv, qkv)?))
    }
}

/// Scaled dot-product attention, as `torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)`:
///
/// `softmax(q k^T / sqrt(E) + mask) v`.
///
/// `q`, `k`, `v` and the result are `[B, H, T, E]`, contiguous, of one float dtype; `mask` is `[T, T]` of the same dtype. It is
/// composed of Candle's operations; on the CPU 16-bit input is computed in f32 and rounded once. [`CausalSelfAttention`], which
/// keeps no scores, takes less memory.
///
/// # Errors
///
/// Shapes or dtypes that do not fit.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, mask: &Tensor) -> Result<Tensor> {
    let (_, _, _, head_width) = q.dims4()?;
    if q.device().is_cpu() && matches!(q.dtype(), DType::F16 | DType::BF16) {
        // Candle has no bf16 product on the CPU.
        let y = attention(&widen(q)?, &widen(k)?, &widen(v)?, &widen(mask)?)?;
        return y.to_dtype(q.dtype());
    }
    // Scaling the queries is T / E times cheaper than scaling the scores.
    let q = (q * (head_width as f64).powf(-0.5))?;
    let scores = q.matmul(&k.t()?)?.broadcast_add(mask)?;
    softmax(&scores)?.matmul(v)
}
