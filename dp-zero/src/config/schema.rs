//! A type's JSON schema, which says what keys and values are known.

use schemars::JsonSchema;
use serde_json::Value;

/// A JSON schema and the definitions it refers to.
pub(super) struct Schema {
    root: Value,
}

/// One of the types that a section can be of, `"type": "AdamW"`.
pub(super) struct Variant<'a> {
    /// The key that says which it is.
    pub tag: &'a str,
    /// What that key says for this one.
    pub name: &'a str,
    /// The section, as it is then.
    pub schema: &'a Value,
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
        if let Some(target) = self.target(schema) {
            return self.resolve(target);
        }
        let is_something = |s: &&Value| s["type"] != "null";
        match schema["anyOf"].as_array() {
            Some(any) if any.iter().filter(is_something).count() == 1 => any
                .iter()
                .find(is_something)
                .map_or(schema, |s| self.resolve(s)),
            _ => schema,
        }
    }

    fn target<'a>(&'a self, schema: &Value) -> Option<&'a Value> {
        let path = schema["$ref"].as_str()?;
        self.root.pointer(path.trim_start_matches('#'))
    }

    /// Whether null is one of the values.
    pub fn is_nullable(&self, schema: &Value) -> bool {
        let has_null = |key: &str| {
            let mut of = schema[key].as_array().into_iter().flatten();
            of.any(|s| s == "null" || s["type"] == "null" || s.is_null())
        };
        schema["type"] == "null" || ["type", "anyOf", "enum"].into_iter().any(has_null)
    }

    /// The keys that stand beside the tag as well as those behind a `$ref`, with their schemas.
    fn properties<'a>(&'a self, schema: &'a Value) -> Vec<(&'a str, &'a Value)> {
        let mut keys = Vec::new();
        if let Some(target) = self.target(schema) {
            keys.extend(self.properties(target));
        }
        let own = schema["properties"].as_object().into_iter().flatten();
        keys.extend(own.map(|(key, s)| (key.as_str(), s)));
        keys
    }

    /// The types of a section, if it has several.
    pub fn variants<'a>(&'a self, schema: &'a Value) -> Vec<Variant<'a>> {
        let resolved = self.resolve(schema);
        let of = ["oneOf", "anyOf"].map(|key| resolved[key].as_array());
        let of = of.into_iter().flatten().flatten();
        of.filter_map(|schema| {
            let mut keys = self.properties(schema).into_iter();
            let (tag, name) = keys.find_map(|(key, s)| Some((key, s["const"].as_str()?)))?;
            Some(Variant { tag, name, schema })
        })
        .collect()
    }

    /// The known keys of a section with this value: of several types, those of the one that `value` names.
    pub fn keys<'a>(&'a self, schema: &'a Value, value: &Value) -> Vec<(&'a str, &'a Value)> {
        let mut keys = self.properties(schema);
        if keys.is_empty() {
            keys = self.properties(self.resolve(schema));
        }
        let variants = self.variants(schema);
        let named = variants.iter().find(|v| value[v.tag] == v.name);
        match named {
            Some(variant) => keys.extend(self.properties(variant.schema)),
            None => keys.extend(variants.iter().flat_map(|v| self.properties(v.schema))),
        }
        keys
    }

    /// The keys that must be there.
    pub fn required<'a>(&'a self, schema: &'a Value, value: &Value) -> Vec<&'a str> {
        let variants = self.variants(schema);
        let named = variants.iter().find(|v| value[v.tag] == v.name);
        let parts = [Some(schema), named.map(|v| v.schema)];
        let parts = parts.into_iter().flatten();
        let lists = parts.flat_map(|s| {
            [s, self.resolve(s)].map(|s| s["required"].as_array().into_iter().flatten())
        });
        lists.flatten().filter_map(Value::as_str).collect()
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
