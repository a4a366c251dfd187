//! One queue of a controller, over any transport: from commands to completions.
//!
//! ```text
//!   transport ──on_command──▶ accept ─▶ start ──fetch──▶ transport      data that is not in the capsule
//!   transport ──on_data────────────────▶ begin ─▶ nvme::admin, control_commands.rs, nvme::io ─▶ submit ─▶ volume
//!   transport ◀──complete── finish ◀── go_on ◀──────────────────────────────────── on_io ◀── volume
//! ```
//! Commands that have to wait for room, memory or others' data before their own is fetched are in
//! `unstarted`; I/O that has to wait for a locked range is in `held`; commands that poll for
//! something else are in `waiting`.

use super::commands::{CommandSlot, CommandState, CommandTable, CommandWork};
use super::connect::{ConnectedQueue, HostConnection};
use super::fused::FusedState;
use super::node::NvmeNode;
use super::timers::QueueTimers;
use super::transport::{DataPlace, Descriptor, FabricsTransport};
use super::unconnected::ConnectPermit;
use super::unstarted::UnstartedCommands;
use crate::backoff::Backoff;
use crate::event::{AuditEvent, AuditEvents};
use crate::exports::VolumeId;
use crate::nvme::admin::AdminQueue;
use crate::nvme::auth::controller::Authenticator;
use crate::nvme::event_queue::{AbortOrder, EventQueue, QueueEvent};
use crate::nvme::io::{IoCommand, IoRequest, IoStep};
use crate::nvme::{HangUp, MAX_DATA, MAX_EVENT_REQUESTS, MQES, Notifier, NvmeOutcome};
use crate::session::{ProtocolError, SessionStage, Target, Timed};
use crate::volume_state::{Needs, NotAdmitted, Reserved};
use blockmux_volume::{Completion, Io, IoError, Pool, Seg, SgList, Tag, Waker};
use blockmux_wire::nvme::opcode::{AdminOpcode, NvmOpcode, Transfer, transfer};
use blockmux_wire::nvme::status::NvmeStatus;
use blockmux_wire::nvme::{Fuse, PSDT_MASK, PSDT_SGL, Sqe};
use core::net::IpAddr;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One queue of a controller: what a host's connection becomes.
pub struct ControllerQueue<T: FabricsTransport> {
    pub(crate) transport: T,
    pub(super) node: Arc<NvmeNode>,
    pub(super) pool: Pool,
    pub(super) connection: HostConnection,
    /// `None` until the host's Connect.
    pub(super) queue: Option<ConnectedQueue>,
    /// The host has to prove who it is.
    pub(super) authenticator: Option<Box<Authenticator>>,
    pub(super) audit: AuditEvents,
    /// Entries of the submission queue: the most commands under way, but for those that wait for
    /// events.
    pub(super) depth: u16,
    /// How far the submission queue was read; `None`: SQ flow control is disabled.
    pub(super) sqhd: Option<u16>,
    pub(super) commands: CommandTable<T::Progress>,
    /// In flight, but not yet taken by the driver.
    io: VecDeque<(VolumeId, Io)>,
    /// I/O of commands whose ranges are locked by others.
    held: VecDeque<(usize, IoRequest)>,
    /// Commands that poll whether they can go on.
    pub(super) waiting: VecDeque<usize>,
    /// I/O in flight that is to end early.
    cancels: VecDeque<(VolumeId, Tag)>,
    pub(super) fusing: FusedState,
    /// What other cores tell this queue.
    pub(super) events: Option<Arc<EventQueue>>,
    /// Commands that wait for room or memory before they begin or their data is fetched, oldest
    /// first.
    pub(super) unstarted: UnstartedCommands,
    /// A Connect that waits for an older association to end, and its data.
    pub(super) connecting: Option<(usize, SgList)>,
    /// Nothing is accepted any more; what is in flight ends.
    pub(super) stopping: bool,
    /// The connection ends.
    pub(super) is_over: bool,
    pub(super) timers: QueueTimers,
    pub(super) make_notifier: Option<MakeNotifier>,
}

/// Makes what wakes a session from other threads of what wakes it on its own.
pub type MakeNotifier = Box<dyn FnOnce(&Waker) -> Notifier>;

