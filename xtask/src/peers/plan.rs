//! Measuring: all servers alternate, so that a machine that slows down slows all of them.

use super::bench::Bench;
use super::client::{Client, Generator, Measurement, MeasurementParameters, SLEEPING, SPINNING};
use super::comparison::{Comparison, MeasuredProgram};
use super::figures::{Rows, Sample};
use super::goals::Goal;
use super::load::Load;
use super::matrix::{self, Cell};
use super::server::{ProgramOrigin, Running, Server};
use anyhow::{Result, bail};
use indicatif::ProgressBar;
use std::process::Command;
use std::time::{Duration, Instant};

/// A protocol's servers, clients and goals.
pub(crate) struct Protocol {
    pub(crate) name: &'static str,
    /// In display order; the first is Blockmux with its defaults, and is always measured.
    pub(crate) servers: &'static [Server],
    pub(crate) clients: fn() -> Vec<Box<dyn Client>>,
    /// The cells to measure; few of them if the argument is true.
    pub(crate) cells: fn(bool) -> Vec<Cell>,
    /// MTUs of protocols on raw frames, with a comparison for each; empty: over TCP on loopback.
    pub(crate) mtus: &'static [u32],
    pub(crate) goals: fn(&Rows) -> Vec<Goal>,
}

impl Protocol {
    /// A protocol that only our own generator speaks, over TCP on loopback.
    pub(crate) const fn of_our_own(
        name: &'static str,
        servers: &'static [Server],
        goals: fn(&Rows) -> Vec<Goal>,
    ) -> Protocol {
        Protocol {
            name,
            servers,
            clients: || vec![Box::new(Generator)],
            cells: matrix::cells,
            mtus: &[],
            goals,
        }
    }
}

/// A comparison to measure.
pub(crate) struct Plan {
    pub(crate) protocol: &'static Protocol,
    pub(crate) servers: Vec<&'static Server>,
    pub(crate) clients: Vec<Box<dyn Client>>,
    pub(crate) cells: Vec<Cell>,
    pub(crate) runs: u32,
}

impl Plan {
    /// Measures everything `runs` times, and passes partial results to `keep` after each turn. A
    /// signal ends it early; the result says so.
    ///
    /// # Errors
    /// If there is nothing to measure, a signal came before the first measurement, or `keep` fails.
    /// Failed servers and clients are named in the result.
    pub(crate) fn run(
        self,
        bench: &Bench,
        keep: &mut dyn FnMut(&Comparison) -> Result<()>,
    ) -> Result<Comparison> {
        let mut skipped = Vec::new();
        let clients = self.installed_clients(bench, &mut skipped);
        bench.fill_file()?;
        let running = self.start(bench, &mut skipped)?;
        let clients: Vec<&dyn Client> = clients.iter().map(|&nth| self.clients[nth].as_ref()).collect();
        let cases = cases(&self.cells, &clients, &running, &mut skipped);
        if cases.is_empty() {
            bail!("nothing to measure: {}", skipped.join("; "));
        }
        let mut comparison = Comparison {
            protocol: self.protocol.name,
            goals: Vec::new(),
            clients: clients.iter().map(|client| measured_client(*client, bench)).collect(),
            servers: running.iter().map(|running| measured_server(running, self.protocol, bench)).collect(),
            rows: Rows::default(),
            skipped,
            machine: super::machine::words(),
            placement: bench.placement(),
            runs: self.runs,
            is_whole: false,
            runtime: bench.runtime,
            cells: self.cells.clone(),
        };
        let mut failed = Vec::new();
        let progress = Progress::start(bench, &cases, self.runs);
        for (round, together, first) in turns(&cases, self.runs) {
            for case in rotated(together, first) {
                if bench.is_interrupted() {
                    break;
                }
                progress.begin(round, case);
                if !failed.contains(case) {
                    let measured = case.take_turn(bench, &mut comparison.rows);
                    self.put_in_order(&mut comparison.rows, &clients);
                    comparison.goals = (self.protocol.goals)(&comparison.rows);
                    if let Err(error) = measured {
                        case.server.pause();
                        if bench.is_interrupted() {
                            break;
                        }
                        comparison.skipped.push(format!("{}: {error:#}", case.words()));
                        failed.push(*case);
                    }
                    keep(&comparison)?;
                }
                progress.end(case, &comparison.rows);
            }
        }
        bench.bar.finish_and_clear();
        if comparison.rows.0.is_empty() {
            bench.check_interrupt()?;
        }
        comparison.is_whole = !bench.is_interrupted();
        keep(&comparison)?;
        Ok(comparison)
    }

