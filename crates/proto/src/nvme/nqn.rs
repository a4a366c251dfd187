//! NVMe Qualified Names (Base 2.0 §4.5).

use blockmux_wire::nvme::{NQN_FIELD_LEN, NQN_MAX_LEN};
use std::fmt;
use std::str;

/// The NQN of a host or a subsystem, as written: NQNs are compared byte for byte. A host may leave
/// its NQN empty in Connect; a config file cannot contain an empty one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Nqn(String);

/// How a usable name differs from an NQN of the specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NqnViolation {
    /// No known prefix.
    #[error("the name does not begin with nqn.")]
    Prefix,
    /// A blank or a control character.
    #[error("the name contains blanks or control characters")]
    Character,
}

impl Nqn {
    /// Takes a name of 1 to 223 bytes without NUL, as Linux and SPDK do; others cannot be sent.
    #[must_use]
    pub fn new(name: &str) -> Option<Nqn> {
        let is_good = (1..=NQN_MAX_LEN).contains(&name.len()) && !name.contains('\0');
        is_good.then(|| Nqn(name.to_owned()))
    }

    /// How the name violates Base 2.0 §4.5; `None` for a regular name.
    #[must_use]
    pub fn violation(&self) -> Option<NqnViolation> {
        if !self.0.starts_with("nqn.") {
            return Some(NqnViolation::Prefix);
        }
        self.0.contains(|c: char| c.is_control() || c.is_whitespace()).then_some(NqnViolation::Character)
    }

    /// Whether the name can be part of a TLS PSK identity, in which spaces separate names.
    #[must_use]
    pub fn fits_tls_identity(&self) -> bool {
        !self.0.contains(' ')
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
    fn any_name_of_bounded_length_is_taken_as_it_is() {
        let longest = format!("nqn.{}", "x".repeat(219));
        for (name, violation) in [
            ("nqn.2014-08.org.nvmexpress.discovery", None),
            ("nqn.2026-11.test:A/b%\u{e4}", None),
            (&longest, None),
            ("blktests-subsystem-1", Some(NqnViolation::Prefix)),
            ("NQN.2026-11.test:a", Some(NqnViolation::Prefix)),
            ("nqn.a b", Some(NqnViolation::Character)),
            ("nqn.a\n", Some(NqnViolation::Character)),
        ] {
            let nqn = Nqn::new(name).unwrap();
            assert_eq!((nqn.as_str(), nqn.violation()), (name, violation));
            assert_eq!(Nqn::of_field(&nqn.to_field()), Some(nqn));
        }
        assert_ne!(Nqn::new("nqn.A"), Nqn::new("nqn.a"));
        for wrong in ["", "nqn.a\0", &format!("{longest}x")] {
            assert_eq!(Nqn::new(wrong), None, "{wrong:?}");
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
