//! The config file of `serve`: TOML, with the options of the command line as keys.

use super::access::ApiAccess;
use super::group::GroupConfig;
use super::role::{ApiCertificate, ApiToken};
use super::setup::check_name;
use super::sources::{INCLUDE, Sources};
use crate::access::{networks, secret};
use crate::api::ControlPath;
use crate::api::bodies::Attachment;
use crate::api::limits;
use crate::data::unit_identity;
use crate::failure::Failure;
use crate::process::dead_paths::look_at_all;
use crate::process::poll::Poll;
use crate::protocol::address::ApiListener;
use crate::protocol::{FilePlaces, Frontends, KeyError, Protocol, by_name};
use blockmux_engine::sys::congestion::Congestion;
use blockmux_proto::names::networks::AllowedNetworks;
use blockmux_proto::names::unit_identity::GivenUnitIdentity;
use blockmux_proto::names::volume_uuid::VolumeUuid;
use blockmux_volume::{Limits, Spec, SpecError, VolumeLimits};
use serde::{Deserialize, Deserializer, de};
use std::env;
use std::fmt::Display;
use std::iter;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use toml::Spanned;
use toml::de::{DeTable, Deserializer as TomlDeserializer};

/// The top-level keys that belong to no protocol. All are optional.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Config {
    pub(super) volume: Vec<VolumeEntry>,
    pub(super) attachment: Vec<Attachment>,
    pub(super) read_only: bool,
    pub(super) cores: Option<NonZeroUsize>,
    pub(super) poll: Option<Poll>,
    pub(super) max_connections: Option<NonZeroUsize>,
    /// In seconds.
    pub(super) login_timeout: Option<u64>,
    /// In seconds.
    pub(super) idle_timeout: Option<u64>,
    #[serde(deserialize_with = "parsed")]
    pub(super) congestion: Option<Congestion>,
    pub(super) state: Option<PathBuf>,
    #[serde(deserialize_with = "parsed")]
    pub(super) control: Option<ControlPath>,
    pub(super) mdns: bool,
    pub(super) group: Option<GroupConfig>,
    #[serde(deserialize_with = "parsed")]
    pub(super) api: Option<ApiListener>,
    pub(super) api_token_file: Option<PathBuf>,
    pub(super) api_tls_certificates: Option<PathBuf>,
    pub(super) api_tls_subject: Vec<String>,
    pub(super) api_token: Vec<ApiToken>,
    pub(super) api_certificate: Vec<ApiCertificate>,
}

/// The keys of [`Config`].
const KEYS: [&str; 19] = [
    "volume",
    "attachment",
    "read_only",
    "cores",
    "poll",
    "max_connections",
    "login_timeout",
    "idle_timeout",
    "congestion",
    "state",
    "control",
    "mdns",
    "group",
    "api",
    "api_token_file",
    "api_tls_certificates",
    "api_tls_subject",
    "api_token",
    "api_certificate",
];

/// One `[[volume]]`, or a `[NAME=]VOLUME` of a command line.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VolumeEntry {
    pub(super) name: Option<String>,
    #[serde(deserialize_with = "spec")]
    pub(super) spec: Spec,
    /// The volume's UUID, from which the identifiers of all protocols are derived; without it, the
    /// UUID is derived from the data.
    #[serde(default, deserialize_with = "parsed")]
    pub(super) uuid: Option<VolumeUuid>,
    /// What SCSI initiators recognize it by, instead of what is derived from the UUID.
    #[serde(default, deserialize_with = "unit_identity::read")]
    pub(super) scsi: GivenUnitIdentity,
    /// Allow another process to export the same data, although reservations and locks are not
    /// shared between processes.
    #[serde(default)]
    pub(super) shared: bool,
    #[serde(default)]
    pub(super) read_only: bool,
    #[serde(default)]
    pub(super) description: String,
    /// Protocols that export the volume; without the key all, unless a target restricts access to
    /// it.
    pub(super) protocols: Option<Vec<String>>,
    /// Networks from which clients may use the volume.
    #[serde(default, rename = "allow", deserialize_with = "networks::read")]
    pub(super) networks: AllowedNetworks,
    /// Limits of all its clients together.
    #[serde(default, deserialize_with = "limits::read")]
    pub(super) limits: Limits,
    /// Limits of each of its clients.
    #[serde(default, deserialize_with = "limits::read")]
    pub(super) client_limits: Limits,
}

