//! The figures of all reports, and the formatting of numbers and jobs.
//!
//! Table, JSON and page use these definitions, so a name means the same in all of them.

use crate::content::Verify;
use crate::job::{Job, Rw};
use crate::result::{Comparison, ConfigurationKind, Machine, Row, Run, Spread, UNKNOWN};

/// One figure of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    /// I/O per second.
    Iops,
    /// Payload in decimal megabytes per second.
    MbPerSecond,
    /// Mean completion latency in microseconds.
    Mean,
    /// A percentile of completion latency in microseconds, given in hundredths of a per cent: 9990
    /// is p99.9.
    Percentile(u16),
    /// Largest completion latency in microseconds.
    Max,
    /// CPU time of the target for each I/O, in microseconds.
    TargetCpu,
    /// CPU time of the initiator for each I/O, in microseconds.
    InitiatorCpu,
    /// System time of the target for each I/O, in microseconds.
    TargetSystem,
    /// System time of the initiator for each I/O, in microseconds.
    InitiatorSystem,
    /// Percent of one CPU, both sides together, for each Gbit/s of payload.
    CpuPerGbit,
    /// CPU time of the whole machine for each I/O, in microseconds.
    MachineCpu,
    /// Percent of one CPU, of the whole machine, for each Gbit/s of payload.
    MachinePerGbit,
}

impl Figure {
    /// The median of completion latency.
    pub const P50: Figure = Figure::Percentile(5000);
    /// The 99th percentile of completion latency.
    pub const P99: Figure = Figure::Percentile(9900);
    /// The 99.9th percentile of completion latency.
    pub const P999: Figure = Figure::Percentile(9990);

    /// The figure's key in JSON, unit last.
    #[must_use]
    pub fn key(self) -> String {
        match self {
            Figure::Iops => "iops".into(),
            Figure::MbPerSecond => "mb_per_s".into(),
            Figure::Mean => "latency_mean_us".into(),
            Figure::Percentile(at) => format!("latency_p{}_us", f64::from(at) / 100.0),
            Figure::Max => "latency_max_us".into(),
            Figure::TargetCpu => "target_cpu_us_per_io".into(),
            Figure::InitiatorCpu => "initiator_cpu_us_per_io".into(),
            Figure::TargetSystem => "target_system_us_per_io".into(),
            Figure::InitiatorSystem => "initiator_system_us_per_io".into(),
            Figure::CpuPerGbit => "cpu_percent_per_gbit_s".into(),
            Figure::MachineCpu => "machine_cpu_us_per_io".into(),
            Figure::MachinePerGbit => "machine_cpu_percent_per_gbit_s".into(),
        }
    }

    /// The figure of one run; `None` where it was not measured or is meaningless.
    #[must_use]
    pub fn of(self, kind: ConfigurationKind, run: &Run) -> Option<f64> {
        let us = |ns: u64| ns as f64 / 1e3;
        let per_io = |cpu_ns: Option<u64>| match (cpu_ns, run.ios()) {
            (Some(cpu_ns), ios) if ios > 0 => Some(us(cpu_ns) / ios as f64),
            _ => None,
        };
        match self {
            Figure::Iops => Some(run.iops()),
            Figure::MbPerSecond => Some(run.bytes_per_second() / 1e6),
            Figure::Mean => run.mean_ns().map(|ns| ns / 1e3),
            Figure::Percentile(at) => run.percentile_ns(f64::from(at) / 100.0).map(us),
            Figure::Max => run.max_ns().map(us),
            Figure::TargetCpu => per_io(run.target_cpu_ns),
            Figure::InitiatorCpu => per_io(run.initiator_cpu_ns),
            Figure::TargetSystem => per_io(run.target_system_ns),
            Figure::InitiatorSystem => per_io(run.initiator_system_ns),
            Figure::CpuPerGbit => cpu_per_gbit(kind, run),
            Figure::MachineCpu => per_io(run.machine_cpu_ns),
            Figure::MachinePerGbit => percent_per_gbit(run.machine_cpu_ns?, run),
        }
    }
}

impl Row {
    /// Median, minimum and maximum of a figure over the runs.
    #[must_use]
    pub fn figure(&self, figure: Figure) -> Option<Spread> {
        self.spread(|run| figure.of(self.kind, run))
    }

    /// The median of a figure over the runs.
    #[must_use]
    pub fn median(&self, figure: Figure) -> Option<f64> {
        self.figure(figure).map(|spread| spread.median)
    }
}

/// Labels of rows: the configuration, with volume and polling policy where rows differ only in
/// those, and with the protocol where ceilings of several protocols are shown together.
#[derive(Clone, Copy, Debug)]
pub struct Labels {
    targets_differ: bool,
    polls_differ: bool,
    ceilings_differ: bool,
}

