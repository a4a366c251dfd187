//! A connection's turn over RDMA: messages in, and data that was read from the initiator's memory.

use super::datamover::{Datamover, Remotes};
use super::full::{FullFeature, Turn, data_in_of};
use super::receive::{Purpose, Segment};
use super::tasks::{State, Tasks};
use crate::iscsi::iser::Message;
use crate::iscsi::login::operational::Key;
use crate::iscsi::pdu::Head;
use crate::scsi::task_set::TaskRouter;
use crate::session::ProtocolError;
use blockmux_volume::Seg;
use blockmux_wire::iscsi::scsi::DataOut;
use blockmux_wire::iscsi::{BHS_LEN, Opcode, RESERVED_TAG};
use zerocopy::transmute_ref;

impl FullFeature {
    /// The connection is a queue pair.
    pub(super) fn set_mover(&mut self, mover: Datamover) {
        self.connection.replies.mover = Some(mover);
    }

    /// Whether tasks that are over, or are to be soon, wait for data to be read from the initiator's memory.
    pub(super) fn wants_reads_over(&self) -> bool {
        let connection = &self.connection;
        connection.is_closed()
            || connection.parting.has_begun()
            || self.shared.borrow().tasks.has_aborted_without_io(connection.key)
    }

    #[inline]
    pub(super) fn mover(&mut self) -> Option<&mut Datamover> {
        self.connection.replies.mover.as_mut()
    }
}

impl Turn<'_> {
    /// Takes a message; `false`: there is no room for its data-in yet.
    ///
    /// # Errors
    /// If it is none that may come.
    pub(super) fn on_message(&mut self, message: &Message) -> Result<bool, ProtocolError> {
        self.connection.keep_alive.heard = true;
        let (Message { header, bhs, ahs, data }, data_len) = (message, message.data_len());
        if !self.connection.has_room(data_in_of(bhs)) {
            return Ok(false);
        }
        if data_len > self.connection.parameters.get(Key::MaxRecvDataSegmentLength) as usize {
            return Err(ProtocolError {
                what: "sent a data segment above TargetRecvDataSegmentLength",
                reference: "RFC 7145 §6.4",
            });
        }
        if bhs.opcode() == Opcode::DATA_OUT && !self.may_come_unasked(transmute_ref!(bhs)) {
            return Err(ProtocolError {
                what: "sent data as a message that RDMA Read is to bring",
                reference: "RFC 7145 §7.3.4",
            });
        }
        if let Some(mover) = &mut self.connection.replies.mover {
            mover.arrive(Remotes::from(header));
        }
        let head = Head { bhs: *bhs, len: BHS_LEN.saturating_add(ahs.len()), data_len };
        match self.on_head(&head, ahs)? {
            Purpose::Talk => self.on_talk(bhs, &data.as_ref().map(Seg::to_vec).unwrap_or_default()),
            purpose => self.conclude(Segment { bhs: *bhs, len: data_len, purpose }, data.clone(), true),
        }
        if !self.session.early.is_empty() {
            self.deliver_early();
        }
        Ok(true)
    }

    /// Whether a Data-Out is of no task, or of one whose data is not being read: else its memory would have two writers.
    fn may_come_unasked(&mut self, data_out: &DataOut) -> bool {
        let slot = self.session.tasks.find(data_out.initiator_task_tag.get());
        let is_fetched = slot
            .and_then(|slot| self.session.tasks.get_mut(slot))
            .is_some_and(|entry| entry.progress.transfer.is_asked());
        data_out.target_transfer_tag.get() == RESERVED_TAG && !is_fetched
    }

    /// Reads what a task's round lacks from the initiator's memory, all at once.
    pub(super) fn fetch(&mut self, slot: usize) {
        let Some(entry) = self.session.tasks.get_mut(slot) else { return };
        let Some(grant) = entry.progress.transfer.grant(u32::MAX, 1) else { return };
        let Some(place) = entry.progress.transfer.place(grant.offset, grant.len as usize) else { return };
        let tag = self.session.tasks.transfer_tag(slot, grant.r2t_sn);
        if let Some(mover) = &mut self.connection.replies.mover {
            mover.get(slot, tag, place, grant.offset);
        }
    }

    /// What was asked for under that tag has been read, or never will be; then the connection is over.
    pub(super) fn on_fetched(&mut self, tag: u32) {
        let slot = Tasks::slot_of(tag);
        let key = self.connection.key;
        let Some(entry) = self.session.tasks.get_mut(slot).filter(|entry| entry.owner == key) else { return };
        let (r2t_sn, state) = (entry.progress.transfer.current_r2t(), entry.state);
        let asked = entry.progress.transfer.outstanding(r2t_sn);
        if self.session.tasks.transfer_tag(slot, r2t_sn) != tag {
            return;
        }
        if let State::Aborted(_) = state {
            return self.drop_aborted(slot);
        }
        if let Some(grant) = asked {
            self.on_data(slot, grant.offset, grant.len as usize, None, (true, false));
        }
    }
}
