//! What every foreign config is read into, before it is written as ours.
//!
//! A reader of a format fills [`Imported`]. What our config cannot express stays with its object as
//! a [`Notes`] entry, so that nothing is lost silently. [`Imported::settle`] then makes the whole
//! valid: one listener for each address, no target without LUNs, a list of protocols for each
//! volume.

use super::listeners::Listeners;
use super::notes::Notes;
use super::unit_identity::ScsiIdentity;
use blockmux_proto::scsi::MAX_LUN;
use blockmux_volume::Spec;
use std::collections::{BTreeMap, BTreeSet};
use toml::Value;
use zeroize::Zeroizing;

/// A foreign config in the words of ours.
#[derive(Default)]
pub(super) struct Imported {
    /// Settings of the whole program.
    pub(super) notes: Notes,
    /// Single keys at the top level, such as `nbd_tls`.
    pub(super) keys: Vec<(&'static str, Value)>,
    pub(super) listeners: Listeners,
    pub(super) volumes: Vec<ImportedVolume>,
    /// Authentication of iSCSI discovery.
    pub(super) discovery: Option<ImportedChap>,
    pub(super) targets: Vec<ImportedTarget>,
    pub(super) srp_targets: Vec<ImportedSrpTarget>,
    pub(super) subsystems: Vec<ImportedSubsystem>,
    pub(super) referrals: Vec<ImportedReferral>,
}

/// A `[[volume]]`.
pub(super) struct ImportedVolume {
    pub(super) name: String,
    pub(super) spec: Spec,
    pub(super) uuid: Option<String>,
    pub(super) read_only: bool,
    pub(super) description: String,
    /// Networks of its clients; `None`: all.
    pub(super) allow: Option<Vec<String>>,
    /// Limits of all its clients together, by key.
    pub(super) limits: Vec<(&'static str, Value)>,
    /// It is an NBD export.
    pub(super) is_nbd: bool,
    /// Protocols and targets that export it; [`Imported::settle`] fills it.
    pub(super) protocols: BTreeSet<String>,
    pub(super) identity: ScsiIdentity,
    pub(super) notes: Notes,
}

impl ImportedVolume {
    pub(super) fn new(name: String, spec: Spec) -> ImportedVolume {
        ImportedVolume {
            name,
            spec,
            uuid: None,
            read_only: false,
            description: String::new(),
            allow: None,
            limits: Vec::new(),
            is_nbd: false,
            protocols: BTreeSet::new(),
            identity: ScsiIdentity::default(),
            notes: Notes::default(),
        }
    }
}

/// Volumes by LUN.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct LunTable(BTreeMap<u16, MappedVolume>);

/// The volume of a LUN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MappedVolume {
    pub(super) volume: String,
    pub(super) is_read_only: bool,
}

impl LunTable {
    /// Maps a volume to a LUN; a mapping that our config refuses becomes a note.
    pub(super) fn insert(&mut self, lun: u64, volume: &str, is_read_only: bool, notes: &mut Notes) {
        let Some(number) = u16::try_from(lun).ok().filter(|lun| *lun <= MAX_LUN) else {
            return notes.lost(format!("LUN {lun} of {volume}: LUNs are numbers up to {MAX_LUN}"));
        };
        let is_other = |own: &&MappedVolume| own.volume == volume && own.is_read_only != is_read_only;
        if self.0.values().any(|own| is_other(&own)) {
            return notes
                .lost(format!("LUN {lun} of {volume}: it is read-only at one LUN and writable at another"));
        }
        if self.0.contains_key(&number) {
            return notes.lost(format!("LUN {lun} of {volume}: that LUN has another volume"));
        }
        self.0.insert(number, MappedVolume { volume: volume.to_owned(), is_read_only });
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&u16, &MappedVolume)> {
        self.0.iter()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The lowest number from `first` on without a volume.
    pub(super) fn next_free(&self, first: u64) -> u64 {
        let is_taken = |lun: &u64| u16::try_from(*lun).is_ok_and(|lun| self.0.contains_key(&lun));
        (first..).find(|lun| !is_taken(lun)).unwrap_or(first)
    }

    /// The volume of a LUN.
    pub(super) fn volume_of(&self, lun: u64) -> Option<&MappedVolume> {
        self.0.get(&u16::try_from(lun).ok()?)
    }

    /// These LUNs with write protection.
    pub(super) fn write_protected(&self) -> LunTable {
        let protected = |(lun, mapped): (&u16, &MappedVolume)| {
            (*lun, MappedVolume { is_read_only: true, ..mapped.clone() })
        };
        LunTable(self.0.iter().map(protected).collect())
    }
}

/// A secret. It has no text form, so that no message can contain it.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct ImportedSecret(pub(super) Zeroizing<String>);

impl ImportedSecret {
    pub(super) fn new(text: impl Into<String>) -> ImportedSecret {
        ImportedSecret(Zeroizing::new(text.into()))
    }
}

/// CHAP of an initiator and, for mutual authentication, of the target.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct ImportedChap {
    pub(super) user: ChapUser,
    pub(super) target: Option<ChapUser>,
}

/// A CHAP name and its secret.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct ChapUser {
    pub(super) name: String,
    pub(super) secret: ImportedSecret,
}

