//! Writing replies in the negotiated format (proto.md, "Simple reply message", "Structured reply
//! chunk message"; extension-ext-header, "Extended reply chunk message").
//!
//! A reply is a head, copied into the outbox, and a payload by reference. With structured replies,
//! a success without payload stays a simple reply, as the document allows: it is shorter, and every
//! client accepts it.

use super::pending::PendingRequest;
use super::request::NbdRequestRefusal;
use crate::driver::outbox::Outbox;
use crate::nbd::HeaderFormat;
use blockmux_volume::{Extent, IoError, Op, Output, SgList};
use blockmux_wire::nbd::transmission::*;
use zerocopy::{BigEndian as BE, Immutable, IntoBytes, U16, U32, U64, Unaligned};

/// Address of a reply: cookie and offset of its request.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReplyAddress {
    pub(super) cookie: u64,
    pub(super) offset: u64,
}

/// Writes replies into an outbox.
#[derive(Debug)]
pub(super) struct ReplyWriter {
    headers: HeaderFormat,
    /// Bytes of heads queued since the outbox was last empty. A client that does not read makes
    /// them grow.
    unsent_heads: usize,
}

/// Head of a structured `NBD_REPLY_TYPE_OFFSET_DATA` chunk; the data follows.
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct StructuredDataHead {
    chunk: StructuredReply,
    offset: U64<BE>,
}

/// Head of an extended `NBD_REPLY_TYPE_OFFSET_DATA` chunk; the data follows.
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct ExtendedDataHead {
    chunk: ExtendedReply,
    offset: U64<BE>,
}

impl ReplyWriter {
    pub(super) fn new(headers: HeaderFormat) -> ReplyWriter {
        ReplyWriter { headers, unsent_heads: 0 }
    }

    /// Whether another reply may be queued before the client has read some.
    #[inline]
    pub(super) fn has_room(&self, outbox: &Outbox) -> bool {
        self.unsent_heads < UNSENT_HEADS || outbox.is_empty()
    }

    /// Replies to a request that the volume has completed.
    #[inline]
    pub(super) fn finish(
        &mut self,
        outbox: &mut Outbox,
        of: &PendingRequest,
        result: Result<Output, IoError>,
    ) {
        let to = of.address();
        match result {
            // Data of another length would desynchronize the client; the guard rules that out
            // whatever the volume returns.
            Ok(Output::Data(data)) if data.len() as u64 == of.length => self.data(outbox, to, data),
            Ok(Output::Extents(mut extents)) if !extents.is_empty() => {
                extents.truncate(if of.one_extent { 1 } else { MAX_DESCRIPTORS });
                cut(&mut extents, of.length);
                self.block_status(outbox, to, &extents);
            }
            Ok(Output::Nothing) if !matches!(of.op, Op::Read | Op::BlockStatus) => self.success(outbox, to),
            Ok(_) => self.failure(outbox, of, IoError::Medium),
            Err(error) => self.failure(outbox, of, error),
        }
    }

    /// Replies with success, without payload.
    #[inline]
    pub(super) fn success(&mut self, outbox: &mut Outbox, to: ReplyAddress) {
        match self.headers {
            HeaderFormat::Simple | HeaderFormat::Structured => self.simple(outbox, to, 0),
            HeaderFormat::Extended => self.chunk(outbox, to, ReplyType::NBD_REPLY_TYPE_NONE, 0),
        }
    }

    /// Replies to a read of 0 bytes. A data chunk has at least one byte, so none is sent.
    pub(super) fn no_data(&mut self, outbox: &mut Outbox, to: ReplyAddress) {
        match self.headers {
            HeaderFormat::Simple => self.simple(outbox, to, 0),
            HeaderFormat::Structured | HeaderFormat::Extended => {
                self.chunk(outbox, to, ReplyType::NBD_REPLY_TYPE_NONE, 0);
            }
        }
    }

