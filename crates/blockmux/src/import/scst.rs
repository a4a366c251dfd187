//! `scst.conf` of SCST.

use super::access::{AccessRules, DISABLED, begins, unknown_discovery_user};
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
    if imported.targets.iter().any(|target| target.portals.is_empty()) {
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
            // Initiators may not write where they perhaps could not before.
            key if begins(key, &["read_only"]) => is_read_only |= value != "0",
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
    /// All of its initiators could be read.
    is_whole: bool,
}

/// Reads a `LUN` statement.
fn lun(statement: &Statement, names: &DeviceNames, luns: &mut LunTable, notes: &mut Notes) {
    let device = statement.argument(1).unwrap_or_default();
    let is_read_only = |own: &&Statement| begins(own.keyword(), &["read_only"]);
    let is_protected = statement.below.iter().filter(is_read_only).any(|own| own.value() != "0");
    match (statement.argument(0).and_then(|number| number.parse().ok()), names.get(device)) {
        (Some(number), Some(volume)) => luns.insert(number, volume, is_protected, notes),
        _ => notes.lost(format!("LUN {}", statement.value())),
    }
    for own in statement.below.iter().filter(|own| !is_read_only(own)) {
        notes.setting(own.keyword(), &own.value());
    }
}

fn group(statement: &Statement, names: &DeviceNames, notes: &mut Notes) -> LunGroup {
    let name = statement.argument(0).unwrap_or_default().to_owned();
    let mut group = LunGroup { name, is_whole: true, ..LunGroup::default() };
    for own in &statement.below {
        match own.keyword() {
            "LUN" => lun(own, names, &mut group.luns, notes),
            "INITIATOR" => group.initiators.push(own.value()),
            "io_grouping_type" | "cpu_mask" | "black_hole" if own.value() == "0" || own.value() == "auto" => {
            }
            key => {
                group.is_whole &= !begins(key, &["initiator"]);
                notes.setting(key, &own.value());
            }
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
    let (mut users, mut target) = (Vec::new(), None);
    for own in &statement.below {
        match own.keyword() {
            "TARGET" => iscsi_target(own, imported, names),
            "enabled" => {}
            // Those of the driver are for discovery.
            key if begins(key, &["incominguser"]) => {
                let user = chap_user(own).filter(|_| is_incoming_user(key));
                users.push(user.unwrap_or_else(|| unknown_discovery_user(key, &mut imported.notes)));
            }
            "OutgoingUser" => target = chap_user(own),
            key => imported.notes.setting(key, &own.value()),
        }
    }
    let mut users = users.into_iter();
    imported.discovery = users.next().map(|user| ImportedChap { user, target });
    for user in users {
        imported.notes.lost(format!("discovery by CHAP user {}: Blockmux has one user for it", user.name));
    }
}

/// Whether a keyword is `IncomingUser`, which has a number from the second user on.
fn is_incoming_user(keyword: &str) -> bool {
    let number = keyword.strip_prefix("IncomingUser");
    number.is_some_and(|number| number.chars().all(|c| c.is_ascii_digit()))
}

fn iscsi_target(statement: &Statement, imported: &mut Imported, names: &DeviceNames) {
    let name = statement.argument(0).unwrap_or_default().to_owned();
    let mut target = ImportedTarget { name, ..ImportedTarget::default() };
    let mut notes = Notes::default();
    let mut rules = AccessRules::default();
    let (mut groups, mut target_user, mut is_enabled) = (Vec::new(), None, false);
    for own in &statement.below {
        let (key, value) = (own.keyword(), own.value());
        match key {
            "LUN" => lun(own, names, &mut target.luns, &mut notes),
            "GROUP" => groups.push(group(own, names, &mut notes)),
            "enabled" => is_enabled = value == "1",
            "alias" => target.alias = value,
            _ if is_incoming_user(key) => {
                let chap = chap_user(own).map(|user| ImportedChap { user, target: None });
                rules.add_user(key, chap, &mut notes);
            }
            "OutgoingUser" => match chap_user(own) {
                Some(user) => target_user = Some(user),
                None => notes.setting(key, &value),
            },
            "allowed_portal" => allowed_portal(&value, &mut target, imported, &mut notes),
            "per_portal_acl" => {}
            "io_grouping_type" if value == "auto" => {}
            _ if parameters::set(&mut target, key, &value) => {}
            _ => rules.add_unknown(key, &value, &ACCESS_WORDS, &mut notes),
        }
    }
    rules.set_target_user(target_user.as_ref());
    let initiators = groups.iter().flat_map(|group| &group.initiators);
    let portals: BTreeSet<_> = initiators.filter_map(|text| split_portal(text).1).collect();
    portals.into_iter().for_each(|portal| allowed_portal(portal, &mut target, imported, &mut notes));
    add_groups(groups, &target.luns, iscsi_initiator, &mut rules, &mut notes);
    if !is_enabled {
        rules.close(DISABLED);
    }
    (target.acl, target.allow) = rules.settle(&mut notes);
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
        "" => None,
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

/// Adds the initiators of groups, which see the LUNs of their group. Others see those of the
/// target; without such LUNs, others see nothing. `read` turns the name of an initiator into ours.
fn add_groups(
    groups: Vec<LunGroup>,
    luns: &LunTable,
    read: impl Fn(&str) -> Option<GroupInitiator>,
    rules: &mut AccessRules,
    notes: &mut Notes,
) {
    if groups.is_empty() && !luns.is_empty() {
        return;
    }
    let mut entries: Vec<ImportedAcl> = Vec::new();
    let mut is_whole = true;
    for group in groups {
        is_whole &= group.is_whole;
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
            let entry = ImportedAcl { initiator, luns: Some(group.luns.clone()), ..ImportedAcl::default() };
            // Two portals of one initiator are one entry.
            if !entries.contains(&entry) {
                entries.push(entry);
            }
        }
    }
    let names_all = entries.iter().any(|entry| entry.initiator.is_none());
    // Initiators that could not be kept must not see the LUNs of the others.
    if is_whole && !names_all && !luns.is_empty() {
        entries.push(ImportedAcl::default());
    }
    rules.add_entries(entries);
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
    let mut rules = AccessRules::default();
    let (mut groups, mut is_enabled) = (Vec::new(), false);
    for own in &statement.below {
        match own.keyword() {
            "LUN" => lun(own, names, &mut target.luns, &mut notes),
            "GROUP" => groups.push(group(own, names, &mut notes)),
            "enabled" => is_enabled = own.value() == "1",
            "rel_tgt_id" => {}
            key => rules.add_unknown(key, &own.value(), &ACCESS_WORDS, &mut notes),
        }
    }
    if !is_enabled {
        rules.close(DISABLED);
    }
    let Some(port_id) = srp_port(name) else {
        return imported.notes.lost(format!("SRP target {name}: it is no port identifier"));
    };
    add_groups(groups, &target.luns, srp_group_initiator, &mut rules, &mut notes);
    let (mut acl, allow) = rules.settle(&mut notes);
    // An entry of ours has to name an initiator.
    if acl.iter().any(|entry| entry.initiator.is_none()) && acl.len() > 1 {
        notes.lost("LUNs of initiators that are in no group");
    }
    acl.retain(|entry| entry.initiator.is_some());
    notes.remark(format!("it was {name}; initiators need this port identifier and the address"));
    imported.listeners.add("srp", "0.0.0.0", 5555, true);
    imported.srp_targets.push(ImportedSrpTarget { port_id, acl, allow, notes, ..target });
}

/// How statements of targets about their initiators begin.
const ACCESS_WORDS: [&str; 4] = ["group", "incominguser", "initiator", "security_group"];
/// Size of a `vdisk_nullio` device without one, in bytes, as SCST makes it.
const NULLIO_SIZE: u64 = 1 << 40;