impl Labels {
    /// Determines what distinguishes the rows of a comparison.
    #[must_use]
    pub fn of(comparison: &Comparison) -> Labels {
        let rows = || comparison.rows.iter();
        // fio's own reports have no polling policy.
        let mut polls = rows().map(|row| &row.poll).filter(|poll| !poll.is_empty());
        let mut ceilings = rows().filter(|row| row.kind.is_ceiling()).map(|row| &row.protocol);
        let (poll, ceiling) = (polls.next(), ceilings.next());
        let twins = |a: &Row, b: &Row| {
            a.target != b.target
                && (&a.configuration, a.kind, &a.poll) == (&b.configuration, b.kind, &b.poll)
                && a.job.does_the_same_as(&b.job)
        };
        Labels {
            targets_differ: rows().enumerate().any(|(at, a)| rows().skip(at + 1).any(|b| twins(a, b))),
            polls_differ: polls.any(|other| Some(other) != poll),
            ceilings_differ: ceilings.any(|other| Some(other) != ceiling),
        }
    }

    /// The label of a row.
    #[must_use]
    pub fn label(&self, row: &Row) -> String {
        let verb = match row.kind {
            ConfigurationKind::CeilingSleeping => "sleeps",
            ConfigurationKind::CeilingSpinning => "spins",
            ConfigurationKind::Protocol | ConfigurationKind::Device if self.polls_differ => row.poll.as_str(),
            ConfigurationKind::Local | ConfigurationKind::Protocol | ConfigurationKind::Device => "",
        };
        let prefix = if row.kind.is_ceiling() && self.ceilings_differ { row.protocol.as_str() } else { "" };
        let is_named =
            row.kind.is_ceiling() || row.kind == ConfigurationKind::Device || row.configuration == row.target;
        let target = if self.targets_differ && !is_named { row.target.as_str() } else { "" };
        // A merged report's directory comes last: "ceiling sleeps (before)".
        let (configuration, from) = match row.configuration.split_once(" (") {
            Some((configuration, _)) if row.kind.is_ceiling() => {
                (configuration, row.configuration[configuration.len()..].trim_start())
            }
            _ => (row.configuration.as_str(), ""),
        };
        let words = [prefix, configuration, target, verb, from];
        words.into_iter().filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
    }
}

/// Shortens text to `most` characters by removing the middle, since both ends of a URL and the
/// policy after it distinguish rows.
#[must_use]
pub fn shortened(text: &str, most: usize) -> String {
    let count = text.chars().count();
    if count <= most {
        return text.to_owned();
    }
    let tail = most * 2 / 5;
    let head = most.saturating_sub(tail + 1);
    let mut short: String = text.chars().take(head).collect();
    short.push('…');
    short.extend(text.chars().skip(count - tail));
    short
}

/// A count with three significant digits and a decimal suffix: 999, 14.2k, 412k, 1.62M.
#[must_use]
pub fn count(value: f64) -> String {
    // The next unit is used as soon as rounding to three digits would reach it.
    let units = [(1e9, "G"), (1e6, "M"), (1e3, "k")];
    for (unit, suffix) in units {
        if value >= unit * 0.9995 {
            return format!("{}{suffix}", three_digits(value / unit));
        }
    }
    if value.fract() == 0.0 { format!("{value:.0}") } else { three_digits(value) }
}

/// A measure with three significant digits, whole up to five digits: 0.85, 76.9, 182, 28100, 412k.
#[must_use]
pub fn measure(value: f64) -> String {
    if value >= 99_999.5 { count(value) } else { three_digits(value) }
}

/// A fraction in percent: 86%, and 8.4% below ten.
#[must_use]
pub fn percent(fraction: f64) -> String {
    let percent = fraction * 100.0;
    if percent < 9.95 { format!("{percent:.1}%") } else { format!("{percent:.0}%") }
}

/// Bytes in the largest binary unit that divides them: 4 KiB, 1 MiB, 513 B.
#[must_use]
pub fn bytes(bytes: u64) -> String {
    let units = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    let whole = units.into_iter().find(|&(unit, _)| bytes > 0 && bytes.is_multiple_of(unit));
    whole.map_or_else(|| format!("{bytes} B"), |(unit, name)| format!("{} {name}", bytes / unit))
}

