//! Linear layers.

use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, CustomOp2, CustomOp3, D, Layout, Result, Shape, Tensor, bail};

use super::chunks::{ELEMENTS, Output, map};
use super::gelu::gelu_tanh;
use super::values::{Numbers, Values, gradient, into_f32, is_fusable, parameter_gradient, round};
use super::widen::follow;
use crate::kernels::{self, Mat, matmul};

/// `x weight^T + bias`, as `torch.nn.functional.linear`.
///
/// `x` `[.., in]`, `weight` `[out, in]`, `bias` `[out]`, the result `[.., out]`, of one float dtype. On the CPU it is one node
/// of the graph, whose backward computes the gradients that are needed and no others.
///
/// 16-bit numbers are computed with in f32, sums included, and the result is rounded once (candle has no bf16 product on the
/// CPU); what is kept for the backward pass is 16 bit. Between f32, f16 and bf16 the parameters may have another dtype than
/// `x`: the result has that of `x`, and each gradient that of what it belongs to. So f32 weights of bf16 activations get f32
/// gradients. On other devices parameters are first converted to the dtype of `x`, and the device's own product is used.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[[1f32, 2.]], &Device::Cpu)?;
/// let weight = Tensor::new(&[[1f32, 1.], [0., 3.]], &Device::Cpu)?;
/// let y = dp_models::linear(&x, &weight, None)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[3., 6.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
///
/// Shapes or dtypes that do not fit.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let shape = output_shape(x, weight, bias)?;
    let rows = x.flatten_to(D::Minus2)?;
    if !is_fusable(&[x, weight, bias.unwrap_or(weight)]) {
        return composed(&rows, weight, bias)?.reshape(shape);
    }
    let (rows, weight) = (rows.contiguous()?, weight.contiguous()?);
    match bias {
        None => rows.apply_op2(&weight, Linear { shape }),
        Some(bias) => rows.apply_op3(&weight, &bias.contiguous()?, Linear { shape }),
    }
}

/// [`gelu_tanh`] of [`linear`], in one node: the first half of a transformer's MLP.
///
/// # Errors
///
/// As [`linear`].
pub fn linear_gelu(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let shape = output_shape(x, weight, Some(bias))?;
    let rows = x.flatten_to(D::Minus2)?;
    if !is_fusable(&[x, weight, bias]) {
        return gelu_tanh(&composed(&rows, weight, Some(bias))?)?.reshape(shape);
    }
    let op = LinearGelu {
        shape,
        before: Mutex::new(None),
    };
    rows.contiguous()?
        .apply_op3(&weight.contiguous()?, &bias.contiguous()?, op)
}

fn composed(rows: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let y = rows.matmul(&follow(weight, rows)?.t()?)?;
    match bias {
        Some(bias) => y.broadcast_add(&follow(bias, rows)?),
        None => Ok(y),
    }
}

