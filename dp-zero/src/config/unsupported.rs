//! Keys that DeepSpeed has and that do nothing here: allowed where they say what happens anyway.

use serde_json::{Value, json};

use super::ConfigError;
use super::expected::shown;
use super::schema::join;

/// What a key of DeepSpeed's may say.
enum Allowed {
    /// This value only, which is DeepSpeed's default or what is done here in any case.
    Only(Value),
    /// A section which is switched off: its `enabled` is false or not there, or it is false itself.
    Disabled,
    /// A section whose `device` is `none` or not there.
    NoDevice,
    /// Anything: it has no meaning for this engine.
    Anything,
    /// A section in which all is off.
    Never,
}

impl Allowed {
    fn allows(&self, value: &Value) -> bool {
        let is_without = |key: &str, off: Value| {
            let section = value.as_object();
            section.is_some_and(|s| s.get(key).is_none_or(|v| v.is_null() || *v == off))
        };
        // As in Python, null is what is not there.
        value.is_null()
            || match self {
                Self::Anything => true,
                Self::Never => is_all_off(value),
                Self::Only(only) => are_equal(value, only),
                Self::Disabled => *value == false || is_without("enabled", json!(false)),
                Self::NoDevice => is_without("device", json!("none")),
            }
    }

    /// The key of the section that switches it on.
    fn switch(&self) -> Option<&'static str> {
        match self {
            Self::Disabled => Some("enabled"),
            Self::NoDevice => Some("device"),
            _ => None,
        }
    }
}

