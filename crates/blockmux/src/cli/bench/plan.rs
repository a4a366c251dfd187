//! The plan of a bench: the cases of the command line.

use super::case::{BenchCase, CaseKind};
use super::device::LocalDisk;
use super::fabric::BenchFabric;
use super::jobs::{Jobs, jobs, times, wrong_option};
use super::linked;
use super::veth::VethPair;
use super::vhost_user::VHOST_USER;
use super::{BenchArgs, LOCAL};
use crate::failure::{Failure, cores_cannot_start};
use crate::process::machine::memory_bytes;
use crate::process::poll::Poll;
use crate::protocol::{self, Carrier, Protocol};
use crate::volume_kinds::open::{self, Access, Populate, Use};
use blockmux_engine::core::cores::{Cores, CoresConfig};
use blockmux_engine::core::reactor::PollPolicy;
use blockmux_engine::sys;
use blockmux_engine::sys::congestion::Congestion;
use blockmux_lab::ceiling::{Data, Transport, Variant};
use blockmux_lab::generator::Bench;
use blockmux_lab::job::{Job, Rw};
use blockmux_lab::link::Links;
use blockmux_lab::suite::{Suite, SuiteRow};
use blockmux_lab::units;
use blockmux_volume::spec::without_secrets;
use blockmux_volume::{Spec, Volume};
use indicatif::ProgressBar;
use std::cell::OnceCell;
use std::sync::Arc;

/// Cases in order of output, and their shared settings.
pub(super) struct BenchPlan {
    pub(super) cases: Vec<BenchCase>,
    /// Jobs that are not measured, with the reason.
    pub(super) skipped: Vec<(String, String)>,
    /// New volumes, which must be written once before they are measured.
    fresh: Vec<Arc<dyn Volume>>,
    /// The veth pair, if the suite uses links.
    pub(super) veth: Option<VethPair>,
    ceiling_data: OnceCell<Data>,
    /// Size of the ceiling's data in bytes: that of the volume, so that caches have the same
    /// effect.
    ceiling_bytes: usize,
    cpus: usize,
    /// Congestion control of TCP connections; `None` for the system's default.
    pub(super) congestion: Option<Congestion>,
}

/// A volume of the command line.
pub(super) struct BenchVolume {
    /// The argument as written.
    name: String,
    /// The argument without passwords.
    pub(super) shown: String,
    /// Name that distinguishes the volume from other local volumes of the suite; empty if there is
    /// only one.
    pub(super) place: String,
    pub(super) volume: Arc<dyn Volume>,
    /// Protocol and transport of a URL.
    remote: Option<(&'static Protocol, Transport)>,
    /// The disk, if `--device` names it.
    disk: Option<LocalDisk>,
    /// Whether the volume existed before. Its content is overwritten only on request.
    holds_data: bool,
}

impl BenchPlan {
    /// A plan without cases.
    fn new(args: &BenchArgs) -> BenchPlan {
        BenchPlan {
            cases: Vec::new(),
            skipped: Vec::new(),
            fresh: Vec::new(),
            veth: None,
            ceiling_data: OnceCell::new(),
            ceiling_bytes: 0,
            cpus: sys::allowed_cpus().map_or(1, |cpus| cpus.len()),
            congestion: args.congestion.clone(),
        }
    }

    /// A plan without cases, and the stripes of a study, of `bytes` each.
    pub(super) fn of_stripes(
        args: &BenchArgs,
        links: &Links,
        bytes: u64,
    ) -> Result<(BenchPlan, Vec<BenchVolume>), Failure> {
        let mut plan = BenchPlan::new(args);
        let stripes = plan.open_stripes(links, bytes)?;
        Ok((plan, stripes))
    }

