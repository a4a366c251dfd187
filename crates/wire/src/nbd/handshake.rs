//! The handshake phase: greeting, options, option replies (proto.md, "Newstyle negotiation" and
//! "Handshake phase").

use crate::layout::layout;
use crate::open_enum::open_enum;
use zerocopy::{BigEndian as BE, U16, U32, U64};

layout! {
    /// The first message of the server: `NBDMAGIC`, `IHAVEOPT`, handshake flags.
    pub struct Greeting(18) {
        /// [`NBD_MAGIC`].
        pub magic: U64<BE>,
        /// [`NBD_OPTS_MAGIC`]; an oldstyle server sends [`NBD_CLISERV_MAGIC`] here.
        pub opts_magic: U64<BE>,
        /// `NBD_FLAG_FIXED_NEWSTYLE`, `NBD_FLAG_NO_ZEROES`.
        pub handshake_flags: U16<BE>,
    }

    /// The client's answer to the greeting: client flags, `NBD_FLAG_C_*`.
    pub struct ClientFlags(4) {
        /// `NBD_FLAG_C_FIXED_NEWSTYLE`, `NBD_FLAG_C_NO_ZEROES`.
        pub flags: U32<BE>,
    }

    /// The header of an option; `length` bytes of data follow.
    pub struct OptionHead(16) {
        /// [`NBD_OPTS_MAGIC`].
        pub magic: U64<BE>,
        /// An [`Opt`].
        pub option: U32<BE>,
        /// Length of the data that follows, in bytes.
        pub length: U32<BE>,
    }

    /// The header of a reply to an option; `length` bytes of data follow.
    pub struct OptionReplyHead(20) {
        /// [`NBD_REP_MAGIC`].
        pub magic: U64<BE>,
        /// The [`Opt`] that this answers.
        pub option: U32<BE>,
        /// A [`Rep`].
        pub reply_type: U32<BE>,
        /// Length of the data that follows, in bytes.
        pub length: U32<BE>,
    }

    /// The reply to `NBD_OPT_EXPORT_NAME`; 124 zeroes follow unless the client set
    /// `NBD_FLAG_C_NO_ZEROES`.
    pub struct ExportNameReply(10) {
        /// Size of the export in bytes.
        pub size: U64<BE>,
        /// `NBD_FLAG_*` of the transmission phase.
        pub transmission_flags: U16<BE>,
    }

    /// `NBD_INFO_EXPORT`: size and transmission flags.
    pub struct InfoExport(12) {
        /// [`Info::NBD_INFO_EXPORT`].
        pub info_type: U16<BE>,
        /// Size of the export in bytes.
        pub size: U64<BE>,
        /// `NBD_FLAG_*` of the transmission phase.
        pub transmission_flags: U16<BE>,
    }

    /// `NBD_INFO_BLOCK_SIZE`: size constraints, in bytes.
    pub struct InfoBlockSize(14) {
        /// [`Info::NBD_INFO_BLOCK_SIZE`].
        pub info_type: U16<BE>,
        /// Offsets and lengths are multiples of this size; a power of two, at most 65,536.
        pub minimum: U32<BE>,
        /// Requests of this size and alignment are efficient.
        pub preferred: U32<BE>,
        /// The most payload in one request or reply.
        pub maximum_payload: U32<BE>,
    }
}

open_enum! {
    /// Option types, `NBD_OPT_*`.
    pub enum Opt(u32) {
        /// Choose an export and enter transmission. The server can refuse only by disconnecting.
        NBD_OPT_EXPORT_NAME = 1,
        /// End the session regularly.
        NBD_OPT_ABORT = 2,
        /// List the exports.
        NBD_OPT_LIST = 3,
        /// Was withdrawn.
        NBD_OPT_PEEK_EXPORT = 4,
        /// Upgrade to TLS.
        NBD_OPT_STARTTLS = 5,
        /// Describe an export.
        NBD_OPT_INFO = 6,
        /// Describe an export and enter transmission.
        NBD_OPT_GO = 7,
        /// Use structured replies.
        NBD_OPT_STRUCTURED_REPLY = 8,
        /// List metadata contexts.
        NBD_OPT_LIST_META_CONTEXT = 9,
        /// Select metadata contexts.
        NBD_OPT_SET_META_CONTEXT = 10,
        /// Use extended headers.
        NBD_OPT_EXTENDED_HEADERS = 11,
    }

    /// Option reply types, `NBD_REP_*`. Errors have bit 31 set.
    pub enum Rep(u32) {
        /// The option succeeded.
        NBD_REP_ACK = 1,
        /// The name of one export.
        NBD_REP_SERVER = 2,
        /// One piece of information about an export.
        NBD_REP_INFO = 3,
        /// One metadata context.
        NBD_REP_META_CONTEXT = 4,
        /// Unknown option.
        NBD_REP_ERR_UNSUP = (1 << 31) | 1,
        /// The server's policy forbids the option.
        NBD_REP_ERR_POLICY = (1 << 31) | 2,
        /// The option is malformed, or not allowed at this point.
        NBD_REP_ERR_INVALID = (1 << 31) | 3,
        /// The server's platform does not support the option.
        NBD_REP_ERR_PLATFORM = (1 << 31) | 4,
        /// The client has to negotiate TLS first.
        NBD_REP_ERR_TLS_REQD = (1 << 31) | 5,
        /// The export does not exist.
        NBD_REP_ERR_UNKNOWN = (1 << 31) | 6,
        /// The server is stopping.
        NBD_REP_ERR_SHUTDOWN = (1 << 31) | 7,
        /// The client has to request the block size constraints.
        NBD_REP_ERR_BLOCK_SIZE_REQD = (1 << 31) | 8,
        /// The request or the reply is too large.
        NBD_REP_ERR_TOO_BIG = (1 << 31) | 9,
        /// The client has to negotiate extended headers first, or has negotiated them already.
        NBD_REP_ERR_EXT_HEADER_REQD = (1 << 31) | 10,
    }
}

