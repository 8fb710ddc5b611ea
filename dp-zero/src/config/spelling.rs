//! DeepSpeed's several ways to say the same, made one: old names of sections, names of optimizers and schedulers in any case,
//! switches of its Adam.

use serde_json::{Value, json};

use super::ConfigError;

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
    if let Some(top) = config.as_object_mut() {
        // As in Python, null is what is not there.
        top.retain(|_, value| !value.is_null());
    }
    if let Some(section) = config.as_object_mut()
        && let Some(old) = section.remove("bfloat16")
        && section.insert("bf16".to_string(), old).is_some()
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
    for (section, known, unsupported) in NAMES {
        if config[section].is_null() {
            continue;
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
    take_adam_switches(config)
}

/// Switches of DeepSpeed's Adam that say what is done here in any case.
fn take_adam_switches(config: &mut Value) -> Result<(), ConfigError> {
    let Some(params) = config
        .pointer_mut("/optimizer/params")
        .and_then(Value::as_object_mut)
    else {
        return Ok(());
    };
    let switches = [
        (
            "adam_w_mode",
            Some(json!(true)),
            "weight decay is decoupled",
        ),
        ("torch_adam", None, ""),
        (
            "bias_correction",
            Some(json!(true)),
            "moments are always corrected",
        ),
        ("amsgrad", Some(json!(false)), "AMSGrad is not there"),
        (
            "fp32_optimizer_states",
            Some(json!(true)),
            "optimizer state is f32",
        ),
        ("max_grad_norm", Some(json!(0)), "use gradient_clipping"),
        ("foreach", None, ""),
        ("fused", None, ""),
        ("maximize", Some(json!(false)), "losses are minimised"),
    ];
    for (key, only, reason) in switches {
        let Some(value) = params.remove(key) else {
            continue;
        };
        if only.is_some_and(|only| value != only) {
            return Err(ConfigError::Unsupported {
                key: format!("optimizer.params.{key}"),
                value: value.to_string(),
                reason: reason.to_string(),
            });
        }
    }
    Ok(())
}
