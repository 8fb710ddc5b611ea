//! What the public types promise to the compiler, and the conversions between them.

use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use candle_nn::Module;
use dp_core::checkpoint::{Checkpoint, PendingSave};
use dp_core::comm::{Collective, Pending, Request, Traffic};
use dp_core::memory::Reservation;
use dp_core::{
    AdamW, BucketLayout, Buffer, Communicator, DdpConfig, DistributedDataParallel,
    DistributedSampler, EngineConfig, Error, GradNorm, Ledger, NonFinite, Param, ParamGroups,
    ParamShapes, ParamStore, Rank, ReduceOp, Sgd, StepReport, Timeline, Trainer, VarMapSync, World,
    WorldError,
};
use dp_models::{CausalLm, Gpt, GptConfig, Llama, LlamaConfig, Mlp};
use dp_zero::{
    ConfigError, DeepSpeedConfig, Sharding, TrainerPlan, ZeroConfig, ZeroOptimizer, ZeroStage,
};

use crate::support::{ones, ranks, values};

fn send<T: Send + Debug>() {}
fn send_sync<T: Send + Sync + Debug>() {}
fn clone<T: Clone + Send + Sync + Debug>() {}
fn value<T: Copy + Eq + Hash + Send + Sync + Debug>() {}
fn error<T: std::error::Error + Send + Sync + 'static>() {}

/// Trainers are made on a rank's thread, but may move to another one; handles of collectives, too. Settings, reports and models
/// are cloned, small choices are copied, compared and put into sets.
#[test]
fn auto_and_common_traits() {
    send_sync::<DistributedDataParallel<AdamW>>();
    send_sync::<ZeroOptimizer<Sgd>>();
    send_sync::<ParamStore>();
    send_sync::<Arc<dyn Communicator>>();
    send_sync::<Buffer>();
    send_sync::<Reservation>();
    send_sync::<VarMapSync>();
    send_sync::<Timeline>();
    send::<Pending>();
    send::<PendingSave>();

    clone::<World>();
    clone::<Rank>();
    clone::<Param>();
    clone::<ParamShapes>();
    clone::<BucketLayout>();
    clone::<Ledger>();
    clone::<DistributedSampler>();
    clone::<ParamGroups<AdamW>>();
    clone::<StepReport>();
    clone::<Traffic>();
    clone::<Checkpoint>();
    clone::<EngineConfig>();
    clone::<DeepSpeedConfig>();
    clone::<TrainerPlan>();
    clone::<Gpt>();
    clone::<Llama>();
    clone::<Mlp>();

    value::<ReduceOp>();
    value::<Collective>();
    value::<Sharding>();
    value::<ZeroStage>();
    value::<GradNorm>();
    value::<NonFinite>();
    fn hashed<T: Clone + Eq + Hash>() {}
    hashed::<Request>();

    error::<Error>();
    error::<WorldError>();
    error::<ConfigError>();
}

/// The traits that stand behind `Box<dyn ...>`.
#[test]
fn dyn_compatible() {
    fn trainer(_: &mut dyn Trainer<Optimizer = AdamW>) {}
    fn model(_: &dyn CausalLm) {}
    fn comm(_: &dyn Communicator) {}
    let _ = (trainer as fn(_), model as fn(_), comm as fn(_));
}

#[test]
fn a_sharding_is_written_and_read_by_name() {
    for sharding in Sharding::ALL {
        assert_eq!(sharding.to_string(), sharding.name());
        assert_eq!(sharding.name().parse::<Sharding>().ok(), Some(sharding));
    }
    assert_eq!(format!("{:>6}|", Sharding::Ddp), "   ddp|");
    let error = "zero9".parse::<Sharding>().map_err(|e| e.to_string());
    let error = error.expect_err("there is no such stage");
    assert!(
        error.contains("\"zero9\"") && error.contains("zero2"),
        "{error}"
    );
}

