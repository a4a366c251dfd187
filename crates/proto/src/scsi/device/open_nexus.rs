//! I_T nexuses that exist, from the first login to the end of the last session.
//!
//! An iSCSI session is a nexus by itself. All RDMA channels from an SRP initiator port to a target
//! port are one nexus together (SRP r16a §4.2), although each has its own device server, possibly
//! on another core.
//!
//! A login costs the same however many units the target has: a unit has no state of a nexus until
//! the nexus sends it a command. The unit then establishes the unit attentions that arose since the
//! login (`missed.rs`).

use super::nexus::ItNexus;
use super::target::{LunMapping, ScsiTarget, TargetUnit};
use super::unit::{LogicalUnit, NexusKey};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An I_T nexus that exists.
pub(crate) struct OpenNexus {
    id: NexusId,
    /// Initiator port and target port.
    pub(super) identity: ItNexus,
    /// The logical units that all sessions of the nexus see.
    pub(crate) target: Arc<ScsiTarget>,
    /// The generation that had last added or removed a unit of the target at the login.
    inventory: u64,
    /// The units that have state of this nexus, by number.
    units: Mutex<BTreeMap<u16, Arc<LogicalUnit>>>,
}

/// Identifies a nexus of this process. Later ones are greater.
pub(super) type NexusId = u64;

/// The nexus that logged in last.
pub(super) fn latest() -> NexusId {
    LATEST.load(Ordering::SeqCst)
}

impl OpenNexus {
    /// A nexus that logs in to `target` now.
    pub(crate) fn new(target: &Arc<ScsiTarget>, identity: ItNexus) -> Arc<OpenNexus> {
        let id = LATEST.fetch_add(1, Ordering::SeqCst).saturating_add(1);
        let inventory = target.inventory();
        target.states().log_in(id, identity.initiator.clone());
        Arc::new(OpenNexus { id, identity, target: target.clone(), inventory, units: Mutex::default() })
    }

    /// Identifies this nexus in the unit with this number.
    pub(super) fn key(&self, number: u16) -> NexusKey {
        NexusKey { nexus: self.id, unit: number }
    }

    /// Begins the state of this nexus in a unit, unless another session has begun it. `inventory`
    /// is the generation that last added or removed a unit of the target.
    pub(super) fn attach(&self, number: u16, own: &TargetUnit, inventory: u64) {
        let TargetUnit { mapping: LunMapping { unit, is_read_only, .. }, added_at } = own;
        let mut units = self.lock();
        let before = units.insert(number, unit.clone());
        if before.as_ref().is_some_and(|before| Arc::ptr_eq(before, unit)) {
            unit.on_inventory_change(self.key(number), inventory);
            return unit.on_protection_change(self.key(number), *is_read_only);
        }
        if let Some(replaced) = before {
            replaced.detach(self.key(number));
        }
        let has_changed = inventory > self.inventory.max(*added_at);
        unit.attach(self.key(number), self.identity.registrant(), (inventory, has_changed), *is_read_only);
    }

    /// Ends the state of this nexus in a unit that was removed.
    pub(super) fn detach(&self, number: u16, unit: &Arc<LogicalUnit>) {
        let mut units = self.lock();
        // Another session of the nexus may have noticed the removal before.
        if units.get(&number).is_some_and(|own| Arc::ptr_eq(own, unit)) {
            units.remove(&number);
            unit.detach(self.key(number));
        }
    }

