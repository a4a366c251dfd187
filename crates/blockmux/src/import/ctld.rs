//! `ctl.conf` of FreeBSD's ctld.

use super::access::{ADMITTED_NOBODY, AccessRules, begins};
use super::model::{
    ChapUser, Imported, ImportedChap, ImportedPortal, ImportedSecret, ImportedTarget, ImportedVolume,
};
use super::notes::Notes;
use super::source::SourceText;
use super::specs::{self, StorageOptions};
use super::tree::{Statement, SyntaxError, braces};
use super::ucl;
use super::unit_identity::{ScsiIdentity, digits, t10_designator};
use crate::failure::Failure;
use std::collections::BTreeMap;
use std::path::Path;

/// Whether the statement is one of this format.
pub(super) fn is_own(statement: &Statement) -> bool {
    let blocks = ["portal-group", "auth-group", "transport-group", "target", "lun", "controller"];
    let is_nested = ["portal-group", "auth-group"].contains(&statement.keyword());
    match statement.words.len() {
        1 => statement.is_block && is_nested,
        2 => statement.is_block && blocks.contains(&statement.keyword()),
        _ => false,
    }
}

/// Whether a text is in the newer form, in UCL.
fn is_ucl(text: &str) -> bool {
    text.lines().any(|line| {
        let code = line.split('#').next().unwrap_or_default();
        let mut words = code.split_whitespace();
        let (first, second) = (words.next().unwrap_or_default(), words.next());
        second == Some("=") || first.ends_with(':') || second == Some("{") && first.ends_with("-group")
    })
}

/// Reads a file.
///
/// # Errors
/// If the file does not follow the syntax.
pub(super) fn read(source: &SourceText) -> Result<Imported, Failure> {
    let read = if is_ucl(source.text()) { ucl::statements } else { |text: &str| braces(text).map(separated) };
    let statements = read(source.text()).map_err(|SyntaxError { line, what }| source.wrong(line, &what))?;
    let mut import = CtldImport::default();
    // Targets may stand before the groups and the LUNs that they name.
    for statement in &statements {
        import.group(statement);
    }
    for statement in statements.iter().filter(|own| own.keyword() == "target") {
        import.target(statement);
    }
    Ok(import.imported)
}

/// Separates statements of one line: ctld knows by its keyword how many words a statement has, so
/// its files need no line breaks.
fn separated(statements: Vec<Statement>) -> Vec<Statement> {
    let mut all = Vec::new();
    for Statement { line, words, below, is_block } in statements {
        let mut words = words.into_iter().peekable();
        let first = all.len();
        while let Some(keyword) = words.next() {
            let (least, has_option) = arity(&keyword).unwrap_or((usize::MAX, false));
            let mut own = vec![keyword];
            own.extend(words.by_ref().take(least));
            own.extend(words.next_if(|word| has_option && arity(word).is_none()));
            all.push(Statement { line, words: own, below: Vec::new(), is_block: false });
        }
        if let Some(last) = all.get_mut(first..).and_then(<[Statement]>::last_mut) {
            (last.below, last.is_block) = (separated(below), is_block);
        }
    }
    all
}

/// The number of words behind a keyword, and whether one more may follow.
fn arity(keyword: &str) -> Option<(usize, bool)> {
    let known = ARITIES.iter().find(|(own, ..)| *own == keyword);
    known.map(|(_, least, has_option)| (*least, *has_option))
}

#[derive(Default)]
struct CtldImport {
    imported: Imported,
    portal_groups: BTreeMap<String, PortalGroupEntry>,
    auth_groups: BTreeMap<String, AuthGroup>,
    /// Names of volumes by the name of their `lun` at the top level.
    luns: BTreeMap<String, String>,
}

#[derive(Clone, Default)]
struct PortalGroupEntry {
    addresses: Vec<String>,
    tag: Option<u16>,
    redirect: Option<String>,
}

/// Who may log in, and how.
#[derive(Clone, Default)]
struct AuthGroup {
    /// `auth-type`; `None`: by what else the group has.
    kind: Option<String>,
    rules: AccessRules,
}

