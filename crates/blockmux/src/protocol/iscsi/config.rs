//! iSCSI targets in the config file: their logical units and their access control.
//!
//! Keys have the names of RFC 7143 where it has one.

use super::access::{AccessStates, GroupTags, OneOrByListener};
use super::{ISCSI, PREFIX};
use crate::access::networks;
use crate::access::secret;
use crate::failure::Failure;
use crate::protocol::address::{matches_listener, tcp_address};
use crate::protocol::alua::AluaStateName;
use crate::protocol::configured::HasVolumes;
use crate::protocol::lun_map::{self, AclLuns, LunMap};
use crate::protocol::policy::TargetAccess;
use blockmux_proto::iscsi::login::chap::{ChapAlgorithm, ChapCredentials, ChapSecret, SECRET_LENGTH};
use blockmux_proto::iscsi::login::operational::{CRC32C, OperationalKey, OperationalParameters};
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::{Chap, Redirect, offer};
use blockmux_proto::names::networks::AllowedNetworks;
use serde::Deserialize;
use std::collections::HashSet;
use std::net::{Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

/// One `[[iscsi_target]]` of the config file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TargetEntry {
    #[serde(rename = "TargetName")]
    target_name: String,
    #[serde(rename = "TargetAlias", default)]
    target_alias: String,
    /// The listeners through which the target is reached; empty for all.
    #[serde(default)]
    portals: Vec<String>,
    /// The access state of all portal groups, or states by address of the listener; other listeners
    /// are active/optimized.
    access_states: Option<OneOrByListener<AluaStateName>>,
    /// Portal group tags; without the key they are assigned.
    #[serde(rename = "TargetPortalGroupTag")]
    group_tags: Option<OneOrByListener<u16>>,
    /// Volumes by LUN; empty if the target redirects logins, or each acl entry has its own.
    #[serde(default)]
    luns: LunMap,
    /// The address to which logins are redirected, as `host:port`.
    redirect: Option<String>,
    /// Whether the redirection is permanent.
    redirect_kind: Option<RedirectKind>,
    /// The units have removable media (RMB of INQUIRY data).
    #[serde(default)]
    removable: bool,
    #[serde(rename = "HeaderDigest")]
    header_digest: Option<Digest>,
    #[serde(rename = "DataDigest")]
    data_digest: Option<Digest>,
    #[serde(rename = "InitialR2T")]
    initial_r2t: Option<bool>,
    #[serde(rename = "ImmediateData")]
    immediate_data: Option<bool>,
    #[serde(rename = "MaxRecvDataSegmentLength")]
    max_recv_data_segment_length: Option<u32>,
    #[serde(rename = "MaxBurstLength")]
    max_burst_length: Option<u32>,
    #[serde(rename = "FirstBurstLength")]
    first_burst_length: Option<u32>,
    #[serde(rename = "MaxOutstandingR2T")]
    max_outstanding_r2t: Option<u32>,
    #[serde(rename = "MaxConnections")]
    max_connections: Option<u32>,
    #[serde(rename = "ErrorRecoveryLevel")]
    error_recovery_level: Option<u32>,
    #[serde(rename = "DefaultTime2Wait")]
    default_time2_wait: Option<u32>,
    #[serde(rename = "DefaultTime2Retain")]
    default_time2_retain: Option<u32>,
    /// Accepted CHAP algorithms, unless an acl entry has its own; without the key all.
    #[serde(rename = "CHAP_A")]
    chap_a: Option<Vec<ChapAlgorithmName>>,
    /// Access control list; if it is empty, every initiator may log in without authentication.
    #[serde(default)]
    acl: Vec<AclEntry>,
    /// Networks from which initiators may log in.
    #[serde(default, rename = "allow", deserialize_with = "networks::read")]
    networks: AllowedNetworks,
}

