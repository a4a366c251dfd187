//! The transmission phase: requests and replies (proto.md, "Transmission" and "Transmission
//! phase").

use crate::layout::layout;
use crate::open_enum::open_enum;
use zerocopy::{BigEndian as BE, U16, U32, U64};

layout! {
    /// A compact request ("Request message"); the `length` bytes of a write's data follow.
    pub struct Request(28) {
        /// [`NBD_REQUEST_MAGIC`].
        pub magic: U32<BE>,
        /// `NBD_CMD_FLAG_*`.
        pub flags: U16<BE>,
        /// [`Cmd`].
        pub command: U16<BE>,
        /// Opaque to the server; the reply returns it.
        pub cookie: U64<BE>,
        /// Offset in the export, in bytes.
        pub offset: U64<BE>,
        /// Length of the request's range, in bytes.
        pub length: U32<BE>,
    }

    /// An extended request; with `NBD_CMD_FLAG_PAYLOAD_LEN`, `length` bytes of payload follow.
    pub struct ExtendedRequest(32) {
        /// [`NBD_EXTENDED_REQUEST_MAGIC`].
        pub magic: U32<BE>,
        /// `NBD_CMD_FLAG_*`.
        pub flags: U16<BE>,
        /// [`Cmd`].
        pub command: U16<BE>,
        /// Opaque to the server; the reply returns it.
        pub cookie: U64<BE>,
        /// Offset in the export, in bytes.
        pub offset: U64<BE>,
        /// Payload length with `NBD_CMD_FLAG_PAYLOAD_LEN`, otherwise effect length; in bytes.
        pub length: U64<BE>,
    }

    /// A simple reply ("Simple reply message"); the data of a successful read follows.
    pub struct SimpleReply(16) {
        /// [`NBD_SIMPLE_REPLY_MAGIC`].
        pub magic: U32<BE>,
        /// [`Errno`], 0 for success.
        pub error: U32<BE>,
        /// Cookie of the request.
        pub cookie: U64<BE>,
    }

    /// The header of a chunk of a structured reply ("Structured reply chunk message"); `length`
    /// bytes follow.
    pub struct StructuredReply(20) {
        /// [`NBD_STRUCTURED_REPLY_MAGIC`].
        pub magic: U32<BE>,
        /// [`NBD_REPLY_FLAG_DONE`].
        pub flags: U16<BE>,
        /// [`ReplyType`].
        pub reply_type: U16<BE>,
        /// Cookie of the request.
        pub cookie: U64<BE>,
        /// Length of the payload that follows, in bytes.
        pub length: U32<BE>,
    }

    /// The header of a chunk of an extended reply ("Extended reply chunk message"); `length` bytes
    /// follow.
    pub struct ExtendedReply(32) {
        /// [`NBD_EXTENDED_REPLY_MAGIC`].
        pub magic: U32<BE>,
        /// [`NBD_REPLY_FLAG_DONE`].
        pub flags: U16<BE>,
        /// [`ReplyType`].
        pub reply_type: U16<BE>,
        /// Cookie of the request.
        pub cookie: U64<BE>,
        /// Offset of the request.
        pub offset: U64<BE>,
        /// Length of the payload that follows, in bytes.
        pub length: U64<BE>,
    }

    /// `NBD_REPLY_TYPE_OFFSET_HOLE`: a range that reads as zeroes.
    pub struct OffsetHole(12) {
        /// Offset of the hole in the export, in bytes.
        pub offset: U64<BE>,
        /// Length of the hole in bytes, not zero.
        pub length: U32<BE>,
    }

    /// The fixed part of an error chunk; `message_length` bytes of text follow.
    pub struct ErrorChunk(6) {
        /// [`Errno`], not zero.
        pub error: U32<BE>,
        /// Length of the text in bytes.
        pub message_length: U16<BE>,
    }

    /// One descriptor of `NBD_REPLY_TYPE_BLOCK_STATUS`.
    pub struct BlockDescriptor(8) {
        /// Length of the extent in bytes, not zero.
        pub length: U32<BE>,
        /// Status flags that the metadata context defines: `NBD_STATE_*` for `base:allocation`.
        pub status: U32<BE>,
    }

    /// The fixed part of `NBD_REPLY_TYPE_BLOCK_STATUS_EXT`.
    pub struct BlockStatusExt(8) {
        /// Identifier of the metadata context.
        pub context: U32<BE>,
        /// Number of [`ExtendedBlockDescriptor`]s that follow, not zero.
        pub count: U32<BE>,
    }

    /// One descriptor of `NBD_REPLY_TYPE_BLOCK_STATUS_EXT`.
    pub struct ExtendedBlockDescriptor(16) {
        /// Length of the extent in bytes, not zero.
        pub length: U64<BE>,
        /// Status flags that the metadata context defines: `NBD_STATE_*` for `base:allocation`.
        pub status: U64<BE>,
    }
}

