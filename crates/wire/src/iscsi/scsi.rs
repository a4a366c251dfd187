//! PDUs of SCSI commands: command, response, data, task management, SNACK (RFC 7143 §11.3 to §11.8,
//! §11.16).

use super::pdus;
use crate::open_enum::open_enum;
use zerocopy::{BigEndian as BE, U16, U32};

pdus! {
    /// SCSI Command PDU (RFC 7143 §11.3); immediate data may follow.
    pub struct ScsiCommand {
        /// F, [`FLAG_READ`], [`FLAG_WRITE`], ATTR in [`ATTR_MASK`].
        pub flags: u8,
        pub reserved: u8 = 0,
        /// Task priority (RFC 7144 §4.1), in the low four bits.
        pub priority: u8,
        lengths,
        /// Logical unit number (SAM-5 §4.7).
        pub lun: [u8; 8],
        /// Initiator Task Tag, chosen by the initiator.
        pub initiator_task_tag: U32<BE>,
        /// Expected Data Transfer Length, in bytes.
        pub expected_data_transfer_length: U32<BE>,
        request_numbers,
        /// The first 16 bytes of the CDB.
        pub cdb: [u8; 16],
    }

    /// SCSI Response PDU (RFC 7143 §11.4); a two-byte length and sense data of that
    /// length follow.
    pub struct ScsiResponse {
        /// F and the residual flags.
        pub flags: u8,
        /// [`ServiceResponse`].
        pub response: u8,
        /// SCSI status (SAM-5 §5.3).
        pub status: u8,
        lengths,
        /// Status qualifier (RFC 7144 §4.2).
        pub status_qualifier: U16<BE>,
        pub reserved: [u8; 6] = 0,
        /// Initiator Task Tag of the command.
        pub initiator_task_tag: U32<BE>,
        /// SNACK Tag of the R-Data SNACK that caused this response, or 0.
        pub snack_tag: U32<BE>,
        response_numbers,
        /// ExpDataSN: number of Data-In and R2T PDUs sent for the command.
        pub exp_data_sn: U32<BE>,
        /// Residual count of a bidirectional command's read data, in bytes.
        pub bidirectional_read_residual_count: U32<BE>,
        /// Residual count, in bytes.
        pub residual_count: U32<BE>,
    }

    /// Task Management Function Request PDU (RFC 7143 §11.5).
    pub struct TaskManagementFunctionRequest {
        /// F and [`Function`].
        pub function: u8,
        pub reserved: [u8; 2] = 0,
        lengths,
        /// LUN, for functions that address a logical unit.
        pub lun: [u8; 8],
        /// Initiator Task Tag, chosen by the initiator.
        pub initiator_task_tag: U32<BE>,
        /// Referenced Task Tag: the task to abort or reassign.
        pub referenced_task_tag: U32<BE>,
        request_numbers,
        /// RefCmdSN: CmdSN of the task to abort.
        pub ref_cmd_sn: U32<BE>,
        /// ExpDataSN: for TASK REASSIGN, the next expected data PDU.
        pub exp_data_sn: U32<BE>,
        pub reserved_end: [u8; 8] = 0,
    }

    /// Task Management Function Response PDU (RFC 7143 §11.6).
    pub struct TaskManagementFunctionResponse {
        /// F.
        pub flags: u8,
        /// [`FunctionResponse`].
        pub response: u8,
        pub reserved: u8 = 0,
        lengths,
        /// Additional response information (RFC 7144 §4.3), in the last three bytes.
        pub additional_response_information: U32<BE>,
        pub reserved_middle: [u8; 4] = 0,
        /// Initiator Task Tag of the request.
        pub initiator_task_tag: U32<BE>,
        pub reserved_tag: [u8; 4] = 0,
        response_numbers,
        pub reserved_end: [u8; 12] = 0,
    }

    /// SCSI Data-Out PDU (RFC 7143 §11.7).
    pub struct DataOut {
        /// F: the last PDU of its sequence.
        pub flags: u8,
        pub reserved: [u8; 2] = 0,
        lengths,
        /// LUN of the R2T.
        pub lun: [u8; 8],
        /// Initiator Task Tag of the command.
        pub initiator_task_tag: U32<BE>,
        /// Target Transfer Tag of the R2T, or [`super::RESERVED_TAG`] for unsolicited data.
        pub target_transfer_tag: U32<BE>,
        pub reserved_cmd_sn: [u8; 4] = 0,
        /// ExpStatSN: acknowledges responses.
        pub exp_stat_sn: U32<BE>,
        pub reserved_end: [u8; 4] = 0,
        /// DataSN: counts the PDUs of a sequence from 0.
        pub data_sn: U32<BE>,
        /// Buffer Offset in the command's data, in bytes.
        pub buffer_offset: U32<BE>,
        pub reserved_last: [u8; 4] = 0,
    }

    /// SCSI Data-In PDU; the last one may carry the status (RFC 7143 §11.7).
    pub struct DataIn {
        /// F, [`FLAG_ACKNOWLEDGE`], residuals, [`FLAG_STATUS`].
        pub flags: u8,
        pub reserved: u8 = 0,
        /// With S: SCSI status (SAM-5 §5.3).
        pub status: u8,
        lengths,
        /// With A: LUN of the command.
        pub lun: [u8; 8],
        /// Initiator Task Tag of the command.
        pub initiator_task_tag: U32<BE>,
        /// With A: the tag that the DataACK returns; otherwise [`super::RESERVED_TAG`].
        pub target_transfer_tag: U32<BE>,
        response_numbers,
        /// DataSN: counts the Data-In PDUs of a command from 0.
        pub data_sn: U32<BE>,
        /// Buffer Offset in the command's data, in bytes.
        pub buffer_offset: U32<BE>,
        /// With S: residual count, in bytes.
        pub residual_count: U32<BE>,
    }

    /// Ready To Transfer PDU: requests data-out (RFC 7143 §11.8).
    pub struct IscsiR2t {
        /// F.
        pub flags: u8,
        pub reserved: [u8; 2] = 0,
        lengths,
        /// LUN of the command.
        pub lun: [u8; 8],
        /// Initiator Task Tag of the command.
        pub initiator_task_tag: U32<BE>,
        /// Target Transfer Tag that the Data-Out PDUs return; never [`super::RESERVED_TAG`].
        pub target_transfer_tag: U32<BE>,
        response_numbers,
        /// R2TSN: counts the R2Ts of a command from 0.
        pub r2t_sn: U32<BE>,
        /// Buffer Offset in the command's data, in bytes.
        pub buffer_offset: U32<BE>,
        /// Desired Data Transfer Length, in bytes; not 0.
        pub desired_data_transfer_length: U32<BE>,
    }

    /// SNACK Request PDU: requests retransmission, or acknowledges data (RFC 7143 §11.16).
    pub struct SnackRequest {
        /// F and [`SnackType`].
        pub snack_type: u8,
        pub reserved: [u8; 2] = 0,
        lengths,
        /// LUN of the command, or reserved.
        pub lun: [u8; 8],
        /// Initiator Task Tag of the command, or [`super::RESERVED_TAG`].
        pub initiator_task_tag: U32<BE>,
        /// For DataACK: the tag of the Data-In PDU; for R-Data: the SNACK Tag.
        pub target_transfer_tag: U32<BE>,
        pub reserved_cmd_sn: [u8; 4] = 0,
        /// ExpStatSN: acknowledges responses.
        pub exp_stat_sn: U32<BE>,
        pub reserved_end: [u8; 8] = 0,
        /// BegRun: the first missing number.
        pub beg_run: U32<BE>,
        /// RunLength: how many are missing; 0 for all up to the last.
        pub run_length: U32<BE>,
    }
}

