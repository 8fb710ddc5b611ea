//! What is said of a DeepSpeed configuration that cannot be, word for word, and what is no error.

use dp_zero::{ConfigError, DeepSpeedConfig};
use serde_json::{Value, json};

fn read(config: Value) -> Result<DeepSpeedConfig, String> {
    DeepSpeedConfig::from_value(config, &[]).map_err(|e| e.to_string())
}

/// The configuration is refused with exactly this message.
fn says(config: Value, message: &str) {
    let read = read(config.clone());
    assert_eq!(read, Err(message.to_string()), "{config}");
}

fn is_fine(config: Value) {
    let read = read(config.clone());
    assert!(read.is_ok(), "{config}: {read:?}");
}

fn optimizer(params: Value) -> Value {
    json!({"optimizer": {"type": "AdamW", "params": params}})
}

/// The nearest key, exactly.
#[test]
fn the_nearest_key_is_named() {
    for (config, key, expected) in [
        (
            json!({"zero_optimisation": {"stage": 1}}),
            "zero_optimisation",
            "zero_optimization",
        ),
        (
            json!({"zero_optimization": {"stag": 1}}),
            "zero_optimization.stag",
            "zero_optimization.stage",
        ),
        (json!({"stage": 1}), "stage", "zero_optimization.stage"),
        (json!({"lr": 1}), "lr", "optimizer.params.lr"),
        (
            json!({"zero_optimization": {"ofload_optimizer": null}}),
            "zero_optimization.ofload_optimizer",
            "zero_optimization.offload_optimizer",
        ),
        (
            json!({"fp16": {"enabled": true, "init_scale_power": 4}}),
            "fp16.init_scale_power",
            "fp16.initial_scale_power",
        ),
        (
            optimizer(json!({"weight_decoy": 0})),
            "optimizer.params.weight_decoy",
            "optimizer.params.weight_decay",
        ),
    ] {
        let error = DeepSpeedConfig::from_value(config, &[]);
        let Err(ConfigError::UnknownKey { key: k, nearest }) = &error else {
            panic!("{key}: {error:?}");
        };
        assert_eq!((k.as_str(), nearest.as_str()), (key, expected));
    }
}

#[test]
fn without_a_near_key_the_known_ones_are_listed() {
    says(
        optimizer(json!({"learning_rate": 1})),
        "`optimizer.params.learning_rate` is no known key; the keys there are `betas`, `eps`, `lr`, `weight_decay`",
    );
    says(
        json!({"data_types": {"": 1}}),
        "`data_types.` is no known key; the keys there are `grad_accum_dtype`",
    );
    let error = DeepSpeedConfig::from_value(json!({"seed": 1}), &[]);
    let is_listed = matches!(&error, Err(ConfigError::NoSuchKey { key, known })
        if key == "seed" && known.contains(&"train_batch_size".to_string()));
    assert!(is_listed, "{error:?}");
    // A program's own keys are known, too.
    let own = ["run".to_string(), "run.seed".to_string()];
    let error = DeepSpeedConfig::from_value(json!({"seed": 1}), &own).map_err(|e| e.to_string());
    let expected = "`seed` is no known key; did you mean `run.seed`?";
    assert_eq!(error, Err(expected.to_string()));
}

#[test]
fn a_key_of_another_type_says_whose_it_is() {
    says(
        optimizer(json!({"momentum": 0.9})),
        "`optimizer.params.momentum` is a key of SGD, not of AdamW, which has `betas`, `eps`, `lr`, `weight_decay`",
    );
    says(
        json!({"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.9]}}}),
        "`optimizer.params.betas` is a key of AdamW, not of SGD, which has `dampening`, `lr`, `momentum`, `nesterov`, `weight_decay`",
    );
    says(
        json!({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 5}}}),
        "`scheduler.params.total_num_steps` is a key of WarmupDecayLR, WarmupCosineLR, not of WarmupLR, which has `warmup_max_lr`, `warmup_min_lr`, `warmup_num_steps`, `warmup_type`",
    );
}

#[test]
fn a_value_of_another_kind_is_named_with_its_whole_path() {
    let scheduler = |params: Value| json!({"scheduler": {"type": "WarmupLR", "params": params}});
    for (config, message) in [
        (
            optimizer(json!({"betas": [0.9]})),
            "`optimizer.params.betas`: must be a list of 2 numbers, got [0.9]",
        ),
        (
            optimizer(json!({"betas": [0.9, "x"]})),
            "`optimizer.params.betas`: must be a list of 2 numbers, got [0.9,\"x\"]",
        ),
        (
            optimizer(json!({"lr": "1e-3"})),
            "`optimizer.params.lr`: must be a number, got \"1e-3\"",
        ),
        (
            scheduler(json!({"warmup_type": "exp"})),
            "`scheduler.params.warmup_type`: must be one of \"log\", \"linear\", got \"exp\"",
        ),
        (
            scheduler(json!({"warmup_num_steps": 1.5})),
            "`scheduler.params.warmup_num_steps`: must be a whole number from 0 on, got 1.5",
        ),
        (
            json!({"fp16": {"initial_scale_power": true}}),
            "`fp16.initial_scale_power`: must be a whole number, got true",
        ),
        (
            json!({"fp16": {"enabled": 1}}),
            "`fp16.enabled`: must be true or false, got 1",
        ),
        (
            json!({"tensorboard": {"job_name": 1}}),
            "`tensorboard.job_name`: must be a text, got 1",
        ),
        (
            json!({"communication_data_type": "fp64"}),
            "`communication_data_type`: must be one of \"fp32\", \"fp16\", \"bf16\", got \"fp64\"",
        ),
    ] {
        says(config, message);
    }
}

