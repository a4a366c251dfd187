//! JSON of nvmetcli: Linux's NVMe target.

use super::members::Members;
use super::model::{
    Imported, ImportedAnaGroup, ImportedHost, ImportedNamespace, ImportedReferral, ImportedSecret,
    ImportedSubsystem, ImportedVolume, KeyPlace,
};
use super::notes::Notes;
use super::specs::{self, StorageOptions};
use std::collections::BTreeMap;
use std::path::Path;

/// Reads the file's value.
pub(super) fn read(mut file: Members) -> Imported {
    let mut imported = Imported::default();
    let mut notes = Notes::default();
    let mut hosts = BTreeMap::new();
    for host in file.objects("hosts", &mut notes) {
        let host = read_host(host, &mut notes);
        hosts.extend(host.map(|host| (host.nqn.clone(), host)));
    }
    let mut ana_groups = Vec::new();
    for subsystem in file.objects("subsystems", &mut notes) {
        read_subsystem(subsystem, &hosts, &mut imported, &mut ana_groups);
    }
    for port in file.objects("ports", &mut notes) {
        read_port(port, &mut imported, &ana_groups, &mut notes);
    }
    for subsystem in imported.subsystems.iter_mut().filter(|own| own.listeners.is_empty()) {
        subsystem.notes.remark("no port had it: nobody may connect until `allow` is removed");
        subsystem.allow = Some(Vec::new());
    }
    file.finish(&mut notes);
    imported.notes.append(&mut notes);
    imported
}

/// Reads a host; `None` for one whose name or keys cannot be read: without its key, it would be let
/// in without authentication.
fn read_host(mut members: Members, notes: &mut Notes) -> Option<ImportedHost> {
    let Some(nqn) = members.filled("nqn") else {
        notes.lost("a host without nqn");
        return None;
    };
    if members.has_odd_text("dhchap_", &DHCHAP_KEYS) {
        notes.lost(format!("host {nqn}: its DH-HMAC-CHAP keys cannot be read"));
        return None;
    }
    let mut key = |name: &str| members.filled(name).map(|text| KeyPlace::Text(ImportedSecret::new(text)));
    let (dhchap_secret, dhchap_ctrl_secret) = (key("dhchap_key"), key("dhchap_ctrl_key"));
    let mut host = ImportedHost { nqn, dhchap_secret, dhchap_ctrl_secret, ..ImportedHost::default() };
    if host.dhchap_secret.is_some() {
        host.dhchap_hash = members.filled("dhchap_hash");
        // "null" is the default of nvmetcli and the weakest: the host chooses instead.
        host.dhchap_dhgroup = members.filled("dhchap_dhgroup").filter(|group| group != "null");
    } else if host.dhchap_ctrl_secret.is_some() {
        notes.lost(format!("host {}: dhchap_ctrl_key without dhchap_key", host.nqn));
        return None;
    }
    members.forget(&["dhchap_hash", "dhchap_dhgroup"]);
    members.finish(&mut host.notes);
    Some(host)
}

/// The ANA group of a namespace: NQN, NSID, group.
type GroupedNamespace = (String, u64, u64);

fn read_subsystem(
    mut members: Members,
    hosts: &BTreeMap<String, ImportedHost>,
    imported: &mut Imported,
    ana_groups: &mut Vec<GroupedNamespace>,
) {
    let mut subsystem =
        ImportedSubsystem { nqn: members.text("nqn").unwrap_or_default(), ..ImportedSubsystem::default() };
    let mut notes = Notes::default();
    let mut attributes = members.object("attr");
    subsystem.serial_number = attributes.filled("serial").map(|text| text.trim().to_owned());
    subsystem.model_number = attributes.filled("model").map(|text| text.trim().to_owned());
    let is_open = attributes.access_flag("allow_any_host", false, false, &mut notes);
    attributes.forget_defaults(&SUBSYSTEM_DEFAULTS);
    attributes.forget(&["version"]);
    attributes.finish(&mut notes);
    let allowed = members.texts("allowed_hosts", &mut notes);
    if is_open {
        if !allowed.is_empty() {
            notes.remark("attr_allow_any_host: every host may connect, also those without a key");
        }
    } else {
        let (known, unknown): (Vec<_>, Vec<_>) = allowed.iter().partition(|nqn| hosts.contains_key(*nqn));
        for nqn in unknown {
            // It may need a key.
            notes.lost(format!("host {nqn}: the file has no such host with keys that can be read"));
        }
        subsystem.hosts = Some(known.into_iter().filter_map(|nqn| hosts.get(nqn).cloned()).collect());
    }
    for namespace in members.objects("namespaces", &mut notes) {
        read_namespace(namespace, &mut subsystem, imported, ana_groups, &mut notes);
    }
    if let Some(passthru) = members.take("passthru").filter(|own| own.get("enable").is_some_and(|on| on == 1))
    {
        notes.lost(format!("passthru of {}", passthru.get("device_path").unwrap_or(&passthru)));
    }
    members.finish(&mut notes);
    subsystem.notes.append(&mut notes);
    imported.subsystems.push(subsystem);
}

