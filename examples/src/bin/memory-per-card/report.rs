//! What is measured: the content of `report.json`, which the table and the page show.

use dp_core::memory::DeviceMemory;
use dp_zero::ModelStates;
use serde::{Deserialize, Serialize};

/// The whole report.
#[derive(Debug, Serialize)]
pub struct Report {
    pub world_size: usize,
    pub num_params: usize,
    /// Of the parameters.
    pub dtype: &'static str,
    /// What their gradients are kept in.
    pub grad_dtype: &'static str,
    /// What gradients travel in, if that was chosen.
    pub communication_dtype: Option<&'static str>,
    pub seed: u64,
    pub model: Model,
    pub strategies: Vec<StrategyReport>,
}

/// Shape of the model and of the batch.
#[derive(Debug, Serialize)]
pub struct Model {
    pub layers: usize,
    pub width: usize,
    pub heads: usize,
    pub context: usize,
    pub batch: usize,
    pub text_bytes: usize,
    pub bucket_kib: usize,
}

/// One strategy's run.
#[derive(Debug, Serialize)]
pub struct StrategyReport {
    pub name: &'static str,
    /// Mean loss over all ranks, per step.
    pub losses: Vec<f64>,
    pub params_sha256: String,
    pub tokens_per_second: f64,
    /// Of the rank that sends most: counted while it is moved, the same in every step.
    pub bytes_sent_per_step: u64,
    /// The same by formula.
    pub bytes_sent_predicted: u64,
    /// On every rank, not just on that one.
    #[serde(skip)]
    pub bytes_sent_as_predicted: bool,
    pub ranks: Vec<RankReport>,
}

/// One rank's memory, in bytes.
#[derive(Debug, Serialize, Deserialize)]
pub struct RankReport {
    pub rank: usize,
    pub parameters: u64,
    pub gradients: u64,
    pub optimizer: u64,
    /// Peak of the buffers that exist only to send or receive.
    pub communication: u64,
    /// Peak of the heap, or of the GPU's memory, that none of the other columns explains. Ranks that share a GPU have equal
    /// parts of it.
    pub activations_peak: u64,
    /// Peak of all.
    pub peak: u64,
    /// What the driver has counted for the rank's GPU, all its ranks together; `None` on the CPU.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub gpu: Option<DeviceMemory>,
    pub predicted: ModelStates,
}

impl RankReport {
    pub fn model_states(&self) -> u64 {
        self.parameters + self.gradients + self.optimizer
    }

    /// Counted and predicted bytes agree in each category.
    pub fn is_as_predicted(&self) -> bool {
        let counted = (self.parameters, self.gradients, self.optimizer);
        let p = &self.predicted;
        counted == (p.parameters, p.gradients, p.optimizer)
    }
}

impl StrategyReport {
    /// Model states of the fullest card.
    pub fn model_states(&self) -> u64 {
        let states = self.ranks.iter().map(RankReport::model_states);
        states.max().unwrap_or(0)
    }

    /// Peak of the fullest card.
    pub fn peak(&self) -> u64 {
        self.ranks.iter().map(|r| r.peak).max().unwrap_or(0)
    }
}

impl Report {
    /// `f32`, or `bf16 (gradients in f32)`.
    pub fn precision(&self) -> String {
        let mut parts = Vec::new();
        if self.dtype != "f32" {
            parts.push(format!("gradients in {}", self.grad_dtype));
        }
        if let Some(dtype) = self.communication_dtype {
            parts.push(format!("sent in {dtype}"));
        }
        match parts.is_empty() {
            true => self.dtype.to_string(),
            false => format!("{} ({})", self.dtype, parts.join(", ")),
        }
    }

    /// What must hold, with whether it does. A run in which one does not hold has failed.
    pub fn checks(&self) -> Vec<(String, bool)> {
        let mut checks = Vec::new();
        if let [first, others @ ..] = &self.strategies[..]
            && !others.is_empty()
        {
            let names: Vec<&str> = self.strategies.iter().map(|s| s.name).collect();
            let bits =
                |s: &StrategyReport| s.losses.iter().map(|l| l.to_bits()).collect::<Vec<_>>();
            let same_losses = others.iter().all(|s| bits(s) == bits(first));
            let same_params = others
                .iter()
                .all(|s| s.params_sha256 == first.params_sha256);
            let names = names.join(", ");
            checks.push((
                format!("losses of {names} are bit-identical in every step"),
                same_losses,
            ));
            checks.push((
                format!("final parameters of {names} are bit-identical"),
                same_params,
            ));
        }
        let mut ranks = self.strategies.iter().flat_map(|s| &s.ranks);
        let as_predicted = ranks.all(RankReport::is_as_predicted);
        checks.push((
            "counted = predicted bytes of parameters, gradients and optimizer state on every rank"
                .to_string(),
            as_predicted,
        ));
        checks.push((
            "counted = predicted bytes sent by every rank in every step".to_string(),
            self.strategies.iter().all(|s| s.bytes_sent_as_predicted),
        ));
        let finite = |s: &StrategyReport| s.losses.iter().all(|l| l.is_finite());
        checks.push((
            "all losses are finite".to_string(),
            self.strategies.iter().all(finite),
        ));
        checks
    }
}
