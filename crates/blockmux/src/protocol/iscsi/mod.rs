//! iSCSI over TCP and over RDMA (iSER): its properties, its frontend for `serve`, and its URLs.
//!
//! Without targets in the config file, each volume has its own target with the name
//! `iqn.2026-11.blockmux:NAME`, in which it is LUN 0. If the volume's name is generated, a part of
//! its UUID is appended.

mod access;
mod config;
mod live;
mod node;
mod remote;

use super::alua::AluaStateName;
use super::configured::{ConfiguredTargets, HasVolumes};
use super::frontend::{
    ConnectInfo, Frontend, LiveFrontend, NamedListener, Portal, Service, TargetTables, VolumeNames,
};
use super::policy::TargetAccess;
use super::{Carrier, KeyError, Protocol, ServiceType};
use crate::failure::Failure;
use crate::output::shell_word;
use crate::protocol::address::tcp_address;
use blockmux_engine::net::zone;
use blockmux_lab::ceiling::{MessageShape, Transport};
use blockmux_proto::iscsi::login::chap::ChapAlgorithm;
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::Chap;
use blockmux_proto::iscsi::url::IscsiUrl;
use clap::{ArgMatches, Command, FromArgMatches, Subcommand};
use config::{Acl, ConfiguredTarget, IscsiDiscoveryEntry, TargetEntry};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use toml::de::Deserializer;

/// iSCSI over TCP.
pub(crate) const ISCSI: Protocol = Protocol {
    name: "iscsi",
    title: "iSCSI",
    carrier: Carrier::Stream,
    is_default: true,
    has_rdma: true,
    is_over_rdma: false,
    listener_help: ["ADDR", "Serve iSCSI and iSER at ADDR; repeatable [default: 127.0.0.1:3260]"],
    port: 3260,
    schemes: &[("iscsi", Transport::Tcp)],
    unsupported_schemes: &[],
    url_forms: &["iscsi://host/target-name/lun"],
    max_description: MAX_ALIAS,
    max_logical_block: 64 << 10,
    // One header each: SCSI Command; Data-In with status; SCSI Command; SCSI Response.
    shape: MessageShape { read_request: 48, read_reply_head: 48, write_request_head: 48, write_reply: 48 },
    frontend: || Box::<Iscsi>::default(),
    remote: remote::of_url,
    served_with: None,
    service_type: Some(ServiceType { name: "_iscsi._tcp", properties: &[] }),
};

/// iSCSI over RDMA (iWARP). Listeners of iSCSI and iSER serve both.
pub(crate) const ISER: Protocol = Protocol {
    name: "iser",
    title: "iSER",
    has_rdma: true,
    is_over_rdma: true,
    listener_help: ["ADDR", "Like --iscsi, but print iSER URLs only; repeatable [default: every iSCSI port]"],
    schemes: &[("iser", Transport::Tcp)],
    url_forms: &["iser://host/target-name/lun"],
    // One frame of 100 bytes each with the headers of iSER and iSCSI; data is sent by an RDMA Write
    // (20 bytes more), or requested by an RDMA Read (52) and sent in another frame (20).
    shape: MessageShape {
        read_request: 100,
        read_reply_head: 120,
        write_request_head: 120,
        write_reply: 152,
    },
    served_with: Some(ISCSI.name),
    ..ISCSI
};

/// The `ctl` commands of iSCSI.
#[derive(clap::Subcommand, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum IscsiCtlCommand {
    /// Set the ALUA state of an iSCSI target's portals; notify initiators
    Alua {
        /// iSCSI name
        target: String,
        state: AluaStateName,
        /// One portal [default: all]
        #[arg(long, value_name = "ADDR", value_parser = |text: &str| tcp_address(text, ISCSI.port))]
        at: Option<SocketAddr>,
    },
}

