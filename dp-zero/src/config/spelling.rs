//! DeepSpeed's several ways to say the same, made one: old names of sections, names of optimizers and schedulers in any case,
//! names of dtypes, switches of its Adam.

use serde_json::{Value, json};

use super::ConfigError;
use super::expected::{SECTION, shown};
use super::unsupported::are_equal;

/// A section, the types of it that are there, and DeepSpeed's others.
type Names = (
    &'static str,
    &'static [&'static str],
    &'static [&'static str],
);

const NAMES: [Names; 2] = [
    (
        "optimizer",
        &["AdamW", "Adam", "SGD"],
        &[
            "Adagrad",
            "Lamb",
            "OneBitAdam",
            "OneBitLamb",
            "ZeroOneAdam",
            "MuAdam",
            "MuAdamW",
            "MuSGD",
            "Lion",
            "Muon",
            "RMSprop",
        ],
    ),
    (
        "scheduler",
        &["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"],
        &["LRRangeTest", "OneCycle"],
    ),
];

/// Old and other spellings become the ones that are read.
///
/// # Errors
/// Names that are not there; two spellings of one section.
pub(super) fn normalize(config: &mut Value) -> Result<(), ConfigError> {
    if let Some(section) = config.as_object_mut()
        && let Some(old) = section.remove("bfloat16").filter(|old| !old.is_null())
        && section
            .insert("bf16".to_string(), old)
            .is_some_and(|new| !new.is_null())
    {
        return Err(ConfigError::contradiction(
            "bfloat16",
            "bf16",
            "they are one section",
        ));
    }
    if config["zero_optimization"].is_boolean() {
        return Err(ConfigError::invalid(
            "zero_optimization",
            "is a section, { \"stage\": 1 }",
        ));
    }
    for path in ["/communication_data_type", "/data_types/grad_accum_dtype"] {
        if let Some(name) = config.pointer_mut(path) {
            shorten_dtype(name);
        }
    }
    for (section, known, unsupported) in NAMES {
        if config[section].is_null() {
            continue;
        }
        if !config[section].is_object() {
            let message = format!("must be {SECTION}, got {}", shown(&config[section]));
            return Err(ConfigError::invalid(section, message));
        }
        let kind = config[section]["type"].clone();
        let key = format!("{section}.type");
        let Some(kind) = kind.as_str() else {
            return Err(ConfigError::invalid(
                key,
                format!("must be one of {}", known.join(", ")),
            ));
        };
        let is = |name: &&&str| name.eq_ignore_ascii_case(kind);
        if let Some(name) = unsupported.iter().find(is) {
            return Err(ConfigError::Unsupported {
                key,
                value: format!("\"{name}\""),
                reason: format!("is not there; {} are", known.join(", ")),
            });
        }
        let Some(name) = known.iter().find(is) else {
            let message = format!("\"{kind}\" is none of {}", known.join(", "));
            return Err(ConfigError::invalid(key, message));
        };
        // DeepSpeed's Adam is AdamW unless adam_w_mode says otherwise.
        config[section]["type"] = json!(if *name == "Adam" { "AdamW" } else { name });
        if config[section]["params"].is_null() {
            config[section]["params"] = json!({});
        }
    }
    take_switches(config)
}

/// `float16`, `half` and `torch.float16` are `fp16`. Other names are left for the error that lists those that are there.
fn shorten_dtype(name: &mut Value) {
    let Some(text) = name.as_str().map(str::to_lowercase) else {
        return;
    };
    let short = match text.strip_prefix("torch.").unwrap_or(&text) {
        "fp32" | "float32" | "float" => "fp32",
        "fp16" | "float16" | "half" => "fp16",
        "bf16" | "bfloat16" => "bf16",
        _ => return,
    };
    *name = json!(short);
}

/// A switch, its only value if it may not say anything, and why.
type Switch = (&'static str, Option<Value>, &'static str);

/// Switches of DeepSpeed's and PyTorch's optimizers that say what is done here in any case. Null is what is not there.
fn take_switches(config: &mut Value) -> Result<(), ConfigError> {
    let is_adam = config["optimizer"]["type"] == "AdamW";
    let Some(params) = config
        .pointer_mut("/optimizer/params")
        .and_then(Value::as_object_mut)
    else {
        return Ok(());
    };
    let (yes, no) = (|| Some(json!(true)), || Some(json!(false)));
    let any: [Switch; 5] = [
        ("max_grad_norm", Some(json!(0)), "use gradient_clipping"),
        ("foreach", None, ""),
        ("fused", None, ""),
        ("maximize", no(), "losses are minimised"),
        ("differentiable", no(), "steps have no gradient"),
    ];
    let adam: [Switch; 7] = [
        ("adam_w_mode", yes(), "weight decay is decoupled"),
        ("torch_adam", None, ""),
        ("set_grad_none", None, ""),
        ("capturable", None, ""),
        ("bias_correction", yes(), "moments are always corrected"),
        ("amsgrad", no(), "AMSGrad is not there"),
        ("fp32_optimizer_states", yes(), "optimizer state is f32"),
    ];
    let adam = adam.into_iter().filter(|_| is_adam);
    for (key, only, reason) in any.into_iter().chain(adam) {
        let Some(value) = params.remove(key) else {
            continue;
        };
        if let Some(only) = only
            && !value.is_null()
            && !are_equal(&value, &only)
        {
            return Err(ConfigError::Unsupported {
                key: format!("optimizer.params.{key}"),
                value: shown(&value),
                reason: reason.to_string(),
            });
        }
    }
    Ok(())
}