    /// Replies with an error, and its text for people where the format has a place for it.
    #[cold]
    pub(super) fn refuse(&mut self, outbox: &mut Outbox, to: ReplyAddress, refusal: &NbdRequestRefusal) {
        if self.headers == HeaderFormat::Simple {
            return self.simple(outbox, to, refusal.errno.0);
        }
        let text = refusal.text.as_bytes();
        let error = ErrorChunk {
            error: U32::new(refusal.errno.0),
            message_length: U16::new(u16::try_from(text.len()).unwrap_or(0)),
        };
        let length = size_of::<ErrorChunk>().saturating_add(text.len());
        self.chunk(outbox, to, ReplyType::NBD_REPLY_TYPE_ERROR, length);
        self.head(outbox, error.as_bytes());
        self.head(outbox, text);
    }

    #[cold]
    fn failure(&mut self, outbox: &mut Outbox, of: &PendingRequest, error: IoError) {
        self.refuse(outbox, of.address(), &NbdRequestRefusal::of_io_error(error, of.op));
    }

    /// Replies to a read of at least one byte. The read can no longer fail, so its only chunk is
    /// also the last.
    #[inline]
    fn data(&mut self, outbox: &mut Outbox, to: ReplyAddress, data: SgList) {
        self.data_chunk(outbox, to, to.offset, data, NBD_REPLY_FLAG_DONE);
    }

    /// Sends a part of the data of a read, which begins at byte `at` of the volume. In a simple
    /// reply the parts follow each other, and nothing can come between them.
    pub(super) fn part(
        &mut self,
        outbox: &mut Outbox,
        to: ReplyAddress,
        at: u64,
        data: SgList,
        is_last: bool,
    ) {
        match (self.headers, is_last) {
            (HeaderFormat::Simple, _) if at > to.offset => outbox.take_payload(data),
            (_, true) => self.data_chunk(outbox, to, at, data, NBD_REPLY_FLAG_DONE),
            (_, false) => self.data_chunk(outbox, to, at, data, 0),
        }
    }

    /// Whether a reply can still report an error after a part of the data.
    pub(super) fn can_fail_later(&self) -> bool {
        self.headers != HeaderFormat::Simple
    }

    #[inline]
    fn data_chunk(&mut self, outbox: &mut Outbox, to: ReplyAddress, at: u64, data: SgList, flags: u16) {
        let length = data.len().saturating_add(size_of::<U64<BE>>());
        let offset = U64::new(at);
        let flags = U16::new(flags);
        match self.headers {
            HeaderFormat::Simple => self.simple(outbox, to, 0),
            HeaderFormat::Structured => {
                let chunk = structured(to, ReplyType::NBD_REPLY_TYPE_OFFSET_DATA, length);
                let chunk = StructuredReply { flags, ..chunk };
                self.head(outbox, StructuredDataHead { chunk, offset }.as_bytes());
            }
            HeaderFormat::Extended => {
                let chunk = extended(to, ReplyType::NBD_REPLY_TYPE_OFFSET_DATA, length);
                let chunk = ExtendedReply { flags, ..chunk };
                self.head(outbox, ExtendedDataHead { chunk, offset }.as_bytes());
            }
        }
        outbox.take_payload(data);
    }

    /// Replies with the extents of `base:allocation`.
    fn block_status(&mut self, outbox: &mut Outbox, to: ReplyAddress, extents: &[Extent]) {
        let count = extents.len();
        let context = U32::new(BASE_ALLOCATION_ID);
        if self.headers == HeaderFormat::Extended {
            let length = count
                .saturating_mul(size_of::<ExtendedBlockDescriptor>())
                .saturating_add(size_of::<BlockStatusExt>());
            self.chunk(outbox, to, ReplyType::NBD_REPLY_TYPE_BLOCK_STATUS_EXT, length);
            let count = U32::new(u32::try_from(count).unwrap_or(u32::MAX));
            self.head(outbox, BlockStatusExt { context, count }.as_bytes());
            for extent in extents {
                let status = U64::new(state(extent).into());
                self.head(
                    outbox,
                    ExtendedBlockDescriptor { length: U64::new(extent.len), status }.as_bytes(),
                );
            }
        } else {
            let length =
                count.saturating_mul(size_of::<BlockDescriptor>()).saturating_add(context.as_bytes().len());
            self.chunk(outbox, to, ReplyType::NBD_REPLY_TYPE_BLOCK_STATUS, length);
            self.head(outbox, context.as_bytes());
            for extent in extents {
                // The length of a compact request is below 4 GiB.
                let length = U32::new(u32::try_from(extent.len).unwrap_or(u32::MAX));
                self.head(outbox, BlockDescriptor { length, status: U32::new(state(extent)) }.as_bytes());
            }
        }
    }

