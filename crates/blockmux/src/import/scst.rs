//! `scst.conf` of SCST.

use super::model::{
    ChapUser, Imported, ImportedAcl, ImportedChap, ImportedPortal, ImportedSecret, ImportedSrpTarget,
    ImportedTarget, ImportedVolume, LunTable,
};
use super::notes::Notes;
use super::parameters;
use super::scsi_names::{srp_initiator, srp_port};
use super::source::SourceText;
use super::specs::{self, StorageOptions};
use super::tree::{Statement, SyntaxError, braces};
use super::unit_identity::{ScsiIdentity, digits, t10_designator};
use crate::failure::Failure;
use std::collections::{BTreeMap, BTreeSet};

/// Whether the statement is one of this format.
pub(super) fn is_own(statement: &Statement) -> bool {
    statement.is_block && ["HANDLER", "TARGET_DRIVER", "DEVICE_GROUP"].contains(&statement.keyword())
}

/// Reads a file.
///
/// # Errors
/// If the file does not follow the syntax.
pub(super) fn read(source: &SourceText) -> Result<Imported, Failure> {
    let statements = braces(source.text()).map_err(|SyntaxError { line, what }| source.wrong(line, &what))?;
    let mut imported = Imported::default();
    let mut names = BTreeMap::new();
    // Devices may stand behind the targets that have them.
    for handler in statements.iter().filter(|own| own.keyword() == "HANDLER") {
        let kind = handler.argument(0).unwrap_or_default();
        for own in &handler.below {
            match own.keyword() {
                "DEVICE" => device(kind, own, &mut imported, &mut names),
                keyword => imported.notes.setting(keyword, &own.value()),
            }
        }
    }
    for statement in statements.iter().filter(|own| own.keyword() != "HANDLER") {
        match (statement.keyword(), statement.argument(0)) {
            ("TARGET_DRIVER", Some("iscsi")) => iscsi_driver(statement, &mut imported, &names),
            ("TARGET_DRIVER", Some("ib_srpt")) => srp_driver(statement, &mut imported, &names),
            ("TARGET_DRIVER", Some("copy_manager")) => {}
            ("TARGET_DRIVER", driver) => {
                let driver = driver.unwrap_or_default();
                let targets = statement.below.iter().filter(|own| own.keyword() == "TARGET");
                let targets: Vec<_> = targets.map(Statement::value).collect();
                imported.notes.lost(format!("driver {driver}: {}", targets.join(", ")));
            }
            ("DEVICE_GROUP", name) => {
                imported.notes.lost(format!("DEVICE_GROUP {} (ALUA)", name.unwrap_or_default()));
            }
            (keyword, _) => imported.notes.setting(keyword, &statement.value()),
        }
    }
    let is_anywhere = |target: &ImportedTarget| target.portals.is_empty() && target.allow.is_none();
    if imported.targets.iter().any(is_anywhere) {
        // iscsi-scstd listens there without options.
        imported.listeners.add("iscsi", "::", 3260, false);
    }
    Ok(imported)
}

/// Names of volumes by the name of their device.
type DeviceNames = BTreeMap<String, String>;

