//! fio's job files.
//!
//! ```text
//! ; a comment, as is anything after ; or #
//! [global]              options for all jobs below, until another [global]
//! filename=mem:1g
//! runtime=${SECONDS}    from the environment; empty if it is not set
//!
//! [random-read]         a job and its name
//! rw=randread
//! stonewall             a switch needs no value
//! ```
//! A file may contain the options of [`Job::set`] and:
//!
//! | option | effect |
//! |---|---|
//! | `filename`, `uri` | the volume or URL of a job; `\:` in a filename means `:`, and a plain `:` is accepted, too |
//! | `stonewall`, `wait_for_previous` | the job starts when all jobs before it have ended |
//! | `time_based` | accepted if on: jobs always run for `runtime` |
//! | `randrepeat` | if off, `randseed` differs in every run |
//! | `ioengine`, `direct`, `buffered`, `thread`, `group_reporting`, `invalidate`, `description`, `loops`, `percentile_list` | concern fio itself; accepted without effect |
//!
//! Any other option, including `include`, is an error with file, line and name, because a job that
//! silently differs from the file measures the wrong thing. For common options the error says what
//! to do instead.

use crate::job::Job;
use crate::options::{JOB_OPTIONS, JobError, parse_switch};
use blockmux_volume::text::printable;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

/// One section of a job file with the globals above it.
#[derive(Clone, Debug, PartialEq)]
pub struct FileJob {
    /// The job; its name is the section's unless the option `name` is given.
    pub job: Job,
    /// The volume or URL, if the file names one.
    pub target: Option<String>,
    /// Wait for the jobs before it. Without this fio starts a job together with the one before.
    pub stonewall: bool,
    /// The line of its section, from 1.
    pub line: usize,
}

/// An error in a job file, in one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}:{line}: {}", printable(file), printable(&fault.to_string()))]
pub struct JobFileError {
    /// The file's name, as given.
    pub file: String,
    /// The line, from 1; the last line if the error concerns the whole file.
    pub line: usize,
    /// The error.
    pub fault: Fault,
}

/// An error in a job file, without its place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// An option has an unknown name or an invalid value.
    #[error(transparent)]
    Option(#[from] JobError),
    /// An option precedes the first section.
    #[error("option `{0}` is before the first [section]; move it into one")]
    OutsideSection(String),
    /// A section has no closing bracket or no name.
    #[error("`{0}` is not a [section] with a name")]
    BadSection(String),
    /// There is no section besides `[global]`.
    #[error("the file has no job: give at least one [section] besides [global]")]
    NoJob,
}

/// Parses the job file `text`. `file` is its name for messages; `env` returns the value of an
/// environment variable.
///
/// # Errors
/// The first error.
pub fn parse(
    text: &str,
    file: &str,
    env: impl Fn(&str) -> Option<String>,
) -> Result<Vec<FileJob>, JobFileError> {
    let mut sections = Sections::default();
    let mut last = 0;
    for (line, raw) in (1..).zip(text.lines()) {
        last = line;
        let raw = without_comment(raw).trim();
        if !raw.is_empty() {
            sections.take(raw, line, &env).map_err(|fault| JobFileError {
                file: file.to_owned(),
                line,
                fault,
            })?;
        }
    }
    if sections.jobs.is_empty() {
        return Err(JobFileError { file: file.to_owned(), line: last, fault: Fault::NoJob });
    }
    Ok(sections.jobs)
}

/// State of the parser.
struct Sections {
    /// The options that the next job begins with.
    global: FileJob,
    jobs: Vec<FileJob>,
    section: SectionKind,
}

enum SectionKind {
    BeforeSections,
    Global,
    /// In the last job's section.
    Job,
}

impl Default for Sections {
    fn default() -> Sections {
        let global = FileJob { job: Job::default(), target: None, stonewall: false, line: 0 };
        Sections { global, jobs: Vec::new(), section: SectionKind::BeforeSections }
    }
}

impl Sections {
    fn take(&mut self, text: &str, line: usize, env: &impl Fn(&str) -> Option<String>) -> Result<(), Fault> {
        if text.starts_with('[') {
            return self.begin(text, line);
        }
        let (key, value) = text.split_once('=').unwrap_or((text, ""));
        let (key, value) = (key.trim(), expand(value.trim(), env));
        let section = match self.section {
            SectionKind::BeforeSections => return Err(Fault::OutsideSection(key.to_owned())),
            SectionKind::Global => &mut self.global,
            // A job was pushed when its section began.
            SectionKind::Job => self.jobs.last_mut().unwrap_or(&mut self.global),
        };
        Ok(section.set(key, &value)?)
    }