impl<T: FabricsTransport> ControllerQueue<T> {
    /// A queue for a host that has just connected. `pool` is the core's, for data from the host.
    /// The host has 30 seconds from `now` on to connect the queue.
    pub(crate) fn with_transport(
        transport: T,
        node: Arc<NvmeNode>,
        pool: Pool,
        now: Instant,
    ) -> ControllerQueue<T> {
        ControllerQueue {
            transport,
            node,
            pool,
            connection: HostConnection { sgls: T::SGLS, ..HostConnection::default() },
            queue: None,
            authenticator: None,
            audit: AuditEvents::default(),
            depth: 1,
            sqhd: Some(0),
            commands: CommandTable::default(),
            io: VecDeque::new(),
            held: VecDeque::new(),
            waiting: VecDeque::new(),
            cancels: VecDeque::new(),
            fusing: FusedState::None,
            events: None,
            unstarted: UnstartedCommands::default(),
            connecting: None,
            stopping: false,
            is_over: false,
            timers: QueueTimers {
                connect_by: now.checked_add(CONNECT_TIME).unwrap_or(now),
                now,
                message_by: now,
                retry: Backoff::new(now),
                poll_at: now,
                keep_alive: None,
            },
            make_notifier: None,
        }
    }

    /// With leave to connect a queue, over a connection to `local_ip` that `hang_up` cuts: that is
    /// how an I/O queue ends with its controller.
    #[must_use]
    pub fn admitted(mut self, permit: ConnectPermit, local_ip: Option<IpAddr>, hang_up: HangUp) -> Self {
        self.connection.permit = Some(permit);
        self.connection.local_ip = local_ip;
        self.connection.hang_up = Some(hang_up);
        self
    }

    /// With random bytes that nobody else knows, without which hosts cannot prove who they are.
    #[must_use]
    pub fn with_seed(mut self, seed: [u8; 32]) -> Self {
        self.connection.seed = Some(seed);
        self
    }

    /// For a host that has come by the port of this identifier.
    #[must_use]
    pub fn at_port(mut self, port: u16) -> Self {
        self.connection.port = port;
        self
    }

    /// Fetching only so many bytes of data at a time, or that of a few commands, if that is more.
    /// Without it all is fetched that there is room for.
    #[must_use]
    pub fn fetching_at_most(mut self, bytes: usize) -> Self {
        self.unstarted.max_fetching = bytes;
        self
    }

    /// With a way for other cores to have it take a turn. Without one it polls its events ten times
    /// a second.
    #[must_use]
    pub fn with_notifier(mut self, make_notifier: MakeNotifier) -> Self {
        self.make_notifier = Some(make_notifier);
        self
    }

    /// TLS is established with the key of that identity.
    pub(crate) fn on_secured_by(&mut self, identity: &[u8]) -> Result<(), ProtocolError> {
        let gone = ProtocolError {
            what: "used a TLS key that is not there any more",
            reference: "TCP Transport 1.1 §3.6.1",
        };
        self.connection.secured = Some(Box::new(self.node.keyring().find(identity).ok_or(gone)?));
        Ok(())
    }

    /// The host was heard of.
    #[inline]
    pub(crate) fn on_traffic(&mut self, now: Instant) {
        self.timers.now = now;
        self.timers.retry.reset(now);
        if let Some(keep_alive) = &mut self.timers.keep_alive {
            keep_alive.is_heard = true;
        }
    }

    /// Whether the next command may be looked at.
    #[inline]
    pub(crate) fn takes_commands(&self) -> bool {
        self.connecting.is_none()
    }

    /// Whether the connection is to be closed.
    #[inline]
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Whether everything has ended that was to end before the connection is closed.
    pub(crate) fn is_finished(&self) -> bool {
        self.is_over || (self.stopping && self.commands.is_idle())
    }

    /// The connection ends now. Answers whether it had ended before.
    pub(crate) fn end(&mut self) -> bool {
        self.held.clear();
        self.waiting.clear();
        self.unstarted.clear();
        self.connecting = None;
        std::mem::replace(&mut self.is_over, true)
    }

