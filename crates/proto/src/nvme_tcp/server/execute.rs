//! From capsules to completions.

use super::TargetSession;
use super::commands::{Entry, State, Work};
use super::fused::Fusing;
use super::receive::LENT_PAYLOAD;
use crate::fabrics::controller::connect::{self, Connected, NotConnected, Queue};
use crate::fabrics::controller::discovery;
use crate::nvme::admin::{Admin, AdminQueue};
use crate::nvme::io::{IoCommand, Step, Wanted};
use crate::nvme::{MAX_DATA, Outcome};
use blockmux_volume::{Completion, Io, IoError, Op, Seg, SgList, Tag};
use blockmux_wire::nvme::opcode::{AdminOpcode, Transfer, transfer};
use blockmux_wire::nvme::status::Status;
use blockmux_wire::nvme::{Fuse, PSDT_MASK, PSDT_SGL, SglSubtype, SglType, Sqe};
use blockmux_wire::nvmeof::fabrics::{
    ATTRIB_8_BYTES, AUTHREQ_ATR, CONNECT_DATA_LEN, Connect, FabricsType, PropertyGet, PropertySet,
    fabrics_type,
};
use zerocopy::transmute_ref;

impl TargetSession {
    /// A command, with `capsule_len` bytes of data in its capsule.
    #[inline]
    pub(super) fn on_capsule(
        &mut self,
        sqe: &Sqe,
        capsule_len: usize,
        lend: impl FnOnce() -> Seg,
        is_good: bool,
    ) {
        if self.stopping {
            // No answer: the connection ends, and a host does elsewhere or later what it has no answer for. A status
            // would be one of the few tries that it makes, perhaps all of them before it sees that the connection ends.
            return;
        }
        // What it moves, if it is what it says; else it is refused before anything moves.
        let payload = (sqe.dptr.length.get() as usize).min(MAX_DATA);
        let cid = sqe.cid.get();
        let first = if sqe.fuse() == Fuse::NORMAL && self.fusing == Fusing::No {
            None
        } else {
            match self.first_half(sqe) {
                Ok(first) => first,
                Err(status) => {
                    let outcome = self.remember(sqe, &Outcome::failure(status));
                    self.sender.outcome(&mut self.outbox, cid, &outcome);
                    return;
                }
            }
        };
        let refuse = |session: &mut TargetSession, outcome: &Outcome| {
            let outcome = session.remember(sqe, outcome);
            session.sender.outcome(&mut session.outbox, cid, &outcome);
            session.half_refused(sqe, first);
        };
        if !is_good {
            return refuse(self, &Outcome::retry(Status::TRANSIENT_TRANSPORT_ERROR));
        }
        if let Some(taken) = self.commands.find(cid)
            && !self.drop_event_request(taken)
        {
            return refuse(self, &Outcome::failure(Status::COMMAND_ID_CONFLICT));
        }
        let accepted = self.accept(sqe, first).and_then(|(work, out)| {
            let in_capsule = locate(sqe, &work, out, capsule_len)?;
            Ok((Entry::new(*sqe, work, out, payload), in_capsule))
        });
        let (entry, in_capsule) = match accepted {
            Ok(accepted) => accepted,
            Err(status) => return refuse(self, &Outcome::refusal(status)),
        };
        let len = entry.data_out;
        let slot = self.commands.insert(entry);
        if sqe.fuse() != Fuse::NORMAL {
            self.half_accepted(slot, first);
        }
        if let Some(offset) = in_capsule {
            // It is here, and holds what it holds.
            self.commands.count(slot);
            return self.begin(slot, lend().slice(offset, len).into());
        }
        if payload == 0 {
            return self.begin(slot, SgList::default());
        }
        self.grants.push_back(slot);
        self.grant();
    }

    /// Drops the command in this place if it is an Asynchronous Event Request that waits; answers whether it was. SPDK's
    /// host reuses the identifiers of its waiting requests when it shuts a controller down, and no target refuses that.
    #[cold]
    fn drop_event_request(&mut self, slot: usize) -> bool {
        let Some(Queue::Admin(admin)) = &mut self.queue else { return false };
        let is_waiting = admin.drop_event_request(slot);
        if is_waiting {
            self.commands.remove(slot);
        }
        is_waiting
    }