/// The frontend of iSCSI: the keys of the config file, and the validated settings.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Iscsi {
    iscsi_target: Vec<TargetEntry>,
    iscsi_discovery: Option<IscsiDiscoveryEntry>,
    /// The configured targets; if it is empty, each volume has its own target.
    #[serde(skip)]
    targets: ConfiguredTargets<ConfiguredTarget>,
    /// CHAP of discovery sessions.
    #[serde(skip)]
    discovery: Option<Chap>,
}

impl Frontend for Iscsi {
    fn keys(&self) -> &'static [&'static str] {
        &["iscsi_target", "iscsi_discovery"]
    }

    fn take_keys(&mut self, written: Deserializer<'_>, directory: &Path) -> Result<(), KeyError> {
        *self = Iscsi::deserialize(written)?;
        for mut target in self.iscsi_target.drain(..) {
            target.anchor(directory);
            self.targets.push(ConfiguredTarget::prepare(target)?);
        }
        if let Some(discovery) = &mut self.iscsi_discovery {
            discovery.anchor(directory);
            self.discovery = Some(discovery.prepare()?);
        }
        Ok(())
    }

    fn commands(&self, command: Command) -> Command {
        IscsiCtlCommand::augment_subcommands(command)
    }

    fn read_command(&self, matches: &ArgMatches) -> Result<(String, Value), clap::Error> {
        let own = IscsiCtlCommand::from_arg_matches(matches)?;
        let IscsiCtlCommand::Alua { target, .. } = &own;
        Ok((target.clone(), json!(own)))
    }

    fn is_configured(&self) -> bool {
        !self.targets.is_empty()
    }

    fn check(&mut self, volumes: &[&str]) -> Result<(), String> {
        let mut names = HashSet::new();
        if self.targets.is_empty() {
            for volume in volumes {
                let target = default_target(volume);
                let advice = "rename it, as in NAME=mem:1g, or do not serve iSCSI, as with --nbd :10809";
                if !Name::new(&target).is_ok_and(|name| name.violation().is_none()) {
                    return Err(format!(
                        "`{volume}` is not allowed in an iSCSI name, which has only letters, digits, `-` and `.`; {advice}"
                    ));
                }
                if !names.insert(name(&target)) {
                    return Err(format!("`{volume}` and another volume differ only in case; {advice}"));
                }
            }
            return Ok(());
        }
        let known: HashSet<&str> = volumes.iter().copied().collect();
        for target in self.targets.iter() {
            let name = &target.name;
            if !names.insert(name.clone()) {
                return Err(format!("two iscsi_targets have the name `{name}`; rename one"));
            }
            if let Some(missing) = target.volumes().find(|volume| !known.contains(volume)) {
                return Err(format!(
                    "iscsi_target `{name}`: no volume has the name `{missing}`; add it, or correct `luns`"
                ));
            }
        }
        Ok(())
    }

    fn targets(&self) -> Vec<TargetAccess> {
        self.targets.iter().map(ConfiguredTarget::access).collect()
    }

    fn serve(&self, service: &Service<'_>) -> Result<Option<Box<dyn LiveFrontend>>, Failure> {
        Ok(Some(node::serve(self, service)))
    }

    fn target_tables(&self) -> &'static [TargetTables] {
        &[TargetTables {
            key: "iscsi_target",
            name: "TargetName",
            units: &["luns"],
            first_unit: 0,
            peers: &[("acl", "InitiatorName")],
            parts: &[],
            port_name: Some(("TargetPortalGroupTag", ISCSI.port)),
        }]
    }

    fn own_entry(&self, named: &VolumeNames, description: &str) -> Option<toml::Table> {
        let luns = toml::Table::from_iter([("0".to_owned(), named.export.as_str().into())]);
        let alias = (!description.is_empty()).then(|| ("TargetAlias".to_owned(), description.into()));
        let name = ("TargetName".to_owned(), default_target(&named.target).into());
        Some([name, ("luns".to_owned(), luns.into())].into_iter().chain(alias).collect())
    }

    fn write_command(
        &self,
        what: &Value,
        target: &mut toml::Table,
        listeners: &[NamedListener],
    ) -> Result<Option<String>, String> {
        let IscsiCtlCommand::Alua { state, at, .. } =
            IscsiCtlCommand::deserialize(what).map_err(|error| error.to_string())?;
        access::write_state(target, state, at, listeners).map(|()| None)
    }

    /// One entry for each logical unit of the volume. The commands for iSER expect that the client
    /// has an RDMA device over the network card that reaches the portal.
    fn connect_info(&self, protocol: &Protocol, portal: &Portal, named: &VolumeNames) -> Vec<ConnectInfo> {
        let Some((listener, address)) = portal.tcp() else { return Vec::new() };
        let rdma_query = portal.rdma_query;
        let PortalText { host, port, portal } = PortalText::of(&address);
        let place = format!("{}://{host}{port}", protocol.name);
        let info = |unit: MappedUnit<'_>| {
            if protocol.name == ISER.name {
                let commands = vec![unit.login(self, &portal, " -I iser")];
                return ConnectInfo { url: unit.url(&place, rdma_query), commands, ..ConnectInfo::default() };
            }
            // libiscsi decodes no host.
            let mut commands = unit.commands_of_libiscsi(&place.replace("%25", "%"));
            commands.push(unit.login(self, &portal, ""));
            let ipxe = unit.boot_by_ipxe(&address);
            ConnectInfo { url: unit.url(&place, ""), commands, ipxe, ..ConnectInfo::default() }
        };
        units(self, &listener, named).into_iter().map(info).collect()
    }
}