impl ChapUser {
    /// `None` if one of them is missing or empty, which means no authentication in every format.
    pub(super) fn of(name: Option<String>, secret: Option<ImportedSecret>) -> Option<ChapUser> {
        let name = name.filter(|name| !name.is_empty())?;
        let secret = secret.filter(|secret| !secret.0.is_empty())?;
        Some(ChapUser { name, secret })
    }
}

/// An `[[iscsi_target]]`.
#[derive(Default)]
pub(super) struct ImportedTarget {
    pub(super) name: String,
    pub(super) alias: String,
    pub(super) luns: LunTable,
    /// Addresses of [`Listeners`], with their portal group tags; empty: all listeners.
    pub(super) portals: Vec<ImportedPortal>,
    /// Address of another target portal.
    pub(super) redirect: Option<String>,
    /// Keys of the login, such as `MaxBurstLength`.
    pub(super) parameters: Vec<(&'static str, Value)>,
    pub(super) acl: Vec<ImportedAcl>,
    /// Networks of its initiators; `None`: all, empty: nobody.
    pub(super) allow: Option<Vec<String>>,
    pub(super) notes: Notes,
}

/// A listener of a target or a subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ImportedPortal {
    pub(super) address: String,
    pub(super) tag: Option<u16>,
}

/// An `[[iscsi_target.acl]]`.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct ImportedAcl {
    /// `None`: all initiators that no other entry names.
    pub(super) initiator: Option<String>,
    /// `None`: all LUNs of the target.
    pub(super) luns: Option<LunTable>,
    pub(super) chap: Option<ImportedChap>,
    pub(super) notes: Notes,
}

/// An `[[srp_target]]`.
#[derive(Default)]
pub(super) struct ImportedSrpTarget {
    pub(super) port_id: String,
    pub(super) luns: LunTable,
    pub(super) acl: Vec<ImportedAcl>,
    pub(super) allow: Option<Vec<String>>,
    pub(super) notes: Notes,
}

/// An `[[nvme_subsystem]]`.
#[derive(Default)]
pub(super) struct ImportedSubsystem {
    pub(super) nqn: String,
    pub(super) serial_number: Option<String>,
    pub(super) model_number: Option<String>,
    /// Addresses of [`Listeners`]; empty: all.
    pub(super) listeners: Vec<String>,
    pub(super) namespaces: Vec<ImportedNamespace>,
    /// `None`: every host.
    pub(super) hosts: Option<Vec<ImportedHost>>,
    pub(super) ana_groups: Vec<ImportedAnaGroup>,
    pub(super) allow: Option<Vec<String>>,
    pub(super) notes: Notes,
}

/// An `[[nvme_subsystem.namespace]]`.
#[derive(Default)]
pub(super) struct ImportedNamespace {
    pub(super) nsid: u64,
    pub(super) volume: String,
    pub(super) nguid: Option<String>,
    pub(super) eui64: Option<String>,
    pub(super) uuid: Option<String>,
    pub(super) notes: Notes,
}

/// An `[[nvme_subsystem.host]]`.
#[derive(Clone, Default)]
pub(super) struct ImportedHost {
    pub(super) nqn: String,
    pub(super) dhchap_secret: Option<KeyPlace>,
    pub(super) dhchap_ctrl_secret: Option<KeyPlace>,
    pub(super) tls_key: Option<KeyPlace>,
    pub(super) dhchap_hash: Option<String>,
    pub(super) dhchap_dhgroup: Option<String>,
    /// NSIDs that it sees; `None`: all.
    pub(super) namespaces: Option<Vec<u64>>,
    pub(super) notes: Notes,
}

/// Where a foreign config has a key.
#[derive(Clone)]
pub(super) enum KeyPlace {
    /// In itself.
    Text(ImportedSecret),
    /// In a file of its own.
    File(String),
}