/// Configured use of a digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum Digest {
    /// The digest is not used.
    None,
    /// The digest is required.
    #[serde(rename = "CRC32C")]
    Crc32c,
    /// The initiator chooses.
    #[serde(rename = "None,CRC32C")]
    Either,
}

/// The name of a CHAP algorithm (`CHAP_A`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
struct ChapAlgorithmName(ChapAlgorithm);

impl TryFrom<String> for ChapAlgorithmName {
    type Error = String;

    fn try_from(name: String) -> Result<ChapAlgorithmName, String> {
        let unknown = || format!("`{name}` is not a CHAP algorithm; use SHA3-256, SHA-256, SHA1 or MD5");
        ChapAlgorithm::from_name(&name).map(ChapAlgorithmName).ok_or_else(unknown)
    }
}

/// Kind of a redirection (RFC 7143 §11.13.5): target moved temporarily or permanently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum RedirectKind {
    Temporary,
    Permanent,
}

/// `[iscsi_discovery]`: authentication of discovery sessions. Without this table, every initiator
/// may discover targets.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct IscsiDiscoveryEntry {
    /// Accepted CHAP algorithms; without the key all.
    #[serde(rename = "CHAP_A")]
    chap_a: Option<Vec<ChapAlgorithmName>>,
    #[serde(rename = "CHAP_N")]
    chap_n: Option<String>,
    secret_file: Option<PathBuf>,
    #[serde(rename = "target_CHAP_N")]
    target_chap_n: Option<String>,
    target_secret_file: Option<PathBuf>,
}

/// One `[[iscsi_target.acl]]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct AclEntry {
    /// Without the key, the entry applies to all initiators that no other entry names.
    #[serde(rename = "InitiatorName")]
    initiator_name: Option<String>,
    /// The LUNs that the initiator sees; without the key all of the target's.
    #[serde(default)]
    luns: AclLuns,
    /// Accepted CHAP algorithms; without the key, those of the target.
    #[serde(rename = "CHAP_A")]
    chap_a: Option<Vec<ChapAlgorithmName>>,
    /// CHAP name and secret of the initiator.
    #[serde(rename = "CHAP_N")]
    chap_n: Option<String>,
    secret_file: Option<PathBuf>,
    /// CHAP name and secret of the target, for mutual authentication.
    #[serde(rename = "target_CHAP_N")]
    target_chap_n: Option<String>,
    target_secret_file: Option<PathBuf>,
}

/// A validated target with its secrets.
#[derive(Clone, Debug)]
pub(crate) struct ConfiguredTarget {
    pub(super) name: Name,
    pub(super) alias: String,
    /// The listeners through which the target is reached; empty for all.
    portals: Vec<SocketAddr>,
    /// Access states of the listeners. If set, each listener is its own portal group.
    pub(super) access_states: Option<AccessStates>,
    /// Portal group tags of the listeners, if they are configured.
    pub(super) group_tags: Option<GroupTags>,
    /// Volumes by LUN.
    pub(super) luns: LunMap,
    pub(super) removable: bool,
    pub(super) offer: OperationalParameters,
    /// Whether header digests and data digests are required.
    pub(super) needs_digests: [bool; 2],
    pub(super) redirect: Option<Redirect>,
    /// Not empty; entries that name an initiator come first.
    pub(super) acl: Vec<Acl>,
    /// Networks from which initiators may log in.
    pub(super) networks: AllowedNetworks,
}

/// An initiator that may log in to a target, with its authentication and its LUNs.
#[derive(Clone, Debug)]
pub(super) struct Acl {
    pub(super) initiator: Option<Name>,
    pub(super) chap: Option<Chap>,
    /// CHAP name and file of the secret, for announced commands.
    pub(super) user: Option<(String, PathBuf)>,
    pub(super) luns: AclLuns,
}

