//! A network namespace for servers and one for clients, joined by a veth pair, for protocols on raw
//! frames.
//!
//! The namespaces have names, so that programs can be started in them. A name contains the PID of
//! its creator. A comparison removes the namespaces of comparisons that were killed.

use super::machine::Side;
use crate::process::succeed;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::Command;

/// The namespaces of a comparison; removed when dropped.
pub(crate) struct Network {
    servers: String,
    clients: String,
    pub(crate) mtu: u32,
}

impl Network {
    /// Creates both namespaces and the veth pair.
    ///
    /// # Errors
    /// Without root, or without `ip`.
    pub(crate) fn new() -> Result<Network> {
        if !rustix::process::geteuid().is_root() {
            bail!("raw frames need network namespaces, which only root can create");
        }
        remove_stale()?;
        let name = |side| format!("{PREFIX}{}-{side}", std::process::id());
        let network = Network { servers: name("servers"), clients: name("clients"), mtu: 0 };
        for name in [&network.servers, &network.clients] {
            succeed(ip().args(["netns", "add", name])).context("cannot create a network namespace")?;
        }
        let pair = ["link", "add", VETH, "type", "veth", "peer", "name", VETH, "netns", &network.clients];
        succeed(ip().args(["-n", &network.servers]).args(pair)).context("cannot create a veth pair")?;
        Ok(network)
    }

    /// Sets the MTU of both ends.
    ///
    /// # Errors
    /// If `ip` fails.
    pub(crate) fn set_mtu(&mut self, mtu: u32) -> Result<()> {
        for name in [&self.servers, &self.clients] {
            succeed(ip().args(["-n", name, "link", "set", VETH, "mtu", &mtu.to_string(), "up"]))?;
        }
        self.mtu = mtu;
        Ok(())
    }

    /// Returns the command, changed to run in one side's namespace.
    pub(crate) fn within(&self, side: Side, command: &Command) -> Command {
        let name = if side == Side::Server { &self.servers } else { &self.clients };
        let mut within = ip();
        within.args(["netns", "exec", name]).arg(command.get_program()).args(command.get_args());
        within
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in [&self.servers, &self.clients] {
            // It may not exist.
            let _ = succeed(ip().args(["netns", "del", name]));
        }
    }
}

fn remove_stale() -> Result<()> {
    let all =
        succeed(ip().args(["netns", "list"])).context("network namespaces need `ip` (package iproute2)")?;
    let names = all.lines().filter_map(|line| line.split_whitespace().next());
    for name in names.filter(|name| owner(name).is_some_and(|pid| !is_alive(pid))) {
        succeed(ip().args(["netns", "del", name]))?;
    }
    Ok(())
}

/// PID of the process that created the namespace with this name.
fn owner(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok()
}

fn is_alive(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

fn ip() -> Command {
    Command::new("ip")
}

/// Name of the interface at both ends.
pub(crate) const VETH: &str = "veth";
const PREFIX: &str = "blockmux-peers-";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_namespaces_of_comparisons_have_an_owner() {
        assert_eq!(owner("blockmux-peers-71-servers"), Some(71));
        assert_eq!([owner("blockmux-71-0t"), owner("blockmux-peers-x-servers"), owner("vpn")], [None; 3]);
        assert!(is_alive(std::process::id()));
    }

    #[test]
    fn namespaces_of_a_killed_comparison_are_removed_by_the_next_one() {
        // No process has such a high number.
        let stale = format!("{PREFIX}{}-servers", u32::MAX);
        if !rustix::process::geteuid().is_root() || succeed(ip().args(["netns", "add", &stale])).is_err() {
            return println!("skipped: network namespaces need root");
        }
        let mut network = Network::new().unwrap();
        network.set_mtu(4608).unwrap();
        let there = |side| succeed(&mut network.within(side, ip().args(["link", "show", VETH]))).unwrap();
        assert!([Side::Server, Side::Client].map(there).iter().all(|text| text.contains("mtu 4608")));
        let names = [network.servers.clone(), stale];
        drop(network);
        let left = succeed(ip().args(["netns", "list"])).unwrap();
        assert!(names.iter().all(|name| !left.contains(name.as_str())), "{left}");
    }
}
