//! What tests call targets of iSCSI.

use blockmux_proto::iscsi::name::Name;

/// The target that an export is.
pub(crate) fn target_name(export: &str) -> Name {
    Name::new(&format!("iqn.2026-11.t:{export}")).unwrap()
}
