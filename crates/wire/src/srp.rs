//! The SCSI RDMA Protocol (T10 SRP, revision 16a), with the immediate data of SRP2.
//!
//! Every message is an information unit (IU): its first byte is an [`SrpOpcode`], and every field
//! is big-endian. A command's additional data follow the 48 bytes of [`SrpCommand`]:
//!
//! ```text
//!   additional CDB bytes │ data-out buffer descriptor │ data-in buffer descriptor
//!   4 × its count        │ high half of BUF_FMT │ low half of BUF_FMT
//! ```
//! A descriptor is a [`DirectDescriptor`], an [`IndirectDescriptor`] followed by the first entries
//! of its table, or with SRP2 an [`ImmediateDescriptor`]. Over RDMA/CM, as Linux connects, the
//! login request is the private data of the connection, without its reserved bytes
//! ([`LoginRequestRdma`]); the answer is a [`LoginResponse`] or a [`LoginReject`].

use crate::layout::layout;
use crate::open_enum::open_enum;
use zerocopy::{BigEndian as BE, U16, U32, U64};

layout! {
    /// SRP_LOGIN_REQ as Linux sends it over RDMA/CM, which carries 56 bytes: the standard's fields
    /// without its reserved bytes.
    #[derive(Default)]
    pub struct LoginRequestRdma(56) {
        /// Tag; the answer returns it.
        pub tag: U64<BE>,
        /// Required buffer formats: [`BUFFER_FORMAT_DIRECT`] and [`BUFFER_FORMAT_INDIRECT`].
        pub req_buf_fmt: U16<BE>,
        /// [`MULTICHANNEL_MULTI`] or nothing, and [`IMMEDIATE_REQUESTED`].
        pub req_flags: u8,
        /// [`SrpOpcode::LOGIN_REQUEST`].
        pub opcode: u8,
        /// The longest information unit of the initiator, in bytes.
        pub req_it_iu_len: U32<BE>,
        /// The initiator port's identifier.
        pub initiator_port_id: [u8; 16],
        /// The target port's identifier.
        pub target_port_id: [u8; 16],
        /// Offset of immediate data in an IU, in bytes (SRP2).
        pub imm_data_offset: U16<BE>,
        pub reserved: [u8; 6] = 0,
    }

    /// SRP_LOGIN_REJ.
    #[derive(Default)]
    pub struct LoginReject(32) {
        /// [`SrpOpcode::LOGIN_REJECT`].
        pub opcode: u8,
        pub reserved1: [u8; 3] = 0,
        /// A [`LoginRejectReason`].
        pub reason: U32<BE>,
        /// Tag of the request.
        pub tag: U64<BE>,
        pub reserved2: [u8; 8] = 0,
        /// Supported buffer formats.
        pub buf_fmt: U16<BE>,
        pub reserved3: [u8; 6] = 0,
    }

    /// SRP_LOGIN_RSP.
    #[derive(Default)]
    pub struct LoginResponse(52) {
        /// [`SrpOpcode::LOGIN_RESPONSE`].
        pub opcode: u8,
        pub reserved1: [u8; 3] = 0,
        /// REQUEST LIMIT DELTA: how many requests the initiator may have outstanding.
        pub req_lim_delta: U32<BE>,
        /// Tag of the request.
        pub tag: U64<BE>,
        /// The longest IU that the target accepts, in bytes.
        pub max_it_iu_len: U32<BE>,
        /// The longest IU that the target sends, in bytes.
        pub max_ti_iu_len: U32<BE>,
        /// Supported buffer formats.
        pub buf_fmt: U16<BE>,
        /// MULTICHANNEL RESULT ([`MULTICHANNEL_TERMINATED`], [`MULTICHANNEL_MAINTAINED`]) and
        /// [`IMMEDIATE_SUPPORTED`].
        pub rsp_flags: u8,
        pub reserved2: [u8; 25] = 0,
    }

    /// SRP_CMD, without its additional CDB bytes and descriptors.
    #[derive(Default)]
    pub struct SrpCommand(48) {
        /// [`SrpOpcode::COMMAND`].
        pub opcode: u8,
        /// Solicited notification.
        pub sol_not: u8,
        pub reserved1: [u8; 3] = 0,
        /// The [`BufferFormat`] of data-out in the high half, of data-in in the low one.
        pub buf_fmt: u8,
        /// Entries of the data-out table that are in this IU.
        pub data_out_desc_cnt: u8,
        /// Entries of the data-in table that are in this IU.
        pub data_in_desc_cnt: u8,
        /// Tag; the response returns it.
        pub tag: U64<BE>,
        pub reserved2: [u8; 4] = 0,
        /// Logical unit number (SAM-5 §4.7).
        pub lun: [u8; 8],
        pub reserved3: u8 = 0,
        /// Task attribute, in the low three bits.
        pub task_attr: u8,
        pub reserved4: u8 = 0,
        /// ADDITIONAL CDB LENGTH in the upper six bits, in units of four bytes.
        pub add_cdb_len: u8,
        /// The first 16 bytes of the CDB.
        pub cdb: [u8; 16],
    }
}

