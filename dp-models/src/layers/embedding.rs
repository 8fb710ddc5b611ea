//! Token and position embeddings.

use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor, bail};

use super::chunks::{ELEMENTS, Output, map};
use super::values::{Numbers, Values, is_fusable, parameter_gradient};
use super::widen::follow;
use crate::ids::check_ids;
use crate::kernels;

/// `weight[tokens]`, as `torch.nn.functional.embedding`: `tokens` `[B, T]` u32 and `weight` `[V, D]` of any float dtype, to
/// `[B T, D]`.
///
/// On the CPU in f32, f16 and bf16 it is one node of the graph, which adds the gradients of a token that repeats in f32.
///
/// # Errors
///
/// Shapes that do not fit, or (checked on the CPU) an id that is not below `V`.
pub fn embedding(tokens: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let (_, (vocab_size, _)) = (tokens.dims2()?, weight.dims2()?);
    check_ids("tokens", tokens, vocab_size)?;
    let ids = tokens.flatten_all()?;
    if is_fusable(&[weight]) {
        let ids = ids.to_vec1()?;
        return weight.contiguous()?.apply_op1(Embedding { ids });
    }
    weight.index_select(&ids, 0)
}

struct Embedding {
    ids: Vec<u32>,
}

impl CustomOp1 for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn cpu_fwd(&self, weight: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (_, width) = layout.shape().dims2()?;
        let weight = Numbers::of(weight, layout)?;
        let rows = (ELEMENTS / width.max(1)).max(1);
        let output = Output {
            dtype: weight.dtype(),
            len: self.ids.len() * width,
            chunk: rows * width,
        };
        let (out, _) = map([], output, |idx, [], out| {
            let ids = &self.ids[idx * rows..];
            for (out, id) in out.chunks_exact_mut(width).zip(ids) {
                let start = *id as usize * width;
                weight.range(start..start + width).copy_to(out);
            }
        })?;
        Ok((out, Shape::from((self.ids.len(), width))))
    }

    fn bwd(&self, weight: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        let grad = Values::of(&grad);
        let sums = scatter(&grad.numbers()?.to_f32(), &self.ids, weight)?;
        parameter_gradient(sums, weight)
    }
}

/// The gradient of a table `[V, D]` of embeddings, from those of the rows that `ids` looked up.
fn scatter(grad: &[f32], ids: &[u32], table: &Tensor) -> Result<Vec<f32>> {
    let (_, width) = table.dims2()?;
    let mut sums = vec![0f32; table.elem_count()];
    for (grad, id) in grad.chunks_exact(width.max(1)).zip(ids) {
        kernels::add(grad, &mut sums[*id as usize * width..][..width]);
    }
    Ok(sums)
}

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
        let (mut dt, mut dp) = (Vec::new(), Vec::new());
        if wte.track_op() {
            dt = scatter(&grad, &self.ids, wte)?;
        }
        if wpe.track_op() {
            dp.resize(wpe.elem_count(), 0f32);
            for (i, grad) in grad.chunks_exact(width.max(1)).enumerate() {
                kernels::add(grad, &mut dp[i % self.len * width..][..width]);
            }
        }
        Ok((parameter_gradient(dt, wte)?, parameter_gradient(dp, wpe)?))
    }
}
