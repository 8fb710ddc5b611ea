//! Multi-head causal self-attention, with grouped queries and rotary positions where a model has them.
//!
//! `B` sequences, `T` positions, `D` width, `H` query heads, `K` heads of keys and of values, `E = D / H` width of a head.

use std::borrow::Cow;

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};
use candle_nn::Linear;

use super::chunks::{Output, map};
use super::values::{Numbers, Values, gradient, is_fusable};
use super::widen::{follow, widen};
use super::{Rotary, linear, softmax};
use crate::kernels::{self, Heads};

/// Multi-head causal self-attention with one projection for queries, keys and values, as in GPT-2 (Vaswani et al.,
/// arXiv 1706.03762, section 3.2), and as in Llama, with [`grouped`](Self::grouped) and [`with_rotary`](Self::with_rotary).
///
/// The rows of the `qkv` weight are all queries, then all keys, then all values; within each, head after head.
#[derive(Clone, Debug)]
pub struct CausalSelfAttention {
    qkv: Linear,
    proj: Linear,
    heads: usize,
    kv_heads: usize,
    rotary: Option<Rotary>,
}

impl CausalSelfAttention {
    /// Attention through `qkv` (weight `[3 D, D]`) and the output projection `proj` (weight `[D, D]`).
    ///
    /// # Errors
    ///
    /// Weights of other shapes, or `heads` that do not divide `D`.
    pub fn new(qkv: Linear, proj: Linear, heads: usize) -> Result<Self> {
        Self::grouped(qkv, proj, heads, heads)
    }

    /// Grouped-query attention (Ainslie et al., arXiv 2305.13245): `heads / kv_heads` consecutive query heads share the keys and
    /// values of one head, as with `num_key_value_heads` of Hugging Face's Llama. The weight of `qkv` is `[(H + 2 K) E, D]`.
    ///
    /// # Errors
    ///
    /// Weights of other shapes, `heads` that do not divide `D`, or `kv_heads` that do not divide `heads`.
    pub fn grouped(qkv: Linear, proj: Linear, heads: usize, kv_heads: usize) -> Result<Self> {
        let (width, width_in) = proj.weight().dims2()?;
        if heads == 0 || !width.is_multiple_of(heads) {
            bail!("attention of width {width} cannot be split into {heads} heads")
        }
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            bail!("attention cannot share {kv_heads} heads of keys and values among {heads} heads")
        }
        let qkv_width = width + 2 * kv_heads * (width / heads);
        if width != width_in || qkv.weight().dims() != [qkv_width, width] {
            bail!(
                "attention needs qkv [{qkv_width}, {width}] and proj [{width}, {width}], got {:?} and {:?}",
                qkv.weight().shape(),
                proj.weight().shape()
            )
        }
        Ok(Self {
            qkv,
            proj,
            heads,
            kv_heads,
            rotary: None,
        })
    }

    /// The same with queries and keys rotated by their positions in the sequence, which begin at 0.
    ///
    /// # Errors
    ///
    /// A rotary embedding for heads of another width.
    pub fn with_rotary(self, rotary: Rotary) -> Result<Self> {
        let (head_width, expected) = (
            rotary.head_width()?,
            self.proj.weight().dim(0)? / self.heads,
        );
        if head_width != expected {
            bail!("attention with heads of {expected} features got a Rotary for {head_width}")
        }
        Ok(Self {
            rotary: Some(rotary),
            ..self
        })
    }

    /// `x` `[B T, D]` and a [`CausalMask`](super::CausalMask) `[T, T]` to `[B T, D]`.
    ///
    /// `x` has two dimensions, because then a linear layer is one matrix product, without reshapes in the graph; each reshape
    /// costs the backward pass an allocation and an addition.
    ///
    /// # Errors
    ///
    /// The rows of `x` are not a multiple of `T`, `T` is more than the positions of the rotary embedding, or shapes or dtypes
    /// do not fit.
    pub fn forward(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (rows, _) = x.dims2()?;
        let len = mask.dim(0)?;
        if len == 0 || !rows.is_multiple_of(len) {
            bail!("attention got {rows} rows, which are not sequences of the mask's length {len}")
        }
        if let Some(rotary) = &self.rotary
            && len > rotary.cos().dim(0)?
        {
            bail!(
                "attention got sequences of length {len}, but its Rotary has {} positions",
                rotary.cos().dim(0)?
            )
        }
        let linear = |x: &Tensor, layer: &Linear| linear(x, layer.weight(), layer.bias());
        let qkv = linear(x, &self.qkv)?;
        linear(&self.heads_of(&qkv, mask)?, &self.proj)
    }

    /// `[B T, (H + 2 K) E]` to `[B T, D]`
    fn heads_of(&self, qkv: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (rows, qkv_width) = qkv.dims2()?;
        let heads = Heads {
            len: mask.dim(0)?,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_width: qkv_width / (self.heads + 2 * self.kv_heads),
        };
        let angles = self.rotary.as_ref().map_or(qkv, Rotary::cos);
        if is_fusable(&[qkv, angles]) {
            let rotary = self.rotary.clone();
            return qkv.contiguous()?.apply_op1(Attention { heads, rotary });
        }
        let mask = follow(mask, qkv)?;
        let (batch, all) = (rows / heads.len, self.heads + 2 * self.kv_heads);
        let qkv = qkv
            .reshape((batch, heads.len, all, heads.head_width))?
            .transpose(1, 2)?
            // One copy puts all three into the layout [B, H, T, E] that candle's matmul asks for.
            .contiguous()?;
        let rotated = |x: Tensor| match &self.rotary {
            Some(rotary) => rotary.forward(&x, 0),
            None => Ok(x),
        };
        // Each head of keys or values as often as there are query heads that share it.
        let shared = |x: Tensor| match self.heads / self.kv_heads {
            1 => x.contiguous(),
            group => {
                let (b, k, t, e) = x.dims4()?;
                let repeated = x.unsqueeze(2)?.broadcast_as((b, k, group, t, e))?;
                repeated.contiguous()?.reshape((b, k * group, t, e))
            }
        };
        let q = rotated(qkv.narrow(1, 0, self.heads)?)?.contiguous()?;
        let k = shared(rotated(qkv.narrow(1, self.heads, self.kv_heads)?)?)?;
        let v = shared(qkv.narrow(1, self.heads + self.kv_heads, self.kv_heads)?)?;
        attention(&q, &k, &v, &mask)?
            .transpose(1, 2)?
            .reshape((rows, heads.width()))
    }
}

