//! Discovery controllers that other discovery controllers refer to (SUBTYPE 1 in the discovery log
//! page).
//!
//! Nearest first, each address once. Who refers to whom is the word of peers, who may as well name
//! each other or never come to an end: how many are asked, and how far away they may be, is
//! bounded.

use blockmux_engine::socket::Address;
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme_tcp::client::FoundSubsystem;
use blockmux_wire::nvmeof::fabrics::{SubsystemType, TransportType};
use std::collections::{HashSet, VecDeque};
use std::fmt::Display;
use std::net::IpAddr;

/// A discovery controller that has told what it knows.
pub(super) struct Site {
    pub(super) address: Address,
    pub(super) found: Vec<FoundSubsystem>,
    /// In its log page, beyond what is kept of one.
    pub(super) left_out: u64,
}

/// One that is to be asked.
struct Referral {
    address: Address,
    nqn: Nqn,
    /// How many have to be asked to hear of it.
    hops: u32,
}

/// That site and all that it leads to; `ask` has the one with that address and name tell what it
/// knows. Those that cannot be asked, and those that are too many or too far away, are a line of
/// the log each.
pub(super) fn follow<E: Display>(
    first: Site,
    mut ask: impl FnMut(&Address, &Nqn) -> Result<(Vec<FoundSubsystem>, u64), E>,
) -> Vec<Site> {
    let mut known = HashSet::from([first.address.clone()]);
    let (mut waiting, mut unasked) = (VecDeque::new(), 0_usize);
    let mut sites: Vec<Site> = Vec::new();
    let mut arrived = Some((first, 0));
    let mut asked = 0;
    loop {
        if let Some((site, hops)) = arrived.take() {
            for (address, nqn) in site.found.iter().filter_map(referral) {
                if !known.insert(address.clone()) {
                    continue;
                }
                if hops >= MAX_HOPS || asked + waiting.len() >= MAX_REFERRALS {
                    unasked += 1;
                } else {
                    waiting.push_back(Referral { address, nqn, hops: hops + 1 });
                }
            }
            sites.push(site);
        }
        let Some(Referral { address, nqn, hops }) = waiting.pop_front() else { break };
        asked += 1;
        match ask(&address, &nqn) {
            Ok((found, left_out)) => arrived = Some((Site { address, found, left_out }, hops)),
            Err(error) => tracing::warn!("referral: {error}"),
        }
    }
    if unasked > 0 {
        tracing::warn!("{unasked} referrals are too many or too far away and are not followed");
    }
    sites
}

/// Where an entry says that it is, if that is an IP address.
pub(super) fn address_of(found: &FoundSubsystem) -> Option<Address> {
    let (ip, port) = (found.address.parse::<IpAddr>().ok()?, found.service.parse().ok()?);
    (port > 0).then(|| Address::Tcp((ip, port).into()))
}

/// The discovery controller that an entry names, if it is another one that we can speak to.
fn referral(found: &FoundSubsystem) -> Option<(Address, Nqn)> {
    let is_for_us = TransportType(found.transport) == TransportType::TCP
        && SubsystemType(found.kind) == SubsystemType::REFERRAL;
    let address = address_of(found).filter(|_| is_for_us)?;
    Some((address, Nqn::new(&found.nqn)?))
}

/// How many are asked beside the first.
const MAX_REFERRALS: usize = 16;
/// How many have to be asked to hear of the last.
const MAX_HOPS: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(port: u16, kind: SubsystemType) -> FoundSubsystem {
        FoundSubsystem {
            nqn: "nqn.2014-08.org.nvmexpress.discovery".to_owned(),
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

    /// Who is asked, in order, where `named` says whom each names.
    fn asked(named: impl Fn(u16) -> Vec<u16>) -> Vec<u16> {
        let found = |port| named(port).into_iter().map(|port| entry(port, SubsystemType::REFERRAL)).collect();
        let mut asked = Vec::new();
        let first = Site { address: at(1), found: found(1), left_out: 0 };
        let sites = follow(first, |address, _| {
            let Address::Tcp(address) = address else { return Err("not by TCP") };
            asked.push(address.port());
            if address.port() == 404 { Err("does not answer") } else { Ok((found(address.port()), 0)) }
        });
        assert_eq!(sites.len(), 1 + asked.iter().filter(|port| **port != 404).count());
        asked
    }

    #[test]
    fn each_discovery_controller_is_asked_once_and_the_nearest_first() {
        let named = |port| match port {
            1 => vec![2, 404, 1, 3],
            2 => vec![1, 4, 2],
            3 => vec![4, 404, 0],
            _ => vec![1, 2, 3],
        };
        assert_eq!(asked(named), [2, 404, 3, 4]);
    }

    #[test]
    fn a_chain_and_a_crowd_of_referrals_come_to_an_end() {
        assert_eq!(asked(|port| vec![port + 1]), [2, 3, 4, 5]);
        assert_eq!(asked(|_| (1..1000).collect()), (2..=17).collect::<Vec<_>>());
        assert_eq!(asked(|port| (port * 10..port * 10 + 3).collect()).len(), MAX_REFERRALS);
    }

    #[test]
    fn what_is_no_referral_to_another_that_we_can_speak_to_is_none() {
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
