//! SCSI commands: from the PDU to the device server and back (RFC 7143 §11.3, §11.4, §11.7, §11.8).

use super::answer::Expected;
use super::full::Turn;
use super::receive::Purpose;
use super::shared::Mail;
use super::tasks::{Entry, Progress, State, Tasks};
use super::transfer::{Misfit, Transfer};
use crate::event::AuditEvent;
use crate::iscsi::login::operational::Key;
use crate::scsi::task_set::{FunctionDone, Parts, TaskEvent, TaskRouter, Transport};
use crate::scsi::{Response, Sense, Status, Task};
use blockmux_volume::{MAX_TRANSFER, Seg, SgList};
use blockmux_wire::iscsi::scsi::*;
use blockmux_wire::iscsi::{Bhs, FLAG_FINAL, RESERVED_TAG};
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use zerocopy::transmute_ref;

impl Turn<'_> {
    /// A command that is next in order.
    #[inline]
    pub(super) fn on_command(&mut self, pdu: &ScsiCommand, bhs: &Bhs, ahs: &[u8]) -> Purpose {
        let request = match self.check_command(pdu, bhs, ahs) {
            Ok(request) => request,
            Err(reason) => {
                self.reject(reason, bhs);
                return Purpose::Nothing;
            }
        };
        // Who uses a tag again has no use for what it stood for.
        self.session.forget_answer(pdu.initiator_task_tag.get());
        let immediate = pdu.data_segment_length.get();
        let is_final = pdu.flags & FLAG_FINAL != 0;
        let first_burst = self.connection.parameters.get(Key::FirstBurstLength);
        let most = request.data_out.unwrap_or(0).min(first_burst);
        let refusal = if self.connection.parting.has_begun() {
            Some(Response::bare(Status::BUSY))
        } else {
            self.misfit(immediate, is_final, most).map(|misfit| Response::failed(data_sense(misfit.into())))
        };
        let (data_in, is_immediate) = (request.data_in, bhs.is_immediate());
        let progress = Progress {
            data_in,
            data_out: request.data_out,
            is_immediate,
            transfer: Transfer::new(immediate, !is_final, most),
            memory: 0,
        };
        let (owner, lun) = (self.connection.key, request.command.lun);
        let entry = Entry::new(owner, pdu.initiator_task_tag.get(), lun, progress);
        let slot = self.session.tasks.insert(entry);
        self.connection.reading = self.connection.reading.saturating_add(bounded(data_in.unwrap_or(0)));
        self.connection.live = self.connection.live.saturating_add(1);
        if is_immediate {
            self.session.immediate = self.session.immediate.saturating_add(1);
        } else {
            self.session.window.occupy();
        }
        if let Some(mover) = &mut self.connection.replies.mover {
            mover.assign(slot);
        }
        match refusal {
            None => self.start(slot, &request.command),
            Some(refusal) => self.refuse(slot, refusal),
        }
        if immediate == 0 {
            return Purpose::Nothing;
        }
        Purpose::Data { slot, offset: 0, is_final, is_immediate: true }
    }

    /// A Data-Out: what becomes of its data. That of a task that is gone, aborted perhaps, is dropped.
    #[inline]
    pub(super) fn on_data_out(&mut self, bhs: &Bhs) -> Purpose {
        let pdu: &DataOut = transmute_ref!(bhs);
        let (itt, ttt) = (pdu.initiator_task_tag.get(), pdu.target_transfer_tag.get());
        let slot = if ttt == RESERVED_TAG { self.session.tasks.find(itt) } else { Some(Tasks::slot_of(ttt)) };
        let Some(slot) = slot else { return Purpose::Nothing };
        let key = self.connection.key;
        let current =
            self.session.tasks.get_mut(slot).map_or(0, |entry| entry.progress.transfer.current_r2t());
        let is_current = ttt == RESERVED_TAG || self.session.tasks.transfer_tag(slot, current) == ttt;
        let Some(entry) = self
            .session
            .tasks
            .get_mut(slot)
            .filter(|entry| is_current && entry.tag == itt && entry.owner == key)
        else {
            return Purpose::Nothing;
        };
        if matches!(entry.state, State::Aborted(_)) {
            return Purpose::Nothing;
        }
        let (offset, len) = (pdu.buffer_offset.get(), pdu.data_segment_length.get());
        let checked = entry.progress.transfer.check(ttt, pdu.data_sn.get(), offset, len);
        if entry.state == State::Data
            && !entry.progress.transfer.is_lost()
            && let Err(misfit) = checked
        {
            if self.connection.level > 0 && entry.progress.transfer.is_gap(pdu.data_sn.get(), offset) {
                entry.progress.transfer.lose();
                return Purpose::Data {
                    slot,
                    offset,
                    is_final: pdu.flags & FLAG_FINAL != 0,
                    is_immediate: false,
                };
            }
            if ttt == RESERVED_TAG && entry.progress.transfer.has_lost() {
                // Unsolicited data that was given up, and is asked for by now.
                return Purpose::Nothing;
            }
            let is_open = entry.progress.transfer.is_open();
            self.fail(slot, Response::failed(data_sense(misfit.into())));
            if !is_open {
                self.end_if_closed(slot);
                return Purpose::Nothing;
            }
        }
        Purpose::Data { slot, offset, is_final: pdu.flags & FLAG_FINAL != 0, is_immediate: false }
    }

    /// Data of a task has come: put in its place, or `lent` in the receive buffer.
    #[inline]
    pub(super) fn on_data(
        &mut self,
        slot: usize,
        offset: u32,
        len: usize,
        lent: Option<Seg>,
        (is_final, is_immediate): (bool, bool),
    ) {
        let Some(entry) = self.session.tasks.get_mut(slot) else { return };
        if entry.state != State::Data {
            entry.progress.transfer.discard(is_final);
            return self.end_if_closed(slot);
        }
        if entry.progress.transfer.is_lost() {
            return self.skip(slot, is_final);
        }
        if let Some(lent) = lent
            && !entry.progress.transfer.put(offset, &lent)
        {
            if !self.give_memory(slot) {
                self.fail(slot, Response::bare(Status::BUSY));
                return self.on_data(slot, offset, len, None, (is_final, is_immediate));
            }
            if let Some(entry) = self.session.tasks.get_mut(slot) {
                entry.progress.transfer.put(offset, &lent);
            }
        }
        let Some(entry) = self.session.tasks.get_mut(slot) else { return };
        let advanced = if is_immediate {
            entry.progress.transfer.advance_immediate(len as u32, is_final);
            Ok(())
        } else {
            entry.progress.transfer.advance(len as u32, is_final)
        };
        if let Err(misfit) = advanced {
            self.fail(slot, Response::failed(data_sense(misfit.into())));
            return self.end_if_closed(slot);
        }
        self.go_on(slot);
    }

    /// Lets writes ask for data that had no memory, in order, as long as there is some.
    pub(super) fn resume_grants(&mut self) {
        while let Some(&slot) = self.connection.grants.front() {
            let wants = self.session.tasks.get_mut(slot).is_some_and(|entry| {
                entry.state == State::Data
                    && entry.progress.transfer.wants_grant()
                    && !entry.progress.transfer.has_memory()
            });
            if wants && !self.give_memory(slot) {
                return;
            }
            self.connection.grants.pop_front();
            if wants {
                self.ask(slot);
            }
        }
    }

    /// Gives a task's round its memory, if there is some.
    pub(super) fn give_memory(&mut self, slot: usize) -> bool {
        let Some(entry) = self.session.tasks.get_mut(slot) else { return false };
        if entry.progress.transfer.has_memory() {
            return true;
        }
        let len = entry.progress.transfer.round_len();
        if self.connection.granted > 0
            && self.connection.granted.saturating_add(len) > self.connection.share()
        {
            return false;
        }
        let Some(memory) = self.connection.pool.take_payload_or_wait(len) else { return false };
        self.connection.given = self.connection.given.wrapping_add(1);
        entry.progress.transfer.given = self.connection.given;
        entry.progress.transfer.set_memory(memory.seg(0, len));
        entry.progress.memory = entry.progress.memory.saturating_add(len);
        self.connection.granted = self.connection.granted.saturating_add(len);
        true
    }

    /// Goes on with a task that collects data.
    #[inline]
    pub(super) fn go_on(&mut self, slot: usize) {
        match self.take_round(slot) {
            Some(data) => self.deliver_data(slot, data),
            None => self.ask(slot),
        }
    }

    /// A round's data, if all of it is here.
    #[inline]
    fn take_round(&mut self, slot: usize) -> Option<Result<SgList, Sense>> {
        let entry = self.session.tasks.get_mut(slot)?;
        let transfer = Some(&mut entry.progress.transfer).filter(|transfer| transfer.is_complete())?;
        // A second round whose data came with the first, beyond what that wanted, was dropped.
        Some(transfer.take_data().ok_or_else(|| data_sense(NOT_ENOUGH_DATA)))
    }

    /// Sends what R2Ts may be sent, or queues for the memory that they need.
    fn ask(&mut self, slot: usize) {
        let is_failed = self.connection.is_failed;
        let Some(entry) = self.session.tasks.get_mut(slot).filter(|_| !is_failed) else { return };
        if !entry.progress.transfer.has_memory() {
            if !entry.progress.transfer.wants_grant() {
                return;
            }
            // Whoever came first gets memory first.
            if !self.connection.grants.is_empty() || !self.give_memory(slot) {
                return self.connection.grants.push_back(slot);
            }
        }
        if self.connection.replies.mover.is_some() {
            return self.fetch(slot);
        }
        let max_burst = self.connection.parameters.get(Key::MaxBurstLength);
        // What is lost is asked for again in order only if nothing else was asked for (RFC 7143 §13.19).
        let max_outstanding = match self.connection.level {
            0 => self.connection.parameters.get(Key::MaxOutstandingR2T),
            _ => 1,
        };
        let Some(entry) = self.session.tasks.get_mut(slot) else { return };
        let to = (entry.lun.0.to_be_bytes(), entry.tag);
        while let Some(grant) = self
            .session
            .tasks
            .get_mut(slot)
            .and_then(|entry| entry.progress.transfer.grant(max_burst, max_outstanding))
        {
            let ttt = self.session.tasks.transfer_tag(slot, grant.r2t_sn);
            self.connection.replies.r2t(self.outbox, self.session.window, to, ttt, grant);
        }
    }
}