/// Attention within each head of `[B T, (H + 2 K) E]`. Rotation is a part of it, so that nothing rotated is kept: the backward
/// pass rotates queries and keys again, and their gradients back.
struct Attention {
    heads: Heads,
    rotary: Option<Rotary>,
}

impl Attention {
    /// Numbers of one sequence in `[B T, (H + 2 K) E]` and in `[B T, D]`.
    fn sequence(&self) -> (usize, usize) {
        let Heads { len, .. } = self.heads;
        (len * self.heads.qkv_width(), len * self.heads.width())
    }

    /// One sequence with its queries and keys rotated.
    fn rotated<'a>(&self, qkv: &'a [f32]) -> Result<Cow<'a, [f32]>> {
        let mut qkv = Cow::Borrowed(qkv);
        if self.rotary.is_some() {
            self.rotate(qkv.to_mut(), false)?;
        }
        Ok(qkv)
    }

    fn rotate(&self, qkv: &mut [f32], back: bool) -> Result<()> {
        let heads = &self.heads;
        // Values lie behind queries and keys, and stay as they are.
        let num = (heads.heads + heads.kv_heads) * heads.head_width;
        match &self.rotary {
            Some(rotary) => rotary.rotate_rows(qkv, heads.qkv_width(), num, back),
            None => Ok(()),
        }
    }
}

impl CustomOp1 for Attention {
    fn name(&self) -> &'static str {
        "causal-self-attention"
    }

    fn cpu_fwd(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let qkv = Numbers::of(qkv, layout)?;
        let (len_in, len_out) = self.sequence();
        let (rows, _) = layout.shape().dims2()?;
        let output = Output {
            dtype: qkv.dtype(),
            len: rows * self.heads.width(),
            chunk: len_out,
        };
        let (out, results) = map([(qkv, len_in)], output, |_, [qkv], out| {
            kernels::attention_forward(&self.rotated(qkv)?, self.heads, out);
            Ok(())
        })?;
        results.into_iter().collect::<Result<()>>()?;
        Ok((out, Shape::from((rows, self.heads.width()))))
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
        let (dqkv, results) = map(inputs, output, |_, [qkv, out, grad], dqkv| {
            kernels::attention_backward(&self.rotated(qkv)?, out, grad, self.heads, dqkv);
            self.rotate(dqkv, true)
        })?;
        results.into_iter().collect::<Result<()>>()?;
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
