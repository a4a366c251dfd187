//! What events of a device mean for its connections.

use blockmux_verbs::async_event::{AsyncEvent, QueueIdentity};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The connections of one device, by their numbers, and its ports.
pub(super) struct DeviceEvents {
    /// The device's name.
    device: String,
    pub(super) connections: BTreeMap<u64, (QueueIdentity, String)>,
    /// Ports that are down, and when their connections end.
    down: BTreeMap<u8, Instant>,
    last_number: u64,
}

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct DeviceNotice {
    /// For the log.
    pub(super) text: String,
    /// The connections that end.
    pub(super) ended: Vec<u64>,
}

impl DeviceEvents {
    pub(super) fn new(device: String) -> DeviceEvents {
        DeviceEvents { device, connections: BTreeMap::new(), down: BTreeMap::new(), last_number: 0 }
    }

    /// Adds a connection; returns its number.
    pub(super) fn add(&mut self, identity: QueueIdentity, peer: &str) -> u64 {
        self.last_number = self.last_number.wrapping_add(1);
        self.connections.insert(self.last_number, (identity, peer.to_owned()));
        self.last_number
    }

    pub(super) fn on_event(&mut self, event: AsyncEvent, now: Instant) -> Option<DeviceNotice> {
        let device = &self.device;
        match event {
            AsyncEvent::QueuePair { number, failure } => {
                let (number, peer) = self.find(|identity| identity.queue_pair == number)?;
                let text = format!("the RDMA device {device} has ended the connection of {peer}: {failure}");
                Some(DeviceNotice { text, ended: vec![number] })
            }
            AsyncEvent::CompletionQueue(queue) => {
                let (number, peer) = self.find(|identity| identity.completion_queue == queue)?;
                let text =
                    format!("the completion queue of {peer} has failed: its connection over {device} ends");
                Some(DeviceNotice { text, ended: vec![number] })
            }
            AsyncEvent::PortDown(port) => {
                let count = self.of_port(port).len();
                if count == 0 || self.down.contains_key(&port) {
                    return None;
                }
                let seconds = GRACE.as_secs();
                let text = format!(
                    "port {port} of the RDMA device {device} is down: its {count} connections end unless \
                     it is up in {seconds} s; check the link"
                );
                self.down.insert(port, now + GRACE);
                Some(DeviceNotice { text, ended: Vec::new() })
            }
            AsyncEvent::PortUp(port) => {
                self.down.remove(&port)?;
                let text = format!("port {port} of the RDMA device {device} is up again");
                Some(DeviceNotice { text, ended: Vec::new() })
            }
            AsyncEvent::DeviceFailed => {
                let ended: Vec<u64> = self.connections.keys().copied().collect();
                if ended.is_empty() {
                    return None;
                }
                let count = ended.len();
                let text = format!(
                    "the RDMA device {device} has failed or was removed: its {count} connections end; see \
                     `dmesg`"
                );
                Some(DeviceNotice { text, ended })
            }
            AsyncEvent::Other(_) => None,
        }
    }

    /// When to call [`DeviceEvents::on_time`].
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.down.values().min().copied()
    }

    /// Ends the connections of ports that have been down for long.
    pub(super) fn on_time(&mut self, now: Instant) -> Option<DeviceNotice> {
        let (port, _) = self.down.iter().find(|(_, until)| **until <= now)?;
        let port = *port;
        self.down.remove(&port);
        let ended = self.of_port(port);
        let (count, device) = (ended.len(), &self.device);
        let text = format!("port {port} of the RDMA device {device} stays down: {count} connections end");
        Some(DeviceNotice { text, ended })
    }

    fn of_port(&self, port: u8) -> Vec<u64> {
        let of_port = self.connections.iter().filter(|(_, (identity, _))| identity.port == port);
        of_port.map(|(number, _)| *number).collect()
    }

    fn find(&self, is_it: impl Fn(&QueueIdentity) -> bool) -> Option<(u64, &str)> {
        let mut connections = self.connections.iter();
        let found = connections.find(|(_, (identity, _))| is_it(identity));
        found.map(|(number, (_, peer))| (*number, peer.as_str()))
    }
}

/// A link that is back by then loses no connection: the transport repeats what was lost.
const GRACE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_verbs::async_event::QueuePairFailure;

    fn identity(queue_pair: u32, port: u8) -> QueueIdentity {
        QueueIdentity { queue_pair, completion_queue: queue_pair as usize + 1000, port }
    }

    /// Two connections by port 1, and one by port 2.
    fn device() -> DeviceEvents {
        let mut events = DeviceEvents::new("rxe0".to_owned());
        for (queue_pair, port) in [(17, 1), (18, 1), (19, 2)] {
            events.add(identity(queue_pair, port), &format!("peer-{queue_pair}"));
        }
        events
    }

    #[test]
    fn a_queue_that_fails_ends_its_connection() {
        let (mut events, now) = (device(), Instant::now());
        let failed = AsyncEvent::QueuePair { number: 18, failure: QueuePairFailure::Access };
        let notice = events.on_event(failed, now).unwrap();
        assert_eq!(notice.ended, [2]);
        assert_eq!(
            notice.text,
            "the RDMA device rxe0 has ended the connection of peer-18: an access of the peer to memory that \
             is not open to it"
        );
        let notice = events.on_event(AsyncEvent::CompletionQueue(1019), now).unwrap();
        assert_eq!(notice.ended, [3]);
        events.connections.remove(&2);
        assert_eq!(events.on_event(failed, now), None, "it has ended before");
    }

    #[test]
    fn a_port_that_stays_down_ends_its_connections() {
        let (mut events, now) = (device(), Instant::now());
        let notice = events.on_event(AsyncEvent::PortDown(1), now).unwrap();
        assert!(notice.ended.is_empty() && notice.text.contains("its 2 connections end"), "{notice:?}");
        assert_eq!(events.on_event(AsyncEvent::PortDown(1), now + GRACE / 2), None, "one line");
        let until = events.deadline().unwrap();
        assert_eq!(events.on_time(until - Duration::from_millis(1)), None);
        let notice = events.on_time(until).unwrap();
        assert_eq!(notice.ended, [1, 2]);
        assert_eq!((events.on_time(until), events.deadline()), (None, None));
    }

    #[test]
    fn a_port_that_comes_back_ends_nothing() {
        let (mut events, now) = (device(), Instant::now());
        assert_eq!(events.on_event(AsyncEvent::PortUp(2), now), None, "it was not down");
        events.on_event(AsyncEvent::PortDown(2), now).unwrap();
        let notice = events.on_event(AsyncEvent::PortUp(2), now + GRACE / 2).unwrap();
        assert!(notice.ended.is_empty() && notice.text.ends_with("is up again"));
        assert_eq!(events.on_time(now + GRACE), None);
        assert_eq!(events.on_event(AsyncEvent::PortDown(3), now), None, "no connection uses it");
    }

    #[test]
    fn a_device_that_fails_ends_all_connections() {
        let (mut events, now) = (device(), Instant::now());
        assert_eq!(events.on_event(AsyncEvent::DeviceFailed, now).unwrap().ended, [1, 2, 3]);
        (1..=3).for_each(|number| drop(events.connections.remove(&number)));
        assert!(events.connections.is_empty());
        assert_eq!(events.on_event(AsyncEvent::DeviceFailed, now), None);
        assert_eq!(events.on_event(AsyncEvent::Other(99), now), None);
    }
}