impl SrpCommand {
    /// The length of the additional CDB bytes.
    #[inline]
    #[must_use]
    pub const fn additional_cdb_len(&self) -> usize {
        (self.add_cdb_len & !3) as usize
    }

    /// The formats of the data-out and the data-in buffer descriptor.
    #[inline]
    #[must_use]
    pub const fn buffer_formats(&self) -> (BufferFormat, BufferFormat) {
        (BufferFormat(self.buf_fmt >> 4), BufferFormat(self.buf_fmt & 0x0f))
    }
}

layout! {
    /// SRP_RSP, without its response data and sense data, which follow in this order.
    #[derive(Default)]
    pub struct SrpResponse(36) {
        /// [`SrpOpcode::RESPONSE`].
        pub opcode: u8,
        /// Solicited notification.
        pub sol_not: u8,
        pub reserved1: [u8; 2] = 0,
        /// REQUEST LIMIT DELTA: how many more requests the initiator may send.
        pub req_lim_delta: U32<BE>,
        /// Tag of the request.
        pub tag: U64<BE>,
        pub reserved2: [u8; 2] = 0,
        /// [`ResponseFlags`].
        pub flags: u8,
        /// SCSI status.
        pub status: u8,
        /// DATA-OUT RESIDUAL COUNT in bytes, with [`ResponseFlags::DOOVER`] or
        /// [`ResponseFlags::DOUNDER`].
        pub data_out_res_cnt: U32<BE>,
        /// DATA-IN RESIDUAL COUNT in bytes, with [`ResponseFlags::DIOVER`] or
        /// [`ResponseFlags::DIUNDER`].
        pub data_in_res_cnt: U32<BE>,
        /// The length of the sense data in bytes, with [`ResponseFlags::SNSVALID`].
        pub sense_data_len: U32<BE>,
        /// The length of the response data in bytes, with [`ResponseFlags::RSPVALID`].
        pub resp_data_len: U32<BE>,
    }

    /// SRP_TSK_MGMT.
    #[derive(Default)]
    pub struct TaskManagementRequest(48) {
        /// [`SrpOpcode::TASK_MANAGEMENT`].
        pub opcode: u8,
        /// Solicited notification.
        pub sol_not: u8,
        pub reserved1: [u8; 6] = 0,
        /// Tag; the response returns it.
        pub tag: U64<BE>,
        pub reserved2: [u8; 4] = 0,
        /// Logical unit number (SAM-5 §4.7).
        pub lun: [u8; 8],
        pub reserved3: [u8; 2] = 0,
        /// A [`TaskManagementFunction`].
        pub tsk_mgmt_func: u8,
        pub reserved4: u8 = 0,
        /// The tag of the task to abort.
        pub task_tag: U64<BE>,
        pub reserved5: [u8; 8] = 0,
    }

    /// The response data of a task management function.
    #[derive(Default)]
    pub struct TaskManagementResponseData(4) {
        pub reserved: [u8; 3] = 0,
        /// A [`ResponseCode`].
        pub rsp_code: u8,
    }

    /// SRP_I_LOGOUT, SRP_CRED_RSP and SRP_AER_RSP, which consist of an opcode and a tag.
    #[derive(Default)]
    pub struct SrpHeader(16) {
        /// An [`SrpOpcode`].
        pub opcode: u8,
        pub reserved: [u8; 7] = 0,
        /// The tag.
        pub tag: U64<BE>,
    }

    /// SRP_T_LOGOUT and SRP_CRED_REQ: the first has the reason of the logout, the second the
    /// REQUEST LIMIT DELTA.
    #[derive(Default)]
    pub struct TargetNotice(16) {
        /// [`SrpOpcode::TARGET_LOGOUT`] or [`SrpOpcode::CREDIT_REQUEST`].
        pub opcode: u8,
        /// Solicited notification.
        pub sol_not: u8,
        pub reserved: [u8; 2] = 0,
        /// A [`LogoutReason`], or REQUEST LIMIT DELTA.
        pub value: U32<BE>,
        /// The tag.
        pub tag: U64<BE>,
    }

    /// SRP_AER_REQ, without its sense data.
    #[derive(Default)]
    pub struct AsynchronousEvent(36) {
        /// [`SrpOpcode::AER_REQUEST`].
        pub opcode: u8,
        /// Solicited notification.
        pub sol_not: u8,
        pub reserved1: [u8; 2] = 0,
        /// REQUEST LIMIT DELTA: how many more requests the initiator may send.
        pub req_lim_delta: U32<BE>,
        /// The tag.
        pub tag: U64<BE>,
        pub reserved2: [u8; 4] = 0,
        /// Logical unit number (SAM-5 §4.7).
        pub lun: [u8; 8],
        /// The length of the sense data in bytes.
        pub sense_data_len: U32<BE>,
        pub reserved3: [u8; 4] = 0,
    }

    /// A memory descriptor: one range of the initiator's memory.
    #[derive(Default)]
    pub struct DirectDescriptor(16) {
        /// Virtual address of the range.
        pub va: U64<BE>,
        /// Remote key of the range's memory region.
        pub key: U32<BE>,
        /// Length of the range in bytes.
        pub len: U32<BE>,
    }

    /// An indirect descriptor: a table of ranges, the first of which follow in the IU.
    #[derive(Default)]
    pub struct IndirectDescriptor(20) {
        /// The initiator's memory with the whole table of [`DirectDescriptor`]s.
        pub table: DirectDescriptor,
        /// Total length of all ranges in bytes.
        pub len: U32<BE>,
    }

    /// An immediate descriptor (SRP2): the IU itself holds the data, at the login's IMMEDIATE DATA
    /// OFFSET.
    #[derive(Default)]
    pub struct ImmediateDescriptor(4) {
        /// Length of the data in bytes.
        pub len: U32<BE>,
    }
}

