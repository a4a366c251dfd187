//! JSON of SPDK's `save_config`: methods with their parameters, in the order in which a start
//! calls them.

use super::access::{AccessRules, optional_user};
use super::listeners::network;
use super::members::Members;
use super::model::{
    Imported, ImportedAnaGroup, ImportedChap, ImportedHost, ImportedNamespace, ImportedPortal,
    ImportedReferral, ImportedSecret, ImportedSubsystem, ImportedTarget, ImportedVolume, KeyPlace,
};
use super::notes::Notes;
use super::specs::{self, StorageOptions};
use super::unit_identity::{ScsiIdentity, spdk_naa};
use blockmux_proto::names::rdma::DEVICE_TARGET_QUERY;
use blockmux_volume::Spec;
use blockmux_volume::spec::{MemSpec, SliceSpec, Url};
use std::collections::{BTreeMap, BTreeSet};
use toml::Value;

/// Reads the file's value.
pub(super) fn read(mut file: Members) -> Imported {
    let mut import = SpdkImport::default();
    let mut notes = Notes::default();
    let mut subsystems = file.objects("subsystems", &mut notes);
    if subsystems.is_empty() {
        // The output of save_subsystem_config.
        subsystems.push(std::mem::take(&mut file));
    }
    for mut subsystem in subsystems {
        let name = subsystem.text("subsystem").unwrap_or_default();
        for mut call in subsystem.objects("config", &mut notes) {
            let method = call.text("method").unwrap_or_default();
            import.call(&method, call.object("params"), &name);
            call.finish(&mut import.imported.notes);
        }
    }
    file.finish(&mut notes);
    import.imported.notes.append(&mut notes);
    import.finish()
}

/// What was called until now.
#[derive(Default)]
struct SpdkImport {
    imported: Imported,
    /// Specs of block devices by name. A device becomes a volume when it is exported.
    devices: BTreeMap<String, Device>,
    /// Paths of keys by name.
    keys: BTreeMap<String, String>,
    portal_groups: BTreeMap<u64, Vec<String>>,
    initiator_groups: BTreeMap<u64, InitiatorGroup>,
    /// CHAP users by the tag of their group; `None`: one that cannot be read.
    auth_groups: BTreeMap<u64, Vec<Option<ImportedChap>>>,
    node_base: Option<String>,
    /// Methods of SPDK's own run time, which are named once.
    tuning: BTreeSet<String>,
}

struct Device {
    spec: Spec,
    uuid: Option<String>,
    is_read_only: bool,
    limits: Vec<(&'static str, Value)>,
    notes: Notes,
    /// The name of its volume.
    volume: Option<String>,
}

#[derive(Default)]
struct InitiatorGroup {
    /// `None`: any.
    names: Option<Vec<String>>,
    networks: Option<Vec<String>>,
}

impl SpdkImport {
    fn call(&mut self, method: &str, params: Members, subsystem: &str) {
        match method {
            "keyring_file_add_key" => self.add_key(params),
            "bdev_set_qos_limit" => self.set_limits(params),
            _ if makes_device(method) => self.create_device(method, params),
            "nvmf_create_subsystem" => self.create_subsystem(params),
            "nvmf_subsystem_add_ns" => self.add_namespace(params),
            "nvmf_subsystem_add_host" => self.add_host(params),
            "nvmf_subsystem_add_listener" => self.add_listener(params),
            "nvmf_subsystem_listener_set_ana_state" => self.set_ana_state(params),
            "nvmf_discovery_add_referral" => self.add_referral(params),
            "iscsi_set_options" => self.node_base = params.clone().filled("node_base"),
            "iscsi_create_portal_group" => self.create_portal_group(params),
            "iscsi_create_initiator_group" => self.create_initiator_group(params),
            "iscsi_create_auth_group" => self.create_auth_group(params),
            "iscsi_create_target_node" => self.create_target(params),
            "bdev_wait_for_examine" | "nvmf_create_transport" => {}
            _ if TUNED.contains(&subsystem) || method.contains("_set_") => {
                self.tuning.insert(method.to_owned());
            }
            _ => {
                let mut params = params;
                let what = ["name", "ctrlr", "nqn", "nbd_device", "bdev_name", "lvs_name"];
                let what = what.iter().find_map(|key| params.filled(key)).unwrap_or_default();
                self.imported.notes.lost(format!("{method} {what}"));
            }
        }
    }

