//! Immediate PDUs, which occupy no place in the command window: NOP-Out, task management, text and
//! logout requests.

use crate::iscsi::login::initiator::FIRST_CID;
use crate::scsi::Lun;
use blockmux_wire::iscsi::scsi::{Function, TaskManagementFunctionRequest};
use blockmux_wire::iscsi::session::{LogoutReasonCode, LogoutRequest, NopOut, TextRequest};
use blockmux_wire::iscsi::{FLAG_FINAL, FLAG_IMMEDIATE, IscsiOpcode, RESERVED_TAG, U24};
use zerocopy::FromZeros;

/// Sequence numbers that every request carries (RFC 7143 §4.2.2).
#[derive(Clone, Copy)]
pub(super) struct RequestNumbers {
    pub(super) cmd_sn: u32,
    pub(super) exp_stat_sn: u32,
}

impl RequestNumbers {
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

    /// A task management function request without a referenced task.
    pub(super) fn task_management(self, function: Function, lun: Lun) -> TaskManagementFunctionRequest {
        TaskManagementFunctionRequest {
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

    /// A text request for `len` bytes of text.
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

    /// A logout request that closes the session.
    pub(super) fn logout(self) -> LogoutRequest {
        LogoutRequest {
            opcode: IscsiOpcode::LOGOUT_REQUEST.0 | FLAG_IMMEDIATE,
            reason: FLAG_FINAL | LogoutReasonCode::CLOSE_SESSION.0,
            initiator_task_tag: LOGOUT_TAG.into(),
            cid: FIRST_CID.into(),
            cmd_sn: self.cmd_sn.into(),
            exp_stat_sn: self.exp_stat_sn.into(),
            ..FromZeros::new_zeroed()
        }
    }
}

/// Task tags of internal requests; commands never use them, because the command table is smaller.
pub(super) const PING_TAG: u32 = 0xffff_fffe;
pub(super) const LOGOUT_TAG: u32 = 0xffff_fffd;
pub(super) const TEXT_TAG: u32 = 0xffff_fffc;
/// Combined with a function code: task tag of a task management function without a referenced task.
pub(super) const FUNCTION_TAG: u32 = 0xffff_ff00;
/// Combined with a command's tag: task tag of its TASK REASSIGN.
pub(super) const REASSIGN_TAG: u32 = 1 << 15;
/// Combined with a command's tag: task tag of its ABORT TASK.
pub(super) const ABORT_TAG: u32 = 1 << 14;