fn read_namespace(
    mut members: Members,
    subsystem: &mut ImportedSubsystem,
    imported: &mut Imported,
    ana_groups: &mut Vec<GroupedNamespace>,
    notes: &mut Notes,
) {
    let nsid = members.number("nsid").unwrap_or(0);
    let mut device = members.object("device");
    let path = device.filled("path").unwrap_or_default();
    if path.is_empty() || path == "(null)" {
        return notes.lost(format!("namespace {nsid}: it has no device"));
    }
    if !members.access_flag("enable", true, false, notes) {
        return notes.lost(format!("namespace {nsid} of {path}: it was disabled"));
    }
    if !(1..=MAX_NSID).contains(&nsid) {
        return notes.lost(format!("namespace {nsid} of {path}: NSIDs are numbers from 1 to {MAX_NSID}"));
    }
    let mut namespace = ImportedNamespace { nsid, ..ImportedNamespace::default() };
    namespace.nguid = nguid(device.filled("nguid"), &mut namespace.notes);
    namespace.uuid = device.filled("uuid").filter(|uuid| uuid.chars().any(|c| !"0-".contains(c)));
    namespace.eui64 = device.filled("eui64").filter(|id| id.chars().any(|c| !"0-".contains(c)));
    let group = members.object("ana").number("grpid").or_else(|| members.number("ana_grpid"));
    ana_groups.extend(group.map(|group| (subsystem.nqn.clone(), nsid, group)));
    device.finish(&mut namespace.notes);
    members.forget_defaults(&[
        ("buffered_io", "0"),
        ("buffered_io", "1"),
        ("p2pmem", "0"),
        ("revalidate_size", "0"),
    ]);
    members.finish(&mut namespace.notes);
    namespace.volume = volume(&path, imported);
    subsystem.namespaces.push(namespace);
}

/// The volume of a path; one path in several subsystems is one volume.
fn volume(path: &str, imported: &mut Imported) -> String {
    let mut notes = Notes::default();
    let spec = specs::of_path(path, StorageOptions::default(), &mut notes);
    if let Some(known) = imported.volumes.iter().find(|volume| volume.spec == spec) {
        return known.name.clone();
    }
    let stem = Path::new(path).file_stem().unwrap_or_default().to_string_lossy();
    let name = imported.free_name(&stem);
    imported.volumes.push(ImportedVolume { notes, ..ImportedVolume::new(name.clone(), spec) });
    name
}

/// 32 hexadecimal digits, which configfs writes as a UUID; `None` for all zeroes.
fn nguid(text: Option<String>, notes: &mut Notes) -> Option<String> {
    let text = text?;
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    if digits.chars().all(|c| c == '0') {
        return None;
    }
    let is_valid = digits.len() == 32 && digits.chars().all(|c| c.is_ascii_hexdigit());
    if !is_valid {
        notes.setting("nguid", &text);
    }
    is_valid.then_some(digits)
}

fn read_port(mut port: Members, imported: &mut Imported, ana_groups: &[GroupedNamespace], notes: &mut Notes) {
    let id = port.number("portid").unwrap_or(0);
    let mut address = port.object("addr");
    let transport = address.text("trtype").unwrap_or_default().to_ascii_lowercase();
    let host = address.text("traddr").unwrap_or_default();
    let service = address.text("trsvcid").unwrap_or_default();
    let subsystems = port.texts("subsystems", notes);
    let number = service.trim().parse().unwrap_or(4420);
    let key = match transport.as_str() {
        "tcp" => Some("nvme_tcp"),
        "rdma" => Some("nvme_rdma"),
        _ => None,
    };
    let is_rdma = transport == "rdma";
    let Some(listener) = key.and_then(|key| imported.listeners.add(key, &host, number, is_rdma)) else {
        return notes.lost(format!("port {id}: {transport} {host} {service}"));
    };
    let is_odd = address.has_odd_text("treq", &["treq"]);
    if is_odd || address.filled("treq").is_some_and(|treq| treq == "required") {
        imported.keys.retain(|(key, _)| *key != "nvme_tcp_treq");
        imported.keys.push(("nvme_tcp_treq", "required".into()));
        notes.remark(format!("port {id} demanded TLS: each host needs its tls_key_file"));
    }
    if address.filled("tsas").is_some_and(|tsas| tsas.starts_with("tls")) {
        notes.remark(format!("port {id} had TLS: its keys are in the kernel; give hosts their tls_key_file"));
    }
    address.forget(&["adrfam", "treq"]);
    address.finish(notes);
    let mut param = port.object("param");
    param.forget_defaults(&[
        ("inline_data_size", "16384"),
        ("inline_data_size", "-1"),
        ("pi_enable", "0"),
        ("max_queue_size", "-1"),
    ]);
    if is_rdma {
        param.forget(&["max_queue_size"]);
    }
    param.finish(notes);
    let states = ana_states(&mut port, notes);
    for nqn in subsystems {
        let Some(subsystem) = imported.subsystems.iter_mut().find(|own| own.nqn == nqn) else {
            notes.lost(format!("port {id}: subsystem {nqn}, which is missing"));
            continue;
        };
        subsystem.listeners.push(listener.clone());
        for (group, state) in &states {
            group_of(subsystem, *group, ana_groups).states.insert(listener.clone(), state.clone());
        }
    }
    referrals(&mut port, imported, notes);
    port.finish(notes);
}