/// The key, what it may say, and why it may not say more.
#[rustfmt::skip] // A row a line.
fn known() -> Vec<(&'static str, Allowed, &'static str)> {
    use Allowed::{Anything, Disabled, Never, NoDevice, Only};
    let no = || Only(json!(false));
    let yes = || Only(json!(true));
    let null = || Only(Value::Null);
    let offload = "states stay in the memory of their rank; offloading is not there";
    let stage3 = "belongs to stage 3, which has no trainer here";
    let quantized =
        "quantised communication is not there; communication_data_type halves the traffic";
    let measured = "is not measured here; the step report and the timeline say where time goes";
    vec![
        // Always so.
        ("zero_optimization.contiguous_gradients", yes(), "gradients are always copied into flat buckets"),
        ("zero_optimization.reduce_scatter", yes(), "stages 1 and 2 always reduce by reduce-scatter"),
        ("zero_optimization.allgather_partitions", yes(), "updated parameters are always gathered by all-gather"),
        ("zero_optimization.compute_grad_norm", Anything, ""),
        ("zero_optimization.use_multi_rank_bucket_allreduce", yes(), "buckets always span all ranks"),
        ("zero_optimization.load_from_fp32_weights", yes(), "masters are always loaded from f32"),
        ("zero_optimization.round_robin_gradients", Anything, "a slice of every bucket belongs to every rank"),
        ("zero_optimization.parameter_alignment", no(), "parameters follow one another in a bucket"),
        ("zero_optimization.legacy_stage1", no(), "there is one stage 1"),
        ("zero_optimization.elastic_checkpoint", Anything, "any checkpoint loads on any number of ranks, without a setting"),
        // Not there.
        ("zero_optimization.offload_param", NoDevice, offload),
        ("zero_optimization.offload_optimizer", NoDevice, offload),
        ("zero_optimization.cpu_offload", Only(json!(false)), offload),
        ("zero_optimization.cpu_offload_param", Only(json!(false)), offload),
        ("zero_optimization.cpu_offload_use_pin_memory", Only(json!(false)), offload),
        ("zero_optimization.zenflow", null(), "ZenFlow is not there"),
        ("zero_optimization.zero_hpz_partition_size", Only(json!(1)), stage3),
        ("zero_optimization.zero_quantized_weights", no(), quantized),
        ("zero_optimization.zero_quantized_nontrainable_weights", no(), quantized),
        ("zero_optimization.zero_quantized_gradients", no(), quantized),
        ("zero_optimization.zeropp_loco_param", null(), quantized),
        ("zero_optimization.mics_shard_size", Only(json!(-1)), stage3),
        ("zero_optimization.mics_hierarchical_params_gather", no(), stage3),
        ("zero_optimization.sub_group_size", Anything, ""),
        ("zero_optimization.memory_efficient_linear", Anything, ""),
        ("zero_optimization.override_module_apply", Anything, ""),
        ("zero_optimization.pipeline_loading_checkpoint", no(), stage3),
        ("zero_optimization.log_trace_cache_warnings", Anything, ""),
        ("zero_optimization.enable_sanity_checks", Anything, ""),
        ("zero_optimization.leaf_module", null(), stage3),
        ("zero_optimization.save_muon_momentum_buffer_in_memory", no(), "there is no Muon"),
        // Sizes that only stage 3 reads.
        ("zero_optimization.stage3_prefetch_bucket_size", Anything, ""),
        ("zero_optimization.stage3_param_persistence_threshold", Anything, ""),
        ("zero_optimization.stage3_model_persistence_threshold", Anything, ""),
        ("zero_optimization.stage3_max_live_parameters", Anything, ""),
        ("zero_optimization.stage3_max_reuse_distance", Anything, ""),
        ("zero_optimization.stage3_module_granularity_threshold", Anything, ""),
        ("zero_optimization.stage3_gather_16bit_weights_on_model_save", Anything, ""),
        ("zero_optimization.stage3_gather_fp16_weights_on_model_save", Anything, ""),
        ("zero_optimization.stage3_use_all_reduce_for_fetch_params", Anything, ""),
        ("zero_optimization.stage3_allgather_sequential", Anything, ""),
        // The same without the prefix, as DeepSpeed's fields are called.
        ("zero_optimization.prefetch_bucket_size", Anything, ""),
        ("zero_optimization.param_persistence_threshold", Anything, ""),
        ("zero_optimization.model_persistence_threshold", Anything, ""),
        ("zero_optimization.max_live_parameters", Anything, ""),
        ("zero_optimization.max_reuse_distance", Anything, ""),
        ("zero_optimization.module_granularity_threshold", Anything, ""),
        ("zero_optimization.gather_16bit_weights_on_model_save", Anything, ""),
        ("zero_optimization.use_all_reduce_for_fetch_params", Anything, ""),
        ("zero_optimization.allgather_sequential", Anything, ""),
        ("fp16.auto_cast", no(), "inputs have the dtype that the program gives them"),
        ("fp16.fp16_master_weights_and_grads", no(), "masters are f32; data_types.grad_accum_dtype sets the gradients' dtype"),
        ("bf16.immediate_grad_update", Anything, ""),
        ("bf16.bf16_master_weights_and_grads", no(), "masters are f32; data_types.grad_accum_dtype sets the gradients' dtype"),
        ("bf16.bf16_optimizer_states", no(), "optimizer state is f32"),
        ("data_types.param_dtype", null(), "bf16.enabled and fp16.enabled set it"),
        ("data_types.buffer_dtype", null(), "buffers have the dtype that the model gives them"),
        ("data_types.keep_in_fp32_modules", Never, "a model chooses it: vb.set_dtype(DType::F32)"),
        ("amp", Disabled, "use bf16.enabled or fp16.enabled"),
        ("torch_autocast", Disabled, "use bf16.enabled or fp16.enabled"),
        ("prescale_gradients", no(), "sums are divided in the accumulator, which does not overflow in f32"),
        ("gradient_predivide_factor", Only(json!(1.0)), "sums are divided in the accumulator, which does not overflow in f32"),
        ("gradient_allreduce_op", Only(json!("mean")), "gradients are means over the ranks"),
        ("sparse_gradients", no(), "gradients are dense"),
        ("disable_allgather", no(), "updated parameters are always gathered by all-gather"),
        ("managed_gradient_accumulation", yes(), "the configuration says how many micro-batches make a step"),
        ("seq_parallel_communication_data_type", Anything, ""),
        ("dump_state", no(), measured),
        ("memory_breakdown", no(), measured),
        ("flops_profiler", Disabled, measured),
        ("comms_logger", Disabled, measured),
        ("csv_monitor", Disabled, "use the JSON lines of train-gpt's metrics file"),
        ("wandb", Disabled, "use tensorboard, or the JSON lines of train-gpt's metrics file"),
        ("comet", Disabled, "use tensorboard, or the JSON lines of train-gpt's metrics file"),
        ("zero_allow_untested_optimizer", Anything, ""),
        ("zero_force_ds_cpu_optimizer", Anything, ""),
        ("disable_python_gc", Anything, ""),
        ("dataloader_drop_last", Anything, ""),
        ("log_level", Anything, ""),
        ("timers", Anything, ""),
        ("optimizer.legacy_fusion", Anything, ""),
        ("scheduler.params.last_batch_iteration", Only(json!(-1)), "a checkpoint says where a run goes on"),
        ("load_universal_checkpoint", Anything, "any checkpoint loads on any number of ranks, without a setting"),
        ("use_data_before_expert_parallelism", no(), "there are no experts"),
        ("expert_parallel", Disabled, "there are no experts"),
        ("sequence_parallel_size", Only(json!(1)), "ranks share data, not sequences"),
        ("graph_harvesting", no(), "there are no CUDA graphs"),
        ("weight_quantization", Never, "models are trained unquantised"),
        ("datastates_ckpt", no(), "checkpoints are written by the trainer"),
        ("checkpoint", Anything, ""),
        ("vocabulary_size", Anything, ""),
        ("activation_checkpointing", Never, "activations are kept; there is no recomputation"),
        ("sparse_attention", Never, "attention is dense"),
        ("elasticity", Disabled, "a run goes on with any number of ranks from its checkpoint, without a setting"),
        ("autotuning", Disabled, "the program plan predicts memory and traffic instead"),
        ("data_efficiency", Disabled, "data is drawn by the program's sampler"),
        ("curriculum_learning", Disabled, "data is drawn by the program's sampler"),
        ("compression_training", Never, "models are trained uncompressed"),
        ("progressive_layer_drop", Disabled, "all layers are trained"),
        ("eigenvalue", Disabled, "eigenvalues are not computed"),
        ("quantize_training", Disabled, "models are trained unquantised"),
        ("hybrid_engine", Disabled, "there is one engine"),
        ("tensor_parallel", Never, "ranks share data, not layers"),
        ("pipeline", Never, "ranks share data, not layers"),
        ("compile", Never, "there is nothing to compile"),
        ("aio", Anything, ""),
        ("nebula", Disabled, "checkpoints are written by the trainer"),
    ]
}

