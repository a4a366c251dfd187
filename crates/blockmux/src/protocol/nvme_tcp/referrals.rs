//! Follows referrals between discovery controllers (SUBTYPE 1 in the discovery log page).
//!
//! Referrals are followed breadth-first, each address once. Discovery controllers may refer to each
//! other in circles or endlessly, so the number of referrals and of hops is bounded.

use blockmux_engine::net::socket::Address;
use blockmux_engine::net::zone;
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme_tcp::client::FoundSubsystem;
use blockmux_wire::nvmeof::fabrics::{SubsystemType, TransportType};
use std::collections::{HashSet, VecDeque};
use std::fmt::Display;

/// The log page of a discovery controller.
pub(super) struct DiscoveryLog {
    pub(super) address: Address,
    pub(super) found: Vec<FoundSubsystem>,
    /// Number of entries beyond the maximum that is kept.
    pub(super) left_out: u64,
}

/// A discovery controller that is still to be queried.
struct Referral {
    address: Address,
    nqn: Nqn,
    /// Number of referrals that lead to it.
    hops: u32,
}

/// Returns the first log page and those of all discovery controllers that it refers to, directly
/// and indirectly. `ask` queries a discovery controller by its address and name. Failures and
/// referrals beyond the limits are logged.
pub(super) fn follow<E: Display>(
    first: DiscoveryLog,
    mut ask: impl FnMut(&Address, &Nqn) -> Result<(Vec<FoundSubsystem>, u64), E>,
) -> Vec<DiscoveryLog> {
    let mut known = HashSet::from([first.address.clone()]);
    let (mut waiting, mut unasked) = (VecDeque::new(), 0_usize);
    let mut logs: Vec<DiscoveryLog> = Vec::new();
    let mut arrived = Some((first, 0));
    let mut asked = 0;
    loop {
        if let Some((log, hops)) = arrived.take() {
            for (address, nqn) in log.found.iter().filter_map(|found| referral(found, &log.address)) {
                if !known.insert(address.clone()) {
                    continue;
                }
                if hops >= MAX_HOPS || asked + waiting.len() >= MAX_REFERRALS {
                    unasked += 1;
                } else {
                    waiting.push_back(Referral { address, nqn, hops: hops + 1 });
                }
            }
            logs.push(log);
        }
        let Some(Referral { address, nqn, hops }) = waiting.pop_front() else { break };
        asked += 1;
        match ask(&address, &nqn) {
            Ok((found, left_out)) => arrived = Some((DiscoveryLog { address, found, left_out }, hops)),
            Err(error) => tracing::warn!("referral: {error}"),
        }
    }
    if unasked > 0 {
        tracing::warn!(
            "{unasked} referrals were not followed: the limit is {MAX_REFERRALS} discovery controllers and {MAX_HOPS} hops"
        );
    }
    logs
}

/// The address of an entry in the log page of the controller at `asked`; `None` if it is not an IP
/// address.
pub(super) fn address_of(found: &FoundSubsystem, asked: &Address) -> Option<Address> {
    let (ip, port) = (zone::answered_ip(&found.address)?, found.service.parse().ok()?);
    (port > 0).then(|| Address::Tcp(asked.complete((ip, port).into())))
}

/// The discovery controller of a referral entry over TCP; `None` for other entries.
fn referral(found: &FoundSubsystem, asked: &Address) -> Option<(Address, Nqn)> {
    let is_tcp_referral = TransportType(found.transport) == TransportType::TCP
        && SubsystemType(found.kind) == SubsystemType::REFERRAL;
    let address = address_of(found, asked).filter(|_| is_tcp_referral)?;
    Some((address, found.nqn.clone()?))
}

/// Maximum number of discovery controllers that are queried after the first.
const MAX_REFERRALS: usize = 16;
/// Maximum number of consecutive referrals.
const MAX_HOPS: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(port: u16, kind: SubsystemType) -> FoundSubsystem {
        FoundSubsystem {
            nqn: Nqn::new("nqn.2014-08.org.nvmexpress.discovery"),
            transport: TransportType::TCP.0,
            kind: kind.0,
            address: "192.0.2.1".to_owned(),
            service: port.to_string(),
            needs_tls: false,
        }
    }

    fn at(port: u16) -> Address {
        Address::Tcp(([192, 0, 2, 1], port).into())
    }

    /// The discovery controllers that are queried, in order; `named` gives the referrals of each.
    fn asked(named: impl Fn(u16) -> Vec<u16>) -> Vec<u16> {
        let found = |port| named(port).into_iter().map(|port| entry(port, SubsystemType::REFERRAL)).collect();
        let mut asked = Vec::new();
        let first = DiscoveryLog { address: at(1), found: found(1), left_out: 0 };
        let logs = follow(first, |address, _| {
            let Address::Tcp(address) = address else { return Err("not by TCP") };
            asked.push(address.port());
            if address.port() == 404 { Err("does not answer") } else { Ok((found(address.port()), 0)) }
        });
        assert_eq!(logs.len(), 1 + asked.iter().filter(|port| **port != 404).count());
        asked
    }

    #[test]
    fn each_discovery_controller_is_queried_once_and_the_nearest_first() {
        let named = |port| match port {
            1 => vec![2, 404, 1, 3],
            2 => vec![1, 4, 2],
            3 => vec![4, 404, 0],
            _ => vec![1, 2, 3],
        };
        assert_eq!(asked(named), [2, 404, 3, 4]);
    }

    #[test]
    fn the_number_of_hops_and_of_referrals_is_limited() {
        assert_eq!(asked(|port| vec![port + 1]), [2, 3, 4, 5]);
        assert_eq!(asked(|_| (1..1000).collect()), (2..=17).collect::<Vec<_>>());
        assert_eq!(asked(|port| (port * 10..port * 10 + 3).collect()).len(), MAX_REFERRALS);
    }

    #[test]
    fn an_entry_without_a_zone_is_on_the_link_of_its_log_page() {
        let asked = Address::Tcp("[fe80::2%7]:8009".parse().unwrap());
        for (written, meant) in [
            ("fe80::1", "[fe80::1%7]:4420"),
            ("fe80::1%eth0", "[fe80::1%7]:4420"),
            ("::", "[fe80::2%7]:4420"),
            ("0.0.0.0", "[fe80::2%7]:4420"),
            ("2001:db8::1", "[2001:db8::1]:4420"),
        ] {
            let entry =
                FoundSubsystem { address: written.to_owned(), ..entry(4420, SubsystemType::REFERRAL) };
            assert_eq!(referral(&entry, &asked).unwrap().0, Address::Tcp(meant.parse().unwrap()));
        }
    }

    #[test]
    fn other_entries_are_no_referrals() {
        let referral = |found: &FoundSubsystem| super::referral(found, &at(8009));
        assert_eq!(referral(&entry(8009, SubsystemType::REFERRAL)).unwrap().0, at(8009));
        assert!(referral(&entry(8009, SubsystemType::NVM)).is_none());
        assert!(referral(&entry(8009, SubsystemType::CURRENT_DISCOVERY)).is_none());
        let rdma = FoundSubsystem { transport: 1, ..entry(8009, SubsystemType::REFERRAL) };
        assert!(referral(&rdma).is_none());
        let named =
            FoundSubsystem { address: "storage.example".to_owned(), ..entry(8009, SubsystemType::REFERRAL) };
        assert!(referral(&named).is_none());
        assert!(referral(&entry(0, SubsystemType::REFERRAL)).is_none());
    }
}