    fn finish(mut self) -> Imported {
        if !self.tuning.is_empty() {
            let all: Vec<_> = self.tuning.into_iter().collect();
            // They set up SPDK itself and have no effect on clients.
            self.imported.notes.remark(format!("settings of SPDK itself: {}", all.join(", ")));
        }
        let unused = self.devices.iter().filter(|(_, device)| device.volume.is_none());
        let unused: Vec<_> = unused.map(|(name, _)| name.as_str()).collect();
        if !unused.is_empty() {
            self.imported
                .notes
                .remark(format!("block devices that no target exports: {}", unused.join(", ")));
        }
        for subsystem in self.imported.subsystems.iter_mut().filter(|own| own.listeners.is_empty()) {
            subsystem.notes.remark("it had no listener: nobody may connect until `allow` is removed");
            subsystem.allow = Some(Vec::new());
        }
        self.imported
    }

    fn add_key(&mut self, mut params: Members) {
        if let (Some(name), Some(path)) = (params.filled("name"), params.filled("path")) {
            self.keys.insert(name, path);
        }
    }

    /// The file of a key that a method names.
    fn key(&self, name: Option<String>, notes: &mut Notes) -> Option<KeyPlace> {
        let name = name?;
        let path = self.keys.get(&name).cloned().or_else(|| name.starts_with('/').then(|| name.clone()));
        if path.is_none() {
            notes.lost(format!("key {name}: its file is not known; without it the host may not connect"));
        }
        // A host without its key would be let in without authentication.
        Some(KeyPlace::File(path.unwrap_or_else(|| format!("missing-key-{name}"))))
    }

    fn create_device(&mut self, method: &str, mut params: Members) {
        let mut notes = Notes::default();
        let name = ["name", "base_bdev", "vbdev_name"].iter().find_map(|key| params.filled(key));
        let name = name.unwrap_or_default();
        let blocks = params.number("num_blocks");
        let block_size = params.number("block_size");
        let size = blocks.and_then(|blocks| blocks.checked_mul(block_size.unwrap_or(512)));
        let physical_block_size = params.number("physical_block_size");
        let options = StorageOptions { size, block_size, physical_block_size, direct: None };
        let uuid = params.filled("uuid").filter(|uuid| uuid.chars().any(|c| !"0-".contains(c)));
        let is_read_only = params.access_flag("readonly", false, true, &mut notes);
        let base = params.filled("base_bdev_name");
        let specs: Vec<(String, Option<Spec>)> = match method {
            "bdev_aio_create" | "bdev_uring_create" => {
                let path = params.filled("filename").unwrap_or_default();
                let options = StorageOptions { size: None, ..options };
                vec![(name, (!path.is_empty()).then(|| specs::of_path(&path, options, &mut notes)))]
            }
            "bdev_malloc_create" => vec![(name, specs::memory(options, &mut notes))],
            "bdev_null_create" => vec![(name, specs::nothing(options, &mut notes))],
            "bdev_passthru_create" => {
                vec![(name, base.and_then(|base| Some(self.devices.get(&base)?.spec.clone())))]
            }
            "bdev_raid_create" => vec![(name, self.stripe(&mut params, &mut notes))],
            "bdev_split_create" => self.parts(&name, &mut params),
            "bdev_nvme_attach_controller" => vec![(format!("{name}n1"), remote(&mut params))],
            _ => vec![(name, None)],
        };
        for (name, spec) in specs {
            let Some(spec) = spec else {
                self.imported.notes.lost(format!("{method} {name}"));
                continue;
            };
            let device = Device {
                spec,
                uuid: uuid.clone(),
                is_read_only,
                limits: Vec::new(),
                notes: notes.clone(),
                volume: None,
            };
            self.devices.insert(name, device);
        }
    }

