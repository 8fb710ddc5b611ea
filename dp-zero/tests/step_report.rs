use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use candle_core::{DType, Tensor};
use candle_nn::Init;
use dp_core::comm::{Collective, Pending, PendingCollective, Request, Traffic};
use dp_core::{
    AdamW, Buffer, Communicator, EngineConfig, LocalReport, Loss, LossScaling, NonFinite,
    ParamGroups, ParamStore, Rank, Result, Sgd, SkipReason, StepReport, Trainer,
};
use dp_zero::Sharding;

use crate::support::{AnyTrainer, Probe, STRATEGIES, caps, ones, ranks, same_on_all, values};

/// A model of one number `w` = 1, so that `w * x` is a loss of `x`.
fn scalar(
    strategy: Sharding,
    rank: &Rank,
    dtype: DType,
    change: impl FnOnce(&mut EngineConfig),
) -> Result<(Tensor, AnyTrainer<Sgd>)> {
    let store = ParamStore::new(rank.device());
    let w = store
        .var_builder(dtype)
        .get_with_hints((), "w", Init::Const(1.0))?;
    let trainer = AnyTrainer::with_settings(strategy, store, rank, Sgd::new(0.125), change)?;
    Ok((w.to_dtype(DType::F32)?, trainer))
}

/// All strategies on 1 to 4 ranks.
fn everywhere() -> impl Iterator<Item = (Sharding, usize)> {
    STRATEGIES
        .into_iter()
        .flat_map(|s| [1, 2, 3, 4].map(|n| (s, n)))
}

#[test]
fn the_loss_is_averaged_as_gradients_are() {
    for (strategy, world_size) in everywhere() {
        // Rank r has losses of 1, 2, ... of count r, as means and as sums; rank 0 so has nothing, if it is not alone.
        let reports = ranks(world_size, move |rank| {
            let count = rank.rank() + usize::from(rank.world_size() == 1);
            let (w, mut trainer) = scalar(strategy, &rank, DType::F32, |_| ())?;
            let mut window = trainer.accumulate(3)?;
            let mean = (&w * (rank.rank() as f64 + 1.0))?;
            window.backward_weighted(Loss::Mean { loss: &mean, count })?;
            let sum = (&w * 7.0)?;
            window.backward_weighted(Loss::Sum { loss: &sum, count })?;
            window.backward_weighted(Loss::Nothing)?;
            window.finish()?;
            trainer.step()
        });
        let report = same_on_all(reports);
        let counts = (0..world_size).map(|r| (r + usize::from(world_size == 1)) as f64);
        let parts = counts.enumerate().filter(|(_, count)| *count > 0.0);
        let (sum, weight) = parts.fold((0.0, 0.0), |(sum, weight), (r, count)| {
            (sum + count * (r as f64 + 1.0) + 7.0, weight + 2.0 * count)
        });
        assert_eq!(
            report.loss,
            Some(sum / weight),
            "{strategy:?} on {world_size}"
        );
        assert_eq!(report.weight, weight);
    }
}

#[test]
fn the_loss_is_the_one_that_the_gradient_is_of() {
    // d (w x) / dw = x, so with a rate of 1/8 the step from w = 1 is the mean loss over 8.
    for (strategy, world_size) in everywhere() {
        ranks(world_size, move |rank| {
            let (w, mut trainer) = scalar(strategy, &rank, DType::F32, |_| ())?;
            let mut window = trainer.accumulate(2)?;
            for i in 0..2 {
                // One number, but no scalar.
                let loss = (&w * (rank.rank() + 4 * i) as f64)?.reshape((1, 1))?;
                window.backward(&loss)?;
            }
            window.finish()?;
            let loss = trainer.step()?.loss.expect("there is one");
            assert_eq!(f64::from(values(&w)[0]), 1.0 - loss / 8.0);
            Ok(())
        });
    }
}

