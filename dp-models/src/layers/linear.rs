//! Linear layers.

use candle_core::{CpuStorage, CustomOp2, CustomOp3, D, Layout, Result, Shape, Tensor, bail};

use super::values::{Numbers, Values, gradient, is_fusable, parameter_gradient, round};
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

pub(super) fn composed(rows: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let y = rows.matmul(&follow(weight, rows)?.t()?)?;
    match bias {
        Some(bias) => y.broadcast_add(&follow(bias, rows)?),
        None => Ok(y),
    }
}

pub(super) fn output_shape(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Shape> {
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
pub(super) fn forward(
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

/// The gradient of `x`, where `grad` is that of `rows` rows of `y`.
pub(super) fn input_gradient(weight: &Tensor, grad: &[f32], rows: usize) -> Result<Vec<f32>> {
    let (out, width) = weight.dims2()?;
    let values = Values::of(weight);
    let mut dx = vec![0f32; rows * width];
    matmul(
        &mut dx,
        width,
        false,
        Mat::new(grad, rows, out),
        Mat::new(&values.numbers()?.to_f32(), out, width),
        1.0,
        true,
    );
    Ok(dx)
}

/// The gradient of `weight`, if it needs one.
pub(super) fn weight_gradient(
    x: Numbers<'_>,
    weight: &Tensor,
    grad: &[f32],
) -> Result<Option<Tensor>> {
    if !weight.track_op() {
        return Ok(None);
    }
    let (out, width) = weight.dims2()?;
    let rows = grad.len() / out.max(1);
    let mut dw = vec![0f32; out * width];
    matmul(
        &mut dw,
        width,
        false,
        Mat::new(grad, rows, out).t(),
        Mat::new(&x.to_f32(), rows, width),
        1.0,
        true,
    );
    parameter_gradient(dw, weight)
}

/// The gradient of `bias`, if it needs one.
pub(super) fn bias_gradient(bias: &Tensor, grad: &[f32]) -> Result<Option<Tensor>> {
    if !bias.track_op() {
        return Ok(None);
    }
    let mut db = vec![0f32; bias.elem_count()];
    kernels::column_sums(grad, &mut db);
    parameter_gradient(db, bias)
}

/// The gradients of `x` and `weight`, where they are needed; `grad` is that of `y`.
fn backward(x: &Tensor, weight: &Tensor, grad: &[f32]) -> Result<[Option<Tensor>; 2]> {
    let mut dx = None;
    if x.track_op() {
        let values = input_gradient(weight, grad, x.dim(0)?)?;
        dx = Some(gradient(round(values, x.dtype())?, x)?);
    }
    let values = Values::of(x);
    Ok([dx, weight_gradient(values.numbers()?, weight, grad)?])
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
        Ok(backward(x, w, &Values::of(&grad).numbers()?.to_f32())?.into())
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
        let grad = grad.numbers()?.to_f32();
        let [dx, dw] = backward(x, w, &grad)?;
        Ok((dx, dw, bias_gradient(b, &grad)?))
    }
}
