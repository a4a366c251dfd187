//! `saveconfig.json` of targetcli: Linux's LIO target.

use super::access::{AccessRules, DISABLED, UnreadableUser, optional_user, unknown_discovery_user};
use super::members::Members;
use super::model::{
    ChapUser, Imported, ImportedAcl, ImportedChap, ImportedPortal, ImportedSecret, ImportedSrpTarget,
    ImportedTarget, ImportedVolume, LunTable,
};
use super::notes::Notes;
use super::parameters;
use super::scsi_names::{srp_initiator, srp_port};
use super::specs::{self, StorageOptions};
use super::unit_identity::{ScsiIdentity, lio_naa, t10_designator};
use std::collections::BTreeMap;

/// Reads the file's value.
pub(super) fn read(mut file: Members) -> Imported {
    let mut imported = Imported::default();
    let mut notes = Notes::default();
    let mut names = BTreeMap::new();
    for object in file.objects("storage_objects", &mut notes) {
        storage_object(object, &mut imported, &mut names);
    }
    for module in file.objects("fabric_modules", &mut notes) {
        fabric_module(module, &mut imported);
    }
    for mut target in file.objects("targets", &mut notes) {
        let fabric = target.text("fabric").unwrap_or_default();
        let wwn = target.text("wwn").unwrap_or_default();
        match fabric.as_str() {
            "iscsi" => iscsi_target(wwn, target, &mut imported, &names),
            "srpt" | "ib_srpt" => srp_target(&wwn, target, &mut imported, &names),
            other => notes.lost(format!("target {wwn} of fabric {other}")),
        }
    }
    file.finish(&mut notes);
    imported.notes.append(&mut notes);
    imported
}

/// Names of volumes by the path of their storage object.
type ObjectNames = BTreeMap<String, String>;

fn storage_object(mut object: Members, imported: &mut Imported, names: &mut ObjectNames) {
    let plugin = object.text("plugin").unwrap_or_default();
    let own_name = object.text("name").unwrap_or_default();
    let mut notes = Notes::default();
    let mut attributes = object.object("attributes");
    let options = StorageOptions {
        size: object.number("size"),
        block_size: attributes.number("block_size"),
        ..StorageOptions::default()
    };
    let dev = object.filled("dev");
    let spec = match (plugin.as_str(), dev) {
        ("block", Some(dev)) => {
            Some(specs::of_path(&dev, StorageOptions { size: None, ..options }, &mut notes))
        }
        ("fileio", Some(dev)) => Some(specs::of_path(&dev, options, &mut notes)),
        ("ramdisk", _) if object.flag("nullio") == Some(true) => specs::nothing(options, &mut notes),
        ("ramdisk", _) => specs::memory(options, &mut notes),
        _ => None,
    };
    let Some(spec) = spec else {
        return imported.notes.lost(format!("storage object {own_name}, plugin {plugin}"));
    };
    let mut volume = ImportedVolume::new(imported.free_name(&own_name), spec);
    volume.read_only = object.access_flag("readonly", false, true, &mut notes);
    let serial = object.filled("wwn");
    // targetcli sets `emulate_model_alias`: the product is the name of the storage object.
    let has_own_name = attributes.flag("emulate_model_alias").unwrap_or(true);
    let product = if has_own_name { own_name.clone() } else { product_of(&plugin).to_owned() };
    volume.identity = identity(product, serial.as_deref());
    volume.uuid = serial.filter(|serial| is_uuid(serial));
    // Blockmux keeps writes of a client no longer than the client allows, so these change nothing.
    object.forget(&["write_back", "aio", "alua_tpgs", "prod_mode"]);
    object.finish(&mut notes);
    attributes.forget(&DEVICE_PROPERTIES);
    attributes.forget_defaults(&DEVICE_DEFAULTS);
    attributes.finish(&mut notes);
    volume.notes = notes;
    names.insert(format!("/backstores/{plugin}/{own_name}"), volume.name.clone());
    imported.volumes.push(volume);
}

/// INQUIRY data and designators of LIO's unit.
fn identity(product: String, serial: Option<&str>) -> ScsiIdentity {
    let product: String = product.chars().take(16).collect();
    ScsiIdentity {
        vendor: Some(VENDOR.to_owned()),
        revision: Some("4.0".to_owned()),
        serial: serial.map(str::to_owned),
        naa: serial.map(lio_naa),
        t10: serial.map(|serial| t10_designator(VENDOR, &format!("{product}:{serial}"))),
        product: Some(product),
        ..ScsiIdentity::default()
    }
}