impl ConfiguredTarget {
    /// Validates an entry and reads the files that it names.
    ///
    /// # Errors
    /// If a value or a file is invalid; the message names the target.
    pub(crate) fn prepare(entry: TargetEntry) -> Result<ConfiguredTarget, Failure> {
        let written = entry.target_name.clone();
        let wrong = |what: String| Failure::request(format!("iscsi_target `{written}`: {what}"));
        let name =
            Name::new(&written).map_err(|error| wrong(format!("{error}; write it as {PREFIX}NAME")))?;
        if let Some(violation) = name.violation() {
            tracing::warn!("iscsi_target `{written}`: {violation}; some initiators refuse it");
        }
        if entry.target_alias.len() > ISCSI.max_description || entry.target_alias.contains('\0') {
            return Err(wrong(
                "TargetAlias is longer than 255 bytes or contains a NUL; shorten it".to_owned(),
            ));
        }
        let luns = entry.luns.clone();
        let redirect = entry.redirect().map_err(wrong)?;
        let portals = entry.portals.iter().map(|portal| tcp_address(portal, ISCSI.port));
        let portals =
            portals.collect::<Result<_, _>>().map_err(|error| wrong(format!("portals: {error}")))?;
        let access_states =
            entry.access_states.as_ref().map(AccessStates::prepare).transpose().map_err(wrong)?;
        let group_tags =
            entry.group_tags.as_ref().map(|tags| GroupTags::prepare(tags, access_states.as_ref()));
        let group_tags = group_tags.transpose().map_err(wrong)?;
        let offer = entry.offer().map_err(wrong)?;
        let acl = entry.acl.iter().map(|acl| acl.prepare(&luns, entry.chap_a.as_deref(), &wrong));
        let mut acl = acl.collect::<Result<Vec<_>, _>>()?;
        if entry.chap_a.is_some() && acl.iter().all(|acl| acl.chap.is_none()) {
            return Err(wrong(
                "CHAP_A has no effect without CHAP_N and secret_file in an acl entry; add them".to_owned(),
            ));
        }
        let mut named = HashSet::new();
        if let Some(twice) = acl.iter().find(|acl| !named.insert(acl.initiator.clone())) {
            let who = twice.initiator.as_ref().map_or("every initiator", Name::as_str);
            return Err(wrong(format!("two acl entries are for {who}; merge them")));
        }
        if acl.is_empty() {
            acl.push(Acl { initiator: None, chap: None, user: None, luns: AclLuns::All });
        }
        acl.sort_by_key(|acl| acl.initiator.is_none());
        let needs_digests =
            [entry.header_digest, entry.data_digest].map(|digest| digest == Some(Digest::Crc32c));
        let TargetEntry { target_alias: alias, removable, networks, .. } = entry;
        Ok(ConfiguredTarget {
            name,
            alias,
            portals,
            access_states,
            group_tags,
            luns,
            removable,
            offer,
            needs_digests,
            redirect,
            acl,
            networks,
        })
    }

    /// Whether the target is reached through the listener.
    pub(super) fn is_at(&self, listener: &SocketAddr) -> bool {
        self.portals.is_empty() || self.portals.iter().any(|portal| matches_listener(portal, listener))
    }

    /// Whether each listener may have an access state of its own.
    pub(super) fn has_states_by_listener(&self) -> bool {
        matches!(self.access_states, Some(AccessStates::ByListener(_)))
    }

    /// Whether every initiator must authenticate.
    fn authenticates_all(&self) -> bool {
        self.acl.iter().all(|acl| acl.chap.is_some())
    }

