//! `blockmux copy`: copies any volume to any other.
//!
//! One core runs everything: [`map`] queries the block status of the source and splits it into
//! segments, and [`task`] copies many of them at a time. Zeroes are not read; they are written with
//! write-zeroes, or skipped if the destination is new.

mod map;
mod progress;
mod task;

use crate::data::layers;
use crate::failure::{self, Failure, cores_cannot_start};
use crate::process::signals;
use crate::process::stdout::print;
use crate::volume_kinds::open::{self, Access, Opened, Use};
use blockmux_engine::core::cores::{Cores, CoresConfig};
use blockmux_volume::units::{human_size, parse_size};
use blockmux_volume::{MAX_TRANSFER, Spec, VolumeInfo};
use progress::CopyProgress;
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use task::{CopyError, CopyPlan, CopyTask, Side};

/// Arguments of `blockmux copy`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CopyArgs {
    /// Source: a volume or a URL
    #[arg(value_name = "SRC")]
    source: Spec,
    /// Destination: a volume or a URL; a missing file is created
    #[arg(value_name = "DST")]
    destination: Spec,
    /// Copy also to a destination that has data
    #[arg(long)]
    overwrite: bool,
    /// Read both after the copy and compare them
    #[arg(long)]
    verify: bool,
    /// Size of each request in bytes
    #[arg(long, value_name = "SIZE", default_value = "1m", value_parser = parse_size)]
    bs: u64,
    /// Number of requests in flight
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=256))]
    iodepth: u32,
    /// Print one JSON object when done
    #[arg(long)]
    json: bool,
}

/// Copies a volume.
pub(crate) fn run(args: &CopyArgs) -> Result<ExitCode, Failure> {
    check_distinct(&args.source, &args.destination)?;
    let how = |access| Use { connections: CONNECTIONS, ..Use::briefly(access) };
    let source = open::open(&args.source, how(Access::Read))?;
    let from = source.volume.info();
    if from.size == 0 || from.size > LARGEST {
        return Err(Failure::request(format!(
            "{}: has {} bytes; copy a volume of 1 to {LARGEST} bytes",
            args.source, from.size
        )));
    }
    let to = created_as_large(&args.destination, from.size);
    let destination = open::open(&to, how(Access::Write))?;
    destination.own(&to)?;
    let plan = plan(args, &from, &destination)?;
    let started = Instant::now();
    let progress = Arc::new(CopyProgress::new(from.size));
    match copy(source, destination, plan, &progress)? {
        Ok(()) => {
            let took = started.elapsed();
            match args.json {
                true => print(progress.json(took, args.verify))?,
                false => print(progress.summary(took, args.verify))?,
            }
            Ok(ExitCode::SUCCESS)
        }
        Err(CopyError::Interrupted(signal)) => {
            Failure::run(explain(&CopyError::Interrupted(signal), args, progress.is_verifying())).report();
            Ok(failure::status_of_signal(signal))
        }
        Err(error @ CopyError::NotEmpty { .. }) => Err(Failure::request(explain(&error, args, false))),
        Err(error) => Err(Failure::run(explain(&error, args, progress.is_verifying()))),
    }
}

/// Whether two volumes with this spec are the same volume.
fn is_persistent(spec: &Spec) -> bool {
    spec.leaves().into_iter().any(|leaf| !matches!(leaf, Spec::Mem(_) | Spec::Null(_)))
}

/// Whether source and destination have no data in common.
fn check_distinct(source: &Spec, destination: &Spec) -> Result<(), Failure> {
    let exact = |spec| {
        let mut parts = layers::of_spec(spec);
        parts.retain(|part| part.is_exact);
        parts
    };
    let [from, to] = [source, destination].map(exact);
    let is_same = source == destination && is_persistent(source) || from == to && !from.is_empty();
    let how = match from.iter().any(|part| to.iter().any(|other| part.overlaps(other))) {
        _ if is_same => "are the same",
        true => "overlap",
        false => return Ok(()),
    };
    Err(Failure::request(format!("{source}: source and destination {how}; give another destination")))
}

/// The destination with the size of the source, if it is a file that does not exist.
fn created_as_large(destination: &Spec, size: u64) -> Spec {
    match destination {
        Spec::File(file) if file.size.is_none() && !file.path.exists() => {
            let mut file = file.clone();
            // A file volume has whole blocks, a source may not.
            let block = file.blocks.logical.map_or(SECTOR, u64::from);
            file.size = size.checked_next_multiple_of(block);
            Spec::File(file)
        }
        Spec::Decorated(decoration, inner) => {
            Spec::Decorated(decoration.clone(), Box::new(created_as_large(inner, size)))
        }
        other => other.clone(),
    }
}

