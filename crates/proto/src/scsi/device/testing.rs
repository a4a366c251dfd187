//! A device server over a RAM volume for tests: CDB bytes in, response out.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

use super::*;
use crate::volume_state::NotAdmitted;
use blockmux_volume::{Channel, Core, IoError, MemVolume, Pool, Seg, Volume, VolumeInfo, Waker};
use std::any::Any;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// A target with one logical unit at LUN 0.
pub(crate) struct DeviceBench {
    pub(crate) unit: Arc<LogicalUnit>,
    pub(crate) target: Arc<ScsiTarget>,
    pub(crate) volume: Arc<dyn Volume>,
}

/// One session with a [`DeviceBench`].
pub(crate) struct TestNexus {
    pub(crate) server: DeviceServer,
    pub(crate) channel: Box<dyn Channel>,
}

/// A response in a form that is easy to compare.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TestResponse {
    pub(crate) status: ScsiStatus,
    /// Sense key, and additional sense code with qualifier.
    pub(crate) sense: Option<(u8, u16)>,
    pub(crate) data: Vec<u8>,
    pub(crate) transfer_len: u64,
}

impl DeviceBench {
    /// A bench with a RAM volume of 8 MiB.
    pub(crate) fn new() -> DeviceBench {
        DeviceBench::over(Arc::new(MemVolume::new(8 << 20)))
    }

    pub(crate) fn over(volume: Arc<dyn Volume>) -> DeviceBench {
        DeviceBench::with(UnitIdentity::of("a"), volume)
    }

    /// A bench whose unit has a removable medium.
    pub(crate) fn removable() -> DeviceBench {
        DeviceBench::with(
            UnitIdentity { removable: true, ..UnitIdentity::of("a") },
            Arc::new(MemVolume::new(8 << 20)),
        )
    }

    fn with(identity: UnitIdentity, volume: Arc<dyn Volume>) -> DeviceBench {
        DeviceBench::around(LogicalUnit::new(identity, volume.clone()), volume)
    }

    pub(crate) fn around(unit: Arc<LogicalUnit>, volume: Arc<dyn Volume>) -> DeviceBench {
        let target = ScsiTarget::new("iqn.2026-11.t:t", vec![port(1), port(2)]);
        let target = Arc::new(target.with_unit(0, VolumeId(0), unit.clone()));
        DeviceBench { unit, target, volume }
    }

    /// A session without pending unit attentions.
    pub(crate) fn client(&self, name: &str) -> TestNexus {
        let mut client = self.fresh_client(name);
        let first = client.run(&[0, 0, 0, 0, 0, 0]);
        assert_eq!(first.sense, Some((6, 0x2900)));
        client
    }

    pub(crate) fn fresh_client(&self, name: &str) -> TestNexus {
        self.nexus(ItNexus::iscsi(&format!("iqn.2026-11.i:{name}"), [0, 0, 0, 0, 0, 1], port(1)))
    }

    /// An SRP channel without pending unit attentions.
    pub(crate) fn srp_client(&self, initiator_port: [u8; 16]) -> TestNexus {
        let mut client = self.nexus(ItNexus::srp(&initiator_port, port(1)));
        assert_eq!(client.run(&[0, 0, 0, 0, 0, 0]).sense, Some((6, 0x2900)));
        client
    }

    fn nexus(&self, nexus: ItNexus) -> TestNexus {
        let core: Rc<dyn Core> = Rc::new(TestCore { pool: Pool::new(usize::MAX) });
        let channel = self.volume.open(&core, 64, Waker::idle()).unwrap();
        TestNexus { server: DeviceServer::new(self.target.clone(), nexus), channel }
    }
}

impl TestNexus {
    /// Executes a command without data-out.
    pub(crate) fn run(&mut self, cdb: &[u8]) -> TestResponse {
        self.run_on(Lun::new(0), cdb, &[])
    }

    /// Executes a command with this data-out.
    pub(crate) fn run_with(&mut self, cdb: &[u8], data_out: &[u8]) -> TestResponse {
        let command = Command { data_in_len: 0, ..command(Lun::new(0), cdb, data_out.len()) };
        self.run_command(&command, data_out)
    }

    pub(crate) fn run_on(&mut self, lun: Lun, cdb: &[u8], data_out: &[u8]) -> TestResponse {
        self.run_command(&command(lun, cdb, data_out.len()), data_out)
    }

    fn run_command(&mut self, command: &Command, data_out: &[u8]) -> TestResponse {
        let (mut task, mut step) = self.server.begin(command);
        let mut sent = 0;
        loop {
            step = match step {
                TaskStep::Done(response) => return answer(response),
                TaskStep::Wait | TaskStep::Pause(_) => panic!("nothing else is under way"),
                next => self.turn(&mut task, next, data_out, &mut sent),
            }
        }
    }

    /// Executes a command that may wait for nothing in particular.
    pub(crate) fn run_waiting(&mut self, cdb: &[u8], data_out: &[u8]) -> TestResponse {
        let (mut task, mut step) = self.server.begin(&command(Lun::new(0), cdb, data_out.len()));
        let mut sent = 0;
        loop {
            match step {
                TaskStep::Done(response) => return answer(response),
                next => step = self.turn(&mut task, next, data_out, &mut sent),
            }
        }
    }

