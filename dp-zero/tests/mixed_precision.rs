use candle_core::{DType, Tensor};
use candle_nn::{Init, VarBuilder};
use dp_core::checkpoint::Checkpoint;
use dp_core::{
    AdamW, BucketCaps, GradAccumDType, Optimizer, ParamStore, Rank, Result, Sgd, Trainer,
};
use dp_models::{ByteTokens, Gpt, GptConfig};
use dp_zero::Sharding;

use crate::checkpoint::folder;
use crate::support::{AnyTrainer, Oddities, STRATEGIES, caps, noise, ranks, same_on_all};

/// A parameter of `len` elements that are all `value`.
pub fn constant(store: &ParamStore, dtype: DType, len: usize, value: f64) -> Result<Tensor> {
    let vb = store.var_builder(dtype);
    Ok(vb.get_with_hints(len, "w", Init::Const(value))?)
}

/// A loss whose gradient is `g` in each element.
pub fn slope(w: &Tensor, g: f64) -> Result<Tensor> {
    Ok((w.sum_all()? * g)?)
}

/// All elements, widened.
pub fn widened(t: &Tensor) -> Vec<f32> {
    let t = t.to_dtype(DType::F32).and_then(|t| t.flatten_all());
    t.and_then(|t| t.to_vec1()).expect("a tensor on the CPU")
}

fn accumulating_in(
    strategy: Sharding,
    store: ParamStore,
    rank: &Rank,
    accum: GradAccumDType,
) -> Result<AnyTrainer<Sgd>> {
    AnyTrainer::with_settings(strategy, store, rank, Sgd::new(1.0), |engine| {
        engine.grad_accum_dtype = accum;
    })
}

const BOTH: [GradAccumDType; 2] = [GradAccumDType::F32, GradAccumDType::Parameter];

/// bf16 cannot take a step of 0.001 from 1.0: without a master the weight would stay 1.0 for ever.
#[test]
fn small_steps_add_up_in_the_master() {
    for strategy in STRATEGIES {
        for world_size in [1, 2, 3, 4] {
            let (_guard, run) = folder();
            ranks(world_size, move |rank| {
                let store = ParamStore::new(rank.device());
                let w = constant(&store, DType::BF16, 5, 1.0)?;
                let adamw = AdamW {
                    weight_decay: 0.0,
                    ..AdamW::with_lr(1e-3)
                };
                let mut trainer = AnyTrainer::new(strategy, store, &rank, adamw, caps(2))?;
                for step in 1..=300 {
                    trainer.backward(&slope(&w, 1.0)?)?;
                    trainer.step()?;
                    if step == 100 {
                        assert_eq!(widened(&w), [0.8984375; 5], "visible");
                        trainer.save(&run)?;
                        for master in Checkpoint::open(&run)?.read_f32("w", "master")? {
                            assert!((master - 0.9).abs() < 1e-4, "{master}");
                        }
                    }
                }
                assert_eq!(trainer.num_steps(), 300);
                trainer.save(&run)?;
                let checkpoint = Checkpoint::open(&run)?;
                assert_eq!(checkpoint.manifest().parameters[0].updates, 300);
                Ok(())
            });
        }
    }
}

/// Sums over ranks that 16-bit addition would get wrong: 256 + 1 is 256 in bf16, 40000 + 40000 is infinite in f16.
#[test]
fn sums_over_ranks_are_in_f32_and_rounded_once() {
    for strategy in STRATEGIES {
        for accum in BOTH {
            for wire in [None, Some(DType::BF16)] {
                ranks(4, move |rank| {
                    let store = ParamStore::new(rank.device());
                    let w = constant(&store, DType::BF16, 3, 0.0)?;
                    let mut trainer = AnyTrainer::with_settings(
                        strategy,
                        store,
                        &rank,
                        Sgd::new(1.0),
                        |engine| {
                            engine.grad_accum_dtype = accum;
                            engine.communication_dtype = wire;
                        },
                    )?;
                    let g = [256.0, 1.0, 1.0, 2.0][rank.rank()];
                    trainer.backward(&slope(&w, g)?)?;
                    trainer.step()?;
                    assert_eq!(widened(&w), [-65.0; 3], "{strategy:?} {accum:?} {wire:?}");
                    Ok(())
                });
            }
            ranks(2, move |rank| {
                let store = ParamStore::new(rank.device());
                let w = constant(&store, DType::F16, 3, 0.0)?;
                let mut trainer = accumulating_in(strategy, store, &rank, accum)?;
                trainer.backward(&slope(&w, 40000.0)?)?;
                trainer.step()?;
                assert_eq!(widened(&w), [-40000.0; 3], "{strategy:?} {accum:?}");
                Ok(())
            });
        }
    }
}

