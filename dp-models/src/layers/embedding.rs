//! Token and position embeddings.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};

use super::chunks::{ELEMENTS, Output, map};
use super::values::{Numbers, Values, is_fusable, parameter_gradient};
use super::widen::follow;
use crate::ids::check_ids;
use crate::kernels;

/// `wte[tokens] + wpe[0..T]`: `tokens` `[B, T]` u32, `wte` `[V, D]` and `wpe` `[context, D]` of one float dtype, to
/// `[B T, D]`.
///
/// On the CPU in f32, f16 and bf16 it is one node of the graph. 16-bit numbers are added in f32 and rounded once, the gradients
/// of a token that repeats, too. Between these types `wpe` may have another dtype than `wte`; the result has that of `wte`.
///
/// # Errors
///
/// Shapes that do not fit, more positions than `wpe` has, or (checked on the CPU) an id that is not below `V`.
pub fn embed(tokens: &Tensor, wte: &Tensor, wpe: &Tensor) -> Result<Tensor> {
    let ((batch, len), (vocab_size, width)) = (tokens.dims2()?, wte.dims2()?);
    let (context, position_width) = wpe.dims2()?;
    if len > context || width != position_width {
        bail!(
            "embed got tokens {:?} for wte {:?} and wpe {:?}",
            tokens.shape(),
            wte.shape(),
            wpe.shape()
        )
    }
    check_ids("tokens", tokens, vocab_size)?;
    if is_fusable(&[wte, wpe]) {
        let op = Embed {
            ids: tokens.flatten_all()?.to_vec1()?,
            len,
        };
        return wte.contiguous()?.apply_op2(&wpe.contiguous()?, op);
    }
    let embedded = wte
        .index_select(&tokens.flatten_all()?, 0)?
        .reshape((batch, len, width))?;
    embedded
        .broadcast_add(&follow(wpe, wte)?.narrow(0, 0, len)?)?
        .reshape((batch * len, width))
}

struct Embed {
    ids: Vec<u32>,
    len: usize,
}

impl CustomOp2 for Embed {
    fn name(&self) -> &'static str {
        "embed"
    }

    fn cpu_fwd(
        &self,
        wte: &CpuStorage,
        lt: &Layout,
        wpe: &CpuStorage,
        lp: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (_, width) = lt.shape().dims2()?;
        let (wte, wpe) = (Numbers::of(wte, lt)?, Numbers::of(wpe, lp)?);
        let positions = wpe.range(0..self.len * width).to_f32();
        let rows = (ELEMENTS / width.max(1)).max(1);
        let output = Output {
            dtype: wte.dtype(),
            len: self.ids.len() * width,
            chunk: rows * width,
        };
        let (out, _) = map([], output, |idx, [], out| {
            for (row, out) in out.chunks_exact_mut(width).enumerate() {
                let i = idx * rows + row;
                let (token, position) = (self.ids[i] as usize * width, i % self.len * width);
                wte.range(token..token + width).copy_to(out);
                kernels::add(&positions[position..position + width], out);
            }
        })?;
        Ok((out, Shape::from((self.ids.len(), width))))
    }

    fn bwd(
        &self,
        wte: &Tensor,
        wpe: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (_, width) = wte.dims2()?;
        let grad = grad.contiguous()?;
        let grad = Values::of(&grad);
        let grad = grad.numbers()?.to_f32();
        let rows = || grad.chunks_exact(width.max(1)).enumerate();
        let (mut dt, mut dp) = (Vec::new(), Vec::new());
        if wte.track_op() {
            dt.resize(wte.elem_count(), 0f32);
            for ((_, grad), id) in rows().zip(&self.ids) {
                kernels::add(grad, &mut dt[*id as usize * width..][..width]);
            }
        }
        if wpe.track_op() {
            dp.resize(wpe.elem_count(), 0f32);
            for (i, grad) in rows() {
                kernels::add(grad, &mut dp[i % self.len * width..][..width]);
            }
        }
        Ok((parameter_gradient(dt, wte)?, parameter_gradient(dp, wpe)?))
    }
}
