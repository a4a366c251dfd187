//! Which clients a server wants by TLS (proto.md, "TLS support").

use crate::session::SecuredBy;
use std::collections::BTreeSet;
use std::sync::Arc;

/// TLS as a server offers it; a clone is another handle.
#[derive(Clone, Debug, Default)]
pub struct NbdTls {
    /// Who has to use it.
    pub mode: TlsMode,
    /// The subjects of certificates whose clients are allowed, as RFC 4514 writes them; `None`:
    /// whoever completes the TLS handshake is allowed.
    pub subjects: Option<Arc<BTreeSet<String>>>,
}

/// Who has to use TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsMode {
    /// TLS is refused (NOTLS).
    #[default]
    Off,
    /// A client may use TLS: somebody between it and us can keep it from that (SELECTIVETLS without
    /// TLS-only exports).
    Optional,
    /// A client can do nothing without TLS (FORCEDTLS).
    Required,
}

impl NbdTls {
    /// Whether a client that authenticated like this may use exports.
    pub(super) fn allows(&self, by: SecuredBy<'_>) -> bool {
        match (&self.subjects, by) {
            (None, _) => true,
            (Some(subjects), SecuredBy::Certificate(subject)) => subjects.contains(subject),
            (Some(_), SecuredBy::Psk(_) | SecuredBy::Nothing) => false,
        }
    }
}
