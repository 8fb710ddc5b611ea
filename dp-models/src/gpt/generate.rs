//! Text generation: the model's own continuation of a prompt, token after token.

use candle_core::{DType, Result, Tensor, bail};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::Gpt;
use crate::layers::linear;

/// How [`Gpt::generate`] chooses the next token from the logits.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it: below 1 is safer, above 1 is bolder, 0 always takes the most likely token.
    pub temperature: f64,
    /// Only this many of the most likely tokens can be chosen; `None` is all of them.
    pub top_k: Option<usize>,
    /// Start of the random numbers: the same seed, model and prompt give the same tokens. Not used at temperature 0.
    pub seed: u64,
}

impl Sampling {
    /// Always the most likely token; of equals, the one with the smallest id.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.,
            top_k: None,
            seed: 0,
        }
    }

    fn validate(&self) -> Result<()> {
        if !self.temperature.is_finite() || self.temperature < 0. {
            let temperature = self.temperature;
            bail!("Sampling: temperature must be finite and not negative, got {temperature}")
        }
        if self.top_k == Some(0) {
            bail!("Sampling: top_k must not be zero")
        }
        Ok(())
    }
}

impl Gpt {
    /// The `prompt` followed by `num_tokens` tokens of the model's choice, as nanoGPT's `generate`.
    ///
    /// Once the text is longer than the context, the model sees only its last `context` tokens. Nothing is cached between
    /// tokens: each one costs a forward pass.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use dp_models::{ByteTokens, Gpt, GptConfig, Sampling};
    ///
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// let gpt = Gpt::new(&GptConfig::mini(), vb)?;
    /// let sampling = Sampling { temperature: 0.8, top_k: Some(40), seed: 1 };
    /// let tokens = gpt.generate(&ByteTokens::encode("Once"), 5, &sampling)?;
    /// assert_eq!(tokens.len(), 9);
    /// assert!(ByteTokens::decode(&tokens).starts_with("Once"));
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// An empty prompt, a prompt token that is not below `vocab_size`, a negative or infinite temperature, a `top_k` of
    /// zero, or logits that are not finite.
    pub fn generate(
        &self,
        prompt: &[u32],
        num_tokens: usize,
        sampling: &Sampling,
    ) -> Result<Vec<u32>> {
        sampling.validate()?;
        if prompt.is_empty() {
            bail!("the prompt is empty: the model needs at least one token to continue")
        }
        let vocab_size = self.config.vocab_size;
        if let Some(token) = prompt.iter().find(|&&token| token as usize >= vocab_size) {
            bail!("the prompt contains the id {token}, but ids must be below {vocab_size}")
        }

        let mut rng = ChaCha8Rng::seed_from_u64(sampling.seed);
        let mut tokens = prompt.to_vec();
        for _ in 0..num_tokens {
            let logits = self.next_logits(&tokens)?;
            tokens.push(choose(&logits, sampling, &mut rng)?);
        }
        Ok(tokens)
    }

    /// Logits of the token after `tokens`, which are not empty.
    fn next_logits(&self, tokens: &[u32]) -> Result<Vec<f32>> {
        let window = &tokens[tokens.len().saturating_sub(self.config.context)..];
        let input = Tensor::new(window, self.wpe.device())?.unsqueeze(0)?;
        // The head is the largest layer, and only the last position is asked for.
        let last = self
            .hidden("tokens", &input)?
            .narrow(0, window.len() - 1, 1)?;
        let logits = linear(&last, &self.head, None)?;
        logits.squeeze(0)?.to_dtype(DType::F32)?.to_vec1()
    }
}

fn choose(logits: &[f32], sampling: &Sampling, rng: &mut ChaCha8Rng) -> Result<u32> {
    if logits.iter().any(|logit| !logit.is_finite()) {
        bail!("the model's logits are not finite: has the training diverged?")
    }
    let mut ranked: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|&x| f64::from(x))).collect();
    // A stable sort: equal logits stay in the order of their ids, so the choice is reproducible.
    ranked.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    if sampling.temperature == 0. {
        return Ok(ranked[0].0);
    }
    ranked.truncate(sampling.top_k.unwrap_or(ranked.len()));

    let max = ranked[0].1;
    let weights: Vec<f64> = ranked
        .iter()
        .map(|(_, logit)| ((logit - max) / sampling.temperature).exp())
        .collect();
    let mut left = rng.random::<f64>() * weights.iter().sum::<f64>();
    for ((id, _), weight) in ranked.iter().zip(&weights) {
        left -= weight;
        if left < 0. {
            return Ok(*id);
        }
    }
    // Rounding of the sum can leave nothing chosen. The most likely token always had a chance.
    Ok(ranked[0].0)
}
