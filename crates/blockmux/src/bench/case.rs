//! One subject under one job, run as often as asked.

use super::plan::BenchPlan;
use super::veth::{INITIATOR, INTERFACE, TARGET, VethPair};
use crate::failure::Failure;
use crate::protocol::frontend::{Portal, Service, VolumeNames};
use crate::protocol::policy::{ListenerAddress, Policy};
use crate::protocol::{Carrier, Protocol, Units};
use blockmux_engine::congestion::Congestion;
use blockmux_engine::cores::Cores;
use blockmux_engine::listener::{ConnectionLimit, ListenerTask};
use blockmux_engine::reactor::PollPolicy;
use blockmux_engine::sessions::Sessions;
use blockmux_engine::socket::{Address, Listener};
use blockmux_lab::ceiling::{self, CeilingJob, Transport, Variant};
use blockmux_lab::generator::Bench;
use blockmux_lab::job::Job;
use blockmux_lab::link::{self, Link};
use blockmux_lab::result::{Row, Run, SubjectKind};
use blockmux_proto::exports::{Export, Exports};
use blockmux_volume::Volume;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

/// One subject under one job.
pub(super) struct BenchCase {
    /// What is measured.
    pub(super) how: How,
    /// What is done.
    pub(super) job: Job,
    /// The volume's spec or URL.
    pub(super) target: String,
    /// The link or the stripe that rows of its kind differ in; empty if they do not.
    pub(super) place: String,
}

