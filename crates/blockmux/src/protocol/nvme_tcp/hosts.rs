//! Hosts of which more is said than that they may connect: in the config file, and while their
//! subsystem is served.

use super::super::secret;
use super::config::Treq;
use super::discovery_names;
use crate::failure::Failure;
use crate::output::shell_word;
use blockmux_engine::ktls;
use blockmux_proto::fabrics::controller::node::NvmeNode;
use blockmux_proto::fabrics::url::{NvmeUrl, read_uuid};
use blockmux_proto::nvme::auth::psk::{ConfiguredPsk, PskError};
use blockmux_proto::nvme::auth::{DhChapSecret, DhGroup, Hash, HostSecrets, SecretError};
use blockmux_proto::nvme::hosts::HostAccess;
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme::subsystem::Subsystem;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A host as it is written, in the config file and on the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields)]
pub(crate) struct HostEntry {
    /// NQN of the host
    pub(super) hostnqn: String,
    /// TLS key, as nvme gen-tls-key prints it; the host must then use TLS
    #[arg(long, value_name = "PATH")]
    tls_key_file: Option<PathBuf>,
    /// NSIDs that the host sees [default: all]
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    namespaces: Option<Vec<u32>>,
    /// Secret of the host, as nvme gen-dhchap-key prints it [default: no authentication]
    #[arg(long, value_name = "PATH")]
    dhchap_secret_file: Option<PathBuf>,
    /// Secret of the controller, for hosts that authenticate it
    #[arg(long, value_name = "PATH")]
    dhchap_ctrl_secret_file: Option<PathBuf>,
    /// The only hash function
    #[arg(long, value_name = "NAME")]
    dhchap_hash: Option<String>,
    /// The only group
    #[arg(long, value_name = "NAME")]
    dhchap_dhgroup: Option<String>,
}

/// What is in a host's files, and what else is said of it.
pub(super) struct HostKeys {
    pub(super) access: HostAccess,
    pub(super) tls_key: Option<ConfiguredPsk>,
}

/// The hosts of a node by subsystem and name, with their files and keys of TLS.
pub(super) struct LiveHosts {
    treq: Treq,
    machine: String,
    known: Mutex<BTreeMap<(Nqn, Nqn), Known>>,
}

struct Known {
    entry: HostEntry,
    tls_key: Option<ConfiguredPsk>,
}

impl HostEntry {
    /// Has its paths mean the same in whatever directory.
    pub(super) fn make_absolute(&mut self) {
        if let Ok(directory) = std::env::current_dir() {
            self.anchor(&directory);
        }
    }

    /// Takes relative paths as below a directory.
    pub(super) fn anchor(&mut self, directory: &Path) {
        let files = [&mut self.tls_key_file, &mut self.dhchap_secret_file, &mut self.dhchap_ctrl_secret_file];
        for path in files.into_iter().flatten() {
            *path = directory.join(&*path);
        }
    }

    /// Reads its files.
    pub(super) fn read(&self) -> Result<HostKeys, Failure> {
        let tls_key = self.tls_key_file.as_deref().map(read_tls_key).transpose()?;
        let namespaces = self.namespaces.as_ref().map(|all| all.iter().copied().collect());
        let secrets = self.secrets()?.map(Arc::new);
        Ok(HostKeys { access: HostAccess { namespaces, secrets }, tls_key })
    }

    /// A host of which nothing but its name is said.
    pub(super) fn plain(host: &Nqn) -> HostEntry {
        HostEntry { hostnqn: host.as_str().to_owned(), ..HostEntry::default() }
    }

    /// Whether it sees that namespace.
    pub(super) fn sees(&self, nsid: u32) -> bool {
        self.namespaces.as_ref().is_none_or(|own| own.contains(&nsid))
    }

    /// Whether it comes by TLS.
    pub(super) fn has_tls_key(&self) -> bool {
        self.tls_key_file.is_some()
    }

    /// The URL by which our own initiator comes as this host.
    pub(super) fn add_to(&self, url: &mut NvmeUrl) {
        let host = self.clone();
        url.host_nqn = Nqn::new(&host.hostnqn);
        url.secret_file = host.dhchap_secret_file;
        url.ctrl_secret_file = host.dhchap_ctrl_secret_file.filter(|_| url.secret_file.is_some());
        url.tls_key_file = host.tls_key_file;
    }

