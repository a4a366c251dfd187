//! Parsing the heads of replies in their three formats (proto.md, "Simple reply message",
//! "Structured reply chunk message", "Extended reply chunk message").

use super::reply::{TRANSMISSION, error};
use crate::driver::session::ProtocolError;
use crate::nbd::HeaderFormat;
use crate::slots::SlotKey;
use blockmux_wire::nbd::transmission::{
    ExtendedReply, NBD_EXTENDED_REPLY_MAGIC, NBD_REPLY_FLAG_DONE, NBD_SIMPLE_REPLY_MAGIC,
    NBD_STRUCTURED_REPLY_MAGIC, ReplyType, SimpleReply, StructuredReply,
};
use zerocopy::FromBytes;

/// The head of a simple reply or of a reply chunk.
#[derive(Clone, Copy)]
pub(super) struct ReplyHead {
    pub(super) kind: ReplyKind,
    pub(super) cookie: SlotKey,
    /// The request's offset; only extended replies repeat it.
    pub(super) offset: Option<u64>,
    /// Length of the payload, in bytes.
    pub(super) length: u64,
    /// Length of the head, in bytes.
    pub(super) size: usize,
}

#[derive(Clone, Copy)]
pub(super) enum ReplyKind {
    Simple { error: u32 },
    Chunk { reply_type: ReplyType, last: bool },
}

/// The length of the shortest head in this format, in bytes.
pub(super) fn shortest(headers: HeaderFormat) -> usize {
    if headers == HeaderFormat::Extended { size_of::<ExtendedReply>() } else { size_of::<SimpleReply>() }
}

/// Parses a head; the inner error is the number of bytes that it needs.
#[inline]
pub(super) fn read(bytes: &[u8], headers: HeaderFormat) -> Result<Result<ReplyHead, usize>, ProtocolError> {
    let Some(magic) = bytes.first_chunk().map(|magic| u32::from_be_bytes(*magic)) else {
        return Ok(Err(shortest(headers)));
    };
    match (magic, headers) {
        (NBD_SIMPLE_REPLY_MAGIC, HeaderFormat::Simple | HeaderFormat::Structured) => {
            Ok(SimpleReply::read_from_prefix(bytes).map_err(|_| size_of::<SimpleReply>()).map(
                |(reply, _)| ReplyHead {
                    kind: ReplyKind::Simple { error: reply.error.get() },
                    cookie: SlotKey(reply.cookie.get()),
                    offset: None,
                    length: 0,
                    size: size_of::<SimpleReply>(),
                },
            ))
        }
        (NBD_STRUCTURED_REPLY_MAGIC, HeaderFormat::Structured) => {
            let reply = StructuredReply::read_from_prefix(bytes).map_err(|_| size_of::<StructuredReply>());
            Ok(reply.map(|(reply, _)| ReplyHead {
                kind: ReplyKind::chunk(reply.reply_type.get(), reply.flags.get()),
                cookie: SlotKey(reply.cookie.get()),
                offset: None,
                length: reply.length.get().into(),
                size: size_of::<StructuredReply>(),
            }))
        }
        (NBD_EXTENDED_REPLY_MAGIC, HeaderFormat::Extended) => {
            let reply = ExtendedReply::read_from_prefix(bytes).map_err(|_| size_of::<ExtendedReply>());
            Ok(reply.map(|(reply, _)| ReplyHead {
                kind: ReplyKind::chunk(reply.reply_type.get(), reply.flags.get()),
                cookie: SlotKey(reply.cookie.get()),
                offset: Some(reply.offset.get()),
                length: reply.length.get(),
                size: size_of::<ExtendedReply>(),
            }))
        }
        (NBD_SIMPLE_REPLY_MAGIC | NBD_STRUCTURED_REPLY_MAGIC | NBD_EXTENDED_REPLY_MAGIC, _) => {
            Err(error("sent a reply in a form that was not agreed", TRANSMISSION))
        }
        _ => Err(error("sent a reply with a wrong magic number", TRANSMISSION)),
    }
}

impl ReplyKind {
    fn chunk(reply_type: u16, flags: u16) -> ReplyKind {
        ReplyKind::Chunk { reply_type: ReplyType(reply_type), last: flags & NBD_REPLY_FLAG_DONE != 0 }
    }
}
