//! Writes what was imported as a config file of ours.

use super::model::{
    ChapUser, Imported, ImportedAcl, ImportedChap, ImportedHost, ImportedPortal, ImportedSrpTarget,
    ImportedSubsystem, ImportedTarget, ImportedVolume, LunTable, MappedVolume,
};
use super::notes::{Notes, comment};
use super::secrets::SecretFiles;
use super::unit_identity::ScsiIdentity;
use crate::failure::Failure;
use std::collections::BTreeSet;
use toml::{Table, Value};

/// A written config.
pub(super) struct WrittenConfig {
    pub(super) text: String,
    /// The number of settings without a counterpart.
    pub(super) lost: usize,
}

/// Writes a config; secrets are added to `secrets`, and only their files are named. `origin` says
/// what was imported.
///
/// # Errors
/// If the system provides no random bytes for a secret.
pub(super) fn write(
    imported: &Imported,
    origin: &str,
    secrets: &mut SecretFiles,
) -> Result<WrittenConfig, Failure> {
    let mut page = Page { text: format!("{}\n", comment(origin)), lost: 0, secrets };
    page.notes(&imported.notes);
    for (key, addresses) in imported.listeners.lists() {
        page.key(key, addresses);
    }
    for (key, value) in &imported.keys {
        page.key(key, value.clone());
    }
    for volume in &imported.volumes {
        page.volume(volume);
    }
    if let Some(chap) = &imported.discovery {
        page.table("[iscsi_discovery]");
        page.chap(chap)?;
    }
    let all = imported.listeners.of("iscsi");
    for target in &imported.targets {
        page.target(target, &all)?;
    }
    for target in &imported.srp_targets {
        page.srp_target(target)?;
    }
    let all = [imported.listeners.of("nvme_tcp"), imported.listeners.of("nvme_rdma")].concat();
    for subsystem in &imported.subsystems {
        page.subsystem(subsystem, &all);
    }
    for referral in &imported.referrals {
        page.table("[[nvme_discovery.referral]]");
        page.notes(&referral.notes);
        page.key("traddr", referral.traddr.as_str());
        page.optional("trsvcid", referral.trsvcid.map(number));
        page.optional("subnqn", referral.subnqn.clone().map(Value::from));
    }
    Ok(WrittenConfig { text: page.text, lost: page.lost })
}

struct Page<'a> {
    text: String,
    lost: usize,
    secrets: &'a mut SecretFiles,
}