/// The parts of a portal's address in URLs and commands.
struct PortalText {
    host: String,
    /// With a colon; empty for the default port.
    port: String,
    /// Host and port.
    portal: String,
}

impl PortalText {
    fn of(tcp: &SocketAddr) -> PortalText {
        let port = if tcp.port() == ISCSI.port { String::new() } else { format!(":{}", tcp.port()) };
        PortalText { host: zone::url_host(tcp), port, portal: zone::address_text(tcp) }
    }
}

/// A logical unit of a volume, and an initiator that can log in to it.
struct MappedUnit<'a> {
    target: String,
    lun: u16,
    /// The initiator's name; `None` if every initiator may log in.
    initiator: Option<&'a Name>,
    /// CHAP name and file of the secret.
    user: Option<(String, PathBuf)>,
    /// CHAP algorithms that the target accepts.
    algorithms: &'a [ChapAlgorithm],
    /// Whether header digests and data digests are required.
    digests: [bool; 2],
}

impl MappedUnit<'_> {
    /// URL for the Blockmux initiator.
    fn url(&self, portal: &str, query: &str) -> String {
        let plain = format!("{portal}{query}");
        let Ok(mut url) = plain.parse::<IscsiUrl>() else { return plain };
        (url.target, url.lun) = (Name::new(&self.target).ok(), self.lun);
        url.initiator = self.initiator.cloned();
        if url.rdma.is_none() {
            [url.header_digest, url.data_digest] = self.digests;
        }
        if let Some((user, file)) = &self.user {
            (url.user, url.secret_file) = (Some(user.clone()), Some(file.clone()));
        }
        url.to_string()
    }

    /// Commands of libiscsi's clients. libiscsi supports CHAP with MD5 only and no data digests,
    /// and decodes no names.
    fn commands_of_libiscsi(&self, portal: &str) -> Vec<String> {
        if self.target.contains(['/', '?', '@'])
            || self.digests[1]
            || self.user.is_some() && !self.algorithms.contains(&ChapAlgorithm::Md5)
        {
            return Vec::new();
        }
        let url = self.url_of_libiscsi(portal);
        let (url, environment) = (shell_word(&url), self.environment_of_libiscsi());
        match self.initiator {
            // QEMU has no such option for the initiator's name.
            Some(name) => vec![format!("{environment}iscsi-inq -i {} {url}", shell_word(name.as_str()))],
            None => {
                vec![format!("{environment}iscsi-inq {url}"), format!("{environment}qemu-img info {url}")]
            }
        }
    }

    /// URL for libiscsi, which copies the LUN to the wire unchanged: above 255 it must include the
    /// addressing method.
    fn url_of_libiscsi(&self, portal: &str) -> String {
        format!("{portal}/{}/{}", self.target, self.lun_field())
    }

    /// The first two bytes of the LUN on the wire (SAM-5 §4.7).
    fn lun_field(&self) -> u16 {
        if self.lun > MAX_PERIPHERAL_LUN { FLAT_SPACE | self.lun } else { self.lun }
    }

    /// Commands for iPXE, which supports CHAP with MD5 only and no digests, and takes the LUN in
    /// hexadecimal digits as it is on the wire (RFC 4173 §5). It reads no files, so a person enters
    /// the secret.
    fn boot_by_ipxe(&self, portal: &SocketAddr) -> Option<String> {
        let is_supported = self.digests == [false; 2]
            && (self.user.is_none() || self.algorithms.contains(&ChapAlgorithm::Md5))
            && zone::zone_of(portal).is_none();
        let mut commands = Vec::new();
        commands.extend(self.initiator.map(|name| format!("set initiator-iqn {}", name.as_str())));
        if let Some((user, _)) = &self.user {
            commands.extend([format!("set username {user}"), "read password".to_owned()]);
        }
        let (host, port, lun) = (zone::url_host(portal), portal.port(), self.lun_field());
        commands.push(format!("sanboot iscsi:{host}::{port}:{lun:x}:{}", self.target));
        is_supported.then(|| commands.join(" && "))
    }

    fn environment_of_libiscsi(&self) -> String {
        let Some((user, file)) = &self.user else { return String::new() };
        let (user, file) = (shell_word(user), file.to_string_lossy());
        let file = shell_word(&file);
        format!("LIBISCSI_CHAP_USERNAME={user} LIBISCSI_CHAP_PASSWORD=\"$(cat {file})\" ")
    }

    /// Commands that log Linux's initiator in. If discovery requires authentication, or is not by
    /// `interface`, the node is created by hand.
    fn login(&self, own: &Iscsi, portal: &str, interface: &str) -> String {
        let (target, portal) = (shell_word(&self.target), shell_word(portal));
        let node = format!("iscsiadm -m node -T {target} -p {portal}{interface}");
        let found = match own.discovery {
            None if interface.is_empty() => format!("iscsiadm -m discovery -t st -p {portal}"),
            _ => format!("{node} -o new"),
        };
        let mut settings = String::new();
        let mut set = |name: &str, value: &str| settings += &format!(" -n {name} -v {value}");
        if let Some((user, file)) = &self.user {
            let file = file.to_string_lossy();
            set("node.session.auth.authmethod", "CHAP");
            set("node.session.auth.username", &shell_word(user));
            set("node.session.auth.password", &format!("\"$(cat {})\"", shell_word(&file)));
            // By default open-iscsi proposes only MD5.
            if !self.algorithms.contains(&ChapAlgorithm::Md5) {
                let names: Vec<_> =
                    self.algorithms.iter().map(|one| one.name().replace("SHA-", "SHA")).collect();
                set("node.session.auth.chap_algs", &names.join(","));
            }
        }
        for (digest, _) in
            ["HeaderDigest", "DataDigest"].iter().zip(self.digests).filter(|(_, is_needed)| *is_needed)
        {
            set(&shell_word(&format!("node.conn[0].iscsi.{digest}")), "CRC32C");
        }
        let update =
            if settings.is_empty() { String::new() } else { format!("{node} -o update{settings} && ") };
        format!("{found} && {update}{node} --login")
    }
}