    /// Handles the loss or reset of the nexus while its sessions continue.
    pub(super) fn on_loss(&self) {
        for (number, unit) in self.lock().iter() {
            unit.on_nexus_loss(self.key(*number));
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u16, Arc<LogicalUnit>>> {
        self.units.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OpenNexus {
    fn drop(&mut self) {
        self.target.states().log_out(self.id);
        for (number, unit) in self.lock().iter() {
            unit.detach(self.key(*number));
        }
    }
}

/// The identifier that was given last.
static LATEST: AtomicU64 = AtomicU64::new(0);

#[cfg(test)]
#[allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]
mod tests {
    use super::*;
    use crate::exports::VolumeId;
    use crate::scsi::device::testing::{DeviceBench, TestNexus, port, resizable};
    use crate::scsi::{DeviceServer, Lun, ScsiStatus, TaskManagement, UnitIdentity};
    use blockmux_volume::MemVolume;

    const TUR: [u8; 6] = [0; 6];
    const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    const POWER_ON: (u8, u16) = (6, 0x2900);

    fn unit(name: &str) -> Arc<LogicalUnit> {
        LogicalUnit::new(UnitIdentity::of(name), Arc::new(MemVolume::new(1 << 20)))
    }

    fn nexuses(unit: &LogicalUnit) -> usize {
        unit.read_state(|state| state.nexuses.len())
    }

    /// PERSISTENT RESERVE OUT: service action, key and service action key.
    fn reserve_out(client: &mut TestNexus, action: u8, kind: u8, key: u8, action_key: u8) {
        let mut list = [0; 24];
        (list[7], list[15]) = (key, action_key);
        client.run_with(&[0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0], &list).good();
    }

    /// All unit attentions of the nexus at LUN 0.
    fn attentions(client: &mut TestNexus) -> Vec<u16> {
        let codes = std::iter::from_fn(|| client.run(&TUR).sense);
        codes.inspect(|sense| assert_eq!(sense.0, 6)).map(|(_, code)| code).collect()
    }

    #[test]
    fn a_unit_has_state_of_a_nexus_from_its_first_command_until_its_end() {
        let bench = DeviceBench::new();
        let (one, other) = (unit("one"), unit("other"));
        assert!(bench.target.add(1, VolumeId(1), one.clone()));
        assert!(bench.target.add(2, VolumeId(2), other.clone()));
        let mut client = bench.fresh_client("a");
        assert_eq!([&bench.unit, &one, &other].map(|unit| nexuses(unit)), [0, 0, 0]);
        client.run_on(Lun::new(1), &TUR, &[]).check();
        assert_eq!([&bench.unit, &one, &other].map(|unit| nexuses(unit)), [0, 1, 0]);
        client.run_on(Lun::new(0), &TUR, &[]).check();
        assert_eq!([&bench.unit, &one, &other].map(|unit| nexuses(unit)), [1, 1, 0]);
        assert_eq!(bench.target.remove(|number, _| number == 1), [1]);
        client.run_on(Lun::new(0), &TUR, &[]).check();
        assert_eq!([&bench.unit, &one, &other].map(|unit| nexuses(unit)), [1, 0, 0]);
        drop(client);
        assert_eq!(nexuses(&bench.unit), 0);
    }

    #[test]
    fn what_arises_between_the_login_and_the_first_command_is_reported() {
        let (volume, set_size) = resizable(1 << 20);
        let bench = DeviceBench::over(volume);
        let mut other = bench.client("other");
        let mut early = bench.fresh_client("early");
        set_size(2 << 20);
        bench.unit.volume_state.on_resize();
        assert_eq!(other.run(&TUR).check(), (6, 0x2a09));
        let mut late = bench.fresh_client("late");
        assert_eq!(attentions(&mut early), [0x2900, 0x2a09]);
        assert_eq!(attentions(&mut late), [0x2900], "it logged in after the change");
    }

    #[test]
    fn a_unit_that_is_added_is_reported_at_units_without_a_command() {
        let bench = DeviceBench::new();
        let mut client = bench.fresh_client("a");
        assert!(bench.target.add(5, VolumeId(9), unit("b")));
        assert_eq!(client.run_on(Lun::new(5), &TUR, &[]).check(), POWER_ON);
        client.run_on(Lun::new(5), &TUR, &[]).good();
        assert_eq!(attentions(&mut client), [0x2900, 0x3f0e]);
        assert_eq!(attentions(&mut bench.fresh_client("late")), [0x2900]);
    }

    #[test]
    fn a_reset_before_the_first_command_supersedes_the_power_on_attention() {
        let bench = DeviceBench::new();
        let (mut early, mut other) = (bench.fresh_client("early"), bench.fresh_client("other"));
        other.server.manage(TaskManagement::LogicalUnitReset, Lun::new(0));
        assert_eq!(nexuses(&bench.unit), 0, "a reset needs no state");
        assert_eq!(attentions(&mut early), [0x2903]);
    }

    #[test]
    fn a_preempted_registrant_is_notified_at_its_first_command() {
        let bench = DeviceBench::new();
        let (mut before, mut b) = (bench.client("a"), bench.client("b"));
        reserve_out(&mut before, 0, 0, 0, 1);
        reserve_out(&mut b, 0, 0, 0, 2);
        // The registration outlives the session.
        drop(before);
        let (mut a, mut c) = (bench.fresh_client("a"), bench.fresh_client("c"));
        reserve_out(&mut b, 4, 3, 2, 1);
        let mut late = bench.fresh_client("a");
        assert_eq!(attentions(&mut a), [0x2900, 0x2a05]);
        assert_eq!(attentions(&mut c), [0x2900], "it was not registered");
        assert_eq!(attentions(&mut late), [0x2900], "it logged in after that");
    }

    #[test]
    fn a_unit_remembers_a_bounded_number_of_notices() {
        let bench = DeviceBench::new();
        let (mut a, mut b) = (bench.client("a"), bench.client("b"));
        let mut early = bench.fresh_client("a");
        for _ in 0..1100 {
            reserve_out(&mut a, 6, 0, 0, 1);
            reserve_out(&mut b, 6, 0, 0, 2);
            reserve_out(&mut b, 4, 3, 2, 1);
            assert_eq!(attentions(&mut a), [0x2a05]);
        }
        let missed =
            bench.unit.read_state(|state| state.missed.of(0, &early.server.nexus().registrant()).count());
        assert_eq!(missed, crate::volume_state::MAX_REGISTRATIONS);
        assert_eq!(attentions(&mut early), [0x2900, 0x2a05]);
    }

    /// Two sessions of one nexus.
    fn channels(bench: &DeviceBench) -> [TestNexus; 2] {
        let nexus = OpenNexus::new(&bench.target, ItNexus::srp(&[7; 16], port(1)));
        [(); 2].map(|()| TestNexus {
            server: DeviceServer::of_nexus(nexus.clone()),
            ..bench.fresh_client("unused")
        })
    }

    #[test]
    fn sessions_of_one_nexus_share_its_unit_attentions() {
        let bench = DeviceBench::new();
        let ([mut one, mut other], mut b) = (channels(&bench), bench.client("b"));
        assert_eq!(one.run(&TUR).check(), POWER_ON);
        other.run(&TUR).good();
        reserve_out(&mut one, 0, 0, 0, 1);
        reserve_out(&mut b, 0, 0, 0, 2);
        reserve_out(&mut b, 4, 3, 2, 1);
        assert_eq!(other.run(&TUR).check(), (6, 0x2a05));
        assert_eq!(attentions(&mut one), [], "another session of the nexus has reported it");
        assert!(bench.target.add(5, VolumeId(9), unit("b")));
        assert_eq!(one.run(&TUR).check(), (6, 0x3f0e));
        assert_eq!(attentions(&mut other), []);
    }

    #[test]
    fn a_change_of_the_units_is_reported_to_the_session_that_uses_a_unit_next() {
        let bench = DeviceBench::new();
        let [mut one, mut other] = channels(&bench);
        assert_eq!(one.run(&TUR).check(), POWER_ON);
        assert!(bench.target.add(5, VolumeId(9), unit("b")));
        assert_eq!(
            other.run(&TUR).check(),
            (6, 0x3f0e),
            "its first command to a unit that the nexus has used"
        );
        assert_eq!(attentions(&mut one), []);
    }

    #[test]
    fn sessions_of_one_nexus_share_its_reservation_until_the_last_one_ends() {
        let bench = DeviceBench::new();
        let ([mut one, mut other], mut b) = (channels(&bench), bench.client("b"));
        assert_eq!(one.run(&TUR).check(), POWER_ON);
        one.run(&[0x16, 0, 0, 0, 0, 0]).good();
        other.run(&READ).good();
        assert_eq!(b.run(&READ).status, ScsiStatus::RESERVATION_CONFLICT);
        drop(one);
        other.run(&READ).good();
        assert_eq!(b.run(&READ).status, ScsiStatus::RESERVATION_CONFLICT, "the nexus still exists");
        drop(other);
        b.run(&READ).good();
    }

    #[test]
    fn the_loss_of_a_nexus_clears_its_state_in_units_that_another_session_has_used() {
        let bench = DeviceBench::removable();
        let ([mut one, mut other], mut b) = (channels(&bench), bench.client("b"));
        assert_eq!(one.run(&TUR).check(), POWER_ON);
        one.run(&[0x1e, 0, 0, 0, 1, 0]).good();
        let eject = [0x1b, 0, 0, 0, 2, 0];
        assert_eq!(b.run(&eject).check(), (5, 0x5302));
        other.server.on_nexus_loss();
        b.run(&eject).good();
        assert_eq!(one.run(&TUR).check(), (6, 0x2907));
    }

    #[test]
    fn an_abort_by_another_nexus_ends_the_tasks_of_all_sessions() {
        let bench = DeviceBench::new();
        let ([mut one, mut other], mut b) = (channels(&bench), bench.client("b"));
        assert_eq!(one.run(&TUR).check(), POWER_ON);
        reserve_out(&mut one, 0, 0, 0, 1);
        reserve_out(&mut b, 0, 0, 0, 2);
        let write = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
        let begun = [&mut one, &mut other].map(|client| {
            let (task, step) = client.server.begin(&super::super::testing::command(Lun::new(0), &write, 512));
            (client, task, step)
        });
        reserve_out(&mut b, 5, 3, 2, 1);
        for (client, mut task, step) in begun {
            let ended = client.turn(&mut task, step, &[0; 512], &mut 0);
            let super::super::TaskStep::Done(response) = ended else { panic!("it goes on: {ended:?}") };
            assert_eq!(response.status, ScsiStatus::TASK_ABORTED);
        }
    }
}
