//! One client of the cluster: the calls that it has in flight, with their limits, and its watch.
//!
//! The member's actions go in, with the time; events for it come out.

use super::call_thread::CallThread;
use super::input::{ClientSender, GroupConnection, NumberedWatch, Report};
use super::volumes::Activation;
use blockmux_group::table::{HEAD_LEN, MAX_LEN};
use blockmux_group::{Client, Event, Generation, Notice, Outcome, RequestId, Table};
use blockmux_rbd::cluster::Cluster;
use blockmux_rbd::error::{Errno, RbdError};
use blockmux_rbd::object::PoolObject;
use blockmux_rbd::watch::{Notifier, Watch, WatchEvent};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// What follows from a call that has ended, or from the time.
pub(super) enum ClientOutput {
    Event(Event),
    /// The client has the newest map: the volume can be activated.
    Activate(Activation),
    /// What is wrong.
    Problem(String),
    /// What is wrong with a volume.
    OfVolume {
        volume: String,
        problem: Option<String>,
    },
    /// The table was read.
    Well,
}

pub(super) struct GroupClient {
    connection: GroupConnection,
    sender: ClientSender,
    notifier: Notifier,
    table_calls: CallThread,
    watch_calls: CallThread,
    fence_calls: CallThread,
    fence_again_calls: CallThread,
    map_calls: CallThread,
    reading: Option<(RequestId, Duration)>,
    proposing: Option<(RequestId, Duration)>,
    /// Those that are not fenced yet.
    fencing: Option<(Vec<Client>, Duration)>,
    /// Volumes that wait for the map that is being asked for.
    waiting: Pending<Vec<Activation>>,
    /// Volumes that wait for the next one.
    waiting_next: Vec<Activation>,
    watch: Option<NumberedWatch>,
    last_watch: u64,
    is_starting_watch: bool,
    wants_watch: bool,
    /// When a watch that has failed is tried again.
    watch_at: Option<Duration>,
    outputs: VecDeque<ClientOutput>,
}

impl GroupClient {
    /// # Errors
    /// If no thread can be started.
    pub(super) fn new(connection: GroupConnection, sender: ClientSender) -> io::Result<GroupClient> {
        let spawn = |name| CallThread::spawn(name, &sender);
        Ok(GroupClient {
            table_calls: spawn("table")?,
            watch_calls: spawn("watch")?,
            fence_calls: spawn("fence")?,
            fence_again_calls: spawn("again")?,
            map_calls: spawn("map")?,
            notifier: Notifier::new(&connection.object),
            connection,
            sender,
            reading: None,
            proposing: None,
            fencing: None,
            waiting: Pending::default(),
            waiting_next: Vec::new(),
            watch: None,
            last_watch: 0,
            is_starting_watch: false,
            wants_watch: false,
            watch_at: None,
            outputs: VecDeque::new(),
        })
    }

    pub(super) fn number(&self) -> u64 {
        self.sender.number()
    }

    pub(super) fn address(&self) -> &Client {
        &self.connection.address
    }

    pub(super) fn cluster(&self) -> &Arc<Cluster> {
        &self.connection.cluster
    }

    pub(super) fn sender(&self) -> &ClientSender {
        &self.sender
    }

    /// What has followed, in order.
    pub(super) fn poll(&mut self) -> Option<ClientOutput> {
        self.outputs.pop_front()
    }

    fn tell(&mut self, event: Event) {
        self.outputs.push_back(ClientOutput::Event(event));
    }

    pub(super) fn read(&mut self, now: Duration, request: RequestId) {
        let object = self.connection.object.clone();
        let call = move || Report::Read { request, result: object.read(MAX_LEN.saturating_add(1)) };
        match self.table_calls.call(call) {
            true => self.reading = Some((request, now.saturating_add(CALL_TIMEOUT))),
            false => self.tell(Event::ReadFailed { request }),
        }
    }

    pub(super) fn propose(&mut self, now: Duration, request: RequestId, table: Table) {
        let object = self.connection.object.clone();
        let call = move || {
            let expected = match table.generation().0.saturating_sub(1) {
                // Not even an empty table.
                0 => [0; HEAD_LEN],
                before => Table::head(Generation(before)),
            };
            let result = object.replace(&expected, &table.encode());
            Report::Proposed { request, table, result }
        };
        match self.table_calls.call(call) {
            true => self.proposing = Some((request, now.saturating_add(CALL_TIMEOUT))),
            false => self.tell(Event::Proposed { request, outcome: Outcome::Unknown }),
        }
    }

