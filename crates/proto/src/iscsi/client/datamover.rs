//! Commands over RDMA, with registered memory instead of Data-Out and Data-In PDUs (RFC 5047).
//!
//! [`ExposedCommands`] registers the memory of commands, and invalidates it before they end.

use crate::driver::session::ProtocolError;
use crate::iscsi::iser::HEADERS_LEN;
use crate::iscsi::unexpected::InitiatorUnexpectedPdus;
use crate::rdma::exposure::{EndedCommand, ExposedCommand, ExposedCommands};
use crate::rdma::{QueuePair, Remote, RemoteRights};
use blockmux_volume::SgList;
use blockmux_wire::iscsi::Bhs;
use blockmux_wire::iscsi::scsi::ScsiCommand;
use blockmux_wire::iser::{ControlHeader, HEADER_LEN};
use smallvec::SmallVec;
use std::collections::VecDeque;
use zerocopy::IntoBytes;

/// Queued commands and registrations of one connection.
#[derive(Default)]
pub(super) struct InitiatorDatamover {
    pub(super) commands: ExposedCommands<ScsiCommand, DelayedResponse>,
    /// Commands whose memory was invalidated.
    pub(super) invalidated: VecDeque<EndedCommand<DelayedResponse>>,
    /// Number of receive buffers to post again.
    pub(super) receives: u32,
    /// Counts unexpected PDUs (RFC 7145 §6.7.2).
    pub(super) unexpected: InitiatorUnexpectedPdus,
    /// Whether the queue pair is connected and no disconnect was requested.
    pub(super) is_connected: bool,
    /// Error of a delayed response; returned by the next call.
    pub(super) pending_error: Option<ProtocolError>,
}

/// A response that did not invalidate its command's memory.
pub(super) struct DelayedResponse {
    pub(super) bhs: Bhs,
    pub(super) data: ResponseData,
}

/// Data segment of a response: usually empty, otherwise a few bytes of sense data.
pub(super) type ResponseData = SmallVec<[u8; 128]>;

impl ExposedCommand for ScsiCommand {
    #[inline]
    fn send(
        &mut self,
        payload: &SgList,
        exposed: Option<(Remote, RemoteRights)>,
        queue_pair: &mut impl QueuePair,
    ) {
        let header = match exposed {
            None => ControlHeader::new(),
            Some((remote, RemoteRights::RemoteWrite)) => {
                ControlHeader::new().with_read(remote.stag.0, remote.address)
            }
            Some((remote, RemoteRights::RemoteRead)) => {
                ControlHeader::new().with_write(remote.stag.0, remote.address)
            }
        };
        let mut head = [0; HEADERS_LEN];
        let (place, rest) = head.split_at_mut(HEADER_LEN);
        place.copy_from_slice(header.as_bytes());
        rest.copy_from_slice(self.as_bytes());
        queue_pair.send(&head, payload, None);
    }
}

/// Maximum number of commands in flight on one connection.
pub(super) const MAX_COMMANDS: u32 = 256;