impl VolumeEntry {
    /// The entry as a `[[volume]]` table with the given name; without passwords in URLs.
    pub(super) fn table(&self, name: &str) -> toml::Table {
        let mut table = toml::Table::new();
        table.insert("name".to_owned(), name.into());
        table.insert("spec".to_owned(), self.spec.to_string().into());
        table.extend(self.uuid.map(|uuid| ("uuid".to_owned(), uuid.to_string().into())));
        table.extend(unit_identity::table(&self.scsi).map(|own| ("scsi".to_owned(), own)));
        for (key, is_on) in [("shared", self.shared), ("read_only", self.read_only)] {
            table.extend(is_on.then(|| (key.to_owned(), true.into())));
        }
        if !self.description.is_empty() {
            table.insert("description".to_owned(), self.description.clone().into());
        }
        // A word that is no protocol is the name of a target.
        let word = |word: &String| by_name(word).map_or_else(|| word.clone(), Protocol::key).into();
        let words = self.protocols.as_ref().map(|words| words.iter().map(word).collect::<Vec<toml::Value>>());
        table.extend(words.map(|words| ("protocols".to_owned(), words.into())));
        table.extend(networks::value(&self.networks).map(|list| ("allow".to_owned(), list)));
        for (key, limits) in [("limits", &self.limits), ("client_limits", &self.client_limits)] {
            table.extend(limits::table(limits).map(|limits| (key.to_owned(), limits)));
        }
        table
    }

    /// The limits of its I/O.
    pub(super) fn volume_limits(&self) -> VolumeLimits {
        VolumeLimits { volume: self.limits, client: self.client_limits }
    }
}

impl FromStr for VolumeEntry {
    type Err = String;

    fn from_str(text: &str) -> Result<VolumeEntry, String> {
        // A spec begins with its kind and a colon, which no name contains.
        let named = text.split_once('=').filter(|(name, _)| !name.contains([':', '/', '?', '[']));
        let (name, spec) = named.map_or((None, text), |(name, spec)| (Some(name), spec));
        if let Some(name) = name {
            check_name(name)?;
        }
        let spec = spec.parse().map_err(|error: SpecError| error.to_string())?;
        Ok(VolumeEntry {
            name: name.map(str::to_owned),
            spec,
            uuid: None,
            scsi: GivenUnitIdentity::default(),
            shared: false,
            read_only: false,
            description: String::new(),
            protocols: None,
            networks: AllowedNetworks::default(),
            limits: Limits::default(),
            client_limits: Limits::default(),
        })
    }
}

/// The current directory, against which paths of the command line are resolved; empty if it was
/// deleted.
pub(super) fn current_directory() -> PathBuf {
    env::current_dir().unwrap_or_default()
}

impl Config {
    /// Reads the config files; keys of protocols are passed to `frontends`. `state` is the state
    /// directory of the command line, which has priority.
    ///
    /// # Errors
    /// If a key or a value is invalid; the message names file and line.
    pub(super) fn read(
        sources: &Sources,
        frontends: &mut Frontends,
        state: Option<&Path>,
    ) -> Result<Config, Failure> {
        let mut config = Config::parse(sources, frontends, state)?;
        config.anchor(sources.path().parent().unwrap_or(Path::new("")))?;
        Ok(config)
    }

    /// What clients of the API over TCP need.
    pub(super) fn api_access(&self) -> ApiAccess {
        ApiAccess {
            api_token_file: self.api_token_file.clone(),
            api_tls_certificates: self.api_tls_certificates.clone(),
            api_tls_subject: self.api_tls_subject.clone(),
            api_token: self.api_token.clone(),
            api_certificate: self.api_certificate.clone(),
        }
    }

