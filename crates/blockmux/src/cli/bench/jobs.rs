//! The jobs of the command line, of job files, or the default list.

use super::BenchArgs;
use crate::failure::Failure;
use crate::process::regular;
use blockmux_lab::job::{Job, Rw};
use blockmux_lab::job_file::{self, FileJob};
use blockmux_lab::options::JobError;
use blockmux_lab::suite::{full_jobs, quick_jobs};
use blockmux_volume::Spec;
use std::io::Read;

/// Jobs, and whether they are the default list.
pub(super) struct Jobs {
    /// The jobs, with the volumes of job files.
    pub(super) jobs: Vec<(Job, Option<String>)>,
    /// Whether this is the default list, because the command line has no job options.
    pub(super) are_default: bool,
}

/// Determines the jobs and, from job files, their volumes.
pub(super) fn jobs(args: &BenchArgs, files: &[&String]) -> Result<Jobs, Failure> {
    let shapes = [("numjobs", &args.numjobs), ("iodepth", &args.iodepth), ("bs", &args.bs), ("rw", &args.rw)];
    let shape = shapes.iter().find(|(_, values)| !values.is_empty());
    if let (Some(_), Some(file)) = (&args.suite, files.first()) {
        return Err(Failure::request(format!("{file}: a suite has its own jobs; remove one of the two")));
    }
    // Files are read before options are checked: a file that is not a job file sets no options.
    let mut jobs = jobs_of_files(files)?;
    let others =
        if args.suite.is_some() { Some("the suite") } else { files.first().map(|file| file.as_str()) };
    if let (Some((name, _)), Some(others)) = (shape, others) {
        return Err(Failure::request(format!("--{name} is set by {others}; remove one of the two")));
    }
    let own = shape.map(|(name, _)| format!("--{name}")).or(others.map(str::to_owned));
    if let (true, Some(own)) = (args.full, own) {
        return Err(Failure::request(format!(
            "--full has its own jobs, and so has {own}; remove one of the two"
        )));
    }
    if args.suite.is_some() {
        let options = [
            ("offset", &args.offset),
            ("rwmixread", &args.rwmixread),
            ("verify", &args.verify),
            ("fsync", &args.fsync),
            ("randseed", &args.randseed),
        ];
        if let Some((name, _)) = options.iter().find(|(_, value)| value.is_some()) {
            return Err(Failure::request(format!("--{name} is set by the suite; remove one of the two")));
        }
        return Ok(Jobs { jobs: Vec::new(), are_default: false });
    }
    if files.is_empty() {
        let base = times(args)?;
        let mut own = match shape {
            None if args.full => full_jobs(base.runtime_ms, base.ramp_time_ms),
            None => quick_jobs(base.runtime_ms, base.ramp_time_ms),
            Some(_) => vec![Job { rw: Rw::RandRead, ..base }],
        };
        for (key, values) in shapes {
            own = combine(&own, key, values)?;
        }
        jobs.extend(own.into_iter().map(|job| (job, None)));
    }
    for (job, _) in &mut jobs {
        set_all(job, args)?;
        if shape.is_some() {
            job.name = job.name_by_shape();
        }
    }
    Ok(Jobs { jobs, are_default: files.is_empty() && shape.is_none() })
}

/// Applies the options that override those of job files.
fn set_all(job: &mut Job, args: &BenchArgs) -> Result<(), Failure> {
    for (key, value) in [
        ("runtime", &args.runtime),
        ("ramp_time", &args.ramp_time),
        ("size", &args.size),
        ("offset", &args.offset),
        ("rwmixread", &args.rwmixread),
        ("fsync", &args.fsync),
        ("randseed", &args.randseed),
        ("verify", &args.verify),
    ] {
        set(job, key, value.as_deref())?;
    }
    Ok(())
}

