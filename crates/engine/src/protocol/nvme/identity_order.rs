//! The order in which a connection offers the identities of a TLS key.
//!
//! NVMe defines two versions of an identity, and a target may know one of them only. OpenSSL and
//! GnuTLS look at a client's first identity and end the handshake if they do not know it. So after
//! such a refusal the next connection offers another identity first.

use blockmux_tls::{Psk, TlsError};
use std::sync::{Arc, Mutex, PoisonError};
use tracing::warn;

/// The identity that comes first, if it is not the newest. Shared by all connections to a
/// namespace.
#[derive(Debug, Default)]
pub struct IdentityOrder(Mutex<Option<Vec<u8>>>);

impl IdentityOrder {
    /// The keys in the order in which they are offered.
    pub(super) fn of(&self, keys: &Arc<[Psk]>) -> Arc<[Psk]> {
        let preferred = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_first = |key: &Psk| Some(&key.identity) == preferred.as_ref();
        let mut keys = keys.to_vec();
        if let Some(first) = keys.iter().position(is_first) {
            keys.rotate_left(first);
        }
        keys.into()
    }

    /// Handles the failure of a handshake that offered `keys`. Returns whether the next connection
    /// offers another identity first.
    pub(super) fn on_failure(&self, keys: &[Psk], error: &TlsError) -> bool {
        let [first, second, ..] = keys else { return false };
        if !error.may_be_about_the_identity() {
            return false;
        }
        let mut preferred = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Several connections may have offered the same.
        if preferred.as_ref() != Some(&second.identity) {
            *preferred = Some(second.identity.clone());
            let [first, second] = [first, second].map(|key| String::from_utf8_lossy(&key.identity));
            warn!("target {error}; it was offered TLS identity `{first}` first, now `{second}`");
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_tls::Hash;

    fn alert(name: &str) -> TlsError {
        TlsError::Alert { name: name.to_owned(), hint: "" }
    }

    #[test]
    fn another_identity_comes_first_after_a_refusal_of_the_first() {
        let psk = |name: &str| Psk { identity: name.into(), secret: vec![7; 32].into(), hash: Hash::Sha256 };
        let (both, order) = (Arc::from([psk("one"), psk("zero")]), IdentityOrder::default());
        let names = || order.of(&both).iter().map(|key| key.identity.clone()).collect::<Vec<_>>();
        assert_eq!(names(), [&b"one"[..], b"zero"]);
        assert!(!order.on_failure(&order.of(&both), &alert("decrypt_error")), "it knows the identity");
        assert!(!order.on_failure(&[psk("one")], &alert("internal_error")), "there is no other");
        for (name, next) in [("internal_error", "zero"), ("unknown_psk_identity", "one")] {
            let offered = order.of(&both);
            assert!(order.on_failure(&offered, &alert(name)));
            assert!(order.on_failure(&offered, &alert(name)), "another connection had offered the same");
            assert_eq!(names()[0], next.as_bytes());
        }
    }
}