impl AuthGroup {
    /// Reads a statement of a group, or of a target; `false` if it is none.
    fn read(&mut self, statement: &Statement, notes: &mut Notes) -> bool {
        let (keyword, value) = (statement.keyword(), statement.value());
        match keyword {
            "auth-type" => self.kind = Some(value),
            "chap" | "chap-mutual" => {
                let user = |at: usize| {
                    let (name, secret) = (statement.argument(at)?, statement.argument(at + 1)?);
                    ChapUser::of(Some(name.to_owned()), Some(ImportedSecret::new(secret)))
                };
                let target = user(2).filter(|_| keyword == "chap-mutual");
                self.rules.add_user(keyword, user(0).map(|user| ImportedChap { user, target }), notes);
            }
            "initiator-name" => self.rules.add_name(&value, notes),
            "initiator-portal" => self.rules.add_network(keyword, &value, notes),
            _ if begins(keyword, &["auth", "chap", "initiator"]) => {
                self.rules.close_for(keyword);
                notes.setting(keyword, &value);
            }
            _ => return false,
        }
        true
    }

    /// The rules of a target with this group. ctld denies access without any statement about it.
    fn rules(self) -> AccessRules {
        let AuthGroup { kind, mut rules } = self;
        let has_users = rules.has_users();
        match kind.as_deref() {
            Some("none") => rules.users.clear(),
            Some("chap" | "chap-mutual") if has_users => {}
            None if !rules.is_empty() => {}
            None | Some("deny" | "chap" | "chap-mutual") => {
                rules.close(ADMITTED_NOBODY);
            }
            Some(_) => rules.close_for("auth-type"),
        }
        rules
    }
}

impl CtldImport {
    fn group(&mut self, statement: &Statement) {
        let name = statement.argument(0).unwrap_or_default().to_owned();
        match statement.keyword() {
            "portal-group" if statement.is_block => self.portal_group(name, statement),
            "auth-group" if statement.is_block => {
                let mut group = AuthGroup::default();
                for own in &statement.below {
                    if !group.read(own, &mut self.imported.notes) {
                        self.imported.notes.setting(own.keyword(), &own.value());
                    }
                }
                self.auth_groups.insert(name, group);
            }
            "lun" if statement.is_block => {
                if let Some(volume) = self.volume(&name, statement) {
                    self.luns.insert(name, volume);
                }
            }
            "target" | "debug" | "pidfile" | "maxproc" | "timeout" | "isns-period" | "isns-timeout" => {}
            keyword => self.imported.notes.lost(format!("{keyword} {}", short(statement))),
        }
    }

    fn portal_group(&mut self, name: String, statement: &Statement) {
        let mut group = PortalGroupEntry::default();
        let notes = &mut self.imported.notes;
        for own in &statement.below {
            let value = own.value();
            match own.keyword() {
                "listen" | "listen-iser" => {
                    let has_rdma = own.keyword() == "listen-iser";
                    let (host, port) = split_portal(&value);
                    match self.imported.listeners.add("iscsi", host, port, has_rdma) {
                        Some(address) => group.addresses.push(address),
                        None => notes.lost(format!("listen {value}")),
                    }
                }
                "tag" => group.tag = value.parse().ok(),
                "redirect" => group.redirect = Some(value),
                "discovery-auth-group" if ["no-authentication", "no-access"].contains(&value.as_str()) => {}
                "discovery-auth-group" => {
                    notes.lost(format!("discovery-auth-group {value} of portal group {name}"));
                }
                key => notes.setting(key, &value),
            }
        }
        self.portal_groups.insert(name, group);
    }

