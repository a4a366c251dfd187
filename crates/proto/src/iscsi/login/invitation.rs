//! What a login has to know of a session that its connection may be added to.

use super::operational::OperationalParameters;
use crate::iscsi::name::Name;
use crate::iscsi::sessions::SessionName;

/// A session that another connection may be added to, as its login has to know it.
#[derive(Clone)]
pub(in crate::iscsi) struct Invitation {
    pub(in crate::iscsi) name: SessionName,
    pub(in crate::iscsi) tsih: u16,
    /// What its leading connection agreed on.
    pub(in crate::iscsi) parameters: OperationalParameters,
    pub(in crate::iscsi) exp_cmd_sn: u32,
    pub(in crate::iscsi) max_cmd_sn: u32,
}

impl Invitation {
    /// Whether it is that initiator's session with that target, through the same portal group (RFC
    /// 7143 §4.4.3).
    pub(super) fn is_for(&self, initiator: &Name, target: &Name, group_tag: u16) -> bool {
        self.name.initiator == *initiator && self.name.target == *target && self.name.group_tag == group_tag
    }
}
