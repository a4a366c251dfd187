//! URLs of NVMe over Fabrics namespaces.
//!
//! ```text
//!   nvme+tcp://host[:port][,host[:port]]...[/subsystem-nqn[/nsid]][?PARAMETER[&PARAMETER]...]
//! ```
//! `nvme+rdma://` selects NVMe/RDMA, with the parameters of its fabric ([`crate::names::rdma`]).
//!
//! Several hosts are several paths to one namespace.
//!
//! Without a subsystem, the URL names a discovery controller; without a number, namespace 1.
//! Parameters have the names of nvme-cli's options: `hostnqn=NQN` and `hostid=UUID` identify the
//! host, `hdr_digest=on|off` and `data_digest=on|off` (off) ask for CRC-32C, `queue_size=N` (1024)
//! is the number of entries of an I/O queue, `keep_alive_tmo=SECONDS` (5) the Keep Alive Timeout,
//! and `ctrl_loss_tmo=SECONDS` (60) the time for reconnecting before I/O fails.
//! `io_timeout=SECONDS` (30) is the time after which a command without a completion ends the
//! connection, named as the parameter of Linux's module. `connections=N` is the number of I/O
//! queues for each core and path, and `iopolicy=round-robin|queue-depth` (round-robin) distributes
//! I/O among equally good paths. `paths=all` asks the discovery controller for all paths to the
//! subsystem.
//!
//! `tls_key_file=PATH` is a file with the TLS PSK, as `nvme gen-tls-key` prints it, and
//! `tls_identity=0|1` the version of the identity that is offered (both by default; servers with
//! GnuTLS look at the first only). `ktls=off` keeps TLS records out of the kernel.
//!
//! `dhchap_secret_file=PATH` is a file with the host's DH-HMAC-CHAP secret, and
//! `dhchap_ctrl_secret_file=PATH` one with the controller's secret, which requires the controller
//! to authenticate. The secret itself is never part of a URL, because the command line is visible
//! to other users. `dhchap_hash=` and `dhchap_dhgroup=` limit the offer to one hash and one group,
//! by the kernel's names: `hmac(sha256)`, `ffdhe2048`. `concat=on` generates a TLS PSK by the
//! authentication and reconnects with it (secure channel concatenation).

pub use super::host::uuid_text;
use super::host::{DEPTH, HostId};
use crate::names::rdma::Rdma;
use crate::names::uri::{
    self, BUT_COLONS, DEFAULT_RECONNECT, DEFAULT_TIMEOUT, MAX_CONNECTIONS, MAX_RECONNECT, Parameter,
    ParameterTable, UriError, UrlParameters, decode_text, encode,
};
pub use crate::names::uri::{HostPort, MAX_PORTALS, Portals};
use crate::nvme::auth::{DhGroup, Hash};
use crate::nvme::nqn::Nqn;
use blockmux_wire::nvmeof::tcp::NVME_TCP_PORT;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;
use uuid::Uuid;

/// A parsed URL: the namespace, the paths to its subsystem, and how to connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmeUrl {
    /// RDMA parameters; `None` for NVMe/TCP.
    pub rdma: Option<Rdma>,
    /// Addresses of the subsystem, one for each path.
    pub portals: Portals,
    /// NQN of the subsystem; `None` for discovery.
    pub subsystem: Option<Nqn>,
    /// Namespace identifier, from 1.
    pub nsid: u32,
    /// Host NQN; `None` for the engine's default.
    pub host_nqn: Option<Nqn>,
    /// Host identifier; `None` if it follows from the NQN.
    pub host_id: Option<HostId>,
    /// File whose first line is the host's DH-HMAC-CHAP secret.
    pub secret_file: Option<PathBuf>,
    /// File whose first line is the controller's DH-HMAC-CHAP secret.
    pub ctrl_secret_file: Option<PathBuf>,
    /// The only hash function to offer in DH-HMAC-CHAP.
    pub dhchap_hash: Option<Hash>,
    /// The only group to offer in DH-HMAC-CHAP.
    pub dhchap_dhgroup: Option<DhGroup>,
    /// Secure channel concatenation.
    pub concat: bool,
    /// CRC-32C over headers.
    pub header_digest: bool,
    /// CRC-32C over data.
    pub data_digest: bool,
    /// Entries of an I/O queue, 2 to 1,024.
    pub queue_size: u16,
    /// I/O queues for each core and path, 1 to [`MAX_CONNECTIONS`]; `None` lets the engine decide.
    pub connections: Option<u32>,
    /// Whether to use all paths that the discovery controller knows.
    pub all_paths: bool,
    /// Policy for distributing I/O among paths.
    pub io_policy: IoPolicy,
    /// Keep Alive Timeout in whole seconds; 0 for none.
    pub keep_alive: Duration,
    /// Time for reconnecting before I/O fails, in whole seconds.
    pub reconnect: Duration,
    /// Time limit for a completion, in whole seconds; 0 for none.
    pub io_timeout: Duration,
    /// File with the TLS PSK; `None` for connections without TLS.
    pub tls_key_file: Option<PathBuf>,
    /// Version of the PSK identity to offer, 0 or 1; `None` for both.
    pub tls_identity: Option<u8>,
    /// Whether the kernel handles TLS records where it can (kTLS).
    pub ktls: bool,
}

