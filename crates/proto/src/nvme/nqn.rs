//! NVMe Qualified Names (Base 2.0 §4.5).

use blockmux_wire::nvme::{NQN_FIELD_LEN, NQN_MAX_LEN};
use std::fmt;
use std::str;

/// The NQN of a host or a subsystem: `nqn.`, a date, a domain, and a name. A host may leave its NQN
/// empty in Connect; a config file cannot contain an empty one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Nqn(String);

impl Nqn {
    /// Checks a name from a configuration or a URL.
    #[must_use]
    pub fn new(name: &str) -> Option<Nqn> {
        let is_printable = !name.chars().any(|c| c.is_control() || c.is_whitespace());
        let is_good = name.starts_with("nqn.") && name.len() <= NQN_MAX_LEN && is_printable;
        is_good.then(|| Nqn(name.to_owned()))
    }

    /// Reads a NUL-terminated field of a structure.
    #[must_use]
    pub fn of_field(field: &[u8; NQN_FIELD_LEN]) -> Option<Nqn> {
        let end = field.iter().position(|&byte| byte == 0)?;
        Nqn::new(str::from_utf8(field.get(..end)?).ok()?)
    }

    /// Reads HOSTNQN of Connect, which may be empty.
    pub(crate) fn of_host_field(field: &[u8; NQN_FIELD_LEN]) -> Option<Nqn> {
        if field.starts_with(&[0]) { Some(Nqn(String::new())) } else { Nqn::of_field(field) }
    }

    /// Whether the NQN is empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Encodes the NQN as a field of a structure.
    pub(crate) fn to_field(&self) -> [u8; NQN_FIELD_LEN] {
        let mut field = [0; NQN_FIELD_LEN];
        field.iter_mut().zip(self.0.bytes()).for_each(|(to, from)| *to = from);
        field
    }

    /// The NQN as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_printable_and_of_bounded_length() {
        let longest = format!("nqn.{}", "x".repeat(219));
        assert!(Nqn::new("nqn.2014-08.org.nvmexpress.discovery").is_some());
        assert_eq!(Nqn::new(&longest).unwrap().as_str().len(), NQN_MAX_LEN);
        for wrong in ["", "iqn.a", "nqn.a b", "nqn.a\n", &format!("{longest}x")] {
            assert_eq!(Nqn::new(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_field_has_an_end() {
        let name = Nqn::new("nqn.2026-11.blockmux:a").unwrap();
        assert_eq!(Nqn::of_field(&name.to_field()), Some(name));
        assert_eq!(Nqn::of_field(&[b'x'; NQN_FIELD_LEN]), None);
        assert_eq!(Nqn::of_field(&[0xff; NQN_FIELD_LEN]), None);
    }
}
