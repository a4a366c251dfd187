//! The places of `--max-connections`: those of peers that have proved nothing go to others.

use crate::allow::{connect_from, server};
use crate::daemon::Daemon;
use crate::raw_iscsi::RawIscsi;
use crate::raw_nvme::RawNvme;
use rustix::process::Signal;
use std::io::Read;
use std::net::SocketAddr;

const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";
const STRANGER: [u8; 4] = [127, 0, 0, 9];

/// A daemon with these options, and the URLs of its volume over iSCSI and NVMe/TCP.
fn serve(more: &[&str]) -> (Daemon, String, String) {
    let listeners = ["mem:1m", "--iscsi", "127.0.0.1:0", "--nvme-tcp", "127.0.0.1:0"];
    let daemon = Daemon::serve(&[&listeners, more].concat());
    let [iscsi, nvme] = ["iscsi", "nvme+tcp"].map(|scheme| daemon.urls_of(scheme).remove(0));
    (daemon, iscsi, nvme)
}

/// The output of the daemon after it has stopped.
fn stop(mut daemon: Daemon) -> String {
    daemon.signal(Signal::TERM);
    let mut said = String::new();
    daemon.stderr.read_to_string(&mut said).unwrap();
    assert_eq!(daemon.wait().code(), Some(0));
    said
}

fn discover(portal: SocketAddr) -> RawIscsi {
    RawIscsi::discover(connect_from(STRANGER, portal), "iqn.2026-11.test:stranger")
}

#[test]
fn idle_discoveries_make_room_for_logins_and_for_other_discoveries() {
    let (daemon, iscsi, nvme) = serve(&["--max-connections", "4"]);
    let portal = server(&iscsi);
    let mut iscsi_discoveries = [(); 2].map(|()| discover(portal));
    let nvme_discovery = || {
        let url = format!("nvme+tcp://{}/{DISCOVERY}/0", server(&nvme));
        RawNvme::admin(&url, "nqn.2026-11.test:stranger").unwrap()
    };
    let mut nvme_discoveries = [(); 2].map(|()| nvme_discovery());
    // Two hosts log in, with three connections.
    let mut initiator = RawIscsi::login(&iscsi, "iqn.2026-11.test:honest");
    let [_admin, mut queue] = RawNvme::controller(&nvme, "nqn.2026-11.test:honest.host");
    // One more discovery replaces the last of the others.
    let mut last = discover(portal);
    assert!(iscsi_discoveries.iter_mut().all(RawIscsi::is_closed));
    assert!(nvme_discoveries.iter_mut().all(|queue| queue.status().is_none()));
    assert_eq!(last.log_out(), 0);
    assert_eq!((initiator.access(), queue.write(0, &[1; 4096], false)), ([0, 0], 0));
    let said = stop(daemon);
    let reason = "logout: a new connection needs its share of --max-connections";
    assert_eq!(said.matches(reason).count(), 4, "{said}");
}

#[test]
fn discoveries_that_are_repeated_for_ever_leave_a_few_lines() {
    let (daemon, iscsi, _) = serve(&[]);
    let portal = server(&iscsi);
    for _ in 0..200 {
        drop(discover(portal));
    }
    let honest = RawIscsi::login(&iscsi, "iqn.2026-11.test:honest");
    drop(honest);
    let said = stop(daemon);
    let about_stranger = said.lines().filter(|line| line.contains("127.0.0.9")).count();
    assert!(about_stranger < 3 * 17 && said.contains("184 more like this"), "{said}");
    assert!(said.contains("initiator=\"iqn.2026-11.test:honest\""), "{said}");
}