    /// What a shell runs so that Linux connects as this host, where `connect` does it for a host of
    /// which nothing is asked.
    pub(super) fn command(&self, subsystem: &Nqn, connect: &str) -> String {
        let content = |file: &Path| format!("\"$(cat {})\"", shell_word(&file.to_string_lossy()));
        let nqn = shell_word(&self.hostnqn);
        let mut command = format!("{connect} --hostnqn={nqn}");
        // The kernel refuses a host that comes by several names with one identifier.
        match self.hostnqn.rsplit_once("uuid:").filter(|(_, id)| read_uuid(id).is_some()) {
            Some((_, id)) => command += &format!(" --hostid={id}"),
            None => command += " --hostid=\"$(uuidgen)\"",
        }
        let secrets = [
            ("dhchap-secret", &self.dhchap_secret_file),
            ("dhchap-ctrl-secret", &self.dhchap_ctrl_secret_file),
        ];
        for (option, file) in secrets {
            command.extend(file.as_deref().map(|file| format!(" --{option}={}", content(file))));
        }
        match &self.tls_key_file {
            None => command,
            Some(file) => format!(
                "nvme check-tls-key --insert --identity=1 --hostnqn={nqn} --subsysnqn={} --keydata={} && {command} --tls",
                shell_word(subsystem.as_str()),
                content(file)
            ),
        }
    }

    fn has_files(&self) -> bool {
        self.tls_key_file.is_some() || self.dhchap_secret_file.is_some()
    }
    fn secrets(&self) -> Result<Option<HostSecrets>, Failure> {
        let wrong = |what: String| Failure::request(format!("host `{}`: {what}", self.hostnqn));
        let hash = self.dhchap_hash.as_deref().map(|name| {
            Hash::of_name(name).map_err(|problem| wrong(format!("dhchap_hash `{name}`: {problem}")))
        });
        let group = self.dhchap_dhgroup.as_deref().map(|name| {
            DhGroup::of_name(name).map_err(|problem| wrong(format!("dhchap_dhgroup `{name}`: {problem}")))
        });
        let (hash, group) = (hash.transpose()?, group.transpose()?);
        let controller = self.dhchap_ctrl_secret_file.as_deref().map(read_secret).transpose()?;
        let Some(file) = &self.dhchap_secret_file else {
            if controller.is_some() || hash.is_some() || group.is_some() {
                return Err(wrong("proves nothing without a dhchap_secret_file; add one".to_owned()));
            }
            return Ok(None);
        };
        Ok(Some(HostSecrets { host: read_secret(file)?, controller, hash, group }))
    }
}

impl LiveHosts {
    /// Those of the config file.
    pub(super) fn new(treq: Treq, machine: &str) -> LiveHosts {
        LiveHosts { treq, machine: machine.to_owned(), known: Mutex::default() }
    }

    /// One of them.
    pub(super) fn insert(&self, subsystem: &Nqn, entry: HostEntry, tls_key: Option<ConfiguredPsk>) {
        if let Some(host) = Nqn::new(&entry.hostnqn) {
            self.known().insert((subsystem.clone(), host), Known { entry, tls_key });
        }
    }

    /// Lets a host connect, or changes what holds for it.
    pub(super) fn add(
        &self,
        node: &NvmeNode,
        subsystem: &Subsystem,
        entry: &HostEntry,
    ) -> Result<(), String> {
        let host = Nqn::new(&entry.hostnqn).ok_or_else(|| {
            format!("`{}` is no NVMe name; write one as nqn.2026-11.com.example:a", entry.hostnqn)
        })?;
        let keys = entry.read().map_err(|failure| failure.to_string())?;
        let mut known = self.known();
        self.set(&mut known, node, subsystem, (&host, entry, keys))
    }

    /// Lets a host connect no more.
    pub(super) fn remove(&self, node: &NvmeNode, subsystem: &Subsystem, host: &str) -> Result<(), String> {
        let mut known = self.known();
        let name = Nqn::new(host).filter(|name| node.remove_host(subsystem, name));
        let name = name.ok_or_else(|| format!("{}: no host is called `{host}`", subsystem.nqn))?;
        known.remove(&(subsystem.nqn.clone(), name.clone()));
        self.set_tls_keys(&known, node, subsystem, &name);
        Ok(())
    }