    /// Watches anew. While a watch is being started, once more after that.
    pub(super) fn watch(&mut self) {
        if self.is_starting_watch {
            self.wants_watch = true;
            return;
        }
        let number = self.last_watch.saturating_add(1);
        let (object, sender, earlier) =
            (self.connection.object.clone(), self.sender.clone(), self.watch.take());
        let call = move || {
            let started = start_watch(&object, number, sender);
            // Ends only now, so that nothing is missed between the two.
            drop(earlier);
            Report::Watching(started)
        };
        // It is free: only starting a watch uses it.
        if self.watch_calls.call(call) {
            (self.is_starting_watch, self.last_watch, self.watch_at) = (true, number, None);
        }
    }

    pub(super) fn fence(&mut self, now: Duration, clients: Vec<Client>) {
        let (cluster, sender) = (self.cluster().clone(), self.sender.clone());
        let asked = clients.clone();
        let call = move || {
            let mut left = asked;
            let mut result = Ok(());
            while let Some(client) = left.first().cloned() {
                result = cluster.fence(&client.0);
                if result.is_err() {
                    break;
                }
                left.remove(0);
                sender.send(Report::Fenced { clients: vec![client], result: Ok(()) });
            }
            Report::Fenced { clients: left, result }
        };
        match self.fence_calls.call(call) {
            true => self.fencing = Some((clients, now.saturating_add(MONITOR_TIMEOUT))),
            false => self.tell(Event::FenceFailed { clients }),
        }
    }

    /// Fences clients once more. While an earlier such call has not returned, nothing is done: the
    /// member asks again after the next activation.
    pub(super) fn fence_again(&self, clients: Vec<Client>) {
        let cluster = self.cluster().clone();
        let call = move || {
            let mut results = clients.iter().map(|client| cluster.fence(&client.0));
            Report::FencedAgain(results.find(Result::is_err).unwrap_or(Ok(())))
        };
        let _ = self.fence_again_calls.call(call);
    }

    /// Activates a volume once the client has the newest map from after now.
    pub(super) fn activate(&mut self, now: Duration, activation: Activation) {
        self.waiting_next.push(activation);
        self.ask_for_map(now);
    }

    fn ask_for_map(&mut self, now: Duration) {
        if self.waiting.call.is_some() || self.waiting_next.is_empty() {
            return;
        }
        let cluster = self.cluster().clone();
        let waiting = std::mem::take(&mut self.waiting_next);
        let call = self.waiting.next();
        match self.map_calls.call(move || Report::LatestMap { call, result: cluster.wait_for_latest_map() }) {
            true => self.waiting.begin(waiting, now.saturating_add(MONITOR_TIMEOUT)),
            false => self.fail_activations(waiting),
        }
    }

    fn fail_activations(&mut self, activations: Vec<Activation>) {
        for Activation { volume, epoch, .. } in activations {
            self.tell(Event::ActivationNotBegun { volume, epoch });
        }
    }

    /// Tells all watchers something, without waiting for them.
    pub(super) fn notify(&self, notice: Notice) {
        let sender = self.sender.clone();
        let done = move |result: Result<(), Errno>| {
            // A watcher that does not acknowledge it is not this client's problem.
            if let Err(error) = result {
                sender.send(Report::NotNotified(error));
            }
        };
        // One that was not sent is as one that was lost.
        self.notifier.notify(&notice.encode(), Box::new(done));
    }

