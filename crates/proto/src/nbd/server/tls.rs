//! TLS settings of a server (proto.md, "TLS support").

use crate::driver::session::SecuredBy;
use std::collections::BTreeSet;
use std::sync::Arc;

/// TLS settings of a server; clones share them.
#[derive(Clone, Debug, Default)]
pub struct NbdTls {
    /// Whether clients may or must use TLS.
    pub mode: TlsMode,
    /// The certificate subjects of allowed clients, in the form of RFC 4514; `None`: every client
    /// that completes the TLS handshake is allowed.
    pub subjects: Option<Arc<BTreeSet<String>>>,
}

/// Whether clients may or must use TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsMode {
    /// TLS is refused (NOTLS).
    #[default]
    Off,
    /// Clients may use TLS (SELECTIVETLS without TLS-only exports); it is not protected against a
    /// downgrade by an attacker on the path.
    Optional,
    /// Clients must use TLS (FORCEDTLS).
    Required,
}

impl NbdTls {
    /// Whether a client with this identity may use exports.
    pub(super) fn allows(&self, by: SecuredBy<'_>) -> bool {
        match (&self.subjects, by) {
            (None, _) => true,
            (Some(subjects), SecuredBy::Certificate(subject)) => subjects.contains(subject),
            (Some(_), SecuredBy::Psk(_) | SecuredBy::Nothing) => false,
        }
    }
}
