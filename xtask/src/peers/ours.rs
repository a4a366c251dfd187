//! Blockmux as a server of any protocol: its start with each polling policy, and its goals relative
//! to other rows and to bare sockets.

use super::client::{Client, Generator, SLEEPING, SPINNING};
use super::figures::Rows;
use super::goals::{Bound, Goal};
use super::matrix::Cell;
use super::server::{Arguments, ProgramOrigin, Server, ServerParameters, Url};
use anyhow::Result;
use std::process::Command;

/// Blockmux with its defaults.
pub(crate) const BLOCKMUX: &str = "blockmux";
pub(crate) const ALWAYS: &str = "blockmux-always";
pub(crate) const NEVER: &str = "blockmux-never";
/// The name of its volume, which other servers use, too.
pub(crate) const EXPORT: &str = "disk0";

/// Blockmux with its defaults.
pub(crate) const fn adaptive(url: Url, arguments: Arguments) -> Server {
    Server {
        name: BLOCKMUX,
        program: ProgramOrigin::Blockmux,
        url,
        arguments,
        set_up: |_| Ok(Vec::new()),
        has_own_memory: true,
        is_daemon: false,
        poll: "adaptive",
        is_for_generator: false,
    }
}

/// Blockmux that never sleeps.
pub(crate) const fn always(url: Url, arguments: Arguments) -> Server {
    Server { name: ALWAYS, poll: "always", is_for_generator: true, ..adaptive(url, arguments) }
}

/// Blockmux that sleeps whenever it is idle.
pub(crate) const fn never(url: Url, arguments: Arguments) -> Server {
    Server { name: NEVER, poll: "never", is_for_generator: true, ..adaptive(url, arguments) }
}

/// Serves [`EXPORT`] from memory; `listen` is the option that names a protocol's listener.
pub(crate) fn serve(place: &ServerParameters, command: &mut Command, listen: &str) -> Result<()> {
    command.arg("serve").arg(format!("{EXPORT}=mem:{}", place.size));
    self::listen(place, command, listen);
    Ok(())
}

/// Adds the options of a listener and of its polling.
pub(crate) fn listen(place: &ServerParameters, command: &mut Command, listen: &str) {
    command.arg(listen).arg(format!("127.0.0.1:{}", place.port)).args(["--poll", place.poll]);
    if place.poll == "always" {
        // Each core uses a whole CPU: one is for the client.
        command.args(["--cores", "1"]);
    }
}

/// The goals of one cell, measured by our own generator.
pub(crate) struct CellGoals<'a> {
    rows: &'a Rows,
    cell: Cell,
    goals: Vec<Goal>,
}

impl<'a> CellGoals<'a> {
    pub(crate) fn new(rows: &'a Rows, cell: Cell) -> CellGoals<'a> {
        CellGoals { rows, cell, goals: Vec::new() }
    }

    /// Adds the ratio of two medians.
    pub(crate) fn add(&mut self, what: &str, bound: Bound, ours: Option<f64>, theirs: Option<f64>) {
        self.goals.push(Goal::ratio(format!("{}: {what}", self.cell.short()), bound, ours, theirs));
    }

    /// Shares of both ceilings, for servers with the same polling policy.
    pub(crate) fn add_shares_of_ceilings(&mut self) {
        let (always, spinning) = (self.iops(ALWAYS), self.iops(SPINNING));
        self.add("always, relative to spinning ceiling", Bound::AtLeast(0.85), always, spinning);
        let (never, sleeping) = (self.iops(NEVER), self.iops(SLEEPING));
        self.add("never, relative to sleeping ceiling", Bound::AtLeast(0.9), never, sleeping);
    }

    pub(crate) fn iops(&self, server: &str) -> Option<f64> {
        self.rows.iops(Generator.name(), server, self.cell)
    }

    /// CPU time of the server for each I/O, in microseconds.
    pub(crate) fn cpu(&self, server: &str) -> Option<f64> {
        self.rows.get(Generator.name(), server, self.cell)?.median(|sample| sample.server_us)
    }

    /// In the order in which they were added.
    pub(crate) fn all(self) -> Vec<Goal> {
        self.goals
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_core_that_never_sleeps_leaves_a_cpu_to_the_client() {
        let words = |poll| {
            let place =
                ServerParameters { dir: "/".into(), file: Path::new("f"), port: 34567, size: 1 << 20, poll };
            let mut command = Command::new("blockmux");
            serve(&place, &mut command, "--nbd").unwrap();
            format!("{command:?}").replace('"', "")
        };
        let usual = "blockmux serve disk0=mem:1048576 --nbd 127.0.0.1:34567 --poll";
        assert_eq!(words("never"), format!("{usual} never"));
        assert_eq!(words("always"), format!("{usual} always --cores 1"));
    }
}