/// An `[[nvme_subsystem.ana_group]]`.
#[derive(Default)]
pub(super) struct ImportedAnaGroup {
    pub(super) id: u64,
    pub(super) namespaces: Vec<u64>,
    /// States by address of the listener.
    pub(super) states: BTreeMap<String, String>,
}

/// An `[[nvme_discovery.referral]]`.
pub(super) struct ImportedReferral {
    pub(super) traddr: String,
    pub(super) trsvcid: Option<u64>,
    pub(super) subnqn: Option<String>,
    pub(super) notes: Notes,
}

impl Imported {
    /// Whether clients can reach a volume.
    pub(super) fn exports_any(&self) -> bool {
        self.volumes.iter().any(|volume| !volume.protocols.is_empty())
    }

    /// A name for a volume that no other one has, of characters that names may have.
    pub(super) fn free_name(&self, wanted: &str) -> String {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let plain: String =
            wanted.chars().take(MAX_NAME).map(|c| if is_plain(c) { c } else { '-' }).collect();
        let plain = plain.trim_matches('-');
        let plain = if plain.is_empty() { "disk" } else { plain };
        let is_taken = |name: &str| self.volumes.iter().any(|volume| volume.name == name);
        let mut name = plain.to_owned();
        let mut number = 2;
        while is_taken(&name) {
            name = format!("{plain}-{number}");
            number += 1;
        }
        name
    }

    /// Makes the whole valid, after a reader has filled it.
    pub(super) fn settle(&mut self) {
        self.listeners.settle();
        self.leave_out_empty();
        self.leave_out_repeated();
        for target in &mut self.targets {
            target.settle(&self.listeners);
        }
        for subsystem in &mut self.subsystems {
            subsystem.settle(&self.listeners);
        }
        self.settle_protocols();
        self.settle_identities();
    }

    /// Targets without LUNs and subsystems without namespaces become notes: our config has none.
    fn leave_out_empty(&mut self) {
        let notes = &mut self.notes;
        self.targets.retain_mut(|target| {
            let is_kept = target.redirect.is_some() || has_luns(&target.luns, &target.acl);
            if !is_kept {
                notes.lost(format!("target {}: it has no LUNs", target.name));
                notes.append_lost(&mut target.notes);
            }
            is_kept
        });
        self.srp_targets.retain_mut(|target| {
            let is_kept = has_luns(&target.luns, &target.acl);
            if !is_kept {
                notes.lost(format!("SRP target {}: it has no LUNs", target.port_id));
                notes.append_lost(&mut target.notes);
            }
            is_kept
        });
        self.subsystems.retain_mut(|subsystem| {
            let is_kept = !subsystem.namespaces.is_empty();
            if !is_kept {
                notes.lost(format!("subsystem {}: it has no namespaces", subsystem.nqn));
                notes.append_lost(&mut subsystem.notes);
            }
            is_kept
        });
    }

    /// Names of targets and serial numbers that occur twice, which our config refuses.
    fn leave_out_repeated(&mut self) {
        let notes = &mut self.notes;
        let mut names = BTreeSet::new();
        self.targets.retain_mut(|target| {
            let is_first = names.insert(target.name.to_ascii_lowercase());
            if !is_first {
                notes.lost(format!("target {}: another one has this name", target.name));
                notes.append_lost(&mut target.notes);
            }
            is_first
        });
        self.subsystems.retain_mut(|subsystem| {
            let is_first = names.insert(subsystem.nqn.clone());
            if !is_first {
                notes.lost(format!("subsystem {}: another one has this name", subsystem.nqn));
                notes.append_lost(&mut subsystem.notes);
            }
            is_first
        });
        for subsystem in &mut self.subsystems {
            let serial = subsystem.serial_number.take();
            subsystem.serial_number = serial.filter(|serial| {
                let is_first = names.insert(format!("serial number {serial}"));
                if !is_first {
                    subsystem.notes.lost(format!("serial number {serial}: another subsystem has it"));
                }
                is_first
            });
        }
    }

    /// Keeps what SCSI initiators recognize volumes by; the others have no such initiators.
    fn settle_identities(&mut self) {
        let mut taken = BTreeSet::new();
        for volume in &mut self.volumes {
            match ["iscsi", "srp"].iter().any(|word| volume.protocols.contains(*word)) {
                true => volume.identity.settle(&mut taken, &mut volume.notes),
                false => volume.identity = ScsiIdentity::default(),
            }
        }
    }

