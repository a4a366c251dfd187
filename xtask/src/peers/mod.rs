//! Other implementations: installing them for the tests, and comparing Blockmux with them.
//!
//! ```text
//!   nbd, iscsi, iser, nvme, nvme_rdma, srp, aoe (servers, clients, goals of a protocol) ── ours: Blockmux in each of them
//!     │
//!   plan: for each round, cell and client ── the servers one after the other, the others paused ──▶ comparison: rows, goals
//!     │     client ──load──▶ server, each on its own CPU                                       │
//!   matrix: cells                                                            table, report (Markdown, JSON)
//! ```
//! Another protocol adds a module like `nbd` and, if its clients differ, a client.

mod aoe;
mod bench;
mod client;
mod comparison;
mod figures;
mod goals;
mod group;
mod install;
mod iscsi;
mod iser;
mod load;
mod machine;
mod matrix;
mod nbd;
mod network;
mod nvme;
mod nvme_rdma;
mod ours;
mod plan;
mod python;
mod report;
mod server;
mod srp;
mod table;

use crate::process::{cargo, target_directory};
use anyhow::{Context, Result, bail};
use bench::Bench;
use comparison::Comparison;
use figures::Rows;
use machine::CpuSet;
use matrix::Filter;
use network::Network;
use plan::{Plan, Protocol};
use server::Server;
use signal_hook::consts::{SIGINT, SIGTERM};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

pub(crate) use install::{install, install_ceph, install_if_permitted, package};
pub(crate) use python::install as install_python;

/// The protocol to compare servers of.
#[derive(clap::Subcommand)]
pub(crate) enum Protocols {
    /// NBD: nbdkit, nbd-server, qemu-nbd and qemu-storage-daemon, measured with Blockmux's
    /// generator, fio and qemu-img
    Nbd(Options),
    /// iSCSI: tgtd and istgt, measured with Blockmux's generator, iscsi-perf and qemu-img
    Iscsi(Options),
    /// iSER over iWARP and our own iSCSI, measured with Blockmux's generator
    Iser(Options),
    /// NVMe/TCP, the ceilings and SPDK's shares of them, measured with Blockmux's generator
    Nvme(Options),
    /// NVMe/RDMA over iWARP and our own iSER, iSCSI and NVMe/TCP, measured with Blockmux's
    /// generator
    NvmeRdma(Options),
    /// SRP over iWARP and our own iSER, iSCSI and NVMe/TCP, measured with Blockmux's generator
    Srp(Options),
    /// AoE: vblade, measured with Blockmux's generator over a veth pair with small and large
    /// frames; needs root
    Aoe(Options),
}

/// What to measure and where the result goes.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Measured time of each run in seconds [default: 3; 0.5 with --quick]
    #[arg(long, value_parser = parse_seconds)]
    runtime: Option<Duration>,
    /// Number of repetitions [default: 5; 1 with --quick]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: Option<u32>,
    /// Measure only a few cells, once and briefly, ignoring other load: a smoke test
    #[arg(long)]
    quick: bool,
    /// Only these clients, by their names in tables; Blockmux's generator is blockmux
    #[arg(long, value_name = "CLIENT", value_delimiter = ',')]
    only: Vec<String>,
    /// Only these servers, and Blockmux with its defaults
    #[arg(long, value_name = "SERVER", value_delimiter = ',')]
    servers: Vec<String>,
    /// Only cells of these block sizes, such as 4k
    #[arg(long, value_delimiter = ',', value_parser = matrix::parse_size)]
    bs: Vec<u32>,
    /// Only cells of these depths
    #[arg(long, value_delimiter = ',')]
    iodepth: Vec<u32>,
    /// Only cells with these numbers of connections, each a session of its own
    #[arg(long, value_delimiter = ',')]
    numjobs: Vec<u32>,
    /// Pin servers to one CPU and clients to another, instead of letting both use all
    #[arg(long)]
    pin: bool,
    /// Measure this program instead of building one; for AoE its directory also has
    /// examples/frame_echo
    #[arg(long, value_name = "FILE")]
    blockmux: Option<PathBuf>,
    /// Print Markdown instead of the table
    #[arg(long)]
    markdown: bool,
    /// Write all results, including every run, as JSON; updated during the measurement
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Builds Blockmux, measures, and prints the result.
///
/// # Errors
/// If options are invalid, Blockmux does not build, or a signal ends it, after printing what was
/// measured. Failures of peers are printed.
pub(crate) fn run(root: &Path, protocol: Protocols) -> Result<()> {
    let (protocol, options) = protocol.chosen();
    let plan = options.plan(protocol)?;
    if let Some(output) = &options.output {
        // Fails now, rather than after minutes of measuring, if the file cannot be written.
        write(output, "")?;
    }
    let blockmux = options.blockmux.clone().map_or_else(|| build(root, protocol), Ok)?;
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, interrupted.clone())?;
    }
    let network = if protocol.mtus.is_empty() { None } else { Some(Network::new()?) };
    let mut bench = Bench {
        dir: directory_in_memory()?,
        blockmux,
        cpus: if options.pin { CpuSet::here()? } else { CpuSet::unbound() },
        network,
        runtime: options.runtime.unwrap_or(Duration::from_millis(if options.quick { 500 } else { 3000 })),
        max_attempts: if options.quick { 1 } else { 2 },
        size: VOLUME_BYTES,
        bar: plan::progress_bar(),
        interrupted,
    };
    if protocol.mtus.is_empty() {
        measure(plan, &bench, &options, options.output.as_deref(), |_| {})?;
        return Ok(());
    }
    let mut found: Vec<Rows> = Vec::new();
    for mtu in protocol.mtus {
        if let Some(network) = &mut bench.network {
            network.set_mtu(*mtu)?;
        }
        let output = options.output.as_ref().map(|output| output.with_extension(format!("{mtu}.json")));
        let comparison =
            measure(options.plan(protocol)?, &bench, &options, output.as_deref(), |comparison| {
                if let Some(small) = found.last() {
                    comparison.goals.extend(aoe::across_mtus(small, &comparison.rows));
                }
            })?;
        found.push(comparison.rows);
    }
    Ok(())
}

