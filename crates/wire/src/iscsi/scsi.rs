//! PDUs that carry SCSI: commands, responses, data both ways, task management, SNACK (RFC 7143
//! §11.3 to §11.8, §11.16).

use super::{BHS_LEN, U24};
use crate::open_enum::open_enum;
use zerocopy::{BigEndian as BE, FromBytes, Immutable, IntoBytes, KnownLayout, U16, U32, Unaligned};

/// A SCSI command (RFC 7143 §11.3); immediate data may follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ScsiCommand {
    /// [`super::IscsiOpcode::SCSI_COMMAND`] and the I bit.
    pub opcode: u8,
    /// F, [`FLAG_READ`], [`FLAG_WRITE`], ATTR in [`ATTR_MASK`].
    pub flags: u8,
    #[doc(hidden)]
    pub reserved: u8,
    /// RFC 7144 §4.1: the task's priority in the low four bits.
    pub priority: u8,
    /// In units of four bytes.
    pub total_ahs_length: u8,
    /// Immediate data, in bytes.
    pub data_segment_length: U24,
    /// SAM-5 §4.7.
    pub lun: [u8; 8],
    /// Chosen by the initiator.
    pub initiator_task_tag: U32<BE>,
    /// What the initiator expects to move, in bytes.
    pub expected_data_transfer_length: U32<BE>,
    /// Orders commands over a session.
    pub cmd_sn: U32<BE>,
    /// Acknowledges status.
    pub exp_stat_sn: U32<BE>,
    /// Its first 16 bytes.
    pub cdb: [u8; 16],
}
const _: () = assert!(size_of::<ScsiCommand>() == BHS_LEN);

/// The response to a SCSI command (RFC 7143 §11.4); sense and response data follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ScsiResponse {
    /// [`super::IscsiOpcode::SCSI_RESPONSE`].
    pub opcode: u8,
    /// F, and `FLAG_*` of residuals.
    pub flags: u8,
    /// [`Response`].
    pub response: u8,
    /// SAM-5 §5.3.
    pub status: u8,
    /// None.
    pub total_ahs_length: u8,
    /// In bytes: a length of two bytes, and sense data of that length.
    pub data_segment_length: U24,
    /// RFC 7144 §4.2: the status qualifier.
    pub status_qualifier: U16<BE>,
    #[doc(hidden)]
    pub reserved: [u8; 6],
    /// The command's.
    pub initiator_task_tag: U32<BE>,
    /// Tag of the R-Data SNACK that this follows, or 0.
    pub snack_tag: U32<BE>,
    /// This status' number.
    pub stat_sn: U32<BE>,
    /// The next command that is expected.
    pub exp_cmd_sn: U32<BE>,
    /// The last command that is allowed.
    pub max_cmd_sn: U32<BE>,
    /// How many Data-In and R2T PDUs the command had.
    pub exp_data_sn: U32<BE>,
    /// In bytes, of a bidirectional command's read.
    pub bidirectional_read_residual_count: U32<BE>,
    /// In bytes.
    pub residual_count: U32<BE>,
}
const _: () = assert!(size_of::<ScsiResponse>() == BHS_LEN);

/// A task management function request (RFC 7143 §11.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct TaskManagementRequest {
    /// [`super::IscsiOpcode::TASK_MANAGEMENT_REQUEST`] and the I bit.
    pub opcode: u8,
    /// F and [`Function`].
    pub function: u8,
    #[doc(hidden)]
    pub reserved: [u8; 2],
    /// None.
    pub total_ahs_length: u8,
    /// None.
    pub data_segment_length: U24,
    /// For functions that are about a logical unit.
    pub lun: [u8; 8],
    /// Chosen by the initiator.
    pub initiator_task_tag: U32<BE>,
    /// The task to abort or to reassign.
    pub referenced_task_tag: U32<BE>,
    /// Orders commands over a session.
    pub cmd_sn: U32<BE>,
    /// Acknowledges status.
    pub exp_stat_sn: U32<BE>,
    /// CmdSN of the task to abort.
    pub ref_cmd_sn: U32<BE>,
    /// For a task that is reassigned: the next data PDU that is expected.
    pub exp_data_sn: U32<BE>,
    #[doc(hidden)]
    pub reserved_end: [u8; 8],
}
const _: () = assert!(size_of::<TaskManagementRequest>() == BHS_LEN);