    /// A command, with `capsule_len` bytes of data in its capsule, which are whole if `is_intact`.
    ///
    /// # Errors
    /// If the host has more commands under way than its queue has entries.
    #[inline]
    pub(crate) fn on_command(
        &mut self,
        sqe: &Sqe,
        capsule_len: usize,
        lend: impl FnOnce() -> Seg,
        is_intact: bool,
    ) -> Result<(), ProtocolError> {
        if self.commands.under_way() >= usize::from(self.depth) {
            self.is_over = true;
            return Err(OVERRUN);
        }
        if self.stopping {
            // No answer: the connection ends, and a host does elsewhere or later what it has no
            // answer for. A status would be one of the few tries that it makes, perhaps all of them
            // before it sees that the connection ends.
            return Ok(());
        }
        let first = if sqe.fuse() == Fuse::NORMAL && self.fusing == FusedState::None {
            None
        } else {
            match self.first_half(sqe) {
                Ok(first) => first,
                Err(status) => {
                    self.complete(sqe, &NvmeOutcome::failure(status));
                    return Ok(());
                }
            }
        };
        let descriptor = T::descriptor(sqe);
        let accepted = if !is_intact {
            Err(NvmeOutcome::retry(NvmeStatus::TRANSIENT_TRANSPORT_ERROR))
        } else if self.is_taken(sqe.cid.get()) {
            Err(NvmeOutcome::failure(NvmeStatus::COMMAND_ID_CONFLICT))
        } else {
            let accepted = self.accept(sqe, first, descriptor.len).and_then(|(work, out)| {
                let in_capsule = locate(sqe, &descriptor, &work, out, capsule_len)?;
                Ok((work, out, in_capsule))
            });
            accepted.map_err(NvmeOutcome::refusal)
        };
        let (work, out, in_capsule) = match accepted {
            Ok(accepted) => accepted,
            Err(outcome) => {
                self.complete(sqe, &outcome);
                self.half_refused(sqe, first);
                return Ok(());
            }
        };
        // What it moves, if it is what it says; else it was refused.
        let payload = descriptor.len.min(MAX_DATA);
        let slot = self.commands.insert(CommandSlot::new(*sqe, work, out, payload));
        if sqe.fuse() != Fuse::NORMAL {
            self.half_accepted(slot, first);
        }
        let data = if let Some(offset) = in_capsule {
            // It is here, and holds what it holds.
            lend().slice(offset, out).into()
        } else if payload == 0 || out == 0 && self.unstarted.is_empty_of_waiting() && self.has_room(payload) {
            SgList::default()
        } else {
            self.unstarted.push(slot);
            self.start();
            return Ok(());
        };
        self.commands.count(slot);
        self.begin(slot, data);
        Ok(())
    }

    /// Whether another command has that CID. One that waits for an event gives it up: SPDK's host
    /// reuses the identifiers of its waiting requests when it shuts a controller down, and no
    /// target refuses that.
    #[inline]
    fn is_taken(&mut self, cid: u16) -> bool {
        let Some(slot) = self.commands.find(cid) else { return false };
        let Some(ConnectedQueue::Admin(admin)) = &mut self.queue else { return true };
        let is_waiting = admin.drop_event_request(slot);
        if is_waiting {
            self.commands.remove(slot);
        }
        !is_waiting
    }

    /// Says who carries a command out, and how much data the host has for it, in bytes. It may be
    /// the second half of the fused operation whose first is in this slot. `told` is the length of
    /// its descriptor.
    #[inline]
    fn accept(
        &mut self,
        sqe: &Sqe,
        first: Option<usize>,
        told: usize,
    ) -> Result<(CommandWork, usize), NvmeStatus> {
        if sqe.flags & PSDT_MASK != PSDT_SGL {
            return Err(NvmeStatus::INVALID_FIELD_IN_COMMAND);
        }
        let is_fabrics = AdminOpcode(sqe.opcode) == AdminOpcode::FABRICS;
        if !is_fabrics && !self.is_authenticated() {
            return Err(NvmeStatus::AUTHENTICATION_REQUIRED);
        }
        let fuse = sqe.fuse();
        match &mut self.queue {
            Some(ConnectedQueue::Io(queue)) if !is_fabrics => {
                queue.look_again();
                let mut command = IoCommand::parse(&queue.subsystem, &queue.view, &queue.origin, sqe)?;
                if fuse != Fuse::NORMAL {
                    let first = first.and_then(|first| self.commands.get_mut(first));
                    match first.map(|first| &first.work) {
                        Some(CommandWork::Io(first)) => command.fuse(&queue.view, sqe, first)?,
                        None if command.is_compare() => {}
                        _ => return Err(NvmeStatus::INVALID_FIELD_IN_COMMAND),
                    }
                }
                let out = command.data_out(told);
                Ok((CommandWork::Io(command), out))
            }
            _ if fuse != Fuse::NORMAL => Err(NvmeStatus::INVALID_FIELD_IN_COMMAND),
            _ if is_fabrics => Ok((CommandWork::Fabrics, self.fabrics_data_out(sqe)?)),
            None => Err(NvmeStatus::COMMAND_SEQUENCE_ERROR),
            Some(_) => Ok((CommandWork::Admin, AdminQueue::data_out(sqe))),
        }
    }

