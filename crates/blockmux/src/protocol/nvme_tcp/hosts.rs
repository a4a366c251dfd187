//! Hosts with keys or restricted namespaces: their entries in the config file and on the command
//! line, and their state while the subsystem is served.

use super::config::{ConfiguredSubsystem, Treq};
use super::discovery_names;
use crate::access::secret;
use crate::failure::Failure;
use crate::output::shell_word;
use blockmux_engine::net::ktls;
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

/// A host in the config file (`[[nvme_subsystem.host]]`) or in `ctl add-host`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields)]
pub(crate) struct HostEntry {
    /// NQN of the host
    pub(super) hostnqn: String,
    /// TLS key, as nvme gen-tls-key prints it; the host must then use TLS
    #[arg(long, value_name = "PATH")]
    pub(super) tls_key_file: Option<PathBuf>,
    /// NSIDs that the host sees [default: all]
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    namespaces: Option<Vec<u32>>,
    /// Secret of the host, as nvme gen-dhchap-key prints it [default: no authentication]
    #[arg(long, value_name = "PATH")]
    dhchap_secret_file: Option<PathBuf>,
    /// Secret of the controller, for hosts that authenticate it
    #[arg(long, value_name = "PATH")]
    dhchap_ctrl_secret_file: Option<PathBuf>,
    /// Allow this hash function only
    #[arg(long, value_name = "NAME")]
    dhchap_hash: Option<String>,
    /// Allow this DH group only
    #[arg(long, value_name = "NAME")]
    dhchap_dhgroup: Option<String>,
}

/// The contents of a host's files, and the namespaces that it sees.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct HostKeys {
    pub(super) access: HostAccess,
    pub(super) tls_key: Option<ConfiguredPsk>,
}

/// The hosts of all subsystems, with their entries and TLS keys.
pub(super) struct LiveHosts {
    treq: Mutex<Treq>,
    machine: String,
    known: Mutex<KnownHosts>,
}

/// The hosts of each subsystem.
type KnownHosts = BTreeMap<Nqn, BTreeMap<Nqn, KnownHost>>;

/// A host's entry and its current TLS key.
struct KnownHost {
    entry: HostEntry,
    tls_key: Option<ConfiguredPsk>,
}

impl HostEntry {
    /// Makes the paths absolute, below the current directory.
    pub(super) fn make_absolute(&mut self) {
        if let Ok(directory) = std::env::current_dir() {
            self.anchor(&directory);
        }
    }

    /// Makes relative paths absolute, below `directory`.
    pub(super) fn anchor(&mut self, directory: &Path) {
        let files = [&mut self.tls_key_file, &mut self.dhchap_secret_file, &mut self.dhchap_ctrl_secret_file];
        for path in files.into_iter().flatten() {
            *path = secret::below(directory, path);
        }
    }

    /// Reads the secret and key files.
    ///
    /// # Errors
    /// If a file cannot be read, or its content or an algorithm is invalid.
    pub(super) fn read(&self) -> Result<HostKeys, Failure> {
        let tls_key = self.tls_key_file.as_deref().map(read_tls_key).transpose()?;
        let namespaces = self.namespaces.as_ref().map(|all| all.iter().copied().collect());
        let secrets = self.secrets()?.map(Arc::new);
        Ok(HostKeys { access: HostAccess { namespaces, secrets }, tls_key })
    }

    /// A host without keys that sees all namespaces.
    pub(super) fn plain(host: &Nqn) -> HostEntry {
        HostEntry { hostnqn: host.as_str().to_owned(), ..HostEntry::default() }
    }

    /// Whether the host sees the namespace.
    pub(super) fn sees(&self, nsid: u32) -> bool {
        self.namespaces.as_ref().is_none_or(|own| own.contains(&nsid))
    }

    /// Adds the parameters with which the Blockmux initiator connects as this host.
    pub(super) fn add_to(&self, url: &mut NvmeUrl) {
        let host = self.clone();
        url.host_nqn = Nqn::new(&host.hostnqn);
        url.secret_file = host.dhchap_secret_file;
        url.ctrl_secret_file = host.dhchap_ctrl_secret_file.filter(|_| url.secret_file.is_some());
        url.tls_key_file = host.tls_key_file;
    }

    /// Shell command with which Linux connects as this host; `connect` is the command without
    /// authentication.
    pub(super) fn command(&self, subsystem: &Nqn, connect: &str) -> String {
        let content = |file: &Path| format!("\"$(cat {})\"", shell_word(&file.to_string_lossy()));
        let nqn = shell_word(&self.hostnqn);
        let mut command = format!("{connect} --hostnqn={nqn}");
        // The kernel refuses several host names with the same host identifier.
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

    /// Whether it names files of secrets or keys.
    pub(super) fn has_files(&self) -> bool {
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
                return Err(wrong("DH-HMAC-CHAP needs a dhchap_secret_file; add one".to_owned()));
            }
            return Ok(None);
        };
        Ok(Some(HostSecrets { host: read_secret(file)?, controller, hash, group }))
    }
}

impl LiveHosts {
    /// Creates an empty list.
    pub(super) fn new(treq: Treq, machine: &str) -> LiveHosts {
        LiveHosts { treq: Mutex::new(treq), machine: machine.to_owned(), known: Mutex::default() }
    }

