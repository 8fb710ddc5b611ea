use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use dp_models::{ByteTokens, CausalLm, GptConfig, Sampling};

use crate::support::{CPU, seeded_gpt};

const TEXT: &str = "the quick brown fox jumps over a lazy dog.";

/// All windows of a short text, again and again: the model must learn it by heart and then write it out.
#[test]
fn a_tiny_gpt_learns_a_text_by_heart() {
    let config = GptConfig {
        vocab_size: ByteTokens::VOCAB_SIZE,
        context: 8,
        width: 32,
        heads: 2,
        layers: 2,
        tied_head: true,
    };
    let (gpt, vars) = seeded_gpt(&config, 42);
    let text = ByteTokens::from_bytes(TEXT).unwrap();
    let offsets: Vec<usize> = (0..text.num_windows(config.context).unwrap()).collect();
    let (inputs, targets) = text.batch(&offsets, config.context, &CPU).unwrap();

    let params = ParamsAdamW {
        lr: 1e-2,
        ..Default::default()
    };
    let mut optimizer = AdamW::new(vars.all_vars(), params).unwrap();
    let mut last = f32::INFINITY;
    for _ in 0..60 {
        let loss = gpt.loss(&inputs, &targets).unwrap();
        optimizer.backward_step(&loss).unwrap();
        last = loss.to_scalar().unwrap();
    }
    // The first letter of a window often has several successors, so the loss stays near 0.08.
    assert!(last < 0.2, "loss {last}");

    let prompt = ByteTokens::encode(&TEXT[..config.context]);
    let rest = TEXT.len() - prompt.len();
    let written = gpt.generate(&prompt, rest, &Sampling::greedy()).unwrap();
    assert_eq!(ByteTokens::decode(&written), TEXT);
}
