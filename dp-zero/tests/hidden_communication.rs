//! A slow link on a clock that only the test moves: how much of the communication backward hides is a count, not a measurement.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use candle_core::{DType, Tensor};
use dp_core::comm::{Collective, Pending, PendingCollective, Request, Traffic};
use dp_core::{BucketCaps, Buffer, Communicator, ParamStore, Rank, Result, Sgd, Trainer};
use dp_zero::Sharding;

use crate::support::{AnyTrainer, Probe, STRATEGIES, ones, ranks};

const LAYERS: u64 = 20;
/// Backward of one layer, in ticks.
const COMPUTE: u64 = 10;
/// Reduction of one element, in ticks; a layer has one element.
const LINK: u64 = 8;

/// One rank's clock, and what it has waited for.
#[derive(Debug, Default)]
struct Clock {
    now: AtomicU64,
    /// When the link has sent all it was given.
    link_free: AtomicU64,
    sent: AtomicU64,
    exposed: AtomicU64,
}

/// Reductions of buckets take their time on the link, one after the other; everything else takes none.
#[derive(Debug)]
struct SlowLink {
    inner: Arc<dyn Communicator>,
    clock: Arc<Clock>,
}

struct OnTheWay {
    inner: Pending,
    done_at: u64,
    clock: Arc<Clock>,
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
        let ticks = match reduces && request.label.starts_with("bucket") {
            true => LINK * buffer.len() as u64 / self.world_size() as u64,
            false => 0,
        };
        let inner = self.inner.start(request, buffer)?;
        let clock = Arc::clone(&self.clock);
        let begin = clock.now.load(Ordering::Relaxed);
        let begin = begin.max(clock.link_free.load(Ordering::Relaxed));
        let done_at = if ticks == 0 { 0 } else { begin + ticks };
        clock.link_free.fetch_max(done_at, Ordering::Relaxed);
        clock.sent.fetch_add(ticks, Ordering::Relaxed);
        Ok(Pending::new(OnTheWay {
            inner,
            done_at,
            clock,
        }))
    }

    fn progress(&self) {
        self.inner.progress();
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }
}

impl PendingCollective for OnTheWay {
    fn is_done(&self) -> bool {
        self.clock.now.load(Ordering::Relaxed) >= self.done_at && self.inner.is_done()
    }

    fn wait(self: Box<Self>) -> Result<Buffer> {
        let now = self.clock.now.fetch_max(self.done_at, Ordering::Relaxed);
        let waited = self.done_at.saturating_sub(now);
        self.clock.exposed.fetch_add(waited, Ordering::Relaxed);
        self.inner.wait()
    }
}

/// One step of a tower of layers; returns the ticks that the link was busy, and those that the rank has waited for it.
fn step(
    strategy: Sharding,
    rank: &Rank,
    layers_per_bucket: usize,
    overlap: bool,
) -> Result<(u64, u64)> {
    let (n, clock) = (rank.world_size(), Arc::new(Clock::default()));
    let store = ParamStore::new(rank.device());
    let layers = (0..LAYERS)
        .map(|i| ones(&store, n, &format!("layer{i}")))
        .collect::<Result<Vec<_>>>()?;
    let comm = Arc::new(SlowLink {
        inner: rank.comm(),
        clock: Arc::clone(&clock),
    });
    let cap = 4 * n * layers_per_bucket;
    let caps = BucketCaps::with_first(cap, cap)?;
    let mut trainer = AnyTrainer::over(comm, strategy, store, Sgd::new(0.1), |engine| {
        engine.bucket_caps = caps;
        engine.overlap_comm = overlap;
    })?;
    let mut h = Tensor::ones(n, DType::F32, rank.device())?;
    for layer in &layers {
        // The gradient of the product is complete, and with it the layer's, when its time has passed.
        let clock = Arc::clone(&clock);
        h = (&h * layer)?.apply_op1(Probe(move || {
            clock.now.fetch_add(COMPUTE, Ordering::Relaxed);
            Ok(())
        }))?;
    }
    trainer.backward(&h.sum_all()?)?;
    trainer.step()?;
    let read = |x: &AtomicU64| x.load(Ordering::Relaxed);
    Ok((read(&clock.sent), read(&clock.exposed)))
}

#[test]
fn backward_hides_at_least_four_fifths_of_a_slow_link() {
    for strategy in STRATEGIES {
        for world_size in [1, 2, 3, 4] {
            for (sent, exposed) in ranks(world_size, move |rank| step(strategy, &rank, 1, true)) {
                assert_eq!(sent, LAYERS * LINK);
                assert!(5 * exposed <= sent, "{strategy:?}: {exposed} of {sent}");
            }
            // All in one bucket: there is nothing to hide behind. So the figure above is not one that anything gives.
            for (sent, exposed) in ranks(world_size, move |rank| step(strategy, &rank, 20, true)) {
                assert_eq!((sent, exposed), (LAYERS * LINK, LAYERS * LINK));
            }
            // Without overlap each bucket is waited for.
            for (sent, exposed) in ranks(world_size, move |rank| step(strategy, &rank, 1, false)) {
                assert_eq!((sent, exposed), (LAYERS * LINK, LAYERS * LINK));
            }
        }
    }
}