    /// Adds the volume of a `lun` block, or finds the one of the same file.
    fn volume(&mut self, name: &str, statement: &Statement) -> Option<String> {
        let mut options = StorageOptions::default();
        let mut notes = Notes::default();
        let mut identity = ScsiIdentity {
            vendor: Some("FREEBSD".to_owned()),
            product: Some("CTLDISK".to_owned()),
            revision: Some("0001".to_owned()),
            ..ScsiIdentity::default()
        };
        let mut device_id = None;
        let (mut path, mut is_ram, mut is_read_only, mut is_disk) = (None, false, false, true);
        for own in &statement.below {
            let value = own.value();
            match own.keyword() {
                "path" => path = Some(value),
                "size" => options.size = specs::size(&value),
                "blocksize" => options.block_size = value.parse().ok(),
                "serial" => identity.serial = Some(value),
                "device-id" => device_id = Some(value),
                "backend" => is_ram = value == "ramdisk",
                "device-type" => is_disk = ["0", "disk", "direct"].contains(&value.as_str()),
                "option" => {
                    match (own.argument(0).unwrap_or_default(), own.argument(1).unwrap_or_default()) {
                        ("vendor", value) => identity.vendor = Some(value.to_owned()),
                        ("product", value) => identity.product = Some(value.to_owned()),
                        ("revision", value) => identity.revision = Some(value.to_owned()),
                        ("naa", value) => identity.naa = Some(digits(value)),
                        ("eui", value) => identity.eui64 = Some(digits(value)),
                        // Initiators may not write where they perhaps could not before.
                        ("readonly", value) => is_read_only = value != "off",
                        ("pblocksize", value) if value.parse::<u64>().is_ok() => {
                            options.physical_block_size = value.parse().ok();
                        }
                        ("rpm" | "formfactor" | "num_threads" | "unmap" | "pblockoffset", _) => {}
                        (key, value) => notes.setting(key, value),
                    }
                }
                "ctl-lun" => {}
                key => notes.setting(key, &value),
            }
        }
        let spec = match path {
            Some(path) if is_disk && !is_ram => Some(specs::of_path(&path, options, &mut notes)),
            _ if is_disk && is_ram => specs::memory(options, &mut notes),
            _ => None,
        };
        let Some(spec) = spec else {
            self.imported.notes.lost(format!("lun {name}: it is no file and no RAM disk"));
            return None;
        };
        let is_same = |volume: &&ImportedVolume| !is_ram && volume.spec == spec;
        if let Some(known) = self.imported.volumes.iter().find(is_same) {
            return Some(known.name.clone());
        }
        let mut volume = ImportedVolume::new(self.imported.free_name(name), spec);
        let vendor = identity.vendor.as_deref().unwrap_or_default();
        identity.t10 = device_id.map(|own| t10_designator(vendor, &own));
        volume.identity = identity;
        volume.read_only = is_read_only;
        volume.notes = notes;
        let name = volume.name.clone();
        self.imported.volumes.push(volume);
        Some(name)
    }

    fn target(&mut self, statement: &Statement) {
        let name = statement.argument(0).unwrap_or_default().to_owned();
        let mut target = ImportedTarget { name: name.clone(), ..ImportedTarget::default() };
        let mut notes = Notes::default();
        let mut own_auth = AuthGroup::default();
        let (mut group, mut has_own, mut portals) = (None, false, Vec::new());
        for own in &statement.below {
            match own.keyword() {
                "alias" => target.alias = own.value(),
                // One without a name is no group, which admits nobody.
                "auth-group" => group = Some(own.argument(0).unwrap_or_default().to_owned()),
                "portal-group" => portals.push((own.argument(0).unwrap_or_default(), own.argument(1))),
                "redirect" => target.redirect = Some(own.value()),
                "lun" => self.lun(own, &name, &mut target, &mut notes),
                _ if own_auth.read(own, &mut notes) => has_own = true,
                "option" => {
                    notes.setting(own.argument(0).unwrap_or_default(), own.argument(1).unwrap_or_default())
                }
                key => notes.setting(key, &own.value()),
            }
        }
        if portals.is_empty() {
            portals.push(("default", None));
        }
        for (name, auth) in portals {
            self.add_portals(name, &mut target, &mut notes);
            match (auth, &group) {
                (Some(auth), None) => group = Some(auth.to_owned()),
                (Some(auth), Some(group)) if auth != group => {
                    notes.lost(format!("auth-group {auth} of portal group {name}: the target has one ACL"));
                }
                _ => {}
            }
        }
        let auth = match (&group, has_own) {
            (_, true) => Some(own_auth),
            (None, false) => self.auth_groups.get("default").cloned(),
            (Some(name), false) if name == "no-authentication" => {
                Some(AuthGroup { kind: Some("none".to_owned()), ..AuthGroup::default() })
            }
            (Some(name), false) => self.auth_groups.get(name).cloned(),
        };
        (target.acl, target.allow) = auth.unwrap_or_default().rules().settle(&mut notes);
        target.notes.append(&mut notes);
        self.imported.targets.push(target);
    }

