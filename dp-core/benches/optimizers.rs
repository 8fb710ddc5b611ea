//! One update of flat slices by an optimizer: by one rank, or by two that own half of them each.
//!
//! ```text
//! cargo bench --workspace --bench optimizers
//! ```

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use dp_core::{AdamW, Optimizer, Sgd};

/// In the second-level cache, and far beyond all caches.
const LENGTHS: [usize; 2] = [1 << 14, 50_000_000];

fn update<O: Optimizer + Sync>(c: &mut Criterion, name: &str, optimizer: &O) {
    let mut group = c.benchmark_group(name);
    for (len, ranks) in [(LENGTHS[0], 1), (LENGTHS[1], 1), (LENGTHS[1], 2)] {
        // What each rank owns.
        let mut owned: Vec<_> = (0..ranks)
            .map(|_| Owned::new(len / ranks, optimizer))
            .collect();
        group.throughput(Throughput::Elements(len as u64));
        let id = BenchmarkId::new(format!("{ranks} rank"), len);
        group.bench_function(id, |b| {
            let mut step = 0;
            b.iter(|| {
                step += 1;
                match &mut owned[..] {
                    [one] => one.update(step, optimizer),
                    all => std::thread::scope(|scope| {
                        for owned in all {
                            scope.spawn(move || owned.update(step, optimizer));
                        }
                    }),
                }
            });
        });
    }
    group.finish();
}

struct Owned {
    values: Vec<f32>,
    gradient: Vec<f32>,
    states: Vec<Vec<f32>>,
}

impl Owned {
    fn new(len: usize, optimizer: &impl Optimizer) -> Self {
        Self {
            values: vec![0.1; len],
            gradient: vec![0.01; len],
            states: vec![vec![0.0; len]; optimizer.state_names().len()],
        }
    }

    fn update(&mut self, step: u64, optimizer: &impl Optimizer) {
        let states = self.states.iter_mut().map(Vec::as_mut_slice);
        let mut states: Vec<&mut [f32]> = states.collect();
        let gradient = black_box(&self.gradient);
        optimizer.update(step, &mut self.values, gradient, 1.0, &mut states);
    }
}

fn optimizers(c: &mut Criterion) {
    update(c, "AdamW", &AdamW::default());
    update(c, "SGD", &Sgd::new(0.1));
    update(
        c,
        "SGD with momentum",
        &Sgd {
            momentum: 0.9,
            ..Sgd::new(0.1)
        },
    );
}

criterion_group!(benches, optimizers);
criterion_main!(benches);