    #[inline]
    fn simple(&mut self, outbox: &mut Outbox, to: ReplyAddress, error: u32) {
        let reply = SimpleReply {
            magic: U32::new(NBD_SIMPLE_REPLY_MAGIC),
            error: U32::new(error),
            cookie: U64::new(to.cookie),
        };
        self.head(outbox, reply.as_bytes());
    }

    /// Queues the head of the last chunk of a reply.
    fn chunk(&mut self, outbox: &mut Outbox, to: ReplyAddress, reply_type: ReplyType, length: usize) {
        if self.headers == HeaderFormat::Extended {
            self.head(outbox, extended(to, reply_type, length).as_bytes());
        } else {
            self.head(outbox, structured(to, reply_type, length).as_bytes());
        }
    }

    #[inline]
    fn head(&mut self, outbox: &mut Outbox, bytes: &[u8]) {
        if outbox.is_empty() {
            self.unsent_heads = 0;
        }
        self.unsent_heads = self.unsent_heads.saturating_add(bytes.len());
        outbox.push_head(bytes);
    }
}

#[inline]
fn structured(to: ReplyAddress, reply_type: ReplyType, length: usize) -> StructuredReply {
    StructuredReply {
        magic: U32::new(NBD_STRUCTURED_REPLY_MAGIC),
        flags: U16::new(NBD_REPLY_FLAG_DONE),
        reply_type: U16::new(reply_type.0),
        cookie: U64::new(to.cookie),
        // At most MAX_TRANSFER plus an offset: it fits 32 bits.
        length: U32::new(length as u32),
    }
}

#[inline]
fn extended(to: ReplyAddress, reply_type: ReplyType, length: usize) -> ExtendedReply {
    ExtendedReply {
        magic: U32::new(NBD_EXTENDED_REPLY_MAGIC),
        flags: U16::new(NBD_REPLY_FLAG_DONE),
        reply_type: U16::new(reply_type.0),
        cookie: U64::new(to.cookie),
        offset: U64::new(to.offset),
        length: U64::new(length as u64),
    }
}

/// Cuts extents at the end of the request: a client may add their lengths without a check.
fn cut(extents: &mut Vec<Extent>, length: u64) {
    let mut left = length;
    extents.retain_mut(|extent| {
        extent.len = extent.len.min(left);
        left = left.saturating_sub(extent.len);
        extent.len > 0
    });
}

/// The `NBD_STATE_*` flags of `base:allocation`.
fn state(extent: &Extent) -> u32 {
    let hole = if extent.hole { NBD_STATE_HOLE } else { 0 };
    let zero = if extent.zero { NBD_STATE_ZERO } else { 0 };
    hole | zero
}

/// The id of `base:allocation`, the same on every connection; clients must not rely on that.
pub(super) const BASE_ALLOCATION_ID: u32 = 1;

/// The maximum number of descriptors in one reply; the document recommends at most 2^20.
const MAX_DESCRIPTORS: usize = 1 << 14;

/// The maximum length of the descriptors of one reply, in bytes.
pub(super) const MAX_STATUS_LEN: usize = MAX_DESCRIPTORS * size_of::<ExtendedBlockDescriptor>();

/// When this many bytes of heads are unsent, no further request is read until the outbox is empty.
const UNSENT_HEADS: usize = 1 << 20;