/// Policy for distributing I/O among equally good paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoPolicy {
    /// Round-robin over the paths.
    #[default]
    RoundRobin,
    /// To the path with the fewest outstanding commands.
    QueueDepth,
}

impl FromStr for NvmeUrl {
    type Err = UriError;

    fn from_str(text: &str) -> Result<NvmeUrl, UriError> {
        let (scheme, place, query) = uri::split(text).ok_or(UriError::new(NO_URL))?;
        let rdma = match scheme {
            tcp if tcp.eq_ignore_ascii_case("nvme+tcp") => None,
            rdma if rdma.eq_ignore_ascii_case("nvme+rdma") => Some(Rdma::default()),
            _ => return Err(UriError::new(NO_URL)),
        };
        let (authority, path) = place.split_once('/').unwrap_or((place, ""));
        let portals = Portals::read(authority, NVME_TCP_PORT)?;
        let (subsystem, nsid) = subsystem_and_nsid(path)?;
        let mut url = NvmeUrl { rdma, portals, subsystem, nsid, ..NvmeUrl::plain() };
        uri::read_query(&mut url, query)?;
        match url.misfit() {
            None => Ok(url),
            Some((part, problem)) => Err(UriError::parameter(part, problem)),
        }
    }
}

impl NvmeUrl {
    /// The URL of the discovery controller at the same addresses.
    #[must_use]
    pub fn discovery(&self) -> NvmeUrl {
        NvmeUrl {
            subsystem: None,
            nsid: 1,
            portals: Portals::one(self.portals.first.clone()),
            ..self.clone()
        }
    }

    /// A parameter that conflicts with others, and the remedy.
    fn misfit(&self) -> Option<(&'static str, &'static str)> {
        let proves = self.secret_file.is_some();
        if self.ctrl_secret_file.is_some() && !proves {
            return Some((
                CTRL_SECRET,
                "requires that the host authenticates, too; give dhchap_secret_file, too",
            ));
        }
        if (self.dhchap_hash.is_some() || self.dhchap_dhgroup.is_some() || self.concat) && !proves {
            let part = if self.concat { "concat" } else { "dhchap_hash, dhchap_dhgroup" };
            return Some((part, "is of no use without a secret; give dhchap_secret_file, too"));
        }
        if self.concat && self.tls_key_file.is_some() {
            return Some(("concat", "makes a key of its own; leave tls_key_file out"));
        }
        let has_key =
            self.dhchap_hash.is_none_or(Hash::is_of_tls) && self.dhchap_dhgroup != Some(DhGroup::Null);
        if self.concat && !has_key {
            return Some(("concat", "needs hmac(sha256) or hmac(sha384), and a group other than null"));
        }
        None
    }
}

impl UrlParameters for NvmeUrl {
    fn plain() -> NvmeUrl {
        NvmeUrl {
            rdma: None,
            portals: Portals::one((String::new(), NVME_TCP_PORT)),
            subsystem: None,
            nsid: 1,
            host_nqn: None,
            host_id: None,
            secret_file: None,
            ctrl_secret_file: None,
            dhchap_hash: None,
            dhchap_dhgroup: None,
            concat: false,
            header_digest: false,
            data_digest: false,
            queue_size: DEFAULT_QUEUE_SIZE,
            connections: None,
            all_paths: false,
            io_policy: IoPolicy::RoundRobin,
            keep_alive: DEFAULT_KEEP_ALIVE,
            reconnect: DEFAULT_RECONNECT,
            io_timeout: DEFAULT_TIMEOUT,
            tls_key_file: None,
            tls_identity: None,
            ktls: true,
        }
    }

