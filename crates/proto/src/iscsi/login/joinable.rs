//! Properties of a session that the login of a further connection needs.

use super::operational::OperationalParameters;
use crate::iscsi::name::Name;
use crate::iscsi::sessions::SessionName;

/// A session that a further connection may join.
#[derive(Clone)]
pub(in crate::iscsi) struct JoinableSession {
    pub(in crate::iscsi) name: SessionName,
    pub(in crate::iscsi) tsih: u16,
    /// Parameters negotiated by the leading connection.
    pub(in crate::iscsi) parameters: OperationalParameters,
    pub(in crate::iscsi) exp_cmd_sn: u32,
    pub(in crate::iscsi) max_cmd_sn: u32,
}

impl JoinableSession {
    /// Whether the session belongs to this initiator, target and portal group (RFC 7143 §4.4.3).
    pub(super) fn is_for(&self, initiator: &Name, target: &Name, group_tag: u16) -> bool {
        self.name.initiator == *initiator && self.name.target == *target && self.name.group_tag == group_tag
    }
}