    /// Indices of the clients that are installed.
    fn installed_clients(&self, bench: &Bench, skipped: &mut Vec<String>) -> Vec<usize> {
        let mut installed = Vec::new();
        for (nth, client) in self.clients.iter().enumerate() {
            match client.program().find(&bench.blockmux) {
                Ok(_) => installed.push(nth),
                Err(error) => skipped.push(format!("client {}: {error:#}", client.name())),
            }
        }
        installed
    }

    /// Starts every server that can be started.
    fn start(&self, bench: &Bench, skipped: &mut Vec<String>) -> Result<Vec<Running>> {
        let mut running = Vec::new();
        for server in &self.servers {
            bench.bar.set_message(format!("starting {}", server.name));
            match Running::start(server, bench) {
                Ok(started) => running.push(started),
                Err(error) => {
                    bench.check_interrupt()?;
                    skipped.push(format!("server {}: {error:#}", server.name));
                }
            }
        }
        Ok(running)
    }

    /// Sorts rows, which were made in the rotating order of turns.
    fn put_in_order(&self, rows: &mut Rows, clients: &[&dyn Client]) {
        rows.0.sort_by_key(|row| {
            let client = clients.iter().position(|client| client.name() == row.client);
            let cell = self.cells.iter().position(|cell| *cell == row.cell);
            // Ceilings are not servers; they come last, in the order of their names.
            let server = self.servers.iter().position(|server| server.name == row.server);
            (client, cell, server.unwrap_or(usize::MAX), row.server)
        });
    }
}

/// Shows progress: a bar on a terminal, otherwise a line for each figure.
struct Progress<'a> {
    bench: &'a Bench,
    runs: u32,
    begun: Instant,
}

impl<'a> Progress<'a> {
    fn start(bench: &'a Bench, cases: &[Vec<PeerCase>], runs: u32) -> Progress<'a> {
        let per_run: u64 = cases.iter().flatten().map(PeerCase::runs_a_turn).sum();
        bench.bar.set_length(per_run * u64::from(runs));
        bench.bar.reset_elapsed();
        Progress { bench, runs, begun: Instant::now() }
    }

    fn begin(&self, round: u32, case: &PeerCase) {
        self.bench.bar.set_message(format!("run {}/{}: {}", round + 1, self.runs, case.words()));
    }

    fn end(&self, case: &PeerCase, rows: &Rows) {
        let bar = &self.bench.bar;
        bar.inc(case.runs_a_turn());
        let last = rows.get(case.client.name(), case.server.server.name, case.cell);
        let (Some(sample), true) = (last.and_then(|row| row.samples.last()), bar.is_hidden()) else { return };
        let (done, all) = (bar.position(), bar.length().unwrap_or(0));
        let left = time_left(self.begun.elapsed(), done, all).as_secs().div_ceil(60);
        eprintln!("{done}/{all}, about {left} min left: {:.0} IOPS, {}", sample.iops, case.words());
    }
}

/// Estimate by the speed so far.
fn time_left(elapsed: Duration, done: u64, all: u64) -> Duration {
    elapsed.mul_f64(all.saturating_sub(done) as f64 / done.max(1) as f64)
}

/// Yields, for each round and each group of alternating cases: the round, the group, and the index
/// of the case that comes first.
fn turns<'a, 'b>(
    cases: &'b [Vec<PeerCase<'a>>],
    runs: u32,
) -> impl Iterator<Item = (u32, &'b [PeerCase<'a>], usize)> {
    (0..runs).flat_map(move |round| {
        cases.iter().enumerate().map(move |(nth, together)| (round, &together[..], round as usize + nth))
    })
}