    /// Makes relative paths relative to the config file's directory instead of the current one.
    fn anchor(&mut self, directory: &Path) -> Result<(), Failure> {
        let mut moved = Vec::new();
        for volume in &mut self.volume {
            let spec = volume.spec.clone().below(directory);
            let both =
                spec.files().into_iter().zip(volume.spec.files()).filter(|(file, before)| file != before);
            moved.extend(both.map(|(file, before)| (file.to_owned(), before.to_owned())));
            volume.spec = spec;
        }
        // One that does not answer is reported when it is opened.
        let wrong = look_at_all(moved, |(file, before)| {
            // Creating the file would export an empty disk.
            (before.exists() && !file.exists()).then(|| {
                format!(
                    "{}: there is no such file, but a {} in the current directory: paths in a config file are \
                     relative to that file; write the whole path",
                    file.display(),
                    before.display()
                )
            })
        });
        if let Some(wrong) = wrong.into_iter().flatten().flatten().next() {
            return Err(Failure::request(wrong));
        }
        let control = self.control.as_mut().map(|ControlPath(path)| path);
        for path in self.state.iter_mut().chain(control).chain(&mut self.api_tls_certificates) {
            *path = directory.join(&*path);
        }
        self.group.iter_mut().for_each(|group| group.anchor(directory));
        let attachments = std::mem::take(&mut self.attachment).into_iter();
        self.attachment = attachments.map(|own| own.below(directory)).collect();
        let tokens = self.api_token.iter_mut().map(|own| &mut own.token_file);
        for path in self.api_token_file.iter_mut().chain(tokens) {
            *path = secret::below(directory, path);
        }
        Ok(())
    }

    fn parse(sources: &Sources, frontends: &mut Frontends, state: Option<&Path>) -> Result<Config, Failure> {
        let table = sources.table()?;
        sources.check_names(table.get_ref())?;
        let config = Config::from_table(table, sources.path(), frontends, state);
        config.map_err(|error| match error {
            KeyError::Syntax(span, message) => sources.wrong(span, &message),
            KeyError::Invalid(failure) => sources.located(failure),
        })
    }

    /// Reads the keys of [`Config`] and passes all others to `frontends`. `path` is the main file.
    fn from_table(
        table: Spanned<DeTable<'_>>,
        path: &Path,
        frontends: &mut Frontends,
        state: Option<&Path>,
    ) -> Result<Config, KeyError> {
        let span = table.span();
        let (own, others): (DeTable<'_>, DeTable<'_>) =
            table.into_inner().into_iter().partition(|(key, _)| KEYS.contains(&&**key.get_ref()));
        let theirs = frontends.keys();
        if let Some((key, _)) =
            others.iter().find(|(key, _)| !theirs.iter().any(|own| *own == **key.get_ref()))
        {
            let [first, rest @ ..] = &KEYS;
            let known =
                iter::once(*first).chain(theirs.iter().map(String::as_str)).chain(rest.iter().copied());
            let known: Vec<_> = known.chain([INCLUDE]).map(|key| format!("`{key}`")).collect();
            let what = format!("unknown key `{}`, expected one of {}", key.get_ref(), known.join(", "));
            return Err(KeyError::Syntax(Some(key.span()), what));
        }
        let own = TomlDeserializer::from(Spanned::new(span, own));
        let config = Config::deserialize(own)?;
        // Announced commands and URLs may be used in another directory.
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let directory = absolute.parent().unwrap_or(Path::new(""));
        let written = config.state.as_ref().map(|state| directory.join(state));
        let state = state.map(|state| current_directory().join(state)).or(written);
        let secrets = state.as_deref().map(secret::directory_below);
        frontends.take_keys(others, &FilePlaces { directory, secrets: secrets.as_deref() })?;
        Ok(config)
    }
}

fn spec<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Spec, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
}