impl Page<'_> {
    fn line(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }

    /// Begins a table, as `[[volume]]`.
    fn table(&mut self, header: &str) {
        self.text.push('\n');
        self.line(header);
    }

    fn key(&mut self, key: &str, value: impl Into<Value>) {
        let value: Value = value.into();
        self.line(&format!("{key} = {value}"));
    }

    fn optional(&mut self, key: &str, value: Option<Value>) {
        value.into_iter().for_each(|value| self.key(key, value));
    }

    fn notes(&mut self, notes: &Notes) {
        self.lost += notes.count();
        notes.lines().for_each(|line| self.line(&line));
    }

    /// A LUN map, as `{ 0 = "root", 7 = { volume = "data", read_only = true } }`.
    fn luns(&mut self, table: &LunTable) {
        let entry = |(lun, MappedVolume { volume, is_read_only }): (&u16, &MappedVolume)| {
            let name = Value::from(volume.as_str());
            match is_read_only {
                false => format!("{lun} = {name}"),
                true => format!("{lun} = {{ volume = {name}, read_only = true }}"),
            }
        };
        let entries: Vec<_> = table.iter().map(entry).collect();
        match entries.is_empty() {
            true => self.line("luns = {}"),
            false => self.line(&format!("luns = {{ {} }}", entries.join(", "))),
        }
    }

    fn volume(&mut self, volume: &ImportedVolume) {
        self.table("[[volume]]");
        self.notes(&volume.notes);
        self.key("name", volume.name.as_str());
        self.key("spec", volume.spec.to_string());
        self.optional("uuid", volume.uuid.clone().map(Value::from));
        self.optional("read_only", volume.read_only.then(|| true.into()));
        let description = Some(&volume.description).filter(|text| !text.is_empty());
        self.optional("description", description.cloned().map(Value::from));
        self.key("protocols", volume.protocols.iter().cloned().collect::<Vec<String>>());
        self.optional("allow", volume.allow.clone().map(Value::from));
        if !volume.limits.is_empty() {
            let limits = volume.limits.iter().map(|(key, value)| ((*key).to_owned(), value.clone()));
            self.key("limits", limits.collect::<Table>());
        }
        if volume.identity != ScsiIdentity::default() {
            self.table("[volume.scsi]");
            volume.identity.texts().for_each(|(key, text)| self.key(key, text));
        }
    }

    fn target(&mut self, target: &ImportedTarget, listeners: &[String]) -> Result<(), Failure> {
        self.table("[[iscsi_target]]");
        self.notes(&target.notes);
        self.key("TargetName", target.name.as_str());
        if !target.alias.is_empty() {
            self.key("TargetAlias", target.alias.as_str());
        }
        if target.redirect.is_none() || !target.luns.is_empty() {
            self.luns(&target.luns);
        }
        self.optional("redirect", target.redirect.clone().map(Value::from));
        let portals: Vec<String> = target.portals.iter().map(|portal| portal.address.clone()).collect();
        self.optional("portals", places(&portals, listeners));
        self.optional("TargetPortalGroupTag", tags(&target.portals));
        for (key, value) in &target.parameters {
            self.key(key, value.clone());
        }
        self.optional("allow", target.allow.clone().map(Value::from));
        for acl in &target.acl {
            self.table("[[iscsi_target.acl]]");
            self.acl(acl, "InitiatorName")?;
        }
        Ok(())
    }

    fn srp_target(&mut self, target: &ImportedSrpTarget) -> Result<(), Failure> {
        self.table("[[srp_target]]");
        self.notes(&target.notes);
        self.key("port_id", target.port_id.as_str());
        self.luns(&target.luns);
        self.optional("allow", target.allow.clone().map(Value::from));
        for acl in &target.acl {
            self.table("[[srp_target.acl]]");
            self.acl(acl, "initiator_port")?;
        }
        Ok(())
    }

    fn acl(&mut self, acl: &ImportedAcl, name: &str) -> Result<(), Failure> {
        self.notes(&acl.notes);
        self.optional(name, acl.initiator.clone().map(Value::from));
        acl.luns.iter().for_each(|own| self.luns(own));
        acl.chap.as_ref().map_or(Ok(()), |chap| self.chap(chap))
    }

    fn chap(&mut self, chap: &ImportedChap) -> Result<(), Failure> {
        let own = [("CHAP_N", "secret_file", Some(&chap.user), None)];
        let target = [("target_CHAP_N", "target_secret_file", chap.target.as_ref(), Some(&chap.user))];
        for (name, file, user, other) in own.into_iter().chain(target) {
            let Some(user): Option<&ChapUser> = user else { continue };
            let secret = self.secrets.chap(user, other)?;
            self.key(name, user.name.as_str());
            if let Some(advice) = secret.advice {
                self.line(&comment(advice));
            }
            self.key(file, secret.path);
        }
        Ok(())
    }

    fn subsystem(&mut self, subsystem: &ImportedSubsystem, listeners: &[String]) {
        self.table("[[nvme_subsystem]]");
        self.notes(&subsystem.notes);
        self.key("nqn", subsystem.nqn.as_str());
        self.optional("serial_number", subsystem.serial_number.clone().map(Value::from));
        self.optional("model_number", subsystem.model_number.clone().map(Value::from));
        self.optional("listeners", places(&subsystem.listeners, listeners));
        let has_table = |host: &&ImportedHost| !host.is_plain();
        let hosts = subsystem.hosts.iter().flatten();
        let plain = hosts.clone().filter(|host| !has_table(host)).map(|host| Value::from(host.nqn.as_str()));
        self.optional("hosts", subsystem.hosts.as_ref().map(|_| Value::Array(plain.collect())));
        self.optional("allow", subsystem.allow.clone().map(Value::from));
        for namespace in &subsystem.namespaces {
            self.table("[[nvme_subsystem.namespace]]");
            self.notes(&namespace.notes);
            self.key("nsid", number(namespace.nsid));
            self.key("volume", namespace.volume.as_str());
            self.optional("nguid", namespace.nguid.clone().map(Value::from));
            self.optional("eui64", namespace.eui64.clone().map(Value::from));
            self.optional("uuid", namespace.uuid.clone().map(Value::from));
        }
        for host in hosts.filter(has_table) {
            self.host(host);
        }
        for group in &subsystem.ana_groups {
            self.table("[[nvme_subsystem.ana_group]]");
            self.key("ANAGRPID", number(group.id));
            let namespaces = group.namespaces.iter().map(|nsid| number(*nsid));
            self.key("namespaces", Value::Array(namespaces.collect()));
            let states = group.states.iter().map(|(address, state)| (address.clone(), state.as_str().into()));
            self.key("states", states.collect::<Table>());
        }
    }

    fn host(&mut self, host: &ImportedHost) {
        self.table("[[nvme_subsystem.host]]");
        self.notes(&host.notes);
        self.key("hostnqn", host.nqn.as_str());
        let namespaces = host.namespaces.as_ref().map(|all| all.iter().map(|nsid| number(*nsid)).collect());
        self.optional("namespaces", namespaces.map(Value::Array));
        let name = host.nqn.rsplit(':').next().unwrap_or_default();
        for (key, kind, place) in [
            ("dhchap_secret_file", "dhchap", &host.dhchap_secret),
            ("dhchap_ctrl_secret_file", "dhchap-ctrl", &host.dhchap_ctrl_secret),
            ("tls_key_file", "tls", &host.tls_key),
        ] {
            let path = place.as_ref().map(|place| self.secrets.key(&format!("{kind}-{name}"), place));
            self.optional(key, path.map(Value::from));
        }
        self.optional("dhchap_hash", host.dhchap_hash.clone().map(Value::from));
        self.optional("dhchap_dhgroup", host.dhchap_dhgroup.clone().map(Value::from));
    }
}

