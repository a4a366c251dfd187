//! `bench --suite NAME --file-system`: a study that measured a file system, repeated on one.
//!
//! ```text
//!   stripe of RAM ─▶ target │ link │ initiator ─▶ attached disk ─▶ XFS ─▶ bonnie++
//! ```
//! A cell is a stripe, behind a protocol and a link or without any. One run of bonnie++ has the
//! rates of all jobs, so a cell has a row for each job, and all of them have equally many runs.
//!
//! | file | contains |
//! |---|---|
//! | `attached` | a volume as a block device, by the best way of this machine |
//! | `cells` | the cells, their names and rows |
//! | `kernel` | disks of the kernel's own initiators |
//! | `page_cache` | the limit of the page cache of bonnie++ |
//! | `programs` | running programs that an interrupt ends |
//! | `xfs` | making and mounting the file system, running bonnie++ |
//!
//! Where the kernel has an initiator of the protocol, its disks are measured, too.
//!
//! Mounts are in a mount namespace of the measuring thread, links in network namespaces, and the
//! kernel removes a loop device with its last user. If the process is killed, there remain an empty
//! directory, an empty control group, the AoE driver's list of interfaces if its disk was measured,
//! and a disk by the kernel's NBD client if that is this machine's way, which `attach --forget`
//! removes.

mod attached;
mod cells;
mod kernel;
mod page_cache;
mod programs;
mod xfs;