/// The logical units of a volume that are reached through a listener. A target that redirects
/// logins has none.
fn units<'a>(own: &'a Iscsi, listener: &SocketAddr, named: &VolumeNames) -> Vec<MappedUnit<'a>> {
    if own.targets.is_empty() {
        let target = default_target(&named.target);
        return vec![MappedUnit {
            target,
            lun: 0,
            initiator: None,
            user: None,
            algorithms: &[],
            digests: [false; 2],
        }];
    }
    let targets = own.targets.having(&named.export);
    let targets = targets.filter(|target| target.is_at(listener) && target.redirect.is_none());
    let mapped = targets.flat_map(|target| {
        // The last entries apply to all initiators and need no name. Write-protected LUNs come
        // last, because the first URL is the one that most people use.
        let mut by_lun: BTreeMap<(bool, u16), &Acl> = BTreeMap::new();
        for acl in target.acl.iter().rev() {
            for (lun, entry) in acl.luns.of(&target.luns).filter(|(_, entry)| entry.volume == named.export) {
                by_lun.entry((entry.is_read_only, lun)).or_insert(acl);
            }
        }
        by_lun.into_iter().map(|((_, lun), acl)| {
            let (user, initiator) = (acl.user.clone(), acl.initiator.as_ref());
            let (name, digests) = (target.name.as_str().to_owned(), target.needs_digests);
            let algorithms = acl.chap.as_ref().map(|chap| &chap.algorithms[..]).unwrap_or_default();
            MappedUnit { target: name, lun, initiator, user, algorithms, digests }
        })
    });
    mapped.collect()
}

