//! A case of the bench: one configuration under one job.

use super::device::DiskLabel;
use super::fabric::BenchFabric;
use super::plan::BenchPlan;
use super::served::{self, ServedAt};
use super::vhost_user::{ServedDisk, VHOST_USER};
use crate::failure::Failure;
use crate::protocol::Protocol;
use blockmux_engine::core::cores::Cores;
use blockmux_engine::core::reactor::PollPolicy;
use blockmux_lab::ceiling::{self, CeilingJob, Transport, Variant};
use blockmux_lab::generator::Bench;
use blockmux_lab::job::Job;
use blockmux_lab::link::{self, Link};
use blockmux_lab::result::{ConfigurationKind, Row, Run};
use blockmux_volume::Volume;
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
    /// The link, stripe or fabric that distinguishes it from similar rows; empty if there is only
    /// one.
    pub(super) place: String,
}

/// Kind of a configuration.
pub(super) enum CaseKind {
    /// A local volume, without a protocol.
    Local(Arc<dyn Volume>),
    /// A volume that this process serves and accesses over loopback, over the fabric if the
    /// protocol is one over RDMA.
    Served(&'static Protocol, BenchFabric, Arc<dyn Volume>, PollPolicy),
    /// A volume that this process serves as the disk of a virtual machine, and accesses as one
    /// does: by vhost-user, through shared memory.
    VhostUser(Arc<dyn Volume>, PollPolicy),
    /// A volume that this process serves and accesses in two network namespaces, over the plan's
    /// veth pair.
    Linked(&'static Protocol, Arc<dyn Volume>, PollPolicy, Link),
    /// A disk of this machine.
    Device(DiskLabel, Arc<dyn Volume>, PollPolicy),
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
            CaseKind::VhostUser(..) => VHOST_USER,
            CaseKind::Device(label, ..) => &label.name,
            CaseKind::Remote(..) => &self.target,
            CaseKind::Ceiling(..) => "ceiling",
        };
        if self.place.is_empty() { of.to_owned() } else { link::row_name(of, &self.place) }
    }

    /// The row of the case, without runs.
    pub(super) fn row(&self) -> Row {
        let (kind, protocol, poll) = match &self.kind {
            CaseKind::Local(_) => (ConfigurationKind::Local, String::new(), ""),
            CaseKind::Served(protocol, _, _, policy) | CaseKind::Linked(protocol, _, policy, _) => {
                (ConfigurationKind::Protocol, protocol.name.to_owned(), policy.name())
            }
            CaseKind::VhostUser(_, policy) => {
                (ConfigurationKind::Protocol, VHOST_USER.to_owned(), policy.name())
            }
            CaseKind::Device(label, _, policy) => {
                (ConfigurationKind::Device, label.driver.clone(), policy.name())
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
            report: 0,
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
            CaseKind::Device(_, volume, policy) => {
                let initiator = plan.initiator_cores(*policy, self.job.numjobs)?;
                self.bench(volume, true, &initiator, None, progress)
            }
            CaseKind::Remote(_, _, volume, policy) => {
                let initiator = plan.initiator_cores(*policy, self.job.numjobs)?;
                let run = self.bench(volume, false, &initiator, None, progress);
                // Log out of the server.
                initiator.stop(STOP_GRACE);
                run
            }
            CaseKind::Served(protocol, fabric, volume, policy) => {
                let target = plan.target_cores(*policy, self.job.numjobs)?;
                let remote = self.reach(ServedAt::Loopback(*fabric), protocol, volume, &target, plan)?;
                let initiator = plan.initiator_cores(*policy, self.job.numjobs)?;
                self.bench_served(&remote, initiator, target, progress)
            }
            CaseKind::VhostUser(volume, policy) => {
                let target = plan.target_cores(*policy, self.job.numjobs)?;
                let disk = ServedDisk::attach(volume, &target).map_err(|error| self.failed(error))?;
                let remote = disk.open().map_err(|error| self.failed(error))?;
                let initiator = plan.initiator_cores(*policy, self.job.numjobs)?;
                let run = self.bench(&remote, false, &initiator, Some(&target), progress);
                // Its queue on the initiator's core is a task as long as it is open.
                drop(remote);
                initiator.stop(STOP_GRACE);
                disk.detach().map_err(|error| self.failed(error))?;
                target.stop(STOP_GRACE);
                run
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
                let remote = self.reach(ServedAt::Link(veth), protocol, volume, &target, plan)?;
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

    fn reach(
        &self,
        place: ServedAt<'_>,
        protocol: &'static Protocol,
        volume: &Arc<dyn Volume>,
        target: &Cores,
        plan: &BenchPlan,
    ) -> Result<Arc<dyn Volume>, Failure> {
        let reached = served::reach(place, protocol, volume, target, plan.congestion.as_ref());
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

/// Time for closing the sessions.
const STOP_GRACE: Duration = Duration::from_secs(5);
