//! What a value must be, in words, and whether it is that.

use serde_json::Value;

use super::schema::Schema;

/// Floats up to this size are whole numbers exactly.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;

/// Refuses a value that is not what `schema` says, in words. Integral floats become integers where integers belong, as in
/// DeepSpeed: `5e8` is a whole number.
///
/// What the schema does not say (an untagged enum, a type of a program's own) is left to the reader.
pub(super) fn fit(schema: &Schema, at: &Value, value: &mut Value) -> Result<(), String> {
    let resolved = schema.resolve(at);
    let names = names(resolved);
    let kinds: Vec<&str> = match &resolved["type"] {
        Value::String(kind) => vec![kind],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let fits = match names.is_empty() {
        false => names.contains(&&*value),
        true => {
            kinds.is_empty()
                || kinds
                    .iter()
                    .any(|kind| is_of_kind(schema, resolved, kind, value))
        }
    };
    match fits {
        true => Ok(()),
        false => Err(format!(
            "must be {}, got {}",
            in_words(schema, at),
            shown(value)
        )),
    }
}

fn is_of_kind(schema: &Schema, at: &Value, kind: &str, value: &mut Value) -> bool {
    match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "number" => value.is_number(),
        "integer" => make_integer(at, value),
        "string" => value.is_string(),
        "object" => value.is_object(),
        "array" => is_list(schema, at, value),
        _ => true,
    }
}

fn is_list(schema: &Schema, at: &Value, value: &mut Value) -> bool {
    let Some(list) = value.as_array_mut() else {
        return false;
    };
    let len = list.len() as u64;
    let [least, most] = ["minItems", "maxItems"].map(|key| at[key].as_u64());
    least.is_none_or(|least| len >= least)
        && most.is_none_or(|most| len <= most)
        && list
            .iter_mut()
            .all(|item| fit(schema, &at["items"], item).is_ok())
}

/// Whether it is a whole number in the range of its type, after an integral float has become an integer.
fn make_integer(at: &Value, value: &mut Value) -> bool {
    if let Some(number) = value.as_f64().filter(|_| value.is_f64())
        && number.fract() == 0.0
        && number.abs() <= MAX_EXACT
    {
        *value = match number < 0.0 {
            true => Value::from(number as i64),
            false => Value::from(number as u64),
        };
    }
    let number = match (value.as_u64(), value.as_i64()) {
        (Some(number), _) => i128::from(number),
        (None, Some(number)) => i128::from(number),
        (None, None) => return false,
    };
    let most = match at["format"].as_str() {
        Some("int32") => i128::from(i32::MAX),
        Some("uint32") => i128::from(u32::MAX),
        Some("int64") => i128::from(i64::MAX),
        _ => i128::from(u64::MAX),
    };
    let least = match at["minimum"].as_i64() {
        Some(least) => i128::from(least),
        None => -most - 1,
    };
    (least..=most).contains(&number)
}

/// What a value of this schema is: "a whole number".
pub(super) fn in_words(schema: &Schema, at: &Value) -> String {
    let resolved = schema.resolve(at);
    let names = names(resolved);
    if !names.is_empty() {
        return one_of(names);
    }
    let kind = match &resolved["type"] {
        Value::Array(kinds) => kinds.iter().find(|k| *k != "null"),
        kind => Some(kind),
    };
    let list = || {
        let items = match schema.resolve(&resolved["items"])["type"].as_str() {
            Some("number") => "numbers",
            Some("integer") => "whole numbers",
            Some("string") => "texts",
            _ => "values",
        };
        match (resolved["minItems"].as_u64(), resolved["maxItems"].as_u64()) {
            (Some(least), Some(most)) if least == most => format!("a list of {least} {items}"),
            _ => format!("a list of {items}"),
        }
    };
    match kind.and_then(Value::as_str) {
        Some("boolean") => "true or false".to_string(),
        Some("number") => "a number".to_string(),
        Some("integer") if resolved["minimum"] == 0 => "a whole number from 0 on".to_string(),
        Some("integer") => "a whole number".to_string(),
        Some("string") => "a text".to_string(),
        Some("array") => list(),
        _ => SECTION.to_string(),
    }
}

/// A section, in words.
pub(super) const SECTION: &str = "a section, { ... }";

/// `one of "log", "linear"`.
pub(super) fn one_of(names: impl IntoIterator<Item = impl std::fmt::Display>) -> String {
    let names: Vec<String> = names.into_iter().map(|n| n.to_string()).collect();
    format!("one of {}", names.join(", "))
}

/// The values of an enum of names.
pub(super) fn names(resolved: &Value) -> Vec<&Value> {
    if let Some(names) = resolved["enum"].as_array() {
        return names.iter().collect();
    }
    let variants = resolved["oneOf"].as_array().map_or(&[][..], Vec::as_slice);
    match variants.iter().all(|v| v["const"].is_string()) {
        true => variants.iter().map(|v| &v["const"]).collect(),
        false => Vec::new(),
    }
}

/// A value in a message, which is one line of bearable length.
pub(super) fn shown(value: &Value) -> String {
    let text = value.to_string();
    match value {
        Value::Object(_) => "a section".to_string(),
        Value::Array(_) if text.len() > 60 => "a list".to_string(),
        _ => text,
    }
}
