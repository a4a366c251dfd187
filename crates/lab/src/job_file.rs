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
//! | `filename`, `uri` | volume or URL of a job; `:` in a filename may be written as `\:` |
//! | `stonewall`, `wait_for_previous` | the job starts when all jobs before it have ended |
//! | `time_based` | accepted if on: jobs always run for `runtime` |
//! | `randrepeat` | if off, `randseed` differs in every run |
//! | `WITHOUT_EFFECT` | fio's process, logs or files; ignored, and listed in [`JobFile::ignored`] |
//!
//! Any other option, including `include`, is an error with file, line and name, because a job that
//! silently differs from the file measures the wrong thing. For options of fio that change the
//! workload, the error says what to do instead.

use crate::job::Job;
use crate::options::{JOB_OPTIONS, JobError, parse_switch};
use blockmux_volume::text::printable;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

/// The content of a job file.
#[derive(Clone, Debug, PartialEq)]
pub struct JobFile {
    /// The jobs, in the order of the file.
    pub jobs: Vec<FileJob>,
    /// The options of the file that have no effect on a volume, each once.
    pub ignored: Vec<&'static str>,
}

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
pub fn parse(text: &str, file: &str, env: impl Fn(&str) -> Option<String>) -> Result<JobFile, JobFileError> {
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
    Ok(JobFile { jobs: sections.jobs, ignored: sections.ignored })
}