    pub(super) fn on_report(&mut self, now: Duration, report: Report) {
        self.sender.on_taken(&report);
        match report {
            Report::Read { request, result } => self.on_read(request, result),
            Report::Proposed { request, table, result } => self.on_proposed(request, &table, result),
            Report::Watching(result) => self.on_watching(now, result),
            Report::Noticed(Notice::Beat(beat)) => self.tell(Event::Beat(beat)),
            Report::Noticed(Notice::Changed(generation)) => self.tell(Event::Changed { generation }),
            Report::Interrupted { watch } => {
                let current = self.watch.as_ref().map(|watch| watch.number);
                if watch.is_none() || watch == current {
                    self.tell(Event::WatchLost);
                }
            }
            Report::NotNotified(error) if error.0 == libc::ESHUTDOWN => self.on_refused(),
            Report::NotNotified(_) => {}
            Report::Fenced { clients, result } => self.on_fenced(now, clients, result),
            Report::FencedAgain(Ok(())) => {}
            Report::FencedAgain(Err(error)) => self.on_error("fencing a client again", &error),
            Report::LatestMap { call, result } => {
                match (self.waiting.end(call), result) {
                    // Who waits by now waits for a newer map.
                    (None, _) => {}
                    (Some(waiting), Ok(())) => {
                        self.outputs.extend(waiting.into_iter().map(ClientOutput::Activate))
                    }
                    (Some(waiting), Err(error)) => {
                        self.on_error("the map of the cluster", &error);
                        self.fail_activations(waiting);
                    }
                }
                self.ask_for_map(now);
            }
            Report::Volume { event, problem } => {
                if let Event::ActivationFailed { volume, .. }
                | Event::Lost { volume, .. }
                | Event::Activated { volume, .. }
                | Event::Deactivated { volume, .. } = &event
                {
                    self.outputs.push_back(ClientOutput::OfVolume { volume: volume.clone(), problem });
                }
                self.tell(event);
            }
        }
    }

    fn on_read(&mut self, request: RequestId, result: Result<Vec<u8>, RbdError>) {
        let _ = self.reading.take_if(|(present, _)| *present == request);
        let table = match result {
            Ok(bytes) if bytes.is_empty() => Ok(None),
            Ok(bytes) => Table::decode(&bytes).map(Some).map_err(|error| error.to_string()),
            Err(error) => {
                self.on_error("the group's table", &error);
                return self.tell(Event::ReadFailed { request });
            }
        };
        match table {
            Ok(table) => {
                self.outputs.push_back(ClientOutput::Well);
                self.tell(Event::TableRead { request, table });
            }
            Err(problem) => {
                self.outputs.push_back(ClientOutput::Problem(problem));
                self.tell(Event::ReadFailed { request });
            }
        }
    }

    fn on_proposed(&mut self, request: RequestId, table: &Table, result: Result<bool, RbdError>) {
        let _ = self.proposing.take_if(|(present, _)| *present == request);
        let outcome = match result {
            Ok(true) => {
                self.notify(Notice::Changed(table.generation()));
                Outcome::Committed
            }
            Ok(false) => Outcome::Stale,
            Err(error) => {
                self.on_error("the group's table", &error);
                Outcome::Unknown
            }
        };
        self.tell(Event::Proposed { request, outcome });
    }

    fn on_watching(&mut self, now: Duration, result: Result<NumberedWatch, RbdError>) {
        self.is_starting_watch = false;
        match result {
            Ok(watch) => {
                self.watch = Some(watch);
                self.tell(Event::Watching);
            }
            Err(error) => {
                self.on_error("watching the group's table", &error);
                self.watch_at = Some(now.saturating_add(WATCH_RETRY));
            }
        }
        if std::mem::take(&mut self.wants_watch) {
            self.watch();
        }
    }

    fn on_fenced(&mut self, now: Duration, clients: Vec<Client>, result: Result<(), RbdError>) {
        if let Some((left, until)) = &mut self.fencing {
            left.retain(|client| !clients.contains(client));
            *until = now.saturating_add(MONITOR_TIMEOUT);
        }
        if self.fencing.as_ref().is_some_and(|(left, _)| left.is_empty()) {
            self.fencing = None;
        }
        match result {
            Ok(()) if clients.is_empty() => {}
            Ok(()) => self.tell(Event::ClientsFenced { clients }),
            Err(error) => {
                self.on_error("fencing a client", &error);
                self.tell(Event::FenceFailed { clients });
            }
        }
    }

