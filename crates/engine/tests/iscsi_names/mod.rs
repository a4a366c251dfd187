//! Names of iSCSI targets in tests.

use blockmux_proto::iscsi::name::Name;

/// The name of the target of an export.
pub(crate) fn target_name(export: &str) -> Name {
    Name::new(&format!("iqn.2026-11.t:{export}")).unwrap()
}
