//! RAID 0: the chunks of a volume are distributed over the members round-robin.
//!
//! ```text
//!   volume    | 0 | 1 | 2 | 3 | 4 | 5 |
//!   member 0  | 0 |   2   |   4   |          chunk c is chunk c / members of member c % members
//!   member 1  | 1 |   3   |   5   |
//! ```
//! A range of the volume is at most one range on each member, so a request becomes at most one
//! request per member, and a member's queue needs no more depth than the stripe's own. A request
//! that fails on one member may have changed others.

use crate::buf::Seg;
use crate::io::{Completion, Extent, Io, IoError, Op, Output, Tag};
use crate::ready::Waker;
use crate::sg_list::SgList;
use crate::slab::Slab;
use crate::volume::{Channel, Core, LinkCounts, Populated, Volume, VolumeInfo};
use std::ops::Range;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

/// Default chunk size, in bytes.
pub const DEFAULT_CHUNK: u64 = 1 << 20;
/// Maximum number of members of a stripe.
pub const MAX_MEMBERS: usize = 256;

/// Several volumes as one, with the sum of their sizes and bandwidths. All its data is lost if one
/// member is lost.
pub struct StripeVolume {
    info: VolumeInfo,
    layout: Layout,
    members: Vec<Arc<dyn Volume>>,
}

/// Why volumes cannot be striped: one line that says what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct StripeError(String);

impl StripeVolume {
    /// Stripes `members` in chunks of `chunk_bytes`. Every member contributes as many whole chunks
    /// as the smallest one has; sizes are read once, now.
    ///
    /// # Errors
    /// If there are no or too many members, or the chunk size does not fit them.
    pub fn new(chunk_bytes: u64, members: Vec<Arc<dyn Volume>>) -> Result<StripeVolume, StripeError> {
        if members.is_empty() || members.len() > MAX_MEMBERS {
            let count = members.len();
            return Err(StripeError(format!("a stripe of {count} volumes: name 1 to {MAX_MEMBERS}")));
        }
        let infos: Vec<_> = members.iter().map(|member| member.info()).collect();
        let block = infos.iter().map(|info| info.logical_block).max().unwrap_or(1);
        if chunk_bytes == 0 || !chunk_bytes.is_multiple_of(block.into()) {
            return Err(StripeError(format!(
                "a chunk of {chunk_bytes} bytes: take a multiple of the members' logical block of {block} bytes"
            )));
        }
        if let Some((index, small)) = infos.iter().enumerate().find(|(_, info)| info.size < chunk_bytes) {
            let size = small.size;
            return Err(StripeError(format!(
                "member {index} has {size} bytes, less than one chunk of {chunk_bytes}: take a smaller chunk"
            )));
        }
        let layout = Layout { chunk: chunk_bytes, members: members.len() as u64 };
        let too_large = || StripeError("the members together are larger than 2^64 bytes".to_owned());
        let info = combine(&infos, layout).ok_or_else(too_large)?;
        Ok(StripeVolume { info, layout, members })
    }
}

/// The combined properties of the members; `None` if the total size overflows.
fn combine(infos: &[VolumeInfo], layout: Layout) -> Option<VolumeInfo> {
    let smallest = infos.iter().map(|info| info.size).min()?;
    let any = |is: fn(&VolumeInfo) -> bool| infos.iter().any(is);
    let all = |is: fn(&VolumeInfo) -> bool| infos.iter().all(is);
    Some(VolumeInfo {
        size: (smallest / layout.chunk * layout.chunk).checked_mul(layout.members)?,
        logical_block: infos.iter().map(|info| info.logical_block).max()?,
        physical_block: infos.iter().map(|info| info.physical_block).max()?,
        preferred_block: infos.iter().map(|info| info.preferred_block).max()?,
        discard_granularity: infos.iter().map(|info| info.discard_granularity).max()?,
        read_only: any(|info| info.read_only),
        write_cache: any(|info| info.write_cache),
        volatile: any(|info| info.volatile),
        rotational: any(|info| info.rotational),
        fast_zeroes: all(|info| info.fast_zeroes),
        shared_flush: all(|info| info.shared_flush),
        lends_reads: all(|info| info.lends_reads),
        // A range may lie on two members.
        compare_and_write_unit: 0,
        registered_alignment: infos
            .iter()
            .map(|info| info.registered_alignment)
            .reduce(|one, other| Some(one?.max(other?)))?,
    })
}