    /// Begins commands that data can be moved for now, or has their data fetched. Who has taken a
    /// command has to go on listening, for the data that makes room may come by the same stream; so
    /// it is here that commands wait.
    pub(super) fn start(&mut self) {
        while let Some(slot) = self.unstarted.next(&mut self.commands) {
            let Some(entry) = self.commands.get_mut(slot) else {
                self.unstarted.remove(slot);
                continue;
            };
            let (len, payload) = (entry.data_out, entry.payload);
            // The second half of what is begun does not wait for others.
            let is_half = entry.half.is_some();
            if !is_half && !self.has_room(payload) {
                return;
            }
            if len > 0 && T::needs_memory(len) && self.memory_for(slot).is_none() {
                if self.pool.could_hold(len) {
                    return;
                }
                // It would wait for ever.
                self.unstarted.remove(slot);
                self.finish(slot, &NvmeOutcome::retry(NvmeStatus::NAMESPACE_NOT_READY));
                continue;
            }
            self.unstarted.remove(slot);
            self.commands.count(slot);
            if len == 0 {
                self.begin(slot, SgList::default());
            } else if let Some(entry) = self.commands.get_mut(slot) {
                self.transport.fetch(slot, entry);
                self.commands.begin_fetch(slot);
            }
        }
    }

    /// Whether that much data may be in flight beside what is.
    #[inline]
    fn has_room(&self, data_len: usize) -> bool {
        let unsent = self.transport.unsent();
        let payload = self.commands.payload.saturating_add(unsent).saturating_add(data_len);
        let is_alone = self.commands.payload == 0 && unsent == 0;
        payload <= blockmux_volume::SHORT_PAYLOAD
            || payload <= PAYLOAD_IN_FLIGHT
                && (is_alone || payload <= self.pool.peer_share() && !self.pool.is_short())
    }

    /// The command in that slot, if its data is being fetched.
    #[inline]
    pub(crate) fn fetching(&mut self, slot: usize) -> Option<&mut CommandSlot<T::Progress>> {
        let entry = self.commands.get_mut(slot)?;
        (entry.state == CommandState::Data && entry.data_out > 0 && entry.is_counted).then_some(entry)
    }

    /// A command's memory, taken from the pool if it has none yet.
    pub(crate) fn memory_for(&mut self, slot: usize) -> Option<Seg> {
        let entry = self.commands.get_mut(slot)?;
        if entry.memory.is_none() {
            let memory = self.pool.take_payload_or_wait(entry.data_out);
            entry.memory = memory.map(|memory| memory.seg(0, entry.data_out));
        }
        entry.memory.clone()
    }

    /// All data of a command is in its memory, or lent to it.
    #[inline]
    pub(crate) fn on_data(&mut self, slot: usize) {
        self.commands.end_fetch(slot);
        if let Some(entry) = self.commands.get_mut(slot) {
            let data = entry.take_memory();
            self.begin(slot, data);
        }
        if self.unstarted.has_unfetched() {
            self.start();
        }
    }

    /// A command's data was lost on its way, which another try may not meet.
    pub(crate) fn on_data_lost(&mut self, slot: usize) {
        self.commands.end_fetch(slot);
        self.finish(slot, &NvmeOutcome::retry(NvmeStatus::TRANSIENT_TRANSPORT_ERROR));
    }

