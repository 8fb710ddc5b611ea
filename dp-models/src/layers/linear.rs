//! Linear layers.

use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, CustomOp2, CustomOp3, D, Layout, Result, Shape, Tensor, bail};

use super::gelu::gelu_tanh;
use super::values::{Values, is_fusable, slice};
use super::widen::widen;
use crate::kernels::{self, Mat, matmul};

/// `x weight^T + bias`, as `torch.nn.functional.linear`.
///
/// `x` `[.., in]`, `weight` `[out, in]`, `bias` `[out]`, the result `[.., out]`, of one float dtype. On the CPU it is one node
/// of the graph, whose backward computes the gradients that are needed and no others; 16-bit input is computed in f32 (candle
/// has no bf16 product on the CPU).
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
    let rows = widen(x)?.flatten_to(D::Minus2)?;
    let y = match (is_fusable(&rows), bias) {
        (true, None) => rows
            .contiguous()?
            .apply_op2(&widen(weight)?.contiguous()?, Linear { shape })?,
        (true, Some(bias)) => {
            let (weight, bias) = (widen(weight)?.contiguous()?, widen(bias)?.contiguous()?);
            rows.contiguous()?
                .apply_op3(&weight, &bias, Linear { shape })?
        }
        (false, _) => composed(&rows, weight, bias)?.reshape(shape)?,
    };
    y.to_dtype(x.dtype())
}

/// [`gelu_tanh`] of [`linear`], in one node: the first half of a transformer's MLP.
///
/// # Errors
///
/// As [`linear`].
pub fn linear_gelu(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let shape = output_shape(x, weight, Some(bias))?;
    let rows = widen(x)?.flatten_to(D::Minus2)?;
    if !is_fusable(&rows) {
        return gelu_tanh(&composed(&rows, weight, Some(bias))?)?
            .reshape(shape)?
            .to_dtype(x.dtype());
    }
    let op = LinearGelu {
        shape,
        before: Mutex::new(None),
    };
    let (weight, bias) = (widen(weight)?.contiguous()?, widen(bias)?.contiguous()?);
    rows.contiguous()?
        .apply_op3(&weight, &bias, op)?
        .to_dtype(x.dtype())
}

fn composed(rows: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let y = rows.matmul(&weight.t()?)?;
    match bias {
        Some(bias) => y.broadcast_add(bias),
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
fn forward(x: &[f32], weight: &[f32], bias: Option<&[f32]>, out: usize) -> Vec<f32> {
    let width = weight.len() / out.max(1);
    let rows = x.len() / width.max(1);
    let mut y = Vec::with_capacity(rows * out);
    match bias {
        Some(bias) => (0..rows).for_each(|_| y.extend_from_slice(bias)),
        None => y.resize(rows * out, 0.0),
    }
    matmul(
        &mut y,
        out,
        bias.is_some(),
        Mat::new(x, rows, width),
        Mat::new(weight, out, width).t(),
        1.0,
        true,
    );
    y
}

/// The gradients of `x` and `weight`, where they are needed, and of the bias.
struct Gradients {
    x: Option<Tensor>,
    weight: Option<Tensor>,
    bias: Vec<f32>,
}

fn backward(x: &Tensor, weight: &Tensor, grad: &[f32]) -> Result<Gradients> {
    let (out, width) = weight.dims2()?;
    let rows = x.elem_count() / width.max(1);
    let grad_mat = Mat::new(grad, rows, out);
    let mut gradients = Gradients {
        x: None,
        weight: None,
        bias: vec![0f32; out],
    };
    if x.track_op() {
        let mut dx = vec![0f32; rows * width];
        matmul(
            &mut dx,
            width,
            false,
            grad_mat,
            Mat::new(&Values::of(weight)?, out, width),
            1.0,
            true,
        );
        gradients.x = Some(Tensor::from_vec(dx, x.shape(), x.device())?);
    }
    if weight.track_op() {
        let mut dw = vec![0f32; out * width];
        matmul(
            &mut dw,
            width,
            false,
            grad_mat.t(),
            Mat::new(&Values::of(x)?, rows, width),
            1.0,
            true,
        );
        gradients.weight = Some(Tensor::from_vec(dw, weight.shape(), weight.device())?);
    }
    kernels::column_sums(grad, &mut gradients.bias);
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
        let y = forward(slice(x, lx)?, slice(w, lw)?, None, lw.dims()[0]);
        Ok((CpuStorage::F32(y), self.shape.clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradients = backward(x, w, &Values::of(&grad.contiguous()?)?)?;
        Ok((gradients.x, gradients.weight))
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
        let y = forward(
            slice(x, lx)?,
            slice(w, lw)?,
            Some(slice(b, lb)?),
            lw.dims()[0],
        );
        Ok((CpuStorage::F32(y), self.shape.clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        b: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let gradients = backward(x, w, &Values::of(&grad.contiguous()?)?)?;
        let bias = Tensor::from_vec(gradients.bias, b.shape(), b.device())?;
        Ok((gradients.x, gradients.weight, Some(bias)))
    }
}

struct LinearGelu {
    shape: Shape,
    /// The linear part, for the backward pass, which turns it into its own gradient.
    before: Mutex<Option<Vec<f32>>>,
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
        let before = forward(
            slice(x, lx)?,
            slice(w, lw)?,
            Some(slice(b, lb)?),
            lw.dims()[0],
        );
        let mut y = vec![0f32; before.len()];
        kernels::gelu(&before, &mut y);
        *self.before.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
        Ok((CpuStorage::F32(y), self.shape.clone()))
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
        let mut before = match kept {
            Some(before) => before,
            // A second backward through the same graph.
            None => forward(
                &Values::of(x)?,
                &Values::of(w)?,
                Some(&Values::of(b)?),
                w.dim(0)?,
            ),
        };
        kernels::gelu_backward(&mut before, &Values::of(&grad.contiguous()?)?);
        let gradients = backward(x, w, &before)?;
        let bias = Tensor::from_vec(gradients.bias, b.shape(), b.device())?;
        Ok((gradients.x, gradients.weight, Some(bias)))
    }
}