fn output_shape(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Shape> {
    let (out, width) = weight.dims2()?;
    let fits =
        x.rank() >= 2 && x.dim(D::Minus1)? == width && bias.is_none_or(|b| b.dims() == [out]);
    if !fits {
        bail!(
            "linear needs x [.., in], weight [out, in] and bias [out], got {:?}, {:?} and {:?}",
            x.shape(),
            weight.shape(),
            bias.map(Tensor::shape)
        )
    }
    let lead = &x.dims()[..x.rank() - 1];
    Ok(Shape::from([lead, &[out]].concat()))
}

/// `y = x weight^T + bias`
fn forward(
    x: Numbers<'_>,
    weight: Numbers<'_>,
    bias: Option<Numbers<'_>>,
    [rows, out]: [usize; 2],
) -> Vec<f32> {
    let width = weight.len() / out.max(1);
    let mut y = Vec::with_capacity(rows * out);
    match bias {
        Some(bias) => {
            let bias = bias.to_f32();
            (0..rows).for_each(|_| y.extend_from_slice(&bias));
        }
        None => y.resize(rows * out, 0.0),
    }
    matmul(
        &mut y,
        out,
        bias.is_some(),
        Mat::new(&x.to_f32(), rows, width),
        Mat::new(&weight.to_f32(), out, width).t(),
        1.0,
        true,
    );
    y
}

/// The gradients of `x`, `weight` and `bias`, where they are needed; `grad` is that of `y`.
fn backward(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    grad: &[f32],
) -> Result<[Option<Tensor>; 3]> {
    let (out, width) = weight.dims2()?;
    let rows = x.dim(0)?;
    let grad_mat = Mat::new(grad, rows, out);
    let mut gradients = [None, None, None];
    if x.track_op() {
        let mut dx = vec![0f32; rows * width];
        let values = Values::of(weight);
        let wide = values.numbers()?.to_f32();
        let weight = Mat::new(&wide, out, width);
        matmul(&mut dx, width, false, grad_mat, weight, 1.0, true);
        drop(wide);
        gradients[0] = Some(gradient(round(dx, x.dtype())?, x)?);
    }
    if weight.track_op() {
        let mut dw = vec![0f32; out * width];
        let values = Values::of(x);
        let wide = values.numbers()?.to_f32();
        let x = Mat::new(&wide, rows, width);
        matmul(&mut dw, width, false, grad_mat.t(), x, 1.0, true);
        drop(wide);
        gradients[1] = parameter_gradient(dw, weight)?;
    }
    if let Some(bias) = bias
        && bias.track_op()
    {
        let mut db = vec![0f32; out];
        kernels::column_sums(grad, &mut db);
        gradients[2] = parameter_gradient(db, bias)?;
    }
    Ok(gradients)
}

struct Linear {
    /// Of the result.
    shape: Shape,
}

impl CustomOp2 for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        lx: &Layout,
        w: &CpuStorage,
        lw: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, w) = (Numbers::of(x, lx)?, Numbers::of(w, lw)?);
        let y = forward(x, w, None, [lx.dims()[0], lw.dims()[0]]);
        Ok((round(y, x.dtype())?, self.shape.clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let [dx, dw, _] = backward(x, w, None, &Values::of(&grad).numbers()?.to_f32())?;
        Ok((dx, dw))
    }
}

impl CustomOp3 for Linear {
    fn name(&self) -> &'static str {
        "linear-with-bias"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        lx: &Layout,
        w: &CpuStorage,
        lw: &Layout,
        b: &CpuStorage,
        lb: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, w, b) = (
            Numbers::of(x, lx)?,
            Numbers::of(w, lw)?,
            Numbers::of(b, lb)?,
        );
        let y = forward(x, w, Some(b), [lx.dims()[0], lw.dims()[0]]);
        Ok((round(y, x.dtype())?, self.shape.clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        b: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let grad = Values::of(&grad);
        Ok(backward(x, w, Some(b), &grad.numbers()?.to_f32())?.into())
    }
}

struct LinearGelu {
    shape: Shape,
    /// The linear part in the dtype of the result, for the backward pass, which takes it.
    before: Mutex<Option<CpuStorage>>,
}

impl LinearGelu {
    /// The linear part as the backward pass sees it: rounded, as it is kept.
    fn recompute(x: &Tensor, w: &Tensor, b: &Tensor) -> Result<CpuStorage> {
        let (x_values, w_values, b_values) = (Values::of(x), Values::of(w), Values::of(b));
        let sizes = [x.dim(0)?, w.dim(0)?];
        let (x, bias) = (x_values.numbers()?, b_values.numbers()?);
        round(
            forward(x, w_values.numbers()?, Some(bias), sizes),
            x.dtype(),
        )
    }
}

impl CustomOp3 for LinearGelu {
    fn name(&self) -> &'static str {
        "linear-gelu"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        lx: &Layout,
        w: &CpuStorage,
        lw: &Layout,
        b: &CpuStorage,
        lb: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, w, b) = (
            Numbers::of(x, lx)?,
            Numbers::of(w, lw)?,
            Numbers::of(b, lb)?,
        );
        let before = forward(x, w, Some(b), [lx.dims()[0], lw.dims()[0]]);
        let output = Output {
            dtype: x.dtype(),
            len: before.len(),
            chunk: ELEMENTS,
        };
        let inputs = [(Numbers::F32(&before), ELEMENTS)];
        let (y, _) = map(inputs, output, |_, [before], y| {
            kernels::gelu_tanh(before, y);
        })?;
        *self.before.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(round(before, x.dtype())?);
        Ok((y, self.shape.clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        b: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let kept = self
            .before
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let before = match kept {
            Some(before) => before,
            // A second backward through the same graph.
            None => Self::recompute(x, w, b)?,
        };
        let mut before = into_f32(before)?;
        let grad = grad.contiguous()?;
        kernels::gelu_tanh_backward(&mut before, &Values::of(&grad).numbers()?.to_f32());
        Ok(backward(x, w, Some(b), &before)?.into())
    }
}
