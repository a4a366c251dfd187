//! fio, with its I/O engine for the protocol.

use super::{Client, Measurement, MeasurementParameters};
use crate::peers::figures::Sample;
use crate::peers::machine::Side;
use crate::peers::matrix::fio_size;
use crate::peers::server::ProgramOrigin;
use anyhow::{Context, Result, bail};
use serde_json::Value;

/// `fio --ioengine=...`.
pub(crate) struct Fio {
    /// Options that name the engine and the server's URL.
    pub(crate) engine: fn(&str) -> Vec<String>,
}

impl Client for Fio {
    fn name(&self) -> &'static str {
        "fio"
    }

    fn program(&self) -> ProgramOrigin {
        ProgramOrigin::Peer("fio", "fio")
    }

    fn measure(&self, parameters: &MeasurementParameters) -> Result<Measurement> {
        let MeasurementParameters { bench, server, cell, .. } = parameters;
        let mut command = bench.command(Side::Client, &self.program().find(&bench.blockmux)?);
        command.args((self.engine)(&server.url));
        command.args(["--name=peers", "--output-format=json", "--group_reporting", "--time_based"]);
        command.args(["--randrepeat=0", "--norandommap"]);
        command.arg(format!("--rw={}", cell.rw.name())).arg(format!("--bs={}", fio_size(cell.bs)));
        command.arg(format!("--iodepth={}", cell.iodepth)).arg(format!("--numjobs={}", cell.numjobs));
        command.arg(format!("--size={}", bench.size));
        command.arg(format!("--runtime={}ms", bench.runtime.as_millis()));
        read(&bench.run(&mut command)?, cell.rw.is_write())
    }
}

/// Parses the report of one group of jobs. Lines before it are messages of the engine.
fn read(text: &str, is_write: bool) -> Result<Measurement> {
    let report = text.find('{').map(|start| &text[start..]).context("fio wrote no report")?;
    let report: Value = serde_json::from_str(report).context("fio's report is not JSON")?;
    let job = &report["jobs"][0];
    if job["error"].as_i64() != Some(0) {
        bail!("fio reports error {}", job["error"]);
    }
    let side = &job[if is_write { "write" } else { "read" }];
    let us = |value: &Value| value.as_f64().map(|ns| ns / 1e3);
    let sample = Sample {
        iops: side["iops"].as_f64().filter(|iops| *iops > 0.0).context("fio's report has no iops")?,
        mean_us: us(&side["lat_ns"]["mean"]),
        p99_us: us(&side["clat_ns"]["percentile"]["99.000000"]),
        ..Sample::default()
    };
    let ios = side["total_ios"].as_f64().context("fio's report has no total_ios")?;
    Ok(Measurement { sample, ios, ceilings: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_measured_direction_is_read() {
        let text = r#"fio: connected to NBD server
{"jobs":[{"error":0,"read":{"iops":0,"total_ios":0},"write":{"iops":65690.2,"total_ios":33502,
"lat_ns":{"mean":1921.5},"clat_ns":{"percentile":{"99.000000":15000}}}}]}"#;
        let found = read(text, true).unwrap();
        let sample = Sample { iops: 65690.2, mean_us: Some(1.9215), p99_us: Some(15.0), ..Sample::default() };
        assert_eq!((found.sample, found.ios), (sample, 33502.0));
        assert!(read(text, false).is_err());
    }

    #[test]
    fn a_failed_job_is_an_error() {
        let Err(error) = read(r#"{"jobs":[{"error":5,"read":{"iops":1,"total_ios":1}}]}"#, false) else {
            panic!("it failed");
        };
        assert_eq!(error.to_string(), "fio reports error 5");
    }
}
