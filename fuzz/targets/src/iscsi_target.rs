//! A hostile initiator against the iSCSI target, with volumes that fail when the input requests it.

use crate::choices::Choices;
use crate::iscsi_target_stream::TargetStream;
use crate::target_side::TargetRun;
use blockmux_proto::exports::{Export, Exports};
use blockmux_proto::iscsi::login::chap::{ChapAlgorithm, ChapCredentials, ChapSecret};
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::iscsi::node::{Chap, IscsiAccess, IscsiNode, Portal, TargetNode};
use blockmux_proto::iscsi::server::IscsiTargetSession;
use blockmux_proto::scsi::{LogicalUnit, ScsiTarget, UnitIdentity};
use blockmux_volume::{MemVolume, Pool};
use std::sync::Arc;
use std::time::Instant;

/// Reads `data` as choices and an initiator's stream.
pub(crate) fn iscsi_target(data: &[u8]) {
    let (choices, stream) = Choices::split(data);
    drive(choices, stream);
}

/// Drives a target session through the complete stream of an initiator.
pub(crate) fn drive(mut choices: Choices<'_>, stream: Vec<u8>) {
    let exports = exports();
    let pool = Pool::new(choices.of(&[usize::MAX, 64 << 10, 128 << 10, 1 << 20]));
    let now = Instant::now();
    let session = IscsiTargetSession::new(node(&exports), 1, pool.clone(), [0; 32], now);
    TargetRun::new((choices, stream), (session, exports), TargetStream::default(), pool, now).drive();
}

/// A target without authentication and one with CHAP.
pub(crate) fn node(exports: &Exports) -> Arc<IscsiNode> {
    let chap = Chap {
        initiator: ChapCredentials::new("user", ChapSecret::new(b"initiator-secret").expect("it is short"))
            .expect("the name is short"),
        target: ChapCredentials::new("target", ChapSecret::new(b"target-secret").expect("it is short")),
        algorithms: ChapAlgorithm::ALL.to_vec(),
    };
    let target = |name: &str, chap| {
        let units = exports.iter().fold(ScsiTarget::new(name, Vec::new()), |target, (id, export)| {
            let unit = LogicalUnit::new(UnitIdentity::of(&export.name), export.volume.clone());
            target.with_unit(id.0 as u16, id, unit)
        });
        let access = IscsiAccess { initiator: None, chap, target: Arc::new(units) };
        let portals = vec![Portal { address: ([192, 0, 2, 1], 3260).into(), listener: 1, group_tag: 1 }];
        TargetNode::new(Name::new(name).expect("it is a name"), portals, vec![access])
    };
    Arc::new(IscsiNode::new(vec![target("iqn.2026-11.t:a", None), target("iqn.2026-11.t:b", Some(chap))]))
}

pub(crate) fn exports() -> Exports {
    let export = |name: &str| Export {
        name: name.into(),
        description: String::new(),
        read_only: false,
        volume: Arc::new(MemVolume::new(SIZE)),
    };
    Exports::new(vec![export("disk0"), export("disk1")])
}

/// Size of each RAM volume in bytes, enough for long payload.
const SIZE: u64 = 512 << 10;
