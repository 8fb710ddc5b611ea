//! JSON in which no key is there twice, and overrides of single keys.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::ConfigError;

/// Parses JSON. A key that is there twice is an error, as in DeepSpeed: the first of them would be lost. A byte order mark at the
/// start, which some editors write, is skipped.
///
/// # Errors
/// [`ConfigError::NotJson`] with line and column.
pub fn parse_json(text: &str) -> Result<Value, ConfigError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let parsed: Result<Unique, _> = serde_json::from_str(text);
    parsed
        .map(|unique| unique.0)
        .map_err(|e| ConfigError::NotJson {
            message: e.to_string(),
        })
}

/// Sets the value at a path such as `zero_optimization.stage`; sections on the way are made. `text` is JSON, or else a string:
/// `2`, `true`, `text.txt`. A text that begins with `{` or `[` must be JSON; as a string it is quoted, `"[a] b"`.
///
/// # Errors
/// [`ConfigError::Invalid`] for a configuration that is no section, for an empty part of the path, or one that leads into a value
/// which is no section, and for a text that begins like JSON and is none.
pub fn set(config: &mut Value, path: &str, text: &str) -> Result<(), ConfigError> {
    check_is_object(config)?;
    let value = match parse_json(text) {
        Ok(value) => value,
        Err(ConfigError::NotJson { message }) if text.trim_start().starts_with(['{', '[']) => {
            return Err(ConfigError::invalid(
                path,
                format!(
                    "begins like JSON and is none: {message}; to set a text, put it in double quotes"
                ),
            ));
        }
        Err(_) => Value::String(text.to_string()),
    };
    let mut at = config;
    for part in path.split('.') {
        if part.is_empty() {
            return Err(ConfigError::invalid(path, "a part of the path is empty"));
        }
        if at.is_null() {
            *at = Value::Object(Map::new());
        }
        let Value::Object(section) = at else {
            return Err(ConfigError::invalid(
                path,
                format!("what `{part}` would be set in is no section"),
            ));
        };
        at = section.entry(part).or_insert(Value::Null);
    }
    *at = value;
    Ok(())
}

/// Refuses a configuration that is not a section itself.
///
/// # Errors
/// [`ConfigError::Invalid`].
pub fn check_is_object(config: &Value) -> Result<(), ConfigError> {
    match config.is_object() {
        true => Ok(()),
        false => Err(ConfigError::invalid(
            "the configuration",
            "must be a JSON object, { ... }",
        )),
    }
}

/// A value whose sections have each key once.
struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueVisitor).map(Self)
    }
}

struct UniqueVisitor;

impl<'de> Visitor<'de> for UniqueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::from(value))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        let number = Number::from_f64(value);
        number
            .map(Value::Number)
            .ok_or_else(|| E::custom("a number is not finite"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_string()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(Unique(value)) = access.next_element()? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut section = Map::new();
        while let Some((key, Unique(value))) = access.next_entry::<String, Unique>()? {
            if section.contains_key(&key) {
                return Err(A::Error::custom(format!("`{key}` is there twice")));
            }
            section.insert(key, value);
        }
        Ok(Value::Object(section))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_key_twice_is_an_error_at_its_place() {
        let text = "{\"zero_optimization\": {\"stage\": 1,\n \"stage\": 2}}";
        let error = parse_json(text).map_err(|e| e.to_string());
        assert!(error.is_err_and(|e| e.contains("`stage` is there twice at line 2")));
    }

    #[test]
    fn set_makes_sections_and_reads_json() -> Result<(), ConfigError> {
        let mut config = json!({"fp16": {"enabled": true}});
        set(&mut config, "fp16.enabled", "false")?;
        set(&mut config, "zero_optimization.stage", "2")?;
        set(&mut config, "data.train", "my text.txt")?;
        assert_eq!(
            config,
            json!({"fp16": {"enabled": false}, "zero_optimization": {"stage": 2}, "data": {"train": "my text.txt"}})
        );
        assert!(set(&mut config, "data.train.x", "1").is_err());
        assert!(set(&mut config, "data..train", "1").is_err());
        Ok(())
    }

    #[test]
    fn what_begins_like_json_must_be_json() -> Result<(), ConfigError> {
        let mut config = json!({});
        for text in [r#"{"a":1,"a":2}"#, "{a: 1}", " [1", "[INST] Hello"] {
            let error = set(&mut config, "key", text).map_err(|e| e.to_string());
            assert!(
                error
                    .as_ref()
                    .is_err_and(|e| e.starts_with("`key`: begins like JSON and is none")
                        && e.contains("double quotes")),
                "{error:?}"
            );
        }
        assert_eq!(config, json!({}));
        set(&mut config, "key", r#""[INST] Hello""#)?;
        set(&mut config, "list", "[1, 2]")?;
        assert_eq!(config, json!({"key": "[INST] Hello", "list": [1, 2]}));
        Ok(())
    }

    #[test]
    fn a_byte_order_mark_is_skipped() -> Result<(), ConfigError> {
        assert_eq!(parse_json("\u{feff}{\"a\": 1}")?, json!({"a": 1}));
        Ok(())
    }

    #[test]
    fn what_is_no_object_has_no_keys_to_set() {
        for mut config in [json!([1]), json!(null), json!("a")] {
            let error = set(&mut config, "key", "1").map_err(|e| e.to_string());
            assert_eq!(
                error,
                Err("`the configuration`: must be a JSON object, { ... }".to_string())
            );
        }
    }
}
