//! SCSI commands: from the PDU to the device server and back (RFC 7143 §11.3, §11.4, §11.7, §11.8).

use super::answer::Expected;
use super::full::{Turn, status};
use super::receive::Purpose;
use super::tasks::{Entry, Pausing, State, TaskTable};
use super::transfer::{Misfit, Transfer};
use crate::event::AuditEvent;
use crate::exports::VolumeId;
use crate::iscsi::login::operational::Key;
use crate::scsi::{Response, Sense, Status, Step, Task};
use blockmux_volume::{Completion, MAX_TRANSFER, Seg, SgList, Tag};
use blockmux_wire::iscsi::scsi::*;
use blockmux_wire::iscsi::{Bhs, FLAG_FINAL, RESERVED_TAG};
use blockmux_wire::scsi::sense::{Asc, SenseKey};
use std::time::Instant;
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
            Some(status(Status::BUSY))
        } else {
            self.misfit(immediate, is_final, most).map(|misfit| data_sense(misfit.into()))
        };
        let (data_in, is_immediate) = (request.data_in, bhs.is_immediate());
        let slot = self.session.tasks.reserve();
        let entry = Entry {
            owner: self.connection.key,
            itt: pdu.initiator_task_tag.get(),
            lun: request.command.lun,
            data_in,
            data_out: request.data_out,
            is_immediate,
            task: None,
            state: State::Data,
            volume: VolumeId(u32::MAX),
            in_flight_at: None,
            transfer: Transfer::new(immediate, !is_final, most),
            memory: 0,
            response: None,
        };
        let entry = self.session.tasks.fill(slot, entry);
        self.connection.reading = self.connection.reading.saturating_add(bounded(data_in.unwrap_or(0)));
        if !is_immediate {
            self.session.window.occupy();
        }
        let step = match (refusal, &mut self.session.server, entry) {
            (None, Some(server), Some(entry)) => server.start(entry.task.insert(Task::new(&request.command))),
            (refusal, ..) => Step::Done(refusal.unwrap_or_else(|| status(Status::BUSY))),
        };
        if let Some(mover) = &mut self.connection.replies.mover {
            mover.assign(slot);
        }
        self.connection.live = self.connection.live.saturating_add(1);
        self.drive(slot, step);
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
        let slot =
            if ttt == RESERVED_TAG { self.session.tasks.find(itt) } else { Some(TaskTable::slot_of(ttt)) };
        let Some(slot) = slot else { return Purpose::Nothing };
        let key = self.connection.key;
        let current = self.session.tasks.get_mut(slot).map_or(0, |entry| entry.transfer.current_r2t());
        let is_current = ttt == RESERVED_TAG || self.session.tasks.transfer_tag(slot, current) == ttt;
        let Some(entry) = self
            .session
            .tasks
            .get_mut(slot)
            .filter(|entry| is_current && entry.itt == itt && entry.owner == key)
        else {
            return Purpose::Nothing;
        };
        if matches!(entry.state, State::Aborted(_)) {
            return Purpose::Nothing;
        }
        let (offset, len) = (pdu.buffer_offset.get(), pdu.data_segment_length.get());
        let checked = entry.transfer.check(ttt, pdu.data_sn.get(), offset, len);
        if entry.state == State::Data
            && !entry.transfer.is_lost()
            && let Err(misfit) = checked
        {
            if self.connection.level > 0 && entry.transfer.is_gap(pdu.data_sn.get(), offset) {
                entry.transfer.lose();
                return Purpose::Data {
                    slot,
                    offset,
                    is_final: pdu.flags & FLAG_FINAL != 0,
                    is_immediate: false,
                };
            }
            if ttt == RESERVED_TAG && entry.transfer.has_lost() {
                // Unsolicited data that was given up, and is asked for by now.
                return Purpose::Nothing;
            }
            let is_open = entry.transfer.is_open();
            self.fail(slot, data_sense(misfit.into()));
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
            entry.transfer.discard(is_final);
            return self.end_if_closed(slot);
        }
        if entry.transfer.is_lost() {
            return self.skip(slot, is_final);
        }
        if let Some(lent) = lent
            && !entry.transfer.put(offset, &lent)
        {
            if !self.give_memory(slot) {
                self.fail(slot, status(Status::BUSY));
                return self.on_data(slot, offset, len, None, (is_final, is_immediate));
            }
            if let Some(entry) = self.session.tasks.get_mut(slot) {
                entry.transfer.put(offset, &lent);
            }
        }
        let Some(entry) = self.session.tasks.get_mut(slot) else { return };
        let advanced = if is_immediate {
            entry.transfer.advance_immediate(len as u32, is_final);
            Ok(())
        } else {
            entry.transfer.advance(len as u32, is_final)
        };
        if let Err(misfit) = advanced {
            self.fail(slot, data_sense(misfit.into()));
            return self.end_if_closed(slot);
        }
        self.go_on(slot);
    }

    /// The volume has finished an I/O.
    #[inline]
    pub(super) fn on_completion(&mut self, done: Completion) {
        let slot = usize::try_from(done.tag.0).unwrap_or(usize::MAX);
        let Some(entry) = self.session.tasks.get_mut(slot) else {
            debug_assert!(false, "{:?} completed but is not in flight", done.tag);
            return;
        };
        entry.in_flight_at = None;
        if entry.owner != self.connection.key {
            let owner = entry.owner;
            return self.hand_on(slot, owner, done);
        }
        if let State::Aborted(function) = entry.state {
            self.drop_task(slot);
            return self.on_aborted(function);
        }
        debug_assert!(entry.state == State::Io, "{:?} completed but is not in flight", done.tag);
        if let (Some(server), Some(task)) = (&mut self.session.server, &mut entry.task) {
            let step = server.on_io(task, done);
            self.drive(slot, step);
        }
    }

    /// Asks every task again that waits for others.
    pub(super) fn resume_waiting(&mut self) {
        for _ in 0..self.connection.waiting.len() {
            if self.connection.waiting.is_empty() {
                return;
            }
            let slot = self.connection.waiting.remove(0);
            self.resume_task(slot);
        }
    }

    /// Asks every task again whose pause is over, and lets those begin that were not told the time yet.
    pub(super) fn resume_pausing(&mut self, now: Instant) {
        let begin = |pausing: &mut Pausing| now.checked_add(pausing.time).unwrap_or(now);
        for pausing in self.connection.pausing.iter_mut().filter(|pausing| pausing.until.is_none()) {
            pausing.until = Some(begin(pausing));
        }
        while let Some(at) =
            self.connection.pausing.iter().position(|pausing| pausing.until.is_some_and(|end| end <= now))
        {
            let slot = self.connection.pausing.swap_remove(at).slot;
            self.resume_task(slot);
        }
    }

    fn resume_task(&mut self, slot: usize) {
        let key = self.connection.key;
        let is_its = |entry: &&mut Entry| entry.state == State::Wait && entry.owner == key;
        let entry = self.session.tasks.get_mut(slot).filter(is_its);
        if let (Some(server), Some(task)) =
            (&mut self.session.server, entry.and_then(|entry| entry.task.as_mut()))
        {
            let step = server.resume(task);
            self.drive(slot, step);
        }
    }

    /// Lets writes ask for data that had no memory, in order, as long as there is some.
    pub(super) fn resume_grants(&mut self) {
        while let Some(&slot) = self.connection.grants.front() {
            let wants = self.session.tasks.get_mut(slot).is_some_and(|entry| {
                entry.state == State::Data && entry.transfer.wants_grant() && !entry.transfer.has_memory()
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
        if entry.transfer.has_memory() {
            return true;
        }
        let len = entry.transfer.round_len();
        if self.connection.granted > 0
            && self.connection.granted.saturating_add(len) > self.connection.share()
        {
            return false;
        }
        let Some(memory) = self.connection.pool.take_payload_or_wait(len) else { return false };
        self.connection.given = self.connection.given.wrapping_add(1);
        entry.transfer.given = self.connection.given;
        entry.transfer.set_memory(memory.seg(0, len));
        entry.memory = entry.memory.saturating_add(len);
        self.connection.granted = self.connection.granted.saturating_add(len);
        true
    }

    /// The task has failed; its response waits until no more of its data is to come.
    pub(super) fn fail(&mut self, slot: usize, response: Response) {
        if let Some(entry) = self.session.tasks.get_mut(slot)
            && entry.state == State::Data
        {
            entry.task = None;
            entry.state = State::Ended;
            entry.response = Some(response);
        }
    }

    /// Answers a task that has ended, once all its data has come.
    pub(super) fn end_if_closed(&mut self, slot: usize) {
        let closed = self
            .session
            .tasks
            .get_mut(slot)
            .filter(|entry| entry.state == State::Ended && !entry.transfer.is_open())
            .and_then(|entry| entry.response.take());
        if let Some(mut response) = closed {
            self.answer(slot, &mut response);
        }
    }

    /// Forgets a task; its place in the window is free again.
    #[inline]
    pub(super) fn drop_task(&mut self, slot: usize) {
        let Some(entry) = self.session.tasks.get_mut(slot) else { return };
        let connection = &mut *self.connection;
        if entry.owner == connection.key {
            connection.reading = connection.reading.saturating_sub(bounded(entry.data_in.unwrap_or(0)));
            connection.granted = connection.granted.saturating_sub(entry.memory);
            connection.live = connection.live.saturating_sub(1);
        }
        if !entry.is_immediate {
            self.session.window.release();
        }
        self.session.tasks.remove(slot);
    }

    /// Walks a task from step to step as far as it goes.
    #[inline]
    fn drive(&mut self, slot: usize, mut step: Step) {
        loop {
            let Some(entry) = self.session.tasks.get_mut(slot) else { return };
            match step {
                Step::Io { volume, mut io } => {
                    io.tag = Tag(slot as u64);
                    (entry.state, entry.volume) = (State::Io, volume);
                    entry.in_flight_at = Some(self.connection.key);
                    self.connection.in_flight = self.connection.in_flight.saturating_add(1);
                    return self.connection.queue.push_back((volume, io));
                }
                Step::Wait => {
                    entry.state = State::Wait;
                    return self.connection.waiting.push(slot);
                }
                Step::Pause(time) => {
                    entry.state = State::Wait;
                    return self.connection.pausing.push(Pausing { slot, time, until: None });
                }
                Step::Done(mut response) => {
                    if entry.transfer.is_open() {
                        entry.state = State::Ended;
                        entry.task = None;
                        entry.response = Some(response);
                        return;
                    }
                    return self.answer(slot, &mut response);
                }
                Step::DataOut { len } => {
                    entry.state = State::Data;
                    entry.transfer.begin_round(u32::try_from(len).unwrap_or(u32::MAX));
                    match self.take_data(slot) {
                        Some(next) => step = next,
                        None => return self.ask(slot),
                    }
                }
            }
        }
    }

    /// Goes on with a task that collects data.
    #[inline]
    pub(super) fn go_on(&mut self, slot: usize) {
        match self.take_data(slot) {
            Some(step) => self.drive(slot, step),
            None => self.ask(slot),
        }
    }

    /// Hands a round's data over, if all of it is here.
    #[inline]
    fn take_data(&mut self, slot: usize) -> Option<Step> {
        let entry = self.session.tasks.get_mut(slot).filter(|entry| entry.transfer.is_complete())?;
        let (server, task) = (self.session.server.as_mut()?, entry.task.as_mut()?);
        let data = entry.transfer.take_data();
        // A second round whose data came with the first, beyond what that wanted, was dropped.
        let Some(data) = data else { return Some(Step::Done(data_sense(NOT_ENOUGH_DATA))) };
        Some(server.on_data_out(task, data))
    }

    /// Sends what R2Ts may be sent, or queues for the memory that they need.
    fn ask(&mut self, slot: usize) {
        let is_failed = self.connection.is_failed;
        let Some(entry) = self.session.tasks.get_mut(slot).filter(|_| !is_failed) else { return };
        if !entry.transfer.has_memory() {
            if !entry.transfer.wants_grant() {
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
        let to = (entry.lun.0.to_be_bytes(), entry.itt);
        while let Some(grant) = self
            .session
            .tasks
            .get_mut(slot)
            .and_then(|entry| entry.transfer.grant(max_burst, max_outstanding))
        {
            let ttt = self.session.tasks.transfer_tag(slot, grant.r2t_sn);
            self.connection.replies.r2t(self.outbox, self.session.window, to, ttt, grant);
        }
    }

    /// Ends a task with its response.
    #[inline]
    fn answer(&mut self, slot: usize, response: &mut Response) {
        let Some(entry) = self.session.tasks.get_mut(slot) else { return };
        let expected = Expected {
            itt: entry.itt,
            lun: entry.lun.0.to_be_bytes(),
            data_in: entry.data_in,
            data_out: entry.data_out,
            r2ts: entry.transfer.r2t_count(),
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
}

impl From<Misfit> for Asc {
    fn from(misfit: Misfit) -> Asc {
        match misfit {
            Misfit::Unexpected => UNEXPECTED_UNSOLICITED_DATA,
            Misfit::WrongAmount => NOT_ENOUGH_DATA,
        }
    }
}

/// CHECK CONDITION, ABORTED COMMAND: the sense of a delivery that failed (RFC 7143 §11.4.7.2).
pub(super) fn data_sense(asc: Asc) -> Response {
    Response {
        status: Status::CHECK_CONDITION,
        sense: Some(Sense::new(SenseKey::ABORTED_COMMAND, asc)),
        data_in: SgList::default(),
        transfer_len: 0,
    }
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