open_enum! {
    /// Opcodes: the first byte of every information unit.
    pub enum SrpOpcode(u8) {
        /// SRP_LOGIN_REQ.
        LOGIN_REQUEST = 0x00,
        /// SRP_TSK_MGMT.
        TASK_MANAGEMENT = 0x01,
        /// SRP_CMD.
        COMMAND = 0x02,
        /// SRP_I_LOGOUT.
        INITIATOR_LOGOUT = 0x03,
        /// SRP_CRED_RSP.
        CREDIT_RESPONSE = 0x41,
        /// SRP_AER_RSP.
        AER_RESPONSE = 0x42,
        /// SRP_T_LOGOUT.
        TARGET_LOGOUT = 0x80,
        /// SRP_CRED_REQ.
        CREDIT_REQUEST = 0x81,
        /// SRP_AER_REQ.
        AER_REQUEST = 0x82,
        /// SRP_LOGIN_RSP.
        LOGIN_RESPONSE = 0xc0,
        /// SRP_RSP.
        RESPONSE = 0xc1,
        /// SRP_LOGIN_REJ.
        LOGIN_REJECT = 0xc2,
    }

    /// Reasons of a rejected login.
    pub enum LoginRejectReason(u32) {
        /// Unable to establish an RDMA channel, no reason specified.
        UNABLE_TO_ESTABLISH_CHANNEL = 0x0001_0000,
        /// Insufficient RDMA channel resources.
        INSUFFICIENT_RESOURCES = 0x0001_0001,
        /// The requested length of IUs is too large.
        IU_LENGTH_TOO_LARGE = 0x0001_0002,
        /// Unable to associate the RDMA channel with the I_T nexus that the login names.
        UNABLE_TO_ASSOCIATE_CHANNEL = 0x0001_0003,
        /// A required buffer format is not supported.
        UNSUPPORTED_BUFFER_FORMAT = 0x0001_0004,
        /// Several channels to a nexus are not supported.
        MULTICHANNEL_UNSUPPORTED = 0x0001_0005,
        /// The nexus has its maximum number of channels.
        CHANNEL_LIMIT_REACHED = 0x0001_0006,
    }

    /// Reasons of a logout by the target.
    pub enum LogoutReason(u32) {
        /// No reason is given.
        UNSPECIFIED = 0x0000,
        /// The channel was idle for too long.
        INACTIVE = 0x0001,
        /// The target does not know the opcode of an IU.
        INVALID_OPCODE = 0x0002,
        /// The target received an unexpected response.
        UNEXPECTED_RESPONSE = 0x0003,
        /// A login with single-channel operation has ended this channel.
        MULTICHANNEL_ACTION = 0x0004,
    }

    /// How an SRP_CMD describes a data buffer.
    pub enum BufferFormat(u8) {
        /// There is no data.
        NONE = 0,
        /// One range of memory.
        DIRECT = 1,
        /// A table of ranges.
        INDIRECT = 2,
        /// The IU holds the data (SRP2; data-out only).
        IMMEDIATE = 3,
    }

    /// TASK MANAGEMENT FUNCTION.
    pub enum TaskManagementFunction(u8) {
        /// ABORT TASK.
        ABORT_TASK = 0x01,
        /// ABORT TASK SET.
        ABORT_TASK_SET = 0x02,
        /// CLEAR TASK SET.
        CLEAR_TASK_SET = 0x04,
        /// LOGICAL UNIT RESET.
        LOGICAL_UNIT_RESET = 0x08,
        /// CLEAR ACA.
        CLEAR_ACA = 0x40,
    }

    /// RSP_CODE: the result of a task management function, or the error of a request.
    pub enum ResponseCode(u8) {
        /// The function was carried out, or the request has no error.
        NO_FAILURE = 0x00,
        /// A field of the request is invalid.
        REQUEST_FIELDS_INVALID = 0x02,
        /// The target does not support the function.
        FUNCTION_NOT_SUPPORTED = 0x04,
        /// The function failed.
        FUNCTION_FAILED = 0x05,
    }
}

