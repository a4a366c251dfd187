//! The TLS PSKs of a node: configured ones, and generated ones with a limited lifetime (TCP
//! Transport 1.0 §3.6.1.4).

use crate::nvme::auth::psk::{GENERATED_LIFETIME, InputPsk, TlsPsk};
use crate::nvme::nqn::Nqn;
use std::collections::HashMap;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Instant;

/// TLS PSKs by identity. Shared by all cores; looked up once for each connection.
///
/// Besides the configured keys there are at most two for each pair of host and subsystem: a
/// generated key replaces the previous one.
#[derive(Debug, Default)]
pub struct Keyring {
    keys: RwLock<HashMap<String, StoredKey>>,
}

#[derive(Debug)]
struct StoredKey {
    key: TlsPsk,
    /// End of the key's lifetime; `None` for a configured key, which does not expire.
    until: Option<Instant>,
}

impl Keyring {
    /// Adds the TLS PSKs of `input` for connections of `host` to `subsystem`. `now` is the
    /// beginning of a generated key's lifetime.
    pub fn insert(&self, input: &InputPsk, host: &Nqn, subsystem: &Nqn, now: Instant) {
        let until = input.is_generated().then(|| now.checked_add(GENERATED_LIFETIME).unwrap_or(now));
        let mut keys = self.write();
        // Removes expired keys, and replaced ones of the same host and subsystem.
        keys.retain(|_, stored| {
            let is_replaced = until.is_some() && stored.until.is_some() && stored.key.is_for(host, subsystem);
            stored.lasts(now) && !is_replaced
        });
        let new = input.tls_psks(host, subsystem).into_iter();
        keys.extend(new.map(|key| (key.identity.clone(), StoredKey { key, until })));
    }

    /// Replaces all keys, configured and generated, for connections of `host` to `subsystem` in one
    /// step.
    pub fn replace(&self, inputs: &[InputPsk], host: &Nqn, subsystem: &Nqn) {
        let mut keys = self.write();
        keys.retain(|_, stored| !stored.key.is_for(host, subsystem));
        let new = inputs.iter().flat_map(|input| input.tls_psks(host, subsystem));
        keys.extend(new.map(|key| (key.identity.clone(), StoredKey { key, until: None })));
    }

    /// The key with this identity, for a connection whose handshake has used it.
    #[must_use]
    pub fn find(&self, identity: &[u8]) -> Option<TlsPsk> {
        let identity = std::str::from_utf8(identity).ok()?;
        self.read().get(identity).map(|stored| stored.key.clone())
    }

    /// The key with this identity, for a connection that begins `now`; `None` if it has expired.
    #[must_use]
    pub fn find_lasting(&self, identity: &[u8], now: Instant) -> Option<TlsPsk> {
        let identity = std::str::from_utf8(identity).ok()?;
        self.read().get(identity).filter(|stored| stored.lasts(now)).map(|stored| stored.key.clone())
    }

    /// Whether a host has a configured key for a subsystem.
    #[must_use]
    pub fn has_retained(&self, host: &Nqn, subsystem: &Nqn) -> bool {
        self.read().values().any(|stored| stored.until.is_none() && stored.key.is_for(host, subsystem))
    }

    /// What commonly explains that the key of an identity was refused, for the log of this side.
    #[must_use]
    pub fn why_refused(&self, identity: &[u8]) -> &'static str {
        let Some(offered) = std::str::from_utf8(identity).ok().and_then(IdentityParts::of) else {
            return "this is no identity of NVMe/TCP";
        };
        let keys = self.read();
        let known = || keys.keys().filter_map(|known| IdentityParts::of(known));
        let of_pair = || known().filter(|known| known.names() == offered.names());
        if of_pair().any(|known| known == offered) {
            return "the key here is another one, or its side derives it otherwise, as libnvme before 1.16 does";
        }
        if offered.kind == "G" {
            return "the key that DH-HMAC-CHAP generated has expired, or this process has started since";
        }
        let mut retained = of_pair().filter(|known| known.kind == "R").peekable();
        if retained.peek().is_some() {
            return match retained.any(|known| known.hash == offered.hash) {
                true => "the key of this host here is another one: its digest differs",
                false if offered.hash == "01" => {
                    "the key of this host here is for SHA-384 (02), not for SHA-256 (01)"
                }
                false => "the key of this host here is for SHA-256 (01), not for SHA-384 (02)",
            };
        }
        if known().any(|known| known.host == offered.host) {
            return "this host has a key here for other subsystems only";
        }
        match known().any(|known| known.subsystem == offered.subsystem) {
            true => "this subsystem has keys of other hosts only; the host may use another host NQN",
            false => "no host has a key here for this subsystem",
        }
    }

    /// Whether there are no keys.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.read().is_empty()
    }

    fn read(&self) -> RwLockReadGuard<'_, HashMap<String, StoredKey>> {
        self.keys.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<String, StoredKey>> {
        self.keys.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The parts of an identity, `NVMe<version><kind><hash> <host> <subsystem> <digest>`; version 0 has
/// no digest.
#[derive(PartialEq, Eq)]
struct IdentityParts<'a> {
    version: &'a str,
    /// `R` for retained, `G` for generated.
    kind: &'a str,
    hash: &'a str,
    host: &'a str,
    subsystem: &'a str,
    digest: Option<&'a str>,
}