/// What 16-bit accumulation costs is what its documentation says.
#[test]
fn micro_batches_add_up_in_f32_unless_asked_otherwise() {
    for strategy in STRATEGIES {
        for (accum, mean) in [
            (GradAccumDType::F32, 52.0),
            // 256 + 1 is 256 each time; the mean itself, 51.2, is rounded only in the parameter.
            (GradAccumDType::Parameter, 51.25),
        ] {
            for world_size in [1, 2, 3] {
                ranks(world_size, move |rank| {
                    let store = ParamStore::new(rank.device());
                    let w = constant(&store, DType::BF16, 3, 0.0)?;
                    let mut trainer = accumulating_in(strategy, store, &rank, accum)?;
                    let mut window = trainer.accumulate(5)?;
                    for g in [256.0, 1.0, 1.0, 1.0, 1.0] {
                        window.backward(&slope(&w, g)?)?;
                    }
                    window.finish()?;
                    trainer.step()?;
                    assert_eq!(widened(&w), [-mean; 3], "{strategy:?} {accum:?}");
                    Ok(())
                });
            }
        }
    }
}

/// A model with a parameter of each kind, in f16, which Candle multiplies on the CPU.
fn train_oddities(
    strategy: Sharding,
    rank: &Rank,
    cap: usize,
    wire: Option<DType>,
    accum: GradAccumDType,
    optimizer: impl Optimizer,
) -> Result<(String, Vec<u64>)> {
    let store = Oddities::store();
    let model = Oddities::new(store.var_builder(DType::F16))?;
    let mut trainer = AnyTrainer::with_settings(strategy, store, rank, optimizer, |engine| {
        engine.bucket_caps = caps(cap);
        engine.communication_dtype = wire;
        engine.grad_accum_dtype = accum;
    })?;
    let mut norms = Vec::new();
    for step in 0..4 {
        let batch = noise(step, (24, 5)).to_dtype(DType::F16)?;
        let part = 24 / rank.world_size();
        let batch = batch.narrow(0, rank.rank() * part, part)?;
        trainer.backward(&model.loss(&batch)?)?;
        norms.push(trainer.clip_grad_norm(0.05)?.to_bits());
        assert_eq!(trainer.step()?.unused, ["unused"]);
    }
    Ok((trainer.store().sha256()?, norms))
}

#[test]
fn strategies_agree_to_the_bit_in_16_bits() {
    for world_size in [1, 2, 3, 4] {
        for accum in BOTH {
            for wire in [None, Some(DType::BF16), Some(DType::F32)] {
                let run = move |strategy, cap| {
                    same_on_all(ranks(world_size, move |rank| {
                        let adamw = AdamW::with_lr(0.01);
                        train_oddities(strategy, &rank, cap, wire, accum, adamw)
                    }))
                };
                let expected = run(Sharding::Ddp, 1);
                for strategy in STRATEGIES {
                    for cap in [1, 50, 1 << 20] {
                        let what = format!("{strategy:?} {world_size} {cap} {wire:?} {accum:?}");
                        assert_eq!(run(strategy, cap), expected, "{what}");
                    }
                }
            }
        }
    }
}

/// A GPT in bf16 whose norms and head are islands of f32: layers see what they asked for, and each dtype has buckets of its own.
fn islands(store: &ParamStore) -> Result<(Gpt, GptConfig)> {
    let config = GptConfig {
        context: 16,
        width: 16,
        heads: 2,
        layers: 2,
        tied_head: false,
        ..GptConfig::mini()
    };
    let vb = store.var_builder(DType::BF16);
    Ok((Gpt::new(&config, vb)?, config))
}

