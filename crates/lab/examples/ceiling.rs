//! Prints the ceiling of this machine: the medians of several short runs of both variants,
//! alternating.
//!
//! `cargo run --release -p blockmux-lab --example ceiling [runs] [milliseconds] [tcp|unix]
//! [row...]`

use blockmux_lab::ceiling::{CeilingJob, DATA_BYTES, Data, MessageShape, Transport, Variant, run_over};
use blockmux_lab::job::{Job, Rw};
use blockmux_lab::result::Run;
use std::io::Write;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |nth: usize, default| args.get(nth).map_or(Ok(default), |text| text.parse::<u64>());
    let (runs, runtime_ms) = (number(0, 3)?, number(1, 500)?);
    let transport =
        if args.get(2).is_some_and(|word| word == "unix") { Transport::Unix } else { Transport::Tcp };
    let wanted = args.get(3..).unwrap_or_default();
    let pins = std::thread::available_parallelism()?.get() > 1;

    let data = Data::new(DATA_BYTES)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{:26} {:>9}  {:>34}  {:>34}", "", "", "sleeping", "spinning")?;
    let figures = "k IOPS    MB/s  mean us   p99 us  srv us  cli us";
    writeln!(out, "{:26} {figures}   {figures}", "")?;
    for (name, rw, bs, iodepth, numjobs) in ROWS {
        if !wanted.is_empty() && !wanted.iter().any(|word| name.contains(word.as_str())) {
            continue;
        }
        let job =
            Job { rw, bs, iodepth, numjobs, runtime_ms, ramp_time_ms: runtime_ms / 5, ..Job::default() };
        let mut found = [Vec::new(), Vec::new()];
        for _ in 0..runs {
            for (runs, variant) in found.iter_mut().zip([Variant::Sleeping, Variant::Spinning]) {
                let mut ceiling = CeilingJob::new(&job, SHAPE, variant);
                ceiling.transport = transport;
                if pins {
                    (ceiling.server_cpu, ceiling.client_cpu) = (Some(0), Some(1));
                }
                runs.push(run_over(&ceiling, &data)?);
            }
        }
        writeln!(out, "{name:26} {}   {}", show(&found[0]), show(&found[1]))?;
        out.flush()?;
    }
    Ok(())
}

/// Formats the medians over the runs.
fn show(runs: &[Run]) -> String {
    let median = |figure: &dyn Fn(&Run) -> f64| {
        let mut values: Vec<f64> = runs.iter().map(figure).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let latency =
        |run: &Run| if run.read.ios > 0 { run.read.latency.clone() } else { run.write.latency.clone() };
    let p99 = |run: &Run| {
        let latency = latency(run);
        latency.percentiles.iter().find(|(at, _)| *at == 99.0).map_or(0.0, |(_, ns)| *ns as f64 / 1e3)
    };
    let per_io = |cpu: Option<u64>, run: &Run| cpu.unwrap_or(0) as f64 / 1e3 / run.ios().max(1) as f64;
    format!(
        "{:6.1} {:7.0} {:8.1} {:8.1} {:7.2} {:7.2}",
        median(&|run| run.iops() / 1e3),
        median(&|run| run.bytes_per_second() / 1e6),
        median(&|run| latency(run).mean_ns / 1e3),
        median(&p99),
        median(&|run| per_io(run.target_cpu_ns, run)),
        median(&|run| per_io(run.initiator_cpu_ns, run)),
    )
}

/// 48 bytes each way, close to what all protocols need.
const SHAPE: MessageShape =
    MessageShape { read_request: 48, read_reply_head: 48, write_request_head: 48, write_reply: 48 };

const ROWS: [(&str, Rw, u32, u32, u32); 9] = [
    ("4k read QD1", Rw::RandRead, 4 << 10, 1, 1),
    ("4k read QD32", Rw::RandRead, 4 << 10, 32, 1),
    ("4k read QD128", Rw::RandRead, 4 << 10, 128, 1),
    ("4k read QD32 x4", Rw::RandRead, 4 << 10, 32, 4),
    ("4k write QD32", Rw::RandWrite, 4 << 10, 32, 1),
    ("4k write QD128", Rw::RandWrite, 4 << 10, 128, 1),
    ("64k read QD32", Rw::RandRead, 64 << 10, 32, 1),
    ("1m read QD8", Rw::Read, 1 << 20, 8, 1),
    ("1m write QD8", Rw::Write, 1 << 20, 8, 1),
];