fn plan(args: &CopyArgs, from: &VolumeInfo, destination: &Opened) -> Result<CopyPlan, Failure> {
    let (to, name) = (destination.volume.info(), &args.destination);
    if to.read_only {
        return Err(Failure::request(format!("{name}: is read-only; copy to a writable volume")));
    }
    if to.size < from.size {
        return Err(Failure::request(format!(
            "{name}: has {} bytes, but {} has {}; use a destination that is at least as large",
            to.size, args.source, from.size
        )));
    }
    let block = u64::from(from.logical_block.max(to.logical_block));
    let most = u64::from(MAX_TRANSFER);
    if args.bs < block || args.bs > most || !args.bs.is_multiple_of(block) {
        let most = human_size(most);
        return Err(Failure::request(format!("--bs {}: set a multiple of {block} up to {most}", args.bs)));
    }
    let is_whole = from.size.is_multiple_of(to.logical_block.into());
    if !is_whole && (!destination.is_fresh || from.size.next_multiple_of(block) > to.size) {
        return Err(Failure::request(format!(
            "{name}: cannot end at byte {} with blocks of {} bytes; copy to a new file",
            from.size, to.logical_block
        )));
    }
    Ok(CopyPlan {
        len: from.size,
        block,
        piece: args.bs,
        depth: args.iodepth,
        is_fresh: destination.is_fresh,
        looks: !args.overwrite,
        verify: args.verify,
    })
}

/// Copies on a separate core, and shows the progress.
fn copy(
    source: Opened,
    destination: Opened,
    plan: CopyPlan,
    progress: &Arc<CopyProgress>,
) -> Result<Result<(), CopyError>, Failure> {
    // Each piece has at most two buffers: as received, and aligned for direct I/O. Rounding may
    // double them, and half of the pool is for long payload.
    let pool_limit_bytes = (8 * plan.piece * u64::from(plan.depth)) as usize + RECEIVE_POOL;
    let cores = Cores::start(&CoresConfig { pool_limit_bytes, ..CoresConfig::default() })
        .map_err(|error| Failure::request(cores_cannot_start(&error)))?;
    let (sender, result) = mpsc::channel();
    signals::watch(&sender, &[], |signal| Err(CopyError::Interrupted(signal)))
        .map_err(|error| Failure::run(format!("cannot install signal handlers: {error}")))?;
    let progress_counters = progress.clone();
    let ended = || Failure::run("the copying core ended unexpectedly; try again with -v");
    cores
        .ask(0, move |core| {
            let (from, to) = (&source.volume, &destination.volume);
            if let Err(error) = CopyTask::spawn(core, from, to, plan, progress_counters, sender.clone()) {
                // The receiver still exists.
                let _ = sender.send(Err(error));
            }
        })
        .ok_or_else(ended)?;
    let outcome = progress.show_until(&result).map_err(|_| ended());
    // Log out of the servers.
    cores.stop(LOGOUT_TIMEOUT);
    outcome
}

fn explain(error: &CopyError, args: &CopyArgs, is_copied: bool) -> String {
    let state = if is_copied {
        "everything was copied, but not everything was compared"
    } else {
        "the copy is not complete"
    };
    let name = |side: &Side| match side {
        Side::Source => &args.source,
        Side::Destination => &args.destination,
    };
    match error {
        CopyError::Io { side, action, offset, len, error } => {
            let name = name(side);
            format!("{name}: cannot {action} {len} bytes at offset {offset}: {error}; {state}")
        }
        CopyError::Open { side, error } => format!("{}: cannot open it: {error}", name(side)),
        CopyError::Flush(error) => {
            format!("{}: flush failed: {error}; the copy may be lost at a power failure", args.destination)
        }
        CopyError::Differs { offset } => format!(
            "{}: differs from {} at offset {offset}; make sure that neither is being written, and copy again",
            args.destination, args.source
        ),
        CopyError::NotEmpty { offset } => format!(
            "{}: has data at offset {offset}, and nothing was copied; to overwrite it, give --overwrite",
            args.destination
        ),
        CopyError::Interrupted(_) => format!("{}: interrupted; {state}", args.destination),
    }
}

/// The maximum size of a file, in bytes.
const LARGEST: u64 = i64::MAX as u64 / SECTOR * SECTOR;
/// Size of a sector of a file volume, in bytes.
const SECTOR: u64 = 512;
/// Connections to a remote volume; servers with one thread per connection need several.
const CONNECTIONS: u32 = 4;
/// Timeout for closing the sessions.
const LOGOUT_TIMEOUT: Duration = Duration::from_secs(1);
/// Pool memory for receive buffers, in bytes.
const RECEIVE_POOL: usize = 64 << 20;

const EXAMPLES: &str = "\
Holes of the source become holes of the destination. Data of the destination
beyond the source's size stays. A destination that has data is refused without
--overwrite. If its block status tells holes from data, all its data is read. Of
others, such as devices, only the first and last --bs bytes of each GiB are
read, and data elsewhere is not found. After Ctrl-C the destination is
incomplete, and the exit status is 130.

Examples:
  blockmux copy nbd://192.0.2.7/disk0 file:disk.img
  blockmux copy file:disk.img block:/dev/sdb --verify --overwrite
  blockmux copy nbd://old/disk0 nbd://new/disk0 --bs 256k --iodepth 32";
