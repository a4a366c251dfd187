//! Executes and aborts the tasks of a nexus, as far as that concerns the transport.

use super::functions::FunctionDone;
use super::tasks::{PausedTask, TaskEntry, TaskState, slot_of};
use super::transport::{ScsiTransport, TaskEvent, TransportParts};
use crate::exports::VolumeId;
use crate::scsi::TaskFailure;
use crate::scsi::{
    Command, DeviceServer, Lun, ManagementResponse, Response, ScsiStatus, Sense, Task, TaskManagement,
    TaskStep,
};
use crate::volume_state::{Drain, NotAdmitted};
use blockmux_volume::{Completion, Io, IoError, SgList, Tag};

/// Task execution, implemented for every [`ScsiTransport`].
pub(crate) trait TaskRouter: ScsiTransport + Sized {
    /// Starts the task in this slot, which was just filled.
    #[inline]
    fn start(&mut self, slot: usize, command: &Command) {
        let tasks = self.parts().tasks;
        if let Some(entry) = tasks.get_mut(slot) {
            entry.task = Some(Task::new(command));
        }
        match tasks.server_and_task(slot) {
            Some((server, task)) => {
                let step = server.start(task);
                self.drive(slot, step);
            }
            None => self.refuse(slot, Response::bare(ScsiStatus::BUSY)),
        }
    }

    /// Ends the task in this slot without starting it.
    fn refuse(&mut self, slot: usize, response: Response) {
        self.drive(slot, TaskStep::Done(response));
    }

    /// Executes a task until it waits or ends.
    #[inline]
    fn drive(&mut self, slot: usize, mut step: TaskStep) {
        loop {
            let TransportParts { tasks, queue, owner, now } = self.parts();
            let Some(entry) = tasks.get_mut(slot) else { return };
            match step {
                TaskStep::Io { volume, mut io } => {
                    io.tag = Tag(slot as u64);
                    (entry.state, entry.volume) = (TaskState::Io, volume);
                    entry.in_flight_at = Some(owner);
                    queue.in_flight = queue.in_flight.saturating_add(1);
                    return queue.io.push_back((volume, io));
                }
                TaskStep::Wait => {
                    entry.state = TaskState::Wait;
                    return queue.waiting.push(slot);
                }
                TaskStep::Pause(time) => {
                    entry.state = TaskState::Wait;
                    return queue
                        .paused
                        .push(PausedTask { slot, until: now.checked_add(time).unwrap_or(now) });
                }
                TaskStep::Done(mut response) => {
                    if Self::is_receiving(&entry.progress) {
                        entry.state = TaskState::Ended;
                        entry.task = None;
                        entry.response = Some(response);
                        return;
                    }
                    return self.complete(slot, &mut response);
                }
                TaskStep::DataOut { len } => {
                    entry.state = TaskState::Data;
                    let Some(data) = self.fetch(slot, len) else { return };
                    let Some((server, task)) = self.parts().tasks.server_and_task(slot) else { return };
                    step = on_data_out(server, task, data);
                }
            }
        }
    }

    /// Continues a task with its data-out, or with the reason why the data failed.
    #[inline]
    fn deliver_data(&mut self, slot: usize, data: Result<SgList, Sense>) {
        self.advance(slot, |server, task| on_data_out(server, task, data));
    }

    /// Executes the next step of a task, and what follows from it.
    #[inline]
    fn advance(&mut self, slot: usize, act: impl FnOnce(&mut DeviceServer, &mut Task) -> TaskStep) {
        if let Some((server, task)) = self.parts().tasks.server_and_task(slot) {
            let step = act(server, task);
            self.drive(slot, step);
        }
    }

    /// Processes the completion of an I/O that this driver submitted.
    #[inline]
    fn on_volume_io(&mut self, done: Completion) {
        let queue = self.parts().queue;
        queue.in_flight = queue.in_flight.saturating_sub(1);
        self.on_completion(done);
    }

