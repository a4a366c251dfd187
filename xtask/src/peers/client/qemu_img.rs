//! `qemu-img bench`, QEMU's own client.
//!
//! It runs for a number of I/O and not for a time, so a short run determines that number. It has no
//! random order; a stride that accesses every block of the volume replaces it.

use super::{Client, Measurement, MeasurementParameters};
use crate::peers::figures::Sample;
use crate::peers::machine::Side;
use crate::peers::matrix::Cell;
use crate::peers::server::ProgramOrigin;
use anyhow::{Context, Result};

/// `qemu-img bench URL`.
pub(crate) struct QemuImg;

impl Client for QemuImg {
    fn name(&self) -> &'static str {
        "qemu-img"
    }

    fn program(&self) -> ProgramOrigin {
        ProgramOrigin::Peer("qemu-img", "qemu-utils")
    }

    fn refuses(&self, cell: Cell) -> Option<&'static str> {
        (cell.numjobs > 1).then_some("qemu-img bench opens one connection")
    }

    fn measure(&self, parameters: &MeasurementParameters) -> Result<Measurement> {
        let (mut count, mut seconds) = (MIN_PROBE, self.run(parameters, MIN_PROBE)?);
        let mut ios = f64::from(count);
        // Starting up takes a part of the first milliseconds, so a quick run is followed by a
        // longer one.
        while seconds < MIN_PROBE_S && count < MAX_PROBE {
            count *= 10;
            seconds = self.run(parameters, count)?;
            ios += f64::from(count);
        }
        let count =
            (f64::from(count) * parameters.bench.runtime.as_secs_f64() / seconds).clamp(1.0, 1e9) as u32;
        let seconds = self.run(parameters, count)?;
        let sample = Sample { iops: f64::from(count) / seconds, ..Sample::default() };
        Ok(Measurement { sample, ios: ios + f64::from(count), ceilings: Vec::new() })
    }
}

impl QemuImg {
    /// Runs `count` I/O; returns the time in seconds.
    fn run(&self, parameters: &MeasurementParameters, count: u32) -> Result<f64> {
        let MeasurementParameters { bench, server, cell, .. } = parameters;
        let mut command = bench.command(Side::Client, &self.program().find(&bench.blockmux)?);
        command.args(["bench", "-f", "raw", "-c", &count.to_string(), "-d", &cell.iodepth.to_string()]);
        command.args(["-s", &cell.bs.to_string(), "-S", &stride(*cell, bench.size).to_string()]);
        if cell.rw.is_write() {
            command.args(["-w", "--pattern=165"]);
        }
        read_seconds(&bench.run(command.arg(&server.url))?)
    }
}

/// Distance from one I/O to the next, in bytes. For random patterns it is an odd number of blocks:
/// in a volume of 2^n blocks it accesses each block once before it accesses any again.
fn stride(cell: Cell, size: u64) -> u64 {
    let blocks = size / u64::from(cell.bs);
    let scattered = if cell.rw.is_random() { (blocks * 2 / 5) | 1 } else { 1 };
    scattered * u64::from(cell.bs)
}

fn read_seconds(text: &str) -> Result<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("Run completed in "));
    let seconds = line.and_then(|line| line.split(' ').next()?.parse::<f64>().ok());
    // qemu-img counts whole milliseconds, so a shorter time is 0.
    seconds.map(|seconds| seconds.max(0.001)).context("qemu-img bench printed no time")
}

const MIN_PROBE: u32 = 50;
const MAX_PROBE: u32 = 50_000;
const MIN_PROBE_S: f64 = 0.05;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::matrix::{Rw, whole};
    use std::collections::HashSet;

    #[test]
    fn the_time_is_read() {
        let text =
            "Sending 9 write requests, 4096 bytes each, 32 in parallel\nRun completed in 0.080 seconds.\n";
        assert_eq!(read_seconds(text).unwrap(), 0.08);
        assert_eq!(read_seconds("Run completed in 0.000 seconds.").unwrap(), 0.001);
        assert!(read_seconds("qemu-img: failed").is_err());
    }

    #[test]
    fn a_stride_reaches_every_block_and_is_accepted_by_qemu() {
        for cell in whole().into_iter().filter(|cell| cell.numjobs == 1) {
            let (size, bs) = (1_u64 << 30, u64::from(cell.bs));
            let stride = stride(cell, size);
            assert!(stride <= i32::MAX as u64);
            let offsets: HashSet<u64> = (0..size / bs).map(|nth| nth * stride % size).collect();
            assert_eq!(offsets.len() as u64, size / bs, "{}", cell.title());
            assert_eq!(stride == bs, matches!(cell.rw, Rw::Read | Rw::Write));
        }
    }
}