/// Description of a machine, without unknown parts: "AMD EPYC, 2 cores, 7.8 GiB, Linux 6.18.44, TCP
/// by cubic".
#[must_use]
pub fn machine(machine: &Machine) -> String {
    let Machine { cpu, cores, kernel, memory_bytes, congestion } = machine;
    let memory_gib = *memory_bytes as f64 / f64::from(1 << 30);
    let known = |text: &str| text != UNKNOWN && !text.is_empty();
    let parts = [
        known(cpu).then(|| cpu.clone()),
        (*cores > 0).then(|| format!("{cores} {}", if *cores == 1 { "core" } else { "cores" })),
        (*memory_bytes > 0).then(|| format!("{memory_gib:.1} GiB")),
        known(kernel).then(|| format!("Linux {kernel}")),
        known(congestion).then(|| format!("TCP by {congestion}")),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    if parts.is_empty() { "unknown machine".into() } else { parts.join(", ") }
}

/// Milliseconds as seconds: 2 s, 0.5 s.
#[must_use]
pub fn seconds(ms: u64) -> String {
    format!("{} s", ms as f64 / 1e3)
}

/// A pattern in words.
#[must_use]
pub fn pattern(rw: Rw) -> &'static str {
    match rw {
        Rw::Read => "sequential read",
        Rw::Write => "sequential write",
        Rw::RandRead => "random read",
        Rw::RandWrite => "random write",
        Rw::ReadWrite => "sequential read and write",
        Rw::RandRw => "random read and write",
        Rw::Trim => "sequential discard",
        Rw::RandTrim => "random discard",
    }
}

/// A job in words: "4 KiB random read, depth 32, 4 connections".
#[must_use]
pub fn title(job: &Job) -> String {
    format!("{} {}", bytes(u64::from(job.bs)), title_within_size(job))
}

/// A job in words without its block size.
#[must_use]
pub fn title_within_size(job: &Job) -> String {
    if let Some(program) = &job.program {
        // It counts the data of a rewrite once.
        let pattern = if job.rw == Rw::ReadWrite { "sequential rewrite" } else { pattern(job.rw) };
        return format!("{pattern}, {program}");
    }
    format!("{}, depth {}{}", pattern(job.rw), job.iodepth, modifiers(job))
}

/// What distinguishes a job from others of the same pattern, block size and depth; empty for a
/// plain one.
#[must_use]
pub fn modifiers(job: &Job) -> String {
    let mut words = String::new();
    let mut add = |word: String| {
        words.push_str(", ");
        words.push_str(&word);
    };
    if job.numjobs > 1 {
        add(format!("{} connections", job.numjobs));
    }
    if matches!(job.rw, Rw::ReadWrite | Rw::RandRw) {
        add(format!("{}% reads", job.rwmixread));
    }
    match job.verify {
        Some(Verify::Crc32c) => add("verified by CRC-32C".into()),
        Some(Verify::Pattern) => add("verified by pattern".into()),
        None => {}
    }
    if job.fua_every > 0 {
        add(format!("FUA every {}", job.fua_every));
    }
    if job.fsync_every > 0 {
        add(format!("flush every {}", job.fsync_every));
    }
    words
}