    /// Processes the completion of an I/O that belongs to a task of this driver or was submitted by
    /// it.
    #[inline]
    fn on_completion(&mut self, done: Completion) {
        let slot = slot_of(done.tag);
        let TransportParts { tasks, owner, .. } = self.parts();
        let Some(entry) = tasks.get_mut(slot) else {
            debug_assert!(false, "{:?} completed but is not in flight", done.tag);
            return;
        };
        entry.in_flight_at = None;
        if entry.owner != owner {
            let owner = entry.owner;
            if !self.post(owner, TaskEvent::Completed(done)) {
                self.drop_aborted(slot);
            }
            return;
        }
        if let TaskState::Aborted(_) = entry.state {
            return self.drop_aborted(slot);
        }
        debug_assert!(entry.state == TaskState::Io, "{:?} completed but is not in flight", done.tag);
        self.advance(slot, |server, task| server.on_io(task, done));
    }

    /// Admits an I/O, as [`IoSource::begin`](crate::driver::target::IoSource::begin).
    #[inline]
    fn begin_io(&mut self, volume: VolumeId, io: &Io, is_late: bool) -> Result<(), NotAdmitted<IoError>> {
        let admitted = self.parts().tasks.admit(volume, io, is_late);
        admitted.map_err(|why| why.map(|failure| self.end_denied(io.tag, failure)))
    }

    /// Ends a task whose I/O is denied; returns the error to count for the volume. `None`: the task
    /// is aborted.
    #[cold]
    fn end_denied(&mut self, tag: Tag, failure: Option<TaskFailure>) -> IoError {
        let slot = slot_of(tag);
        let error = failure.map_or(IoError::Aborted, |failure| failure.io_error());
        let TransportParts { tasks, queue, owner, .. } = self.parts();
        let is_own = tasks.get_mut(slot).is_some_and(|entry| entry.owner == owner);
        match failure {
            Some(failure) if is_own => {
                queue.in_flight = queue.in_flight.saturating_sub(1);
                if let Some(entry) = tasks.get_mut(slot) {
                    entry.in_flight_at = None;
                }
                self.advance(slot, |server, task| server.fail_denied(task, failure));
            }
            _ => {
                // Its slot may get another task, whose I/O must not be cancelled.
                queue.cancels.retain(|(_, cancelled)| *cancelled != tag);
                self.on_volume_io(Completion { tag, result: Err(error) });
            }
        }
        error
    }

    /// Resumes all tasks that wait for others, and functions that wait for I/O of other nexuses.
    fn resume_waiting(&mut self) {
        for _ in 0..self.parts().queue.waiting.len() {
            let queue = self.parts().queue;
            if queue.waiting.is_empty() {
                break;
            }
            let slot = queue.waiting.remove(0);
            self.resume_task(slot);
        }
        self.resume_functions();
    }

    /// Resumes all tasks whose pause has ended.
    fn resume_paused(&mut self) {
        loop {
            let TransportParts { queue, now, .. } = self.parts();
            let Some(at) = queue.paused.iter().position(|paused| paused.until <= now) else { return };
            let slot = queue.paused.swap_remove(at).slot;
            self.resume_task(slot);
        }
    }

    /// Resumes a waiting task.
    fn resume_task(&mut self, slot: usize) {
        let TransportParts { tasks, owner, .. } = self.parts();
        let is_its = |entry: &mut TaskEntry<_>| entry.state == TaskState::Wait && entry.owner == owner;
        if tasks.get_mut(slot).is_some_and(is_its) {
            self.advance(slot, DeviceServer::resume);
        }
    }

    /// Sends the response of an ended task when all its data has arrived.
    fn end_if_closed(&mut self, slot: usize) {
        let entry = self.parts().tasks.get_mut(slot);
        let is_closed = |entry: &&mut TaskEntry<_>| {
            entry.state == TaskState::Ended && !Self::is_receiving(&entry.progress)
        };
        if let Some(mut response) = entry.filter(is_closed).and_then(|entry| entry.response.take()) {
            self.complete(slot, &mut response);
        }
    }