    /// Looks for calls that have taken too long, and whether the watch is in order.
    pub(super) fn on_tick(&mut self, now: Duration) {
        if let Some((request, _)) = self.reading.take_if(|(_, until)| *until <= now) {
            self.on_no_answer("the group's table");
            self.tell(Event::ReadFailed { request });
        }
        if let Some((request, _)) = self.proposing.take_if(|(_, until)| *until <= now) {
            self.on_no_answer("the group's table");
            self.tell(Event::Proposed { request, outcome: Outcome::Unknown });
        }
        if let Some((clients, _)) = self.fencing.take_if(|(_, until)| *until <= now) {
            self.on_no_answer("fencing a client");
            self.tell(Event::FenceFailed { clients });
        }
        if let Some(waiting) = self.waiting.expire(now) {
            self.on_no_answer("the map of the cluster");
            let next = std::mem::take(&mut self.waiting_next);
            self.fail_activations(waiting);
            self.fail_activations(next);
        }
        let is_broken = self.watch.as_ref().is_some_and(|watch| watch.watch.check().is_err());
        if self.watch_at.take_if(|at| *at <= now).is_some() || is_broken {
            self.tell(Event::WatchLost);
        }
    }

    fn on_no_answer(&mut self, what: &str) {
        let problem =
            format!("{what}: no answer from the cluster; 'ceph health detail' says what is missing");
        self.outputs.push_back(ClientOutput::Problem(problem));
    }

    fn on_error(&mut self, what: &str, error: &RbdError) {
        self.outputs.push_back(ClientOutput::Problem(format!("{what}: {error}")));
        if error.is_blocklisted() {
            self.on_refused();
        }
    }

    fn on_refused(&mut self) {
        self.cluster().note_blocklisted();
        self.tell(Event::OwnClientFenced);
    }

    /// Closes the client, on a thread, which waits for its calls. `closing` has the number of those
    /// that are not closed.
    pub(super) fn close(self, closing: &Arc<AtomicUsize>) {
        closing.fetch_add(1, Ordering::SeqCst);
        let closed = Closed(closing.clone());
        let close = move || {
            drop(self);
            drop(closed);
        };
        // Without a thread, it is closed here.
        let _ = thread::Builder::new().name("group close".to_owned()).spawn(close);
    }
}

/// A call that has not returned, with its limit. Calls have numbers, so that the late result of one
/// that has taken too long is not taken for that of the next one.
struct Pending<T> {
    /// Of the latest.
    number: u64,
    call: Option<(T, Duration)>,
}

impl<T> Pending<T> {
    /// The number of the next call.
    fn next(&self) -> u64 {
        self.number.saturating_add(1)
    }

    fn begin(&mut self, what: T, until: Duration) {
        (self.number, self.call) = (self.next(), Some((what, until)));
    }

    /// A call has returned. `None` if it had taken too long.
    fn end(&mut self, number: u64) -> Option<T> {
        self.call.take_if(|_| self.number == number).map(|(what, _)| what)
    }

    /// The call, if it has taken too long.
    fn expire(&mut self, now: Duration) -> Option<T> {
        self.call.take_if(|(_, until)| *until <= now).map(|(what, _)| what)
    }
}

impl<T> Default for Pending<T> {
    fn default() -> Pending<T> {
        Pending { number: 0, call: None }
    }
}

/// Counts down when it is dropped.
struct Closed(Arc<AtomicUsize>);

impl Drop for Closed {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Starts a watch of the table's object, which is created without content if it does not exist.
fn start_watch(
    object: &Arc<PoolObject>,
    number: u64,
    sender: ClientSender,
) -> Result<NumberedWatch, RbdError> {
    object.create()?;
    let call = move |event: WatchEvent<'_>| match event {
        WatchEvent::Notified(content) => {
            if let Some(notice) = Notice::decode(content) {
                sender.notice(notice);
            }
        }
        WatchEvent::Interrupted(_) => sender.send(Report::Interrupted { watch: Some(number) }),
    };
    Ok(NumberedWatch { number, watch: Watch::start(object, Box::new(call))? })
}

/// Time after which a call about the table counts as failed.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// Time after which a call of the monitors counts as failed: they may elect a leader meanwhile.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(10);
/// Time after which a watch that has failed is tried again.
const WATCH_RETRY: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_result_is_not_that_of_the_next_call() {
        let second = Duration::from_secs(1);
        let mut pending = Pending::default();
        let early = pending.next();
        pending.begin("early", second);
        assert_eq!(pending.expire(second / 2), None);
        assert_eq!(pending.expire(second), Some("early"));
        let next = pending.next();
        pending.begin("next", second * 2);
        assert_eq!(pending.end(early), None);
        assert_eq!(pending.end(next), Some("next"));
        assert_eq!(pending.end(next), None);
    }
}
