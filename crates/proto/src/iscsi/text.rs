//! Text: NUL-terminated `key=value` pairs (RFC 7143 §6.1).
//!
//! [`TextBuilder`] builds text, and [`pairs`] parses it. The key determines the type of its value:
//! a number ([`parse_number`]), a list ([`parse_list`]) or binary ([`parse_binary`]). All lengths
//! are checked here.

use data_encoding::{BASE64, HEXLOWER, HEXLOWER_PERMISSIVE};

/// A syntax error in text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// A pair without `=`.
    #[error("a pair without '='")]
    NoEquals,
    /// A key that is empty, longer than 63 bytes, or has invalid characters.
    #[error("a malformed key")]
    Key,
    /// A value that is not UTF-8.
    #[error("a value that is not UTF-8")]
    Value,
    /// The last pair has no NUL.
    #[error("a pair without its terminating NUL")]
    Unterminated,
}

/// A `key=value` pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyValue<'a> {
    /// The key, at most [`MAX_KEY`] bytes.
    pub key: &'a str,
    /// The value, without NUL.
    pub value: &'a str,
}

/// Parses the pairs of a text, in order, up to the first error. Empty pairs are ignored, because
/// some peers pad with NULs.
pub fn pairs(text: &[u8]) -> impl Iterator<Item = Result<KeyValue<'_>, TextError>> {
    let mut rest = text;
    std::iter::from_fn(move || {
        loop {
            if rest.is_empty() {
                return None;
            }
            let Some(end) = rest.iter().position(|&byte| byte == 0) else {
                rest = &[];
                return Some(Err(TextError::Unterminated));
            };
            let (bytes, behind) = rest.split_at(end);
            rest = behind.get(1..).unwrap_or_default();
            if bytes.is_empty() {
                continue;
            }
            let pair = parse_pair(bytes);
            if pair.is_err() {
                rest = &[];
            }
            return Some(pair);
        }
    })
}

/// Text to send.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TextBuilder(Vec<u8>);

impl TextBuilder {
    /// Appends a pair. The value must not contain a NUL.
    pub fn push(&mut self, key: &str, value: &str) {
        debug_assert!(!value.contains('\0') && is_key(key), "{key}={value}");
        self.0.extend_from_slice(key.as_bytes());
        self.0.push(b'=');
        self.0.extend_from_slice(value.as_bytes());
        self.0.push(0);
    }

    /// Appends a pair with a numeric value.
    pub fn push_number(&mut self, key: &str, value: u32) {
        self.push(key, &value.to_string());
    }

    /// Appends a pair with a binary value, in hexadecimal.
    pub fn push_binary(&mut self, key: &str, value: &[u8]) {
        self.push(key, &format!("0x{}", HEXLOWER.encode(value)));
    }

    /// The text as sent.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Whether there are no pairs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Parses a decimal or hexadecimal number of at most 32 bits (RFC 7143 §6.1, numerical-value).
#[must_use]
pub fn parse_number(value: &str) -> Option<u32> {
    let (digits, radix) = match strip_prefix_of(value, ["0x", "0X"]) {
        Some(digits) => (digits, 16),
        None => (value, 10),
    };
    // `from_str_radix` would accept a sign.
    if !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    u32::from_str_radix(digits, radix).ok()
}

/// Parses `Yes` or `No`.
#[must_use]
pub fn parse_bool(value: &str) -> Option<bool> {
    match value {
        YES => Some(true),
        NO => Some(false),
        _ => None,
    }
}

/// The values of a list, in order of preference.
pub fn parse_list(value: &str) -> impl Iterator<Item = &str> {
    value.split(',')
}

/// Parses a binary value of at most `max_len` bytes: hexadecimal after `0x`, base64 after `0b` (RFC
/// 7143 §6.1, binary-value).
#[must_use]
pub fn parse_binary(value: &str, max_len: usize) -> Option<Vec<u8>> {
    let bytes = if let Some(digits) = strip_prefix_of(value, ["0x", "0X"]) {
        if digits.len().div_ceil(2) > max_len {
            return None;
        }
        parse_hex(digits.as_bytes())?
    } else {
        let digits = strip_prefix_of(value, ["0b", "0B"])?;
        if digits.len() / 4 > max_len {
            return None;
        }
        parse_base64(digits.as_bytes())?
    };
    (bytes.len() <= max_len).then_some(bytes)
}

fn strip_prefix_of<'a>(value: &'a str, prefixes: [&str; 2]) -> Option<&'a str> {
    prefixes.iter().find_map(|prefix| value.strip_prefix(prefix))
}

fn parse_pair(bytes: &[u8]) -> Result<KeyValue<'_>, TextError> {
    let equals = bytes.iter().position(|&byte| byte == b'=').ok_or(TextError::NoEquals)?;
    let (key, value) = bytes.split_at(equals);
    let key = std::str::from_utf8(key).ok().filter(|key| is_key(key)).ok_or(TextError::Key)?;
    let value = std::str::from_utf8(value.get(1..).unwrap_or_default()).map_err(|_| TextError::Value)?;
    Ok(KeyValue { key, value })
}