/// Bits of [`SrpResponse::flags`].
pub struct ResponseFlags;

impl ResponseFlags {
    /// There is response data.
    pub const RSPVALID: u8 = 1 << 0;
    /// There is sense data.
    pub const SNSVALID: u8 = 1 << 1;
    /// Data-out overflow: the command has more data-out than its buffer.
    pub const DOOVER: u8 = 1 << 2;
    /// Data-out underflow: the command used less data-out than its buffer has.
    pub const DOUNDER: u8 = 1 << 3;
    /// Data-in overflow: the command has more data-in than its buffer.
    pub const DIOVER: u8 = 1 << 4;
    /// Data-in underflow: the command has less data-in than its buffer.
    pub const DIUNDER: u8 = 1 << 5;
}

/// Commands may have direct descriptors.
pub const BUFFER_FORMAT_DIRECT: u16 = 1 << 1;
/// Commands may have indirect descriptors.
pub const BUFFER_FORMAT_INDIRECT: u16 = 1 << 2;

/// MULTICHANNEL ACTION of a login request: the mask of its bits in [`LoginRequestRdma::req_flags`].
/// With 0 the login ends the initiator's other channels.
pub const MULTICHANNEL_MASK: u8 = 0x03;
/// MULTICHANNEL ACTION of a login request: the initiator's other channels stay open.
pub const MULTICHANNEL_MULTI: u8 = 0x01;
/// The initiator requests immediate data (SRP2; a flag of the login request).
pub const IMMEDIATE_REQUESTED: u8 = 0x80;
/// MULTICHANNEL RESULT of a login response: the target ended the initiator's other channels.
pub const MULTICHANNEL_TERMINATED: u8 = 0x01;
/// MULTICHANNEL RESULT of a login response: the initiator's other channels stay open.
pub const MULTICHANNEL_MAINTAINED: u8 = 0x02;
/// The target accepts immediate data (SRP2; a flag of the login response).
pub const IMMEDIATE_SUPPORTED: u8 = 0x80;
