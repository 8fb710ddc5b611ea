//! The gated multi-layer perceptron of Llama.

use candle_core::{CpuStorage, CustomOp2, Layout, Module, Result, Shape, Tensor, bail};
use candle_nn::init::DEFAULT_KAIMING_NORMAL;
use candle_nn::{Init, VarBuilder};

use super::chunks::{ELEMENTS, Output, map};
use super::values::{Numbers, Values, gradient, is_fusable};
use super::widen::widen;
use super::{linear, silu_gated_linear};
use crate::kernels;

/// `silu(gate) * up` with `silu(x) = x / (1 + exp(-x))`, as `torch.nn.functional.silu(gate) * up`, in one node of the graph.
///
/// `gate`, `up` and the result have one shape, of any float dtype; 16-bit input is computed in f32 and rounded once. Between
/// f32, f16 and bf16 `up` may have another dtype than `gate`, and the result has that of `gate`.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let (gate, up) = (Tensor::new(&[0f32, 1.], &Device::Cpu)?, Tensor::new(&[5f32, 2.], &Device::Cpu)?);
/// let y = dp_models::silu_gated(&gate, &up)?.to_vec1::<f32>()?;
/// assert!(y[0] == 0. && (y[1] - 1.462_117).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
///
/// Two shapes, an integer dtype, or dtypes that do not fit.
pub fn silu_gated(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if gate.shape() != up.shape() {
        bail!(
            "silu_gated needs a gate and an input of one shape, got {:?} and {:?}",
            gate.shape(),
            up.shape()
        )
    }
    match is_fusable(&[gate, up]) {
        true => gate.contiguous()?.apply_op2(&up.contiguous()?, SiluGated),
        false => (widen(gate)?.silu()? * widen(up)?)?.to_dtype(gate.dtype()),
    }
}

/// The gated multi-layer perceptron of Llama, as `LlamaMLP` of Hugging Face (SwiGLU, Shazeer, arXiv 2002.05202):
///
/// `down_proj(silu(gate_proj(x)) * up_proj(x))`.
///
/// Input and output `[.., D]` with at least two dimensions, without biases. Dtypes as in [`linear`].
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use dp_models::SwiGlu;
///
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let mlp = SwiGlu::new(4, 11, vb)?;
/// let y = mlp.forward(&Tensor::ones((3, 4), DType::F32, &Device::Cpu)?)?;
/// assert_eq!(y.dims(), [3, 4]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SwiGlu {
    gate_proj: Tensor,
    up_proj: Tensor,
    down_proj: Tensor,
}

impl SwiGlu {
    /// Takes `gate_proj.weight` and `up_proj.weight`, both `[hidden, width]`, and `down_proj.weight` `[width, hidden]` from
    /// `vb`, in this order. Initial values are those of `candle_nn::linear_no_bias`.
    ///
    /// # Errors
    ///
    /// A size of zero, or whatever `vb` reports: a missing name, or another shape.
    pub fn new(width: usize, hidden: usize, vb: VarBuilder) -> Result<Self> {
        let init = DEFAULT_KAIMING_NORMAL;
        Self::with_init(width, hidden, init, init, vb)
    }

    /// As [`new`](Self::new), with initial values `init` for `gate_proj` and `up_proj`, and `down_init` for `down_proj`.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_init(
        width: usize,
        hidden: usize,
        init: Init,
        down_init: Init,
        vb: VarBuilder,
    ) -> Result<Self> {
        if width == 0 || hidden == 0 {
            bail!("SwiGlu: width ({width}) and hidden ({hidden}) must not be zero")
        }
        let weight = |name: &str, shape: (usize, usize), init: Init| {
            vb.pp(name).get_with_hints(shape, "weight", init)
        };
        Ok(Self {
            gate_proj: weight("gate_proj", (hidden, width), init)?,
            up_proj: weight("up_proj", (hidden, width), init)?,
            down_proj: weight("down_proj", (width, hidden), down_init)?,
        })
    }
}

impl Module for SwiGlu {
    /// # Errors
    ///
    /// As [`linear`].
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gate = linear(x, &self.gate_proj, None)?;
        let up = linear(x, &self.up_proj, None)?;
        silu_gated_linear(&gate, &up, &self.down_proj)
    }
}

struct SiluGated;

impl CustomOp2 for SiluGated {
    fn name(&self) -> &'static str {
        "silu-gated"
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        lg: &Layout,
        up: &CpuStorage,
        lu: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (gate, up) = (Numbers::of(gate, lg)?, Numbers::of(up, lu)?);
        let inputs = [(gate, ELEMENTS), (up, ELEMENTS)];
        let (y, _) = map(inputs, Output::like(gate), |_, [gate, up], y| {
            kernels::silu_gated(gate, up, y);
        })?;
        Ok((y, lg.shape().clone()))
    }

    fn bwd(
        &self,
        gate: &Tensor,
        up: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let (gate_values, up_values, grad) = (Values::of(gate), Values::of(up), Values::of(&grad));
        let (gates, ups, grad) = (
            (gate_values.numbers()?, ELEMENTS),
            (up_values.numbers()?, ELEMENTS),
            (grad.numbers()?, ELEMENTS),
        );
        let mut gradients = (None, None);
        if gate.track_op() {
            let output = Output::like(gates.0);
            let (dgate, _) = map([gates, ups, grad], output, |_, [gate, up, grad], dgate| {
                kernels::silu_gated_grad_gate(gate, up, grad, dgate);
            })?;
            gradients.0 = Some(gradient(dgate, gate)?);
        }
        if up.track_op() {
            // The derivative by `up` is silu(gate).
            let (dup, _) = map(
                [gates, grad],
                Output::like(ups.0),
                |_, [gate, grad], dup| {
                    kernels::silu_gated(gate, grad, dup);
                },
            )?;
            gradients.1 = Some(gradient(dup, up)?);
        }
        Ok(gradients)
    }
}