    /// Reads the files of one host again, or of all; answers how many hosts have some. If one
    /// cannot be read, nothing has changed.
    pub(super) fn read_again(
        &self,
        node: &NvmeNode,
        subsystem: &Subsystem,
        only: Option<&str>,
    ) -> Result<u32, String> {
        let mut known = self.known();
        let is_meant = |(of, host): &(Nqn, Nqn), known: &Known| {
            *of == subsystem.nqn && only.is_none_or(|only| host.as_str() == only) && known.entry.has_files()
        };
        let meant = known.iter().filter(|(key, known)| is_meant(key, known));
        let all =
            meant.map(|((_, host), known)| Ok((host.clone(), known.entry.clone(), known.entry.read()?)));
        let all: Vec<_> = all.collect::<Result<_, Failure>>().map_err(|failure| failure.to_string())?;
        if let Some(host) = only.filter(|_| all.is_empty()) {
            return Err(format!("{}: no host with files is called `{host}`", subsystem.nqn));
        }
        let count = all.len() as u32; // of lines that somebody wrote
        for (host, entry, keys) in all {
            self.set(&mut known, node, subsystem, (&host, &entry, keys))?;
        }
        Ok(count)
    }

    /// At no time the host may come without what is asked of it.
    fn set(
        &self,
        known: &mut BTreeMap<(Nqn, Nqn), Known>,
        node: &NvmeNode,
        subsystem: &Subsystem,
        (host, entry, HostKeys { access, tls_key }): (&Nqn, &HostEntry, HostKeys),
    ) -> Result<(), String> {
        let wrong = |problem: &dyn std::fmt::Display| format!("{}: {problem}", subsystem.nqn);
        if subsystem.is_open() {
            return Err(wrong(&blockmux_proto::nvme::hosts::OpenToAll));
        }
        let has_keys = tls_key.is_some() || access.secrets.is_some();
        let place = (subsystem.nqn.clone(), host.clone());
        let had_tls = known.get(&place).is_some_and(|known| known.tls_key.is_some());
        let asks_more = tls_key.is_some() || !had_tls;
        known.insert(place, Known { entry: entry.clone(), tls_key });
        if asks_more {
            self.set_tls_keys(known, node, subsystem, host);
        }
        node.set_host(subsystem, host, access).map_err(|error| wrong(&error))?;
        self.set_tls_keys(known, node, subsystem, host);
        if has_keys {
            node.set_secure_channel(self.treq.secure_channel(true));
        }
        Ok(())
    }

    /// The keys of a host for a subsystem, and for discovery those that it has for any.
    fn set_tls_keys(
        &self,
        known: &BTreeMap<(Nqn, Nqn), Known>,
        node: &NvmeNode,
        subsystem: &Subsystem,
        host: &Nqn,
    ) {
        let of_host = known.iter().filter(|((_, name), _)| name == host);
        let keys = of_host.filter_map(|((of, _), known)| Some((of, known.tls_key.as_ref()?.retained(host))));
        let keys: Vec<_> = keys.collect();
        let own: Vec<_> =
            keys.iter().filter(|(of, _)| **of == subsystem.nqn).map(|(_, key)| key.clone()).collect();
        let all: Vec<_> = keys.iter().map(|(_, key)| key.clone()).collect();
        node.keyring().replace(&own, host, &subsystem.nqn);
        for name in discovery_names(&self.machine) {
            node.keyring().replace(&all, host, &name);
        }
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<(Nqn, Nqn), Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads a secret of DH-HMAC-CHAP.
pub(super) fn read_secret(path: &Path) -> Result<DhChapSecret, Failure> {
    secret::read("secret file", path, |line| {
        DhChapSecret::parse(std::str::from_utf8(line).map_err(|_| SecretError::Format)?)
    })
}

/// Reads a key of TLS. Has the kernel load its TLS, too, as long as we may.
pub(super) fn read_tls_key(path: &Path) -> Result<ConfiguredPsk, Failure> {
    ktls::load();
    secret::read("TLS key file", path, |line| {
        ConfiguredPsk::parse(std::str::from_utf8(line).map_err(|_| PskError::Format)?)
    })
}
