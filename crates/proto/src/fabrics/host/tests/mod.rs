//! Host queues over a transport in memory: the commands that are sent, and the effects of their
//! completions. No byte is encoded; each transport has its own tests for that.
#![allow(clippy::arithmetic_side_effects, reason = "an overflow fails the test")]

mod admin;
mod authentication;
mod paths;
mod queue;

use super::testing::*;
use super::*;
use crate::driver::outbox::Outbox;
use crate::driver::session::{Demand, ProtocolError, StreamSession};
use crate::nvme::auth::HostCredentials;
use crate::testing::Driver;
use blockmux_volume::{Chunk, Pool, Seg, SgList};
use blockmux_wire::nvme::feature::FeatureId;
use blockmux_wire::nvme::opcode::{AdminOpcode, NvmOpcode};
use blockmux_wire::nvme::status::StatusField;
use blockmux_wire::nvme::{Cqe, Sqe};
use std::time::Instant;
use zerocopy::FromZeros;

/// A transport that records the sent commands and their data.
#[derive(Default)]
struct LoopbackHostTransport {
    /// Longest in-capsule data, in bytes.
    in_capsule: u32,
    sent: Vec<SentCommand>,
    outbox: Outbox,
}

#[derive(Debug, Clone)]
struct SentCommand {
    sqe: Sqe,
    data: Vec<u8>,
}

impl HostTransport for LoopbackHostTransport {
    type Options = ();

    const ERROR_HANDLING: &'static str = "this transport";

    fn new((): (), in_capsule: Option<u32>, _pool: Pool) -> LoopbackHostTransport {
        LoopbackHostTransport {
            in_capsule: in_capsule.unwrap_or(u32::MAX),
            ..LoopbackHostTransport::default()
        }
    }

    fn begin(&mut self) {}

    fn is_open(&self) -> bool {
        true
    }

    fn send(&mut self, request: &NvmeRequest, commands: &mut impl Commands) {
        let sqe = Sqe { cid: request.key.narrow().into(), ..request.command };
        let mut data = Vec::new();
        if let DataTransfer::Out(len) = request.transfer
            && len <= self.in_capsule
        {
            let (list, base) = commands.data_out(request.key).unwrap();
            data = list.slice(base, len as usize).to_vec();
            commands.transport(request.key).unwrap().0.moved.add(0, len).unwrap();
        }
        self.sent.push(SentCommand { sqe, data });
    }

    fn may_end(&self) -> bool {
        true
    }

    fn discard(&mut self) {
        self.sent.clear();
    }
}

impl SentCommand {
    fn cid(&self) -> u16 {
        self.sqe.cid.get()
    }

    fn opcode(&self) -> NvmOpcode {
        NvmOpcode(self.sqe.opcode)
    }

    /// First block, number of blocks, and the other flags of CDW12.
    fn range(&self) -> (u64, u32, u32) {
        (self.sqe.slba(), (self.sqe.cdw12.get() & 0xffff) + 1, self.sqe.cdw12.get() & !0xffff)
    }
}

/// A session over [`LoopbackHostTransport`], which does not use bytes.
trait LoopbackSession: StreamSession {
    fn sent(&mut self) -> Vec<SentCommand>;

    /// Delivers data to a command, completes it, or both.
    fn answer(&mut self, cid: u16, data: &[u8], end: Option<(StatusField, u64)>);
}

/// Delivers data and a completion from the controller.
fn deliver(
    commands: &mut impl Commands,
    cid: u16,
    data: &[u8],
    end: Option<(StatusField, u64)>,
) -> Result<(), ProtocolError> {
    let key = commands.find(cid).unwrap();
    if !data.is_empty() {
        let len = data.len();
        commands.transport(key).unwrap().0.moved.add(0, len as u32).unwrap();
        if commands.can_borrow(key, len) {
            commands.attach_borrowed(key, Seg::from_slice(data));
        } else {
            let (list, base) = commands.data_in(key).unwrap();
            list.slice(base, len).copy_from(data);
        }
    }
    if let Some((status, result)) = end {
        commands.finish(key, &Cqe { cid: cid.into(), status, result: result.into(), ..Cqe::new_zeroed() });
    }
    Ok(())
}