/// The name of a volume's own target; `name` is the part after the prefix.
fn default_target(name: &str) -> String {
    format!("{PREFIX}{}", name.to_lowercase())
}

/// Prefix of the names of volumes' own targets.
const PREFIX: &str = "iqn.2026-11.blockmux:";
/// Maximum length of TargetAlias, in bytes (RFC 7143 §13.6).
const MAX_ALIAS: usize = 255;

/// Maximum LUN of the peripheral device addressing method (SAM-5 §4.7.7).
const MAX_PERIPHERAL_LUN: u16 = 255;
/// Bits of the flat space addressing method in the LUN field (SAM-5 §4.7.7).
const FLAT_SPACE: u16 = 1 << 14;

/// Parses a name that [`Frontend::check`] has validated.
fn name(text: &str) -> Name {
    Name::new(text).expect("checked before anything was opened")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn urls(address: &str, volume: &str) -> Vec<String> {
        Iscsi::default()
            .connect_info(&ISCSI, &Portal::at(address), &VolumeNames::plainly(volume))
            .into_iter()
            .map(|way| way.url)
            .collect()
    }

    #[test]
    fn a_volume_is_lun_0_of_a_target_with_its_name() {
        assert_eq!(urls("127.0.0.1:3260", "Disk0"), ["iscsi://127.0.0.1/iqn.2026-11.blockmux:disk0/0"]);
        assert_eq!(urls("[::1]:7", "a"), ["iscsi://[::1]:7/iqn.2026-11.blockmux:a/0"]);
        let over_rdma =
            &Iscsi::default().connect_info(&ISER, &Portal::at("[::1]:7"), &VolumeNames::plainly("a"))[0];
        assert_eq!(over_rdma.url, "iser://[::1]:7/iqn.2026-11.blockmux:a/0?rdma=iwarp");
    }

    /// Writes a CHAP secret to a file in a directory.
    fn secret_file() -> (tempfile::TempDir, String) {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let secret = folder.path().join("secret");
        std::fs::write(&secret, "twelve bytes").unwrap();
        std::fs::set_permissions(&secret, PermissionsExt::from_mode(0o600)).unwrap();
        (folder, secret.to_str().unwrap().to_owned())
    }

    fn configured(text: &str) -> Iscsi {
        let entry: TargetEntry = toml::from_str(text).unwrap();
        let target = ConfiguredTarget::prepare(entry).unwrap_or_else(|error| panic!("{error}"));
        Iscsi { targets: [target].into_iter().collect(), ..Iscsi::default() }
    }

    #[test]
    fn commands_have_user_initiator_name_and_lun_in_the_syntax_of_their_client() {
        let (_folder, secret) = secret_file();
        let text = format!(
            "TargetName = 'iqn.a'\nHeaderDigest = 'CRC32C'\nluns = {{ 300 = 'x', 1 = 'y' }}\n[[acl]]\nInitiatorName = 'iqn.me'\nluns = [300]\n\
             [[acl]]\nluns = [1]\nCHAP_N = 'u'\nsecret_file = '{secret}'"
        );
        let (settings, address) = (configured(&text), Portal::at("127.0.0.1:3260"));
        let [named] = &settings.connect_info(&ISCSI, &address, &VolumeNames::plainly("x"))[..] else {
            panic!("one listener, one unit")
        };
        assert_eq!(named.url, "iscsi://127.0.0.1/iqn.a/300?initiator=iqn.me&header_digest=on");
        assert_eq!(named.commands[0], "iscsi-inq -i iqn.me iscsi://127.0.0.1/iqn.a/16684");
        assert!(named.commands[1].starts_with("iscsiadm "), "{}", named.commands[1]);
        let [proved] = &settings.connect_info(&ISCSI, &address, &VolumeNames::plainly("y"))[..] else {
            panic!("one listener, one unit")
        };
        assert_eq!(proved.url, format!("iscsi://u@127.0.0.1/iqn.a/1?secret_file={secret}&header_digest=on"));
        let environment = format!("LIBISCSI_CHAP_USERNAME=u LIBISCSI_CHAP_PASSWORD=\"$(cat {secret})\"");
        assert_eq!(proved.commands[1], format!("{environment} qemu-img info iscsi://127.0.0.1/iqn.a/1"));
        let login = &proved.commands[2];
        assert!(
            login
                .contains(&format!(".username -v u -n node.session.auth.password -v \"$(cat {secret})\" -n"))
        );
        assert!(login.contains("-n 'node.conn[0].iscsi.HeaderDigest' -v CRC32C && "), "{login}");
        assert!(!login.contains("chap_algs"), "its own is MD5: {login}");
    }

    #[test]
    fn luns_of_an_acl_entrys_own_map_have_urls_and_write_protected_ones_come_last() {
        let settings = configured(
            "TargetName = 'iqn.a'\nluns = { 4 = 'x', 5 = 'y' }\n[[acl]]\nInitiatorName = 'iqn.one'\n\
             [[acl]]\nInitiatorName = 'iqn.two'\nluns = { 0 = { volume = 'x', read_only = true }, 4 = 'y' }",
        );
        let address = Portal::at("127.0.0.1:3260");
        let of_volume = |name| settings.connect_info(&ISCSI, &address, &VolumeNames::plainly(name));
        let urls = |name| of_volume(name).into_iter().map(|way| way.url).collect::<Vec<_>>();
        let url =
            |lun: u16, initiator: &str| format!("iscsi://127.0.0.1/iqn.a/{lun}?initiator=iqn.{initiator}");
        assert_eq!(urls("x"), [url(4, "one"), url(0, "two")]);
        assert_eq!(urls("y"), [url(4, "two"), url(5, "one")]);
    }

    #[test]
    fn clients_without_support_get_no_command_and_linux_gets_the_required_settings() {
        let commands = |more: &str| {
            let settings = configured(&format!("TargetName = 'iqn.a'\nluns = {{ 0 = 'x' }}\n{more}"));
            settings
                .connect_info(&ISCSI, &Portal::at("127.0.0.1:3260"), &VolumeNames::plainly("x"))
                .remove(0)
                .commands
        };
        assert_eq!(commands("").len(), 3);
        let [login] = &commands("DataDigest = 'CRC32C'")[..] else { panic!("libiscsi has no data digest") };
        assert!(login.contains("-o update -n 'node.conn[0].iscsi.DataDigest' -v CRC32C && "), "{login}");
        let (_folder, secret) = secret_file();
        let acl =
            format!("CHAP_A = ['SHA3-256', 'SHA-256']\n[[acl]]\nCHAP_N = 'u'\nsecret_file = '{secret}'");
        let [login] = &commands(&acl)[..] else { panic!("libiscsi speaks MD5 alone") };
        assert!(login.contains(" -n node.session.auth.chap_algs -v SHA3-256,SHA256 && "), "{login}");
    }

    #[test]
    fn ipxe_gets_the_lun_as_it_is_on_the_wire_and_the_names_that_the_target_requires() {
        let ipxe = |address: &str, text: &str| {
            let ways =
                configured(text).connect_info(&ISCSI, &Portal::at(address), &VolumeNames::plainly("x"));
            ways.into_iter().next().and_then(|way| way.ipxe)
        };
        let lun = |lun: u16, more: &str| format!("TargetName = 'iqn.a'\nluns = {{ {lun} = 'x' }}\n{more}");
        let is = |text: &str| Some(text.to_owned());
        assert_eq!(ipxe("192.0.2.1:3260", &lun(10, "")), is("sanboot iscsi:192.0.2.1::3260:a:iqn.a"));
        assert_eq!(ipxe("[2001:db8::1]:7", &lun(300, "")), is("sanboot iscsi:[2001:db8::1]::7:412c:iqn.a"));
        assert_eq!(ipxe("[fe80::1%1]:7", &lun(0, "")), None, "the zone is one of this machine");
        assert_eq!(ipxe("192.0.2.1:7", &lun(0, "HeaderDigest = 'CRC32C'")), None, "it has no digests");
        let (_folder, secret) = secret_file();
        let acl = |algorithm: &str| {
            let entry = format!("InitiatorName = 'iqn.me'\nCHAP_N = 'u'\nsecret_file = '{secret}'");
            lun(0, &format!("CHAP_A = ['{algorithm}']\n[[acl]]\n{entry}"))
        };
        let proved = "set initiator-iqn iqn.me && set username u && read password && \
                      sanboot iscsi:192.0.2.1::7:0:iqn.a";
        assert_eq!(ipxe("192.0.2.1:7", &acl("MD5")), is(proved));
        assert_eq!(ipxe("192.0.2.1:7", &acl("SHA-256")), None, "it has no other CHAP algorithm");
    }

    #[test]
    fn a_target_that_redirects_has_its_new_address_and_no_commands() {
        let settings = configured("TargetName = 'iqn.a'\nluns = { 0 = 'x' }\nredirect = 'h:1'");
        let address = Portal::at("127.0.0.1:3260");
        assert!(settings.connect_info(&ISCSI, &address, &VolumeNames::plainly("x")).is_empty());
        assert_eq!(settings.targets()[0].moved_to.as_deref(), Some("h:1"));
    }

    #[test]
    fn names_and_volumes_are_checked_before_anything_is_opened() {
        let check = |text: &[&str], names: &[&str]| {
            let targets = text.iter().flat_map(|text| configured(text).targets.to_vec()).collect();
            Iscsi { targets, ..Iscsi::default() }.check(names)
        };
        assert_eq!(check(&[], &["disk0", "b.c-1"]), Ok(()));
        assert!(check(&[], &["a_b"]).unwrap_err().starts_with("`a_b` is not allowed in an iSCSI name"));
        assert!(
            check(&[], &["a", "A"]).unwrap_err().starts_with("`A` and another volume differ only in case")
        );
        let target = "TargetName = 'iqn.a'\nluns = { 0 = 'x' }";
        assert_eq!(check(&[target], &["x", "a_b"]), Ok(()));
        assert_eq!(
            check(&[target], &["y"]).unwrap_err(),
            "iscsi_target `iqn.a`: no volume has the name `x`; add it, or correct `luns`"
        );
        assert_eq!(
            check(&[target, target], &["x"]).unwrap_err(),
            "two iscsi_targets have the name `iqn.a`; rename one"
        );
    }
}