    /// Opens the volumes and checks every job against them.
    pub(super) fn make(args: &BenchArgs) -> Result<BenchPlan, Failure> {
        let (names, files): (Vec<&String>, Vec<&String>) =
            args.volumes_and_jobs.iter().partition(|word| !super::is_job_file(word));
        let policies: Vec<PollPolicy> = args.poll.iter().map(|&poll| poll.into()).collect();
        let mut plan = BenchPlan::new(args);
        let Jobs { jobs, are_default } = jobs(args, &files)?;
        let names_in_files = jobs.iter().filter_map(|(_, target)| target.as_deref());
        let mut volumes = Vec::new();
        for name in names.into_iter().map(String::as_str).chain(names_in_files) {
            if volumes.iter().all(|volume: &BenchVolume| volume.name != name) {
                volumes.push(plan.open(name)?);
            }
        }
        let disks = plan.open_disks(args)?;
        if volumes.is_empty() && (disks.is_empty() || args.suite.is_some()) {
            volumes = plan.open_default(args)?;
        }
        match &args.suite {
            Some(name) => plan.add_suite(name, args, &volumes, &disks, &policies)?,
            None => {
                volumes.extend(disks);
                for (job, target) in &jobs {
                    // A disk may have another owner, so a pattern alone does not suffice.
                    let is_told =
                        |volume: &BenchVolume| args.overwrite || !args.rw.is_empty() && volume.disk.is_none();
                    let spares = |volume: &BenchVolume| {
                        volume.holds_data && job.rw.changes_content() && !is_told(volume)
                    };
                    let named =
                        |volume: &&BenchVolume| target.as_deref().is_none_or(|name| name == volume.name);
                    let (spared, wanted): (Vec<_>, Vec<_>) =
                        volumes.iter().filter(named).partition(|volume| spares(volume));
                    if let Some(volume) = spared.first().filter(|_| !are_default) {
                        return Err(would_overwrite(&format!("job {}", job.name), volume));
                    }
                    plan.skip_overwriting(job, &spared);
                    plan.add_job(job, &wanted, &policies, args);
                }
            }
        }
        plan.check(files.is_empty() && args.suite.is_none())?;
        check_fabrics(&args.rdma, &plan.cases)?;
        args.rdma.iter().try_for_each(|fabric| fabric.check())?;
        Ok(plan)
    }

    fn open(&mut self, name: &str) -> Result<BenchVolume, Failure> {
        let spec: Spec = name.parse().map_err(Failure::request)?;
        let usage = Use { populate: Populate::Whole, ..Use::briefly(Access::Either) };
        let opened = open::open(&spec, usage)?;
        opened.own(&spec)?;
        if opened.is_fresh {
            self.fresh.push(opened.volume.clone());
        }
        let size = usize::try_from(opened.volume.info().size).unwrap_or(usize::MAX);
        self.ceiling_bytes = self.ceiling_bytes.max(size.min(MAX_CEILING_BYTES));
        let remote = if opened.is_remote { protocol::of_url(name) } else { None };
        let holds_data = !opened.is_fresh && keeps_content(&spec);
        let (name, shown) = (name.to_owned(), without_secrets(name));
        let (volume, place) = (opened.volume, String::new());
        Ok(BenchVolume { name, shown, place, volume, remote, disk: None, holds_data })
    }

    /// Opens the disks of `--device`. The kernel refuses those that are in use.
    fn open_disks(&mut self, args: &BenchArgs) -> Result<Vec<BenchVolume>, Failure> {
        let mut disks: Vec<BenchVolume> = Vec::new();
        for path in &args.device {
            let disk = LocalDisk::at(path)?;
            let shown = disk.path.display().to_string();
            if disks.iter().any(|other| other.shown == shown) {
                return Err(Failure::request(format!("--device {}: is given twice", path.display())));
            }
            let access = if disk.is_read_only { Access::Read } else { Access::Write };
            let volume = open::open(&disk.spec, Use::briefly(access))?.volume;
            disks.push(BenchVolume {
                name: shown.clone(),
                shown,
                place: String::new(),
                volume,
                remote: None,
                disk: Some(disk),
                holds_data: true,
            });
        }
        Ok(disks)
    }

    /// Opens the default volume.
    fn open_default(&mut self, args: &BenchArgs) -> Result<Vec<BenchVolume>, Failure> {
        let bytes = default_bytes(args)?;
        let suite = args.suite.as_deref().and_then(|name| Suite::by_name(name).ok());
        let Some(links) = suite.as_ref().and_then(Suite::links) else {
            return Ok(vec![self.open(&format!("mem:{bytes}"))?]);
        };
        self.open_stripes(links, bytes / links.stripes.len().max(1) as u64)
    }