/// The range of one member that holds the bytes of `range` of a stripe. Ranges of a stripe that do
/// not overlap do not overlap on a member either.
#[must_use]
pub fn range_on_member(chunk_bytes: u64, members: usize, member: usize, range: Range<u64>) -> Range<u64> {
    if chunk_bytes == 0 || chunk_bytes.checked_mul(members as u64).is_none_or(|row| row == 0) {
        return range;
    }
    let layout = Layout { chunk: chunk_bytes, members: members as u64 };
    layout.on_member(member, range.start)..layout.on_member(member, range.end)
}

impl Volume for StripeVolume {
    fn info(&self) -> VolumeInfo {
        self.info.clone()
    }

    fn populated(&self) -> Option<Populated> {
        let members = self.members.iter().filter_map(|member| member.populated());
        members.reduce(|sum, one| Populated { bytes: sum.bytes + one.bytes, of: sum.of + one.of })
    }

    fn links(&self) -> Option<LinkCounts> {
        let members = self.members.iter().filter_map(|member| member.links());
        members.reduce(|sum, one| LinkCounts { reconnects: sum.reconnects + one.reconnects })
    }

    fn snapshots_in_use(&self) -> Vec<String> {
        self.members.iter().flat_map(|member| member.snapshots_in_use()).collect()
    }

    fn deleted_file(&self) -> Option<PathBuf> {
        self.members.iter().find_map(|member| member.deleted_file())
    }

    fn lost_path(&self) -> Option<PathBuf> {
        self.members.iter().find_map(|member| member.lost_path())
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        let members: Result<Vec<_>, _> =
            self.members.iter().map(|member| member.open(core, depth, waker.clone())).collect();
        let members = members?;
        Ok(Box::new(StripeChannel {
            info: self.info.clone(),
            layout: self.layout,
            requests: Slab::with_capacity(depth),
            parts: Vec::with_capacity(depth as usize * members.len()),
            shares: (0..members.len()).map(|_| SgList::default()).collect(),
            done: Vec::with_capacity(depth as usize),
            below: Vec::with_capacity(depth as usize),
            members,
        }))
    }
}

#[derive(Clone, Copy)]
struct Layout {
    chunk: u64,
    members: u64,
}

/// The part of a range that lies in one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    member: usize,
    len: u64,
}

impl Layout {
    fn member_of(self, offset: u64) -> usize {
        (offset / self.chunk % self.members) as usize
    }

    /// How many of the volume's first `end` bytes lie on `member`.
    fn on_member(self, member: usize, end: u64) -> u64 {
        let row = self.chunk * self.members;
        let rest = (end % row).saturating_sub(member as u64 * self.chunk);
        end / row * self.chunk + rest.min(self.chunk)
    }

    /// The part of a range that lies on `member`: offset there and length, which may be 0.
    fn part(self, member: usize, offset: u64, len: u64) -> (u64, u64) {
        let start = self.on_member(member, offset);
        (start, self.on_member(member, offset + len) - start)
    }

    /// The chunks of a range in order.
    fn pieces(self, offset: u64, len: u64) -> impl Iterator<Item = Piece> {
        let end = offset + len;
        let mut at = offset;
        std::iter::from_fn(move || {
            let len = (self.chunk - at % self.chunk).min(end - at);
            let piece = Piece { member: self.member_of(at), len };
            at += len;
            (len > 0).then_some(piece)
        })
    }
}

struct StripeChannel {
    info: VolumeInfo,
    layout: Layout,
    members: Vec<Box<dyn Channel>>,
    /// Requests in flight; the index is the tag on every member.
    requests: Slab<StripedRequest>,
    /// Results of each member for each request, until all have completed.
    parts: Vec<Output>,
    /// Each member's share of the data that is being split; otherwise empty.
    shares: Vec<SgList>,
    done: Vec<Completion>,
    /// Completions polled from a member; otherwise empty.
    below: Vec<Completion>,
}

struct StripedRequest {
    /// The submitter's tag.
    tag: Tag,
    op: Op,
    offset: u64,
    len: u64,
    /// The submitter's read buffer; write data was passed to the members.
    data: Option<SgList>,
    /// The request lies on one member, whose completion is passed on.
    whole: bool,
    /// Members that have not completed.
    left: u32,
    error: Option<IoError>,
}

