//! The page about a run: it needs no network.

use std::path::Path;

use maud::{Markup, html};

use super::job::Job;
use super::monitor::{Record, TrainRecord, read_metrics};
use super::training::Outcome;
use crate::html::page;
use crate::line_chart::{Curve, chart};
use crate::table::{mib, thousands};

/// The page, from the run's metrics file and what the ranks have brought home.
///
/// # Errors
/// The metrics file cannot be read.
pub fn report(job: &Job, outcomes: &[Outcome], metrics: &Path) -> anyhow::Result<String> {
    let records = read_metrics(metrics)?;
    let outcome = &outcomes[0];
    let title = format!(
        "{} on {} ranks, {}",
        job.model.architecture(),
        job.sizes.world_size,
        job.config.deepspeed.sharding().name()
    );
    let curve = |name: &str, of: fn(&TrainRecord) -> Option<f64>| Curve {
        name: name.to_string(),
        points: records
            .iter()
            .filter_map(|r| match r {
                Record::Train(r) if r.skipped.is_none() => Some((r.step as f64, of(r)?)),
                _ => None,
            })
            .collect(),
    };
    let validation = Curve {
        name: "validation".to_string(),
        points: records
            .iter()
            .filter_map(|r| match r {
                Record::Evaluation { step, loss } => Some((*step as f64, (*loss)?)),
                Record::Train(_) => None,
            })
            .collect(),
    };
    let skipped = records
        .iter()
        .filter(|r| matches!(r, Record::Train(r) if r.skipped.is_some()))
        .count();
    let mut losses = vec![curve("train", |r| r.loss)];
    if !validation.points.is_empty() {
        losses.push(validation);
    }
    let body = html! {
        @for line in job.summary().lines() { p { (line) } }
        @if outcome.stopped { p { "Stopped after step " (outcome.steps) " of " (job.config.run.steps) "." } }
        @if skipped > 0 { p { (skipped) " steps were skipped." } }
        h2 { "Loss" }
        (chart("loss over steps", &losses))
        h2 { "Learning rate" }
        (chart("learning rate over steps", &[curve("learning rate", |r| r.learning_rate)]))
        @if records.iter().any(|r| matches!(r, Record::Train(r) if r.grad_norm.is_some())) {
            h2 { "Norm of the gradients, before clipping" }
            (chart("gradient norm over steps", &[curve("norm", |r| r.grad_norm)]))
        }
        h2 { "Speed" }
        (chart("tokens per second over steps", &[curve("tokens/s", |r| Some(r.tokens_per_second))]))
        h2 { "Where the time of rank 0 went" }
        (times(&records))
        h2 { "Memory per card, at its peak" }
        (memory(outcomes))
        @if let Some(sample) = &outcome.sample {
            h2 { "Sample" }
            pre { (sample) }
        }
        h2 { "Configuration" }
        pre { (serde_json::to_string_pretty(&job.config.json)?) }
        p.note { "SHA-256 of the parameters: " code { (outcome.params_sha256) } }
    };
    Ok(page(&title, &body))
}

fn memory(outcomes: &[Outcome]) -> Markup {
    html! {
        div.scroll { table {
            thead { tr { th { "rank" } th { "parameters" } th { "gradients" } th { "optimizer" } th { "communication" } } }
            tbody { @for (rank, outcome) in outcomes.iter().enumerate() {
                @let m = &outcome.memory;
                tr { td { (rank) } td { (mib(m.parameters)) } td { (mib(m.gradients)) } td { (mib(m.optimizer)) } td { (mib(m.communication)) } }
            } }
        } }
        p.note { "MiB, counted where it is allocated; activations are not in it. " (thousands(outcomes[0].memory.model_states())) " bytes of model states on rank 0." }
    }
}

/// Sums over all steps.
fn times(records: &[Record]) -> Markup {
    let steps = || {
        records.iter().filter_map(|r| match r {
            Record::Train(r) => Some(r),
            Record::Evaluation { .. } => None,
        })
    };
    let sum = |of: fn(&TrainRecord) -> f64| steps().map(of).sum::<f64>();
    let total = sum(|r| r.total_ms).max(f64::MIN_POSITIVE);
    let parts = [
        ("forward", sum(|r| r.forward_ms)),
        ("backward", sum(|r| r.backward_ms)),
        ("exposed communication", sum(|r| r.exposed_communication_ms)),
        ("optimizer", sum(|r| r.optimizer_ms)),
    ];
    let reduction = sum(|r| r.reduction_ms);
    let hidden = sum(|r| r.reduction_ms * r.hidden_share.unwrap_or(0.0));
    html! {
        div.scroll { table {
            thead { tr { th { "part" } th { "seconds" } th { "share" } } }
            tbody { @for (name, ms) in parts {
                tr { td { (name) } td { (format!("{:.2}", ms / 1e3)) } td { (format!("{:.1} %", 100.0 * ms / total)) } }
            } }
        } }
        p.note {
            "Communication is exposed while nothing else is done. Reductions were under way for " (format!("{:.2}", reduction / 1e3))
            " s, " @if reduction > 0.0 { (format!("{:.0} %", 100.0 * hidden / reduction)) } @else { "none" } " of it hidden behind backward."
        }
    }
}