/// What is measured.
pub(super) enum How {
    /// A volume of this process.
    Local(Arc<dyn Volume>),
    /// The volume served and reached by this process.
    Served(&'static Protocol, Arc<dyn Volume>, PollPolicy),
    /// The volume served and reached by this process, each in its own network, over the plan's veth
    /// pair.
    Linked(&'static Protocol, Arc<dyn Volume>, PollPolicy, Link),
    /// A volume that somebody else serves over such sockets.
    Remote(&'static Protocol, Transport, Arc<dyn Volume>, PollPolicy),
    /// Bare sockets with a protocol's messages.
    Ceiling(&'static Protocol, Transport, Variant),
}

impl BenchCase {
    pub(super) fn new(how: How, job: &Job, target: &str) -> BenchCase {
        BenchCase { how, job: job.clone(), target: target.to_owned(), place: String::new() }
    }

    /// What the table calls it.
    pub(super) fn subject(&self) -> String {
        let of = match &self.how {
            How::Local(_) => "local",
            How::Served(protocol, ..) | How::Linked(protocol, ..) => protocol.name,
            How::Remote(..) => &self.target,
            How::Ceiling(..) => "ceiling",
        };
        if self.place.is_empty() { of.to_owned() } else { link::subject(of, &self.place) }
    }

    /// Its row, without runs.
    pub(super) fn row(&self) -> Row {
        let (kind, protocol, poll) = match &self.how {
            How::Local(_) => (SubjectKind::Local, String::new(), ""),
            How::Served(protocol, _, policy) | How::Linked(protocol, _, policy, _) => {
                (SubjectKind::Protocol, protocol.name.to_owned(), policy.name())
            }
            How::Remote(protocol, transport, _, policy) => {
                (SubjectKind::Protocol, protocol.name_over(*transport), policy.name())
            }
            How::Ceiling(protocol, transport, Variant::Sleeping) => {
                (SubjectKind::CeilingSleeping, protocol.name_over(*transport), "")
            }
            How::Ceiling(protocol, transport, Variant::Spinning) => {
                (SubjectKind::CeilingSpinning, protocol.name_over(*transport), "")
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
    pub(super) fn run(&self, plan: &BenchPlan, progress: &dyn Fn(f64)) -> Result<Run, Failure> {
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
                let remote = self.reach(None, protocol, volume, &target, plan.congestion.as_ref())?;
                let initiator = plan.initiator_cores(*policy, self.job.numjobs)?;
                self.bench_served(&remote, initiator, target, progress)
            }
            How::Linked(protocol, volume, policy, link) => {
                let cable = plan.cable.as_ref().ok_or_else(|| self.failed("there is no cable"))?;
                cable.set(*link).map_err(|error| self.failed(error))?;
                let target = plan.target_cores(*policy, self.job.numjobs)?;
                let initiator = plan.initiator_cores(*policy, self.job.numjobs)?;
                cable.enter(&target, &initiator).map_err(|error| self.failed(error))?;
                let remote = self.reach(Some(cable), protocol, volume, &target, plan.congestion.as_ref())?;
                self.bench_served(&remote, initiator, target, progress)
            }
            How::Ceiling(protocol, transport, variant) => {
                let (server_cpu, client_cpu) = plan.ceiling_cpus();
                let job = CeilingJob {
                    transport: *transport,
                    congestion: plan.congestion.clone(),
                    server_cpu,
                    client_cpu,
                    ..CeilingJob::new(&self.job, protocol.shape, *variant)
                };
                ceiling::run_over(&job, plan.ceiling_data()?).map_err(|error| self.failed(error))
            }
        }
    }

    /// Serves the volume at one end of a cable and reaches it from the other, or does both on
    /// loopback.
    fn reach(
        &self,
        cable: Option<&VethPair>,
        protocol: &'static Protocol,
        volume: &Arc<dyn Volume>,
        target: &Cores,
        congestion: Option<&Congestion>,
    ) -> Result<Arc<dyn Volume>, Failure> {
        let at = cable.map_or(Ipv4Addr::LOCALHOST, |cable| cable.address(TARGET));
        let serve = || serve(target, protocol, volume, at, congestion);
        let open = |url: &str| (protocol.remote)(url)?.open(1);
        let reached = match cable {
            None => serve().and_then(|url| open(&url)),
            Some(cable) => {
                let url = cable.within(TARGET, serve)?;
                url.and_then(|url| cable.within(INITIATOR, || open(&url))?)
            }
        };
        reached.map_err(|error| self.failed(error))
    }

    /// Measures what is served by `target`, and ends both sides.
    fn bench_served(
        &self,
        remote: &Arc<dyn Volume>,
        initiator: Cores,
        target: Cores,
        progress: &dyn Fn(f64),
    ) -> Result<Run, Failure> {
        let run = self.bench(remote, false, &initiator, Some(&target), progress);
        initiator.stop(STOP_GRACE);
        target.stop(STOP_GRACE);
        run
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

/// Serves `volume` with `cores`, on a free port of an address or at the end of the cable; answers
/// its URL.
fn serve(
    cores: &Cores,
    protocol: &'static Protocol,
    volume: &Arc<dyn Volume>,
    at: Ipv4Addr,
    congestion: Option<&Congestion>,
) -> Result<String, Failure> {
    let listener = match protocol.carrier {
        Carrier::Stream => {
            let address = Address::Tcp(SocketAddr::new(IpAddr::V4(at), 0));
            Some(Listener::bind_with(&address, congestion).map_err(Failure::run)?)
        }
        Carrier::Frames => None,
    };
    let address = listener.as_ref().map(|listener| listener.address().clone());
    let place =
        address.map_or_else(|| ListenerAddress::Interface(INTERFACE.to_owned()), ListenerAddress::Socket);
    let exports = Exports::new(vec![Export {
        name: EXPORT.to_owned(),
        description: String::new(),
        read_only: false,
        volume: volume.clone(),
    }]);
    let policy = &Policy::of_one_volume(protocol, place.clone(), EXPORT);
    let mut frontend = (protocol.frontend)();
    frontend.check(&[EXPORT]).map_err(Failure::run)?;
    let (places, sessions) = (std::slice::from_ref(&place), Sessions::default());
    let units = Units::new(&exports);
    let service = Service { exports: &exports, units: &units, places, policy, cores, sessions: &sessions };
    let live = frontend.serve(&service)?;
    for (listener, live) in listener.into_iter().zip(&live) {
        let (serve, inboxes) = (live.serve(&place), cores.inboxes());
        cores
            .ask(0, move |core| {
                ListenerTask::spawn(core, listener, inboxes, serve, ConnectionLimit::new(MOST_CONNECTIONS))
            })
            .ok_or_else(|| Failure::run("the target's core has ended"))?;
    }
    let portal = Portal { listener: place.clone(), reached_at: place };
    let ways =
        VolumeNames::all(&exports).into_iter().flat_map(|named| frontend.ways(protocol, &portal, &named));
    ways.map(|way| way.url).next().ok_or_else(|| Failure::run("the volume is out of reach"))
}

/// The name under which the bench exports its volume.
const EXPORT: &str = "bench";
/// More than any job has workers.
const MOST_CONNECTIONS: usize = 2048;
const STOP_GRACE: Duration = Duration::from_secs(5);
