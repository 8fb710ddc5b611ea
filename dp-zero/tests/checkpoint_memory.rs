//! What saving and loading cost in memory. A process of its own, because the counters of the heap belong to rank numbers.

use std::alloc::System;
use std::time::Duration;

use candle_core::DType;
use dp_core::memory::{CountingAllocator, heap_usage, reset_heap_peak};
use dp_core::{
    AdamW, EngineConfig, Optimizer, ParamSpec, ParamStore, Rank, Result, Trainer, World,
};
use dp_zero::{ModelStates, Sharding};

#[global_allocator]
static ALLOCATOR: CountingAllocator<System> = CountingAllocator::new(System);

const MIB: u64 = 1 << 20;

/// Values and two moments: 256 MiB.
const ELEMENTS: usize = (256 << 20) / 12;
const TENSORS: usize = 6;

fn trainer(strategy: Sharding, rank: &Rank) -> Result<Box<dyn Trainer<Optimizer = AdamW>>> {
    let store = ParamStore::new(rank.device());
    let vb = store.var_builder(DType::F32);
    for i in 0..TENSORS {
        vb.get_with_hints(
            ELEMENTS / TENSORS,
            &format!("w{i}"),
            candle_nn::Init::Const(0.5),
        )?;
    }
    dp_zero::trainer(
        strategy,
        store,
        rank.comm(),
        AdamW::default(),
        EngineConfig::default(),
    )
}

/// Growth of this rank's heap while `f` runs, and how much of that the ledger does not explain, in bytes.
fn growth(rank: &Rank, f: impl FnOnce() -> Result<()>) -> Result<(u64, u64)> {
    rank.comm().barrier()?;
    let me = Some(rank.rank());
    reset_heap_peak(me);
    let before = heap_usage(me);
    f()?;
    rank.comm().barrier()?;
    let after = heap_usage(me);
    Ok((
        after.peak - before.current,
        after.untracked_peak.saturating_sub(before.untracked_peak),
    ))
}

/// 256 MiB of state on 4 ranks: a save and a load need a few chunks each, and what they read goes where it stays.
#[test]
fn a_rank_reads_its_share_and_holds_it_once() -> Result<()> {
    let guard = tempfile::tempdir().map_err(candle_core::Error::wrap)?;
    let run = guard.path().to_path_buf();
    let world = World::threads(4)?
        .with_timeout(Duration::from_secs(60))
        .with_threads_per_rank(1);
    world.run(move |rank| {
        for strategy in [Sharding::Zero2, Sharding::Zero1, Sharding::Ddp] {
            let mut trainer = trainer(strategy, &rank)?;
            let (saving, _) = growth(&rank, || trainer.save(&run).map(drop))?;
            assert!(saving < MIB, "{strategy:?}: saving took {saving} bytes");
            let states = ModelStates::of_layout(
                trainer.layout(),
                &ParamSpec::of_all(&trainer.store().params()),
                strategy,
                AdamW::default().state_names().len(),
            );
            let share = states.map_or(0, |s| s.parameters / 4 + s.optimizer);
            let bucket = 4 * trainer.layout().max_padded_len() as u64;
            let (loading, untracked) = growth(&rank, || trainer.load(&run).map(drop))?;
            assert!(
                untracked < MIB,
                "{strategy:?}: loading took {untracked} bytes outside of the ledger"
            );
            assert!(
                loading <= share + bucket,
                "{strategy:?}: loading took {loading} bytes, the share is {share}"
            );
        }
        Ok(())
    })
}