/// Whether this is a key-name (RFC 7143 §6.1); extension keys contain `#` and `/`.
fn is_key(key: &str) -> bool {
    let is_of_key = |byte: u8| byte.is_ascii_alphanumeric() || b".-+@_#/".contains(&byte);
    (1..=MAX_KEY).contains(&key.len()) && key.bytes().all(is_of_key)
}

/// With an odd number of digits, the first one is a byte of its own.
fn parse_hex(digits: &[u8]) -> Option<Vec<u8>> {
    let first: &[u8] = if digits.len().is_multiple_of(2) { b"" } else { b"0" };
    let even = [first, digits].concat();
    HEXLOWER_PERMISSIVE.decode(&even).ok().filter(|bytes| !bytes.is_empty())
}

/// Padded base64. The library would also accept concatenated padded pieces.
fn parse_base64(digits: &[u8]) -> Option<Vec<u8>> {
    let is_one = digits.iter().rev().skip(2).all(|&digit| digit != b'=');
    BASE64.decode(digits).ok().filter(|bytes| is_one && !bytes.is_empty())
}

/// Maximum length of a key, in bytes (RFC 7143 §6.1, key-name).
pub const MAX_KEY: usize = 63;

/// Maximum length of one negotiation's text, over all its PDUs, in bytes; longer text is rejected.
pub const MAX_TEXT: usize = 64 << 10;

/// Boolean true.
pub const YES: &str = "Yes";
/// Boolean false.
pub const NO: &str = "No";
/// The key is unknown (RFC 7143 §6.2).
pub const NOT_UNDERSTOOD: &str = "NotUnderstood";
/// The key does not apply.
pub const IRRELEVANT: &str = "Irrelevant";
/// The value is not acceptable.
pub const REJECT: &str = "Reject";
/// The empty choice.
pub const NONE: &str = "None";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn pairs_round_trip() {
        let mut text = TextBuilder::default();
        text.push("SendTargets", "All");
        text.push_number("MaxBurstLength", 262_144);
        text.push("InitialR2T", NO);
        text.push_binary("CHAP_C", b"\x00\xff");
        text.push("X-com.example.empty", "");
        let bytes =
            b"SendTargets=All\0MaxBurstLength=262144\0InitialR2T=No\0CHAP_C=0x00ff\0X-com.example.empty=\0";
        assert_eq!(text.as_bytes(), bytes);
        let read: Vec<_> = pairs(bytes).map(|pair| pair.unwrap().value).collect();
        assert_eq!(read, ["All", "262144", "No", "0x00ff", ""]);
    }

    #[test]
    fn nul_padding_is_ignored() {
        let read: Vec<_> = pairs(b"a=1\0\0\0b=2\0\0").map(|pair| pair.unwrap().key).collect();
        assert_eq!(read, ["a", "b"]);
    }

    #[test]
    fn a_malformed_pair_ends_the_text() {
        let long = [b"k".repeat(MAX_KEY + 1), b"=v\0".to_vec()].concat();
        let cases: [(&[u8], TextError); 6] = [
            (b"noequals\0a=b\0", TextError::NoEquals),
            (b"=v\0a=b\0", TextError::Key),
            (b"k y=v\0", TextError::Key),
            (&long, TextError::Key),
            (b"k=\xff\0", TextError::Value),
            (b"k=v", TextError::Unterminated),
        ];
        for (text, error) in cases {
            assert_eq!(pairs(text).collect::<Vec<_>>(), [Err(error)], "{text:?}");
        }
    }

    #[test]
    fn numbers_are_decimal_or_hexadecimal_without_a_sign() {
        let good = [("0", 0), ("0x1F", 31), ("0Xff", 255), ("4294967295", u32::MAX)];
        for (text, number) in good {
            assert_eq!(parse_number(text), Some(number));
        }
        for text in ["", "+1", "-1", "0x", "0x+1", "1f", "4294967296", " 1", "1~2"] {
            assert_eq!(parse_number(text), None, "{text}");
        }
    }

    #[test]
    fn binary_is_hexadecimal_or_base64_of_a_bounded_length() {
        let good: [(&str, &[u8]); 6] = [
            ("0xABcd", b"\xab\xcd"),
            ("0xbcd", b"\x0b\xcd"),
            ("0bTWFu", b"Man"),
            ("0bTWE=", b"Ma"),
            ("0BTQ==", b"M"),
            ("0b+/+/", b"\xfb\xff\xbf"),
        ];
        for (text, bytes) in good {
            assert_eq!(parse_binary(text, 3).as_deref(), Some(bytes), "{text}");
        }
        for text in ["", "ab", "0x", "0xgg", "0b", "0bTQ=", "0bT===", "0bTQ==TQ==", "0b!!!!", "0x01020304"] {
            assert_eq!(parse_binary(text, 3), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_panic(bytes: Vec<u8>) {
            for pair in pairs(&bytes).flatten() {
                let _ = parse_number(pair.value);
                let _ = parse_binary(pair.value, 16);
            }
        }

        #[test]
        fn binary_values_round_trip(bytes in proptest::collection::vec(any::<u8>(), 1..40)) {
            let mut text = TextBuilder::default();
            text.push_binary("k", &bytes);
            let read = pairs(text.as_bytes()).next().unwrap().unwrap();
            prop_assert_eq!(parse_binary(read.value, 40), Some(bytes));
        }
    }
}