    /// The target's access control, for the policy.
    pub(super) fn access(&self) -> TargetAccess {
        let is_everybody =
            |acl: &&Acl| acl.initiator.is_none() && acl.chap.is_none() && self.networks.is_everyone();
        let seen = self.acl.iter().filter(is_everybody).flat_map(|acl| acl.luns.of(&self.luns));
        let volumes = lun_map::public_access(self.volumes(), seen.map(|(_, entry)| entry));
        let keeps_out = |acl: &Acl| acl.initiator.is_some() || acl.chap.is_some();
        TargetAccess {
            kind: "iscsi_target",
            name: self.name.as_str().to_owned(),
            listeners: ("portals", self.portals.clone()),
            is_restricted: self.acl.iter().all(keeps_out)
                || volumes.iter().any(|(_, public)| public.is_restricted()),
            volumes,
            authenticates_all: self.authenticates_all(),
            tables: self
                .access_states
                .iter()
                .filter_map(AccessStates::listeners)
                .chain(self.group_tags.iter().filter_map(GroupTags::listeners))
                .collect(),
            moved_to: self.redirect.as_ref().map(|redirect| redirect.address.clone()),
        }
    }
}

impl HasVolumes for ConfiguredTarget {
    /// The names of all volumes that initiators see as LUNs.
    fn volumes(&self) -> impl Iterator<Item = &str> {
        self.luns.volumes().chain(self.acl.iter().flat_map(|acl| acl.luns.own_volumes()))
    }
}

impl IscsiDiscoveryEntry {
    /// Makes relative paths absolute, below `directory`.
    pub(crate) fn anchor(&mut self, directory: &Path) {
        for path in [&mut self.secret_file, &mut self.target_secret_file].into_iter().flatten() {
            *path = directory.join(&*path);
        }
    }

    /// Reads the files that it names.
    ///
    /// # Errors
    /// If a name or a file is missing or invalid.
    pub(crate) fn prepare(&self) -> Result<Chap, Failure> {
        let wrong = |what: String| Failure::request(format!("iscsi_discovery: {what}"));
        let own = (&self.chap_n, &self.secret_file);
        let target = (&self.target_chap_n, &self.target_secret_file);
        let chap = chap(own, target, self.chap_a.as_deref(), &wrong)?;
        chap.ok_or_else(|| wrong("needs CHAP_N and secret_file; add them, or remove the table".to_owned()))
    }
}

impl TargetEntry {
    /// Makes relative paths absolute, below `directory`.
    pub(crate) fn anchor(&mut self, directory: &Path) {
        let files = self.acl.iter_mut().flat_map(|acl| [&mut acl.secret_file, &mut acl.target_secret_file]);
        for path in files.flatten() {
            *path = directory.join(&*path);
        }
    }

    fn redirect(&self) -> Result<Option<Redirect>, String> {
        let kind = self.redirect_kind;
        let Some(address) = &self.redirect else {
            let without = "redirect_kind has no effect without redirect; add redirect = \"host:port\"";
            return if kind.is_none() { Ok(None) } else { Err(without.to_owned()) };
        };
        if !is_portal(address) {
            return Err(format!(
                "redirect: `{address}` is not a host:port; write it as storage2.example.com:3260"
            ));
        }
        Ok(Some(Redirect { address: address.clone(), permanent: kind == Some(RedirectKind::Permanent) }))
    }