impl IdentityParts<'_> {
    fn of(identity: &str) -> Option<IdentityParts<'_>> {
        let mut words = identity.split(' ');
        let head = words.next()?.strip_prefix("NVMe")?;
        let (version, head) = head.split_at_checked(1)?;
        let (kind, hash) = head.split_at_checked(1)?;
        let (host, subsystem, digest) = (words.next()?, words.next()?, words.next());
        words.next().is_none().then_some(IdentityParts { version, kind, hash, host, subsystem, digest })
    }

    fn names(&self) -> (&str, &str) {
        (self.host, self.subsystem)
    }
}

impl StoredKey {
    fn lasts(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| now < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvme::auth::Hash;
    use crate::nvme::auth::psk::ConfiguredPsk;
    use std::time::Duration;

    #[test]
    fn a_generated_key_replaces_the_previous_one_and_no_other() {
        let [host, other, subsystem] = ["nqn.h", "nqn.o", "nqn.s"].map(|name| Nqn::new(name).unwrap());
        let keyring = Keyring::default();
        assert!(keyring.is_empty());
        let key = ConfiguredPsk::parse("NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:")
            .unwrap();
        let now = Instant::now();
        keyring.insert(&key.retained(&host), &host, &subsystem, now);
        let generated = |fill| InputPsk::generated(Hash::Sha256, vec![fill; 32]).unwrap();
        keyring.insert(&generated(1), &other, &subsystem, now);
        keyring.insert(&generated(1), &host, &subsystem, now);
        let secret = |identity: &str| keyring.find(identity.as_bytes()).map(|key| key.secret().to_vec());
        let first = secret("NVMe0G01 nqn.h nqn.s").unwrap();
        keyring.insert(&generated(2), &host, &subsystem, now);
        assert_ne!(secret("NVMe0G01 nqn.h nqn.s").unwrap(), first);
        assert_eq!(keyring.read().len(), 6);
        assert!(secret("NVMe0R01 nqn.h nqn.s").is_some() && secret("NVMe0G01 nqn.o nqn.s").is_some());
        assert!(keyring.has_retained(&host, &subsystem) && !keyring.has_retained(&other, &subsystem));
        assert!(secret("NVMe0R01 nqn.o nqn.s").is_none() && keyring.find(&[0xff]).is_none());
    }

    #[test]
    fn a_generated_key_expires_after_ten_minutes_and_a_configured_one_never() {
        let [host, other, subsystem] = ["nqn.h", "nqn.o", "nqn.s"].map(|name| Nqn::new(name).unwrap());
        let (keyring, start) = (Keyring::default(), Instant::now());
        let key = ConfiguredPsk::parse("NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:")
            .unwrap();
        keyring.insert(&key.retained(&host), &host, &subsystem, start);
        let generated = InputPsk::generated(Hash::Sha256, vec![1; 32]).unwrap();
        keyring.insert(&generated, &host, &subsystem, start);
        let lasts = |identity: &str, now| keyring.find_lasting(identity.as_bytes(), now).is_some();
        let end = start + GENERATED_LIFETIME;
        assert!(lasts("NVMe0G01 nqn.h nqn.s", end - Duration::from_millis(1)));
        assert!(!lasts("NVMe0G01 nqn.h nqn.s", end) && lasts("NVMe0R01 nqn.h nqn.s", end));
        // A connection whose handshake used it just before it expired still finds it, until another
        // key is generated.
        assert!(keyring.find(b"NVMe0G01 nqn.h nqn.s").is_some());
        keyring.insert(&generated, &other, &subsystem, end);
        assert!(keyring.find(b"NVMe0G01 nqn.h nqn.s").is_none() && lasts("NVMe0G01 nqn.o nqn.s", end));
        assert!(keyring.find(b"NVMe0R01 nqn.h nqn.s").is_some());
    }
    #[test]
    fn a_refused_key_is_explained_by_what_is_known_here() {
        let [host, other, subsystem] = ["nqn.h", "nqn.o", "nqn.s"].map(|name| Nqn::new(name).unwrap());
        let keyring = Keyring::default();
        let key = ConfiguredPsk::parse("NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:")
            .unwrap();
        keyring.replace(&[key.retained(&host)], &host, &subsystem);
        keyring.replace(&[key.retained(&other)], &other, &Nqn::new("nqn.t").unwrap());
        for (identity, expected) in [
            ("alice", "no identity of NVMe/TCP"),
            ("NVMe0R01 nqn.h nqn.s", "the key here is another one"),
            ("NVMe1R01 nqn.h nqn.s AAAA", "its digest differs"),
            ("NVMe0R02 nqn.h nqn.s", "for SHA-256 (01), not for SHA-384 (02)"),
            ("NVMe0G01 nqn.h nqn.s", "DH-HMAC-CHAP generated has expired"),
            ("NVMe0R01 nqn.o nqn.s", "for other subsystems only"),
            ("NVMe0R01 nqn.x nqn.s", "keys of other hosts only"),
            ("NVMe0R01 nqn.x nqn.y", "no host has a key here for this subsystem"),
        ] {
            let said = keyring.why_refused(identity.as_bytes());
            assert!(said.contains(expected), "{identity}: {said}");
        }
    }
}