/// One server with one client in one cell.
#[derive(Clone, Copy)]
struct PeerCase<'a> {
    client: &'a dyn Client,
    server: &'a Running,
    cell: Cell,
    /// Also measures the ceilings.
    with_ceilings: bool,
}

impl PartialEq for PeerCase<'_> {
    fn eq(&self, other: &PeerCase) -> bool {
        let names = |case: &PeerCase| (case.client.name(), case.server.server.name);
        names(self) == names(other) && self.cell == other.cell
    }
}

impl PeerCase<'_> {
    fn words(&self) -> String {
        format!("{}, client {}, {}", self.server.server.name, self.client.name(), self.cell.title())
    }

    /// Duration of a turn, in runs.
    fn runs_a_turn(&self) -> u64 {
        if self.with_ceilings { 3 } else { 1 }
    }

    /// Repeats a measurement during which other programs used much CPU time. The decision depends
    /// only on their load, never on the measured values.
    fn take_turn(&self, bench: &Bench, rows: &mut Rows) -> Result<()> {
        let PeerCase { client, server, cell, .. } = *self;
        let mut attempt = 1;
        loop {
            let (sample, ceilings) = self.attempt(bench)?;
            if sample.others > MAX_OTHERS && attempt < bench.max_attempts {
                attempt += 1;
                continue;
            }
            rows.add(client.name(), server.server.name, cell, sample);
            for (name, sample) in ceilings {
                rows.add(client.name(), name, cell, sample);
            }
            return Ok(());
        }
    }

    fn attempt(&self, bench: &Bench) -> Result<(Sample, Vec<(&'static str, Sample)>)> {
        let PeerCase { client, server, cell, with_ceilings } = *self;
        let turn = MeasurementParameters { bench, server, cell, with_ceilings };
        let before = Load::now()?;
        let (found, used) = server.turn(|| client.measure(&turn))?;
        let others = before.others_since(used)?;
        let Measurement { sample, ios, ceilings } = found;
        if ios <= 0.0 {
            bail!("no I/O completed");
        }
        let server_us = Some(used.as_secs_f64() * 1e6 / ios);
        let ceilings = ceilings.into_iter().map(|(name, sample)| (name, Sample { others, ..sample }));
        Ok((Sample { server_us, others, ..sample }, ceilings.collect()))
    }
}

/// For each cell and client, the cases that alternate.
fn cases<'a>(
    cells: &[Cell],
    clients: &[&'a dyn Client],
    running: &'a [Running],
    skipped: &mut Vec<String>,
) -> Vec<Vec<PeerCase<'a>>> {
    let mut cases = Vec::new();
    for &cell in cells {
        for &client in clients {
            if let Some(why) = client.refuses(cell) {
                let text = format!("client {}, some cells: {why}", client.name());
                if !skipped.contains(&text) {
                    skipped.push(text);
                }
                continue;
            }
            let is_generator = client.program() == ProgramOrigin::Blockmux;
            let asks = |running: &&Running| is_generator || !running.server.is_for_generator;
            let together: Vec<PeerCase> = running
                .iter()
                .filter(asks)
                .map(|server| {
                    let Server { program, is_for_generator, .. } = *server.server;
                    // Ceilings are measured while our own server, in its default policy, is idle.
                    let with_ceilings =
                        is_generator && program == ProgramOrigin::Blockmux && !is_for_generator;
                    PeerCase { client, server, cell, with_ceilings }
                })
                .collect();
            cases.extend(Some(together).filter(|together| !together.is_empty()));
        }
    }
    cases
}

