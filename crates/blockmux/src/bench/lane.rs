//! One subject under one job, run as often as asked.

use super::plan::Plan;
use crate::failure::Failure;
use crate::protocol::{Protocol, Service, Settings};
use blockmux_engine::cores::Cores;
use blockmux_engine::listener::{ConnectionLimit, ListenerTask};
use blockmux_engine::reactor::PollPolicy;
use blockmux_engine::socket::{Address, Listener};
use blockmux_lab::ceiling::{self, CeilingJob, Transport, Variant};
use blockmux_lab::generator::Bench;
use blockmux_lab::job::Job;
use blockmux_lab::result::{Kind, Row, Run};
use blockmux_proto::exports::{Export, Exports};
use blockmux_volume::Volume;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

/// One subject under one job.
pub(super) struct Lane {
    /// What is measured.
    pub(super) how: How,
    /// What is done.
    pub(super) job: Job,
    /// The volume's spec or URL.
    pub(super) target: String,
}

/// What is measured.
pub(super) enum How {
    /// A volume of this process.
    Local(Arc<dyn Volume>),
    /// The volume served and reached by this process.
    Served(&'static Protocol, Arc<dyn Volume>, PollPolicy),
    /// A volume that somebody else serves over such sockets.
    Remote(&'static Protocol, Transport, Arc<dyn Volume>, PollPolicy),
    /// Bare sockets with a protocol's messages.
    Ceiling(&'static Protocol, Transport, Variant),
}

impl Lane {
    /// What the table calls it.
    pub(super) fn subject(&self) -> String {
        match &self.how {
            How::Local(_) => "local".to_owned(),
            How::Served(protocol, ..) => protocol.name.to_owned(),
            How::Remote(..) => self.target.clone(),
            How::Ceiling(..) => "ceiling".to_owned(),
        }
    }

    /// Its row, without runs.
    pub(super) fn row(&self) -> Row {
        let (kind, protocol, poll) = match &self.how {
            How::Local(_) => (Kind::Local, String::new(), ""),
            How::Served(protocol, _, policy) => (Kind::Protocol, protocol.name.to_owned(), policy.name()),
            How::Remote(protocol, transport, _, policy) => {
                (Kind::Protocol, protocol.name_over(*transport), policy.name())
            }
            How::Ceiling(protocol, transport, Variant::Sleeping) => {
                (Kind::CeilingSleeping, protocol.name_over(*transport), "")
            }
            How::Ceiling(protocol, transport, Variant::Spinning) => {
                (Kind::CeilingSpinning, protocol.name_over(*transport), "")
            }
        };
        Row {
            subject: self.subject(),
            kind,
            protocol,
            target: self.target.clone(),
            poll: poll.to_owned(),
            job: self.job.clone(),
            runs: Vec::new(),
        }
    }

    /// Runs it once.
    pub(super) fn run(&self, plan: &Plan, progress: &dyn Fn(f64)) -> Result<Run, Failure> {
        match &self.how {
            How::Local(volume) => {
                let initiator = plan.initiator_cores(PollPolicy::ADAPTIVE, self.job.numjobs)?;
                self.bench(volume, true, &initiator, None, progress)
            }
            How::Remote(_, _, volume, policy) => {
                let initiator = plan.initiator_cores(*policy, self.job.numjobs)?;
                let run = self.bench(volume, false, &initiator, None, progress);
                // A server is told good-bye, as its protocol wants it.
                initiator.stop(STOP_GRACE);
                run
            }
            How::Served(protocol, volume, policy) => {
                let target = plan.target_cores(*policy, self.job.numjobs)?;
                let connect = protocol.connect.ok_or_else(|| self.failed(protocol.no_initiator()))?;
                let address = serve(&target, protocol, volume).map_err(|error| self.failed(error))?;
                let remote = connect(&address, EXPORT).map_err(|error| self.failed(error))?;
                let initiator = plan.initiator_cores(*policy, self.job.numjobs)?;
                let run = self.bench(&remote, false, &initiator, Some(&target), progress);
                initiator.stop(STOP_GRACE);
                target.stop(STOP_GRACE);
                run
            }
            How::Ceiling(protocol, transport, variant) => {
                let (server_cpu, client_cpu) = plan.ceiling_cpus();
                let job = CeilingJob {
                    transport: *transport,
                    server_cpu,
                    client_cpu,
                    ..CeilingJob::new(&self.job, protocol.shape, *variant)
                };
                ceiling::run_over(&job, plan.ceiling_data()?).map_err(|error| self.failed(error))
            }
        }
    }

    fn bench(
        &self,
        volume: &Arc<dyn Volume>,
        own_buffers: bool,
        initiator: &Cores,
        target: Option<&Cores>,
        progress: &dyn Fn(f64),
    ) -> Result<Run, Failure> {
        let bench = Bench { job: &self.job, volume, own_buffers, initiator, target, progress };
        bench.run().map_err(|error| self.failed(error))
    }

    fn failed(&self, error: impl std::fmt::Display) -> Failure {
        Failure::run(format!("{}, {}: {error}", self.subject(), self.job.name))
    }
}

/// Serves `volume` on a free loopback port of `cores`.
fn serve(cores: &Cores, protocol: &Protocol, volume: &Arc<dyn Volume>) -> std::io::Result<Address> {
    let anywhere = Address::Tcp(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0));
    let listener = Listener::bind(&anywhere)?;
    let address = listener.address().clone();
    let exports = Exports::new(vec![Export {
        name: EXPORT.to_owned(),
        description: String::new(),
        read_only: false,
        volume: volume.clone(),
    }]);
    let (settings, addresses) = (Settings::default(), [address.clone()]);
    let service = Service { exports: &exports, addresses: &addresses, settings: &settings };
    let (serve, inboxes) = ((protocol.serve)(&service).remove(0), cores.inboxes());
    cores
        .ask(0, move |core| {
            ListenerTask::spawn(core, listener, inboxes, serve, ConnectionLimit::new(MOST_CONNECTIONS))
        })
        .ok_or_else(|| std::io::Error::other("the target's core has ended"))?;
    Ok(address)
}

/// The name under which the bench exports its volume.
const EXPORT: &str = "bench";
/// More than any job has workers.
const MOST_CONNECTIONS: usize = 2048;
const STOP_GRACE: Duration = Duration::from_secs(5);