#[test]
fn the_loss_is_without_its_scale() {
    for strategy in STRATEGIES {
        let reports = ranks(2, move |rank| {
            let scaling = LossScaling::Static(1024.0);
            let (w, mut trainer) =
                scalar(strategy, &rank, DType::F16, |e| e.loss_scaling = scaling)?;
            trainer.backward(&(w * (rank.rank() as f64 + 1.0))?)?;
            trainer.step()
        });
        let report = same_on_all(reports);
        assert_eq!((report.loss, report.loss_scale), (Some(1.5), Some(1024.0)));
    }
}

#[test]
fn losses_of_all_dtypes_are_read() {
    ranks(1, |rank| {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let (w, mut trainer) = scalar(Sharding::Ddp, &rank, DType::F32, |_| ())?;
            trainer.backward(&(w * 2.5)?.to_dtype(dtype)?)?;
            assert_eq!(trainer.step()?.loss, Some(2.5), "{dtype:?}");
        }
        Ok(())
    });
}

#[test]
fn a_loss_that_is_nan_or_missing_is_said() {
    for strategy in STRATEGIES {
        let reports = ranks(2, move |rank| {
            let (w, mut trainer) = scalar(strategy, &rank, DType::F32, |e| {
                e.non_finite = NonFinite::SkipStep;
            })?;
            trainer.backward(&(w * [f64::NAN, 1.0][rank.rank()])?)?;
            let nan = trainer.step()?;
            trainer.backward_weighted(Loss::Nothing)?;
            let line = serde_json::to_value(trainer.record(&nan)).expect("plain data");
            assert!(line["loss"].is_null());
            assert_eq!(line["skipped"], "non-finite gradient of w on rank 0");
            Ok((nan, trainer.step()?))
        });
        for (nan, nothing) in reports {
            assert!(nan.loss.is_some_and(f64::is_nan));
            assert_eq!(
                (nothing.loss, nothing.skipped),
                (None, Some(SkipReason::NoSamples))
            );
        }
    }
}

#[test]
fn the_loss_costs_no_message_and_can_be_turned_off() {
    let run = |report_loss: bool| {
        same_on_all(ranks(3, move |rank| {
            let (w, mut trainer) = scalar(Sharding::Zero2, &rank, DType::F32, |e| {
                e.report_loss = report_loss;
            })?;
            trainer.backward(&(w * 2.0)?)?;
            let before = rank.comm().traffic().calls();
            let loss = trainer.step()?.loss;
            Ok((loss, rank.comm().traffic().calls() - before))
        }))
    };
    // The summary, and the gather of the one bucket.
    assert_eq!(run(true), (Some(2.0), 2));
    assert_eq!(run(false), (None, 2));
}

/// Four layers, a bucket each, with something to do between them in backward.
fn tower(
    strategy: Sharding,
    rank: &Rank,
    comm: Arc<dyn Communicator>,
    bucket_cap: usize,
    between: impl Fn() + Send + Sync + 'static,
) -> Result<(impl Fn() -> Result<Tensor>, AnyTrainer<Sgd>)> {
    let store = ParamStore::new(rank.device());
    let layers = (0..4).map(|i| ones(&store, 12, &format!("layer{i}")));
    let layers = layers.collect::<Result<Vec<_>>>()?;
    let change = |engine: &mut EngineConfig| engine.bucket_caps = caps(bucket_cap);
    let trainer = AnyTrainer::over(comm, strategy, store, Sgd::new(0.1), change)?;
    let between: Arc<dyn Fn() + Send + Sync> = Arc::new(between);
    let forward = move || {
        let mut h = Tensor::ones(12, DType::F32, rank.device())?;
        for layer in &layers {
            let between = Arc::clone(&between);
            h = (&h * layer)?.apply_op1(Probe(move || {
                between();
                Ok(())
            }))?;
        }
        Ok(h.mean_all()?)
    };
    Ok((forward, trainer))
}

const NAP: Duration = Duration::from_millis(5);