    fn stripe(&self, params: &mut Members, notes: &mut Notes) -> Option<Spec> {
        let level = params.text("raid_level").unwrap_or_default();
        let bases = params.texts("base_bdevs", notes);
        let members: Option<Vec<_>> =
            bases.iter().map(|base| Some(self.devices.get(base)?.spec.clone())).collect();
        let chunk = params.number("strip_size_kb").filter(|kb| *kb > 0).and_then(|kb| kb.checked_mul(1024));
        let members = members.filter(|members| ["raid0", "0"].contains(&&*level) && !members.is_empty())?;
        if params.flag("superblock") == Some(true) {
            return None;
        }
        Some(Spec::Stripe { chunk: chunk?, members })
    }

    /// The parts of a split device, with their names.
    fn parts(&self, base: &str, params: &mut Members) -> Vec<(String, Option<Spec>)> {
        let spec = self.devices.get(base).map(|device| &device.spec);
        let count = params.number("split_count").unwrap_or(0).min(MAX_PARTS);
        let megabytes = params.number("split_size_mb").filter(|size| *size > 0);
        let size = megabytes
            .and_then(|size| size.checked_mul(1 << 20))
            .or_else(|| Some(spec?.size()? / count.max(1)));
        let part = |nth: u64| {
            let (size, spec) = (size?, spec?);
            if let Spec::Mem(whole) = spec {
                // Each part is RAM of its own.
                return Some(Spec::Mem(MemSpec { size, ..*whole }));
            }
            let slice = SliceSpec { offset: nth.checked_mul(size)?, len: Some(size) };
            Some(Spec::Slice(slice, Box::new(spec.clone())))
        };
        (0..count).map(|nth| (format!("{base}p{nth}"), part(nth))).collect()
    }

    fn set_limits(&mut self, mut params: Members) {
        let name = params.filled("name").unwrap_or_default();
        let Some(device) = self.devices.get_mut(&name) else {
            return self.imported.notes.lost(format!("bdev_set_qos_limit {name}"));
        };
        for (key, own, unit) in [
            ("rw_ios_per_sec", "iops", 1),
            ("rw_mbytes_per_sec", "bandwidth", 1 << 20),
            ("r_mbytes_per_sec", "read_bandwidth", 1 << 20),
            ("w_mbytes_per_sec", "write_bandwidth", 1 << 20),
        ] {
            let value = params.number(key).filter(|value| *value > 0);
            let value = value.and_then(|value| i64::try_from(value.checked_mul(unit)?).ok());
            device.limits.extend(value.map(|value| (own, Value::Integer(value))));
        }
    }

    /// The volume of a device, which is made when it is first exported.
    fn volume(&mut self, device_name: &str) -> Option<String> {
        let device = self.devices.get_mut(device_name)?;
        if let Some(name) = &device.volume {
            return Some(name.clone());
        }
        let name = self.imported.free_name(device_name);
        device.volume = Some(name.clone());
        let mut volume = ImportedVolume::new(name.clone(), device.spec.clone());
        volume.uuid.clone_from(&device.uuid);
        volume.read_only = device.is_read_only;
        volume.limits.clone_from(&device.limits);
        volume.notes.append(&mut device.notes);
        // The product is the kind of the device, which is left out: INQUIRY shows another one.
        volume.identity = ScsiIdentity {
            vendor: Some("INTEL".to_owned()),
            revision: Some("0001".to_owned()),
            serial: Some(device_name.to_owned()),
            naa: Some(spdk_naa(device_name)),
            ..ScsiIdentity::default()
        };
        self.imported.volumes.push(volume);
        Some(name)
    }

    fn subsystem(&mut self, nqn: &str) -> Option<&mut ImportedSubsystem> {
        self.imported.subsystems.iter_mut().find(|subsystem| subsystem.nqn == nqn)
    }

