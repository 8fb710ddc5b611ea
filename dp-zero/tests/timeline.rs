//! The timeline of a run: complete, in order, and with the overlap in it.
//!
//! A process of its own, one test at a time: `tracing` keeps per call site, for the whole process, whether anybody listens, and
//! tests with listeners of their own come and go in between.

#[allow(dead_code)]
mod support;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use candle_core::{DType, Tensor};
use dp_core::{Error, ParamStore, Rank, Result, Sgd, Timeline, Trainer, World};
use dp_zero::Sharding;
use serde_json::Value;
use tracing::Dispatch;
use tracing_subscriber::layer::SubscriberExt;

use support::{AnyTrainer, Probe, STRATEGIES, caps, ones, ranks};

/// Held by the test that runs.
static ALONE: Mutex<()> = Mutex::new(());

/// Waits for the tests before; a failed one does not matter.
fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

const LAYERS: usize = 4;
const LEN: usize = 1000;

/// A tower of layers, a bucket each, with a probe on the input side of each layer but the first, and a buffer.
struct Tower {
    layers: Vec<Tensor>,
    trainer: AnyTrainer<Sgd>,
}

impl Tower {
    fn new(strategy: Sharding, rank: &Rank) -> Result<Self> {
        let store = ParamStore::new(rank.device());
        let layers = (0..LAYERS).map(|i| ones(&store, LEN, &format!("layer{i}")));
        let layers = layers.collect::<Result<_>>()?;
        ones(&store, 2, "norm.running_mean")?;
        let trainer = AnyTrainer::new(strategy, store, rank, Sgd::new(0.1), caps(LEN))?;
        assert_eq!(trainer.layout().buckets().len(), LAYERS);
        Ok(Self { layers, trainer })
    }

    fn loss(
        &self,
        probe: impl Fn() -> Result<()> + Send + Sync + Clone + 'static,
    ) -> Result<Tensor> {
        let mut h = Tensor::ones(LEN, DType::F32, &candle_core::Device::Cpu)?;
        for (i, layer) in self.layers.iter().enumerate() {
            if i > 0 {
                let probe = probe.clone();
                h = h.apply_op1(Probe(move || Ok(probe()?)))?;
            }
            h = (h * layer)?;
        }
        Ok(h.mean_all()?)
    }
}

/// An event with its times in nanoseconds.
#[derive(Debug, Clone)]
struct Span {
    name: String,
    rank: u64,
    lane: u64,
    begin: i64,
    end: i64,
    args: Value,
}

impl Span {
    fn step(&self) -> u64 {
        self.args["step"].as_u64().expect("each has its step")
    }
}

/// The spans of a file in their order, after the checks that hold for every file.
fn read(path: &Path, world_size: usize) -> Vec<Span> {
    let text = std::fs::read_to_string(path).expect("the file is there");
    let events: Vec<Value> = serde_json::from_str(&text).expect("valid JSON");
    let (named, spans): (Vec<_>, Vec<_>) = events.into_iter().partition(|e| e["ph"] == "M");
    let spans: Vec<Span> = spans.iter().map(span).collect();

    // Ranks and lanes have names, each once.
    let name = |kind: &str, pid: u64, tid: u64| {
        let of = |e: &&Value| e["name"] == kind && e["pid"] == pid && e["tid"] == tid;
        let names: Vec<_> = named
            .iter()
            .filter(of)
            .map(|e| &e["args"]["name"])
            .collect();
        assert_eq!(names.len(), 1, "{kind} {pid} {tid}");
        names[0].as_str().expect("text").to_string()
    };
    for rank in 0..world_size as u64 {
        assert_eq!(name("process_name", rank, 0), format!("rank {rank}"));
        assert_eq!(name("thread_name", rank, 0), "compute");
        assert_eq!(name("thread_name", rank, 1), "communication");
    }

    let mut lanes: BTreeMap<(u64, u64), Vec<&Span>> = BTreeMap::new();
    for span in &spans {
        assert!(span.rank < world_size as u64, "{span:?}");
        assert!(0 <= span.begin && span.begin <= span.end, "{span:?}");
        assert_eq!(
            span.lane > 0,
            span.name.starts_with("reduction"),
            "{span:?}"
        );
        lanes.entry((span.rank, span.lane)).or_default().push(span);
    }
    for ((rank, lane), mut spans) in lanes {
        assert!(
            name("thread_name", rank, lane)
                .starts_with(["compute", "communication"][usize::from(lane > 0)])
        );
        assert!(
            spans.windows(2).all(|s| s[0].end <= s[1].end),
            "ends in the order of the file"
        );
        spans.sort_by_key(|s| (s.begin, -s.end));
        let mut around: Vec<&Span> = Vec::new();
        for span in spans {
            around.retain(|outer| outer.end > span.begin);
            let inside = around.iter().all(|outer| span.end <= outer.end);
            assert!(inside, "{span:?} in {around:?}");
            assert!(
                lane == 0 || around.is_empty(),
                "{span:?} and {around:?} at a time"
            );
            around.push(span);
        }
    }
    spans
}