/// A stage alone, and settings alone, are configurations.
#[test]
fn configurations_are_made_of_their_parts() {
    assert_eq!(ZeroConfig::from(ZeroStage::Two).stage, ZeroStage::Two);
    let mut engine = EngineConfig::default();
    engine.non_finite = NonFinite::SkipStep;
    assert_eq!(
        DdpConfig::from(engine.clone()).engine.non_finite,
        NonFinite::SkipStep
    );
    let config = ZeroConfig::from(ZeroStage::One).with_engine(engine);
    assert_eq!(
        (config.stage, config.engine.non_finite),
        (ZeroStage::One, NonFinite::SkipStep)
    );

    // And the trainers take them: a NaN is skipped, which the default would have kept.
    let weights = ranks(2, |rank| {
        let mut engine = EngineConfig::default();
        engine.non_finite = NonFinite::SkipStep;
        let store = ParamStore::new(rank.device());
        let w = ones(&store, (), "w")?;
        let mut trainer =
            DistributedDataParallel::with_config(store, rank.comm(), Sgd::new(0.25), engine)?;
        assert!(trainer.backward_step(&(&w * f64::NAN)?)?.skipped.is_some());
        w.to_scalar::<f32>().map_err(Into::into)
    });
    assert_eq!(weights, [1.0; 2]);
}

/// candle_nn's loop has `optimizer.backward_step(&loss)?`, and this is the same line.
#[test]
fn backward_step_is_backward_and_step() {
    let run = |together: bool| {
        ranks(3, move |rank| {
            let store = ParamStore::new(rank.device()).with_seed(3);
            let model = candle_nn::linear(4, 2, store.var_builder(DType::F32))?;
            let mut trainer =
                ZeroOptimizer::new(store, rank.comm(), AdamW::default(), ZeroStage::Two)?;
            for step in 0..3 {
                let x = Tensor::full((rank.rank() + step) as f32, (2, 4), rank.device())?;
                let loss = model.forward(&x)?.sqr()?.mean_all()?;
                let report = if together {
                    trainer.backward_step(&loss)?
                } else {
                    trainer.backward(&loss)?;
                    trainer.step()?
                };
                assert_eq!(report.step, step as u64 + 1);
            }
            Ok(values(model.weight()))
        })
    };
    assert_eq!(run(true), run(false));
}

/// A clone of a model is another handle on the same parameters, as with all of Candle's layers.
#[test]
fn clones_of_models_share_their_parameters() -> candle_core::Result<()> {
    let store = ParamStore::new(&candle_core::Device::Cpu);
    let vb = store.var_builder(DType::F32);
    let gpt = Gpt::new(
        &GptConfig {
            context: 8,
            ..GptConfig::mini()
        },
        vb.pp("gpt"),
    )?;
    let llama = Llama::new(
        &LlamaConfig {
            context: 8,
            ..LlamaConfig::mini()
        },
        vb.pp("llama"),
    )?;
    let made = store.params().len();
    let tokens = Tensor::new(&[[1u32, 2, 3]], store.device())?;
    let clones: [Box<dyn CausalLm>; 2] = [Box::new(gpt.clone()), Box::new(llama.clone())];
    let before = [gpt.forward(&tokens)?, llama.forward(&tokens)?];
    for (clone, before) in clones.iter().zip(&before) {
        assert_eq!(values(&clone.forward(&tokens)?), values(before));
    }
    assert_eq!(store.params().len(), made);
    // What changes in one changes in the other.
    for param in store.params() {
        param.write(0..1, &[7.0]).expect("it is there");
    }
    let after = [gpt.forward(&tokens)?, llama.forward(&tokens)?];
    for ((clone, before), after) in clones.iter().zip(&before).zip(&after) {
        assert_ne!(values(after), values(before));
        assert_eq!(values(&clone.forward(&tokens)?), values(after));
    }
    Ok(())
}
