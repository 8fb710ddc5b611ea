//! DeepSpeed's configurations, read.

use candle_core::DType;
use dp_core::{
    AdamW, DynamicLossScale, GradAccumDType, LossScaling, LrSchedule, NonFinite, Optimizer,
    ParamStore, Result, Trainer, UnusedParameters, World,
};
use dp_zero::config::{ConfiguredOptimizer, parse_json, reference, set};
use dp_zero::{ConfigError, DeepSpeedConfig, Sharding};

fn read(text: &str) -> std::result::Result<DeepSpeedConfig, String> {
    DeepSpeedConfig::from_json(text).map_err(|e| e.to_string())
}

/// The error has all of `words`.
fn refused(text: &str, words: &[&str]) {
    let read = read(text);
    let says = |e: &String| words.iter().all(|w| e.contains(w));
    assert!(
        read.as_ref().is_err_and(says),
        "{text}: {read:?}, expected {words:?}"
    );
}

/// The kind of file that users bring: the usual keys of stage 2 and bf16, as in DeepSpeed's documentation.
#[test]
fn a_usual_file_is_read_whole() -> std::result::Result<(), ConfigError> {
    let config = DeepSpeedConfig::from_json(
        r#"{
            "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 2000,
            "gradient_clipping": 0.5, "wall_clock_breakdown": true, "prescale_gradients": false,
            "zero_allow_untested_optimizer": true, "dump_state": false,
            "bf16": {"enabled": true},
            "data_types": {"grad_accum_dtype": "bf16"},
            "communication_data_type": "fp32",
            "zero_optimization": {
                "stage": 2, "allgather_partitions": true, "allgather_bucket_size": 2e8, "overlap_comm": false,
                "reduce_scatter": true, "reduce_bucket_size": 2e8, "contiguous_gradients": true, "sub_group_size": 1e9,
                "offload_optimizer": {"device": "none"}, "stage3_max_live_parameters": 1e9, "ignore_unused_parameters": false
            },
            "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.1, "torch_adam": true}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 3e-5, "warmup_max_lr": 3e-4, "warmup_num_steps": 10, "total_num_steps": 100, "warmup_type": "linear"}},
            "flops_profiler": {"enabled": false}, "activation_checkpointing": {"partition_activations": false, "number_checkpoints": null}, "wandb": {"enabled": false, "project": "x"}
        }"#,
    )?;
    assert_eq!(config.sharding(), Sharding::Zero2);
    assert_eq!(config.dtype(), DType::BF16);
    let sizes = config.batch_sizes(4)?;
    assert_eq!(
        (
            sizes.micro_batch_size,
            sizes.accumulation_steps,
            sizes.divisor()
        ),
        (4, 4, 16)
    );
    let engine = config.engine_config()?;
    assert_eq!(engine.grad_accum_dtype, GradAccumDType::Parameter);
    assert_eq!(engine.communication_dtype, Some(DType::F32));
    assert_eq!(
        engine.bucket_caps.rest(),
        400_000_000,
        "2e8 elements of 2 bytes"
    );
    assert_eq!(engine.unused_parameters, UnusedParameters::Error);
    assert_eq!(engine.non_finite, NonFinite::SkipStep);
    assert!(!engine.overlap_comm);
    let ConfiguredOptimizer::AdamW(adamw) = config.optimizer()? else {
        panic!("another optimizer");
    };
    let expected = AdamW {
        lr: 3e-4,
        beta1: 0.8,
        beta2: 0.95,
        eps: 1e-7,
        weight_decay: 0.1,
    };
    assert_eq!(adamw, expected);
    let schedule = config.schedule(None)?;
    // One step later than PyTorch's: 0.1 + 0.9 / 2 after 6 steps.
    assert!((schedule.factor(6) - 0.55).abs() < 1e-12);
    assert_eq!(
        (config.gradient_clipping, config.steps_per_print),
        (0.5, 2000)
    );
    Ok(())
}

