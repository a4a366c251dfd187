//! Target and initiator of SRP.

use blockmux_engine::net::socket::Address;
use blockmux_engine::protocol::srp::initiator::SrpEndpoint;
use blockmux_proto::exports::Exports;
use blockmux_proto::names::networks::AllowedNetworks;
use blockmux_proto::scsi::{LogicalUnit, Lun, ScsiTarget, TargetPort, UnitIdentity};
use blockmux_proto::srp::node::{SrpAccess, SrpNode, SrpPortId, SrpTarget};
use std::sync::Arc;
use std::time::Duration;

/// Each export as LUN 0 of a target port of its own, in order.
pub(crate) fn node(exports: &Exports) -> Arc<SrpNode> {
    let targets = exports.iter().map(|(volume, export)| {
        let id = port(volume.0 as u8);
        let port = TargetPort { relative_id: 1, group: 1, name: id.name_string().into() };
        let identity = UnitIdentity { read_only: export.read_only, ..UnitIdentity::of(&export.name) };
        let unit = LogicalUnit::over(identity, &exports.volume_state(volume).expect("it is served"));
        let units = ScsiTarget::new(&id.name_string(), vec![port.clone()]).with_unit(0, volume, unit);
        SrpTarget {
            id,
            port,
            access: vec![SrpAccess { initiator: None, target: Arc::new(units) }],
            networks: AllowedNetworks::default(),
        }
    });
    Arc::new(SrpNode::new(targets.collect()))
}

/// The target port of an export.
pub(crate) fn port(nth: u8) -> SrpPortId {
    SrpPortId([nth; 16])
}

pub(crate) fn endpoint<F>(address: &Address, nth: u8, over: F) -> SrpEndpoint<F> {
    SrpEndpoint {
        address: address.clone(),
        further: Vec::new(),
        initiator: [7; 8],
        target: port(nth),
        lun: Lun::new(0),
        channels: 1,
        immediate_data: true,
        over,
        reconnect_timeout: RECONNECT_TIMEOUT,
        timeout: Some(RECONNECT_TIMEOUT),
    }
}

const RECONNECT_TIMEOUT: Duration = Duration::from_secs(30);