impl ImportedHost {
    /// Whether it needs no table of its own.
    fn is_plain(&self) -> bool {
        let keys = [&self.dhchap_secret, &self.dhchap_ctrl_secret, &self.tls_key];
        let is_plain = keys.iter().all(|key| key.is_none()) && self.namespaces.is_none();
        is_plain && self.notes == Notes::default()
    }
}

/// The listeners of a target; `None` if these are all.
fn places(own: &[String], all: &[String]) -> Option<Value> {
    let (own_set, all) = (own.iter().collect::<BTreeSet<_>>(), all.iter().collect::<BTreeSet<_>>());
    (!own.is_empty() && own_set != all).then(|| Value::from(own.to_vec()))
}

/// Tags of portal groups: one number if all portals have it.
fn tags(portals: &[ImportedPortal]) -> Option<Value> {
    let tags: Option<Vec<u16>> = portals.iter().map(|portal| portal.tag).collect();
    let tags = tags?;
    let first = *tags.first()?;
    if tags.iter().all(|tag| *tag == first) {
        return Some(i64::from(first).into());
    }
    let table = portals.iter().zip(tags).map(|(portal, tag)| (portal.address.clone(), i64::from(tag).into()));
    Some(Value::Table(table.collect()))
}

fn number(value: u64) -> Value {
    Value::Integer(i64::try_from(value).unwrap_or(i64::MAX))
}