    /// Says who carries a command out, and how much data the host has for it, in bytes. It may be the second half of the
    /// fused operation whose first is in this place.
    #[inline]
    fn accept(&mut self, sqe: &Sqe, first: Option<usize>) -> Result<(Work, usize), Status> {
        if sqe.flags & PSDT_MASK != PSDT_SGL {
            return Err(Status::INVALID_FIELD_IN_COMMAND);
        }
        let is_fabrics = AdminOpcode(sqe.opcode) == AdminOpcode::FABRICS;
        if !is_fabrics && !self.is_authentic() {
            return Err(Status::AUTHENTICATION_REQUIRED);
        }
        if sqe.fuse() != Fuse::NORMAL {
            return self.accept_half(sqe, first);
        }
        if is_fabrics {
            let len = match fabrics_type(sqe) {
                FabricsType::CONNECT => CONNECT_DATA_LEN,
                FabricsType::AUTHENTICATION_SEND => self.message_len(sqe)?,
                _ => 0,
            };
            return Ok((Work::Fabrics, len));
        }
        match &mut self.queue {
            None => Err(Status::COMMAND_SEQUENCE_ERROR),
            Some(Queue::Admin(_)) => Ok((Work::Admin, AdminQueue::data_out(sqe))),
            Some(Queue::Io(queue)) => {
                queue.look_again();
                let command = IoCommand::parse(&queue.subsystem, &queue.view, &queue.origin, sqe)?;
                let out = command.data_out(sqe.dptr.length.get() as usize);
                Ok((Work::Io(command), out))
            }
        }
    }

    fn accept_half(&mut self, sqe: &Sqe, first: Option<usize>) -> Result<(Work, usize), Status> {
        let first = first.and_then(|first| self.commands.get_mut(first));
        let Some(Queue::Io(queue)) = &mut self.queue else { return Err(Status::INVALID_FIELD_IN_COMMAND) };
        queue.look_again();
        if AdminOpcode(sqe.opcode) == AdminOpcode::FABRICS {
            return Err(Status::INVALID_FIELD_IN_COMMAND);
        }
        let mut command = IoCommand::parse(&queue.subsystem, &queue.view, &queue.origin, sqe)?;
        match first.map(|first| &first.work) {
            Some(Work::Io(first)) => command.fuse(&queue.view, sqe, first)?,
            None if command.is_compare() => {}
            _ => return Err(Status::INVALID_FIELD_IN_COMMAND),
        }
        let out = command.data_out(sqe.dptr.length.get() as usize);
        Ok((Work::Io(command), out))
    }

    /// Begins commands that data can be moved for now, or asks for their data. Who has taken a command has to go on
    /// listening, for the data that makes room comes by the same stream; so it is here that commands wait.
    pub(super) fn grant(&mut self) {
        while let Some(&slot) = self.grants.front() {
            let Some(entry) = self.commands.get_mut(slot) else {
                self.grants.pop_front();
                continue;
            };
            let (cid, len, payload) = (entry.sqe.cid.get(), entry.data_out, entry.payload);
            // The second half of what is begun does not wait for others.
            let is_half = entry.half.is_some();
            if !is_half && !self.has_room(payload) {
                return;
            }
            if len > LENT_PAYLOAD && self.memory_for(slot).is_none() {
                if self.pool.could_hold(len) {
                    return;
                }
                // It would wait for ever.
                self.grants.pop_front();
                self.finish(slot, &Outcome::retry(Status::NAMESPACE_NOT_READY));
                continue;
            }
            self.grants.pop_front();
            self.commands.count(slot);
            if len == 0 {
                self.begin(slot, SgList::default());
                continue;
            }
            // A place fits: there are at most MAX_COMMANDS.
            self.sender.r2t(&mut self.outbox, cid, slot as u16, len);
        }
    }

    /// All of a command's data is here.
    #[inline]
    pub(super) fn begin(&mut self, slot: usize, data: SgList) {
        let Some(entry) = self.commands.get_mut(slot) else { return };
        if entry.doom.is_some() {
            return self.finish_doomed(slot);
        }
        if entry.half.is_some() {
            return self.on_half(slot, data);
        }
        let sqe = entry.sqe;
        match &mut entry.work {
            Work::Io(command) => {
                let step = command.begin(data);
                self.go_on(slot, step);
            }
            Work::Admin => self.administer(slot, &sqe, &data),
            Work::Fabrics => self.on_fabrics(slot, &sqe, data),
        }
    }