/// Deserializes a value from a string with `FromStr`.
fn parsed<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    String::deserialize(deserializer)?.parse().map(Some).map_err(de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_volume::spec::{MemSpec, NullSpec};
    use std::collections::BTreeSet;

    fn parse_all(text: &str) -> Result<(Config, Frontends), String> {
        let mut frontends = Frontends::default();
        let sources = Sources::of_text(Path::new("b.toml"), text.to_owned());
        let config = Config::parse(&sources, &mut frontends, None);
        config.map(|config| (config, frontends)).map_err(|failure| failure.to_string())
    }

    fn parse(text: &str) -> Result<Config, String> {
        parse_all(text).map(|(config, _)| config)
    }

    #[test]
    fn every_key_of_a_frontend_is_read() {
        for (protocol, frontend) in Frontends::default().iter() {
            for key in frontend.keys() {
                let wrong = parse(&format!("{key} = 1.5")).unwrap_err();
                assert!(!wrong.contains("unknown key"), "{protocol:?}: {wrong}");
            }
        }
    }

    #[test]
    fn a_file_has_the_options_of_the_command_line() {
        let text = "
            nbd = ['127.0.0.1:0', 'unix:/s']
            cores = 2
            poll = 'never'
            congestion = 'cubic'
            max_connections = 10
            login_timeout = 5
            idle_timeout = 3600
            state = '/s'
            read_only = true
            [[volume]]
            name = 'a'
            spec = 'mem:1g'
            uuid = '6f9a4c2e-1d3b-4f5a-8c7d-9e0f1a2b3c4d'
            shared = true
            read_only = true
            description = 'of RAM'
            [[volume]]
            spec = 'null:1g'
        ";
        let (config, frontends) = parse_all(text).unwrap();
        let first = VolumeEntry {
            uuid: "6f9a4c2e-1d3b-4f5a-8c7d-9e0f1a2b3c4d".parse().ok(),
            shared: true,
            read_only: true,
            description: "of RAM".into(),
            ..VolumeEntry::from_str("a=mem:1g").unwrap()
        };
        assert_eq!(config.volume[0], first);
        assert_eq!(config.volume[1].spec, Spec::Null(NullSpec::new(1 << 30)));
        assert_eq!((frontends.listeners().len(), config.read_only), (2, true));
        assert_eq!((config.cores, config.poll), (NonZeroUsize::new(2), Some(Poll::Never)));
        assert_eq!(config.max_connections, NonZeroUsize::new(10));
        assert_eq!((config.login_timeout, config.idle_timeout), (Some(5), Some(3600)));
        assert_eq!(config.congestion, Some("cubic".parse().unwrap()));
        assert_eq!(config.state.as_deref(), Some(Path::new("/s")));
        assert_eq!(parse("").unwrap(), Config::default());
    }

    #[test]
    fn a_name_is_before_an_equals_sign() {
        let read = |text: &str| text.parse::<VolumeEntry>().unwrap();
        let named = read("a=mem:1g");
        assert_eq!((named.name.as_deref(), named.spec), (Some("a"), Spec::Mem(MemSpec::new(1 << 30))));
        assert_eq!(read("mem:1g").name, None);
        assert_eq!(read("file:x?size=1g").name, None);
        assert_eq!(read("a=file:x?size=1g").name, Some("a".into()));
        assert_eq!(read("fault:op=read:mem:1g").name, None);
        assert_eq!(read("nbd+unix:///x?socket=/s").name, None);
    }

    /// docs/reference/config.md.
    const REFERENCE: &str =
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/config.md"));

    /// The keys of a table, as serde's error about an unknown key lists them.
    fn keys_of(table: &str) -> BTreeSet<String> {
        let text = format!("{table}\nxyzzyxyzzyxyzzy = 1");
        let sources = Sources::of_text(Path::new("b.toml"), text);
        let table = sources.table().unwrap();
        let error = match Config::from_table(table, sources.path(), &mut Frontends::default(), None) {
            Err(KeyError::Syntax(_, message)) => message,
            _ => panic!("an unknown key was accepted"),
        };
        let (_, known) = error.split_once("`, expected ").unwrap_or_else(|| panic!("{error}"));
        known.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    #[test]
    fn the_reference_page_lists_exactly_the_keys_of_every_table() {
        for (section, table) in [
            ("Top level", ""),
            ("volume", "[[volume]]"),
            ("volume.limits", "[[volume]]\nspec = 'mem:1m'\n[volume.limits]"),
            ("volume.limits", "[[volume]]\nspec = 'mem:1m'\n[volume.client_limits]"),
            ("volume.scsi", "[[volume]]\nspec = 'mem:1m'\n[volume.scsi]"),
            ("attachment", "[[attachment]]\nvolume = 'a'"),
            ("group", "[group]"),
            ("api_token", "[[api_token]]"),
            ("api_certificate", "[[api_certificate]]"),
            ("iscsi_target", "[[iscsi_target]]"),
            ("iscsi_target.acl", "[[iscsi_target]]\nTargetName = 'iqn.a'\n[[iscsi_target.acl]]"),
            ("iscsi_discovery", "[iscsi_discovery]"),
            ("srp_target", "[[srp_target]]"),
            (
                "srp_target.acl",
                "[[srp_target]]\nport_id = '0x0123456789abcdef0123456789abcdef'\n[[srp_target.acl]]",
            ),
            ("nvme_subsystem", "[[nvme_subsystem]]"),
            ("nvme_subsystem.namespace", "[[nvme_subsystem]]\n[[nvme_subsystem.namespace]]"),
            ("nvme_subsystem.host", "[[nvme_subsystem]]\n[[nvme_subsystem.host]]"),
            ("nvme_subsystem.ana_group", "[[nvme_subsystem]]\n[[nvme_subsystem.ana_group]]"),
            ("nvme_discovery", "[nvme_discovery]"),
            ("nvme_discovery.referral", "[[nvme_discovery.referral]]"),
        ] {
            let (_, text) = REFERENCE.split_once(&format!("\n## {section}\n")).unwrap();
            let text = text.split("\n## ").next().unwrap();
            let rows = text.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
            assert_eq!(rows.map(str::to_owned).collect::<BTreeSet<_>>(), keys_of(table), "{section}");
        }
    }

    #[test]
    fn an_error_names_its_line() {
        for (text, expected) in [
            ("\nndb = []", "b.toml:2: unknown key `ndb`, did you mean `nbd`?"),
            (
                "\nqwertyuiop = []",
                "b.toml:2: unknown key `qwertyuiop`; remove it, docs/reference/config.md lists the keys",
            ),
            ("[[volume]]\nnam = 'a'", "b.toml:2: unknown key `nam`, did you mean `name`?"),
            (
                "[[iscsi_target]]\nTargetName = 'iqn.a'\naccess_states = { '127.0.0.1:3260' = 'activ' }",
                "b.toml:3: 127.0.0.1:3260: unknown value `activ`, expected one of ",
            ),
            (
                "[[attachment]]\nvolume = 'a'\nthreads = 1",
                "b.toml:3: unknown key `threads`, expected one of `volume`, `via`, ",
            ),
            ("[[volume]]\nname = 'a'", "b.toml:1: missing key `spec`"),
            ("[[volume]]\nspec = 'mem:1g'\nuuid = '1'", "b.toml:3: `1` is not a UUID: write 32 "),
            (
                "[[volume]]\nspec = 'mem:1g'\n[volume.scsi]\nrevision = '1'\nnaa = '1'",
                "b.toml:5: `1`: an NAA designator has 16 hexadecimal digits and begins with 2, 3 or 5, or 32 and ",
            ),
            ("[[volume]]\nspec = 'mem:x'", "b.toml:2: in `mem:x`: `x` is not a size"),
            ("nbd = ['10809']", "b.toml:1: `10809` is not a host"),
            ("[[attachment]]\nvolume = 'a'\nvia = 'wire'", "b.toml:3: via: unknown value `wire`, expected "),
            ("congestion = ''", "b.toml:1: name a TCP congestion control, such as cubic"),
            ("poll = 'often'", "b.toml:1: poll: unknown value `often`, expected one of `adaptive`"),
            (
                "nbd = ':10809'",
                "b.toml:1: nbd: invalid type: string \":10809\", expected a list, such as nbd = [\":10809\"] or [[volume]]",
            ),
            ("\n[volume]", "b.toml:2: [volume] is one table, and `volume` is a list; write [[volume]]"),
            ("[nbd]", "b.toml:1: invalid type: map, expected a list, such as nbd = "),
            ("nbd = [\n':1',\n7]", "b.toml:3: nbd: invalid type: integer `7`, expected a string"),
            (
                "[[iscsi_target]]\nTargetName = 'iqn.a'\nluns = { 0 = 'x', 1 = 2 }",
                "b.toml:3: 1: invalid type: integer `2`, expected the name of a volume, or { volume = ",
            ),
            ("[[iscsi_target]]\nTargetName = 'iqn.a'\nluns = 'x'", "b.toml:3: luns: invalid type: string"),
            ("cores = 0", "b.toml:1: cores: invalid value: integer `0`, expected a number of at least 1"),
            ("cores = ", "b.toml:1: "),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
