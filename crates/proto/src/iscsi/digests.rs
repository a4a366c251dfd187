//! Which digests a connection has (RFC 7143 §13.1).

use super::login::operational::{OperationalKey, OperationalParameters};
use blockmux_wire::iscsi::{DIGEST_LEN, padding};

/// Which digests a connection has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct IscsiDigests {
    pub(super) header: bool,
    pub(super) data: bool,
}

impl IscsiDigests {
    /// What a login agreed on.
    pub(super) fn of(parameters: &OperationalParameters) -> IscsiDigests {
        IscsiDigests {
            header: parameters.is_on(OperationalKey::HeaderDigest),
            data: parameters.is_on(OperationalKey::DataDigest),
        }
    }

    /// Of a header's digest, in bytes.
    #[inline]
    pub(super) fn header_len(self) -> usize {
        if self.header { DIGEST_LEN } else { 0 }
    }

    /// Of what follows a data segment of that length: padding and digest, in bytes.
    #[inline]
    pub(super) fn tail_len(self, data_len: usize) -> usize {
        let digest = if self.data && data_len > 0 { DIGEST_LEN } else { 0 };
        padding(data_len).saturating_add(digest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_data_has_a_data_digest() {
        let digests = IscsiDigests { header: true, data: true };
        assert_eq!((digests.header_len(), digests.tail_len(0), digests.tail_len(5)), (4, 0, 7));
        assert_eq!(IscsiDigests::default().tail_len(6), 2);
    }
}