    fn lun(&mut self, own: &Statement, name: &str, target: &mut ImportedTarget, notes: &mut Notes) {
        let number = own.argument(0).unwrap_or_default();
        let volume = match own.argument(1) {
            Some(named) => self.luns.get(named).cloned(),
            None => {
                let path = own.below.iter().find(|below| below.keyword() == "path").map(Statement::value);
                let stem = path.as_deref().and_then(|path| Path::new(path).file_stem()?.to_str());
                let short = name.rsplit(':').next().unwrap_or_default();
                let fallback = format!("{short}-{number}");
                self.volume(stem.unwrap_or(&fallback), own)
            }
        };
        match (number.parse(), volume) {
            (Ok(number), Some(volume)) => target.luns.insert(number, &volume, false, notes),
            _ => notes.lost(format!("LUN {}", short(own))),
        }
    }

    fn add_portals(&mut self, name: &str, target: &mut ImportedTarget, notes: &mut Notes) {
        if name == "default" && !self.portal_groups.contains_key(name) {
            let addresses = self.imported.listeners.add("iscsi", "::", 3260, false);
            let group = PortalGroupEntry { addresses: addresses.into_iter().collect(), ..Default::default() };
            self.portal_groups.insert(name.to_owned(), group);
        }
        let Some(group) = self.portal_groups.get(name) else {
            return notes.lost(format!("portal group {name}"));
        };
        let portal = |address: &String| ImportedPortal { address: address.clone(), tag: group.tag };
        target.portals.extend(group.addresses.iter().map(portal));
        if target.redirect.is_none() {
            target.redirect.clone_from(&group.redirect);
        }
    }
}

/// Host and port of `192.0.2.1`, `192.0.2.1:3261`, `[::1]:3260` or `::1`.
fn split_portal(text: &str) -> (&str, u16) {
    let bracketed = text.strip_prefix('[').and_then(|rest| rest.split_once(']'));
    let (host, port) = match bracketed {
        Some((host, rest)) => (host, rest.strip_prefix(':')),
        None => match text.rsplit_once(':') {
            Some((host, port)) if !host.contains(':') => (host, Some(port)),
            _ => (text, None),
        },
    };
    (host, port.and_then(|port| port.parse().ok()).unwrap_or(3260))
}

/// The arguments of a statement without those that may be secrets.
fn short(statement: &Statement) -> String {
    statement.arguments().take(2).collect::<Vec<_>>().join(" ")
}

/// Keywords, with [`arity`].
const ARITIES: [(&str, usize, bool); 36] = [
    ("alias", 1, false),
    ("auth-group", 1, false),
    ("auth-type", 1, false),
    ("backend", 1, false),
    ("blocksize", 1, false),
    ("chap", 2, false),
    ("chap-mutual", 4, false),
    ("ctl-lun", 1, false),
    ("debug", 1, false),
    ("device-id", 1, false),
    ("device-type", 1, false),
    ("discovery-auth-group", 1, false),
    ("discovery-filter", 1, false),
    ("dscp", 1, false),
    ("foreign", 0, false),
    ("initiator-name", 1, false),
    ("initiator-portal", 1, false),
    ("isns-period", 1, false),
    ("isns-server", 1, false),
    ("isns-timeout", 1, false),
    ("listen", 1, false),
    ("listen-iser", 1, false),
    ("lun", 1, true),
    ("maxproc", 1, false),
    ("offload", 1, false),
    ("option", 2, false),
    ("path", 1, false),
    ("pidfile", 1, false),
    ("port", 1, false),
    ("portal-group", 1, true),
    ("redirect", 1, false),
    ("serial", 1, false),
    ("size", 1, false),
    ("tag", 1, false),
    ("target", 1, false),
    ("timeout", 1, false),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_need_no_line_breaks() {
        let text = "portal-group pg0 { discovery-auth-group no-authentication listen 192.0.2.1 listen [::1]:3261 }\n\
                    target iqn.a { auth-group no-authentication portal-group pg0 lun 0 { path /dev/da0 size 1G } }";
        let source = SourceText::of_bytes(Path::new("ctl.conf"), text.as_bytes()).ok().unwrap();
        let imported = read(&source).ok().unwrap();
        let portals: Vec<_> =
            imported.targets[0].portals.iter().map(|portal| portal.address.as_str()).collect();
        assert_eq!(portals, ["192.0.2.1:3260", "[::1]:3261"]);
        assert_eq!(imported.volumes[0].spec.to_string(), "block:/dev/da0");
    }
}
