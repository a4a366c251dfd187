//! Asynchronous events of a controller (Base 2.0 §5.2), and the logs that clear them.
//!
//! Each event type is reported once: the completion of a request names a log page, and until the
//! host has read that page no further event of that type is reported. The page contains everything
//! that happens meanwhile.

use super::event_queue::QueueEvent;
use super::temperature::TemperatureThresholds;
use blockmux_wire::nvme::NSID_ALL;
use blockmux_wire::nvme::feature::*;
use blockmux_wire::nvme::log::{CHANGED_NAMESPACES_MAX, LogPage, ReservationNotification};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use zerocopy::{FromZeros, IntoBytes};

/// Pending events of a controller, and the requests that wait for them.
#[derive(Default)]
pub(crate) struct Events {
    /// Outstanding Asynchronous Event Requests, by their slots in the command table, oldest first.
    pub(crate) waiting: VecDeque<usize>,
    /// Value of the feature Asynchronous Event Configuration.
    pub(super) configuration: u32,
    /// Value of the feature Temperature Threshold.
    pub(super) thresholds: TemperatureThresholds,
    temperature: NoticeState,
    namespaces: NoticeState,
    ana: NoticeState,
    reservation: NoticeState,
    discovery: NoticeState,
    changed: BTreeSet<u32>,
    notifications: VecDeque<ReservationNotification>,
    /// Log Page Count of the last notification.
    log_page_count: u64,
    /// Reservation Notification Masks that are not 0.
    masks: BTreeMap<u32, u32>,
}

/// State of one event type.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum NoticeState {
    /// There is nothing to report.
    #[default]
    Nothing,
    /// An event has to be reported.
    Due,
    /// An event was reported, and the host has not read the log page.
    Sent,
}

impl Events {
    /// Removes a request; returns whether it was outstanding.
    pub(crate) fn abort(&mut self, slot: usize) -> bool {
        let place = self.waiting.iter().position(|&waiting| waiting == slot);
        place.and_then(|place| self.waiting.remove(place)).is_some()
    }

    /// Resets all event state, for a reset of the controller; returns the outstanding requests.
    pub(crate) fn reset(&mut self) -> VecDeque<usize> {
        std::mem::take(self).waiting
    }

    /// Records that the temperature thresholds were set.
    pub(super) fn on_thresholds(&mut self) {
        match (self.thresholds.is_exceeded(), self.temperature) {
            (true, _) => self.temperature.happen(),
            (false, NoticeState::Due) => self.temperature = NoticeState::Nothing,
            (false, _) => {}
        }
    }

    /// Records an event.
    pub(super) fn on_event(&mut self, event: &QueueEvent) {
        match *event {
            QueueEvent::NamespaceChanged(nsid) | QueueEvent::NamespaceShown(nsid) => {
                // One entry more than the log can hold indicates an overflow.
                if self.changed.len() <= CHANGED_NAMESPACES_MAX {
                    self.changed.insert(nsid);
                }
                self.namespaces.happen();
            }
            QueueEvent::Reservation { nsid, kind }
                if self.mask(nsid) & 1_u32.wrapping_shl(kind.into()) == 0 =>
            {
                self.log_page_count = self.log_page_count.checked_add(1).unwrap_or(1);
                if self.notifications.len() >= MAX_NOTIFICATIONS {
                    self.notifications.pop_front();
                }
                self.notifications.push_back(ReservationNotification {
                    log_page_count: self.log_page_count.into(),
                    kind,
                    nsid: nsid.into(),
                    ..ReservationNotification::new_zeroed()
                });
                self.reservation.happen();
            }
            QueueEvent::AnaChanged { .. } => self.ana.happen(),
            QueueEvent::DiscoveryChanged => self.discovery.happen(),
            _ => {}
        }
    }