impl Channel for StripeChannel {
    fn submit(&mut self, io: Io) {
        if let Err(error) = self.info.check(&io) {
            return self.done.push(Completion { tag: io.tag, result: Err(error) });
        }
        let only_fast = matches!(io.op, Op::WriteZeroes { only_fast: true, .. });
        if only_fast && !self.info.fast_zeroes {
            return self.done.push(Completion { tag: io.tag, result: Err(IoError::Unsupported) });
        }
        if io.op == Op::Flush {
            return self.flush(io.tag);
        }
        if io.len == 0 {
            return self.done.push(Completion { tag: io.tag, result: Ok(empty_output(io)) });
        }
        let in_chunk = io.len <= self.layout.chunk - io.offset % self.layout.chunk;
        if in_chunk || self.members.len() == 1 { self.submit_whole(io) } else { self.submit_parts(io) }
    }

    fn kick(&mut self) {
        self.members.iter_mut().for_each(|member| member.kick());
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        let mut below = std::mem::take(&mut self.below);
        for member in 0..self.members.len() {
            self.members[member].poll(&mut below);
            below.drain(..).for_each(|part| self.on_part(member, part));
        }
        self.below = below;
        done.append(&mut self.done);
    }

    fn cancel(&mut self, tag: Tag) {
        if let Some((below, _)) = self.requests.iter().find(|(_, request)| request.tag == tag) {
            let below = Tag(below as u64);
            // A member ignores tags that it does not have.
            self.members.iter_mut().for_each(|member| member.cancel(below));
        }
    }
}

impl StripeChannel {
    fn flush(&mut self, tag: Tag) {
        let left = self.members.len() as u32;
        let (op, data, error) = (Op::Flush, None, None);
        let request = StripedRequest { tag, op, offset: 0, len: 0, data, whole: false, left, error };
        let tag = self.begin(request);
        self.members.iter_mut().for_each(|member| member.submit(Io::new(tag, Op::Flush, 0, 0)));
    }

    #[inline]
    fn begin(&mut self, request: StripedRequest) -> Tag {
        let index = self.requests.insert(request);
        let parts = (index + 1) * self.members.len();
        if self.parts.len() < parts {
            self.parts.resize_with(parts, Output::default);
        }
        Tag(index as u64)
    }

    #[inline]
    fn submit_whole(&mut self, io: Io) {
        let Io { tag, op, offset, len, data } = io;
        let request = StripedRequest { tag, op, offset, len, data: None, whole: true, left: 1, error: None };
        let tag = self.begin(request);
        let member = self.layout.member_of(offset);
        let offset = self.layout.on_member(member, offset);
        self.members[member].submit(Io { tag, op, offset, len, data });
    }

    fn submit_parts(&mut self, io: Io) {
        let Io { tag, op, offset, mut len, data } = io;
        if op == Op::BlockStatus {
            // A reply may cover less than requested: this bounds the chunks to merge.
            len = len.min(MAX_STATUS_CHUNKS.saturating_mul(self.layout.chunk) - offset % self.layout.chunk);
        }
        let has_data = data.is_some();
        if let Some(data) = &data {
            let mut cutter = Cutter::new(data);
            for piece in self.layout.pieces(offset, len) {
                cutter.take(piece.len as usize, &mut self.shares[piece.member]);
            }
        }
        let keep = data.filter(|_| op == Op::Read);
        let request = StripedRequest { tag, op, offset, len, data: keep, whole: false, left: 0, error: None };
        let tag = self.begin(request);
        for member in 0..self.members.len() {
            let (offset, len) = self.layout.part(member, offset, len);
            if len > 0 {
                let data = has_data.then(|| std::mem::take(&mut self.shares[member]));
                self.requests.get_mut(tag.0 as usize).expect("it was begun").left += 1;
                self.members[member].submit(Io { tag, op, offset, len, data });
            }
        }
    }

    #[inline]
    fn on_part(&mut self, member: usize, part: Completion) {
        let below = part.tag;
        let request = self.requests.get_mut(below.0 as usize).expect("the tag is in flight");
        if request.whole {
            let tag = request.tag;
            self.requests.discard(below.0 as usize);
            return self.done.push(Completion { tag, result: part.result });
        }
        match part.result {
            Ok(output) => self.parts[below.0 as usize * self.members.len() + member] = output,
            Err(error) => request.error = request.error.or(Some(error)),
        }
        request.left -= 1;
        if request.left == 0 {
            self.finish(below);
        }
    }