    /// Removes a task and frees its slot.
    #[inline]
    fn drop_task(&mut self, slot: usize) {
        self.release(slot);
        self.parts().tasks.remove(slot);
    }

    /// Removes an aborted task without outstanding I/O, and counts it for the function that aborted
    /// it.
    fn drop_aborted(&mut self, slot: usize) {
        let state = self.parts().tasks.get_mut(slot).map(|entry| entry.state);
        self.drop_task(slot);
        if let Some(TaskState::Aborted(function)) = state {
            self.on_aborted(function);
        }
    }

    /// ABORT TASK of an existing task (SAM-5 §7.2).
    fn abort_task(&mut self, tag: u32, referenced: u32) {
        self.abort(tag, |entry| entry.tag == referenced, Vec::new(), false);
    }

    /// ABORT TASK SET, CLEAR TASK SET, LOGICAL UNIT RESET (SAM-5 §7.3, §7.5, §7.7).
    fn manage_unit(&mut self, tag: u32, function: TaskManagement, lun: Lun) -> ManagementResponse {
        let Some(server) = &mut self.parts().tasks.server else {
            return ManagementResponse::IncorrectLogicalUnitNumber;
        };
        let response = server.manage(function, lun);
        if response == ManagementResponse::FunctionComplete {
            let concerns_others = function != TaskManagement::AbortTaskSet;
            let drain = if concerns_others { server.drain(lun) } else { None };
            self.abort(tag, |entry| entry.lun.names_same_unit(lun), Vec::from_iter(drain), false);
        }
        response
    }

    /// Resets every logical unit of the target.
    fn reset_target(&mut self, tag: u32, ends_session: bool) {
        let mut drains = Vec::new();
        if let Some(server) = &mut self.parts().tasks.server {
            for (number, ..) in server.target.units() {
                server.manage(TaskManagement::LogicalUnitReset, Lun::new(number));
                drains.extend(server.drain(Lun::new(number)));
            }
        }
        self.abort(tag, |_| true, drains, ends_session);
    }

    /// I_T NEXUS RESET (SAM-5 §7.6).
    fn reset_nexus(&mut self, tag: u32) {
        if let Some(server) = &mut self.parts().tasks.server {
            server.on_nexus_loss();
        }
        self.abort(tag, |_| true, Vec::new(), false);
    }

    /// Aborts the tasks that satisfy `predicate`; the function completes when they and the `drains`
    /// have ended.
    fn abort(
        &mut self,
        tag: u32,
        predicate: impl Fn(&TaskEntry<Self::Progress>) -> bool,
        mut drains: Vec<Drain>,
        ends_session: bool,
    ) {
        let Some(function) = self.parts().tasks.functions.free() else { return };
        let done = FunctionDone { tag, ends_session };
        drains.retain(|drain| !drain.is_over());
        let remaining = self.abort_tasks(predicate, Some(function)).saturating_add(drains.len());
        let TransportParts { tasks, queue, owner, .. } = self.parts();
        queue.drains.extend(drains.into_iter().map(|drain| (function, drain)));
        if remaining == 0 {
            return self.on_function_done(done);
        }
        tasks.functions.wait(function, done, remaining, owner);
    }

