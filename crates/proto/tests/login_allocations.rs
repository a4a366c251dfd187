//! A login allocates the same whatever the number of units of its target.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

#[path = "../../volume/tests/counting/mod.rs"]
mod counting;

use blockmux_proto::driver::session::StreamSession;
use blockmux_proto::exports::{Export, Exports, VolumeId};
use blockmux_proto::fabrics::controller::node::NvmeNode;
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::{IscsiAccess, IscsiNode, Portal, TargetNode};
use blockmux_proto::iscsi::server::IscsiTargetSession;
use blockmux_proto::names::networks::AllowedNetworks;
use blockmux_proto::names::volume_uuid::VolumeUuid;
use blockmux_proto::nvme::nqn::Nqn;
use blockmux_proto::nvme::subsystem::{Namespace, Subsystem};
use blockmux_proto::nvme_tcp::server::NvmeTcpTargetSession;
use blockmux_proto::rdma::testing::Recorder;
use blockmux_proto::rdma::{Event, RdmaConnections, RdmaSession, WorkRequest};
use blockmux_proto::scsi::{LogicalUnit, Lun, ScsiTarget, TargetPort, UnitIdentity};
use blockmux_proto::srp::client::{SrpInitiatorConfig, SrpInitiatorSession, SrpSessionMode};
use blockmux_proto::srp::node::{SrpAccess, SrpNode, SrpPortId, SrpTarget};
use blockmux_proto::srp::server::SrpTargetSession;
use blockmux_volume::{Chunk, MemVolume, Pool};
use std::sync::Arc;
use std::time::Instant;

const NAME: &str = "iqn.2026-11.com.example:disk";
const PORT: SrpPortId = SrpPortId([2; 16]);
const MANY: u16 = 300;

/// Number of allocations and of their bytes in `act`.
fn allocations<T>(act: impl FnOnce() -> T) -> (T, (u64, u64)) {
    let before = (counting::of_this_thread(), counting::bytes_of_this_thread());
    let result = act();
    let after = (counting::of_this_thread(), counting::bytes_of_this_thread());
    (result, (after.0 - before.0, after.1 - before.1))
}

/// What the third of three logins allocates: the first ones fill what all share.
fn of_third_login<T>(mut log_in: impl FnMut() -> T) -> (u64, u64) {
    let [_first, _second, (_, third)] = [(); 3].map(|()| allocations(&mut log_in));
    third
}

fn target(name: &str, units: u16) -> ScsiTarget {
    let port = TargetPort { relative_id: 1, group: 1, name: name.into() };
    (0..units).fold(ScsiTarget::new(name, vec![port]), |target, number| {
        let unit = LogicalUnit::new(UnitIdentity::of(&number.to_string()), Arc::new(MemVolume::new(1 << 12)));
        target.with_unit(number, VolumeId(number.into()), unit)
    })
}

fn take(session: &mut impl StreamSession, bytes: &[u8]) -> Vec<u8> {
    assert_eq!(session.on_bytes(&Chunk::from_slice(bytes), Instant::now()), Ok(bytes.len()));
    session.outbox().take_bytes()
}

/// A login of iSCSI.
fn of_iscsi(units: u16) -> (u64, u64) {
    let access = vec![IscsiAccess { initiator: None, chap: None, target: Arc::new(target(NAME, units)) }];
    let portals = vec![Portal { address: "192.0.2.1:3260".parse().unwrap(), listener: 1, group_tag: 1 }];
    let node = Arc::new(IscsiNode::new(vec![TargetNode::new(Name::new(NAME).unwrap(), portals, access)]));
    let mut isid = 0;
    of_third_login(|| {
        isid += 1;
        let text = format!("InitiatorName=iqn.2026-11.com.example:me\0TargetName={NAME}\0");
        let mut login = vec![0x43, 0x87, 0, 0, 0, 0, 0, text.len() as u8, 0x80, 0, 0, 0, 0, isid, 0, 0];
        login.resize(48, 0);
        login.extend(text.bytes());
        login.resize(login.len().next_multiple_of(4), 0);
        let mut session =
            IscsiTargetSession::new(node.clone(), 1, Pool::new(16 << 20), [1; 32], Instant::now());
        let answer = take(&mut session, &login);
        assert_eq!((answer[0], answer[1], &answer[36..38]), (0x23, 0x87, &[0, 0][..]), "it is logged in");
        session
    })
}