impl Rep {
    /// Whether this reply reports an error (bit 31).
    #[must_use]
    pub const fn is_error(self) -> bool {
        self.0 & (1 << 31) != 0
    }
}

open_enum! {
    /// Information types, `NBD_INFO_*`.
    pub enum Info(u16) {
        /// [`InfoExport`].
        NBD_INFO_EXPORT = 0,
        /// The export's canonical name.
        NBD_INFO_NAME = 1,
        /// The export's description.
        NBD_INFO_DESCRIPTION = 2,
        /// [`InfoBlockSize`].
        NBD_INFO_BLOCK_SIZE = 3,
    }
}

bitflags::bitflags! {
    /// Transmission flags: the capabilities of an export, `NBD_FLAG_*` without that prefix.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct TransmissionFlags: u16 {
        /// Always set.
        const HAS_FLAGS = 1 << 0;
        /// The export is read-only.
        const READ_ONLY = 1 << 1;
        /// `NBD_CMD_FLUSH` is supported.
        const SEND_FLUSH = 1 << 2;
        /// `NBD_CMD_FLAG_FUA` is supported.
        const SEND_FUA = 1 << 3;
        /// The export is on a rotating medium.
        const ROTATIONAL = 1 << 4;
        /// `NBD_CMD_TRIM` is supported.
        const SEND_TRIM = 1 << 5;
        /// `NBD_CMD_WRITE_ZEROES` is supported.
        const SEND_WRITE_ZEROES = 1 << 6;
        /// `NBD_CMD_FLAG_DF` is supported.
        const SEND_DF = 1 << 7;
        /// A flush on one connection covers the writes of all.
        const CAN_MULTI_CONN = 1 << 8;
        /// `NBD_CMD_RESIZE` (withdrawn extension).
        const SEND_RESIZE = 1 << 9;
        /// `NBD_CMD_CACHE` is supported.
        const SEND_CACHE = 1 << 10;
        /// `NBD_CMD_FLAG_FAST_ZERO` is supported.
        const SEND_FAST_ZERO = 1 << 11;
        /// `NBD_CMD_BLOCK_STATUS` accepts a payload that selects metadata contexts.
        const BLOCK_STATUS_PAYLOAD = 1 << 12;
    }
}

/// `NBDMAGIC`, the first magic number of the greeting.
pub const NBD_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
/// `IHAVEOPT`, the magic number of newstyle negotiation and of options.
pub const NBD_OPTS_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
/// The magic number of oldstyle negotiation, which replaces `IHAVEOPT`.
pub const NBD_CLISERV_MAGIC: u64 = 0x0000_4202_8186_1253;
/// The magic number of option replies.
pub const NBD_REP_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Handshake flag: fixed newstyle.
pub const NBD_FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
/// Handshake flag: the server can omit the 124 zeroes of the reply to `NBD_OPT_EXPORT_NAME`.
pub const NBD_FLAG_NO_ZEROES: u16 = 1 << 1;

/// Client flag: fixed newstyle.
pub const NBD_FLAG_C_FIXED_NEWSTYLE: u32 = 1 << 0;
/// Client flag: the server has to omit the 124 zeroes of the reply to `NBD_OPT_EXPORT_NAME`.
pub const NBD_FLAG_C_NO_ZEROES: u32 = 1 << 1;

/// Number of zeroes after [`ExportNameReply`] if the client did not set `NBD_FLAG_C_NO_ZEROES`.
pub const NBD_EXPORT_NAME_ZEROES: usize = 124;
