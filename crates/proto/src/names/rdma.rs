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
    /// RoCEv2, over UDP.
    Roce,
    /// An RDMA device.
    Verbs,
}

/// The name of a fabric in a URL.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FabricName {
    Iwarp,
    Roce,
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

impl<E: From<ParameterError>> ParameterTable<'_, E> {
    /// The parameters of the fabric, of a URL over RDMA; those of other URLs are refused before.
    pub(crate) fn fabric(&mut self, field: &mut Option<Rdma>) {
        let mut has_crc = matches!(field, Some(Rdma::Iwarp { crc: true }));
        let mut name = field.map(|rdma| match rdma {
            Rdma::Iwarp { .. } => FabricName::Iwarp,
            Rdma::Roce => FabricName::Roce,
            Rdma::Verbs => FabricName::Verbs,
        });
        let names = [
            ("iwarp", Some(FabricName::Iwarp)),
            ("roce", Some(FabricName::Roce)),
            ("verbs", Some(FabricName::Verbs)),
        ];
        match has_crc {
            false => self.word("rdma", &mut name, &names, "write iwarp, roce or verbs"),
            true => self.word("rdma", &mut name, &names[..1], "write iwarp, because of crc=on"),
        }
        match name {
            Some(FabricName::Roce) => {
                self.word(
                    "crc",
                    &mut has_crc,
                    &[("off", false)],
                    "packets of RoCEv2 always have a CRC; remove crc",
                );
            }
            Some(FabricName::Verbs) => {
                self.word(
                    "crc",
                    &mut has_crc,
                    &[("off", false)],
                    "RDMA devices have their own CRC; remove crc",
                );
            }
            _ => self.switch("crc", &mut has_crc),
        }
        *field = name.map(|name| match name {
            FabricName::Iwarp => Rdma::Iwarp { crc: has_crc },
            FabricName::Roce => Rdma::Roce,
            FabricName::Verbs => Rdma::Verbs,
        });
    }
}
