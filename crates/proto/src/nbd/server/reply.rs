//! Replies, in whichever form was agreed (proto.md, "Simple reply message", "Structured reply chunk
//! message"; extension-ext-header, "Extended reply chunk message").
//!
//! A reply is one head on the stack, pushed once, and payload by reference. In the structured form
//! a success without payload stays a simple reply, as the document allows: it is shorter, and every
//! client reads it.

use super::pending::PendingRequest;
use super::request::NbdRequestRefusal;
use crate::nbd::HeaderFormat;
use crate::outbox::Outbox;
use blockmux_volume::{Extent, IoError, Op, Output, SgList};
use blockmux_wire::nbd::transmission::*;
use zerocopy::{BigEndian as BE, Immutable, IntoBytes, U16, U32, U64, Unaligned};

/// Where a reply goes: cookie and offset of its request.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReplyAddress {
    pub(super) cookie: u64,
    pub(super) offset: u64,
}

/// Writes replies into an outbox.
#[derive(Debug)]
pub(super) struct ReplyWriter {
    headers: HeaderFormat,
    /// Bytes of heads pushed since the outbox was last seen empty: what a client that does not read
    /// makes us keep.
    unsent_heads: usize,
}

/// An `NBD_REPLY_TYPE_OFFSET_DATA` chunk up to its data, structured.
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
struct StructuredDataHead {
    chunk: StructuredReply,
    offset: U64<BE>,
}

/// An `NBD_REPLY_TYPE_OFFSET_DATA` chunk up to its data, extended.
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

    /// Whether another request may be answered before the client reads something.
    #[inline]
    pub(super) fn has_room(&self, outbox: &Outbox) -> bool {
        self.unsent_heads < UNSENT_HEADS || outbox.is_empty()
    }

    /// Answers a request that the volume has finished.
    #[inline]
    pub(super) fn finish(
        &mut self,
        outbox: &mut Outbox,
        of: &PendingRequest,
        result: Result<Output, IoError>,
    ) {
        let to = of.address();
        match result {
            // A list of another length would put the client out of step; no volume may do that to
            // it.
            Ok(Output::Data(data)) if data.len() as u64 == of.length => self.data(outbox, to, &data),
            Ok(Output::Extents(extents)) if !extents.is_empty() => {
                let most = if of.one_extent { 1 } else { MAX_DESCRIPTORS };
                let extents = extents.get(..extents.len().min(most)).unwrap_or_default();
                self.block_status(outbox, to, extents);
            }
            Ok(Output::Nothing) if !matches!(of.op, Op::Read | Op::BlockStatus) => self.success(outbox, to),
            Ok(_) => self.failure(outbox, of, IoError::Medium),
            Err(error) => self.failure(outbox, of, error),
        }
    }

    /// Answers that all is done, without payload.
    #[inline]
    pub(super) fn success(&mut self, outbox: &mut Outbox, to: ReplyAddress) {
        match self.headers {
            HeaderFormat::Simple | HeaderFormat::Structured => self.simple(outbox, to, 0),
            HeaderFormat::Extended => self.chunk(outbox, to, ReplyType::NBD_REPLY_TYPE_NONE, 0),
        }
    }

    /// Answers a read of no bytes: a chunk of content must have at least one byte, so there is
    /// none.
    pub(super) fn no_data(&mut self, outbox: &mut Outbox, to: ReplyAddress) {
        match self.headers {
            HeaderFormat::Simple => self.simple(outbox, to, 0),
            HeaderFormat::Structured | HeaderFormat::Extended => {
                self.chunk(outbox, to, ReplyType::NBD_REPLY_TYPE_NONE, 0);
            }
        }
    }

    /// Answers that the request failed, with words for people where the form has room for them.
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

    /// Answers a read, not of no bytes. Nothing can fail after this, so the one chunk is also the
    /// last.
    #[inline]
    fn data(&mut self, outbox: &mut Outbox, to: ReplyAddress, data: &SgList) {
        let length = data.len().saturating_add(size_of::<U64<BE>>());
        let offset = U64::new(to.offset);
        match self.headers {
            HeaderFormat::Simple => self.simple(outbox, to, 0),
            HeaderFormat::Structured => {
                let chunk = structured(to, ReplyType::NBD_REPLY_TYPE_OFFSET_DATA, length);
                self.head(outbox, StructuredDataHead { chunk, offset }.as_bytes());
            }
            HeaderFormat::Extended => {
                let chunk = extended(to, ReplyType::NBD_REPLY_TYPE_OFFSET_DATA, length);
                self.head(outbox, ExtendedDataHead { chunk, offset }.as_bytes());
            }
        }
        outbox.push_payload(data);
    }

    /// Answers with the extents of the one context that there is.
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
                // Compact requests ask for less than 4 GiB, and a volume never answers more than
                // was asked.
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

    /// The head of the only chunk of a reply.
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
        // At most MAX_TRANSFER and a little.
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

/// `NBD_STATE_*` of `base:allocation`.
fn state(extent: &Extent) -> u32 {
    let hole = if extent.hole { NBD_STATE_HOLE } else { 0 };
    let zero = if extent.zero { NBD_STATE_ZERO } else { 0 };
    hole | zero
}

/// The id of `base:allocation` on every connection; a client may not assume that.
pub(super) const BASE_ALLOCATION_ID: u32 = 1;

/// The most descriptors in one answer; the document's advice is at most 2^20.
const MAX_DESCRIPTORS: usize = 1 << 14;

/// The most that the descriptors of one answer take, in bytes.
pub(super) const MAX_STATUS_LEN: usize = MAX_DESCRIPTORS * size_of::<ExtendedBlockDescriptor>();

/// A client that leaves this many bytes of heads unread is not listened to until it has read
/// everything.
const UNSENT_HEADS: usize = 1 << 20;
