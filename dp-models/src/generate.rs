//! Text generation: the model's own continuation of a prompt, token after token.

use candle_core::{DType, Result, Tensor, bail};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::causal_lm::CausalLm;

/// How [`CausalLm::generate`] chooses the next token from the logits.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it: below 1 is safer, above 1 is bolder, 0 always takes the most likely token.
    pub temperature: f64,
    /// Only this many of the most likely tokens can be chosen; `None` is all of them.
    pub top_k: Option<usize>,
    /// Of these, only the fewest of the most likely tokens whose probabilities add up to at least this can be chosen (nucleus
    /// sampling, Holtzman et al., arXiv 1904.09751); above 0 and at most 1, `None` is all of them. Probabilities are those
    /// after temperature and `top_k`, as with `top_p` of Hugging Face.
    pub top_p: Option<f64>,
    /// Start of the random numbers: the same seed, model and prompt give the same tokens. Not used at temperature 0.
    pub seed: u64,
}

impl Sampling {
    /// Always the most likely token; of equals, the one with the smallest id.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.,
            ..Self::with_seed(0)
        }
    }

    /// By the model's own probabilities: temperature 1, every token.
    pub fn with_seed(seed: u64) -> Self {
        Self {
            temperature: 1.,
            top_k: None,
            top_p: None,
            seed,
        }
    }

    /// Refuses settings out of their range; [`CausalLm::generate`] does so, too.
    ///
    /// # Errors
    ///
    /// The first of them, by its name.
    pub fn validate(&self) -> Result<()> {
        if !self.temperature.is_finite() || self.temperature < 0. {
            let temperature = self.temperature;
            bail!("Sampling: temperature must be finite and not negative, got {temperature}")
        }
        if self.top_k == Some(0) {
            bail!("Sampling: top_k must not be zero")
        }
        if let Some(top_p) = self.top_p
            && !(top_p > 0. && top_p <= 1.)
        {
            bail!("Sampling: top_p must be above 0 and at most 1, got {top_p}")
        }
        Ok(())
    }
}

/// What [`CausalLm::generate`] does.
pub(crate) fn generate<M: CausalLm + ?Sized>(
    model: &M,
    prompt: &[u32],
    num_tokens: usize,
    sampling: &Sampling,
) -> Result<Vec<u32>> {
    sampling.validate()?;
    if prompt.is_empty() {
        bail!("the prompt is empty: the model needs at least one token to continue")
    }
    let config = model.model_config();
    let vocab_size = config.vocab_size();
    if let Some(token) = prompt.iter().find(|&&token| token as usize >= vocab_size) {
        bail!("the prompt contains the id {token}, but ids must be below {vocab_size}")
    }

    let device = model.head().device();
    let mut rng = ChaCha8Rng::seed_from_u64(sampling.seed);
    let mut tokens = prompt.to_vec();
    for _ in 0..num_tokens {
        let window = &tokens[tokens.len().saturating_sub(config.context())..];
        let logits = model.next_logits(&Tensor::new(window, device)?.unsqueeze(0)?)?;
        let logits: Vec<f32> = logits.squeeze(0)?.to_dtype(DType::F32)?.to_vec1()?;
        tokens.push(choose(&logits, sampling, &mut rng)?);
    }
    Ok(tokens)
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
    let mut weights: Vec<f64> = ranked
        .iter()
        .map(|(_, logit)| ((logit - max) / sampling.temperature).exp())
        .collect();
    if let Some(top_p) = sampling.top_p {
        let enough = top_p * weights.iter().sum::<f64>();
        let mut sum = 0.;
        // The token that reaches the sum is the last one, and the first is always there.
        let before = |weight: &&f64| {
            let is_needed = sum < enough;
            sum += **weight;
            is_needed
        };
        let num_needed = weights.iter().take_while(before).count();
        weights.truncate(num_needed);
    }
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