fn device(kind: &str, statement: &Statement, imported: &mut Imported, names: &mut DeviceNames) {
    let own_name = statement.argument(0).unwrap_or_default();
    let mut options = StorageOptions::default();
    let (mut file, mut is_read_only, mut is_dummy) = (None, false, false);
    let (mut identity, mut notes) = (ScsiIdentity::default(), Notes::default());
    let vendor = if kind == "vdisk_blockio" { "SCST_BIO" } else { "SCST_FIO" };
    identity.vendor = Some(vendor.to_owned());
    identity.product = Some(own_name.chars().take(16).collect());
    let (mut t10_vendor, mut t10_text) = (vendor.to_owned(), None);
    for own in &statement.below {
        let (key, value) = (own.keyword(), own.value());
        let is_on = value == "1";
        match key {
            "filename" => file = Some(value),
            "blocksize" => options.block_size = value.parse().ok(),
            "size" => options.size = specs::size(&value),
            "size_mb" => options.size = value.parse::<u64>().ok().and_then(|size| size.checked_mul(1 << 20)),
            "o_direct" if is_on => options.direct = Some(true),
            "read_only" => is_read_only = is_on,
            "vend_id" => identity.vendor = Some(value),
            "t10_vend_id" => t10_vendor = value,
            "prod_id" => identity.product = Some(value),
            "prod_rev_lvl" => identity.revision = Some(value),
            "usn" => identity.serial = Some(value),
            "naa_id" => identity.naa = Some(digits(&value)),
            "eui64_id" => identity.eui64 = Some(digits(&value)),
            "t10_dev_id" => t10_text = Some(value),
            "rotational" | "threads_num" | "threads_pool_type" | "numa_node_id" | "async" | "o_direct" => {}
            "nv_cache" | "write_through" | "removable" | "thin_provisioned" | "dummy" if !is_on => {}
            "dummy" => is_dummy = true,
            _ => notes.setting(key, &value),
        }
    }
    identity.t10 = t10_text.map(|text| t10_designator(&t10_vendor, &text));
    let spec = match (kind, file) {
        ("vdisk_fileio" | "vdisk_blockio", Some(file)) => Some(specs::of_path(&file, options, &mut notes)),
        ("vdisk_nullio", _) if !is_dummy => {
            let size = options.size.or(Some(NULLIO_SIZE));
            specs::nothing(StorageOptions { size, ..options }, &mut notes)
        }
        _ => None,
    };
    let Some(spec) = spec else {
        return imported.notes.lost(format!("device {own_name} of handler {kind}"));
    };
    let volume = ImportedVolume::new(imported.free_name(own_name), spec);
    let volume = ImportedVolume { read_only: is_read_only, identity, notes, ..volume };
    names.insert(own_name.to_owned(), volume.name.clone());
    imported.volumes.push(volume);
}

/// LUNs and initiators of a target, or of a group of initiators.
#[derive(Default)]
struct LunGroup {
    name: String,
    luns: LunTable,
    initiators: Vec<String>,
}

/// Reads a `LUN` statement.
fn lun(statement: &Statement, names: &DeviceNames, luns: &mut LunTable, notes: &mut Notes) {
    let device = statement.argument(1).unwrap_or_default();
    let is_read_only = |own: &&Statement| own.keyword() == "read_only" && own.argument(0) == Some("1");
    let is_protected = statement.below.iter().any(|own| is_read_only(&own));
    match (statement.argument(0).and_then(|number| number.parse().ok()), names.get(device)) {
        (Some(number), Some(volume)) => luns.insert(number, volume, is_protected, notes),
        _ => notes.lost(format!("LUN {}", statement.value())),
    }
    for own in statement.below.iter().filter(|own| !is_read_only(own) && own.keyword() != "read_only") {
        notes.setting(own.keyword(), &own.value());
    }
}

fn group(statement: &Statement, names: &DeviceNames, notes: &mut Notes) -> LunGroup {
    let name = statement.argument(0).unwrap_or_default().to_owned();
    let mut group = LunGroup { name, ..LunGroup::default() };
    for own in &statement.below {
        match own.keyword() {
            "LUN" => lun(own, names, &mut group.luns, notes),
            "INITIATOR" => group.initiators.push(own.value()),
            "io_grouping_type" | "cpu_mask" | "black_hole" if own.value() == "0" || own.value() == "auto" => {
            }
            key => notes.setting(key, &own.value()),
        }
    }
    group
}

fn chap_user(statement: &Statement) -> Option<ChapUser> {
    // "name secret" is one word, or two.
    let words = statement.value();
    let (name, secret) = words.split_once(' ')?;
    ChapUser::of(Some(name.to_owned()), Some(ImportedSecret::new(secret.trim())))
}

