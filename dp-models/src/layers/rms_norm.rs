//! Root-mean-square normalisation over the last dimension.

use candle_core::{CpuStorage, CustomOp2, D, Layout, Module, Result, Shape, Tensor};
use candle_nn::{Init, VarBuilder};

use super::chunks::{Output, map, total};
use super::layer_norm::check_width;
use super::values::{Numbers, Values, gradient, is_fusable, parameter_gradient};
use super::widen::widen;
use crate::kernels::{self, NORM_ROWS};

/// Root-mean-square normalisation, as `torch.nn.RMSNorm` over the last dimension (Zhang and Sennrich, arXiv 1910.07467):
///
/// `y = x / sqrt(mean(x^2) + eps) * weight`.
///
/// Input and output `[.., D]` of any float dtype; `weight` is `[D]`. 16-bit input is computed in f32 and rounded once, after
/// the weight; between f32, f16 and bf16 the weight may have another dtype than the input, and the result has the input's.
/// `candle_nn::RmsNorm` has no backward pass on contiguous input; this one has.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::VarBuilder;
/// use dp_models::RmsNorm;
///
/// let vb = VarBuilder::from_varmap(&candle_nn::VarMap::new(), DType::F32, &Device::Cpu);
/// let norm = RmsNorm::new(2, 1e-6, vb)?;
/// let y = norm.forward(&Tensor::new(&[[1f32, 7.]], &Device::Cpu)?)?;
/// assert!((y.to_vec2::<f32>()?[0][1] - 1.4).abs() < 1e-5);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    /// Takes `weight` `[width]`, initially ones, from `vb`.
    ///
    /// # Errors
    ///
    /// Whatever `vb` reports: a missing name, or another shape.
    pub fn new(width: usize, eps: f64, vb: VarBuilder) -> Result<Self> {
        let weight = vb.get_with_hints(width, "weight", Init::Const(1.))?;
        Ok(Self { weight, eps })
    }
}

impl Module for RmsNorm {
    /// # Errors
    ///
    /// An input whose last dimension is not `D`, or dtypes that do not fit.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        check_width("RmsNorm", &self.weight, x)?;
        if is_fusable(&[x, &self.weight]) {
            let op = Normalise {
                eps: self.eps as f32,
            };
            return x.contiguous()?.apply_op2(&self.weight.contiguous()?, op);
        }
        let (wide, weight) = (widen(x)?, widen(&self.weight)?);
        let mean_square = wide.sqr()?.mean_keepdim(D::Minus1)?;
        let inverse = (mean_square + self.eps)?.sqrt()?.recip()?;
        wide.broadcast_mul(&inverse)?
            .broadcast_mul(&weight)?
            .to_dtype(x.dtype())
    }
}

struct Normalise {
    eps: f32,
}

impl CustomOp2 for Normalise {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        lx: &Layout,
        w: &CpuStorage,
        lw: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, w) = (Numbers::of(x, lx)?, Numbers::of(w, lw)?.to_f32());
        let chunk = NORM_ROWS * w.len();
        let (y, _) = map([(x, chunk)], Output::rows(x, chunk), |_, [x], y| {
            kernels::rms_norm(x, &w, self.eps, y);
        })?;
        Ok((y, lx.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let (x_values, w_values, grad) = (Values::of(x), Values::of(w), Values::of(&grad));
        let (numbers, weight) = (x_values.numbers()?, w_values.numbers()?.to_f32());
        let chunk = NORM_ROWS * weight.len();
        let output = match x.track_op() {
            true => Output::rows(numbers, chunk),
            false => Output::none(),
        };
        let num_sums = if w.track_op() { weight.len() } else { 0 };
        let inputs = [(numbers, chunk), (grad.numbers()?, chunk)];
        let (dx, sums) = map(inputs, output, |_, [x, grad], dx| {
            let mut dw = vec![0f32; num_sums];
            kernels::rms_norm_backward(x, &weight, grad, self.eps, dx, &mut dw);
            dw
        })?;
        Ok((
            x.track_op().then(|| gradient(dx, x)).transpose()?,
            parameter_gradient(total(sums, num_sums), w)?,
        ))
    }
}
