//! The plan: the content of the JSON file, which the table and the page show.

use dp_models::ModelConfig;
use dp_zero::{Sharding, TrainerPlan};
use serde::Serialize;

use crate::options::Job;
use crate::subject::{Batch, OptimizerName, Subject};

/// The whole plan.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Trained elements.
    pub num_params: u64,
    /// `None` if a count is all that is known.
    pub model: Option<Model>,
    /// Of the parameters.
    pub dtype: &'static str,
    /// What their gradients are kept in.
    pub grad_dtype: &'static str,
    /// What gradients travel in, if that was chosen.
    pub communication_dtype: Option<&'static str>,
    pub optimizer: OptimizerName,
    /// Bytes of a card, if given.
    pub card: Option<u64>,
    pub rows: Vec<Row>,
    /// For each number of ranks, if there is a card.
    pub choices: Vec<Choice>,
}

/// Shape of the model and of the sequences.
#[derive(Debug, Serialize)]
pub struct Model {
    #[serde(flatten)]
    pub config: ModelConfig,
    /// Tokens of a sequence.
    pub sequence_len: usize,
}

/// One rank's memory with a strategy, in bytes, and what it sends.
#[derive(Debug, Serialize)]
pub struct Row {
    pub ranks: usize,
    pub strategy: &'static str,
    /// It is that of the configuration.
    pub configured: bool,
    /// `None` if a count is all that is known.
    #[serde(flatten)]
    pub batch: Option<Batch>,
    pub basis: Basis,
    pub parameters: u64,
    pub gradients: u64,
    pub optimizer: u64,
    /// Peak of the buffers that exist only to send or receive, in steps.
    pub communication: Option<u64>,
    /// Largest buffer while the trainer is made.
    pub set_up: Option<u64>,
    /// An estimate, in every row.
    pub activations: Option<u64>,
    /// Bytes of the fullest moment, as far as they are known.
    pub total: u64,
    /// Of the rank that sends most.
    pub bytes_sent_per_step: u64,
    /// Of rank 0, whose metrics a run writes.
    pub bytes_sent_by_rank_0: Option<u64>,
    pub num_buckets: Option<usize>,
    /// Into the card, if there is one.
    pub fits: Option<bool>,
}

/// Where a row's numbers come from, activations apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// The real layout: what the trainer will count.
    Exact,
    /// The paper's formulas.
    Formula,
    /// A strategy that nothing here trains with.
    EstimateOnly,
}

impl Basis {
    pub fn text(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Formula => "formula",
            Self::EstimateOnly => "estimate only: no trainer",
        }
    }
}

/// What fits into the card.
#[derive(Debug, Serialize)]
pub struct Choice {
    pub ranks: usize,
    /// The strategy that shards least of those that fit and have a trainer.
    pub smallest: Option<&'static str>,
    /// What zero3 would take, by estimate, if nothing else fits.
    pub zero3_total: Option<u64>,
}

impl Report {
    /// Plans all numbers of ranks with all strategies.
    pub fn new(job: &Job) -> anyhow::Result<Self> {
        let settings = &job.settings;
        let looked = job.subject.look(settings.dtype)?;
        let mut rows = Vec::new();
        for (i, &ranks) in job.ranks.iter().enumerate() {
            for sharding in Sharding::ALL {
                let plan = looked.plan(settings, (i, ranks), sharding)?;
                let configured = settings.configured == Some(sharding);
                rows.push(Row::new(&plan, looked.batch(i), configured, job.card));
            }
        }
        let engine = &settings.engine;
        let groups = rows.chunks_exact(Sharding::ALL.len());
        let choices = match job.card {
            Some(_) => groups.map(Choice::new).collect(),
            None => Vec::new(),
        };
        Ok(Self {
            num_params: looked.num_params(),
            model: match &job.subject {
                Subject::Count(_) => None,
                Subject::Model {
                    config, context, ..
                } => Some(Model {
                    config: config.clone(),
                    sequence_len: *context,
                }),
            },
            dtype: settings.dtype.as_str(),
            grad_dtype: engine.grad_accum_dtype.of(settings.dtype).as_str(),
            communication_dtype: engine.communication_dtype.map(|d| d.as_str()),
            optimizer: settings.optimizer,
            card: job.card,
            choices,
            rows,
        })
    }
}

impl Row {
    fn new(
        plan: &TrainerPlan,
        batch: Option<(Batch, u64)>,
        configured: bool,
        card: Option<u64>,
    ) -> Self {
        let activations = batch.map(|(_, bytes)| bytes);
        let total = plan.peak(activations.unwrap_or(0));
        Self {
            ranks: plan.world_size,
            strategy: plan.sharding.name(),
            configured,
            batch: batch.map(|(batch, _)| batch),
            basis: match plan.sharding {
                Sharding::Zero3 => Basis::EstimateOnly,
                _ if plan.is_exact() => Basis::Exact,
                _ => Basis::Formula,
            },
            parameters: plan.states.parameters,
            gradients: plan.states.gradients,
            optimizer: plan.states.optimizer,
            communication: plan.communication,
            set_up: plan.set_up,
            activations,
            total,
            bytes_sent_per_step: plan.bytes_sent_per_step,
            bytes_sent_by_rank_0: plan.bytes_sent_by_rank_0,
            num_buckets: plan.num_buckets,
            fits: card.map(|card| total <= card),
        }
    }
}

impl Choice {
    /// Of the rows of one number of ranks, from most memory to least.
    fn new(rows: &[Row]) -> Self {
        let has_trainer = |r: &&Row| r.basis != Basis::EstimateOnly;
        let mut trained = rows.iter().filter(has_trainer);
        let smallest = trained.find(|r| r.fits == Some(true)).map(|r| r.strategy);
        let zero3 = rows.iter().find(|r| !has_trainer(r)).map(|r| r.total);
        Self {
            ranks: rows[0].ranks,
            smallest,
            zero3_total: zero3.filter(|_| smallest.is_none()),
        }
    }
}
