//! Clients: programs that put load on a server and measure one cell at a time.

mod fio;
mod frame_echo;
mod generator;
mod iscsi_perf;
mod qemu_img;

use super::bench::Bench;
use super::figures::Sample;
use super::matrix::Cell;
use super::server::{ProgramOrigin, Running};
use anyhow::Result;

pub(crate) use fio::Fio;
pub(crate) use generator::Generator;
pub(crate) use iscsi_perf::IscsiPerf;
pub(crate) use qemu_img::QemuImg;

/// A program that puts load on a server.
pub(crate) trait Client {
    /// Name in tables and on the command line.
    fn name(&self) -> &'static str;

    fn program(&self) -> ProgramOrigin;

    /// The reason why it cannot measure the cell; `None` if it can.
    fn refuses(&self, _cell: Cell) -> Option<&'static str> {
        None
    }

    /// Measures one cell, once.
    ///
    /// # Errors
    /// If the program fails, or its output is not understood.
    fn measure(&self, parameters: &MeasurementParameters) -> Result<Measurement>;
}

/// Parameters of a measurement.
pub(crate) struct MeasurementParameters<'a> {
    pub(crate) bench: &'a Bench,
    pub(crate) server: &'a Running,
    pub(crate) cell: Cell,
    /// Also measure the bare sockets, if the client can.
    pub(crate) with_ceilings: bool,
}

/// Result of a measurement.
pub(crate) struct Measurement {
    /// The run, without CPU times of the server and of others, which the client cannot measure.
    pub(crate) sample: Sample,
    /// All I/O sent to the server in this measurement, measured or not.
    pub(crate) ios: f64,
    /// Bare sockets with the same message sizes: name and run.
    pub(crate) ceilings: Vec<(&'static str, Sample)>,
}

/// Name of the sleeping ceiling in the tables of servers.
pub(crate) const SLEEPING: &str = "ceiling, sleeping";
pub(crate) const SPINNING: &str = "ceiling, spinning";