    /// Aborts the tasks that satisfy `predicate`; returns how many of them still wait for the
    /// volume or for their driver.
    fn abort_tasks(
        &mut self,
        predicate: impl Fn(&TaskEntry<Self::Progress>) -> bool,
        function: Option<usize>,
    ) -> usize {
        let TransportParts { tasks, queue, owner: own, .. } = self.parts();
        let slots = tasks.select(predicate);
        queue.forget(|slot| slots.contains(&slot));
        let mut remaining: usize = 0;
        for slot in slots {
            let Some(entry) = self.parts().tasks.get_mut(slot) else { continue };
            let (owner, volume, state, at) = (entry.owner, entry.volume, entry.state, entry.in_flight_at);
            match at {
                Some(at) if at == own => {
                    self.parts().queue.cancels.push_back((volume, Tag(slot as u64)));
                }
                Some(at) => drop(self.post(at, TaskEvent::Cancel(slot))),
                // Its I/O has completed and the completion is on its way to the owner, or its data
                // is being transferred.
                None if state == TaskState::Io || self.is_fetching(slot) => {}
                None if owner != own => drop(self.post(owner, TaskEvent::Drop(slot, function))),
                None => {
                    self.drop_task(slot);
                    continue;
                }
            }
            remaining = remaining.saturating_add(1);
            let tasks = self.parts().tasks;
            if let Some(entry) = tasks.get_mut(slot) {
                entry.state = TaskState::Aborted(function);
            }
            tasks.release_tag(slot);
        }
        remaining
    }

    /// Counts an aborted task for its function.
    fn on_aborted(&mut self, function: Option<usize>) {
        let TransportParts { tasks, owner, .. } = self.parts();
        match function.and_then(|function| tasks.functions.count(function)) {
            Some((requester, done)) if requester == owner => self.on_function_done(done),
            Some((requester, done)) => drop(self.post(requester, TaskEvent::FunctionDone(done))),
            None => {}
        }
    }

    /// Completes functions whose wait for other nexuses' I/O is over.
    fn resume_functions(&mut self) {
        loop {
            let drains = &mut self.parts().queue.drains;
            let Some(at) = drains.iter().position(|(_, drain)| drain.is_over()) else { return };
            let (function, _) = drains.swap_remove(at);
            self.on_aborted(Some(function));
        }
    }

    /// Lets the functions of this driver complete without a response.
    fn forget_functions(&mut self) {
        let TransportParts { tasks, queue, owner, .. } = self.parts();
        tasks.functions.drop_requester(owner);
        for (function, _) in std::mem::take(&mut queue.drains) {
            self.on_aborted(Some(function));
        }
    }

    /// Processes an event from another driver of the task set.
    fn on_event(&mut self, event: TaskEvent) {
        match event {
            TaskEvent::Cancel(slot) => {
                let TransportParts { tasks, queue, owner, .. } = self.parts();
                // Its I/O may have completed meanwhile.
                if let Some(entry) = tasks.get_mut(slot)
                    && matches!(entry.state, TaskState::Aborted(_))
                    && entry.in_flight_at == Some(owner)
                {
                    queue.cancels.push_back((entry.volume, Tag(slot as u64)));
                }
            }
            TaskEvent::Drop(slot, function) => {
                self.parts().queue.forget(|other| other == slot);
                self.drop_task(slot);
                self.on_aborted(function);
            }
            TaskEvent::FunctionDone(done) => self.on_function_done(done),
            TaskEvent::Completed(done) => self.on_completion(done),
        }
    }

    /// Ends all tasks after the driver dropped its I/O, which will not complete.
    fn abandon(&mut self) {
        let TransportParts { tasks, owner, .. } = self.parts();
        for slot in tasks.slots_in_flight_at(owner) {
            let tag = Tag(slot as u64);
            self.on_completion(Completion { tag, result: Err(IoError::PathLost) });
        }
        for slot in self.parts().tasks.slots_of(owner) {
            let Some(entry) = self.parts().tasks.get_mut(slot) else { continue };
            if entry.in_flight_at.is_some() {
                // The driver of the I/O frees the slot.
                entry.owner = 0;
                continue;
            }
            self.drop_aborted(slot);
        }
    }
}

impl<T: ScsiTransport> TaskRouter for T {}

/// The step of a task with its data-out, or with the reason why the data failed.
#[inline]
fn on_data_out(server: &mut DeviceServer, task: &mut Task, data: Result<SgList, Sense>) -> TaskStep {
    match data {
        Ok(data) => server.on_data_out(task, data),
        Err(sense) => TaskStep::Done(Response::failed(sense)),
    }
}
