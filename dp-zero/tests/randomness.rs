use candle_core::{DType, Module, Tensor};
use candle_nn::ModuleT;
use dp_core::{AdamW, Result, Trainer};
use dp_models::Dropout;

use crate::support::{AnyTrainer, STRATEGIES, caps, ranks};

/// C53: the same seed on all ranks gives each its own masks, and the same ones in another run.
#[test]
fn c53_dropout_differs_between_ranks_and_repeats_between_runs() {
    let masks = || {
        ranks(2, |rank| {
            let ones = Tensor::ones(1000, DType::F32, rank.device())?;
            let dropout = Dropout::new(0.5, rank.seed(42))?;
            Ok(dropout.forward_t(&ones, true)?.to_vec1::<f32>()?)
        })
    };
    let first = masks();
    let agree = first[0]
        .iter()
        .zip(&first[1])
        .filter(|(a, b)| a == b)
        .count();
    assert!((430..570).contains(&agree), "{agree} of 1000 agree");
    assert_eq!(first, masks());
}

/// Training with dropout: replicas stay equal, runs repeat, strategies agree, since only the batch parts differ.
#[test]
fn training_with_dropout_repeats_to_the_bit() {
    let run = |strategy| {
        let digests = ranks(3, move |rank| {
            let store = dp_core::ParamStore::new(rank.device()).with_seed(1);
            let vb = store.var_builder(DType::F32);
            let first = candle_nn::linear(4, 16, vb.pp("first"))?;
            let second = candle_nn::linear(16, 1, vb.pp("second"))?;
            let dropout = Dropout::new(0.3, rank.seed(9))?;
            let mut trainer =
                AnyTrainer::new(strategy, store, &rank, AdamW::with_lr(0.01), caps(20))?;
            let x = Tensor::full(0.5f32 + rank.rank() as f32, (8, 4), rank.device())?;
            for _ in 0..5 {
                let hidden = dropout.forward_t(&first.forward(&x)?.tanh()?, true)?;
                let loss = second.forward(&hidden)?.sqr()?.mean_all()?;
                trainer.backward(&loss)?;
                trainer.step()?;
            }
            trainer.store().sha256()
        });
        assert!(digests.iter().all(|d| *d == digests[0]));
        Ok::<_, dp_core::Error>(digests[0].clone())
    };
    let results: Result<Vec<String>> = STRATEGIES.into_iter().chain(STRATEGIES).map(run).collect();
    let results = results.expect("all train");
    assert!(results.iter().all(|r| *r == results[0]));
}
