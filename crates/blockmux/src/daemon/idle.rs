//! Disconnects clients that have sent no request to a volume for `idle_timeout`.
//!
//! All sessions of a client count together: the queues of an NVMe host, or the connections of an
//! iSCSI initiator, are in use if one of them is. Keep-alives and commands that do not reach a
//! volume, such as TEST UNIT READY, are not requests.

use super::control::ConnectionLimits;
use super::setup::Setup;
use crate::failure::Failure;
use blockmux_engine::core::reactor::Inbox;
use blockmux_engine::serve::sessions::SessionInfo;
use blockmux_proto::nvme::subsystem::is_discovery_nqn;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

/// The watch of idle clients. Dropping it ends the watch.
pub(super) struct IdleWatch {
    _end: Sender<()>,
}

/// Starts a thread that disconnects idle clients and wakes the cores through `inboxes`; `None` if
/// there is no timeout and the config cannot change.
pub(super) fn watch(
    setup: &Setup,
    connection_limits: &Arc<ConnectionLimits>,
    inboxes: Vec<Inbox>,
) -> Result<Option<IdleWatch>, Failure> {
    if setup.idle_timeout.is_none() && !setup.may_change() {
        return Ok(None);
    }
    let connection_limits = connection_limits.clone();
    let (sender, end) = mpsc::channel::<()>();
    let watch = move || {
        let mut clients = Clients::default();
        while end.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
            let Some(timeout) = connection_limits.idle_timeout() else {
                clients = Clients::default();
                continue;
            };
            let sessions = connection_limits.limit.sessions().list();
            let idle = clients.update(Instant::now(), timeout, &sessions);
            if idle.is_empty() {
                continue;
            }
            let draining =
                connection_limits.limit.sessions().drain(IDLE, |info| idle.contains(&ClientKey::of(info)));
            wake_all(&inboxes);
            let begun = Instant::now();
            while !draining.left().is_empty() && begun.elapsed() < DRAIN_TIMEOUT {
                if end.recv_timeout(DRAIN_POLL) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
            draining.close();
            wake_all(&inboxes);
        }
    };
    let started = thread::Builder::new().name("idle".to_owned()).spawn(watch);
    started.map_err(|error| Failure::run(format!("cannot start a thread: {error}")))?;
    Ok(Some(IdleWatch { _end: sender }))
}

/// Wakes all tasks of all cores, so that sessions notice that they are to end.
fn wake_all(inboxes: &[Inbox]) {
    inboxes.iter().for_each(|inbox| inbox.send(|core| core.wake_all()));
}

/// A client: the sessions of one initiator with one target. The initiator is identified by its
/// name, or by its address if it has no name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ClientKey {
    protocol: &'static str,
    target: String,
    initiator: String,
}

impl ClientKey {
    fn of(info: &SessionInfo) -> ClientKey {
        let login = &info.login;
        ClientKey { protocol: login.protocol, target: login.target.clone(), initiator: info.client() }
    }

    /// Whether the client is disconnected when it is idle. A host stays connected to a discovery
    /// controller to receive notifications, and AoE has no connections.
    fn is_watched(&self) -> bool {
        self.protocol != "aoe" && !is_discovery_nqn(&self.target)
    }
}

/// The logged-in clients.
#[derive(Default)]
struct Clients(BTreeMap<ClientKey, Activity>);

/// The activity of a client at the last check.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Activity {
    /// Time of the last change of `requests` or `sessions`.
    since: Instant,
    requests: u64,
    sessions: usize,
    /// Requests that are throttled.
    throttled: u64,
}

