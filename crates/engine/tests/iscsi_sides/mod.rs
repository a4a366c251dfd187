//! An iSCSI node for tests, with a target for each export.

use crate::iscsi_names::target_name;
use blockmux_proto::exports::Exports;
use blockmux_proto::iscsi::node::{IscsiAccess, IscsiNode, Portal, TargetNode};
use blockmux_proto::scsi::{LogicalUnit, ScsiTarget, UnitIdentity};
use std::sync::Arc;

/// Each export as LUN 0 of a target with its name.
pub(crate) fn node(exports: &Exports) -> Arc<IscsiNode> {
    let targets = exports.iter().map(|(id, export)| {
        let name = target_name(&export.name);
        let identity = UnitIdentity { read_only: export.read_only, ..UnitIdentity::of(&export.name) };
        let unit = LogicalUnit::new(identity, export.volume.clone());
        let view = ScsiTarget::new(name.as_str(), Vec::new()).with_unit(0, id, unit);
        let access = IscsiAccess { initiator: None, chap: None, target: Arc::new(view) };
        let portal = Portal { address: "192.0.2.1:3260".parse().unwrap(), listener: 1, group_tag: 1 };
        TargetNode::new(name, vec![portal], vec![access])
    });
    Arc::new(IscsiNode::new(targets.collect()))
}