#[test]
fn times_are_where_they_were_spent() {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let (forward, mut trainer) = tower(strategy, &rank, rank.comm(), 12, || sleep(NAP))?;
            assert_eq!(*trainer.local_report(), LocalReport::default());
            for step in 0..4 {
                let marks = step % 2 == 1;
                sleep(4 * NAP);
                let marked = Instant::now();
                if marks {
                    trainer.begin_forward();
                }
                let mut window = trainer.accumulate(2)?;
                for _ in 0..2 {
                    sleep(NAP);
                    window.backward(&forward()?)?;
                }
                window.finish()?;
                trainer.clip_grad_norm(1.0)?;
                trainer.step()?;
                let t = *trainer.local_report();
                // Sleeping lasts as long as it should, or longer.
                assert!(
                    t.forward >= 2 * NAP + if marks { Duration::ZERO } else { 4 * NAP },
                    "{t:?}"
                );
                assert!(t.backward >= 8 * NAP, "{t:?}");
                assert!(
                    !t.exposed_communication.is_zero() && !t.optimizer.is_zero(),
                    "{t:?}"
                );
                let parts = t.forward + t.backward + t.exposed_communication + t.optimizer;
                assert!(parts <= t.total, "{t:?}");
                assert!(!marks || t.total <= marked.elapsed(), "{t:?}");
            }
            Ok(())
        });
    }
}

#[test]
fn waiting_for_a_slower_rank_is_exposed() {
    ranks(2, |rank| {
        let late = rank.rank() == 1;
        let between = move || sleep(if late { 3 * NAP } else { Duration::ZERO });
        let (forward, mut trainer) = tower(Sharding::Ddp, &rank, rank.comm(), 12, between)?;
        for _ in 0..3 {
            trainer.backward(&forward()?)?;
            trainer.step()?;
            trainer.barrier()?;
        }
        let t = trainer.local_report();
        if late {
            assert!(t.backward >= 12 * NAP, "{t:?}");
        } else {
            // It cannot have gone on before the other one was through its backward.
            assert!(t.exposed_communication >= 6 * NAP, "{t:?}");
        }
        Ok(())
    });
}

/// What it takes for each layer of a bucket. Long, beside what a busy machine takes to wake a thread.
const LINK: Duration = Duration::from_millis(20);

/// A link that works by itself on one bucket after the other.
#[derive(Debug)]
struct SlowLink {
    inner: Arc<dyn Communicator>,
    free: std::sync::Mutex<Option<Instant>>,
}

struct OnTheWay {
    inner: Pending,
    done_at: Option<Instant>,
}

impl Communicator for SlowLink {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn timeout(&self) -> Duration {
        self.inner.timeout()
    }

    fn start(&self, request: Request, buffer: Buffer) -> Result<Pending> {
        let reduces = matches!(
            request.collective,
            Collective::AllReduce(_) | Collective::ReduceScatter(_)
        );
        let nap = LINK * buffer.len() as u32 / 12;
        let done_at = (reduces && request.label.starts_with("bucket")).then(|| {
            let mut free = self.free.lock().expect("not poisoned");
            let done_at = free.unwrap_or_else(Instant::now).max(Instant::now()) + nap;
            *free.insert(done_at)
        });
        let inner = self.inner.start(request, buffer)?;
        Ok(Pending::new(OnTheWay { inner, done_at }))
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }
}

impl PendingCollective for OnTheWay {
    fn is_done(&self) -> bool {
        self.done_at.is_none_or(|at| at <= Instant::now()) && self.inner.is_done()
    }

    fn wait(self: Box<Self>) -> Result<Buffer> {
        if let Some(at) = self.done_at {
            sleep(at.saturating_duration_since(Instant::now()));
        }
        self.inner.wait()
    }

    fn completed_at(&self) -> Option<Instant> {
        self.done_at
    }
}

#[test]
fn the_hidden_share_is_that_of_a_slow_link() {
    let run = |layers_per_bucket: usize| -> LocalReport {
        let mut reports = ranks(1, move |rank| {
            let comm = Arc::new(SlowLink {
                inner: rank.comm(),
                free: Default::default(),
            });
            let between = || sleep(2 * LINK);
            let (forward, mut trainer) = tower(
                Sharding::Zero1,
                &rank,
                comm,
                12 * layers_per_bucket,
                between,
            )?;
            assert_eq!(trainer.layout().buckets().len(), 4 / layers_per_bucket);
            trainer.backward(&forward()?)?;
            trainer.step()?;
            Ok(*trainer.local_report())
        });
        reports.remove(0)
    };
    // All in one bucket: nothing to hide behind.
    let one = run(4);
    assert!(one.reduction >= 4 * LINK, "{one:?}");
    assert!(
        one.hidden_share().is_some_and(|share| share < 0.25),
        "{one:?}"
    );
    // A bucket per layer: three of four are behind the layers that follow.
    let four = run(1);
    assert!(four.reduction >= 4 * LINK, "{four:?}");
    assert!(
        four.hidden_share().is_some_and(|share| share > 0.4),
        "{four:?}"
    );
    assert_eq!(LocalReport::default().hidden_share(), None);
}