    /// Records that the host has read a log page and wants further events of its type.
    pub(super) fn is_read(&mut self, page: LogPage) {
        match page {
            LogPage::CHANGED_NAMESPACE_LIST => {
                self.changed.clear();
                self.namespaces = NoticeState::Nothing;
            }
            LogPage::RESERVATION_NOTIFICATION => {
                self.notifications.pop_front();
                self.reservation =
                    if self.notifications.is_empty() { NoticeState::Nothing } else { NoticeState::Due };
            }
            LogPage::ASYMMETRIC_NAMESPACE_ACCESS => self.ana = NoticeState::Nothing,
            LogPage::DISCOVERY => self.discovery = NoticeState::Nothing,
            LogPage::SMART_HEALTH_INFORMATION => self.temperature = NoticeState::Nothing,
            _ => {}
        }
    }

    /// The next event for the oldest request: its slot, and the result.
    pub(crate) fn next(&mut self) -> Option<(usize, u32)> {
        if self.waiting.is_empty() {
            return None;
        }
        let is_wanted = |notice| self.configuration & notice != 0;
        let result = if is_wanted(AEC_ANA_CHANGE) && self.ana == NoticeState::Due {
            // Reported first, because I/O depends on it.
            self.ana = NoticeState::Sent;
            let information = Notice::ASYMMETRIC_NAMESPACE_ACCESS_CHANGE.0;
            event(EventType::NOTICE, information, LogPage::ASYMMETRIC_NAMESPACE_ACCESS.0)
        } else if is_wanted(AEC_NAMESPACE_ATTRIBUTE) && self.namespaces == NoticeState::Due {
            self.namespaces = NoticeState::Sent;
            let information = Notice::NAMESPACE_ATTRIBUTE_CHANGED.0;
            event(EventType::NOTICE, information, LogPage::CHANGED_NAMESPACE_LIST.0)
        } else if is_wanted(AEC_DISCOVERY_CHANGE) && self.discovery == NoticeState::Due {
            self.discovery = NoticeState::Sent;
            event(EventType::NOTICE, Notice::DISCOVERY_LOG_PAGE_CHANGE.0, LogPage::DISCOVERY.0)
        } else if is_wanted(AEC_TEMPERATURE) && self.temperature == NoticeState::Due {
            self.temperature = NoticeState::Sent;
            let information = TEMPERATURE_THRESHOLD_EXCEEDED;
            event(EventType::SMART, information, LogPage::SMART_HEALTH_INFORMATION.0)
        } else if self.reservation == NoticeState::Due {
            self.reservation = NoticeState::Sent;
            event(EventType::IO_COMMAND_SPECIFIC, 0, LogPage::RESERVATION_NOTIFICATION.0)
        } else {
            return None;
        };
        Some((self.waiting.pop_front()?, result))
    }

    /// The Changed Namespace List.
    pub(super) fn changed_namespaces(&self) -> Vec<u8> {
        let mut page: Vec<u8> = match self.changed.len() {
            0..=CHANGED_NAMESPACES_MAX => self.changed.iter().copied().flat_map(u32::to_le_bytes).collect(),
            _ => NSID_ALL.to_le_bytes().to_vec(),
        };
        page.resize(CHANGED_NAMESPACES_MAX.saturating_mul(4), 0);
        page
    }

    /// The oldest reservation notification. The next one follows once this was read.
    pub(super) fn reservation_notification(&self) -> Vec<u8> {
        let more = self.notifications.len().saturating_sub(1);
        let oldest = self.notifications.front().copied();
        let page = oldest.map_or_else(ReservationNotification::new_zeroed, |oldest| {
            // At most `MAX_NOTIFICATIONS`.
            ReservationNotification { available: more as u8, ..oldest }
        });
        page.as_bytes().to_vec()
    }

    /// The Reservation Notification Mask of a namespace.
    pub(super) fn mask(&self, nsid: u32) -> u32 {
        self.masks.get(&nsid).copied().unwrap_or(0)
    }