#[test]
fn defaults_are_deepspeeds() -> std::result::Result<(), ConfigError> {
    let config =
        DeepSpeedConfig::from_json(r#"{"train_batch_size": 8, "fp16": {"enabled": true}}"#)?;
    assert_eq!(config.sharding(), Sharding::Ddp);
    assert_eq!(config.gradient_clipping, 1.0);
    let expected = DynamicLossScale {
        init_scale: 65536.0,
        growth_interval: 1000,
        hysteresis: 2,
        min_scale: 1.0,
        ..DynamicLossScale::default()
    };
    assert_eq!(
        config.engine_config()?.loss_scaling,
        LossScaling::Dynamic(expected)
    );
    let optimizer = config.optimizer()?;
    assert_eq!(
        (optimizer.name(), optimizer.learning_rate()),
        ("adamw", 1e-3)
    );
    assert_eq!(config.schedule(Some(10))?, LrSchedule::Constant);
    Ok(())
}

#[test]
fn what_is_not_there_says_so() {
    for (text, key) in [
        (
            r#"{"zero_optimization": {"stage": 3}}"#,
            "zero_optimization.stage",
        ),
        (
            r#"{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}"#,
            "zero_optimization.offload_optimizer.device",
        ),
        (
            r#"{"zero_optimization": {"contiguous_gradients": false}}"#,
            "zero_optimization.contiguous_gradients",
        ),
        (r#"{"amp": {"enabled": true}}"#, "amp.enabled"),
        (r#"{"prescale_gradients": true}"#, "prescale_gradients"),
        (
            r#"{"gradient_predivide_factor": 2}"#,
            "gradient_predivide_factor",
        ),
        (r#"{"fp16": {"auto_cast": true}}"#, "fp16.auto_cast"),
        (r#"{"optimizer": {"type": "Lamb"}}"#, "optimizer.type"),
        (
            r#"{"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}}"#,
            "optimizer.params.adam_w_mode",
        ),
        (
            r#"{"scheduler": {"type": "OneCycle", "params": {}}}"#,
            "scheduler.type",
        ),
        (
            r#"{"activation_checkpointing": {"partition_activations": true}}"#,
            "activation_checkpointing",
        ),
    ] {
        let error = DeepSpeedConfig::from_json(text);
        let found = matches!(&error, Err(ConfigError::Unsupported { key: k, .. }) if k == key);
        assert!(found, "{text}: {error:?}");
    }
}

#[test]
fn contradictions_name_both_keys() {
    refused(
        r#"{"bf16": {"enabled": true}, "fp16": {"enabled": true}}"#,
        &["bf16.enabled", "fp16.enabled"],
    );
    refused(
        r#"{"zero_optimization": {"reduce_bucket_size": 10, "allgather_bucket_size": 5}}"#,
        &["reduce_bucket_size", "allgather_bucket_size"],
    );
    refused(
        r#"{"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp16"}}"#,
        &["data_types.grad_accum_dtype", "bf16.enabled"],
    );
    refused(
        r#"{"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4}}}"#,
        &["optimizer.params.lr", "scheduler.params.warmup_max_lr"],
    );
    refused(
        r#"{"fp16": {"enabled": true, "loss_scale": 128, "hysteresis": 3}}"#,
        &["fp16.loss_scale", "hysteresis"],
    );
    refused(
        r#"{"bfloat16": {"enabled": true}, "bf16": {"enabled": false}}"#,
        &["bfloat16", "bf16"],
    );
    let cosine = r#"{"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 50}}}"#;
    let config = DeepSpeedConfig::from_json(cosine).unwrap();
    let error = config.schedule(Some(40)).unwrap_err().to_string();
    assert!(
        error.contains("warmup_num_steps") && error.contains("steps of the run"),
        "{error}"
    );
    assert!(
        config
            .schedule(None)
            .unwrap_err()
            .to_string()
            .contains("total_num_steps")
    );
    assert!(config.schedule(Some(60)).is_ok());
}

#[test]
fn values_of_another_kind_are_named() {
    refused(
        r#"{"zero_optimization": {"stage": "two"}}"#,
        &["`zero_optimization.stage`"],
    );
    refused(
        r#"{"zero_optimization": {"stage": 4}}"#,
        &["`zero_optimization.stage`", "4"],
    );
    refused(
        r#"{"zero_optimization": {"reduce_bucket_size": 0}}"#,
        &["reduce_bucket_size"],
    );
    refused(
        r#"{"zero_optimization": {"reduce_bucket_size": 1.5}}"#,
        &["reduce_bucket_size", "whole"],
    );
    refused(
        r#"{"zero_optimization": {"reduce_bucket_size": -1}}"#,
        &["reduce_bucket_size"],
    );
    refused(
        r#"{"train_batch_size": "auto"}"#,
        &["`train_batch_size`", "auto"],
    );
    refused(
        r#"{"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}"#,
        &["optimizer.params.lr", "auto"],
    );
    refused(
        r#"{"optimizer": {"type": "AdamW", "params": {"lr": -1}}}"#,
        &["optimizer.params", "lr"],
    );
    refused(
        r#"{"optimizer": {"type": "Adamm"}}"#,
        &["optimizer.type", "Adamm", "AdamW"],
    );
    refused(r#"{"optimizer": {"params": {}}}"#, &["optimizer.type"]);
    refused(
        r#"{"communication_data_type": "fp64"}"#,
        &["communication_data_type"],
    );
    refused(r#"{"gradient_clipping": -1}"#, &["gradient_clipping"]);
    refused(r#"{"steps_per_print": 0}"#, &["steps_per_print"]);
    refused(
        r#"{"fp16": {"enabled": true, "hysteresis": 0}}"#,
        &["fp16", "hysteresis"],
    );
    refused(
        r#"{"train_batch_size": 8, "train_batch_size": 16}"#,
        &["train_batch_size", "twice"],
    );
    refused("[1]", &["object"]);
    refused("{", &["JSON"]);
    refused(
        r#"{"zero_optimization": true}"#,
        &["zero_optimization", "stage"],
    );
}

#[test]
fn an_override_counts_like_the_file() -> std::result::Result<(), ConfigError> {
    let mut value = parse_json(r#"{"train_batch_size": 8}"#)?;
    set(&mut value, "zero_optimization.stage", "1")?;
    set(&mut value, "optimizer.type", "SGD")?;
    set(&mut value, "optimizer.params.momentum", "0.9")?;
    let config = DeepSpeedConfig::from_value(value.clone(), &[])?;
    assert_eq!(config.sharding(), Sharding::Zero1);
    assert_eq!(config.optimizer()?.state_names(), ["momentum_buffer"]);
    set(&mut value, "zero_optimization.stagee", "1")?;
    assert!(DeepSpeedConfig::from_value(value, &[]).is_err());
    Ok(())
}

/// The configuration's trainer computes what one made by hand computes.
#[test]
fn the_trainer_is_the_one_that_is_described() -> Result<()> {
    use candle_core::{Device, Tensor};
    let config = DeepSpeedConfig::from_json(
        r#"{"zero_optimization": {"stage": 2, "reduce_bucket_size": 3, "overlap_comm": false},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_num_steps": 4}}}"#,
    )
    .expect("a configuration");
    let run = |configured: bool| -> Result<String> {
        let digests = World::threads(2)?.map(|rank| {
            let store = ParamStore::new(rank.device()).with_seed(3);
            let model = candle_nn::linear(3, 2, store.var_builder(DType::F32))?;
            let x = Tensor::full(rank.rank() as f32 + 1.0, (4, 3), &Device::Cpu)?;
            let train = |trainer: &mut dyn FnMut(&Tensor) -> Result<()>| -> Result<()> {
                for _ in 0..6 {
                    let loss = candle_nn::Module::forward(&model, &x)?.sqr()?.mean_all()?;
                    trainer(&loss)?;
                }
                Ok(())
            };
            if configured {
                let mut t = config.trainer(store, rank.comm(), None)?;
                assert_eq!(t.strategy_name(), "zero2");
                assert_eq!(t.layout().buckets().len(), 2, "3 elements a bucket");
                train(&mut |loss| {
                    t.backward(loss)?;
                    t.step().map(drop)
                })?;
                t.store().sha256()
            } else {
                let adamw = AdamW {
                    weight_decay: 0.1,
                    ..AdamW::with_lr(0.01)
                };
                let mut t = dp_core::DistributedDataParallel::new(store, rank.comm(), adamw)?;
                for lr in [0.001, 0.001, 0.0055, 0.0, 0.01, 0.01] {
                    // 0.001 + 0.009 ln 3 / ln 4 for the fourth.
                    let lr = if lr == 0.0 {
                        0.001 + 0.009 * 3f64.ln() / 4f64.ln()
                    } else {
                        lr
                    };
                    t.set_learning_rate(lr);
                    let loss = candle_nn::Module::forward(&model, &x)?.sqr()?.mean_all()?;
                    t.backward(&loss)?;
                    t.step()?;
                }
                t.store().sha256()
            }
        })?;
        Ok(digests[0].clone())
    };
    assert_eq!(run(true)?, run(false)?);
    Ok(())
}

#[test]
fn the_reference_has_every_key_with_its_meaning() {
    let page = reference();
    for words in [
        "| `train_batch_size` | whole number | left out | Samples of one optimizer step",
        "## `zero_optimization`",
        "| `stage` | whole number | `0` | What is sharded",
        "| `initial_scale_power` | whole number | `16` |",
        "with `\"type\": \"WarmupCosineLR\"`",
        "| `betas` | list | `[0.9,0.999]` |",
        "| `communication_data_type` | `\"fp32\"`, `\"fp16\"`, `\"bf16\"` | left out |",
        "| `zero_optimization.contiguous_gradients` | `true` |",
    ] {
        assert!(page.contains(words), "{words} is not in\n{page}");
    }
    assert!(
        !page.contains("|  |"),
        "a description or type is missing in\n{page}"
    );
}