    #[inline]
    pub(super) fn go_on(&mut self, slot: usize, step: Step) {
        match step {
            Step::Io(wanted) => self.submit(slot, wanted),
            Step::Wait => {
                if let Some(entry) = self.commands.get_mut(slot) {
                    entry.state = State::Other;
                }
                self.waiting.push_back(slot);
            }
            Step::Done(outcome) => {
                if let (Some(entry), Some(Queue::Io(queue))) = (self.commands.get_mut(slot), &self.queue)
                    && let Work::Io(command) = &entry.work
                {
                    command.count(&outcome, &queue.counts);
                }
                self.finish(slot, &outcome);
            }
        }
    }

    /// Hands an I/O out if reservations allow it, or holds it while somebody else has its range for itself.
    #[inline]
    fn submit(&mut self, slot: usize, wanted: Wanted) {
        let (Some(entry), Some(Queue::Io(queue))) = (self.commands.get_mut(slot), &mut self.queue) else {
            return;
        };
        entry.state = State::Io;
        let Wanted { volume, op, offset, len, .. } = wanted;
        if wanted.is_alone {
            entry.passage = queue.gate.pass_locked(volume, op, (offset, len));
        } else if op == Op::Read || op.is_write() {
            entry.passage = queue.gate.pass(volume, op, (offset, len));
            if entry.passage.is_none() {
                queue.look_again();
                if queue.gate.leads_to(volume) {
                    return self.held.push_back((slot, wanted));
                }
                return self.finish(slot, &Outcome::failure(Status::INVALID_NAMESPACE_OR_FORMAT));
            }
        }
        // After the I/O is counted, so that whoever preempts this host and then waits for what is counted has waited for
        // all that was admitted before.
        let access = queue.gate.access(volume);
        if !(if wanted.needs_write { access.writes } else { access.reads }) {
            queue.look_again();
            if !queue.gate.leads_to(volume) {
                // It was detached while the command was under way.
                entry.passage = None;
                return self.finish(slot, &Outcome::failure(Status::INVALID_NAMESPACE_OR_FORMAT));
            }
            return self.io_failed(slot, IoError::Reserved);
        }
        self.in_flight = self.in_flight.saturating_add(1);
        self.io.push_back((volume, Io { tag: Tag(slot as u64), op, offset, len, data: wanted.data }));
    }

    fn io_failed(&mut self, slot: usize, error: IoError) {
        self.on_result(slot, Err(error));
    }

    #[inline]
    pub(super) fn io_done(&mut self, done: Completion) {
        if let Ok(slot) = usize::try_from(done.tag.0) {
            self.on_result(slot, done.result);
        }
    }

    #[inline]
    fn on_result(&mut self, slot: usize, result: Result<blockmux_volume::Output, IoError>) {
        let Some(entry) = self.commands.get_mut(slot) else { return };
        entry.passage = None;
        let Work::Io(command) = &mut entry.work else { return };
        let was_cut_short = matches!(result, Err(IoError::Aborted));
        let step = command.on_io(result);
        if self.is_over {
            // Nobody waits for the rest.
            self.commands.remove(slot);
            return;
        }
        if entry.doom.is_some() && (was_cut_short || !matches!(step, Step::Done(_))) {
            return self.finish_doomed(slot);
        }
        self.go_on(slot, step);
    }

    /// Goes on with whatever waits, if it can.
    pub(super) fn resume(&mut self) {
        for _ in 0..self.held.len() {
            if let Some((slot, wanted)) = self.held.pop_front() {
                self.submit(slot, wanted);
            }
        }
        for _ in 0..self.waiting.len() {
            let is_last = self.commands.under_way() == 1;
            if let Some(slot) = self.waiting.pop_front()
                && let Some(entry) = self.commands.get_mut(slot)
            {
                match &mut entry.work {
                    Work::Io(command) => {
                        let step = command.resume();
                        self.go_on(slot, step);
                    }
                    // Disconnect.
                    Work::Fabrics if is_last => self.finish(slot, &Outcome::success(0)),
                    _ => self.waiting.push_back(slot),
                }
            }
        }
        while let Some(Queue::Admin(admin)) = &mut self.queue
            && let Some((slot, outcome)) = admin.poll_waiting()
        {
            self.finish(slot, &outcome);
        }
        if let Some((slot, data)) = self.connecting.take()
            && let Some(entry) = self.commands.get_mut(slot)
        {
            let sqe = entry.sqe;
            self.connect(slot, &sqe, data);
        }
        self.grant();
    }