    /// Lists for each volume the protocols that export it. A volume that one target restricts and
    /// another shows to everybody has to name the latter.
    fn settle_protocols(&mut self) {
        let mut users: BTreeMap<String, Vec<(&str, String)>> = BTreeMap::new();
        let mut uses = |volume: &str, protocol: &'static str, target: &str| {
            users.entry(volume.to_owned()).or_default().push((protocol, target.to_owned()));
        };
        for target in &self.targets {
            let own = target.acl.iter().filter_map(|acl| acl.luns.as_ref());
            let mapped = own.chain([&target.luns]).flat_map(LunTable::iter);
            let volumes: BTreeSet<_> = mapped.map(|(_, mapped)| &mapped.volume).collect();
            volumes.into_iter().for_each(|volume| uses(volume, "iscsi", &target.name));
        }
        for target in &self.srp_targets {
            let own = target.acl.iter().filter_map(|acl| acl.luns.as_ref());
            let mapped = own.chain([&target.luns]).flat_map(LunTable::iter);
            let volumes: BTreeSet<_> = mapped.map(|(_, mapped)| &mapped.volume).collect();
            volumes.into_iter().for_each(|volume| uses(volume, "srp", &target.port_id));
        }
        for subsystem in &self.subsystems {
            let volumes: BTreeSet<_> = subsystem.namespaces.iter().map(|one| &one.volume).collect();
            volumes.into_iter().for_each(|volume| uses(volume, "nvme_tcp", &subsystem.nqn));
        }
        for volume in &mut self.volumes {
            let mut own = users.remove(&volume.name).unwrap_or_default();
            volume.protocols.extend(own.iter().map(|(protocol, _)| (*protocol).to_owned()));
            volume.protocols.extend(volume.is_nbd.then(|| "nbd".to_owned()));
            // Only SRP has no names of targets that `protocols` could contain.
            own.retain(|(protocol, _)| *protocol != "srp");
            if own.len() > 1 {
                volume.protocols.extend(own.into_iter().map(|(_, target)| target));
            }
        }
    }
}

impl ImportedTarget {
    fn settle(&mut self, listeners: &Listeners) {
        let mut portals: Vec<ImportedPortal> = Vec::new();
        for mut portal in std::mem::take(&mut self.portals) {
            let settled = listeners.settled(&portal.address);
            if settled != portal.address {
                self.notes.lost(format!("portal {} only: {settled} has all addresses", portal.address));
            }
            portal.address = settled;
            match portals.iter().find(|other| other.address == portal.address) {
                Some(other) if other.tag != portal.tag => {
                    let tag = portal.tag.map(|tag| tag.to_string()).unwrap_or_default();
                    self.notes.lost(format!("portal group {tag} at {}, which is in another", portal.address));
                }
                Some(_) => {}
                None => portals.push(portal),
            }
        }
        self.portals = portals;
        let mut named = BTreeSet::new();
        let notes = &mut self.notes;
        self.acl.retain_mut(|acl| {
            let is_first = named.insert(acl.initiator.as_ref().map(|name| name.to_ascii_lowercase()));
            if !is_first {
                let who = acl.initiator.as_deref().unwrap_or("all initiators");
                let user = acl.chap.as_ref().map(|chap| format!(", CHAP name {}", chap.user.name));
                let user = user.unwrap_or_default();
                notes.lost(format!("another entry for {who}{user}: Blockmux has one for each initiator"));
                notes.append(&mut acl.notes);
            }
            is_first
        });
    }
}

impl ImportedSubsystem {
    fn settle(&mut self, listeners: &Listeners) {
        let mut settled: Vec<String> = Vec::new();
        for address in std::mem::take(&mut self.listeners) {
            let address = listeners.settled(&address);
            if !settled.contains(&address) {
                settled.push(address);
            }
        }
        self.listeners = settled;
        let (known, notes) = (&self.listeners, &mut self.notes);
        for group in &mut self.ana_groups {
            let states = std::mem::take(&mut group.states);
            group.states =
                states.into_iter().map(|(address, state)| (listeners.settled(&address), state)).collect();
            group.states.retain(|address, _| known.contains(address));
        }
        self.ana_groups.retain(|group| {
            let is_kept = !group.namespaces.is_empty();
            if !is_kept && group.states.values().any(|state| state != "optimized") {
                notes.remark(format!("ANA group {} has no namespaces", group.id));
            }
            is_kept
        });
    }
}

/// Whether initiators see LUNs, as our config demands.
fn has_luns(luns: &LunTable, acl: &[ImportedAcl]) -> bool {
    !luns.is_empty() || !acl.is_empty() && acl.iter().all(|acl| acl.luns.is_some())
}

/// Maximum length of a volume's name that a reader makes.
const MAX_NAME: usize = 100;
