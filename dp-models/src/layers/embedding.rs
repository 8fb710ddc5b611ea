//! Token and position embeddings.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};

use super::values::{Values, is_fusable, slice};
use crate::ids::check_ids;
use crate::kernels;

/// `wte[tokens] + wpe[0..T]`: `tokens` `[B, T]` u32, `wte` `[V, D]` and `wpe` `[context, D]` of one float dtype, to
/// `[B T, D]`.
///
/// On the CPU in f32 it is one node of the graph.
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
    if is_fusable(wte) && is_fusable(wpe) {
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
        .broadcast_add(&wpe.narrow(0, 0, len)?)?
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
        let (wte, wpe) = (slice(wte, lt)?, slice(wpe, lp)?);
        let mut out = vec![0f32; self.ids.len() * width];
        for (i, (out, id)) in out.chunks_exact_mut(width).zip(&self.ids).enumerate() {
            let (token, position) = (*id as usize * width, i % self.len * width);
            kernels::add_rows(
                &wte[token..token + width],
                &wpe[position..position + width],
                out,
            );
        }
        Ok((CpuStorage::F32(out), Shape::from((self.ids.len(), width))))
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
        let grad = Values::of(&grad)?;
        let (mut dt, mut dp) = (vec![0f32; wte.elem_count()], vec![0f32; wpe.elem_count()]);
        for (i, (grad, id)) in grad.chunks_exact(width).zip(&self.ids).enumerate() {
            let (token, position) = (*id as usize * width, i % self.len * width);
            kernels::column_sums(grad, &mut dt[token..token + width]);
            kernels::column_sums(grad, &mut dp[position..position + width]);
        }
        Ok((
            Some(Tensor::from_vec(dt, wte.shape(), wte.device())?),
            Some(Tensor::from_vec(dp, wpe.shape(), wpe.device())?),
        ))
    }
}
