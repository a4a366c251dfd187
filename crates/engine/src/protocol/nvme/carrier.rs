//! The transports of an NVMe host: TCP and RDMA.

use crate::core::reactor::EngineCore;
use crate::fabric::{self, Setup, StreamFabric};
use crate::net::host::Host;
use blockmux_proto::driver::session::{
    Control, Initiator, Overdue, PathRank, RetryRules, StreamConnections, StreamSession,
};
use blockmux_proto::fabrics::host::{AdminConfig, AdminResults, NvmeRefused, QueueConfig};
use blockmux_proto::{nvme_rdma, nvme_tcp};
use blockmux_rdma::Driven;

/// The transport of an NVMe host's queues.
pub trait NvmeCarrier: Clone + Send + Sync + 'static {
    /// The core that makes its connections.
    type Host: Host;
    /// A session with an admin queue.
    type Admin: Control + StreamSession + 'static;
    /// A session with the I/O queues of one namespace.
    type Queues: Initiator + Overdue + StreamConnections + 'static;

    /// Creates an admin queue for a new connection.
    fn admin(&self, config: AdminConfig, with: Setup) -> Self::Admin;

    /// Creates the I/O queues; the first one is for a new connection.
    fn queues(&self, config: QueueConfig, retries: RetryRules, with: Setup) -> Self::Queues;

    /// The results of the admin queue's commands.
    fn answers(admin: &Self::Admin) -> AdminResults<'_>;

    /// Sets the rank of the queues' path
    /// ([`blockmux_proto::fabrics::host::HostQueues::set_path_rank`]).
    fn set_path_rank(queues: &mut Self::Queues, rank: PathRank);

    /// Why the controller refused the queues
    /// ([`blockmux_proto::fabrics::host::HostQueues::refused`]).
    fn refused(queues: &Self::Queues) -> Option<&NvmeRefused>;

    /// Whether to connect again after the controller has closed the connection: see
    /// [`crate::fabric::Fabric::retries`].
    fn retries(&self, _closed: &Self::Admin) -> bool {
        false
    }
}

/// NVMe/TCP.
#[derive(Clone, Copy, Debug, Default)]
pub struct NvmeOverTcp {
    /// The digests to request.
    pub digests: nvme_tcp::client::Digests,
}

impl NvmeCarrier for NvmeOverTcp {
    type Host = EngineCore;
    type Admin = nvme_tcp::client::NvmeTcpAdminSession;
    type Queues = nvme_tcp::client::NvmeTcpQueueSession;

    fn admin(&self, config: AdminConfig, with: Setup) -> Self::Admin {
        Self::Admin::new(config, self.digests, with.pool, with.now)
    }

    fn queues(&self, config: QueueConfig, retries: RetryRules, with: Setup) -> Self::Queues {
        let session = Self::Queues::new(config, self.digests, with.pool, with.now);
        session.with_retries(retries)
    }

    fn answers(admin: &Self::Admin) -> AdminResults<'_> {
        admin.answers()
    }

    fn set_path_rank(queues: &mut Self::Queues, rank: PathRank) {
        queues.set_path_rank(rank);
    }

    fn refused(queues: &Self::Queues) -> Option<&NvmeRefused> {
        queues.refused()
    }
}

/// NVMe/RDMA.
impl<F: StreamFabric> NvmeCarrier for F {
    type Host = F::Host;
    type Admin = Driven<F::QueuePair, nvme_rdma::client::NvmeRdmaAdminSession>;
    type Queues = Driven<F::QueuePair, nvme_rdma::client::NvmeRdmaQueueSession>;

    fn admin(&self, config: AdminConfig, with: Setup) -> Self::Admin {
        let session = nvme_rdma::client::NvmeRdmaAdminSession::new(config, (), with.pool.clone(), with.now);
        fabric::connect(self, session, with)
    }

    fn queues(&self, config: QueueConfig, retries: RetryRules, with: Setup) -> Self::Queues {
        let session = nvme_rdma::client::NvmeRdmaQueueSession::new(config, (), with.pool.clone(), with.now);
        let session = session.with_retries(retries);
        fabric::connect_several(self, session, with)
    }

    fn answers(admin: &Self::Admin) -> AdminResults<'_> {
        admin.session().answers()
    }

    fn set_path_rank(queues: &mut Self::Queues, rank: PathRank) {
        queues.session_mut().set_path_rank(rank);
    }

    fn refused(queues: &Self::Queues) -> Option<&NvmeRefused> {
        queues.session().refused()
    }

    fn retries(&self, closed: &Self::Admin) -> bool {
        fabric::Fabric::retries(self, closed.queue_pair())
    }
}
