//! The estimate of activations against the heap. Its counters belong to rank numbers, so this is the only test of its process.

use candle_core::{DType, Tensor};
use dp_core::memory::{CountingAllocator, heap_usage, reset_heap_peak};
use dp_core::{AdamW, DistributedDataParallel, ParamStore, Rank, Trainer, World};
use dp_models::{GptConfig, LlamaConfig, ModelConfig};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::system();

/// Model, and sequences of its context.
fn shapes() -> Vec<(ModelConfig, usize)> {
    let gpt = |layers, width, context, vocab_size, tied_head| GptConfig {
        vocab_size,
        context,
        width,
        heads: 4,
        layers,
        tied_head,
    };
    let llama = |layers, width, context, vocab_size, tied_head| LlamaConfig {
        vocab_size,
        context,
        width,
        heads: 4,
        kv_heads: Some(2),
        hidden: 11 * width / 4,
        layers,
        tied_head,
        ..LlamaConfig::mini()
    };
    // Large enough that what else is on the heap, half a MiB, is no part of it.
    vec![
        (gpt(4, 64, 64, 256, true).into(), 16),
        // Logits are the most of it.
        (gpt(1, 64, 128, 5000, true).into(), 2),
        (gpt(2, 64, 64, 9000, false).into(), 1),
        // Weights are: their gradients exist three times.
        (gpt(2, 512, 16, 256, false).into(), 1),
        (gpt(2, 128, 256, 256, false).into(), 2),
        (llama(4, 64, 64, 256, true).into(), 16),
        (llama(1, 64, 128, 5000, false).into(), 2),
        (llama(2, 512, 16, 256, false).into(), 1),
        (llama(2, 128, 256, 256, true).into(), 2),
    ]
}

/// The peak over two steps of everything that the ledger does not know.
fn measure(rank: &Rank, config: &ModelConfig, batch: usize, dtype: DType) -> dp_core::Result<u64> {
    let before = heap_usage(Some(rank.rank())).current;
    reset_heap_peak(Some(rank.rank()));
    let store = ParamStore::new(rank.device());
    let model = config.build(store.var_builder(dtype))?;
    let mut trainer = DistributedDataParallel::new(store, rank.comm(), AdamW::default())?;
    let len = config.context();
    let tokens = |step: usize| {
        let token = |i: usize| ((i * 31 + step * 7) % config.vocab_size()) as u32;
        let tokens: Vec<u32> = (0..batch * len).map(token).collect();
        Tensor::from_vec(tokens, (batch, len), rank.device())
    };
    for step in 0..2 {
        let (inputs, targets) = (tokens(step)?, tokens(step + 1)?);
        trainer.backward(&model.loss(&inputs, &targets)?)?;
        trainer.step()?;
    }
    Ok(heap_usage(Some(rank.rank())).untracked_peak - before)
}

#[test]
fn estimates_are_within_15_percent_of_the_measured_peak() -> Result<(), Box<dyn std::error::Error>>
{
    let world = World::threads(1)?.with_threads_per_rank(1);
    let mut wrong = Vec::new();
    for (config, batch) in shapes() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let measured = world.map(|rank| measure(&rank, &config, batch, dtype))?[0];
            let estimate = config.activations(batch, config.context(), dtype).peak;
            let ratio = estimate as f64 / measured as f64;
            if !(0.85..=1.15).contains(&ratio) {
                wrong.push((ratio, config.clone(), dtype));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}