/// A task management function response (RFC 7143 §11.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct TaskManagementResponse {
    /// [`super::IscsiOpcode::TASK_MANAGEMENT_RESPONSE`].
    pub opcode: u8,
    /// F.
    pub flags: u8,
    /// [`FunctionResponse`].
    pub response: u8,
    #[doc(hidden)]
    pub reserved: u8,
    /// None.
    pub total_ahs_length: u8,
    /// None.
    pub data_segment_length: U24,
    /// RFC 7144 §4.3: additional response information in the last three bytes.
    pub additional_response_information: U32<BE>,
    #[doc(hidden)]
    pub reserved_middle: [u8; 4],
    /// The request's.
    pub initiator_task_tag: U32<BE>,
    #[doc(hidden)]
    pub reserved_tag: [u8; 4],
    /// This status' number.
    pub stat_sn: U32<BE>,
    /// The next command that is expected.
    pub exp_cmd_sn: U32<BE>,
    /// The last command that is allowed.
    pub max_cmd_sn: U32<BE>,
    #[doc(hidden)]
    pub reserved_end: [u8; 12],
}
const _: () = assert!(size_of::<TaskManagementResponse>() == BHS_LEN);

/// SCSI data to the target (RFC 7143 §11.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DataOut {
    /// [`super::IscsiOpcode::DATA_OUT`].
    pub opcode: u8,
    /// F: the last of its sequence.
    pub flags: u8,
    #[doc(hidden)]
    pub reserved: [u8; 2],
    /// None.
    pub total_ahs_length: u8,
    /// In bytes.
    pub data_segment_length: U24,
    /// The R2T's.
    pub lun: [u8; 8],
    /// The command's.
    pub initiator_task_tag: U32<BE>,
    /// The R2T's, or [`super::RESERVED_TAG`] for unsolicited data.
    pub target_transfer_tag: U32<BE>,
    #[doc(hidden)]
    pub reserved_cmd_sn: [u8; 4],
    /// Acknowledges status.
    pub exp_stat_sn: U32<BE>,
    #[doc(hidden)]
    pub reserved_end: [u8; 4],
    /// Counts the PDUs of a sequence from 0.
    pub data_sn: U32<BE>,
    /// In bytes, from the begin of the command's data.
    pub buffer_offset: U32<BE>,
    #[doc(hidden)]
    pub reserved_last: [u8; 4],
}
const _: () = assert!(size_of::<DataOut>() == BHS_LEN);

/// SCSI data to the initiator, and a good status with the last of it (RFC 7143 §11.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DataIn {
    /// [`super::IscsiOpcode::DATA_IN`].
    pub opcode: u8,
    /// F, [`FLAG_ACKNOWLEDGE`], residuals, [`FLAG_STATUS`].
    pub flags: u8,
    #[doc(hidden)]
    pub reserved: u8,
    /// With S: SAM-5 §5.3.
    pub status: u8,
    /// None.
    pub total_ahs_length: u8,
    /// In bytes.
    pub data_segment_length: U24,
    /// With A: the command's.
    pub lun: [u8; 8],
    /// The command's.
    pub initiator_task_tag: U32<BE>,
    /// With A: comes back in the data acknowledgement; else [`super::RESERVED_TAG`].
    pub target_transfer_tag: U32<BE>,
    /// With S: this status' number.
    pub stat_sn: U32<BE>,
    /// The next command that is expected.
    pub exp_cmd_sn: U32<BE>,
    /// The last command that is allowed.
    pub max_cmd_sn: U32<BE>,
    /// Counts the Data-In PDUs of a command from 0.
    pub data_sn: U32<BE>,
    /// In bytes, from the begin of the command's data.
    pub buffer_offset: U32<BE>,
    /// With S: in bytes.
    pub residual_count: U32<BE>,
}
const _: () = assert!(size_of::<DataIn>() == BHS_LEN);

