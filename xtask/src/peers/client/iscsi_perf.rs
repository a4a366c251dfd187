//! `iscsi-perf`, libiscsi's own load generator.
//!
//! It only reads, over one session, for whole seconds. Its counts are in blocks of the disk, which
//! have 512 bytes on every server here; this module checks that. Its random offsets are multiples
//! of 512 bytes and not of the I/O size.

use super::{Client, Measurement, MeasurementParameters};
use crate::peers::figures::Sample;
use crate::peers::machine::Side;
use crate::peers::matrix::Cell;
use crate::peers::server::ProgramOrigin;
use anyhow::{Context, Result, bail};

/// `iscsi-perf URL`.
pub(crate) struct IscsiPerf;

impl Client for IscsiPerf {
    fn name(&self) -> &'static str {
        "iscsi-perf"
    }

    fn program(&self) -> ProgramOrigin {
        ProgramOrigin::Peer("iscsi-perf", "libiscsi-bin")
    }

    fn refuses(&self, cell: Cell) -> Option<&'static str> {
        match cell {
            cell if cell.rw.is_write() => Some("iscsi-perf only reads"),
            cell if cell.numjobs > 1 => Some("iscsi-perf opens one session"),
            _ => None,
        }
    }

    fn measure(&self, parameters: &MeasurementParameters) -> Result<Measurement> {
        let MeasurementParameters { bench, server, cell, .. } = parameters;
        let mut command = bench.command(Side::Client, &self.program().find(&bench.blockmux)?);
        let seconds = bench.runtime.as_secs_f64().ceil();
        command.args(["-m", &cell.iodepth.to_string(), "-b", &(cell.bs / BLOCK_BYTES).to_string()]);
        command.args(["-t", &seconds.to_string()]);
        if cell.rw.is_random() {
            command.arg("-r");
        }
        let iops = read(&bench.run(command.arg(&server.url))?, cell.bs)?;
        let sample = Sample { iops, ..Sample::default() };
        Ok(Measurement { sample, ios: iops * seconds, ceilings: Vec::new() })
    }
}

/// Parses the average IOPS of the whole run, with I/O of `bs` bytes. The lines of progress in the
/// output overwrite each other.
fn read(text: &str, bs: u32) -> Result<f64> {
    if !text.contains(&format!("({bs} byte)")) {
        bail!("the disk's blocks do not have {BLOCK_BYTES} bytes");
    }
    if !text.contains("finished.") {
        bail!("iscsi-perf aborted the run");
    }
    let average = text.rsplit("iops average ").next().and_then(|rest| rest.split(' ').next());
    let iops = average.and_then(|number| number.parse::<f64>().ok()).filter(|iops| *iops > 0.0);
    iops.context("iscsi-perf printed no result")
}

const BLOCK_BYTES: u32 = 512;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::matrix::Rw;

    const RUN: &str = "iscsi-perf version 0.1\n\nFIXED transfer size of 8 blocks (4096 byte)\n\
        will run for 2 seconds.\n\n\r00:00:01 - lba 7, iops current 8676 (33 MB/s), iops average 8676 (33 MB/s), \
        in_flight 32, busy 0        \riops average 8921 (34 MB/s)        \n\nfinished.\n";

    #[test]
    fn the_average_of_the_whole_run_is_read() {
        assert_eq!(read(RUN, 4096).unwrap(), 8921.0);
    }

    #[test]
    fn a_run_with_other_blocks_or_that_ended_early_is_an_error() {
        let why = |text: &str, bs| read(text, bs).unwrap_err().to_string();
        assert_eq!(why(RUN, 512), "the disk's blocks do not have 512 bytes");
        assert_eq!(why(&RUN.replace("finished.", "ABORTED!"), 4096), "iscsi-perf aborted the run");
        assert!(why(&RUN.replace("average", "mean"), 4096).contains("printed no result"));
    }

    #[test]
    fn it_measures_only_reads_over_one_session() {
        let cell = |rw, numjobs| IscsiPerf.refuses(Cell::new(rw, 4096, 32, numjobs));
        assert_eq!(cell(Rw::RandRead, 1), None);
        assert!(cell(Rw::RandRead, 4).is_some() && cell(Rw::Write, 1).is_some());
    }
}