    fn parameters(&mut self, table: &mut ParameterTable<'_>) {
        let nqn = |text: &str| Nqn::new(text).ok_or("write 1 to 223 bytes without NUL");
        table.fabric(&mut self.rdma);
        table.text("hostnqn", &mut self.host_nqn, nqn, Nqn::to_string);
        table.text("hostid", &mut self.host_id, |text| read_uuid(text).ok_or("write a UUID"), uuid_text);
        table.file(SECRET, &mut self.secret_file);
        table.file(CTRL_SECRET, &mut self.ctrl_secret_file);
        table.text("dhchap_hash", &mut self.dhchap_hash, Hash::of_name, |hash| hash.name().into());
        table.text("dhchap_dhgroup", &mut self.dhchap_dhgroup, DhGroup::of_name, |group| group.name().into());
        table.switch("concat", &mut self.concat);
        table.switch("hdr_digest", &mut self.header_digest);
        table.switch("data_digest", &mut self.data_digest);
        table.count("queue_size", &mut self.queue_size, 2..=DEPTH as u32);
        table.number("connections", &mut self.connections, 1..=MAX_CONNECTIONS);
        let problem = "write all, or list several hosts in the URL";
        table.word("paths", &mut self.all_paths, &[("all", true)], problem);
        let policies = [("round-robin", IoPolicy::RoundRobin), ("queue-depth", IoPolicy::QueueDepth)];
        table.word("iopolicy", &mut self.io_policy, &policies, "write round-robin or queue-depth");
        table.seconds("keep_alive_tmo", &mut self.keep_alive, MAX_KEEP_ALIVE, "; 0 for no Keep Alive");
        table.seconds("ctrl_loss_tmo", &mut self.reconnect, MAX_RECONNECT, "");
        table.seconds("io_timeout", &mut self.io_timeout, MAX_RECONNECT, "; 0 for no limit");
        table.file("tls_key_file", &mut self.tls_key_file);
        table.number("tls_identity", &mut self.tls_identity, 0..=1);
        table.switch("ktls", &mut self.ktls);
    }

    fn refuse(&self, parameter: &Parameter<'_>) -> Result<(), UriError> {
        let problem = match (parameter.key, self.rdma) {
            ("dhchap_secret" | "dhchap_ctrl_secret", _) => {
                "everybody can see it here; put it in a file and give dhchap_secret_file"
            }
            ("rdma" | "crc", None) => "belongs to nvme+rdma://",
            ("hdr_digest" | "data_digest", Some(_)) => "there are no digests over RDMA; use crc=on",
            ("tls_key_file" | "tls_identity" | "ktls" | "concat", Some(_)) => {
                "there is no TLS over RDMA; remove it"
            }
            _ => return Ok(()),
        };
        Err(parameter.wrong(problem))
    }
}

impl fmt::Display for NvmeUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.rdma.is_some() { "nvme+rdma://" } else { "nvme+tcp://" })?;
        self.portals.write(f, NVME_TCP_PORT)?;
        if let Some(subsystem) = &self.subsystem {
            f.write_str("/")?;
            encode(f, subsystem.as_str().as_bytes(), BUT_COLONS)?;
            write!(f, "/{}", self.nsid)?;
        }
        uri::write_query(f, self.clone())
    }
}

/// Reads a UUID, with or without dashes.
#[must_use]
pub fn read_uuid(text: &str) -> Option<HostId> {
    let is_plain = matches!(text.len(), 32 | 36);
    is_plain.then(|| Uuid::try_parse(text).ok())?.map(Uuid::into_bytes)
}

fn subsystem_and_nsid(path: &str) -> Result<(Option<Nqn>, u32), UriError> {
    let Some((name, nsid)) = uri::name_and_number(path, "1") else { return Ok((None, 1)) };
    let subsystem = decode_text(name).ok().and_then(|name| Nqn::new(&name));
    let subsystem = subsystem.ok_or_else(|| UriError::part("name", name, NAME))?;
    let number = uri::number(nsid).filter(|nsid| (1..u32::MAX).contains(nsid));
    Ok((Some(subsystem), number.ok_or_else(|| UriError::part("namespace", nsid, NUMBER))?))
}