/// State of the parser.
struct Sections {
    /// The options that the next job begins with.
    global: FileJob,
    jobs: Vec<FileJob>,
    ignored: Vec<&'static str>,
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
        Sections { global, jobs: Vec::new(), ignored: Vec::new(), section: SectionKind::BeforeSections }
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
        if let Some(key) = WITHOUT_EFFECT.iter().find_map(|words| find_word(words, key)) {
            if !self.ignored.contains(&key) {
                self.ignored.push(key);
            }
            return Ok(());
        }
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
        let (key, value) = equal_sizes(key, value).map_or((key, value), |size| ("bs", size));
        if JOB_OPTIONS.contains(&key) {
            return self.job.set(key, value);
        }
        if NEUTRAL.contains(&(key, value)) {
            return Ok(());
        }
        for (words, instead) in UNSUPPORTED {
            if let Some(key) = find_word(words, key) {
                return Err(JobError::unsupported(key, instead));
            }
        }
        let Some(&key) = FILE_OPTIONS.iter().find(|&&known| known == key) else {
            return Err(JobError::unknown(key, &[JOB_OPTIONS, FILE_OPTIONS]));
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

/// The block size that an option gives for all directions, or as both ends of a range.
fn equal_sizes<'a>(key: &str, value: &'a str) -> Option<&'a str> {
    let is_range = ["bsrange", "blocksize_range"].contains(&key) && value.contains('-');
    if !is_range && !["bs", "blocksize"].contains(&key) {
        return None;
    }
    let mut sizes = value.split([',', '-']).map(str::trim).filter(|size| !size.is_empty());
    let first = sizes.next()?;
    sizes.all(|size| size == first).then_some(first)
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

/// Options of fio that change nothing for a volume, as words: how its engines submit, its
/// processes, its logs and report, the files that it creates, and how it fills and checks blocks.
const WITHOUT_EFFECT: &[&str] = &[
    "ioengine direct buffered invalidate fixedbufs registerfiles hipri hipri_percentage sqthread_poll \
     sqthread_poll_cpu nonvectored uncached nowait force_async cmd_type userspace_reap io_submit_mode \
     serialize_overlap cmdprio cmdprio_percentage cmdprio_class cmdprio_bssplit write_hint \
     ioscheduler busy_poll md_per_io_size pi_act pi_chk apptag apptag_mask pool clientname rbdname \
     port hostname interface net_interface protocol proto nodelay ping_packets listen window_size mss \
     http_host http_user http_pass http_mode http_verbose http_s3_key http_s3_keyid http_s3_region https",
    "description loops thread new_group exitall exit_what exitall_on_error nice prio prioclass \
     priohint cpumask cpus_allowed cpus_allowed_policy numa_cpu_nodes numa_mem_policy uid gid cgroup \
     cgroup_weight cgroup_nodelete lockmem mem iomem iomem_align mem_align hugepage-size allrandrepeat \
     clocksource gtod_cpu job_start_clock_id random_generator softrandommap",
    "group_reporting unified_rw_reporting unit_base per_job_logs write_bw_log write_lat_log \
     write_iops_log write_hist_log log_entries log_avg_msec log_hist_msec log_hist_coarseness \
     log_window_value log_max_value log_offset log_prio log_issue_time log_compression \
     log_compression_cpus log_store_compressed log_alternate_epoch log_unix_epoch \
     log_alternate_epoch_clock_id block_error_percentiles bwavgtime iopsavgtime stats \
     clat_percentiles lat_percentiles slat_percentiles percentile_list significant_figures disk_util \
     gtod_reduce disable_lat disable_clat disable_slat disable_bw disable_bw_measurement write_iolog \
     ss_dur steadystate_duration ss_ramp steadystate_ramp_time ss_interval \
     steadystate_check_interval replay_align replay_scale replay_skip replay_time_scale comm",
    "directory filename_format unique_filename filesize nrfiles nr_files openfiles file_service_type \
     filetype file_append fill_device fill_fs fallocate fadvise_hint create_serialize create_fsync \
     create_on_open allow_file_create allow_mounted_write opendir lockfile pre_read overwrite \
     end_fsync end_syncfs fsync_on_close sync_file_range unlink unlink_each_loop",
    "do_verify verify_fatal verify_dump verify_async verify_async_cpus verify_backlog \
     verify_backlog_batch verify_interval verify_offset verify_state_save verify_state_load \
     verify_write_sequence verify_header_seed verifysort verifysort_nr experimental_verify \
     continue_on_error ignore_error error_dump refill_buffers scramble_buffers",
];

/// Values of options of the next list that change nothing.
const NEUTRAL: &[(&str, &str)] = &[
    ("rate", "0"),
    ("rate_iops", "0"),
    ("thinktime", "0"),
    ("kb_base", "1024"),
    ("zonemode", "none"),
    ("random_distribution", "random"),
    ("startdelay", "0"),
    ("percentage_random", "100"),
    ("bs_unaligned", "0"),
];

/// Options of fio that change the workload and are not supported, as words, and what to do instead.
const UNSUPPORTED: &[(&str, &str)] = &[
    ("rate rate_min ratemin", "remove it, and measure the volume `rate:bw=SIZE:VOLUME`"),
    ("rate_iops rate_iops_min", "remove it, and measure the volume `rate:iops=N:VOLUME`"),
    (
        "bssplit bsrange blocksize_range bs_unaligned blocksize_unaligned bs_is_seq_rand",
        "remove it, and give `bs`; write one job for each block size",
    ),
    ("io_size io_limit number_ios steadystate ss", "remove it; a job ends after `runtime`"),
    ("startdelay wait_for", "remove it; jobs run one after the other"),
    ("exec_prerun exec_postrun", "remove it, and run the command yourself"),
    ("kb_base", "remove it; units of sizes are powers of 1024"),
    ("readfua writefua", "remove it; `sync=1` makes every write FUA"),
    (
        "rw_sequencer iodepth_batch iodepth_batch_submit iodepth_batch_complete \
         iodepth_batch_complete_min iodepth_batch_complete_max iodepth_low offset_align num_range \
         blockalign ba write_barrier random_distribution random_sequence_stride percentage_random \
         percentage_sequential sprandom atomic verify_only ramp_size verify_policy verify_pattern \
         verify_pattern_interval trim_percentage trim_verify_zero trim_backlog trim_backlog_batch \
         read_iolog replay_redirect replay_no_stall zonemode zonesize zonecapacity zonerange zoneskip \
         zone_reset_threshold zone_reset_frequency max_open_zones job_max_open_zones read_beyond_wp fdp \
         dataplacement rwmixcycle thinktime thinktime_spin thinktime_blocks thinktime_blocks_type \
         thinktime_iotime thinkcycles rate_process rate_cycle ratecycle rate_ignore_thinktime \
         max_latency latency_target latency_window latency_percentile latency_run zero_buffers \
         buffer_pattern buffer_compress_percentage buffer_compress_chunk dedupe_percentage \
         dedupe_global dedupe_mode dedupe_working_set_percentage profile flow flow_id flow_watermark \
         flow_sleep create_only",
        "remove it; it would change the workload",
    ),
];

/// The word of a list that is `key`.
fn find_word(words: &'static str, key: &str) -> Option<&'static str> {
    words.split_whitespace().find(|&word| word == key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::content::Verify;
    use crate::job::Rw;
    use proptest::prelude::*;

    fn read(text: &str) -> Result<Vec<FileJob>, String> {
        let env = |name: &str| match name {
            "SIZE" => Some("64k".to_owned()),
            "NESTED" => Some("${SIZE}".to_owned()),
            _ => None,
        };
        parse(text, "jobs.fio", env).map(|file| file.jobs).map_err(|error| error.to_string())
    }

    #[test]
    fn values_that_change_nothing_are_accepted() {
        let same = "thinktime=0\nrate_iops=0\nzonemode=none\nrandom_distribution=random\nkb_base=1024\n";
        let files = "hugepage-size=2m\nallrandrepeat=1\nsteadystate_duration=10\nhttp_verbose=1\n";
        for size in ["bs=8k,8k", "bsrange=8k-8k", "blocksize_range=8k-8k,8k-8k"] {
            assert_eq!(read(&format!("[a]\nrw=read\n{same}{files}{size}\n")).unwrap()[0].job.bs, 8192);
        }
        for change in ["thinktime=1", "bsrange=4k-8k", "zonemode=zbd"] {
            assert!(read(&format!("[a]\nrw=read\n{change}\n")).is_err(), "{change}");
        }
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
            (
                "[a]\niodepth=8,16",
                "jobs.fio:2: bad value `8,16` for `iodepth`: a job has one value; write one ",
            ),
            ("[a]\nrw=read,write", "jobs.fio:2: bad value `read,write` for `rw`: a job has one value; "),
            ("[a]\nbs=4k,8k", "jobs.fio:2: bad value `4k,8k` for `bs`: give one block size; "),
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
    fn options_for_fio_alone_are_ignored_and_listed_once() {
        let known = || WITHOUT_EFFECT.iter().flat_map(|words| words.split_whitespace());
        let lines: Vec<String> = known().map(|key| format!("{key}=1\n")).collect();
        let text = format!("[global]\ndirect=1\n[a]\n{}randrepeat=1\n", lines.concat());
        let file = parse(&text, "jobs.fio", |_| None).unwrap();
        assert_eq!(file.jobs[0].job, Job { name: "a".into(), ..Job::default() });
        let sorted = |keys: &[&'static str]| {
            let mut keys = keys.to_vec();
            keys.sort_unstable();
            keys
        };
        assert_eq!(sorted(&file.ignored), sorted(&known().collect::<Vec<_>>()));
    }

    #[test]
    fn every_option_is_in_one_list() {
        let lists = WITHOUT_EFFECT.iter().chain(UNSUPPORTED.iter().map(|(words, _)| words));
        let words = lists.flat_map(|words| words.split_whitespace());
        let mut all: Vec<&str> = JOB_OPTIONS.iter().chain(FILE_OPTIONS).copied().chain(words).collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn an_option_of_fio_is_never_taken_for_a_typing_error() {
        for (words, instead) in UNSUPPORTED {
            for key in words.split_whitespace() {
                let fault = read(&format!("[a]\n{key}=1\n")).unwrap_err();
                assert_eq!(fault, format!("jobs.fio:2: fio option `{key}` is not supported: {instead}"));
            }
        }
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