    /// Adds the hosts of a new subsystem and their TLS keys.
    pub(super) fn insert_all(
        &self,
        node: &NvmeNode,
        subsystem: &Subsystem,
        configured: &ConfiguredSubsystem,
    ) {
        let mut known = self.known();
        let hosts = configured.entries.iter().filter_map(|entry| {
            let host = Nqn::new(&entry.hostnqn)?;
            let tls_key = configured.tls_keys.get(&host).cloned();
            Some((host, KnownHost { entry: entry.clone(), tls_key }))
        });
        known.insert(subsystem.nqn.clone(), hosts.collect());
        for host in configured.tls_keys.keys() {
            self.set_tls_keys(&known, node, subsystem, host);
        }
    }

    /// Removes the hosts of a removed subsystem and their TLS keys.
    pub(super) fn remove_all(&self, node: &NvmeNode, subsystem: &Subsystem) {
        let mut known = self.known();
        let of_it = known.remove(&subsystem.nqn).unwrap_or_default();
        of_it.keys().for_each(|host| self.set_tls_keys(&known, node, subsystem, host));
    }

    /// Sets whether hosts must use TLS.
    pub(super) fn set_treq(&self, treq: Treq) {
        *self.treq.lock().unwrap_or_else(PoisonError::into_inner) = treq;
    }

    /// Applies the hosts of a subsystem's new config. Returns the hosts that may not connect any
    /// more; their controllers are still connected.
    pub(super) fn reconfigure(
        &self,
        node: &NvmeNode,
        subsystem: &Subsystem,
        (before, wanted): (Option<&ConfiguredSubsystem>, &ConfiguredSubsystem),
    ) -> Vec<Nqn> {
        let mut known = self.known();
        if !wanted.is_open {
            node.set_open(subsystem, false);
        }
        let mut gone = subsystem.listed_hosts();
        gone.retain(|host| !wanted.hosts.contains(host));
        for host in &gone {
            node.withdraw_host(subsystem, host);
            known.get_mut(&subsystem.nqn).and_then(|own| own.remove(host));
            self.set_tls_keys(&known, node, subsystem, host);
        }
        if wanted.is_open {
            node.set_open(subsystem, true);
            return gone;
        }
        let listed = subsystem.listed_hosts();
        for host in &wanted.hosts {
            let named = wanted.entries.iter().find(|entry| entry.hostnqn == host.as_str());
            let (entry, keys) =
                (named.cloned().unwrap_or_else(|| HostEntry::plain(host)), wanted.host_keys(host));
            let is_known = known.get(&subsystem.nqn).and_then(|own| own.get(host));
            let is_same_entry = is_known.map_or(named.is_none(), |known| known.entry == entry);
            let is_same = before.is_some_and(|before| before.host_keys(host) == keys);
            if listed.contains(host) && is_same && is_same_entry {
                continue;
            }
            self.set(&mut known, node, subsystem, (host, &entry, keys));
        }
        gone
    }

    /// Sets a host's access. During the change, the host must authenticate at least as the old or
    /// the new setting requires.
    fn set(
        &self,
        known: &mut KnownHosts,
        node: &NvmeNode,
        subsystem: &Subsystem,
        (host, entry, HostKeys { access, tls_key }): (&Nqn, &HostEntry, HostKeys),
    ) {
        let has_keys = tls_key.is_some() || access.secrets.is_some();
        let keeps_tls = tls_key.is_some();
        let of_it = known.entry(subsystem.nqn.clone()).or_default();
        let before = of_it.insert(host.clone(), KnownHost { entry: entry.clone(), tls_key });
        let keeps_tls = keeps_tls || before.is_none_or(|before| before.tls_key.is_none());
        if keeps_tls {
            self.set_tls_keys(known, node, subsystem, host);
        }
        // This fails only for a subsystem that is open to all hosts.
        let _ = node.set_host(subsystem, host, access);
        self.set_tls_keys(known, node, subsystem, host);
        if has_keys {
            let treq = *self.treq.lock().unwrap_or_else(PoisonError::into_inner);
            node.set_secure_channel(treq.secure_channel(true));
        }
    }

    /// Updates a host's TLS keys in the keyring: its key for the subsystem, and for discovery its
    /// keys for all subsystems.
    fn set_tls_keys(&self, known: &KnownHosts, node: &NvmeNode, subsystem: &Subsystem, host: &Nqn) {
        let of_host = known.iter().filter_map(|(of, hosts)| Some((of, hosts.get(host)?)));
        let keys = of_host.filter_map(|(of, known)| Some((of, known.tls_key.as_ref()?.retained(host))));
        let keys: Vec<_> = keys.collect();
        let own: Vec<_> =
            keys.iter().filter(|(of, _)| **of == subsystem.nqn).map(|(_, key)| key.clone()).collect();
        let all: Vec<_> = keys.iter().map(|(_, key)| key.clone()).collect();
        node.keyring().replace(&own, host, &subsystem.nqn);
        for name in discovery_names(&self.machine) {
            node.keyring().replace(&all, host, &name);
        }
    }

    fn known(&self) -> MutexGuard<'_, KnownHosts> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) const NO_TLS_IDENTITY: &str = "TLS needs names without spaces; use another name";

/// Reads a DH-HMAC-CHAP secret from a file.
pub(super) fn read_secret(path: &Path) -> Result<DhChapSecret, Failure> {
    secret::read("secret file", path, |line| {
        DhChapSecret::parse(std::str::from_utf8(line).map_err(|_| SecretError::Format)?)
    })
}

/// Reads a TLS key from a file. Also loads the kernel's TLS module, while the process is permitted
/// to.
pub(super) fn read_tls_key(path: &Path) -> Result<ConfiguredPsk, Failure> {
    ktls::load();
    secret::read("TLS key file", path, |line| {
        ConfiguredPsk::parse(std::str::from_utf8(line).map_err(|_| PskError::Format)?)
    })
}