fn span(event: &Value) -> Span {
    assert_eq!(event["ph"], "X", "complete, so it has an end: {event}");
    let number = |key: &str| {
        event[key]
            .as_u64()
            .unwrap_or_else(|| panic!("{key}: {event}"))
    };
    let nanos = |key: &str| (event[key].as_f64().expect("a time") * 1e3).round() as i64;
    Span {
        name: event["name"].as_str().expect("text").to_string(),
        rank: number("pid"),
        lane: number("tid"),
        begin: nanos("ts"),
        end: nanos("ts") + nanos("dur"),
        args: event["args"].clone(),
    }
}

/// Three steps of two micro-batches each. In the backward of each, all ranks meet between two layers.
fn train(strategy: Sharding, world_size: usize, path: &Path) -> Result<()> {
    let timeline = Timeline::create(path)?;
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(timeline.layer()));
    let barrier = Arc::new(Barrier::new(world_size));
    ranks(world_size, move |rank| {
        let barrier = Arc::clone(&barrier);
        tracing::dispatcher::with_default(&dispatch, || {
            let mut tower = Tower::new(strategy, &rank)?;
            let meet = move || {
                barrier.wait();
                Ok(())
            };
            for step in 0..3 {
                if step == 2 {
                    tower.trainer.begin_forward();
                }
                let (first, second) = (tower.loss(meet.clone())?, tower.loss(meet.clone())?);
                let mut window = tower.trainer.accumulate(2)?;
                window.backward(&first)?;
                window.backward(&second)?;
                window.finish()?;
                tower.trainer.clip_grad_norm(1.0)?;
                tower.trainer.step()?;
            }
            Ok(())
        })
    });
    timeline.finish()
}

#[test]
fn each_phase_of_each_rank_and_step_is_drawn_once() -> Result<()> {
    let _alone = alone();
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("trace.json");
    for (strategy, world_size) in STRATEGIES
        .into_iter()
        .flat_map(|s| [1, 2, 3].map(|n| (s, n)))
    {
        train(strategy, world_size, &path)?;
        let spans = read(&path, world_size);
        for (rank, step) in (0..world_size as u64).flat_map(|r| [1, 2, 3].map(|s| (r, s))) {
            let of = |name: &str| -> Vec<&Span> {
                let same = |s: &&Span| s.rank == rank && s.step() == step && s.name == name;
                spans.iter().filter(same).collect()
            };
            let gathers = usize::from(strategy != Sharding::Ddp);
            let counts =
                ["wait", "clip", "optimizer", "gather", "broadcast_buffers"].map(|p| of(p).len());
            assert_eq!(
                counts,
                [1, 1, 1, gathers, 1],
                "{strategy:?}, rank {rank}, step {step}"
            );
            let (forward, backward) = (of("forward"), of("backward"));
            assert_eq!(
                (forward.len(), backward.len()),
                (2, 2),
                "{strategy:?}, rank {rank}, step {step}"
            );

            // One after the other, in this order.
            let mut order = vec![forward[0], backward[0], forward[1], backward[1]];
            let later = ["wait", "clip", "optimizer", "gather", "broadcast_buffers"];
            order.extend(later.into_iter().flat_map(of));
            assert!(
                order.windows(2).all(|s| s[0].end <= s[1].begin),
                "{order:#?}"
            );
            for (i, span) in order[..4].iter().enumerate() {
                assert_eq!(span.args["micro_batch"], i / 2);
            }

            for (i, backward) in backward.into_iter().enumerate() {
                // Stage 2 reduces each micro-batch, the others the last one.
                let reduces = i == 1 || strategy == Sharding::Zero2;
                let reductions: Vec<&Span> = (0..LAYERS)
                    .flat_map(|b| of(&format!("reduction of bucket {b}")))
                    .filter(|s| s.args["micro_batch"] == i)
                    .collect();
                assert_eq!(reductions.len(), if reduces { LAYERS } else { 0 });
                for (bucket, reduction) in reductions.iter().enumerate() {
                    assert_eq!(reduction.args["bucket"], bucket);
                    let padded = LEN.next_multiple_of(world_size);
                    assert_eq!(reduction.args["bytes"], 4 * padded);
                    let op = match strategy {
                        Sharding::Ddp => "all_reduce(mean)",
                        _ => "reduce_scatter(mean)",
                    };
                    assert_eq!(reduction.args["op"], op);
                    // The overlap: all begin within backward, and while the last layer is computed all but the last two
                    // are through, since all ranks have met, and worked on them, twice since.
                    assert!(backward.begin <= reduction.begin && reduction.begin <= backward.end);
                    if bucket + 2 < LAYERS {
                        assert!(
                            reduction.end < backward.end,
                            "{reduction:?} in {backward:?}"
                        );
                    }
                }
            }
        }
        let drawn = [
            "forward",
            "backward",
            "wait",
            "clip",
            "optimizer",
            "gather",
            "broadcast_buffers",
            "wait_in_backward",
        ];
        let known = |s: &Span| {
            drawn.contains(&s.name.as_str()) || s.name.starts_with("reduction of bucket ")
        };
        assert!(spans.iter().all(known), "nothing else");
    }
    Ok(())
}

