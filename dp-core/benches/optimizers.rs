//! One update of flat slices by an optimizer, on one thread.
//!
//! ```text
//! cargo bench --workspace --bench optimizers
//! ```

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use dp_core::{AdamW, Optimizer, Sgd};

fn update<O: Optimizer>(c: &mut Criterion, name: &str, optimizer: &O) {
    let mut group = c.benchmark_group(name);
    // In the second-level cache, and far beyond all caches.
    for len in [1 << 14, 1 << 24] {
        let mut values = vec![0.1f32; len];
        let gradient = vec![0.01f32; len];
        let mut states = vec![vec![0f32; len]; optimizer.state_names().len()];
        group.throughput(Throughput::Elements(len as u64));
        group.bench_function(BenchmarkId::from_parameter(len), |b| {
            let mut step = 0;
            b.iter(|| {
                step += 1;
                let mut states: Vec<&mut [f32]> =
                    states.iter_mut().map(Vec::as_mut_slice).collect();
                optimizer.update(step, &mut values, black_box(&gradient), 1.0, &mut states);
            });
        });
    }
    group.finish();
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
