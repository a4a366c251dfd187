//! The ceiling of raw frames: an example of the crate `lab` at both ends of the veth pair, polling
//! and sleeping.

use super::{MeasurementParameters, SLEEPING, SPINNING};
use crate::peers::figures::Sample;
use crate::peers::group::Group;
use crate::peers::machine::Side;
use crate::peers::network::{Network, VETH};
use anyhow::{Context, Result};
use std::process::Stdio;

/// Measures both ceilings of a cell. The server is paused meanwhile, because it would receive every
/// frame.
///
/// # Errors
/// If the example fails.
pub(super) fn ceilings(
    parameters: &MeasurementParameters,
    network: &Network,
) -> Result<Vec<(&'static str, Sample)>> {
    parameters.server.pause();
    [(SLEEPING, None), (SPINNING, Some("--spin"))]
        .into_iter()
        .map(|(name, spin)| {
            Ok((name, Sample { iops: echo(parameters, network, spin)?, ..Sample::default() }))
        })
        .collect()
}

fn echo(parameters: &MeasurementParameters, network: &Network, spin: Option<&str>) -> Result<f64> {
    let MeasurementParameters { bench, cell, .. } = parameters;
    let program = bench.blockmux.with_file_name("examples").join("frame_echo");
    let mut server = bench.command(Side::Server, &program);
    server
        .args(["serve", VETH, "--size", &bench.size.to_string()])
        .args(spin)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let _server = Group::start(&mut server)?;
    let mut client = bench.command(Side::Client, &program);
    client.args(["client", VETH, "--mtu", &network.mtu.to_string(), "--bs", &cell.bs.to_string()]).args(spin);
    client.args(["--iodepth", &cell.iodepth.to_string()]);
    client.args(["--runtime_ms", &bench.runtime.as_millis().to_string()]);
    client.args(cell.rw.is_write().then_some("--write"));
    bench.run(&mut client)?.trim().parse().context("frame_echo printed no result")
}
