//! The page that lists all keys, made from the types that read them.

use std::fmt::Write;

use schemars::JsonSchema;
use serde_json::Value;

use super::schema::{Schema, join};
use super::{DeepSpeedConfig, unsupported};

/// All keys of [`DeepSpeedConfig`] as Markdown tables: key, type, default, meaning; and those keys of DeepSpeed's that may only
/// say what happens anyway.
pub fn reference() -> String {
    let mut page = reference_of::<DeepSpeedConfig>("");
    page += "\n## Keys that are read, and may not ask for more\n\n";
    page += "What DeepSpeed has and this engine has not. A value that asks for it is an error that says so.\n\n";
    page += "| key | allowed | why |\n|---|---|---|\n";
    for (path, allowed, reason) in unsupported::table() {
        let _ = writeln!(page, "| `{path}` | {allowed} | {reason} |");
    }
    page
}

/// The keys of a program's own section as Markdown tables; `section` is its name, empty at the top.
pub fn reference_of<T: JsonSchema>(section: &str) -> String {
    let schema = Schema::of::<T>();
    let mut page = String::new();
    let defaults = schema.root()["default"].clone();
    write_section(&mut page, section, schema.root(), &defaults, &schema);
    page
}

fn write_section(page: &mut String, path: &str, at: &Value, defaults: &Value, schema: &Schema) {
    let resolved = schema.resolve(at);
    let variants = resolved["oneOf"].as_array();
    let Some(variants) = variants.filter(|v| v.iter().any(|v| v["properties"].is_object())) else {
        return write_keys(page, path, at, defaults, schema, "");
    };
    for variant in variants {
        let tags = variant["properties"].as_object().into_iter().flatten();
        let tag = tags
            .filter_map(|(key, s)| Some((key, s["const"].as_str()?)))
            .next();
        let title = tag.map(|(key, name)| format!(" with `\"{key}\": \"{name}\"`"));
        write_keys(
            page,
            path,
            variant,
            defaults,
            schema,
            &title.unwrap_or_default(),
        );
    }
}

fn write_keys(
    page: &mut String,
    path: &str,
    at: &Value,
    defaults: &Value,
    schema: &Schema,
    title: &str,
) {
    let resolved = schema.resolve(at);
    let heading = match path {
        "" => "At the top".to_string(),
        path => format!("`{path}`{title}"),
    };
    let description = resolved["description"].as_str().unwrap_or_default();
    let _ = write!(page, "\n## {heading}\n\n");
    if !path.is_empty() {
        let _ = write!(page, "{description}\n\n");
    }
    let _ = write!(
        page,
        "| key | type | default | meaning |\n|---|---|---|---|\n"
    );
    let defaults = match resolved["default"].is_object() {
        true => &resolved["default"],
        false => defaults,
    };
    let required = [at, resolved].map(|s| s["required"].as_array());
    let is_required = |key: &str| {
        required
            .iter()
            .flatten()
            .any(|keys| keys.iter().any(|k| k == key))
    };
    let mut below = Vec::new();
    for (key, inner) in schema.keys(at, &Value::Null) {
        if !inner["const"].is_null() {
            continue;
        }
        let default = match inner["default"].is_null() {
            true => defaults[key].clone(),
            false => inner["default"].clone(),
        };
        let inner_resolved = schema.resolve(inner);
        let meaning = [inner, inner_resolved].map(|s| s["description"].as_str());
        let meaning = meaning.into_iter().flatten().next().unwrap_or_default();
        let is_section = !schema.keys(inner, &Value::Null).is_empty();
        let (kind, shown) = match is_section {
            true => ("section".to_string(), "see below".to_string()),
            false if is_required(key) => (kind_of(inner, schema), "required".to_string()),
            false => (kind_of(inner, schema), shown(&default)),
        };
        let _ = writeln!(
            page,
            "| `{key}` | {kind} | {shown} | {} |",
            meaning.replace('\n', " ")
        );
        if is_section {
            below.push((join(path, key), inner, default));
        }
    }
    for (path, inner, default) in below {
        write_section(page, &path, inner, &default, schema);
    }
}

fn shown(default: &Value) -> String {
    match default {
        Value::Null => "left out".to_string(),
        value => format!("`{value}`"),
    }
}

fn kind_of(schema: &Value, all: &Schema) -> String {
    let resolved = all.resolve(schema);
    let names = |values: Vec<&Value>| {
        let quoted: Vec<String> = values.iter().map(|v| format!("`{v}`")).collect();
        quoted.join(", ")
    };
    if let Some(values) = resolved["enum"].as_array() {
        return names(values.iter().collect());
    }
    if let Some(variants) = resolved["oneOf"].as_array() {
        return names(variants.iter().map(|v| &v["const"]).collect());
    }
    let of_type = |kind: &str| match kind {
        "integer" => "whole number".to_string(),
        "array" => "list".to_string(),
        other => other.to_string(),
    };
    match &resolved["type"] {
        Value::String(kind) => of_type(kind),
        Value::Array(kinds) => {
            let kinds = kinds
                .iter()
                .filter_map(Value::as_str)
                .filter(|k| *k != "null");
            kinds.map(of_type).collect::<Vec<_>>().join(" or ")
        }
        _ => String::new(),
    }
}
