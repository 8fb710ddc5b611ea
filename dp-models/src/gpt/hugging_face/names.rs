//! The parameters of a GPT-2 by both names.

use super::super::GptConfig;

/// Absent in some files.
const PREFIX: &str = "transformer.";

/// A parameter here and there.
pub(super) struct Name {
    /// As [`Gpt`](crate::Gpt) calls it.
    pub ours: String,
    /// As `GPT2LMHeadModel` calls it.
    pub theirs: String,
    /// Its shape here.
    pub shape: Vec<usize>,
    /// Whether theirs is the transpose.
    pub is_transposed: bool,
}

/// All parameters, in the order of their use.
pub(super) fn names(config: &GptConfig) -> Vec<Name> {
    let d = config.width;
    let parameter = |ours: String, theirs: String, shape: &[usize], is_transposed| Name {
        ours,
        theirs,
        shape: shape.to_vec(),
        is_transposed,
    };
    let plain = |ours: &str, theirs: &str, shape: &[usize]| {
        parameter(ours.into(), theirs.into(), shape, false)
    };
    let mut names = vec![
        plain(
            "wte.weight",
            "transformer.wte.weight",
            &[config.vocab_size, d],
        ),
        plain("wpe.weight", "transformer.wpe.weight", &[config.context, d]),
    ];
    for idx in 0..config.layers {
        let both = |ours: &str, theirs: &str, part: &str| {
            let ours = format!("blocks.{idx}.{ours}.{part}");
            (ours, format!("{PREFIX}h.{idx}.{theirs}.{part}"))
        };
        for (ours, theirs, out, input) in [
            ("ln1", "ln_1", d, None),
            ("qkv", "attn.c_attn", 3 * d, Some(d)),
            ("proj", "attn.c_proj", d, Some(d)),
            ("ln2", "ln_2", d, None),
            ("fc", "mlp.c_fc", 4 * d, Some(d)),
            ("out", "mlp.c_proj", d, Some(4 * d)),
        ] {
            let shape: Vec<usize> = [Some(out), input].into_iter().flatten().collect();
            let (weight, bias) = (both(ours, theirs, "weight"), both(ours, theirs, "bias"));
            names.push(parameter(weight.0, weight.1, &shape, input.is_some()));
            names.push(parameter(bias.0, bias.1, &[out], false));
        }
    }
    names.push(plain("lnf.weight", "transformer.ln_f.weight", &[d]));
    names.push(plain("lnf.bias", "transformer.ln_f.bias", &[d]));
    if !config.tied_head {
        names.push(plain(
            "head.weight",
            "lm_head.weight",
            &[config.vocab_size, d],
        ));
    }
    names
}

/// The name that [`names`] has for a tensor of a file of theirs; `None` for a mask, which is no parameter.
pub(super) fn canonical(name: &str) -> Option<String> {
    let short = name.strip_prefix(PREFIX).unwrap_or(name);
    let is_mask = short.strip_prefix("h.").is_some_and(|rest| {
        let (idx, rest) = rest.split_once('.').unwrap_or_default();
        idx.parse::<usize>().is_ok() && ["attn.bias", "attn.masked_bias"].contains(&rest)
    });
    match short {
        _ if is_mask => None,
        "lm_head.weight" => Some(short.to_string()),
        _ => Some(format!("{PREFIX}{short}")),
    }
}
