//! Digests of a connection (RFC 7143 §13.1).

use super::login::operational::{OperationalKey, OperationalParameters};
use blockmux_wire::iscsi::{DIGEST_LEN, padding};

/// Digests that are in use on a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct IscsiDigests {
    pub(super) header: bool,
    pub(super) data: bool,
}

impl IscsiDigests {
    /// The negotiated digests.
    pub(super) fn of(parameters: &OperationalParameters) -> IscsiDigests {
        IscsiDigests {
            header: parameters.is_on(OperationalKey::HeaderDigest),
            data: parameters.is_on(OperationalKey::DataDigest),
        }
    }

    /// Length of a header digest, in bytes.
    #[inline]
    pub(super) fn header_len(self) -> usize {
        if self.header { DIGEST_LEN } else { 0 }
    }

    /// Length of the padding and digest after a data segment, in bytes.
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