    /// All of a command's data is here.
    #[inline]
    fn begin(&mut self, slot: usize, data: SgList) {
        let Some(entry) = self.commands.get_mut(slot) else { return };
        if let Some(abort) = &entry.abort {
            if !abort.is_given_up() {
                return self.finish_aborted(slot);
            }
            entry.abort = None;
        }
        if entry.half.is_some() {
            return self.on_half(slot, data);
        }
        match &mut entry.work {
            CommandWork::Io(command) => {
                let step = command.begin(data);
                self.go_on(slot, step);
            }
            CommandWork::Admin => {
                let sqe = entry.sqe;
                self.administer(slot, &sqe, &data);
            }
            CommandWork::Fabrics => {
                let sqe = entry.sqe;
                self.on_fabrics(slot, &sqe, data);
            }
        }
    }

    #[inline]
    pub(super) fn go_on(&mut self, slot: usize, step: IoStep) {
        match step {
            IoStep::Io(wanted) => self.submit(slot, wanted),
            IoStep::Wait => self.wait(slot),
            IoStep::Done(outcome) => {
                if let (Some(entry), Some(ConnectedQueue::Io(queue))) =
                    (self.commands.get_mut(slot), &self.queue)
                    && let CommandWork::Io(command) = &entry.work
                {
                    command.count(&outcome, &queue.counts);
                }
                self.finish(slot, &outcome);
            }
        }
    }

    /// Has a command poll whether it can go on.
    pub(super) fn wait(&mut self, slot: usize) {
        if let Some(entry) = self.commands.get_mut(slot) {
            entry.state = CommandState::Other;
        }
        self.waiting.push_back(slot);
    }

    /// Hands an I/O out if reservations allow it, or holds it while somebody else has its range for
    /// itself.
    #[inline]
    fn submit(&mut self, slot: usize, wanted: IoRequest) {
        let (Some(entry), Some(ConnectedQueue::Io(queue))) = (self.commands.get_mut(slot), &mut self.queue)
        else {
            return;
        };
        entry.state = CommandState::Io;
        let IoRequest { volume, op, offset, len, needs_write, is_alone, .. } = wanted;
        let needs = if needs_write { Needs::Writing } else { Needs::Reading };
        match queue.admissions.admit(volume, op, (offset, len), needs, is_alone) {
            Ok(guard) => entry.io_guard = guard,
            Err(why) => {
                queue.look_again();
                if !queue.admissions.has(volume) {
                    // It was detached while the command was under way.
                    return self.finish(slot, &NvmeOutcome::failure(NvmeStatus::INVALID_NAMESPACE_OR_FORMAT));
                }
                return match why {
                    NotAdmitted::Locked => self.held.push_back((slot, wanted)),
                    NotAdmitted::Denied(Reserved) => self.on_result(slot, Err(IoError::Reserved)),
                };
            }
        }
        self.io.push_back((volume, Io { tag: Tag(slot as u64), op, offset, len, data: wanted.data }));
    }

