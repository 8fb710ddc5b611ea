//! A multi-layer perceptron.

use candle_core::{DType, Module, Result, Tensor, bail};
use candle_nn::{Linear, VarBuilder};

use crate::layers::{gelu_tanh, linear};

/// The function between two linear layers of an [`Mlp`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// `max(x, 0)`, as `torch.nn.ReLU`. At exactly 0 candle's gradient is 1, PyTorch's is 0.
    Relu,
    /// [`gelu_tanh`], as `torch.nn.GELU(approximate="tanh")`.
    GeluTanh,
    /// `tanh(x)`, as `torch.nn.Tanh`.
    Tanh,
}

impl Module for Activation {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Relu => x.relu(),
            Self::GeluTanh => gelu_tanh(x),
            Self::Tanh => x.tanh(),
        }
    }
}

/// The shape of an [`Mlp`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MlpConfig {
    /// Features of an input.
    pub input: usize,
    /// Features of each hidden layer, from input to output; none makes a linear model.
    pub hidden: Vec<usize>,
    /// Features of an output.
    pub output: usize,
    /// Applied after every layer except the last.
    pub activation: Activation,
}

impl MlpConfig {
    /// Checks that no layer is empty.
    ///
    /// # Errors
    ///
    /// A size of zero, by the name of its field.
    pub fn validate(&self) -> Result<()> {
        if self.input == 0 {
            bail!("MlpConfig: input must not be zero")
        }
        if let Some(idx) = self.hidden.iter().position(|&size| size == 0) {
            bail!("MlpConfig: hidden[{idx}] must not be zero")
        }
        if self.output == 0 {
            bail!("MlpConfig: output must not be zero")
        }
        Ok(())
    }

    /// Elements of all parameters: the sum over layers of `(in + 1) * out`.
    pub fn num_params(&self) -> usize {
        let sizes = self.sizes();
        sizes.windows(2).map(|pair| (pair[0] + 1) * pair[1]).sum()
    }

    /// Features before the first layer and after each layer.
    fn sizes(&self) -> Vec<usize> {
        [&[self.input], &self.hidden[..], &[self.output]].concat()
    }
}

/// A multi-layer perceptron: linear layers with an activation between them, as `torch.nn.Sequential` of `Linear`s.
///
/// Input `[.., input]`, output `[.., output]`. Parameters are named `layers.0.weight`, `layers.0.bias`, `layers.1.weight`, ...;
/// a weight is `[out, in]`. Initial values are those of `candle_nn::linear`. In 16 bits each layer is [`linear`].
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use dp_models::{Activation, Mlp, MlpConfig};
///
/// let config = MlpConfig { input: 4, hidden: vec![8], output: 3, activation: Activation::Tanh };
/// let mlp = Mlp::new(&config, VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu))?;
/// let y = mlp.forward(&Tensor::ones((5, 4), DType::F32, &Device::Cpu)?)?;
/// assert_eq!(y.dims(), [5, 3]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Mlp {
    layers: Vec<Linear>,
    activation: Activation,
}

impl Mlp {
    /// Takes the parameters from `vb`, from input to output, weight before bias.
    ///
    /// # Errors
    ///
    /// [`MlpConfig::validate`], or whatever `vb` reports: a missing name, or another shape.
    pub fn new(config: &MlpConfig, vb: VarBuilder) -> Result<Self> {
        config.validate()?;
        let vb = vb.pp("layers");
        let layers = config
            .sizes()
            .windows(2)
            .enumerate()
            .map(|(idx, pair)| candle_nn::linear(pair[0], pair[1], vb.pp(idx)))
            .collect::<Result<_>>()?;
        Ok(Self {
            layers,
            activation: config.activation,
        })
    }
}

impl Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        for (idx, layer) in self.layers.iter().enumerate() {
            if idx > 0 {
                x = self.activation.forward(&x)?;
            }
            x = match x.dtype() {
                // Candle has no bf16 product on the CPU, and rounds the product before it adds the bias.
                DType::F16 | DType::BF16 => linear(&x, layer.weight(), layer.bias())?,
                _ => layer.forward(&x)?,
            };
        }
        Ok(x)
    }
}
