//! Data parallel training on a GPU. That of the ZeRO stages is tested in dp-zero.

use candle_core::{DType, Tensor};
use candle_nn::Init;
use dp_core::{AdamW, DistributedDataParallel, Optimizer, ParamStore, Rank, Result, Sgd, Trainer};

use crate::harness::{Test, gpu_world};
use crate::support::{failing_ranks, ranks_of, world};

pub const TESTS: &[Test] = &[
    ("training: exact steps of a probe model", exact_steps),
    (
        "training: optimizers without a kernel are refused",
        no_kernel,
    ),
    ("training: replicas that drift are found", sentinel),
];

/// Parameters begin at 1, and the gradient is what the loss multiplies them by; all numbers are exact.
fn train(rank: &Rank, dtype: DType) -> Result<Vec<f32>> {
    let store = ParamStore::new(rank.device());
    let w = store
        .var_builder(dtype)
        .get_with_hints(5, "w", Init::Const(1.0))?;
    let mut ddp = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.25))?;
    for step in 0..3 {
        let g = (rank.rank() + step) as f64;
        let loss = (w.to_dtype(DType::F32)?.sum_all()? * g)?;
        ddp.backward(&loss)?;
        ddp.step()?;
    }
    let mut values = vec![0.0; 5];
    ddp.store().params()[0].read(0..5, &mut values)?;
    Ok(values)
}

fn exact_steps() {
    for n in [1, 2, 4] {
        // Mean gradients (n - 1) / 2 + step.
        let mean = (n - 1) as f32 / 2.0;
        let expected = 1.0 - 0.25 * (3.0 * mean + 3.0);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for world in [gpu_world(n), world(n)] {
                for values in ranks_of(world, move |rank| train(&rank, dtype)) {
                    assert_eq!(values, [expected; 5], "{dtype:?} on {n} ranks");
                }
            }
        }
    }
}

/// A rule of a user's own, for the CPU.
#[derive(Debug, Clone, PartialEq)]
struct SignDescent(f64);

impl Optimizer for SignDescent {
    fn name(&self) -> &'static str {
        "sign-descent"
    }
    fn state_names(&self) -> &'static [&'static str] {
        &[]
    }
    fn update(&self, _: u64, values: &mut [f32], grad: &[f32], _: f32, _: &mut [&mut [f32]]) {
        for (w, g) in values.iter_mut().zip(grad) {
            *w -= self.0 as f32 * g.signum();
        }
    }
    fn hyper_parameters(&self) -> Vec<(&'static str, f64)> {
        vec![("lr", self.0)]
    }
    fn set_hyper_parameter(&mut self, _: &str, value: f64) -> Result<()> {
        self.0 = value;
        Ok(())
    }
    fn learning_rate(&self) -> f64 {
        self.0
    }
    fn set_learning_rate(&mut self, lr: f64) {
        self.0 = lr;
    }
    fn validate(&self) -> Result<()> {
        Ok(())
    }
}

fn no_kernel() {
    let error = failing_ranks(gpu_world(2), |rank| {
        let store = ParamStore::new(rank.device());
        candle_nn::linear(2, 2, store.var_builder(DType::F32))?;
        DistributedDataParallel::new(store, rank.comm(), SignDescent(0.1)).map(drop)
    });
    let text = error.to_string();
    assert!(text.contains("sign-descent has no CUDA kernel"), "{text}");
}

fn sentinel() {
    let error = failing_ranks(gpu_world(2), |rank| {
        let store = ParamStore::new(rank.device());
        let layer = candle_nn::linear(2, 2, store.var_builder(DType::F32))?;
        let mut config = dp_core::DdpConfig::default();
        config.engine.compare_replicas_every = 1;
        let mut ddp =
            DistributedDataParallel::with_config(store, rank.comm(), AdamW::default(), config)?;
        let x = Tensor::ones((3, 2), DType::F32, rank.device())?;
        for step in 0..3 {
            if step == 2 && rank.rank() == 1 {
                ddp.store().params()[0].write(0..1, &[100.0])?;
            }
            let loss = candle_nn::Module::forward(&layer, &x)?.sqr()?.mean_all()?;
            ddp.backward(&loss)?;
            ddp.step()?;
        }
        Ok(())
    });
    let diverged = |e: &dp_core::RankError| e.to_string().contains("rank 1 differs from rank 0's");
    assert!(error.failures().iter().all(diverged), "{error}");
}