/// Serde reads a struct from an array by position.
#[test]
fn a_list_is_no_section() {
    for (config, message) in [
        (
            json!({"zero_optimization": [1, 10]}),
            "`zero_optimization`: must be a section, { ... }, got [1,10]",
        ),
        (
            json!({"bf16": [true]}),
            "`bf16`: must be a section, { ... }, got [true]",
        ),
        (
            json!({"optimizer": ["AdamW"]}),
            "`optimizer`: must be a section, { ... }, got [\"AdamW\"]",
        ),
        (
            optimizer(json!([])),
            "`optimizer.params`: must be a section, { ... }, got []",
        ),
    ] {
        says(config, message);
    }
}

#[test]
fn sections_that_ask_for_what_is_not_there_are_refused() {
    let [amp, offload] = [
        "use bf16.enabled or fp16.enabled",
        "states stay in the memory of their rank; offloading is not there",
    ];
    for (config, key, reason) in [
        (json!({"amp": true}), "`amp` is true", amp),
        (
            json!({"amp": {"enabled": "true"}}),
            "`amp.enabled` is \"true\"",
            amp,
        ),
        (json!({"amp": {"enabled": 1}}), "`amp.enabled` is 1", amp),
        (
            json!({"autotuning": [1]}),
            "`autotuning` is [1]",
            "the program plan predicts memory and traffic instead",
        ),
        (
            json!({"amp": {"device": "none", "enabled": true}}),
            "`amp.enabled` is true",
            amp,
        ),
        (
            json!({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
            "`zero_optimization.offload_optimizer.device` is \"cpu\"",
            offload,
        ),
        (
            json!({"zero_optimization": {"offload_param": true}}),
            "`zero_optimization.offload_param` is true",
            offload,
        ),
        (
            json!({"compile": {"deepcompile": true}}),
            "`compile` is on",
            "there is nothing to compile",
        ),
        (
            json!({"compression_training": {"layer_reduction": {"enabled": true}}}),
            "`compression_training` is on",
            "models are trained uncompressed",
        ),
        (
            json!({"sequence_parallel_size": 2}),
            "`sequence_parallel_size` is 2",
            "ranks share data, not sequences",
        ),
        (
            json!({"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": 3}}}),
            "`scheduler.params.last_batch_iteration` is 3",
            "a checkpoint says where a run goes on",
        ),
    ] {
        says(config, &format!("{key}: {reason}"));
    }
    let wandb = read(json!({"wandb": "yes"}));
    assert!(wandb.is_err_and(|e| e.starts_with("`wandb` is \"yes\"")));
}

#[test]
fn what_is_switched_off_is_not_asked_for() {
    for config in [
        json!({"amp": {"enabled": false, "opt_level": "O1"}, "wandb": {"project": "x"}, "autotuning": {"enabled": null}}),
        json!({"comet": false, "torch_autocast": null}),
        json!({"fp16": {"enabled": false, "loss_scale": 128, "loss_scale_window": 500}}),
        json!({"compression_training": {
            "weight_quantization": {"shared_parameters": {"enabled": false, "schedule_offset": 10}, "different_groups": {"a": {"params": {"start_bits": 8}}}},
            "layer_reduction": {"enabled": false, "keep_number_layer": 5}
        }}),
        json!({"zero_optimization": {"elastic_checkpoint": true, "round_robin_gradients": true, "offload_param": {"device": "none", "pin_memory": true}}}),
        optimizer(
            json!({"adam_w_mode": null, "amsgrad": null, "max_grad_norm": 0.0, "torch_adam": true}),
        ),
        json!({"scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": -1}}}),
    ] {
        is_fine(config);
    }
}

