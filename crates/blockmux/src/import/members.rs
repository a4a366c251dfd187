//! Members of JSON objects. What a reader takes is known; what is left when it is done becomes a
//! note.

use super::notes::Notes;
use serde_json::{Map, Value};

/// The members of a JSON object that were not taken yet.
#[derive(Clone, Debug, Default)]
pub(super) struct Members(Map<String, Value>);

impl Members {
    /// The members of an object; `None` for another value.
    pub(super) fn of(value: Value) -> Option<Members> {
        if let Value::Object(members) = value { Some(Members(members)) } else { None }
    }

    /// Takes a member of any type; `null` counts as missing.
    pub(super) fn take(&mut self, key: &str) -> Option<Value> {
        self.0.shift_remove(key).filter(|value| !value.is_null())
    }

    /// Takes a text; numbers are texts in some versions of a format. Lists and objects are left.
    pub(super) fn text(&mut self, key: &str) -> Option<String> {
        if self.0.get(key).is_some_and(|value| value.is_array() || value.is_object()) {
            return None;
        }
        match self.take(key)? {
            Value::String(text) => Some(text),
            other => Some(other.to_string()),
        }
    }

    /// Takes a text that is not empty.
    pub(super) fn filled(&mut self, key: &str) -> Option<String> {
        self.text(key).filter(|text| !text.trim().is_empty())
    }

    /// Takes a number, which may be a text. Another value is left, so that it becomes a note.
    pub(super) fn number(&mut self, key: &str) -> Option<u64> {
        let number = match self.0.get(key)? {
            Value::Number(number) => number.as_u64(),
            Value::String(text) => text.trim().parse().ok(),
            _ => None,
        }?;
        self.0.shift_remove(key);
        Some(number)
    }

    /// Takes a switch: a boolean, 0 or 1, or such a text. Another value is left.
    pub(super) fn flag(&mut self, key: &str) -> Option<bool> {
        let flag = match self.0.get(key)? {
            Value::Bool(flag) => *flag,
            Value::Number(number) => number.as_i64().map(|number| number != 0)?,
            Value::String(text) if text.is_empty() => false,
            Value::String(text) => switch(text)?,
            _ => return None,
        };
        self.0.shift_remove(key);
        Some(flag)
    }

    /// Takes a switch that decides about access: `missing` if there is none, and `unreadable` if
    /// its value is none of a switch, or if its key only begins like this one. These become notes.
    pub(super) fn access_flag(
        &mut self,
        key: &str,
        missing: bool,
        unreadable: bool,
        notes: &mut Notes,
    ) -> bool {
        let is_empty = self.0.get(key).and_then(Value::as_str).is_some_and(|text| text.trim().is_empty());
        if let Some(flag) = (!is_empty).then(|| self.flag(key)).flatten() {
            return flag;
        }
        let alike: Vec<_> = self.0.keys().filter(|own| own.starts_with(key)).cloned().collect();
        alike.iter().for_each(|own| notes.lost(format!("{own} (see the imported file)")));
        self.0.retain(|own, _| !alike.contains(own));
        if alike.is_empty() { missing } else { unreadable }
    }

    /// Whether a key that begins with `word` is none of `known`, or has a value that is no text.
    pub(super) fn has_odd_text(&self, word: &str, known: &[&str]) -> bool {
        self.0.iter().filter(|(key, _)| key.starts_with(word)).any(|(key, value)| {
            let is_text = value.is_string() || value.is_number();
            !is_text || !known.contains(&key.as_str())
        })
    }

    /// Whether a key that begins with `key` is another one, or has a value that is no list of
    /// objects.
    pub(super) fn has_odd_objects(&self, key: &str) -> bool {
        let is_list = |value: &Value| value.as_array().is_some_and(|all| all.iter().all(Value::is_object));
        self.0.iter().any(|(own, value)| own.starts_with(key) && (own != key || !is_list(value)))
    }

    /// Takes a list; another value is left.
    pub(super) fn list(&mut self, key: &str) -> Vec<Value> {
        if !self.0.get(key).is_some_and(Value::is_array) {
            return Vec::new();
        }
        match self.0.shift_remove(key) {
            Some(Value::Array(list)) => list,
            _ => Vec::new(),
        }
    }

    /// Takes a list of objects; other items become notes.
    pub(super) fn objects(&mut self, key: &str, notes: &mut Notes) -> Vec<Members> {
        let mut objects = Vec::new();
        for item in self.list(key) {
            match item {
                Value::Object(members) => objects.push(Members(members)),
                other => notes.setting(key, &other.to_string()),
            }
        }
        objects
    }

    /// Takes a list of texts; other items become notes.
    pub(super) fn texts(&mut self, key: &str, notes: &mut Notes) -> Vec<String> {
        let mut texts = Vec::new();
        for item in self.list(key) {
            match item {
                Value::String(text) => texts.push(text),
                other => notes.setting(key, &other.to_string()),
            }
        }
        texts
    }

    /// Takes an object; empty if there is none.
    pub(super) fn object(&mut self, key: &str) -> Members {
        if !self.0.get(key).is_some_and(Value::is_object) {
            return Members::default();
        }
        self.take(key).and_then(Members::of).unwrap_or_default()
    }

    /// Forgets members that have no effect here.
    pub(super) fn forget(&mut self, keys: &[&str]) {
        self.0.retain(|key, _| !keys.contains(&key.as_str()));
    }

    /// Forgets members that have these values, the defaults of the program that wrote them.
    pub(super) fn forget_defaults(&mut self, defaults: &[(&str, &str)]) {
        self.0.retain(|key, value| {
            let text = plain(value);
            !defaults.iter().any(|(name, default)| name == key && *default == text)
        });
    }

    /// The keys that are left, with their values as text.
    pub(super) fn into_texts(self) -> impl Iterator<Item = (String, String)> {
        self.0.into_iter().map(|(key, value)| (key, plain(&value)))
    }

    /// All members that are left become notes.
    pub(super) fn finish(self, notes: &mut Notes) {
        for (key, value) in self.0 {
            match &value {
                Value::Null => {}
                Value::Array(items) if items.is_empty() => {}
                Value::Object(members) if members.is_empty() => {}
                Value::Object(_) | Value::Array(_) => {
                    // What is below may contain secrets.
                    notes.lost(format!("{key} (see the imported file)"));
                }
                value => notes.setting(&key, &plain(value)),
            }
        }
    }
}

/// The value of a switch in a text.
pub(super) fn switch(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "yes" | "true" | "on" => Some(true),
        "0" | "no" | "false" | "off" => Some(false),
        _ => None,
    }
}

/// A value as text, without quotes.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Bool(flag) => u8::from(*flag).to_string(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_not_taken_becomes_a_note() {
        let value = json!({"a": "x", "n": "7", "f": 1, "none": null, "list": [], "o": {"password": "p"},
            "chap_password": "of twelve bytes", "odd": "x", "left": true, "default": 5});
        let mut members = Members::of(value).unwrap();
        assert_eq!(members.text("a").as_deref(), Some("x"));
        assert_eq!(
            (members.number("n"), members.flag("f"), members.number("odd")),
            (Some(7), Some(true), None)
        );
        assert_eq!(members.text("none"), None);
        members.forget_defaults(&[("default", "5"), ("odd", "y")]);
        let mut notes = Notes::default();
        members.finish(&mut notes);
        let lines: Vec<_> = notes.lines().collect();
        let expected = ["o (see the imported file)", "chap_password (hidden)", "odd x", "left 1"];
        assert_eq!(lines, expected.map(|text| format!("# no counterpart: {text}")));
    }
}