/// ANA states of groups that are not optimized, or are not the default group.
fn ana_states(port: &mut Members, notes: &mut Notes) -> Vec<(u64, String)> {
    let mut states = Vec::new();
    for mut group in port.objects("ana_groups", notes) {
        let id = group.number("grpid").unwrap_or(1);
        let state = group.object("ana").filled("state").unwrap_or_else(|| "optimized".to_owned());
        match state.as_str() {
            "optimized" if id == 1 => {}
            "optimized" | "non-optimized" | "inaccessible" => states.push((id, state)),
            other => {
                notes.lost(format!("ANA state {other} of group {id}: it is inaccessible"));
                states.push((id, "inaccessible".to_owned()));
            }
        }
        group.finish(notes);
    }
    states
}

fn group_of<'a>(
    subsystem: &'a mut ImportedSubsystem,
    id: u64,
    ana_groups: &[GroupedNamespace],
) -> &'a mut ImportedAnaGroup {
    if let Some(at) = subsystem.ana_groups.iter().position(|group| group.id == id) {
        return &mut subsystem.ana_groups[at];
    }
    let group = |nsid: u64| {
        let own = ana_groups.iter().find(|(nqn, own, _)| *nqn == subsystem.nqn && *own == nsid);
        own.map_or(1, |(_, _, group)| *group)
    };
    let namespaces = subsystem.namespaces.iter().map(|one| one.nsid).filter(|nsid| group(*nsid) == id);
    let namespaces = namespaces.collect();
    subsystem.ana_groups.push(ImportedAnaGroup { id, namespaces, states: BTreeMap::new() });
    let last = subsystem.ana_groups.len() - 1;
    &mut subsystem.ana_groups[last]
}

fn referrals(port: &mut Members, imported: &mut Imported, notes: &mut Notes) {
    for mut referral in port.objects("referrals", notes) {
        let mut address = referral.object("addr");
        let traddr = address.text("traddr").unwrap_or_default();
        let transport = address.text("trtype").unwrap_or_default();
        let mut own = ImportedReferral {
            traddr: traddr.clone(),
            trsvcid: address.number("trsvcid").filter(|port| (1..=65_535).contains(port)),
            subnqn: None,
            notes: Notes::default(),
        };
        let is_known =
            imported.referrals.iter().any(|other| other.traddr == traddr && other.trsvcid == own.trsvcid);
        let is_address = traddr.parse::<std::net::IpAddr>().is_ok();
        let is_on = referral.flag("enable").unwrap_or(true);
        if transport != "tcp" || !is_address || !is_on {
            notes.lost(format!("referral to {transport} {traddr}"));
            continue;
        }
        address.forget(&["adrfam", "treq", "portid", "tsas"]);
        address.finish(&mut own.notes);
        referral.forget(&["name", "portid"]);
        referral.finish(&mut own.notes);
        if !is_known {
            imported.referrals.push(own);
        }
    }
}

/// Members of a host for its authentication.
const DHCHAP_KEYS: [&str; 4] = ["dhchap_key", "dhchap_ctrl_key", "dhchap_hash", "dhchap_dhgroup"];
/// Highest NSID of our subsystems.
const MAX_NSID: u64 = 1024;
/// Attributes of subsystems with the defaults of the kernel.
const SUBSYSTEM_DEFAULTS: [(&str, &str); 7] = [
    ("cntlid_min", "1"),
    ("cntlid_max", "65519"),
    ("pi_enable", "0"),
    ("qid_max", "128"),
    ("ieee_oui", "0x000000"),
    ("firmware", ""),
    ("vendor_id", "0x0"),
];
