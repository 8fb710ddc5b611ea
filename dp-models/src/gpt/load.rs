//! Weights of a GPT from a safetensors file.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Error, Result, Tensor, bail, safetensors};

use super::GptConfig;

const EMBEDDING: &str = "wte.weight";
const HEAD: &str = "head.weight";

impl GptConfig {
    /// The weights in a safetensors file, by parameter name, for `VarMap::set` or `VarBuilder::from_tensors`.
    ///
    /// Parameters have one name each, so a tied head has none: its weight is `wte.weight`. PyTorch's
    /// `safetensors.torch.save_model` keeps the other of the two names, `head.weight`; it is renamed here.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or it has a head of its own although `tied_head` is set. Missing names and other shapes are
    /// reported where the weights are used.
    pub fn load_weights(
        &self,
        path: impl AsRef<Path>,
        device: &Device,
    ) -> Result<HashMap<String, Tensor>> {
        let path = path.as_ref();
        let mut weights = safetensors::load(path, device).map_err(|err| {
            Error::msg(format!(
                "cannot read weights from {}: {err}",
                path.display()
            ))
        })?;
        if self.tied_head
            && let Some(head) = weights.remove(HEAD)
        {
            match weights.get(EMBEDDING) {
                None => {
                    weights.insert(EMBEDDING.to_string(), head);
                }
                Some(embedding) if same_values(embedding, &head)? => {}
                Some(_) => bail!(
                    "{} has a {HEAD} that differs from its {EMBEDDING}, but the config has tied_head",
                    path.display()
                ),
            }
        }
        Ok(weights)
    }
}

fn same_values(a: &Tensor, b: &Tensor) -> Result<bool> {
    if a.dims() != b.dims() || a.dtype() != b.dtype() {
        return Ok(false);
    }
    let num_different = a.ne(b)?.flatten_all()?.to_dtype(DType::U32)?.sum(0)?;
    Ok(num_different.to_scalar::<u32>()? == 0)
}
