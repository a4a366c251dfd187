//! PDUs for immediate delivery, which take no place in the window of commands: NOP-Out, task
//! management, text and the logout.

use crate::iscsi::login::initiator::FIRST_CID;
use crate::scsi::Lun;
use blockmux_wire::iscsi::scsi::{Function, TaskManagementRequest};
use blockmux_wire::iscsi::session::{LogoutReason, LogoutRequest, NopOut, TextRequest};
use blockmux_wire::iscsi::{FLAG_FINAL, FLAG_IMMEDIATE, IscsiOpcode, RESERVED_TAG, U24};
use zerocopy::FromZeros;

/// What every request says of the session's numbers (RFC 7143 §4.2.2).
#[derive(Clone, Copy)]
pub(super) struct Numbers {
    pub(super) cmd_sn: u32,
    pub(super) exp_stat_sn: u32,
}

impl Numbers {
    pub(super) fn nop_out(self, initiator_task_tag: u32, target_transfer_tag: u32, lun: [u8; 8]) -> NopOut {
        NopOut {
            opcode: IscsiOpcode::NOP_OUT.0 | FLAG_IMMEDIATE,
            flags: FLAG_FINAL,
            lun,
            initiator_task_tag: initiator_task_tag.into(),
            target_transfer_tag: target_transfer_tag.into(),
            cmd_sn: self.cmd_sn.into(),
            exp_stat_sn: self.exp_stat_sn.into(),
            ..FromZeros::new_zeroed()
        }
    }

    /// About no task yet.
    pub(super) fn task_management(self, function: Function, lun: Lun) -> TaskManagementRequest {
        TaskManagementRequest {
            opcode: IscsiOpcode::TASK_MANAGEMENT_REQUEST.0 | FLAG_IMMEDIATE,
            function: FLAG_FINAL | function.0,
            lun: lun.0.to_be_bytes(),
            initiator_task_tag: RESERVED_TAG.into(),
            referenced_task_tag: RESERVED_TAG.into(),
            cmd_sn: self.cmd_sn.into(),
            exp_stat_sn: self.exp_stat_sn.into(),
            ..FromZeros::new_zeroed()
        }
    }

    /// With a text of so many bytes, to be sent behind it.
    pub(super) fn text(self, target_transfer_tag: u32, lun: [u8; 8], len: u32) -> TextRequest {
        TextRequest {
            opcode: IscsiOpcode::TEXT_REQUEST.0 | FLAG_IMMEDIATE,
            flags: FLAG_FINAL,
            data_segment_length: U24::new(len),
            lun,
            initiator_task_tag: TEXT_TAG.into(),
            target_transfer_tag: target_transfer_tag.into(),
            cmd_sn: self.cmd_sn.into(),
            exp_stat_sn: self.exp_stat_sn.into(),
            ..FromZeros::new_zeroed()
        }
    }

    /// Ends the session in order.
    pub(super) fn logout(self) -> LogoutRequest {
        LogoutRequest {
            opcode: IscsiOpcode::LOGOUT_REQUEST.0 | FLAG_IMMEDIATE,
            reason: FLAG_FINAL | LogoutReason::CLOSE_SESSION.0,
            initiator_task_tag: LOGOUT_TAG.into(),
            cid: FIRST_CID.into(),
            cmd_sn: self.cmd_sn.into(),
            exp_stat_sn: self.exp_stat_sn.into(),
            ..FromZeros::new_zeroed()
        }
    }
}

/// Tags that no command has: a table of commands has no such place.
pub(super) const PING_TAG: u32 = 0xffff_fffe;
pub(super) const LOGOUT_TAG: u32 = 0xffff_fffd;
pub(super) const TEXT_TAG: u32 = 0xffff_fffc;
/// And with the number of a task management function, the tag of a request for that.
pub(super) const MANAGE_TAG: u32 = 0xffff_ff00;
/// Makes the tag of the request to move a task of the task's own.
pub(super) const MOVE_TAG: u32 = 1 << 15;
/// And of the request to abort it.
pub(super) const ABORT_TAG: u32 = 1 << 14;
