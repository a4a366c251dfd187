//! iSCSI names (RFC 7143 §4.2.7, RFC 3722).

use blockmux_wire::iscsi::ISCSI_MAX_NAME;
use std::fmt;

/// The normalized name of an iSCSI node: `iqn.`, `eui.` or `naa.` followed by the rest, in lower
/// case.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(String);

/// Why a string is not an iSCSI name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Empty, or longer than 223 bytes.
    #[error("an iSCSI name has 1 to 223 bytes")]
    Length,
    /// No known prefix.
    #[error("an iSCSI name begins with iqn., eui. or naa.")]
    Kind,
    /// A character that RFC 3722 forbids, or invalid hexadecimal digits.
    #[error(
        "an iSCSI name has letters, digits, '-', '.' and ':' only; after eui. and naa. only hexadecimal digits"
    )]
    Byte,
}

impl Name {
    /// Parses a name and converts it to lower case (RFC 3722).
    ///
    /// # Errors
    /// Why the string is not an iSCSI name.
    pub fn new(name: &str) -> Result<Name, NameError> {
        if !(1..=ISCSI_MAX_NAME).contains(&name.len()) {
            return Err(NameError::Length);
        }
        let name = name.to_lowercase();
        let is_hex = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        let is_good = if let Some(digits) = name.strip_prefix("eui.") {
            digits.len() == 16 && is_hex(digits)
        } else if let Some(digits) = name.strip_prefix("naa.") {
            matches!(digits.len(), 16 | 32) && is_hex(digits)
        } else if let Some(rest) = name.strip_prefix("iqn.") {
            // Beyond ASCII, RFC 3722 permits most letters. The forbidden ASCII characters would
            // break lists and logs.
            !rest.is_empty() && rest.chars().all(|c| c.is_alphanumeric() || "-.:".contains(c))
        } else {
            return Err(NameError::Kind);
        };
        if !is_good {
            return Err(NameError::Byte);
        }
        Ok(Name(name))
    }

    /// The normalized name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_kinds_of_names_are_read_in_lower_case() {
        for name in [
            "iqn.2026-11.com.example:Disk-0",
            "iqn.2026-11.com.example",
            "eui.02004567A425678D",
            "naa.52004567ba64678d",
            "naa.62004567BA64678D0123456789ABCDEF",
        ] {
            assert_eq!(Name::new(name).unwrap().as_str(), name.to_lowercase());
        }
    }

    #[test]
    fn invalid_names_are_refused_with_a_reason() {
        let long = format!("iqn.{}", "a".repeat(ISCSI_MAX_NAME - 3));
        assert_eq!(Name::new(""), Err(NameError::Length));
        assert_eq!(Name::new(&long), Err(NameError::Length));
        assert_eq!(Name::new("disk0"), Err(NameError::Kind));
        for name in ["iqn.", "iqn.a b", "iqn.a\nb", "iqn.a,b", "iqn.a=b", "eui.123", "naa.5200456_ba64678d"] {
            assert_eq!(Name::new(name), Err(NameError::Byte), "{name:?}");
        }
    }
}
