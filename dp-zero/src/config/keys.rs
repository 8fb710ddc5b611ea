//! Reads a section into its type, and says which key is wrong.

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::ConfigError;

/// Reads a section of a configuration into its Rust type. The known keys are those of the type's JSON schema; `section` is the
/// path that messages begin with, empty at the top. Programs with sections of their own read them with this.
///
/// ```
/// use dp_zero::config::{parse_json, read_section};
///
/// #[derive(Debug, serde::Deserialize, schemars::JsonSchema)]
/// struct Data {
///     /// Text to train on.
///     train: String,
/// }
///
/// let error = read_section::<Data>("data", parse_json(r#"{"trian": "a.txt"}"#)?).unwrap_err();
/// assert_eq!(error.to_string(), "`data.trian` is no known key; did you mean `data.train`?");
/// # Ok::<(), dp_zero::config::ConfigError>(())
/// ```
///
/// # Errors
/// [`ConfigError::UnknownKey`]; [`ConfigError::Invalid`] for a value of another type, one that is missing, or `"auto"`, which
/// Hugging Face's Trainer fills in.
pub fn read_section<T: DeserializeOwned + JsonSchema>(
    section: &str,
    value: Value,
) -> Result<T, ConfigError> {
    read_with(section, value, &[])
}

/// [`read_section`]; `more`: known keys that are no part of the type, for suggestions.
pub(super) fn read_with<T: DeserializeOwned + JsonSchema>(
    section: &str,
    value: Value,
    more: &[String],
) -> Result<T, ConfigError> {
    Keys::new::<T>(section, more).check(section, &value)?;
    serde_path_to_error::deserialize(value).map_err(|e| {
        let inner = e.path().to_string();
        let key = match inner.as_str() {
            "." => section.to_string(),
            inner => join(section, inner),
        };
        match key.is_empty() {
            true => ConfigError::invalid("the configuration", e.inner().to_string()),
            false => ConfigError::invalid(key, e.inner().to_string()),
        }
    })
}

/// A JSON schema and the definitions it refers to.
pub(super) struct Schema {
    root: Value,
}

impl Schema {
    pub fn of<T: JsonSchema>() -> Self {
        Self {
            root: schemars::schema_for!(T).to_value(),
        }
    }

    /// The schema of the whole type.
    pub fn root(&self) -> &Value {
        &self.root
    }

    /// Follows `$ref`, and `anyOf` of one thing and null, which is how an `Option` looks.
    pub fn resolve<'a>(&'a self, schema: &'a Value) -> &'a Value {
        if let Some(path) = schema["$ref"].as_str() {
            let target = self.root.pointer(path.trim_start_matches('#'));
            return target.map_or(schema, |s| self.resolve(s));
        }
        let is_null = |s: &&Value| s["type"] != "null";
        match schema["anyOf"].as_array() {
            Some(any) if any.iter().filter(is_null).count() == 1 => {
                any.iter().find(is_null).map_or(schema, |s| self.resolve(s))
            }
            _ => schema,
        }
    }

    /// The known keys of a section with this value: of an enum's variants, those of the one that `value` names.
    pub fn keys<'a>(&'a self, schema: &'a Value, value: &Value) -> Vec<(&'a str, &'a Value)> {
        let schema = self.resolve(schema);
        let own = schema["properties"].as_object().into_iter().flatten();
        let mut keys: Vec<_> = own.map(|(k, s)| (k.as_str(), s)).collect();
        let variants = ["oneOf", "anyOf"].map(|k| schema[k].as_array());
        let variants: Vec<&Value> = variants.into_iter().flatten().flatten().collect();
        let named = |variant: &&&Value| {
            let tags = self.resolve(variant)["properties"].as_object();
            tags.is_some_and(|tags| {
                let mut tags = tags.iter().filter(|(_, s)| !s["const"].is_null());
                tags.any(|(key, s)| value[key] == s["const"])
            })
        };
        let chosen: Vec<&Value> = match variants.iter().find(named) {
            Some(variant) => vec![variant],
            None => variants,
        };
        for variant in chosen {
            keys.extend(self.keys(variant, value));
        }
        keys
    }

    /// All paths below `schema`.
    pub fn paths(&self, prefix: &str, schema: &Value) -> Vec<String> {
        let mut paths = Vec::new();
        for (key, inner) in self.keys(schema, &Value::Null) {
            let path = join(prefix, key);
            paths.extend(self.paths(&path, inner));
            paths.push(path);
        }
        paths
    }
}

/// `section.key`, or `key` at the top.
pub(super) fn join(section: &str, key: &str) -> String {
    match section.is_empty() {
        true => key.to_string(),
        false => format!("{section}.{key}"),
    }
}

/// The known keys of a type.
struct Keys {
    schema: Schema,
    /// All known paths.
    paths: Vec<String>,
}

impl Keys {
    fn new<T: JsonSchema>(section: &str, more: &[String]) -> Self {
        let schema = Schema::of::<T>();
        let mut paths = schema.paths(section, schema.root());
        paths.extend_from_slice(more);
        Self { schema, paths }
    }

    /// Refuses unknown keys and `"auto"`.
    fn check(&self, section: &str, value: &Value) -> Result<(), ConfigError> {
        self.check_below(section, value, self.schema.root())
    }

    fn check_below(&self, path: &str, value: &Value, at: &Value) -> Result<(), ConfigError> {
        if value == "auto" {
            return Err(ConfigError::invalid(
                path,
                "\"auto\" is filled in by Hugging Face's Trainer, which is not at work here; give a value, or leave the key out",
            ));
        }
        let known = self.schema.keys(at, value);
        let Value::Object(section) = value else {
            return Ok(());
        };
        if known.is_empty() {
            return Ok(());
        }
        for (key, inner) in section {
            let key_path = join(path, key);
            match known.iter().find(|(name, _)| name == key) {
                Some((_, inner_schema)) => self.check_below(&key_path, inner, inner_schema)?,
                None => {
                    let here = known.iter().map(|(name, _)| join(path, name)).collect();
                    return Err(ConfigError::UnknownKey {
                        nearest: nearest(key, path, here, &self.paths),
                        key: key_path,
                    });
                }
            }
        }
        Ok(())
    }
}

/// The known path whose last part is most like `key`; of equals, one of the same section.
fn nearest(key: &str, section: &str, mut known: Vec<String>, elsewhere: &[String]) -> String {
    let is_in_section = |path: &&String| path.rsplit_once('.').map_or("", |(s, _)| s) == section;
    known.extend(elsewhere.iter().filter(is_in_section).cloned());
    known.extend_from_slice(elsewhere);
    let mut best = (String::new(), -1.0);
    for path in known {
        let last = path.rsplit('.').next().unwrap_or(&path);
        let likeness = strsim::normalized_damerau_levenshtein(&key.to_lowercase(), last);
        if likeness > best.1 {
            best = (path, likeness);
        }
    }
    best.0
}