    /// Opens stripes of RAM of `bytes` each.
    fn open_stripes(&mut self, links: &Links, bytes: u64) -> Result<Vec<BenchVolume>, Failure> {
        let stripes = linked::stripes(links, bytes).into_iter();
        stripes.map(|(spec, place)| Ok(BenchVolume { place, ..self.open(&spec)? })).collect()
    }

    /// Skips a job that would overwrite existing volumes without request.
    fn skip_overwriting(&mut self, job: &Job, volumes: &[&BenchVolume]) {
        self.skipped.extend(volumes.iter().map(|volume| {
            (
                job.name.clone(),
                format!("{} would be overwritten (give --overwrite to allow that)", volume.shown),
            )
        }));
    }

    /// Adds the cases of a job: each volume, then the ceilings of their protocols.
    fn add_job(&mut self, job: &Job, volumes: &[&BenchVolume], policies: &[PollPolicy], args: &BenchArgs) {
        let mut protocols: Vec<(&'static Protocol, Transport)> = Vec::new();
        for volume in volumes {
            if volume.disk.is_some() {
                self.add_disk(job, volume, policies);
                continue;
            }
            let case = |kind| BenchCase::new(kind, job, &volume.shown);
            match volume.remote {
                Some((protocol, transport)) => {
                    let kind = |&poll| CaseKind::Remote(protocol, transport, volume.volume.clone(), poll);
                    self.cases.extend(policies.iter().map(kind).map(case));
                    // There is no ceiling for raw frames.
                    if protocol.carrier == Carrier::Stream {
                        protocols.push((protocol, transport));
                    }
                }
                None => {
                    if args.measures(LOCAL) {
                        self.cases.push(case(CaseKind::Local(volume.volume.clone())));
                    }
                    // As a URL, it is measured where it is.
                    if is_of_back_end(&volume.name) {
                        continue;
                    }
                    let is_wanted = |protocol: &&Protocol| match args.protocols.is_empty() {
                        true => protocol.is_default || !args.is_quick(),
                        false => args.measures(protocol.name),
                    };
                    for protocol in protocol::stream_protocols().filter(is_wanted) {
                        self.add_served(protocol, job, volume, &args.rdma, policies);
                        protocols.push((protocol, Transport::Tcp));
                    }
                    // Memory that both sides share has no ceiling of sockets.
                    if args.measures(VHOST_USER) {
                        let kind = |&poll| CaseKind::VhostUser(volume.volume.clone(), poll);
                        self.cases.extend(policies.iter().map(kind).map(case));
                    }
                }
            }
        }
        self.add_ceilings(job, protocols, args);
    }

    /// Adds a volume as a protocol serves it, over each fabric if it is one over RDMA.
    fn add_served(
        &mut self,
        protocol: &'static Protocol,
        job: &Job,
        volume: &BenchVolume,
        fabrics: &[BenchFabric],
        policies: &[PollPolicy],
    ) {
        let fabrics = BenchFabric::of(protocol, fabrics);
        for &fabric in &fabrics {
            let kind = |&poll| CaseKind::Served(protocol, fabric, volume.volume.clone(), poll);
            let is_named = fabrics.len() > 1 || fabric != BenchFabric::default();
            let place = || if is_named { fabric.title().to_owned() } else { String::new() };
            let case = |poll| BenchCase { place: place(), ..BenchCase::new(kind(poll), job, &volume.shown) };
            self.cases.extend(policies.iter().map(case));
        }
    }

    /// The fabrics that a suite is measured over. One that cannot be had here is skipped, unless
    /// `--rdma` asks for it.
    fn fabrics_of(&mut self, suite: &Suite, args: &BenchArgs) -> Vec<BenchFabric> {
        if !args.rdma.is_empty() {
            return args.rdma.clone();
        }
        let named = suite.fabrics().filter_map(BenchFabric::named);
        let mut fabrics: Vec<BenchFabric> = named.collect();
        fabrics.retain(|fabric| {
            let checked = fabric.check();
            self.skipped
                .extend(checked.as_ref().err().map(|why| (fabric.title().to_owned(), why.to_string())));
            checked.is_ok()
        });
        fabrics
    }

    fn add_disk(&mut self, job: &Job, volume: &BenchVolume, policies: &[PollPolicy]) {
        let Some(disk) = &volume.disk else { return };
        let kind = |&poll: &PollPolicy| CaseKind::Device(disk.label(), volume.volume.clone(), poll);
        let cases = policies.iter().map(|poll| BenchCase::new(kind(poll), job, &volume.shown));
        self.cases.extend(cases);
    }

    fn add_ceilings(&mut self, job: &Job, protocols: Vec<(&'static Protocol, Transport)>, args: &BenchArgs) {
        // A discard transfers no data, and verifying has no raw-socket equivalent.
        if args.no_ceiling || matches!(job.rw, Rw::Trim | Rw::RandTrim) || job.verify.is_some() {
            return;
        }
        for (nth, &(protocol, transport)) in protocols.iter().enumerate() {
            let known = &protocols[..nth];
            if known.iter().any(|(other, over)| (other.name, *over) == (protocol.name, transport)) {
                continue;
            }
            for variant in self.ceilings(args) {
                let kind = CaseKind::Ceiling(protocol, transport, variant);
                self.cases.push(BenchCase::new(kind, job, ""));
            }
        }
    }

    /// The ceilings to measure. The short list has only the ceiling that the rows of a policy are
    /// compared with. For adaptive polling it is the spinning ceiling, which is faster if each side
    /// has a CPU.
    fn ceilings(&self, args: &BenchArgs) -> Vec<Variant> {
        let variant = |poll: &Poll| match poll {
            Poll::Never => Variant::Sleeping,
            Poll::Adaptive if self.cpus < 2 => Variant::Sleeping,
            Poll::Adaptive | Poll::Always => Variant::Spinning,
        };
        let all = [Variant::Sleeping, Variant::Spinning];
        let is_wanted =
            |wanted: &Variant| !args.is_quick() || args.poll.iter().any(|poll| variant(poll) == *wanted);
        all.into_iter().filter(is_wanted).collect()
    }

    fn add_suite(
        &mut self,
        name: &str,
        args: &BenchArgs,
        volumes: &[BenchVolume],
        disks: &[BenchVolume],
        policies: &[PollPolicy],
    ) -> Result<(), Failure> {
        let suite =
            Suite::by_name(name).map_err(|error| Failure::request(format!("--suite {name}: {error}")))?;
        if let (Some(_), [disk, ..]) = (suite.links(), disks) {
            let disk = &disk.shown;
            return Err(Failure::request(format!(
                "--device {disk}: {name} compares links, not disks; use another suite"
            )));
        }
        if let Some(links) = suite.links()
            && volumes.iter().all(|volume| volume.remote.is_none())
            && (volumes.len() == 1 || args.volumes_and_jobs.is_empty())
        {
            return self.add_linked(&suite, links, args, volumes, policies);
        }
        let [served @ BenchVolume { remote: None, .. }] = volumes else {
            return Err(Failure::request(
                "--suite measures one local volume; give one, such as mem:1g, or none",
            ));
        };
        let times = times(args)?;
        let mut rows = suite.rows(times.runtime_ms, times.ramp_time_ms);
        rows.retain(|row| args.measures(&row.protocol));
        check_spared(args, &rows, volumes)?;
        check_spared(args, &rows, disks)?;
        for of_job in rows.chunk_by_mut(|a, b| a.job == b.job) {
            // Local rows first, as everywhere.
            of_job.sort_by_key(|row| row.protocol != "local");
        }
        let fabrics = self.fabrics_of(&suite, args);
        let mut measured = Vec::new();
        for (at, row) in rows.iter().enumerate() {
            match protocol::by_name(&row.protocol) {
                Some(protocol) if protocol.carrier == Carrier::Frames => {
                    self.skip(row, format!("{} is measured over virtual links", protocol.title));
                }
                Some(protocol) => {
                    self.add_served(protocol, &row.job, served, &fabrics, policies);
                    measured.push((protocol, Transport::Tcp));
                }
                None if row.protocol == "local" => {
                    let kind = CaseKind::Local(served.volume.clone());
                    self.cases.push(BenchCase::new(kind, &row.job, &served.shown));
                }
                None => self.skip(row, format!("this version does not support {}", row.protocol)),
            }
            let is_last_of_job = rows.get(at + 1).is_none_or(|next| next.job != row.job);
            if is_last_of_job {
                for volume in disks {
                    self.add_disk(&row.job, volume, policies);
                }
                self.add_ceilings(&row.job, std::mem::take(&mut measured), args);
            }
        }
        Ok(())
    }

    fn skip(&mut self, row: &SuiteRow, reason: String) {
        self.skipped.push((row.job.name.clone(), reason));
    }

    /// Checks that every job fits its volume.
    fn check(&self, from_options: bool) -> Result<(), Failure> {
        for case in &self.cases {
            if let CaseKind::Local(volume)
            | CaseKind::Served(_, _, volume, _)
            | CaseKind::VhostUser(volume, _)
            | CaseKind::Linked(_, volume, ..)
            | CaseKind::Device(_, volume, _)
            | CaseKind::Remote(_, _, volume, _) = &case.kind
            {
                let info = volume.info();
                case.job.validate(info.size, info.logical_block).map_err(|error| match from_options {
                    true => wrong_option(&error),
                    false => Failure::request(format!("job {} on {}: {error}", case.job.name, case.target)),
                })?;
                if info.read_only && case.job.rw.changes_content() {
                    let text = format!("{}: is read-only, and {} writes", case.target, case.job.rw.name());
                    return Err(Failure::request(text));
                }
            }
        }
        if self.cases.is_empty() {
            return Err(Failure::request(
                "nothing to measure; give a volume, such as mem:1g, and --protocols that it is measured over",
            ));
        }
        Ok(())
    }

    /// Writes every new volume once, because untouched memory and holes in files behave
    /// differently.
    pub(super) fn prepare(&self, bar: &ProgressBar) -> Result<(), Failure> {
        for volume in &self.fresh {
            bar.set_message("writing the new volume once");
            let initiator = self.initiator_cores(PollPolicy::Never, 1)?;
            // The block size must divide the size of the volume.
            let bs = 1 << volume.info().size.trailing_zeros().min(MAX_FILL_BITS);
            let job = Job { name: "fill".to_owned(), rw: Rw::Write, bs, iodepth: 8, ..Job::default() };
            let bench = Bench {
                job: &job,
                volume,
                own_buffers: true,
                initiator: &initiator,
                target: None,
                progress: &|_| {},
            };
            bench.fill().map_err(|error| Failure::run(format!("cannot fill the volume: {error}")))?;
        }
        bar.set_message("preparing the ceiling's data");
        if self.cases.iter().any(|case| matches!(case.kind, CaseKind::Ceiling(..))) {
            self.ceiling_data()?;
        }
        Ok(())
    }

    /// The data region of the ceiling.
    pub(super) fn ceiling_data(&self) -> Result<&Data, Failure> {
        if let Some(data) = self.ceiling_data.get() {
            return Ok(data);
        }
        let largest = self.cases.iter().map(|case| case.job.bs as usize).max().unwrap_or(0);
        let data = Data::new(self.ceiling_bytes.max(largest)).map_err(Failure::run)?;
        Ok(self.ceiling_data.get_or_init(|| data))
    }

    /// Cores of the target: at most the first half of the CPUs.
    pub(super) fn target_cores(&self, policy: PollPolicy, numjobs: u32) -> Result<Cores, Failure> {
        self.start_cores(self.cores_per_side(numjobs), self.pin(0), policy)
    }

    /// Cores of the initiator, after those of the target.
    pub(super) fn initiator_cores(&self, policy: PollPolicy, numjobs: u32) -> Result<Cores, Failure> {
        let count = self.cores_per_side(numjobs);
        self.start_cores(count, self.pin(count), policy)
    }

    /// CPU numbers of the ceiling's two threads.
    pub(super) fn ceiling_cpus(&self) -> (Option<usize>, Option<usize>) {
        match sys::allowed_cpus() {
            Ok(cpus) if cpus.len() > 1 => (Some(cpus[0]), Some(cpus[1])),
            _ => (None, None),
        }
    }

    fn cores_per_side(&self, numjobs: u32) -> usize {
        (self.cpus / 2).clamp(1, numjobs.max(1) as usize)
    }

    fn start_cores(
        &self,
        count: usize,
        pin_from: Option<usize>,
        policy: PollPolicy,
    ) -> Result<Cores, Failure> {
        let congestion = self.congestion.clone();
        let config = CoresConfig { count, pin_from, policy, congestion, ..CoresConfig::default() };
        Cores::start(&config).map_err(|error| Failure::run(cores_cannot_start(&error)))
    }

    fn pin(&self, from: usize) -> Option<usize> {
        (self.cpus > 1).then_some(from)
    }
}

/// Refuses a job of a file or a suite, which was perhaps written for a volume without data.
fn would_overwrite(what: &str, volume: &BenchVolume) -> Failure {
    Failure::request(format!(
        "{what} would overwrite {}, which existed before; to allow that, give --overwrite",
        volume.shown
    ))
}

/// Checks that no job of a suite would overwrite an existing volume without request.
///
/// # Errors
/// Names the job, the volume and what to do.
pub(super) fn check_spared(
    args: &BenchArgs,
    rows: &[SuiteRow],
    volumes: &[BenchVolume],
) -> Result<(), Failure> {
    let writing = rows.iter().find(|row| row.job.rw.changes_content());
    let existing = volumes.iter().find(|volume| volume.holds_data);
    match writing.zip(existing).filter(|_| !args.overwrite) {
        Some((row, volume)) => Err(would_overwrite(&format!("job {}", row.job.name), volume)),
        None => Ok(()),
    }
}

/// Refuses `--rdma` if it applies to none of the cases.
///
/// # Errors
/// Says where the fabric is chosen.
fn check_fabrics(asked: &[BenchFabric], cases: &[BenchCase]) -> Result<(), Failure> {
    let Some(fabric) = asked.first() else { return Ok(()) };
    let is_over_fabric =
        |case: &BenchCase| matches!(&case.kind, CaseKind::Served(protocol, ..) if protocol.is_over_rdma);
    if cases.iter().any(is_over_fabric) {
        return Ok(());
    }
    let is_served = |case: &BenchCase| matches!(&case.kind, CaseKind::Served(..) | CaseKind::Linked(..));
    let over_rdma =
        |case: &BenchCase| matches!(&case.kind, CaseKind::Remote(protocol, ..) if protocol.is_over_rdma);
    let name = fabric.name();
    Err(Failure::request(if cases.iter().any(over_rdma) && !cases.iter().any(is_served) {
        format!("--rdma {name}: is for volumes that bench serves itself; write {} in the URL", fabric.query())
    } else {
        let all = protocol::PROTOCOLS.iter().filter(|protocol| protocol.is_over_rdma);
        let all: Vec<_> = all.map(|protocol| protocol.name).collect();
        format!(
            "--rdma {name}: is for protocols over RDMA that bench serves itself, and none is measured; remove \
             it, or measure a volume over {}",
            all.join(", ")
        )
    }))
}

/// Whether the volume is, or is above, the device of a vhost-user back end.
fn is_of_back_end(name: &str) -> bool {
    let spec = name.parse::<Spec>();
    spec.is_ok_and(|spec| spec.leaves().into_iter().any(|leaf| matches!(leaf, Spec::VhostUser(_))))
}

/// Whether a volume of this kind returns the data that was written.
fn keeps_content(spec: &Spec) -> bool {
    spec.leaves().into_iter().any(|leaf| !matches!(leaf, Spec::Null(_)))
}

/// Size of the default RAM volume: `--size`, or a share of the machine's memory.
fn default_bytes(args: &BenchArgs) -> Result<u64, Failure> {
    Ok(match args.size.as_deref().map(units::parse_size) {
        Some(Ok(units::Size::Bytes(bytes))) if args.offset.is_none() => bytes,
        Some(Err(why)) => {
            return Err(Failure::request(format!("--size {}: {why}", args.size.clone().unwrap_or_default())));
        }
        _ => (memory_bytes() / 8).clamp(MIN_VOLUME, MAX_VOLUME),
    })
}

/// Minimum size of the default RAM volume, in bytes.
const MIN_VOLUME: u64 = 64 << 20;
/// Maximum size of the default RAM volume, in bytes.
const MAX_VOLUME: u64 = 1 << 30;
/// Maximum size of the ceiling's data, in bytes.
const MAX_CEILING_BYTES: usize = 1 << 30;
/// Binary logarithm of the maximum block size for writing new volumes: 1 MiB.
const MAX_FILL_BITS: u32 = 20;