#[test]
fn bytes_and_memory_are_those_of_communicator_and_ledger() {
    for strategy in STRATEGIES {
        ranks(3, move |rank| {
            let (forward, mut trainer) = tower(strategy, &rank, rank.comm(), 12, || ())?;
            for _ in 0..2 {
                // Between steps: no part of any.
                trainer.barrier()?;
                dp_core::weighted_mean(rank.comm().as_ref(), 1.0, 1.0)?;
                let before = rank.comm().traffic().bytes_sent();
                trainer.backward(&forward()?)?;
                trainer.step()?;
                let sent = rank.comm().traffic().bytes_sent() - before;
                let report = trainer.local_report();
                assert_eq!(report.bytes_sent, sent);
                assert_eq!(report.memory, trainer.ledger().current());
                assert_eq!(report.peak_memory, trainer.ledger().peak());
            }
            Ok(())
        });
    }
}

/// Every name of a line in a metrics file, and that it is flat.
#[test]
fn a_record_is_one_flat_object() {
    ranks(2, |rank| {
        let store = ParamStore::new(rank.device());
        let (w, b) = (ones(&store, 3, "w")?, ones(&store, 3, "b")?);
        ones(&store, 3, "unused")?;
        let groups = ParamGroups::new(AdamW::with_lr(0.5)).with_group(
            "bias",
            |n| n == "b",
            AdamW::with_lr(0.25),
        );
        let mut trainer = AnyTrainer::new(Sharding::Zero2, store, &rank, groups, caps(8))?;
        trainer.backward(&(w + b)?.mean_all()?)?;
        let norm = trainer.clip_grad_norm(1.0)?;
        let report: StepReport = trainer.step()?;
        let line = serde_json::to_string(&trainer.record(&report)).expect("plain data");
        let record: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(&line).expect("an object");
        let mut names: Vec<&str> = record.keys().map(String::as_str).collect();
        let mut expected = vec![
            "step",
            "loss",
            "grad_norm",
            "learning_rate",
            "learning_rate/bias",
            "skipped",
            "num_micro_batches",
            "weight",
            "num_unused",
            "loss_scale",
            "rank",
            "forward_ms",
            "backward_ms",
            "exposed_communication_ms",
            "optimizer_ms",
            "total_ms",
            "reduction_ms",
            "hidden_share",
            "bytes_sent",
            "parameters_bytes",
            "gradients_bytes",
            "optimizer_bytes",
            "communication_bytes",
            "communication_peak_bytes",
            "checkpoint_bytes",
            "checkpoint_peak_bytes",
        ];
        names.sort();
        expected.sort();
        assert_eq!(names, expected);
        assert!(record.values().all(|v| !v.is_object() && !v.is_array()));
        assert_eq!(record["step"], 1);
        assert_eq!(record["loss"], 2.0);
        assert_eq!(record["grad_norm"].as_f64(), Some(norm));
        assert_eq!(
            (&record["learning_rate"], &record["learning_rate/bias"]),
            (&0.5.into(), &0.25.into())
        );
        assert!(record["skipped"].is_null() && record["loss_scale"].is_null());
        assert_eq!(
            (&record["weight"], &record["num_unused"]),
            (&2.0.into(), &1.into())
        );
        assert_eq!(record["rank"], rank.rank());
        assert_eq!(record["bytes_sent"], trainer.local_report().bytes_sent);
        assert_eq!(
            record["optimizer_bytes"],
            trainer.ledger().current().optimizer
        );
        Ok(())
    });
}