    /// Sets the Reservation Notification Mask of a namespace.
    pub(super) fn set_mask(&mut self, nsid: u32, mask: u32) {
        if mask == 0 {
            self.masks.remove(&nsid);
        } else {
            self.masks.insert(nsid, mask);
        }
    }
}

impl NoticeState {
    fn happen(&mut self) {
        if *self == NoticeState::Nothing {
            *self = NoticeState::Due;
        }
    }
}

/// Most pending reservation notifications. Beyond that the oldest is lost, which the Log Page Count
/// reveals.
const MAX_NOTIFICATIONS: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Events {
        let mut events = Events { configuration: AEC_NAMESPACE_ATTRIBUTE, ..Events::default() };
        (0..4).for_each(|slot| events.waiting.push_back(slot));
        events
    }

    #[test]
    fn an_event_is_reported_once_until_its_log_is_read() {
        let mut events = all();
        assert_eq!(events.next(), None);
        events.on_event(&QueueEvent::NamespaceChanged(3));
        assert_eq!(events.next(), Some((0, 0x04_0002)));
        events.on_event(&QueueEvent::NamespaceChanged(1));
        assert_eq!(events.next(), None);
        assert_eq!(events.changed_namespaces()[..12], [1, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
        events.is_read(LogPage::CHANGED_NAMESPACE_LIST);
        assert_eq!(events.next(), None);
        assert_eq!(events.changed_namespaces()[..4], [0; 4]);
        events.on_event(&QueueEvent::NamespaceChanged(2));
        assert_eq!(events.next(), Some((1, 0x04_0002)));
    }

    #[test]
    fn a_disabled_event_is_still_in_its_log() {
        let mut events = all();
        events.configuration = 0;
        events.on_event(&QueueEvent::NamespaceChanged(3));
        assert_eq!(events.next(), None);
        events.configuration = AEC_NAMESPACE_ATTRIBUTE;
        assert!(events.next().is_some());
    }

    #[test]
    fn too_many_changed_namespaces_are_reported_as_overflow() {
        let mut events = all();
        (1..=CHANGED_NAMESPACES_MAX as u32)
            .for_each(|nsid| events.on_event(&QueueEvent::NamespaceChanged(nsid)));
        assert_eq!(events.changed_namespaces()[4092..], 1024_u32.to_le_bytes());
        events.on_event(&QueueEvent::NamespaceChanged(5000));
        let page = events.changed_namespaces();
        assert_eq!((&page[..4], &page[4..8]), (&[0xff; 4][..], &[0; 4][..]));
    }

    #[test]
    fn reservation_notifications_are_read_one_by_one_and_can_be_masked() {
        let mut events = all();
        events.set_mask(2, 1 << 2);
        for (nsid, kind) in [(1, 1), (2, 2), (2, 3)] {
            events.on_event(&QueueEvent::Reservation { nsid, kind });
        }
        assert_eq!(events.next(), Some((0, 0x80_0006)));
        assert_eq!(events.next(), None);
        let page = |events: &mut Events| {
            let page = events.reservation_notification();
            events.is_read(LogPage::RESERVATION_NOTIFICATION);
            (page[0], page[8], page[9], page[12])
        };
        assert_eq!(page(&mut events), (1, 1, 1, 1));
        assert_eq!(events.next(), Some((1, 0x80_0006)), "there is one more");
        assert_eq!(page(&mut events), (2, 3, 0, 2));
        assert_eq!(page(&mut events), (0, 0, 0, 0));
        (0..1000).for_each(|_| events.on_event(&QueueEvent::Reservation { nsid: 1, kind: 1 }));
        assert_eq!(page(&mut events).2, MAX_NOTIFICATIONS as u8 - 1);
    }

    #[test]
    fn a_reset_forgets_everything() {
        let mut events = all();
        events.on_event(&QueueEvent::NamespaceChanged(3));
        assert_eq!(events.reset(), [0, 1, 2, 3]);
        events.waiting.push_back(7);
        assert_eq!(events.next(), None);
    }
}