/// PRODUCT IDENTIFICATION of a back end whose storage objects do not show their names.
fn product_of(plugin: &str) -> &'static str {
    match plugin {
        "block" => "IBLOCK",
        "fileio" => "FILEIO",
        _ => "RAMDISK-MCP",
    }
}

fn is_uuid(text: &str) -> bool {
    text.parse::<blockmux_proto::names::volume_uuid::VolumeUuid>().is_ok()
}

fn fabric_module(mut module: Members, imported: &mut Imported) {
    let name = module.text("name").unwrap_or_default();
    let mut chap = |prefix: &str| {
        let user = module.text(&format!("discovery_{prefix}userid"));
        let secret = module.text(&format!("discovery_{prefix}password")).map(ImportedSecret::new);
        ChapUser::of(user.filter(|user| user != "NULL"), secret)
    };
    let (user, target) = (chap(""), chap("mutual_"));
    let is_enabled = module.access_flag("discovery_enable_auth", false, true, &mut imported.notes);
    if name == "iscsi" && is_enabled {
        let unknown = || unknown_discovery_user("discovery_userid", &mut imported.notes);
        imported.discovery = Some(ImportedChap { user: user.unwrap_or_else(unknown), target });
    }
    module.finish(&mut imported.notes);
}

/// A portal group of a target.
struct PortalGroup {
    tag: u16,
    target: ImportedTarget,
}