open_enum! {
    /// iSCSI service response of a command (RFC 7143 §11.4.3).
    pub enum ServiceResponse(u8) {
        /// The command completed with a status.
        COMMAND_COMPLETED_AT_TARGET = 0x00,
        /// The target failed; the status is invalid.
        TARGET_FAILURE = 0x01,
    }

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
        /// Query whether a task exists (RFC 7144).
        QUERY_TASK = 9,
        /// Query whether a logical unit has tasks of this session (RFC 7144).
        QUERY_TASK_SET = 10,
        /// Reset the I_T nexus (RFC 7144).
        I_T_NEXUS_RESET = 11,
        /// Query whether a unit attention is pending (RFC 7144).
        QUERY_ASYNCHRONOUS_EVENT = 12,
    }

    /// Response of a task management function (RFC 7143 §11.6.1, RFC 7144 §4.3).
    pub enum FunctionResponse(u8) {
        /// The function is complete.
        FUNCTION_COMPLETE = 0,
        /// No such task.
        TASK_DOES_NOT_EXIST = 1,
        /// No such logical unit.
        LUN_DOES_NOT_EXIST = 2,
        /// The task is still allegiant to a working connection.
        TASK_STILL_ALLEGIANT = 3,
        /// Task reassignment is not supported.
        TASK_ALLEGIANCE_REASSIGNMENT_NOT_SUPPORTED = 4,
        /// The function is not supported.
        TASK_MANAGEMENT_FUNCTION_NOT_SUPPORTED = 5,
        /// Not allowed.
        FUNCTION_AUTHORIZATION_FAILED = 6,
        /// The query's answer is yes (RFC 7144).
        FUNCTION_SUCCEEDED = 7,
        /// Not possible now.
        FUNCTION_REJECTED = 255,
    }

    /// Type of a SNACK (RFC 7143 §11.16.1).
    pub enum SnackType(u8) {
        /// Requests Data-In or R2T PDUs.
        DATA_R2T = 0,
        /// Requests responses.
        STATUS = 1,
        /// Acknowledges Data-In PDUs.
        DATA_ACK = 2,
        /// Requests Data-In PDUs with a new segment length.
        R_DATA = 3,
    }
}

/// R, in a command: data-in is expected.
pub const FLAG_READ: u8 = 0x40;
/// W, in a command: data-out is expected.
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

/// A, in a Data-In: requests a DataACK.
pub const FLAG_ACKNOWLEDGE: u8 = 0x40;
/// S, in a Data-In: the PDU carries the status.
pub const FLAG_STATUS: u8 = 0x01;

/// Mask of a task management function, and of a SNACK type.
pub const FUNCTION_MASK: u8 = 0x7f;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iscsi::{FLAG_FINAL, IscsiOpcode, RESERVED_TAG};
    use zerocopy::FromBytes;

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