    #[inline]
    fn on_result(&mut self, slot: usize, result: Result<blockmux_volume::Output, IoError>) {
        let Some(entry) = self.commands.get_mut(slot) else { return };
        entry.io_guard = None;
        let CommandWork::Io(command) = &mut entry.work else { return };
        let was_cut_short = matches!(result, Err(IoError::Aborted));
        let step = command.on_io(result);
        if self.is_over {
            // Nobody waits for the rest.
            return self.commands.remove(slot);
        }
        if entry.abort.is_some() && (was_cut_short || !matches!(step, IoStep::Done(_))) {
            return self.finish_aborted(slot);
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
                    CommandWork::Io(command) => {
                        let step = command.resume();
                        self.go_on(slot, step);
                    }
                    // Disconnect.
                    CommandWork::Fabrics if is_last => self.finish(slot, &NvmeOutcome::success(0)),
                    _ => self.waiting.push_back(slot),
                }
            }
        }
        while let Some(ConnectedQueue::Admin(admin)) = &mut self.queue
            && let Some((slot, outcome)) = admin.poll_waiting(self.timers.now)
        {
            self.finish(slot, &outcome);
        }
        if let Some((slot, data)) = self.connecting.take()
            && let Some(entry) = self.commands.get_mut(slot)
        {
            let sqe = entry.sqe;
            self.connect(slot, &sqe, data);
        }
        self.start();
    }

    /// A command is over.
    #[inline]
    pub(super) fn finish(&mut self, slot: usize, outcome: &NvmeOutcome) {
        let Some(entry) = self.commands.get_mut(slot) else { return };
        if let Some(half) = entry.half.take() {
            return self.half_finished(slot, &half, outcome);
        }
        if !outcome.status.is_success() {
            return self.finish_failed(slot, outcome);
        }
        let sqhd = next_sqhd(&mut self.sqhd, self.depth);
        self.transport.complete(&entry.sqe, outcome, sqhd);
        let (opcode, nsid) = (NvmOpcode(entry.sqe.opcode), entry.sqe.nsid.get());
        self.commands.remove(slot);
        self.audit_command(opcode, nsid, true);
    }

    #[cold]
    fn finish_failed(&mut self, slot: usize, outcome: &NvmeOutcome) {
        let Some(entry) = self.commands.get_mut(slot) else { return };
        let sqe = entry.sqe;
        self.audit_command(NvmOpcode(sqe.opcode), sqe.nsid.get(), false);
        self.commands.remove(slot);
        self.complete(&sqe, outcome);
    }

    /// A command that is not in the table, or not any more, has failed: notes that in the
    /// controller's error log, if there is a controller, and tells the host.
    #[cold]
    fn complete(&mut self, sqe: &Sqe, outcome: &NvmeOutcome) {
        let status = match &self.queue {
            Some(ConnectedQueue::Admin(admin)) => admin.place.errors.add(0, sqe, outcome.status),
            Some(ConnectedQueue::Io(queue)) => queue.place.errors.add(queue.place.qid, sqe, outcome.status),
            None => outcome.status,
        };
        let sqhd = next_sqhd(&mut self.sqhd, self.depth);
        self.transport.complete(sqe, &NvmeOutcome { status, ..outcome.clone() }, sqhd);
    }

    /// Reads what other cores have told.
    #[inline]
    fn read_events(&mut self) {
        let Some(event) = self.events.as_ref().and_then(|events| events.pop()) else { return };
        self.on_event(event);
        while let Some(event) = self.events.as_ref().and_then(|events| events.pop()) {
            self.on_event(event);
        }
        self.send_events();
    }

    #[cold]
    fn on_event(&mut self, event: QueueEvent) {
        match event {
            QueueEvent::Abort(order) => {
                if let Some(slot) = self.commands.find(order.cid) {
                    self.end_early(slot, NvmeStatus::COMMAND_ABORT_REQUESTED, Some(order));
                }
            }
            QueueEvent::Preempted(volume) => self.preempted(volume),
            QueueEvent::NamespaceChanged(_)
            | QueueEvent::NamespaceShown(_)
            | QueueEvent::Reservation { .. }
            | QueueEvent::AnaChanged { .. }
            | QueueEvent::DiscoveryChanged => {
                if let Some(ConnectedQueue::Admin(admin)) = &mut self.queue {
                    admin.on_event(&event);
                }
            }
        }
    }

    /// Answers Asynchronous Event Requests as long as there is something to tell.
    pub(super) fn send_events(&mut self) {
        while let Some(ConnectedQueue::Admin(admin)) = &mut self.queue
            && let Some((slot, result)) = admin.next_event()
        {
            self.finish(slot, &NvmeOutcome::success(result.into()));
        }
    }

    /// What the host has under way on that volume ends.
    fn preempted(&mut self, volume: VolumeId) {
        for slot in self.commands.slots() {
            let entry = self.commands.get_mut(slot);
            let is_there = entry.is_some_and(|entry| match &entry.work {
                CommandWork::Io(command) => entry.state == CommandState::Io && command.is_for(volume),
                _ => false,
            });
            if is_there {
                self.end_early(slot, NvmeStatus::COMMAND_ABORTED_DUE_TO_PREEMPT_AND_ABORT, None);
            }
        }
    }

    /// Ends a command: at once if nothing of it is under way, else with its data or its I/O.
    fn end_early(&mut self, slot: usize, status: NvmeStatus, order: Option<AbortOrder>) {
        let held = self.held.iter().position(|(held, _)| *held == slot);
        let Some(entry) = self.commands.get_mut(slot).filter(|entry| entry.half.is_none()) else { return };
        let CommandWork::Io(command) = &entry.work else { return };
        match (entry.state, held) {
            (CommandState::Io, Some(held)) => {
                self.held.remove(held);
                entry.abort(status, order);
                self.finish_aborted(slot);
            }
            (CommandState::Io, None) => {
                self.cancels.push_back((command.volume(), Tag(slot as u64)));
                entry.abort(status, order);
            }
            (CommandState::Data, _) => entry.abort(status, order),
            _ => {}
        }
    }

    /// A command ends as it was told to.
    fn finish_aborted(&mut self, slot: usize) {
        let Some(entry) = self.commands.get_mut(slot) else { return };
        let Some(abort) = entry.abort.take() else { return };
        let outcome = match abort.status {
            // The host knows best whether to try again.
            NvmeStatus::COMMAND_ABORT_REQUESTED => NvmeOutcome::retry(abort.status),
            status => NvmeOutcome::failure(status),
        };
        let outcome = match &entry.work {
            CommandWork::Io(command) => command.unfinished(outcome),
            _ => outcome,
        };
        self.finish(slot, &outcome);
        if let Some(order) = abort.order {
            order.aborted();
        }
    }

    /// Whether there is a queue that may be used.
    fn is_usable(&self) -> bool {
        self.queue.is_some() && self.is_authenticated()
    }

    /// Whether the host has proved who it is, or need not.
    #[inline]
    pub(super) fn is_authenticated(&self) -> bool {
        self.authenticator.as_ref().is_none_or(|authenticator| authenticator.is_done())
    }

    /// Whether the host is proving who it is.
    fn is_authenticating(&self) -> bool {
        self.queue.is_some() && !self.is_authenticated()
    }

    /// Whether it has to poll for events itself.
    fn polls_events(&self) -> bool {
        let is_notified = self.events.as_ref().is_none_or(|events| events.notifies());
        !is_notified && matches!(&self.queue, Some(ConnectedQueue::Admin(admin)) if admin.waits_for_events())
    }

    /// Whether anything waits that nothing is certain to wake. Commands that wait for room beside
    /// data in flight begin when some of that has gone: each such turn looks.
    fn polls(&self) -> bool {
        let is_alone = self.commands.payload == 0 && self.transport.unsent() == 0;
        self.waits() || is_alone && !self.unstarted.is_empty()
    }

    fn waits(&self) -> bool {
        !self.held.is_empty()
            || !self.waiting.is_empty()
            || matches!(&self.queue, Some(ConnectedQueue::Admin(admin)) if admin.waits())
            || self.connecting.is_some()
    }
}