    fn offer(&self) -> Result<OperationalParameters, String> {
        let mut offer = offer();
        for (key, digest) in [
            (OperationalKey::HeaderDigest, self.header_digest),
            (OperationalKey::DataDigest, self.data_digest),
        ] {
            offer = match digest {
                None | Some(Digest::Either) => offer,
                Some(Digest::None) => offer.with(key, 0),
                Some(Digest::Crc32c) => offer.with(key, CRC32C).requiring(key),
            };
        }
        let switches = [
            (OperationalKey::InitialR2T, self.initial_r2t),
            (OperationalKey::ImmediateData, self.immediate_data),
        ];
        for (key, value) in switches {
            offer = value.map_or(offer, |value| offer.with(key, u32::from(value)));
        }
        let lengths = 512..=(1 << 24) - 1;
        for (key, value, bounds) in [
            (OperationalKey::MaxRecvDataSegmentLength, self.max_recv_data_segment_length, lengths.clone()),
            (OperationalKey::MaxBurstLength, self.max_burst_length, lengths.clone()),
            (OperationalKey::FirstBurstLength, self.first_burst_length, lengths),
            (OperationalKey::MaxOutstandingR2T, self.max_outstanding_r2t, 1..=65_535),
            (OperationalKey::MaxConnections, self.max_connections, 1..=MAX_CONNECTIONS),
            (OperationalKey::ErrorRecoveryLevel, self.error_recovery_level, 0..=2),
            (OperationalKey::DefaultTime2Wait, self.default_time2_wait, 0..=3600),
            (OperationalKey::DefaultTime2Retain, self.default_time2_retain, 0..=3600),
        ] {
            let Some(value) = value else { continue };
            if !bounds.contains(&value) {
                let (name, least, most) = (key.name(), bounds.start(), bounds.end());
                return Err(format!("{name} {value} is out of range; set a number from {least} to {most}"));
            }
            offer = offer.with(key, value);
        }
        if offer.get(OperationalKey::FirstBurstLength) > offer.get(OperationalKey::MaxBurstLength) {
            return Err("FirstBurstLength is larger than MaxBurstLength; reduce it".to_owned());
        }
        Ok(offer)
    }
}

impl AclEntry {
    fn prepare(
        &self,
        luns: &LunMap,
        chap_a: Option<&[ChapAlgorithmName]>,
        wrong: &impl Fn(String) -> Failure,
    ) -> Result<Acl, Failure> {
        let initiator = self.initiator_name.as_deref().map(Name::new).transpose();
        let initiator = initiator.map_err(|error| wrong(format!("InitiatorName: {error}")))?;
        if let Some((name, violation)) = initiator.as_ref().and_then(|name| Some((name, name.violation()?))) {
            tracing::warn!("iscsi_target acl: InitiatorName `{name}`: {violation}");
        }
        self.luns.check(luns).map_err(wrong)?;
        let own = (&self.chap_n, &self.secret_file);
        let target = (&self.target_chap_n, &self.target_secret_file);
        let chap = chap(own, target, self.chap_a.as_deref().or(chap_a), wrong)?;
        if chap.is_none() && self.chap_a.is_some() {
            return Err(wrong("CHAP_A also needs CHAP_N and secret_file; add them".to_owned()));
        }
        let user = self.chap_n.clone().zip(self.secret_file.clone());
        Ok(Acl { initiator, chap, user, luns: self.luns.clone() })
    }
}

/// A CHAP name and the file of its secret, each optional.
type NameAndSecret<'a> = (&'a Option<String>, &'a Option<PathBuf>);

/// CHAP of initiators (`own`) and, for mutual authentication, of the target. `None` without
/// authentication.
fn chap(
    own: NameAndSecret<'_>,
    target: NameAndSecret<'_>,
    algorithms: Option<&[ChapAlgorithmName]>,
    wrong: &impl Fn(String) -> Failure,
) -> Result<Option<Chap>, Failure> {
    let both = |(name, file): NameAndSecret<'_>, keys: [&str; 2]| match (name, file) {
        (None, None) => Ok(None),
        (Some(name), Some(file)) => {
            let credentials = ChapCredentials::new(name, read_secret(file)?);
            credentials.map(Some).ok_or_else(|| wrong(format!("{} must have 1 to 255 bytes", keys[0])))
        }
        _ => Err(wrong(format!("{} and {} belong together; set both", keys[0], keys[1]))),
    };
    let own = both(own, ["CHAP_N", "secret_file"])?;
    let target = both(target, ["target_CHAP_N", "target_secret_file"])?;
    match (own, target) {
        (None, None) => Ok(None),
        (None, Some(_)) => Err(wrong("target_CHAP_N also needs CHAP_N and secret_file; add them".to_owned())),
        // RFC 7143 §9.2.1 forbids equal secrets.
        (Some(own), Some(target)) if own.secret() == target.secret() => {
            Err(wrong("initiator and target have the same secret; use two different ones".to_owned()))
        }
        _ if algorithms.is_some_and(<[_]>::is_empty) => {
            Err(wrong("CHAP_A is empty; name algorithms, as [\"SHA3-256\", \"SHA-256\"]".to_owned()))
        }
        (Some(initiator), target) => {
            let named = algorithms.map(|named| named.iter().map(|algorithm| algorithm.0).collect());
            Ok(Some(Chap { initiator, target, algorithms: named.unwrap_or(ChapAlgorithm::ALL.to_vec()) }))
        }
    }
}