fn iscsi_target(wwn: String, mut members: Members, imported: &mut Imported, names: &ObjectNames) {
    let mut notes = Notes::default();
    let mut groups: Vec<PortalGroup> = Vec::new();
    for group in members.objects("tpgs", &mut notes) {
        let group = portal_group(group, imported, names);
        // Groups that differ only in their portals are one target of ours.
        match groups.iter_mut().find(|other| is_alike(&other.target, &group.target)) {
            Some(other) => other.target.portals.extend(group.target.portals),
            None => groups.push(group),
        }
    }
    members.forget_defaults(&[("parameters", r#"{"cmd_completion_affinity":"-1"}"#)]);
    members.finish(&mut notes);
    if groups.is_empty() {
        imported.notes.lost(format!("target {wwn}: it has no portal groups"));
    }
    // One without LUNs becomes nothing, so it is not the one that keeps the name.
    groups.sort_by_key(|group| group.target.luns.is_empty());
    for (nth, PortalGroup { tag, mut target }) in groups.into_iter().enumerate() {
        target.name = wwn.clone();
        if nth == 0 {
            target.notes.append(&mut notes);
        } else {
            target.name = format!("{wwn}:tpg{tag}");
            if !target.luns.is_empty() {
                target.notes.lost(format!(
                    "portal group {tag} of {wwn} with its own LUNs or ACLs: initiators need this other name"
                ));
            }
        }
        imported.targets.push(target);
    }
}

fn is_alike(one: &ImportedTarget, other: &ImportedTarget) -> bool {
    one.luns == other.luns
        && one.acl == other.acl
        && one.parameters == other.parameters
        && one.allow == other.allow
        && one.alias == other.alias
        && one.notes == other.notes
}

fn portal_group(mut group: Members, imported: &mut Imported, names: &ObjectNames) -> PortalGroup {
    let tag = group.number("tag").and_then(|tag| u16::try_from(tag).ok()).unwrap_or(1);
    let mut target = ImportedTarget::default();
    let mut notes = Notes::default();
    target.luns = luns(&mut group, names, &mut notes);
    for mut portal in group.objects("portals", &mut notes) {
        let host = portal.text("ip_address").unwrap_or_default();
        let port = portal.number("port").and_then(|port| u16::try_from(port).ok()).unwrap_or(3260);
        let has_rdma = portal.flag("iser").unwrap_or(false);
        match imported.listeners.add("iscsi", &host, port, has_rdma) {
            Some(address) => target.portals.push(ImportedPortal { address, tag: Some(tag) }),
            None => notes.setting("portal", &host),
        }
        portal.forget_defaults(&[("offload", "0")]);
        portal.finish(&mut notes);
    }
    set_parameters(&mut group, &mut target, &mut notes);
    let mut attributes = group.object("attributes");
    let login = TpgLogin {
        needs_chap: attributes.access_flag("authentication", true, true, &mut notes),
        is_open: attributes.access_flag("generate_node_acls", false, false, &mut notes),
        is_protected: attributes.access_flag("demo_mode_write_protect", true, true, &mut notes),
    };
    attributes.forget_defaults(&TPG_DEFAULTS);
    attributes.finish(&mut notes);
    let mut rules = AccessRules::default();
    let everyone = chap(&mut group);
    let mut is_whole = !group.has_odd_objects("node_acls");
    let mut entries = Vec::new();
    for acl in group.objects("node_acls", &mut notes) {
        let entry = node_acl(acl, &target.luns, &login, &mut notes);
        is_whole &= entry.is_some();
        entries.extend(entry);
    }
    match is_whole {
        true if login.is_open => {
            entries.extend(login.entry_of_everyone(&target.luns, everyone, &mut notes));
        }
        // Its initiators would have the access of those without an ACL.
        false if login.is_open => {
            notes.lost("initiators without an ACL: one that has an ACL could not be kept");
        }
        _ => {}
    }
    rules.add_entries(entries);
    if !group.access_flag("enable", true, false, &mut notes) {
        rules.close(DISABLED);
    }
    (target.acl, target.allow) = rules.settle(&mut notes);
    group.finish(&mut notes);
    if target.portals.is_empty() && target.allow.is_none() {
        notes.remark("it had no portals: it is reached through all listeners");
    }
    target.notes = notes;
    PortalGroup { tag, target }
}

fn luns(group: &mut Members, names: &ObjectNames, notes: &mut Notes) -> LunTable {
    let mut table = LunTable::default();
    for mut lun in group.objects("luns", notes) {
        let index = lun.number("index").unwrap_or(0);
        let object = lun.text("storage_object").unwrap_or_default();
        match names.get(&object) {
            Some(volume) => table.insert(index, volume, false, notes),
            None => notes.lost(format!("LUN {index} of {object}")),
        }
        lun.forget(&["alias"]);
        lun.forget_defaults(&[("alua_tg_pt_gp_name", "default_tg_pt_gp")]);
        lun.finish(notes);
    }
    table
}

fn set_parameters(group: &mut Members, target: &mut ImportedTarget, notes: &mut Notes) {
    let mut all = group.object("parameters");
    let alias = all.filled("TargetAlias").filter(|alias| alias != "LIO Target");
    target.alias = alias.unwrap_or_default();
    // LIO's defaults are smaller than ours, and nobody chose them.
    all.forget_defaults(&PARAMETER_DEFAULTS);
    for (key, value) in all.into_texts() {
        if !parameters::set(target, &key, &value) {
            notes.setting(&key, &value);
        }
    }
}

/// How initiators log in to a portal group.
struct TpgLogin {
    needs_chap: bool,
    /// Initiators without an ACL may log in (demo mode).
    is_open: bool,
    /// And may not write.
    is_protected: bool,
}

impl TpgLogin {
    /// The entry for initiators without an ACL.
    fn entry_of_everyone(
        &self,
        luns: &LunTable,
        chap: Result<Option<ImportedChap>, UnreadableUser>,
        notes: &mut Notes,
    ) -> Option<ImportedAcl> {
        let mut acl = ImportedAcl::default();
        if self.is_protected && !luns.is_empty() {
            acl.luns = Some(luns.write_protected());
        }
        self.with_chap(acl, chap, "initiators without an ACL", notes)
    }

    /// The entry if initiators could log in by it. LIO refuses everybody if it needs CHAP and has
    /// no user.
    fn with_chap(
        &self,
        mut acl: ImportedAcl,
        chap: Result<Option<ImportedChap>, UnreadableUser>,
        who: &str,
        notes: &mut Notes,
    ) -> Option<ImportedAcl> {
        let Ok(chap) = chap else {
            notes.lost(format!("{who}: CHAP needs a name and a secret"));
            return None;
        };
        acl.chap = chap;
        match (&acl.chap, self.needs_chap) {
            (None, true) => {
                notes.lost(format!(
                    "{who}: authentication is required, but there is no user; nobody could log in"
                ));
                return None;
            }
            (Some(_), false) => {
                acl.notes.remark("authentication was 0: logins without CHAP were accepted, too")
            }
            _ => {}
        }
        Some(acl)
    }
}

/// CHAP of an ACL or of a portal group.
fn chap(members: &mut Members) -> Result<Option<ImportedChap>, UnreadableUser> {
    let is_odd = members.has_odd_text("chap_", &CHAP_KEYS);
    let mut user = |prefix: &str| {
        let name = members.text(&format!("chap_{prefix}userid"));
        let secret = members.text(&format!("chap_{prefix}password")).map(ImportedSecret::new);
        optional_user(name, secret)
    };
    let (own, target) = (user("")?, user("mutual_")?);
    if is_odd {
        return Err(UnreadableUser);
    }
    Ok(own.map(|user| ImportedChap { user, target }))
}

fn node_acl(mut acl: Members, luns: &LunTable, login: &TpgLogin, notes: &mut Notes) -> Option<ImportedAcl> {
    let Some(name) = acl.filled("node_wwn") else {
        notes.lost("an ACL without node_wwn");
        return None;
    };
    let chap = chap(&mut acl);
    let mut entry = ImportedAcl { initiator: Some(name.clone()), ..Default::default() };
    entry.luns = Some(mapped_luns(&mut acl, luns, &mut entry.notes)).filter(|own| own != luns);
    let mut attributes = acl.object("attributes");
    // An ACL may have its own setting; -1 is the portal group's.
    attributes.forget_defaults(&[("authentication", "-1")]);
    let needs_chap = attributes.access_flag("authentication", login.needs_chap, true, &mut entry.notes);
    attributes.forget_defaults(&ACL_DEFAULTS);
    attributes.finish(&mut entry.notes);
    acl.forget(&["tag"]);
    acl.finish(&mut entry.notes);
    TpgLogin { needs_chap, ..*login }.with_chap(entry, chap, &format!("initiator {name}"), notes)
}

fn mapped_luns(acl: &mut Members, luns: &LunTable, notes: &mut Notes) -> LunTable {
    let mut table = LunTable::default();
    for mut mapped in acl.objects("mapped_luns", notes) {
        let index = mapped.number("index").unwrap_or(0);
        let of_group = mapped.number("tpg_lun");
        let is_protected = mapped.access_flag("write_protect", false, true, notes);
        match of_group.and_then(|lun| luns.volume_of(lun)) {
            Some(own) => table.insert(index, &own.volume, is_protected, notes),
            None => {
                let lun = of_group.map(|lun| lun.to_string()).unwrap_or_default();
                notes.lost(format!("mapped LUN {index} of LUN {lun}"));
            }
        }
        mapped.forget(&["alias"]);
        mapped.finish(notes);
    }
    table
}

fn srp_target(wwn: &str, mut members: Members, imported: &mut Imported, names: &ObjectNames) {
    let mut notes = Notes::default();
    let port_id = srp_port(wwn);
    for mut group in members.objects("tpgs", &mut notes) {
        let mut target = ImportedSrpTarget::default();
        target.luns = luns(&mut group, names, &mut target.notes);
        for mut acl in group.objects("node_acls", &mut notes) {
            let name = acl.text("node_wwn").unwrap_or_default();
            let mut entry = ImportedAcl::default();
            entry.luns = Some(mapped_luns(&mut acl, &target.luns, &mut entry.notes));
            entry.luns = entry.luns.filter(|own| *own != target.luns);
            acl.forget(&["attributes", "tag"]);
            acl.finish(&mut entry.notes);
            entry.initiator = srp_initiator(&name);
            match entry.initiator {
                Some(_) => target.acl.push(entry),
                None => target.notes.lost(format!("initiator {name}: it is no port identifier")),
            }
        }
        let mut rules = AccessRules::default();
        rules.add_entries(std::mem::take(&mut target.acl));
        if !group.access_flag("enable", true, false, &mut target.notes) {
            rules.close(DISABLED);
        }
        (target.acl, target.allow) = rules.settle(&mut target.notes);
        group.forget(&["attributes", "parameters", "tag", "portals"]);
        group.finish(&mut target.notes);
        let Some(port_id) = &port_id else {
            imported.notes.lost(format!("SRP target {wwn}: it is no port identifier"));
            continue;
        };
        target.port_id.clone_from(port_id);
        target.notes.remark(format!("it was {wwn}; initiators need this port identifier and the address"));
        imported.listeners.add("srp", "0.0.0.0", SRP_PORT, true);
        imported.srp_targets.push(target);
    }
    members.finish(&mut notes);
    imported.notes.append(&mut notes);
}

/// Port on which SRP listens over RDMA/CM, as the examples of `ib_srpt` and our default.
const SRP_PORT: u16 = 5555;

/// Members of an ACL, or of a portal group, for CHAP.
const CHAP_KEYS: [&str; 4] = ["chap_userid", "chap_password", "chap_mutual_userid", "chap_mutual_password"];

/// Attributes that describe the device, or limits that Blockmux finds out itself.
const DEVICE_PROPERTIES: [&str; 24] = [
    "alua_support",
    "pgr_support",
    "hw_block_size",
    "hw_max_sectors",
    "hw_pi_prot_type",
    "hw_queue_depth",
    "is_nonrot",
    "max_unmap_block_desc_count",
    "max_unmap_lba_count",
    "max_write_same_len",
    "optimal_sectors",
    "fabric_max_sectors",
    "max_sectors",
    "queue_depth",
    "task_timeout",
    "unmap_granularity",
    "unmap_granularity_alignment",
    "unmap_zeroes_data",
    "pi_prot_format",
    "pi_prot_verify",
    "complete_type",
    "submit_type",
    "emulate_fua_read",
    "emulate_dpo",
];
/// T10 VENDOR IDENTIFICATION of LIO's units.
const VENDOR: &str = "LIO-ORG";
/// Attributes of storage objects whose default means what Blockmux does.
const DEVICE_DEFAULTS: [(&str, &str); 17] = [
    ("emulate_3pc", "1"),
    ("emulate_caw", "1"),
    ("emulate_fua_write", "1"),
    ("emulate_pr", "1"),
    ("emulate_rest_reord", "0"),
    ("emulate_rsoc", "1"),
    ("emulate_tas", "1"),
    ("emulate_tpu", "0"),
    ("emulate_tpu", "1"),
    ("emulate_tpws", "0"),
    ("emulate_tpws", "1"),
    ("emulate_ua_intlck_ctrl", "0"),
    ("emulate_write_cache", "0"),
    ("emulate_write_cache", "1"),
    ("enforce_pr_isids", "1"),
    ("force_pr_aptpl", "0"),
    ("pi_prot_type", "0"),
];
/// Attributes of portal groups with their defaults.
const TPG_DEFAULTS: [(&str, &str); 12] = [
    ("cache_dynamic_acls", "0"),
    ("default_cmdsn_depth", "64"),
    ("default_cmdsn_depth", "16"),
    ("default_erl", "0"),
    ("demo_mode_discovery", "1"),
    ("fabric_prot_type", "0"),
    ("login_keys_workaround", "1"),
    ("login_timeout", "15"),
    ("netif_timeout", "2"),
    ("prod_mode_write_protect", "0"),
    ("t10_pi", "0"),
    ("tpg_enabled_sendtargets", "1"),
];
/// Attributes of node ACLs with their defaults.
const ACL_DEFAULTS: [(&str, &str); 9] = [
    ("authentication", "-1"),
    ("dataout_timeout", "3"),
    ("dataout_timeout_retries", "5"),
    ("default_erl", "0"),
    ("nopin_response_timeout", "30"),
    ("nopin_timeout", "15"),
    ("random_datain_pdu_offsets", "0"),
    ("random_datain_seq_offsets", "0"),
    ("random_r2t_offsets", "0"),
];
/// Login keys with LIO's defaults, some of several versions.
const PARAMETER_DEFAULTS: [(&str, &str); 24] = [
    ("AuthMethod", "CHAP,None"),
    ("AuthMethod", "CHAP"),
    ("AuthMethod", "None"),
    ("DataDigest", "CRC32C,None"),
    ("HeaderDigest", "CRC32C,None"),
    ("DataPDUInOrder", "Yes"),
    ("DataSequenceInOrder", "Yes"),
    ("DefaultTime2Retain", "20"),
    ("DefaultTime2Wait", "2"),
    ("ErrorRecoveryLevel", "0"),
    ("FirstBurstLength", "65536"),
    ("IFMarkInt", "Reject"),
    ("IFMarkInt", "2048~65535"),
    ("IFMarker", "No"),
    ("ImmediateData", "Yes"),
    ("InitialR2T", "Yes"),
    ("MaxBurstLength", "262144"),
    ("MaxConnections", "1"),
    ("MaxOutstandingR2T", "1"),
    ("MaxRecvDataSegmentLength", "8192"),
    ("MaxXmitDataSegmentLength", "262144"),
    ("OFMarkInt", "Reject"),
    ("OFMarkInt", "2048~65535"),
    ("OFMarker", "No"),
];