impl Transport for Turn<'_> {
    type Progress = Progress;

    #[inline]
    fn parts(&mut self) -> Parts<'_, Progress> {
        let (tasks, connection) = (&mut self.session.tasks, &mut *self.connection);
        Parts { tasks, queue: &mut connection.queue, owner: connection.key }
    }

    #[inline]
    fn fetch(&mut self, slot: usize, len: usize) -> Option<Result<SgList, Sense>> {
        let entry = self.session.tasks.get_mut(slot)?;
        entry.progress.transfer.begin_round(u32::try_from(len).unwrap_or(u32::MAX));
        let data = self.take_round(slot);
        if data.is_none() {
            self.ask(slot);
        }
        data
    }

    #[inline]
    fn is_receiving(progress: &Progress) -> bool {
        progress.transfer.is_open()
    }

    fn is_fetching(&mut self, slot: usize) -> bool {
        // Over RDMA, data that is asked for is read from memory that the initiator closes when it hears of the abort.
        let is_read = self.connection.replies.mover.is_some();
        is_read && self.session.tasks.get_mut(slot).is_some_and(|entry| entry.progress.transfer.is_asked())
    }

    #[inline]
    fn complete(&mut self, slot: usize, response: &mut Response) {
        let Some(entry) = self.session.tasks.get_mut(slot) else { return };
        let expected = Expected {
            itt: entry.tag,
            lun: entry.lun.0.to_be_bytes(),
            data_in: entry.progress.data_in,
            data_out: entry.progress.data_out,
            r2ts: entry.progress.transfer.r2t_count(),
        };
        if let Some(change) = entry.task.as_ref().and_then(Task::reservation_change) {
            let is_done = response.status == Status::GOOD;
            let unit = match entry.lun.number() {
                Some(number) => format!("LUN {number}"),
                None => format!("LUN {:#018x}", entry.lun.0),
            };
            self.connection.events.push(AuditEvent::Reservation { unit, change, is_done });
        }
        self.drop_task(slot);
        if self.connection.is_failed {
            let outcome = self.connection.replies.outcome(expected, response);
            return self.session.park(self.connection.key, outcome);
        }
        if self.connection.replies.mover.is_some() {
            return self.connection.replies.command_over_rdma(
                self.outbox,
                self.session.window,
                slot,
                expected,
                response,
            );
        }
        self.connection.replies.command(self.outbox, self.session.window, expected, response);
    }

    #[inline]
    fn release(&mut self, slot: usize) {
        let Some(entry) = self.session.tasks.get_mut(slot) else { return };
        let connection = &mut *self.connection;
        if !connection.grants.is_empty() {
            connection.grants.retain(|other| *other != slot);
        }
        let Progress { data_in, memory, is_immediate, .. } = entry.progress;
        if entry.owner == connection.key {
            connection.reading = connection.reading.saturating_sub(bounded(data_in.unwrap_or(0)));
            connection.granted = connection.granted.saturating_sub(memory);
            connection.live = connection.live.saturating_sub(1);
        }
        if is_immediate {
            self.session.immediate = self.session.immediate.saturating_sub(1);
        } else {
            self.session.window.release();
        }
    }

    fn on_function_done(&mut self, done: FunctionDone) {
        if self.connection.is_over {
            return;
        }
        self.respond(done.tag, FunctionResponse::FUNCTION_COMPLETE);
        if done.ends_session {
            // RFC 7143 §11.5.1: the connections of all initiators, and this one's when it has its answer.
            if let Some(membership) = &self.session.membership {
                membership.end_others();
            }
            self.end_session();
        }
    }

    fn post(&mut self, owner: u32, event: TaskEvent) -> bool {
        let is_there = self.session.has_link(owner);
        self.session.post(owner, Mail::Task(event));
        is_there
    }
}

impl From<Misfit> for Asc {
    fn from(misfit: Misfit) -> Asc {
        match misfit {
            Misfit::Unexpected => UNEXPECTED_UNSOLICITED_DATA,
            Misfit::WrongAmount => NOT_ENOUGH_DATA,
        }
    }
}

/// ABORTED COMMAND: a delivery that failed (RFC 7143 §11.4.7.2).
pub(super) fn data_sense(asc: Asc) -> Sense {
    Sense::new(SenseKey::ABORTED_COMMAND, asc)
}

/// What a length that an initiator names may make us hold, in bytes.
#[inline]
pub(super) fn bounded(len: u32) -> usize {
    len.min(MAX_TRANSFER) as usize
}

/// UNEXPECTED UNSOLICITED DATA.
const UNEXPECTED_UNSOLICITED_DATA: Asc = Asc(0x0c0c);
/// NOT ENOUGH UNSOLICITED DATA; the RFC's "incorrect amount of data".
pub(super) const NOT_ENOUGH_DATA: Asc = Asc(0x0c0d);
/// PROTOCOL SERVICE CRC ERROR.
pub(super) const CRC_ERROR: Asc = Asc(0x4705);