    fn create_subsystem(&mut self, mut params: Members) {
        let mut notes = Notes::default();
        let is_open = params.access_flag("allow_any_host", false, false, &mut notes);
        let mut subsystem = ImportedSubsystem {
            nqn: params.filled("nqn").unwrap_or_default(),
            serial_number: params.filled("serial_number"),
            model_number: params.filled("model_number"),
            hosts: (!is_open).then(Vec::new),
            notes,
            ..ImportedSubsystem::default()
        };
        params.forget(&[
            "ana_reporting",
            "max_namespaces",
            "max_discard_size_kib",
            "max_write_zeroes_size_kib",
        ]);
        params.forget_defaults(&[("min_cntlid", "1"), ("max_cntlid", "65519"), ("passthrough", "0")]);
        params.finish(&mut subsystem.notes);
        if !subsystem.nqn.contains("discovery") {
            self.imported.subsystems.push(subsystem);
        }
    }

    fn add_namespace(&mut self, mut params: Members) {
        let nqn = params.filled("nqn").unwrap_or_default();
        let mut own = params.object("namespace");
        let device = own.filled("bdev_name").unwrap_or_default();
        let mut notes = Notes::default();
        let nsid = own.number("nsid");
        let group = own.number("anagrpid");
        let mut namespace = ImportedNamespace {
            nguid: own.filled("nguid").map(|id| id.to_ascii_lowercase()),
            eui64: own.filled("eui64").map(|id| id.to_ascii_lowercase()),
            uuid: own.filled("uuid"),
            ..ImportedNamespace::default()
        };
        own.forget(&["ptpl_file", "no_auto_visible"]);
        own.finish(&mut namespace.notes);
        let volume = self.volume(&device);
        let Some(subsystem) = self.subsystem(&nqn) else {
            return self.imported.notes.lost(format!("nvmf_subsystem_add_ns {nqn} {device}"));
        };
        let next = subsystem.namespaces.iter().map(|one| one.nsid).max().unwrap_or(0) + 1;
        namespace.nsid = nsid.filter(|nsid| *nsid > 0).unwrap_or(next);
        match volume {
            _ if namespace.nsid > MAX_NSID => notes.lost(format!("namespace {} of {device}", namespace.nsid)),
            None => notes.lost(format!("namespace {} of {device}: no such volume", namespace.nsid)),
            Some(volume) => {
                if let Some(group) = group.filter(|group| *group != namespace.nsid || *group == 0) {
                    group_of(subsystem, group).namespaces.push(namespace.nsid);
                }
                namespace.volume = volume;
                subsystem.namespaces.push(namespace);
            }
        }
        subsystem.notes.append(&mut notes);
    }

    fn add_host(&mut self, mut params: Members) {
        let nqn = params.filled("nqn").unwrap_or_default();
        let name = params.filled("host").unwrap_or_default();
        let is_odd = params.has_odd_text("psk", &["psk"])
            || params.has_odd_text("dhchap_", &["dhchap_key", "dhchap_ctrlr_key"]);
        if is_odd || name.is_empty() {
            // Without its keys, it would be let in without authentication.
            let what = format!("nvmf_subsystem_add_host {nqn} {name}: its name or its keys cannot be read");
            return self.imported.notes.lost(what);
        }
        let mut host = ImportedHost { nqn: name, ..ImportedHost::default() };
        let mut notes = Notes::default();
        host.tls_key = self.key(params.filled("psk"), &mut notes);
        host.dhchap_secret = self.key(params.filled("dhchap_key"), &mut notes);
        host.dhchap_ctrl_secret = self.key(params.filled("dhchap_ctrlr_key"), &mut notes);
        params.finish(&mut notes);
        host.notes = notes;
        match self.subsystem(&nqn) {
            Some(subsystem) => subsystem.hosts.get_or_insert_default().push(host),
            None => self.imported.notes.lost(format!("nvmf_subsystem_add_host {nqn} {}", host.nqn)),
        }
    }

    /// Adds the listener of an NVMe address; `None` if we have none of its kind.
    fn listen(&mut self, mut address: Members) -> Option<String> {
        let transport = address.text("trtype").unwrap_or_default().to_ascii_lowercase();
        let key = match transport.as_str() {
            "tcp" => "nvme_tcp",
            "rdma" => "nvme_rdma",
            _ => return None,
        };
        let port = address.number("trsvcid").and_then(|port| u16::try_from(port).ok()).unwrap_or(4420);
        self.imported.listeners.add(key, &address.text("traddr")?, port, transport == "rdma")
    }