#[test]
fn checkpoints_are_drawn() -> Result<()> {
    let _alone = alone();
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("trace.json");
    let timeline = Timeline::create(&path)?;
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(timeline.layer()));
    let run = dir.path().join("run");
    ranks(2, move |rank| {
        tracing::dispatcher::with_default(&dispatch, || {
            let mut tower = Tower::new(Sharding::Zero1, &rank)?;
            for _ in 0..2 {
                tower.trainer.backward(&tower.loss(|| Ok(()))?)?;
                tower.trainer.step()?;
                tower.trainer.save(&run)?;
                tower.trainer.load(&run)?;
                tower
                    .trainer
                    .save_in_background(&run, &Default::default())?
                    .wait()?;
            }
            Ok(())
        })
    });
    timeline.finish()?;
    let spans = read(&path, 2);
    for name in ["save", "load"] {
        let steps = spans
            .iter()
            .filter(|s| s.name == name)
            .map(|s| (s.rank, s.step()));
        let mut steps: Vec<_> = steps.collect();
        steps.sort();
        steps.dedup();
        assert_eq!(steps, [(0, 1), (0, 2), (1, 1), (1, 2)], "{name}");
    }
    Ok(())
}

/// A rank fails in the middle of the second backward: what has begun is drawn to there, and the file is whole.
#[test]
fn the_file_is_complete_after_a_failure() -> Result<()> {
    let _alone = alone();
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("trace.json");
    for panics in [false, true] {
        let timeline = Timeline::create(&path)?;
        let dispatch = Dispatch::new(tracing_subscriber::registry().with(timeline.layer()));
        let world = World::threads(2)?.with_timeout(Duration::from_secs(10));
        let outcome = world.run(|rank| {
            tracing::dispatcher::with_default(&dispatch, || {
                let mut tower = Tower::new(Sharding::Ddp, &rank)?;
                for step in 0..2 {
                    let fails = step == 1 && rank.rank() == 1;
                    let loss = tower.loss(move || match fails {
                        true if panics => panic!("on purpose"),
                        true => Err(Error::misuse("probe", "fails")),
                        false => Ok(()),
                    })?;
                    tower.trainer.backward(&loss)?;
                    tower.trainer.step()?;
                }
                Ok(())
            })
        });
        assert!(outcome.is_err_and(|e: Error| e.to_string().contains("rank 1")));
        drop(timeline);
        let spans = read(&path, 2);
        for rank in [0, 1] {
            let drawn = |step: u64, name: &str| {
                spans
                    .iter()
                    .any(|s| s.rank == rank && s.step() == step && s.name == name)
            };
            assert!(drawn(1, "optimizer") && drawn(2, "backward"), "rank {rank}");
            assert!(!drawn(2, "optimizer"));
        }
    }
    Ok(())
}

#[test]
fn files_that_cannot_be_written_are_named() -> Result<()> {
    let _alone = alone();
    let text = |outcome: Result<()>| outcome.map_err(|e| e.to_string());
    let nowhere = Timeline::create("/no/such/folder/trace.json");
    let error = text(nowhere.map(drop)).expect_err("there is no such folder");
    assert!(error.contains("/no/such/folder/trace.json"), "{error}");
    // A disk that is full, which shows only when something is written.
    let full = Path::new("/dev/full");
    if full.exists() {
        let error = text(Timeline::create(full)?.finish()).expect_err("no space");
        assert!(
            error.starts_with("/dev/full: cannot write the timeline"),
            "{error}"
        );
    }
    Ok(())
}

#[test]
fn a_timeline_of_nothing_is_valid() -> Result<()> {
    let _alone = alone();
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("trace.json");
    Timeline::create(&path)?.finish()?;
    assert!(read(&path, 0).is_empty());
    Ok(())
}
