//! Blockmux's own load generator, which also measures the ceiling: bare sockets with the protocol's
//! message sizes.

use super::{Client, Measurement, MeasurementParameters, SLEEPING, SPINNING};
use crate::peers::figures::Sample;
use crate::peers::machine::Side;
use crate::peers::matrix::fio_size;
use crate::peers::server::ProgramOrigin;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::fs;

/// `blockmux bench URL`.
pub(crate) struct Generator;

impl Client for Generator {
    fn name(&self) -> &'static str {
        "blockmux"
    }

    fn program(&self) -> ProgramOrigin {
        ProgramOrigin::Blockmux
    }

    fn measure(&self, parameters: &MeasurementParameters) -> Result<Measurement> {
        let MeasurementParameters { bench, server, cell, with_ceilings } = parameters;
        // The program pins its own threads: the load to the client's CPU, the two ends of the
        // ceiling to both CPUs.
        let mut command = bench.command(Side::Both, &bench.blockmux);
        command.arg("bench").arg(&server.url).args(["--rw", cell.rw.name(), "--bs", &fio_size(cell.bs)]);
        command.args(["--iodepth", &cell.iodepth.to_string(), "--numjobs", &cell.numjobs.to_string()]);
        // Without a ramp all I/O is counted, so the server's CPU time can be divided by it.
        command.args(["--runs", "1", "--ramp_time", "0", "--json"]);
        command.args(["--runtime", &format!("{:.3}", bench.runtime.as_secs_f64())]);
        let report = bench.dir_of("generator")?;
        // The report of the previous measurement, which this one would not overwrite.
        fs::remove_dir_all(&report).with_context(|| report.display().to_string())?;
        command.args(["--poll", server.server.poll, "--report"]).arg(report);
        if !with_ceilings {
            command.arg("--no_ceiling");
        }
        let mut found = read(&bench.run(&mut command)?)?;
        if let Some(network) = bench.network.as_ref().filter(|_| *with_ceilings) {
            found.ceilings = super::frame_echo::ceilings(parameters, network)?;
        }
        Ok(found)
    }
}

/// Parses the report of one run: one job for the server, and one for each ceiling.
fn read(text: &str) -> Result<Measurement> {
    let report: Value = serde_json::from_str(text).context("its report is not JSON")?;
    let jobs = report["jobs"].as_array().context("its report has no jobs")?;
    let (mut own, mut ceilings) = (None, Vec::new());
    for job in jobs {
        let row = &job["blockmux"];
        let figure = |name: &str| row["figures"][name]["median"].as_f64();
        let sample = Sample {
            iops: figure("iops").context("its report has no iops")?,
            mean_us: figure("latency_mean_us"),
            p99_us: figure("latency_p99_us"),
            server_us: figure("target_cpu_us_per_io"),
            others: 0.0,
        };
        match row["kind"].as_str() {
            Some("protocol") => {
                let run = &row["runs"][0];
                let ios = ["read", "write"].iter().filter_map(|side| run[side]["ios"].as_f64()).sum::<f64>();
                own = Some((sample, ios));
            }
            Some("ceilingsleeping") => ceilings.push((SLEEPING, sample)),
            Some("ceilingspinning") => ceilings.push((SPINNING, sample)),
            kind => bail!("its report has a row of kind {kind:?}"),
        }
    }
    let (sample, ios) = own.context("its report has no row for the server")?;
    Ok(Measurement { sample, ios, ceilings })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_the_server_and_both_ceilings() {
        let job = |kind: &str, iops: f64| {
            format!(
                r#"{{"blockmux":{{"kind":"{kind}","runs":[{{"read":{{"ios":7}},"write":{{"ios":2}}}}],
                "figures":{{"iops":{{"median":{iops}}},"latency_mean_us":{{"median":3.5}}}}}}}}"#
            )
        };
        let jobs = [job("protocol", 5.0), job("ceilingsleeping", 8.0), job("ceilingspinning", 9.0)];
        let found = read(&format!(r#"{{"jobs":[{}]}}"#, jobs.join(","))).unwrap();
        assert_eq!((found.sample.iops, found.sample.mean_us, found.sample.p99_us), (5.0, Some(3.5), None));
        assert_eq!(found.ios, 9.0);
        let ceilings: Vec<_> = found.ceilings.iter().map(|(name, sample)| (*name, sample.iops)).collect();
        assert_eq!(ceilings, [(SLEEPING, 8.0), (SPINNING, 9.0)]);
    }

    #[test]
    fn a_report_without_the_server_is_refused() {
        for (text, why) in [
            ("IOPS=5", "not JSON"),
            ("{}", "no jobs"),
            (r#"{"jobs":[]}"#, "no row for the server"),
            (r#"{"jobs":[{}]}"#, "no iops"),
        ] {
            let Err(error) = read(text) else { panic!("{text} is no report") };
            assert!(error.to_string().contains(why), "{error}");
        }
    }
}