    fn administer(&mut self, slot: usize, sqe: &Sqe, data: &SgList) {
        let Some(Queue::Admin(admin)) = &mut self.queue else { return };
        let (node, local_ip, host) = (&self.node, self.local_ip, admin.host.nqn.clone());
        let log = || discovery::page(node, &host, local_ip);
        let commands = &self.commands;
        let executed = admin.execute(sqe, data, slot, &|cid| commands.find(cid), &log);
        let keep_alive = admin.keep_alive();
        self.set_keep_alive(keep_alive);
        match executed {
            Admin::Held => self.commands.wait_for_event(slot),
            Admin::Waiting => {
                if let Some(entry) = self.commands.get_mut(slot) {
                    entry.state = State::Other;
                }
            }
            Admin::Aborted(other) => {
                self.finish(other, &Outcome::failure(Status::COMMAND_ABORT_REQUESTED));
                self.finish(slot, &Outcome::success(0));
            }
            Admin::Done(outcome) => {
                let room = sqe.dptr.length.get() as usize;
                let fits = outcome.data.len() <= room && is_from_transport(sqe);
                if fits || outcome.data.is_empty() {
                    self.finish(slot, &outcome);
                } else {
                    self.finish(slot, &Outcome::failure(Status::DATA_SGL_LENGTH_INVALID));
                }
            }
        }
        self.tell_events();
    }

    fn on_fabrics(&mut self, slot: usize, sqe: &Sqe, data: SgList) {
        let is_authentic = self.is_authentic();
        let outcome = match (fabrics_type(sqe), &mut self.queue) {
            (FabricsType::CONNECT, None) => return self.connect(slot, sqe, data),
            (FabricsType::AUTHENTICATION_SEND, Some(_)) => self.on_message(&data),
            (FabricsType::AUTHENTICATION_RECEIVE, Some(_)) => self.next_message(sqe),
            (FabricsType::CONNECT, Some(_)) | (_, None) => Outcome::failure(Status::COMMAND_SEQUENCE_ERROR),
            (_, Some(_)) if !is_authentic => Outcome::failure(Status::AUTHENTICATION_REQUIRED),
            (FabricsType::PROPERTY_GET, Some(Queue::Admin(admin))) => {
                let get: &PropertyGet = transmute_ref!(sqe);
                let is_long = get.attrib & 7 == ATTRIB_8_BYTES;
                let value = admin.properties.get(&admin.place, get.ofst.get(), is_long);
                value.map_or_else(Outcome::failure, Outcome::success)
            }
            (FabricsType::PROPERTY_SET, Some(Queue::Admin(admin))) => {
                let set: &PropertySet = transmute_ref!(sqe);
                let is_long = set.attrib & 7 == ATTRIB_8_BYTES;
                let done = admin.properties.set(&admin.place, set.ofst.get(), is_long, set.value.get());
                if !admin.properties.is_ready() {
                    // A reset or a shutdown ends requests for events without an answer (Base 2.0 §5.2).
                    for event in admin.reset_events() {
                        self.commands.remove(event);
                    }
                }
                done.map_or_else(Outcome::failure, |()| Outcome::success(0))
            }
            (FabricsType::DISCONNECT, Some(Queue::Admin(_))) => {
                Outcome::failure(Status::DISCONNECT_INVALID_QUEUE_TYPE)
            }
            (FabricsType::DISCONNECT, Some(Queue::Io(_))) => {
                // What is in flight ends, then comes this answer, which is the queue's last, and the connection ends.
                self.stopping = true;
                self.end_fusing();
                if let Some(entry) = self.commands.get_mut(slot) {
                    entry.state = State::Other;
                }
                self.waiting.push_back(slot);
                return self.resume();
            }
            _ => Outcome::failure(Status::INVALID_COMMAND_OPCODE),
        };
        self.finish(slot, &outcome);
    }