impl Clients {
    /// Compares the sessions with the previous check; returns the clients that have been idle for
    /// `timeout`.
    fn update(&mut self, now: Instant, timeout: Duration, sessions: &[SessionInfo]) -> Vec<ClientKey> {
        let mut seen: BTreeMap<ClientKey, Activity> = BTreeMap::new();
        for session in sessions {
            let client = ClientKey::of(session);
            let traffic = &session.traffic;
            let requests = traffic.reads + traffic.writes + traffic.others;
            let own =
                seen.entry(client).or_insert(Activity { since: now, requests: 0, sessions: 0, throttled: 0 });
            own.requests += requests;
            own.sessions += 1;
            own.throttled += traffic.throttled_now;
        }
        for (client, own) in &mut seen {
            let before = self.0.get(client).copied();
            let is_same = |before: &Activity| {
                own.throttled == 0 && (before.requests, before.sessions) == (own.requests, own.sessions)
            };
            if let Some(before) = before.filter(is_same) {
                own.since = before.since;
            }
        }
        self.0 = seen;
        let is_idle = |own: &Activity| now.saturating_duration_since(own.since) >= timeout;
        let idle = self.0.iter().filter(|(client, own)| client.is_watched() && is_idle(own));
        idle.map(|(client, _)| client.clone()).collect()
    }
}

/// The reason in the log when an idle client's session ends.
const IDLE: &str = "it was idle for `idle_timeout`";
/// Interval of checks for idle clients.
const PERIOD: Duration = Duration::from_secs(1);
/// Time for sessions to end before they are disconnected.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of checks whether the sessions have ended.
const DRAIN_POLL: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_proto::driver::audit_event::Login;
    use blockmux_proto::volume_state::VolumeTraffic;
    use blockmux_wire::nvmeof::fabrics::DISCOVERY_NQN;
    use std::time::SystemTime;

    fn session(protocol: &'static str, initiator: &str, target: &str, peer: &str, reads: u64) -> SessionInfo {
        SessionInfo {
            login: Login {
                protocol,
                initiator: initiator.to_owned(),
                target: target.to_owned(),
                is_authenticated: false,
            },
            peer: peer.to_owned(),
            listener: "127.0.0.1:1".to_owned(),
            fabric: None,
            since: SystemTime::UNIX_EPOCH,
            traffic: VolumeTraffic { reads, ..VolumeTraffic::default() },
        }
    }

    /// The clients that become idle, each with the second, at a timeout of 10 s.
    fn idle_at(seconds: u64, sessions: impl Fn(u64) -> Vec<SessionInfo>) -> Vec<(u64, String)> {
        let (mut clients, begun, timeout) = (Clients::default(), Instant::now(), Duration::from_secs(10));
        let mut found = Vec::new();
        for second in 0..seconds {
            let now = begun + Duration::from_secs(second);
            let idle = clients.update(now, timeout, &sessions(second));
            found.extend(idle.into_iter().map(|client| (second, client.initiator)));
        }
        found
    }

    #[test]
    fn a_client_is_idle_when_the_timeout_has_passed_since_its_last_request() {
        let sessions = |second: u64| {
            // The first client sends a request each second for 5 s, the second does so all the
            // time.
            let one = session("nbd", "", "a", "192.0.2.1:9", second.min(5));
            vec![one, session("nbd", "", "a", "192.0.2.2:9", second)]
        };
        assert_eq!(idle_at(16, sessions), [(15, "192.0.2.1".to_owned())]);
    }

    #[test]
    fn the_sessions_of_one_initiator_are_idle_together() {
        let sessions = |second: u64| {
            let queue = |port: u16, reads| session("nvme-tcp", "nqn.h", "nqn.a", &format!("x:{port}"), reads);
            vec![queue(1, 0), queue(2, second.min(3)), queue(3, 0)]
        };
        assert_eq!(idle_at(14, sessions), [(13, "nqn.h".to_owned())]);
    }

    #[test]
    fn a_login_is_activity_and_discovery_controllers_and_aoe_are_not_watched() {
        let sessions = |second: u64| {
            let mut all = vec![
                session("nvme-tcp", "nqn.h", DISCOVERY_NQN, "x:1", 0),
                session("nvme-tcp", "nqn.h", "nqn.2026-11.blockmux:discovery.77", "x:1", 0),
                session("aoe", "00:00:5e:00:53:01", "e0.0", "00:00:5e:00:53:01", 0),
                session("nbd", "", "a", "192.0.2.1:9", 0),
            ];
            all.extend((second >= 8).then(|| session("nbd", "", "a", "192.0.2.1:10", 0)));
            all
        };
        assert_eq!(idle_at(19, sessions), [(18, "192.0.2.1".to_owned())]);
    }
}