impl<T: FabricsTransport> Timed for ControllerQueue<T> {
    fn poll_timeout(&self) -> Option<Instant> {
        if self.is_over {
            return None;
        }
        let timers = &self.timers;
        let connect = (!self.is_usable()).then_some(timers.connect_by);
        let prove = self.is_authenticating().then_some(timers.message_by);
        let retry = self.polls().then_some(timers.retry.at());
        let keep_alive = timers.keep_alive.as_ref().map(|keep_alive| keep_alive.next_check);
        let poll = self.polls_events().then_some(timers.poll_at);
        [connect, prove, retry, keep_alive, poll].into_iter().flatten().min()
    }

    fn on_timeout(&mut self, now: Instant) -> Result<(), ProtocolError> {
        let is_authenticating = self.is_authenticating();
        let timers = &mut self.timers;
        timers.now = now;
        let late = if now >= timers.connect_by && (is_authenticating || self.queue.is_none()) {
            Some(ProtocolError {
                what: "did not connect a queue, and prove who it is, within 30 seconds",
                reference: "NVMe Base 2.0 §3.3.2.2",
            })
        } else if is_authenticating && now >= timers.message_by {
            Some(ProtocolError {
                what: "did not go on proving who it is within 15 seconds",
                reference: "NVMe Base 2.0 §8.13.2",
            })
        } else {
            None
        };
        if let Some(late) = late {
            self.is_over = true;
            return Err(late);
        }
        timers.poll_at = now.checked_add(POLL).unwrap_or(now);
        timers.retry.on_try(now);
        self.read_events();
        self.resume();
        // Who is still proving itself may not send Keep Alive yet, and has `connect_by` to be done.
        let is_excused = !self.is_authenticated();
        let checked = match &mut self.timers.keep_alive {
            Some(keep_alive) => keep_alive.check(now, is_excused),
            None => Ok(()),
        };
        self.is_over |= checked.is_err();
        checked
    }
}