/// Measures and prints the result; partial results are written to `output` meanwhile. `complete`
/// adds what the plan does not know.
fn measure(
    plan: Plan,
    bench: &Bench,
    options: &Options,
    output: Option<&Path>,
    complete: impl FnOnce(&mut Comparison),
) -> Result<Comparison> {
    let keep = |comparison: &Comparison| match output {
        Some(output) => write(output, &report::json(comparison)),
        None => Ok(()),
    };
    let mut comparison = plan.run(bench, &mut { keep })?;
    complete(&mut comparison);
    keep(&comparison)?;
    let text = if options.markdown { report::markdown(&comparison) } else { table::render(&comparison) };
    println!("{}", text.trim_end());
    bench.check_interrupt()?;
    Ok(comparison)
}

impl Protocols {
    fn chosen(self) -> (&'static Protocol, Options) {
        match self {
            Protocols::Nbd(options) => (&nbd::NBD, options),
            Protocols::Iscsi(options) => (&iscsi::ISCSI, options),
            Protocols::Iser(options) => (&iser::ISER, options),
            Protocols::Nvme(options) => (&nvme::NVME, options),
            Protocols::NvmeRdma(options) => (&nvme_rdma::NVME_RDMA, options),
            Protocols::Srp(options) => (&srp::SRP, options),
            Protocols::Aoe(options) => (&aoe::AOE, options),
        }
    }
}

impl Options {
    fn plan(&self, protocol: &'static Protocol) -> Result<Plan> {
        let mut clients = (protocol.clients)();
        let names: Vec<&str> = clients.iter().map(|client| client.name()).collect();
        check_names("--only", &self.only, &names)?;
        clients.retain(|client| self.only.is_empty() || self.only.iter().any(|name| name == client.name()));
        let names: Vec<&str> = protocol.servers.iter().map(|server| server.name).collect();
        check_names("--servers", &self.servers, &names)?;
        let wanted = |(nth, server): &(usize, &Server)| {
            *nth == 0 || self.servers.is_empty() || self.servers.iter().any(|name| name == server.name)
        };
        let servers = protocol.servers.iter().enumerate().filter(wanted).map(|(_, server)| server).collect();
        let filter =
            Filter { bs: self.bs.clone(), iodepth: self.iodepth.clone(), numjobs: self.numjobs.clone() };
        let cells = filter.of((protocol.cells)(self.quick))?;
        let runs = self.runs.unwrap_or(if self.quick { 1 } else { 5 });
        Ok(Plan { protocol, servers, clients, cells, runs })
    }
}

fn check_names(option: &str, given: &[String], known: &[&str]) -> Result<()> {
    match given.iter().find(|name| !known.contains(&name.as_str())) {
        Some(name) => bail!("{option} {name}: unknown name, expected one of {}", known.join(", ")),
        None => Ok(()),
    }
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.01..=3600.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "write seconds, from 0.01 to 3600".to_owned())
}

