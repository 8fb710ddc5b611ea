//! What to say of a key that is not there.

use serde_json::Value;

use super::ConfigError;
use super::schema::{Schema, join};

/// Keys that are less alike are not suggested: 0 for nothing in common, 1 for equal.
const MIN_LIKENESS: f64 = 0.5;

/// What is known, and the configuration that is read.
pub(super) struct Known<'a> {
    pub schema: &'a Schema,
    /// All that is read, from the schema's root on.
    pub value: &'a Value,
    /// Its path, empty at the top.
    pub path: &'a str,
    /// Known paths that are not in the schema.
    pub others: &'a [String],
}

impl Known<'_> {
    /// The error for a `key` that the section at `path` does not have: where it belongs, or which keys the section has.
    pub fn error(&self, path: &str, key: &str) -> ConfigError {
        let types = self.types_at(path);
        let own = types.iter().find(|t| t.is_own);
        let keys = own.map_or(&[][..], |t| t.keys.as_slice());
        let here: Vec<String> = keys.iter().map(|k| join(path, k)).collect();
        let (name, key) = (key, join(path, key));
        let others = types.iter().filter(|t| t.keys.contains(&name));
        let others: Vec<String> = others.filter_map(|t| t.name.map(str::to_string)).collect();
        if !others.is_empty() {
            return ConfigError::KeyOfAnotherType {
                key,
                types: others,
                own: own.and_then(|t| t.name).unwrap_or_default().to_string(),
                known: here,
            };
        }
        match self.nearest(path, name, &here) {
            Some(nearest) => ConfigError::UnknownKey { key, nearest },
            None => ConfigError::NoSuchKey { key, known: here },
        }
    }

    /// The known path whose last part is most like `key`; of equals, one of the same section.
    fn nearest(&self, section: &str, key: &str, here: &[String]) -> Option<String> {
        let elsewhere = self.schema.paths(self.path, self.schema.root());
        let parent = |path: &str| {
            path.rsplit_once('.')
                .map_or(String::new(), |(s, _)| s.to_string())
        };
        let beside = self.others.iter().filter(|path| parent(path) == section);
        let candidates = here.iter().chain(beside).chain(&elsewhere);
        let mut best = (None, MIN_LIKENESS);
        for path in candidates.chain(self.others) {
            let last = path.rsplit('.').next().unwrap_or(path);
            let likeness = strsim::normalized_damerau_levenshtein(&key.to_lowercase(), last);
            if likeness > best.1 {
                best = (Some(path.clone()), likeness);
            }
        }
        best.0
    }

    /// The types that the section at `path` could be of, also through a section above it: `optimizer.params` has the keys that
    /// `optimizer.type` says.
    fn types_at(&self, path: &str) -> Vec<Type<'_>> {
        let below = path.strip_prefix(self.path).unwrap_or(path);
        let parts: Vec<&str> = below.split('.').filter(|part| !part.is_empty()).collect();
        let mut types = Vec::new();
        let root = Type {
            name: None,
            is_own: true,
            keys: Vec::new(),
        };
        self.descend(self.schema.root(), self.value, &parts, root, &mut types);
        types
    }

    fn descend<'a>(
        &'a self,
        at: &'a Value,
        value: &Value,
        parts: &[&str],
        of: Type<'a>,
        types: &mut Vec<Type<'a>>,
    ) {
        let variants = self.schema.variants(at);
        let choices: Vec<Type> = match variants.is_empty() {
            true => vec![of],
            false => variants
                .iter()
                .map(|v| Type {
                    name: Some(v.name),
                    is_own: of.is_own && value[v.tag] == v.name,
                    keys: Vec::new(),
                })
                .collect(),
        };
        for mut choice in choices {
            let section = match variants.iter().find(|v| Some(v.name) == choice.name) {
                Some(variant) => variant.schema,
                None => at,
            };
            let keys = self.schema.keys(section, &Value::Null);
            match parts {
                [] => {
                    choice.keys = keys.into_iter().map(|(key, _)| key).collect();
                    types.push(choice);
                }
                [part, rest @ ..] => {
                    if let Some((_, inner)) = keys.into_iter().find(|(key, _)| key == part) {
                        self.descend(inner, &value[*part], rest, choice, types);
                    }
                }
            }
        }
    }
}

/// One of the types that a section could be of.
struct Type<'a> {
    /// What its `type` is called; none if there is no choice.
    name: Option<&'a str>,
    /// It is the one that the configuration says.
    is_own: bool,
    keys: Vec<&'a str>,
}
