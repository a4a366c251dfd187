//! iSCSI names (RFC 7143 §4.2.7).
//!
//! A name is kept and sent as it was written: some peers compare names byte for byte, and many use
//! names that RFC 3722 forbids. Names are compared by their prepared form, as RFC 3722 demands.

use blockmux_wire::iscsi::ISCSI_MAX_NAME;
use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use unicode_normalization::UnicodeNormalization;

/// The name of an iSCSI node, as written. Names with the same prepared form are equal.
#[derive(Clone)]
pub struct Name {
    written: Box<str>,
    /// The prepared form, if it differs.
    prepared: Option<Box<str>>,
}

/// Why a string cannot be used as an iSCSI name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Empty, or longer than 223 bytes.
    #[error("an iSCSI name has 1 to 223 bytes")]
    Length,
    /// NUL ends a text.
    #[error("an iSCSI name has no NUL byte")]
    Nul,
}

/// How a usable name differs from what the standards allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameViolation {
    /// No known prefix.
    #[error("the name does not begin with iqn., eui. or naa.")]
    Kind,
    /// A character that RFC 3722 forbids, or invalid hexadecimal digits.
    #[error(
        "the name has other characters than letters, digits, '-', '.' and ':', or after eui. and naa. than hexadecimal digits"
    )]
    Character,
}

impl Name {
    /// Takes a name as it is.
    ///
    /// # Errors
    /// If the protocol cannot carry the name.
    pub fn new(name: &str) -> Result<Name, NameError> {
        if !(1..=ISCSI_MAX_NAME).contains(&name.len()) {
            return Err(NameError::Length);
        }
        if name.contains('\0') {
            return Err(NameError::Nul);
        }
        // Designators have a one-byte length, so a name must not grow.
        let prepared = Some(prepare(name)).filter(|form| form != name && form.len() <= ISCSI_MAX_NAME);
        Ok(Name { written: name.into(), prepared: prepared.map(String::into_boxed_str) })
    }

    /// The name as written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.written
    }

    /// The form in which names are compared, and which SCSI identifiers contain.
    #[must_use]
    pub fn prepared(&self) -> &str {
        self.prepared.as_deref().unwrap_or(&self.written)
    }

    /// How the name violates RFC 7143 or RFC 3722; `None` for a regular name.
    #[must_use]
    pub fn violation(&self) -> Option<NameViolation> {
        let is_hex = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        let name = self.prepared();
        let is_good = if let Some(digits) = name.strip_prefix("eui.") {
            digits.len() == 16 && is_hex(digits)
        } else if let Some(digits) = name.strip_prefix("naa.") {
            matches!(digits.len(), 16 | 32) && is_hex(digits)
        } else if let Some(rest) = name.strip_prefix("iqn.") {
            // Beyond ASCII, RFC 3722 permits most letters.
            !rest.is_empty() && rest.chars().all(|c| c.is_alphanumeric() || "-.:".contains(c))
        } else {
            return Some(NameViolation::Kind);
        };
        (!is_good).then_some(NameViolation::Character)
    }
}

/// Maps and normalizes a name (RFC 3722 §4 and §5). Prohibited characters are kept.
fn prepare(name: &str) -> String {
    if name.is_ascii() {
        return name.to_ascii_lowercase();
    }
    // Upper case first, because that expands what case folding expands, such as the sharp s.
    let fold = |text: &mut dyn Iterator<Item = char>| -> String {
        text.flat_map(char::to_uppercase).flat_map(char::to_lowercase).collect()
    };
    let folded = fold(&mut name.chars().filter(|c| !is_mapped_to_nothing(*c)));
    // Table B.2 of RFC 3454 folds what normalization yields once more.
    fold(&mut folded.nfkc()).nfkc().collect()
}

/// Table B.1 of RFC 3454.
fn is_mapped_to_nothing(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{34f}' | '\u{1806}' | '\u{180b}'..='\u{180d}' | '\u{200b}'..='\u{200d}')
        || matches!(c, '\u{2060}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}')
}

impl PartialEq for Name {
    fn eq(&self, other: &Name) -> bool {
        self.prepared() == other.prepared()
    }
}

impl Eq for Name {}

impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.prepared().hash(state);
    }
}

impl Ord for Name {
    fn cmp(&self, other: &Name) -> Ordering {
        self.prepared().cmp(other.prepared())
    }
}

impl PartialOrd for Name {
    fn partial_cmp(&self, other: &Name) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.written)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    #[test]
    fn three_kinds_of_names_are_regular_and_kept_as_written() {
        for text in [
            "iqn.2026-11.com.example:Disk-0",
            "iqn.2026-11.com.example",
            "eui.02004567A425678D",
            "naa.52004567ba64678d",
            "naa.62004567BA64678D0123456789ABCDEF",
        ] {
            let name = name(text);
            assert_eq!((name.as_str(), name.to_string().as_str(), name.violation()), (text, text, None));
            assert_eq!(name.prepared(), text.to_lowercase());
        }
    }

    #[test]
    fn only_what_the_protocol_cannot_carry_is_refused() {
        let long = format!("iqn.{}", "a".repeat(ISCSI_MAX_NAME - 3));
        assert_eq!(Name::new(""), Err(NameError::Length));
        assert_eq!(Name::new(&long), Err(NameError::Length));
        assert_eq!(Name::new("iqn.a\0b"), Err(NameError::Nul));
        assert_eq!(name("disk0").violation(), Some(NameViolation::Kind));
        for text in [
            "iqn.",
            "iqn.a b",
            "iqn.a\nb",
            "iqn.a,b",
            "iqn.a=b",
            "iqn.a_b",
            "eui.123",
            "naa.5200456_ba64678d",
        ] {
            assert_eq!(name(text).violation(), Some(NameViolation::Character), "{text:?}");
            assert_eq!(name(text).as_str(), text);
        }
    }

    #[test]
    fn names_are_compared_as_rfc_3722_prepares_them() {
        for (one, other) in [
            ("IQN.2026-11.T:Disk_A", "iqn.2026-11.t:disk_a"),
            ("iqn.2026-11.t:Stra\u{df}e", "iqn.2026-11.t:STRASSE"),
            ("iqn.2026-11.t:\u{3a3}", "iqn.2026-11.t:\u{3c2}"),
            ("iqn.2026-11.t:e\u{301}", "iqn.2026-11.t:\u{c9}"),
            ("iqn.2026-11.t:\u{ff21}b", "iqn.2026-11.t:a\u{ad}B"),
            ("iqn.2026-11.t:\u{2103}", "iqn.2026-11.t:\u{b0}c"),
        ] {
            assert_eq!(name(one), name(other));
            assert_eq!(name(one).cmp(&name(other)), Ordering::Equal);
            assert_eq!(name(one).prepared(), name(other).prepared());
            assert_ne!(name(one).as_str(), name(other).as_str());
        }
        assert_ne!(name("iqn.2026-11.t:a-b"), name("iqn.2026-11.t:a_b"));
        // 1 character becomes 18.
        let grown = "\u{fdfa}".repeat(70);
        assert_eq!(name(&grown).prepared(), grown, "a name that would become too long");
    }
}
