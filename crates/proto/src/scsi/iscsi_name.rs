//! iSCSI names (RFC 7143 §4.2.7, RFC 3722).

use blockmux_wire::iscsi::ISCSI_MAX_NAME;
use std::fmt;

/// The name of an iSCSI node: `iqn.`, `eui.` or `naa.` and what belongs behind it, in lower case.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(String);

/// What is no iSCSI name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Empty, or longer than 223 bytes.
    #[error("an iSCSI name has 1 to 223 bytes")]
    Length,
    /// None of the three kinds.
    #[error("an iSCSI name begins with iqn., eui. or naa.")]
    Kind,
    /// A byte that RFC 3722 forbids, or a number that is none.
    #[error(
        "an iSCSI name has letters, digits, '-', '.' and ':' only; behind eui. and naa. hexadecimal digits"
    )]
    Byte,
}

impl Name {
    /// Reads a name; upper case becomes lower case, as RFC 3722 has it.
    ///
    /// # Errors
    /// What is wrong with it.
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
            // Beyond ASCII, RFC 3722 allows most letters; forbidden ASCII is what breaks lists and
            // logs.
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
    fn what_is_no_name_says_why() {
        let long = format!("iqn.{}", "a".repeat(ISCSI_MAX_NAME - 3));
        assert_eq!(Name::new(""), Err(NameError::Length));
        assert_eq!(Name::new(&long), Err(NameError::Length));
        assert_eq!(Name::new("disk0"), Err(NameError::Kind));
        for name in ["iqn.", "iqn.a b", "iqn.a\nb", "iqn.a,b", "iqn.a=b", "eui.123", "naa.5200456_ba64678d"] {
            assert_eq!(Name::new(name), Err(NameError::Byte), "{name:?}");
        }
    }
}