fn iscsi_driver(statement: &Statement, imported: &mut Imported, names: &DeviceNames) {
    let (mut user, mut target_user) = (None, None);
    for own in &statement.below {
        match (own.keyword(), own.argument(0)) {
            ("TARGET", _) => iscsi_target(own, imported, names),
            ("enabled", _) => {}
            // Those of the driver are for discovery.
            ("IncomingUser", _) => user = chap_user(own),
            ("OutgoingUser", _) => target_user = chap_user(own),
            (key, _) => imported.notes.setting(key, &own.value()),
        }
    }
    imported.discovery = user.map(|user| ImportedChap { user, target: target_user });
}

fn iscsi_target(statement: &Statement, imported: &mut Imported, names: &DeviceNames) {
    let name = statement.argument(0).unwrap_or_default().to_owned();
    let mut target = ImportedTarget { name, ..ImportedTarget::default() };
    let mut notes = Notes::default();
    let (mut groups, mut users, mut target_user) = (Vec::new(), Vec::new(), None);
    let mut is_enabled = false;
    for own in &statement.below {
        let (key, value) = (own.keyword(), own.value());
        match key {
            "LUN" => lun(own, names, &mut target.luns, &mut notes),
            "GROUP" => groups.push(group(own, names, &mut notes)),
            "enabled" => is_enabled = value == "1",
            "alias" => target.alias = value,
            "IncomingUser" | "IncomingUser1" | "IncomingUser2" => users.extend(chap_user(own)),
            "OutgoingUser" => target_user = chap_user(own),
            "allowed_portal" => allowed_portal(&value, &mut target, imported, &mut notes),
            "per_portal_acl" => {}
            "io_grouping_type" if value == "auto" => {}
            _ if parameters::set(&mut target, key, &value) => {}
            _ => notes.setting(key, &value),
        }
    }
    let first = (!users.is_empty()).then(|| users.remove(0));
    for user in users {
        notes.lost(format!("IncomingUser {}: an acl entry has one user; add entries by name", user.name));
    }
    let chap = first.map(|user| ImportedChap { user, target: target_user });
    let initiators = groups.iter().flat_map(|group| &group.initiators);
    let portals: BTreeSet<_> = initiators.filter_map(|text| split_portal(text).1).collect();
    portals.into_iter().for_each(|portal| allowed_portal(portal, &mut target, imported, &mut notes));
    let (acl, allow) = access(groups, &target.luns, chap, iscsi_initiator, &mut notes);
    (target.acl, target.allow) = (acl, allow);
    if !is_enabled {
        notes.remark("it was not enabled: nobody may log in until `allow` is removed");
        target.allow = Some(Vec::new());
    }
    target.notes.append(&mut notes);
    imported.targets.push(target);
}

/// An address through which a target is reached; without any, all are.
fn allowed_portal(text: &str, target: &mut ImportedTarget, imported: &mut Imported, notes: &mut Notes) {
    let is_pattern = text.contains(['*', '?', '!']);
    let listener = (!is_pattern).then(|| imported.listeners.add("iscsi", text, 3260, false)).flatten();
    match listener {
        Some(address) => target.portals.push(ImportedPortal { address, tag: None }),
        None => notes.setting("allowed_portal", text),
    }
}

/// Whom an `INITIATOR` statement names.
enum GroupInitiator {
    All,
    One(String),
}

/// Reads the name of an iSCSI initiator; `None` for a pattern that our ACLs cannot express.
fn iscsi_initiator(text: &str) -> Option<GroupInitiator> {
    match split_portal(text).0 {
        "*" => Some(GroupInitiator::All),
        name if name.contains(['*', '?', '!']) => None,
        name => Some(GroupInitiator::One(name.to_owned())),
    }
}

