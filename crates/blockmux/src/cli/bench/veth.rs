//! Two network namespaces with a veth pair between them, whose MTU and speed the suites set.
//!
//! The namespaces have no names, so they end with the process, and several benches can run at the
//! same time. `ip` and `tc` configure the interfaces.

use crate::failure::Failure;
use blockmux_engine::attach::program;
use blockmux_engine::core::cores::Cores;
use blockmux_engine::net::namespace::Network;
use blockmux_lab::link::Link;
use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::process::Command;

/// The network namespaces of target and initiator.
pub(super) struct VethPair {
    networks: [Network; 2],
    /// Names of the interfaces in them.
    names: [String; 2],
}

/// Index of an end of a veth pair.
pub(super) type VethEnd = usize;

pub(super) const TARGET: VethEnd = 0;
pub(super) const INITIATOR: VethEnd = 1;
/// Name of the interface in a namespace that has no other.
const INTERFACE: &str = "veth";

impl VethPair {
    /// Creates the namespaces and the veth pair.
    ///
    /// # Errors
    /// If that is not permitted, or `ip` is not installed.
    pub(super) fn new() -> Result<VethPair, Failure> {
        let network = || {
            Network::new().map_err(|error| match error.kind() {
                ErrorKind::PermissionDenied => Failure::request(NEEDS),
                _ => Failure::request(format!("{NEEDS}: {error}")),
            })
        };
        let names = [INTERFACE, INTERFACE].map(str::to_owned);
        let veth = VethPair { networks: [network()?, network()?], names };
        veth.make().map_err(|why| Failure::request(format!("{NEEDS}: {why}")))?;
        for end in [TARGET, INITIATOR] {
            let address = format!("{}/30", veth.address(end));
            let words = ["addr", "add", &address, "dev", veth.interface(end)];
            veth.run(end, "ip", &words).map_err(Failure::run)?;
        }
        Ok(veth)
    }

    /// Creates a pair whose initiator is in the network of this process, for a driver that uses no
    /// other. Its interface there has no address. It ends with the namespace of the target.
    ///
    /// # Errors
    /// The message of the failed command.
    pub(super) fn with_own_network() -> Result<VethPair, String> {
        let failed = |error| format!("cannot create a network namespace: {error}");
        let networks = [Network::new().map_err(failed)?, Network::current().map_err(failed)?];
        let names = [INTERFACE.to_owned(), format!("bmx{}", std::process::id())];
        let veth = VethPair { networks, names };
        veth.make().map(|()| veth)
    }

    /// Creates the interfaces.
    fn make(&self) -> Result<(), String> {
        let there = self.networks[INITIATOR].path();
        let [name, peer] = &self.names;
        let there = there.to_string_lossy();
        let pair = ["link", "add", name, "type", "veth", "peer", "name", peer, "netns", &there];
        self.run(TARGET, "ip", &pair)?;
        [TARGET, INITIATOR]
            .into_iter()
            .try_for_each(|end| self.run(end, "ip", &["link", "set", self.interface(end), "up"]))
    }

    /// Name of the interface at one end.
    pub(super) fn interface(&self, end: VethEnd) -> &str {
        &self.names[end]
    }

    /// Sets MTU and speed.
    ///
    /// # Errors
    /// The message of the failed command.
    pub(super) fn set(&self, link: Link) -> Result<(), String> {
        for end in [TARGET, INITIATOR] {
            let name = self.interface(end);
            self.run(end, "ip", &["link", "set", name, "mtu", &link.mtu.to_string()])?;
            let at = |what| ["qdisc", what, "dev", name, "root"];
            match link.gbit_per_s {
                Some(rate) => {
                    let rate = format!("{rate}gbit");
                    let limit = ["tbf", "rate", &rate, "burst", BURST, "limit", LIMIT];
                    self.run(end, "tc", &[&at("replace")[..], &limit].concat())?;
                }
                // There may be no limit to remove, or no `tc`.
                None => drop(self.run(end, "tc", &at("del"))),
            }
        }
        Ok(())
    }

    /// Moves the cores of both sides to their namespaces.
    ///
    /// # Errors
    /// If a core cannot enter its namespace.
    pub(super) fn enter(&self, target: &Cores, initiator: &Cores) -> Result<(), String> {
        self.enter_at(TARGET, target).and_then(|()| self.enter_at(INITIATOR, initiator))
    }

    /// Moves the cores of one side to their namespace.
    ///
    /// # Errors
    /// If a core cannot enter it.
    pub(super) fn enter_at(&self, end: VethEnd, cores: &Cores) -> Result<(), String> {
        for nth in 0..cores.count() {
            let network = self.networks[end].clone();
            let entered = cores.ask(nth, move |_| network.enter()).ok_or("a core ended unexpectedly")?;
            entered.map_err(|error| format!("a core cannot enter its network namespace: {error}"))?;
        }
        Ok(())
    }

    /// Calls a function in the namespace of one end.
    ///
    /// # Errors
    /// If the namespace cannot be entered.
    pub(super) fn within<T: Send>(
        &self,
        end: VethEnd,
        work: impl FnOnce() -> T + Send,
    ) -> Result<T, Failure> {
        let done = self.networks[end].within(work);
        done.map_err(|error| Failure::run(format!("cannot enter a network namespace: {error}")))
    }

    /// The address of one end, from the range for documentation.
    pub(super) fn address(&self, end: VethEnd) -> Ipv4Addr {
        Ipv4Addr::new(192, 0, 2, 1 + end as u8)
    }

    fn run(&self, end: VethEnd, program: &str, words: &[&str]) -> Result<(), String> {
        match self.networks[end].within(|| program::run(Command::new(program).args(words))) {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(format!("`{program} {}` of iproute2: {error}", words.join(" "))),
            Err(error) => Err(format!("cannot enter a network namespace: {error}")),
        }
    }
}

const NEEDS: &str = "this suite measures over virtual links, which needs root and the program `ip`";
/// Burst of the token bucket filter: more than 10 Gbit/s transfer in a tick of the slowest clock.
const BURST: &str = "1mb";
/// Queue length of the token bucket filter: about that of a network adapter and a switch.
const LIMIT: &str = "4mb";
