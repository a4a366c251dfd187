//! A case of the bench: one configuration under one job.

use super::plan::BenchPlan;
use super::veth::{INITIATOR, INTERFACE, TARGET, VethPair};
use crate::failure::Failure;
use crate::protocol::address::ListenerAddress;
use crate::protocol::frontend::{Portal, Service, VolumeNames};
use crate::protocol::policy::Policy;
use crate::protocol::{Carrier, LogicalUnits, Protocol};
use blockmux_engine::core::cores::Cores;
use blockmux_engine::core::reactor::PollPolicy;
use blockmux_engine::net::socket::{Address, Listener};
use blockmux_engine::serve::listener::{ConnectionLimit, ListenerTask};
use blockmux_engine::serve::sessions::Sessions;
use blockmux_engine::sys::congestion::Congestion;
use blockmux_lab::ceiling::{self, CeilingJob, Transport, Variant};
use blockmux_lab::generator::Bench;
use blockmux_lab::job::Job;
use blockmux_lab::link::{self, Link};
use blockmux_lab::result::{ConfigurationKind, Row, Run};
use blockmux_proto::exports::{Export, Exports};
use blockmux_volume::Volume;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

/// One configuration under one job.
pub(super) struct BenchCase {
    /// The configuration.
    pub(super) kind: CaseKind,
    /// The job.
    pub(super) job: Job,
    /// The volume's spec or URL.
    pub(super) target: String,
    /// The link or stripe that distinguishes it from similar rows; empty if there is only one.
    pub(super) place: String,
}