/// Name and portal of an initiator, as `iqn.a\#192.0.2.1` with `per_portal_acl`.
fn split_portal(text: &str) -> (&str, Option<&str>) {
    match text.split_once('#') {
        Some((name, portal)) => (name.trim_end_matches('\\'), Some(portal)),
        None => (text, None),
    }
}

/// The ACL of a target. Initiators of a group see its LUNs, others those of the target; without
/// such LUNs, others see nothing. `read` turns the name of an initiator into ours.
fn access(
    groups: Vec<LunGroup>,
    luns: &LunTable,
    chap: Option<ImportedChap>,
    read: impl Fn(&str) -> Option<GroupInitiator>,
    notes: &mut Notes,
) -> (Vec<ImportedAcl>, Option<Vec<String>>) {
    let mut acl: Vec<ImportedAcl> = Vec::new();
    let (has_groups, mut is_whole) = (!groups.is_empty(), true);
    for group in groups {
        for text in &group.initiators {
            let initiator = match read(text) {
                Some(GroupInitiator::All) => None,
                Some(GroupInitiator::One(name)) => Some(name),
                None => {
                    notes.lost(format!("INITIATOR {text} of group {}", group.name));
                    is_whole = false;
                    continue;
                }
            };
            let luns = Some(group.luns.clone());
            let entry = ImportedAcl { initiator, luns, chap: chap.clone(), ..ImportedAcl::default() };
            // Two portals of one initiator are one entry.
            if !acl.contains(&entry) {
                acl.push(entry);
            }
        }
    }
    let names_all = acl.iter().any(|entry| entry.initiator.is_none());
    // Initiators that could not be kept must not see the LUNs of the others.
    if is_whole && !names_all && !luns.is_empty() && (has_groups || chap.is_some()) {
        acl.push(ImportedAcl { chap, ..ImportedAcl::default() });
    }
    let is_closed = acl.is_empty() && (luns.is_empty() || !is_whole);
    if is_closed {
        notes.remark("nobody saw a LUN: add an acl entry, and remove `allow`");
    }
    (acl, is_closed.then(Vec::new))
}

fn srp_driver(statement: &Statement, imported: &mut Imported, names: &DeviceNames) {
    for own in &statement.below {
        match own.keyword() {
            "TARGET" => srp_target(own, imported, names),
            "enabled" | "one_target_per_port" => {}
            key => imported.notes.setting(key, &own.value()),
        }
    }
}

fn srp_group_initiator(text: &str) -> Option<GroupInitiator> {
    srp_initiator(text).map(GroupInitiator::One)
}

fn srp_target(statement: &Statement, imported: &mut Imported, names: &DeviceNames) {
    let name = statement.argument(0).unwrap_or_default();
    let mut target = ImportedSrpTarget::default();
    let mut notes = Notes::default();
    let mut groups = Vec::new();
    for own in &statement.below {
        match own.keyword() {
            "LUN" => lun(own, names, &mut target.luns, &mut notes),
            "GROUP" => groups.push(group(own, names, &mut notes)),
            "enabled" | "rel_tgt_id" => {}
            key => notes.setting(key, &own.value()),
        }
    }
    let Some(port_id) = srp_port(name) else {
        return imported.notes.lost(format!("SRP target {name}: it is no port identifier"));
    };
    let (mut acl, allow) = access(groups, &target.luns, None, srp_group_initiator, &mut notes);
    // An entry of ours has to name an initiator.
    if acl.iter().any(|entry| entry.initiator.is_none()) && acl.len() > 1 {
        notes.lost("LUNs of initiators that are in no group");
    }
    acl.retain(|entry| entry.initiator.is_some());
    notes.remark(format!("it was {name}; initiators need this port identifier and the address"));
    imported.listeners.add("srp", "0.0.0.0", 5555, true);
    imported.srp_targets.push(ImportedSrpTarget { port_id, acl, allow, notes, ..target });
}

/// Size of a `vdisk_nullio` device without one, in bytes, as SCST makes it.
const NULLIO_SIZE: u64 = 1 << 40;