/// A login of SRP.
fn of_srp(units: u16) -> (u64, u64) {
    let target = Arc::new(target(&PORT.name_string(), units));
    let port = target.ports().remove(0);
    let access = vec![SrpAccess { initiator: None, target }];
    let networks = AllowedNetworks::default();
    let node = Arc::new(SrpNode::new(vec![SrpTarget { id: PORT, port, access, networks }]));
    let mut initiator = 0;
    of_third_login(|| {
        initiator += 1;
        let config = SrpInitiatorConfig {
            initiator: SrpPortId([initiator; 16]),
            target: PORT,
            lun: Lun::new(0),
            mode: SrpSessionMode::Use,
            channels: 1,
            immediate_data: true,
        };
        let now = Instant::now();
        let private_data = SrpInitiatorSession::new(config, Pool::new(16 << 20), now).endpoint().private_data;
        let mut session = SrpTargetSession::new(node.clone(), Pool::new(16 << 20), Arc::new(|| {}), now);
        session.on_event(Event::Requested { private_data, reads: 32 }, now).unwrap();
        let answer = Recorder::default().next(&mut session, 1000);
        assert!(matches!(answer, Some(WorkRequest::Accept { .. })), "it is logged in");
        session
    })
}

/// The connections of an admin queue and an I/O queue of NVMe/TCP.
fn of_nvme_tcp(namespaces: u16) -> (u64, u64) {
    let export = |number: u16| Export {
        name: number.to_string(),
        description: String::new(),
        read_only: false,
        volume: Arc::new(MemVolume::new(1 << 12)),
    };
    let exports = Exports::new((0..namespaces).map(export).collect());
    let namespace = |number: u16| {
        let volume = VolumeId(number.into());
        let uuid = VolumeUuid::of_texts(&[&number.to_string()]);
        Namespace::new(u32::from(number) + 1, volume, exports.volume_state(volume).unwrap(), false, uuid)
    };
    let namespaces = (0..namespaces).map(namespace).collect();
    let subsystem = Subsystem::new(Nqn::new("nqn.t").unwrap(), "", namespaces, Vec::new());
    let node = Arc::new(NvmeNode::new(vec![Arc::new(subsystem)], Vec::new(), ""));
    let connected = |qid: u8, cntlid: [u8; 2]| {
        let mut session = NvmeTcpTargetSession::new(node.clone(), Pool::new(16 << 20), Instant::now());
        let mut ic_req = [0; 128];
        (ic_req[2], ic_req[4]) = (128, 128);
        take(&mut session, &ic_req);
        let mut data = [0; 1024];
        data[0] = 1;
        data[16..18].copy_from_slice(&cntlid);
        data[256..261].copy_from_slice(b"nqn.t");
        data[512..517].copy_from_slice(b"nqn.h");
        let mut connect = fabrics_command(1);
        (connect[8 + 33], connect[8 + 39], connect[8 + 42], connect[8 + 44]) = (4, 1, qid, 63);
        (connect[3], connect[4], connect[5]) = (72, 72, 4);
        let answer = take(&mut session, &[&connect[..], &data].concat());
        assert_eq!(answer[22..24], [0, 0], "it is connected");
        (session, [answer[8], answer[9]])
    };
    of_third_login(|| {
        let (mut admin, cntlid) = connected(0, [0xff; 2]);
        let mut enable = fabrics_command(0);
        (enable[8 + 44], enable[8 + 48], enable[8 + 50]) = (0x14, 0x61, 0x46);
        take(&mut admin, &enable);
        (admin, connected(1, cntlid))
    })
}

/// A capsule with a fabrics command of this type, without data.
fn fabrics_command(kind: u8) -> [u8; 72] {
    let mut pdu = [0; 72];
    (pdu[0], pdu[2], pdu[4]) = (4, 72, 72);
    (pdu[8], pdu[8 + 1], pdu[8 + 4]) = (0x7f, 0x40, kind);
    pdu
}

#[test]
fn a_login_allocates_the_same_for_one_unit_and_for_hundreds() {
    for (protocol, of_login) in
        [("iscsi", of_iscsi as fn(u16) -> (u64, u64)), ("srp", of_srp), ("nvme-tcp", of_nvme_tcp)]
    {
        let (one, many) = (of_login(1), of_login(MANY));
        assert_ne!(one.0, 0, "{protocol}: the allocations are counted");
        assert_eq!(one, many, "{protocol}: number and bytes of the allocations");
    }
}
