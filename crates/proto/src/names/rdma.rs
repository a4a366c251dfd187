//! The RDMA fabric of a URL: the parameter `rdma`, and the options of each fabric.

use super::uri::ParameterTable;

/// The fabric of a protocol over RDMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rdma {
    /// iWARP, over TCP.
    Iwarp {
        /// Whether frames have a CRC-32C.
        crc: bool,
    },
    /// RoCEv2, over UDP.
    Roce,
    /// An RDMA device.
    Verbs,
}

impl Default for Rdma {
    /// The fabric of a URL that names none.
    fn default() -> Rdma {
        Rdma::Iwarp { crc: false }
    }
}

/// The query of URLs of our targets that names the fabric at their TCP ports.
pub const TCP_TARGET_QUERY: &str = "?rdma=iwarp";
/// The query of URLs of our targets that names the fabric at their UDP ports.
pub const UDP_TARGET_QUERY: &str = "?rdma=roce";
/// The query of URLs of our targets that names the fabric of RDMA devices.
pub const DEVICE_TARGET_QUERY: &str = "?rdma=verbs";

impl ParameterTable<'_> {
    /// The parameters of the fabric, of a URL over RDMA; those of other URLs are refused before.
    pub(crate) fn fabric(&mut self, field: &mut Option<Rdma>) {
        let mut has_crc = matches!(field, Some(Rdma::Iwarp { crc: true }));
        let names = [
            ("iwarp", Some(Rdma::Iwarp { crc: has_crc })),
            ("roce", Some(Rdma::Roce)),
            ("verbs", Some(Rdma::Verbs)),
        ];
        match has_crc {
            false => self.word("rdma", field, &names, "write iwarp, roce or verbs"),
            true => self.word("rdma", field, &names[..1], "write iwarp, because of crc=on"),
        }
        let fixed = match field {
            Some(Rdma::Roce) => Some("packets of RoCEv2 always have a CRC; remove crc"),
            Some(Rdma::Verbs) => Some("RDMA devices have their own CRC; remove crc"),
            Some(Rdma::Iwarp { .. }) | None => None,
        };
        match fixed {
            Some(problem) => self.word("crc", &mut has_crc, &[("off", false)], problem),
            None => self.switch("crc", &mut has_crc),
        }
        if let Some(Rdma::Iwarp { crc }) = field {
            *crc = has_crc;
        }
    }
}