    /// Admits the I/O of a step, as a driver does just before it submits it.
    pub(crate) fn admit(&mut self, task: &mut Task, step: &TaskStep) -> Result<(), NotAdmitted<TaskFailure>> {
        let TaskStep::Io { volume, io } = step else { panic!("no I/O but {step:?}") };
        self.server.admit(task, *volume, io, false)
    }

    /// As [`TestNexus::admit`], for an I/O that was throttled; if it is denied, the task ends.
    pub(crate) fn admit_late(
        &mut self,
        task: &mut Task,
        step: &TaskStep,
    ) -> Result<(), NotAdmitted<TaskStep>> {
        let TaskStep::Io { volume, io } = step else { panic!("no I/O but {step:?}") };
        self.server
            .admit(task, *volume, io, true)
            .map_err(|why| why.map(|failure| self.server.fail_denied(task, failure)))
    }

    /// Executes one step other than the last; returns an I/O that is not admitted yet unchanged.
    pub(crate) fn turn(
        &mut self,
        task: &mut Task,
        step: TaskStep,
        data_out: &[u8],
        sent: &mut usize,
    ) -> TaskStep {
        match step {
            TaskStep::DataOut { len } => {
                let data = Seg::from_slice(&data_out[*sent..*sent + len]);
                *sent += len;
                self.server.on_data_out(task, data.into())
            }
            TaskStep::Io { .. } if task.guard.is_none() && self.admit(task, &step).is_err() => {
                begin_io(&mut self.server, task, step)
            }
            TaskStep::Io { volume, io } => {
                assert_eq!(volume, VolumeId(0));
                let mut done = Vec::new();
                self.channel.submit(io);
                self.channel.kick();
                // Zeroing may complete in parts.
                while done.is_empty() {
                    self.channel.poll(&mut done);
                }
                self.server.on_io(task, done.pop().unwrap())
            }
            TaskStep::Wait | TaskStep::Pause(_) => self.server.resume(task),
            TaskStep::Done(_) => unreachable!("the caller ends"),
        }
    }
}

/// Admits the I/O of a step; returns the end of the task if it is denied, else the step.
pub(crate) fn begin_io(server: &mut DeviceServer, task: &mut Task, step: TaskStep) -> TaskStep {
    let TaskStep::Io { volume, io } = &step else { return step };
    match server.admit(task, *volume, io, false) {
        Err(NotAdmitted::Denied(failure)) => server.fail_denied(task, failure),
        _ => step,
    }
}

pub(crate) fn command(lun: Lun, cdb: &[u8], data_out_len: usize) -> Command {
    Command {
        lun,
        cdb: Cdb::new(cdb).unwrap(),
        attribute: TaskAttribute::Simple,
        data_out_len: data_out_len as u32,
        data_in_len: if data_out_len > 0 { 0 } else { 1 << 20 },
    }
}

pub(crate) fn answer(response: Response) -> TestResponse {
    TestResponse {
        status: response.status,
        sense: response.sense.map(|sense| (sense.key.0, sense.asc.0)),
        data: response.data_in.to_vec(),
        transfer_len: response.transfer_len,
    }
}

impl TestResponse {
    /// The data of a successful command.
    #[track_caller]
    pub(crate) fn good(self) -> Vec<u8> {
        assert_eq!((self.status, self.sense), (ScsiStatus::GOOD, None));
        self.data
    }

    /// Sense key and code of a failed command.
    #[track_caller]
    pub(crate) fn check(self) -> (u8, u16) {
        assert_eq!(self.status, ScsiStatus::CHECK_CONDITION);
        self.sense.unwrap()
    }
}

pub(crate) fn port(relative_id: u16) -> TargetPort {
    let name = format!("iqn.2026-11.t:t,t,0x{relative_id:04x}");
    TargetPort { relative_id, group: relative_id, name: name.into() }
}

/// A RAM volume that reports other properties.
pub(crate) fn shaped(info: VolumeInfo) -> Arc<dyn Volume> {
    Arc::new(Shaped { inner: MemVolume::new(info.size), info: Mutex::new(info) })
}

/// A RAM volume, and a function that changes its size up to 8 MiB.
pub(crate) fn resizable(size: u64) -> (Arc<dyn Volume>, impl Fn(u64)) {
    let shaped = Arc::new(Shaped { inner: MemVolume::new(8 << 20), info: Mutex::new(VolumeInfo::new(size)) });
    let handle = shaped.clone();
    (shaped, move |size| handle.info.lock().unwrap().size = size)
}

struct Shaped {
    inner: MemVolume,
    info: Mutex<VolumeInfo>,
}

impl Volume for Shaped {
    fn info(&self) -> VolumeInfo {
        self.info.lock().unwrap().clone()
    }

    fn open(&self, core: &Rc<dyn Core>, depth: u32, waker: Waker) -> Result<Box<dyn Channel>, IoError> {
        self.inner.open(core, depth, waker)
    }
}

struct TestCore {
    pool: Pool,
}

impl Core for TestCore {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn wake_at(&self, _when: Instant, _waker: &Waker) {}

    fn as_any(&self) -> &dyn Any {
        self
    }
}