/// Paths of these keys, for suggestions.
pub(super) fn paths() -> Vec<String> {
    known()
        .into_iter()
        .map(|(path, ..)| path.to_string())
        .collect()
}

/// Key, what it may say, and why, for the reference page.
pub(super) fn table() -> Vec<(&'static str, String, &'static str)> {
    let row = |(path, allowed, reason): (&'static str, Allowed, &'static str)| {
        let allowed = match allowed {
            Allowed::Only(only) => format!("`{only}`"),
            Allowed::Disabled => "`false`, `\"enabled\": false`".to_string(),
            Allowed::NoDevice => "`\"device\": \"none\"`".to_string(),
            Allowed::Anything => "anything".to_string(),
            Allowed::Never => "nothing that is on".to_string(),
        };
        let reason = if reason.is_empty() {
            "has no meaning here"
        } else {
            reason
        };
        (path, allowed, reason)
    };
    known().into_iter().map(row).collect()
}

/// Takes these keys out of `config`.
///
/// # Errors
/// [`ConfigError::Unsupported`] for the first that asks for what is not there.
pub(super) fn take_out(config: &mut Value) -> Result<(), ConfigError> {
    for (path, allowed, reason) in known() {
        let (section, key) = match path.rsplit_once('.') {
            Some((section, key)) => {
                let pointer = format!("/{}", section.replace('.', "/"));
                (config.pointer_mut(&pointer), key)
            }
            None => (Some(&mut *config), path),
        };
        let Some(value) = section
            .and_then(Value::as_object_mut)
            .and_then(|s| s.remove(key))
        else {
            continue;
        };
        if allowed.allows(&value) {
            continue;
        }
        let switch = allowed.switch().filter(|switch| !value[switch].is_null());
        let (key, value) = match switch {
            Some(switch) => (join(path, switch), shown(&value[switch])),
            None if value.is_object() => (path.to_string(), "on".to_string()),
            None => (path.to_string(), shown(&value)),
        };
        return Err(ConfigError::Unsupported {
            key,
            value,
            reason: reason.to_string(),
        });
    }
    Ok(())
}

/// Null, false, or a section which is off or in which everything is. `shared_parameters` are how a part of DeepSpeed's
/// compression is switched on.
fn is_all_off(value: &Value) -> bool {
    let Some(section) = value.as_object() else {
        return value.is_null() || *value == false;
    };
    let shared = section.get("shared_parameters").unwrap_or(&Value::Null);
    [&value["enabled"], &shared["enabled"]].contains(&&json!(false))
        || section.values().all(is_all_off)
}

/// Whether they are the same; `1` is `1.0`.
pub(super) fn are_equal(a: &Value, b: &Value) -> bool {
    a == b || a.is_number() && a.as_f64() == b.as_f64()
}