    fn begin(&mut self, text: &str, line: usize) -> Result<(), Fault> {
        let name = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).map(str::trim);
        let name = name.filter(|name| !name.is_empty()).ok_or_else(|| Fault::BadSection(text.to_owned()))?;
        // fio compares only this many letters.
        if name.starts_with("global") {
            self.section = SectionKind::Global;
            return Ok(());
        }
        let mut job = FileJob { line, ..self.global.clone() };
        name.clone_into(&mut job.job.name);
        self.jobs.push(job);
        self.section = SectionKind::Job;
        Ok(())
    }
}

impl FileJob {
    fn set(&mut self, key: &str, value: &str) -> Result<(), JobError> {
        if JOB_OPTIONS.contains(&key) {
            return self.job.set(key, value);
        }
        if let Some(&(key, instead)) = UNSUPPORTED.iter().find(|(name, _)| *name == key) {
            return Err(JobError::Unsupported { key, instead });
        }
        let Some(&key) = FILE_OPTIONS.iter().chain(WITHOUT_EFFECT).find(|&&known| known == key) else {
            return Err(JobError::unknown(key, &[JOB_OPTIONS, FILE_OPTIONS, WITHOUT_EFFECT]));
        };
        let switch = || parse_switch(value).map_err(|why| JobError::bad_value(key, value, why));
        match key {
            "filename" | "uri" if value.is_empty() => {
                return Err(JobError::bad_value(key, value, "give a volume or a URL"));
            }
            "filename" => self.target = Some(value.replace("\\:", ":")),
            "uri" => self.target = Some(value.to_owned()),
            "stonewall" | "wait_for_previous" => self.stonewall = switch()?,
            "time_based" if !switch()? => {
                return Err(JobError::bad_value(key, value, "jobs always run for `runtime` here"));
            }
            "randrepeat" if !switch()? => self.job.randseed = RandomState::new().hash_one(()),
            _ => {}
        }
        Ok(())
    }
}

/// The text before the first `;` or `#`; fio has no way to quote them.
fn without_comment(line: &str) -> &str {
    line.split([';', '#']).next().unwrap_or(line)
}

/// Expands variables `${NAME}`, once: the values are not expanded again. A variable without a
/// closing bracket is left unchanged.
fn expand(value: &str, env: &impl Fn(&str) -> Option<String>) -> String {
    let mut expanded = String::new();
    let mut rest = value;
    while let Some((before, behind)) = rest.split_once("${") {
        let Some((name, after)) = behind.split_once('}') else {
            break;
        };
        expanded.push_str(before);
        expanded.push_str(&env(name).unwrap_or_default());
        rest = after;
    }
    expanded.push_str(rest);
    expanded
}

/// Options that only files have, and that have an effect or restrict their values.
const FILE_OPTIONS: &[&str] =
    &["filename", "uri", "stonewall", "wait_for_previous", "time_based", "randrepeat"];

/// Options of fio without effect here.
const WITHOUT_EFFECT: &[&str] = &[
    "ioengine",
    "direct",
    "buffered",
    "thread",
    "group_reporting",
    "invalidate",
    "description",
    "loops",
    "percentile_list",
];