/// Ready To Transfer: asks for data (RFC 7143 §11.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct IscsiR2t {
    /// [`super::IscsiOpcode::R2T`].
    pub opcode: u8,
    /// F.
    pub flags: u8,
    #[doc(hidden)]
    pub reserved: [u8; 2],
    /// None.
    pub total_ahs_length: u8,
    /// None.
    pub data_segment_length: U24,
    /// The command's.
    pub lun: [u8; 8],
    /// The command's.
    pub initiator_task_tag: U32<BE>,
    /// Comes back in the data; never [`super::RESERVED_TAG`].
    pub target_transfer_tag: U32<BE>,
    /// The next status' number; not advanced.
    pub stat_sn: U32<BE>,
    /// The next command that is expected.
    pub exp_cmd_sn: U32<BE>,
    /// The last command that is allowed.
    pub max_cmd_sn: U32<BE>,
    /// Counts the R2Ts of a command from 0.
    pub r2t_sn: U32<BE>,
    /// In bytes, from the begin of the command's data.
    pub buffer_offset: U32<BE>,
    /// In bytes, not 0.
    pub desired_data_transfer_length: U32<BE>,
}
const _: () = assert!(size_of::<IscsiR2t>() == BHS_LEN);

/// Asks to send again what was lost, or acknowledges data (RFC 7143 §11.16).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SnackRequest {
    /// [`super::IscsiOpcode::SNACK_REQUEST`].
    pub opcode: u8,
    /// F and [`SnackType`].
    pub snack_type: u8,
    #[doc(hidden)]
    pub reserved: [u8; 2],
    /// None.
    pub total_ahs_length: u8,
    /// None.
    pub data_segment_length: U24,
    /// Of the command, or reserved.
    pub lun: [u8; 8],
    /// Of the command, or [`super::RESERVED_TAG`].
    pub initiator_task_tag: U32<BE>,
    /// For DataACK: the Data-In's; for R-Data: the SNACK Tag.
    pub target_transfer_tag: U32<BE>,
    #[doc(hidden)]
    pub reserved_cmd_sn: [u8; 4],
    /// Acknowledges status.
    pub exp_stat_sn: U32<BE>,
    #[doc(hidden)]
    pub reserved_end: [u8; 8],
    /// The first number that is missing.
    pub beg_run: U32<BE>,
    /// How many are missing; 0: all to the last.
    pub run_length: U32<BE>,
}
const _: () = assert!(size_of::<SnackRequest>() == BHS_LEN);

open_enum! {
    /// How a command ended, apart from its status (RFC 7143 §11.4.3).
    pub enum Response(u8) {
        /// Completed; the status says how.
        COMMAND_COMPLETED_AT_TARGET = 0x00,
        /// The target failed; there is no status.
        TARGET_FAILURE = 0x01,
    }
}

open_enum! {
    /// Task management functions (RFC 7143 §11.5.1, RFC 7144 §4.2).
    pub enum Function(u8) {
        /// Abort the task with the referenced tag.
        ABORT_TASK = 1,
        /// Abort this session's tasks on a logical unit.
        ABORT_TASK_SET = 2,
        /// Clear auto contingent allegiance.
        CLEAR_ACA = 3,
        /// Abort every session's tasks on a logical unit.
        CLEAR_TASK_SET = 4,
        /// Reset a logical unit.
        LOGICAL_UNIT_RESET = 5,
        /// Reset all logical units.
        TARGET_WARM_RESET = 6,
        /// Reset all logical units and end all sessions.
        TARGET_COLD_RESET = 7,
        /// Move a task to this connection.
        TASK_REASSIGN = 8,
        /// RFC 7144: is the task there?
        QUERY_TASK = 9,
        /// RFC 7144: are there tasks?
        QUERY_TASK_SET = 10,
        /// RFC 7144: reset this session's state.
        I_T_NEXUS_RESET = 11,
        /// RFC 7144: is a unit attention pending?
        QUERY_ASYNCHRONOUS_EVENT = 12,
    }
}

open_enum! {
    /// How a task management function ended (RFC 7143 §11.6.1, RFC 7144 §4.3).
    pub enum FunctionResponse(u8) {
        /// Done.
        FUNCTION_COMPLETE = 0,
        /// No such task.
        TASK_DOES_NOT_EXIST = 1,
        /// No such logical unit.
        LUN_DOES_NOT_EXIST = 2,
        /// The task belongs to a connection that still works.
        TASK_STILL_ALLEGIANT = 3,
        /// Tasks cannot be reassigned.
        TASK_ALLEGIANCE_REASSIGNMENT_NOT_SUPPORTED = 4,
        /// Not a function of this target.
        TASK_MANAGEMENT_FUNCTION_NOT_SUPPORTED = 5,
        /// Not allowed.
        FUNCTION_AUTHORIZATION_FAILED = 6,
        /// RFC 7144: done, and the answer is yes.
        FUNCTION_SUCCEEDED = 7,
        /// Not possible now.
        FUNCTION_REJECTED = 255,
    }
}