/// DeepSpeed reads whole numbers with a point or an exponent, too.
#[test]
fn integral_floats_are_whole_numbers() -> Result<(), String> {
    let config = read(json!({
        "train_batch_size": 8.0, "steps_per_print": 1e1,
        "fp16": {"enabled": true, "initial_scale_power": 12.0, "loss_scale_window": 5e2},
        "zero_optimization": {"stage": 1.0, "reduce_bucket_size": 5e8}
    }))?;
    assert_eq!(
        (config.train_batch_size, config.steps_per_print),
        (Some(8), 10)
    );
    assert_eq!(
        (
            config.fp16.initial_scale_power,
            config.fp16.loss_scale_window
        ),
        (12, 500)
    );
    let zero = config.zero_optimization;
    assert_eq!(
        (zero.stage, zero.reduce_bucket_size),
        (1, Some(500_000_000))
    );
    // No detour through a float: 2^53 + 1 is not one.
    let exact = read(json!({"train_batch_size": 9_007_199_254_740_993_u64}))?;
    assert_eq!(exact.train_batch_size, Some(9_007_199_254_740_993));
    Ok(())
}

#[test]
fn other_names_of_dtypes_are_known() -> Result<(), String> {
    let config = |dtype: &str| json!({"fp16": {"enabled": true}, "data_types": {"grad_accum_dtype": dtype}, "communication_data_type": dtype});
    let expected = read(config("fp16"))?;
    for dtype in ["float16", "half", "torch.float16", "FP16"] {
        assert_eq!(read(config(dtype))?, expected, "{dtype}");
    }
    Ok(())
}

/// Keys of DeepSpeed 0.19.8 (`runtime/config.py`, `constants.py`, `precision_config.py`, `zero/config.py`, `lr_schedules.py`),
/// and those that it has removed of late. Null is what is not there, at any depth; an unknown key is unknown with null, too.
#[test]
fn no_key_of_deepspeeds_is_unknown() {
    const KEYS: [(&str, &str); 6] = [
        (
            "",
            "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation steps_per_print dump_state \
             disable_python_gc disable_allgather communication_data_type seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor \
             gradient_allreduce_op zero_optimization activation_checkpointing comms_logger tensorboard wandb csv_monitor comet gradient_clipping fp16 bf16 \
             bfloat16 torch_autocast optimizer scheduler zero_allow_untested_optimizer zero_force_ds_cpu_optimizer flops_profiler wall_clock_breakdown \
             memory_breakdown autotuning use_data_before_expert_parallelism hybrid_engine pipeline data_efficiency checkpoint data_types aio \
             dataloader_drop_last log_level datastates_ckpt weight_quantization compile timers tensor_parallel expert_parallel vocabulary_size \
             sequence_parallel_size load_universal_checkpoint nebula compression_training amp quantize_training sparse_gradients eigenvalue \
             sparse_attention elasticity graph_harvesting curriculum_learning progressive_layer_drop",
        ),
        (
            "zero_optimization",
            "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size \
             overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size \
             cpu_offload_param cpu_offload_use_pin_memory cpu_offload prefetch_bucket_size stage3_prefetch_bucket_size param_persistence_threshold \
             stage3_param_persistence_threshold model_persistence_threshold stage3_model_persistence_threshold max_live_parameters \
             stage3_max_live_parameters max_reuse_distance stage3_max_reuse_distance gather_16bit_weights_on_model_save \
             stage3_gather_16bit_weights_on_model_save module_granularity_threshold stage3_module_granularity_threshold use_all_reduce_for_fetch_params \
             stage3_use_all_reduce_for_fetch_params allgather_sequential stage3_allgather_sequential stage3_gather_fp16_weights_on_model_save \
             ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment zero_hpz_partition_size zero_quantized_weights \
             zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply \
             log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module mics_shard_size \
             mics_hierarchical_params_gather zeropp_loco_param",
        ),
        (
            "fp16",
            "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads",
        ),
        (
            "bf16",
            "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
        ),
        (
            "data_types",
            "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
        ),
        ("tensorboard", "enabled output_path job_name"),
    ];
    for (section, keys) in KEYS {
        for key in keys.split_whitespace() {
            is_fine(match section {
                "" => json!({ key: null }),
                section => json!({ section: {key: null} }),
            });
        }
    }
    for key in "lr betas eps weight_decay torch_adam adam_w_mode bias_correction amsgrad set_grad_none fp32_optimizer_states max_grad_norm foreach maximize capturable differentiable fused".split(' ') {
        is_fine(optimizer(json!({ key: null })));
    }
    is_fine(json!({"optimizer": {"type": "AdamW", "params": null, "legacy_fusion": true}}));
    let common = ["warmup_num_steps", "warmup_type", "last_batch_iteration"];
    let rates = ["warmup_min_lr", "warmup_max_lr"];
    for (name, own) in [
        ("WarmupLR", &rates[..]),
        (
            "WarmupDecayLR",
            &["warmup_min_lr", "warmup_max_lr", "total_num_steps"],
        ),
        (
            "WarmupCosineLR",
            &["total_num_steps", "warmup_min_ratio", "cos_min_ratio"],
        ),
    ] {
        for key in common.iter().chain(own) {
            is_fine(json!({"scheduler": {"type": name, "params": {*key: null}}}));
        }
    }
    assert!(read(json!({"zero_optimisation": null})).is_err());
    assert!(read(json!({"fp16": {"enable": null}})).is_err());
}
