//! An initiator of one block of a volume, which it writes with growing numbers: over the path that
//! is optimized, and again over another one when it has no answer.

use super::cluster::{BLOCKS, Cluster};
use super::gateway::{FrontRequest, Input};
use super::net::{Happening, Net};

/// What an initiator gets.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    /// From a process, for a session.
    Of {
        process: u64,
        session: u64,
        kind: ReplyKind,
    },
    Timer(u64),
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum ReplyKind {
    LoggedIn { is_active: bool },
    Written,
    Value(u64),
    PathError,
}

pub(crate) struct Initiator {
    volume: usize,
    block: usize,
    /// The latest value that it has sent.
    sent: u64,
    /// The latest value that was acknowledged.
    pub(crate) acknowledged: u64,
    path: usize,
    process: u64,
    session: u64,
    waits_for: WaitsFor,
    timer: u64,
    pub(crate) violation: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WaitsFor {
    Login,
    Write,
    Read,
    /// The time of the next request, or of the next login.
    Request,
    NextPath,
}

/// The initiator that writes this block.
pub(crate) fn number(volume: usize, block: usize) -> usize {
    volume * BLOCKS + block
}

impl Initiator {
    pub(crate) fn new(number: usize) -> Initiator {
        Initiator {
            volume: number / BLOCKS,
            block: number % BLOCKS,
            sent: 0,
            acknowledged: 0,
            path: number,
            process: 0,
            session: 0,
            waits_for: WaitsFor::NextPath,
            timer: 0,
            violation: None,
        }
    }

    /// `processes`: those that run on the gateways.
    pub(crate) fn receive(&mut self, net: &mut Net, reply: Reply, cluster: &Cluster, processes: &[u64]) {
        match reply {
            Reply::Timer(timer) if timer == self.timer => match self.waits_for {
                WaitsFor::Request => self.request(net),
                _ => self.log_in(net, processes),
            },
            Reply::Of { process, session, kind } if (process, session) == (self.process, self.session) => {
                self.on_reply(net, kind, cluster);
            }
            _ => {}
        }
    }

    fn on_reply(&mut self, net: &mut Net, kind: ReplyKind, cluster: &Cluster) {
        match (kind, self.waits_for) {
            (ReplyKind::LoggedIn { is_active: true }, WaitsFor::Login) => self.request(net),
            (ReplyKind::LoggedIn { .. }, WaitsFor::Login) | (ReplyKind::PathError, _) => {
                self.wait(net, WaitsFor::NextPath, 30);
            }
            (ReplyKind::Written, WaitsFor::Write) => {
                let stored = cluster.images[self.volume].blocks[self.block];
                if stored != self.sent {
                    self.fail(format!("{} was acknowledged, and {stored} is stored", self.sent));
                }
                self.acknowledged = self.sent;
                let pause = net.random.below(200);
                self.wait(net, WaitsFor::Request, pause);
            }
            (ReplyKind::Value(value), WaitsFor::Read) => {
                if value != self.acknowledged {
                    self.fail(format!("{value} was read after {} was acknowledged", self.acknowledged));
                }
                self.wait(net, WaitsFor::Request, 5);
            }
            _ => {}
        }
    }

    fn fail(&mut self, what: String) {
        self.violation.get_or_insert(format!("v{}/{}: {what}", self.volume, self.block));
    }

    fn wait(&mut self, net: &mut Net, waits_for: WaitsFor, delay: u64) {
        self.timer += 1;
        self.waits_for = waits_for;
        let (initiator, reply) = (number(self.volume, self.block), Reply::Timer(self.timer));
        net.after(delay, Happening::Initiator { initiator, reply });
    }

    fn log_in(&mut self, net: &mut Net, processes: &[u64]) {
        self.path = (self.path + 1) % processes.len();
        self.process = processes[self.path];
        self.session += 1;
        self.send(net, FrontRequest::Login { volume: self.volume });
        self.wait(net, WaitsFor::Login, 700);
    }

    fn request(&mut self, net: &mut Net) {
        let (volume, block) = (self.volume, self.block);
        let is_settled = self.sent == self.acknowledged;
        let waits_for = if is_settled && net.random.below(4) == 0 {
            self.send(net, FrontRequest::Read { volume, block });
            WaitsFor::Read
        } else {
            self.sent += u64::from(is_settled);
            self.send(net, FrontRequest::Write { volume, block, value: self.sent });
            WaitsFor::Write
        };
        self.wait(net, waits_for, 1000);
    }

    fn send(&mut self, net: &mut Net, request: FrontRequest) {
        let (initiator, session) = (number(self.volume, self.block), self.session);
        let input = Input::FromInitiator { initiator, session, request };
        net.front(self.path, Happening::Gateway { gateway: self.path, process: self.process, input });
    }
}