    fn add_listener(&mut self, mut params: Members) {
        let nqn = params.filled("nqn").unwrap_or_default();
        let address = params.object("listen_address");
        let shown = ["trtype", "traddr", "trsvcid"].map(|key| address.clone().text(key).unwrap_or_default());
        let listener = self.listen(address);
        let is_secure = params.flag("secure_channel").unwrap_or(false);
        match (listener, self.subsystem(&nqn)) {
            (Some(listener), Some(subsystem)) => {
                if is_secure {
                    subsystem
                        .notes
                        .remark(format!("{listener} was for TLS only: each host needs its tls_key_file"));
                }
                subsystem.listeners.push(listener);
            }
            // The discovery subsystem is part of every port.
            (Some(_), None) if nqn.contains("discovery") => {}
            _ => self.imported.notes.lost(format!("listener {} of {nqn}", shown.join(" "))),
        }
    }

    fn set_ana_state(&mut self, mut params: Members) {
        let nqn = params.filled("nqn").unwrap_or_default();
        let state = params.filled("ana_state").unwrap_or_default().replace('_', "-");
        let group = params.number("anagrpid");
        let listener = self.listen(params.object("listen_address"));
        let is_known = ["optimized", "non-optimized", "inaccessible"].contains(&&*state);
        let (Some(listener), Some(subsystem), true) = (listener, self.subsystem(&nqn), is_known) else {
            return self.imported.notes.lost(format!("nvmf_subsystem_listener_set_ana_state {nqn} {state}"));
        };
        if state == "optimized" && subsystem.ana_groups.is_empty() {
            return;
        }
        // SPDK's default is a group for each namespace.
        let own = subsystem.namespaces.iter().map(|one| one.nsid);
        let own: Vec<u64> = own
            .filter(|nsid| subsystem.ana_groups.iter().all(|group| !group.namespaces.contains(nsid)))
            .collect();
        let groups: Vec<u64> = group.map_or_else(|| own.clone(), |group| vec![group]);
        for id in groups {
            let is_default = own.contains(&id);
            let group = group_of(subsystem, id);
            if group.namespaces.is_empty() && is_default {
                group.namespaces.push(id);
            }
            group.states.insert(listener.clone(), state.clone());
        }
    }

    fn add_referral(&mut self, mut params: Members) {
        let mut address = params.object("address");
        let traddr = address.text("traddr").unwrap_or_default();
        let is_tcp = address.text("trtype").is_some_and(|kind| kind.eq_ignore_ascii_case("tcp"));
        if !is_tcp || traddr.parse::<std::net::IpAddr>().is_err() {
            return self.imported.notes.lost(format!("nvmf_discovery_add_referral {traddr}"));
        }
        let subnqn = params.filled("subnqn");
        let mut notes = Notes::default();
        params.forget_defaults(&[("secure_channel", "0"), ("allow_any_host", "1")]);
        params.finish(&mut notes);
        let trsvcid = address.number("trsvcid").filter(|port| (1..=65_535).contains(port));
        self.imported.referrals.push(ImportedReferral { traddr, trsvcid, subnqn, notes });
    }

    fn create_portal_group(&mut self, mut params: Members) {
        let mut notes = Notes::default();
        let Some(tag) = params.number("tag") else {
            return self.imported.notes.lost("a portal group without a tag");
        };
        let mut addresses = Vec::new();
        for mut portal in params.objects("portals", &mut notes) {
            let host = portal.text("host").unwrap_or_default();
            let port = portal.number("port").and_then(|port| u16::try_from(port).ok()).unwrap_or(3260);
            match self.imported.listeners.add("iscsi", &host, port, false) {
                Some(address) => addresses.push(address),
                None => notes.setting("portal", &host),
            }
        }
        self.portal_groups.insert(tag, addresses);
        params.forget_defaults(&[("private", "0")]);
        params.finish(&mut notes);
        self.imported.notes.append(&mut notes);
    }