use super::BenchArgs;
use super::jobs::jobs;
use super::linked::refused;
use super::measure::{BenchEnd, BenchEvent, Interrupts, Measured, collect};
use super::plan::{BenchPlan, BenchVolume};
use super::served;
use super::veth::{TARGET, VethPair};
use crate::attach::way::{WantedWays, Way};
use crate::failure::Failure;
use crate::process::machine::memory_bytes;
use crate::process::signals;
use attached::AttachedVolume;
use blockmux_engine::attach::is_installed;
use blockmux_engine::core::cores::Cores;
use blockmux_engine::core::reactor::PollPolicy;
use blockmux_engine::sys;
use blockmux_lab::bonnie::BonnieRates;
use blockmux_lab::figure;
use blockmux_lab::job::Job;
use blockmux_lab::link;
use blockmux_lab::pattern::shuffled;
use blockmux_lab::suite::Suite;
use blockmux_lab::units::{self, Size};
use blockmux_volume::Volume;
use cells::{StudyCell, StudyPath, cells, kernel_initiators};
use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle};
use kernel::{KernelDisk, KernelInitiator};
use page_cache::PageCacheLimit;
use programs::Programs;
use std::fs;
use std::io::{self, IsTerminal, Write as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tracing::{info, warn};
use xfs::MountedXfs;

/// Results of the measurement.
pub(super) struct FileSystemResults {
    pub(super) measured: Measured,
    /// Rows that have no figures, with the reason.
    pub(super) skipped: Vec<(String, String)>,
    /// How it was measured, as sentences.
    pub(super) conditions: Vec<String>,
}

/// What the measuring thread needs.
struct FileSystemBench {
    plan: BenchPlan,
    stripes: Vec<BenchVolume>,
    cells: Vec<StudyCell>,
    jobs: Vec<Job>,
    way: Way,
    policy: PollPolicy,
    programs: Arc<Programs>,
    limit: Option<PageCacheLimit>,
    /// What bonnie++ writes in a run.
    data_bytes: u64,
    /// Has the mount points.
    directory: TempDir,
    /// The link of the kernel's AoE driver, if it is used.
    own_network: Option<VethPair>,
}

/// A disk that a cell is measured on.
enum StudyDisk {
    Attached(AttachedVolume),
    Kernel(KernelDisk),
}

impl StudyDisk {
    fn node(&self) -> PathBuf {
        match self {
            StudyDisk::Attached(volume) => volume.node.clone(),
            StudyDisk::Kernel(disk) => disk.node.clone(),
        }
    }

    fn is_mounted_now(&mut self) {
        if let StudyDisk::Attached(volume) = self {
            volume.is_mounted_now();
        }
    }

    fn detach(self) -> Result<(), String> {
        match self {
            StudyDisk::Attached(volume) => volume.detach(),
            StudyDisk::Kernel(disk) => disk.detach(),
        }
    }
}

/// Measures every cell `args.runs()` times, in alternating order.
///
/// # Errors
/// If the study did not measure a file system, or this machine lacks something for it.
pub(super) fn run(args: &BenchArgs, interrupts: Interrupts) -> Result<FileSystemResults, Failure> {
    let suite = suite(args)?;
    let policy = check_options(args)?;
    let data_bytes = data_bytes(args)?;
    check_programs(&PROGRAMS)?;
    let links = suite.links().ok_or_else(|| Failure::request("internal error: the study has no links"))?;
    // Without root, this is where the user learns it.
    let veth = VethPair::new()?;
    let way = Way::choose(None, WantedWays::All)
        .map_err(|error| Failure::request(format!("--file-system attaches disks: {error}")))?;
    if way == Way::Fuse {
        check_programs(&LOOP_PROGRAMS)?;
    }
    let (mut initiators, mut skipped) = kernel_initiators(&suite);
    let own_network = own_network(&mut initiators, &mut skipped);
    let (cells, without) = cells(&suite, links, &refused(&veth, links), &initiators);
    skipped.extend(without);
    let cells = chosen(cells, &skipped, &args.only)?;
    let (mut plan, stripes) = BenchPlan::of_stripes(args, links, disk_bytes(data_bytes))?;
    plan.veth = Some(veth);
    let directory = tempfile::Builder::new().prefix("blockmux-bench-").tempdir();
    let directory =
        directory.map_err(|error| Failure::run(format!("cannot make a temporary directory: {error}")))?;
    signals::remove_at_exit(directory.path());
    let (limit, limited) = limit(data_bytes);
    let conditions = conditions(data_bytes, way, &limited);
    if data_bytes <= HALF_A_SECOND {
        let (size, more) = (data_bytes / MIB, MIN_DEFAULT_BYTES / MIB);
        warn!("--size {size}m: disks may be left without figures: {TOO_FAST}, as {more}m");
    }
    // The times of a job are those of the load generator.
    let jobs: Vec<Job> =
        suite.jobs().map(|job| Job { runtime_ms: 0, ramp_time_ms: 0, ..job.clone() }).collect();
    let rows = cells.iter().flat_map(|cell| jobs.iter().map(|job| cell.row(job, &stripes, policy))).collect();
    let programs = Arc::new(Programs::default());
    let bench = FileSystemBench {
        plan,
        stripes,
        cells,
        jobs,
        way,
        policy,
        programs: programs.clone(),
        limit,
        data_bytes,
        directory,
        own_network,
    };
    let runs = args.runs();
    let bar = progress_bar(bench.cells.len() as u64 * u64::from(runs));
    let its_bar = bar.clone();
    let work = move |events: &Sender<BenchEvent>| bench.run_all(runs, &its_bar, events);
    let (measured, thread) = collect(rows, interrupts, &bar, work)?;
    if matches!(measured.end, BenchEnd::Signal(_)) {
        programs.stop();
    }
    // It removes what it has made, which takes a moment.
    let _ = thread.join();
    let mut results = FileSystemResults { measured, skipped, conditions };
    results.note_rows_without_rates()?;
    Ok(results)
}

impl FileSystemResults {
    /// Names the rows whose tests took too little time for bonnie++ to state a rate.
    ///
    /// # Errors
    /// If that is true of all.
    fn note_rows_without_rates(&mut self) -> Result<(), Failure> {
        if !matches!(self.measured.end, BenchEnd::Complete) {
            return Ok(());
        }
        let without: Vec<_> = self.measured.rows.iter().filter(|row| row.runs.is_empty()).collect();
        if without.len() == self.measured.rows.len() {
            return Err(Failure::run(TOO_FAST));
        }
        let names = without.iter().map(|row| format!("{}, {}", row.job.name, row.configuration));
        self.skipped.extend(names.map(|name| (name, TOO_FAST.to_owned())));
        Ok(())
    }
}

impl FileSystemBench {
    fn run_all(&self, runs: u32, bar: &ProgressBar, events: &Sender<BenchEvent>) -> Result<(), Failure> {
        let mount_failed = |error| Failure::run(format!("cannot make a mount namespace: {error}"));
        sys::unshare_mounts().map_err(mount_failed)?;
        self.plan.prepare(bar)?;
        let started = Instant::now();
        let prints_lines = !io::stderr().is_terminal();
        for nth in 1..=runs {
            for at in shuffled(self.cells.len(), nth.into()) {
                let cell = &self.cells[at];
                let name = cell.name();
                bar.set_message(format!("run {nth}/{runs}: {name}"));
                let rates = self.run(cell).map_err(|why| Failure::run(format!("{name}: {why}")))?;
                info!("run {nth}/{runs} of {name}: {rates:?}");
                for (job_at, job) in self.jobs.iter().enumerate() {
                    let Some(run) = rates.run(job, self.data_bytes) else { continue };
                    let case = at * self.jobs.len() + job_at;
                    let event = BenchEvent::Run { case, run: Box::new(run), is_short_of_one: false };
                    if events.send(event).is_err() {
                        return Ok(());
                    }
                }
                bar.inc(1);
                if prints_lines {
                    print_finished((nth, runs), &name, bar, started.elapsed());
                }
            }
        }
        Ok(())
    }

    /// Runs bonnie++ once in a cell.
    fn run(&self, cell: &StudyCell) -> Result<BonnieRates, String> {
        let stripe = &self.stripes[cell.stripe].volume;
        match cell.over {
            None => {
                let cores = self.initiator()?;
                let disk = self.attach(stripe.clone(), &cores)?;
                let rates = self.bonnie_on(disk);
                cores.stop(STOP_GRACE);
                rates
            }
            Some(path) => self.run_over(path, stripe),
        }
    }

    /// Serves `stripe` at one end of a link, and runs bonnie++ at the other one.
    fn run_over(&self, path: StudyPath, stripe: &Arc<dyn Volume>) -> Result<BonnieRates, String> {
        let StudyPath { protocol, link, kernel } = path;
        let own = self.own_network.as_ref().filter(|_| kernel == Some(KernelInitiator::Aoe));
        let veth = own.or(self.plan.veth.as_ref()).ok_or("internal error: there is no veth pair")?;
        veth.set(link)?;
        let target = self.plan.target_cores(self.policy, MAX_CORES).map_err(in_words)?;
        let congestion = self.plan.congestion.as_ref();
        let rates = match kernel {
            Some(kernel) => {
                veth.enter_at(TARGET, &target)?;
                let url = served::serve_at(veth, protocol, stripe, &target, congestion).map_err(in_words)?;
                let disk = kernel.attach(&self.programs, veth, &url).map(StudyDisk::Kernel)?;
                self.bonnie_on(disk)
            }
            None => {
                let initiator = self.initiator()?;
                veth.enter(&target, &initiator)?;
                let reached =
                    served::reach(served::ServedAt::Link(veth), protocol, stripe, &target, congestion);
                let disk = self.attach(reached.map_err(in_words)?, &initiator)?;
                let rates = self.bonnie_on(disk);
                initiator.stop(STOP_GRACE);
                rates
            }
        };
        target.stop(STOP_GRACE);
        rates
    }

    /// Cores that serve an attached disk.
    fn initiator(&self) -> Result<Cores, String> {
        let most = self.way.cores(MAX_CORES as usize) as u32;
        self.plan.initiator_cores(self.policy, most).map_err(in_words)
    }

    fn attach(&self, volume: Arc<dyn Volume>, cores: &Cores) -> Result<StudyDisk, String> {
        let directory = self.directory.path().join("attached");
        AttachedVolume::attach(self.way, volume, cores, &directory, &self.programs).map(StudyDisk::Attached)
    }

    /// Runs bonnie++ on a new file system on `disk`, and detaches it.
    fn bonnie_on(&self, mut disk: StudyDisk) -> Result<BonnieRates, String> {
        let place = self.directory.path().join("mounted");
        fs::create_dir_all(&place).map_err(|error| format!("{}: {error}", place.display()))?;
        let mounted = MountedXfs::make(&self.programs, &disk.node(), &place)?;
        disk.is_mounted_now();
        let rates = mounted.bonnie(&self.programs, self.limit.as_ref(), self.data_bytes);
        let undone = mounted.unmount().and_then(|()| disk.detach());
        self.programs.use_disk(None);
        rates.and_then(|rates| undone.map(|()| rates))
    }
}

fn in_words(failure: Failure) -> String {
    failure.to_string()
}

/// The link of the kernel's AoE driver, if `initiators` has it; without a link it is skipped.
fn own_network(
    initiators: &mut Vec<KernelInitiator>,
    skipped: &mut Vec<(String, String)>,
) -> Option<VethPair> {
    if !initiators.contains(&KernelInitiator::Aoe) {
        return None;
    }
    let made = VethPair::with_own_network();
    made.map_err(|why| {
        initiators.retain(|initiator| *initiator != KernelInitiator::Aoe);
        skipped.push((link::by_kernel("aoe"), why));
    })
    .ok()
}

fn suite(args: &BenchArgs) -> Result<Suite, Failure> {
    let name = args.suite.as_deref().unwrap_or_default();
    let suite = Suite::by_name(name).map_err(|error| Failure::request(format!("--suite {name}: {error}")))?;
    suite.on_file_system().ok_or_else(|| {
        Failure::request(format!("--suite {name}: its study measured no file system; omit --file-system"))
    })
}

/// The cells whose names contain one of these texts; all of them if there is none.
fn chosen(
    mut cells: Vec<StudyCell>,
    skipped: &[(String, String)],
    only: &[String],
) -> Result<Vec<StudyCell>, Failure> {
    let names: Vec<String> = cells.iter().map(StudyCell::name).collect();
    if let Some(text) = only.iter().find(|text| !names.iter().any(|name| name.contains(*text))) {
        let why = match skipped.iter().find(|(name, _)| name.contains(text)) {
            Some((_, why)) => format!("cannot be measured here: {why}"),
            None => {
                let last = names.last().map_or("", String::as_str);
                format!("is in the name of no configuration; names are such as \"{last}\"")
            }
        };
        return Err(Failure::request(format!("--only {text}: {why}")));
    }
    cells.retain(|cell| only.is_empty() || only.iter().any(|text| cell.name().contains(text)));
    Ok(cells)
}

/// Refuses options that change nothing here, and returns the polling policy.
fn check_options(args: &BenchArgs) -> Result<PollPolicy, Failure> {
    if let Some(word) = args.volumes_and_jobs.first() {
        return Err(Failure::request(format!("{word}: --file-system measures stripes of RAM; omit it")));
    }
    if let Some(disk) = args.device.first() {
        let disk = disk.display();
        return Err(Failure::request(format!(
            "--device {disk}: --file-system attaches its own disks; omit it"
        )));
    }
    jobs(args, &[])?;
    for (name, value) in [("runtime", &args.runtime), ("ramp_time", &args.ramp_time)] {
        if value.is_some() {
            return Err(Failure::request(format!(
                "--{name} has no effect on bonnie++, which writes and reads --size; omit it"
            )));
        }
    }
    match args.poll[..] {
        [poll] => Ok(poll.into()),
        _ => Err(Failure::request("--file-system measures with one polling policy; give --poll once")),
    }
}

/// Checks that programs are installed, before anything is made.
fn check_programs(programs: &[(&str, &str)]) -> Result<(), Failure> {
    match programs.iter().find(|(program, _)| !is_installed(program)) {
        Some((program, package)) => Err(Failure::request(format!(
            "--file-system needs the program {program}; install the package {package}"
        ))),
        None => Ok(()),
    }
}

/// What bonnie++ writes: `--size`, or a share of the machine's memory.
fn data_bytes(args: &BenchArgs) -> Result<u64, Failure> {
    let refused = |size: &str, why: String| Failure::request(format!("--size {size}: {why}"));
    let bytes = match args.size.as_deref() {
        None => (memory_bytes() / MEMORY_SHARE).clamp(MIN_DEFAULT_BYTES, MAX_DEFAULT_BYTES),
        Some(size) => match units::parse_size(size).map_err(|why| refused(size, why))? {
            Size::Bytes(bytes) if bytes >= MIN_BYTES => bytes,
            Size::Bytes(_) => return Err(refused(size, "bonnie++ needs at least 16m".to_owned())),
            Size::Percent(_) => {
                return Err(refused(size, "give the bytes that bonnie++ writes, as 1g".to_owned()));
            }
        },
    };
    Ok(bytes & !(MIB - 1))
}

/// The size of a stripe that has room for `data_bytes` in files.
fn disk_bytes(data_bytes: u64) -> u64 {
    (data_bytes + data_bytes / 16 + LOG_BYTES).max(MIN_DISK_BYTES)
}

/// Limits the page cache of bonnie++; returns the limit, and what readers must know about it.
fn limit(data_bytes: u64) -> (Option<PageCacheLimit>, String) {
    match PageCacheLimit::new((data_bytes / CACHE_SHARE).max(MIN_CACHE_BYTES)) {
        Ok(limit) => {
            let said =
                format!("Its memory, page cache included, was limited to {}.", figure::bytes(limit.bytes));
            (Some(limit), said)
        }
        Err(why) => {
            let said = format!(
                "Its page cache could not be limited ({why}), so writes went to memory until the flush that each test ends with."
            );
            (None, said)
        }
    }
}

fn conditions(data_bytes: u64, way: Way, limited: &str) -> Vec<String> {
    let bonnie = [xfs::BONNIE, &xfs::bonnie_version()].join(" ");
    let (bytes, way) = (figure::bytes(data_bytes), attached::described(way));
    vec![
        format!(
            "{} wrote {bytes} in each run, on XFS on a disk attached by {way}. Its files were dropped from the page cache before each test.",
            bonnie.trim_end()
        ),
        limited.to_owned(),
    ]
}

fn progress_bar(cells: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(cells), ProgressDrawTarget::stderr_with_hz(10));
    let style = ProgressStyle::with_template("{bar:24} {percent:>3}%, {eta} left; {wide_msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(250));
    bar
}

/// Prints that run `nth` of a cell is finished, with the progress and the estimated remaining time.
fn print_finished((nth, runs): (u32, u32), name: &str, bar: &ProgressBar, elapsed: Duration) {
    let (done, all) = (bar.position(), bar.length().unwrap_or(0));
    let left = elapsed.mul_f64(all.saturating_sub(done) as f64 / done.max(1) as f64);
    let (percent, left) = (done * 100 / all.max(1), HumanDuration(left));
    // A closed standard error does not end the bench.
    let _ = writeln!(io::stderr(), "{percent:>3}%, {left:#} left; run {nth}/{runs} finished: {name}");
}

/// Programs that every way needs, with their Debian packages.
const PROGRAMS: [(&str, &str); 4] =
    [(xfs::BONNIE, "bonnie++"), (xfs::MKFS, "xfsprogs"), ("mount", "mount"), ("umount", "mount")];
/// Programs that make a disk of a file.
const LOOP_PROGRAMS: [(&str, &str); 1] = [(attached::LOSETUP, "mount")];
/// Why a row has no figures.
const TOO_FAST: &str =
    "bonnie++ states no rate of a test that takes less than half a second; give a larger --size";
/// Time for closing the sessions.
const STOP_GRACE: Duration = Duration::from_secs(5);
/// Most cores of each side; they get half of the CPUs.
const MAX_CORES: u32 = 64;
const MIB: u64 = 1 << 20;
/// The least that `--size` may be.
const MIN_BYTES: u64 = 16 << 20;
/// What the slowest link of a study, 1 Gbit/s, carries in half a second: the tests of every disk
/// may take less.
const HALF_A_SECOND: u64 = 64 << 20;
/// Without `--size`, this part of the memory is written, within these limits.
const MEMORY_SHARE: u64 = 16;
const MIN_DEFAULT_BYTES: u64 = 256 << 20;
const MAX_DEFAULT_BYTES: u64 = 1 << 30;
/// The page cache may have this part of the data, but at least what bonnie++ itself needs.
const CACHE_SHARE: u64 = 8;
const MIN_CACHE_BYTES: u64 = 32 << 20;
/// The log of XFS with some room, and the smallest disk that mkfs.xfs accepts.
const LOG_BYTES: u64 = 128 << 20;
const MIN_DISK_BYTES: u64 = 384 << 20;
