//! The RDMA fabric of a URL: the parameter `rdma`, and the options of each fabric.

use super::uri::{ParameterError, ParameterTable};

/// The fabric of a protocol over RDMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rdma {
    /// iWARP, over TCP.
    Iwarp {
        /// Whether frames have a CRC-32C.
        crc: bool,
    },
}

impl Default for Rdma {
    /// The fabric of a URL that names none.
    fn default() -> Rdma {
        Rdma::Iwarp { crc: false }
    }
}

/// The query of URLs of our targets: it names the fabric at their TCP ports.
pub const TARGET_QUERY: &str = "?rdma=iwarp";

impl<E: From<ParameterError>> ParameterTable<'_, E> {
    /// The parameters of the fabric, of a URL over RDMA; those of other URLs are refused before.
    pub(crate) fn fabric(&mut self, field: &mut Option<Rdma>) {
        let mut is_iwarp = field.is_some();
        self.word("rdma", &mut is_iwarp, &[("iwarp", true)], "write iwarp");
        let mut has_crc = matches!(field, Some(Rdma::Iwarp { crc: true }));
        self.switch("crc", &mut has_crc);
        *field = field.map(|_| Rdma::Iwarp { crc: has_crc });
    }
}