/// All items from index `from` on, then those before it.
fn rotated<T>(items: &[T], from: usize) -> impl Iterator<Item = &T> {
    let (before, behind) = items.split_at(from % items.len().max(1));
    behind.iter().chain(before)
}

fn measured_client(client: &dyn Client, bench: &Bench) -> MeasuredProgram {
    MeasuredProgram {
        name: client.name(),
        version: version(client.program(), bench),
        command: String::new(),
        ceilings: &[],
        is_peer: client.program() != ProgramOrigin::Blockmux,
    }
}

fn measured_server(running: &Running, protocol: &Protocol, bench: &Bench) -> MeasuredProgram {
    let server = running.server;
    let ceilings: &[&str] = match server.poll {
        _ if !is_asked_by(&running.url, protocol.name) => &[],
        "always" => &[SPINNING],
        "never" => &[SLEEPING],
        _ => &[SPINNING, SLEEPING],
    };
    MeasuredProgram {
        name: server.name,
        version: version(server.program, bench),
        command: running.command.clone(),
        ceilings,
        is_peer: server.program != ProgramOrigin::Blockmux,
    }
}

/// Whether a URL belongs to the protocol with this name or to one of its transports: `nvme+tcp`
/// belongs to `nvme`, `nvme+rdma` to `nvme-rdma`.
fn is_asked_by(url: &str, protocol: &str) -> bool {
    let scheme = url.split("://").next().unwrap_or_default().replace('+', "-");
    scheme.strip_prefix(protocol).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

fn version(program: ProgramOrigin, bench: &Bench) -> String {
    let asked = program.find(&bench.blockmux).and_then(|path| bench.run(Command::new(path).arg("--version")));
    let text = asked.unwrap_or_default();
    text.lines().next().unwrap_or_default().trim().to_owned()
}

/// A progress bar with the remaining time.
pub(crate) fn progress_bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, indicatif::ProgressDrawTarget::stderr_with_hz(4));
    let style = "{bar:24} {percent:>3}% {elapsed} (about {eta} left) {wide_msg}";
    let style = indicatif::ProgressStyle::with_template(style);
    bar.set_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(500));
    bar
}

/// CPU use of other programs, in CPUs, from which a run is repeated; an idle machine stays well
/// below.
const MAX_OTHERS: f64 = 0.08;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_server_comes_first_in_its_turn() {
        let order = |from| rotated(&["a", "b", "c"], from).copied().collect::<String>();
        assert_eq!([0, 1, 2, 3].map(order), ["abc", "bca", "cab", "abc"]);
        assert_eq!(rotated::<u8>(&[], 4).count(), 0);
    }

    #[test]
    fn a_row_of_another_protocol_has_no_ceiling() {
        for (url, protocol, is_of_it) in [
            ("iser://h/t/0?rdma=iwarp", "iser", true),
            ("iscsi://h/t/0", "iser", false),
            ("nvme+rdma://h/n/1?rdma=iwarp", "nvme-rdma", true),
            ("nvme+tcp://h/n/1", "nvme-rdma", false),
            ("nvme+tcp://h/n/1", "nvme", true),
            ("nbd+unix:///x?socket=s", "nbd", true),
        ] {
            assert_eq!(is_asked_by(url, protocol), is_of_it, "{url}");
        }
    }

    #[test]
    fn the_remaining_time_is_estimated_from_the_speed_so_far() {
        let minutes = |n: u64| Duration::from_secs(60 * n);
        assert_eq!(time_left(minutes(2), 10, 40), minutes(6));
        assert_eq!(time_left(minutes(2), 40, 40), Duration::ZERO);
        assert_eq!(time_left(Duration::ZERO, 0, 40), Duration::ZERO);
    }
}