    /// Completes a request of which all members have completed their parts.
    fn finish(&mut self, below: Tag) {
        let request = self.requests.remove(below.0 as usize).expect("the tag is in flight");
        let first = below.0 as usize * self.members.len();
        let parts = &mut self.parts[first..first + self.members.len()];
        let result = match (request.error, request.op, request.data) {
            (Some(error), ..) => Err(error),
            (None, Op::Read, Some(data)) => Ok(Output::Data(data)),
            (None, Op::Read, None) => join_data(self.layout, request.offset, request.len, parts),
            (None, Op::BlockStatus, _) => Ok(join_extents(self.layout, request.offset, request.len, parts)),
            _ => Ok(Output::Nothing),
        };
        parts.fill_with(Output::default);
        self.done.push(Completion { tag: request.tag, result });
    }
}

/// The result of a request of length 0.
fn empty_output(io: Io) -> Output {
    match io.op {
        Op::Read => Output::Data(io.data.unwrap_or_default()),
        Op::BlockStatus => Output::Extents(Vec::new()),
        _ => Output::Nothing,
    }
}

/// Merges the members' memory in the volume's order.
fn join_data(layout: Layout, offset: u64, len: u64, parts: &[Output]) -> Result<Output, IoError> {
    let empty = SgList::default();
    let lists = parts.iter().map(|part| if let Output::Data(list) = part { list } else { &empty });
    let mut cutters: Vec<_> = lists.map(Cutter::new).collect();
    let mut joined = SgList::default();
    for piece in layout.pieces(offset, len) {
        cutters[piece.member].take(piece.len as usize, &mut joined);
    }
    // A member that returned less than requested has failed.
    if joined.len() as u64 == len { Ok(Output::Data(joined)) } else { Err(IoError::Medium) }
}

/// Merges the members' extents in the volume's order, up to the end of the shortest reply.
fn join_extents(layout: Layout, offset: u64, len: u64, parts: &mut [Output]) -> Output {
    let mut cursors: Vec<_> = parts.iter().map(ExtentCursor::new).collect();
    let mut joined: Vec<Extent> = Vec::new();
    for mut piece in layout.pieces(offset, len) {
        while piece.len > 0 {
            let Some(extent) = cursors[piece.member].take(piece.len) else { return Output::Extents(joined) };
            piece.len -= extent.len;
            let full = joined.len() == MAX_EXTENTS;
            match joined.last_mut() {
                Some(last) if (last.hole, last.zero) == (extent.hole, extent.zero) => last.len += extent.len,
                _ if full => return Output::Extents(joined),
                _ => joined.push(extent),
            }
        }
    }
    Output::Extents(joined)
}

/// Splits a list in one pass.
struct Cutter<'a> {
    segs: &'a [Seg],
    /// Bytes of the first segment already taken.
    done: usize,
}

impl<'a> Cutter<'a> {
    fn new(list: &'a SgList) -> Cutter<'a> {
        Cutter { segs: list.segs(), done: 0 }
    }

    /// Moves the next `len` bytes, or what is left, to the end of `to`.
    fn take(&mut self, mut len: usize, to: &mut SgList) {
        while len > 0 {
            let Some((first, rest)) = self.segs.split_first() else { return };
            let part_len = len.min(first.len() - self.done);
            if part_len > 0 {
                to.push(first.slice(self.done, part_len));
            }
            len -= part_len;
            self.done += part_len;
            if self.done == first.len() {
                (self.segs, self.done) = (rest, 0);
            }
        }
    }
}

/// Iterates over the extents in one member's reply.
struct ExtentCursor<'a> {
    extents: &'a [Extent],
    done: u64,
}

impl<'a> ExtentCursor<'a> {
    fn new(part: &'a Output) -> ExtentCursor<'a> {
        let extents = if let Output::Extents(extents) = part { extents.as_slice() } else { &[] };
        ExtentCursor { extents, done: 0 }
    }

    /// The next part of an extent, at most `len` bytes of it.
    fn take(&mut self, len: u64) -> Option<Extent> {
        let (first, rest) = self.extents.split_first()?;
        let part_len = len.min(first.len - self.done);
        self.done += part_len;
        if self.done == first.len {
            (self.extents, self.done) = (rest, 0);
        }
        Some(Extent { len: part_len, ..*first })
    }
}

/// Maximum number of extents in one reply.
const MAX_EXTENTS: usize = 4096;
const MAX_STATUS_CHUNKS: u64 = 16384;

#[cfg(test)]
mod tests;