/// Writes a report, creating its directory.
fn write(output: &Path, text: &str) -> Result<()> {
    let dir = output.parent().unwrap_or(output);
    let written = std::fs::create_dir_all(dir).and_then(|()| std::fs::write(output, text));
    written.with_context(|| format!("--output {}", output.display()))
}

/// Builds what is measured; cargo prints its own messages.
fn build(root: &Path, protocol: &Protocol) -> Result<PathBuf> {
    let echo = "build --release --package blockmux-lab --example frame_echo";
    let echo = if protocol.mtus.is_empty() { None } else { Some(echo) };
    for words in std::iter::once("build --release --package blockmux").chain(echo) {
        let status = cargo(root, words).status().context("cannot run cargo")?;
        if !status.success() {
            bail!("blockmux does not build");
        }
    }
    Ok(target_directory(root).join("release/blockmux"))
}

/// A directory in memory for the file that some servers serve.
fn directory_in_memory() -> Result<tempfile::TempDir> {
    let dir = tempfile::Builder::new().prefix("blockmux-peers-").tempdir_in(SHARED_MEMORY);
    dir.with_context(|| format!("no directory in {SHARED_MEMORY}, where files are in memory"))
}

const SHARED_MEMORY: &str = "/dev/shm";
const VOLUME_BYTES: u64 = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use server::ServerParameters;
    use std::fs;
    use std::process::Command;

    #[derive(Parser)]
    struct Line {
        #[command(subcommand)]
        protocol: Protocols,
    }

    fn plan(words: &str) -> Result<Plan> {
        let line = Line::try_parse_from(format!("peers {words}").split_whitespace())?;
        let (protocol, options) = line.protocol.chosen();
        options.plan(protocol)
    }

    #[test]
    fn options_choose_servers_clients_and_cells() {
        let chosen =
            plan("nbd --only fio --servers nbdkit,qemu-nbd --bs 4k --iodepth 1,32 --runs 2").unwrap();
        let servers: Vec<_> = chosen.servers.iter().map(|server| server.name).collect();
        assert_eq!(servers, ["blockmux", "nbdkit", "qemu-nbd"]);
        assert_eq!(chosen.clients.iter().map(|client| client.name()).collect::<Vec<_>>(), ["fio"]);
        assert_eq!((chosen.cells.len(), chosen.runs), (8, 2));
        for (protocol, servers) in [("nbd", 7), ("iscsi", 8)] {
            let all = plan(protocol).unwrap();
            assert_eq!(
                (all.servers.len(), all.clients.len(), all.cells.len(), all.runs),
                (servers, 3, 16, 5)
            );
        }
        let aoe = plan("aoe --bs 4k --quick").unwrap();
        assert_eq!((aoe.servers.len(), aoe.cells.len(), aoe.runs), (4, 2, 1));
    }

    #[test]
    fn a_wrong_name_is_answered_with_the_right_ones() {
        for (words, answer) in [
            ("--only curl", "--only curl: unknown name, expected one of blockmux, fio, qemu-img"),
            ("--servers apache", "--servers apache: unknown name, expected one of blockmux, blockmux-always"),
            ("--bs 3k", "no cell"),
            ("--runtime 0", "from 0.01 to 3600"),
            ("--runs 0", "0 is not in 1..=100"),
        ] {
            let Err(error) = plan(&format!("nbd {words}")) else { panic!("{words} is wrong") };
            assert!(error.to_string().contains(answer), "{error}");
        }
    }

    #[test]
    fn every_server_serves_the_same_name_on_its_port() {
        let dir = tempfile::tempdir().unwrap();
        for server in nbd::NBD
            .servers
            .iter()
            .chain(iscsi::ISCSI.servers)
            .chain(iser::ISER.servers)
            .chain(nvme::NVME.servers)
            .chain(nvme_rdma::NVME_RDMA.servers)
        {
            let (dir, file) = (dir.path().join(server.name), Path::new("disk.img"));
            fs::create_dir_all(&dir).unwrap();
            let place = ServerParameters { dir, file, port: 34567, size: 1 << 30, poll: server.poll };
            let mut command = Command::new("server");
            (server.arguments)(&place, &mut command).unwrap();
            let config = fs::read_to_string(place.dir.join("config")).unwrap_or_default();
            assert!(format!("{command:?}{config}").contains("34567"), "{}", server.name);
            let url = (server.url)(34567);
            assert!(url.contains("127.0.0.1:34567/") && url.contains(ours::EXPORT), "{url}");
        }
    }
}