/// Common options that are not supported, and what to do instead.
const UNSUPPORTED: &[(&str, &str)] = &[
    ("rate", "remove it, and measure the volume `rate:bw=SIZE:VOLUME`"),
    ("rate_iops", "remove it, and measure the volume `rate:iops=N:VOLUME`"),
    ("bssplit", "remove it, and give `bs`; write one job for each block size"),
    ("bsrange", "remove it, and give `bs`; write one job for each block size"),
    ("io_size", "remove it; a job ends after `runtime`"),
    ("number_ios", "remove it; a job ends after `runtime`"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{Rw, Verify};
    use proptest::prelude::*;

    fn read(text: &str) -> Result<Vec<FileJob>, String> {
        let env = |name: &str| match name {
            "SIZE" => Some("64k".to_owned()),
            "NESTED" => Some("${SIZE}".to_owned()),
            _ => None,
        };
        parse(text, "jobs.fio", env).map_err(|error| error.to_string())
    }

    #[test]
    fn globals_hold_for_the_jobs_below_them() {
        let text = "\
            # first line\n\
            ; second\n\
            [global]\n\
            ioengine=libaio ; fio's own business\n\
            rw = randread\n\
            iodepth=8\n\
            \n\
            [a]\n\
            \tbs=8k # trailing\n\
            [global]\n\
            iodepth=32\n\
            [b]\n\
            bs=16k\n\
            name=renamed\n";
        let jobs = read(text).unwrap();
        let got: Vec<_> = jobs
            .iter()
            .map(|file| (file.job.name.as_str(), file.job.bs, file.job.iodepth, file.line))
            .collect();
        assert_eq!(got, [("a", 8192, 8, 8), ("renamed", 16384, 32, 12)]);
        assert!(jobs.iter().all(|file| file.job.rw == Rw::RandRead));
    }

    #[test]
    fn a_message_is_one_line_for_any_content_of_the_file() {
        let error = read("[x]\nr\rw\x1b=read\n").unwrap_err();
        assert!(error.contains("`r\\rw\\u{1b}`"), "{error}");
    }

    #[test]
    fn a_job_does_not_change_the_next() {
        let jobs = read("[a]\nbs=8k\nverify=crc32c\nstonewall\n[b]\n").unwrap();
        assert_eq!((jobs[0].job.verify, jobs[0].stonewall), (Some(Verify::Crc32c), true));
        assert_eq!(jobs[1].job, Job { name: "b".into(), ..Job::default() });
        assert!(!jobs[1].stonewall);
    }

    #[test]
    fn switches_need_no_value() {
        let jobs =
            read("[global]\nthread\ngroup_reporting\ntime_based\n[a]\nnorandommap\nwait_for_previous\n")
                .unwrap();
        assert!(jobs[0].job.norandommap && jobs[0].stonewall);
        assert!(!read("[global]\nstonewall\n[a]\nstonewall=0").unwrap()[0].stonewall);
    }

    #[test]
    fn variables_come_from_the_environment_once() {
        let jobs = read("[a]\nsize=${SIZE}\nfilename=${NESTED}-${UNSET}x${SIZE\n").unwrap();
        assert_eq!(jobs[0].job.size.unwrap().to_string(), "65536");
        assert_eq!(jobs[0].target.as_deref(), Some("${SIZE}-x${SIZE"));
    }

    #[test]
    fn a_filename_or_uri_names_the_volume() {
        let target = |line: &str| read(&format!("[a]\n{line}\n")).unwrap()[0].target.clone().unwrap();
        assert_eq!(target("filename=mem:1g"), "mem:1g");
        assert_eq!(target("filename=nbd\\://h\\:1/x"), "nbd://h:1/x");
        assert_eq!(target("uri=nbd+unix:///x?socket=/s"), "nbd+unix:///x?socket=/s");
        assert_eq!(read("[a]").unwrap()[0].target, None);
    }

    #[test]
    fn an_error_is_one_line_with_file_line_and_name() {
        for (text, start) in [
            ("[a]\n\nfoo=1\n", "jobs.fio:3: unknown fio option `foo`; known are name rw "),
            ("[a]\niodpeth=1", "jobs.fio:2: unknown fio option `iodpeth`, did you mean `iodepth`?"),
            ("[a]\nfile_name=x", "jobs.fio:2: unknown fio option `file_name`, did you mean `filename`?"),
            ("[a]\nrate_iops=100", "jobs.fio:2: fio option `rate_iops` is not supported: remove it, and "),
            ("[a]\ninclude other.fio", "jobs.fio:2: unknown fio option `include other.fio`; known are "),
            ("[global]\nbs=4q\n[a]", "jobs.fio:2: bad value `4q` for `bs`: a size ends in "),
            ("[a]\nbs", "jobs.fio:2: bad value `` for `bs`: not a number"),
            ("[a]\nsize=${UNSET}", "jobs.fio:2: bad value `` for `size`: not a number"),
            ("[a]\ntime_based=0", "jobs.fio:2: bad value `0` for `time_based`: jobs always run"),
            ("[a]\nstonewall=no", "jobs.fio:2: bad value `no` for `stonewall`: a switch is 0 or 1"),
            ("[a]\nfilename=", "jobs.fio:2: bad value `` for `filename`: give a volume or a URL"),
            ("bs=4k\n[a]", "jobs.fio:1: option `bs` is before the first [section]"),
            ("[a\n", "jobs.fio:1: `[a` is not a [section] with a name"),
            ("[ ]\n", "jobs.fio:1: `[ ]` is not a [section] with a name"),
            ("[global]\nbs=4k\n", "jobs.fio:2: the file has no job"),
            ("", "jobs.fio:0: the file has no job"),
        ] {
            let fault = read(text).unwrap_err();
            assert!(fault.starts_with(start) && !fault.contains('\n'), "{fault}");
        }
    }

    #[test]
    fn options_for_fio_alone_are_accepted_without_effect() {
        let lines: Vec<String> = WITHOUT_EFFECT.iter().map(|key| format!("{key}=1\n")).collect();
        let jobs = read(&format!("[a]\n{}randrepeat=1\n", lines.concat())).unwrap();
        assert_eq!(jobs[0].job, Job { name: "a".into(), ..Job::default() });
    }

    #[test]
    fn offsets_differ_between_runs_without_randrepeat() {
        let seed = |text| read(text).unwrap()[0].job.randseed;
        assert_ne!(seed("[a]\nrandrepeat=0"), seed("[a]\nrandrepeat=0"));
        assert_eq!(seed("[a]\nrandrepeat=1"), seed("[a]"));
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "(\\[[a-z]{0,2}\\]?|\\PC{0,6}=|\\$\\{|[a-z]{2,8}|=|\n|#|;|\\PC){0,30}") {
            let _ = read(&text);
        }
    }
}
