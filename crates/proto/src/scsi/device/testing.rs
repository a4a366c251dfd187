//! A device server driven by hand over a RAM volume: CDB bytes in, the response out.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

use super::*;
use blockmux_volume::{Channel, Core, IoError, MemVolume, Pool, Seg, Volume, VolumeInfo, Waker};
use std::any::Any;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// A target with one logical unit at LUN 0, and the channel to its volume.
pub(crate) struct Bench {
    pub(crate) unit: Arc<LogicalUnit>,
    pub(crate) target: Arc<ScsiTarget>,
    pub(crate) volume: Arc<dyn Volume>,
}

/// One session with a [`Bench`].
pub(crate) struct Client {
    pub(crate) server: DeviceServer,
    pub(crate) channel: Box<dyn Channel>,
}

/// What came back, easy to compare.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: ScsiStatus,
    /// Key, code and qualifier.
    pub(crate) sense: Option<(u8, u16)>,
    pub(crate) data: Vec<u8>,
    pub(crate) transfer_len: u64,
}

impl Bench {
    /// Over a RAM volume of 8 MiB.
    pub(crate) fn new() -> Bench {
        Bench::over(Arc::new(MemVolume::new(8 << 20)))
    }

    pub(crate) fn over(volume: Arc<dyn Volume>) -> Bench {
        Bench::with(UnitIdentity::of("a"), volume)
    }

    /// Whose medium can be ejected.
    pub(crate) fn removable() -> Bench {
        Bench::with(
            UnitIdentity { removable: true, ..UnitIdentity::of("a") },
            Arc::new(MemVolume::new(8 << 20)),
        )
    }

    fn with(identity: UnitIdentity, volume: Arc<dyn Volume>) -> Bench {
        Bench::around(LogicalUnit::new(identity, volume.clone()), volume)
    }

    pub(crate) fn around(unit: Arc<LogicalUnit>, volume: Arc<dyn Volume>) -> Bench {
        let target = ScsiTarget::new("iqn.2026-11.t:t", vec![port(1), port(2)]);
        let target = Arc::new(target.with_unit(0, VolumeId(0), unit.clone()));
        Bench { unit, target, volume }
    }

    /// A session whose power-on attention has been seen.
    pub(crate) fn client(&self, name: &str) -> Client {
        let mut client = self.fresh_client(name);
        let first = client.run(&[0, 0, 0, 0, 0, 0]);
        assert_eq!(first.sense, Some((6, 0x2900)));
        client
    }

    pub(crate) fn fresh_client(&self, name: &str) -> Client {
        let nexus = Nexus::iscsi(&format!("iqn.2026-11.i:{name}"), [0, 0, 0, 0, 0, 1], port(1));
        let core: Rc<dyn Core> = Rc::new(TestCore { pool: Pool::new(usize::MAX) });
        let channel = self.volume.open(&core, 64, Waker::idle()).unwrap();
        Client { server: DeviceServer::new(self.target.clone(), nexus), channel }
    }
}

impl Client {
    /// A command without data-out.
    pub(crate) fn run(&mut self, cdb: &[u8]) -> Answer {
        self.run_on(Lun::new(0), cdb, &[])
    }

    /// A command with as much data-out as there is.
    pub(crate) fn run_with(&mut self, cdb: &[u8], data_out: &[u8]) -> Answer {
        let command = Command { data_in_len: 0, ..command(Lun::new(0), cdb, data_out.len()) };
        self.run_command(&command, data_out)
    }

    pub(crate) fn run_on(&mut self, lun: Lun, cdb: &[u8], data_out: &[u8]) -> Answer {
        self.run_command(&command(lun, cdb, data_out.len()), data_out)
    }

    fn run_command(&mut self, command: &Command, data_out: &[u8]) -> Answer {
        let (mut task, mut step) = self.server.begin(command);
        let mut sent = 0;
        loop {
            step = match step {
                Step::Done(response) => return answer(response),
                Step::Wait | Step::Pause(_) => panic!("nothing else is under way"),
                next => self.turn(&mut task, next, data_out, &mut sent),
            }
        }
    }

    /// A command that waits now and then, for nobody.
    pub(crate) fn run_waiting(&mut self, cdb: &[u8], data_out: &[u8]) -> Answer {
        let (mut task, mut step) = self.server.begin(&command(Lun::new(0), cdb, data_out.len()));
        let mut sent = 0;
        loop {
            match step {
                Step::Done(response) => return answer(response),
                next => step = self.turn(&mut task, next, data_out, &mut sent),
            }
        }
    }

    /// One step that is not the last.
    pub(crate) fn turn(&mut self, task: &mut Task, step: Step, data_out: &[u8], sent: &mut usize) -> Step {
        match step {
            Step::DataOut { len } => {
                let data = Seg::from_slice(&data_out[*sent..*sent + len]);
                *sent += len;
                self.server.on_data_out(task, data.into())
            }
            Step::Io { volume, io } => {
                assert_eq!(volume, VolumeId(0));
                let mut done = Vec::new();
                self.channel.submit(io);
                self.channel.kick();
                // What is zeroed is so a part at a time.
                while done.is_empty() {
                    self.channel.poll(&mut done);
                }
                self.server.on_io(task, done.pop().unwrap())
            }
            Step::Wait | Step::Pause(_) => self.server.resume(task),
            Step::Done(_) => unreachable!("the caller ends"),
        }
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

pub(crate) fn answer(response: Response) -> Answer {
    Answer {
        status: response.status,
        sense: response.sense.map(|sense| (sense.key.0, sense.asc.0)),
        data: response.data_in.to_vec(),
        transfer_len: response.transfer_len,
    }
}

impl Answer {
    /// Data of a command that succeeded.
    #[track_caller]
    pub(crate) fn good(self) -> Vec<u8> {
        assert_eq!((self.status, self.sense), (ScsiStatus::GOOD, None));
        self.data
    }

    /// Key and code of a command that did not.
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

/// A RAM volume that says that it is something else.
pub(crate) fn shaped(info: VolumeInfo) -> Arc<dyn Volume> {
    Arc::new(Shaped { inner: MemVolume::new(info.size), info: Mutex::new(info) })
}

/// A RAM volume, and what gives it another size up to 8 MiB.
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