open_enum! {
    /// What a SNACK is about (RFC 7143 §11.16.1).
    pub enum SnackType(u8) {
        /// Data-In or R2T.
        DATA_R2T = 0,
        /// Status.
        STATUS = 1,
        /// Acknowledges Data-In.
        DATA_ACK = 2,
        /// Data-In of another segmentation.
        R_DATA = 3,
    }
}

/// R, in a command: data to the initiator is expected.
pub const FLAG_READ: u8 = 0x40;
/// W, in a command: data to the target is expected.
pub const FLAG_WRITE: u8 = 0x20;
/// ATTR, in a command: the task attribute, `ATTR_*`.
pub const ATTR_MASK: u8 = 0x07;
/// Untagged.
pub const ATTR_UNTAGGED: u8 = 0;
/// SIMPLE.
pub const ATTR_SIMPLE: u8 = 1;
/// ORDERED.
pub const ATTR_ORDERED: u8 = 2;
/// HEAD OF QUEUE.
pub const ATTR_HEAD_OF_QUEUE: u8 = 3;
/// ACA.
pub const ATTR_ACA: u8 = 4;

/// o, in a response: the bidirectional read had more data than expected.
pub const FLAG_BIDIRECTIONAL_OVERFLOW: u8 = 0x10;
/// u, in a response: the bidirectional read had less data than expected.
pub const FLAG_BIDIRECTIONAL_UNDERFLOW: u8 = 0x08;
/// O: the command had more data than expected, by the residual count.
pub const FLAG_OVERFLOW: u8 = 0x04;
/// U: the command had less data than expected, by the residual count.
pub const FLAG_UNDERFLOW: u8 = 0x02;

/// A, in a Data-In: asks for an acknowledgement.
pub const FLAG_ACKNOWLEDGE: u8 = 0x40;
/// S, in a Data-In: status is in here.
pub const FLAG_STATUS: u8 = 0x01;

/// The function of a task management request, without F; the same bits are a SNACK's type.
pub const FUNCTION_MASK: u8 = 0x7f;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iscsi::{FLAG_FINAL, IscsiOpcode, RESERVED_TAG};

    #[test]
    fn an_inquiry_reads_as_the_kernel_sent_it() {
        let bytes = b"\x01\xc1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\x24\0\0\0\x06\0\0\0\x07\
                      \x12\x01\0\0\x24\0\0\0\0\0\0\0\0\0\0\0";
        let command = ScsiCommand::read_from_bytes(bytes).unwrap();
        assert_eq!(IscsiOpcode(command.opcode), IscsiOpcode::SCSI_COMMAND);
        assert_eq!(command.flags, FLAG_FINAL | FLAG_READ | ATTR_SIMPLE);
        assert_eq!(command.initiator_task_tag.get(), 0x0700_0000);
        assert_eq!(command.expected_data_transfer_length.get(), 36);
        assert_eq!((command.cmd_sn.get(), command.exp_stat_sn.get()), (6, 7));
        assert_eq!(command.cdb[..6], *b"\x12\x01\0\0\x24\0");
    }

    #[test]
    fn data_with_status_reads_as_another_target_sent_it() {
        let bytes = b"\x25\x83\0\0\0\0\0\x0a\0\0\0\0\0\0\0\0\x07\0\0\0\xff\xff\xff\xff\0\0\0\x07\
                      \0\0\0\x07\0\0\0\x87\0\0\0\0\0\0\0\0\0\0\0\x1a";
        let data = DataIn::read_from_bytes(bytes).unwrap();
        assert_eq!(IscsiOpcode(data.opcode), IscsiOpcode::DATA_IN);
        assert_eq!(data.flags, FLAG_FINAL | FLAG_UNDERFLOW | FLAG_STATUS);
        assert_eq!((data.data_segment_length.get(), data.residual_count.get()), (10, 26));
        assert_eq!(data.target_transfer_tag.get(), RESERVED_TAG);
        assert_eq!((data.exp_cmd_sn.get(), data.max_cmd_sn.get()), (7, 0x87));
    }
}
