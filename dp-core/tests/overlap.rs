use std::sync::{Arc, Barrier};

use candle_core::Tensor;
use dp_core::{
    BucketCaps, Communicator, DdpConfig, DistributedDataParallel, ParamStore, Rank, Result, Sgd,
    Trainer,
};

use crate::support::{Numbers, Probe, builder, ones, ranks, values};

const LEN: usize = 50_000;

/// Four parameters of `LEN` elements, a bucket each; `layers[0]` is next to the model's input, so its gradient is the
/// last one.
fn four_layers(rank: &Rank) -> Result<(Vec<Tensor>, DistributedDataParallel<Sgd>)> {
    let store = ParamStore::new(rank.device());
    let names = ["layer0", "layer1", "layer2", "layer3"];
    let layers = names.map(|n| ones(&builder(&store), LEN, n));
    let layers = layers.into_iter().collect::<Result<_>>()?;
    let config = DdpConfig::default().with_bucket_caps(BucketCaps::new(4 * LEN)?);
    let trainer = DistributedDataParallel::with_config(store, rank.comm(), Sgd::new(0.25), config)?;
    assert_eq!(trainer.layout().buckets().len(), 4);
    Ok((layers, trainer))
}

/// `((x * layer0) * layer1) * ...`, with a probe on the input side of each layer but the first.
fn forward(
    layers: &[Tensor],
    probe: impl Fn(usize) + Send + Sync + Clone + 'static,
) -> Result<Tensor> {
    let mut h = Tensor::ones(LEN, candle_core::DType::F32, &candle_core::Device::Cpu)?;
    for (i, layer) in layers.iter().enumerate() {
        if i > 0 {
            let probe = probe.clone();
            h = h.apply_op1(Probe(move || probe(i)))?;
        }
        h = (h * layer)?;
    }
    Ok(h.sum_all()?)
}

#[test]
fn buckets_are_reduced_while_backward_runs() {
    for world_size in [2, 3, 4] {
        let barrier = Arc::new(Barrier::new(world_size));
        ranks(world_size, move |rank| {
            let (layers, mut trainer) = four_layers(&rank)?;
            let comm: Arc<dyn Communicator> = rank.comm();
            let (n, bucket) = (
                world_size as u64,
                4 * (LEN as u64).next_multiple_of(world_size as u64),
            );
            let per_bucket = 2 * (n - 1) * bucket / n;
            let before = comm.traffic().all_reduce;
            let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
            let loss = {
                let (seen, barrier, comm) =
                    (Arc::clone(&seen), Arc::clone(&barrier), Arc::clone(&comm));
                forward(&layers, move |layer| {
                    // All ranks are here: the hooks of this layer have run everywhere, those of earlier ones nowhere.
                    barrier.wait();
                    let now = comm.traffic().all_reduce;
                    let moved = (now.calls - before.calls, now.bytes_sent - before.bytes_sent);
                    seen.lock().expect("not poisoned").push((layer, moved));
                    barrier.wait();
                })?
            };
            trainer.backward(&loss)?;
            // A bucket starts with its last gradient, and has moved when each rank has had one more gradient.
            let seen = seen.lock().expect("not poisoned").clone();
            let expected = [(3, (1, 0)), (2, (2, per_bucket)), (1, (3, 2 * per_bucket))];
            assert_eq!(seen, expected);
            trainer.step()?;
            assert!(layers.iter().all(|l| values(l) == vec![0.75; LEN]));
            Ok(())
        });
    }
}

#[test]
fn nothing_is_sent_before_the_last_micro_batch() {
    ranks(2, |rank| {
        let (layers, mut trainer) = four_layers(&rank)?;
        let before = rank.comm().traffic();
        let mut window = trainer.accumulate(2)?;
        window.backward(&forward(&layers, |_| ())?)?;
        assert_eq!(rank.comm().traffic(), before);
        window.backward(&forward(&layers, |_| ())?)?;
        window.finish()?;
        trainer.step()?;
        assert!(layers.iter().all(|l| values(l) == vec![0.75; LEN]));
        Ok(())
    });
}

/// C10: with ranks that are late now and then, 50 steps of small buckets give the same bits every time.
#[test]
fn c10_delays_in_backward_do_not_change_a_bit() {
    let run = |delays: u64| {
        ranks(3, move |rank| {
            let store = ParamStore::new(rank.device()).with_seed(1);
            let vb = builder(&store);
            let shapes = [(4, 9), (9, 9), (9, 9), (9, 1)];
            let layers = shapes
                .iter()
                .enumerate()
                .map(|(i, (a, b))| candle_nn::linear(*a, *b, vb.pp(i)));
            let layers = layers.collect::<candle_core::Result<Vec<_>>>()?;
            let config = DdpConfig::default().with_bucket_caps(BucketCaps::new(40)?);
            let mut trainer =
                DistributedDataParallel::with_config(store, rank.comm(), Sgd::new(0.05), config)?;
            assert!(trainer.layout().buckets().len() >= 6);
            let mut batches = Numbers::new(rank.rank() as u64);
            for step in 0..50 {
                let mut h = batches.tensor((3, 4));
                for (i, layer) in layers.iter().enumerate() {
                    h = candle_nn::Module::forward(layer, &h)?.tanh()?;
                    let turn = step * 31 + i as u64 * 7 + rank.rank() as u64 * 13 + delays;
                    let late = turn.is_multiple_of(5);
                    h = h.apply_op1(Probe(move || {
                        if late && delays > 0 {
                            std::thread::sleep(std::time::Duration::from_micros(200 * delays));
                        }
                    }))?;
                }
                trainer.backward(&h.sqr()?.mean_all()?)?;
                trainer.step()?;
            }
            trainer.store().sha256()
        })
    };
    let expected = run(0);
    assert!(expected.iter().all(|d| *d == expected[0]));
    for delays in 1..4 {
        assert_eq!(run(delays), expected);
    }
}