open_enum! {
    /// Request types, `NBD_CMD_*`.
    pub enum Cmd(u16) {
        /// Read.
        NBD_CMD_READ = 0,
        /// Write.
        NBD_CMD_WRITE = 1,
        /// Disconnect regularly.
        NBD_CMD_DISC = 2,
        /// Bring completed writes to stable storage.
        NBD_CMD_FLUSH = 3,
        /// The data is no longer needed.
        NBD_CMD_TRIM = 4,
        /// Prefetch data that will be read soon.
        NBD_CMD_CACHE = 5,
        /// Write zeroes without payload.
        NBD_CMD_WRITE_ZEROES = 6,
        /// Query metadata of a range.
        NBD_CMD_BLOCK_STATUS = 7,
        /// Withdrawn extension.
        NBD_CMD_RESIZE = 8,
    }

    /// Types of structured and extended reply chunks, `NBD_REPLY_TYPE_*`. Errors have bit 15 set.
    pub enum ReplyType(u16) {
        /// The chunk has no payload and is the last one.
        NBD_REPLY_TYPE_NONE = 0,
        /// A 64-bit offset, then data.
        NBD_REPLY_TYPE_OFFSET_DATA = 1,
        /// An [`OffsetHole`].
        NBD_REPLY_TYPE_OFFSET_HOLE = 2,
        /// A 32-bit context identifier, then [`BlockDescriptor`]s.
        NBD_REPLY_TYPE_BLOCK_STATUS = 5,
        /// A [`BlockStatusExt`], then [`ExtendedBlockDescriptor`]s.
        NBD_REPLY_TYPE_BLOCK_STATUS_EXT = 6,
        /// An [`ErrorChunk`], then text.
        NBD_REPLY_TYPE_ERROR = (1 << 15) | 1,
        /// An [`ErrorChunk`], text, then a 64-bit offset.
        NBD_REPLY_TYPE_ERROR_OFFSET = (1 << 15) | 2,
    }
}

impl ReplyType {
    /// Whether this chunk reports an error (bit 15).
    #[must_use]
    pub const fn is_error(self) -> bool {
        self.0 & (1 << 15) != 0
    }
}

open_enum! {
    /// Error values ("Error values"). The protocol defines their numbers, not the host's libc.
    pub enum Errno(u32) {
        /// Operation not permitted: the export is read-only.
        NBD_EPERM = 1,
        /// Input/output error.
        NBD_EIO = 5,
        /// Cannot allocate memory.
        NBD_ENOMEM = 12,
        /// Invalid argument.
        NBD_EINVAL = 22,
        /// No space left on the device, or a write beyond the end of the export.
        NBD_ENOSPC = 28,
        /// Value too large.
        NBD_EOVERFLOW = 75,
        /// Operation not supported (a fast zero that would not be fast).
        NBD_ENOTSUP = 95,
        /// The server is stopping.
        NBD_ESHUTDOWN = 108,
    }
}

bitflags::bitflags! {
    /// Command flags of a request: `NBD_CMD_FLAG_*` without that prefix.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct CmdFlags: u16 {
        /// Reply only once the data is on stable storage.
        const FUA = 1 << 0;
        /// `NBD_CMD_WRITE_ZEROES`: do not create a hole.
        const NO_HOLE = 1 << 1;
        /// `NBD_CMD_READ`: do not fragment; send at most one content chunk.
        const DF = 1 << 2;
        /// `NBD_CMD_BLOCK_STATUS`: return one extent per context.
        const REQ_ONE = 1 << 3;
        /// `NBD_CMD_WRITE_ZEROES`: fail if it would be no faster than a write.
        const FAST_ZERO = 1 << 4;
        /// With extended headers: `length` is the length of the payload that follows.
        const PAYLOAD_LEN = 1 << 5;
    }
}

/// The magic number of compact requests.
pub const NBD_REQUEST_MAGIC: u32 = 0x2560_9513;
/// The magic number of extended requests.
pub const NBD_EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// The magic number of simple replies.
pub const NBD_SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// The magic number of chunks of structured replies.
pub const NBD_STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// The magic number of chunks of extended replies.
pub const NBD_EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Reply flag: the last chunk of this reply.
pub const NBD_REPLY_FLAG_DONE: u16 = 1 << 0;

/// `base:allocation`: the extent is not allocated.
pub const NBD_STATE_HOLE: u32 = 1 << 0;
/// `base:allocation`: the extent reads as zeroes.
pub const NBD_STATE_ZERO: u32 = 1 << 1;

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromBytes;

    #[test]
    fn an_unknown_command_prints_as_a_number() {
        extern crate alloc;
        use alloc::format;
        assert_eq!(format!("{:?} {:?}", Cmd::NBD_CMD_TRIM, Cmd(0x99)), "NBD_CMD_TRIM Cmd(0x99)");
    }

    #[test]
    fn a_request_reads_as_the_kernel_client_sent_it() {
        let bytes = [
            0x25, 0x60, 0x95, 0x13, 0x00, 0x01, 0x00, 0x01, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0x10,
            0, 0, 0, 2, 0,
        ];
        let request = Request::read_from_bytes(&bytes).unwrap();
        assert_eq!(request.magic.get(), NBD_REQUEST_MAGIC);
        assert_eq!(Cmd(request.command.get()), Cmd::NBD_CMD_WRITE);
        assert_eq!(
            (request.flags.get(), request.cookie.get(), request.offset.get(), request.length.get()),
            (CmdFlags::FUA.bits(), 7, 4096, 512)
        );
    }
}