/// Kind of a configuration.
pub(super) enum CaseKind {
    /// A local volume, without a protocol.
    Local(Arc<dyn Volume>),
    /// A volume that this process serves and accesses over loopback.
    Served(&'static Protocol, Arc<dyn Volume>, PollPolicy),
    /// A volume that this process serves and accesses in two network namespaces, over the plan's
    /// veth pair.
    Linked(&'static Protocol, Arc<dyn Volume>, PollPolicy, Link),
    /// A volume of another server, over this transport.
    Remote(&'static Protocol, Transport, Arc<dyn Volume>, PollPolicy),
    /// The ceiling: bare sockets with the message sizes of a protocol.
    Ceiling(&'static Protocol, Transport, Variant),
}

impl BenchCase {
    pub(super) fn new(kind: CaseKind, job: &Job, target: &str) -> BenchCase {
        BenchCase { kind, job: job.clone(), target: target.to_owned(), place: String::new() }
    }

    /// Name of the configuration in the table.
    pub(super) fn configuration(&self) -> String {
        let of = match &self.kind {
            CaseKind::Local(_) => "local",
            CaseKind::Served(protocol, ..) | CaseKind::Linked(protocol, ..) => protocol.name,
            CaseKind::Remote(..) => &self.target,
            CaseKind::Ceiling(..) => "ceiling",
        };
        if self.place.is_empty() { of.to_owned() } else { link::row_name(of, &self.place) }
    }

    /// The row of the case, without runs.
    pub(super) fn row(&self) -> Row {
        let (kind, protocol, poll) = match &self.kind {
            CaseKind::Local(_) => (ConfigurationKind::Local, String::new(), ""),
            CaseKind::Served(protocol, _, policy) | CaseKind::Linked(protocol, _, policy, _) => {
                (ConfigurationKind::Protocol, protocol.name.to_owned(), policy.name())
            }
            CaseKind::Remote(protocol, transport, _, policy) => {
                (ConfigurationKind::Protocol, protocol.name_over(*transport), policy.name())
            }
            CaseKind::Ceiling(protocol, transport, Variant::Sleeping) => {
                (ConfigurationKind::CeilingSleeping, protocol.name_over(*transport), "")
            }
            CaseKind::Ceiling(protocol, transport, Variant::Spinning) => {
                (ConfigurationKind::CeilingSpinning, protocol.name_over(*transport), "")
            }
        };
        Row {
            configuration: self.configuration(),
            kind,
            protocol,
            target: self.target.clone(),
            poll: poll.to_owned(),
            job: self.job.clone(),
            runs: Vec::new(),
        }
    }

    /// Runs the case once.
    pub(super) fn run(&self, plan: &BenchPlan, progress: &dyn Fn(f64)) -> Result<Run, Failure> {
        match &self.kind {
            CaseKind::Local(volume) => {
                let initiator = plan.initiator_cores(PollPolicy::ADAPTIVE, self.job.numjobs)?;
                self.bench(volume, true, &initiator, None, progress)
            }
            CaseKind::Remote(_, _, volume, policy) => {
                let initiator = plan.initiator_cores(*policy, self.job.numjobs)?;
                let run = self.bench(volume, false, &initiator, None, progress);
                // Log out of the server.
                initiator.stop(STOP_GRACE);
                run
            }
            CaseKind::Served(protocol, volume, policy) => {
                let target = plan.target_cores(*policy, self.job.numjobs)?;
                let remote = self.reach(None, protocol, volume, &target, plan.congestion.as_ref())?;
                let initiator = plan.initiator_cores(*policy, self.job.numjobs)?;
                self.bench_served(&remote, initiator, target, progress)
            }
            CaseKind::Linked(protocol, volume, policy, link) => {
                let veth = plan
                    .veth
                    .as_ref()
                    .ok_or_else(|| self.failed("internal error: the suite has no veth pair"))?;
                veth.set(*link).map_err(|error| self.failed(error))?;
                let target = plan.target_cores(*policy, self.job.numjobs)?;
                let initiator = plan.initiator_cores(*policy, self.job.numjobs)?;
                veth.enter(&target, &initiator).map_err(|error| self.failed(error))?;
                let remote = self.reach(Some(veth), protocol, volume, &target, plan.congestion.as_ref())?;
                self.bench_served(&remote, initiator, target, progress)
            }
            CaseKind::Ceiling(protocol, transport, variant) => {
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

    /// Serves the volume at one end of the veth pair and accesses it from the other, or over
    /// loopback.
    fn reach(
        &self,
        veth: Option<&VethPair>,
        protocol: &'static Protocol,
        volume: &Arc<dyn Volume>,
        target: &Cores,
        congestion: Option<&Congestion>,
    ) -> Result<Arc<dyn Volume>, Failure> {
        let at = veth.map_or(Ipv4Addr::LOCALHOST, |veth| veth.address(TARGET));
        let serve = || serve(target, protocol, volume, at, congestion);
        let open = |url: &str| (protocol.remote)(url)?.open(1);
        let reached = match veth {
            None => serve().and_then(|url| open(&url)),
            Some(veth) => {
                let url = veth.within(TARGET, serve)?;
                url.and_then(|url| veth.within(INITIATOR, || open(&url))?)
            }
        };
        reached.map_err(|error| self.failed(error))
    }

    /// Measures the volume that `target` serves, and stops both sides.
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
        Failure::run(format!("{}, {}: {error}", self.configuration(), self.job.name))
    }
}

/// Serves `volume` with `cores`, on a free port or at an end of the veth pair; returns its URL.
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
    let units = LogicalUnits::new(&exports);
    let service = Service { exports: &exports, units: &units, places, policy, cores, sessions: &sessions };
    let live = frontend.serve(&service)?;
    for (listener, live) in listener.into_iter().zip(&live) {
        let (serve, inboxes) = (live.serve(&place), cores.inboxes());
        cores
            .ask(0, move |core| {
                ListenerTask::spawn(core, listener, inboxes, serve, ConnectionLimit::new(MAX_CONNECTIONS))
            })
            .ok_or_else(|| Failure::run("a core of the target ended unexpectedly"))?;
    }
    let portal = Portal { listener: place.clone(), reached_at: place };
    let infos = VolumeNames::all(&exports)
        .into_iter()
        .flat_map(|named| frontend.connect_info(protocol, &portal, &named));
    infos.map(|info| info.url).next().ok_or_else(|| Failure::run("the protocol does not export the volume"))
}

/// Name of the bench's export.
const EXPORT: &str = "bench";
/// The maximum number of connections, more than the workers of any job.
const MAX_CONNECTIONS: usize = 2048;
/// Time for closing the sessions.
const STOP_GRACE: Duration = Duration::from_secs(5);