    fn create_initiator_group(&mut self, mut params: Members) {
        let mut notes = Notes::default();
        let Some(tag) = params.number("tag") else {
            return self.imported.notes.lost("an initiator group without a tag");
        };
        let mut names = params.texts("initiators", &mut notes);
        let is_wildcard = |name: &String| ["ANY", "ALL"].contains(&name.as_str());
        // Without the initiators that it keeps out, a group may not be for all.
        let is_any = names.iter().any(is_wildcard) && !names.iter().any(|name| name.starts_with('!'));
        names.retain(|name| {
            if name.starts_with('!') {
                notes.lost(format!("initiator {name}: only those named here may log in"));
            }
            !name.starts_with('!') && !is_wildcard(name)
        });
        let mut networks = Vec::new();
        let masks = params.texts("netmasks", &mut notes);
        let is_everywhere = masks.iter().any(|mask| ["ANY", "ALL"].contains(&mask.as_str()));
        for mask in masks.iter().filter(|_| !is_everywhere) {
            match network(mask) {
                Some(network) => networks.push(network),
                None => notes.lost(format!("netmask {mask}")),
            }
        }
        let names = (!is_any).then_some(names);
        let networks = (!is_everywhere).then_some(networks);
        self.initiator_groups.insert(tag, InitiatorGroup { names, networks });
        self.imported.notes.append(&mut notes);
    }

    fn create_auth_group(&mut self, mut params: Members) {
        let mut notes = Notes::default();
        let tag = params.number("tag").unwrap_or(0);
        let mut all = Vec::new();
        for secret in params.list("secrets") {
            let mut secret = Members::of(secret).unwrap_or_default();
            let mut user = |name: &str, key: &str| {
                optional_user(secret.text(name), secret.text(key).map(ImportedSecret::new)).ok().flatten()
            };
            let (own, target) = (user("user", "secret"), user("muser", "msecret"));
            all.push(own.map(|user| ImportedChap { user, target }));
        }
        self.auth_groups.insert(tag, all);
        self.imported.notes.append(&mut notes);
    }

    fn create_target(&mut self, mut params: Members) {
        let name = params.filled("name").unwrap_or_default();
        let is_whole = ["iqn.", "eui.", "naa."].iter().any(|prefix| name.starts_with(prefix));
        let base = self.node_base.as_deref().unwrap_or("iqn.2016-06.io.spdk");
        let name = if is_whole { name } else { format!("{base}:{name}") };
        let mut target = ImportedTarget { name, ..ImportedTarget::default() };
        target.alias = params.filled("alias_name").unwrap_or_default();
        let mut notes = Notes::default();
        for mut lun in params.objects("luns", &mut notes) {
            let device = lun.filled("bdev_name").unwrap_or_default();
            let number = lun.number("lun_id").unwrap_or_else(|| target.luns.next_free(0));
            match self.volume(&device) {
                Some(volume) => target.luns.insert(number, &volume, false, &mut notes),
                None => notes.lost(format!("LUN {number} of {device}")),
            }
        }
        for (key, own) in [("header_digest", "HeaderDigest"), ("data_digest", "DataDigest")] {
            if params.flag(key) == Some(true) {
                target.parameters.push((own, "CRC32C".into()));
            }
        }
        self.login(&mut target, &mut params, &mut notes);
        params.forget(&["queue_depth"]);
        params.finish(&mut notes);
        target.notes.append(&mut notes);
        self.imported.targets.push(target);
    }

    /// Portals, initiators and authentication of a target.
    fn login(&mut self, target: &mut ImportedTarget, params: &mut Members, notes: &mut Notes) {
        let mut groups = Vec::new();
        for mut map in params.objects("pg_ig_maps", notes) {
            let tag = map.number("pg_tag").unwrap_or(0);
            for address in self.portal_groups.get(&tag).into_iter().flatten() {
                let tag = u16::try_from(tag).ok();
                target.portals.push(ImportedPortal { address: address.clone(), tag });
            }
            groups.extend(map.number("ig_tag"));
        }
        groups.sort_unstable();
        groups.dedup();
        if groups.len() > 1 {
            notes.lost("initiator groups by portal group: all portals are for all of them");
        }
        let mut rules = AccessRules::default();
        let needs_chap = params.access_flag("require_chap", false, true, notes);
        let is_mutual = params.flag("mutual_chap").unwrap_or(false);
        let is_without_chap = params.access_flag("disable_chap", false, false, notes);
        // A group that is not here has its secrets in another file.
        let group = params.number("chap_group");
        let is_odd = group.is_none() && params.has_odd_text("chap_group", &[]);
        if !is_without_chap && (needs_chap || is_odd || group.is_some_and(|group| group > 0)) {
            let users = group.and_then(|group| self.auth_groups.get(&group)).cloned().unwrap_or_default();
            if is_mutual && users.iter().flatten().next().is_some_and(|chap| chap.target.is_none()) {
                notes.lost("mutual CHAP: the group has no secret of the target");
            }
            if users.is_empty() {
                rules.close(
                    "the secrets of its CHAP group are not in the file: add an acl entry, and remove `allow`",
                );
            }
            users.into_iter().for_each(|chap| rules.add_user("a user of its CHAP group", chap, notes));
        }
        self.add_initiators(&groups, &mut rules, notes);
        (target.acl, target.allow) = rules.settle(notes);
    }