const NO_URL: &str = "this is not an NVMe/TCP URL; write nvme+tcp://host[:port]/subsystem-nqn/nsid";
const NAME: &str = "an NQN has 1 to 223 bytes of percent-encoded UTF-8, without NUL";
const NUMBER: &str = "write a number from 1 behind the subsystem's name";
const SECRET: &str = "dhchap_secret_file";
const CTRL_SECRET: &str = "dhchap_ctrl_secret_file";
/// The default of Linux.
const DEFAULT_KEEP_ALIVE: Duration = Duration::from_secs(5);
const MAX_KEEP_ALIVE: Duration = Duration::from_secs(3600);
const DEFAULT_QUEUE_SIZE: u16 = DEPTH as u16;

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> NvmeUrl {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn a_url_names_a_namespace() {
        let plain = url("nvme+tcp://host/nqn.2026-11.test:a");
        assert_eq!((&plain.portals.first, plain.nsid), (&("host".to_owned(), 4420), 1));
        assert_eq!(plain.subsystem, Nqn::new("nqn.2026-11.test:a"));
        let full =
            url("NVME+TCP://[::1]:7/nqn.a/12?hostnqn=nqn.b&hostid=00112233-4455-6677-8899-aabbccddeeff\
                        &hdr_digest=on&data_digest=on&queue_size=128&connections=2&keep_alive_tmo=0\
                        &ctrl_loss_tmo=600&io_timeout=7");
        assert_eq!((&full.portals.first, full.nsid), (&("::1".to_owned(), 7), 12));
        assert_eq!((full.header_digest, full.data_digest, full.queue_size), (true, true, 128));
        assert_eq!((full.keep_alive, full.reconnect), (Duration::ZERO, Duration::from_secs(600)));
        assert_eq!((full.io_timeout, plain.io_timeout), (Duration::from_secs(7), Duration::from_secs(30)));
        assert_eq!(full.host_id.map(|id| id[1]), Some(0x11));
        assert_eq!(url("nvme+tcp://host").subsystem, None);
    }

    #[test]
    fn a_formatted_url_parses_to_the_same_value() {
        let texts = [
            "nvme+tcp://host",
            "nvme+tcp://[fd77::12]:8009",
            "nvme+tcp://h/nqn.%C3%A4:b/3?hostnqn=nqn.c&hostid=00112233445566778899aabbccddeeff&hdr_digest=on",
            "nvme+tcp://h/nqn.a/1?dhchap_secret_file=/run/a%26b&dhchap_ctrl_secret_file=c",
            "nvme+tcp://h/nqn.a/1?dhchap_secret_file=a&dhchap_hash=hmac(sha256)&dhchap_dhgroup=ffdhe3072&concat=on",
            "nvme+tcp://h/nqn.a/1?dhchap_secret_file=a&dhchap_hash=hmac%28sha512%29&dhchap_dhgroup=null",
            "nvme+tcp://h,h:4421,[::1]:7/nqn.a/1?paths=all&iopolicy=queue-depth",
            "nvme+tcp://h/nqn.a/1?data_digest=on&queue_size=2&connections=16&keep_alive_tmo=9&ctrl_loss_tmo=0&io_timeout=0",
            "nvme+tcp://h/nqn.a/1?tls_key_file=/etc/a%20key&tls_identity=0",
            "nvme+tcp://h/nqn.a/1?tls_key_file=a&ktls=off",
            "nvme+rdma://h:7/nqn.a/2?rdma=iwarp&crc=on",
            "nvme+rdma://h/nqn.a/1",
        ];
        for text in texts {
            let first = url(text);
            assert_eq!(url(&first.to_string()), first, "{text}");
        }
        let error = "nvme+tcp://host/nqn.a%00/3".parse::<NvmeUrl>().unwrap_err().to_string();
        assert!(error.starts_with("name \"nqn.a%00\": an NQN has"), "{error}");
    }

    #[test]
    fn any_name_is_taken_as_it_is_and_percent_encoded() {
        for (name, written) in [
            ("blktests-subsystem-1", "blktests-subsystem-1"),
            ("NQN.2026-11.Test:a", "NQN.2026-11.Test:a"),
            ("nqn.a/b c%20?d#e@f,g", "nqn.a%2Fb%20c%2520%3Fd%23e%40f%2Cg"),
            ("\u{c4}\n", "%C3%84%0A"),
        ] {
            let nqn = Nqn::new(name);
            let subsystem = NvmeUrl { subsystem: nqn.clone(), nsid: 2, ..url("nvme+tcp://h") };
            assert_eq!(subsystem.to_string(), format!("nvme+tcp://h/{written}/2"));
            assert_eq!(url(&subsystem.to_string()), subsystem);
            let host = NvmeUrl { host_nqn: nqn, ..url("nvme+tcp://h/nqn.a") };
            assert_eq!(url(&host.to_string()), host);
        }
    }

    #[test]
    fn url_errors_say_what_is_wrong() {
        let cases = [
            ("nvme://h/nqn.a/1", "this is not an NVMe/TCP URL"),
            ("nvme+tcp:///nqn.a/1", "host \"\""),
            ("nvme+tcp://u:p@ss@h/nqn.a", "the protocol has no users; remove all up to the @"),
            ("nvme+tcp://h/a%/1", "name \"a%\""),
            ("nvme+tcp://h/nqn.a/0", "namespace \"0\""),
            ("nvme+tcp://h/nqn.a/4294967295", "namespace"),
            ("nvme+tcp://h/nqn.a/1/2", "namespace \"1/2\""),
            ("nvme+tcp://h/nqn.a?queue_size=1", "from 2 to 1024"),
            ("nvme+tcp://h/nqn.a?queue_size=+8", "from 2 to 1024"),
            ("nvme+tcp://h/nqn.a?hostid=0011", "write a UUID"),
            ("nvme+tcp://h/nqn.a?hdr_digest=on&hdr_digest=on", "given twice"),
            ("nvme+tcp://h,h/nqn.a", "named before"),
            ("nvme+tcp://h/nqn.a?paths=2", "write all"),
            ("nvme+tcp://h/nqn.a?iopolicy=numa", "write round-robin"),
            ("nvme+tcp://h/nqn.a?tls=on", "tls_key_file, tls_identity and ktls"),
            ("nvme+tcp://h/nqn.a?tls_key_file=", "name a file"),
            ("nvme+tcp://h/nqn.a?tls_identity=2", "give a number from 0 to 1"),
            ("nvme+tcp://h/nqn.a?dhchap_secret_file=", "name a file"),
            ("nvme+tcp://h/nqn.a?dhchap_ctrl_secret_file=b", "give dhchap_secret_file, too"),
            ("nvme+tcp://h/nqn.a?dhchap_secret_file=a&dhchap_hash=md5", "write hmac(sha256)"),
            ("nvme+tcp://h/nqn.a?dhchap_secret_file=a&dhchap_dhgroup=modp1024", "write null, ffdhe2048"),
            ("nvme+tcp://h/nqn.a?dhchap_dhgroup=null", "give dhchap_secret_file, too"),
            ("nvme+tcp://h/nqn.a?concat=on", "give dhchap_secret_file, too"),
            ("nvme+tcp://h/nqn.a?concat=on&dhchap_secret_file=a&tls_key_file=b", "leave tls_key_file out"),
            (
                "nvme+tcp://h/nqn.a?concat=on&dhchap_secret_file=a&dhchap_dhgroup=null",
                "a group other than null",
            ),
            ("nvme+tcp://h/nqn.a?dhchap_secret=DHHC-1:00:hunter2:", "everybody can see it here"),
            ("nvme+tcp://h/nqn.a?key=hunter2", "unknown"),
            ("nvme+tcp://h/nqn.a?rdma=iwarp", "belongs to nvme+rdma://"),
            ("nvme+rdma://h/nqn.a?rdma=ib", "write iwarp, roce or verbs"),
            ("nvme+rdma://h/nqn.a?hdr_digest=on", "no digests over RDMA"),
            ("nvme+rdma://h/nqn.a?tls_key_file=a", "no TLS over RDMA"),
        ];
        for (text, words) in cases {
            let error = text.parse::<NvmeUrl>().unwrap_err().to_string();
            assert!(error.contains(words) && !error.contains("hunter2"), "{text}: {error}");
        }
    }
}