impl<T: FabricsTransport> Target for ControllerQueue<T> {
    fn depth(&self) -> u32 {
        MAX_COMMANDS as u32
    }

    #[inline]
    fn poll_io(&mut self) -> Option<(VolumeId, Io)> {
        self.io.pop_front()
    }

    fn poll_cancel(&mut self) -> Option<(VolumeId, Tag)> {
        self.cancels.pop_front()
    }

    #[inline]
    fn poll_event(&mut self) -> Option<AuditEvent> {
        self.audit.pop()
    }

    fn on_start(&mut self, waker: &Waker, _now: Instant) {
        self.connection.notifier = self.make_notifier.take().map(|make| make(waker));
    }

    #[inline]
    fn on_turn(&mut self, now: Instant) {
        self.timers.now = now;
        self.read_events();
        // What was sent meanwhile has made room.
        if !self.unstarted.is_empty() {
            self.start();
        }
    }

    #[inline]
    fn on_io(&mut self, done: Completion, now: Instant) {
        self.timers.now = now;
        self.timers.retry.reset(now);
        if let Ok(slot) = usize::try_from(done.tag.0) {
            self.on_result(slot, done.result);
        }
        if self.waits() || !self.unstarted.is_empty() {
            self.resume();
        }
    }

    #[inline]
    fn stage(&self) -> SessionStage {
        if self.queue.is_some() { SessionStage::Established } else { SessionStage::Handshake }
    }

    fn owed(&self) -> Option<u64> {
        self.commands.owed()
    }

    fn on_stop(&mut self, _now: Instant) {
        self.stopping = true;
        self.end_fusing();
    }
}

/// Where the host's data is: at an offset in the capsule, or with the host. Refuses descriptors
/// that do not fit the command (Base 2.0 §4.1.2, TCP Transport 1.0 §3.3.2).
#[inline]
fn locate(
    sqe: &Sqe,
    descriptor: &Descriptor,
    work: &CommandWork,
    out: usize,
    capsule_len: usize,
) -> Result<Option<usize>, NvmeStatus> {
    if out > 0 {
        if descriptor.len != out {
            return Err(NvmeStatus::DATA_SGL_LENGTH_INVALID);
        }
        return match descriptor.place {
            Ok(DataPlace::Capsule(offset)) => {
                let offset = usize::try_from(offset).map_err(|_| NvmeStatus::SGL_OFFSET_INVALID)?;
                let end = offset.checked_add(out).filter(|&end| end <= capsule_len);
                end.map(|_| Some(offset)).ok_or(NvmeStatus::SGL_OFFSET_INVALID)
            }
            Ok(DataPlace::Host) => Ok(None),
            Err(status) => Err(status),
        };
    }
    if let CommandWork::Io(command) = work {
        let wanted = command.data_in();
        if wanted > 0 && !descriptor.is_at_host() {
            return Err(NvmeStatus::SGL_DESCRIPTOR_TYPE_INVALID);
        }
        if wanted != descriptor.len && transfer(sqe.opcode) == Transfer::ControllerToHost {
            return Err(NvmeStatus::DATA_SGL_LENGTH_INVALID);
        }
    }
    Ok(None)
}

/// SQHD of the next completion, of a queue of so many entries. Until Connect it just counts.
#[inline]
fn next_sqhd(sqhd: &mut Option<u16>, entries: u16) -> Option<u16> {
    let next = sqhd.as_mut()?;
    *next = next.wrapping_add(1);
    if *next >= entries && entries > 1 {
        *next = 0;
    }
    Some(*next)
}

/// The most commands of one queue: its entries, and those that wait for events.
const MAX_COMMANDS: usize = MQES as usize + 1 + MAX_EVENT_REQUESTS;
/// The most data of one session, in bytes, what the transport has not sent included.
const PAYLOAD_IN_FLIGHT: usize = 64 << 20;
/// Until a queue is connected.
pub(super) const CONNECT_TIME: Duration = Duration::from_secs(30);
/// How often a queue without a notifier polls its events.
const POLL: Duration = Duration::from_millis(100);
/// A host has more commands under way than its queue has entries for; the connection ends, and
/// nothing else would tell the host.
const OVERRUN: ProtocolError = ProtocolError {
    what: "sent more commands than its queue has entries",
    reference: "NVMe Base 2.0, SQ flow control",
};