fn jobs_of_files(files: &[&String]) -> Result<Vec<(Job, Option<String>)>, Failure> {
    let mut jobs = Vec::new();
    for file in files {
        let text = read_job_file(file)?;
        let env = |name: &str| std::env::var(name).ok();
        let found = job_file::parse(&text, file, env).map_err(Failure::request)?;
        if !found.ignored.is_empty() {
            tracing::warn!("{file}: ignored, without effect on a volume: {}", found.ignored.join(" "));
        }
        for FileJob { job, target, line, .. } in found.jobs {
            if let Some(Err(error)) = target.as_deref().map(str::parse::<Spec>) {
                return Err(Failure::request(format!("{file}:{line}: job {}: {error}", job.name)));
            }
            jobs.push((job, target));
        }
    }
    Ok(jobs)
}

/// Reads a job file, up to a maximum length, because a disk image may be given by mistake.
fn read_job_file(file: &str) -> Result<String, Failure> {
    let mut content = Vec::new();
    let read = regular::open(file).and_then(|opened| opened.take(MAX_JOB_FILE + 1).read_to_end(&mut content));
    let length = read.map_err(|error| {
        Failure::request(format!("{file}: neither a volume, such as mem:1g, nor a job file: {error}"))
    })?;
    let text = String::from_utf8(content).ok().filter(|text| !text.contains('\0'));
    text.filter(|_| length as u64 <= MAX_JOB_FILE).ok_or_else(|| {
        Failure::request(format!(
            "{file}: is not a fio job file; to measure it as a volume, write file:{file}"
        ))
    })
}

/// Combines every job with every value of an option.
fn combine(jobs: &[Job], key: &str, values: &[String]) -> Result<Vec<Job>, Failure> {
    if values.is_empty() {
        return Ok(jobs.to_vec());
    }
    let mut combined = Vec::new();
    // In fio, such a list has the block sizes of reads, writes and discards.
    let apart = |value: &'_ String| if key == "bs" { vec![value.clone()] } else { split_list(value) };
    for value in values.iter().flat_map(apart) {
        for job in jobs {
            let mut job = job.clone();
            set(&mut job, key, Some(&value))?;
            combined.push(job);
        }
    }
    Ok(combined)
}

fn set(job: &mut Job, key: &str, value: Option<&str>) -> Result<(), Failure> {
    value.map_or(Ok(()), |value| job.set(key, value)).map_err(|error| wrong_option(&error))
}

fn split_list(values: &str) -> Vec<String> {
    values.split(',').map(|value| value.trim().to_owned()).collect()
}

/// The error for an invalid option.
pub(super) fn wrong_option(error: &JobError) -> Failure {
    Failure::request(match error {
        JobError::BadValue { key: "bs", value, why } if value.contains(',') => {
            format!("--bs {value}: {why}; to measure several sizes, give --bs several times")
        }
        JobError::BadValue { key, value, why } => format!("--{key} {value}: {why}"),
        JobError::Option(text) => format!("--{text}"),
    })
}

/// A job with the requested times.
pub(super) fn times(args: &BenchArgs) -> Result<Job, Failure> {
    let (runtime_ms, ramp_time_ms) = if args.is_quick() {
        (QUICK_RUNTIME_MS, QUICK_RAMP_MS)
    } else {
        (DEFAULT_RUNTIME_MS, DEFAULT_RAMP_MS)
    };
    let mut job = Job { runtime_ms, ramp_time_ms, ..Job::default() };
    set(&mut job, "runtime", args.runtime.as_deref())?;
    set(&mut job, "ramp_time", args.ramp_time.as_deref())?;
    Ok(job)
}

/// The maximum length of a job file, in bytes.
const MAX_JOB_FILE: u64 = 1 << 20;
const DEFAULT_RUNTIME_MS: u64 = 1000;
const DEFAULT_RAMP_MS: u64 = 200;
const QUICK_RUNTIME_MS: u64 = 400;
const QUICK_RAMP_MS: u64 = 100;