    /// Adds the initiators of groups. Our targets have one list of names and one of networks.
    fn add_initiators(&self, groups: &[u64], rules: &mut AccessRules, notes: &mut Notes) {
        let groups: Vec<_> = groups.iter().filter_map(|group| self.initiator_groups.get(group)).collect();
        let Some((first, others)) = groups.split_first() else {
            return rules.add_entries(Vec::new());
        };
        let is_alike = others.iter().all(|group| group.names == first.names)
            || others.iter().all(|group| group.networks == first.networks);
        // Together, they would admit the names of one group from the networks of the other.
        let groups = if is_alike { &groups[..] } else { &groups[..1] };
        if !is_alike {
            notes.lost("initiator groups with other names and networks than its first one");
        }
        if groups.iter().all(|group| group.names.is_some()) {
            rules.add_entries(Vec::new());
            groups.iter().filter_map(|group| group.names.as_ref()).flatten().for_each(|name| {
                rules.add_name(name, notes);
            });
        }
        if groups.iter().all(|group| group.networks.is_some()) {
            let networks = groups.iter().filter_map(|group| group.networks.as_ref()).flatten();
            rules.networks.get_or_insert_default().extend(networks.cloned());
        }
    }
}

/// Whether a method makes a block device.
fn makes_device(method: &str) -> bool {
    let makes = ["_create", "_attach_controller"];
    method.starts_with("bdev_") && makes.iter().any(|end| method.ends_with(end))
}

/// A namespace of another target, if it is reached by TCP or RDMA.
fn remote(params: &mut Members) -> Option<Spec> {
    let transport = params.text("trtype").unwrap_or_default().to_ascii_lowercase();
    let (scheme, query) = match transport.as_str() {
        "tcp" => ("nvme+tcp", ""),
        "rdma" => ("nvme+rdma", DEVICE_TARGET_QUERY),
        _ => return None,
    };
    let host = params.filled("traddr")?;
    let host = if host.contains(':') { format!("[{host}]") } else { host };
    let (port, nqn) = (params.text("trsvcid").unwrap_or("4420".to_owned()), params.filled("subnqn")?);
    let is_plain = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.:[]".contains(c));
    if ![&host, &port, &nqn].iter().all(|part| is_plain(part)) {
        return None;
    }
    Some(Spec::Url(Url::new(&format!("{scheme}://{host}:{port}/{nqn}/1{query}"))))
}

fn group_of(subsystem: &mut ImportedSubsystem, id: u64) -> &mut ImportedAnaGroup {
    let at = subsystem.ana_groups.iter().position(|group| group.id == id).unwrap_or_else(|| {
        subsystem.ana_groups.push(ImportedAnaGroup { id, ..ImportedAnaGroup::default() });
        subsystem.ana_groups.len() - 1
    });
    &mut subsystem.ana_groups[at]
}

/// Subsystems of SPDK that have nothing to export.
const TUNED: [&str; 8] = ["iobuf", "sock", "vmd", "accel", "scheduler", "keyring", "fsdev", "interface"];
/// Highest NSID of our subsystems.
const MAX_NSID: u64 = 1024;
/// Maximum number of parts of a split device.
const MAX_PARTS: u64 = 1024;
