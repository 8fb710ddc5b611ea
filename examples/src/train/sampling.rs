//! Text of the model's own.

use anyhow::Context;
use dp_models::CausalLm;

use super::job::Job;

/// The sample of the job's configuration; `None` if it asks for none.
///
/// # Errors
/// Logits that are not finite; what cannot be decoded.
pub fn sample(model: &dyn CausalLm, job: &Job) -> anyhow::Result<Option<String>> {
    if job.prompt.is_empty() {
        return Ok(None);
    }
    let run = &job.config.run;
    let sampling = run.sample.sampling(run.seed);
    let tokens = model
        .generate(&job.prompt, run.sample.tokens, &sampling)
        .context("cannot sample a text")?;
    job.tokenizer.decode(&tokens).map(Some)
}