/// Reads a CHAP secret of this target from a file.
fn read_secret(path: &Path) -> Result<ChapSecret, Failure> {
    let secret = read_any_secret(path)?;
    if secret.is_short() {
        return Err(Failure::request(format!("secret file {}: {SHORT}; use a longer one", path.display())));
    }
    Ok(secret)
}

/// Reads a CHAP secret that another server demands from a file; warns of a short one.
pub(super) fn read_others_secret(path: &Path) -> Result<ChapSecret, Failure> {
    let secret = read_any_secret(path)?;
    warn_if_short(&format!("secret file {}", path.display()), &secret);
    Ok(secret)
}

/// Warns of a short secret that another server demands; `what` names its source.
pub(super) fn warn_if_short(what: &str, secret: &ChapSecret) {
    if secret.is_short() {
        tracing::warn!("{what}: {SHORT}; use a longer one on both sides");
    }
}

fn read_any_secret(path: &Path) -> Result<ChapSecret, Failure> {
    secret::read_any("secret file", path, |line| ChapSecret::new(line).ok_or(SECRET_LENGTH))
}

const SHORT: &str =
    "a CHAP secret of fewer than 12 bytes can be guessed from a recorded login (RFC 7143 §9.2.1)";

/// Whether the text is a TargetAddress with a port and without a portal group tag (RFC 7143 §13.8).
fn is_portal(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let is_host = |host: &str| {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-.".contains(&byte);
        !host.is_empty() && host.len() <= MAX_HOST && host.bytes().all(is_plain)
    };
    let is_host = match host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(ip) => ip.parse::<Ipv6Addr>().is_ok(),
        None => is_host(host),
    };
    is_host && port.parse::<u16>().is_ok_and(|port| port > 0)
}