#[test]
fn a_bf16_gpt_is_the_same_in_all_strategies() {
    let run = |strategy, world_size, cap: usize| {
        same_on_all(ranks(world_size, move |rank| {
            let store = ParamStore::new(rank.device()).with_seed(3);
            let (model, config) = islands(&store)?;
            let adamw = AdamW::with_lr(0.003);
            let bytes = BucketCaps::with_first(cap, cap)?;
            let mut trainer = AnyTrainer::new(strategy, store, &rank, adamw, bytes)?;
            let text = ByteTokens::from_bytes(lipsum())?;
            let mut losses = Vec::new();
            for step in 0..4 {
                let offset = 40 * (step * rank.world_size() + rank.rank());
                let (inputs, targets) =
                    text.batch(&[offset, offset + 7], config.context, rank.device())?;
                let loss = model.loss(&inputs, &targets)?;
                losses.push(loss.to_dtype(DType::F32)?.to_scalar::<f32>()?);
                trainer.backward(&loss)?;
                trainer.step()?;
            }
            assert!(losses.iter().all(|l| l.is_finite()), "{losses:?}");
            trainer.store().sha256()
        }))
    };
    for world_size in [1, 2, 4] {
        let expected = run(Sharding::Ddp, world_size, 1 << 20);
        for strategy in STRATEGIES {
            assert_eq!(run(strategy, world_size, 3000), expected, "{strategy:?}");
        }
    }
}

/// Some text.
fn lipsum() -> Vec<u8> {
    (0..2000u32)
        .map(|i| b"in principio erat verbum et "[(i * i / 7 % 28) as usize])
        .collect()
}

/// Two dtypes side by side.
struct Islands {
    narrow: Vec<Tensor>,
    wide: Vec<Tensor>,
}

impl Islands {
    fn new(vb: &VarBuilder) -> Result<Self> {
        let mut model = Self {
            narrow: Vec::new(),
            wide: Vec::new(),
        };
        for i in 0..3 {
            let vb = vb.pp(format!("block{i}"));
            let wide = vb.clone().set_dtype(DType::F32);
            model
                .narrow
                .push(vb.get_with_hints((5, 3), "linear", Init::Const(1.0))?);
            model
                .wide
                .push(wide.get_with_hints(3, "norm", Init::Const(1.0))?);
        }
        Ok(model)
    }

    fn loss(&self, g: f64) -> Result<Tensor> {
        let mut loss = Tensor::zeros((), DType::F32, &candle_core::Device::Cpu)?;
        for (narrow, wide) in self.narrow.iter().zip(&self.wide) {
            let x = narrow.to_dtype(DType::F32)?.broadcast_mul(wide)?;
            loss = (loss + (x.sqr()?.sum_all()? * g)?)?;
        }
        Ok(loss)
    }
}

#[test]
fn islands_of_f32_train_beside_16_bit_parameters() {
    let run = |strategy, world_size, cap| {
        same_on_all(ranks(world_size, move |rank| {
            let store = ParamStore::new(rank.device());
            let model = Islands::new(&store.var_builder(DType::F16))?;
            let adamw = AdamW::with_lr(0.01);
            let mut trainer = AnyTrainer::new(strategy, store, &rank, adamw, caps(cap))?;
            let dtypes = trainer.layout().buckets().iter().map(|b| b.dtype);
            let expected = [DType::F16, DType::F32];
            assert!(dtypes.clone().all(|d| expected.contains(&d)));
            assert!(expected.iter().all(|d| dtypes.clone().any(|b| b == *d)));
            for step in 0..3 {
                trainer.backward(&model.loss(1.0 + (rank.rank() + step) as f64)?)?;
                trainer.step()?;
            }
            for t in &model.wide {
                let moved = widened(t).iter().all(|x| *x < 0.98);
                assert!(moved && t.dtype() == DType::F32);
            }
            trainer.store().sha256()
        }))
    };
    for world_size in [1, 2, 3, 4] {
        let expected = run(Sharding::Ddp, world_size, 1);
        for strategy in STRATEGIES {
            for cap in [1, 20, 1000] {
                let outcome = run(strategy, world_size, cap);
                assert_eq!(outcome, expected, "{strategy:?} {world_size} {cap}");
            }
        }
    }
}