    fn connect(&mut self, slot: usize, sqe: &Sqe, data: SgList) {
        let command: &Connect = transmute_ref!(sqe);
        match connect::connect(
            &self.node,
            command,
            &data,
            self.hang_up.clone(),
            self.secured.as_deref(),
            (self.ring.clone(), self.port, self.seed),
        ) {
            Ok(Connected { queue, letters, authenticator, cntlid, size, has_flow_control }) => {
                if let Queue::Admin(admin) = &queue {
                    self.set_keep_alive(admin.keep_alive());
                }
                self.queue = Some(queue);
                self.letters = Some(letters);
                self.authenticator = authenticator;
                if self.is_authentic() {
                    self.permit = None;
                }
                self.depth = usize::from(size);
                self.sender.on_connected(size, has_flow_control);
                let must_prove = if self.authenticator.is_some() { AUTHREQ_ATR } else { 0 };
                self.finish(slot, &Outcome::success(u64::from(u32::from(cntlid) | must_prove)));
            }
            Err(NotConnected::Refused(outcome)) => self.finish(slot, &outcome),
            Err(NotConnected::Later) => {
                if let Some(entry) = self.commands.get_mut(slot) {
                    entry.state = State::Connect;
                }
                self.connecting = Some((slot, data));
            }
        }
    }

    /// A command is over.
    #[inline]
    pub(super) fn finish(&mut self, slot: usize, outcome: &Outcome) {
        if let Some(half) = self.commands.get_mut(slot).and_then(|entry| entry.half.take()) {
            return self.half_finished(slot, &half, outcome);
        }
        if !outcome.status.is_success()
            && let Some(sqe) = self.commands.get_mut(slot).map(|entry| entry.sqe)
        {
            let outcome = self.remember(&sqe, outcome);
            self.commands.remove(slot);
            return self.sender.outcome(&mut self.outbox, sqe.cid.get(), &outcome);
        }
        if let Some(cid) = self.commands.remove(slot) {
            self.sender.outcome(&mut self.outbox, cid, outcome);
        }
    }

    /// Notes a failure in the controller's error log, if there is a controller; answers what the host is told.
    #[cold]
    fn remember(&self, sqe: &Sqe, outcome: &Outcome) -> Outcome {
        let status = match &self.queue {
            Some(Queue::Admin(admin)) => admin.place.errors.add(0, sqe, outcome.status),
            Some(Queue::Io(queue)) => queue.place.errors.add(queue.place.qid, sqe, outcome.status),
            None => outcome.status,
        };
        Outcome { status, ..outcome.clone() }
    }
}

/// Where the host's data is: at an offset in the capsule, or with the transport. Refuses descriptors that do not fit
/// the command (Base 2.0 §4.1.2, TCP Transport 1.0 §3.3.2).
#[inline]
fn locate(sqe: &Sqe, work: &Work, out: usize, capsule_len: usize) -> Result<Option<usize>, Status> {
    let (dptr, told) = (&sqe.dptr, sqe.dptr.length.get() as usize);
    if out > 0 {
        if told != out {
            return Err(Status::DATA_SGL_LENGTH_INVALID);
        }
        return match (dptr.kind(), dptr.subtype()) {
            (SglType::DATA_BLOCK, SglSubtype::OFFSET) => {
                let offset = usize::try_from(dptr.address.get()).map_err(|_| Status::SGL_OFFSET_INVALID)?;
                let end = offset.checked_add(out).filter(|&end| end <= capsule_len);
                end.map(|_| Some(offset)).ok_or(Status::SGL_OFFSET_INVALID)
            }
            (SglType::TRANSPORT_DATA_BLOCK, SglSubtype::TRANSPORT) => Ok(None),
            _ => Err(Status::SGL_DESCRIPTOR_TYPE_INVALID),
        };
    }
    if let Work::Io(command) = work {
        let wanted = command.data_in();
        if wanted > 0 && !is_from_transport(sqe) {
            return Err(Status::SGL_DESCRIPTOR_TYPE_INVALID);
        }
        if wanted != told && transfer(sqe.opcode) == Transfer::ControllerToHost {
            return Err(Status::DATA_SGL_LENGTH_INVALID);
        }
    }
    Ok(None)
}

/// Whether the transport moves the data.
#[inline]
pub(super) fn is_from_transport(sqe: &Sqe) -> bool {
    sqe.dptr.is_transport()
}