macro_rules! looped {
    ($session:ty, $commands:ident) => {
        impl LoopbackSession for $session {
            fn sent(&mut self) -> Vec<SentCommand> {
                std::mem::take(&mut self.transport.sent)
            }

            fn answer(&mut self, cid: u16, data: &[u8], end: Option<(StatusField, u64)>) {
                let now = self.$commands.now();
                self.receive(now, |_, commands| deliver(commands, cid, data, end)).unwrap();
            }
        }

        impl StreamSession for $session {
            fn demand(&self) -> Demand {
                if self.is_over() { Demand::Close } else { Demand::Nothing }
            }

            fn on_bytes(&mut self, _input: &Chunk, _now: Instant) -> Result<usize, ProtocolError> {
                unreachable!("it demands no bytes")
            }

            fn on_placed(&mut self, _now: Instant) -> Result<(), ProtocolError> {
                unreachable!("it demands no placement")
            }

            fn on_end(&mut self, _now: Instant) -> Result<(), ProtocolError> {
                Ok(())
            }

            fn outbox(&mut self) -> &mut Outbox {
                &mut self.transport.outbox
            }
        }
    };
}

type Queues = HostQueues<LoopbackHostTransport>;
type AdminSession = HostAdmin<LoopbackHostTransport>;

looped!(HostQueue<LoopbackHostTransport>, queue);
looped!(AdminSession, admin);

/// I/O queues, their driver, and a scripted controller.
struct TestQueues {
    driver: Driver<Queues>,
}

impl TestQueues {
    /// Queues that have sent Connect.
    fn fresh(namespace: NamespaceInfo, entries: u16) -> TestQueues {
        TestQueues::fresh_of(controller(), namespace, entries)
    }

    fn fresh_of(controller: ControllerInfo, namespace: NamespaceInfo, entries: u16) -> TestQueues {
        TestQueues::fresh_with(None, controller, namespace, entries)
    }

    fn fresh_with(
        credentials: Option<HostCredentials>,
        controller: ControllerInfo,
        namespace: NamespaceInfo,
        entries: u16,
    ) -> TestQueues {
        let config = QueueConfig { names: names(), credentials, controller, namespace, queues: 1, entries };
        let mut session = Queues::new(config, (), Pool::new(64 << 20), Instant::now());
        session.queue(0).receive(Instant::now(), |_, _| Ok(())).unwrap();
        TestQueues { driver: Driver::of(session, usize::MAX) }
    }

    /// Connected queues.
    fn with(namespace: NamespaceInfo, entries: u16) -> TestQueues {
        TestQueues::of(controller(), namespace, entries)
    }

    /// Queues connected to this controller.
    fn of(controller: ControllerInfo, namespace: NamespaceInfo, entries: u16) -> TestQueues {
        let mut client = TestQueues::fresh_of(controller, namespace, entries);
        let connect = client.command();
        assert_eq!(connect.data.len(), 1024);
        client.complete(connect.cid(), StatusField::default(), 5);
        client
    }

    fn ready() -> TestQueues {
        TestQueues::with(namespace(), 128)
    }

    fn sent(&mut self) -> Vec<SentCommand> {
        self.driver.session.queue(0).sent()
    }

    /// The only command that was sent.
    fn command(&mut self) -> SentCommand {
        let [command] = self.sent().try_into().unwrap();
        command
    }

    fn complete(&mut self, cid: u16, status: StatusField, result: u64) {
        self.driver.session.queue(0).answer(cid, &[], Some((status, result)));
    }

    fn good(&mut self, cid: u16) {
        self.complete(cid, StatusField::default(), 0);
    }

    fn data(&mut self, cid: u16, data: &[u8]) {
        self.driver.session.queue(0).answer(cid, data, None);
    }

    fn write(&mut self, tag: u64, offset: u64, data: &[u8]) {
        let op = blockmux_volume::Op::Write { fua: false };
        self.driver.submit(tag, op, offset, data.len() as u64, Some(SgList::one(Seg::from_slice(data))));
    }
}

/// Runs an admin queue against a controller until it sends no more commands; returns all opcodes.
fn bring_up(driver: &mut Driver<AdminSession>, subsystem: &mut ScriptedSubsystem) -> Vec<u8> {
    let mut opcodes = Vec::new();
    driver.session.receive(driver.session.admin.now(), |_, _| Ok(())).unwrap();
    loop {
        let sent = driver.session.sent();
        if sent.is_empty() {
            return opcodes;
        }
        for command in sent {
            let sqe = command.sqe;
            opcodes.push(sqe.opcode);
            if sqe.opcode == AdminOpcode::ASYNC_EVENT_REQUEST.0 {
                subsystem.listening = Some(sqe.cid.get());
                continue;
            }
            if sqe.opcode == AdminOpcode::GET_LOG_PAGE.0 && subsystem.is_silent_about_logs {
                continue;
            }
            if sqe.cdw10.get() == u32::from(FeatureId::HOST_BEHAVIOR_SUPPORT.0) {
                subsystem.behavior = Some(command.data.clone());
            }
            // The shutdown at the end is not completed.
            if !driver.is_closing() {
                let (data, status, result) = subsystem.answer(&sqe);
                driver.session.answer(sqe.cid.get(), &data, Some((status, result)));
            }
        }
    }
}