fn three_digits(value: f64) -> String {
    match value {
        0.0 => "0".into(),
        v if v < 9.995 => format!("{v:.2}"),
        v if v < 99.95 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

/// CPU time per Gbit/s. If one side was not measured, there is no figure, because half of the cost
/// would look like a cheap protocol. A local volume has only one side.
fn cpu_per_gbit(kind: ConfigurationKind, run: &Run) -> Option<f64> {
    let target_ns =
        if kind == ConfigurationKind::Local { run.target_cpu_ns.or(Some(0)) } else { run.target_cpu_ns };
    percent_per_gbit(target_ns? + run.initiator_cpu_ns?, run)
}

fn percent_per_gbit(cpu_ns: u64, run: &Run) -> Option<f64> {
    let bits = run.bytes() as f64 * 8.0;
    // (CPU ns / run ns * 100) / (bits / run ns): the duration cancels out.
    (bits > 0.0).then(|| cpu_ns as f64 * 100.0 / bits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::Direction;

    #[test]
    fn long_text_is_shortened_in_the_middle() {
        assert_eq!(shortened("nbd://127.0.0.1:10809/disk0 never", 28), "nbd://127.0.0.1:…disk0 never");
        assert_eq!(shortened("short", 5), "short");
        assert_eq!(shortened("longer", 5), "lo…er");
    }

    #[test]
    fn a_machine_is_described_by_its_known_properties() {
        let mut known = Machine {
            cpu: "Z80".into(),
            cores: 1,
            kernel: "6.1".into(),
            memory_bytes: 3 << 29,
            congestion: "cubic".into(),
        };
        assert_eq!(machine(&known), "Z80, 1 core, 1.5 GiB, Linux 6.1, TCP by cubic");
        (known.cpu, known.memory_bytes, known.congestion) = (UNKNOWN.into(), 0, UNKNOWN.into());
        assert_eq!(machine(&known), "1 core, Linux 6.1");
        (known.cores, known.kernel) = (0, String::new());
        assert_eq!(machine(&known), "unknown machine");
    }

    #[test]
    fn a_job_of_another_program_names_it_in_place_of_a_depth() {
        let job = Job { bs: 8192, program: Some("bonnie++ on XFS".into()), ..Job::default() };
        assert_eq!(title(&job), "8 KiB sequential read, bonnie++ on XFS");
        let rewrite = Job { rw: Rw::ReadWrite, ..job.clone() };
        assert_eq!(title(&rewrite), "8 KiB sequential rewrite, bonnie++ on XFS");
        assert_eq!(title(&Job { program: None, ..job }), "8 KiB sequential read, depth 1");
    }

    #[test]
    fn a_label_contains_only_properties_that_differ() {
        let row = |configuration: &str, kind, target: &str, poll: &str, protocol: &str| Row {
            configuration: configuration.into(),
            kind,
            protocol: protocol.into(),
            target: target.into(),
            poll: poll.into(),
            job: Job::default(),
            report: 0,
            runs: Vec::new(),
        };
        let labels = |rows: &[Row]| {
            let labels = Labels::of(&Comparison::of_rows(rows.to_vec()));
            rows.iter().map(|row| labels.label(row)).collect::<Vec<_>>()
        };
        let local = row("local", ConfigurationKind::Local, "mem:1g", "", "");
        let nbd = row("nbd", ConfigurationKind::Protocol, "mem:1g", "adaptive", "nbd");
        let url = row("nbd://h/x", ConfigurationKind::Protocol, "nbd://h/x", "adaptive", "nbd");
        let spins = row("ceiling", ConfigurationKind::CeilingSpinning, "", "", "nbd");
        let all = [local.clone(), nbd.clone(), url.clone(), spins.clone()];
        assert_eq!(labels(&all), ["local", "nbd", "nbd://h/x", "ceiling spins"]);
        let merged = Row { configuration: "ceiling (before)".into(), ..spins.clone() };
        assert_eq!(labels(&[merged]), ["ceiling spins (before)"]);
        let unix = Row { protocol: "nbd+unix".into(), ..spins.clone() };
        assert_eq!(labels(&[spins, unix]), ["nbd ceiling spins", "nbd+unix ceiling spins"]);
        let other = Row { target: "null:1g".into(), ..local.clone() };
        assert_eq!(labels(&[local, other, url.clone()]), ["local mem:1g", "local null:1g", "nbd://h/x"]);
        let never = Row { poll: "never".into(), ..nbd.clone() };
        let from_fio = Row { poll: String::new(), ..url.clone() };
        assert_eq!(labels(&[nbd.clone(), never]), ["nbd adaptive", "nbd never"]);
        assert_eq!(labels(&[nbd, from_fio]), ["nbd", "nbd://h/x"]);
    }

    #[test]
    fn counts_have_three_digits_and_a_suffix() {
        let shown = |value| count(value);
        assert_eq!([0.0, 7.0, 95.24, 999.4].map(shown), ["0", "7", "95.2", "999"]);
        assert_eq!([999.6, 14_213.0, 412_400.0].map(shown), ["1.00k", "14.2k", "412k"]);
        assert_eq!([999_600.0, 1.62e6, 2.5e9].map(shown), ["1.00M", "1.62M", "2.50G"]);
    }

    #[test]
    fn measures_fit_five_characters() {
        let shown = |value| measure(value);
        assert_eq!([0.0, 0.851, 9.996, 76.94, 182.3].map(shown), ["0", "0.85", "10.0", "76.9", "182"]);
        assert_eq!([1350.4, 28_100.0, 99_999.4, 412_000.0].map(shown), ["1350", "28100", "99999", "412k"]);
    }

    #[test]
    fn sizes_are_named_in_the_unit_that_divides_them() {
        assert_eq!([0, 513, 4096, 1 << 20, 3 << 30].map(bytes), ["0 B", "513 B", "4 KiB", "1 MiB", "3 GiB"]);
    }

    #[test]
    fn cpu_per_gbit_needs_both_sides_unless_there_is_only_one() {
        let read = Direction { ios: 1, bytes: 1_000_000_000 / 8, ..Direction::default() };
        // One second of CPU time for one Gbit.
        let run = Run { read, initiator_cpu_ns: Some(1_000_000_000), ..Run::default() };
        assert_eq!(Figure::CpuPerGbit.of(ConfigurationKind::Local, &run), Some(100.0));
        assert_eq!(Figure::CpuPerGbit.of(ConfigurationKind::Protocol, &run), None);
        let both = Run { target_cpu_ns: Some(500_000_000), ..run };
        assert_eq!(Figure::CpuPerGbit.of(ConfigurationKind::Protocol, &both), Some(150.0));
    }

    #[test]
    fn a_key_names_the_percentile_and_its_unit() {
        assert_eq!(Figure::P999.key(), "latency_p99.9_us");
        assert_eq!(Figure::P50.key(), "latency_p50_us");
    }
}