/// Maximum number of connections of one session.
const MAX_CONNECTIONS: u32 = 64;
/// Maximum length of a host name.
const MAX_HOST: usize = 253;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::policy::PublicAccess;

    fn prepare(text: &str) -> Result<ConfiguredTarget, String> {
        let entry: TargetEntry = toml::from_str(text).map_err(|error| error.message().to_owned())?;
        ConfiguredTarget::prepare(entry).map_err(|failure| failure.to_string())
    }

    #[test]
    fn a_target_has_the_values_of_its_table() {
        let target = prepare(
            "TargetName = 'iqn.2026-11.T:a'\nluns = { 0 = 'x', 16383 = 'y' }\nportals = ['192.0.2.1']\n\
             DataDigest = 'CRC32C'\nInitialR2T = true\nMaxBurstLength = 65536\nFirstBurstLength = 512\n\
             MaxConnections = 2\nErrorRecoveryLevel = 0",
        );
        let target = target.unwrap();
        assert_eq!(target.name.as_str(), "iqn.2026-11.T:a");
        assert_eq!(target.luns.iter().map(|(lun, _)| *lun).collect::<Vec<_>>(), [0, 16_383]);
        assert!(target.is_at(&"192.0.2.1:3260".parse().unwrap()));
        assert!(!target.is_at(&"192.0.2.2:3260".parse().unwrap()));
        assert!(
            target.offer.is_on(OperationalKey::InitialR2T) && target.offer.is_on(OperationalKey::DataDigest)
        );
        let limits = [OperationalKey::MaxConnections, OperationalKey::ErrorRecoveryLevel]
            .map(|key| target.offer.get(key));
        assert_eq!(limits, [2, 0]);
        assert_eq!((target.acl.len(), target.authenticates_all()), (1, false));
    }

    #[test]
    fn a_secret_has_1_to_255_bytes_and_one_of_this_target_at_least_12() {
        let said = |len: usize| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), vec![b'x'; len]).unwrap();
            let read = |read: fn(&Path) -> Result<ChapSecret, Failure>| {
                read(file.path()).map_err(|failure| failure.to_string())
            };
            (read(read_others_secret), read(read_secret))
        };
        for (len, others, own) in [
            (0, Err("must contain exactly one line"), Err("must contain exactly one line")),
            (1, Ok(()), Err("(RFC 7143 §9.2.1); use a longer one")),
            (11, Ok(()), Err("(RFC 7143 §9.2.1); use a longer one")),
            (12, Ok(()), Ok(())),
            (255, Ok(()), Ok(())),
            (256, Err("a CHAP secret has 1 to 255 bytes"), Err("a CHAP secret has 1 to 255 bytes")),
        ] {
            for (read, expected) in [(said(len).0, others), (said(len).1, own)] {
                match expected {
                    Ok(()) => assert!(read.is_ok(), "{len}"),
                    Err(why) => assert!(read.unwrap_err().ends_with(why), "{len}"),
                }
            }
        }
    }

    #[test]
    fn chap_algorithms_are_those_of_the_acl_entry_or_of_the_target_or_all() {
        use std::os::unix::fs::PermissionsExt;
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "initiator-secret").unwrap();
        std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o600)).unwrap();
        let with = |target: &str, acl: &str| {
            let secret = file.path().display();
            let entry = format!("[[acl]]\nCHAP_N = 'u'\nsecret_file = '{secret}'\n{acl}");
            prepare(&format!("TargetName = 'iqn.a'\nluns = {{ 0 = 'x' }}\n{target}\n{entry}"))
        };
        let algorithms =
            |target: &str, acl: &str| with(target, acl).unwrap().acl[0].chap.clone().unwrap().algorithms;
        assert_eq!(algorithms("", ""), ChapAlgorithm::ALL);
        assert_eq!(
            algorithms("CHAP_A = ['SHA3-256', 'sha256']", ""),
            [ChapAlgorithm::Sha3_256, ChapAlgorithm::Sha256]
        );
        assert_eq!(algorithms("CHAP_A = ['SHA-256']", "CHAP_A = ['MD5']"), [ChapAlgorithm::Md5]);
        assert!(with("CHAP_A = []", "").unwrap_err().contains("CHAP_A is empty; name algorithms"));
        let unknown = with("", "CHAP_A = ['SHA-512']").unwrap_err();
        assert!(unknown.contains("`SHA-512` is not a CHAP algorithm"), "{unknown}");
    }

    #[test]
    fn an_acl_entry_may_have_its_own_luns_and_everybody_what_no_entry_protects() {
        let target = prepare(
            "TargetName = 'iqn.a'\nluns = { 0 = 'x', 1 = { volume = 'y', read_only = true }, 2 = 'z' }\n\
             TargetPortalGroupTag = 7\n[[acl]]\nluns = [0, 1]\n\
             [[acl]]\nInitiatorName = 'iqn.i'\nluns = { 0 = { volume = 'w', read_only = true }, 5 = 'x' }",
        );
        let target = target.unwrap();
        let seen = |acl: &Acl| {
            let seen = acl.luns.of(&target.luns);
            seen.map(|(lun, entry)| (lun, entry.volume.clone(), entry.is_read_only)).collect::<Vec<_>>()
        };
        let [own, everybody] = &target.acl[..] else { panic!("two entries") };
        assert_eq!(seen(own), [(0, "w".to_owned(), true), (5, "x".to_owned(), false)]);
        assert_eq!(seen(everybody), [(0, "x".to_owned(), false), (1, "y".to_owned(), true)]);
        assert_eq!(target.group_tags, Some(GroupTags::All(7)));
        let [nothing, read, write] = [PublicAccess::Nothing, PublicAccess::Read, PublicAccess::Write];
        let expected = [("w", nothing), ("x", write), ("y", read), ("z", nothing)];
        assert_eq!(target.access().volumes, expected.map(|(name, public)| (name.to_owned(), public)));
        let alone = "TargetName = 'iqn.a'\n[[acl]]\nInitiatorName = 'iqn.i'\nluns = { 0 = 'x' }";
        assert_eq!(prepare(alone).unwrap().volumes().collect::<Vec<_>>(), ["x"]);
    }

    #[test]
    fn a_target_that_redirects_needs_no_volumes() {
        let to = |rest: &str| prepare(&format!("TargetName = 'iqn.a'\n{rest}"));
        let moved = to("redirect = 'storage2.example.com:3260'\nredirect_kind = 'permanent'").unwrap();
        let address = "storage2.example.com:3260".to_owned();
        assert_eq!(moved.redirect, Some(Redirect { address, permanent: true }));
        assert!(!to("redirect = '[2001:db8::2]:7'").unwrap().redirect.unwrap().permanent);
        for address in ["", "host", ":3260", "host:0", "host:x", "a b:1", "[::1:1", "h,1:3260", "[h]:1"] {
            let error = to(&format!("redirect = '{address}'")).unwrap_err();
            assert!(error.contains(&format!("redirect: `{address}` is not a host:port")), "{error}");
        }
        assert!(to("redirect_kind = 'permanent'").unwrap_err().contains("has no effect without redirect"));
        assert!(
            to("redirect = 'h:1'\nredirect_kind = 'for a while'").unwrap_err().contains("unknown variant")
        );
    }

    #[test]
    fn an_error_names_its_target() {
        let with = |rest: &str| prepare(&format!("TargetName = 'iqn.a'\nluns = {{ 0 = 'x' }}\n{rest}"));
        let wrong = "iscsi_target `iqn.a`: ";
        for (rest, expected) in [
            ("MaxConnections = 65", "MaxConnections 65 is out of range; set a number from 1 to 64"),
            ("MaxBurstLength = 511", "MaxBurstLength 511 is out of range; set a number from 512 to 16777215"),
            ("MaxBurstLength = 512", "FirstBurstLength is larger than MaxBurstLength; reduce it"),
            ("portals = ['unix:/s']", "portals: `unix:/s` is a Unix socket; write host:port"),
            ("[[acl]]\nluns = [1]", "an acl entry has LUN 1, which `luns` does not map; correct one of them"),
            ("[[acl]]\nCHAP_N = 'u'", "CHAP_N and secret_file belong together; set both"),
            (
                "CHAP_A = ['MD5']",
                "CHAP_A has no effect without CHAP_N and secret_file in an acl entry; add them",
            ),
            ("[[acl]]\nCHAP_A = ['MD5']", "CHAP_A also needs CHAP_N and secret_file; add them"),
            ("[[acl]]\n[[acl]]", "two acl entries are for every initiator; merge them"),
            (
                "[[acl]]\nInitiatorName = 'iqn.A'\n[[acl]]\nInitiatorName = 'iqn.a'",
                "two acl entries are for iqn.a; merge them",
            ),
        ] {
            assert_eq!(with(rest).unwrap_err(), format!("{wrong}{expected}"));
        }
        let error = prepare("TargetName = ''\nluns = { 0 = 'x' }").unwrap_err();
        assert!(error.ends_with("; write it as iqn.2026-11.blockmux:NAME"), "{error}");
        // It gets its LUNs later.
        assert!(prepare("TargetName = 'iqn.a'").is_ok());
        assert!(with("HeaderDigest = 'crc'").unwrap_err().starts_with("unknown variant `crc`"));
    }
}
