//! Reads a section into its type, and says which key is wrong.

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::ConfigError;
use super::expected::{SECTION, fit, in_words, one_of, shown};
use super::schema::{Schema, join};
use super::unknown::Known;

/// Reads a section of a configuration into its Rust type. The known keys and the kinds of their values are those of the type's
/// JSON schema; `section` is the path that messages begin with, empty at the top. Programs with sections of their own read them
/// with this. An integral float is a whole number where the schema says integer: `1e3`.
///
/// ```
/// use dp_zero::config::{parse_json, read_section};
///
/// #[derive(Debug, serde::Deserialize, schemars::JsonSchema)]
/// struct Data {
///     /// Text to train on.
///     train: String,
///     /// Tokens of a sequence.
///     context: usize,
/// }
///
/// let read = |text| read_section::<Data>("data", parse_json(text)?);
/// assert_eq!(read(r#"{"train": "a.txt", "context": 1e3}"#)?.context, 1000);
///
/// let error = read(r#"{"trian": "a.txt"}"#).unwrap_err();
/// assert_eq!(error.to_string(), "`data.trian` is no known key; did you mean `data.train`?");
/// let error = read(r#"{"train": "a.txt", "context": "32"}"#).unwrap_err();
/// assert_eq!(error.to_string(), "`data.context`: must be a whole number from 0 on, got \"32\"");
/// # Ok::<(), dp_zero::config::ConfigError>(())
/// ```
///
/// # Errors
/// [`ConfigError::UnknownKey`], [`ConfigError::NoSuchKey`] or [`ConfigError::KeyOfAnotherType`] for a key that is not there;
/// [`ConfigError::Invalid`] for a value of another kind, one that is missing, or `"auto"`, which Hugging Face's Trainer fills
/// in (a text may be `auto`).
pub fn read_section<T: DeserializeOwned + JsonSchema>(
    section: &str,
    value: Value,
) -> Result<T, ConfigError> {
    Reader {
        schema: Schema::of::<T>(),
        others: &[],
        null_is_absent: false,
    }
    .read(section, value)
}

/// The paths of all keys of a section, for the suggestions of [`DeepSpeedConfig::from_value`](super::DeepSpeedConfig::from_value).
pub fn paths_of<T: JsonSchema>(section: &str) -> Vec<String> {
    let schema = Schema::of::<T>();
    let mut paths = vec![section.to_string()];
    paths.extend(schema.paths(section, schema.root()));
    paths
}

/// [`read_section`] of DeepSpeed's part: as in Python, null is what is not there. `others`: known paths that are no part of
/// the type, for suggestions.
pub(super) fn read_deepspeed<T: DeserializeOwned + JsonSchema>(
    value: Value,
    others: &[String],
) -> Result<T, ConfigError> {
    Reader {
        schema: Schema::of::<T>(),
        others,
        null_is_absent: true,
    }
    .read("", value)
}

struct Reader<'a> {
    schema: Schema,
    others: &'a [String],
    null_is_absent: bool,
}

impl Reader<'_> {
    fn read<T: DeserializeOwned>(&self, section: &str, mut value: Value) -> Result<T, ConfigError> {
        let whole = value.clone();
        let known = Known {
            schema: &self.schema,
            value: &whole,
            path: section,
            others: self.others,
        };
        self.check(section, &mut value, self.schema.root(), &known)?;
        // What the schema cannot say. Paths end at a section of several types, which is why all else is checked before.
        serde_path_to_error::deserialize(value).map_err(|e| {
            let key = match e.path().to_string().as_str() {
                "." => section.to_string(),
                inner => join(section, inner),
            };
            invalid(&key, e.inner().to_string())
        })
    }

    /// Refuses unknown keys, values of another kind and `"auto"`; see [`fit`] for what it changes.
    fn check(
        &self,
        path: &str,
        value: &mut Value,
        at: &Value,
        known: &Known,
    ) -> Result<(), ConfigError> {
        let resolved = self.schema.resolve(at);
        if value.is_null() && self.schema.is_nullable(at) {
            return Ok(());
        }
        let is_section = !self.schema.keys(at, &Value::Null).is_empty();
        if value == "auto" && (is_section || in_words(&self.schema, at) != "a text") {
            return Err(invalid(
                path,
                "\"auto\" is filled in by Hugging Face's Trainer, which is not at work here; give a value, or leave the key out",
            ));
        }
        if !is_section {
            return fit(&self.schema, at, value).map_err(|message| invalid(path, message));
        }
        // An enum may also have variants that are no sections.
        let may_be_other = ["oneOf", "anyOf"].into_iter().any(|key| {
            let mut of = resolved[key].as_array().into_iter().flatten();
            of.any(|s| self.schema.keys(s, &Value::Null).is_empty())
        });
        match value.is_object() {
            true => self.check_section(path, value, at, known),
            false if may_be_other => Ok(()),
            false => Err(invalid(
                path,
                format!("must be {SECTION}, got {}", shown(value)),
            )),
        }
    }

    fn check_section(
        &self,
        path: &str,
        value: &mut Value,
        at: &Value,
        known: &Known,
    ) -> Result<(), ConfigError> {
        self.check_type(path, value, at)?;
        let keys = self.schema.keys(at, value);
        let required = self.schema.required(at, value);
        let Some(section) = value.as_object_mut() else {
            return Ok(());
        };
        let is_known = |key: &str| keys.iter().any(|(name, _)| *name == key);
        if let Some(key) = section.keys().find(|key| !is_known(key)) {
            return Err(known.error(path, key));
        }
        if self.null_is_absent {
            section.retain(|_, value| !value.is_null());
        }
        for (key, schema) in keys {
            let path = join(path, key);
            match section.get_mut(key) {
                Some(inner) => self.check(&path, inner, schema, known)?,
                None if required.contains(&key) => {
                    let is = in_words(&self.schema, schema);
                    return Err(invalid(&path, format!("is missing; it is {is}")));
                }
                None => {}
            }
        }
        Ok(())
    }

    /// A section of several types says which it is of.
    fn check_type(&self, path: &str, value: &Value, at: &Value) -> Result<(), ConfigError> {
        let variants = self.schema.variants(at);
        let Some(first) = variants.first() else {
            return Ok(());
        };
        if variants.iter().any(|v| value[v.tag] == v.name) {
            return Ok(());
        }
        let names = one_of(variants.iter().map(|v| format!("\"{}\"", v.name)));
        let message = match &value[first.tag] {
            Value::Null => format!("is missing; it is {names}"),
            other => format!("must be {names}, got {}", shown(other)),
        };
        Err(invalid(&join(path, first.tag), message))
    }
}

fn invalid(path: &str, message: impl Into<String>) -> ConfigError {
    match path.is_empty() {
        true => ConfigError::invalid("the configuration", message),
        false => ConfigError::invalid(path, message),
    }
}
