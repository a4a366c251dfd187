//! Refuses JSON in which an object has a key twice. RFC 8259 §4 leaves to the reader what that
//! means, and serde takes the last value, which need not be the one that the author has looked at.

use blockmux_volume::spec::with_hidden_secrets;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use std::collections::HashSet;
use std::fmt::{self, Write};

/// Checks that no object has a key twice. Other faults are left to the reader of the document.
///
/// # Errors
/// Names the first such key by its path.
pub(crate) fn check(json: &[u8]) -> Result<(), String> {
    let (mut path, mut twice) = (String::new(), None);
    let keys = Keys { path: &mut path, twice: &mut twice };
    // The reader reports what ends this early.
    let _ = keys.deserialize(&mut serde_json::Deserializer::from_slice(json));
    match twice {
        Some(path) => Err(format!("{} is given twice; write each key once", with_hidden_secrets(&path))),
        None => Ok(()),
    }
}

/// Visits a value at a path.
struct Keys<'a> {
    path: &'a mut String,
    /// The path of a key that was found twice.
    twice: &'a mut Option<String>,
}

impl Keys<'_> {
    /// Visits a part of this value.
    fn part<T>(&mut self, step: fmt::Arguments<'_>, visit: impl FnOnce(Keys<'_>) -> T) -> T {
        let len = self.path.len();
        // Writing to a string does not fail.
        let _ = self.path.write_fmt(step);
        let visited = visit(Keys { path: self.path, twice: self.twice });
        self.path.truncate(len);
        visited
    }
}

impl<'de> DeserializeSeed<'de> for Keys<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Keys<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value of JSON")
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
        let mut at = 0;
        while self.part(format_args!("[{at}]"), |item| items.next_element_seed(item))?.is_some() {
            at += 1;
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut entries: A) -> Result<(), A::Error> {
        let mut seen = HashSet::new();
        while let Some(key) = entries.next_key::<String>()? {
            let dot = if self.path.is_empty() { "" } else { "." };
            self.part(format_args!("{dot}{key}"), |value| {
                if seen.contains(&key) {
                    *value.twice = Some(value.path.clone());
                    return Err(A::Error::custom("a key is given twice"));
                }
                entries.next_value_seed(value)
            })?;
            seen.insert(key);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_given_twice_is_named_by_its_path() {
        for (json, expected) in [
            (r#"{"a": 1, "a": 1}"#, Some("a")),
            (r#"{"a": [{"b": null}, {"b": -1, "c": {"d": 1.5, "d": "x"}}]}"#, Some("a[1].c.d")),
            // The same key, written otherwise.
            (r#"{"a": {"b": true, "\u0062": true}}"#, Some("a.b")),
            (r#"[{"a": 1}, {"a": 1}, {"a": 1, "a": 2}]"#, Some("[2].a")),
            (r#"{"a": {"a": {"a": 18446744073709551615}}, "b": [[], "a"]}"#, None),
            (r#"{"a": 1, "a""#, Some("a")),
            (r#"{"a": 1, "b"#, None),
            ("", None),
        ] {
            let expected = expected.map(|path| format!("{path} is given twice; write each key once"));
            assert_eq!(check(json.as_bytes()).err(), expected, "{json}");
        }
        let deep = "[".repeat(100_000);
        assert_eq!(check(deep.as_bytes()), Ok(()), "the reader refuses it");
    }
}
